"""Collects the facts of a job from this host: recordings, /proc, connections, and stacks of those who are waited for.

Everything is looked at twice, a moment apart, since what counts is what moves: a wait that goes on grows, a rank
that gets no CPU is still ready, a slow network acknowledges bytes. No rank has to do anything for it but one thread of
those that are waited for, which answers with its stacks meanwhile.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from ftcomm.diagnosis import processes, stacks
from ftcomm.diagnosis.connections import TcpConnection, connections, links
from ftcomm.diagnosis.facts import (
    COORDINATOR,
    JobFacts,
    OpFacts,
    PauseFacts,
    PhaseFacts,
    Rank,
    RankFacts,
    WaitFacts,
)
from ftcomm.diagnosis.processes import ProcessFacts, SchedulerTimes
from ftcomm.diagnosis.stacks import Stacks
from ftcomm.diagnosis.text import ranks_named
from ftcomm.recorder.layout import ALL
from ftcomm.recorder.reader import (
    SUFFIX,
    RecordedOp,
    RecordedPhase,
    RecordedPhaseWait,
    RecordedWait,
    Recording,
    RecordingError,
    read,
)

BETWEEN = 0.3  # s between the two looks
NEWEST = 64  # ops of a rank that are compared with those of others, besides those that are not over or have failed
RECORDS = 256  # of a recording that are read, besides what is not over, and as many ops that have failed
FEW = 64  # of them at the first look, for which ops and waits that are not over are enough
ASKED = 32  # ranks whose stacks are taken
TOGETHER = 8  # at once

_NAME = re.compile(r"replica-(\d+)\.shard-(\d+)\.pid-(\d+)" + re.escape(SUFFIX))


class ReplicaPlace(msgspec.Struct, frozen=True):
    """The place of the facts of a replica, as the launcher knows it. `pids` has the living ranks on this host; a
    replica whose host was not asked is not `reached`."""

    replica: int
    member: bool
    host: str
    pids: Mapping[int, int]
    reason: str = ""
    reached: bool = True


class JobPlace(msgspec.Struct, frozen=True):
    """The places of all replicas of a job, as the launcher knows them; see `JobFacts` for the times."""

    run: str
    folder: Path  # of the recordings
    replicas: tuple[ReplicaPlace, ...]
    ranks_per_replica: int
    op_floor: float
    op_timeout: float
    grace: float
    presence: float
    forming: bool
    coordinator: int = 0  # the process that has its connections; 0: not on this host
    network: str = ""  # the path of the namespace that they are in, if that is not the one of that process


class Suspicion(msgspec.Struct, frozen=True):
    """A replica has told the coordinator, `at` a time of the monotonic clock, that it hears nothing of another one."""

    by: int
    on: int
    at: float


def recordings(folder: Path, pids: Mapping[Rank, int], newest: int | None = None) -> dict[Rank, list[Recording]]:
    """Returns the recordings of each rank, the newest last; of one that has a process only that. See `read` for
    `newest`. Without what cannot be read."""
    found: dict[Rank, list[Recording]] = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        rank, pid = (int(match[1]), int(match[2])), int(match[3])
        if pids.get(rank, pid) != pid:
            continue
        with contextlib.suppress(RecordingError):
            found.setdefault(rank, []).append(read(path, newest))
    return {rank: sorted(lives, key=lambda life: life.began) for rank, lives in found.items()}


def collect(place: JobPlace, suspicions: Iterable[Suspicion] = (), *, everybody: bool = False) -> JobFacts:
    """Returns the facts of a job. With `everybody` the stacks of all ranks are taken, not only of those that others
    wait for. A rank that has suspected another one counts as having waited for it, even if that was removed before this
    looked. Blocks for `BETWEEN`, and for some seconds if ranks do not answer. Any thread."""
    pids = {(r.replica, rank): pid for r in place.replicas for rank, pid in r.pids.items()}
    before, connected = _sides(place, pids), time.monotonic()  # first: who is removed soon has none any more
    first = recordings(place.folder, pids, FEW)
    scheduled = {rank: processes.scheduled(pid) for rank, pid in pids.items()}
    garbage, begun = {rank: stacks.collected(_prefix(place, rank, pid)) for rank, pid in pids.items()}, time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(TOGETHER, thread_name_prefix="ftcomm-why") as pool:
        answers: dict[Rank, concurrent.futures.Future[Stacks]] = {}

        def ask(ranks: Sequence[RankFacts]) -> None:
            wanted = [rank.rank for rank in ranks] if everybody else _awaited(ranks, place.forming)
            for rank in wanted[:ASKED]:
                if rank in pids and rank not in answers:
                    answers[rank] = pool.submit(stacks.take, _prefix(place, rank, pids[rank]), pids[rank])

        waiting, at, looked = _all_ranks(place, first, pids, {}, {}), time.time(), time.monotonic()
        ask(waiting)
        time.sleep(max(0.0, BETWEEN - (time.monotonic() - begun)))
        after, apart = _sides(place, pids), time.monotonic() - connected
        second, passed = recordings(place.folder, pids, RECORDS), time.monotonic() - begun
        collecting = {
            rank: min(1.0, max(0.0, stacks.collected(_prefix(place, rank, pid)) - garbage[rank]) / passed)
            for rank, pid in pids.items()
        }
        ranks = _all_ranks(place, second, pids, first, scheduled)
        ask(ranks)  # those that were not waited for before
        ranks = [
            msgspec.structs.replace(
                rank,
                collecting=collecting.get(rank.rank, 0.0),
                stacks=answers[rank.rank].result() if rank.rank in answers else rank.stacks,
            )
            for rank in ranks
        ]
    facts = JobFacts(
        at=time.time(),
        run=place.run,
        replicas=len(place.replicas),
        ranks_per_replica=place.ranks_per_replica,
        op_floor=place.op_floor,
        op_timeout=place.op_timeout,
        grace=place.grace,
        presence=place.presence,
        forming=place.forming,
        ranks=tuple(ranks),
        links=links(after, before, apart),
    )
    then = [one for one in suspicions if not _came_back(one, first, pids)]
    waiting = [_waited(rank, then, looked, place.presence) for rank in waiting]
    waiting = [
        msgspec.structs.replace(then, process=now.process, stacks=now.stacks, collecting=now.collecting)
        for then, now in zip(waiting, ranks, strict=True)
    ]
    if _pairs(waiting) <= _pairs(ranks):
        return facts
    known = {(link.sender, link.receiver): link for link in (*links(before, before, apart), *facts.links)}
    earlier = msgspec.structs.replace(facts, at=at, ranks=tuple(waiting), links=tuple(known.values()))
    return msgspec.structs.replace(facts, earlier=earlier)


def _came_back(one: Suspicion, lives: Mapping[Rank, Sequence[Recording]], pids: Mapping[Rank, int]) -> bool:
    """Whether one of the two has begun another life since."""
    now = (_life(lives[rank], pids.get(rank)) for rank in lives if rank[0] in (one.by, one.on))
    return any(life is not None and life.began > one.at for life in now)


def _waited(rank: RankFacts, suspicions: Iterable[Suspicion], now: float, presence: float) -> RankFacts:
    """Returns the facts of a rank that also waits for those whom its replica has suspected, which had been silent for
    `presence` then: in the op that it was in, until that returns, or for a sign of life alone."""
    ops, phases, seen = list(rank.ops), list(rank.phases), _pairs([rank])
    for one in suspicions:
        on, ago = (one.on, rank.rank[1]), now - one.at
        if one.by != rank.rank[0] or (rank.rank, on) in seen:
            continue
        seen.add((rank.rank, on))
        place = next((place for place, op in enumerate(ops) if op.age >= ago >= op.over), None)
        if place is not None:
            wait = WaitFacts(on, ago + presence - ops[place].over)
            ops[place] = msgspec.structs.replace(ops[place], open=True, waits=(*ops[place].waits, wait))
        else:
            phases.append(PhaseFacts("alive", "a sign of life", f"{on}", 0, waits=(WaitFacts(on, ago + presence),)))
    return msgspec.structs.replace(rank, ops=tuple(ops), phases=tuple(phases))


def _pairs(ranks: Iterable[RankFacts]) -> set[tuple[Rank, Rank]]:
    """Returns who waits for whom."""
    return {(rank.rank, wait.rank) for rank in ranks for each in rank.inside for wait in each.waits}


def _sides(place: JobPlace, pids: Mapping[Rank, int]) -> dict[Rank, list[TcpConnection]]:
    """Returns the connections of the ranks, and of the coordinator."""
    owners = {rank: (pid, "") for rank, pid in pids.items()}
    if place.coordinator:
        owners[COORDINATOR] = place.coordinator, place.network
    return connections(owners)


def _all_ranks(
    place: JobPlace,
    lives: Mapping[Rank, Sequence[Recording]],
    pids: Mapping[Rank, int],
    before: Mapping[Rank, Sequence[Recording]],
    scheduled: Mapping[Rank, SchedulerTimes],
) -> list[RankFacts]:
    """Returns the facts of all ranks but their stacks; `before` and `scheduled` are from an earlier look, {} in the
    first one."""
    now, members, found = time.monotonic(), _members(lives, pids), []
    for replica in place.replicas:
        for shard in range(place.ranks_per_replica):
            rank = replica.replica, shard
            pid = pids.get(rank)
            life, earlier = (_life(looked.get(rank, ()), pid) for looked in (lives, before))
            process = processes.look(pid, scheduled[rank]) if pid is not None and rank in scheduled else None
            found.append(_rank_facts(replica, rank, earlier, life, process, members, now))
    return found


def newest_lives(place: JobPlace) -> dict[Rank, Recording]:
    """Returns the recordings of the ranks that have a process."""
    pids = {(r.replica, rank): pid for r in place.replicas for rank, pid in r.pids.items()}
    lives = recordings(place.folder, pids)
    found = {rank: _life(lives[rank], pid) for rank, pid in pids.items() if rank in lives}
    return {rank: life for rank, life in found.items() if life is not None}


def _prefix(place: JobPlace, rank: Rank, pid: int) -> Path:
    return place.folder / f"replica-{rank[0]}.shard-{rank[1]}.pid-{pid}"


def _life(lives: Sequence[Recording], pid: int | None) -> Recording | None:
    """Returns the recording of a process; without one that of the last that there was."""
    if pid is None:
        return lives[-1] if lives else None
    return next((life for life in reversed(lives) if life.pid == pid), None)


def _members(lives: Mapping[Rank, Sequence[Recording]], pids: Mapping[Rank, int]) -> dict[tuple[str, int, int], Rank]:
    """Returns which rank each member of a static group is: (group, replica or -1, its number in the group) -> rank. A
    name that several groups have counts within its replica alone."""
    found: dict[tuple[str, int, int], Rank] = {}
    twice = set()
    for rank, recorded in lives.items():
        life = _life(recorded, pids.get(rank))
        for group in () if life is None else life.groups:
            if group.kind == "static" and group.closed is None:
                key = group.name, -1, group.me
                if found.get(key, rank) != rank:
                    twice.add(key)
                found[key] = rank
                found[group.name, rank[0], group.me] = rank
    return {key: rank for key, rank in found.items() if key not in twice}


class _LooksAtRank(NamedTuple):
    """The recording of `rank` at the second look, and `before` at the first. `members` is of `_members`."""

    life: Recording
    before: Recording | None
    rank: Rank
    members: Mapping[tuple[str, int, int], Rank]
    now: float


def _rank_facts(
    replica: ReplicaPlace,
    rank: Rank,
    before: Recording | None,
    life: Recording | None,
    process: ProcessFacts | None,
    members: Mapping[tuple[str, int, int], Rank],
    now: float,
) -> RankFacts:
    looks = None if life is None else _LooksAtRank(life, before, rank, members, now)
    phase = (
        None if life is None else next((p for p in reversed(life.phases) if p.ended is None and p.name != "step"), None)
    )
    ended = [op.returned for op in life.ops if op.returned is not None] if life is not None else []
    return RankFacts(
        rank=rank,
        host=replica.host,
        reached=replica.reached,
        began=life is not None and (process is None or life.pid == process.pid),
        member=replica.member,
        reason=replica.reason,
        process=process,
        phase="" if phase is None else phase.name,
        phase_age=0.0 if phase is None else max(0.0, now - phase.began),
        idle=max(0.0, now - max(ended)) if ended else 0.0,
        step=0.0 if life is None else _usual(life),
        ops=() if looks is None else _ops(looks),
        phases=() if looks is None else _phases(looks),
        pause=None if life is None else _pause(life, now),
    )


def _pause(life: Recording, now: float) -> PauseFacts | None:
    """Returns the pause in which a rank is."""
    pause = next((p for p in reversed(life.phases) if p.ended is None and p.name == "pause"), None)
    if pause is None:
        return None
    left = None if pause.gives_up is None else max(0.0, pause.gives_up - now)
    return PauseFacts(pause.step, pause.number, pause.note, max(0.0, now - pause.began), left)


def _phases(of: _LooksAtRank) -> tuple[PhaseFacts, ...]:
    """Returns the phases in which a rank waits, with the waits that have grown between the two looks, as those of
    ops."""
    life, before, rank, members, now = of
    known = () if before is None else before.phases
    earlier = {(p.name, p.began, w.replica, w.rank): w.seconds for p in known for w in p.waits}
    static = {group.name for group in life.groups if group.kind == "static"}
    within = next((p for p in reversed(life.phases) if p.ended is None and p.name == "vote"), None)
    found = []
    for phase in life.phases:
        if phase.ended is not None or not phase.waits:
            continue
        grown = [w for w in phase.waits if w.seconds > earlier.get((phase.name, phase.began, w.replica, w.rank), 0.0)]
        waits = []
        for wait in grown:
            if (other := _of_phase(phase, wait, rank, members, static)) is not None:
                waits.append(WaitFacts(other, wait.seconds))
        named, group = _named(phase, within, rank, [wait.rank for wait in waits])
        left = None if phase.gives_up is None else max(0.0, phase.gives_up - now)
        found.append(PhaseFacts(phase.name, named, group, phase.number, phase.caller, left, tuple(waits)))
    return tuple(found)


def _of_phase(
    phase: RecordedPhase,
    wait: RecordedPhaseWait,
    rank: Rank,
    members: Mapping[tuple[str, int, int], Rank],
    static: Collection[str],
) -> Rank | None:
    """Returns for whom a phase waits."""
    if wait.rank is not None:
        return wait.replica, wait.rank
    return _member(phase.note, wait.replica, rank, members) if phase.note in static else (wait.replica, rank[1])


def _named(phase: RecordedPhase, within: RecordedPhase | None, rank: Rank, others: Sequence[Rank]) -> tuple[str, str]:
    """Returns what a phase is in words, and what is alike for all that are in it."""
    if phase.name == "stand":
        return f"the step boundary {phase.number}, where the membership changes", ""
    if phase.name == "meet":
        what = "an exchange" if within is None else f"the vote on step {within.step}"
        return f"{what} between the ranks of replica {rank[0]}", f"{rank[0]}"
    way = "a send to" if phase.name == "send" else "a recv from"
    group = "" if phase.note in ("", ALL) else f" of group {phase.note!r}"
    mine = f"{rank[0]}.{rank[1]} {phase.note} {phase.began}"
    whom = f"any of {ranks_named(others)}" if len(others) > 1 else ranks_named(others) or "another rank"
    return f"{way} {whom} with tag {phase.number}{group}", mine


def _ops(of: _LooksAtRank) -> tuple[OpFacts, ...]:
    life, before, rank, members, now = of
    kinds = {group.name: group.kind for group in life.groups}
    waits = _going_on(life, before)
    found = []
    for op in (*(op for op in life.ops[:-NEWEST] if op.returned is None or op.failed), *life.ops[-NEWEST:]):
        static = kinds.get(op.group) == "static"
        open_ = op.returned is None
        mine = []
        for wait in waits.get((op.group, op.number), ()) if open_ else ():
            other = _member(op.group, wait.replica, rank, members) if static else (wait.replica, rank[1])
            if other is not None:
                mine.append(WaitFacts(other, wait.seconds))
        shared = (op.group, -1, 0) in members or (op.group, -1, 1) in members
        column = (-1 if shared else -2 - rank[0]) if static else rank[1]
        found.append(
            OpFacts(
                group=op.group,
                number=op.number,
                what=_what(op),
                age=max(0.0, now - op.called),
                over=0.0 if op.returned is None else max(0.0, now - op.returned),
                caller=op.caller,
                open=open_,
                failed=op.failed,
                column=column,
                epoch=op.last_epoch,
                waits=tuple(mine),
            )
        )
    return tuple(found)


def _usual(life: Recording) -> float:
    """Returns the median time between the return of an op and the next call."""
    gaps = [
        max(0.0, op.called - before.returned)
        for before, op in itertools.pairwise(life.ops[-NEWEST:])
        if before.returned is not None
    ]
    return median(gaps) if gaps else 0.0


def _member(group: str, number: int, rank: Rank, members: Mapping[tuple[str, int, int], Rank]) -> Rank | None:
    return members.get((group, -1, number)) or members.get((group, rank[0], number))


def _going_on(life: Recording, before: Recording | None) -> dict[tuple[str, int], list[RecordedWait]]:
    """Returns the waits that have grown between the two looks. Where none has, the rank itself does not run: then it
    waits for nobody."""
    earlier = {} if before is None else {(w.group, w.op, w.replica): w.seconds for w in before.waits}
    found: dict[tuple[str, int], list[RecordedWait]] = {}
    for wait in life.waits:
        if wait.seconds > earlier.get((wait.group, wait.op, wait.replica), 0.0):
            found.setdefault((wait.group, wait.op), []).append(wait)
    return found


def _what(op: RecordedOp) -> str:
    how = [f"op={op.reduction!r}"] if op.reduction else []
    how += [f"root={op.root}"] if op.root is not None else []
    how += [f"compression={op.compression!r}"] if op.compression not in ("", "input") else []
    how += ["atomic=True"] if op.atomic else []
    return f"{op.kind}({', '.join(how)}) of {op.elements} x {op.dtype}"


def _awaited(ranks: Iterable[RankFacts], forming: bool) -> list[Rank]:
    """Returns the ranks that others wait for, the most awaited first; while the job forms, the ranks that have not
    come."""
    weight: dict[Rank, float] = {}
    for rank in ranks:
        if forming and not rank.began:
            weight[rank.rank] = float("inf")
        for each in rank.inside:
            for wait in each.waits:
                weight[wait.rank] = weight.get(wait.rank, 0.0) + wait.seconds
    return sorted(weight, key=lambda rank: (-weight[rank], rank))
