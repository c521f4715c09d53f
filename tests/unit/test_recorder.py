"""The flight recorder: what a writer has written, a reader finds, at whatever moment it looks, in whatever is left."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import mmap
import os
import resource
import signal
import struct
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ftcomm
from ftcomm.engines.host_calls import HostCalls
from ftcomm.groups.calls import Calls
from ftcomm.kernels.call_codes import KINDS, NUMBER
from ftcomm.recorder import callers, files, layout
from ftcomm.recorder.chrome import trace
from ftcomm.recorder.layout import PROCESS_SHAPE, RECORD, GroupKind, PhaseKind, RecordingEnd, Shape
from ftcomm.recorder.reader import Recording, RecordingError, lives, numbers, parse, read, stands_since
from ftcomm.recorder.recorder import Owner, Recorder, listed
from ftcomm.recorder.tail import RecordingTail
from ftcomm.recorder.torch_format import torch_dumps
from ftcomm.recorder.waits import PhaseWait

OWNER = Owner(2, 1, 4, 2, "a job", "a host")
SHAPE = Shape(4, 32, 4096)
SUM_OF_FLOATS = 1000 << 16 | 2 << 8  # 1000 x float32


@dataclasses.dataclass
class Op:
    place: int
    call: int = SUM_OF_FLOATS
    detail: int = 0
    caller: int = 0
    record: int = 0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def made(shape: Shape = SHAPE) -> Recorder:
    recorder = Recorder(bytearray(shape.size), shape, Clock())
    recorder.describe(OWNER)
    return recorder


def seen(recorder: Recorder) -> Recording:
    data = bytes(recorder.memory)
    return parse(data, data, "here")


def test_what_was_recorded_is_read() -> None:
    recorder = made()
    group = recorder.group("*", 2, GroupKind.JOB)
    recorder.lag(3)
    group.entered(7, *listed({0: "shm", 1: "tcp", 2: "", 3: "shm"}))
    caller = recorder.text("train.py:12 main")
    first = Op((10 + 2) << NUMBER | 5, caller=caller)
    group.called(first, 10.0)
    group.posted(first, "two-shot")
    group.arrived(first)
    group.returned(first, 12.0)
    second = Op(6, detail=KINDS.index("broadcast") | 4 << 8, call=9 << 16 | 0x7F | 2 << 8)
    group.called(second, 13.0)
    group.waits(second, (3,), 13.5, 13.7)
    group.waits(second, (1, 3), 13.5, 14.0)
    group.waits(second, (3,), 20.0, 20.5)  # another wait of the same op
    group.waits(second, (3,), 30.0, 30.25)
    group.entered(8, "0,2,3", "shm")
    group.goes_on(second)
    with recorder.phase(PhaseKind.STEP, step=7, number=2, note="a note"):
        pass
    with pytest.raises(ValueError, match="broken"), recorder.phase(PhaseKind.VOTE):
        raise ValueError("broken")
    recorder.begin(PhaseKind.BOUNDARY, step=-3)
    recorder.end(RecordingEnd.FAILED)

    found = seen(recorder)
    assert (found.replica, found.shard, found.replicas, found.ranks_per_replica) == OWNER[:4]
    assert (found.job, found.host, found.pid) == ("a job", "a host", os.getpid())
    assert lives(found)
    assert abs(found.began + found.wall_offset - time.time()) < 1000
    assert (found.ending, found.problems, found.torn) == ("failed", (), 0)
    [seen_group] = found.groups
    assert (seen_group.name, seen_group.kind, seen_group.members, seen_group.closed) == ("*", "job", "0,2,3", None)
    one, two = found.ops
    assert (one.group, one.number, one.boundary, found.step(one)) == ("*", 5, 10, 7)
    assert (one.kind, one.dtype, one.elements, one.reduction) == ("allreduce", "float32", 1000, "sum")
    assert (one.epoch, one.transports, one.algorithm, one.caller) == (7, "shm tcp", "two-shot", "train.py:12 main")
    assert one.posted is not None
    assert one.arrived == one.posted + 1
    assert (one.called, one.returned, one.retries, one.last_epoch, one.failed) == (10.0, 12.0, 0, 7, False)
    assert (two.kind, two.root, two.reduction, two.boundary, two.returned) == ("broadcast", 3, "", None, None)
    assert (two.retries, two.epoch, two.last_epoch, two.algorithm) == (1, 7, 8, "")
    waited = {wait.replica: wait.seconds for wait in found.waits}
    assert waited == {3: pytest.approx(1.25), 1: pytest.approx(0.5)}
    assert {wait.op for wait in found.waits} == {6}
    step, vote, boundary = found.phases
    assert (step.name, step.step, step.number, step.note, step.failed) == ("step", 7, 2, "a note", False)
    assert step.ended == step.began + 1
    assert (vote.name, vote.failed) == ("vote", True)
    assert (boundary.name, boundary.step, boundary.ended) == ("boundary", -3, None)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 100), st.lists(st.integers(0, 40), max_size=30))
def test_the_ring_keeps_the_last_records_and_no_late_store_hits_another(before: int, late: list[int]) -> None:
    recorder = made()
    group = recorder.group("*", 0, GroupKind.JOB)
    ops = [Op(number) for number in range(before)]
    for op in ops:
        group.called(op, float(op.place + 10))
    for number in late:
        if number < before:
            group.returned(ops[number], 5000.0 + number)
            group.failed(ops[number])
            group.posted(ops[number], "ring")
    found = seen(recorder)
    kept = range(max(0, before - SHAPE.records), before)
    assert [op.number for op in found.ops] == list(kept)
    assert {op.number for op in found.ops if op.returned} == {n for n in late if n in kept}
    assert {op.number for op in found.ops if op.failed} == {n for n in late if n in kept}
    assert all(op.returned in (None, 5000.0 + op.number) for op in found.ops)


def test_the_newest_records_are_read_with_all_that_are_not_over_or_have_failed() -> None:
    recorder = made()
    group = recorder.group("all", 0, GroupKind.JOB)
    stuck, ops = Op(3), [Op(number) for number in range(4, 24)]
    group.called(stuck, 1.0)
    group.waits(stuck, (1,), 1.5, 2.5)
    for op in ops:
        group.called(op, float(op.place))
        group.returned(op, op.place + 0.5)
    group.failed(ops[6])
    recorder.begin(PhaseKind.VIEW)
    data = bytes(recorder.memory)
    few = parse(data, data, "here", 5)
    assert [op.number for op in few.ops] == [3, 10, 19, 20, 21, 22, 23]
    assert [wait.op for wait in few.waits] == [3]
    assert [each.name for each in few.phases] == ["view"]
    assert parse(data, data, "here", 1000) == seen(recorder)


@pytest.mark.parametrize("cut", range(0, RECORD, 8))
def test_a_record_that_its_writer_did_not_finish_is_torn(cut: int) -> None:
    """A rank is killed in the midst of the store, whose bytes come in order, behind zeroes."""
    recorder = made()
    group = recorder.group("*", 0, GroupKind.JOB)
    for number in range(SHAPE.records + 3):  # it is written over an older one
        group.called(Op(number), 10.0 + number)
    whole = bytes(recorder.memory)
    at = SHAPE.ring + RECORD * 2
    half = whole[: at + cut] + bytes(RECORD - cut) + whole[at + RECORD :]
    found = parse(half, half)
    assert len(found.ops) == SHAPE.records - 1
    assert SHAPE.records + 2 not in {op.number for op in found.ops}
    assert found.torn == (cut > 8)  # before its kind is there, it is none


def test_a_record_that_is_written_between_two_looks_is_left_out() -> None:
    recorder = made()
    group = recorder.group("*", 0, GroupKind.JOB)
    for number in range(SHAPE.records):
        group.called(Op(number), 10.0 + number)
    first = bytes(recorder.memory)
    group.called(Op(99), 99.0)
    second = bytes(recorder.memory)
    found = parse(first, second)
    assert {op.number for op in found.ops} == set(range(1, SHAPE.records))
    assert found.torn == 1
    assert "1 record" in found.problems[0]
    began = SHAPE.ring + RECORD - 8  # the time of its call, which is stored last
    torn = first[:began] + bytes(8) + first[began + 8 :]
    for looks in ((torn, first), (first, torn)):
        assert parse(*looks).torn == 1


def test_every_truncation_is_read_as_far_as_it_goes_and_said() -> None:
    recorder = made()
    group = recorder.group("*", 0, GroupKind.JOB)
    group.entered(1, "0", "")
    for number in range(SHAPE.records):
        group.called(Op(number, caller=recorder.text(f"file{number}.py:1 f")), 10.0 + number)
    whole = bytes(recorder.memory)
    before = 0
    for size in [*range(0, SHAPE.size, 61), SHAPE.size]:
        data = whole[:size]
        if size < layout.HEADER:
            with pytest.raises(RecordingError, match="bytes"):
                parse(data, data)
            continue
        found = parse(data, data)
        assert any("truncated" in problem for problem in found.problems) == (size < SHAPE.size)
        assert len(found.ops) >= before
        before = len(found.ops)
    assert before == SHAPE.records


def test_a_wait_outside_of_ops_is_a_phase_with_those_who_have_not_come() -> None:
    recorder = made()
    with PhaseWait(PhaseKind.RECV, number=-7, note="a group", recorder=lambda: recorder) as wait:
        wait.look([(1, None)], 9.0)
    assert not seen(recorder).phases, "who came at once leaves no trace"
    with PhaseWait(PhaseKind.MEET, number=3, recorder=lambda: recorder) as wait:
        for ranks in ([(2, 0), (2, 3)], [(2, 0), (2, 3)], [(2, 3)], [(2, 3)]):
            wait.look(ranks, 20.0)
        [phase] = seen(recorder).phases
        began, now = phase.began, recorder.clock.now  # type: ignore[attr-defined]
        assert (phase.name, phase.number, phase.ended, phase.gives_up) == ("meet", 3, None, now + 20.0)
        assert {(w.replica, w.rank): w.seconds for w in phase.waits} == {(2, 0): 1.0, (2, 3): now - began}
        assert __file__ in phase.caller
        for _ in range(SHAPE.records):  # the ring comes around
            recorder.finish(recorder.begin(PhaseKind.VIEW))
        wait.look([(2, 3)], 5.0)
        [phase] = [phase for phase in seen(recorder).phases if phase.name == "meet"]
        assert phase.waits[0].seconds == recorder.clock.now - began  # type: ignore[attr-defined]
    [phase] = [phase for phase in seen(recorder).phases if phase.name == "meet"]
    assert (phase.failed, phase.ended) == (False, recorder.clock.now)  # type: ignore[attr-defined]


def test_the_training_stands_since_somebody_waits_and_no_op_returns(tmp_path: Path) -> None:
    def write(name: str, recorder: Recorder) -> None:
        (tmp_path / f"{name}.recording").write_bytes(recorder.memory)

    (tmp_path / "other.recording").write_bytes(b"none")
    assert stands_since(tmp_path) == math.inf
    for name, returned in (("a", 12.0), ("b", 11.0)):
        recorder = made()
        group, op = recorder.group("*", 2, GroupKind.JOB), Op(5)
        group.called(op, 10.0)
        group.returned(op, returned)
        write(name, recorder)
    assert stands_since(tmp_path) == math.inf, "both compute"
    group.called(waits := Op(6), 11.5)
    write("b", recorder)
    assert stands_since(tmp_path) == 12.0
    group.returned(waits, 13.0)
    recorder.clock.now = 14.0  # type: ignore[attr-defined]
    with recorder.phase(PhaseKind.BOUNDARY):
        write("b", recorder)
    assert stands_since(tmp_path) == 15.0
    struct.pack_into("<Q", recorder.memory, layout.PROCESS_AT, 1 << 30)  # its pid: it has died there
    write("b", recorder)
    assert stands_since(tmp_path) == math.inf


def test_files_that_are_none_are_refused_by_name(tmp_path: Path) -> None:
    whole = bytes(made().memory)
    for data, said in (
        (b"x" * layout.HEADER, "no recording"),
        (whole[:8] + struct.pack("<I", 2) + whole[12:], "format 2; this ftcomm reads format 1"),
        (whole[:16] + struct.pack("<I", 1 << 30) + whole[20:], "contradicts itself"),
        (whole[:24] + struct.pack("<I", 0xFFFFFFFF) + whole[28:], "contradicts itself"),
        (whole[:12] + struct.pack("<I", 0) + whole[16:], "contradicts itself"),
    ):
        file = tmp_path / "file"
        file.write_bytes(data)
        with pytest.raises(RecordingError, match=said) as caught:
            read(file)
        assert str(file) in str(caught.value)
    with pytest.raises(RecordingError, match="No such file"):
        read(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RecordingError):
        read(tmp_path / "pipe")  # and does not wait for a writer
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(RecordingError):
        read(tmp_path / "link")


def test_a_wall_clock_that_is_none_costs_the_date_alone() -> None:
    recorder = made()
    group = recorder.group("*", 0, GroupKind.JOB)
    group.entered(1, "2", "shm")
    group.called(Op(1), 10.0)
    for wall in (1e308, -1e308, math.inf, math.nan):
        struct.pack_into("<d", recorder.memory, layout.PROCESS_AT + layout.PROCESS.size - 8, wall)
        found = seen(recorder)
        assert found.wall_offset == 0.0
        assert len(torch_dumps([found])[5]["entries"]) == len(trace([found])["otherData"]["clocks"]) == 1


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_hostile_bytes_make_no_reader_fail(data: Any) -> None:
    recorder = made()
    group = recorder.group("*", 0, GroupKind.JOB)
    group.entered(1, "2", "shm")
    for number in range(9):
        group.called(Op(number), 10.0 + number)
    recorder.begin(PhaseKind.VIEW)
    hostile = bytearray(recorder.memory)
    for _ in range(data.draw(st.integers(1, 12))):
        at = data.draw(st.integers(12, len(hostile) - 8))
        hostile[at : at + 8] = data.draw(st.binary(min_size=8, max_size=8))
    try:
        found = parse(bytes(hostile), bytes(hostile))
    except RecordingError:
        return
    assert len(found.ops) + len(found.waits) + len(found.phases) + found.torn <= SHAPE.records
    torch_dumps([found])
    trace([found])
    for op in found.ops:
        assert all(char.isprintable() for char in op.caller + op.group + op.algorithm)
        assert all(time is None or math.isfinite(time) for time in (op.called, op.posted, op.arrived, op.returned))


def test_rooms_that_are_full_cost_names_and_nothing_else() -> None:
    recorder = made(Shape(2, 8, 64))
    numbers = [recorder.text("x" * 20 + str(n)) for n in range(9)]
    assert numbers[0] > 0
    assert numbers[-1] == 0
    groups = [recorder.group(f"g{n}", 0, GroupKind.SUBGROUP) for n in range(3)]
    assert [group.number for group in groups] == [0, 1, layout.MANY]
    groups[2].entered(3, "0", "")
    groups[2].called(Op(4), recorder.clock())
    assert [op.group for op in seen(recorder).ops] == ["?"]
    groups[2].close()
    groups[0].called(Op(1), recorder.clock())
    groups[0].close()
    again = recorder.group("g9", 0, GroupKind.SUBGROUP)
    assert again.number == 0
    again.called(Op(0), recorder.clock())
    assert [(op.group, op.number) for op in seen(recorder).ops] == [("?", 4), ("(closed)", 1), ("g9", 0)]


def test_the_line_of_a_call_is_that_of_the_script() -> None:
    texts: list[str] = []

    def number_of(text: str) -> int:
        texts.append(text)
        return len(texts)

    def called() -> int:
        return callers.find(sys._getframe(), number_of)

    namespace = {"called": called, "__name__": "ftcomm.groups.calls"}
    exec("def inside():\n    return called()\n", namespace)
    inside: Any = namespace["inside"]
    assert called() == 1
    assert callers.find(sys._getframe(), number_of) == 2
    assert texts[1].startswith(f"{__file__}:")
    assert texts[1].endswith(" test_the_line_of_a_call_is_that_of_the_script")
    lambdas = [sys._getframe for _ in range(2)]
    assert callers.find(lambdas[0](), number_of) != callers.find(lambdas[1](), number_of)  # two lines
    assert inside() == 1  # `called` is a line of this file, whoever calls it


def test_each_call_is_recorded_with_its_line_whatever_functions_it_goes_through() -> None:
    called: list[int] = []

    class Alone(Calls):
        roster = (0,)

        def _may_call(self) -> None:
            """It always may."""

    def run(op: Any) -> None:
        called.append(op.caller)
        op.finish()

    exchange: Any = SimpleNamespace(run=run)
    group, x = Alone("", 0, None, HostCalls(1), exchange), np.zeros(4, np.float32)
    inside: Any = {"__name__": "ftcomm.training.some", "group": group}
    exec("def reduce(x):\n    group.allreduce(x)\n", inside)
    for _ in range(2):
        group.allreduce(x)
        group.allreduce(x)
        inside["reduce"](x)
        inside["reduce"](x)
        ftcomm.allreduce(x, group=group)
        ftcomm.allreduce(x, group=group)
        ftcomm.barrier(group=group)
    assert called[:7] == called[7:]
    assert len(set(called)) == 7
    data = bytes(files.process_recorder().memory)
    texts = [data[PROCESS_SHAPE.text + number + 2 :][:200].decode(errors="replace") for number in called]
    assert all(text.startswith(__file__) for text in texts)


def test_listed() -> None:
    assert listed({3: "tcp", 0: "", 1: "shm", 7: "tcp", 4: "tcp"}) == ("3,0-1,7,4", "shm tcp")  # as a ring goes
    assert numbers("3,0-1,7,4") == [3, 0, 1, 7, 4]
    assert listed({2: ""}) == ("2", "")


# -- the file of a process ---------------------------------------------------------------------------------------------


def in_a_child(body: Any) -> int:
    """Run `body` in a forked child, which has no recording yet; returns its exit status."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


