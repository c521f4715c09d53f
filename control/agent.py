"""The control thread of one rank: runs its `Machine`, and in rank 0 the replica's `Leader`, over real sockets and time.

The user's code calls from its own threads; the event loop lives in a daemon thread. What moves the data is an `Engine`,
injected, so that this package knows nothing of arrays or memory.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol

from ftcomm.control import leader as lead
from ftcomm.control import member as mem
from ftcomm.control import messages as m
from ftcomm.control import wire
from ftcomm.control.links import Link, Listener, serve_messages
from ftcomm.control.peers import Peers
from ftcomm.control.views import Address, View

log = logging.getLogger("ftcomm.control")

Handler = Callable[[socket.socket, wire.Fields], None]

NUDGE = 0.001  # s between wake-ups of an engine that sleeps on a dead peer's flag


class Engine(Protocol):
    """What the agent drives. None of these blocks, but `reach`, which runs in a thread of its own."""

    def freeze(self, quiesced: Callable[[], None]) -> None: ...

    def nudge(self) -> None: ...

    def progress(self) -> m.Progress: ...

    def reach(self, view: View) -> Iterable[int]:
        """Make the memory of the view's members reachable; returns the replicas whose process lives on this host.
        Raises `Unreachable`."""

    def resume(self, view: View, progress: dict[int, m.Progress]) -> dict[str, int]:
        """Returns what was in flight, for the log."""

    def fail(self, reason: str) -> None: ...


class Unreachable(Exception):
    """The memory of `replica` cannot be reached."""

    def __init__(self, replica: int, reason: str) -> None:
        super().__init__(reason)
        self.replica = replica


class JoinError(RuntimeError):
    """The job cannot be joined; the message says what was tried and the mend."""


class Gone(RuntimeError):
    """This replica is no longer part of the job."""


class Agent:
    """`start`, then `join`; the other methods after that, from any thread of the user's."""

    def __init__(
        self,
        engine: Engine,
        *,
        coordinator: tuple[str, int],
        token: str,
        replica: int,
        rank: int,
        ranks: int,
        leader: tuple[str, int] | None,
        leader_socket: socket.socket | None,
        sock: socket.socket,
        address: Address,
        heartbeat_timeout: float,
        op_timeout: float,
        on_start: Callable[[], object] = lambda: None,
    ) -> None:
        """`on_start` is called first in the control thread, which lives as long as this rank takes part."""
        self.engine = engine
        self.replica, self.rank = replica, rank
        self._coordinator, self._token = coordinator, token
        self._leader_address, self._leader_socket = leader, leader_socket
        self._sock, self.address = sock, address
        self._heartbeat = heartbeat_timeout / 10
        self._op_timeout = op_timeout
        self._machine = mem.Machine(replica)
        self._leader = lead.Leader(replica, secrets.token_hex(8), ranks, heartbeat_timeout) if rank == 0 else None
        self._lock = threading.Lock()  # guards the machine; never held across a wait
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="ftcomm-control", daemon=True)
        self._on_start = on_start
        self._handlers: dict[str, Handler] = {}
        self._up: Link | None = None  # to the coordinator (rank 0) or to the leader
        self._ranks: dict[int, asyncio.StreamWriter] = {}  # rank 0: the other ranks of the replica
        self._tasks: set[asyncio.Task[None]] = set()
        self._peers = Peers(replica, rank, token, on_open=self._again, on_lost=self._suspect, on_back=self._reachable)
        self._joined: concurrent.futures.Future[View] = concurrent.futures.Future()
        self._passed: concurrent.futures.Future[View] | None = None
        self._acked = threading.Event()
        self._news = "no connection was tried yet"
        self._since = 0.0  # when the newest view was heard of
        self._refused: Exception | None = None
        self.view: View | None = None  # in force at the exchange
        self.left = False

    # -- the user's threads --------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout: float) -> View:
        """Blocks until this rank runs in a view. Raises `JoinError`; a queued joiner may wait longer than `timeout`."""
        deadline = time.monotonic() + timeout
        told = time.monotonic()
        news = self._news
        while True:
            try:
                return self._joined.result(timeout=0.2)
            except concurrent.futures.TimeoutError:
                pass
            except Gone as error:
                raise JoinError(str(error)) from None
            now = time.monotonic()
            if isinstance(self._refused, wire.Refused):
                raise JoinError(str(self._refused))
            if news.startswith("joins") and self._news != news:  # it was on the way in: a new wait for another thing
                deadline = now + timeout
            news = self._news
            if now > deadline and not self._news.startswith("joins"):
                raise JoinError(f"{self._news} (waited {timeout:g} s)")
            if now - told > 10:
                told = now
                log.info("replica %d rank %d: %s", self.replica, self.rank, self._news)

    def boundary(self, step: int, timeout: float | None) -> View:
        """Stand at the boundary of `step`, nothing in flight. Blocks only if membership may change there; returns the
        view in force. Raises `Gone`, `TimeoutError`."""
        with self._lock:
            actions = self._machine.boundary(step)
            if len(actions) == 1 and isinstance(actions[0], mem.Passed):
                assert self.view is not None
                return self.view
            if self._machine.phase == "failed":
                raise Gone(self._news)
            passed: concurrent.futures.Future[View] = concurrent.futures.Future()
            self._passed = passed
        self._loop.call_soon_threadsafe(self._do, actions)
        try:
            return passed.result(timeout)
        except concurrent.futures.TimeoutError:
            raise TimeoutError(f"the boundary of step {step} was not passed within {timeout:g} s") from None

    def tell(self, message: m.Message) -> None:
        """Report, CaughtUp, Stalled, Leave: to the leader, from any thread; dropped if the job has gone."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._do, [mem.ToLeader(message)])

    def finish(self, timeout: float) -> None:
        """Say that the script has ended, and wait until that is known.

        The ranks of a replica live and die together, so they wait for each other here, as long as they all live; then
        for the acknowledgement of the coordinator, `timeout` seconds at most.
        """
        self.tell(m.Finished())
        deadline: float | None = None
        while self._thread.is_alive() and self._machine.phase != "failed" and not self._acked.wait(0.05):
            alone = self._leader.finished if self._leader is not None else not (self._up and self._up.is_up)
            if not alone:
                continue
            now = time.monotonic()
            deadline = now + timeout if deadline is None else deadline
            if now > deadline:
                return

    def stop(self) -> None:
        """End the control thread; idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5)

    def dial(self, replica: int, purpose: str, fields: wire.Fields, timeout: float = 5.0) -> socket.socket:
        """An authenticated blocking connection to this rank of another replica of the newest view. Raises `OSError`."""
        view = self._machine.view
        member = view.member(replica) if view is not None else None
        if member is None:
            raise ConnectionError(f"replica {replica} is not in the view")
        address = member.ranks[self.rank]
        return self.dial_address((address.host, address.port), purpose, fields, timeout)

    def dial_address(
        self, address: tuple[str, int], purpose: str, fields: wire.Fields, timeout: float = 5.0
    ) -> socket.socket:
        """The same to any rank of the job. Raises `OSError`."""
        return wire.connect(address, self._token, purpose, fields, timeout)

    def suspect(self, replica: int, epoch: int, reason: str, proof: bool) -> None:
        """Report a replica that cannot be reached since some moment of `epoch`, or (`proof`) is certainly dead."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._suspected, replica, epoch, reason, proof)

    def _suspected(self, replica: int, epoch: int, reason: str, proof: bool) -> None:
        for view in (self.view, self._machine.view):  # the second is of a change that is under way
            if view is not None and view.epoch == epoch:
                self._suspect(view, replica, reason, proof)
                return

    def _reachable(self, replica: int) -> None:
        self._do([mem.ToLeader(m.Reachable(replica))])

    def serve(self, purpose: str, handler: Handler) -> None:
        """Hand incoming authenticated connections of `purpose` (blocking sockets) to `handler`, each in a thread."""
        self._handlers[purpose] = handler

    # -- the loop ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._on_start()
        asyncio.set_event_loop(self._loop)
        self._spawn(self._main())
        try:
            self._loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            with contextlib.suppress(Exception):
                self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._peers.close()
            self._loop.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task whose error ends this rank: a control thread that has lost a task must not seem alive."""

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and task.exception() is not None:
                log.error("internal error in the control thread", exc_info=task.exception())
                self._fail(f"internal error in the control thread: {task.exception()!r}; please report it")

        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(ended)

    async def _main(self) -> None:
        listeners = [Listener(self._sock, self._token, self._peer)]
        if self._leader_socket is not None:
            listeners.append(Listener(self._leader_socket, self._token, self._peer))
        hello = m.Hello(self.rank, self.address)
        if self._leader is not None:
            self._do_leader(self._leader.from_rank(0, hello))
            self._up = Link(
                self._coordinator,
                self._token,
                "leader",
                {"replica": self.replica},
                on_open=self._greet,
                on_message=lambda message: self._do_leader(self._lead().from_coordinator(message)),
                on_down=lambda error: self._down("coordinator", self._coordinator, error),
            )
        else:
            assert self._leader_address is not None
            leader = self._leader_address
            self._up = Link(
                leader,
                self._token,
                "rank",
                {"rank": self.rank},
                on_open=lambda: self._send_up(hello),
                on_message=self._from_leader,
                on_down=lambda error: self._down("leader of the replica", leader, error),
            )
        while True:
            await asyncio.sleep(self._heartbeat)
            if self._leader is not None:
                self._leader.from_rank(0, m.Heartbeat(self._machine.step))
                self._do_leader(self._leader.tick(time.monotonic()))
            else:
                self._send_up(m.Heartbeat(self._machine.step))
            self._watch_change()

    def _watch_change(self) -> None:
        """A change of view that does not come about is a stall like that of an op."""
        view, missing = self._machine.view, self._machine.missing()
        if view is not None and missing and time.monotonic() - self._since > self._op_timeout:
            self._do([mem.ToLeader(m.Stalled(view.epoch, -1, missing))])

    def _lead(self) -> lead.Leader:
        assert self._leader is not None
        return self._leader

    def _greet(self) -> None:
        self._refused = None
        join = self._lead().join()
        if join is not None:
            self._send_up(join)
        else:
            self._news = "not all ranks of this replica have started yet"

    def _down(self, what: str, address: tuple[str, int], error: Exception) -> None:
        self._refused = error
        self._news = (
            f"the {what} at {address[0]}:{address[1]} cannot be reached ({error}); is it running there, and is the "
            "port open to this host?"
        )
        if self.view is not None:
            log.debug("replica %d rank %d: %s", self.replica, self.rank, self._news)
            if self._leader is None:  # the replica lives and dies as one
                self._from_leader(m.Expelled(f"the {what} is lost: {error}"))

    def _send_up(self, message: m.Message) -> None:
        if self._up is not None:
            self._up.send(message)

    async def _peer(self, sock: socket.socket, opening: wire.Opening) -> None:
        if opening.purpose == "member":
            await serve_messages(sock, self._from_peer, lambda writer: None)
        elif opening.purpose == "rank" and self._leader is not None:
            rank = int(opening.fields.get("rank", -1))
            leader = self._leader

            def ready(writer: asyncio.StreamWriter) -> None:
                self._ranks[rank] = writer

            def received(message: m.AnyMessage) -> None:
                leader.detector.heard(rank, time.monotonic())
                self._do_leader(leader.from_rank(rank, message))

            why = await serve_messages(sock, received, ready)
            leader.detector.forget(rank)
            self._ranks.pop(rank, None)
            self._do_leader(leader.rank_lost(rank, why))
        elif opening.purpose in self._handlers:
            sock.setblocking(True)
            handler = self._handlers[opening.purpose]
            name = f"ftcomm-{opening.purpose}"
            threading.Thread(target=handler, args=(sock, opening.fields), name=name, daemon=True).start()
        else:
            log.warning("closed a connection for %r, which nothing here serves", opening.purpose)
            sock.close()

    # -- messages ------------------------------------------------------------------------------------------------

    def _from_leader(self, message: m.Message) -> None:
        if isinstance(message, m.FinishAck):
            self._acked.set()
            return
        with self._lock:
            actions = self._machine.from_leader(message)
        self._do(actions)

    def _from_peer(self, message: m.AnyMessage) -> None:
        if isinstance(message, m.MemberProgress):
            with self._lock:
                actions = self._machine.from_member(message)
            self._do(actions)
        elif isinstance(message, m.Boundary) and self._leader is not None:
            self._do_leader(self._leader.from_leader(message))

    def _do_leader(self, actions: list[lead.Action]) -> None:
        for action in actions:
            if isinstance(action, lead.ToCoordinator):
                self._send_up(action.message)
            elif isinstance(action, lead.ToLeader):
                self._peers.send(action.replica, action.message)
            elif action.rank == 0:
                self._from_leader(action.message)
            elif action.rank in self._ranks:
                wire.write_frame(self._ranks[action.rank], m.encode(action.message))

    def _do(self, actions: Sequence[mem.Action]) -> None:
        for action in actions:
            if isinstance(action, mem.ToLeader):
                if self._leader is not None:
                    self._do_leader(self._leader.from_rank(0, action.message))
                else:
                    self._send_up(action.message)
            elif isinstance(action, mem.ToMember):
                self._peers.send(action.replica, action.message)
            elif isinstance(action, mem.Quiesce):
                self._quiesce(action.view)
            elif isinstance(action, mem.Resume):
                self._spawn(self._resume(action.view, action.progress))
            elif isinstance(action, mem.Queued):
                self._news = action.reason
            elif isinstance(action, mem.Passed):
                assert self.view is not None
                self._pass(self.view)
            elif isinstance(action, mem.Left):
                self.left = True
                assert self._machine.view is not None
                self._pass(self._machine.view)
            else:
                self._fail(action.reason)

    def _pass(self, view: View) -> None:
        passed, self._passed = self._passed, None
        if passed is not None and not passed.done():
            passed.set_result(view)

    def failed(self, reason: str) -> None:
        """The engine cannot go on; from any thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._fail, reason)

    def _fail(self, reason: str) -> None:
        """The end for this rank. It hangs up, so that nobody waits for it."""
        with self._lock:
            self._machine.fail()
        self._news = reason
        self.engine.fail(reason)
        if self._up is not None:
            self._up.close()
            self._up = None
        for future in (self._joined, self._passed):
            if future is not None and not future.done():
                future.set_exception(Gone(reason))

    # -- changing the view ---------------------------------------------------------------------------------------

    def _quiesce(self, view: View) -> None:
        self._since = time.monotonic()
        still = asyncio.Event()
        self._peers.connect(view)

        def quiesced() -> None:
            still.set()
            if self._machine.view is view:
                try:
                    progress = self.engine.progress()
                except Exception as error:  # it has failed, and says with what
                    self._fail(str(error))
                    return
                with self._lock:
                    actions = self._machine.quiesced(view.epoch, progress)
                self._do(actions)

        def tell() -> None:
            self._loop.call_soon_threadsafe(quiesced)

        self.engine.freeze(tell)
        self._spawn(self._nudge(still))

    async def _nudge(self, still: asyncio.Event) -> None:
        while not still.is_set():
            self.engine.nudge()
            await asyncio.sleep(NUDGE)

    async def _resume(self, view: View, progress: dict[int, m.Progress]) -> None:
        told = time.monotonic()
        while True:
            try:
                local = await self._in_thread(self.engine.reach, view)
                break
            except Unreachable as error:
                if self._machine.view is not view:
                    return
                self._suspect(view, error.replica, f"its memory cannot be reached: {error}", proof=False)
                await asyncio.sleep(self._heartbeat)
        if self._machine.view is not view or self._machine.phase != "resuming":
            return
        self._peers.watch(view, local)
        counts = self.engine.resume(view, progress)
        now = time.monotonic()
        self.view = view
        with self._lock:
            actions = self._machine.resumed(view.epoch)
        first = not self._joined.done()
        if not first:
            times = {"told_ms": 1e3 * (told - self._since), "resume_ms": 1e3 * (now - self._since)}
            self._do([mem.ToLeader(m.Report("resumed", {"rank": self.rank, "epoch": view.epoch, **times, **counts}))])
        self._do(actions)
        if first:
            self._joined.set_result(view)

    def _in_thread(self, work: Callable[[View], Iterable[int]], view: View) -> asyncio.Future[Iterable[int]]:
        """Not the loop's executor: that one is shut down before the last view changes of an exiting interpreter."""
        future: concurrent.futures.Future[Iterable[int]] = concurrent.futures.Future()

        def run() -> None:
            try:
                result = work(view)
            except BaseException as error:
                with contextlib.suppress(concurrent.futures.InvalidStateError):  # given up meanwhile
                    future.set_exception(error)
            else:
                with contextlib.suppress(concurrent.futures.InvalidStateError):
                    future.set_result(result)

        threading.Thread(target=run, name="ftcomm-reach", daemon=True).start()
        return asyncio.wrap_future(future, loop=self._loop)

    def _suspect(self, view: View, replica: int, reason: str, proof: bool) -> None:
        member = view.member(replica)
        if member is not None:
            self._do([mem.ToLeader(m.Suspect(replica, member.incarnation, reason, proof))])

    def _again(self, replica: int) -> None:
        with self._lock:
            actions = self._machine.again(replica)
        self._do(actions)
        if self._leader is not None:
            self._do_leader(self._leader.again(replica))
