"""The live view without a job: who may look, what a page is told, metrics and the dashboard that asks for them."""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st

from ftcomm.cli import commands
from ftcomm.dashboard.access import TOKENS, Access, Reply
from ftcomm.dashboard.commands import serve
from ftcomm.dashboard.feed import STACKS, Changes, Feed
from ftcomm.dashboard.metrics import METRICS, MetricKind, OtelExport, prometheus_text
from ftcomm.dashboard.ranks import RankWaits, stack_lines, with_waits
from ftcomm.dashboard.report import lasting, seconds
from ftcomm.dashboard.stragglers import RankComparison, Stragglers, slowest
from ftcomm.dashboard.top import screen
from ftcomm.diagnosis.slowdown import SlowdownOfGroup, SlowdownOfRank
from ftcomm.diagnosis.stacks import Stacks
from ftcomm.errors import SettingsError
from ftcomm.launch.admin import protocol
from ftcomm.launch.listen import Listen
from ftcomm.monitoring.history import HistoryFile
from ftcomm.monitoring.job import JobMonitor, Overview
from ftcomm.process.stacks import StackFrame, ThreadStack
from ftcomm.recorder import layout
from ftcomm.recorder.layout import GroupKind
from ftcomm.recorder.recorder import Owner, Recorder

pytestmark = pytest.mark.protocol

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a-token-of-the-view"
ACCESS = Access("127.0.0.1", 8265, TOKEN)


def judge(target: str = "/", access: Access = ACCESS, **headers: str) -> Reply:
    found = {"Host": f"127.0.0.1:{access.port}"} | {name.replace("_", "-"): value for name, value in headers.items()}
    return access.judge(target, lambda name: found.get(name, "")).reply


# -- who may look ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["/", "/events", "/metrics", "/overview", "/page.js", "/nothing"])
def test_nothing_is_served_without_the_token_or_with_a_wrong_one(target: str) -> None:
    assert judge(target) is Reply.NO_TOKEN
    for wrong in ("", "x", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "é" * 9):
        assert judge(target, Authorization=f"Bearer {wrong}") is Reply.REFUSED
        assert judge(target, Cookie=f"{ACCESS.cookie}={wrong or 'x'}") in (Reply.REFUSED, Reply.NO_TOKEN)
    assert judge(target, Authorization=f"Basic {TOKEN}") is Reply.NO_TOKEN
    assert judge(target, Cookie=f"ftcomm_view_1={TOKEN}") is Reply.NO_TOKEN  # of another port
    assert judge(target, Authorization=f"Bearer {TOKEN}") is Reply.SERVED
    assert judge(target, Cookie=f"other=1; {ACCESS.cookie}={TOKEN}") is Reply.SERVED


def test_a_token_in_the_address_becomes_a_cookie_on_the_page_alone() -> None:
    assert judge(f"/?token={TOKEN}") is Reply.LOGIN
    assert judge("/?token=x") is Reply.REFUSED
    assert judge(f"/metrics?token={TOKEN}") is Reply.NO_TOKEN


@pytest.mark.parametrize("origin", ["null", "http://evil.example", "https://127.0.0.1:8265", "http://127.0.0.1:1"])
def test_another_origin_is_refused_with_the_token_too(origin: str) -> None:
    assert judge("/events", Origin=origin, Authorization=f"Bearer {TOKEN}") is Reply.REFUSED
    assert judge(f"/?token={TOKEN}", Origin=origin) is Reply.REFUSED


def test_its_own_origin_is_served_and_other_names_are_not() -> None:
    mine = {"Authorization": f"Bearer {TOKEN}"}
    assert judge("/events", Origin="http://127.0.0.1:8265", **mine) is Reply.SERVED
    assert judge(Host="localhost:8265", Origin="http://localhost:8265", **mine) is Reply.SERVED
    for name in ("evil.example:8265", "127.0.0.1", "127.0.0.1:80", ""):
        assert judge(Host=name, **mine) is Reply.REFUSED, name
    everywhere = Access("0.0.0.0", 8265, TOKEN)
    assert judge(access=everywhere, Host="node7:8265", **mine) is Reply.SERVED
    assert judge(access=everywhere, Host="node7:8265", Origin="http://evil.example", **mine) is Reply.REFUSED


