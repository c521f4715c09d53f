"""What `ftcomm chaos` draws, and what it makes of events: no job, no clock."""

from __future__ import annotations

import json
import random
import re
import threading
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from ftcomm.control.store import ViewStore
from ftcomm.control.views import View
from ftcomm.errors import FtcommError, SettingsError
from ftcomm.lab.chaos import process_faults, run
from ftcomm.lab.chaos.cli import chaos
from ftcomm.lab.chaos.leaks import LIMITS, Leaks, Sample, slope
from ftcomm.lab.chaos.plan import COORDINATOR, KINDS, LOCAL, REMOVES_NOBODY, Fault, Plan
from ftcomm.lab.chaos.record import FaultLedger
from ftcomm.lab.chaos.report import as_dict, percentile, rows, show, write
from ftcomm.lab.chaos.run import ChaosOptions, ChaosOutcome, possible
from ftcomm.launch.admin import protocol
from ftcomm.launch.commands import confirmation
from ftcomm.launch.commands.confirmation import confirm

# -- the plan --------------------------------------------------------------------------------------------------------


@given(st.integers(), st.sets(st.integers(0, 5)), st.booleans(), st.integers(1, 3))
def test_somebody_is_always_left_alone(seed: int, untouched: set[int], away: bool, ranks: int) -> None:
    plan = Plan(KINDS, ranks, seed, cables=True)
    for _ in range(20):
        fault = plan.next(untouched, away)
        if fault is None:
            assert len(untouched) < 2
            return
        assert set(fault.replicas) <= untouched
        assert fault.kind in REMOVES_NOBODY or untouched - set(fault.replicas)
        assert not (away and fault.kind in ("coordinator", "coordinator-stop", "roll-back", "cut-off"))
        assert set(fault.ranks) <= set(range(ranks))
        assert str(fault)


def test_the_same_seed_draws_the_same_faults_and_all_kinds_come_equally_often() -> None:
    count = 10 * len(KINDS)
    drawn = [[plan.next({0, 1, 2, 3}, False) for _ in range(count)] for plan in (Plan(KINDS, 2, 7), Plan(KINDS, 2, 7))]
    assert drawn[0] == drawn[1]
    assert drawn[0] != [Plan(KINDS, 2, 8).next({0, 1, 2, 3}, False) for _ in range(count)]
    kinds = [fault.kind for fault in drawn[0] if fault is not None]
    assert {kind: kinds.count(kind) for kind in KINDS} == dict.fromkeys(KINDS, 10)


# -- the ledger ------------------------------------------------------------------------------------------------------


def view(at: float, epoch: int, contributing: set[int], catching_up: frozenset[int] = frozenset()) -> dict[str, Any]:
    members = [{"replica": x, "contributing": x in contributing} for x in sorted(contributing | catching_up)]
    return {"kind": "view", "mono": at, "epoch": epoch, "members": members, "why": "", "step": None}


def step(at: float, replica: int, number: int) -> dict[str, Any]:
    return {"kind": "report", "mono": at, "replica": replica, "step": number}


def ledger(replicas: int = 3) -> FaultLedger:
    made = FaultLedger(replicas)
    made.started(frozenset(range(replicas)))
    return made


def test_a_kill_from_injection_to_the_return() -> None:
    book = ledger()
    book.feed(step(9.9, 0, 1))
    book.feed(step(9.9, 1, 1))
    record = book.add(Fault(1, "kill", (1,), (0,)), 10.0)
    book.healed(record, 10.0)
    assert not book.whole
    assert record.closed is None, "it still counts in the view, but must go first"
    book.feed({"kind": "suspect", "mono": 10.25, "replica": 1, "reason": ""})
    book.feed(view(10.5, 2, {0, 2}))
    book.feed({"kind": "resumed", "mono": 10.6, "replica": 0, "epoch": 2, "resume_ms": 100.0})
    book.feed({"kind": "resumed", "mono": 10.7, "replica": 2, "epoch": 2, "resume_ms": 150.0})
    book.feed({"kind": "resumed", "mono": 10.7, "replica": 2, "epoch": 1, "resume_ms": 9000.0})
    book.feed(step(10.65, 0, 2))
    book.feed({"kind": "restarting", "mono": 10.8, "replica": 1})
    book.feed(view(12.0, 3, {0, 2}, frozenset({1})))
    assert record.closed is None
    book.feed(view(13.0, 4, {0, 1, 2}))
    assert (record.detection, record.stall, record.restarts, record.closed) == (0.25, pytest.approx(0.65), 1, 13.0)
    assert record.gap == pytest.approx(0.75)
    assert book.whole
    assert not book.innocent


