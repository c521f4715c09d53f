"""The group of ranks that reduce together across replicas, and the calls a user makes on it."""

from __future__ import annotations

import dataclasses
import logging
import socket
import threading
from _thread import get_ident
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from ftcomm.collective.checksum import Divergence
from ftcomm.collective.member import GroupExchange
from ftcomm.collective.operation import stamp_of
from ftcomm.collective.roster import NONE
from ftcomm.collective.watchdog import Stall, StallLog
from ftcomm.control import fork, liveness
from ftcomm.control import messages as m
from ftcomm.control.agent_ranks import agent_ranks
from ftcomm.control.control_thread import ACK, ControlThread
from ftcomm.control.links import listen
from ftcomm.control.own_host_agent import AgentPlace
from ftcomm.control.rank_errors import Gone, JoinError
from ftcomm.control.rank_name import rank_name
from ftcomm.control.script_end import ScriptEnd
from ftcomm.control.sealed import Channel
from ftcomm.control.views import View
from ftcomm.engines.base import Events, JobEngine
from ftcomm.engines.registry import open_engine
from ftcomm.errors import CollectiveTimeout, FtcommError, InitError, RemovedError, TooLateError
from ftcomm.groups.calls import Calls
from ftcomm.groups.communicator import Communicator, Terms
from ftcomm.groups.data_plane import LocalDataPlane, removed_error
from ftcomm.groups.group_internals import Internals
from ftcomm.kernels.call_codes import ELSEWHERE, UNKNOWN
from ftcomm.p2p.calls import JobProgressEngine
from ftcomm.process import callers, ending, pending, stacks
from ftcomm.process.descriptors import JOB_PEER, room_for
from ftcomm.process.own import checked_page, own_process
from ftcomm.recorder import files
from ftcomm.recorder.layout import ALL, GroupKind, PhaseKind, RecordingEnd
from ftcomm.recorder.recorder import Owner
from ftcomm.recorder.waits import PhaseWait
from ftcomm.settings import Settings, credentials, split_endpoint
from ftcomm.sync.robust_mutex import hold
from ftcomm.sync.sched import request_short_slice
from ftcomm.transport.address import open_port, own_address
from ftcomm.transport.connect import prepare
from ftcomm.transport.group_connection import P2P
from ftcomm.transport.router import PURPOSE, ConnectionRouter
from ftcomm.transport.segment import MUTEXES, mutex

if TYPE_CHECKING:
    from ftcomm.groups.subgroup import Subgroup
    from ftcomm.groups.subgroup_internals import SubgroupInternals

log = logging.getLogger("ftcomm")

FINISH = 30.0  # s that a finished replica waits for a coordinator to hear that, which may have to come back


