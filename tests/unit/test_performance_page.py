"""docs/performance.md is what the committed results say; and what is made of results of all kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ftcomm.bench.research.page import SECTIONS, Result, load, pictures, render
from ftcomm.cli import main
from ftcomm.errors import SettingsError

REPOSITORY = Path(__file__).parents[2]
HEADER = {
    "command": "ftcomm bench x --ranks 2 --json /tmp/out.json --plot a.png",
    "date": "2026-11-21T00:00:00+00:00",
    "cpu": "a CPU",
    "cores": 2,
    "load": 0.5,
    "torch": "2.13",
}
ROW: dict[str, Any] = {
    **{"op": "allreduce", "library": "ftcomm", "device": "cpu", "transport": "auto", "ranks": 2, "dtype": "float32"},
    **{"redop": "sum", "root": -1, "in_place": True, "bytes": 1 << 20, "count": 1 << 18, "rounds": 3, "iterations": 9},
    **{"time_us_p50": 70.0, "time_us_p99": 90.0, "time_us_mean": 75.0, "algbw_gbps": 15.0, "busbw_gbps": 15.0},
    **{"limit_pct": 51.6, "wrong": 0, "round_us": [70.0] * 3, "ratio": None, "round_ratio": []},
}
EVENT: dict[str, Any] = {
    **{"number": 0, "victim": 1, "step": 4, "detect_ms": 2.0, "stall_ms": 30.0, "survivor_ms": {"0": 30.0}},
    **{"usual_ms": 20.0, "completed": True, "equal": True, "wrong": 0, "rejoin_ms": 1500.0, "view_ms": 5.5},
    **{"resume_ms": 3.0, "bytes_resent": 1 << 20, "library": "ftcomm", "fault": "kill", "steps_lost": 0},
}


def result(**data: Any) -> Result:
    return Result("2026-11-21-x-cpu.json", {"header": HEADER, **data})


def test_the_committed_page_is_what_the_committed_results_say() -> None:
    """If this fails: ftcomm bench page"""
    assert (REPOSITORY / "docs" / "performance.md").read_text() == render(load())


def test_without_results_every_section_says_how_to_get_one() -> None:
    text = render({})
    assert text.count("Not measured yet; `") == len(SECTIONS)
    assert "Method" in text
    assert "Limits" in text


def test_an_all_reduce_with_and_without_the_new_columns() -> None:
    peer = {**ROW, "library": "gloo", "ratio": 9.5, "round_ratio": [9.0, 9.5, 10.0]}
    text = render({"allreduce": result(rows=[ROW, peer])})
    assert "| 2 | 1M | 70.0 | 90.0 | 15.00 | 52% | 9.50x (9.00 to 10.00) |" in text
    assert "performance-allreduce.png" in text
    assert "by `ftcomm bench x --ranks 2`" in text  # where it was written to is nobody's business
    old = [{k: v for k, v in row.items() if k not in ("in_place", "limit_pct", "root")} for row in (ROW, peer)]
    text = render({"allreduce": result(rows=old)})
    assert "| 2 | 1M | 70.0 | 90.0 | 15.00 | - | 9.50x (9.00 to 10.00) |" in text
    assert "performance-allreduce.png" not in text
    failed = {**peer, "error": "it crashed", "time_us_p50": None}
    assert "gloo |" not in render({"allreduce": result(rows=[ROW, failed])})


def test_each_processor_has_its_newest_results_and_the_newest_come_first(tmp_path: Path) -> None:
    for day, cpu in (("20", "Epyc"), ("21", "Xeon"), ("22", "Epyc")):
        data = {"header": {**HEADER, "cpu": cpu}, "rows": [{**ROW, "time_us_p50": float(day)}]}
        (tmp_path / f"2026-11-{day}-allreduce-cpu.json").write_text(json.dumps(data))
    text = render(load(tmp_path))
    assert "| 2 | 1M | 20.0 |" not in text
    assert (
        0 < text.index("Epyc") < text.index("| 2 | 1M | 22.0 |") < text.index("Xeon") < text.index("| 2 | 1M | 21.0 |")
    )


def test_an_all_reduce_beside_puts() -> None:
    row = {"library": "puts", "ranks": 2, "bytes": 64 << 20, "time_us": 31096.0, "rate_gbps": 2.158, "of_puts": 1.0}
    text = render({"nixl": result(nixl="1.5.1", rows=[row])})
    assert "| 2 | 64M | puts | 31096 | 2.16 | 100% |" in text
    assert "NIXL 1.5.1" in text


def test_recoveries_of_all_and_from_before_there_were_faults() -> None:
    request = {"replicas": 4, "size": 64 << 20}
    never = {**EVENT, "library": "gloo", "stall_ms": None, "view_ms": None, "bytes_resent": None, "steps_lost": 1}
    text = render({"recovery": result(request=request, events=[EVENT, EVENT, never])})
    ours = "| ftcomm | 2 x kill | 2.0, 2.0 | 5.5, 5.5 | 30.0, 30.0 | 20.0, 20.0 | 1500.0, 1500.0 | 1.0 MB | 0 of 2 |"
    assert ours in text
    assert "| gloo | 1 x kill | 2.0, 2.0 | - | never | 20.0, 20.0 | 1500.0, 1500.0 | - | 1 of 1 |" in text
    assert "performance-recovery.png" in text
    smaller = render({"recovery-16m": result(request=request, events=[EVENT])})
    assert "performance-recovery-16m.png" in smaller
    assert "performance-recovery.png" not in smaller
    new = ("view_ms", "resume_ms", "bytes_resent", "library", "fault", "steps_lost")
    old = {k: v for k, v in EVENT.items() if k not in new}
    text = render({"recovery": result(request=request, events=[old])})
    assert "| ftcomm | 1 x kill | 2.0, 2.0 | - | 30.0, 30.0 | 20.0, 20.0 | 1500.0, 1500.0 | - | 0 of 1 |" in text
    assert "performance-recovery.png" not in text


def test_a_host_that_is_cut_off_is_silent_first() -> None:
    cut = {**EVENT, "fault": "cut", "stall_ms": 5080.0, "heartbeat_ms": 5000.0, "bytes_in_flight": 3 << 20}
    text = render({"recovery-cut": result(request={"replicas": 4, "size": 64 << 20}, events=[cut])})
    assert "the silence: 5 s of it at most" in text
    assert "returned everywhere at +80 ms, p99 +80, the last at +80. Survivors sent 1.0 MB again" in text
    assert "performance-recovery.png" not in text


def test_overhead_and_parts() -> None:
    off = {"level": "off", "ranks": 2, "bytes": 1024, "time_us_p50": 9.5, "over_off_us": None, "over_off_pct": None}
    on = {**off, "level": "ftcomm", "time_us_p50": 10.0, "over_off_us": 0.5, "over_off_pct": 5.25}
    parts = [{"name": "test_wake_nobody", "stats": {"median": 1e-6, "min": 0.5e-6, "rounds": 7}}]
    text = render({"overhead": result(costs=[off, on]), "micro": result(benchmarks=parts)})
    assert "| 2 | 1K | off | 9.5 |  |  |" in text
    assert "| 2 | 1K | ftcomm | 10.0 | 0.50 | 5.2% |" in text
    assert "| wake nobody | 1.00 | 0.50 | 7 |" in text


def test_the_command_writes_page_and_pictures_of_what_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, docs = tmp_path / "results", tmp_path / "docs"
    results.mkdir()
    docs.mkdir()
    rows = [{**ROW, "bytes": size} for size in (1 << 10, 1 << 20)]
    (results / "2026-11-20-allreduce-cpu.json").write_text(json.dumps({"header": HEADER, "rows": []}))
    (results / "2026-11-21-allreduce-cpu.json").write_text(json.dumps({"header": HEADER, "rows": rows}))
    with pytest.raises(SystemExit) as ended:
        main(["bench", "page", "--results", str(results), "--docs", str(docs)])
    assert ended.value.code == 0
    assert "2026-11-21-allreduce-cpu.json" in (docs / "performance.md").read_text()  # the newest
    assert (docs / "performance-allreduce.png").exists()
    assert (docs / "performance-allreduce.svg").exists()
    with pytest.raises(SystemExit) as ended:
        main(["bench", "page", "--results", str(results), "--docs", str(docs), "--check"])
    assert ended.value.code == 0
    (docs / "performance.md").write_text("something else")
    with pytest.raises(SystemExit) as ended:
        main(["bench", "page", "--results", str(results), "--docs", str(docs), "--check"])
    assert ended.value.code == 2
    assert "make it again with: ftcomm bench page" in capsys.readouterr().err


def test_the_control_plane_with_host_agents() -> None:
    rest = {"messages_per_second": 900.0, "losses": [], "costs": []}
    request = {"replicas": 2, "ranks": 64, "hosts": 8}
    without = render({"control": result(request=request, **rest)})
    assert "machines with a real connection to their leader each, many in a process" in without
    assert "900 messages a second between light ranks and leaders." in without
    assert "have a host agent" not in without
    more = {"request": {**request, "agents": True}, "agent_messages_per_second": 30.0}
    text = render({"control": result(**rest, **more)})
    assert "machines with a real connection to their host agent or leader each, many in a process" in text
    assert "Of the 8 hosts of each replica all but that of rank 0 have a host agent, that of a real job" in text
    assert "900 messages a second between light ranks and host agents or leaders, and 30 between host agents" in text


def test_what_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "2026-11-21-kernels-h200.json").write_text("{}")
    assert load(tmp_path) == {}  # not of this page
    path = tmp_path / "2026-11-21-fleet-cpu.json"
    path.write_text("{}")
    assert load(tmp_path)["fleet"].data == {}
    path.write_text("{")
    with pytest.raises(SettingsError, match="is no JSON"):
        load(tmp_path)


def test_no_pictures_of_results_that_lack_what_they_show(tmp_path: Path) -> None:
    old = {k: v for k, v in ROW.items() if k != "in_place"}
    assert pictures({"allreduce": result(rows=[old])}, tmp_path) == []
