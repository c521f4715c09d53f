"""A process group that is made anew from handles, as torchft does it: these reach members on other hosts."""

from __future__ import annotations

import multiprocessing
import os
import re
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftcomm.errors import TransportError
from ftcomm.lab.netns import network
from ftcomm.lab.netns.network import LabNetwork
from ftcomm.lab.netns.slow_network import settle
from ftcomm.torch.reconfigure import ReconfigurableGroup
from tests.rigs.deadlines import DEADLINE

from .test_promises import cables  # noqa: F401

SECONDS = 60.0


def member(place: int, hosts: list[str], folder: Path, host: str) -> None:
    """Meets the other one, sums, and notes its handle and the sum, or the error."""
    with open(hosts[place]) as namespace:
        network.call("setns", namespace.fileno(), network.CLONE_NEWNET)
    settle(f"host-{place}")
    os.environ["FTCOMM_LOG"] = "error"
    os.environ.pop("FTCOMM_HOST", None)
    if host:
        os.environ["FTCOMM_HOST"] = host
    group = ReconfigurableGroup(place, len(hosts), SECONDS, name="over hosts")
    handles = told(folder, "handle", place, len(hosts), group.get_reconfigure_handle())
    asked: Any = SimpleNamespace(uuid=1, handles=handles, timeout=timedelta(seconds=SECONDS if host else 2.0), hints={})
    try:
        group.reconfigure(asked).wait()
        x = torch.full((300_000,), place + 1.0)
        group.allreduce([x]).wait()
        said = f"sum {x.min():g} {x.max():g}"
    except TransportError as error:
        said = str(error)
    told(folder, "said", place, len(hosts), said)
    group.shutdown()


def told(folder: Path, what: str, place: int, members: int, text: str) -> list[str]:
    """Tell the others; returns what all have told."""
    unfinished = folder / f"{what}-{place}.new"
    unfinished.write_text(text)
    unfinished.rename(folder / f"{what}-{place}")
    files = [folder / f"{what}-{each}" for each in range(members)]
    end = time.monotonic() + DEADLINE
    while not all(file.exists() for file in files):
        assert time.monotonic() < end, f"not all have told their {what}"
        time.sleep(0.02)
    return [file.read_text() for file in files]


@pytest.mark.parametrize("host", ["eth0", ""])
def test_a_handle_has_the_address_that_the_host_is_told_to_have(
    cables: LabNetwork,  # noqa: F811
    tmp_path: Path,
    host: str,
) -> None:
    """Without one it has the loopback, and who does not meet the others says what to set."""
    hosts = [f"/proc/{os.getpid()}/fd/{fd}" for fd in cables.hosts[:2]]
    forks = multiprocessing.get_context("forkserver")
    members = [forks.Process(target=member, args=(place, hosts, tmp_path, host), daemon=True) for place in range(2)]
    for each in members:
        each.start()
    try:
        for each in members:
            each.join(DEADLINE)
    finally:
        for each in members:
            each.kill()
    assert [each.exitcode for each in members] == [0, 0]
    handles = [(tmp_path / f"handle-{place}").read_text() for place in range(2)]
    addresses = [re.search(r"//(.*):", handle)[1] for handle in handles]  # type: ignore[index]
    assert addresses == [network.address(place) if host else "127.0.0.1" for place in range(2)]
    said = [(tmp_path / f"said-{place}").read_text() for place in range(2)]
    if host:
        assert said == ["sum 3 3"] * 2
    else:
        assert all("set FTCOMM_HOST on each to its address" in text for text in said), said