@given(st.text(max_size=60), st.dictionaries(st.sampled_from(("Host", "Origin", "Cookie", "Authorization")), st.text()))
@example("/[", {"Host": "127.0.0.1:8265"})  # once it ended the connection without an answer
def test_no_request_without_the_token_is_served(target: str, headers: dict[str, str]) -> None:
    reply = ACCESS.judge("/" + target, lambda name: headers.get(name, "")).reply
    assert reply in (Reply.NO_TOKEN, Reply.REFUSED)


def test_a_browser_names_no_port_where_it_is_that_of_http() -> None:
    mine = {"Authorization": f"Bearer {TOKEN}"}
    usual = Access("127.0.0.1", 80, TOKEN)
    assert judge(access=usual, Host="localhost", Origin="http://localhost", **mine) is Reply.SERVED
    assert judge(access=usual, Host="evil.example", **mine) is Reply.REFUSED


@given(st.from_regex(TOKENS, fullmatch=True))
@example("base64+of/16+bytes==")
def test_a_token_goes_through_the_address_and_the_cookie(token: str) -> None:
    access = Access("127.0.0.1", 8265, token)
    assert judge(f"/?token={token}", access) is Reply.LOGIN
    assert judge("/events", access, Cookie=f"theme=dark; {access.cookie}={token}") is Reply.SERVED