def test_a_killed_process_leaves_its_last_ops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("FTCOMM_RUN", raising=False)

    def killed() -> None:
        recorder = files.begin(OWNER, "127.0.0.1:1")
        group = recorder.group("*", 0, GroupKind.JOB)
        for number in range(PROCESS_SHAPE.records + 7):
            op = Op(number)
            group.called(op, recorder.clock())
            if number < PROCESS_SHAPE.records + 6:
                group.returned(op, recorder.clock())
        os.kill(os.getpid(), signal.SIGKILL)

    for _ in range(4):
        assert os.WTERMSIG(in_a_child(killed)) == signal.SIGKILL
    [folder] = files.folders().values()
    found = [read(path) for path in folder.iterdir()]
    assert len(found) == files.LIVES + 1  # older lives of that rank are gone
    for recording in found:
        assert not lives(recording)
        assert recording.ending == "none"
        assert recording.ops[-1].number == PROCESS_SHAPE.records + 6
        assert recording.ops[-1].returned is None
        assert len(recording.ops) == PROCESS_SHAPE.records

    def leaves() -> None:
        files.begin(OWNER._replace(job="another"), "127.0.0.1:1")
        assert files.own_path() is not None
        files.end(RecordingEnd.CLOSED)

    assert in_a_child(leaves) == 0
    assert files.folders() == {}  # those of the killed ones, whose job has ended, and its own


