"""How long the thread that drives sleeps where all that can wake it is a descriptor."""

from __future__ import annotations

import select

from ftcomm.kernels.epochs import COUNTER
from ftcomm.sync.futex import MAX_SLEEP, Waiter
from ftcomm.transport.segment import POSTED
from ftcomm.transport.tcp.mirror import TcpMirror
from ftcomm.transport.tcp.poller import TcpPoller
from ftcomm.transport.tcp.writer import TcpMirrorWriter
from tests.rigs.exchange import DEADLINE, socket_pair

EPOCH = 3


class Counted(Waiter):
    """One that notes how long it was asked to sleep; the last of a wait is what was left of it."""

    def __init__(self) -> None:
        super().__init__(memoryview(bytearray(64)).cast("Q"), 0, 0)
        self.asked: list[float] = []

    def poll_sleep(self, poll: select.poll, seconds: float, *look: object) -> list[int] | None:
        self.asked.append(seconds)
        return super().poll_sleep(poll, seconds, *look)  # type: ignore[arg-type]


def test_who_waits_for_long_looks_up_less_often_until_something_comes() -> None:
    near, far = socket_pair()
    peer, reader, waiter = TcpMirror(7, EPOCH, near, print), TcpMirrorWriter(far, 1, EPOCH), Counted()
    peer.drive()
    lines = TcpPoller([peer], waiter)
    while max(waiter.asked, default=0.0) <= MAX_SLEEP:
        assert not lines.wait(())
        assert len(waiter.asked) < 1000
    assert len(waiter.asked) > 5  # not at once
    waiter.asked.clear()
    lines.wait((), lambda: False)  # words in shared memory tell nobody who has missed them
    assert max(waiter.asked, default=0.0) <= MAX_SLEEP
    reader.send(POSTED, EPOCH << COUNTER | 1, 0, memoryview(b""), (0, 0, 0))
    assert reader.flush()
    for _ in range(int(DEADLINE / MAX_SLEEP)):
        if lines.wait(()):
            break
    assert peer.words[POSTED] == EPOCH << COUNTER | 1
    waiter.asked.clear()
    assert not lines.wait(())
    assert max(waiter.asked, default=0.0) <= MAX_SLEEP
    waiter.interrupt()
    assert not lines.wait(())  # nobody sleeps on with news for it
    reader.close()
    peer.close()
