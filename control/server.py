"""Runs a `Coordinator` over real sockets and a real clock, in an asyncio loop (embedded in `ftcomm run`, or alone)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from ftcomm.control import coordinator as c
from ftcomm.control import messages as m
from ftcomm.control import wire
from ftcomm.control.dials import Outcome
from ftcomm.control.dropped import drop
from ftcomm.control.links import CALL_TIMEOUT, Listener, listen, open_socket, serve_messages
from ftcomm.control.liveness import Knock, boot, is_ending, ports, state_of
from ftcomm.control.sealed import Channel
from ftcomm.control.store import JobOver, Store, StoreError, ViewStore
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.views import Address, View
from ftcomm.control.wait_for import wait_for

log = logging.getLogger("ftcomm.control")

Event = dict[str, Any]

RETRY = 1.0  # s between two attempts to store a view that could not be written


class ServerError(RuntimeError):
    """The coordinator cannot start; the message says why and what to do."""


def _promises_nothing(action: c.Action) -> bool:
    """Whether it says nothing of a view that is not written down yet."""
    if isinstance(action, c.Send):
        return isinstance(action.message, m.FinishAck | m.Queued | m.WhoWaits)
    return isinstance(action, c.Dial | c.Ask)


class CoordinatorServer:
    """All methods belong to one event loop. Events are handed to `on_event` as JSON-able dicts in that loop."""

    def __init__(
        self,
        replicas: int,
        ranks_per_replica: int,
        credentials: wire.Credentials,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        store: Path | Store | None = None,
        timeouts: Timeouts,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._new = (replicas, ranks_per_replica, timeouts)
        self._credentials, self._host, self._port = credentials, host, port
        self._store = store if isinstance(store, Store) else ViewStore(store)
        self._store.tell = lambda text: self._log("store", {"text": text})
        self._on_event = on_event
        self._beat = timeouts.beat
        self._machine: c.Coordinator | None = None
        self._writers: dict[c.Conn, wire.Writer] = {}
        self._here: dict[c.Conn, Any] = {}  # who a connection said to be from; its `Join` may be still under way
        self._conns = 0
        self._listener: Listener | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._dials: set[asyncio.Task[None]] = set()
        self._knocks: dict[tuple[int, str], Knock] = {}  # (replica, incarnation) of those that are looked for
        self._keeper: asyncio.Task[None] | None = None
        self._waiting: deque[c.Action] = deque()  # for a view before them that is being written down
        self._writing: asyncio.Future[None] | None = None
        self._done = asyncio.Event()
        self.ended = False  # the job has; else it goes on, even if we cannot
        self.failed = ""

    @property
    def endpoint(self) -> str:
        return f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"

    @property
    def store(self) -> str:
        """Where the views are, in words."""
        return self._store.name

    @property
    def steps(self) -> dict[int, int]:
        """Replica -> the last step that its heartbeats told; of those that are connected."""
        return {} if self._machine is None else {link.replica: link.step for link in self._machine.links.values()}

    async def start(self) -> None:
        """Waits for another coordinator if the store is to. Raises `ServerError` if the port is taken or the store is
        of no use, `JobOver` if the other one has ended the job."""
        try:
            await self._store.acquire()
            self._begin()
        except BaseException as error:
            await self._store.release()
            if isinstance(error, StoreError) and not isinstance(error, JobOver):
                raise ServerError(str(error)) from None
            raise
        self._keeper = asyncio.ensure_future(self._keep())

    def _begin(self) -> None:
        """Serve, from what is in the store. Raises `ServerError`."""
        ranks = {len(member.ranks) for view in self._store.views for member in view.members} - {self._new[1]}
        if ranks:
            raise ServerError(
                f"{self._store.name} is of a job with {ranks.pop()} ranks a replica, not {self._new[1]}; choose "
                "another --store, or the --ranks-per-replica of that job"
            )
        try:
            sock = listen(self._host, self._port)
        except OSError as error:
            raise ServerError(
                f"cannot listen on {self._host}:{self._port}: {error.strerror or error}; another coordinator may run "
                "there. Choose another --port, or 0 for any free one"
            ) from None
        self._port = sock.getsockname()[1]
        self._machine = c.Coordinator(
            *self._new,
            views=self._store.views,
            now=time.monotonic(),
            lifetime=secrets.randbits(32),
            state=state_of,
            room=self._store.room,
            boot=boot(),
        )
        self._listener = Listener(sock, self._credentials, self._peer)
        self._ticker = asyncio.ensure_future(self._tick())

    async def _keep(self) -> None:
        """Who cannot be sure any more to be the only coordinator is as good as dead until it is. Then it knows what is
        in the store, as if it had been started again."""
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
        """All replicas leave at one common step boundary."""
        if self._machine is not None:
            self._do(self._machine.drain())

    def exited(self, replica: int, reason: str) -> None:
        """A process of it has ended, and not well, whatever it has said before."""
        if self._machine is not None:
            self._do(self._machine.exited(replica, reason))

    async def wait_done(self) -> None:
        """Until all members have finished, the job has failed, or this coordinator cannot go on (`failed` says why)."""
        await self._done.wait()

    async def clear(self) -> None:
        """Remove what is stored: the next job of this name would begin with members that are gone."""
        await self._store.clear()

    async def stop(self) -> None:
        """Close every connection and give the store back; idempotent. The members do not notice until they need us."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
            self._keeper = None
        await self._give_up()
        await self._store.release()

    async def _give_up(self) -> None:
        self._machine = None
        self._waiting.clear()
        for task in (self._ticker, self._writing, *self._dials):
            if task is not None:
                task.cancel()
        self._ticker = self._writing = None
        for knock in self._knocks.values():
            knock.close()
        self._knocks.clear()
        if self._listener is not None:
            await self._listener.close()
            self._listener = None
        for writer in self._writers.values():
            writer.close()

    async def _peer(self, channel: Channel, opening: wire.Opening) -> None:
        if opening.purpose != "leader" or self._machine is None:
            drop("purpose", f"a connection for {opening.purpose!r}, which a coordinator does not serve")
            channel.close()
            return
        self._conns += 1
        conn = self._conns
        self._here[conn] = opening.fields.get("replica")

        def ready(writer: wire.Writer) -> None:
            self._writers[conn] = writer

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

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._beat / 2)
            if self._machine is not None and self._store.sure:  # else members may be another one's to call
                try:
                    self._ask_kernels(self._machine)
                    self._do(self._machine.tick(time.monotonic()))
                except Exception as error:  # who is lost later is still to be found
                    drop("internal", f"the look at who is here: {error!r}", error=error)

    def _ask_kernels(self, machine: c.Coordinator) -> None:
        """Whose kernels have acknowledged what they were sent; then the next to be acknowledged."""
        for life in self._knocks.keys() - machine.missed:
            self._unknock(life)
        ping = m.encode(m.Ping())
        for conn, writer in self._writers.items():
            seconds = writer.unanswered()
            if seconds is not None:
                machine.acknowledged(conn, time.monotonic() - seconds)
            writer.write(ping)

    def _spawn(self, dial: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(dial)
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)

    async def _dialled(self, dial: c.Dial) -> None:
        machine, life = self._machine, (dial.replica, dial.incarnation)
        outcome = await self._knock(life, dial.address)
        if machine is None or machine is not self._machine:
            return
        self._do(machine.dialled(*life, outcome, time.monotonic()))
        if outcome == "answered" and dial.call and dial.replica not in self._here.values():
            # It may still hang on to a coordinator before us.
            fields: wire.Fields = {"port": self._port} if self._anywhere else {"host": self._host, "port": self._port}
            ended = await self._call(dial.address, "coordinator", fields) == "ended"
            if ended and machine is self._machine:
                self._do(machine.dialled(*life, "ended", time.monotonic()))

    async def _asked(self, ask: c.Ask) -> None:
        machine = self._machine
        ending = is_ending(ask.address)
        if not ending:
            await asyncio.sleep(0.002)  # its threads end one after the other
            ending = is_ending(ask.address)
        here = not ending and await self._call(ask.address, "asked", {}) == "answered"
        if machine is not None and machine is self._machine:
            self._do(machine.asked(ask.replica, ask.incarnation, ask.rank, here))

    async def _probed(self, probe: c.Probe) -> None:
        machine = self._machine
        outcome: Outcome = "answered"
        try:
            (await Knock.at((probe.address.host, probe.address.port), CALL_TIMEOUT)).close()
        except ConnectionRefusedError:
            outcome = "refused"
        except (OSError, ValueError, OverflowError):
            outcome = "unreachable"
        if machine is not None and machine is self._machine:
            self._do(machine.probed(probe.replica, probe.incarnation, probe.rank, probe.itself, outcome))

    async def _knock(self, life: tuple[int, str], there: Address) -> Outcome:
        """What listens there. The connection is kept as long as the process does not take it and close it, so that one
        that is held up for long does not find a thousand of them."""
        known = self._knocks.get(life)
        seconds = known.unanswered() if known is not None else None
        if seconds is not None:
            return "answered" if seconds <= CALL_TIMEOUT else "unreachable"
        self._unknock(life)
        try:
            knock = await Knock.at((there.host, there.port), CALL_TIMEOUT)
        except ConnectionRefusedError:
            return "ended" if self._here_alone(there) else "refused"
        except (OSError, ValueError, OverflowError):
            return "unreachable"
        self._unknock(life)
        self._knocks[life] = knock
        return "answered"

    def _unknock(self, life: tuple[int, str]) -> None:
        knock = self._knocks.pop(life, None)
        if knock is not None:
            knock.close()

    @staticmethod
    def _here_alone(there: Address) -> bool:
        """Whether it is a port of ours, with no network and no firewall in between."""
        local = there.host == "::1" or there.host.startswith("127.")
        return local and there.ports == ports()

    async def _call(self, there: Address, purpose: str, fields: wire.Fields) -> Outcome:
        """Whether the process of that address, and no other one, answers; "ended" if another has its port by now."""
        try:
            call = open_socket((there.host, there.port), self._credentials, purpose, fields, to=there)
            (await wait_for(CALL_TIMEOUT, call)).close()
        except wire.Elsewhere:
            return "ended"
        except (OSError, asyncio.TimeoutError):
            return "unreachable"
        return "answered"

    @property
    def _anywhere(self) -> bool:
        return self._host in ("", "0.0.0.0", "::")

    def _do(self, actions: list[c.Action]) -> None:
        """Carry out, in order: nothing that comes after a view before that is written down, but for what promises
        nothing about it."""
        if not self._store.sure:  # `_keep` is about to give all of this up
            return
        self._waiting.extend(actions)
        held: deque[c.Action] = deque()
        while self._waiting:
            action = self._waiting.popleft()
            if self._writing is None or _promises_nothing(action):
                self._carry_out(action)
            else:
                held.append(action)
        self._waiting = held

    def _carry_out(self, action: c.Action) -> None:
        if isinstance(action, c.Send):
            writer = self._writers.get(action.conn)
            if writer is not None:
                writer.write(m.encode(action.message))
        elif isinstance(action, c.Persist):
            try:
                self._writing = self._store.append(action.view)
            except OSError as error:
                self._writing = asyncio.ensure_future(self._write_again(action.view, error))
            if self._writing is not None:
                self._writing.add_done_callback(self._written)
        elif isinstance(action, c.Close):
            writer = self._writers.pop(action.conn, None)
            if writer is not None:
                writer.close()
        elif isinstance(action, c.Dial):
            self._spawn(self._dialled(action))
        elif isinstance(action, c.Ask):
            self._spawn(self._asked(action))
        elif isinstance(action, c.Probe):
            self._spawn(self._probed(action))
        elif isinstance(action, c.Log):
            self._log(action.kind, action.fields)
        elif isinstance(action, c.Unfit):
            self._over(action.reason)
        else:
            self.ended = True
            self._over(action.failed)

    def _written(self, writing: asyncio.Future[None]) -> None:
        if writing.cancelled() or writing is not self._writing:
            return
        self._writing = None
        error = writing.exception()
        if error is not None:
            self._not_written(str(error))
        self._do([])

    async def _write_again(self, view: View, error: OSError) -> None:
        """Until it can be, whatever is wrong. Nothing that was decided with it or later is heard of before."""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        mend = "free space there" if full else "mend the file system that it lies in, or the way there"
        self._log(
            "store",
            {
                "text": f"the views cannot be stored in {self._store.name}: {error.strerror or error}; {mend}. Until "
                f"then nobody joins, leaves or is replaced; it is tried again every {RETRY:g} s"
            },
        )
        while True:
            await asyncio.sleep(RETRY)
            with contextlib.suppress(OSError):
                writing = self._store.append(view)
                break
        if writing is not None:
            await writing
        self._log("store", {"text": f"the views are stored in {self._store.name} again"})

    def _not_written(self, why: str) -> None:
        """A view that is not written down must not be heard of, and no second attempt would mend it."""
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
        except Exception:  # whoever listens must not keep a decision from those who wait for it
            log.exception("cannot tell of the event %s", kind)
