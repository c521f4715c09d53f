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
from typing import Any, NamedTuple

from ftcomm.control import actions as act
from ftcomm.control import messages as m
from ftcomm.control import node as n
from ftcomm.control import wire
from ftcomm.control.dropped import drop
from ftcomm.control.engine import Engine, Unreachable
from ftcomm.control.links import Link, Listener, event_loop, hand_over, serve_messages
from ftcomm.control.liveness import Knock, ports, state_of
from ftcomm.control.member import Phase
from ftcomm.control.peers import Peers
from ftcomm.control.sealed import Channel
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.views import Address, View

log = logging.getLogger("ftcomm.control")

Handler = Callable[[Channel, wire.Fields], None]

NUDGE = 0.001  # s between wake-ups of an engine that sleeps on a dead peer's flag


class JoinError(RuntimeError):
    """The job cannot be joined; the message says what was tried and the mend."""

    def __init__(self, reason: str, ending: m.Ending = m.Ending.FAILED) -> None:
        super().__init__(reason)
        self.ending = ending


class Gone(RuntimeError):
    """This replica is no longer part of the job."""

    def __init__(self, reason: str, ending: m.Ending = m.Ending.FAILED) -> None:
        super().__init__(reason)
        self.ending = ending


class _News(NamedTuple):
    """What this rank heard last on its way into the job, and how far that says it has got."""

    text: str
    stage: m.Stage = m.Stage.WAITING
    ending: m.Ending = m.Ending.FAILED  # if it is the end


