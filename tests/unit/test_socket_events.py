"""The sockets of an event loop by an epoll of their own: each is called for what it waits for, and for nothing else."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import select
import socket
from collections.abc import Callable
from typing import Any

import pytest

from ftcomm.control import socket_events as events
from ftcomm.control.socket_events import SocketEvents, socket_events
from tests.rigs.peers import pair, until


def _run(work: Callable[[SocketEvents], Any]) -> None:
    async def run() -> None:
        await work(socket_events())

    asyncio.run(run())


def test_a_socket_is_called_for_what_it_waits_for_until_it_waits_no_more() -> None:
    called: list[str] = []

    async def work(made: SocketEvents) -> None:
        assert socket_events() is made
        with pair() as (near, far):
            number = near.fileno()
            made.add_writer(number, lambda: called.append("writes"))
            await until(lambda: "writes" in called)
            made.add_reader(number, lambda: called.append("wrong"))
            made.add_reader(number, lambda: called.append("reads"))
            assert made.remove_writer(number)
            assert not made.remove_writer(number)
            called.clear()
            await asyncio.sleep(0.01)
            assert not called
            assert not select.select(list(made._descriptors()), [], [], 0)[0], "it would be looked at all the time"
            far.sendall(b"a")
            await until(lambda: "reads" in called)
            made.add_writer(number, lambda: called.append("writes"))
            assert made.remove_reader(number)
            called.clear()
            await until(lambda: "writes" in called)
            assert set(called) == {"writes"}
            assert made.remove_writer(number)

    _run(work)


def test_who_waits_is_told_of_an_error_whatever_he_waits_for() -> None:
    class Epoll:
        def poll(self, timeout: float, most: int) -> list[tuple[int, int]]:
            return [(7, select.EPOLLERR), (8, select.EPOLLHUP), (9, select.EPOLLIN), (10, select.EPOLLOUT)]

    called: list[str] = []

    async def work(made: SocketEvents) -> None:
        made._epoll = Epoll()  # type: ignore[assignment]
        for number in (7, 8, 9, 10):
            made._readers[number] = lambda number=number: called.append(f"{number} reads")  # type: ignore[misc]
            made._writers[number] = lambda number=number: called.append(f"{number} writes")  # type: ignore[misc]
        made._look()

    _run(work)
    assert called == ["7 reads", "7 writes", "8 reads", "8 writes", "9 reads", "10 writes"]


def test_who_has_the_number_of_a_descriptor_that_was_closed_in_the_same_turn_is_not_called() -> None:
    """Its socket has nothing to read: a dial would take the call for its connection."""
    called: list[str] = []

    async def work(made: SocketEvents) -> None:
        with pair() as (near, far), pair() as (other, other_far), pair() as (silent, _):
            ends = {near.fileno(), other.fileno()}

            def ends_the_other(own: int) -> None:
                called.append("ended")
                (number,) = ends - {own}
                made.remove_reader(own)
                made.remove_reader(number)
                os.dup2(silent.fileno(), number)
                made.add_reader(number, lambda: called.append("wrong"))

            far.sendall(b"a")
            other_far.sendall(b"a")
            for number in ends:
                made.add_reader(number, lambda number=number: ends_the_other(number))  # type: ignore[misc]
            await until(lambda: bool(called))
            await asyncio.sleep(0.01)
            for number in ends:
                made.remove_reader(number)
        assert called == ["ended"]

    _run(work)


def test_a_descriptor_that_was_closed_meanwhile_is_no_error_and_its_number_can_be_watched_again() -> None:
    """A script may close what is not its own."""
    called: list[str] = []

    async def work(made: SocketEvents) -> None:
        with pair() as (near, _), pair() as (other, far):
            number = os.dup(near.fileno())
            made.add_reader(number, lambda: called.append("wrong"))
            os.close(number)
            os.dup2(other.fileno(), number)
            far.sendall(b"a")
            made.add_reader(number, lambda: called.append("reads"))
            await until(lambda: bool(called))
            assert set(called) == {"reads"}
            made.add_reader(near.fileno(), print)
            os.close(number)
            assert made.remove_reader(number)
            assert made.remove_reader(near.fileno())

    _run(work)


def test_what_cannot_be_watched_is_an_error_and_leaves_nothing() -> None:
    async def work(made: SocketEvents) -> None:
        with pair() as (near, _), open(os.devnull) as file:
            for number in (file.fileno(), -1):
                with pytest.raises((OSError, ValueError)):
                    made.add_reader(number, print)
                assert not made.remove_reader(number)
            assert not list(made._descriptors())
            made.add_reader(near.fileno(), print)
            assert made.remove_reader(near.fileno())

    _run(work)


@pytest.mark.parametrize("lacks", ["the epoll", "its place in the loop"])
def test_a_shortage_while_the_epoll_is_made_is_an_error_and_the_next_one_is_watched(
    lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    def short(*_: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    async def work(made: SocketEvents) -> None:
        with pair() as (near, far):
            with monkeypatch.context() as patch:
                if lacks == "the epoll":
                    patch.setattr(select, "epoll", short)
                else:
                    patch.setattr(asyncio.get_running_loop(), "add_reader", short)
                with pytest.raises(OSError, match="too many"):
                    made.add_reader(near.fileno(), lambda: called.append("wrong"))
            assert not made.remove_reader(near.fileno())
            far.sendall(b"a")
            made.add_reader(near.fileno(), lambda: called.append("reads"))
            await until(lambda: bool(called))
            assert set(called) == {"reads"}
            assert made.remove_reader(near.fileno())

    _run(work)


def test_a_loop_that_has_ended_keeps_no_socket_open() -> None:
    """The other end hears that nobody is there any more."""
    far: list[socket.socket] = []

    async def work() -> None:
        near, other = socket.socketpair()
        far.append(other)
        socket_events().add_reader(near.fileno(), near.close)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(work())
    socket_events(loop).close()
    loop.close()
    far[0].settimeout(10)
    assert far[0].recv(1) == b""
    far[0].close()


def test_an_error_in_a_call_is_told_to_the_loop_and_keeps_no_other_from_being_called() -> None:
    told: list[Any] = []
    called: list[int] = []

    async def work(made: SocketEvents) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
        with pair() as (near, far), pair() as (other, other_far):
            ends = (near, other)

            def read(sock: socket.socket) -> None:
                called.append(sock.fileno())
                raise KeyError(sock.recv(1))

            for sock in ends:
                made.add_reader(sock.fileno(), lambda sock=sock: read(sock))  # type: ignore[misc]
            far.sendall(b"a")
            other_far.sendall(b"a")
            made._look()
            assert len(called) == 2
            assert {type(error) for error in told} == {KeyError}
            for sock in ends:
                made.remove_reader(sock.fileno())

    _run(work)


def test_there_is_an_epoll_as_long_as_there_is_a_descriptor() -> None:
    async def work(made: SocketEvents) -> None:
        with pair() as (near, far):
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(2):
                made.add_reader(near.fileno(), print)
                made.add_reader(far.fileno(), print)
                assert len(os.listdir("/proc/self/fd")) == before + 1
                assert list(made._descriptors())
                made.remove_reader(near.fileno())
                made.remove_reader(far.fileno())
                assert len(os.listdir("/proc/self/fd")) == before
                assert not list(made._descriptors())

    _run(work)


def test_no_more_are_called_in_a_turn_than_leave_others_theirs(monkeypatch: Any) -> None:
    called: list[int] = []
    turns: list[int] = []

    async def work(made: SocketEvents) -> None:
        with pair() as (near, far), pair() as (other, other_far):
            far.sendall(b"a")
            other_far.sendall(b"a")
            numbers = {near.fileno(), other.fileno()}
            for number in numbers:
                made.add_reader(number, lambda number=number: called.append(number))  # type: ignore[misc]
            while len(turns) < 10:
                await asyncio.sleep(0)
                turns.append(len(called))
            assert max(later - before for before, later in itertools.pairwise(turns)) == 1
            assert set(called) == numbers
            for number in numbers:
                made.remove_reader(number)

    monkeypatch.setattr(events, "AT_ONCE", 1)
    _run(work)
