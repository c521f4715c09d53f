"""Interruptions: their causes, what they cost, and the history that outlives a job. Pure, but for a file in SQLite."""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import sqlite3
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftcomm.control.script_end import ScriptEnd
from ftcomm.errors import SettingsError
from ftcomm.monitoring import interruptions
from ftcomm.monitoring.causes import Evidence, Kind, classify, last_error
from ftcomm.monitoring.evidence import killed_in, kills_counted, without
from ftcomm.monitoring.gpu_time import OVER, PRICED, GpuTime, Use
from ftcomm.monitoring.history import HistoryFile, HistoryWriter, JobRecord
from ftcomm.monitoring.history_path import default_path
from ftcomm.monitoring.interruptions import Interruption, Interruptions
from ftcomm.monitoring.job import CELLS, GONE, JobMonitor
from ftcomm.monitoring.plain import plain
from ftcomm.monitoring.statistics import binomial_tail, statistics

pytestmark = pytest.mark.protocol

RANKS = 2


# -- causes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("evidence", "kind", "says"),
    [
        (Evidence(signal="SIGKILL"), Kind.SIGNAL, "killed by SIGKILL"),
        (Evidence(signal="SIGSEGV"), Kind.SIGNAL, "crashed with SIGSEGV"),
        (Evidence(signal="SIGKILL", killed_by_kernel=True), Kind.OUT_OF_MEMORY, "kernel"),
        (Evidence(code=1, lines=("Traceback ...", "ValueError: bad batch")), Kind.PROGRAM, "ValueError: bad batch"),
        (Evidence(code=1, lines=("torch.OutOfMemoryError: CUDA out of memory. Tried",)), Kind.GPU, "out of GPU memory"),
        (Evidence(code=1, lines=("RuntimeError: CUDA error: an illegal memory access",)), Kind.GPU, "illegal memory"),
        (Evidence(signal="SIGABRT", lines=("CUDA error: uncorrectable ECC error encountered",)), Kind.GPU, "ECC"),
        (Evidence(code=1, lines=("NVRM: Xid (PCI:0000:17:00): 79, GPU has fallen off the bus",)), Kind.GPU, "lost GPU"),
        (Evidence(code=1, lines=("CUDA error: something new (err 999)",)), Kind.GPU, "something new"),
        (Evidence(removal="stall", reason="op 7 waits for it", signal="SIGTERM"), Kind.STALL, "op 7"),
        (Evidence(removal="silence", reason="nothing heard for 5 s"), Kind.HOST_LOST, "5 s"),
        (Evidence(removal="unreachable", reason="cannot reach each other"), Kind.NETWORK, "cannot reach"),
        (Evidence(diverged=True, signal="SIGKILL"), Kind.DIVERGENCE, "differed"),
        (Evidence(restart_asked=True, left=True), Kind.OPERATOR, "restart"),
        (Evidence(left=True), Kind.PREEMPTION, "SIGTERM"),
        (Evidence(signal="SIGTERM"), Kind.PREEMPTION, "SIGTERM"),
        (Evidence(script=ScriptEnd("KeyError")), Kind.PROGRAM, "its script failed with KeyError"),
        (Evidence(script=ScriptEnd(code=3), signal="SIGTERM"), Kind.PROGRAM, "exited with code 3"),
        (Evidence(script=ScriptEnd("KeyError"), left=True), Kind.PREEMPTION, "SIGTERM"),
        (Evidence(reason="lost 3: its script failed with KeyError", signal="SIGTERM"), Kind.PREEMPTION, "SIGTERM"),
        (Evidence(reason="lost 3: its process died"), Kind.UNKNOWN, "process died"),
        (Evidence(), Kind.UNKNOWN, "ended"),
    ],
)
def test_causes(evidence: Evidence, kind: Kind, says: str) -> None:
    cause = classify(evidence)
    assert cause.kind is kind
    assert says in cause.detail
    assert cause.planned == (kind is Kind.OPERATOR)