def test_a_replica_that_was_removed_has_the_time_of_a_start_to_come_back() -> None:
    book = ledger()
    stop = book.add(Fault(1, "stop", (1,), (0,)), 10.0)
    assert book.stuck(71.0, 60.0, 120.0) == [stop]
    book.feed(view(20.0, 2, {0, 2}))
    assert (book.stuck(189.0, 60.0, 120.0), book.stuck(191.0, 60.0, 120.0)) == ([], [stop])
    book.healed(stop, 191.0)
    book.feed(view(192.0, 3, {0, 1, 2}))
    assert not book.stuck(1000.0, 60.0, 120.0)


def test_a_gap_of_a_replica_that_another_fault_hit_does_not_count() -> None:
    book = ledger()
    book.feed(step(10.0, 0, 1))
    slow = book.add(Fault(1, "slow", (1,), (0,), 2.0), 10.0)
    book.add(Fault(2, "kill", (0,), (0,)), 10.1)
    book.feed(view(10.2, 2, {1, 2}))
    book.feed(view(19.0, 3, {0, 1, 2}))
    book.feed(step(19.5, 0, 90))
    assert slow.gap == 0.0
    book.feed(step(19.6, 2, 91))
    book.feed(step(19.9, 2, 92))
    assert slow.gap == pytest.approx(0.3)


def test_who_is_removed_without_a_fault_is_named() -> None:
    book = ledger()
    record = book.add(Fault(1, "slow", (0,), (0,), 2.0), 10.0)
    book.feed(view(11.0, 2, {0, 1}))
    assert [event["innocent"] for event in book.innocent] == [[2]]
    assert record.detected is None
    book.healed(record, 12.0)
    assert record.closed == 12.0, "it contributes, and was never removed"
    assert not book.whole


@pytest.mark.parametrize("kind", REMOVES_NOBODY)
def test_who_is_removed_by_what_removes_nobody_is_innocent_though_it_was_hit(kind: str) -> None:
    book = ledger()
    book.add(Fault(1, kind, (0, 1, 2) if kind in ("hold", "fork") else ()), 10.0)
    book.feed(view(11.0, 2, {0, 1}))
    assert [event["innocent"] for event in book.innocent] == [[2]]


def test_the_return_of_the_coordinator_closes_its_fault() -> None:
    book = ledger()
    record = book.add(Fault(1, "coordinator", seconds=1.0), 10.0)
    book.feed({"kind": "coordinator_stopped", "mono": 10.0})
    assert book.open == [record]
    assert book.add(Fault(2, "kill", (0,), (0,)), 10.5).overlapped
    book.feed({"kind": "coordinator_started", "mono": 11.0})
    assert record.closed == 11.0


class Coordinator:
    """Has its store locked, and goes and comes as a launcher makes it."""

    def __init__(self, path: Path) -> None:
        self._path, self.restarts = path, 0
        self.busy = 2  # requests that find another restart under way
        self.decides = False
        self._start()

    def _start(self) -> None:
        self._store = ViewStore(self._path)
        self._store.open()
        self.views = [view.epoch for view in self._store.views]
        if self.decides:
            self._store.append(View(9, None, ()))

    def restart(self, away: float) -> None:
        if self.busy:
            self.busy -= 1
            raise FtcommError("the coordinator is being restarted already")
        self.restarts += 1
        self._store.close()
        self.back = threading.Timer(away, self._start)
        self.back.start()

    def end(self) -> None:
        self.back.join()
        self._store.close()


@pytest.mark.parametrize(("views", "left", "decides"), [(2, [1, 2], False), (2, [1, 2], True), (5, [1], False)])
def test_a_store_is_rolled_back_while_nobody_has_it_and_put_right_again(
    views: int, left: list[int], decides: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_faults, "AWAY", 0.5)
    store = ViewStore(tmp_path / "views")
    store.open()
    for epoch in range(1, 5):
        store.append(View(epoch, None, ()))
    store.close()
    right = (tmp_path / "views").read_bytes()
    coordinator = Coordinator(tmp_path / "views")
    decided: list[bool] = []
    older = process_faults.RolledBack(tmp_path / "views", views, coordinator.restart, lambda: decided.append(True))
    coordinator.decides = decides
    coordinator.back.join()
    assert coordinator.views == left
    coordinator.decides = False
    older.close()
    coordinator.end()
    older.close()
    assert coordinator.restarts == 2
    assert coordinator.views == [3, 4]
    assert (tmp_path / "views").read_bytes() == right
    assert decided == [True] * decides


def test_a_cut_between_two_is_closed_when_both_contribute() -> None:
    book = ledger()
    record = book.add(Fault(1, "partition", (0, 1), (0,), 1.0, other=1), 10.0)
    book.feed(view(12.0, 2, {0, 2}))
    book.healed(record, 13.0)
    assert record.closed is None
    book.feed(view(15.0, 3, {0, 1, 2}))
    assert (record.removed, record.closed) == ({1: 2}, 15.0)


