"""Dumps and traces: torch's own analyser reads them, hosts are put on one clock, and a full disk harms nobody."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import logging
import os
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from ftcomm.cli import commands
from ftcomm.errors import SettingsError
from ftcomm.kernels.call_codes import KINDS
from ftcomm.launch import dumper
from ftcomm.launch.dumper import Dumper, cause_of
from ftcomm.recorder import dump
from ftcomm.recorder.chrome import trace
from ftcomm.recorder.clocks import offsets
from ftcomm.recorder.dump import DumpError, DumpSummary, recordings_in, write
from ftcomm.recorder.layout import GroupKind, PhaseKind, Shape
from ftcomm.recorder.reader import Recording, RecordingError, parse, read_all
from ftcomm.recorder.recorder import GroupRecorder, Owner, Recorder
from ftcomm.recorder.torch_format import numbers, torch_dumps

from .test_recorder import Op

SHAPE = Shape(4, 128, 4096)
FLOATS = 2 << 8  # float32, sum


class Rank:
    """A rank of a job that records by hand."""

    def __init__(self, replica: int, replicas: int = 3, shard: int = 0, ranks: int = 1) -> None:
        self.now = 0.5
        self.recorder = Recorder(bytearray(SHAPE.size), SHAPE, lambda: self.now)
        self.recorder.describe(Owner(replica, shard, replicas, ranks, "a job", f"host {replica}"))
        self.group = self.recorder.group("*", replica, GroupKind.JOB)
        self.group.entered(1, f"0-{replicas - 1}" if replicas > 1 else "0", "shm")

    def op(
        self, number: int, *, kind: str = "allreduce", elements: int = 10, called: float, returned: float = 0.0
    ) -> None:
        made = Op(number, elements << 16 | FLOATS, KINDS.index(kind), self.recorder.text(f"train.py:{number + 1} step"))
        _record(self.group, made, called, returned)

    def recording(self) -> Recording:
        data = bytes(self.recorder.memory)
        return parse(data, data, "a file")

    def save(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        owner = self.recording()
        (folder / f"replica-{owner.replica}.shard-{owner.shard}.pid-1.recording").write_bytes(self.recorder.memory)


def _record(group: GroupRecorder, made: Op, called: float, returned: float) -> None:
    group.called(made, called)
    group.posted(made, "one-shot")
    if returned:
        group.returned(made, returned)


def analysed(ranks: list[Rank], folder: Path) -> tuple[Any, str]:
    """What torch's analyser finds in the dump of these ranks, and what it prints."""
    for rank in ranks:
        rank.save(folder / "recordings")
    return analyse(write(folder / "recordings", "run", "asked"))


def analyse(written: Path) -> tuple[Any, str]:
    """What torch's analyser finds in a dump, and what it prints."""
    from torch.distributed.flight_recorder.components import builder, config_manager, loader

    printed = io.StringIO()
    handler = logging.StreamHandler(printed)
    logger = loader.logger.logger
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        arguments: Any = config_manager.JobConfig().parse_args([str(written)])
        details, version = loader.read_dir(arguments)
        return builder.build_db(details, arguments, version), printed.getvalue()
    finally:
        logger.removeHandler(handler)


@pytest.fixture(autouse=True)
def _dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTCOMM_DUMP_DIR", str(tmp_path))


def test_torchs_analyser_matches_what_all_have_done(tmp_path: Path) -> None:
    ranks = [Rank(replica) for replica in range(3)]
    for rank in ranks:
        for number, kind in enumerate(KINDS):
            rank.op(number, kind=kind, called=number + 1.0, returned=number + 1.5)
    ranks[0].recorder.begin(PhaseKind.STEP)
    found, said = analysed(ranks, tmp_path)
    assert [collective.collective_name.removeprefix("gloo:") for collective in found.collectives] == [
        {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}.get(kind, kind)
        for kind in KINDS
    ]
    assert all(collective.pass_check for collective in found.collectives), said
    assert len(found.ncclcalls) == 3 * len(KINDS)
    [group] = found.groups
    assert "ftcomm" in group.desc
    assert group.size == 3


def test_torchs_analyser_names_who_did_not_come_and_the_line_of_those_who_wait(tmp_path: Path) -> None:
    ranks = [Rank(replica) for replica in range(3)]
    for rank in ranks:
        for number in range(5):
            rank.op(number, called=number + 1.0, returned=number + 1.5)
    for rank in ranks[:2]:
        rank.op(5, called=7.0)
    _, said = analysed(ranks, tmp_path)
    assert "Not all ranks joining collective, sequence number: 6" in said
    assert "missing ranks: {2}" in said
    assert "step at train.py:6" in said


