"""The bench without processes: sizes, patterns, statistics, rows and tables, and what it refuses."""

from __future__ import annotations

import asyncio
import importlib.machinery
import importlib.metadata
import random
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from ftcomm.bench import collective, overhead, peers, recovery, stragglers
from ftcomm.bench.collective import CollectiveRequest, CollectiveRow, Contestant, rows
from ftcomm.bench.collectives import COLLECTIVES, IN, OUT, Case
from ftcomm.bench.data import FLOATS, INTEGERS, PERIOD, REDOPS, Pattern, item_size
from ftcomm.bench.harness import BenchReport
from ftcomm.bench.header import header, header_lines
from ftcomm.bench.interleave import BenchTurn, Interleaver, OpDeclined, RankChannel, RankHello, RanksGone, TimedBlock
from ftcomm.bench.job import Tail
from ftcomm.bench.overhead import LEVELS, costs
from ftcomm.bench.peers import missing, theirs
from ftcomm.bench.recorder_share import RecorderShare
from ftcomm.bench.recovery import (
    TABLE,
    RecoveryEvent,
    RecoveryRequest,
    good,
    spans,
    summaries,
    summarize,
    summary_lines,
)
from ftcomm.bench.recovery import draw as draw_recovery
from ftcomm.bench.sizes import format_size, parse_size, sweep
from ftcomm.bench.stats import median, percentile, slowest
from ftcomm.cli import main
from ftcomm.errors import FtcommError, SettingsError

pytestmark = pytest.mark.protocol  # torch adds and compares small whole numbers

# ---- sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512", 512),
        ("1K", 1024),
        ("1k", 1024),
        ("64M", 64 << 20),
        ("2G", 2 << 30),
        ("1.5K", 1536),
        (" 8 MiB ", 8 << 20),
    ],
)
def test_parse_size(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "1X", "-1K", "1e6", "1.0001K", "1 K K", "nan"])
def test_no_size(text: str) -> None:
    with pytest.raises(SettingsError, match=r"is no size|whole number"):
        parse_size(text)


def test_format_size_is_exact() -> None:
    chance = random.Random(0)
    for size in (0, 1, 1000, 1024, 1536, 64 << 20, 3 << 30, *(chance.randrange(1 << 40) for _ in range(100))):
        assert parse_size(format_size(size)) == size
    assert format_size(64 << 20) == "64M"


def test_sweep() -> None:
    assert sweep(1 << 10, 1 << 20, factor=32) == [1 << 10, 1 << 15, 1 << 20]
    assert sweep(1000, 3500, step=1000) == [1000, 2000, 3000]
    assert sweep(8, 8, factor=2) == [8]