# -- leaks -----------------------------------------------------------------------------------------------------------


def histories(seed: int, fds: float) -> list[list[Sample]]:
    """Twenty processes of a minute each, with noise and their own levels; `fds` leak a minute."""
    draw = random.Random(seed)
    made = []
    for number in range(20):
        level = draw.randrange(10, 20)
        made.append(
            [
                Sample(60.0 * number + t, int(level + fds * t / 60 + draw.randrange(3)), 5, 3, 100 + draw.random())
                for t in range(0, 60, 2)
            ]
        )
    return made


def test_growth_is_found_over_many_short_lives_and_noise_is_not() -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    for fds, leaks in ((0.0, False), (10.0, True)):
        found = slope(histories(seed, fds), "fds")
        assert found.leaks(LIMITS["fds"]) is leaks, (seed, fds, found)
    assert not slope(histories(seed, 0.0), "memory").leaks(LIMITS["memory"]), seed


def test_this_process_can_be_looked_at() -> None:
    import os

    leaks = Leaks()
    for now in range(100):
        leaks.sample(os.getpid(), [os.getpid(), 2**22 + 1], float(now))
    assert leaks.ranks.keys() == {os.getpid()}
    sample = leaks.launcher[0]
    assert sample.fds >= 3
    assert sample.threads >= 1
    assert sample.memory > 5


# -- the report ------------------------------------------------------------------------------------------------------


def outcome() -> ChaosOutcome:
    replicas = [protocol.ReplicaStatus(x, "running", 1, {"0": 1}, True, True, 5, "127.0.0.1") for x in range(3)]
    status = protocol.Status("run", 1, "x.py", 1, False, "127.0.0.1:1", False, 1, "auto", 2.0, 24.0, replicas)
    book = ledger()
    for number in range(100):
        record = book.add(Fault(number + 1, "kill", (1,), (0,)), 10.0 * number)
        book.feed(view(10.0 * number + (number + 1) / 1000, 2 * number + 2, {0, 2}))
        book.healed(record, 10.0 * number)
        book.feed(view(10.0 * number + 5, 2 * number + 3, {0, 1, 2}))
    return ChaosOutcome(ChaosOptions(5.0, 60.0, ("kill",), 1), status, book, Leaks(), seconds=1000.0)


@pytest.mark.parametrize(("transport", "shared"), [("auto", True), ("shm", True), ("tcp", False)])
def test_who_cuts_a_network_is_told_what_does_not_go_by_it(transport: str, shared: bool) -> None:
    said: list[str] = []
    status = msgspec.structs.replace(outcome().status, transport=transport, network="/run/netns/hub")
    assert possible(status, ("partition",), said.append) == ("partition",)
    assert ["start the job with --transport tcp" in text for text in said] == [True] * shared


def test_a_replica_that_is_no_member_yet_is_not_asked_whether_it_listens_to_signals() -> None:
    status = outcome().status  # of processes that have no handler
    starting = [msgspec.structs.replace(replica, member=False) for replica in status.replicas]
    with pytest.raises(FtcommError, match="does not listen"):
        possible(status, ("hold",), lambda text: None)
    assert possible(msgspec.structs.replace(status, replicas=starting), ("hold",), lambda text: None) == ("hold",)


def test_chaos_waits_for_a_job_that_is_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    status = outcome().status
    answers = [msgspec.structs.replace(status, epoch=0)] * 3 + [status]
    monkeypatch.setattr(run, "TICK", 0.0)
    assert run.when_formed(lambda: answers.pop(0)) is status
    monkeypatch.setattr(run, "STARTED", 0.0)
    with pytest.raises(FtcommError, match="have not met within 0 s; ask `ftcomm why`"):
        run.when_formed(lambda: msgspec.structs.replace(status, epoch=0))