texts = st.text("abcXYZ 019:.\n\\\"'é*", max_size=40)
evidences = st.builds(
    Evidence,
    code=st.none() | st.integers(-5, 300),
    signal=st.sampled_from(("", "SIGKILL", "SIGSEGV", "SIGTERM", "signal 63")),
    script=st.none() | st.builds(ScriptEnd, st.sampled_from(("KeyError", "SystemExit"))) | st.just(ScriptEnd(code=3)),
    reason=texts,
    removal=st.sampled_from(("", "stall", "silence", "unreachable", "something of tomorrow")),
    lines=st.lists(texts, max_size=3).map(tuple),
    killed_by_kernel=st.booleans(),
    restart_asked=st.booleans(),
    left=st.booleans(),
    diverged=st.booleans(),
)


@given(evidences)
def test_whatever_is_known_has_one_cause_in_a_line(evidence: Evidence) -> None:
    cause = classify(evidence)
    assert cause == classify(evidence)
    assert 0 < len(cause.detail) <= 220
    assert cause.component
    assert cause.category


def test_the_last_error_of_a_log() -> None:
    assert last_error(("Traceback", "  File x", "KeyError: 'w'", "", "bye")) == "KeyError: 'w'"
    assert last_error(("", "only words ")) == "only words"
    assert last_error(()) == ""


def test_what_the_kernel_says_of_memory() -> None:
    log = "6,1,2,-;usb 1-1: new device\n3,9,8,-;Out of memory: Killed process 4711 (python3) total-vm:1kB\n"
    assert killed_in(log) == {4711}
    assert killed_in("3,1,1,-;Memory cgroup out of memory: Killed process 12 (a b), UID 0") == {12}
    assert killed_in("Killed process 5 by hand") == frozenset()
    assert kills_counted("low 0\noom 3\noom_kill 2\noom_group_kill 0\n") == 2
    assert kills_counted("") == 0


@given(st.text("abc9-_", min_size=6, max_size=40), texts, texts)
def test_no_secret_is_left_in_a_line(secret: str, before: str, after: str) -> None:
    assert secret not in without(before + secret + after, (secret,))


# -- GPU time ----------------------------------------------------------------------------------------------------------

commands = st.lists(
    st.tuples(
        st.integers(0, 3),  # replica
        st.sampled_from((*Use, OVER, "move")),
        st.floats(0, 10),  # seconds since the last one
        st.floats(0, 40),  # amount of a move
        st.sampled_from((Use.DETECTION, Use.VIEW, Use.RESUME, Use.ABSENCE, Use.PAUSE)),
        st.integers(0, 3),  # payer
    ),
    max_size=40,
)


@given(commands)
def test_each_gpu_second_is_booked_once(history: list[tuple[Any, ...]]) -> None:
    gpu_time, now, lived = GpuTime(RANKS), 0.0, dict.fromkeys(range(4), 0.0)
    for replica, what, passes, amount, use, payer in history:
        for other in lived:
            lived[other] += passes * RANKS * (gpu_time.use(other) is not None)
        now += passes
        if what == "move":
            assert 0 <= gpu_time.move(replica, use, amount, payer, now) <= amount
        else:
            gpu_time.begin(replica, what, now, payer)
    booked = gpu_time.booked(now)
    assert all(amount >= -1e-9 for amount in booked.values())
    assert sum(booked.values()) == pytest.approx(sum(lived.values()))
    prices = [gpu_time.price(payer, now) for payer in range(4)]
    for use in PRICED:  # no interruption is paid twice
        assert sum(price[use] for price in prices) <= booked[use] + 1e-9


# -- interruptions -----------------------------------------------------------------------------------------------------


class Script:
    """Events of a job, in order. `at` is their clock; wall clock is 1000 s ahead."""

    def __init__(self, replicas: int = 3) -> None:
        self.of = Interruptions(RANKS, lambda replica: f"host{replica}")
        self.at, self.epoch = 0.0, 0
        self.view(dict.fromkeys(range(replicas), True), step=0)

    def say(self, kind: str, after: float = 0.0, **fields: Any) -> None:
        self.at += after
        self.of.event({"kind": kind, "mono": self.at, "time": self.at + 1000, **fields})

    def view(
        self,
        members: dict[int, bool],
        after: float = 0.0,
        step: int | None = None,
        why: str = "",
        lost: list[int] | None = None,
    ) -> None:
        self.epoch += 1
        listed = [{"replica": replica, "contributing": counts} for replica, counts in members.items()]
        losses = {} if lost is None else {"lost": lost}
        self.say("view", after, epoch=self.epoch, step=step, members=listed, why=why, **losses)

    def all(self) -> list[Interruption]:
        return self.of.listed(self.at)


