"""The engine whose ops a kernel runs, in the interpreter of Triton: real processes, real kills, waits of the kernel.

Ranks die, or stop, inside the kernel at named places; see `kernel_stops` and `rank_points`. The whole protocol suite
runs with it, too: `make test-kernels`.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ftcomm
from ftcomm.arrays import stage
from ftcomm.kernels.device import INTERPRETED
from ftcomm.kernels.dtypes import DTYPES, OPS, unsupported
from ftcomm.kernels.host.fp8 import DTYPES as CODED_DTYPES
from ftcomm.kernels.host.reduce import Reducer, operand
from ftcomm.settings import Settings
from ftcomm.settings.engines import KINDS
from tests.rigs.fp8_results import coded

from . import kernel_stops, torn_puts
from .bodies import reduce_forever
from .job import DEADLINE, SILENCE, STALL, Job, Notes
from .rank_points import Points, watch_points
from .test_kills import ENDLESS, SEED, check

pytestmark = pytest.mark.protocol

if not INTERPRETED:
    pytest.skip("TRITON_INTERPRET=1 is not set: kernels are compiled here", allow_module_level=True)

CHUNK = 64 << 10
ONE_SHOT = 4000  # elements of fp32: one chunk, that every member reduces by itself
TWO_SHOT = 50_000  # four chunks, reduced in slices


def job(folder: Path, replicas: int, body: Any = reduce_forever, **arguments: Any) -> Job:
    arguments.setdefault("steps", ENDLESS)
    return Job(folder, replicas=replicas, body=body, engine="interpreter-kernel", **arguments)


def finish(running: Job, replicas: set[int]) -> dict[int, dict[int, dict[str, Any]]]:
    running.drain()
    for replica in replicas:
        assert running.join(replica) == [0], running.errors()
    return check(running)


# ---- results ------------------------------------------------------------------------------------------------------


def given(seed: int, replica: int, count: int, dtype: str) -> Any:
    """Any bits of the dtype, NaN and infinities among them, but few enough that results differ."""
    rng = np.random.default_rng([seed, replica, count])
    carrier = DTYPES[dtype].carrier
    if dtype in ("float16", "bfloat16"):
        return torch.from_numpy(rng.normal(0, 100, count)).to(getattr(torch, dtype))
    if carrier.kind == "f":
        values = rng.normal(0, 1e3, count).astype(carrier)
        values[rng.random(count) < 0.01] = np.inf
        values[rng.random(count) < 0.01] = np.nan
        return values
    if dtype == "bool":
        return rng.random(count) < 0.5
    return rng.integers(0, 256, count * carrier.itemsize, np.uint8).view(carrier)


def reduce_kinds(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """Each op of `arguments["ops"]`, compared with what the host makes of the same inputs."""
    with pytest.raises(ftcomm.ArgumentError, match="at least 1"):
        group.allreduce(np.ones(3), max_sms=0)  # counts as no call
    reducer = Reducer()
    works = []
    for number, (count, dtype, op, atomic, wire) in enumerate(arguments["ops"]):
        inputs = [given(arguments["seed"] + number, replica, count, dtype) for replica in group.members]
        flat = [stage(x).flat for x in inputs]
        expected = coded(flat, dtype, op) if wire else np.empty_like(flat[0])
        if not wire:
            with np.errstate(all="ignore"):
                reducer.get(dtype, op)([operand(dtype, x) for x in flat], operand(dtype, expected))
        mine = inputs[group.members.index(group.replica)]
        how = {"atomic": atomic, "max_sms": 1 + number % 3, "compression": wire}
        works.append((group.allreduce(mine, op, async_op=True, **how), expected))
    for (work, expected), what in zip(works, arguments["ops"], strict=True):
        got = stage(work.wait()).flat
        if not (got.tobytes() == expected.tobytes() if what[-1] else _equal(got, expected)):
            at = np.flatnonzero((got != expected) & ((got == got) | (expected == expected)))  # NaN is not itself
            notes.write(kind="wrong", what=what, at=at[:5].tolist(), got=str(got[at][:5]), want=str(expected[at][:5]))
        if [list(span.replicas) for span in work.contributors] != [list(group.members)]:
            notes.write(kind="wrong", what=what, spans=str(work.contributors))
        notes.write(kind="right", what=what)


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    """The same bits, but that a NaN is a NaN: which one, processors choose."""
    if a.dtype.kind != "f":
        return np.array_equal(a, b)
    signs = np.array_equal(np.signbit(a[~np.isnan(a)]), np.signbit(b[~np.isnan(b)]))
    return signs and np.array_equal(a, b, equal_nan=True)


def test_every_dtype_and_op(tmp_path: Path) -> None:
    """Nothing, one element, odd tails, chunks of one lane and of several; queued one behind the other. Each dtype with
    one op, and each op: all pairs, and two, three and four members, are those of tests/kernels. Then those that travel
    as fp8."""
    replicas = 3
    rng = random.Random(SEED)
    turn = rng.randrange(len(OPS))
    kinds = []
    for place, dtype in enumerate(DTYPES):
        able = [op for op in OPS if not unsupported(dtype, op)]
        kinds.append((dtype, able[(turn + place) % len(able)]))
    assert {op for _, op in kinds} == set(OPS)
    sizes = [0, 1, 17, 4097, CHUNK // 4 + 3]
    ops: list[tuple[int, str, str, bool, str | None]] = [
        (rng.choice(sizes), dtype, op, rng.random() < 0.3, None) for dtype, op in kinds
    ]
    ops += [
        (rng.choice(sizes), dtype, op, rng.random() < 0.3, "fp8") for dtype in CODED_DTYPES for op in ("sum", "avg")
    ]
    rng.shuffle(ops)
    # The second is one whose call has 32 bits, behind one whose call has more, in the same lanes.
    ops += [(6 * CHUNK // 2 + 5, "bfloat16", "sum", True, None), (TWO_SHOT + 1, "float32", "avg", False, None)]
    ops += [(TWO_SHOT + 1, dtype, "avg", False, "fp8") for dtype in CODED_DTYPES]
    with job(tmp_path, replicas, reduce_kinds, ops=ops, seed=SEED) as running:
        for replica in range(replicas):
            assert running.join(replica) == [0], f"seed {SEED}: {running.errors()}"
        notes = [note for _, _, note in running.notes()]
        wrong = [note for note in notes if note["kind"] == "wrong"]
        assert not wrong, f"seed {SEED}: {wrong}"
        assert sum(note["kind"] == "right" for note in notes) == replicas * len(ops)


def call_ahead(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """`calls`, but all are queued before the first has come back."""
    works = [
        group.allreduce(np.ones(elements, dtype), op, async_op=True)
        for elements, dtype, op in arguments["calls"][group.replica]
    ]
    for work in works:
        try:
            notes.write(kind="call", value=float(work.wait()[0]))
        except ftcomm.FtcommError as error:
            notes.write(kind="call", error=type(error).__name__, text=str(error))


def look_seldom(settings: Settings, arguments: dict[str, Any]) -> None:
    """The monitor is later than the kernels, which then have to wait for it where they must."""
    from ftcomm.engines.gpu_kernel import monitor

    monitor._LOOK = 1.0


def test_different_calls_are_an_error_on_all_and_the_group_goes_on(tmp_path: Path) -> None:
    """Several in a row, so that none hides another, and of different numbers of lanes."""
    first = [(10, "float32", "sum"), (TWO_SHOT, "float32", "sum"), (5, "int32", "max"), (8, "float32", "sum")]
    other = [(10, "float32", "avg"), (7, "float32", "sum"), (5, "int64", "max"), (8, "float32", "sum")]
    with job(tmp_path, 3, call_ahead, calls=[first, first, other], prepare=look_seldom) as running:
        for replica in range(3):
            assert running.join(replica) == [0], running.errors()
        for replica in range(3):
            said = [note for who, _, note in running.notes() if who == replica and note["kind"] == "call"]
            assert [note.get("error") for note in said] == ["MismatchError"] * 3 + [None]
            assert said[3]["value"] == 3.0
            assert "replicas 0, 1: op 0, allreduce(op='sum') of 10 x float32" in said[0]["text"]
            assert "replica 2: op 1, allreduce(op='sum') of 7 x float32" in said[1]["text"]


# ---- losses -------------------------------------------------------------------------------------------------------


POINTS = [("posted", TWO_SHOT), ("reduced", TWO_SHOT), ("taken", TWO_SHOT), ("taken", ONE_SHOT)]
sweep = pytest.mark.sweep


@pytest.mark.parametrize(
    ("point", "elements", "wire"),
    [
        ("taken", TWO_SHOT, "fp8"),
        ("taken", ONE_SHOT, None),
        *[pytest.param(*point, None, marks=sweep) for point in POINTS[:3]],
        *[pytest.param(*point, "fp8", marks=sweep) for point in POINTS if point != ("taken", TWO_SHOT)],
    ],
)
def test_one_is_killed_inside_the_kernel(tmp_path: Path, point: str, elements: int, wire: str | None) -> None:
    """Several times, at later and later chunks, in plain and atomic ops; a new life of it joins each time."""
    with job(tmp_path, 3, elements=elements, wire=wire, prepare=watch_points) as running:
        points = Points(tmp_path)
        running.wait_contributing({0, 1, 2})
        for _ in range(3):
            seen = len(running.events)
            points.die(1, point)
            running.wait_event(
                "view without 1",
                lambda events, seen=seen: any(e["kind"] == "view" and len(e["members"]) == 2 for e in events[seen:]),
            )
            running.start(1)
            running.wait_contributing({0, 1, 2}, since=seen)
        steps = finish(running, {0, 1, 2})
    assert len(steps) > 3


def reduce_and_die(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """`reduce_forever`; replica 1 dies just before it says for the `take`-th time that it has all of a chunk, when the
    others have said so of theirs."""
    have = [Path(arguments["marks"]) / f"has-{replica}" for replica in range(3)]
    left = arguments["take"]

    def at(point: str) -> None:
        nonlocal left
        left -= point == "taken"
        if left or point != "taken":
            return
        have[group.replica].touch()
        if group.replica == 1:
            end = time.monotonic() + 30
            while not all(path.exists() for path in have) and time.monotonic() < end:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)

    if group.replica == 1:
        kernel_stops.before_announce(at)
    else:
        kernel_stops.before_announce(lambda point: None, after=at)
    reduce_forever(group, notes, arguments)


@pytest.mark.parametrize(
    ("atomic", "wire"),
    [
        (True, None),
        (False, None),
        pytest.param(False, "fp8", marks=sweep),
        pytest.param(True, "fp8", marks=sweep),
    ],
)
def test_what_the_others_hold_of_an_op_when_one_dies_in_it(tmp_path: Path, atomic: bool, wire: str | None) -> None:
    """Four chunks, a lane each, which the interpreter runs one after the other: two are FINAL at the others, with the
    input of the one that dies. They stay, if they may; of an atomic op, as step 3 is one, they are reduced again."""
    step = 3 if atomic else 1
    with job(
        tmp_path, 3, reduce_and_die, elements=TWO_SHOT, wire=wire, take=1 + 4 * step + 2
    ) as running:  # the first: where loops begin
        running.wait_event("view without 1", lambda events: _newest(events) == [0, 2])
        _go_on(running, 2)
        steps = finish(running, {0, 2})
    two = 2 * CHUNK // 4
    spans = [[0, TWO_SHOT, [0, 2]]] if atomic else [[0, two, [0, 1, 2]], [two, TWO_SHOT, [0, 2]]]
    assert [note["spans"] for note in steps[step].values()] == [spans, spans]


@pytest.mark.parametrize("wire", [None, pytest.param("fp8", marks=sweep)])
def test_losses_until_one_is_left(tmp_path: Path, wire: str | None) -> None:
    with job(tmp_path, 4, elements=TWO_SHOT, wire=wire, prepare=watch_points) as running:
        points = Points(tmp_path)
        running.wait_contributing({0, 1, 2, 3})
        points.die(2, "taken")
        points.die(0, "reduced")
        running.wait_event("view of two", lambda events: _newest(events) == [1, 3])
        points.die(3, "posted")
        running.wait_event("view of one", lambda events: _newest(events) == [1])
        _go_on(running, 3, 1)
        steps = finish(running, {1})
    assert steps[max(steps)][100]["spans"] == [[0, TWO_SHOT, [1]]]


def _newest(events: list[dict[str, Any]]) -> list[int]:
    views = [[m["replica"] for m in e["members"]] for e in events if e["kind"] == "view"]
    return views[-1] if views else []


@pytest.mark.parametrize(
    ("place", "wire"),
    [
        ("read", None),
        pytest.param("copy", None, marks=sweep),
        pytest.param("taken", None, marks=sweep),
        pytest.param("read", "fp8", marks=sweep),
        pytest.param("copy", "fp8", marks=sweep),
    ],
)
def test_who_is_stopped_inside_the_kernel_and_wakes_removed(tmp_path: Path, place: str, wire: str | None) -> None:
    """It goes on where it was, in an epoch that is over: it changes nothing, returns nothing, and learns it."""
    how: dict[str, Any] = dict(victim=(1, 0), place=place, times=6, elements=TWO_SHOT, wire=wire, **STALL)
    with job(tmp_path, 3, torn_puts.reduce_and_stop, **how) as running:
        running.wait_event("view without 1", lambda events: _newest(events) == [0, 2])
        _go_on(running, 8)
        running.signal(1, signal.SIGCONT)
        assert running.join(1) == [1]
        kinds = [note["kind"] for replica, _, note in running.notes() if replica == 1]
        assert kinds[-2:] == ["woke", "error"], "it returned an op that the others had without it"
        [(_, _, text)] = running.errors()
        assert text.startswith("RemovedError")
        _go_on(running, 4)
        finish(running, {0, 2})


def _go_on(running: Job, steps: int, watched: int = 0) -> None:
    def made() -> int:
        return sum(note["kind"] == "step" for replica, _, note in running.notes() if replica == watched)

    goal, end = made() + steps, time.monotonic() + DEADLINE
    while made() < goal:
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.sweep
def test_the_one_that_stands_still_is_removed(tmp_path: Path) -> None:
    """Nobody is dead: its deadline passes in the kernels of the others, which say so, and it is the one that goes."""
    with job(
        tmp_path, 3, elements=TWO_SHOT, prepare=watch_points, op_timeout=16.0, op_floor=6.0, heartbeat_timeout=SILENCE
    ) as running:
        points = Points(tmp_path)
        running.wait_contributing({0, 1, 2})
        points.hold(1, "taken")
        running.wait_event("view without 1", lambda events: _newest(events) == [0, 2])
        _go_on(running, 3)
        lost = [e for e in running.events if e["kind"] == "lost"]
        assert {e["replica"] for e in lost} <= {1}
        points.release(1)
        assert running.join(1) == [1]
        finish(running, {0, 2})


# ---- the end ------------------------------------------------------------------------------------------------------


def wait_alone(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """Replica 0 calls an op that nobody else calls, and leaves while the kernel waits in it, and the other is there."""
    left = Path(arguments["marks"]) / "left"
    array = np.full(TWO_SHOT, 1.0 + group.replica, np.float32)
    group.allreduce(array)
    mine = np.full(TWO_SHOT, 7.0, np.float32)
    if group.replica == 0:
        work = group.allreduce(mine, async_op=True)
        threading.Timer(0.5, group.close).start()
        try:
            work.wait(30)
        except ftcomm.FtcommError as error:
            notes.write(kind="ended", text=str(error), input=bool((mine == 7.0).all()), sum=float(array[0]))
        left.touch()
    end = time.monotonic() + DEADLINE
    while not left.exists() and time.monotonic() < end:
        time.sleep(0.01)


def test_a_kernel_that_waits_ends_when_the_engine_does(tmp_path: Path) -> None:
    """And has not touched its array: nobody else has posted."""
    with job(tmp_path, 2, wait_alone) as running:
        assert running.join(0) == [0], running.errors()
        [ended] = [note for _, _, note in running.notes() if note["kind"] == "ended"]
        assert "shut down" in ended["text"]
        assert ended["input"]
        assert ended["sum"] == 3.0


def open_without_variable(first: str, engine: str) -> subprocess.CompletedProcess[str]:
    settings = f"coordinator='', token='', replica=0, replicas=1, engine='{engine}'"
    code = (
        f"import {first}; from ftcomm.engines.registry import open_engine, Settings; open_engine(Settings({settings}))"
    )
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=230)


@pytest.mark.parametrize("engine", [name for name, kind in KINDS.items() if kind.interpreted])
def test_nothing_but_the_engine_decides_that_kernels_are_interpreted(engine: str) -> None:
    ended = open_without_variable("ftcomm.groups.group", engine)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("engine", [name for name, kind in KINDS.items() if kind.interpreted])
def test_triton_that_was_imported_to_compile_cannot_interpret(engine: str) -> None:
    ended = open_without_variable("triton.language", engine)
    assert "SettingsError: FTCOMM_ENGINE=interpreter-... comes too late" in ended.stderr
    assert "Set TRITON_INTERPRET=1 in the environment" in ended.stderr


def be_another(settings: Settings, arguments: dict[str, Any]) -> None:
    logging.getLogger("ftcomm").addHandler(logging.FileHandler(Path(arguments["marks"]) / f"log-{settings.replica}"))
    if settings.replica == 1:
        object.__setattr__(settings, "engine", "host")


def test_members_with_other_engines_say_so(tmp_path: Path) -> None:
    """And none of them falls back to TCP, at whose other end nobody would answer."""
    with job(tmp_path, 2, elements=ONE_SHOT, prepare=be_another) as running:
        assert running.join(1) == [1]
        running.wait_event("view without 1", lambda events: _newest(events) == [0])
    for replica, (there, here) in enumerate((("host", "interpreter-kernel"), ("interpreter-kernel", "host"))):
        line = (tmp_path / f"log-{replica}").read_text().partition("\n")[0]
        assert line.startswith(f"replica {replica} shard 0: replica {1 - replica} cannot take part: its staging is")
        assert f"is that of engine {there}, " in line
        assert f"here it is that of engine {here}, " in line