def test_ranks_that_were_read_at_other_times_of_a_job_that_goes_on_miss_nothing(tmp_path: Path) -> None:
    ranks = [Rank(replica) for replica in range(3)]
    for rank, done in zip(ranks, (4, 5, 7), strict=True):
        for number in range(done):
            rank.op(number, called=number + 1.0, returned=number + 1.5)
    for rank in ranks[1:]:  # the first one may have called it since it was read
        rank.op(7, called=9.0)
    found, said = analysed(ranks, tmp_path)
    assert len(found.collectives) == 4
    assert "missing" not in said


def test_a_rank_that_was_removed_has_what_it_did_in_a_process_group_of_its_own(tmp_path: Path) -> None:
    ranks = [Rank(replica) for replica in range(3)]
    for rank in ranks:
        for number in range(3):
            rank.op(number, called=number + 1.0, returned=number + 1.5)
    left, *others = [rank.recording() for rank in ranks]
    others = [
        msgspec.structs.replace(
            each,
            groups=tuple(msgspec.structs.replace(group, members="1,2") for group in each.groups),
            ops=tuple(msgspec.structs.replace(op, last_epoch=op.last_epoch + 1) for op in each.ops),
        )
        for each in others
    ]
    found = torch_dumps([left, *others])
    assert [len(dumped["entries"]) for dumped in found.values()] == [3, 3, 3]
    assert found[0]["pg_config"]["*.0 until rank 0 left"]["ranks"] == "[0]"
    assert found[1]["pg_config"] == found[2]["pg_config"]
    assert found[1]["pg_config"]["*.0"]["ranks"] == "[1, 2]"


def test_torchs_analyser_finds_the_call_that_differs(tmp_path: Path) -> None:
    ranks = [Rank(replica) for replica in range(3)]
    for rank in ranks:
        rank.op(0, called=1.0, returned=1.5)
        rank.op(1, elements=11 if rank is ranks[1] else 10, called=2.0, returned=2.5)
    _, said = analysed(ranks, tmp_path)
    assert "Collective sequence number: 2 has errors" in said
    assert "Culprit rank 1" in said


@pytest.mark.parametrize("late_one", [0, 1])
def test_ranks_whose_rings_begin_at_other_ops_are_compared_from_the_same_one_on(late_one: int) -> None:
    early, late = Rank(1 - late_one, 2), Rank(late_one, 2)
    for number in range(9):
        early.op(number, called=number + 1.0, returned=number + 1.5)
        if number >= 4:
            late.op(number, called=number + 1.0, returned=number + 1.5)
    found = torch_dumps([early.recording(), late.recording()])
    for dumped in found.values():
        assert [entry["collective_seq_id"] for entry in dumped["entries"]] == [5, 6, 7, 8, 9]
        assert [entry["record_id"] for entry in dumped["entries"]] == [0, 1, 2, 3, 4]
        assert dumped["pg_config"]["*.0"]["ranks"] == "[0, 1]"
        assert dumped["pg_status"]["*.0"]["last_completed_collective"] == 9


def test_ranks_of_a_replica_are_columns_of_groups() -> None:
    ranks = [Rank(replica, 2, shard, 2) for replica in range(2) for shard in range(2)]
    for rank in ranks:
        rank.op(0, called=1.0, returned=2.0)
    found = torch_dumps(rank.recording() for rank in ranks)
    assert {rank: next(iter(one["pg_config"].values()))["ranks"] for rank, one in found.items()} == {
        0: "[0, 2]",
        1: "[1, 3]",
        2: "[0, 2]",
        3: "[1, 3]",
    }
    assert numbers("0-2,5") == [0, 1, 2, 5]
    assert numbers("") == numbers("x") == numbers("1-x") == []
    assert numbers(",".join(["0-4095"] * 2)) == numbers("0-4096") == [], "more than a group may have"


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 1 << 30), st.floats(-1e6, 1e6))
def test_the_clock_of_another_host_is_found_within_the_error_that_is_said(seed: int, offset: float) -> None:
    """`offset` is by how much the clock of the second host is ahead."""
    dice = random.Random(seed)
    here, there = Rank(0, 2), Rank(1, 2)
    base = 2e6
    for number in range(dice.randint(1, 30)):
        base += dice.uniform(0.001, 1.0)
        calls = [base + dice.expovariate(100) for _ in range(2)]
        returns = [max(calls) + dice.expovariate(1000) for _ in range(2)]
        here.op(number, called=calls[0], returned=returns[0])
        there.op(number, called=calls[1] + offset, returned=returns[1] + offset)
    mine, theirs = (msgspec.structs.replace(rank.recording(), boot=boot) for rank, boot in ((here, "a"), (there, "b")))
    found = offsets([mine, theirs])
    assert found["a"].seconds == 0.0
    assert found["b"].error is not None
    assert abs(found["b"].seconds + offset) <= found["b"].error + 1e-6