def test_a_kill_costs_the_survivors_little_and_the_lost_one_much() -> None:
    job = Script()
    job.say("process_exited", 100, replica=2, shard=0, code=None, signal="SIGKILL", lines=["hello"])
    job.say("suspect", 0.01, replica=2, by=0, reason="its process died")
    job.view({0: True, 1: True}, 0.02, why="lost 2: its process died")
    for replica in (0, 1):
        for rank in range(RANKS):
            job.say("resumed", 0.001, replica=replica, shard=rank, epoch=2, resume_ms=50.0)
    job.say("process_exited", 0, replica=2, shard=1, code=None, signal="SIGKILL")  # its other rank, by the launcher
    job.say("process_started", 1, replica=2, shard=0, pid=1)
    job.view({0: True, 1: True, 2: False}, 4, step=50)
    job.view({0: True, 1: True, 2: True}, 2, step=60)
    [one] = job.all()
    assert (one.cause.kind, one.cause.detail, one.host) == (Kind.SIGNAL, "killed by SIGKILL", "host2")
    assert one.lines == ("hello",)
    assert one.at == pytest.approx(1100)
    assert (one.over, one.back, one.deaths) == (True, True, 0)
    assert one.price["detection"] == pytest.approx(0.01 * 2 * RANKS)
    assert one.price["view"] == pytest.approx(0.02 * 2 * RANKS)
    assert one.price["resume"] == pytest.approx(0.05 * 2 * RANKS, abs=0.01)  # as much as had passed by then
    assert one.price["catch-up"] == pytest.approx(2 * RANKS)
    assert one.price["absence"] + one.price["catch-up"] == pytest.approx(one.absent * RANKS)


def test_a_stall_is_paid_from_its_beginning() -> None:
    job = Script()
    job.view({0: True, 1: True}, 100, why="lost 2: op 9 waits for it")
    job.say("removed", 0, replica=2, removal="stall", reason="op 9 waits for it", lasted=30.0)
    job.say("process_exited", 5, replica=2, shard=0, code=None, signal="SIGTERM")
    [one] = job.all()
    assert one.cause.kind is Kind.STALL
    assert one.price["detection"] == pytest.approx(30 * 2 * RANKS)
    assert not one.over


def test_how_a_script_has_ended_is_known_whatever_was_said_before_and_after() -> None:
    """A complaint came first, and a view of another loss came before the one without the replica."""
    job = Script(4)
    job.say("suspect", 1, replica=2, by=0, reason="silent for 1.0 s", silent=True)
    job.say("suspect", 1, replica=2, by=2, reason="its shard 0 is lost", error="KeyError")
    job.view({0: True, 1: True, 2: True}, 1, why="lost 3: its process died")
    job.view({0: True, 1: True}, 1, why="lost 2: its shard 0 is lost")
    one = next(one for one in job.all() if one.replica == 2)
    assert (one.cause.kind, one.cause.detail) == (Kind.PROGRAM, "its script failed with KeyError")


def test_two_that_are_lost_together_share_what_the_others_pay() -> None:
    job = Script(4)
    for replica in (2, 3):
        job.say("suspect", 1, replica=replica, by=0, reason="its process died")
    job.view({0: True, 1: True}, 0.5, why="lost 2, lost 3")
    first, second = job.all()
    booked = job.of.gpu_time.booked(job.at)
    paid = first.price["view"] + second.price["view"] + first.price["detection"] + second.price["detection"]
    assert paid == pytest.approx(booked[Use.VIEW] + booked[Use.DETECTION])
    assert paid <= 1.5 * 2 * RANKS
    job.say("resumed", 1.0, replica=0, epoch=job.epoch, resume_ms=400.0)
    assert [one.price["resume"] for one in job.all()] == pytest.approx([0.2, 0.2])


def test_leaving_in_order_costs_the_others_nothing() -> None:
    job = Script()
    job.say("restart_asked", 10, replica=1)
    job.view({0: True, 2: True}, 5, step=7)
    job.view({0: True, 2: True, 1: True}, 5, step=9)
    job.view({1: True, 2: True}, 5, step=12)  # nobody of ours asked for that
    asked, told = job.all()
    assert (asked.cause.kind, asked.cause.planned, asked.back) == (Kind.OPERATOR, True, True)
    assert (told.cause.kind, told.replica) == (Kind.PREEMPTION, 0)
    assert asked.price["detection"] == asked.price["view"] == told.price["view"] == 0.0


