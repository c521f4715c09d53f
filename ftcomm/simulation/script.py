"""The user's loop on a simulated rank, and `ftcomm.steps` with the catch-up beneath it.

The model is a number: a checksum of the results of all ops so far. So two ranks hold the same model exactly if they
have applied the same results in the same order, from the same state.
"""

from __future__ import annotations

import bisect
import dataclasses
import zlib
from collections.abc import Generator
from typing import Any

from ftcomm.collective.operation import Operation
from ftcomm.control import messages as m
from ftcomm.control.views import View
from ftcomm.errors import MismatchError
from ftcomm.groups.subgroup_internals import PARTING
from ftcomm.simulation.memory import CHUNK
from ftcomm.simulation.network import SimulatedConnection
from ftcomm.simulation.promises import BrokenPromise, input_of
from ftcomm.simulation.rank import RankEnded, SimulatedRank
from ftcomm.training.block_scheduler import BlockScheduler, Snapshots, sources_of
from ftcomm.training.joiner import REPLAY_LEAST

_FINISH = 2.0  # s that the end of the loop waits for joiners that fetch: training waits longer than a history lasts


@dataclasses.dataclass(frozen=True)
class Workload:
    """The training that all ranks run: `steps` steps of ops with so many elements each."""

    steps: int
    counts: tuple[int, ...]
    atomic: tuple[bool, ...]
    compute: float  # s a step
    ahead: int  # ops in flight
    prepare: float  # s from joining a running job to the first step
    blocks: int  # of a state that is fetched
    groups: tuple[tuple[int, ...], ...] = ()  # of some replicas
    renew: int = 0  # steps after which each of them is closed and made again; 0: never
    statics: int = 0  # steps after which the static group of all members is closed, and the next one made; 0: never
    loops: tuple[int, ...] = ()  # the first steps of the step loops after the first one

    def loop_of(self, step: int) -> int:
        return 1 + bisect.bisect(self.loops, step)