@pytest.mark.parametrize(
    ("sizes", "how", "message"),
    [
        ((2, 1), {"factor": 2}, "swap them"),
        ((0, 1), {"factor": 2}, "at least 1"),
        ((1, 2), {"factor": 1}, "at least 2"),
        ((1, 2), {"step": 0}, "at least one byte"),
        ((1, 2), {"factor": 2, "step": 1}, "exclude each other"),
        ((1, 1 << 30), {"step": 1}, "more than 10000"),
    ],
)
def test_sweep_refused(sizes: tuple[int, int], how: dict[str, int], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        sweep(*sizes, **how)


# ---- patterns -----------------------------------------------------------------------------------------------------


def kinds() -> list[tuple[str, str]]:
    return [(d, o) for d in FLOATS + INTEGERS for o in REDOPS if o != "avg" or d in FLOATS]


def reduced(arrays: list[torch.Tensor], redop: str) -> torch.Tensor:
    """What an all-reduce gives, computed another way: in fp64 or with wrapping integers, rounded once."""
    wide = [x.double().numpy() if x.is_floating_point() else x.numpy() for x in arrays]
    how = {"sum": np.add, "avg": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}[redop]
    total = wide[0]
    for x in wide[1:]:
        total = how(total, x)
    return torch.from_numpy(total / len(wide) if redop == "avg" else total).to(arrays[0].dtype)


@pytest.mark.parametrize(("dtype", "redop"), kinds())
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_pattern_knows_the_result(dtype: str, redop: str, ranks: int) -> None:
    pattern = Pattern(ranks, dtype, redop)
    for count in (1, PERIOD - 1, PERIOD, 3 * PERIOD + 7):
        arrays = [torch.empty(count, dtype=getattr(torch, dtype)) for _ in range(ranks)]
        for rank, x in enumerate(arrays):
            pattern.fill(x, rank)
        for ops in range(1, min(5, pattern.max_ops()) + 1):
            result = reduced(arrays, redop)
            assert pattern.wrong(result, ops) == 0
            arrays = [result] * ranks


@pytest.mark.parametrize("ranks", [2, 4, 16])
@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_stay_finite_and_exact_enough(dtype: str, ranks: int) -> None:
    pattern = Pattern(ranks, dtype, "sum")
    last = torch.from_numpy(pattern.result(pattern.max_ops())).to(getattr(torch, dtype))
    assert last.isfinite().all()
    first = torch.from_numpy(pattern.result(1))
    assert (first.to(getattr(torch, dtype)).double() == first).all()


@pytest.mark.parametrize("redop", ["sum", "min", "max"])
def test_wrong_counts_single_elements(redop: str) -> None:
    pattern = Pattern(4, "float32", redop)
    x = torch.empty(10_000)
    row = torch.from_numpy(pattern.result(1)).float()
    x.copy_(row.repeat(40)[:10_000])
    assert pattern.wrong(x, 1) == 0
    x[17] += 1
    x[9_999] = float("nan")
    assert pattern.wrong(x, 1) == 2
    assert pattern.wrong(x, 3) > 0 or redop != "sum"


def test_a_chunk_in_the_wrong_place_is_wrong() -> None:
    pattern = Pattern(2, "float32", "sum")
    x = torch.from_numpy(pattern.result(1)).float().repeat(6000)[: 1 << 20]
    chunk = 128 << 10
    x[:chunk], x[chunk : 2 * chunk] = x[chunk : 2 * chunk].clone(), x[:chunk].clone()
    assert pattern.wrong(x, 1) > chunk


# ---- statistics, rows, tables -------------------------------------------------------------------------------------


def test_percentiles() -> None:
    assert median([3.0, 1.0, 2.0]) == 2
    assert median([1.0, 2.0]) == 1.5
    assert percentile([5.0], 99) == 5
    assert percentile([float(i) for i in range(101)], 99) == 99
    assert slowest([[1, 5], [2, 4]]) == [2, 5]


def test_busbw_is_that_of_nccl_tests() -> None:
    assert [COLLECTIVES["allreduce"].busbw(n) for n in (2, 4, 8)] == [1, 1.5, 1.75]
    assert [COLLECTIVES[name].busbw(4) for name in ("allgather", "reduce_scatter", "alltoall")] == [0.75] * 3
    assert [COLLECTIVES[name].busbw(4) for name in ("broadcast", "reduce")] == [1, 1]


@pytest.mark.parametrize(
    ("name", "place", "bytes_"),
    [
        ("allreduce", OUT, 8),  # each of four reads its input once, and writes its result once
        ("allreduce", IN, 8),
        ("allgather", OUT, 1 + 4),
        ("allgather", IN, 1 + 3),  # a quarter of each result is there
        ("reduce_scatter", IN, 4 + 1),
        ("broadcast", IN, 1 + 3),
        ("reduce", IN, 4 + 1),
        ("alltoall", OUT, 8),
        ("gather", OUT, 2),
        ("scatter", OUT, 2),
    ],
)
def test_bytes_that_have_to_move(name: str, place: str, bytes_: int) -> None:
    assert COLLECTIVES[name].bytes_moved(4, place) == bytes_


@pytest.mark.parametrize(
    ("dtype", "size"), [("float64", 8), ("bfloat16", 2), ("int8", 1), ("uint16", 2), ("float32", 4)]
)
def test_item_size(dtype: str, size: int) -> None:
    assert item_size(dtype) == size


def blocks(times: list[tuple[list[int], list[int]]]) -> list[list[TimedBlock]]:
    return [[TimedBlock(rank, ranks[rank], sum(ranks[rank]), rank) for rank in range(2)] for ranks in times]


def test_rows_take_the_slowest_rank_and_the_ratio_of_each_round() -> None:
    request = CollectiveRequest([4096], [2], rounds=2, iterations=2, compare=("gloo", "mpi"))
    task = request.task(2)
    copy, ours, gloo, mpi = request.contestants()
    assert [who.library for who in (copy, ours, gloo, mpi)] == ["copy", "ftcomm", "gloo", "mpi"]
    times = {
        copy: blocks([([500, 500], [500, 500]), ([1000, 1000], [250, 250])]),
        # slowest 2000, 3000: median 2.5 us; in the second round the machine is faster
        ours: blocks([([1000, 3000], [2000, 1000]), ([1000, 1000], [1000, 1000])]),
        gloo: blocks([([10_000, 10_000], [25_000, 25_000]), ([9000, 9000], [9000, 9000])]),
    }
    own, peer, dead = rows(times, {mpi: "mpirun ended with signal SIGKILL"}, task, task.sizes[0], IN)
    assert own.round_us == [2.5, 1.0]
    assert own.time_us_p50 == 1.75
    assert own.time_us_mean == pytest.approx((2.0 + 1.0) / 2)
    assert own.algbw_gbps == own.busbw_gbps == pytest.approx(4096 / 1.75e-6 / 1e9)
    assert own.limit_pct == pytest.approx((100 * 0.5 / 2.5 + 100 * 1.0 / 1.0) / 2)  # as many bytes as a copy of all
    assert own.ratio is None
    assert peer.round_ratio == [10.0, 9.0]
    assert peer.ratio == 9.5
    assert (own.wrong, peer.wrong) == (2, 2)
    assert (dead.time_us_p50, dead.ratio, dead.wrong) == (None, None, 0)
    assert msgspec.json.decode(msgspec.json.encode(own), type=CollectiveRow) == own
    first, second, third = collective.lines([own, peer, dead], [True])
    assert "9.50" in second
    assert first.endswith(" 2")
    assert third.endswith("mpirun ended with signal SIGKILL")
    assert len(collective.heading([True])[1]) == len(first) == len(second)
    assert "OK" in collective.footer(0)
    assert "FAILED" in collective.footer(1)


def test_the_bound_of_a_broadcast_counts_what_it_has_to_move() -> None:
    request = CollectiveRequest([4096], [2], rounds=1, iterations=1, collective="broadcast")
    task = request.task(2)
    copy, ours = request.contestants()
    times = {copy: blocks([([1000], [1000])]), ours: blocks([([1000], [1000])])}
    (row,) = rows(times, {}, task, task.sizes[0], IN)
    assert row.limit_pct == pytest.approx(100 * (1 + 1) / 4)  # read once, written once; the copies moved 4 sizes
    assert (row.root, row.redop, row.in_place) == (0, "none", True)


def test_transports_and_blocks_are_contestants_of_their_own() -> None:
    request = CollectiveRequest([64], [2], transports=("shm", "tcp"), compare=("atomic", "gloo"))
    found = [(who.library, who.transport, who.job) for who in request.contestants()]
    assert found == [
        ("copy", "memory", "ftcomm-shm"),
        ("ftcomm", "shm", "ftcomm-shm"),
        ("atomic", "shm", "ftcomm-shm"),
        ("ftcomm", "tcp", "ftcomm-tcp"),
        ("atomic", "tcp", "ftcomm-tcp"),
        ("gloo", "tcp", "gloo"),
    ]
    sms = CollectiveRequest([64], [2], device="cuda", sms=(2, 4)).contestants()
    assert [dict(who.env) for who in sms[1:]] == [{"FTCOMM_ENGINE": "gpu-kernel", "FTCOMM_SMS": n} for n in ("2", "4")]
    over_tcp = CollectiveRequest([64], [2], device="cuda", transports=("tcp",)).contestants()
    assert dict(over_tcp[1].env) == {"FTCOMM_ENGINE": "gpu-reduce"}
    assert sms[0].env == sms[1].env  # the bound runs in the same processes
    assert isinstance(sms[0], Contestant)


# ---- every collective, among arrays of one process ------------------------------------------------------------------


def by_hand(name: str, cases: list[Case]) -> None:
    """What the collective does, of the inputs of all, in plain torch."""
    inputs = [None if case.x is None else case.x.clone() for case in cases]
    n = len(cases)
    for rank, case in enumerate(cases):
        if case.out is None or (name == "reduce" and rank):
            continue
        if name in ("allreduce", "reduce", "reduce_scatter"):
            total = reduced([x for x in inputs if x is not None], case.pattern.redop)
            case.out.copy_(total if name != "reduce_scatter" else total.split(case.part)[rank])
        elif name in ("allgather", "gather"):
            case.out.copy_(torch.cat([x for x in inputs if x is not None]))
        elif name == "alltoall":
            case.out.copy_(torch.cat([x.split(case.part)[rank] for x in inputs if x is not None]))
        else:
            root = inputs[0]
            assert root is not None
            case.out.copy_(root if name == "broadcast" else root.split(case.part)[rank])
    assert n == cases[0].ranks


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize(("dtype", "redop"), [("float32", "sum"), ("int16", "max"), ("bfloat16", "avg")])
def test_a_case_knows_the_right_result_and_a_wrong_one(name: str, dtype: str, redop: str) -> None:
    kind, ranks = COLLECTIVES[name], 3
    for place in kind.places:
        for part in (1, 7, 4 * PERIOD + 9):
            count = part * ranks
            cases = [Case(kind, Pattern(ranks, dtype, redop), rank, count, place) for rank in range(ranks)]
            for case in cases:
                case.fill()
            holders = [case for case in cases if case.out is not None and not (name == "reduce" and case.rank)]
            receivers = [case for case in holders if not (name == "broadcast" and case.rank == 0)]
            if part > PERIOD:  # in a small one the input may happen to be the result
                assert all(case.wrong(1) for case in receivers), "nothing has been done yet"
            by_hand(name, cases)
            assert [case.wrong(1) for case in cases] == [0] * ranks
            for case in receivers:
                assert case.out is not None
                case.out[-1] += 1
                assert case.wrong(1) == 1


# ---- turns ----------------------------------------------------------------------------------------------------------


def play(path: str, job: str, rank: int, answers: list[TimedBlock]) -> None:
    """A rank that answers so, and then not any more; it stays until the command has gone."""
    channel, left = RankChannel(path, job, rank), iter(answers)
    for _ in channel.turns():
        answer = next(left, None)
        if answer is not None:
            channel.answer(answer)


def test_turns_of_ranks_that_answer_refuse_fail_and_go(tmp_path: Path) -> None:
    path = tmp_path / "turns"
    ranks = [
        [
            TimedBlock(0, [1], 1),
            TimedBlock(0, error="no such op", refused=True),
            TimedBlock(0, [2], 2),
            TimedBlock(0, error="it broke"),
        ],
        [TimedBlock(1, [3], 3), TimedBlock(1, error="no such op", refused=True), TimedBlock(1, [4], 4)],
    ]

    async def command() -> None:
        async with Interleaver(path) as turns:
            process: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            players = [asyncio.to_thread(play, str(path), "peer", rank, [*said]) for rank, said in enumerate(ranks)]
            playing = asyncio.gather(*players)
            await turns.expect("peer", 2, process)
            turn = BenchTurn("peer", 0)
            assert [b.times for b in await turns.turn("peer", turn, 60, process)] == [[1], [3]]
            with pytest.raises(OpDeclined, match="no such op"):
                await turns.turn("peer", turn, 60, process)
            assert [b.times for b in await turns.turn("peer", turn, 60, process)] == [[2], [4]]
            with pytest.raises(RanksGone, match="it broke"):  # though the other rank never answers
                await turns.turn("peer", turn, 60, process)
            with pytest.raises(RanksGone, match="was not done"):
                await turns.turn("peer", turn, 0.05, process)
            process.set_result("rank 1 ended with signal SIGKILL")
            with pytest.raises(RanksGone, match="SIGKILL"):
                await turns.turn("peer", turn, 60, process)
        await playing

    asyncio.run(command())


def test_ranks_that_cannot_measure_say_why_and_those_that_never_come_are_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "turns"

    async def command() -> None:
        async with Interleaver(path) as turns:
            process: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            channel = await asyncio.to_thread(RankChannel, str(path), "peer", 0, "ImportError: no peer")
            with pytest.raises(RanksGone, match="rank 0: ImportError: no peer"):
                await turns.expect("peer", 2, process)
            process.set_result("rank 0 ended with exit code 1")
            with pytest.raises(RanksGone, match="exit code 1"):
                await turns.expect("other", 2, process)
            assert RankHello("peer", 0)
            assert channel

    asyncio.run(command())


def test_a_peer_that_ends_says_how(tmp_path: Path) -> None:
    async def start() -> str:
        async with theirs("gloo", 2, ("no.such.module:rank", "task"), str(tmp_path)) as ended:
            return await asyncio.wait_for(ended, 110)

    said = asyncio.run(start())
    assert "ended with exit code 1; it said last:" in said
    assert "No module named" in said


def test_a_peer_that_cannot_be_measured_is_named() -> None:
    assert "--device cuda" in str(missing("nccl", "cpu", 2))
    assert missing("gloo", "cpu", 2) is None
    assert "CPU alone" in str(missing("mpi", "cuda", 2)) or "pip install" in str(missing("mpi", "cuda", 2))


def test_task_keeps_small_floats_in_range() -> None:
    for ranks in (2, 16):
        task = CollectiveRequest([1024], [ranks], dtype="float16").task(ranks)
        assert Pattern(ranks, "float16", "sum").max_ops() - 1 - task.sizes[0].warmup >= 1


def test_header() -> None:
    fields = header()
    assert msgspec.json.decode(msgspec.json.encode(fields)) == fields
    assert all(line.startswith("# ") for line in header_lines(fields))
    assert f"torch {importlib.metadata.version('torch')}," in header_lines(fields)[1]


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("tests.verdicts.__main__", "python -m tests.verdicts --runs 2"),
        ("tests.many_members", "python -m tests.many_members --runs 2"),
        ("", "ftcomm --runs 2"),  # a program
    ],
)
def test_the_command_of_a_result_can_be_run_again(module: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/ftcomm", "--runs", "2"])
    spec = importlib.machinery.ModuleSpec(module, None) if module else None
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    assert header()["command"] == said


def test_tail_leaves_half_a_line(tmp_path: Path) -> None:
    class Record(msgspec.Struct):
        n: int

    path = tmp_path / "x"
    tail = Tail([path, tmp_path / "missing"], Record)
    assert tail.read() == []
    with path.open("ab", buffering=0) as file:
        file.write(b'{"n":1}\n{"n"')
        assert tail.read() == [Record(1)]
        file.write(b':2}\n{"n":3}\n')
        assert tail.read() == [Record(2), Record(3)]
    assert tail.read() == []


def test_summary_counts_what_did_not_happen() -> None:
    good_one = RecoveryEvent(0, 1, 5, 2.0, 40.0, {0: 39.0, 2: 40.0}, 30.0, True, True, 0, 2000.0, bytes_resent=1 << 20)
    lost = {"completed": False, "equal": False, "stall_ms": None, "rejoin_ms": None, "steps_lost": 1}
    bad = msgspec.structs.replace(good_one, number=1, **lost)
    summary = summarize([good_one, bad])
    assert (summary.kills, summary.completed, summary.equal, summary.steps_lost) == (2, 1, 1, 1)
    assert summary.stall_ms == {"p50": 40.0, "p99": 40.0, "max": 40.0}
    assert "FAILED" in summary_lines(summary)[-1]
    assert "OK" in summary_lines(summarize([good_one]))[-1]
    assert "never" in TABLE.lines(bad)[0]
    assert "NOT EQUAL" in TABLE.lines(bad)[0]
    assert "1.05" in TABLE.lines(good_one)[0]
    assert not good(summary)
    assert good(summarize([good_one]))
    above = msgspec.structs.replace(good_one, bytes_in_flight=(1 << 20) - 1, heartbeat_ms=30.0)
    assert good(summarize([msgspec.structs.replace(above, bytes_in_flight=1 << 20)]))
    assert not good(summarize([good_one, above]))
    assert summarize([good_one, above]).over_heartbeat_ms == {"p50": 10.0, "p99": 10.0, "max": 10.0}
    assert "sent again more than was in flight: 1 FAILED" in summary_lines(summarize([above]))[-1]
    peer = msgspec.structs.replace(bad, library="gloo")
    assert [(one.library, one.fault, one.kills) for one in summaries([good_one, bad, peer])] == [
        ("ftcomm", "kill", 2),
        ("gloo", "kill", 1),
    ]
    assert good(summarize([peer]))  # nobody asks that of gloo
    assert len(TABLE.lines(good_one)[0]) == len(TABLE.heading()[0])


def test_parts_of_a_stall_follow_each_other_and_end_with_it() -> None:
    event = RecoveryEvent(0, 1, 5, 2.0, 40.0, {}, 30.0, True, True, 0, None, view_ms=5.0, resume_ms=10.0)
    assert spans(event) == [2.0, 5.0, 15.0, 40.0]
    unknown = msgspec.structs.replace(event, detect_ms=None, view_ms=None, resume_ms=None)
    assert spans(unknown) == [0.0, 0.0, 0.0, 40.0]
    late = msgspec.structs.replace(event, detect_ms=9.0, resume_ms=90.0)  # told later than decided, and than returned
    assert spans(late) == [9.0, 9.0, 40.0, 40.0]


def test_the_picture_of_recoveries_that_end_and_of_those_that_do_not(tmp_path: Path) -> None:
    one = RecoveryEvent(0, 1, 5, 2.0, 40.0, {0: 40.0}, 30.0, True, True, 0, 2000.0, view_ms=5.0, resume_ms=10.0)
    stop = msgspec.structs.replace(one, fault="stop", stall_ms=4000.0, detect_ms=2000.0, view_ms=3900.0)
    never = msgspec.structs.replace(one, library="gloo", stall_ms=None, completed=False, steps_lost=1)
    draw_recovery([one, stop, never], RecoveryRequest(), header(), tmp_path / "x.svg")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "x.svg").read_text()
    draw_recovery([never], RecoveryRequest(), header(), tmp_path / "y.png")