def test_an_op_maps_no_page_of_the_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(files, "_own", files._OwnRecording())
    group, op = files.begin(OWNER, "127.0.0.1:1").group("*", 0, GroupKind.JOB), Op(1)
    assert files.own_path() is not None
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(PROCESS_SHAPE.records):
        group.called(op, 1.0)
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert faults < PROCESS_SHAPE.records * RECORD / mmap.PAGESIZE / 2  # a disk may have written some back


def test_without_room_for_a_file_a_process_records_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(files, "_own", files._OwnRecording())
    recorder = files.begin(OWNER, "127.0.0.1:1")
    assert "No space left on device" in caplog.text
    assert "XDG_RUNTIME_DIR" in caplog.text
    recorder.group("*", 0, GroupKind.JOB).called(Op(1), 1.0)
    assert [op.number for op in seen(recorder).ops] == [1]
    assert not list(tmp_path.rglob("*.recording"))


def test_a_process_that_is_in_one_job_after_the_other_can_be_read_in_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The directory that the ranks of a job share goes with the last of them."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("FTCOMM_RUN", raising=False)
    monkeypatch.setattr(files, "_own", files._OwnRecording())
    for job in ("one", "two"):
        recorder = files.begin(OWNER._replace(job=job), "127.0.0.1:1")
        recorder.group("*", 0, GroupKind.JOB).called(Op(3), 1.0)
        path = files.own_path()
        assert path is not None
        assert [op.number for op in read(path).ops] == [3]
        files.end(RecordingEnd.CLOSED)
        assert files.folders() == {}
    assert not caplog.text


