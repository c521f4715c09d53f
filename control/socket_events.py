"""Tells the sockets of one event loop when there is something to read, or room to write, by an epoll of their own.

The loop watches that epoll alone. Its own selector makes an object of each event and calls through four layers, which
costs a leader of thousands of ranks as much as half of what it does with a message; and so much again whenever a socket
is watched in another way, which is three times in a handshake.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import weakref
from collections.abc import Callable, Iterator

from ftcomm.control.fork import keep_from_children

AT_ONCE = 256  # events in one turn of the loop, so that its timers and tasks have their turn

_READ, _WRITE = select.EPOLLIN, select.EPOLLOUT
_OF_LOOP = "_ftcomm_socket_events"  # an attribute of an event loop, so that they are forgotten with it


def socket_events(loop: asyncio.AbstractEventLoop | None = None) -> SocketEvents:
    """Returns those of `loop`, or of the running one."""
    loop = asyncio.get_running_loop() if loop is None else loop
    made: SocketEvents | None = getattr(loop, _OF_LOOP, None)
    if made is None:
        made = SocketEvents(loop)
        setattr(loop, _OF_LOOP, made)
    return made


class SocketEvents:
    """Calls what is to be called for a descriptor, as `add_reader` and `add_writer` of an event loop do. Belongs to the
    thread of its loop. There is an epoll as long as there is a descriptor."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)  # which refers to this
        self._readers: dict[int, Callable[[], object]] = {}
        self._writers: dict[int, Callable[[], object]] = {}
        self._epoll: select.epoll | None = None
        keep_from_children(self, SocketEvents._descriptors)

    def _descriptors(self) -> Iterator[int]:
        if self._epoll is not None:
            yield self._epoll.fileno()

    def add_reader(self, number: int, call: Callable[[], object]) -> None:
        """Call `call` whenever there is something to read, and nothing else that was to be called then. Raises
        `OSError`."""
        self._add(self._readers, number, call)

    def add_writer(self, number: int, call: Callable[[], object]) -> None:
        """Call `call` whenever there is room to write, and nothing else that was to be called then. Raises
        `OSError`."""
        self._add(self._writers, number, call)

    def remove_reader(self, number: int) -> bool:
        """Returns whether there was one."""
        return self._remove(self._readers, number)

    def remove_writer(self, number: int) -> bool:
        """Returns whether there was one."""
        return self._remove(self._writers, number)

    def _add(self, to: dict[int, Callable[[], object]], number: int, call: Callable[[], object]) -> None:
        epoll = self._watched()
        before = self._waits(number)
        to[number] = call
        try:
            if before:
                with contextlib.suppress(FileNotFoundError):  # another one had that number, and was closed meanwhile
                    epoll.modify(number, self._waits(number))
                    return
            epoll.register(number, self._waits(number))
        except BaseException:
            self._remove(to, number)
            raise

    def _watched(self) -> select.epoll:
        """Returns the epoll, which the loop watches. Raises `OSError` if there is none to be had; then nothing has
        changed."""
        if self._epoll is None:
            made = select.epoll()
            try:
                self._running().add_reader(made.fileno(), self._look)
            except BaseException:
                made.close()
                raise
            self._epoll = made
        return self._epoll

    def _remove(self, of: dict[int, Callable[[], object]], number: int) -> bool:
        if of.pop(number, None) is None:
            return False
        assert self._epoll is not None
        with contextlib.suppress(OSError, ValueError):  # the script has closed the descriptor
            if left := self._waits(number):
                self._epoll.modify(number, left)
            else:
                self._epoll.unregister(number)
        if not self._readers and not self._writers:
            self.close()
        return True

    def close(self) -> None:
        """Call nothing any more of all that was added, and hold none of it."""
        self._readers.clear()
        self._writers.clear()
        epoll, self._epoll = self._epoll, None
        if epoll is None:
            return
        loop = self._loop()
        if loop is not None and not loop.is_closed():
            loop.remove_reader(epoll.fileno())
        epoll.close()

    def _waits(self, number: int) -> int:
        """Returns the events that a descriptor waits for."""
        return (_READ if number in self._readers else 0) | (_WRITE if number in self._writers else 0)

    def _running(self) -> asyncio.AbstractEventLoop:
        loop = self._loop()
        assert loop is not None  # it runs
        return loop

    def _look(self) -> None:
        assert self._epoll is not None
        events = self._epoll.poll(0, AT_ONCE)
        readers, writers = self._readers, self._writers
        due = [(number, event, readers.get(number), writers.get(number)) for number, event in events]
        for number, event, reader, writer in due:
            # What was called before may have closed a descriptor, and another one have its number by now.
            if reader is not None and event & ~_WRITE and readers.get(number) is reader:
                self._call(reader)
            if writer is not None and event & ~_READ and writers.get(number) is writer:
                self._call(writer)

    def _call(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            self._running().call_exception_handler({"message": f"Exception in callback {call!r}", "exception": error})