@pytest.mark.parametrize(("step", "count"), [(13, 1), (None, 2)], ids=["in order", "by a death"])
def test_who_leaves_after_its_leave_was_withdrawn_is_one_interruption(step: int | None, count: int) -> None:
    job = Script()
    job.view({0: True, 1: True}, 1.0, step=11, why="leave 2")
    job.view(dict.fromkeys(range(3), True), 1.0, why="a change was withdrawn")
    job.view({0: True, 1: True}, 1.0, step=step, why="leave 2")
    job.view({0: True, 1: True, 2: False}, 4.0, step=20)
    job.view(dict.fromkeys(range(3), True), 1.0, step=21)
    *_, last = found = job.all()
    assert (len(job.of), len(found)) == (count, count)
    assert found[0].cause.kind is Kind.PREEMPTION
    assert (last.over, last.back) == (True, True)
    assert last.price[Use.CATCH_UP.value] == RANKS * 1.0
    assert sum(one.price[Use.ABSENCE.value] for one in found) == RANKS * 5.0


def test_who_is_lost_again_while_catching_up_is_two_interruptions() -> None:
    job = Script()
    job.view({0: True, 1: True}, 10)
    job.say("process_started", 1, replica=2, shard=0, pid=5)
    job.say("process_exited", 1, replica=2, shard=0, code=1, signal=None, lines=["OSError: no"])
    job.say("process_started", 1, replica=2, shard=0, pid=6)
    job.view({0: True, 1: True, 2: False}, 1, step=5)
    job.view({0: True, 1: True}, 1)
    first, second = job.all()
    assert (first.over, first.back, first.deaths) == (True, False, 1)
    assert (second.over, second.replica) == (False, 2)


@pytest.mark.parametrize("lost", [[], [1]], ids=["by itself", "by a death"])
def test_who_is_taken_in_again_after_its_view_was_withdrawn_is_one_interruption(lost: list[int]) -> None:
    job = Script()
    job.view({0: True, 1: True}, 10, lost=[2])
    job.view({0: True, 1: True, 2: False}, 1, step=5, lost=[])
    job.view({replica: True for replica in (0, 1) if replica not in lost}, 1, lost=lost)
    job.view({0: True, 1: not lost, 2: False}, 3, step=9, lost=[])
    job.view({0: True, 1: True, 2: True}, 2, step=12, lost=[])
    found = [one for one in job.all() if one.replica == 2]
    assert [(one.over, one.back) for one in found] == [(True, True)]
    assert found[0].price[Use.ABSENCE.value] == RANKS * 4.0
    assert found[0].price[Use.CATCH_UP.value] == RANKS * 3.0


def test_a_view_of_the_same_members_is_a_connection() -> None:
    job = Script()
    job.say("suspect", 10, replica=1, by=0, reason="the connection has ended")
    job.view({0: True, 1: True, 2: True}, 0.3)
    [one] = job.all()
    assert (one.cause.kind, one.replica, one.over, one.back) == (Kind.NETWORK, 1, True, True)
    assert one.price["view"] == pytest.approx(0.3 * 3 * RANKS)
    assert one.price["absence"] == 0.0


def test_the_end_of_a_job_is_no_interruption() -> None:
    done, drained = Script(), Script()
    for replica in range(3):
        done.say("finished", 1, replica=replica)
        done.say("process_exited", 0, replica=replica, shard=0, code=0, signal=None)
        done.view({other: True for other in range(replica + 1, 3)}, 2)
    drained.say("draining", 1)
    drained.view({}, 1, step=5)
    assert done.all() == drained.all() == []