class Agent:
    """`start`, `register`, `enter`; the other methods after that, from any thread of the user's."""

    def __init__(
        self,
        engine: Engine,
        *,
        coordinator: tuple[str, int],
        credentials: wire.Credentials,
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
        self._coordinator, self._credentials = coordinator, credentials
        self._leader_address, self._leader_socket = leader, leader_socket
        self._sock, self.address = sock, address
        self._timeouts = timeouts
        self._node = n.Node(replica, rank, ranks, secrets.token_hex(8), address, timeouts, state_of)
        self._lock = threading.Lock()  # guards the node; never held across a wait
        self._loop = event_loop()
        self._thread = threading.Thread(target=self._run, name="ftcomm-control", daemon=True)
        self._on_start = on_start
        self._handlers: dict[str, Handler] = {}
        self._up: Link | None = None  # to the coordinator (rank 0) or to the leader
        self._ranks: dict[int, wire.Writer] = {}  # rank 0: the other ranks of the replica
        self._tasks: set[asyncio.Task[None]] = set()
        self._peers = Peers(
            replica,
            rank,
            credentials,
            on_open=lambda peer: self._do(self._node.peer_opened, peer),
            on_message=lambda message: self._do(self._node.from_beside, message),
            on_lost=self._lost,
            on_back=lambda peer: self._do(self._node.peer_back, peer),
        )
        self._known: concurrent.futures.Future[View] = concurrent.futures.Future()
        self._joined: concurrent.futures.Future[View] = concurrent.futures.Future()
        self._passed: concurrent.futures.Future[View] | None = None
        self._acked = threading.Event()
        self._news = _News("no connection was tried yet")
        self._since = 0.0  # when the newest view was heard of
        self._refused: Exception | None = None
        self._warned = ""  # the last refusal that was logged
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
            raise JoinError(str(error), error.ending) from None
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
            if isinstance(self._refused, wire.Refused):  # any other refusal may be forged: it is tried again
                raise JoinError(str(self._refused))
            before, news = news, self._news
            if before.stage is m.Stage.JOINING and news != before:  # a new wait for another thing
                deadline = now + timeout
            if now > deadline and news.stage is m.Stage.WAITING:
                raise JoinError(f"{news.text} (waited {timeout:g} s)")
            if now - told > 10:
                told = now
                log.info("replica %d rank %d: %s", self.replica, self.rank, news.text)

    def boundary(self, step: int, timeout: float | None) -> View:
        """Stand at the boundary of `step`, nothing in flight. Blocks only if membership may change there; returns the
        view in force. Raises `Gone`, `TimeoutError`."""
        with self._lock:
            actions = self._node.boundary(step)
            if len(actions) == 1 and isinstance(actions[0], act.Passed):
                self.left = actions[0].left
                return actions[0].view
            if self._node.machine.phase is Phase.FAILED:
                raise Gone(self._news.text, self._news.ending)
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
        self.tell(m.Finished(True))
        deadline: float | None = None
        while self._thread.is_alive() and self._node.machine.phase is not Phase.FAILED and not self._acked.wait(0.05):
            if not self._node.all_finished:
                continue
            now = time.monotonic()
            deadline = now + timeout if deadline is None else deadline
            if now > deadline:
                return

    def give_up(self, reason: str) -> None:
        """Say that the script has ended, and not well: nobody is to wait for this replica. Does not wait."""
        self.tell(m.Finished(False, reason))

    def stop(self) -> None:
        """End the control thread; idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5)

    def dial(self, replica: int, purpose: str, fields: wire.Fields, timeout: float | None = None) -> Channel:
        """An authenticated blocking connection to this rank of another replica of the newest view. Raises `OSError`.

        `timeout` as `ftcomm.control.wire.connect` has it; None: as long as an op waits, since whoever dials need not be
        quicker than who calls an op, and a stall ends what takes longer.
        """
        view = self._node.machine.view
        member = view.member(replica) if view is not None else None
        if member is None:
            raise ConnectionError(f"replica {replica} is not in the view")
        return self.dial_address(member.ranks[self.rank], purpose, fields, timeout)

    def dial_address(self, there: Address, purpose: str, fields: wire.Fields, timeout: float | None = None) -> Channel:
        """The same to any rank of the job, and to no other process that listens there by now. Raises `OSError`."""
        patience = self._timeouts.give_up if timeout is None else timeout
        return wire.connect((there.host, there.port), self._credentials, purpose, fields, patience, to=there)

    def serve(self, purpose: str, handler: Handler) -> None:
        """Hand incoming authenticated connections of `purpose` (blocking) to `handler`, each in a thread."""
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
            for sock in (self._sock, self._leader_socket):  # nobody is to be found here any more
                if sock is not None:
                    sock.close()

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
        name = self.address.nonce
        listeners = [Listener(self._sock, self._credentials, self._peer, name=name)]
        if self._leader_socket is not None:
            listeners.append(Listener(self._leader_socket, self._credentials, self._peer, name=name))
        self._do(self._node.start)
        if self._node.leader is not None:
            what, address, purpose, fields = "coordinator", self._coordinator, "leader", {"replica": self.replica}
        else:
            assert self._leader_address is not None
            what, address, purpose = "leader of the replica", self._leader_address, "rank"
            fields = {"replica": self.replica, "rank": self.rank}
        self._up = Link(
            address,
            self._credentials,
            purpose,
            dict(fields),
            on_open=self._up_opened,
            on_message=lambda message: self._do(self._node.from_up, message),
            on_down=lambda error: self._up_lost(what, error),
            on_mute=lambda: self._up_mute(what),
        )
        while True:
            await asyncio.sleep(self._timeouts.beat)
            self._look()
            self._do(self._node.tick, time.monotonic())

    def _look(self) -> None:
        """Whose kernels answer, before anything more is sent to them."""
        now = time.monotonic()
        above = self._up.unanswered() if self._up is not None else None
        if above is not None:
            self._do(self._node.up_acknowledged, now - above)
        for rank, writer in list(self._ranks.items()):
            seconds = writer.unanswered()
            if seconds is not None:
                self._do(self._node.rank_acknowledged, rank, now - seconds)
        peers = self._peers.unanswered()
        self._do(self._node.peers_acknowledged, {replica: now - seconds for replica, seconds in peers.items()})
        self._do(self._node.reaching, self.engine.reaching())

    def _up_opened(self) -> None:
        self._refused = None
        self._do(self._node.up_opened)

    def _up_lost(self, what: str, error: Exception) -> None:
        self._refused = error
        address = self._up.address if self._up is not None else self._coordinator
        news = (
            f"the {what} at {address[0]}:{address[1]} cannot be reached ({error}); is it running there, and is the "
            "port open to this host?"
        )
        self._news = _News(news)
        if self.view is not None:
            log.debug("replica %d rank %d: %s", self.replica, self.rank, news)
        elif isinstance(error, wire.HandshakeError) and str(error) != self._warned:
            self._warned = str(error)
            log.warning("replica %d rank %d: %s", self.replica, self.rank, news)
        refused = isinstance(error, ConnectionRefusedError)
        self._do(self._node.up_lost, f"the {what} is lost: {error}", refused, address[0] == self.address.host)

    def _up_mute(self, what: str) -> None:
        address = self._up.address if self._up is not None else self._coordinator
        where = f"{address[0]}:{address[1]}"
        self._news = _News(
            f"the {what} at {where} has not answered yet; it is stopped, or something else listens there"
        )

    async def _peer(self, channel: Channel, opening: wire.Opening) -> None:
        if opening.purpose == "member":
            await self._serve_member(channel, wire.number(opening.fields, "replica"))
        elif opening.purpose == "rank" and self._node.leader is not None:
            ours, most = self._node.leader.replica, self._node.leader.ranks - 1
            wire.number(opening.fields, "replica", least=ours, most=ours)
            await self._serve_rank(channel, wire.number(opening.fields, "rank", least=1, most=most))
        elif opening.purpose == "coordinator" and self._node.leader is not None:
            self._called(channel, opening.fields)
        elif opening.purpose == "asked":  # whether this process lives: it does
            channel.close()
        elif opening.purpose in self._handlers:
            channel.setblocking(True)
            handler = self._handlers[opening.purpose]
            name = f"ftcomm-{opening.purpose}"
            threading.Thread(target=hand_over, args=(handler, channel, opening.fields), name=name, daemon=True).start()
        else:
            drop("purpose", f"a connection for {opening.purpose!r}, which nothing here serves")
            channel.close()

    def _called(self, channel: Channel, fields: wire.Fields) -> None:
        """By a coordinator that has taken the place of another, from where it can be reached."""
        host, port = fields.get("host", channel.getpeername()[0]), wire.number(fields, "port", least=1, most=65535)
        channel.close()
        if self._up is not None:
            self._up.redirect((str(host), port))

    async def _serve_member(self, channel: Channel, replica: int) -> None:
        back: list[wire.Writer] = []

        def received(message: m.AnyMessage) -> None:
            if getattr(message, "replica", replica) != replica:
                drop("message", f"replica {replica} speaks for another: {type(message).__name__}")
                return
            self._do(self._node.from_peer, message, time.monotonic())
            later = self._node.passed_by(message)
            if later is not None:
                back[0].write(m.encode(later))

        await serve_messages(channel, received, back.append)

    async def _serve_rank(self, channel: Channel, rank: int) -> None:
        current: list[wire.Writer] = []

        def ready(writer: wire.Writer) -> None:
            self._ranks[rank] = writer
            current.append(writer)

        def received(message: m.AnyMessage) -> None:
            self._do(self._node.from_rank, rank, message, time.monotonic())

        why = await serve_messages(channel, received, ready)
        if current and self._ranks.get(rank) is current[0]:  # else it is here again, by another connection
            del self._ranks[rank]
            self._spawn(self._seek(rank, why))

    async def _seek(self, rank: int, why: str) -> None:
        """The connection of a rank has ended. So has its process if our own kernel says that nobody listens at its port
        any more; what another host says is told. Else it makes another one as soon as it runs. Where no kernel answers,
        its silence will tell."""
        there = self._node.leader.addresses.get(rank) if self._node.leader is not None else None
        while rank not in self._ranks and self._up is not None:
            try:
                if there is None:
                    raise ConnectionRefusedError
                knock = await Knock.at((there.host, there.port), self._timeouts.heartbeat)
            except ConnectionRefusedError:
                if there is None or there.ports == ports():
                    self._do(self._node.rank_lost, rank, why)
                    return
                self._do(self._node.rank_refused, rank, why)
                await asyncio.sleep(self._timeouts.beat)
                continue
            except OSError:
                await asyncio.sleep(self._timeouts.beat)
                continue
            try:
                while rank not in self._ranks and (seconds := knock.unanswered()) is not None:
                    self._do(self._node.rank_acknowledged, rank, time.monotonic() - seconds)
                    await asyncio.sleep(self._timeouts.beat)
            finally:
                knock.close()

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
                    self._ranks[action.rank].write(m.encode(action.message))
            elif isinstance(action, n.ToPeer):
                self._peers.send(action.replica, action.message)
            elif isinstance(action, act.Freeze):
                self._freeze(action.view)
            elif isinstance(action, act.Resume):
                self._spawn(self._resume(action.view, action.progress))
            elif isinstance(action, n.LookAtWaits):
                op, waiting_on = self.engine.waiting(self._timeouts.beat) or (0, ())
                self._do(self._node.waits, op, waiting_on)
            elif isinstance(action, act.Passed):
                self.left = action.left
                passed, self._passed = self._passed, None
                for future in (passed, self._joined if action.left else None):
                    if future is not None and not future.done():
                        future.set_result(action.view)
            elif isinstance(action, act.Queued):
                self._news = _News(action.reason, action.stage)
            elif isinstance(action, act.Known):
                self._news = _News("the coordinator has not answered yet")  # to what we say next
                if not self._known.done():
                    self._known.set_result(action.view)
            elif isinstance(action, n.Acked):
                self._acked.set()
            else:
                self._end(action.reason, action.ending)

    def _end(self, reason: str, ending: m.Ending) -> None:
        """It hangs up, so that nobody waits for it."""
        self._news = _News(reason, ending=ending)
        self.engine.fail(reason, ending)
        if self._up is not None:
            self._up.close()
            self._up = None
        for future in (self._known, self._joined, self._passed):
            if future is not None and not future.done():
                future.set_exception(Gone(reason, ending))

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
