"""A group of ranks that reduce together, and the calls a user makes on it."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import inspect
import logging
import os
import socket
import threading
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from ftcomm import callers, credentials, ending
from ftcomm.address import open_port, own_address
from ftcomm.calls import Calls
from ftcomm.collective.checksum import Divergence
from ftcomm.collective.operation import ELSEWHERE, UNKNOWN, stamp_of
from ftcomm.collective.roster import NONE
from ftcomm.collective.watchdog import Stall
from ftcomm.control import fork
from ftcomm.control import messages as m
from ftcomm.control.agent import Agent, Gone, JoinError
from ftcomm.control.links import listen
from ftcomm.control.sealed import Channel
from ftcomm.control.views import Address, View
from ftcomm.control.wire import number, text
from ftcomm.descriptors import room_for
from ftcomm.engine import Engine, expelled
from ftcomm.engines.base import Events, GroupEngine
from ftcomm.engines.registry import open_engine
from ftcomm.errors import CollectiveTimeout, ExpelledError, FtcommError, InitError, TooLateError, TransportError
from ftcomm.messages.p2p import JobPost
from ftcomm.own import own_process
from ftcomm.router import ConnectionRouter
from ftcomm.settings import Settings, split_endpoint
from ftcomm.sync.robust_mutex import hold
from ftcomm.sync.sched import request_short_slice
from ftcomm.transport.connect import CONNECTIONS, Fields, accept, here_is
from ftcomm.transport.nixl import context as nixl
from ftcomm.transport.segment import LIVES, life

if TYPE_CHECKING:
    from ftcomm.subgroup import Subgroup

log = logging.getLogger("ftcomm")


class Group(Calls):
    """One shard of the job: the ranks with the same index inside all of its replicas. Thread-safe but for `boundary`.

    Calls are matched by their order, which threads must keep the same on all members, or have a group each.

    rank, world_size: the place of this replica in `roster`, which every `root`, `src` and `dst` names, and its length.
    roster, contributors: the replicas in rank order, and those of them whose input counts. Alike on all members; they
        change at step boundaries alone. `view`, `members` and `contributing` say what is in force now.
    replica, replicas: the number of this replica, and with how many the job was started.
    shard, shards: the index of this rank inside its replica, and how many ranks a replica has.
    drained: whether this replica has left the job.

    A replica that joins a running job is in no view, and nobody waits for it, before `ready`, which the first boundary
    or op calls. Until then `roster`, `contributors` and `view` say who was there when it came, and this replica with
    them. It does not contribute (`contributes`) until it has caught up.
    """

    def __init__(self, settings: Settings) -> None:
        own_process()
        coordinator = split_endpoint(settings.coordinator, "FTCOMM_COORDINATOR")
        host = own_address(settings.host, coordinator, "FTCOMM_COORDINATOR", settings.init_timeout)
        self.settings = settings = dataclasses.replace(settings, host=host)
        mine = credentials.of(settings)
        room_for(settings.replicas - 1, f"replica {settings.replica} rank {settings.shard}")
        self.replica, self.replicas = settings.replica, settings.replicas
        self.shard, self.shards = settings.shard, settings.ranks_per_replica
        self._me = settings.replica
        self.roster: tuple[int, ...] = ()
        self.contributors: tuple[int, ...] = ()
        self.drained = False
        self._fresh = False  # has joined a running job, and not caught up yet
        self._outside = False  # has joined a running job, and not passed its first boundary yet
        self._runs = False  # in a view
        self._view: View | None = None  # that ops run in
        self._entering = threading.Lock()  # guards the way into the first one; never held across a wait
        way = nixl.get_nixl(f"{self.replica}.{self.shard}")
        if settings.transport == "nixl":
            way.endpoint()
        sock = open_port(settings.host)
        self._engine: GroupEngine = open_engine(settings)
        self._segment = self._engine.segment
        self._exchange = self._engine.exchange(Events(self._stalled, self._failed, self._lost, self._diverged))
        self._post = JobPost(self.replica, self.shard, lambda *call: self._agent.dial(*call), self._engine.slots)
        leader = split_endpoint(settings.leader, "FTCOMM_LEADER") if settings.ranks_per_replica > 1 else None
        port = sock.getsockname()[1]
        tuning, rack = settings.tuning, settings.rack
        address = here_is(settings.host, port, self._segment, tuning, rack, self._engine.arithmetic, settings.data)
        self._data_plane = Engine(
            settings.shard,
            self._exchange,
            address,
            mode=self._engine.transport,
            dial=self._dial_address,
            on_lost=self._lost,
            layout=self._segment.layout,
            algorithm=settings.algorithm,
            tuning=settings.tuning,
            on_reached=self._engine.reach,
            on_left=self._engine.leave,
            on_died=lambda replica, epoch: self._agent.suspect(replica, epoch, "its process died", proof=True),
            on_view=self._entered,
            on_failed=self._ended,
            on_waits=lambda seconds: self._router.waiting(seconds),
            data=settings.data,
        )
        self._subgroups: tuple[Subgroup, ...] = ()  # replaced as a whole, so that any thread may go through it
        self._replacing = threading.Lock()  # guards that; never held across a wait
        self._agent = Agent(
            self._data_plane,
            coordinator=coordinator,
            credentials=mine,
            replica=settings.replica,
            rank=settings.shard,
            ranks=settings.ranks_per_replica,
            leader=leader,
            leader_socket=_leader_socket(settings, leader) if leader and settings.shard == 0 else None,
            sock=sock,
            address=address,
            timeouts=settings.timeouts,
            on_start=self._alive,
        )
        for what in CONNECTIONS:
            self._agent.serve(what, functools.partial(self._attach, what))
        self._agent.serve("p2p", self._post.incoming)
        self._port: int = port
        self._router = ConnectionRouter(self._agent)  # for the other groups of this rank
        self._open = True
        fork.take_part(self, f"replica {self.replica} rank {self.shard}")
        self._stall: Stall | None = None  # the last that was reported
        self._step = 0
        self._loop = -1  # the thread that passes boundaries, -1 before the first one
        self._lag = 0  # boundaries passed beyond the training steps: of repeated steps and of pauses
        self._intra_replica_exchanges = 0  # how often the ranks of this replica have begun to meet in a step loop
        self._on_step_error: Callable[[Exception], None] | None = None  # of a step loop that can discard the step

    def _join(self) -> None:
        self._engine.warm()
        self._agent.start()
        try:
            runs = self._agent.register(self.settings.init_timeout)
        except JoinError as error:
            self.close()
            raise self._not_joined(error) from None
        if runs:
            self.ready()
        else:
            self.roster, self.contributors = self.view.replicas, tuple(sorted(self.view.contributing))
            self._fresh = True
            log.info("replica %d rank %d: joins a running job when its script is ready", self.replica, self.shard)
        self._outside = self._fresh

    def _say_where(self) -> None:
        how = "contributing" if self.contributes else "catching up"
        who = ", ".join(map(str, self.members))
        log.info(
            "replica %d rank %d: in epoch %d with replicas %s (%s)", self.replica, self.shard, self.epoch, who, how
        )

    def _not_joined(self, error: JoinError) -> InitError:
        kind = TooLateError if error.ending is m.Ending.TOO_LATE else InitError
        return kind(f"{self._named()} could not join the job: {error}")

    def _named(self) -> str:
        return f"replica {self.replica} rank {self.shard}"

    def _begin(self, view: View) -> None:
        """This rank runs in its first view."""
        self._step = view.step or 0
        self._exchange.stand(self._step - 1)
        self._use(self._exchange.roster(NONE if view.step is None else view.step))
        self._fresh = self.replica not in view.contributing

    def _use(self, roster: m.Roster) -> None:
        self.roster, self.contributors = roster.members, roster.givers

    # -- collectives ---------------------------------------------------------------------------------------------

    def _may_call(self) -> None:
        self.ready()
        if self.drained:
            where = "before it had joined" if self._outside else f"at the boundary of step {self._step - 1}"
            raise ExpelledError(
                f"replica {self.replica} has left the job {where}; look at Group.drained before a collective that "
                "follows the step loop"
            )

    def _when(self) -> tuple[int, int]:
        if self._loop == -1:
            return UNKNOWN, 0
        stamp = stamp_of(self._step - 1) if threading.get_ident() == self._loop else self._of_another_thread()
        return stamp, self._lag

    def _of_another_thread(self) -> int:
        """Than that of the step loop. It passes no boundary while it stands in a backward, so what autograd calls for
        that, in threads of its own on a GPU, is of its step."""
        if getattr(callers.chained, "value", False):
            return UNKNOWN
        by_loop = callers.in_backward_of(self._loop)
        if by_loop is None:
            return UNKNOWN
        return stamp_of(self._step - 1) if by_loop else ELSEWHERE

    def _patience(self) -> float:
        return self.settings.timeouts.give_up

    def verify(self, state: Any) -> str:
        """Compare `state` on this rank of all contributing replicas; returns its digest, 32 hex digits, if it is equal.

        state: what `ftcomm.steps` takes, a module or an optimizer alone, or any nest of mappings and sequences of
            arrays. Names, dtypes, shapes and bytes count.

        Call it at the same point on all members, between two steps, say; it is two all-reduces at most, so it blocks
        until all have come. Hashing costs about a second a gigabyte. What a replica holds that still catches up is not
        compared. Raises `DivergenceError` on all members, with the replicas that differ from the majority and the first
        entries in which they do, and `StateError` for what cannot be compared. The group goes on in either case.
        """
        from ftcomm.training.compare import compare

        return compare(state, self)

    # -- membership ----------------------------------------------------------------------------------------------

    @property
    def view(self) -> View:
        """The view in force; before `ready` in a replica that joins a running job what it may become."""
        view = self._view or self._agent.preview
        assert view is not None
        return view

    @property
    def step(self) -> int:
        """The boundary to pass next. A replica that joins a running job is told when it is in: this calls `ready`."""
        self.ready()
        return self._step

    @property
    def epoch(self) -> int:
        return self.view.epoch

    @property
    def members(self) -> tuple[int, ...]:
        """The replicas of the view in force, ascending."""
        return self.view.replicas

    @property
    def contributing(self) -> frozenset[int]:
        """Those of them whose input counts."""
        return self.view.contributing

    @property
    def contributes(self) -> bool:
        """Whether the input of this replica counts; False while it catches up."""
        return self.replica in self.view.contributing

    def ready(self) -> None:
        """The script of this rank has prepared: from now on the others may wait for it. The first boundary, the first
        op and the first look at `step` call this, so no script need to. Does nothing in a replica that runs in a view.

        In a replica that joins a running job it blocks until all its ranks have called this and the job, at one of its
        next step boundaries, has taken it in; or until it never will, `drained`. Thread-safe. Raises `ExpelledError` if
        the job has ended, `InitError` if the coordinator is away for FTCOMM_INIT_TIMEOUT.
        """
        if self._runs or self.drained:
            return
        own_process()
        try:
            view = self._agent.enter(self.settings.init_timeout)
        except Gone as error:
            raise expelled(self._named(), str(error), error.ending) from None
        except JoinError as error:
            raise self._not_joined(error) from None
        with self._entering:
            if not self._runs and not self._agent.left:
                self._begin(view)
                self._say_where()
            self._runs, self.drained = not self._agent.left, self._agent.left
        if self._runs:
            for subgroup in self._subgroups:
                subgroup.follow(view, self.settings.timeouts.give_up)

    def boundary(self, step: int, timeout: float | None = None) -> View:
        """Stand between step `step` - 1 and `step`: replicas join, begin to contribute and leave here, nowhere else.

        Call it from one thread, with increasing steps, the same on all replicas. Waits for the ops in flight; returns
        the view in force. Without a change under way it costs microseconds and asks nobody. `drained` is True
        afterwards if this replica has left the job. Raises `ExpelledError`, `CollectiveTimeout`, and what an op of a
        CUDA graph failed with. The first one of a replica that joins is `step` of this group, see `ready`.
        """
        own_process()
        self.ready()
        ending.goes_on()
        if self.drained:
            return self.view
        try:
            for group in (self._exchange, *self._subgroups):
                group.drain(timeout)
            view = self._agent.boundary(step, self.settings.timeouts.give_up if timeout is None else timeout)
            for group in (self._exchange, *self._subgroups):
                group.common(reset=True)
        except Gone as error:
            raise expelled(self._named(), str(error), error.ending) from None
        except TimeoutError as error:
            raise CollectiveTimeout(f"replica {self.replica} rank {self.shard}: {error}") from None
        self._step = step + 1
        self._loop = threading.get_ident()
        self._outside = False
        self.drained = self._agent.left
        if not self.drained:
            self._use(self._exchange.pass_boundary(step, self.settings.timeouts.give_up))
            for subgroup in self._subgroups:
                subgroup.follow(view, self.settings.timeouts.give_up)
        return view

    @property
    def _stood(self) -> float:
        """Seconds that ops of this rank have stood still, waiting for members that did not move, or were lost."""
        return float(self._exchange.stood + sum(subgroup._stood for subgroup in self._subgroups))

    def contributed(self) -> tuple[int, ...]:
        """The replicas whose input is in every chunk of every all-reduce since the boundary; the same on all members.

        Subgroups of all replicas (the world of torch is one, if replicas have several ranks) count too, others do not.
        Waits for the ops in flight; then it costs nothing and asks nobody. A replica that was lost in mid-op is in some
        chunks of it perhaps, but not in all, and so is left out. Raises `FtcommError` if nothing was reduced.
        """
        own_process()
        told = []
        for group in (self._exchange, *(subgroup for subgroup in self._subgroups if subgroup.of_all)):
            group.drain(None)
            told.append(group.common())
        sets = [who for who in told if who is not None]
        if not sets:
            raise FtcommError(
                f"replica {self.replica}, step {self._step - 1}: nothing was reduced since the step boundary, so "
                "nobody has contributed; call contributed(), or commit() of a sampler, after the gradients are reduced"
            )
        return tuple(replica for replica in sets[0] if all(replica in who for who in sets))

    def _caught_up(self, step: int) -> None:
        """This rank holds the state of everybody as of `step`: let its replica contribute from a next boundary on."""
        own_process()
        self._fresh = False
        self._agent.tell(m.CaughtUp(step))

    def leave(self) -> None:
        """Ask to leave at a next boundary; `drained` becomes True there, and in `ready`. Does not block."""
        own_process()
        self._agent.tell(m.Leave())

    def report(self, kind: str = "report", **fields: str | int | float | bool | None) -> None:
        """A line for the event log of the job. Does not block; said later if the coordinator is away."""
        own_process()
        self._agent.tell(m.Report(kind, {"rank": self.shard, **fields}))

    # -- to other parts of ftcomm --------------------------------------------------------------------------------

    def _dial(self, replica: int, purpose: str, fields: dict[str, str | int]) -> Channel:
        """An authenticated blocking connection to this rank of another replica, handed there to who serves `purpose`.
        Waits as long as an op does for a process whose kernel answers. Raises `TransportError`."""
        try:
            return self._agent.dial(replica, purpose, fields)
        except OSError as error:
            raise TransportError(f"replica {replica} cannot be reached for {purpose!r}: {error}") from error

    def _dial_rank(
        self, replica: int, rank: int, purpose: str, fields: dict[str, str | int], timeout: float
    ) -> Channel:
        """An authenticated blocking connection to any rank of the view in force. Raises `OSError`."""
        member = self.view.member(replica)
        if member is None or rank >= len(member.ranks):
            raise ConnectionError(f"the view of epoch {self.epoch} has no rank {rank} of replica {replica}")
        return self._agent.dial_address(member.ranks[rank], purpose, fields, timeout)

    def subgroup(self, name: str, replicas: Collection[int]) -> Subgroup:
        """A group of this rank with its likes in `replicas`, which outlives losses as this one does; see `Subgroup`.

        name: the same on all members, and of no other group that they have.

        Call it on all members, in a replica that comes back too, and there before its first boundary: others wait for
        it then. Its calls stand in no order to those of other groups. Blocks until all have come that are in the view
        in force; in a replica that joins a running job, and is in none yet, not at all. It takes 16 MB of memory from
        its first collective on, and as much for each peer that does not share memory; before that, some KB.
        Raises `ArgumentError`, and `TransportError` after FTCOMM_INIT_TIMEOUT.
        """
        from ftcomm.subgroup import Subgroup

        own_process()
        made = Subgroup(
            self,
            name,
            replicas,
            dial=self._agent.dial_address,
            on_stall=self._subgroup_stalled,
            on_failed=self._failed,
            on_divergence=self._diverged if self.settings.verify else None,
        )
        with self._replacing:
            self._subgroups = (*self._subgroups, made)
        try:
            made.begin(self.settings.init_timeout)
        except BaseException:
            made.close()
            raise
        return made

    def _left(self, subgroup: Subgroup) -> None:
        """It was closed."""
        with self._replacing:
            self._subgroups = tuple(other for other in self._subgroups if other is not subgroup)

    def _serve(self, purpose: str, handler: Callable[[Channel, dict[str, str | int]], None]) -> None:
        """Hand every incoming connection of `purpose` to `handler(channel, fields)`, in a thread of its own."""
        self._agent.serve(purpose, handler)

    def close(self, *, finished: bool = False, failure: str = "the group was shut down") -> None:
        """Leave without a step boundary; idempotent. `finished`: the script has ended well, nobody need wait for us.
        Else this replica is lost to the others, with `failure` for a reason. Does nothing in a forked child, which has
        nothing to leave."""
        if not self._open or fork.is_child():
            return
        self._open = False
        for subgroup in self._subgroups:
            subgroup.close()
        self._post.close(FtcommError("the group was shut down (ftcomm.shutdown); call ftcomm.init() before any send"))
        if finished and self._agent.view is not None:
            self._agent.finish(timeout=2.0)
        elif not finished:
            self._agent.give_up(failure)
        self._agent.stop()
        self._router.close()
        self._data_plane.close()
        self._exchange.fail(FtcommError("the group was shut down (ftcomm.shutdown); call ftcomm.init() before any op"))
        self._engine.close()
        fork.part(self)

    # -- callbacks -----------------------------------------------------------------------------------------------

    def _alive(self) -> None:
        """The first act of the control thread: its end is what the others see."""
        request_short_slice()
        hold(*(self._segment.address + 8 * life(reader) for reader in range(LIVES)))

    def _dial_address(self, there: Address, purpose: str, fields: Fields) -> Channel:
        return self._agent.dial_address(there, purpose, dict(fields))

    def _attach(self, what: str, channel: Channel, fields: dict[str, str | int]) -> None:
        who, life = number(fields, "replica"), text(fields, "nonce")
        epoch = number(fields, "epoch")
        accept(self._exchange, what, channel, who, epoch, life, self._lost, data=self.settings.data)

    def _entered(self, view: View) -> None:
        """Called before any op runs in `view`: who returns from one finds `epoch` and `members` as they were in it."""
        self._view = view
        self._post.enter(view)
        self._router.entered(view)

    def _failed(self, error: BaseException) -> None:
        """An exchange of this rank cannot go on."""
        self._agent.failed(str(error))

    def _ended(self, error: FtcommError) -> None:
        self._post.fail(error)
        for subgroup in self._subgroups:
            subgroup.fail(error)

    def _subgroup_stalled(self, epoch: int, op: int, waiting_on: tuple[int, ...]) -> None:
        """A rank has one stall at a time for the coordinator: that of this group, if there is one."""
        if self._exchange.waiting(0) is None:
            self._agent.stalled(epoch, op, waiting_on)

    def _lost(self, replica: int, epoch: int, reason: str) -> None:
        self._agent.suspect(replica, epoch, reason, proof=False)

    def _diverged(self, divergence: Divergence) -> None:
        log.warning("replica %d rank %d: %s", self.replica, self.shard, divergence)
        wrong, right = (", ".join(map(str, who)) for who in (divergence.wrong, divergence.right))
        self.report("divergence", op=divergence.op, chunk=divergence.chunk, wrong=wrong, right=right)

    def _stalled(self, stall: Stall) -> None:
        """Comes every second as long as the op stands still; one word in the log is enough."""
        if stall != self._stall:
            self._stall = stall
            waiting = ", ".join(map(str, stall.waiting_on))
            who = f"replica {self.replica} rank {self.shard}"
            log.warning("%s: op %d makes no progress; waiting for replicas %s", who, stall.op, waiting)
        self._agent.stalled(stall.epoch, stall.op, tuple(stall.waiting_on))


def _leader_socket(settings: Settings, leader: tuple[str, int]) -> socket.socket:
    """Where the other ranks of the replica come: inherited from the launcher, or bound here."""
    if settings.leader_fd is not None:
        return fork.apart(socket.socket(fileno=settings.leader_fd))
    try:
        return listen(*leader)
    except OSError as error:
        raise InitError(
            f"rank 0 cannot listen on FTCOMM_LEADER={settings.leader}: {error.strerror or error}; give each replica a "
            "free port on the host of its rank 0"
        ) from None


# -- the default group -----------------------------------------------------------------------------------------------

_default: Group | None = None


def init(settings: Settings | None = None) -> Group:
    """Join the job that the environment names (see `ftcomm run`) and return the default group.

    Blocks until all replicas of a new job are here, or, in a running job, until that knows this one (and has passed its
    first step boundary). In the latter case nobody waits for this replica before its own first boundary or op, so the
    script may take its time until then; see `Group.ready`. Call it once. Raises `SettingsError`, `InitError`,
    `TransportError`.
    """
    global _default
    own_process()
    if _default is not None:
        raise InitError("ftcomm.init() was called before in this process; use ftcomm.default_group()")
    settings = Settings.from_env() if settings is None else settings
    _configure_log()
    ending.watch()
    group = Group(settings)
    group._join()
    _default = group
    atexit.register(_at_exit)
    return group


def default_group() -> Group:
    """The group of `init`. Raises `InitError` without one."""
    if _default is None:
        raise InitError("there is no group yet; call ftcomm.init() first")
    return _default


def _of_default_group(method: Callable[..., Any]) -> Callable[..., Any]:
    """A call of `Group` as a function that takes the group as a keyword."""
    name = method.__name__

    def call(*args: Any, group: Calls | None = None, **kwargs: Any) -> Any:
        return getattr(default_group() if group is None else group, name)(*args, **kwargs)

    _, *parameters = inspect.signature(method).parameters.values()
    parameters.append(inspect.Parameter("group", inspect.Parameter.KEYWORD_ONLY, default=None))
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"`Group.{name}` on `group`, or on the default group.\n\n        {method.__doc__}"
    return call


allreduce = _of_default_group(Group.allreduce)
allgather = _of_default_group(Group.allgather)
reduce_scatter = _of_default_group(Group.reduce_scatter)
alltoall = _of_default_group(Group.alltoall)
broadcast = _of_default_group(Group.broadcast)
reduce = _of_default_group(Group.reduce)
gather = _of_default_group(Group.gather)
scatter = _of_default_group(Group.scatter)
barrier = _of_default_group(Group.barrier)
send = _of_default_group(Group.send)
recv = _of_default_group(Group.recv)


def verify(state: Any, group: Group | None = None) -> str:
    """`Group.verify` on `group`, or on the default group."""
    return (default_group() if group is None else group).verify(state)


def report(**fields: str | int | float | bool | None) -> None:
    """Numbers and words about this rank's training for the event log of the job (step, loss, ...). Does not block."""
    default_group().report("report", **fields)


def shutdown() -> None:
    """Say that this rank's work is done, and leave. Called at exit if the script ended well; idempotent.

    Blocks until all ranks of the replica have said so, or one has died, and then for 2 seconds at most."""
    global _default
    group, _default = _default, None
    if group is not None:
        group.close(finished=True)


def _at_exit() -> None:
    """A script that ends by an error is not finished: its replica is lost to the others, and restarted."""
    why = ending.failure()
    if not why:
        shutdown()
    elif _default is not None:
        _default.close(failure=why)


def _configure_log() -> None:
    """Log to stderr if the program has set up no logging of its own."""
    level = os.environ.get("FTCOMM_LOG", "info").upper()
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s ftcomm %(levelname)s: %(message)s"))
        log.addHandler(handler)
        log.propagate = False
        log.setLevel(level if level in ("DEBUG", "INFO", "WARNING", "ERROR") else "INFO")
