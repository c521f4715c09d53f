"""How long the thread that drives sleeps where all that can wake it is a descriptor."""

from __future__ import annotations

import select

from ftcomm.kernels.wait import SLEEP, Waiter
from ftcomm.transport.lines import Lines
from ftcomm.transport.segment import POSTED
from ftcomm.transport.tcp import Reader, TcpPeer
from tests.exchange_rig import DEADLINE, socket_pair

EPOCH = 3


class Counted(Waiter):
    """One that notes how long it was asked to sleep; the last of a wait is what was left of it."""

    def __init__(self) -> None:
        super().__init__(memoryview(bytearray(64)).cast("Q"), 0, 0)
        self.asked: list[float] = []

    def doze(self, poll: select.poll, seconds: float, *look: object) -> list[int] | None:
        self.asked.append(seconds)
        return super().doze(poll, seconds, *look)  # type: ignore[arg-type]


def test_who_waits_for_long_looks_up_less_often_until_something_comes() -> None:
    near, far = socket_pair()
    peer, reader, waiter = TcpPeer(7, EPOCH, near, print), Reader(far, 1, EPOCH), Counted()
    peer.drive()
    lines = Lines([peer], waiter)
    while max(waiter.asked, default=0.0) <= SLEEP:
        assert not lines.wait(())
        assert len(waiter.asked) < 1000
    assert len(waiter.asked) > 5  # not at once
    waiter.asked.clear()
    lines.wait((), lambda: False)  # words in shared memory tell nobody who has missed them
    assert max(waiter.asked, default=0.0) <= SLEEP
    reader.send(POSTED, EPOCH << 32 | 1, 0, memoryview(b""), (0, 0, 0))
    assert reader.flush()
    for _ in range(int(DEADLINE / SLEEP)):
        if lines.wait(()):
            break
    assert peer.words[POSTED] == EPOCH << 32 | 1
    waiter.asked.clear()
    assert not lines.wait(())
    assert max(waiter.asked, default=0.0) <= SLEEP
    waiter.poke()
    assert not lines.wait(())  # nobody sleeps on with news for it
    reader.close()
    peer.close()
