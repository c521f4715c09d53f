"""How the training state gets from healthy replicas to one that came back, while everybody trains on.

A view that takes a replica in at the boundary of step m makes up to four contributing members its *sources*. Each
copies its state entering step m to host memory, which is all that a healthy replica ever stalls (snapshot.py), and
serves the copy from a thread. All sources hold the same bits, so the joiner takes each block from whichever is free,
checks it, and when a source dies or answers wrongly gets its blocks from the others. Who is asked for what is decided
in block_scheduler.py; what they say to each other is in catchup_protocol.py.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from ftcomm.control import wire
from ftcomm.control.dropped import drop
from ftcomm.control.liveness import unanswered
from ftcomm.control.sealed import Connection
from ftcomm.control.views import View
from ftcomm.errors import StateError, TransportError
from ftcomm.training.block_scheduler import BlockScheduler, Snapshots, sources_of
from ftcomm.training.catchup_protocol import (
    BLOCK,
    MAX_REQUEST,
    Block,
    BlockStream,
    Done,
    Frame,
    NoSource,
    Offer,
    Refusal,
    Wait,
    Want,
    Wrong,
    read_into,
    receive,
    send,
)
from ftcomm.training.snapshot import Snapshot
from ftcomm.training.state import SAME_SCRIPT, FlatState, Stateful, allocate, first_difference
from ftcomm.training.throttle import Throttle

if TYPE_CHECKING:
    from ftcomm.group import Group

log = logging.getLogger("ftcomm")

SILENCE = 10.0  # seconds without a byte after which others are asked, or without a kernel's answer until it is gone
SPOILED = (
    "parameters or optimizer state were changed before optimizer.step(), while they were being copied for a joiner; "
    "from now on they are copied before the step begins"
)
_LOOK = 1.0  # seconds between two looks whether the time of a wait passes
RETRY = 0.2  # seconds between attempts to reach a source whose script has not come to the step loop


class StateSource:
    """The healthy side. `at_boundary` is called by the step loop, requests are served in threads of their own."""

    def __init__(
        self, group: Group, state: Mapping[str, Stateful], *, overlap: bool = False, throttle: Throttle | None = None
    ) -> None:
        """`overlap`: `settle` is called before every step of an optimizer, so that copies may take until then."""
        self._group = group
        self._state = state
        self._overlap = overlap
        self._throttle = Throttle(None) if throttle is None else throttle
        self._copying: Snapshot | None = None
        self._step = -1
        self._broken = ""  # why there is no snapshot
        self._snapshots: Snapshots[Snapshot] = Snapshots()
        self._moved = threading.Condition()
        group._serve("state", self._serve)

    def at_boundary(self, step: int, view: View) -> None:
        """Take a snapshot if members joined here and this replica is a source; drop those nobody needs any more."""
        self.settle()
        with self._moved:
            joined = self._snapshots.due(step, view)
        snapshot = None
        if joined and self._state and self._group.replica in sources_of(view):
            snapshot = self._copying = self._snapshot(step)
        with self._moved:
            if snapshot is not None:
                self._snapshots.put(joined, step, snapshot)
            self._step = step
            self._moved.notify_all()

    def _snapshot(self, step: int) -> Snapshot | None:
        """None if the state cannot be copied: that is a joiner's loss, and no reason for a healthy replica to end."""
        try:
            return Snapshot(step, self._state, self._overlap)
        except Exception as error:
            self._broken = f"its state cannot be copied ({type(error).__name__}: {error})"[:1000]
            log.warning(
                "replica %d rank %d: %s; a replica that comes back cannot have it from here",
                *(self._group.replica, self._group.shard, self._broken),
                exc_info=not isinstance(error, StateError),
            )
            self._group.report("state_broken", step=step, error=f"{type(error).__name__}: {error}"[:200])
            return None

    def settle(self) -> float:
        """Block until the live state may change; returns for how many seconds the loop has stood still for the snapshot
        that is now complete, 0.0 without one."""
        snapshot, self._copying = self._copying, None
        if snapshot is None:
            return 0.0
        snapshot.finish()
        fields = dict(step=snapshot.step, bytes=snapshot.nbytes, seconds=round(snapshot.seconds, 6))
        if snapshot.spoiled:
            self._overlap = False
            log.warning("replica %d rank %d: %s", self._group.replica, self._group.shard, SPOILED)
            self._group.report("state_snapshot", **fields, spoiled=True)
        else:
            self._group.report("state_snapshot", **fields)
        return snapshot.seconds

    def linger(self, seconds: float) -> None:
        """Stay after the last step until each joiner has its state or has left, or the time is over."""
        deadline = time.monotonic() + seconds
        with self._moved:
            while self._snapshots and time.monotonic() < deadline:
                self._moved.wait(0.05)  # a loss is not announced here, so look
                self._snapshots.only(self._group.members)

    def _serve(self, sock: Connection, fields: Mapping[str, Any]) -> None:
        joiner = wire.number(fields, "replica"), wire.text(fields, "incarnation")
        step = wire.number(fields, "step", most=1 << 53)
        with contextlib.closing(sock), contextlib.suppress(OSError):
            sock.settimeout(None)  # a joiner may idle while other sources are busy; its death closes the connection
            wire.for_bulk(sock, self._group.settings.timeouts.give_up)  # it may be stopped; but the snapshot is large
            try:
                self._answer(sock, step, joiner)
            except (msgspec.DecodeError, Wrong) as error:
                drop("state", f"the connection of replica {joiner[0]}, which fetches the state: {error}")

    def _answer(self, sock: Connection, step: int, joiner: tuple[int, str]) -> None:
        snapshot = self._await(sock, step, joiner)
        if snapshot is None:
            reason = self._broken or "it took no snapshot for this replica"
            send(sock, Refusal(reason if self._state else "it passes no `state` to steps()"))
            return
        # At once, though the copy may go on: the joiner takes part in no op before it has heard this.
        send(sock, Offer(snapshot.flat.skeleton, snapshot.nbytes, BLOCK))
        count = -(-snapshot.nbytes // BLOCK)
        while isinstance(want := receive(sock, MAX_REQUEST), Want) and 0 <= want.number < count:
            while not snapshot.wait(1.0):
                send(sock, Wait())
            stream = snapshot.stream()
            if stream is None:
                send(sock, Refusal(SPOILED))
                while True:  # until it hangs up: what it asked for on top must not reset the line
                    receive(sock, MAX_REQUEST)
            pieces = stream.pieces(want.number)
            nbytes = sum(piece.nbytes for piece in pieces)
            self._throttle.take(nbytes)
            send(sock, Block(want.number, nbytes))
            for piece in pieces:
                sock.sendall(piece)
        if not isinstance(want, Done):
            raise Wrong(f"it sent {want!r}, expected Want of one of {count} blocks, or Done")
        with self._moved:
            self._snapshots.done(joiner)
            self._moved.notify_all()

    def _await(self, sock: Connection, step: int, joiner: tuple[int, str]) -> Snapshot | None:
        """Wait until this replica has passed the boundary of `step`; the joiner may have done so a step earlier."""
        while True:
            with self._moved:
                if self._step >= step or self._moved.wait_for(lambda: self._step >= step, timeout=1.0):
                    return self._snapshots.get(joiner, step)
            send(sock, Wait())


class _FellSilent(Exception):
    """A source that lives has said nothing for `SILENCE`, and what it was asked for was given to others."""


class Fetch:
    """The joiner's side: the state entering `step` of `view`, fetched by one background thread a source.

    `here` is the skeleton of the joiner's own state, to refuse another model before its bytes are moved.
    """

    def __init__(self, group: Group, view: View, step: int, here: bytes) -> None:
        self._group = group
        self._here = here
        member = view.member(group.replica)
        assert member is not None, "a joiner is a member of the view that took it in"
        self._fields: dict[str, str | int] = {"step": step, "replica": group.replica, "incarnation": member.incarnation}
        self._changed = threading.Condition()
        self._started = time.monotonic()
        self._offer: Offer | None = None  # the first one; it lays out what is to be received
        self._flat: FlatState | None = None
        self._stream: BlockStream | None = None
        self._scheduler = BlockScheduler(sources_of(view))
        self._error: Exception | None = None
        self._sockets: dict[int, Connection] = {}
        self._left_view: set[int] = set()
        self._mute: set[int] = set()  # whose kernels answer, and whose processes are waited for
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
            thread.start()

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
        """Who served at least one block."""
        return self._scheduler.served

    def agree(self, seconds: float) -> None:
        """Block until a source has said what it has, a round trip; raises `StateError` if that does not fit here.

        Before that a joiner must not take part in an op: with another model it would call one of another size, and
        that is an error on everybody. For `seconds`, see `_within`.
        """
        with self._changed:
            if not self._within(seconds, lambda: self._offer is not None):
                raise StateError(f"No replica offered the state of step {self.step} within {seconds:.0f} s.")
        self.ready()

    def ready(self) -> bool:
        """Whether all has arrived; raises `StateError` when it never will. Does not block."""
        with self._changed:
            if self._error is not None:
                raise self._error
            return self._scheduler.complete

    def wait(self, seconds: float) -> None:
        """Block until all has arrived; raises `StateError` when it never will, or not `_within` that time."""
        with self._changed:
            if not self._within(seconds, lambda: self._scheduler.complete):
                raise StateError(
                    f"The state of step {self.step} did not arrive within {seconds:.0f} s ({self._scheduler.left} "
                    f"blocks of {BLOCK >> 20} MB are missing). Look at the network between the replicas."
                )
        self.ready()

    def _within(self, seconds: float, true: Callable[[], bool]) -> bool:
        """Wait until that is so, or never will be; False if it is not in time. No time passes while all sources that
        are left live and hold their interpreters, or are stopped: they go on when they can, or are removed."""
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
        """The state, once, after `ready`; it belongs to the caller from then on."""
        flat, self._flat, self._stream = self._flat, None, None
        assert flat is not None
        return flat

    def keep(self, members: Collection[int]) -> None:
        """Give up sources that are no members any more, without waiting for them to time out."""
        with self._changed:
            self._left_view |= {source for source in self._scheduler.alive if source not in members}
            left = [self._sockets[source] for source in self._left_view & self._sockets.keys()]
            for source in self._left_view - self._sockets.keys():  # it may be stopped, and its dial take long
                self._drop(source, "it left before it was asked")
            self._changed.notify_all()
        for sock in left:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the threads: at once if something is missing, else as soon as every source knows that we have it all."""
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
        except (Wrong, msgspec.DecodeError) as error:
            drop("state", f"replica {source} as a source of the state: {error}")
            self._drop(source, str(error))
        except StateError as error:  # another model: no other source can help
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
        except Exception as error:  # this thread must not die unheard: nobody would wait for another source
            drop("internal", f"the fetch of the state from replica {source}: {error!r}", error=error)
            self._drop(source, repr(error))

    def _fetched_from(self, source: int) -> bool:
        """Whether all is there; else it has fallen silent, and others were asked."""
        sock, offer = self._open(source)
        with contextlib.closing(sock):
            self._agree(source, offer)
            while True:
                numbers, due = self._next(source)
                for number in numbers:
                    send(sock, Want(number))
                if due is None:
                    send(sock, Done())
                    return True
                try:
                    self._receive(source, sock, due)
                except _FellSilent:
                    return False  # by a new connection: what still comes by this one would be written too late
                self._received(source)

    def _open(self, source: int) -> tuple[Connection, Offer]:
        """Connect until the source makes its offer; one whose script is not in steps() yet closes the connection."""
        while True:
            with self._changed:
                self._mute.add(source)  # until it takes the connection
            sock = self._group._dial(source, "state", self._fields)
            sock.settimeout(SILENCE)
            with self._changed:  # who gives sources up looks at both under this lock
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

    def _heard(self, source: int, sock: Connection) -> Frame:
        """What it says next."""
        frame = receive(sock, patient=functools.partial(self._patient, source, sock))
        with self._changed:
            self._mute.discard(source)
        return frame

    def _patient(self, source: int, sock: Connection) -> bool:
        """Whether to go on waiting for a source that has said nothing for `SILENCE`: if its kernel answers. Its process
        holds its interpreter, say; if that takes too long for the others, it is removed. Raises `_FellSilent` if others
        are to send what it was asked for."""
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
        """The first offer lays out what is to be received, every other must be the same."""
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
                raise Wrong("it offers another state than the first source")

    def _next(self, source: int) -> tuple[list[int], int | None]:
        """Blocks to ask for now, and the one that is due. Waits while others fetch the last ones."""
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
        if not isinstance(block, Block) or block.number != number:
            raise Wrong(f"it answered {type(block).__name__} when block {number} was due")
        if block.nbytes != sum(piece.nbytes for piece in pieces):
            raise Wrong(f"block {number} has {block.nbytes} bytes")
        for piece in pieces:
            read_into(sock, piece, functools.partial(self._patient, source, sock))

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


def _offered(frame: Frame) -> Offer:
    if isinstance(frame, Offer):
        return frame
    if isinstance(frame, Refusal):
        raise NoSource(frame.reason)
    raise Wrong(f"it answered {type(frame).__name__}")
