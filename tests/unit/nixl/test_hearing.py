"""A process that hears nothing by NIXL any more starts anew, and one that hears waits on."""

from __future__ import annotations

import errno
import gc
import os
import threading

import pytest

from ftcomm.kernels.epochs import COUNTER
from ftcomm.transport.nixl import handshake as hello
from ftcomm.transport.nixl.context import Nixl
from ftcomm.transport.nixl.hearing import HearingProbe
from ftcomm.transport.nixl.mirror import NixlMirror
from ftcomm.transport.nixl.writer import NixlMirrorWriter
from ftcomm.transport.segment import (
    POSTED,
)
from tests.rigs import nixl_queues
from tests.unit.nixl.rig import BEGUN, EPOCH, Link, until, wait

pytest.importorskip("nixl_cu12._api", reason="NIXL is not installed: pip install 'ftcomm[rdma]'")


@pytest.mark.parametrize("deaf", ["reader", "writer"])
def test_who_hears_nothing_any_more_starts_anew(fresh_link: tuple[Link, dict[Nixl, set[int]]], deaf: str) -> None:
    """As somebody was killed while it told it something: nobody is to blame, and all get through to each other."""
    link, of = fresh_link
    side = getattr(link, deaf)
    before = side.endpoint()
    (queue,) = of[side]
    nixl_queues.claim(nixl_queues.queues()[queue])
    reader, peer = link.connect()
    assert side.endpoint() is not before
    assert side.endpoint() in (peer.endpoint, reader._endpoint)
    reader.send(POSTED, BEGUN | 1, 0, link.staged(POSTED, 0, 0, bytes(100_000)), (41, 99, 7))
    reader.flush()
    wait(peer, POSTED, 1)
    reader.close()
    peer.close()
    until(lambda: not before._thread.is_alive(), "it goes on looking")


def test_connections_end_of_who_hears_nothing_any_more(fresh_link: tuple[Link, dict[Nixl, set[int]]]) -> None:
    """Those that it reads and those that it is read by: nothing that they have begun gets through. No others."""
    link, of = fresh_link
    reader, peer = link.connect(EPOCH)
    back, mirrored = link.connect(EPOCH + 1, backwards=True)
    link.lost = []
    (queue,) = of[link.reader]
    nixl_queues.claim(nixl_queues.queues()[queue])
    again, there = link.connect(EPOCH + 2)
    assert there.endpoint.retired == ""
    back.send(POSTED, (EPOCH + 1) << COUNTER | 1, 0, memoryview(b"more"), (1, 0, 0))
    with pytest.raises(ConnectionError, match="hears nothing by NIXL"):
        back.flush()
    for each in (reader, peer, back, mirrored, again, there):
        each.close()


def test_who_hears_nothing_in_an_op_starts_anew(fresh_link: tuple[Link, dict[Nixl, set[int]]]) -> None:
    """As who was killed while it told it something was no member, so that no connection is made."""
    link, of = fresh_link
    reader, peer = link.connect()
    before = link.reader.endpoint()
    (queue,) = of[link.reader]
    nixl_queues.claim(nixl_queues.queues()[queue])
    peer.overdue(hello.SOON)
    until(lambda: bool(link.lost), "it does not ask itself")
    ((replica, epoch, reason),) = link.lost
    assert (replica, epoch) == (0, EPOCH)
    assert "this process hears nothing by NIXL" in reason
    assert link.reader.endpoint() is not before
    later, next_peer = link.connect(EPOCH + 1)
    for each in (reader, peer, later, next_peer):
        each.close()


@pytest.mark.parametrize("shortage", [RuntimeError("can't start new thread"), OSError(errno.EMFILE, "too many files")])
def test_a_shortage_while_a_process_asks_itself_ends_no_thread(
    shortage: Exception, fresh_link: tuple[Link, dict[Nixl, set[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread moves the puts, and asks again later."""
    link, _ = fresh_link
    asked: list[object] = []

    def short(endpoint: object) -> None:
        asked.append(endpoint)
        raise shortage

    monkeypatch.setattr(link.reader, "_ask", short)
    endpoint = link.reader.endpoint()
    for times in (1, 2):
        endpoint._doubted = float("-inf")
        endpoint.doubt(hello.SOON)
        until(lambda n=times: len(asked) == n, "it does not ask itself")  # type: ignore[misc]


def test_an_endpoint_that_gets_no_thread_leaves_no_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Nixl("short", ("lo",))
    begin = threading.Thread.start

    def short(thread: threading.Thread) -> None:
        if thread.name == "ftcomm-nixl":
            raise RuntimeError("can't start new thread")
        begin(thread)

    def held() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = []
    gc.disable()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", short)
            for _ in range(3):
                with pytest.raises(RuntimeError, match=r"can't start new thread.*raise its limits"):
                    made.endpoint()
                before.append(held())
    finally:
        gc.enable()
    assert before == before[:1] * 3, "descriptors of UCX"
    made.endpoint()
    made.close()


def test_who_hears_waits_on(fresh_link: tuple[Link, dict[Nixl, set[int]]]) -> None:
    """However long: it asks itself whenever it has waited for twice as long, and nothing is mapped for that again."""
    link, _ = fresh_link
    reader, peer = link.connect()
    endpoint, asked = link.reader.endpoint(), list[bool]()
    with pytest.MonkeyPatch.context() as patch:
        reaches = HearingProbe.reaches
        patch.setattr(HearingProbe, "reaches", lambda *args: asked.append(reaches(*args)) or asked[-1])
        mapped = 0
        for number in range(1, 6):
            peer.overdue(0.9 * hello.SOON)  # not yet
            endpoint._doubted = float("-inf")
            peer.overdue(2 * hello.SOON)
            peer.overdue(2 * hello.SOON)  # not again yet
            until(lambda number=number: len(asked) == number, "it does not ask itself")  # type: ignore[misc]
            mapped = mapped or len(nixl_queues.mapped())
        assert len(nixl_queues.mapped()) == mapped
    assert asked == [True] * 5
    assert link.reader.endpoint() is endpoint
    assert not link.lost
    reader.close()
    peer.close()


def test_who_hears_keeps_its_agents(link: Link, pair: tuple[NixlMirrorWriter, NixlMirror]) -> None:
    """Whatever the other side does: it is dialled again, and its connections go on."""
    reader, peer = pair
    before = link.reader.endpoint(), link.writer.endpoint()
    greet, greeted = NixlMirrorWriter.greet, list[int]()

    def late(self: NixlMirrorWriter) -> None:
        greeted.append(self.epoch)
        if len(greeted) > 1:
            greet(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NixlMirrorWriter, "greet", late)
        later, next_peer = link.connect(EPOCH + 1)
    assert greeted == [EPOCH + 1] * 2
    assert (link.reader.endpoint(), link.writer.endpoint()) == before
    reader.send(POSTED, BEGUN | 1, 0, memoryview(b"more"), (1, 0, 0))
    reader.flush()
    wait(peer, POSTED, 1)
    assert not link.lost
    later.close()
    next_peer.close()
