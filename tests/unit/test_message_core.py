"""The core of messages in every interleaving of small histories: calls, frames on their way, deadlines, and ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import pytest

from ftcomm.errors import LostError
from ftcomm.p2p import core, matching
from ftcomm.p2p.channels import RecvChannel, SendChannel
from ftcomm.p2p.core import Actions, Deliver, DialPeer, EndMessage, FetchMessage, HangUp, MessageCore, Read, Write
from ftcomm.p2p.protocol import ANSWER, MAGIC, ReceiverKind, RecvRequest, SendRequest
from ftcomm.p2p.slots import DeviceMemory

pytestmark = pytest.mark.protocol

SMALL, BIG = 3, 20  # bytes; the longest that is sent unasked has 8


class Call(NamedTuple):
    tag: int
    nbytes: int


class Faults(NamedTuple):
    """What may happen once, at any moment: one of these messages is given up, or the connection ends."""

    send: int = -1
    receive: int = -1
    breaks: bool = False


class Pair:
    """A sender and a receiver. `choose` draws the next event of so many."""

    def __init__(self, sends: list[Call], receives: list[Call], faults: Faults, choose: Callable[[int], int]) -> None:
        self.cores = MessageCore("a", lambda peer: "b"), MessageCore("b", lambda peer: "a")
        self.sends = [
            SendRequest(1, x.tag, "uint8", memoryview(bytes([i]) * x.nbytes), 0.0) for i, x in enumerate(sends)
        ]
        self.outs = [bytearray(b"\xff" * x.nbytes) for x in receives]
        self.receives = [
            RecvRequest(0, x.tag, "uint8", memoryview(out), 0.0) for x, out in zip(receives, self.outs, strict=True)
        ]
        self.on_way: tuple[deque[Write], deque[Write]] = deque(), deque()
        self.channels: list[SendChannel | RecvChannel | None] = [None, None]
        self.coming: tuple[memoryview, bytes] | None = None  # bytes behind a head that has come, and where they go
        to_send, to_receive = deque(self.sends), deque(self.receives)
        given_up = [(0, self.sends[faults.send])] if faults.send >= 0 else []
        given_up += [(1, self.receives[faults.receive])] if faults.receive >= 0 else []
        breaks = [self.hang_up] if faults.breaks else []
        while True:
            events: list[Callable[[], object]] = []
            if to_send:
                events.append(lambda: self.do(0, self.cores[0].send(to_send.popleft())))
            if to_receive:
                events.append(lambda: self.do(1, self.cores[1].receive(to_receive.popleft())))
            if self.coming is not None:
                events.append(self.fill)
            elif self.on_way[0]:
                events.append(lambda: self.carry(0))
            if self.on_way[1]:
                events.append(lambda: self.carry(1))
            events += [lambda: self.give_up(*given_up.pop())] if given_up and self.is_under_way(given_up[0][1]) else []
            events += [lambda: breaks.pop()()] if breaks and self.channels[0] is not None else []
            if not events:
                break
            events[choose(len(events))]()
            self.do(1, self.cores[1].fail_silent())  # as the thread does each time it turns
            if isinstance(channel := self.channels[0], SendChannel):
                assert channel.nbytes == sum(channel.unasked.values())
                assert len(channel.offers) + len(channel.unasked) <= core.MAX_UNEXPECTED
        self.quiet = [message.ended.is_set() for message in (*self.sends, *self.receives)]
        self.hang_up()

    def is_under_way(self, message: SendRequest | RecvRequest) -> bool:
        held = self.cores[1].matching.wants() if isinstance(message, RecvRequest) else []
        return not message.ended.is_set() and (message.number >= 0 or message in held)

    def do(self, end: int, actions: Actions) -> memoryview | None:
        memory = None
        for action in actions:
            match action:
                case DialPeer(channel):
                    other = RecvChannel(0)
                    self.channels[:] = channel, other
                    self.do(1, self.cores[1].accepted(other))
                    self.do(0, self.cores[0].opened(channel))
                case Write():
                    if action.channel is self.channels[end]:
                        self.on_way[end].append(action)
                case EndMessage():
                    action.message.end(action.error)
                case Deliver():
                    assert not action.receive.ended.is_set()
                    action.receive.memory[:] = action.data
                    action.receive.end()
                case Read():
                    memory = action.memory
                case HangUp(channel, _):
                    if channel in self.channels:
                        self.hang_up()
                case _:
                    raise AssertionError(action)
        return memory

    def carry(self, end: int) -> None:
        """A frame goes out and comes; bytes behind it come later."""
        write = self.on_way[end].popleft()
        frame, message = write.frame, write.message
        payload = b""
        if message is not None:
            assert not message.ended.is_set(), "its bytes are still to be written"
            payload = bytes(message.memory)
            message.end()
        channel, there = self.channels[1 - end], self.cores[1 - end]
        if isinstance(channel, SendChannel):
            self.do(0, there.answered(channel, frame))
            return
        assert channel is not None
        memory = self.do(1, there.heard(channel, frame))
        assert (memory is None) == (message is None)
        if memory is not None:
            self.coming = memory, payload

    def fill(self) -> None:
        """The bytes behind a head come."""
        assert self.coming is not None
        (memory, payload), self.coming = self.coming, None
        channel = self.channels[1]
        assert isinstance(channel, RecvChannel)
        memory[:] = payload  # raises if the sizes differ, as for a receive that has ended
        self.do(1, self.cores[1].whole(channel))

    def give_up(self, end: int, message: SendRequest | RecvRequest) -> None:
        self.do(end, self.cores[end].give_up(message))

    def hang_up(self) -> None:
        channels, self.channels = self.channels, [None, None]
        self.coming = None
        for end, channel in enumerate(channels):
            if channel is not None:
                unsent = [write.message for write in self.on_way[end] if write.message is not None]
                self.on_way[end].clear()
                self.do(end, self.cores[end].hung_up(channel, "it is over", unsent))

    def check(self) -> None:
        assert all(message.ended.is_set() for message in (*self.sends, *self.receives))
        assert not self.cores[1].matching.wants()
        for out, receive in zip(self.outs, self.receives, strict=True):
            assert len(set(out)) <= 1, "a part of a message"
            if receive.error is None:
                assert self.sends[out[0]].tag == receive.tag
        for tag in {message.tag for message in self.sends}:
            got = [out[0] for out, x in zip(self.outs, self.receives, strict=True) if x.tag == tag and x.error is None]
            assert got == sorted(set(got)), "out of order, or twice"


def every(run: Callable[[Callable[[int], int]], object]) -> int:
    """Runs every sequence of choices; returns how many there are."""
    path: list[list[int]] = []  # (choice, of how many)
    count = 0
    while True:
        at = 0

        def choose(of: int) -> int:
            nonlocal at
            if at == len(path):
                path.append([0, of])
            assert path[at][1] == of
            at += 1
            return path[at - 1][0]

        run(choose)
        count += 1
        while path and path[-1][0] + 1 == path[-1][1]:
            path.pop()
        if not path:
            return count
        path[-1][0] += 1


HISTORIES = {
    "tags out of order": ([Call(0, SMALL), Call(1, BIG)], [Call(1, BIG), Call(0, SMALL)], Faults()),
    "one tag": ([Call(0, BIG), Call(0, SMALL)], [Call(0, BIG), Call(0, SMALL)], Faults()),
    "another size": ([Call(0, BIG), Call(0, BIG)], [Call(0, SMALL), Call(0, BIG)], Faults()),
    "no room": ([Call(0, BIG), Call(0, SMALL)], [Call(0, BIG), Call(0, SMALL)], Faults()),
    "a send is given up": ([Call(0, BIG), Call(0, BIG)], [Call(0, BIG)], Faults(send=0)),
    "a receive is given up": ([Call(0, BIG), Call(0, SMALL)], [Call(0, BIG)], Faults(receive=0)),
    "the connection ends": ([Call(0, SMALL), Call(0, BIG)], [Call(0, SMALL), Call(0, BIG)], Faults(breaks=True)),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_every_interleaving(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "EAGER", 8)
    if name == "no room":
        monkeypatch.setattr(core, "MAX_UNEXPECTED", 1)
        monkeypatch.setattr(matching, "MAX_UNEXPECTED", 1)
    sends, receives, faults = HISTORIES[name]

    def run(choose: Callable[[int], int]) -> None:
        pair = Pair(sends, receives, faults, choose)
        pair.check()
        if name == "a send is given up":
            assert pair.quiet[-1], "a receive waits for what was withdrawn"
        if faults == Faults():
            assert all(pair.quiet), "a message waits for nothing"
            errors = [message.error for message in (*pair.sends, *pair.receives)]
            assert all(error is None for error in errors) or name == "another size"
            assert not any(isinstance(error, LostError) for error in errors)

    assert every(run) > 50


def test_what_comes_late_for_a_connection_that_is_over_does_nothing() -> None:
    member = MessageCore("a", lambda peer: "b")
    first, second = (SendRequest(1, 0, "uint8", memoryview(bytes(SMALL)), 0.0) for _ in range(2))
    [dial] = member.send(first)
    assert isinstance(dial, DialPeer)
    member.lose(1, "it is no more")
    assert not member.serves(dial.channel), "a dial that succeeds now"
    member.found(1)
    [again] = member.send(second)
    assert isinstance(again, DialPeer), "it goes into the connection that is over"
    assert member.serves(again.channel)
    [end] = member.hung_up(dial.channel, "it is no more")
    assert isinstance(end, EndMessage)
    assert end.message is first
    assert member.serves(again.channel)


def test_a_message_that_lies_on_the_host_after_its_connection_has_ended_is_not_sent() -> None:
    member, size = MessageCore("a", lambda peer: "b"), core.EAGER + 1
    message = SendRequest(1, 0, "uint8", memoryview(b""), 0.0, DeviceMemory(0, size, "uint8", None))
    [dial] = member.send(message)
    assert isinstance(dial, DialPeer)
    member.opened(dial.channel)
    [fetch] = member.answered(dial.channel, ANSWER.pack(MAGIC, ReceiverKind.PLAIN, message.number))
    assert isinstance(fetch, FetchMessage)
    [end] = member.hung_up(dial.channel, "it is over")
    assert isinstance(end, EndMessage)
    assert end.message is message
    assert member.fetched(fetch, memoryview(bytes(size))) == []