# -- the tail ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [0, 5, 31, 32, 100])
def test_the_tail_says_how_long_a_rank_waits_wherever_the_ring_stands(tmp_path: Path, before: int) -> None:
    recorder = made()
    group = recorder.group("g", 0, GroupKind.JOB)
    path = tmp_path / f"a{files.SUFFIX}"

    def waits() -> float:
        path.write_bytes(bytes(recorder.memory))
        return tail.waits()

    path.write_bytes(bytes(recorder.memory))
    tail = RecordingTail(path)
    assert tail.waits() == 0.0
    for number in range(before):
        group.called(done := Op(number + 1), recorder.clock())
        group.returned(done, recorder.clock())
        if number % 7 == 0:
            assert waits() == 0.0
    group.called(op := Op(before + 1), recorder.clock())
    assert waits() == 0.0
    group.waits(op, (1, 3), since=1000.0, now=1002.5)
    assert waits() == 2.5
    group.waits(op, (3,), since=1000.0, now=1004.0)
    assert waits() == 4.0
    group.returned(op, 1005.0)
    assert waits() == 0.0
    tail.close()


@pytest.mark.parametrize("ops", [0, 1, 5, 31, 32, 33, 100])
def test_the_newest_records_are_those_of_the_whole_file(tmp_path: Path, ops: int) -> None:
    recorder = made()
    group, path = recorder.group("g", 0, GroupKind.JOB), tmp_path / f"a{files.SUFFIX}"
    for number in range(ops):
        group.called(op := Op(number + 1, caller=recorder.text(f"train.py:{number % 3}")), recorder.clock())
        group.returned(op, recorder.clock())
    path.write_bytes(bytes(recorder.memory))
    whole = read(path)
    with contextlib.closing(RecordingTail(path)) as tail:
        for newest in (1, 7, 32, 1000):
            few = tail.recording(newest)
            assert few.ops == whole.ops[-newest:]
            assert (few.groups, few.host, few.pid, few.problems) == (whole.groups, whole.host, whole.pid, ())


@given(st.binary(max_size=600), st.integers(0, SHAPE.size - 1))
def test_the_tail_of_any_bytes_is_a_number_or_refused(junk: bytes, at: int) -> None:
    recorder = made()
    group = recorder.group("g", 0, GroupKind.JOB)
    group.called(op := Op(1), 1.0)
    group.waits(op, (1,), since=1.0, now=3.0)
    with tempfile.NamedTemporaryFile(suffix=files.SUFFIX) as file:
        data = bytearray(recorder.memory)
        data[at : at + len(junk)] = junk
        file.write(data[: SHAPE.size - len(junk) % 50])
        file.flush()
        try:
            tail = RecordingTail(file.name)
        except RecordingError:
            return
        for _ in range(3):
            assert 0.0 <= tail.waits() < 1e7
            with contextlib.suppress(RecordingError):
                assert len(tail.recording(8).ops) <= 8
        tail.close()
