"""One thread that waits for all connections of a process."""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ftcomm.transport import epoll_thread
from ftcomm.transport.epoll_thread import ENDED, EPOLL_THREAD, EpollThread
from ftcomm.transport.tcp import mirror
from ftcomm.transport.tcp.mirror import TcpMirror
from tests.rigs.exchange import DEADLINE, socket_pair

EPOCH = 3


class Heard:
    """A reader that notes what comes, and leaves at the end of its connection. `thread` waits for it."""

    def __init__(self, thread: EpollThread, *, receives: bool = False) -> None:
        self.near, self.far = socket_pair()
        self.near.setblocking(False)
        self.fd, self.thread = self.near.fileno(), thread
        self.said: queue.Queue[bytes] = queue.Queue()
        thread.enter(self.fd, self, receives=receives)

    def ready(self, events: int) -> None:
        came = self.near.recv(100)
        if events & ENDED:
            self.thread.leave(self.fd, self)
            self.near.close()
        self.said.put(came)

    def next(self) -> bytes:
        return self.said.get(timeout=DEADLINE)


def running() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "ftcomm-epoll"}


@pytest.fixture
def new() -> Iterator[Callable[[], set[threading.Thread]]]:
    """The threads that run since the test began: none at its end. Other tests may have left connections open."""
    before = running()

    def since() -> set[threading.Thread]:
        return running() - before

    yield since
    over(since())


def over(threads: set[threading.Thread]) -> None:
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()


def test_the_peers_of_a_large_group_have_one_thread_and_each_end_is_told_of(
    new: Callable[[], set[threading.Thread]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "EPOLL_THREAD", EpollThread())
    lost: queue.Queue[tuple[int, int, str]] = queue.Queue()
    peers, ends = [], []
    for replica in range(64):
        near, far = socket_pair()
        peers.append(TcpMirror(replica, EPOCH, near, lambda *args: lost.put(args)))
        peers[-1].drive(replica % 2 == 0)
        ends.append(far)
    assert len(new()) == 1
    for replica in (17, 40, 5):
        ends[replica].close()
        assert lost.get(timeout=DEADLINE) == (replica, EPOCH, "connection for data: closed by the other side")
    assert len(new()) == 1
    for peer in peers:
        peer.close()
    over(new())  # by the end of the last connection
    assert lost.empty()
    for end in ends:
        end.close()


def test_the_thread_goes_with_the_last_connection_and_comes_with_the_next(new: object) -> None:
    thread = EpollThread()
    for _ in range(50):
        first = Heard(thread)
        first.far.close()
        assert first.next() == b""
        second = Heard(thread)  # while the thread may be about to end
        second.far.close()
        assert second.next() == b""


def test_frames_wake_it_only_where_it_receives(new: object) -> None:
    thread = EpollThread()
    driven, reader = Heard(thread), Heard(thread, receives=True)
    driven.far.sendall(b"for the driver")
    reader.far.sendall(b"for the thread")
    assert reader.next() == b"for the thread"
    thread.change(driven.fd, driven, receives=True)
    thread.change(reader.fd, reader, receives=False)
    assert driven.next() == b"for the driver"
    reader.far.sendall(b"more")
    driven.far.close()
    assert driven.next() == b""
    assert reader.said.empty()
    reader.far.close()
    assert reader.next() == b"more"


def test_a_number_that_means_another_connection_by_now_is_that_ones(new: object) -> None:
    thread = EpollThread()
    stays, first = Heard(thread), Heard(thread)
    number = first.fd
    thread.leave(number, first)
    first.near.close()
    second = Heard(thread)
    assert second.fd == number  # the lowest that is free
    thread.leave(number, first)  # once more
    thread.change(number, first, receives=True)
    first.far.close()
    second.far.sendall(b"for the driver")
    stays.far.close()
    assert stays.next() == b""
    assert first.said.empty()
    assert second.said.empty()
    second.far.close()
    assert second.next() == b"for the driver"


def test_a_defect_of_one_reader_does_not_stop_the_others(
    new: Callable[[], set[threading.Thread]], caplog: pytest.LogCaptureFixture
) -> None:
    thread = EpollThread()

    class Defective(Heard):
        def ready(self, events: int) -> None:
            raise KeyError("a defect")

    bad, good = Defective(thread), Heard(thread)
    bad.far.close()
    good.far.close()
    assert good.next() == b""
    over(new())
    assert "not waited for any more" in caplog.text
    assert "a defect" in caplog.text
    bad.near.close()


def test_what_the_script_has_closed_ends_the_thread_and_not_the_next(
    new: Callable[[], set[threading.Thread]], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: queue.Queue[object] = queue.Queue()
    monkeypatch.setattr(threading, "excepthook", errors.put)
    thread = EpollThread()
    first = Heard(thread, receives=True)
    assert thread._epoll is not None
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, thread._epoll.fileno())  # a file of the script has its number now
    os.close(null)
    first.far.sendall(b"wakes it")
    assert errors.get(timeout=DEADLINE)
    over(new())
    second = Heard(thread)
    second.far.close()
    assert second.next() == b""
    first.near.close()
    first.far.close()


@pytest.mark.parametrize("held", [False, True])
def test_a_forked_child_has_a_thread_of_its_own_and_leaves_the_parents_alone(held: bool) -> None:
    """Even if it was forked while some thread had the lock."""
    of_parent = Heard(EPOLL_THREAD)
    answers, answer = os.pipe()
    if held:
        EPOLL_THREAD._lock.acquire()
    pid = os.fork()
    if pid == 0:
        try:
            of_child = Heard(EPOLL_THREAD)
            EPOLL_THREAD.leave(of_parent.fd, of_parent)  # which it knows nothing of
            of_child.far.close()
            said = of_child.next().decode()
        except BaseException as error:
            said = repr(error)
        os.write(answer, json.dumps(said).encode())
        os._exit(0)
    if held:
        EPOLL_THREAD._lock.release()
    os.close(answer)
    with open(answers, "rb") as told:
        assert json.loads(told.read()) == ""
    os.waitpid(pid, 0)
    of_parent.far.close()
    assert of_parent.next() == b""


class _Unbegun:
    """A thread that does not begin."""

    def start(self) -> None:
        pass


class _Deaf:
    def __init__(self) -> None:
        self.near, self.far = socket_pair()
        self.fd = self.near.fileno()

    def ready(self, events: int) -> None:
        raise AssertionError("nothing has come")


def test_a_last_reader_that_leaves_while_an_earlier_bell_is_taken_ends_the_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own bell must not be taken with that. The rounds of the thread are made here."""
    begun: list[tuple[Any, ...]] = []
    with monkeypatch.context() as patch:
        patch.setattr(epoll_thread.threading, "Thread", lambda target, args, **more: begun.append(args) or _Unbegun())
        thread = EpollThread()
        first, last = _Deaf(), _Deaf()
        thread.enter(first.fd, first, receives=False)
    thread.leave(first.fd, first)
    thread.enter(last.fd, last, receives=False)
    [(epoll, bell)] = begun
    clear, leaving = bell.clear, threading.Thread(target=thread.leave, args=(last.fd, last))

    def between() -> None:
        leaving.start()
        if not thread._lock.locked():
            leaving.join(DEADLINE)
        clear()

    bell.clear = between
    assert thread._round(epoll, bell)
    leaving.join(DEADLINE)
    bell.clear = clear
    assert epoll.poll(0), "the bell was rung for nobody"
    assert not thread._round(epoll, bell)
