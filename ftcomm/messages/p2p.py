"""Arrays from one member to another: `send` and `recv` by rank and tag, the same on every kind of group.

What the two say to each other is in `ftcomm.messages.post`, which message a receive gets in `ftcomm.messages.matching`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ftcomm.control import wire
from ftcomm.control.sealed import Connection
from ftcomm.control.views import View
from ftcomm.errors import ArgumentError, CollectiveTimeout, fresh
from ftcomm.flat import Flat, to_read, to_write
from ftcomm.messages.post import Post
from ftcomm.messages.protocol import EAGER, Message, Receive, Send
from ftcomm.messages.slots import Place, Slots
from ftcomm.own import own_process

PURPOSE = "p2p"  # of connections between replicas


class MessageWork:
    """A send or a receive that was started. Methods may be called from any thread."""

    def __init__(self, message: Message, array: Any, finish: Callable[[], Any] | None, roster: tuple[int, ...]) -> None:
        self._message, self._roster = message, roster
        self._finish = finish
        self._lock = threading.Lock()
        self.array = array  # what was sent; what was received, when `wait` has returned: a new one if `x` is immutable

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._message.ended.is_set()

    @property
    def source(self) -> int | None:
        """The rank from which it is received; None while that is open, and of a send."""
        found = getattr(self._message, "found", None)
        return None if found is None else self._roster.index(found)

    def wait(self, timeout: float | None = None) -> int | None:
        """Block until the array is received, or was sent and may be changed; returns the rank it came from, or None.

        Raises what it failed with, or `CollectiveTimeout` after `timeout` seconds; it then goes on, until the timeout
        that was given with the call.
        """
        message = self._message
        if not message.ended.is_set():
            own_process()
        if not message.ended.wait(timeout):
            raise CollectiveTimeout(f"a message with tag {message.tag} has not ended within {timeout:g} s; it goes on")
        if message.error is not None:
            raise fresh(message.error)
        if self._finish is not None:
            with self._lock:
                if self._finish is not None:
                    self.array = self._finish()
                    self._finish = None
        return self.source


class JobPost(Post):
    """The messages of a rank in a job, whose views say who is lost and who has come back. Peers are replicas.

    `dial(replica, purpose, fields)` connects to the same rank of another replica, and may raise `OSError`.
    """

    def __init__(
        self,
        replica: int,
        shard: int,
        dial: Callable[[int, str, wire.Fields], Connection],
        slots: Slots | None = None,
    ) -> None:
        super().__init__(f"replica {replica} rank {shard}", self._dial_replica, lambda peer: f"replica {peer}", slots)
        self._replica, self._to_replica = replica, dial
        self._lives: dict[int, str] = {}  # of the members of the newest view
        self._epoch = 0  # of that view
        self._gone: dict[str, int] = {}  # lives that were members -> epoch of the view that left them out

    def forget(self) -> None:
        super().forget()
        self._to_replica = _nobody

    def enter(self, view: View) -> None:
        """A view is in force."""
        lives = {member.replica: member.incarnation for member in view.members}
        for replica, life in self._lives.items():
            if lives.get(replica) != life:
                self._gone[life] = view.epoch
                self.lose(replica, f"it is not in the view of epoch {view.epoch}")
        self._lives, self._epoch = lives, view.epoch
        for replica in lives:
            self.found(replica)

    def incoming(self, sock: Connection, fields: wire.Fields) -> None:
        """A connection from another replica, maybe one that is ahead of us and in a view that we have not entered. It
        may be a joiner which a view has left out, and a later one has in the same life."""
        replica, life = wire.number(fields, "replica"), wire.text(fields, "life")
        if wire.number(fields, "epoch") < self._gone.get(life, 0):
            sock.close()  # what it sends belongs to no view that we may still see
        else:
            self.accept(sock, replica, str(fields.get("nonce", "")))

    def _dial_replica(self, replica: int) -> Connection:
        fields: wire.Fields = {"replica": self._replica, "life": self._lives[self._replica], "epoch": self._epoch}
        if self.slots is not None:
            fields["nonce"] = self.slots.nonce
        return self._to_replica(replica, PURPOSE, fields)


class Messages:
    """`send` and `recv` of a group. Every rank is a position in `roster`."""

    roster: tuple[int, ...]  # the members' numbers in rank order; changes at step boundaries alone
    _me: int  # the number of this member
    _post: Post

    @property
    def rank(self) -> int:
        """The place of this member in `roster`, from 0; changes at step boundaries alone."""
        return self.roster.index(self._me)

    @property
    def world_size(self) -> int:
        """The number of members in `roster`; changes at step boundaries alone."""
        return len(self.roster)

    def _may_call(self) -> None:
        """Raises if nothing can be called any more."""

    def _patience(self) -> float:
        """Seconds until a message without a timeout of its own fails."""
        raise NotImplementedError

    def send(
        self,
        x: Any,
        dst: int,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout: float | None = None,
        copy_engine: bool = False,
    ) -> Any:
        """Send the array `x`, of any dtype, to rank `dst`, which receives as many elements of the same dtype.

        copy_engine: leave it to the copy engines of a GPU, with FTCOMM_ENGINE=gpu-kernel, if `x` is a contiguous torch
        tensor in its memory or in pinned memory, and of more than 64 KB. Else, as without it, it goes through memory of
        the host, which takes no multiprocessor either. The receiver need not say the same.

        Returns None, or at once (`async_op`) a `MessageWork`; `x` must not be changed until it has ended. Up to 64 KB
        are sent ahead, a megabyte at most that was not received yet; what is more waits until it is asked for. Messages
        to one rank with one tag arrive in the order of the calls. Raises `ArgumentError`, `LostError`,
        `CollectiveTimeout` (after `timeout` seconds, or the op timeout), and `MismatchError` if the receiver has seen
        that it is another array.
        """
        target = self._peer(dst, "send to")
        place = self._place(x, copy_engine)
        flat = to_read(x) if place is None else None
        message = Send(target, *self._outline(flat, tag, timeout, place))
        self._post.send(message)
        sending = MessageWork(message, x, None, self.roster)
        return sending if async_op else sending.wait()

    def recv(
        self,
        x: Any,
        src: int | None = None,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout: float | None = None,
        copy_engine: bool = False,
    ) -> Any:
        """Receive into the array `x` what rank `src`, or any (None), has sent with `tag`; `copy_engine` as in `send`.

        Returns the rank it came from, or at once (`async_op`) a `MessageWork`; `x` must not be touched until it has
        ended. An immutable array (JAX) needs the latter, whose `array` is the new one.
        Raises `ArgumentError`, `LostError` if the rank is lost before it has sent, `MismatchError` if it has sent
        another number of elements or another dtype (the message is gone then), and `CollectiveTimeout` after `timeout`
        seconds, or the op timeout.
        """
        source = None if src is None else self._peer(src, "receive from")
        place = self._place(x, copy_engine)
        flat = to_write(x) if place is None else None
        if flat is not None and flat.anew and not async_op:
            raise ArgumentError(
                f"recv into a {type(x).__name__}, which is immutable; pass async_op=True, and take the new array from "
                "`array` of what it returns, after wait()"
            )
        message = Receive(source, *self._outline(flat, tag, timeout, place))
        finish = flat.finish if flat is not None else self._landing(message, x)
        self._post.receive(message)
        sending = MessageWork(message, x, finish, self.roster)
        return sending if async_op else sending.wait()

    def _place(self, x: Any, copy_engine: bool) -> Place | None:
        """Where `x` lies if copy engines are to move it."""
        place = self._post.slots.place(x) if copy_engine and self._post.slots is not None else None
        return place if place is not None and place.nbytes > EAGER else None

    def _landing(self, message: Receive, x: Any) -> Callable[[], Any]:
        """The way into `x` for what has come to the host."""
        slots, place = self._post.slots, message.place
        assert slots is not None
        assert place is not None

        def finish() -> Any:
            if message.landed is not None:
                host = np.frombuffer(message.landed, np.uint8)
                slots.move(place.address, host.ctypes.data, host.nbytes)
            return x

        return finish

    def _peer(self, rank: int, what: str) -> int:
        self._may_call()
        own = self.rank
        if not isinstance(rank, int) or not 0 <= rank < len(self.roster) or rank == own:
            raise ArgumentError(
                f"cannot {what} rank {rank!r}; expected one of 0 to {len(self.roster) - 1}, and not {own}, which is "
                "this one"
            )
        return self.roster[rank]

    def _outline(
        self, flat: Flat | None, tag: int, timeout: float | None, place: Place | None
    ) -> tuple[int, str, memoryview, float, Place | None]:
        """One of `flat` and `place` says where the array is."""
        if not isinstance(tag, int) or not -(1 << 63) <= tag < 1 << 63:
            raise ArgumentError(f"a tag of {tag!r}; expected an integer of 64 bits")
        seconds = self._patience() if timeout is None else timeout
        if not 0 < seconds < float("inf"):
            raise ArgumentError(f"timeout={timeout}; expected a positive number of seconds")
        deadline = time.monotonic() + seconds
        if flat is not None:
            return tag, flat.dtype, flat.flat.data, deadline, None
        assert place is not None
        return tag, place.dtype, memoryview(b""), deadline, place


def _nobody(replica: int, purpose: str, fields: wire.Fields) -> Connection:
    raise ConnectionError("the group is closed")
