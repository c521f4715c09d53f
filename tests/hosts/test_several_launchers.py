"""`ftcomm run --nnodes` on two hosts that have networks of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftcomm.errors import SettingsError
from ftcomm.lab.netns.slow_network import SlowNetwork
from tests.process.several_hosts import DEADLINE, SCRIPT, Host

pytestmark = pytest.mark.protocol

OVER_TCP = ("--transport", "tcp", "--op-timeout", "20")  # the memory of the two is the same in truth


@pytest.fixture
def network() -> Iterator[SlowNetwork]:
    try:
        made = SlowNetwork(2, delay=0.001)
    except SettingsError as error:
        pytest.skip(str(error))
    with made:
        yield made


@pytest.fixture
def host(tmp_path: Path, network: SlowNetwork) -> Iterator[Callable[..., Host]]:
    (tmp_path / "script.py").write_text(SCRIPT)
    made: list[Host] = []

    def make(rank: int, *more: str) -> Host:
        with network.inside(rank):
            made.append(Host(tmp_path, rank, f"{network.address(0)}:29400", *OVER_TCP, *more))
        return made[-1]

    yield make
    for each in made:
        if each.process.poll() is None:
            each.kill()


def test_a_host_loses_power_and_comes_back(tmp_path: Path, network: SlowNetwork, host: Callable[..., Host]) -> None:
    """Nothing of it says that it ends: the others find out by its silence, and host 0 still has its connection. Hosts
    whose replicas have one rank are killed in test_several_hosts.py, and fall silent below."""
    first, second = host(0, "--ranks-per-replica", "2"), host(1, "--ranks-per-replica", "2")
    second.hears("^.1.0. step .* with 2")
    links = network.change([1], [0], up=False) | network.change([0], [1], up=False)
    second.kill()
    first.hears("step .* with 1", len(first.lines))
    network.restore(links)
    again = host(1, "--ranks-per-replica", "2")
    again.hears("^.1.0. step .* with 2")
    (tmp_path / "enough").touch()
    # Each rank makes the last step that its column agrees upon.
    ends = {each.hears(r"^.\d.0. ended (.*)")[1] for each in (first, again)}
    assert (first.process.wait(DEADLINE), again.process.wait(DEADLINE)) == (0, 0), first.lines + again.lines
    assert len(ends) == 1, "replicas differ"


def test_a_cut_between_hosts_ends_nothing_but_what_cannot_be_reached(
    tmp_path: Path, network: SlowNetwork, host: Callable[..., Host]
) -> None:
    """The replicas of host 1 are removed, and come back by themselves when it is reached again."""
    first, second = host(0), host(1)
    second.hears("^.2. step .* with 4")
    said = len(second.lines)
    links = network.change([1], [0], up=False) | network.change([0], [1], up=False)
    first.hears("step .* with 2", len(first.lines))
    network.restore(links)
    second.hears("^.2. step .* with 4", said)
    (tmp_path / "enough").touch()
    assert (first.process.wait(DEADLINE), second.process.wait(DEADLINE)) == (0, 0), first.lines + second.lines
