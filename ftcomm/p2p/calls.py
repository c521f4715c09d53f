"""Sends arrays from one member to another: `send` and `recv` by rank and tag, the same on every kind of group.

`ftcomm.p2p.progress` has the protocol of the two, and `ftcomm.p2p.matching` says which message a receive gets.
"""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ftcomm.arrays.flat import Flat, to_read, to_write
from ftcomm.control.rank_name import rank_name
from ftcomm.control.sealed import Connection
from ftcomm.control.timeouts import AWAITED_EVERY
from ftcomm.control.views import View
from ftcomm.errors import ArgumentError, CollectiveTimeout, copy_of
from ftcomm.p2p.progress import ProgressEngine
from ftcomm.p2p.protocol import EAGER, MessageRequest, RecvRequest, SendRequest
from ftcomm.p2p.slots import DeviceMemory, Slots
from ftcomm.process.own import checked_page, own_process
from ftcomm.recorder.layout import PhaseKind
from ftcomm.recorder.waits import PhaseWait
from ftcomm.transport.group_connection import GroupConnection


class MessageWork:
    """A send or a receive that was started. Methods may be called from any thread."""

    def __init__(
        self,
        message: MessageRequest,
        received: Any,
        finish: Callable[[], Any] | None,
        roster: tuple[int, ...],
        group: str,
        peers: Sequence[int],
    ) -> None:
        """`peers` are the members that can end the message, as `roster` has them."""
        self._message, self._roster, self._group, self._peers = message, roster, group, peers
        self._received, self._finish = received, finish
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._message.ended.is_set()

    @property
    def source(self) -> int | None:
        """The rank that has sent what is received. None while that is open, and for a send."""
        found = getattr(self._message, "found", None)
        return None if found is None else self._roster.index(found)

    def wait(self, timeout: float | None = None) -> Any:
        """Block until the array is received, or was sent and may be changed. Returns what `recv` does, or None for a
        send.

        Raises what the message failed with, or `CollectiveTimeout` after `timeout` seconds. The message then goes on,
        until the timeout that was given with the call. Any thread.
        """
        message = self._message
        if not message.ended.is_set():
            own_process()
        if not self._come(timeout):
            raise CollectiveTimeout(f"a message with tag {message.tag} has not ended within {timeout:g} s; it goes on")
        if message.error is not None:
            raise copy_of(message.error)
        if self._finish is not None:
            with self._lock:
                if self._finish is not None:
                    self._received = self._finish()
                    self._finish = None
        return self._received

    def _come(self, timeout: float | None) -> bool:
        """Wait for the end of the message for `timeout` seconds at most, and record that; whether it has come."""
        message = self._message
        if message.ended.wait(AWAITED_EVERY if timeout is None else min(AWAITED_EVERY, timeout)):
            return True
        end = None if timeout is None else time.monotonic() + timeout - AWAITED_EVERY
        kind = PhaseKind.RECV if isinstance(message, RecvRequest) else PhaseKind.SEND
        with PhaseWait(kind, number=message.tag, note=self._group) as wait:
            while True:
                now = time.monotonic()
                until = message.deadline if end is None else min(end, message.deadline)
                wait.look([(peer, None) for peer in self._peers], max(0.0, until - now))
                part = AWAITED_EVERY if end is None else min(AWAITED_EVERY, end - now)
                if part <= 0 or message.ended.wait(part):
                    return message.ended.is_set()


class JobProgressEngine(ProgressEngine):
    """The messages of a rank in a job. The job's views say which members are lost or have come back. Peers are
    replicas.

    `dial(replica, incarnation, epoch)` connects to the same rank of another replica, as that incarnation of this one in
    the view of that epoch, and may raise `OSError`.
    """

    def __init__(
        self,
        replica: int,
        shard: int,
        dial: Callable[[int, str, int], Connection],
        slots: Slots | None = None,
    ) -> None:
        super().__init__(rank_name(replica, shard), self._dial_replica, lambda peer: f"replica {peer}", slots)
        self._replica, self._to_replica = replica, dial
        self._incarnations: dict[int, str] = {}  # the incarnations of the members of the newest view
        self._epoch = 0  # the epoch of that view
        self._gone: dict[str, int] = {}  # incarnation of a former member -> epoch of the view without it

    def forget(self) -> None:
        super().forget()
        self._to_replica = _nobody

    def enter(self, view: View) -> None:
        """Note that `view` is in force."""
        incarnations = {member.replica: member.incarnation for member in view.members}
        for replica, incarnation in self._incarnations.items():
            if incarnations.get(replica) != incarnation:
                self._gone[incarnation] = view.epoch
                self.lose(replica, f"it is not in the view of epoch {view.epoch}")
        self._incarnations, self._epoch = incarnations, view.epoch
        for replica in incarnations:
            self.found(replica)

    def incoming(self, call: GroupConnection) -> None:
        """Take a connection from another replica. It may be ahead, in a view that this rank has not entered. It may be
        a joiner that one view has removed and a later one has, in the same life."""
        if call.epoch < self._gone.get(call.instance, 0):
            call.sock.close()  # its messages belong to no view still to come
        else:
            self.accept(call.sock, call.member, call.nonce)

    def _dial_replica(self, replica: int) -> Connection:
        return self._to_replica(replica, self._incarnations[self._replica], self._epoch)