def test_of_many_interruptions_the_newest_are_kept_and_all_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def kills(written: bool) -> Script:
        job = Script()
        for number in range(20):
            job.say("process_exited", 5, replica=2, shard=0, code=number % 2, signal=None, lines=["a line"])
            job.say("suspect", 0.1, replica=2, by=0, reason="its process died")
            job.view({0: True, 1: True}, 0.2)
            job.view({0: True, 1: True, 2: True}, 3, step=number)
            if written:
                job.of.changed.clear()
        job.view({0: True, 1: True}, 2)  # and it is away
        return job

    whole = kills(written=True)
    monkeypatch.setattr(interruptions, "KEPT", 5)
    job, unwritten = kills(written=True), kills(written=False)
    assert [one.number for one in job.all()] == [*range(16, 21)]
    assert set(job.of.gpu_time._prices) <= {*range(16, 21)}, "nor are prices of others"
    assert (len(job.of), len(whole.all()), len(unwritten.all())) == (21, 21, 21), "not before the history has them"
    (causes, prices), (causes_of_all, prices_of_all) = job.of.by_cause(job.at), whole.of.by_cause(whole.at)
    assert causes == causes_of_all
    assert sum(causes.values()) == 21
    assert prices.keys() == prices_of_all.keys()
    assert all(prices[kind] == pytest.approx(prices_of_all[kind]) for kind in prices)


def test_an_old_suspicion_is_not_paid_later() -> None:
    job = Script()
    job.say("suspect", 10, replica=2, by=1, reason="cannot be reached")
    job.say("not_removed", 1, replica=2, reason="it answers")
    job.view({0: True, 1: True}, 1000, why="lost 2: its process died")
    [one] = job.all()
    assert one.price["view"] == one.price["detection"] == 0.0


KINDS = ("view", "suspect", "removed", "process_exited", "process_started", "resumed", "not_removed", "finished")


@given(st.integers(0, 10**9))
def test_no_history_makes_a_gpu_second_cost_twice(seed: int) -> None:
    draw = random.Random(seed)
    job = Script(4)
    for _ in range(draw.randrange(60)):
        kind, replica = draw.choice(KINDS), draw.randrange(4)
        after = draw.choice((0.0, 0.001, 1.0, 100.0))
        if kind == "view":
            members = {x: draw.random() < 0.8 for x in range(4) if draw.random() < 0.8}
            job.view(members, after, draw.choice((None, 5)))
            continue
        job.say(
            kind,
            after,
            replica=replica,
            shard=draw.randrange(RANKS),
            code=draw.choice((None, 0, 1)),
            signal=draw.choice((None, "SIGKILL")),
            epoch=job.epoch,
            resume_ms=draw.choice((0.0, 5.0, 1e6)),
            lasted=draw.choice((0.0, 30.0, 1e6)),
            removal="stall",
            reason="some",
            pid=1,
        )
    booked = job.of.gpu_time.booked(job.at)
    assert all(amount >= -1e-6 for amount in booked.values()), seed
    assert sum(booked.values()) <= job.at * 4 * RANKS + 1e-6, seed
    assert sum(one.gpu_seconds for one in job.all()) <= sum(booked[use] for use in PRICED) + 1e-3, seed
    assert len({one.number for one in job.all()}) == len(job.all())
    job.of.close(job.at)
    assert all(one.over for one in job.all()), seed


# -- the job as people look at it --------------------------------------------------------------------------------------


def test_the_grid_of_many_ranks_has_few_cells() -> None:
    job = JobMonitor("run", "train.py", 2, 8192)
    waits = [0.0] * 8192
    waits[8191] = 2.5
    job.waits(1, waits)
    job.event({"kind": "process_started", "mono": 0.0, "time": 1.0, "replica": 0, "shard": 0, "pid": 1})
    seen = job.overview(1.0, 0.0)
    assert seen.ranks_per_cell == 8192 // CELLS
    assert [len(row.cells) for row in seen.rows] == [CELLS, CELLS]
    assert seen.rows[1].cells[-1] == 2500
    assert set(seen.rows[0].cells) == {GONE}


ESCAPES = "\x1b[1;35mValueError\x1b[0m: \x1b]0;a title\x07bad\tbatch\x9b2J \x1b[?25l\u202e\x00"