def test_hosts_without_a_common_op_are_put_together_by_their_wall_clocks_and_that_is_said() -> None:
    mine, theirs = Rank(0, 2).recording(), msgspec.structs.replace(Rank(1, 2).recording(), boot="b", wall_offset=1e9)
    found = offsets([mine, theirs])["b"]
    assert found.error is None
    assert "wall clocks" in str(found)
    assert found.seconds == pytest.approx(1e9 - mine.wall_offset)


def test_the_trace_has_all_ops_on_one_clock_and_lines_of_what_overlaps() -> None:
    rank = Rank(0, 2)
    rank.now = 1.0
    begun = rank.recorder.begin(PhaseKind.STEP, step=3)
    rank.op(0, called=2.0, returned=5.0)
    rank.op(1, called=3.0, returned=6.0)
    rank.op(2, called=5.5, returned=7.0)
    rank.op(3, called=8.0)
    rank.group.waits(Op(3), (1,), 8.0, 9.5)
    rank.now = 10.0
    rank.recorder.finish(begun)
    other = msgspec.structs.replace(rank.recording(), boot="elsewhere", replica=98_303)
    made = json.loads(msgspec.json.encode(trace([rank.recording(), other])))
    events = [event for event in made["traceEvents"] if event["ph"] == "X"]
    assert len(events) == 2 * 5
    assert {event["pid"] for event in made["traceEvents"]} == {1, 2}  # Perfetto takes 32 bits
    names = {event["args"]["name"] for event in made["traceEvents"] if event["name"] == "process_name"}
    assert any(name.startswith("replica 98303 shard 0 (") for name in names), names
    mine = [event for event in events if event["pid"] == 1]
    spans = {event["args"]["number"]: event for event in mine if event["cat"] == "op"}
    [step] = [event for event in mine if event["cat"] == "phase"]
    assert step["dur"] == 9e6
    assert step["args"]["step"] == 3
    assert spans[0]["tid"] != spans[1]["tid"]
    assert spans[2]["tid"] == spans[0]["tid"]
    assert spans[1]["ts"] - spans[0]["ts"] == pytest.approx(1e6)
    assert spans[3]["args"]["state"] == "in flight"
    assert spans[3]["args"]["waited, s"] == {"replica 1": 1.5}
    assert spans[3]["dur"] == pytest.approx(2e6)  # to the last moment that is known
    assert spans[0]["args"]["caller"] == "train.py:1 step"
    for tid in {event["tid"] for event in mine}:
        line = sorted((event["ts"], event["ts"] + event["dur"]) for event in mine if event["tid"] == tid)
        assert all(after[0] >= before[1] for before, after in itertools.pairwise(line))
    assert len(made["otherData"]["clocks"]) == 2


def test_a_dump_is_whole_or_not_there_and_the_newest_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recordings = tmp_path / "recordings"
    rank = Rank(0, 1)
    rank.op(0, called=1.0)
    rank.save(recordings)
    (recordings / "replica-9.shard-0.pid-2.recording").write_bytes(b"FTCOMMFR" + bytes(5000))
    made = [write(recordings, "run", "stall") for _ in range(dump.KEPT + 2)]
    left = sorted(path.name for path in dump.dump_dir().iterdir())
    assert len(left) == dump.KEPT
    assert made[-1].name in left
    summary = msgspec.json.decode((made[-1] / "dump.json").read_bytes(), type=DumpSummary)
    assert (summary.cause, summary.job, summary.ranks) == ("stall", "a job", [0])
    assert "format 0" in summary.unread[0]
    [found], problems = recordings_in(made[-1])
    assert found.ops[0].number == 0
    assert problems

    os.mkfifo(recordings / "pipe.recording")  # nobody ever writes to it
    (recordings / "folder.recording").mkdir()
    (tmp_path / "secret").write_text("of somebody else")
    (recordings / "link.recording").symlink_to(tmp_path / "secret")
    made.append(write(recordings, "run", "stall"))
    left = sorted([*left[1:], made[-1].name])
    summary = msgspec.json.decode((made[-1] / "dump.json").read_bytes(), type=DumpSummary)
    assert summary.ranks == [0]
    assert sorted(Path(text.partition(": ")[0]).stem for text in summary.unread) == [
        *("folder", "link", "pipe", "replica-9.shard-0.pid-2"),
    ]
    assert not any(b"somebody else" in path.read_bytes() for path in made[-1].iterdir())

    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(DumpError, match=r"No space left on device; make room there, or set FTCOMM_DUMP_DIR"):
        write(recordings, "run", "stall")
    assert sorted(path.name for path in dump.dump_dir().iterdir()) == left


