"""The bench without processes: sizes, patterns, statistics, rows and tables, and what it refuses."""

from __future__ import annotations

import importlib.metadata
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from ftcomm.bench import table
from ftcomm.bench.allreduce import Request, Row, item_size, rows
from ftcomm.bench.allreduce_rank import Block
from ftcomm.bench.data import FLOATS, INTEGERS, PERIOD, REDOPS, Pattern
from ftcomm.bench.header import header, header_lines
from ftcomm.bench.job import Tail
from ftcomm.bench.recovery import Event, summarize
from ftcomm.bench.sizes import format_size, parse_size, sweep
from ftcomm.bench.stats import busbw_factor, median, percentile, slowest
from ftcomm.cli import main
from ftcomm.errors import SettingsError

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
    assert [busbw_factor(n) for n in (2, 4, 8)] == [1, 1.5, 1.75]


@pytest.mark.parametrize(
    ("dtype", "size"), [("float64", 8), ("bfloat16", 2), ("int8", 1), ("uint16", 2), ("float32", 4)]
)
def test_item_size(dtype: str, size: int) -> None:
    assert item_size(dtype) == size


def test_rows_take_the_slowest_rank_and_the_ratio_of_each_round() -> None:
    request = Request([4096], [2], rounds=2, iterations=2, compare=("gloo",))
    task = request.task(2, "/nowhere")
    times = {
        ("ftcomm", 0): ([1000, 3000], [2000, 1000]),  # slowest 2000, 3000: median 2.5 us
        ("ftcomm", 1): ([1000, 1000], [1000, 1000]),  # the machine is faster in this round
        ("gloo", 0): ([10_000, 10_000], [25_000, 25_000]),
        ("gloo", 1): ([9000, 9000], [9000, 9000]),
    }
    blocks = [
        Block(rank, 4096, number, library, ranks[rank], sum(ranks[rank]), rank)
        for (library, number), ranks in times.items()
        for rank in range(2)
    ]
    own, peer = rows(blocks, task, task.sizes[0], "shm")
    assert own.round_us == [2.5, 1.0]
    assert own.time_us_p50 == 1.75
    assert own.time_us_mean == pytest.approx((2.0 + 1.0) / 2)
    assert own.algbw_gbps == own.busbw_gbps == pytest.approx(4096 / 1.75e-6 / 1e9)
    assert own.ratio is None
    assert peer.round_ratio == [10.0, 9.0]
    assert peer.ratio == 9.5
    assert (own.wrong, peer.wrong) == (2, 2)
    assert msgspec.json.decode(msgspec.json.encode(own), type=Row) == own
    text = table.line([own, peer])
    assert "9.5x" in text
    assert "9.0-10.0" in text
    assert text.endswith(" 4")
    assert len(table.heading(["gloo"])[1]) == len(text)
    assert "OK" in table.footer(0)
    assert "FAILED" in table.footer(1)


def test_task_keeps_small_floats_in_range() -> None:
    for ranks in (2, 16):
        task = Request([1024], [ranks], dtype="float16").task(ranks, "")
        assert Pattern(ranks, "float16", "sum").max_ops() - 1 - task.sizes[0].warmup >= 1


def test_header() -> None:
    fields = header()
    assert msgspec.json.decode(msgspec.json.encode(fields)) == fields
    assert all(line.startswith("# ") for line in header_lines(fields))
    assert f"torch {importlib.metadata.version('torch')}," in header_lines(fields)[1]


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
    good = Event(0, 1, 5, 2.0, 40.0, {0: 39.0, 2: 40.0}, 30.0, True, True, 0, 2000.0)
    bad = msgspec.structs.replace(good, number=1, completed=False, equal=False, stall_ms=None, rejoin_ms=None)
    summary = summarize([good, bad])
    assert (summary.kills, summary.completed, summary.equal, summary.steps_lost) == (2, 1, 1, 1)
    assert summary.stall_ms == {"p50": 40.0, "p99": 40.0, "max": 40.0}
    assert "FAILED" in table.summary_lines(summary)[-1]
    assert "OK" in table.summary_lines(summarize([good]))[-1]
    assert "never" in table.event_line(bad)
    assert "NOT EQUAL" in table.event_line(bad)


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
        ("allreduce --compare carrier-pigeon", "is not one of 'gloo', 'atomic'"),
        ("allreduce --ranks 1", "expected 2 to 16"),
        ("allreduce --ranks 2,many", "not a valid integer"),
        ("allreduce -e 4000G -f 1000", "are free; lower"),
        ("allreduce -n 0", "at least 1"),
        ("allreduce --rounds 0", "at least 1"),
        ("allreduce --transport pigeon", "'auto', 'shm', 'tcp'"),
        ("allreduce --json /nonexistent/x.json", "choose a file that you can write to"),
        ("recovery --replicas 1", "expected 2 to 16"),
        ("recovery --kills 0", "at least 1"),
        ("detection --replicas 1", "expected 2 to 16"),
        ("detection --ranks-per-replica 0", "at least 1"),
        ("detection --kills 0", "at least 1"),
        ("detection --compute -1", "back to back"),
        ("detection --size 1K", "expected at least 256K"),
        ("detection --size 4M --memory 2M", "no more than --memory"),
        ("detection --memory 4000G", "are free; lower"),
        ("recovery --size 12", "at least"),
        ("recovery --size 4000G", "are free; lower"),
    ],
)
def test_bad_input_is_a_clear_error_with_code_2(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["bench", *arguments.split()])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err
