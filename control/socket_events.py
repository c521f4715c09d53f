"""Tells the sockets of one event loop when there is something to read, or room to write, by an epoll of their own.

The loop watches that epoll alone. Its own selector makes an object of each event and calls through four layers, which
costs a leader of thousands of ranks as much as half of what it does with a message; and so much again whenever a socket
is watched in another way, which is three times in a handshake.
"""

from __future__ import annotations

import asyncio
import select
import weakref
from collections.abc import Callable, Iterator

from ftcomm.control.fork import keep_from_children

AT_ONCE = 256  # events in one turn of the loop, so that its timers and tasks have their turn

_READ, _WRITE = select.EPOLLIN, select.EPOLLOUT
_made: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, SocketEvents] = weakref.WeakKeyDictionary()


def socket_events() -> SocketEvents:
    """Returns those of the running event loop."""
    loop = asyncio.get_running_loop()
    made = _made.get(loop)
    if made is None:
        made = _made[loop] = SocketEvents(loop)
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
        """Call `call` whenever there is something to read, and nothing else that was to be called then."""
        known = number in self._readers
        self._readers[number] = call
        if not known:
            self._watch(number, _READ, _WRITE if number in self._writers else 0)

    def add_writer(self, number: int, call: Callable[[], object]) -> None:
        """Call `call` whenever there is room to write, and nothing else that was to be called then."""
        known = number in self._writers
        self._writers[number] = call
        if not known:
            self._watch(number, _WRITE, _READ if number in self._readers else 0)

    def remove_reader(self, number: int) -> bool:
        """Returns whether there was one."""
        if self._readers.pop(number, None) is None:
            return False
        self._watch_less(number, _WRITE if number in self._writers else 0)
        return True

    def remove_writer(self, number: int) -> bool:
        """Returns whether there was one."""
        if self._writers.pop(number, None) is None:
            return False
        self._watch_less(number, _READ if number in self._readers else 0)
        return True

    def _watch(self, number: int, more: int, before: int) -> None:
        epoll = self._epoll
        if epoll is None:
            epoll = self._epoll = select.epoll()
            loop = self._loop()
            assert loop is not None  # it runs
            loop.add_reader(epoll.fileno(), self._look)
        if before:
            epoll.modify(number, before | more)
        else:
            epoll.register(number, more)

    def _watch_less(self, number: int, left: int) -> None:
        assert self._epoll is not None
        if left:
            self._epoll.modify(number, left)
            return
        self._epoll.unregister(number)
        if not self._readers and not self._writers:
            loop = self._loop()
            if loop is not None and not loop.is_closed():
                loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None

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
            loop = self._loop()
            assert loop is not None  # it runs
            loop.call_exception_handler({"message": f"Exception in callback {call!r}", "exception": error})
