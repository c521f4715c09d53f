"""The control thread of one rank, which runs its `Node` over real sockets and time.

The user's code calls from its own threads; the event loop lives in a daemon thread. An `Engine` moves the data. It is
injected, so that this package knows nothing of arrays or memory.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NamedTuple, TypeVar

from ftcomm.control import actions as act
from ftcomm.control import handshake, wire
from ftcomm.control import messages as m
from ftcomm.control import node as n
from ftcomm.control.dropped import drop
from ftcomm.control.engine import Engine, Unreachable
from ftcomm.control.failed_dials import cause_of, shortage, start
from ftcomm.control.knock import Knock
from ftcomm.control.links import Link, Listener, ask, event_loop, hand_over, serve_messages
from ftcomm.control.liveness import lived, processes, state_of, unanswered
from ftcomm.control.member import Phase
from ftcomm.control.peers import Peers
from ftcomm.control.running_time import RunningTime
from ftcomm.control.sealed import Channel
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.unstarted import HOPELESS
from ftcomm.control.views import Address, View
from ftcomm.control.witness import PURPOSE, Charge, Witness

log = logging.getLogger("ftcomm.control")

Handler = Callable[[Channel, handshake.Fields], None]
Entered = TypeVar("Entered", View, "View | None")

ACK = 2.0  # s in which a coordinator that runs takes in what it is told
WAKE_AGAIN = 0.001  # s between wake-ups of an engine that goes to sleep just as it is frozen: one may be missed
WAKE_UPS = 10  # then its longest sleep is over (`ftcomm.sync.futex.MAX_SLEEP`), and it has looked around


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
    """The last news of this rank on its way into the job, and how far it has got."""

    text: str
    stage: m.Stage = m.Stage.WAITING


def why_broken(error: BaseException | None) -> str:
    """Returns why the control thread has ended: the system lacks something, or there is a defect."""
    lacks = shortage(error)
    if lacks:
        return f"the control thread cannot go on: {lacks}"
    return f"internal error in the control thread: {error!r}; please report it"


class Agent:
    """The rank's end of the control plane. Call `start`, `register` and `enter` in this order; then the other methods,
    from any thread of the user's."""

    def __init__(
        self,
        engine: Engine,
        *,
        coordinator: tuple[str, int],
        credentials: handshake.Credentials,
        replica: int,
        shard: int,
        ranks: int,
        replicas: int = 0,
        leader: tuple[str, int] | None,
        leader_socket: socket.socket | None,
        sock: socket.socket,
        address: Address,
        timeouts: Timeouts,
        on_start: Callable[[], object] = lambda: None,
    ) -> None:
        """`on_start` is called first in the control thread, which lives for as long as this rank takes part."""
        self.engine = engine
        self.replica, self.shard = replica, shard
        self._coordinator, self._credentials = coordinator, credentials
        self._leader_address, self._leader_socket = leader, leader_socket
        self._sock, self.address = sock, address
        self._timeouts = timeouts
        self._node = n.Node(replica, shard, ranks, secrets.token_hex(8), address, timeouts, state_of, replicas)
        self._lock = threading.Lock()  # guards the node; never held during a wait
        self._loop = event_loop()
        self._thread = threading.Thread(target=self._run, name="ftcomm-control", daemon=True)
        self._on_start = on_start
        self._handlers: dict[str, Handler] = {}
        self._up: Link | None = None  # to the coordinator from rank 0, to the leader from others
        self._witness: Witness | None = None
        self._ranks: dict[int, wire.Writer] = {}  # in rank 0, by shard: the other ranks of the replica
        self._tasks: set[asyncio.Task[None]] = set()
        self._peers = Peers(
            replica,
            shard,
            credentials,
            on_open=lambda peer: self._do(self._node.peer_opened, peer),
            on_message=lambda message: self._do(self._node.peer_answered, message),
            on_lost=self._lost,
            on_failed=self._dial_failed,
            on_back=lambda peer: self._do(self._node.peer_back, peer),
        )
        self._known: concurrent.futures.Future[View] = concurrent.futures.Future()
        self._joined: concurrent.futures.Future[View | None] = concurrent.futures.Future()
        self._passed: concurrent.futures.Future[View] | None = None
        self._acked = threading.Event()
        self._news = _News("no connection was tried yet")
        self._failed: act.Failed | None = None  # why the node has failed
        self._since = 0.0  # when this rank heard of the newest view
        self._refused: Exception | None = None
        self._told = False  # this connection has told what we wait for
        self._warned = ""  # the last refusal that was logged
        self.left = False

    @property
    def view(self) -> View | None:
        """The view in force at the exchange."""
        return self._node.view

    @property
    def preview(self) -> View | None:
        """The members of the running job, with this replica added, before any view is in force."""
        return self._node.machine.preview

    # -- the user's threads --------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def register(self, timeout: float) -> bool:
        """Block until this rank runs in the first view of a job (True), or a running job knows it (False). In the
        second case it is in no view before `enter`. Raises `JoinError`. Waits longer than `timeout` if a job has to
        begin its steps."""
        try:
            self._wait(self._known, timeout)
        except Gone as error:
            raise JoinError(str(error), error.ending) from None
        return self._joined.done()

    def enter(self, timeout: float, loop: int = 0) -> View | None:
        """Let the others wait for the script from now on. Blocks until this rank runs in a view, or never will
        (`left`), or until the job has step loop `loop`, in which the script stands, behind it (None; call again in a
        later one). With `loop` 0 it stands in none. Raises `JoinError`, `Gone`. Waits longer than `timeout` for a step
        boundary, and for the other ranks of the replica."""
        joined = self._joined
        if not joined.done():
            self.tell(m.Ready(loop))
        return self._wait(joined, timeout)

    def _wait(self, future: concurrent.futures.Future[Entered], timeout: float) -> Entered:
        ran = RunningTime()
        told = ran.at(time.monotonic())
        deadline = told + timeout
        news = self._news
        while True:
            try:
                return future.result(timeout=0.2)
            except concurrent.futures.TimeoutError:
                pass
            now = ran.at(time.monotonic())
            if not self._thread.is_alive():
                raise Gone("the group was shut down (ftcomm.shutdown)")
            if isinstance(self._refused, handshake.Refused):  # any other refusal may be forged, so the link tries again
                raise JoinError(str(self._refused))
            before, news = news, self._news
            if before.stage is m.Stage.JOINING and news != before:  # a new wait, with its own time
                deadline = now + timeout
            if now > deadline and news.stage is m.Stage.WAITING:
                raise JoinError(f"{news.text} (waited {timeout:g} s)")
            if now - told > 10:
                told = now
                log.info("replica %d rank %d: %s", self.replica, self.shard, news.text)

    @property
    def loop_of_job(self) -> int:
        """The step loop of the members, as a replica that joins them was told last."""
        return self._node.machine.loop_of_job

    def boundary(self, step: int, timeout: float | None, loop: int = 0) -> View:
        """Stand at the boundary of `step` in step loop `loop`, with no op in flight. Blocks only if membership may
        change there; returns the view in force. Raises `Gone`, `TimeoutError`."""
        with self._lock:
            actions = self._inform(self._node.boundary, step, loop)
            if len(actions) == 1 and isinstance(actions[0], act.Passed):
                self.left = actions[0].left
                return actions[0].view
            if self._failed is not None:
                raise Gone(self._failed.reason, self._failed.ending)
            passed: concurrent.futures.Future[View] = concurrent.futures.Future()
            self._passed = passed
        self._loop.call_soon_threadsafe(self._carry_out, actions)
        try:
            return passed.result(timeout)
        except concurrent.futures.TimeoutError:
            raise TimeoutError(f"the boundary of step {step} was not passed within {timeout:g} s") from None

    def tell(self, message: m.Message) -> None:
        """Tell the leader a Report, Ready, CaughtUp, Leave or Finished. Any thread; dropped if the job has gone."""
        self._soon(self._node.tell, message)

    def stalled(self, epoch: int, op: int, waiting_on: tuple[int, ...], lasted: float) -> None:
        """Report that an op makes no progress, in a wait of `lasted` seconds. Any thread."""
        self._soon(self._node.stalled, epoch, op, waiting_on, lasted)

    def suspect(self, replica: int, epoch: int, reason: str, proof: bool) -> None:
        """Report that a replica cannot be reached since some moment of `epoch`, or (`proof`) is certainly dead. Any
        thread."""
        self._soon(self._node.peer_lost, replica, epoch, reason, proof)

    def severed(self, replica: int, epoch: int, reason: str) -> None:
        """Report that a connection for data with a replica has ended in `epoch`. Any thread."""
        self._soon(self._node.severed, replica, epoch, reason, time.monotonic())

    def failed(self, reason: str) -> None:
        """Report that the engine cannot go on. Any thread."""
        self._soon(self._node.failed, reason)

    def finish(self, timeout: float) -> None:
        """Say that the script has ended, and wait until that is known.

        The ranks of a replica live and die together, so they wait here for each other, as long as all of them live.
        Then they wait for the coordinator to acknowledge, for `timeout` seconds at most. A leader that has ended has
        waited for all of them, and only it could pass the acknowledgement on.
        """
        self.tell(m.Finished(True))
        since: float | None = None
        told = False
        while self._thread.is_alive() and self._node.machine.phase is not Phase.FAILED and not self._acked.wait(0.05):
            if not self._node.all_finished:
                since = None
                continue
            now = time.monotonic()
            since = now if since is None else since
            if now - since > (min(ACK, timeout) if self._node.leader_ended else timeout):
                return
            if not told and now - since > ACK:
                told = True
                log.warning(
                    "replica %d rank %d: has finished, and waits for a coordinator to hear that, for %.0f s at most: "
                    "if none does, nobody knows it but by the output of this process",
                    *(self.replica, self.shard, timeout),
                )

    def give_up(self, reason: str) -> None:
        """Say that the script has ended with an error, so that no member waits for this replica. Does not block."""
        self.tell(m.Finished(False, reason))

    def stop(self) -> None:
        """End the control thread; idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5)

    def dial(self, replica: int, purpose: str, fields: handshake.Fields, timeout: float | None = None) -> Channel:
        """Returns an authenticated blocking connection to this rank of another replica of the newest view. Raises
        `OSError`.

        `timeout` is as in `ftcomm.control.wire.connect`. None means the time that an op may wait: the caller need not
        be quicker than an op, and a stall ends what takes longer.
        """
        view = self._node.machine.view
        member = view.member(replica) if view is not None else None
        if member is None:
            raise ConnectionError(f"replica {replica} is not in the view")
        return self.dial_address(member.ranks[self.shard], purpose, fields, timeout)

    def dial_address(
        self, there: Address, purpose: str, fields: handshake.Fields, timeout: float | None = None
    ) -> Channel:
        """Like `dial`, to any rank of the job, but to no other process that may listen at its address by now. Raises
        `OSError`."""
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
            for sock in (self._sock, self._leader_socket):  # no process is to be found here any more
                if sock is not None:
                    sock.close()
            if self._witness is not None:
                self._witness.dismiss()

    def _from_up(self, message: m.AnyMessage) -> None:
        if isinstance(message, m.Welcome) and self._node.leader is None and self._witness is None:
            self._call_witness(message.processes)
        self._do(self._node.from_up, message)

    def _call_witness(self, seen: str) -> None:
        """Start the witness, unless the leader sees this process by itself. `seen` are the processes that the leader
        sees."""
        if seen == processes() or os.getpid() == 1:  # with process 1 all of its container ends
            return
        assert self._leader_address is not None
        token, job, tls = self._credentials.token, self._credentials.job, self._credentials.tls
        files = None if tls is None else tls.files
        nonce, patience = self.address.nonce, self._timeouts.give_up
        try:
            self._witness = Witness(Charge(nonce, self.shard, self._leader_address, token, job, files, patience))
        except OSError as error:
            self._unwitnessed(str(error))
        else:
            self._spawn(self._look_at(self._witness))

    async def _look_at(self, witness: Witness) -> None:
        why = await witness.begun()
        if why:
            self._unwitnessed(why)

    def _unwitnessed(self, why: str) -> None:
        who = f"replica {self.replica} rank {self.shard}"
        log.warning("%s has no witness of its end, so its leader may hear of that late: %s", who, why)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task whose error ends this rank, since a control thread without one of its tasks must not seem
        alive."""

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and task.exception() is not None:
                log.error("internal error in the control thread", exc_info=task.exception())
                self._broken(task.exception())

        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(ended)

    def _broken(self, error: BaseException | None) -> None:
        self._do(self._node.failed, why_broken(error))

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
            fields = {"replica": self.replica, "shard": self.shard}
        self._up = Link(
            address,
            self._credentials,
            purpose,
            dict(fields),
            on_open=self._up_opened,
            on_message=self._from_up,
            on_down=lambda error: self._up_lost(what, error),
            on_mute=lambda: self._up_mute(what),
        )
        self._spawn(self._ask())
        while True:
            await asyncio.sleep(self._timeouts.beat)
            self._look()
            self._do(self._node.tick, time.monotonic())
            self.engine.wake()

    async def _ask(self) -> None:
        """Ask the coordinator once a heartbeat timeout, until this rank is in a view, whether it waits in vain: for a
        leader, or for another replica, that cannot start. The leader tells a rank that has a connection to it."""
        leads = self._node.leader is not None
        if not leads:
            await asyncio.sleep(self._timeouts.heartbeat)  # most leaders come in that time
        while self._up is not None and not self._knows_job:
            if leads or not self._up.is_up:
                await self._ask_once()
            await asyncio.sleep(self._timeouts.heartbeat)

    async def _ask_once(self) -> None:
        fields: handshake.Fields = {"replica": self.replica, "lived": min(int(1e3 * lived()), handshake.MOST)}
        with contextlib.suppress(OSError):
            answer = await ask(self._coordinator, self._credentials, HOPELESS, fields)
            if isinstance(answer, m.Expelled) and not self._knows_job:
                self._do(self._node.from_up, answer)

    @property
    def _knows_job(self) -> bool:
        """Whether this rank has heard of a view, which only a leader that has started tells it."""
        return self._known.done() or self._node.machine.view is not None

    def _look(self) -> None:
        """Look which kernels answer, before anything more is sent to them."""
        now = time.monotonic()
        above = self._up.unanswered() if self._up is not None else None
        if above is not None:
            self._do(self._node.up_acknowledged, now - above)
        for shard, writer in list(self._ranks.items()):
            seconds = writer.unanswered()
            if seconds is not None:
                self._do(self._node.rank_acknowledged, shard, now - seconds)
        self._peers.watch_again()
        peers = self._peers.unanswered()
        self._do(self._node.peers_acknowledged, {replica: now - seconds for replica, seconds in peers.items()})
        self._do(self._node.reaching, self.engine.reaching())

    def _up_opened(self) -> None:
        self._refused, self._told = None, False
        self._do(self._node.up_opened)

    def _up_lost(self, what: str, error: Exception) -> None:
        self._refused = error
        address = self._up.address if self._up is not None else self._coordinator
        news = (
            f"the {what} at {address[0]}:{address[1]} cannot be reached ({error}); is it running there, and is the "
            "port open to this host?"
        )
        told, self._told = self._told, False
        if not told:  # otherwise it was ended with a reason
            self._news = _News(news)
        if self.view is not None:
            log.debug("replica %d rank %d: %s", self.replica, self.shard, news)
        elif isinstance(error, handshake.HandshakeError) and str(error) != self._warned:
            self._warned = str(error)
            log.warning("replica %d rank %d: %s", self.replica, self.shard, news)
        refused = isinstance(error, ConnectionRefusedError)
        self._do(self._node.up_lost, f"the {what} is lost: {error}", refused, address[0] == self.address.host)

    def _up_mute(self, what: str) -> None:
        address = self._up.address if self._up is not None else self._coordinator
        where = f"{address[0]}:{address[1]}"
        self._news = _News(
            f"the {what} at {where} has not answered yet; it is stopped, or something else listens there"
        )

    async def _peer(self, channel: Channel, opening: handshake.Opening) -> None:
        if opening.purpose == "member":
            await self._serve_member(channel, handshake.number(opening.fields, "replica"))
        elif opening.purpose == "rank" and self._node.leader is not None:
            ours, most = self._node.leader.replica, self._node.leader.ranks - 1
            handshake.number(opening.fields, "replica", least=ours, most=ours)
            await self._serve_rank(channel, handshake.number(opening.fields, "shard", least=1, most=most))
        elif opening.purpose == "coordinator" and self._node.leader is not None:
            self._called(channel, opening.fields)
        elif opening.purpose == PURPOSE and self._node.leader is not None:
            self._witnessed(channel, opening.fields)
        elif opening.purpose == "asked":  # a question whether this process lives
            channel.close()
        elif opening.purpose in self._handlers:
            await self._hand_over(channel, opening)
        else:
            drop("purpose", f"a connection for {opening.purpose!r}, which nothing here serves")
            channel.close()

    async def _hand_over(self, channel: Channel, opening: handshake.Opening) -> None:
        """Serve a connection in a thread of its own. If none can be had now, who has dialled waits, until it hangs up
        or for as long as an op may take: that costs its recovery, and this rank nothing."""
        channel.setblocking(True)
        args = self._handlers[opening.purpose], channel, opening.fields
        thread = threading.Thread(target=hand_over, args=args, name=f"ftcomm-{opening.purpose}", daemon=True)
        deadline = time.monotonic() + self._timeouts.op
        told = False
        while True:
            lacks = start(thread)
            if not lacks:
                return
            if not told:
                told = True
                log.warning(
                    "replica %d rank %d: a connection for %r waits to be served, for %g s at most: %s",
                    *(self.replica, self.shard, opening.purpose, self._timeouts.op, lacks),
                )
            await asyncio.sleep(self._timeouts.beat)
            failed = self._node.machine.phase is Phase.FAILED
            if failed or time.monotonic() > deadline or unanswered(channel) is None:
                channel.close()
                return

    def _called(self, channel: Channel, fields: handshake.Fields) -> None:
        """Take a call from a coordinator that has replaced another one, and tells where it can be reached."""
        host, port = fields.get("host", channel.getpeername()[0]), handshake.number(fields, "port", least=1, most=65535)
        channel.close()
        if self._up is not None:
            self._up.redirect((str(host), port))

    def _witnessed(self, channel: Channel, fields: handshake.Fields) -> None:
        """Take the word of the kernel of a rank's host that the rank's process has ended."""
        channel.close()
        shard = handshake.number(fields, "shard", least=1)
        there = self._node.leader.addresses.get(shard) if self._node.leader is not None else None
        if there is not None and there.nonce == handshake.text(fields, "nonce"):
            self._do(self._node.rank_lost, shard, f"its process {there.pid} has ended, says its host")

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

    async def _serve_rank(self, channel: Channel, shard: int) -> None:
        current: list[wire.Writer] = []

        def ready(writer: wire.Writer) -> None:
            self._ranks[shard] = writer
            current.append(writer)

        def received(message: m.AnyMessage) -> None:
            self._do(self._node.from_rank, shard, message, time.monotonic())

        why = await serve_messages(channel, received, ready)
        if current and self._ranks.get(shard) is current[0]:  # otherwise the rank has connected again
            del self._ranks[shard]
            self._spawn(self._seek(shard, why))

    async def _seek(self, shard: int, why: str) -> None:
        """Find out why the connection of a rank has ended. If our own kernel says so, the process has ended; if another
        host says so, that is reported. Otherwise the rank connects again as soon as it runs. If no kernel answers, the
        silence of the rank will tell."""
        there = self._node.leader.addresses.get(shard) if self._node.leader is not None else None
        if there is None:
            self._do(self._node.rank_lost, shard, why)
            return
        begun = time.monotonic()
        knock: Knock | None = None
        try:
            while shard not in self._ranks and self._up is not None:
                knock = knock or Knock(there, self._credentials, "asked", {})
                outcome = await knock.outcome(self._timeouts.presence)
                now = time.monotonic()
                if shard in self._ranks:
                    return
                if outcome == "ended":
                    self._do(self._node.rank_lost, shard, why)
                    return
                if outcome == "refused":
                    self._do(self._node.rank_refused, shard, why)
                elif outcome == "answered" or (outcome == "mute" and now - begun < self._timeouts.op):
                    self._do(self._node.rank_acknowledged, shard, now)
                if outcome != "mute":
                    knock.close()
                    knock = None
                await asyncio.sleep(self._timeouts.beat)
        finally:
            if knock is not None:
                knock.close()

    def _lost(self, view: View, replica: int, reason: str) -> None:
        self._do(self._node.peer_lost, replica, view.epoch, reason, True)

    def _dial_failed(self, view: View, replica: int, reason: str, error: Exception) -> None:
        if not self._is_short(error):
            self._do(self._node.dial_failed, replica, view.epoch, reason, cause_of(error), time.monotonic())

    def _is_short(self, error: BaseException) -> bool:
        """Whether this process lacks what it needs to reach the others, and `error` says nothing else. It tries again;
        the node ends it if that lasts. What it lacks to serve or to watch others does not belong here."""
        lacks = shortage(error)
        if lacks:
            now = time.monotonic()
            if not self._node.is_short(now):
                log.warning(
                    "replica %d rank %d: this process is short of something, and tries again for %g s at most: %s",
                    *(self.replica, self.shard, self._timeouts.op, lacks),
                )
            self._do(self._node.short, f"it was short of something for {self._timeouts.op:g} s: {lacks}", now)
        return bool(lacks)

    # -- what the node wants -------------------------------------------------------------------------------------

    def _soon(self, event: Callable[..., list[n.Action]], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._do, event, *args)

    def _do(self, event: Callable[..., list[n.Action]], *args: Any) -> None:
        """Tell the node of an event, and carry out its actions. In the loop."""
        with self._lock:
            actions = self._inform(event, *args)
        self._carry_out(actions)

    def _inform(self, event: Callable[..., list[n.Action]], *args: Any) -> list[n.Action]:
        """Tell the node of an event; returns its actions. With the lock, so that whoever finds that the node has failed
        also finds why."""
        actions = event(*args)
        self._failed = next((action for action in actions if isinstance(action, act.Failed)), self._failed)
        return actions

    def _carry_out(self, actions: list[n.Action]) -> None:
        for action in actions:
            if isinstance(action, n.Up):
                if self._up is not None:
                    self._up.send(action.message)
            elif isinstance(action, n.Down):
                if action.shard in self._ranks:
                    self._ranks[action.shard].write(m.encode(action.message))
            elif isinstance(action, n.ToPeer):
                self._peers.send(action.replica, action.message)
            elif isinstance(action, act.Freeze):
                self._freeze(action.view)
            elif isinstance(action, act.Resume):
                self._spawn(self._resume(action.view, action.progress))
            elif isinstance(action, n.LookAtWaits):
                op, waiting_on = self.engine.stalls(self._timeouts.beat) or (0, ())
                self._do(self._node.waits, op, waiting_on)
            elif isinstance(action, n.HandWaits):
                self.engine.waited(action.seconds)
            elif isinstance(action, act.Passed):
                self.left = action.left
                passed, self._passed = self._passed, None
                for future in (passed, self._joined if action.left else None):
                    if future is not None and not future.done():
                        future.set_result(action.view)
            elif isinstance(action, act.JoinPending):
                self._news, self._told = _News(action.reason, action.stage), True
            elif isinstance(action, act.Known):
                self._news = _News("the coordinator has not answered yet")  # what this rank says next
                if not self._known.done():
                    self._known.set_result(action.view)
            elif isinstance(action, act.GoOn):
                joined, self._joined = self._joined, concurrent.futures.Future()
                joined.set_result(None)
            elif isinstance(action, n.Acked):
                self._acked.set()
            else:
                self._end(action.reason, action.ending)

    def _end(self, reason: str, ending: m.Ending) -> None:
        """End the control thread and close its connections, so that no rank waits for this one."""
        self._news = _News(reason)
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
            except Exception as error:  # the exchange has failed
                self._do(self._node.failed, str(error))
                return
            self._do(self._node.quiesced, view.epoch, progress, self.engine.awaited())

        def tell() -> None:
            self._loop.call_soon_threadsafe(quiesced)

        self.engine.freeze(tell)
        self._spawn(self._wake(still))

    async def _wake(self, still: asyncio.Event) -> None:
        for _ in range(WAKE_UPS):
            await asyncio.sleep(WAKE_AGAIN)
            if still.is_set():
                return
            self.engine.wake()

    async def _resume(self, view: View, progress: dict[int, m.Progress]) -> None:
        told = time.monotonic()
        severed = frozenset(replica for replica, said in progress.items() if self.replica in said.severed)
        while self._node.wants(view):
            try:
                local = await self._in_thread(self.engine.reach, view, severed)
                break
            except Exception as error:
                if self._node.wants(view) and not self._is_short(error):
                    if not isinstance(error, Unreachable):
                        raise
                    now, cause = time.monotonic(), cause_of(error)
                    self._do(self._node.unreachable, view.epoch, error.replica, str(error), cause, now)
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
            report = m.Report("resumed", {"rank": self.shard, "epoch": view.epoch, **times, **counts})
            self._do(self._node.tell, report)

    def _in_thread(
        self, work: Callable[[View, frozenset[int]], Iterable[int]], view: View, severed: frozenset[int]
    ) -> asyncio.Future[Iterable[int]]:
        """Run work in a thread of its own. Raises `RuntimeError` if there is none to be had. The executor of the loop
        is shut down before the last view changes of an interpreter that exits."""
        future: concurrent.futures.Future[Iterable[int]] = concurrent.futures.Future()

        def run() -> None:
            try:
                result = work(view, severed)
            except BaseException as error:
                with contextlib.suppress(concurrent.futures.InvalidStateError):  # the caller has given up
                    future.set_exception(error)
            else:
                with contextlib.suppress(concurrent.futures.InvalidStateError):
                    future.set_result(result)

        threading.Thread(target=run, name="ftcomm-reach", daemon=True).start()
        return asyncio.wrap_future(future, loop=self._loop)
