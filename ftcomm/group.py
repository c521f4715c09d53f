"""A group of ranks that reduce together, and the calls a user makes on it."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ftcomm.arrays import Staged, stage
from ftcomm.collective.divergence import Divergence
from ftcomm.collective.exchange import Exchange
from ftcomm.collective.operation import Operation
from ftcomm.collective.stall import Stall
from ftcomm.control import messages as m
from ftcomm.control.agent import Agent, Gone, JoinError
from ftcomm.control.links import listen
from ftcomm.control.views import Address, View
from ftcomm.control.wire import number
from ftcomm.device.choose import open_device
from ftcomm.engine import Engine
from ftcomm.errors import ArgumentError, CollectiveTimeout, ExpelledError, FtcommError, InitError, TransportError
from ftcomm.kernels.life import hold
from ftcomm.kernels.urgent import urgent
from ftcomm.settings import Settings, split_endpoint
from ftcomm.transport.segment import LIVES, life

if TYPE_CHECKING:
    from ftcomm.device.exchange import DeviceExchange

log = logging.getLogger("ftcomm")


class Span(NamedTuple):
    """Elements `start` to `stop` (flat, C order) of a result, and the replicas whose inputs they contain."""

    start: int
    stop: int
    replicas: tuple[int, ...]


class Work:
    """An all-reduce that was started. Methods may be called from any thread."""

    def __init__(self, op: Operation, staged: Staged, array: Any, group: Group) -> None:
        self._op, self._staged, self._group = op, staged, group
        self._result = array
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._op.done

    def wait(self, timeout: float | None = None) -> Any:
        """Block until the op has its result on this rank; returns it (the array itself, or the new one).

        Raises what the op failed with, or `CollectiveTimeout` after `timeout` seconds; the op then goes on, and `wait`
        may be called again.
        """
        if not self._group._exchange.wait(self._op, timeout):
            raise CollectiveTimeout(
                f"replica {self._group.replica}, op {self._op.number}: not done within {timeout:g} s; it goes on, "
                "call wait() again or raise FTCOMM_OP_TIMEOUT"
            )
        return self._finish()

    def _finish(self) -> Any:
        if self._op.error is not None:
            raise self._op.error
        finish = self._staged.finish
        if finish is not None:
            with self._lock:
                if self._staged.finish is not None:
                    self._result = finish()
                    self._staged.finish = None
        return self._result

    @property
    def contributors(self) -> tuple[Span, ...]:
        """Which replicas the result contains, by ranges of elements; one range unless a member was lost in mid-op.

        Known when the op is done; raises `FtcommError` before.
        """
        if not self._op.done:
            raise FtcommError("the contributors are known when the op is done; call wait() first")
        return tuple(Span(*span) for span in self._op.spans())


class Group:
    """The ranks with this rank's index in all replicas of the job. Thread-safe but for `boundary`.

    `step` is the boundary to pass next, `fresh` is True in a process that joined a running job, until it has caught up.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.replica, self.rank = settings.replica, settings.rank
        self.drained = False
        self.fresh = False
        sock = _listen(settings.host)
        self._segment, self._device = open_device(settings.engine, settings.staging)
        self._exchange = self._make_exchange()
        leader = split_endpoint(settings.leader, "FTCOMM_LEADER") if settings.ranks_per_replica > 1 else None
        port = sock.getsockname()[1]
        address = Address(settings.host, port, _boot_id(), os.getpid(), self._segment.fd, self._segment.nonce)
        self._engine = Engine(
            settings.rank,
            self._exchange,
            address,
            mode=settings.transport if self._device is None else "shm",
            dial=self._dial_address,
            on_lost=self._lost,
            layout=self._segment.layout,
            on_reached=lambda peer: None if self._device is None else self._device.reach(peer),
            on_died=lambda replica, epoch: self._agent.suspect(replica, epoch, "its process died", proof=True),
        )
        self._agent = Agent(
            self._engine,
            coordinator=split_endpoint(settings.coordinator, "FTCOMM_COORDINATOR"),
            token=settings.token,
            replica=settings.replica,
            rank=settings.rank,
            ranks=settings.ranks_per_replica,
            leader=leader,
            leader_socket=_leader_socket(settings, leader) if leader and settings.rank == 0 else None,
            sock=sock,
            address=address,
            timeouts=settings.timeouts,
            on_start=self._alive,
        )
        self._agent.serve("data", self._attach)
        self._open = True
        self._stall: Stall | None = None  # the last that was reported
        self.step = 0

    def _make_exchange(self) -> Exchange | DeviceExchange:
        settings = self.settings
        common: dict[str, Any] = dict(
            deadline_floor=settings.timeouts.op_floor,
            deadline_ceiling=settings.timeouts.op,
            give_up=settings.timeouts.give_up,
            on_stall=self._stalled,
            on_failed=lambda error: self._agent.failed(str(error)),
        )
        if self._device is not None:
            from ftcomm.device.exchange import DeviceExchange

            return DeviceExchange(settings.replica, self._device, **common)
        return Exchange(
            settings.replica,
            self._segment,
            on_lost=self._lost,
            on_divergence=self._diverged if settings.verify else None,
            ranks_per_replica=settings.ranks_per_replica,
            **common,
        )

    def _join(self) -> None:
        if self._device is not None:
            self._device.warm()
        self._agent.start()
        try:
            view = self._agent.join(self.settings.init_timeout)
        except JoinError as error:
            self.close()
            raise InitError(f"replica {self.replica} rank {self.rank} could not join the job: {error}") from None
        self.step = view.step or 0
        self.fresh = self.replica not in view.contributing

    # -- collectives ---------------------------------------------------------------------------------------------

    def allreduce(
        self, x: Any, op: str = "sum", *, async_op: bool = False, atomic: bool = False, sms: int | None = None
    ) -> Any:
        """Reduce `x` over all contributing replicas; every member gets the same bits.

        x: an array of any shape; the same number of elements, dtype and `op` on every member. torch, NumPy and CuPy
            arrays are reduced in place; for immutable ones (JAX) a new array is returned.
        op: "sum", "avg" (divides by those who really contributed), "min", "max" or "product". fp16 and bf16 are
            accumulated in fp32 and rounded once.
        async_op: return a `Work` at once; `x` must not be touched before `Work.wait` has returned.
        atomic: the whole result is of one set of contributors. If a member is lost in mid-op, the parts that contain
            it are reduced again without it, unless all of them do. For that the op keeps a copy of its input, as large
            as `x`, until it returns (32 MB of such memory at most stay with the process for the next op). Up to 512 KB
            are atomic by themselves and cost nothing. By `ftcomm bench allreduce --compare atomic`, two ranks: 1 MB
            takes 1.4 times as long, 16 MB 1.2, 64 MB, which is fresh memory for every op, 2.0.
        sms: streaming multiprocessors of the GPU that the op may occupy, at least 1; None: FTCOMM_SMS, or as many as
            pay. May differ between members. Means nothing to FTCOMM_ENGINE=host.

        Ops are matched by the order in which they are called, which must be the same on all members. Blocks (unless
        `async_op`) until all members of the view hold the result. A member that is lost meanwhile does not fail the op:
        it ends among the others. Raises `ArgumentError`, `MismatchError`, `CollectiveTimeout`, `ExpelledError`, and
        with FTCOMM_VERIFY=1, which compares the results of all members, `DivergenceError` on those whose result is not
        that of the majority (on all, if there is none; see `ftcomm.collective.divergence` for what it cannot see).
        """
        if self.drained:
            raise ExpelledError(
                f"replica {self.replica} has left the job at the boundary of step {self.step - 1}; look at "
                "Group.drained before a collective that follows the step loop"
            )
        device = self._device
        if device is None:
            staged = stage(x)
            operation = Operation(staged.flat, staged.dtype, op, atomic=atomic)
        else:
            staged = device.stage(x)
            chunk = device.layout.chunk
            operation = Operation(staged.flat, staged.dtype, op, chunk, atomic=atomic, on_device=True)
            operation.sms = self.settings.sms if sms is None else sms
        if sms is not None and sms < 1:
            raise ArgumentError(
                f"sms={sms}: an all-reduce needs at least 1 to reduce with; None leaves the choice to us"
            )
        if async_op:
            self._exchange.submit(operation)
            return Work(operation, staged, x, self)
        self._exchange.run(operation)
        if operation.error is None and staged.finish is None:
            return x
        return Work(operation, staged, x, self)._finish()

    def verify(self, state: Any) -> str:
        """Compare `state` on this rank of all contributing replicas; returns its digest, 32 hex digits, if it is equal.

        state: what `ftcomm.steps` takes, a module or an optimizer alone, or any nest of mappings and sequences of
            arrays. Names, dtypes, shapes and bytes count.

        Call it at the same point on all members, between two steps, say; it is two all-reduces at most, so it blocks
        until all have come. Hashing costs about a second a gigabyte. What a replica holds that still catches up is not
        compared. Raises `DivergenceError` on all members, with the replicas that differ from the majority and the first
        entries in which they do, and `StateError` for what cannot be compared. The group goes on in either case.
        """
        from ftcomm.hsdp.compare import compare

        return compare(state, self)

    # -- membership ----------------------------------------------------------------------------------------------

    @property
    def view(self) -> View:
        """The view in force."""
        assert self._agent.view is not None
        return self._agent.view

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

    def boundary(self, step: int, timeout: float | None = None) -> View:
        """Stand between step `step` - 1 and `step`: replicas join, begin to contribute and leave here, nowhere else.

        Call it from one thread, with increasing steps, the same on all replicas. Waits for the ops in flight; returns
        the view in force. Without a change under way it costs microseconds and asks nobody. `drained` is True
        afterwards if this replica has left the job. Raises `ExpelledError`, `CollectiveTimeout`.
        """
        if self.drained:
            return self.view
        try:
            self._exchange.drain(timeout)
            view = self._agent.boundary(step, self.settings.timeouts.give_up if timeout is None else timeout)
        except Gone as error:
            raise ExpelledError(str(error)) from None
        except TimeoutError as error:
            raise CollectiveTimeout(f"replica {self.replica} rank {self.rank}: {error}") from None
        self.step = step + 1
        self.drained = self._agent.left
        return view

    def caught_up(self, step: int) -> None:
        """This rank holds the state of everybody as of `step`: let its replica contribute from a next boundary on."""
        self.fresh = False
        self._agent.tell(m.CaughtUp(step))

    def leave(self) -> None:
        """Ask to leave at a next boundary; `drained` becomes True there. Does not block."""
        self._agent.tell(m.Leave())

    def report(self, kind: str = "report", **fields: str | int | float | bool | None) -> None:
        """A line for the event log of the job. Does not block; said later if the coordinator is away."""
        self._agent.tell(m.Report(kind, {"rank": self.rank, **fields}))

    # -- to other parts of ftcomm --------------------------------------------------------------------------------

    def dial(self, replica: int, purpose: str, fields: dict[str, str | int], timeout: float = 5.0) -> socket.socket:
        """An authenticated blocking connection to this rank of another replica, handed there to who serves `purpose`.
        Raises `TransportError`."""
        try:
            return self._agent.dial(replica, purpose, fields, timeout)
        except OSError as error:
            raise TransportError(f"replica {replica} cannot be reached for {purpose!r}: {error}") from error

    def serve(self, purpose: str, handler: Callable[[socket.socket, dict[str, str | int]], None]) -> None:
        """Hand every incoming connection of `purpose` to `handler(socket, fields)`, in a thread of its own."""
        self._agent.serve(purpose, handler)

    def close(self, *, finished: bool = False) -> None:
        """Leave without a step boundary; idempotent. `finished`: the script has ended well, nobody need wait for us."""
        if not self._open:
            return
        self._open = False
        if finished and self._agent.view is not None:
            self._agent.finish(timeout=2.0)
        self._agent.stop()
        self._engine.close()
        self._exchange.fail(FtcommError("the group was shut down (ftcomm.shutdown); call ftcomm.init() before any op"))
        if self._device is not None:
            self._device.settle(2.0)
            self._device.close()
        self._segment.close()

    # -- callbacks -----------------------------------------------------------------------------------------------

    def _alive(self) -> None:
        """The first act of the control thread: its end is what the others see."""
        urgent()
        hold(*(self._segment.address + 8 * life(reader) for reader in range(LIVES)))

    def _dial_address(self, there: Address, purpose: str, fields: Mapping[str, int]) -> socket.socket:
        return self._agent.dial_address((there.host, there.port), purpose, dict(fields))

    def _attach(self, sock: socket.socket, fields: dict[str, str | int]) -> None:
        self._exchange.attach(sock, number(fields, "replica"), number(fields, "epoch"))

    def _lost(self, replica: int, epoch: int, reason: str) -> None:
        self._agent.suspect(replica, epoch, reason, proof=False)

    def _diverged(self, divergence: Divergence) -> None:
        log.warning("replica %d rank %d: %s", self.replica, self.rank, divergence)
        wrong, right = (", ".join(map(str, who)) for who in (divergence.wrong, divergence.right))
        self.report("divergence", op=divergence.op, chunk=divergence.chunk, wrong=wrong, right=right)

    def _stalled(self, stall: Stall) -> None:
        """Comes every second as long as the op stands still; one word in the log is enough."""
        if stall != self._stall:
            self._stall = stall
            waiting = ", ".join(map(str, stall.waiting_on))
            who = f"replica {self.replica} rank {self.rank}"
            log.warning("%s: op %d makes no progress; waiting for replicas %s", who, stall.op, waiting)
        self._agent.stalled(stall.epoch, stall.op, tuple(stall.waiting_on))


