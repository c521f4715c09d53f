"""The control thread of one rank: runs its `Node` over real sockets and time.

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
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from ftcomm.control import messages as m
from ftcomm.control import node as n
from ftcomm.control import wire
from ftcomm.control.dropped import drop
from ftcomm.control.engine import Engine, Unreachable
from ftcomm.control.links import Link, Listener, hand_over, serve_messages
from ftcomm.control.peers import Peers
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.views import Address, View

log = logging.getLogger("ftcomm.control")

Handler = Callable[[socket.socket, wire.Fields], None]

NUDGE = 0.001  # s between wake-ups of an engine that sleeps on a dead peer's flag


class JoinError(RuntimeError):
    """The job cannot be joined; the message says what was tried and the mend."""


class Gone(RuntimeError):
    """This replica is no longer part of the job."""


class Agent:
    """`start`, `register`, `enter`; the other methods after that, from any thread of the user's."""

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
        timeouts: Timeouts,
        on_start: Callable[[], object] = lambda: None,
    ) -> None:
        """`on_start` is called first in the control thread, which lives as long as this rank takes part."""
        self.engine = engine
        self.replica, self.rank = replica, rank
        self._coordinator, self._token = coordinator, token
        self._leader_address, self._leader_socket = leader, leader_socket
        self._sock, self.address = sock, address
        self._timeouts = timeouts
        self._node = n.Node(replica, rank, ranks, secrets.token_hex(8), address, timeouts)
        self._lock = threading.Lock()  # guards the node; never held across a wait
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="ftcomm-control", daemon=True)
        self._on_start = on_start
        self._handlers: dict[str, Handler] = {}
        self._up: Link | None = None  # to the coordinator (rank 0) or to the leader
        self._ranks: dict[int, asyncio.StreamWriter] = {}  # rank 0: the other ranks of the replica
        self._tasks: set[asyncio.Task[None]] = set()
        self._peers = Peers(
            replica,
            rank,
            token,
            on_open=lambda peer: self._do(self._node.peer_opened, peer),
            on_lost=self._lost,
            on_back=lambda peer: self._do(self._node.peer_back, peer),
        )
        self._known: concurrent.futures.Future[View] = concurrent.futures.Future()
        self._joined: concurrent.futures.Future[View] = concurrent.futures.Future()
        self._passed: concurrent.futures.Future[View] | None = None
        self._acked = threading.Event()
        self._news = "no connection was tried yet"
        self._since = 0.0  # when the newest view was heard of
        self._refused: Exception | None = None
        self.left = False

    @property
    def view(self) -> View | None:
        """In force at the exchange."""
        return self._node.view

    @property
    def preview(self) -> View | None:
        """Before any is: who is in the running job, and this replica with them."""
        return self._node.machine.preview

    # -- the user's threads --------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def register(self, timeout: float) -> bool:
        """Blocks until this rank runs in the first view of a job, True, or a running job knows it, False: then it is in
        no view before `enter`. Raises `JoinError`; who waits for a job to begin its steps waits longer than `timeout`.
        """
        try:
            self._wait(self._known, timeout)
        except Gone as error:
            raise JoinError(str(error)) from None
        return self._joined.done()

    def enter(self, timeout: float) -> View:
        """The script is ready to be waited for; blocks until this rank runs in a view, or (`left`) never will. Raises
        `JoinError`, `Gone`. Waits longer than `timeout` for a step boundary, and for the other ranks of the replica."""
        if not self._joined.done():
            self.tell(m.Ready())
        return self._wait(self._joined, timeout)

    def _wait(self, future: concurrent.futures.Future[View], timeout: float) -> View:
        deadline = time.monotonic() + timeout
        told = time.monotonic()
        news = self._news
        while True:
            try:
                return future.result(timeout=0.2)
            except concurrent.futures.TimeoutError:
                pass
            now = time.monotonic()
            if not self._thread.is_alive():
                raise Gone("the group was shut down (ftcomm.shutdown)")
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
            actions = self._node.boundary(step)
            if len(actions) == 1 and isinstance(actions[0], n.Passed):
                self.left = actions[0].left
                return actions[0].view
            if self._node.machine.phase == "failed":
                raise Gone(self._news)
            passed: concurrent.futures.Future[View] = concurrent.futures.Future()
            self._passed = passed
        self._loop.call_soon_threadsafe(self._carry_out, actions)
        try:
            return passed.result(timeout)
        except concurrent.futures.TimeoutError:
            raise TimeoutError(f"the boundary of step {step} was not passed within {timeout:g} s") from None

    def tell(self, message: m.Message) -> None:
        """Report, Ready, CaughtUp, Leave, Finished: to the leader, from any thread; dropped if the job has gone."""
        self._soon(self._node.tell, message)

    def stalled(self, epoch: int, op: int, waiting_on: tuple[int, ...]) -> None:
        """An op makes no progress. Any thread."""
        self._soon(self._node.stalled, epoch, op, waiting_on)

    def suspect(self, replica: int, epoch: int, reason: str, proof: bool) -> None:
        """A replica cannot be reached since some moment of `epoch`, or (`proof`) is certainly dead. Any thread."""
        self._soon(self._node.peer_lost, replica, epoch, reason, proof)

    def failed(self, reason: str) -> None:
        """The engine cannot go on. Any thread."""
        self._soon(self._node.failed, reason)

    def finish(self, timeout: float) -> None:
        """Say that the script has ended, and wait until that is known.

        The ranks of a replica live and die together, so they wait for each other here, as long as they all live; then
        for the acknowledgement of the coordinator, `timeout` seconds at most.
        """
        self.tell(m.Finished())
        deadline: float | None = None
        while self._thread.is_alive() and self._node.machine.phase != "failed" and not self._acked.wait(0.05):
            if not self._node.all_finished:
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
        view = self._node.machine.view
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
                self._broken(task.exception())

        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(ended)

    def _broken(self, error: BaseException | None) -> None:
        self._do(self._node.failed, f"internal error in the control thread: {error!r}; please report it")

    async def _main(self) -> None:
        listeners = [Listener(self._sock, self._token, self._peer)]
        if self._leader_socket is not None:
            listeners.append(Listener(self._leader_socket, self._token, self._peer))
        self._do(self._node.start)
        if self._node.leader is not None:
            what, address, purpose, fields = "coordinator", self._coordinator, "leader", {"replica": self.replica}
        else:
            assert self._leader_address is not None
            what, address, purpose, fields = "leader of the replica", self._leader_address, "rank", {"rank": self.rank}
        self._up = Link(
            address,
            self._token,
            purpose,
            dict(fields),
            on_open=self._up_opened,
            on_message=lambda message: self._do(self._node.from_up, message),
            on_down=lambda error: self._up_lost(what, error),
        )
        while True:
            await asyncio.sleep(self._timeouts.beat)
            self._do(self._node.tick, time.monotonic())

    def _up_opened(self) -> None:
        self._refused = None
        self._do(self._node.up_opened)

    def _up_lost(self, what: str, error: Exception) -> None:
        self._refused = error
        address = self._up.address if self._up is not None else self._coordinator
        self._news = (
            f"the {what} at {address[0]}:{address[1]} cannot be reached ({error}); is it running there, and is the "
            "port open to this host?"
        )
        if self.view is not None:
            log.debug("replica %d rank %d: %s", self.replica, self.rank, self._news)
        self._do(self._node.up_lost, f"the {what} is lost: {error}")

    async def _peer(self, sock: socket.socket, opening: wire.Opening) -> None:
        if opening.purpose == "member":
            await self._serve_member(sock, wire.number(opening.fields, "replica"))
        elif opening.purpose == "rank" and self._node.leader is not None:
            await self._serve_rank(sock, wire.number(opening.fields, "rank", least=1, most=self._node.leader.ranks - 1))
        elif opening.purpose == "coordinator" and self._node.leader is not None:
            self._called(sock, opening.fields)
        elif opening.purpose in self._handlers:
            sock.setblocking(True)
            handler = self._handlers[opening.purpose]
            name = f"ftcomm-{opening.purpose}"
            threading.Thread(target=hand_over, args=(handler, sock, opening.fields), name=name, daemon=True).start()
        else:
            drop("purpose", f"a connection for {opening.purpose!r}, which nothing here serves")
            sock.close()

    def _called(self, sock: socket.socket, fields: wire.Fields) -> None:
        """By a coordinator that has taken the place of another, from where it can be reached."""
        host, port = fields.get("host", sock.getpeername()[0]), wire.number(fields, "port", least=1, most=65535)
        sock.close()
        if self._up is not None:
            self._up.redirect((str(host), port))

    async def _serve_member(self, sock: socket.socket, replica: int) -> None:
        def received(message: m.AnyMessage) -> None:
            if getattr(message, "replica", replica) != replica:
                drop("message", f"replica {replica} speaks for another: {type(message).__name__}")
                return
            self._do(self._node.from_peer, message, time.monotonic())

        await serve_messages(sock, received, lambda writer: None)

    async def _serve_rank(self, sock: socket.socket, rank: int) -> None:
        current: list[asyncio.StreamWriter] = []

        def ready(writer: asyncio.StreamWriter) -> None:
            self._ranks[rank] = writer
            current.append(writer)

        def received(message: m.AnyMessage) -> None:
            self._do(self._node.from_rank, rank, message, time.monotonic())

        why = await serve_messages(sock, received, ready)
        if current and self._ranks.get(rank) is current[0]:  # else it is here again, by another connection
            del self._ranks[rank]
            self._do(self._node.rank_lost, rank, why)

    def _lost(self, view: View, replica: int, reason: str, proof: bool) -> None:
        self._do(self._node.peer_lost, replica, view.epoch, reason, proof)

    # -- what the node wants -------------------------------------------------------------------------------------

    def _soon(self, event: Callable[..., list[n.Action]], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._do, event, *args)

    def _do(self, event: Callable[..., list[n.Action]], *args: Any) -> None:
        """Tell the node of an event, and carry out what it answers. In the loop."""
        with self._lock:
            actions = event(*args)
        self._carry_out(actions)

    def _carry_out(self, actions: list[n.Action]) -> None:
        for action in actions:
            if isinstance(action, n.Up):
                if self._up is not None:
                    self._up.send(action.message)
            elif isinstance(action, n.Down):
                if action.rank in self._ranks:
                    wire.write_frame(self._ranks[action.rank], m.encode(action.message))
            elif isinstance(action, n.ToPeer):
                self._peers.send(action.replica, action.message)
            elif isinstance(action, n.Freeze):
                self._freeze(action.view)
            elif isinstance(action, n.Resume):
                self._spawn(self._resume(action.view, action.progress))
            elif isinstance(action, n.LookAtWaits):
                op, waiting_on = self.engine.waiting(self._timeouts.beat) or (0, ())
                self._do(self._node.waits, op, waiting_on)
            elif isinstance(action, n.Passed):
                self.left = action.left
                passed, self._passed = self._passed, None
                for future in (passed, self._joined if action.left else None):
                    if future is not None and not future.done():
                        future.set_result(action.view)
            elif isinstance(action, n.Queued):
                self._news = action.reason
            elif isinstance(action, n.Known):
                self._news = "the coordinator has not answered yet"  # to what we say next
                if not self._known.done():
                    self._known.set_result(action.view)
            elif isinstance(action, n.Acked):
                self._acked.set()
            else:
                self._end(action.reason)

    def _end(self, reason: str) -> None:
        """It hangs up, so that nobody waits for it."""
        self._news = reason
        self.engine.fail(reason)
        if self._up is not None:
            self._up.close()
            self._up = None
        for future in (self._known, self._joined, self._passed):
            if future is not None and not future.done():
                future.set_exception(Gone(reason))

    # -- changing the view ---------------------------------------------------------------------------------------

    def _freeze(self, view: View) -> None:
        self._since = time.monotonic()
        still = asyncio.Event()
        self._peers.connect(view)

        def quiesced() -> None:
            still.set()
            if self._node.machine.view is not view:
                return
            try:
                progress = self.engine.progress()
            except Exception as error:  # it has failed, and says with what
                self._do(self._node.failed, str(error))
                return
            self._do(self._node.quiesced, view.epoch, progress)

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
        while self._node.wants(view):
            try:
                local = await self._in_thread(self.engine.reach, view)
                break
            except Unreachable as error:
                if self._node.wants(view):
                    self._do(self._node.unreachable, view.epoch, error.replica, str(error))
                    await asyncio.sleep(self._timeouts.beat)
        if not self._node.wants(view):
            return
        self._peers.watch(view, local)
        counts = self.engine.resume(view, progress)
        times = {"told_ms": 1e3 * (told - self._since), "resume_ms": 1e3 * (time.monotonic() - self._since)}
        first = not self._joined.done()
        self._do(self._node.resumed, view)
        if first:
            for future in (self._joined, self._known):
                if not future.done():
                    future.set_result(view)
        else:
            report = m.Report("resumed", {"rank": self.rank, "epoch": view.epoch, **times, **counts})
            self._do(self._node.tell, report)

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
