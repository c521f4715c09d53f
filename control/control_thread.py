"""The control thread of one rank, which runs its `RankNode` over real sockets and time. Shard 0 also starts the leader
of its replica, a process of its own; if there is no other rank, the thread runs the `LeaderNode`, too.

The user's code calls from its own threads; the event loop lives in a daemon thread. A `DataPlane` moves the data. It is
injected, so that this package knows nothing of arrays or memory.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from ftcomm.control import actions as act
from ftcomm.control import handshake, leaderless, wire
from ftcomm.control import messages as m
from ftcomm.control import rank_node as n
from ftcomm.control.control_loop import ControlLoop
from ftcomm.control.data_plane import DataPlane
from ftcomm.control.directory import Directory
from ftcomm.control.failed_dials import cause_of
from ftcomm.control.hopeless import ask_until_over
from ftcomm.control.incoming import Handler, IncomingConnections
from ftcomm.control.leader import ToCoordinator, ToRank
from ftcomm.control.leader_driver import LeaderDriver
from ftcomm.control.leader_node import LeaderNode
from ftcomm.control.links import Listener
from ftcomm.control.liveness import started, state_of
from ftcomm.control.member import Phase
from ftcomm.control.own_companion import OwnCompanion
from ftcomm.control.own_host_agent import AgentPlace, OwnHostAgent
from ftcomm.control.own_leader import OwnLeader
from ftcomm.control.own_witness import OwnWitness
from ftcomm.control.peers import Peers
from ftcomm.control.rank_errors import Gone, JoinError, why_ended
from ftcomm.control.rank_name import rank_name
from ftcomm.control.rank_with_leader import InProcessAction, RankWithLeader
from ftcomm.control.running_time import RunningTime, RunningTimer
from ftcomm.control.script_end import ScriptEnd
from ftcomm.control.sealed import Channel
from ftcomm.control.socket_events import socket_events
from ftcomm.control.timeouts import AWAITED_EVERY, Timeouts
from ftcomm.control.unstarted import NamedRank, asking_times
from ftcomm.control.upward_link import JoinNews, UpwardLink
from ftcomm.control.view_entry import ViewEntry
from ftcomm.control.views import Address, View

log = logging.getLogger("ftcomm.control")

ViewT = TypeVar("ViewT", View, "View | None")

ACK = 2.0  # s in which a coordinator that runs takes in what it is told


class ControlThread:
    """The rank's end of the control plane. Call `start`, `register` and `enter` in this order; then the other methods,
    from any thread of the user's."""

    def __init__(
        self,
        data_plane: DataPlane,
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
        host_agent: AgentPlace | None = None,
        on_start: Callable[[], object] = lambda: None,
    ) -> None:
        """`leader` is where the leader of the replica listens, None if it has one rank, and `leader_socket` is what
        shard 0 hands to the leader for that. `host_agent` stands between this rank and the leader, if there is one.
        `on_start` is called first in the control thread, which lives for as long as this rank takes part."""
        self.data_plane = data_plane
        self.replica, self.shard = replica, shard
        self._coordinator, self._credentials = coordinator, credentials
        self._ranks, self._leader = ranks, leader
        self._me = NamedRank.of(replica, shard, leader)
        self._asking = asking_times(shard, ranks, timeouts.heartbeat)
        self._sock, self.address = sock, address
        self._timeouts = timeouts
        self._node = n.RankNode(replica, shard, address, timeouts, replicas, ranks)
        self._control = ControlLoop(self._node, timeouts, self._carry_out)
        self._directory = None if leader is None else Directory(leader, credentials, self._control.loop)
        self._thread = threading.Thread(target=self._run, name="ftcomm-control", daemon=True)
        self._on_start = on_start
        self._leading: LeaderDriver | None = None  # in this process
        self._leader_socket = leader_socket
        self._own_leader: OwnLeader | None = None  # a process that this rank has started
        self._host_agent = host_agent
        self._own_host_agent: OwnHostAgent | None = None
        above = leader if host_agent is None else host_agent.there
        if ranks == 1:
            node = LeaderNode(replica, secrets.token_hex(8), ranks, timeouts, state_of)
            self._leading = LeaderDriver(
                *(node, self._me, credentials, coordinator, address.host, timeouts),
                do=self._control.do,
                spawn=self._control.spawn,
                trains=lambda: self.view is not None,
            )
            self._control.with_leader = RankWithLeader(self._node, node)
            self._up = self._leading.up
        else:
            assert above is not None
            what = "leader of the replica" if host_agent is None else "host agent"
            fields: handshake.Fields = {"replica": replica, "shard": shard}
            self._up = UpwardLink(
                *(self._me, what, above, credentials, "rank", fields, address.host),
                on_open=lambda: self._control.do(self._node.up_opened),
                on_lost=self._up_lost,
                trains=lambda: self.view is not None,
            )
        self._witness = OwnWitness(self._control, address.nonce, above, credentials)
        self._incoming = IncomingConnections(self._control, self._lead)
        self._peers = Peers(
            replica,
            shard,
            credentials,
            on_open=lambda peer: self._control.do(self._node.peer_opened, peer),
            on_message=lambda message: self._control.do(self._node.peer_answered, message),
            on_lost=self._lost,
            on_failed=self._dial_failed,
            on_back=lambda peer: self._control.do(self._node.peer_back, peer),
        )
        self._entry = ViewEntry(
            *(self._control, data_plane, self._peers), joins=lambda: not self._joined.done(), on_joined=self._on_joined
        )
        self._known: concurrent.futures.Future[View] = concurrent.futures.Future()
        self._joined: concurrent.futures.Future[View | None] = concurrent.futures.Future()
        self._passed: concurrent.futures.Future[View] | None = None
        self._acked = threading.Event()
        self._away = 0.0  # s in which waits went on without a coordinator
        self._said_waits = float("-inf")  # when that was last logged
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
        """Start the control thread, and the leader if this is shard 0 of several, or the host agent if this is
        its first rank. Raises `JoinError`."""
        what = "leader of its replica"
        try:
            if self._leader_socket is not None:
                of_all = self._me, self._ranks, self._coordinator, self._credentials, self._timeouts, self.address
                self._own_leader = OwnLeader(*of_all, self._leader_socket)
            if self._host_agent is not None and self._host_agent.listening is not None:
                what = "host agent"
                self._own_host_agent = self._start_host_agent(self._host_agent, self._host_agent.listening)
        except OSError as error:
            raise JoinError(
                f"the process of the {what} cannot be started: {error.strerror or error}; raise the limit on processes "
                "(ulimit -u) or on open files (ulimit -n)"
            ) from None
        self._thread.start()

    def _start_host_agent(self, place: AgentPlace, listening: socket.socket) -> OwnHostAgent:
        assert self._leader is not None
        those = self.replica, place.shards, self._ranks, self._leader
        return OwnHostAgent(*those, self._credentials, self._timeouts, self.address.host, listening)

    @property
    def host_agent_pid(self) -> int:
        """The process of the host agent, if this rank has started it and it has begun; otherwise 0."""
        return 0 if self._own_host_agent is None else self._own_host_agent.pid

    @property
    def leader_pid(self) -> int:
        """The process of the leader that this rank has started; 0 if there is none, or it has not begun."""
        return 0 if self._own_leader is None else self._own_leader.pid

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

    def _wait(self, future: concurrent.futures.Future[ViewT], timeout: float) -> ViewT:
        ran = RunningTime()
        told = ran.at(time.monotonic())
        deadline = told + timeout
        news = self._up.news
        while True:
            try:
                return future.result(timeout=0.2)
            except concurrent.futures.TimeoutError:
                pass
            now = ran.at(time.monotonic())
            if not self._thread.is_alive():
                raise Gone("the group was shut down (ftcomm.shutdown)")
            refused = self._up.refused
            if isinstance(refused, handshake.Refused):  # any other refusal may be forged, so the link tries again
                raise JoinError(str(refused))
            before, news = news, self._up.news
            if before.stage is m.Stage.JOINING and news != before:  # a new wait, with its own time
                deadline = now + timeout
            if now > deadline and news.stage is m.Stage.WAITING:
                raise JoinError(f"{news.text} (waited {timeout:g} s)")
            if now - told > 10:
                told = now
                log.info("%s: %s", rank_name(self.replica, self.shard), news.text)

    @property
    def loop_of_job(self) -> int:
        """The step loop of the members, as a replica that joins them was told last."""
        return self._node.machine.loop_of_job

    def boundary(
        self,
        step: int,
        timeout: float | None,
        loop: int = 0,
        waits: Callable[[Sequence[tuple[int, int]], float], object] | None = None,
    ) -> View:
        """Stand at the boundary of `step` in step loop `loop`, with no op in flight. Blocks only if membership may
        change there; returns the view in force. Raises `Gone`, and `TimeoutError` after `timeout` seconds. Without
        that it waits for as long as an op may, anew after each view that comes meanwhile: those that hold it up are
        removed one after the other, by a coordinator that is heard. `waits` hears every `AWAITED_EVERY` seconds for
        which (replica, rank in it) this rank waits, and in how many seconds it gives up."""
        with self._control.lock:
            actions = self._control.inform(self._node.boundary, step, loop)
            if len(actions) == 1 and isinstance(actions[0], act.Passed):
                self.left = actions[0].left
                return actions[0].view
            if self._control.failed is not None:
                raise Gone(self._control.failed.reason, self._control.failed.ending)
            passed: concurrent.futures.Future[View] = concurrent.futures.Future()
            self._passed = passed
        self._control.call(self._carry_out, actions)
        seconds = self._timeouts.give_up if timeout is None else timeout
        timer = RunningTimer(seconds, time.monotonic)
        if timeout is None:
            timer = RunningTimer(seconds, time.monotonic, lambda: self._newest, lambda: self._away)
        while True:
            left = timer.left()
            try:
                return passed.result(min(left, AWAITED_EVERY))
            except concurrent.futures.TimeoutError:
                if not left:
                    raise TimeoutError(f"the boundary of step {step} was not passed within {seconds:g} s") from None
            with self._control.lock:
                missing = self._node.not_come()
            if waits is not None:
                waits(missing, left)

    @property
    def _newest(self) -> int:
        """The epoch of the newest view that this rank has heard of."""
        view = self._node.machine.view
        return 0 if view is None else view.epoch

    def tell(self, message: m.Message) -> None:
        """Tell the leader a Report, Ready, CaughtUp, Leave or Finished. Any thread; dropped if the job has gone."""
        self._control.soon(self._node.tell, message)

    def stalled(self, epoch: int, op: int, waiting_on: tuple[int, ...], lasted: float) -> None:
        """Report that an op makes no progress, in a wait of `lasted` seconds. Any thread."""
        self._control.soon(self._node.stalled, epoch, op, waiting_on, lasted)

    def suspect(self, replica: int, epoch: int, reason: str, proof: bool) -> None:
        """Report that a replica cannot be reached since some moment of `epoch`, or (`proof`) is certainly dead. Any
        thread."""
        self._control.soon(self._node.peer_lost, replica, epoch, reason, proof)

    def severed(self, replica: int, epoch: int, reason: str) -> None:
        """Report that a connection for data with a replica has ended in `epoch`. Any thread."""
        self._control.soon(self._node.severed, replica, epoch, reason, time.monotonic())

    def failed(self, reason: str) -> None:
        """Report that the data plane cannot go on. Any thread."""
        self._control.soon(self._node.failed, reason)

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
                    "%s: has finished, and waits for a coordinator to hear that, for %.0f s at most: "
                    "if none does, nobody knows it but by the output of this process",
                    *(rank_name(self.replica, self.shard), timeout),
                )

    def give_up(self, reason: str, script: ScriptEnd | None = None) -> None:
        """Say that this rank cannot go on, so that no member waits for this replica, and how its script has ended, if
        it has. Does not block."""
        self.tell(m.Finished(False, reason, script))

    def stop(self) -> None:
        """End the control thread; idempotent."""
        if self._thread.is_alive():
            self._control.loop.call_soon_threadsafe(self._control.loop.stop)
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

    def address_of(self, view: View, replica: int, shard: int, timeout: float) -> Address:
        """Returns where any rank of `view` is reached. Blocks for up to `timeout` seconds. Raises `OSError`."""
        member = view.member(replica)
        if member is None or (self._directory is None and not member.ranks.has(shard)):
            raise ConnectionError(f"the view of epoch {view.epoch} has no {rank_name(replica, shard)}")
        if self._directory is None or member.ranks.has(shard):
            return member.ranks[shard]
        return self._directory.address(view, member, shard, timeout)

    def dial_address(
        self, there: Address, purpose: str, fields: handshake.Fields, timeout: float | None = None
    ) -> Channel:
        """Like `dial`, to any rank of the job, but to no other process that may listen at its address by now. Raises
        `OSError`."""
        timeout = self._timeouts.give_up if timeout is None else timeout
        return wire.connect((there.host, there.port), self._credentials, purpose, fields, timeout, to=there)

    def serve(self, purpose: str, handler: Handler) -> None:
        """Hand incoming authenticated connections of `purpose` (blocking) to `handler`, each in a thread."""
        self._incoming.handlers[purpose] = handler

    # -- the loop ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._on_start()
            asyncio.set_event_loop(self._control.loop)
            self._control.spawn(self._main())
            self._control.loop.run_forever()
        except BaseException as error:
            self._ended(error)
        finally:
            loop = self._control.loop
            with contextlib.suppress(Exception):
                while tasks := asyncio.all_tasks(loop):  # a connection that comes in meanwhile starts one
                    for task in tasks:
                        task.cancel()
                    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            # No process is to be found here any more.
            for close in (self._peers.close, self._sock.close, socket_events(loop).close, loop.close):
                with contextlib.suppress(OSError):  # the script has closed its descriptor
                    close()
            self._witness.dismiss()
            for process in (self._own_leader, self._own_host_agent):
                if process is not None:
                    process.dismiss()

    def _ended(self, error: BaseException) -> None:
        """Fail all that waits for this thread, which ends by itself."""
        reason = f"{rank_name(self.replica, self.shard)}: {why_ended(error)}"
        log.error("%s", reason, exc_info=error)
        try:
            self._control.do(self._node.failed, reason)
        except Exception:  # the others could not be told; the end of this thread tells them
            self._end(reason, m.Ending.FAILED)

    def _from_up(self, message: m.AnyMessage) -> None:
        if isinstance(message, m.Welcome) and self.shard:  # the leader is beside shard 0
            self._witness.call(message.processes)
        if isinstance(message, m.LeaderLost):
            self._up.lost_above(message.reason)
        self._control.do(self._node.from_up, message)

    async def _main(self) -> None:
        self._listener = Listener(self._sock, self._credentials, self._incoming.serve, names={self.address.nonce})
        for process in (self._own_leader, self._own_host_agent):
            if process is not None:
                self._control.spawn(self._watch(process))
        if self._leading is None or self._control.with_leader is None:
            self._up.open(self._from_up)
        else:
            self._control.do(self._control.with_leader.start)
            self._leading.open()
        self._control.spawn(
            ask_until_over(
                *(self._me, self._coordinator, self._credentials, self._asking),
                over=lambda: self._up.link is None or self._knows_job,
                alone=lambda: self._leading is not None or not self._hears_leader,  # else that tells it
                tell=self._hopeless,
                started=started(),
            )
        )
        while True:
            await asyncio.sleep(self._timeouts.beat)
            self._look()
            self._tick(time.monotonic())
            self.data_plane.wake()

    def _tick(self, now: float) -> None:
        if self._control.with_leader is not None:
            self._control.do(self._control.with_leader.tick, now)
        else:
            self._control.do(self._node.beat, now)
            self._control.do(self._node.tick, now)

    def _up_lost(self, reason: str, refused: bool, here: bool) -> None:
        if self._host_agent is None or not refused:
            self._control.do(self._node.up_lost, reason, refused, here)
        elif self._node.machine.incarnation and not self._node.has_finished:
            self._control.spawn(self._end_with_host_agent(reason))
        else:  # it has not begun yet, or ends with a rank that has finished
            self._control.do(self._node.up_lost, reason, True, self._node.has_finished)

    async def _end_with_host_agent(self, reason: str) -> None:
        """End with the host agent, which refuses no more to be there again. The rank that has started it may be
        held, so each tells it."""
        if self._node.machine.phase not in (Phase.LEFT, Phase.FAILED):
            self._up.close()  # it is told once
            await self._tell_end(f"its host agent has ended: {reason}")
            self._control.do(self._node.host_agent_ended, reason)

    async def _tell_end(self, why: str) -> None:
        """Tell the coordinator that this replica ends, which no leader can by now."""
        mine = self.replica, self._node.machine.incarnation
        await leaderless.tell(self._coordinator, self._credentials, *mine, why)

    async def _watch(self, process: OwnCompanion) -> None:
        """End with the leader, or the host agent: the ranks of a replica and these live and die together. The
        others connect to nobody any more, and the coordinator hears it from here."""
        why = await process.ended()
        if self._node.machine.phase is Phase.FAILED:
            return
        self._up.close()
        await self._tell_end(why)
        self._control.do(self._node.failed, f"replica {self.replica} cannot go on: {why}")

    def _lead(self, channel: Channel, opening: handshake.Opening) -> bool:
        """Take a call from a coordinator that has replaced another one, and tells where it can be reached."""
        if opening.purpose != "coordinator":
            return False
        with channel:
            host = str(opening.fields.get("host", channel.getpeername()[0]))
            self._coordinator = host, handshake.number(opening.fields, "port", least=1, most=65535)
        if self._leading is not None:
            self._leading.called(self._coordinator)
        elif self._up.link is not None:
            self._up.link.send(m.CoordinatorAt(*self._coordinator))
        return True

    def _hopeless(self, told: m.Removed) -> None:
        if self._leading is not None:
            self._control.do(self._leading.node.from_coordinator, told)
        else:
            self._control.do(self._node.from_up, told)

    @property
    def _hears_leader(self) -> bool:
        return self._up.link is not None and self._up.link.is_up and not self._node.cut_off

    @property
    def _knows_job(self) -> bool:
        """Whether this rank has heard of a view, which only a leader that has started tells it."""
        return self._known.done() or self._node.machine.view is not None

    def _look(self) -> None:
        """Look which kernels answer, before anything more is sent to them."""
        now = time.monotonic()
        if self._leading is not None:
            self._leading.look()
        elif self._up.link is not None and (seconds := self._up.link.unanswered()) is not None:
            self._control.do(self._node.up_acknowledged, now - seconds)
        self._peers.watch_again()
        peers = self._peers.unanswered()
        self._control.do(self._node.peers_acknowledged, {replica: now - seconds for replica, seconds in peers.items()})
        self._control.do(self._node.reaching, self.data_plane.reaching())

    def _lost(self, view: View, replica: int, reason: str) -> None:
        self._control.do(self._node.peer_lost, replica, view.epoch, reason, True)

    def _dial_failed(self, view: View, replica: int, reason: str, error: Exception) -> None:
        if not self._control.is_short(error):
            self._control.do(self._node.dial_failed, replica, view.epoch, reason, cause_of(error), time.monotonic())

    # -- what the node wants -------------------------------------------------------------------------------------

    def _carry_out(self, actions: Sequence[InProcessAction]) -> None:
        for is_up, some in itertools.groupby(actions, lambda action: isinstance(action, act.ToLeader)):
            if not is_up:
                self._carry_out_here(some)
            elif self._up.link is not None:
                self._up.link.send(*(action.message for action in some if isinstance(action, act.ToLeader)))

    def _carry_out_here(self, actions: Iterable[InProcessAction]) -> None:
        for action in actions:
            if isinstance(action, ToCoordinator | ToRank):
                assert self._leading is not None
                self._leading.carry_out(action)
            elif isinstance(action, n.ToPeer):
                self._peers.send(action.replica, action.message)
            elif isinstance(action, act.Freeze):
                self._entry.freeze(action.view)
            elif isinstance(action, act.EnterView):
                self._control.spawn(self._entry.enter(action.view, action.progress))
            elif isinstance(action, n.LookAtWaits):
                op, waiting_on = self.data_plane.stalls(self._timeouts.beat) or (0, ())
                self._control.do(self._node.waits, op, waiting_on)
            elif isinstance(action, n.HandWaits):
                self.data_plane.hand_waits(action.seconds)
            elif isinstance(action, n.WaitOn):
                self._wait_on(action.seconds, action.away)
            elif isinstance(action, act.Passed):
                self.left = action.left
                passed, self._passed = self._passed, None
                for future in (passed, self._joined if action.left else None):
                    if future is not None and not future.done():
                        future.set_result(action.view)
            elif isinstance(action, act.JoinPending):
                self._up.queued(action.reason, action.stage)
            elif isinstance(action, act.Known):
                self._up.news = JoinNews("the coordinator has not answered yet")  # what this rank says next
                if not self._known.done():
                    self._known.set_result(action.view)
            elif isinstance(action, act.GoOn):
                joined, self._joined = self._joined, concurrent.futures.Future()
                joined.set_result(None)
            elif isinstance(action, n.Acked):
                self._acked.set()
            else:
                assert isinstance(action, act.Failed)
                self._end(action.reason, action.ending)

    def _wait_on(self, unheard: float, away: float) -> None:
        """Let all waits go on, and say so once in the time of an op if there are any."""
        self._away += away
        self.data_plane.wait_on(away)
        stalls, now = self.data_plane.stalls(self._timeouts.op_floor), time.monotonic()
        missing = self._node.waiting()[1] or (() if stalls is None else stalls.replicas)
        if not missing or now - self._said_waits < self._timeouts.op:
            return
        self._said_waits = now
        link, refused = self._up.link, self._up.refused
        address = self._coordinator if link is None or self._leading is None else link.address
        log.warning(
            "%s: waits for replicas %s, and for the coordinator at %s:%d, which has not been heard for "
            "%.0f s: only it can decide that one of them is lost. Start it again, or let it go on if it is stopped "
            "(`fg`, or `kill -CONT PID`; under `ftcomm run` it is in the launcher). This rank waits for %.0f s more%s",
            *(rank_name(self.replica, self.shard), ", ".join(map(str, missing)), *address),
            *(unheard, self._timeouts.absence - unheard + self._timeouts.give_up),
            f". Who is there refuses it: {refused}" if isinstance(refused, handshake.HandshakeError) else "",
        )

    def _end(self, reason: str, ending: m.Ending) -> None:
        """End the control thread and close its connections, so that no rank waits for this one."""
        self._up.news = JoinNews(reason)
        self.data_plane.fail(reason, ending)
        self._up.close()
        for future in (self._known, self._joined, self._passed):
            if future is not None and not future.done():
                future.set_exception(Gone(reason, ending))

    def _on_joined(self, view: View) -> None:
        for future in (self._joined, self._known):
            if not future.done():
                future.set_result(view)