# ---- overhead -------------------------------------------------------------------------------------------------------


def level_rows(size: int, **round_us: list[float]) -> list[CollectiveRow]:
    kind = ("allreduce", "", "cpu", "shm", 2, "float32", "sum", -1, True, size, size // 4, 3, 3)
    made = CollectiveRow(*kind, 0, 0, 0, 0, 0, 0, 0, [], None, [])
    return [
        msgspec.structs.replace(made, library=level, round_us=times, time_us_p50=median(times))
        for level, times in round_us.items()
    ]


def test_what_fault_tolerance_costs_is_the_median_of_differences_within_rounds() -> None:
    off, stability, ours = [100.0, 400.0, 200.0], [101.0, 404.0, 199.0], [104.0, 410.0, 202.0]
    seen = [103.5, 409.0, 201.8]
    rows_ = level_rows(1 << 20, off=off, stability=stability, detection=seen, ftcomm=ours, verify=[150.0] * 3)
    found = {cost.level: cost for cost in costs(rows_)}
    assert list(found) == list(LEVELS)
    assert found["off"].over_off_us is None
    assert found["ftcomm"].round_over_off_us == [4.0, 10.0, 2.0]
    assert found["ftcomm"].over_off_us == 4.0
    assert found["ftcomm"].over_off_pct == pytest.approx(2.5)  # of 4, 2.5 and 1
    assert found["ftcomm"].good
    assert found["ftcomm"].recorder_us == pytest.approx(0.5)  # of 0.5, 1 and 0.2
    assert found["detection"].recorder_us is None
    assert not msgspec.structs.replace(found["ftcomm"], over_off_pct=3.1).good
    assert msgspec.structs.replace(found["verify"], over_off_pct=30.0).good
    small = msgspec.structs.replace(found["ftcomm"], bytes=1 << 10, over_off_us=1.1)
    assert not small.good
    assert msgspec.structs.replace(small, bytes=64 << 10).good
    assert "missed at 1024 bytes" in overhead.footer([small])
    assert "OK; the recorder alone" in overhead.footer([found["ftcomm"]])
    assert overhead.footer([found["detection"]]).endswith("OK")
    share = RecorderShare(op_us=2.0, phase_us=1.0, ops_per_step=7, step_ms=10.0, share_pct=0.17)
    for table, record in zip(overhead.EXPERIMENT.tables, (small, share), strict=True):
        assert len(table.lines(record)[0]) == len(table.heading()[0])
    assert overhead.said_of_a_step(share).endswith("0.170%: OK")
    assert overhead.said_of_a_step(msgspec.structs.replace(share, share_pct=0.6)).endswith("0.600%: missed")


def test_a_level_that_failed_is_an_error() -> None:
    rows_ = level_rows(1024, off=[1.0], stability=[1.0], detection=[1.0], ftcomm=[1.0], verify=[1.0])
    rows_[4] = msgspec.structs.replace(rows_[4], time_us_p50=None, error="it broke")
    with pytest.raises(ValueError, match="verify: it broke"):
        costs(rows_)


# ---- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("allreduce -b 1X", "is no size"),
        ("allreduce -b 2M -e 1M", "swap them"),
        ("allreduce -f 1", "at least 2"),
        ("allreduce -f 2 -i 1K", "exclude each other"),
        ("allreduce -b 2 -e 64", "less than one element"),
        ("allreduce --sizes 1K,2Q", "is no size"),
        ("allreduce -d float7", "expected one of float64"),
        ("allreduce -o median", "expected one of sum"),
        ("allreduce -o avg -d int8", "only of floats"),
        ("allreduce -o avg --compare gloo", "gloo has no avg"),
        ("allreduce --compare carrier-pigeon", "is not one of 'gloo', 'mpi', 'torchft', 'nccl', 'atomic'"),
        ("allgather --compare atomic", "only an all-reduce can be atomic"),
        ("allgather --sizes 4 --ranks 2", "one element of float32 for each rank"),
        ("allreduce --compression bf16", "is not one of 'input', 'fp32', 'fp8'"),
        ("allreduce --compression fp8 -o max", "--compression fp8: compression='fp8' with op='max'"),
        ("allreduce --compression input,fp32 -d int32", "--compression fp32: compression='fp32' of int32"),
        ("allgather --compression fp8", "only an all-reduce has another form"),
        ("allreduce -G", "add --device cuda"),
        ("allreduce --sms 4", "add --device cuda"),
        ("allreduce --device cuda --sms 0", "needs at least 1"),
        ("broadcast --device cuda", "only allreduce is measured there, not broadcast"),
        ("allreduce -c 2", "not in the range"),
        ("allreduce --plot /nonexistent/x.png", "no folder /nonexistent"),
        ("allreduce --plot x.gif", ".png or .svg"),
        ("allreduce --csv /nonexistent/x.csv", "choose a file that you can write to"),
        ("allreduce --ranks 1", "expected 2 to 1024"),
        ("allreduce --ranks 2,many", "not a valid integer"),
        ("allreduce -e 4000G -f 1000", "are free; lower"),
        ("allreduce -n 0", "at least 1"),
        ("allreduce --rounds 0", "at least 1"),
        ("allreduce --transport pigeon", "is not one of 'auto', 'shm'"),
        ("allreduce --json /nonexistent/x.json", "choose a file that you can write to"),
        ("recovery --replicas 1", "expected 2 to 1024"),
        ("recovery --kills 0", "at least 1"),
        ("recovery --faults pull", "is not one of 'kill', 'stop', 'cut'"),
        ("recovery --faults cut --transport shm", "no network to cut"),
        ("recovery --compare nccl", "is not one of 'gloo', 'torchft'"),
        ("recovery --plot x.jpg", ".png or .svg"),
        ("overhead --ranks 1", "expected 2 to 1024"),
        ("overhead --sizes 2", "less than one element"),
        ("recovery --size 12", "at least"),
        ("recovery --size 4000G", "are free; lower"),
        ("recovery --size big", "is no size"),
        ("wire --sizes 1M,big", "is no size"),
        ("tune --ranks 1", "expected 2 to 1024"),
        ("tune --ranks three", "not a valid integer"),
        ("tune --rounds 0", "at least 1"),
        ("tune --hosts moon", "is not one of 'shared', 'netns'"),
        ("tune --file /nonexistent/x.json", "choose a file that you can write to"),
    ],
)
def test_bad_input_is_a_clear_error_with_code_2(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["bench", *arguments.split()])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_a_peer_that_fails_has_a_line_that_says_so_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    event = RecoveryEvent(0, 1, 5, 2.0, 40.0, {0: 40.0}, 30.0, True, True, 0, 2000.0, bytes_resent=5)

    async def ours(request: RecoveryRequest, report: BenchReport) -> None:
        report.add(event)

    async def theirs(library: str, request: RecoveryRequest, report: BenchReport) -> None:
        if library == "gloo":
            raise FtcommError("its ranks were killed by SIGSEGV")
        report.add(msgspec.structs.replace(event, library=library))

    monkeypatch.setattr(recovery, "measure_ftcomm", ours)
    monkeypatch.setattr(recovery, "measure_peer", theirs)
    monkeypatch.setattr(peers, "missing", lambda *what: None)
    path = tmp_path / "out.json"
    with pytest.raises(SystemExit) as raised:
        main(["bench", "recovery", "--smoke", "--compare", "gloo,torchft", "--json", str(path)])
    assert raised.value.code == 0
    assert "# gloo: its ranks were killed by SIGSEGV" in capsys.readouterr().out
    result = msgspec.json.decode(path.read_bytes())
    assert result["errors"] == {"gloo": "its ranks were killed by SIGSEGV"}
    assert [each["library"] for each in result["events"]] == ["ftcomm", "torchft"]


def test_the_command_fails_if_more_is_sent_again_than_was_in_flight(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    event = RecoveryEvent(0, 1, 5, 2.0, 40.0, {0: 40.0}, 30.0, True, True, 0, 2000.0, bytes_resent=5, bytes_in_flight=4)

    async def ours(request: RecoveryRequest, report: BenchReport) -> None:
        report.add(event)

    monkeypatch.setattr(recovery, "measure_ftcomm", ours)
    with pytest.raises(SystemExit) as raised:
        main(["bench", "recovery", "--smoke"])
    assert raised.value.code == 1
    assert "sent again more than was in flight: 1 FAILED" in capsys.readouterr().out


def test_each_name_while_all_are_alike_is_a_false_one_and_later_that_of_another() -> None:
    looks = [
        stragglers.Look(30.0, "even", 150, (1.0, 1.1, 1.0, 1.0), (1,)),
        stragglers.Look(60.0, "even", 300, (1.0, 1.0, 1.0, 1.0), ()),
        stragglers.Look(62.0, "slow", 310, (1.0, 1.0, 1.2, 1.3), (2, 3)),
    ]
    assert stragglers.false_names(looks, slow=3) == 2