class Script:
    def __init__(self, rank: SimulatedRank, work: Workload) -> None:
        self.rank, self.work = rank, work
        self.stuck = False  # behind the next boundary
        self.misses: int | None = None  # the boundary to which it does not come
        self._step = -1  # the boundary that was passed last
        self._snapshots: Snapshots[tuple[int, int]] = Snapshots()  # (step, model)
        self._asking: list[tuple[SimulatedConnection, dict[str, Any]]] = []
        rank.serves = self._serve

    # -- the loop ----------------------------------------------------------------------------------------------------

    def train(self) -> Generator[Any, Any, None]:
        rank, work, promises = self.rank, self.work, self.rank.promises
        view: View | None = yield "known"
        if view is None:
            view = yield from self._enter()
            if view is None:
                rank.say("is sent away")
                yield from self._ends()
                return
        else:
            yield from self._make_groups()
        rank.say("has joined")
        yield from self._groups_enter(view)
        step = rank.next_boundary = view.step or 0
        fresh = rank.replica not in view.contributing
        model = 0
        joiner: SimulatedJoiner | None = None
        rank.holds_state = not fresh
        while True:
            while self.misses == step:
                yield 0.05
            view = yield "boundary", step, work.loop_of(step)
            rank.next_boundary = step + 1
            rank.view = view
            if rank.left:
                rank.say("has left at the boundary of step %s", step)
                break
            yield from self._groups_enter(view)
            if self.work.renew and step % self.work.renew == self.work.renew - 1:
                yield from self._make_groups()
            self._at_boundary(step, view, model, rank.holds_state)
            if work.statics and step % work.statics == 0:
                yield from self._renew_static(step, view)
            if fresh:
                fresh, joiner = False, SimulatedJoiner(rank, view, step, work.blocks)
            if joiner is not None:
                while not joiner.offered:
                    yield "news"
                joiner.keep(view)
                if joiner.at_boundary(step):
                    model, joiner = joiner.model, None
                    rank.holds_state = True
            if joiner is None:
                promises.stands(rank, step, model)
                if rank.replica not in view.contributing:
                    rank.do(rank.node.tell(m.CaughtUp(step)))
            if step >= work.steps:
                break
            while self.stuck:
                yield 0.5
            yield work.compute * (0.5 + rank.world.random.random())
            if rank.gone:
                raise RankEnded(rank.gone)
            for name in rank.groups:
                yield from self._enter_group(name, 1)
            called = [group.call(step) for group in rank.groups.values()]
            static = [group.call(step) for group in rank.statics.values() if group.membership.error is None]
            results = []
            for result in self._ops(step):
                if isinstance(result, Operation) and not result.done:
                    yield result
                elif isinstance(result, Operation):
                    results.append(result)
            for op in called:
                if not op.done:
                    yield op
                if op.error is not None:
                    raise RankEnded(str(op.error))
            for op in static:
                if not op.done:
                    yield op  # it may fail, and the training goes on
            said = step_result(results)
            if joiner is not None:
                joiner.kept.append(said)
            else:
                model = zlib.crc32(said, model)
            step += 1
        if not rank.left:
            while joiner is not None and not joiner.finish():
                yield "news"
            if joiner is not None:
                promises.stands(rank, step, joiner.model)
            began = rank.clock()
            while self._lingers() and rank.clock() - began < _FINISH:
                yield 0.05
        yield from self._ends()
        rank.do(rank.node.tell(m.Finished()))
        began = rank.clock()
        acked = False
        while not rank.gone:  # as `ControlThread.finish`
            if rank.node.all_finished:
                if acked or rank.clock() - began > 2.0:
                    break
            else:
                began = rank.clock()
            rank.after(0.05, rank.wake, "ack", False)
            acked = (yield "ack") or acked
        rank.say("has finished")

    def _make_groups(self) -> Generator[str, None, None]:
        """One after the other, anew; a replica that joins a running job waits for no other."""
        rank = self.rank
        for number, among in enumerate(self.work.groups):
            if rank.replica in among:
                name = f"g{number}"
                if name in rank.groups:
                    yield from self._close_group(name)
                rank.make_group(name, number, among)
                if rank.view is not None:
                    yield from self._enter_group(name, rank.view.epoch)

    def _renew_static(self, step: int, view: View) -> Generator[Any, None, None]:
        """Make a static group of all who pass this boundary, if they agree on who they are, in place of the last."""
        rank = self.rank
        yield from self._close_statics()
        group = rank.make_static(f"s{step}", view, rank.timeouts.op_floor / 2)
        while not group.is_running and not group.membership.is_over:
            if rank.gone:
                raise RankEnded(rank.gone)
            yield "static"

    def _close_statics(self) -> Generator[float, None, None]:
        for name in list(self.rank.statics):
            yield from self.rank.close_static(name)

    def _groups_enter(self, view: View) -> Generator[str, None, None]:
        """Wait until all groups run in that view, as `SubgroupInternals.follow` does."""
        for name, group in self.rank.groups.items():
            if group.membership.epoch:
                yield from self._enter_group(name, view.epoch)

    def _enter_group(self, name: str, epoch: int) -> Generator[str, None, None]:
        """Wait until a group runs in that epoch, or a later one."""
        rank = self.rank
        rank.waits_for_groups = True
        while rank.groups[name].membership.epoch < epoch:
            if rank.gone:
                raise RankEnded(rank.gone)
            yield "group"
        rank.waits_for_groups = False

    def _close_group(self, name: str) -> Generator[str, None, None]:
        """Close a group when the others have entered what this member has, or after `PARTING`."""
        rank = self.rank
        until = rank.clock() + PARTING
        rank.after(PARTING, rank.goes_on_in_group)
        while rank.groups[name].membership.is_needed() and rank.clock() < until and not rank.gone:
            yield "group"
        rank.close_group(name)

    def _ends(self) -> Generator[Any, None, None]:
        """Note that the script has ended well, whatever happens now."""
        yield from self._close_statics()
        for name in list(self.rank.groups):
            yield from self._close_group(name)
        self.rank.finishing = True
        self.rank.promises.excuse(self.rank.incarnation, "its script has ended")

    def _enter(self) -> Generator[Any, Any, View | None]:
        """Prepare to join a running job, and join it; None: it never will be in it."""
        rank = self.rank
        machine = rank.node.machine
        loop = 0
        view: View | None = None
        while view is None:
            loop += 1
            rank.say("prepares for step loop %s", loop)
            yield self.work.prepare * (0.5 + rank.world.random.random())
            if rank.left:
                return None
            if loop == 1:
                yield from self._make_groups()
            if loop >= machine.loop_of_job:
                rank.promises.ready(rank)
                rank.do(rank.node.tell(m.Ready(loop)))
                view = yield "join"
        if loop < machine.loop_of_job:
            raise BrokenPromise(
                f"{rank.name} came in from step loop {loop} when the others were in {machine.loop_of_job}"
            )
        return view

    def _ops(self, step: int) -> Generator[Operation, None, None]:
        """Calls the ops of a step, `ahead` of them in flight. Yields one to wait for it, again when it is done."""
        rank, work = self.rank, self.work
        flight: list[Operation] = []
        for i, count in enumerate(work.counts):
            number = step * len(work.counts) + i
            if (rank.replica, number) in rank.promises.wrong:
                count += 1
            if rank.gone:
                raise RankEnded(rank.gone)
            op = Operation(input_of(rank.replica, number, count).copy(), "float32", "sum", CHUNK, atomic=work.atomic[i])
            rank.exchange.submit(op)
            if op.number != number:
                raise AssertionError(f"{rank.name} calls op {number}, which gets the number {op.number}")
            flight.append(op)
            if len(flight) >= work.ahead:
                yield from _finished(flight.pop(0))
        for op in flight:
            yield from _finished(op)

    # -- a source of the state, as `ftcomm.training.catchup.StateSource` ----------------------------------------------

    def _at_boundary(self, step: int, view: View, model: int, holds: bool) -> None:
        joined = self._snapshots.due(step, view)
        if joined and holds and self.rank.replica in sources_of(view):
            self._snapshots.put(joined, step, (step, model))
        self._step = step
        asking, self._asking = self._asking, []
        for connection, fields in asking:
            self._answer(connection, fields)

    def _lingers(self) -> bool:
        members = self.rank.node.view.replicas if self.rank.node.view is not None else ()
        self._snapshots.only(members)
        return bool(self._snapshots)

    def _serve(self, connection: SimulatedConnection, fields: dict[str, Any]) -> bool:
        if self._step >= fields["step"]:
            self._answer(connection, fields)
        else:
            self._asking.append((connection, fields))
        return True

    def _answer(self, connection: SimulatedConnection, fields: dict[str, Any]) -> None:
        joiner = fields["replica"], fields["incarnation"]
        snapshot = self._snapshots.get(joiner, fields["step"])
        if snapshot is None:
            connection.send(1, ("refusal",))
            connection.close(1)
            return

        def asked(what: tuple[Any, ...]) -> None:
            if what[0] == "want":
                lies = self.rank.world.random.random() < 0.01  # memory that fails; a checksum finds it
                connection.send(1, ("block", what[1], snapshot[1], lies))
            else:
                self._snapshots.done(joiner)

        connection.receive[1] = asked
        connection.send(1, ("offer", snapshot[0]))