def test_the_report_of_a_hundred_kills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    made = outcome()
    kill, everything = rows(made.ledger.records)
    assert (kill.kind, everything.kind) == ("kill", "all")
    assert (kill.faults, kill.over, kill.removed) == (100, 100, 100)
    assert kill.detection == pytest.approx((0.05, 0.099))
    show(made, Console(width=140))
    assert "50 / 99" in capsys.readouterr().out
    write(made, tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["kinds"][0]["faults"] == 100
    assert as_dict(made)["faults"][3]["what"] == "kill replica 1 shard 0"
    with pytest.raises(SettingsError, match=r"absent/report\.json: No such file or directory; choose"):
        write(made, tmp_path / "absent" / "report.json")


def test_a_step_is_timed_by_its_rank_though_the_news_of_it_waits_for_a_coordinator() -> None:
    book = ledger()
    for at in (9.0, 10.0):
        book.feed({**step(at, 0, int(at)), "at": at})
    record = book.add(Fault(1, "coordinator", seconds=3.0), 10.5)
    book.feed({"kind": "coordinator_started", "mono": 14.0})
    for at in (11.0, 12.0, 13.0):
        book.feed({**step(14.1, 0, int(at)), "at": at})
    assert record.gap == pytest.approx(1.0)


def test_reports_that_got_lost_are_no_long_step() -> None:
    """A rank keeps so many while the coordinator is cut off, and no more."""
    book = ledger()
    record = book.add(Fault(1, "cut-off", seconds=3.0), 10.0)
    for at, number in ((10.5, 7), (10.75, 8), (40.75, 128), (41.5, 129)):
        book.feed({**step(41.5, 0, number), "at": at})
    assert record.gap == pytest.approx(0.75)


def test_no_leak_is_claimed_where_too_little_was_seen(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    made = outcome()
    show(made, Console(width=140))
    said = capsys.readouterr().out
    assert "leaks: too short to tell (0 of 30 samples of ranks; 0 of 30 samples of the launcher" in said
    assert "no leak" not in said
    assert as_dict(made)["leaks_unsure"]
    made.leaks.ranks = dict(enumerate(histories(1, 0.0)))
    made.leaks.launcher = [Sample(float(t), 10, 5, 3, 100.0) for t in range(0, 200, 2)]
    show(made, Console(width=140))
    said = capsys.readouterr().out
    assert "no hang, no divergence reported, no leak" in said
    assert "too short" not in said


def test_the_timeline_is_drawn(tmp_path: Path) -> None:
    from ftcomm.lab.chaos.timeline import draw

    draw(outcome(), tmp_path / "chaos.png")
    assert (tmp_path / "chaos.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SettingsError, match=r"choose a file as in chaos\.png"):
        draw(outcome(), tmp_path / "chaos.unknown")


def test_percentiles_are_values_that_occurred() -> None:
    assert percentile([3.0], 0.99) == 3.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.99) == 4.0


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--every", "soon"], "'soon': expected a time above 0, as in 5s, 10m or 1h"),
        (["--every", "0s"], "expected a time above 0"),
        (["--for", "-5m"], "expected a time above 0"),
        (["--kinds", "kill,flood"], "'flood' is not one of 'kill', 'stop',"),
        (["--overlap", "1.5"], "1.5 is not in the range"),
    ],
)
def test_the_command_says_what_cannot_work(argv: list[str], said: str) -> None:
    result = CliRunner().invoke(chaos, argv)
    assert result.exit_code == 2
    assert said in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("terminal", "named", "yes", "answer", "said"),
    [
        (True, False, False, "y\n", None),
        (True, True, False, "y\n", None),
        (True, False, False, "\n", "nothing was done"),
        (True, True, False, "n\n", "nothing was done"),
        (True, False, True, "", None),
        (False, False, True, "", None),
        (False, True, False, "", None),
        (False, False, False, "", r"Hit it\? There is no terminal to ask at.* type: ftcomm chaos --job run, or --yes"),
    ],
)
def test_what_is_done_to_all_of_a_job_is_asked_first(
    terminal: bool, named: bool, yes: bool, answer: str, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confirmation, "at_terminal", lambda: terminal)

    @click.command()
    def command() -> None:
        confirm(outcome().status, "Hit it", "ftcomm chaos", named=named, yes=yes)

    result = CliRunner().invoke(command, input=answer)
    assert "job run: x.py, 3 replicas, at step 5" in result.output
    assert ("Hit it? [y/N]" in result.output) is (terminal and not yes)
    if said is None:
        assert result.exit_code == 0, result.output
    else:
        assert isinstance(result.exception, SettingsError)
        assert re.search(said, str(result.exception)), result.exception


def test_a_fault_says_what_it_is() -> None:
    assert str(Fault(1, "partition", (2,), other=None)) == "cut replica 2 from everybody"
    assert str(Fault(1, "oneway", (2,), other=COORDINATOR, outgoing=False)) == (
        "cut replica 2 from the coordinator, one way"
    )
    assert str(Fault(1, "fork", (2,), (1,))) == "fork replica 2 shard 1"
    assert str(Fault(1, "orphan", (2,), (1,))) == "kill replica 2 shard 1, whose forked children live on"
    assert str(Fault(1, "hold", (0, 2), seconds=1.5)) == "hold the interpreters of replicas 0, 2"
    cut = Fault(1, "cut-off", seconds=2.0, other=COORDINATOR, outgoing=False)
    assert str(cut) == "cut the coordinator from everybody for 2.0 heartbeats, one way: it hears nobody"
    assert str(Fault(1, "stop", (0,), (0, 1))) == "stop replica 0 shards 0, 1"
    assert "coordinator" in LOCAL