class Messages:
    """`send` and `recv` of a group. Every rank is a position in `roster`. Thread-safe."""

    roster: tuple[int, ...]  # the members' numbers in rank order; changes only at step boundaries
    name: str = ""  # the name of the group, also in recordings

    def __init__(self, name: str, me: int, p2p: ProgressEngine) -> None:
        """`me`: the number of this member."""
        self.name, self._me, self._p2p = name, me, p2p

    @property
    def rank(self) -> int:
        """The place of this member in `roster`, from 0; changes only at step boundaries."""
        return self.roster.index(self._me)

    @property
    def world_size(self) -> int:
        """The number of members in `roster`; changes only at step boundaries."""
        return len(self.roster)

    def _may_call(self) -> None:
        """Raises in a forked child, before anything is locked, and if no call is possible any more."""
        if not checked_page[0]:
            own_process()

    def _default_timeout(self) -> float:
        """The seconds until a message without a timeout of its own fails."""
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
        """Send the array `x`, of any shape and dtype, to rank `dst`, which receives as many elements of the same dtype.

        copy_engine: leave it to the copy engines of a GPU, with FTCOMM_ENGINE=gpu-kernel, if `x` is a contiguous torch
            tensor of more than 64 KB in GPU memory or in pinned memory. Otherwise it goes through memory of the host,
            which takes no multiprocessor either. The receiver need not say the same.
        timeout: seconds for the whole message; None: the op timeout.

        Blocks until `x` may be changed, and returns None. With `async_op` it returns a `MessageWork` at once, and `x`
        must not be changed until that has ended. Messages up to 64 KB are sent ahead, up to a megabyte that was not
        received yet; a larger one waits until it is asked for. Messages to one rank with one tag arrive in the order of
        the calls. Any thread. Raises `ArgumentError`, `LostError`, `CollectiveTimeout`, and `MismatchError` if the
        receiver expects another array.
        """
        target = self._peer(dst, "send to")
        place = self._place(x, copy_engine)
        flat = to_read(x) if place is None else None
        message = SendRequest(target, *self._outline(flat, tag, timeout, place))
        self._p2p.send(message)
        sending = MessageWork(message, None, None, self.roster, self.name, (target,))
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
        """Receive into the array `x` what rank `src`, or any (None), has sent with `tag`; `copy_engine` and `timeout`
        as in `send`.

        Blocks, and returns `x`, or a new array if `x` is immutable (JAX). With `async_op` it returns a `MessageWork` at
        once, whose `source` is the rank it comes from, and `x` must not be touched until that has ended. Any thread.
        Raises `ArgumentError`, `LostError` if the rank is lost before it has sent, `MismatchError` if it has sent
        another number of elements or another dtype (that message is gone then), and `CollectiveTimeout`.
        """
        source = None if src is None else self._peer(src, "receive from")
        place = self._place(x, copy_engine)
        flat = to_write(x) if place is None else None
        message = RecvRequest(source, *self._outline(flat, tag, timeout, place))
        finish = flat.finish if flat is not None else self._landing(message, x)
        self._p2p.receive(message)
        peers = [other for other in self.roster if other != self._me] if source is None else [source]
        receiving = MessageWork(message, x, finish, self.roster, self.name, peers)
        return receiving if async_op else receiving.wait()

    def _place(self, x: Any, copy_engine: bool) -> DeviceMemory | None:
        """Returns the place of `x` if copy engines are to move it."""
        place = self._p2p.slots.place(x) if copy_engine and self._p2p.slots is not None else None
        return place if place is not None and place.nbytes > EAGER else None

    def _landing(self, message: RecvRequest, x: Any) -> Callable[[], Any]:
        """Returns what copies into `x` the bytes that have come to the host."""
        slots, place = self._p2p.slots, message.place
        assert slots is not None
        assert place is not None

        def finish() -> Any:
            if message.landed is not None:
                host = np.frombuffer(message.landed, np.uint8)
                slots.move(place.address, host.ctypes.data, host.nbytes)
            return x

        return finish

    @staticmethod
    def _integer(value: Any) -> int | None:
        """Returns an integer of Python, of NumPy or of another library as an `int`; None for anything else."""
        try:
            return operator.index(value)
        except TypeError:
            return None

    def _peer(self, rank: Any, what: str) -> int:
        self._may_call()
        own, found = self.rank, self._integer(rank)
        if found is None or not 0 <= found < len(self.roster) or found == own:
            raise ArgumentError(
                f"cannot {what} rank {rank!r}; expected one of 0 to {len(self.roster) - 1}, and not {own}, which is "
                "this one"
            )
        return self.roster[found]

    def _outline(
        self, flat: Flat | None, tag: Any, timeout: float | None, place: DeviceMemory | None
    ) -> tuple[int, str, memoryview, float, DeviceMemory | None]:
        """Returns the outline of a message; either `flat` or `place` says where its array is."""
        label = self._integer(tag)
        if label is None or not -(1 << 63) <= label < 1 << 63:
            raise ArgumentError(f"a tag of {tag!r}; expected an integer of 64 bits")
        seconds = self._default_timeout() if timeout is None else timeout
        if not 0 < seconds < float("inf"):
            raise ArgumentError(f"timeout={timeout}; expected a positive number of seconds")
        deadline = time.monotonic() + seconds
        if flat is not None:
            return label, flat.dtype, flat.flat.data, deadline, None
        assert place is not None
        return label, place.dtype, memoryview(b""), deadline, place


def _nobody(replica: int, incarnation: str, epoch: int) -> Connection:
    raise ConnectionError("the group is closed")