def test_what_ranks_write_commands_no_terminal() -> None:
    """Colours, which Python's own tracebacks have, hide no error either."""
    assert plain(ESCAPES) == "ValueError: bad batch ??"
    job = JobMonitor("run", "train.py", 2, 1)
    both = [{"replica": r, "contributing": True} for r in range(2)]
    job.event({"kind": "view", "mono": 1.0, "time": 1.0, "epoch": 1, "members": both, "step": 0, "why": ""}, ESCAPES)
    exited = {"kind": "process_exited", "replica": 1, "shard": 0, "pid": 2, "code": 1, "lines": ["at x.py", ESCAPES]}
    job.event(exited | {"mono": 2.0, "time": 2.0}, ESCAPES)
    job.event({"kind": "removed", "mono": 2.0, "time": 2.0, "replica": 1, "reason": ESCAPES}, ESCAPES)
    alone = {"kind": "view", "mono": 3.0, "time": 3.0, "epoch": 2, "members": both[:1], "step": None, "why": ESCAPES}
    job.event(alone, ESCAPES)
    seen = job.overview(3.0, 3.0)
    [one] = seen.newest
    assert one.cause.detail == "exit code 1: ValueError: bad batch ??"
    assert not re.search(rb"\\u00|\x9b|\xe2\x80\xae", msgspec.json.encode(seen))


@given(st.text(alphabet=st.sampled_from("\x1b\x9b[]P?;0m7\x07\\ax ")))
def test_nothing_of_a_sequence_is_left(text: str) -> None:
    assert plain(text).isprintable()
    assert plain(plain(text)) == plain(text)


# -- statistics --------------------------------------------------------------------------------------------------------


def test_the_tail_of_a_binomial() -> None:
    assert binomial_tail(0, 9, 0.5) == binomial_tail(3, 3, 1.0) == 1.0
    assert binomial_tail(1, 1, 0.25) == pytest.approx(0.25)
    assert binomial_tail(2, 3, 0.5) == pytest.approx(0.5)
    assert binomial_tail(8, 11, 0.05) == pytest.approx(5.65e-9, rel=0.01)
    assert binomial_tail(400, 1000, 0.9) == pytest.approx(1.0)
    assert binomial_tail(1, 5, 0.0) == 0.0


def record(run: str, hosts: dict[str, float]) -> JobRecord:
    return JobRecord(run, "x.py", 4, 1, 0.0, 1e5, True, 10, hosts, {"training": 99.0, "absence": 1.0, "start": 50.0})


def interruption(number: int, host: str, evidence: Evidence) -> Interruption:
    return Interruption(number, 0, host, float(number), 2, 5, classify(evidence), {"absence": 2.0}, 2.0, True, True)


def test_one_bad_host_among_many_is_named() -> None:
    hosts = {f"n{k}": 1e5 for k in range(20)}
    kill, own = Evidence(signal="SIGKILL"), Evidence(code=1, lines=("ValueError: x",))
    bad = [interruption(k, "n3", kill) for k in range(8)]
    others = [interruption(10 + k, f"n{k}", kill) for k in (1, 5, 9)]
    found = statistics([record("a", hosts)], [*bad, *others])
    assert [row.host for row in found.hosts if row.suspect] == ["n3"]
    assert found.hosts[0].mtbf == pytest.approx(1e5 / 8)
    assert found.effective == pytest.approx(0.99)
    assert [(row.component, row.count) for row in found.categories] == [("Killed from outside", 11)]
    # What a program does to itself is no fault of its host.
    assert not any(
        row.suspect for row in statistics([record("a", hosts)], [interruption(k, "n3", own) for k in range(8)]).hosts
    )


def test_even_luck_names_a_host_in_one_of_a_hundred_reports_at_most() -> None:
    draw, wronged = random.Random(3), 0
    hosts = {f"n{k}": draw.choice((1e4, 1e5)) for k in range(12)}
    for _ in range(300):
        count = draw.randrange(40)
        hit = draw.choices(list(hosts), list(hosts.values()), k=count)
        every = [interruption(k, host, Evidence(signal="SIGKILL")) for k, host in enumerate(hit)]
        found = statistics([record("a", hosts)], every)
        wronged += any(row.suspect for row in found.hosts)
        assert sum(row.count for row in found.categories) == count
        assert found.lost == pytest.approx(2.0 * count)
    assert wronged <= 3


# -- history -----------------------------------------------------------------------------------------------------------


