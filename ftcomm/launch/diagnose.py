"""Asks a running job why it stands still, and who makes it slow. For commands, and for the launcher when it hears of a
stall."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from ftcomm.control.timeouts import Timeouts
from ftcomm.diagnosis import slowdown
from ftcomm.diagnosis.causes import StallCause
from ftcomm.diagnosis.collect import JobPlace, ReplicaPlace, Suspicion, collect, newest_lives
from ftcomm.diagnosis.facts import JobFacts, Rank
from ftcomm.diagnosis.processes import look
from ftcomm.diagnosis.verdict import StallVerdict, judge
from ftcomm.errors import FtcommError
from ftcomm.launch.admin.protocol import Status
from ftcomm.launch.dumper import cause_of
from ftcomm.process.user_dir import base_dir
from ftcomm.recorder.files import FOLDER

AGAIN = 10.0  # s until the launcher tells the same verdict again
GAP = 0.3  # s between two looks: what was not known at the first one, a retransmission tells soon
VERDICT_TIMEOUT = 5.0  # s for a verdict that is under way when the job ends
_AT_ONCE = {
    cause.value
    for cause in (
        StallCause.CUT,
        StallCause.CUT_ONE_WAY,
        StallCause.DEAD_HOST,
        StallCause.MISMATCH,
        StallCause.SWAPPED,
    )
}
BACK = 60.0  # s after which what is told of a dead host is no more of its death: some reach it again before others do
LOOKS = 3  # at a stall, until there is a verdict


class Diagnosis(msgspec.Struct, frozen=True):
    """A verdict, and the facts that it was made from."""

    verdict: StallVerdict
    facts: JobFacts


def diagnose(seen: Status, suspicions: Collection[Suspicion] = (), *, everybody: bool = False) -> Diagnosis:
    """Returns why a job stands still. With `everybody` the stacks of all ranks are in the facts. Blocks for about a
    third of a second, and for two seconds more if ranks do not answer. Any thread."""
    facts = collect(place_of(seen), suspicions, everybody=everybody)
    return Diagnosis(judge(facts), facts)


def slowdowns(seen: Status) -> tuple[slowdown.SlowdownOfGroup, ...]:
    """Returns how the ranks of a job keep up, from what they have recorded. Reads 3 MiB a rank. Any thread."""
    place = place_of(seen)
    lives = newest_lives(place)
    looked = {rank: look(life.pid) for rank, life in lives.items()}
    racks = {rank: process.rack for rank, process in looked.items() if process is not None}
    return slowdown.of_job(lives, racks)


def place_of(seen: Status) -> JobPlace:
    """Returns where the facts of a job are found. Raises `SettingsError` if this user's directory cannot be used."""
    timeouts = Timeouts.derive(seen.op_timeout, seen.heartbeat_timeout, seen.op_timeout_floor or None)
    return JobPlace(
        run=seen.run,
        folder=base_dir() / seen.run / FOLDER,
        replicas=tuple(
            ReplicaPlace(
                replica=replica.replica,
                member=replica.member,
                host=replica.host,
                pids={int(rank): pid for rank, pid in replica.pids.items()},
                reason=replica.reason,
                reached=seen.launched,
            )
            for replica in seen.replicas
        ),
        ranks_per_replica=seen.ranks_per_replica,
        op_floor=timeouts.op_floor,
        op_timeout=timeouts.op,
        grace=timeouts.grace,
        presence=timeouts.presence,
        forming=seen.epoch == 0,
        coordinator=seen.pid,
        network=seen.network,
    )


def stands_still(event: Mapping[str, Any]) -> bool:
    """Whether an event says that something stands still: an op, or a network; or that members have made different
    calls."""
    return _is_silence(event) or cause_of(event) in ("stall", "mismatch")


def _is_silence(event: Mapping[str, Any]) -> bool:
    return event["kind"] == "suspect" and event.get("silent") is True


def _is_due(found: Diagnosis) -> bool:
    """Whether a verdict is told unasked: what is wrong at once, and waits that are a stall."""
    verdict, facts = found.verdict, found.facts
    if verdict.cause in _AT_ONCE:
        return True
    return verdict.since is not None and facts.at - verdict.since >= facts.op_floor


class StallDiagnosis:
    """Makes a verdict when something stands still, one at a time. It lives on one event loop, and blocks nothing of it:
    the facts are collected in a thread. It is always the same one: each that does such work keeps a heap of its own."""

    def __init__(self, status: Callable[[], Status], tell: Callable[[Diagnosis], None]) -> None:
        self._status, self._tell = status, tell
        self._thread = ThreadPoolExecutor(1, "ftcomm-verdict")
        self._task: asyncio.Task[None] | None = None
        self._looks = 0  # that are still to be made
        self._suspicions: list[Suspicion] = []  # of the last seconds
        self._told: dict[tuple[str, tuple[Rank, ...], str], float] = {}  # cause, culprits and op -> when
        self._dead: dict[Rank, float] = {}  # those whose host was told to be dead -> when

    def look(self, event: Mapping[str, Any]) -> None:
        """Note that a rank has reported that something stands still, or has failed as a stall would."""
        now = time.monotonic()
        self._suspicions = [known for known in self._suspicions if now - known.at < AGAIN]
        if _is_silence(event):
            self._suspicions.append(Suspicion(event["by"], event["replica"], now))
        self._looks = LOOKS
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._diagnose())

    async def close(self) -> None:
        """Wait for a verdict under way, for `VERDICT_TIMEOUT` at most: it may be why the job ends."""
        self._looks = 0
        if self._task is not None:
            await asyncio.wait([self._task], timeout=VERDICT_TIMEOUT)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown(wait=False)

    async def _diagnose(self) -> None:
        kept: Diagnosis | None = None  # of the last look, if it was not sure
        loop = asyncio.get_running_loop()
        while self._looks > 0:
            self._looks = left = self._looks - 1
            try:
                seen, suspicions = self._status(), tuple(self._suspicions)
                found = await loop.run_in_executor(self._thread, diagnose, seen, suspicions)
            except (FtcommError, OSError, RuntimeError):  # RuntimeError: no thread could be started
                return  # it is for people; the job goes on
            if kept is not None and found.verdict.cause == StallCause.NONE.value:
                found, left, self._looks = kept, 0, 0  # it is over, by a removal: no other look will say more
            sure = found.verdict.sure
            kept = None if sure else found
            clear = sure and found.verdict.cause not in (StallCause.NONE.value, StallCause.UNKNOWN.value)
            due = _is_due(found)  # else another look may find what is wrong at once, such as a network that is cut
            if clear and due and self._looks == left:  # nothing else was reported meanwhile
                self._looks = 0
            if due and (clear or left == 0):
                self._say(found)
            if sure and 0 < self._looks == left:
                await asyncio.sleep(GAP)

    def _say(self, found: Diagnosis) -> None:
        now, verdict = time.monotonic(), found.verdict
        said = verdict.cause, verdict.culprits, verdict.op
        self._told = {known: at for known, at in self._told.items() if now - at < AGAIN}
        self._dead = {known: at for known, at in self._dead.items() if now - at < BACK}
        comes_back = verdict.cause == StallCause.CUT.value and self._dead.keys() & set(verdict.culprits)
        if said in self._told or comes_back:
            return
        self._told[said] = now
        if verdict.cause == StallCause.DEAD_HOST.value:
            self._dead |= dict.fromkeys(verdict.culprits, now)
        self._tell(found)