def _finished(op: Operation) -> Generator[Operation, None, None]:
    if not op.done:
        yield op
    if op.error is not None and not isinstance(op.error, MismatchError):
        raise RankEnded(str(op.error))
    yield op


def step_result(ops: list[Operation]) -> bytes:
    return b"".join(op.array.tobytes() if op.error is None else str(op.error).encode() for op in ops)


class SimulatedJoiner:
    """The joiner's side, as `Joiner` over `Fetch` in `ftcomm.training`, with the same `BlockScheduler`."""

    def __init__(self, rank: SimulatedRank, view: View, step: int, blocks: int) -> None:
        self.rank, self.step, self._blocks = rank, step, blocks
        self.kept: list[bytes] = []
        self.model = -1
        self.loaded = False
        self.offered = False
        self._said: int | None = None
        self._scheduler = BlockScheduler(sources_of(view))
        self._connections: dict[int, SimulatedConnection] = {}
        member = view.member(rank.replica)
        assert member is not None
        self._fields = {"step": step, "replica": rank.replica, "incarnation": member.incarnation}
        self._view = view
        self._left_view: set[int] = set()
        for source in self._scheduler.alive:
            self._dial(source)

    def keep(self, view: View) -> None:
        """Sources that are no members any more are given up without waiting for them."""
        for source in self._scheduler.alive:
            if source not in view.replicas:
                self._left_view.add(source)
                if source in self._connections:
                    self._connections[source].close(0)
                self._drop(source, "it is no member any more")

    def at_boundary(self, step: int) -> bool:
        """Load what has arrived, replay a little; True when the model is that of everybody entering `step`."""
        if self._scheduler.hopeless:
            raise RankEnded(f"the state of step {self.step} cannot be fetched: {self._scheduler.why()}")
        self._load()
        if self.loaded:
            for said in self.kept[:REPLAY_LEAST]:
                self.model = zlib.crc32(said, self.model)
            del self.kept[:REPLAY_LEAST]
        return self.loaded and not self.kept

    def finish(self) -> bool:
        """Load the state, after the last step; returns whether it was there."""
        if self._scheduler.hopeless:
            raise RankEnded(f"the state of step {self.step} cannot be fetched: {self._scheduler.why()}")
        self._load()
        if self.loaded:
            for said in self.kept:
                self.model = zlib.crc32(said, self.model)
            self.kept.clear()
        return self.loaded

    def _load(self) -> None:
        if not self.loaded and self._scheduler.complete:
            assert self._said is not None
            self.loaded, self.model = True, self._said
            self.rank.say("has loaded the state of step %s; %s steps to replay", self.step, len(self.kept))

    def _dial(self, source: int) -> None:
        if source not in self._scheduler.alive or self.rank.gone:
            return
        member = self._view.member(source)
        assert member is not None
        self.rank.network.dial(
            self.rank,
            member.ranks[self.rank.index].pid,
            lambda target, connection: target.accepts(connection, "state", self._fields),  # type: ignore[attr-defined]
            lambda connection: self._opened(source, connection),
            lambda reason: self._drop(source, str(reason)),
        )

    def _opened(self, source: int, connection: SimulatedConnection) -> None:
        connection.receive[0] = lambda what: self._received(source, connection, what)
        connection.closed[0] = lambda reason: self._drop(source, str(reason))

    def _received(self, source: int, connection: SimulatedConnection, what: tuple[Any, ...]) -> None:
        scheduler = self._scheduler
        if source not in scheduler.alive:
            return
        if what[0] == "refusal":
            connection.close(0)
            self._drop(source, "it took no snapshot for this replica")
            return
        if what[0] == "offer":
            if what[1] != self.step:
                raise AssertionError(f"replica {source} offers the state of step {what[1]}, not {self.step}")
            self._connections[source] = connection
            if not self.offered:
                scheduler.begin(self._blocks)
                self._news()
        else:
            _, number, model, lies = what
            if number != scheduler.due(source):
                raise AssertionError(f"replica {source} sends block {number}, {scheduler.due(source)} is due")
            if lies:
                connection.close(0)
                self._drop(source, f"block {number} has a wrong checksum")
                return
            if self._said not in (None, model):
                raise AssertionError(f"sources differ in the state of step {self.step}")
            self._said = model
            scheduler.received(source)
        self._ask()

    def _ask(self) -> None:
        for source in self._scheduler.alive:
            connection = self._connections.get(source)
            if connection is None:
                continue
            for number in self._scheduler.ask(source):
                connection.send(0, ("want", number))
        if self._scheduler.complete:
            for connection in self._connections.values():
                connection.send(0, ("done",))
                connection.close(0)
            self._connections.clear()
            self._news()

    def _drop(self, source: int, reason: str) -> None:
        self._scheduler.drop(source, reason)
        self._connections.pop(source, None)
        if self._scheduler.hopeless:
            self._news()
        elif self.offered:
            self._ask()

    def _news(self) -> None:
        self.offered = True
        self.rank.awaken()