def test_a_launcher_lets_another_process_write_its_dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dumper, "DUMP_TIMEOUT", dumper.LONGEST)
    monkeypatch.setattr(dump, "write", None)  # so that this process cannot
    rank, said = Rank(0, 1), list[str]()
    rank.op(0, called=1.0)
    rank.save(tmp_path / "recordings")

    async def dump_for(*causes: str) -> None:
        writer = Dumper(tmp_path / "recordings", "run", said.append)
        for cause in causes:
            writer.dump(cause)
        await writer.close()

    asyncio.run(dump_for("stall", "crash"))
    for cause, line in zip(("stall", "crash"), sorted(said, reverse=True), strict=True):
        begin, _, folder = line.rpartition(" ")
        assert begin == f"{cause}: what all ranks did is in"
        assert recordings_in(Path(folder))[0][0].ops[0].number == 0
    dump.dump_dir().chmod(0o755)
    asyncio.run(dump_for("stall"))
    assert said[-1].startswith("stall: no dump was written")
    assert "FTCOMM_DUMP_DIR" in said[-1]


def test_where_others_can_read_no_dump_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(0, 1)
    rank.save(tmp_path / "recordings")
    dump.dump_dir().chmod(0o755)
    with pytest.raises(DumpError, match="FTCOMM_DUMP_DIR"):
        write(tmp_path / "recordings", "run", "stall")
    monkeypatch.setenv("FTCOMM_DUMP_DIR", str(tmp_path / "none"))
    with pytest.raises(SettingsError, match="FTCOMM_DUMP_DIR"):
        dump.dump_dir()


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    run = CliRunner().invoke
    for command in ("dump", "trace"):
        with pytest.raises(SettingsError, match="no job of yours"):
            run(commands, [command], catch_exceptions=False)
    from ftcomm.process.user_dir import base_dir

    folder = base_dir() / "0123abcd"
    folder.mkdir()
    for replica in range(2):
        rank = Rank(replica, 2)
        rank.op(0, called=1.0, returned=2.0)
        rank.save(folder / "recordings")
    done = run(commands, ["dump", "0123"], catch_exceptions=False)
    written = Path(done.output.strip())
    assert {"dump.json", "rank_0", "rank_1"} < {path.name for path in written.iterdir()}
    assert read_all(written)[0][1].replica == 1
    output = tmp_path / "trace.json"
    for source in ([], ["0123abcd"], [str(written)]):
        done = run(commands, ["trace", *source, "-o", str(output)], catch_exceptions=False)
        assert "2 ops of 2 processes" in done.output
        assert len([e for e in json.loads(output.read_text())["traceEvents"] if e["ph"] == "X"]) == 2
    with pytest.raises(SettingsError, match="no job is named so"):
        run(commands, ["dump", "9"], catch_exceptions=False)
    with pytest.raises(RecordingError, match="no recordings"):
        run(commands, ["trace", str(tmp_path)], catch_exceptions=False)
    with pytest.raises(SettingsError, match="with -o"):
        run(commands, ["trace", "-o", str(tmp_path / "none" / "x")], catch_exceptions=False)


def test_which_events_are_dumped() -> None:
    assert cause_of({"kind": "stalled"}) == "stall"
    assert cause_of({"kind": "divergence"}) == "divergence"
    assert cause_of({"kind": "step_failed", "error": "MismatchError: ...", "mismatch": True}) == "mismatch"
    assert cause_of({"kind": "step_failed", "error": "ValueError: MismatchError", "mismatch": False}) == ""
    suspect = {"kind": "suspect", "reason": "its shard 0 is lost: its script failed with MismatchError"}
    for fields, cause in (({"error": "MismatchError"}, "mismatch"), ({"error": "ValueError"}, ""), ({"code": 1}, "")):
        assert cause_of({**suspect, **fields}) == cause
    assert cause_of(suspect) == "", "what it says to people decides nothing"
    assert cause_of({"kind": "failed", "reason": "lost 1"}) == "crash"
    assert cause_of({"kind": "view"}) == ""