class Group(Calls):
    """The ranks of one shard: those with the same index inside all replicas of a job. Thread-safe, except `boundary`.

    Members match calls by their order. Threads must keep that order the same on all members, or have a group each.

    rank: the place of this replica in `roster`, from 0. Every `root`, `src` and `dst` is such a place.
    world_size: the length of `roster`.
    roster, contributors: the replicas in rank order, and those of them whose input counts. The same on all members;
        they change only at step boundaries. `view`, `members` and `contributing` say what is in force now.
    replica, replicas: the number of this replica, and the number of replicas with which the job was started.
    shard, shards: the index of this rank inside its replica, and how many ranks a replica has.
    drained: whether this replica has left the job.
    name: "*", as recordings and verdicts name the group of all replicas.

    A replica that joins a running job is in no view, and no member waits for it, before `ready`, which the first
    boundary or op calls. Until then `roster`, `contributors` and `view` say who was there when it came, with this
    replica added. It does not contribute (`contributes`) until it has caught up.
    """

    _p2p: JobProgressEngine
    _engine: JobEngine

    def __init__(self, settings: Settings) -> None:
        own_process()
        coordinator = split_endpoint(settings.coordinator, "FTCOMM_COORDINATOR")
        host = own_address(settings.host, coordinator, "FTCOMM_COORDINATOR", settings.init_timeout)
        self.settings = settings = dataclasses.replace(settings, host=host)
        mine = credentials.of(settings)
        self._recorder = files.begin(_owner(settings), settings.coordinator)
        self._stacks = stacks.serve(files.own_path())
        led = settings.ranks_per_replica - 1 if settings.shard == 0 else 0  # ranks that connect to this one
        room_for(JOB_PEER * (settings.replicas - 1) + led, rank_name(settings.replica, settings.shard))
        self.replica, self.replicas = settings.replica, settings.replicas
        self.shard, self.shards = settings.shard, settings.ranks_per_replica
        self.contributors: tuple[int, ...] = ()
        self.drained = False
        self._runs = False  # whether this rank is in a view
        self._view: View | None = None  # the view that ops run in
        self._entering = threading.Lock()  # guards the way into the first view; never held during a wait
        prepare(settings.transport, f"{self.replica}.{self.shard}")
        sock = open_port(settings.host)
        engine = open_engine(settings)
        p2p = JobProgressEngine(self.replica, self.shard, self._dial_p2p, engine.slots)
        leader = split_endpoint(settings.leader, "FTCOMM_LEADER") if settings.ranks_per_replica > 1 else None
        port = sock.getsockname()[1]
        self._communicator = communicator = Communicator(
            ALL,
            self.replica,
            engine,
            Events(self._stalled, self._failed, self._lost, self._diverged),
            p2p,
            Terms((settings.host, port), settings.data, settings.algorithm, settings.tuning, settings.rack),
            GroupKind.JOB,
            on_died=self._died,
        )
        super().__init__(ALL, self.replica, p2p, engine, communicator.exchange)
        self.roster = ()
        self._segment = communicator.segment
        data_plane = LocalDataPlane(
            settings.shard,
            communicator,
            p2p,
            dial=lambda there, fields: self._control_thread.dial_address(there, PURPOSE, fields),
            on_view=self._entered,
            on_failed=self._ended,
        )
        self._subgroups: tuple[Subgroup, ...] = ()  # replaced as a whole, so that any thread may read it
        self._replacing = threading.Lock()  # guards that; never held during a wait
        self._control_thread = ControlThread(
            data_plane,
            coordinator=coordinator,
            credentials=mine,
            replica=settings.replica,
            shard=settings.shard,
            ranks=settings.ranks_per_replica,
            replicas=settings.replicas,
            leader=leader,
            leader_socket=_leader_socket(settings, leader) if leader and settings.shard == 0 else None,
            sock=sock,
            address=communicator.here,
            timeouts=settings.timeouts,
            host_agent=_host_agent(settings),
            on_start=self._alive,
        )
        self._router = ConnectionRouter(self._control_thread)
        communicator.open(self._router, data_plane)
        self.internals = Internals(
            self._control_thread,
            port,
            self._router,
            self._exchange,
            settings.timeouts.give_up,
            view=lambda: self.view,
            may_call=self._may_call,
            when=self._when,
            next_boundary=lambda: self._step,
            stalled_seconds=self._stalled_seconds,
            join=self._join,
            end_as=lambda script: self._close(False, str(script), script),
        )
        self._open = True
        fork.take_part(self, rank_name(self.replica, self.shard))
        self._stalls = StallLog()
        self._step = 0
        self._loop = -1  # the thread that passes boundaries, -1 before the first one
        self._stamp = UNKNOWN  # of the calls of that thread

    def _join(self) -> None:
        self._engine.warm()
        try:
            self._control_thread.start()
            with self._recorder.phase(PhaseKind.JOIN):
                runs = self._control_thread.register(self.settings.init_timeout)
        except JoinError as error:
            self._close(False, str(error))
            raise self._not_joined(error) from None
        if runs:
            self.ready()
        else:
            self.roster, self.contributors = self.view.replicas, tuple(sorted(self.view.contributing))
            self.internals.catching_up = True
            log.info("%s: joins a running job when its script is ready", rank_name(self.replica, self.shard))
        self.internals.outside = self.internals.catching_up

    def _say_where(self) -> None:
        how = "contributing" if self.contributes else "catching up"
        who = ", ".join(map(str, self.members))
        log.info("%s: in epoch %d with replicas %s (%s)", rank_name(self.replica, self.shard), self.epoch, who, how)

    def _not_joined(self, error: JoinError) -> InitError:
        kind = TooLateError if error.ending is m.Ending.TOO_LATE else InitError
        return kind(f"{self._named()} could not join the job: {error}")

    def _named(self) -> str:
        return rank_name(self.replica, self.shard)

    def _begin(self, view: View) -> None:
        """Begin: this rank runs in its first view."""
        self._step = view.step or 0
        self._exchange.begin_at(self._step - 1)
        self._use(self._exchange.roster(NONE if view.step is None else view.step))
        self.internals.catching_up = self.replica not in view.contributing

    def _use(self, roster: m.Roster) -> None:
        self.roster, self.contributors = roster.members, roster.contributors

    # -- collectives ---------------------------------------------------------------------------------------------

    def _may_call(self) -> None:
        if not checked_page[0]:
            own_process()
        if self._runs and not self.drained and not self.internals.outside:
            return
        self._check_loop()
        self.ready()
        self._check_loop()
        if self.drained:
            where = "before it had joined" if self.internals.outside else f"at the boundary of step {self._step - 1}"
            raise RemovedError(
                f"replica {self.replica} has left the job {where}; look at Group.drained before a collective that "
                "follows the step loop"
            )

    def _check_loop(self) -> None:
        """Raise `FtcommError` if the others have this call behind them."""
        internals = self.internals
        if not internals.behind or self._exchange.capturing:
            return
        raise FtcommError(
            f"{self._named()} comes back to a job that is in step loop {internals.loop_of_job} of the script, and has "
            f"entered {internals.loop} so far. The others make this call no more; move it into a step loop, or behind "
            "the last one"
        )

    def _when(self) -> tuple[int, int]:
        if self._loop == -1:
            return UNKNOWN, 0
        stamp = self._stamp if get_ident() == self._loop else self._of_another_thread()
        return stamp, self.internals.lag

    def _of_another_thread(self) -> int:
        """Returns the stamp of a call from another thread than that of the step loop. That thread passes no boundary
        during a backward, so the calls of autograd for it, in threads of its own on a GPU, belong to its step."""
        if pending.called_here():
            return self._stamp
        if getattr(callers.chained, "value", False):
            return UNKNOWN
        by_loop = callers.in_backward_of(self._loop)
        if by_loop is None:
            return UNKNOWN
        return self._stamp if by_loop else ELSEWHERE

    def _default_timeout(self) -> float:
        return self.settings.timeouts.give_up

    def verify(self, state: Any) -> str:
        """Compare `state` on this rank of all contributing replicas; returns its digest, 32 hex digits, if it is equal.

        state: what `ftcomm.steps` takes, a module or an optimizer alone, or any nest of mappings and sequences of
            arrays. Names, dtypes, shapes and bytes count.

        Call it at the same point on all members, between two steps, say. It makes two all-reduces at most, so it blocks
        until all have come, and has its place in the order of calls. Hashing costs about a second a gigabyte. The state
        of a replica that catches up is not compared. Raises `DivergenceError` on all members, with the replicas that
        differ from the majority and the first entries that differ, and `StateError` for what cannot be compared. The
        group goes on in either case.
        """
        from ftcomm.groups.compare import compare

        return compare(state, self)

    # -- membership ----------------------------------------------------------------------------------------------

    @property
    def view(self) -> View:
        """The view in force; before `ready` in a replica that joins a running job, the view that it may get."""
        view = self._view or self._control_thread.preview
        assert view is not None
        return view

    @property
    def next_boundary(self) -> int:
        """The number of the step boundary to pass next. In a replica that joins a running job this calls `ready`, which
        may block, since only a member knows it."""
        self.ready()
        return self._step

    @property
    def epoch(self) -> int:
        """The epoch of the view in force."""
        return self.view.epoch

    @property
    def members(self) -> tuple[int, ...]:
        """The replicas of the view in force, ascending."""
        return self.view.replicas

    @property
    def contributing(self) -> frozenset[int]:
        """The replicas of the view in force whose input counts."""
        return self.view.contributing

    @property
    def contributes(self) -> bool:
        """Whether the input of this replica counts; False while it catches up."""
        return self.replica in self.view.contributing

    def ready(self) -> None:
        """Let the others wait for the script of this rank from now on. The first boundary, the first op and the first
        look at `next_boundary` call this, so a script need not. Does nothing in a replica that runs in a view.

        In a replica that joins a running job it blocks until all its ranks have called this and the job has taken it in
        at one of its next step boundaries; or until it never will, `drained`; or, in a step loop, until the job has
        that loop behind it. Thread-safe. Raises `RemovedError` if the job has ended, `InitError` if the coordinator is
        away for FTCOMM_INIT_TIMEOUT.
        """
        if self._runs or self.drained:
            return
        own_process()
        try:
            view, loop = None, 0
            while view is None and not loop:  # outside of a step loop none can be over
                loop = self.internals.loop if self.internals.step_loop is not None else 0
                view = self._control_thread.enter(self.settings.init_timeout, loop)
        except Gone as error:
            raise removed_error(self._named(), str(error), error.ending) from None
        except JoinError as error:
            raise self._not_joined(error) from None
        if view is None:
            return
        with self._entering:
            if not self._runs and not self._control_thread.left:
                self._begin(view)
                self._say_where()
            self._runs, self.drained = not self._control_thread.left, self._control_thread.left
        if self._runs:
            for subgroup in self._subgroups:
                subgroup.internals.follow(view, self.settings.timeouts.give_up)

    def boundary(self, step: int, timeout: float | None = None) -> View:
        """Stand between step `step` - 1 and `step`. Replicas join, begin to contribute and leave here, and nowhere
        else.

        Call it from one thread, with increasing steps, the same on all replicas. Blocks for the ops in flight and for a
        change under way, for `timeout` seconds at most (None: the timeouts of the job); returns the view in force.
        Without a change it costs microseconds and sends nothing. `drained` is True afterwards if this replica has left
        the job. Raises `RemovedError`, `CollectiveTimeout`, and what an op of a CUDA graph failed with. The first
        boundary of a joiner is `next_boundary`, see `ready`.
        """
        own_process()
        pending.settle()
        self.ready()
        ending.goes_on()
        if self.drained:
            return self.view
        try:
            for exchange in self._exchanges():
                exchange.wait_all(timeout)
            with PhaseWait(PhaseKind.STAND, number=step) as wait:
                view = self._control_thread.boundary(step, timeout, self.internals.loop, wait.look)
            for exchange in self._exchanges():
                exchange.common(reset=True)
        except Gone as error:
            raise removed_error(self._named(), str(error), error.ending) from None
        except TimeoutError as error:
            raise CollectiveTimeout(f"{rank_name(self.replica, self.shard)}: {error}") from None
        self._step = step + 1
        self._turn.agree()
        self._loop, self._stamp = get_ident(), stamp_of(step)
        self.internals.outside = False
        self.drained = self._control_thread.left
        if not self.drained:
            self._use(self._exchange.pass_boundary(step, self.settings.timeouts.give_up))
            for subgroup in self._subgroups:
                subgroup.internals.follow(view, self.settings.timeouts.give_up)
            if self.internals.on_roster is not None:
                self.internals.on_roster()
        return view

    def _stalled_seconds(self) -> float:
        """The seconds for which ops of this rank have stood still, waiting for members that were lost or did not
        move."""
        return sum(exchange.stalled_seconds for exchange in self._exchanges())

    def _exchanges(self) -> list[GroupExchange[Any]]:
        """Returns those of this group and of its subgroups."""
        return [self._exchange, *(internals.exchange for internals in self._internals_of_subgroups())]

    def _internals_of_subgroups(self) -> list[SubgroupInternals]:
        return [subgroup.internals for subgroup in self._subgroups]

    def contributed(self) -> tuple[int, ...]:
        """Returns the replicas whose input is in every chunk of every all-reduce since the boundary; the same on all
        members.

        Subgroups of all replicas count too (the world of torch is one, if replicas have several ranks), others do not.
        Blocks for the ops in flight, and sends nothing. A replica that was lost in mid-op may be in some chunks of it,
        but not in all, and so is left out. Raises `FtcommError` if nothing was reduced.
        """
        own_process()
        told = []
        of_all = (internals.exchange for internals in self._internals_of_subgroups() if internals.of_all)
        for exchange in (self._exchange, *of_all):
            exchange.wait_all(None)
            told.append(exchange.common())
        sets = [who for who in told if who is not None]
        if not sets:
            raise FtcommError(
                f"replica {self.replica}, step {self._step - 1}: nothing was reduced since the step boundary, so "
                "no replica has contributed; call contributed(), or commit() of a sampler, after gradients are reduced"
            )
        return tuple(replica for replica in sets[0] if all(replica in who for who in sets))

    def leave(self) -> None:
        """Ask to leave at one of the next boundaries, where `drained` becomes True, also in `ready`. Does not block.
        Any thread."""
        own_process()
        self._control_thread.tell(m.Leave())

    def report(self, **fields: str | int | float | bool | None) -> None:
        """Write numbers and words about this rank's training to the event log of the job (step, loss, ...). Does not
        block; they are sent later if the coordinator is away. Any thread."""
        self.emit("report", **fields)

    def emit(self, kind: str, **fields: str | int | float | bool | None) -> None:
        """Write an event of a kind of its own, as `report` writes numbers. Raises `ValueError` for a kind of the
        coordinator or of a launcher."""
        own_process()
        self._control_thread.tell(m.Report(kind, {"shard": self.shard, **fields}))

    # -- subgroups and the end -----------------------------------------------------------------------------------

    def subgroup(self, name: str, replicas: Collection[int]) -> Subgroup:
        """Make a group of this rank and the same rank of `replicas`. It survives losses as this group does; see
        `Subgroup`.

        name: the same on all members, and of no other group that they have.

        Call it on all members; in a replica that comes back too, before its first boundary, since others wait for it
        then. Its calls have no order relative to those of other groups. Blocks until all members in the view in force
        have come; it does not block in a replica that joins a running job and is in no view yet. The group takes as
        much memory as its collectives stage, up to 4 MB among members of one host and 16 MB beyond, and as much for
        each peer that does not share memory; before that, some KB. Raises `ArgumentError`, and `TransportError` after
        FTCOMM_INIT_TIMEOUT; in a step, a member that does not come is removed as a stall before.
        """
        from ftcomm.groups.subgroup import Subgroup
        from ftcomm.groups.subgroup_internals import SubgroupInternals

        own_process()
        internals = SubgroupInternals(
            self,
            name,
            replicas,
            dial=self._control_thread.dial_address,
            on_stall=self._subgroup_stalled,
            on_lost=self._lost,
            on_failed=self._failed,
            on_divergence=self._diverged,
        )
        made = Subgroup(internals, self._left)
        with self._replacing:
            self._subgroups = (*self._subgroups, made)
        try:
            internals.begin(self.settings.init_timeout)
        except BaseException:
            made.close()
            raise
        return made

    def _left(self, subgroup: Subgroup) -> None:
        """Forget a subgroup that was closed."""
        with self._replacing:
            self._subgroups = tuple(other for other in self._subgroups if other is not subgroup)

    def close(self, *, finished: bool = False) -> None:
        """Leave without a step boundary; idempotent. `finished`: the script has ended well, and no member need wait for
        this replica. Otherwise the others lose this replica. Blocks for up to 30 seconds while the coordinator is away.
        Does nothing in a forked child, which has nothing to leave."""
        self._close(finished, "the group was shut down")

    def _close(self, finished: bool, failure: str, script: ScriptEnd | None = None) -> None:
        """`close`, where a replica that has not finished is lost for the reason `failure`; `script` is how its script
        has ended, if it has."""
        if not self._open or fork.is_child():
            return
        self._open = False
        if self._subgroups:
            from ftcomm.groups.subgroup import close_all

            close_all(self._subgroups)
        self._p2p.close(FtcommError("the group was shut down (ftcomm.shutdown); call ftcomm.init() before any send"))
        if finished and self._control_thread.view is not None:
            # A replica that has left said so at the boundary.
            self._control_thread.finish(ACK if self.drained else FINISH)
        elif not finished:
            self._control_thread.tell(m.Report("gives_up", {"shard": self.shard}))
            self._control_thread.give_up(failure, script)
        self._control_thread.stop()
        self._router.close()
        self._communicator.fail(
            FtcommError("the group was shut down (ftcomm.shutdown); call ftcomm.init() before any op")
        )
        self._engine.close()
        if self._stacks is not None:
            self._stacks.close()
        files.end(RecordingEnd.CLOSED if finished else RecordingEnd.FAILED)
        fork.part(self)

    # -- callbacks -----------------------------------------------------------------------------------------------

    def _alive(self) -> None:
        """Begin the control thread: its end is what the others see."""
        request_short_slice()
        hold(*(self._segment.address + 8 * mutex(reader) for reader in range(MUTEXES)))

    def _dial_p2p(self, replica: int, incarnation: str, epoch: int) -> Channel:
        return self._control_thread.dial(replica, PURPOSE, self._communicator.fields(P2P, incarnation, epoch))

    def _entered(self, view: View) -> None:
        """Enter `view`, before any op runs in it: after an op, `epoch` and `members` are those that it ran in."""
        self._view = view
        self._recorder.epoch = view.epoch

    def _failed(self, error: BaseException) -> None:
        """Note that an exchange of this rank cannot go on."""
        self._control_thread.failed(str(error))

    def _ended(self, error: FtcommError) -> None:
        for subgroup in self._subgroups:
            subgroup.internals.fail(error)
        if self.internals.on_ended is not None:
            self.internals.on_ended(error)

    def _subgroup_stalled(self, stall: Stall) -> None:
        """Report the stall of a subgroup. A rank has one stall at a time for the coordinator: that of this group comes
        first."""
        if self._exchange.waiting(0) is None:
            self._control_thread.stalled(*stall)

    def _died(self, replica: int, epoch: int) -> None:
        """Report a member of this host whose control thread has ended: with its process, or since it has left."""
        member = None if self._view is None else self._view.member(replica)
        which = "its process" if self.shards == 1 else f"the process of its shard {self.shard}"
        left = member is not None and liveness.runs(member.ranks[self.shard])
        why = f"{which} runs, and takes no part in the job any more" if left else f"{which} died"
        self._control_thread.suspect(replica, epoch, why, proof=True)

    def _lost(self, replica: int, epoch: int, reason: str) -> None:
        self._control_thread.severed(replica, epoch, reason)

    def _diverged(self, divergence: Divergence) -> None:
        log.warning("%s: %s", rank_name(self.replica, self.shard), divergence)
        wrong, right = (", ".join(map(str, who)) for who in (divergence.wrong, divergence.right))
        self.emit("divergence", op=divergence.op, chunk=divergence.chunk, wrong=wrong, right=right)

    def _stalled(self, stall: Stall) -> None:
        """Report a stall, every second while the op stands still; one line in the log is enough."""
        if self._stalls.is_new(stall):
            waiting = ", ".join(map(str, stall.waiting_on))
            who = rank_name(self.replica, self.shard)
            log.warning("%s: op %d makes no progress; waiting for replicas %s", who, stall.op, waiting)
            self.emit("stalled", epoch=stall.epoch, op=stall.op, waiting=waiting)
        self._control_thread.stalled(*stall)


