"""Carries the training state from healthy replicas to one that comes back, while all train on.

A view that takes a replica in at the boundary of step m makes up to four contributing members its *sources*. Each
copies its state entering step m to host memory, which is the only stall of a healthy replica (snapshot.py), and serves
the copy from a thread. All sources hold the same bits, so the joiner takes each block from any free source and checks
it. If a source dies or answers wrongly, the joiner gets its blocks from the others. block_scheduler.py decides what to
ask of which source; catchup_protocol.py has the messages.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from ftcomm.control import handshake, wire
from ftcomm.control.dropped import drop
from ftcomm.control.failed_dials import start
from ftcomm.control.liveness import unanswered
from ftcomm.control.rank_name import rank_name
from ftcomm.control.sealed import Connection
from ftcomm.control.views import View
from ftcomm.errors import StateError, TransportError
from ftcomm.recorder.files import process_recorder
from ftcomm.recorder.layout import PhaseKind
from ftcomm.training.block_scheduler import BlockScheduler, JoinerLife, Snapshots, sources_of
from ftcomm.training.catchup_protocol import (
    BLOCK,
    MAX_REQUEST,
    BadFrame,
    BlockHeader,
    BlockStream,
    CatchUpDone,
    CatchUpFrame,
    NoSource,
    Offer,
    Refusal,
    Wait,
    Want,
    read_into,
    receive,
    send,
)
from ftcomm.training.snapshot import Snapshot
from ftcomm.training.state import SAME_SCRIPT, FlatState, Stateful, allocate, first_difference
from ftcomm.training.throttle import Throttle

if TYPE_CHECKING:
    from ftcomm.groups.group import Group

log = logging.getLogger("ftcomm")

SILENCE = 10.0  # s without a byte until others are asked, or without an answer of the kernel until a source is lost
SPOILED = (
    "parameters or optimizer state were changed before optimizer.step(), while they were being copied for a joiner; "
    "from now on they are copied before the step begins"
)
_LOOK = 1.0  # s between two checks whether the time of a wait passes
RETRY = 0.2  # seconds between attempts to reach a source whose script has not come to the step loop


class StateSource:
    """The healthy side. The step loop calls `at_boundary`; requests are served in threads of their own."""

    def __init__(
        self, group: Group, state: Mapping[str, Stateful], *, overlap: bool = False, throttle: Throttle | None = None
    ) -> None:
        """Makes a source. With `overlap`, `settle` is called before every step of an optimizer, so that copies may take
        until then."""
        self._group = group
        self._state = state
        self._overlap = overlap
        self._throttle = Throttle(None) if throttle is None else throttle
        self._copying: Snapshot | None = None
        self._recorder = process_recorder()
        self._recorded: tuple[int, int] | None = None
        self._step = -1
        self._broken = ""  # why there is no snapshot
        self._snapshots: Snapshots[Snapshot] = Snapshots()
        self._moved = threading.Condition()
        self._open: Counter[JoinerLife] = Counter()  # connections of each joiner
        self._closed: dict[JoinerLife, float] = {}  # when the last one of each has ended
        group.internals.serve("state", self._serve)

    def at_boundary(self, step: int, view: View) -> None:
        """Take a snapshot if members joined here and this replica is a source; drop snapshots that are no longer
        needed."""
        self.settle()
        with self._moved:
            joined = self._snapshots.due(step, view)
        snapshot = None
        if joined and self._group.replica in sources_of(view):
            snapshot = self._copying = self._snapshot(step)
        with self._moved:
            if snapshot is not None:
                self._snapshots.put(joined, step, snapshot)
            self._step = step
            self._moved.notify_all()

    def _snapshot(self, step: int) -> Snapshot | None:
        """Take a snapshot. None if the state cannot be copied: the joiner loses by that, and a healthy replica must not
        end."""
        self._recorded = self._recorder.begin(PhaseKind.SNAPSHOT, step=step)
        try:
            return Snapshot(step, self._state, self._overlap)
        except Exception as error:
            self._recorder.finish(self._recorded, failed=True)
            self._broken = f"its state cannot be copied ({type(error).__name__}: {error})"[:1000]
            log.warning(
                "%s: %s; a replica that comes back cannot have it from here",
                *(rank_name(self._group.replica, self._group.shard), self._broken),
                exc_info=not isinstance(error, StateError),
            )
            self._group.emit("state_broken", step=step, error=f"{type(error).__name__}: {error}"[:200])
            return None

    def settle(self) -> float:
        """Block until the live state may change. Returns the seconds for which the loop has stood still for a snapshot
        that is now complete, 0.0 without one."""
        snapshot, self._copying = self._copying, None
        if snapshot is None:
            return 0.0
        snapshot.finish()
        if self._recorded is not None:
            self._recorder.finish(self._recorded, number=snapshot.nbytes)
        fields = dict(step=snapshot.step, bytes=snapshot.nbytes, seconds=round(snapshot.seconds, 6))
        if snapshot.spoiled:
            self._overlap = False
            log.warning("%s: %s", rank_name(self._group.replica, self._group.shard), SPOILED)
            self._group.emit("state_snapshot", **fields, spoiled=True)
        else:
            self._group.emit("state_snapshot", **fields)
        return snapshot.seconds

    def linger(self, seconds: float) -> None:
        """Stay after the last step until each joiner has its state or has left, for at most `seconds`.

        A joiner that got its state in an earlier loop, or from other sources, asks for nothing, and may stand in an op
        of the next loop already. So who has no connection here is waited for no longer than half the time in which the
        others would call this replica a stall.
        """
        begun = time.monotonic()
        timeout = self._group.settings.timeouts.op_floor / 2
        with self._moved:
            while (now := time.monotonic()) < begun + seconds and any(
                self._open[joiner] or now < max(begun, self._closed.get(joiner, begun)) + timeout
                for joiner in self._snapshots.joiners
            ):
                self._moved.wait(0.05)  # a loss is not announced here, so look
                self._snapshots.only(self._group.members)

    def _serve(self, sock: Connection, fields: Mapping[str, Any]) -> None:
        joiner = handshake.number(fields, "replica"), handshake.text(fields, "incarnation")
        step = handshake.number(fields, "step", most=1 << 53)
        with contextlib.closing(sock), self._talking(joiner), contextlib.suppress(OSError):
            sock.settimeout(None)  # a joiner may idle while other sources are busy; its death closes the connection
            wire.for_bulk(sock, self._group.settings.timeouts.give_up)  # for a stopped joiner
            try:
                self._answer(sock, step, joiner)
            except (msgspec.DecodeError, BadFrame) as error:
                drop("state", f"the connection of replica {joiner[0]}, which fetches the state: {error}")

    @contextlib.contextmanager
    def _talking(self, joiner: JoinerLife) -> Iterator[None]:
        """A context in which a joiner has a connection here."""
        with self._moved:
            self._open[joiner] += 1
        try:
            yield
        finally:
            with self._moved:
                self._open[joiner] -= 1
                self._closed[joiner] = time.monotonic()

    def _answer(self, sock: Connection, step: int, joiner: JoinerLife) -> None:
        snapshot = self._await(sock, step, joiner)
        if snapshot is None:
            reason = self._broken or "it took no snapshot for this replica"
            send(sock, Refusal(reason))
            return
        # At once, even if the copy goes on: the joiner takes part in no op before this answer.
        send(sock, Offer(snapshot.flat.skeleton, snapshot.nbytes, BLOCK))
        count = -(-snapshot.nbytes // BLOCK)
        while isinstance(want := receive(sock, MAX_REQUEST), Want) and 0 <= want.number < count:
            while not snapshot.wait(1.0):
                send(sock, Wait())
            stream = snapshot.stream()
            if stream is None:
                send(sock, Refusal(SPOILED))
                while True:  # until the joiner closes: unread requests must not reset the connection
                    receive(sock, MAX_REQUEST)
            pieces = stream.pieces(want.number)
            nbytes = sum(piece.nbytes for piece in pieces)
            self._throttle.take(nbytes)
            send(sock, BlockHeader(want.number, nbytes))
            for piece in pieces:
                sock.sendall(piece)
        if not isinstance(want, CatchUpDone):
            raise BadFrame(f"it sent {want!r}, expected Want of one of {count} blocks, or CatchUpDone")
        with self._moved:
            self._snapshots.done(joiner)
            self._moved.notify_all()

    def _await(self, sock: Connection, step: int, joiner: JoinerLife) -> Snapshot | None:
        """Wait until this replica has passed the boundary of `step`; the joiner may have done so a step earlier."""
        while True:
            with self._moved:
                if self._step >= step or self._moved.wait_for(lambda: self._step >= step, timeout=1.0):
                    return self._snapshots.get(joiner, step)
            send(sock, Wait())


class _FellSilent(Exception):
    """A source that lives has sent nothing for `SILENCE`, and its blocks were given to other sources."""


class Fetch:
    """The joiner's side. It fetches the state entering `step` of `view`, with a background thread for each source.

    `here` is the skeleton of the joiner's own state, so that another model is refused before its bytes are moved.
    """

    def __init__(self, group: Group, view: View, step: int, here: bytes) -> None:
        self._group = group
        self._here = here
        member = view.member(group.replica)
        assert member is not None, "a joiner is a member of the view that took it in"
        self._fields: dict[str, str | int] = {"step": step, "replica": group.replica, "incarnation": member.incarnation}
        self._changed = threading.Condition()
        self._started = time.monotonic()
        self._offer: Offer | None = None  # the first one, which lays out the state
        self._flat: FlatState | None = None
        self._stream: BlockStream | None = None
        self._scheduler = BlockScheduler(sources_of(view))
        self._error: Exception | None = None
        self._sockets: dict[int, Connection] = {}
        self._left_view: set[int] = set()
        self._mute: set[int] = set()  # sources whose kernels answer, and whose processes are waited for
        self.step = step
        self.seconds = 0.0
        alive = self._scheduler.alive
        if not alive:
            self._give_up()
        self._threads = [
            threading.Thread(target=self._from, args=(source,), name=f"ftcomm-state-{source}", daemon=True)
            for source in alive
        ]
        for thread in self._threads:
            _start(thread, group.settings.timeouts.op)

    @property
    def nbytes(self) -> int:
        return self._offer.nbytes if self._offer else 0

    @property
    def skeleton(self) -> bytes:
        """The skeleton of the offered state; valid after `agree`."""
        assert self._offer is not None
        return self._offer.skeleton

    @property
    def sources(self) -> list[int]:
        """The sources that served at least one block."""
        return self._scheduler.served

    def agree(self, seconds: float) -> None:
        """Block until a source has said what it has, for a round trip. Raises `StateError` if that does not fit here.

        Before that a joiner must not take part in an op: with another model it would call one of another size, and that
        is an error for all. For `seconds`, see `_within`.
        """
        with self._changed:
            if not self._within(seconds, lambda: self._offer is not None):
                raise StateError(f"No replica offered the state of step {self.step} within {seconds:.0f} s.")
        self.ready()

    def ready(self) -> bool:
        """Whether the state has arrived completely. Raises `StateError` when it never will. Does not block."""
        with self._changed:
            if self._error is not None:
                raise self._error
            return self._scheduler.complete

    def wait(self, seconds: float) -> None:
        """Block until the state has arrived. Raises `StateError` when it never will, or not `_within` that time."""
        with self._changed:
            if not self._within(seconds, lambda: self._scheduler.complete):
                raise StateError(
                    f"The state of step {self.step} did not arrive within {seconds:.0f} s ({self._scheduler.left} "
                    f"blocks of {BLOCK >> 20} MB are missing). Look at the network between the replicas."
                )
        self.ready()

    def _within(self, seconds: float, true: Callable[[], bool]) -> bool:
        """Wait until `true()`, or until it can no longer be. False if it is not in time. No time passes while all
        sources left are alive and hold their interpreters, or are stopped: they go on when they can, or are removed."""
        left = seconds
        while not (true() or self._error is not None):
            if left <= 0:
                return False
            alive, begun = set(self._scheduler.alive), time.monotonic()
            self._changed.wait(min(left, _LOOK))
            if not alive or not alive <= self._mute:
                left -= time.monotonic() - begun
        return True

    def take(self) -> FlatState:
        """Returns the state, once, after `ready`; it belongs to the caller from then on."""
        flat, self._flat, self._stream = self._flat, None, None
        assert flat is not None
        return flat

    def keep(self, members: Collection[int]) -> None:
        """Give up sources that are no longer members, without waiting for their timeouts."""
        with self._changed:
            self._left_view |= {source for source in self._scheduler.alive if source not in members}
            left = [self._sockets[source] for source in self._left_view & self._sockets.keys()]
            for source in self._left_view - self._sockets.keys():  # a source may be stopped, and a dial to it take long
                self._drop(source, "it left before it was asked")
            self._changed.notify_all()
        for sock in left:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the threads: at once if something is missing, otherwise as soon as every source knows that the state has
        arrived."""
        with self._changed:
            if not self._scheduler.complete and self._error is None:
                self._error = StateError("The fetch of the state was given up.")
            self._changed.notify_all()
        if self._error is not None:
            self.keep(())
        deadline = time.monotonic() + SILENCE
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _from(self, source: int) -> None:
        try:
            while not self._fetched_from(source):
                pass
        except (OSError, TransportError, NoSource) as error:
            self._drop(source, str(error) or type(error).__name__)
        except (BadFrame, msgspec.DecodeError) as error:
            drop("state", f"replica {source} as a source of the state: {error}")
            self._drop(source, str(error))
        except StateError as error:  # another model: no other source can help
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
        except Exception as error:  # this thread must not end unnoticed: another source is needed then
            drop("internal", f"the fetch of the state from replica {source}: {error!r}", error=error)
            self._drop(source, repr(error))

    def _fetched_from(self, source: int) -> bool:
        """Fetch from a source. True if all is there; False if the source has fallen silent, and others were asked."""
        sock, offer = self._open(source)
        with contextlib.closing(sock):
            self._agree(source, offer)
            while True:
                numbers, due = self._next(source)
                for number in numbers:
                    send(sock, Want(number))
                if due is None:
                    send(sock, CatchUpDone())
                    return True
                try:
                    self._receive(source, sock, due)
                except _FellSilent:
                    return False  # go on by a new connection: late bytes of this one must not be written
                self._received(source)

    def _open(self, source: int) -> tuple[Connection, Offer]:
        """Connect until the source makes its offer. A source whose script is not in steps() yet closes the
        connection."""
        while True:
            with self._changed:
                self._mute.add(source)  # until the source takes the connection
            sock = self._group.internals.dial(source, "state", self._fields)
            sock.settimeout(SILENCE)
            with self._changed:  # `keep` and `close` look at both under this lock
                self._mute.discard(source)
                self._sockets[source] = sock
                left = source in self._left_view
            if left:
                sock.close()
                raise NoSource("it left before it was asked")
            try:
                while isinstance(frame := self._heard(source, sock), Wait):
                    pass
                return sock, _offered(frame)
            except ConnectionError:
                sock.close()
            with self._changed:
                if self._changed.wait_for(lambda: source in self._left_view or self._error is not None, RETRY):
                    raise NoSource("it left before it made an offer")

    def _heard(self, source: int, sock: Connection) -> CatchUpFrame:
        """Returns the next frame of a source."""
        frame = receive(sock, goes_on=functools.partial(self._goes_on, source, sock))
        with self._changed:
            self._mute.discard(source)
        return frame

    def _goes_on(self, source: int, sock: Connection) -> bool:
        """Whether to go on waiting for a source that has sent nothing for `SILENCE`: yes if its kernel answers. Its
        process holds its interpreter, say; if that takes too long for the others, it is removed. Raises `_FellSilent`
        if others are to send its blocks."""
        seconds = unanswered(sock)
        with self._changed:
            if source in self._left_view or seconds is None or seconds >= SILENCE:
                return False
            self._mute.add(source)
            if self._scheduler.due(source) is not None and set(self._scheduler.alive) - self._mute:
                self._scheduler.release(source)
                self._changed.notify_all()
                raise _FellSilent
            return True

    def _agree(self, source: int, offer: Offer) -> None:
        """Take an offer. The first one lays out what is to be received, and every other must be the same."""
        with self._changed:
            if self._offer is None:
                if difference := first_difference(self._here, offer.skeleton):
                    raise StateError(f"The state of replica {source} does not fit here: {difference}. {SAME_SCRIPT}")
                self._flat = allocate(offer.skeleton)
                self._stream = BlockStream(self._flat, offer.block)
                self._scheduler.begin(self._stream.count)
                self._offer = offer
                self._progress()
                self._changed.notify_all()
            if offer != self._offer:
                raise BadFrame("it offers another state than the first source")

    def _next(self, source: int) -> tuple[list[int], int | None]:
        """Returns the blocks to ask for now, and the one that is due. Waits while others fetch the last ones."""
        with self._changed:
            self._changed.wait_for(lambda: not self._scheduler.idle(source) or self._error is not None)
            if self._error is not None:
                raise NoSource("the fetch was given up")
            return self._scheduler.ask(source), self._scheduler.due(source)

    def _receive(self, source: int, sock: Connection, number: int) -> None:
        assert self._stream is not None, "the state is taken only when no block is missing"
        while isinstance(block := self._heard(source, sock), Wait):
            pass
        if isinstance(block, Refusal):
            raise NoSource(block.reason)
        pieces = self._stream.pieces(number)
        if not isinstance(block, BlockHeader) or block.number != number:
            raise BadFrame(f"it answered {type(block).__name__} when block {number} was due")
        if block.nbytes != sum(piece.nbytes for piece in pieces):
            raise BadFrame(f"block {number} has {block.nbytes} bytes")
        for piece in pieces:
            read_into(sock, piece, functools.partial(self._goes_on, source, sock))

    def _received(self, source: int) -> None:
        with self._changed:
            self._mute.discard(source)
            self._scheduler.received(source)
            self._progress()

    def _progress(self) -> None:
        if self._scheduler.complete:
            self.seconds = time.monotonic() - self._started
            self._changed.notify_all()

    def _drop(self, source: int, reason: str) -> None:
        with self._changed:
            self._scheduler.drop(source, reason)
            if self._scheduler.hopeless:
                self._give_up()
            self._changed.notify_all()

    def _give_up(self) -> None:
        self._error = self._error or StateError(
            f"The state of step {self._fields['step']} cannot be fetched, no source is left "
            f"({self._scheduler.why() or 'nobody contributes'}). "
            "Start this replica again: it joins at a later step with other sources."
        )


def _start(thread: threading.Thread, seconds: float) -> None:
    """Start a thread; if none can be had now, try again for so many seconds. Raises `RuntimeError`."""
    deadline = time.monotonic() + seconds
    told = False
    while True:
        lacks = start(thread)
        if not lacks:
            return
        if time.monotonic() > deadline:
            raise lacks
        if not told:
            log.warning("the fetch of the state waits for a thread: %s", lacks)
        told = True
        time.sleep(RETRY)


def _offered(frame: CatchUpFrame) -> Offer:
    if isinstance(frame, Offer):
        return frame
    if isinstance(frame, Refusal):
        raise NoSource(frame.reason)
    raise BadFrame(f"it answered {type(frame).__name__}")