@pytest.mark.parametrize(
    "token", ["short", "a token with a blank in it", "sixteen-or-more;Path=/x", "ganz-geheim-é-é-é-é"]
)
def test_a_token_that_no_cookie_can_carry_is_refused_with_the_mend(
    token: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FTCOMM_DASHBOARD_TOKEN", token)
    with pytest.raises(SettingsError, match="openssl rand -hex 16") as refused:
        serve(tmp_path / "control", "127.0.0.1", 0)
    assert token not in str(refused.value)


def test_the_token_is_in_no_repr() -> None:
    assert TOKEN not in repr(ACCESS) + str(ACCESS)


def test_addresses() -> None:
    assert Listen.parse("8265") == ("127.0.0.1", 8265)
    assert Listen.parse("10.0.0.1:0") == ("10.0.0.1", 0)
    assert Listen.parse("[::1]:1") == ("::1", 1)
    for wrong in ("", "x", "host:", "1:99999", ":-1"):
        with pytest.raises(SettingsError, match="HOST:PORT"):
            Listen.parse(wrong)


# -- what is shown -----------------------------------------------------------------------------------------------------


def told(job: JobMonitor, kind: str, at: float, text: str = "", **fields: Any) -> None:
    job.event({"kind": kind, "mono": at, "time": at + 1000, **fields}, text or None)


def some_job() -> JobMonitor:
    """Two replicas, of which one was killed and is back."""
    job = JobMonitor("a1b2", "train.py", 2, 1, lambda replica: f"host{replica}")
    both = [{"replica": 0, "contributing": True}, {"replica": 1, "contributing": True}]
    for replica in (0, 1):
        told(job, "process_started", 0.0, replica=replica, shard=0, pid=replica + 1)
    told(job, "view", 1.0, "view 1", epoch=1, step=0, members=both, why="")
    told(job, "report", 5.0, replica=0, step=40)
    job.sample(5.0, {0: 40, 1: 40})
    told(
        job,
        "process_exited",
        6.0,
        "killed",
        replica=1,
        shard=0,
        pid=2,
        code=None,
        signal="SIGKILL",
        lines=["<b>hi</b>"],
    )
    told(job, "view", 6.0, "view 2", epoch=2, step=None, members=both[:1], why="lost 1")
    job.sample(6.0, {0: 50})
    told(job, "process_started", 8.0, replica=1, shard=0, pid=3)
    told(job, "view", 9.0, "view 3", epoch=3, step=60, members=both, why="")
    return job


def test_a_page_is_told_only_what_has_changed() -> None:
    job, page = some_job(), Changes()
    first = json.loads(page.of(job.overview(1010.0, 10.0)))
    assert set(first) == set(Overview.__struct_fields__)
    assert msgspec.convert(first, Overview) == job.overview(1010.0, 10.0)
    again = json.loads(page.of(job.overview(1010.0, 10.0)))
    assert again == {}
    job.sample(11.0, {0: 61})
    later = json.loads(page.of(job.overview(1011.0, 11.0)))
    assert later["points"] == [[11.0, 61, 2]]
    assert later["step"] == 61
    assert not {"run", "newest", "events"} & set(later)


def test_the_curves_go_on_though_somebody_sets_the_clock_back() -> None:
    job, page = some_job(), Changes()
    page.of(job.overview(1010.0, 10.0))
    job.sample(11.0, {0: 61})
    seen = job.overview(1011.0 - 3600, 11.0)
    later = json.loads(page.of(seen))
    assert later["points"] == [[11.0, 61, 2]]
    assert seen.rate == pytest.approx((61 - 40) / (11.0 - 5.0), abs=1e-3)
    assert job.record(1011.0 - 3600, 11.0).hosts == {"host0": 6.0, "host1": 6.0}


def test_an_overview_of_many_replicas_fits_the_admin_socket() -> None:
    """One that does not ends the view: its reader takes the job for ended."""
    job = JobMonitor("run", "train.py", 1024, 96, lambda replica: f"a-host-with-a-long-name-{replica}.example")
    for replica in range(1024):
        job.waits(replica, [86_400.0] * 96)
    for number in range(100):
        told(job, "removed", float(number), "x" * 300, replica=number, reason="y" * 300)
    told(job, "view", 100.0, epoch=1, members=[{"replica": r, "contributing": True} for r in range(512)])
    seen = job.overview(1e9, 100.0)
    assert len(protocol.encode(protocol.OverviewAnswer(seen))) < protocol.MAX_ANSWER // 2
    assert [len(row.cells) for row in seen.rows] == [4] * 1024
    assert seen.ranks_per_cell == 24


def test_an_overview_survives_the_admin_socket() -> None:
    job = some_job().overview(1010.0, 10.0)
    line = protocol.encode(protocol.OverviewAnswer(job))
    assert protocol.decode_answer(line.rstrip()) == protocol.OverviewAnswer(job)
    assert isinstance(protocol.decode_request(b'{"ask":"overview"}'), protocol.GetOverview)


def test_the_screen_of_a_terminal() -> None:
    from rich.console import Console

    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(screen(some_job().overview(1010.0, 10.0), 40))
    text = console.export_text()
    for said in ("train.py", "a1b2", "2 of 2", "killed by SIGKILL", "view 3", "host1"):
        assert said in text


def test_why_a_job_stands_still_is_shown_until_it_goes_on() -> None:
    from rich.console import Console

    job = some_job()

    def seen() -> tuple[bool | None, str]:
        overview = job.overview(1010.0, 10.0)
        told = overview.told
        line = protocol.encode(protocol.OverviewAnswer(overview))
        assert protocol.decode_answer(line.rstrip()) == protocol.OverviewAnswer(overview)
        console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        console.print(screen(overview, 40))
        return (None if told is None else told.over), console.export_text()

    assert seen()[0] is None
    many = [[1, 0]] * 10_000
    verdict = {"cause": "own code", "culprits": many, "who": "Replica 1 is in \x1b[2Jits own code." + "x" * 99_999}
    told(job, "diagnosis", 9.0, verdict=verdict)
    over, text = seen()
    assert over is False
    assert "why: Replica 1 is in its own code." in text
    job.sample(9.5, {0: job.step})
    assert seen()[0] is False, "no step was made"

    def waiting(seconds: float) -> bool:
        shown = with_waits(job.overview(1010.0, 10.0), {(0, 0): 0.01, (1, 0): seconds}).told
        assert shown is not None
        return shown.over

    since = 1010.0 - job.overview(1010.0, 10.0).told.at  # type: ignore[union-attr]
    assert waiting(since + 4) is False
    assert waiting(0.5) is True, "it waits for something else"
    job.sample(9.6, {0: job.step + 1})
    over, text = seen()
    assert over is True
    assert "why: " not in text


def test_a_step_of_other_ranks_says_nothing_of_a_verdict_but_a_removal_does() -> None:
    job = JobMonitor("a1b2", "train.py", 2, 2)
    both = [{"replica": replica, "contributing": True} for replica in (0, 1)]
    told(job, "view", 1.0, epoch=1, step=0, members=both, why="")
    told(job, "diagnosis", 9.0, verdict={"cause": "own code", "culprits": [[1, 1]], "who": "It is in its own code."})
    job.sample(9.6, {0: 7, 1: 7})
    assert job.overview(1010.0, 10.0).told.over is False  # type: ignore[union-attr]
    told(job, "view", 11.0, epoch=2, step=None, members=both[:1], why="lost 1")
    assert job.overview(1010.0, 12.0).told.over is True  # type: ignore[union-attr]


# -- one rank ----------------------------------------------------------------------------------------------------------


def test_of_the_ranks_of_a_cell_the_one_that_waits_longest_is_told(tmp_path: Path) -> None:
    waits = RankWaits(tmp_path / "control")
    assert waits.longest(0, 24, 24) == 24
    waits._last = {(0, 23): 99.0, (0, 30): 1.0, (0, 40): 7.0, (1, 31): 50.0, (0, 48): 99.0}
    assert waits.longest(0, 24, 24) == 40


def test_no_more_ranks_are_asked_for_their_stacks_at_once_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs a thread of the page, and seconds if the rank holds its interpreter."""
    overview = JobMonitor("a1b2", "train.py", 8, 1).overview(0.0, 0.0)
    begun, go_on = threading.Semaphore(0), threading.Event()

    def slow(self: RankWaits, replica: int, rank: int) -> list[str]:
        begun.release()
        assert go_on.wait(60)
        return [f"of {replica}"]

    monkeypatch.setattr(Feed, "_ask", lambda self: overview)
    monkeypatch.setattr(RankWaits, "stack", slow)
    feed = Feed(tmp_path / "control")
    with ThreadPoolExecutor(STACKS) as pool:
        asked = [pool.submit(feed.stack, replica, 0) for replica in range(STACKS)]
        for _ in asked:
            assert begun.acquire(timeout=60)
        more = threading.Timer(20.0, go_on.set)  # so that one too many ends, too
        more.start()
        refused = feed.stack(STACKS, 0)
        more.cancel()
        go_on.set()
    assert refused == [f"{STACKS} ranks are being asked for their stacks already; try again in a moment"]
    assert [done.result() for done in asked] == [[f"of {replica}"] for replica in range(STACKS)]
    assert feed.stack(STACKS, 0) == [f"of {STACKS}"], "the others have been answered"
    feed.close(0.0)


def test_stacks_in_lines() -> None:
    frames = StackFrame("/x/train.py", 7, "load"), StackFrame("/x/train.py", 30, "main")
    found = Stacks(
        (ThreadStack(1, "MainThread", frames), ThreadStack(2, "", ())), native="from py-spy\n", missing="no more"
    )
    assert stack_lines(found) == [
        *("thread MainThread", f"    {frames[0]}", f"    {frames[1]}", "thread 2"),
        *("by py-spy", "from py-spy", "no more"),
    ]


# -- stragglers --------------------------------------------------------------------------------------------------------


def rank_slowdown(replica: int, share: float, named: str = "") -> SlowdownOfRank:
    return SlowdownOfRank((replica, 0), "n1", "", 100, 1.0, share, 0.0, named)


def test_the_slowest_of_all_groups_come_first_and_are_few() -> None:
    groups = [
        SlowdownOfGroup("job", 100, 1.0, tuple(rank_slowdown(r, r / 100) for r in range(10)), (), ()),
        SlowdownOfGroup("job, shard 1", 100, 1.0, (rank_slowdown(77, 0.01, "compute"),), (), ()),
    ]
    assert [one.rank[0] for one in slowest(groups)] == [77, 9, 8, 7, 6, 5, 4, 3]


def recorded(folder: Path, replica: int, rank: int, ops: int = 100) -> Path:
    """A recording of this process, of all-reduces of 1 ms in seconds of their own."""
    path = folder / f"replica-{replica}.shard-{rank}.pid-{os.getpid()}.recording"
    with open(path, "w+b") as file:
        file.truncate(layout.PROCESS_SHAPE.size)
        recorder = Recorder(mmap.mmap(file.fileno(), layout.PROCESS_SHAPE.size), layout.PROCESS_SHAPE)
    recorder.describe(Owner(replica, rank, 2, 2, "job", "here"))
    group = recorder.group("job", 0, GroupKind.JOB)
    began = time.monotonic()
    for number in range(1, ops + 1):
        group.called(op := RecordedCall(number), began + number)
        group.returned(op, began + number + 0.001)
    return path


@dataclasses.dataclass
class RecordedCall:
    place: int
    call: int = 1000 << 16 | 2 << 8  # an all-reduce of 1000 floats
    detail: int = 0
    caller: int = 0
    record: int = 0


def test_one_index_after_the_other_is_compared(tmp_path: Path) -> None:
    comparison = RankComparison(tmp_path)
    assert comparison.go_on(7.0) == Stragglers()
    paths = [recorded(tmp_path, replica, rank) for replica in range(2) for rank in range(2)]
    told = [comparison.go_on(7.0) for _ in range(3)]
    assert [{one.rank for one in each.slowest} for each in told] == [
        {(0, 0), (1, 0)},
        *[{(0, 0), (0, 1), (1, 0), (1, 1)}] * 2,
    ]
    assert [(each.compared, each.compared_at) for each in told] == [(2, 7.0), (4, 7.0), (4, 7.0)]
    assert all(one.slowdown == pytest.approx(1.0, abs=0.01) and not one.named for one in told[-1].slowest)
    for path in paths[1::2]:
        path.unlink()
    assert [comparison.go_on(7.0).compared for _ in range(2)] == [2, 2]


# -- metrics -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def scraped() -> str:
    return prometheus_text(some_job().overview(1010.0, 10.0)).decode()


def test_metrics_follow_the_conventions_and_have_values(scraped: str) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    families = {family.name: family for family in text_string_to_metric_families(scraped)}
    assert set(families) == {metric.name for metric in METRICS}
    for metric in METRICS:
        assert re.fullmatch(r"ftcomm_[a-z_]+", metric.name)
        assert not metric.name.endswith(("_total", "_ms", "_count"))
        assert ("seconds" in metric.name) == (metric.unit == "s")
        assert families[metric.name].documentation == metric.help
        assert families[metric.name].samples, metric.name
    values = {
        (sample.name, *sorted(sample.labels.values())): sample.value for x in families.values() for sample in x.samples
    }
    assert values["ftcomm_interruptions_total", "signal"] == 1
    assert values["ftcomm_interruption_gpu_seconds_total", "absence", "signal"] == pytest.approx(3.0)
    assert values["ftcomm_replicas", "training"] == 2
    assert values["ftcomm_steps_total",] == 51


def test_each_query_of_the_dashboard_names_a_metric_that_exists() -> None:
    dashboard = json.loads((ROOT / "examples" / "monitoring" / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [each["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    used = {name for query in queries for name in re.findall(r"ftcomm_\w+", query)}
    assert len(queries) > 10
    known = {f"{each.name}_total" if each.kind is MetricKind.COUNTER else each.name: each for each in METRICS}
    assert used <= set(known), used - set(known)
    for query in queries:  # a rate of what does not only grow says nothing
        for name in re.findall(r"(?:rate|increase)\((ftcomm_\w+)", query):
            assert known[name].kind is MetricKind.COUNTER, query
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def test_opentelemetry_gets_the_same() -> None:
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    export = OtelExport("http://localhost:1/v1/metrics", lambda: some_job().overview(1010.0, 10.0), 60.0, reader)
    data = json.loads(reader.get_metrics_data().to_json())  # type: ignore[union-attr]
    export.close()
    [resource] = data["resource_metrics"]
    assert resource["resource"]["attributes"]["service.instance.id"] == "a1b2"
    metrics = {each["name"]: each for each in resource["scope_metrics"][0]["metrics"]}
    assert set(metrics) == {metric.otel for metric in METRICS}
    assert metrics["ftcomm.gpu_time"]["unit"] == "s"
    [point] = metrics["ftcomm.interruptions"]["data"]["data_points"]
    assert (point["attributes"], point["value"]) == ({"cause": "signal"}, 1)


# -- the report --------------------------------------------------------------------------------------------------------


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., Any]:
    path = tmp_path / "history.sqlite"
    job = some_job()
    history = HistoryFile(path)
    history.put(job.record(1010.0, 10.0), job.interruptions.listed(10.0))
    history.close()
    return lambda *args: CliRunner().invoke(commands, ["report", "--history", str(path), *args])


def test_the_report_says_what_it_cost(report: Callable[..., Any], tmp_path: Path) -> None:
    said = report("--list", "--plot", str(tmp_path / "report.png"))
    assert said.exit_code == 0, said.output
    for text in ("1 job", "1 unplanned interruption", "Killed from outside", "killed by SIGKILL", "host1", "absence"):
        assert text in said.output
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads(report("--json", "--job", "a1").output)
    assert found["statistics"]["causes"] == {"signal": 1}
    assert found["statistics"]["effective"] == pytest.approx(15 / 18)
    for args in (["--job", "zz"], ["--since", "soon"]):
        refused = report(*args)
        assert isinstance(refused.exception, SettingsError)
    assert json.loads(report("--json", "--since", "1h").output)["jobs"] == []  # it was in 1970


def test_times_as_text() -> None:
    assert [seconds(text) for text in ("90m", "2h", "1.5d", "1w")] == [5400, 7200, 129600, 604800]
    assert [lasting(value) for value in (0.5, 185.0, 90000.0)] == ["0.50 s", "03:05", "1 day, 1:00:00"]
