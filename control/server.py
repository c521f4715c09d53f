"""Runs a `Coordinator` over real sockets and a real clock in an asyncio loop, inside `ftcomm run` or alone."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from ftcomm.control import coordinator as c
from ftcomm.control import coordinator_actions as ca
from ftcomm.control import handshake, leaderless, links, wire
from ftcomm.control import messages as m
from ftcomm.control.dropped import drop
from ftcomm.control.finish_writer import LONGEST, RETRY, FinishWriter
from ftcomm.control.links import Listener, ViewWriter, serve_messages
from ftcomm.control.liveness import boot, state_of
from ftcomm.control.messages import Event
from ftcomm.control.port import Port
from ftcomm.control.probe import KERNEL, Prober
from ftcomm.control.probe_schedule import Probe, ProbeReason
from ftcomm.control.sealed import Channel
from ftcomm.control.store import JobOver, Store, StoreError, ViewStore
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.unstarted import HOPELESS, UNSTARTED, NamedRank
from ftcomm.control.view_differences import EncodedOnce
from ftcomm.control.views import View
from ftcomm.control.wait_for import wait_for

log = logging.getLogger("ftcomm.control")

LAST = 2.0  # s for what is said at the end
LONG = 60.0  # s in which a leader says nothing, until it gets fewer pings
FEW = 8  # then one in so many, so that its kernel still answers twice in the time in which it has to

Serve = Callable[[Channel, handshake.Fields], Coroutine[Any, Any, None]]


class ServerError(RuntimeError):
    """The coordinator cannot start; the message says why and what to do."""


def _promises_nothing(action: ca.CoordinatorAction) -> bool:
    """Whether an action says nothing of a view that is not written down yet."""
    if isinstance(action, ca.Send):
        return isinstance(action.message, m.FinishAck | m.Queued | m.WhoWaits)
    if isinstance(action, ca.Log):
        return action.kind == "finished"  # an acknowledged process may end at once
    return isinstance(action, Probe | ca.Keep | ca.StoreFinishes)


class CoordinatorServer:
    """The server. All methods belong to one event loop. It hands events to `on_event` there, as dicts that JSON can
    hold. `others` serve, at its port, connections of purposes that are none of a coordinator's. It keeps its port until
    `stop`; where another server follows on it, the caller gives both the same `Port`, and closes that."""

    def __init__(
        self,
        replicas: int,
        ranks_per_replica: int,
        credentials: handshake.Credentials,
        *,
        host: str = "127.0.0.1",
        port: int | Port = 0,
        store: Path | Store | None = None,
        timeouts: Timeouts,
        on_event: Callable[[Event], None] = lambda event: None,
        others: Mapping[str, Serve] = MappingProxyType({}),
    ) -> None:
        self._others = others
        self._new = (replicas, ranks_per_replica, timeouts)
        self.timeouts = timeouts
        self._credentials, self._host = credentials, host
        self._port, self._shares_port = (port, True) if isinstance(port, Port) else (Port(host, port), False)
        self._store = store if isinstance(store, Store) else ViewStore(store)
        self._store.tell = lambda text: self._log("store", {"text": text})
        self._on_event = on_event
        self._beat, self._presence = timeouts.beat, timeouts.presence
        self._machine: c.Coordinator | None = None
        self._once = EncodedOnce()
        self._writers: dict[ca.Conn, ViewWriter] = {}
        self._looks = 0  # at the kernels of leaders
        self._here: dict[ca.Conn, NamedRank] = {}  # the leaders that are here; their `Join` may be under way
        self._conns = 0
        self._listener: Listener | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._probes: set[asyncio.Task[None]] = set()
        self._prober = Prober(credentials)
        self._keep_task: asyncio.Task[None] | None = None
        self._waiting: deque[ca.CoordinatorAction] = deque()  # actions that wait for a view to be written
        self._writing: asyncio.Future[None] | None = None
        self._finishes = FinishWriter(self._store, self._finishes_delayed, self._not_written)
        self._done = asyncio.Event()
        self.ended = False  # the job has ended; otherwise it goes on, even without this coordinator
        self.failed = ""

    @property
    def endpoint(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._port.number}"

    @property
    def store(self) -> str:
        """The place of the views, in words."""
        return self._store.name

    @property
    def steps(self) -> dict[int, int]:
        """The last step that the heartbeats of each connected replica told."""
        return {} if self._machine is None else {link.replica: link.step for link in self._machine.links.values()}

    @property
    def hosts(self) -> dict[int, str]:
        """The address of the host of each member of the newest view."""
        view = None if self._machine is None else self._machine.view
        return {} if view is None else {member.replica: member.ranks[0].host for member in view.members}

    async def start(self) -> None:
        """Start. Waits for another coordinator if the store does. Raises `ServerError` if the port is taken or the
        store cannot be used, `JobOver` if the other coordinator has ended the job."""
        try:
            await self._store.acquire()
            self._begin()
        except BaseException as error:
            await self._store.release()
            if isinstance(error, StoreError) and not isinstance(error, JobOver):
                raise ServerError(str(error)) from None
            raise
        self._keep_task = asyncio.ensure_future(self._keep())

    def _begin(self) -> None:
        """Begin to serve with what is in the store. Raises `ServerError`."""
        ranks = {len(member.ranks) for view in self._store.views for member in view.members} - {self._new[1]}
        if ranks:
            raise ServerError(
                f"{self._store.name} is of a job with {ranks.pop()} ranks a replica, not {self._new[1]}; choose "
                "another --store, or the --ranks-per-replica of that job"
            )
        try:
            sock = self._port.listen()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise  # no other port would help
            raise ServerError(
                f"cannot listen on {self._host}:{self._port.number}: {error.strerror or error}; another coordinator "
                "may run there. Choose another --port, or 0 for any free one"
            ) from None
        self._machine = c.Coordinator(
            *self._new,
            views=self._store.views,
            now=time.monotonic(),
            lifetime=secrets.randbits(32),
            state=state_of,
            boot=boot(),
            unstarted=self._store.reports,
            finishes=self._store.finishes,
        )
        self._listener = Listener(sock, self._credentials, self._peer)
        self._ticker = asyncio.ensure_future(self._tick())

    async def _keep(self) -> None:
        """Give up when this coordinator may no longer be the only one, until it is again. Then it begins with what is
        in the store, as after a restart."""
        while True:
            await self._store.doubt()
            await self._give_up()
            try:
                await self._store.acquire()
                self._begin()
            except JobOver as error:
                self._log("store", {"text": str(error)})
                self._over("")
                return
            except Exception as error:
                if not isinstance(error, StoreError | ServerError):
                    log.exception("internal error of the coordinator")
                self._log("store", {"text": str(error) or repr(error)})
                self._over(str(error) or repr(error))
                return
            self._log("store", {"text": "this coordinator has the job again"})

    def drain(self) -> None:
        """Let all replicas leave at one common step boundary."""
        if self._machine is not None:
            self._do(self._machine.drain())

    def exited(self, replica: int, code: int) -> None:
        """Note that a process of a replica has exited with `code`, that of an error, whatever the replica has said
        before."""
        if self._machine is not None:
            self._do(self._machine.exited(replica, code, time.monotonic()))

    async def wait_done(self) -> None:
        """Wait until all members have finished, the job has failed, or this coordinator cannot go on (`failed` says
        why)."""
        await self._done.wait()

    async def clear(self) -> None:
        """Remove what is stored. Otherwise the next job of this name would begin with members that are gone."""
        await self._store.clear()

    async def stop(self) -> None:
        """Close every connection, when the members have what they were told, and release the store; idempotent. The
        members notice only when they next need a coordinator."""
        if self._keep_task is not None:
            self._keep_task.cancel()
            await asyncio.wait({self._keep_task})
            self._keep_task = None
        await self._flush()
        await self._give_up()
        await self._store.release()
        if not self._shares_port:
            self._port.close()

    async def _flush(self) -> None:
        """Wait until the kernels have what was said, for `LAST` seconds at most, and say whose has not."""
        behind = {asyncio.ensure_future(writer.flushed()): conn for conn, writer in self._writers.items()}
        if not behind:
            return
        _, late = await asyncio.wait(behind, timeout=LAST)
        for flushing in late:
            flushing.cancel()
            who = self._here.get(behind[flushing])
            drop("unsent", f"what was said last to replica {'?' if who is None else who.replica}, which does not read")

    async def _give_up(self) -> None:
        self._machine = None
        self._waiting.clear()
        self._finishes.stop()
        for task in (self._ticker, self._writing, *self._probes):
            if task is not None:
                task.cancel()
        self._ticker = self._writing = None
        self._prober.only(frozenset())
        if self._listener is not None:
            await self._listener.close()
            self._listener = None
        for writer in self._writers.values():
            writer.close()

    async def _peer(self, channel: Channel, opening: handshake.Opening) -> None:
        if opening.purpose == UNSTARTED and self._machine is not None:
            rank, reason = NamedRank.read(opening.fields), handshake.text(opening.fields, "reason")
            lasting = handshake.number(opening.fields, "lasting", most=1)
            self._do(self._machine.unstarted(rank, reason, bool(lasting), self._here, time.monotonic()))
            channel.close()
            return
        if opening.purpose == leaderless.PURPOSE and self._machine is not None:
            replica, life = handshake.number(opening.fields, "replica"), handshake.text(opening.fields, "life")
            reason = handshake.text(opening.fields, "reason")
            self._do(self._machine.leaderless(replica, life, reason, time.monotonic()))
            channel.close()
            return
        if opening.purpose == HOPELESS and self._machine is not None:
            await self._answer(channel, opening.fields)
            return
        if opening.purpose in self._others:
            await self._others[opening.purpose](channel, opening.fields)
            return
        if opening.purpose != "leader" or self._machine is None:
            drop("purpose", f"a connection for {opening.purpose!r}, which a coordinator does not serve")
            channel.close()
            return
        conn = self._next()
        self._here[conn] = NamedRank.read(opening.fields)

        def ready(writer: wire.Writer) -> None:
            self._writers[conn] = ViewWriter(writer, self._once)

        def received(message: m.AnyMessage) -> None:
            if self._machine is not None:
                self._do(self._machine.receive(conn, message, time.monotonic()))

        try:
            await serve_messages(channel, received, ready)
        finally:
            self._writers.pop(conn, None)
            self._here.pop(conn, None)
        if self._machine is not None:
            self._do(self._machine.disconnected(conn, time.monotonic()))

    def _next(self) -> ca.Conn:
        self._conns += 1
        return self._conns

    async def _answer(self, channel: Channel, fields: handshake.Fields) -> None:
        """Tell a process that waits to get into a view whether it waits in vain."""
        rank, lived = NamedRank.read(fields), handshake.number(fields, "lived")
        conn = self._next()

        def ready(writer: wire.Writer) -> None:
            self._writers[conn] = ViewWriter(writer, self._once)
            if self._machine is not None:
                self._do(self._machine.asked(conn, rank, lived / 1e3, time.monotonic()))

        try:
            await wait_for(links.HANDSHAKE_TIMEOUT, serve_messages(channel, lambda message: None, ready))
        except asyncio.TimeoutError:
            drop("handshake", f"a process of replica {rank.replica} that has asked, and does not hang up")
        finally:
            self._writers.pop(conn, None)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._beat / 2)
            if (
                self._machine is not None and self._store.sure
            ):  # otherwise the members may belong to another coordinator
                try:
                    self._ask_kernels(self._machine)
                    self._do(self._machine.tick(time.monotonic()))
                except Exception as error:  # later losses must still be found
                    drop("internal", f"the look at who is here: {error!r}", error=error)

    def _ask_kernels(self, machine: c.Coordinator) -> None:
        """Look which kernels have acknowledged what they were sent, then send the next ping. A leader that is stopped
        reads none of them, and its connection would end when there is no room for more: it gets few."""
        self._prober.only(machine.lives)
        ping, mute = m.Ping(), machine.mute(LONG, time.monotonic())
        self._looks += 1
        for conn, writer in self._writers.items():
            seconds = writer.unanswered()
            if seconds is not None:
                machine.acknowledged(conn, time.monotonic() - seconds)
            if conn not in mute or self._looks % FEW == 0:
                writer.send(ping)

    async def _probe(self, probe: Probe) -> None:
        machine = self._machine
        purpose = "asked"
        fields: handshake.Fields = {}
        probes = [probe]
        if probe.call and all(
            leader.replica != probe.life[0] for leader in self._here.values()
        ):  # it may still hold a connection to an earlier coordinator
            purpose = "coordinator"
            fields = {"port": self._port.number} if self._anywhere else {"host": self._host, "port": self._port.number}
            probes += [] if probe.also is None else [msgspec.structs.replace(probe, shard=1, address=probe.also)]
        # An accused process has that long to answer; a silent one is probed again in any case.
        timeout = KERNEL if probe.why in (ProbeReason.ACCUSED, ProbeReason.SEVERED) else self._presence
        outcome, *_ = await asyncio.gather(*(self._prober.outcome(x, purpose, fields, timeout) for x in probes))
        if machine is not None and machine is self._machine:
            self._do(machine.probed(probe, outcome, time.monotonic()))

    @property
    def _anywhere(self) -> bool:
        return self._host in ("", "0.0.0.0", "::")

    def _do(self, actions: list[ca.CoordinatorAction]) -> None:
        """Carry actions out in order. No action overtakes a view that is still being written, except those that promise
        nothing about it."""
        if not self._store.sure:  # `_keep` is about to give up
            return
        self._waiting.extend(actions)
        held: deque[ca.CoordinatorAction] = deque()
        while self._waiting:
            action = self._waiting.popleft()
            if self._writing is None or _promises_nothing(action):
                self._carry_out(action)
            else:
                held.append(action)
        self._waiting = held

    def _carry_out(self, action: ca.CoordinatorAction) -> None:
        if isinstance(action, ca.Send) and isinstance(action.message, m.FinishAck):
            self._finishes.then(functools.partial(self._send, action))
        elif isinstance(action, ca.Send):
            self._send(action)
        elif isinstance(action, ca.StoreFinishes):
            self._finishes.write(action.finishes)
        elif isinstance(action, ca.Persist):
            try:
                self._writing = self._store.append(action.view)
            except OSError as error:
                self._writing = asyncio.ensure_future(self._write_again(action.view, error))
            if self._writing is not None:
                self._writing.add_done_callback(self._written)
        elif isinstance(action, ca.Close):
            writer = self._writers.pop(action.conn, None)
            if writer is not None:
                writer.close()
        elif isinstance(action, ca.Keep):
            try:
                self._store.keep(action.reports)
            except OSError as error:  # then it is known until this coordinator ends
                log.warning("what ranks say that cannot start is not kept in %s: %s", self._store.name, error.strerror)
        elif isinstance(action, Probe):
            task = asyncio.ensure_future(self._probe(action))
            self._probes.add(task)
            task.add_done_callback(self._probes.discard)
        elif isinstance(action, ca.Log):
            self._log(action.kind, action.fields)
        elif isinstance(action, ca.Unfit):
            self._machine = None  # a coordinator that decides nothing must not be heard: members wait for another one
            for writer in self._writers.values():
                writer.close()
            self._over(action.reason)
        else:
            self._finishes.then(functools.partial(self._end, action))

    def _send(self, action: ca.Send) -> None:
        writer = self._writers.get(action.conn)
        if writer is not None:
            writer.send(action.message)

    def _end(self, action: ca.Done) -> None:
        self._finishes.stop()  # what is stored is removed now
        self.ended = True
        self._over(action.failed)

    def _written(self, writing: asyncio.Future[None]) -> None:
        if writing.cancelled() or writing is not self._writing:
            return
        self._writing = None
        error = writing.exception()
        if error is not None:
            self._not_written(str(error))
        else:
            self._finishes.view_stored()
        self._do([])

    async def _write_again(self, view: View, error: OSError) -> None:
        """Write a view until that succeeds, whatever is wrong. No later decision is sent before."""
        what = f"the views cannot be stored in {self._store.name}"
        self._delayed(what, error, "no replica joins, leaves or is replaced")
        while True:
            await asyncio.sleep(RETRY)
            with contextlib.suppress(OSError):
                writing = self._store.append(view)
                break
        if writing is not None:
            await writing
        self._log("store", {"text": f"the views are stored in {self._store.name} again"})

    def _finishes_delayed(self, error: OSError) -> None:
        what = f"who has finished cannot be stored in {self._store.name}"
        self._delayed(what, error, f"each replica that finishes waits for {LONGEST:g} s")

    def _delayed(self, what: str, error: OSError, meanwhile: str) -> None:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        mend = "free space there" if full else "mend the file system that it lies in, or the way there"
        text = f"{what}: {error.strerror or error}; {mend}. Until then {meanwhile}; it is tried again every {RETRY:g} s"
        self._log("store", {"text": text})

    def _not_written(self, why: str) -> None:
        """End: a view that is not written must not be sent, and a second attempt would not help."""
        self._waiting.clear()
        self._machine = None
        mend = "Then start this coordinator again with --port and --store as they were"
        reason = f"the views cannot be stored in {self._store.name}: {why}. {mend}"
        self._log("failed", {"reason": reason})
        self._over(reason)

    def _over(self, failed: str) -> None:
        self.failed = self.failed or failed
        self._done.set()

    def _log(self, kind: str, fields: dict[str, Any]) -> None:
        try:
            self._on_event({**fields, "time": time.time(), "mono": time.monotonic(), "kind": kind})
        except Exception:  # a listener must not hold a decision up
            log.exception("cannot tell of the event %s", kind)
