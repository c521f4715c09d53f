"""Every decoder of bytes from elsewhere, and the state machines behind them, on input that nobody meant.

What must hold is said in tests/fuzz, next to each target. Here each is driven by hypothesis (noise, and mutations of
input that is right), and for some seconds by coverage where atheris is installed.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftcomm.control import messages as m
from tests.fuzz.choices import KINDS, Choices
from tests.fuzz.machines import Coordinated, Ranked, entries
from tests.fuzz.targets import TARGETS, all_messages

pytestmark = pytest.mark.protocol

ROOT = Path(__file__).resolve().parents[2]
SEED = int(os.environ.get("FTCOMM_TEST_SEED", "1"))  # the same each time: what is refused for chance is no help

SEEDS = {name: target.seeds() for name, target in TARGETS.items()}
NO_TEXT = b"\x81\xa4type\xa1\xff"  # a string that is no UTF-8
DEEP = b"\x82\xa4type\xa9Heartbeat\xa1x" + b"\x91" * 100_000  # nesting that ends the stack of a decoder
LONG = b"\xdd\xff\xff\xff\xff"  # an array that claims 4 G entries


@st.composite
def mutated(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """A right input with bytes changed, left out, repeated, or cut off; or noise."""
    data = bytearray(draw(st.sampled_from([*seeds, b""])))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        what = draw(st.sampled_from(("flip", "cut", "insert", "repeat", "leave out")))
        if what == "flip" and at < len(data):
            data[at] ^= draw(st.integers(1, 255))
        elif what == "cut":
            del data[at:]
        elif what == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=12))
        elif what == "repeat":
            data[at:at] = data[at : at + 16]
        elif what == "leave out":
            del data[at : at + draw(st.integers(1, 8))]
    return bytes(data)


@pytest.mark.parametrize("examples", [40, pytest.param(150, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("name", TARGETS)
def test_senseless_bytes(name: str, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(mutated(SEEDS[name]))
    def senseless(data: bytes) -> None:
        TARGETS[name].run(data)

    senseless()


@pytest.mark.parametrize("name", TARGETS)
def test_right_input(name: str) -> None:
    for seed in SEEDS[name]:
        TARGETS[name].run(seed)


@pytest.mark.parametrize(
    "name",
    ["messages", "connection", "server", "client", "state_frames", "skeleton", "member", "views", "requests", "relay"],
)
@pytest.mark.parametrize("data", [NO_TEXT, DEEP[:4000], LONG], ids=["no UTF-8", "deep", "long"])
def test_what_decoders_trip_over(name: str, data: bytes) -> None:
    """Each raw and as a frame; msgspec raises other errors than its own on the first two."""
    TARGETS[name].run(data)
    TARGETS[name].run(len(data).to_bytes(4, "big") + data)


@pytest.mark.parametrize("line", [b'{"epoch":1,"step":null,"members":[],"why":"\xff"}', b'{"x":' + b"[" * 100_000])
def test_a_file_of_views_that_a_decoder_trips_over(line: bytes) -> None:
    TARGETS["views"].run(line + b"\n")


@pytest.mark.parametrize("name", ["coordinator", "rank"])
def test_senseless_messages_upset_no_machine(name: str) -> None:
    """Some ten thousand events; hypothesis prefers short histories, these are long enough to get somewhere."""
    for seed in range(SEED, SEED + 100):
        print(f"FTCOMM_TEST_SEED={seed}")
        TARGETS[name].run(random.Random(seed).randbytes(1500))


def test_a_connection_speaks_for_one_life_of_one_replica() -> None:
    told = Coordinated(Choices(b"\x02"))
    for replica in range(2):
        told.joined(0, replica)
    assert not told.machine.links
    assert not told.machine.joiners


@pytest.mark.parametrize(
    "said", [m.Withdrawn(0), m.Stalled(0, 1, 5, (77,), True), m.Stalled(0, 1, 5, (0,), True)], ids=repr
)
def test_nobody_is_removed_for_what_makes_no_sense(said: m.Message) -> None:
    """To withdraw a view that was no proposal, to wait for one who is no member, or for oneself."""
    told = Coordinated(Choices(b"\x02"))
    for replica in range(3):
        told.joined(replica, replica)
    for second in range(40):
        told.now = float(second)
        for replica in range(3):
            told.check(told.machine.receive(replica, m.Heartbeat(0), told.now))
        told.check(told.machine.receive(0, said, told.now))
        told.check(told.machine.tick(told.now))
    assert told.view is not None
    assert (told.view.epoch, told.view.replicas) == (1, (0, 1, 2))


def test_long_floods_are_not_remembered() -> None:
    """Fifty thousand events of any numbers: what a machine keeps of them stays small."""
    print(f"FTCOMM_TEST_SEED={SEED}")
    told = Coordinated(Choices(random.Random(SEED).randbytes(300_000)))
    ranked = Ranked(Choices(b"\x00" + random.Random(SEED + 1).randbytes(300_000)))
    for replica in range(3):
        told.joined(replica, replica)
    while told.choices:
        told.step()
    while ranked.choices:
        ranked.step()
    assert entries(told.machine) < 1000
    assert entries(ranked.with_leader) < 20_000


def test_a_leader_answers_for_a_bounded_number_of_proposals_and_members_hear_of_a_bounded_number_of_epochs() -> None:
    ranked = Ranked(Choices(b"\x00"))
    ranked.from_up(m.NewView(ranked.view()))
    for number in range(70_000):
        ranked.check(ranked.node.from_peer(m.Boundary(number % 1000, 1, number, None), 0.0))
    for number in range(3000):
        ranked.node.from_peer(m.MemberProgress(1, "a1", 1 + number, m.Progress(0, ())), 0.0)
    assert entries(ranked.leader) < 20_000
    assert entries(ranked.node.machine) < 1000
    refused = ranked.leader.from_coordinator(m.Prepare(1 << 40, 1, 100))
    assert [action.message.ok for action in refused] == [False], "one that was forgotten must not be promised"


def test_a_leader_hears_members_only() -> None:
    ranked = Ranked(Choices(b"\x00"))
    view = ranked.view()
    ranked.from_up(m.NewView(view))
    ranked.check(ranked.node.quiesced(view.epoch, m.Progress(0, ())))
    ranked.check(ranked.node.entered(view))
    ranked.from_up(m.Prepare(1 << 40, 1, 100))
    before = entries(ranked.with_leader)
    for replica in range(5, 1000):
        ranked.check(ranked.node.from_peer(m.Boundary(replica, 1, 1 << 40, None), 0.0))
    assert entries(ranked.with_leader) == before


def test_the_seeds_are_of_all_kinds() -> None:
    assert {type(message) for message in all_messages()} == set(KINDS)


@pytest.mark.slow
@pytest.mark.sweep
def test_guided_by_coverage() -> None:
    pytest.importorskip("atheris", reason="it has no wheel for this platform", exc_type=ImportError)
    command = [sys.executable, "-m", "tests.fuzz", "all", "--seconds", "0.25", "--seed", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=270)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    assert said.count("stat::number_of_executed_units") == len(TARGETS), said[-3000:]