def _listen(host: str) -> socket.socket:
    try:
        return listen(host, 0)
    except OSError as error:
        raise InitError(
            f"cannot listen on FTCOMM_HOST={host}: {error.strerror or error}; set it to an address of this host"
        ) from None


def _leader_socket(settings: Settings, leader: tuple[str, int]) -> socket.socket:
    """Where the other ranks of the replica come: inherited from the launcher, or bound here."""
    if settings.leader_fd is not None:
        return socket.socket(fileno=settings.leader_fd)
    try:
        return listen(*leader)
    except OSError as error:
        raise InitError(
            f"rank 0 cannot listen on FTCOMM_LEADER={settings.leader}: {error.strerror or error}; give each replica a "
            "free port on the host of its rank 0"
        ) from None


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


# -- the default group -----------------------------------------------------------------------------------------------

_default: Group | None = None


def init(settings: Settings | None = None) -> Group:
    """Join the job that the environment names (see `ftcomm run`) and return the default group.

    Blocks until this rank runs in a view: until all replicas of a new job are here, or, in a running job, until the
    next step boundary. Call it once. Raises `SettingsError`, `InitError`, `TransportError`.
    """
    global _default
    if _default is not None:
        raise InitError("ftcomm.init() was called before in this process; use ftcomm.default_group()")
    settings = Settings.from_env() if settings is None else settings
    _configure_log()
    started = time.monotonic()
    group = Group(settings)
    group._join()
    _default = group
    atexit.register(_at_exit)
    how = "contributing" if group.contributes else "catching up"
    log.info(
        "replica %d rank %d: in epoch %d with replicas %s (%s) after %.1f s",
        group.replica,
        group.rank,
        group.epoch,
        ", ".join(map(str, group.members)),
        how,
        time.monotonic() - started,
    )
    return group


def default_group() -> Group:
    """The group of `init`. Raises `InitError` without one."""
    if _default is None:
        raise InitError("there is no group yet; call ftcomm.init() first")
    return _default


def allreduce(
    x: Any,
    op: str = "sum",
    *,
    async_op: bool = False,
    atomic: bool = False,
    sms: int | None = None,
    group: Group | None = None,
) -> Any:
    """`Group.allreduce` on `group`, or on the default group."""
    return (default_group() if group is None else group).allreduce(x, op, async_op=async_op, atomic=atomic, sms=sms)


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
    if getattr(sys, "last_value", None) is None:
        shutdown()
    elif _default is not None:
        _default.close()


def _configure_log() -> None:
    """Log to stderr if the program has set up no logging of its own."""
    level = os.environ.get("FTCOMM_LOG", "info").upper()
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s ftcomm %(levelname)s: %(message)s"))
        log.addHandler(handler)
        log.propagate = False
        log.setLevel(level if level in ("DEBUG", "INFO", "WARNING", "ERROR") else "INFO")