def test_the_history_outlives_jobs_and_grows(tmp_path: Path) -> None:
    path, told = tmp_path / "state" / "history.sqlite", []
    one = interruption(0, "n1", Evidence(signal="SIGKILL"))
    for run in ("a", "b"):
        writer = HistoryWriter(path, told.append)
        writer.put(record(run, {}), [one])
        writer.put(record(run, {"n1": 5.0}), [one])  # the same again, as more is known
        writer.close(60)
    assert told == []
    assert path.stat().st_mode & 0o777 == 0o600
    history = HistoryFile(path, write=False)
    assert [job.run for job in history.jobs()] == ["a", "b"]
    assert history.jobs()[0].hosts == {"n1": 5.0}
    assert history.interruptions() == [("a", one), ("b", one)]
    assert history.interruptions(since=1e9) == history.jobs(since=1e9) == []
    history.close()


def test_a_history_that_is_none_is_refused_with_the_mend(tmp_path: Path) -> None:
    text, later = tmp_path / "notes.txt", tmp_path / "later.sqlite"
    text.write_text("not a database, and long enough to be taken for one" * 50)
    with sqlite3.connect(later) as other:
        other.execute("PRAGMA user_version = 99")
    for path, says in ((text, "no history"), (later, "another version"), (tmp_path / "gone", "there is no history")):
        with pytest.raises(SettingsError, match=says):
            HistoryFile(path, write=False)
    told: list[str] = []
    writer = HistoryWriter(text, told.append)
    for _ in range(3):
        writer.put(record("a", {}), [])
    writer.close(60)
    assert len(told) == 1
    assert "the job goes on" in told[0]


def test_what_could_not_be_written_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftcomm.monitoring.history.BUSY", 0.0)
    path, told = tmp_path / "history.sqlite", []
    heard = threading.Event()
    writer = HistoryWriter(path, lambda text: (told.append(text), heard.set()))
    HistoryFile(path).close()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        writer.put(record("a", {}), [interruption(0, "n1", Evidence(signal="SIGKILL"))])
        assert heard.wait(100)
        assert "locked" in told[0]
        other.execute("COMMIT")
    writer.put(record("a", {}), [interruption(1, "n1", Evidence(signal="SIGSEGV"))])
    writer.close(60)
    history = HistoryFile(path, write=False)
    assert [one.number for _, one in history.interruptions()] == [0, 1]
    history.close()
    assert len(told) == 1


def test_a_database_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "theirs.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as theirs:
        theirs.execute("CREATE TABLE bookmarks (url TEXT)")
        theirs.commit()
    before = path.read_bytes()
    for write in (True, False):
        with pytest.raises(SettingsError, match="no history"):
            HistoryFile(path, write=write)
    assert path.read_bytes() == before


def test_a_history_is_read_while_another_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftcomm.monitoring.history.BUSY", 0.0)
    path = tmp_path / "history.sqlite"
    first = HistoryFile(path)
    first.put(record("a", {}), [])
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        history = HistoryFile(path, write=False)
        assert [job.run for job in history.jobs()] == ["a"]
        history.close()
    first.close()


def test_what_a_killed_launcher_has_half_written_is_undone_by_who_reads(tmp_path: Path) -> None:
    path, left = tmp_path / "history.sqlite", tmp_path / "left.sqlite"
    history = HistoryFile(path)
    history.put(record("a", {}), [])
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as killed:
        killed.execute("PRAGMA cache_size = 1")
        killed.execute("BEGIN IMMEDIATE")
        killed.execute("UPDATE jobs SET record = zeroblob(100000)")  # more than it keeps to itself
        killed.execute("UPDATE jobs SET run = 'b'")
        for file in (path, Path(f"{path}-journal")):
            shutil.copy(file, file.with_name(file.name.replace(path.name, left.name)))
        killed.execute("ROLLBACK")
    history.close()
    assert left.read_bytes() != path.read_bytes()
    history = HistoryFile(left, write=False)
    assert [job.run for job in history.jobs()] == ["a"]
    history.close()


def test_where_the_history_lies() -> None:
    assert default_path({"FTCOMM_HISTORY": "off"}) is None
    assert default_path({"FTCOMM_HISTORY": "/x/y"}) == Path("/x/y")
    assert default_path({"XDG_STATE_HOME": "/s"}) == Path("/s/ftcomm/history.sqlite")
    assert default_path({"HOME": "/h"}) == Path("/h/.local/state/ftcomm/history.sqlite")