def _owner(settings: Settings) -> Owner:
    return Owner(
        *(settings.replica, settings.shard, settings.replicas, settings.ranks_per_replica, settings.job),
        socket.gethostname(),
    )


def _leader_socket(settings: Settings, leader: tuple[str, int]) -> socket.socket:
    """Returns the socket to which the other ranks of the replica come: inherited from the launcher, or bound here."""
    return _listening(settings.leader_fd, leader, "FTCOMM_LEADER", "shard 0", "its shard 0")


def _host_agent(settings: Settings) -> AgentPlace | None:
    """Returns where the host agent listens for its ranks; None if there is none."""
    shards = agent_ranks(settings.shard, settings.host_ranks, settings.ranks_per_replica)
    if not settings.host_agent or not shards:
        return None
    there = split_endpoint(settings.host_agent, "FTCOMM_HOST_AGENT")
    starts = settings.shard == shards.start
    _check_own(there, settings.shard)
    who = "FTCOMM_HOST_AGENT", f"shard {settings.shard}", "these ranks"
    return AgentPlace(there, shards, _listening(settings.host_agent_fd, there, *who) if starts else None)


def _check_own(there: tuple[str, int], shard: int) -> None:
    """Check that the host agent is of this host: there alone it proves its end that nobody listens at its port. Raises
    `InitError`."""
    try:
        listen(there[0], 0).close()
    except OSError as error:
        raise InitError(
            f"shard {shard}: FTCOMM_HOST_AGENT={there[0]}:{there[1]} is no address of its host "
            f"({error.strerror or error}); each host has a host agent of its own: set one such as 127.0.0.1:{there[1]}"
        ) from None


def _listening(inherited: int | None, there: tuple[str, int], variable: str, who: str, whose: str) -> socket.socket:
    """Returns a socket that listens, inherited from the launcher or bound here."""
    if inherited is not None:
        return fork.keep_from_children(socket.socket(fileno=inherited))
    try:
        return listen(*there)
    except OSError as error:
        raise InitError(
            f"{who} cannot listen on {variable}={there[0]}:{there[1]}: {error.strerror or error}; give each replica a "
            f"free port on the host of {whose}"
        ) from None
