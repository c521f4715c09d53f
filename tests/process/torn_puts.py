"""A rank that stops itself (SIGSTOP) in the middle of a put, at a named place: what it was doing goes on when it wakes.

place     is reached                                                   transport
copy      half of its input is copied into its staging                 shm
posted    its input lies in its staging, and the word does not say so  both
reduced   the same for its shard of the reduced chunk                  both
read      some shards of the others are copied into its result         both
taken     the last of the result is there, and the word does not say so both
frame     half of a frame is in the socket                             tcp
put       a put is under way, and nobody announces it                  nixl
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ftcomm
from ftcomm.collective.pipeline import Pipeline, Slot
from ftcomm.collective.publisher import Publisher
from ftcomm.settings.engines import engine_kind
from ftcomm.transport.nixl import puts as nixl_puts
from ftcomm.transport.segment import POSTED, REDUCED, TAKEN
from ftcomm.transport.tcp.writer import TcpMirrorWriter

from . import kernel_stops
from .bodies import reduce_forever
from .job import Notes

SHARED = ("copy", "posted", "reduced", "read", "taken")
TCP = ("read", "frame", "posted", "taken")
_WORDS = {"posted": POSTED, "reduced": REDUCED, "taken": TAKEN}


def reduce_and_stop(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """`reduce_forever`; the first life of the rank `arguments["victim"]` stops at `arguments["place"]`."""
    if [group.replica, group.shard] == list(arguments["victim"]) and first_life(arguments["marks"]):
        kernels = engine_kind(group.settings.engine).runs_ops
        stop_at(arguments["place"], arguments["times"], lambda kind: notes.write(kind=kind), kernels)
    reduce_forever(group, notes, arguments)


def first_life(folder: str | Path) -> bool:
    try:
        (Path(folder) / "stopped").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def stop_at(place: str, times: int, note: Callable[[str], None] = lambda kind: None, kernels: bool = False) -> None:
    """Stop this process the `times`-th time that `place` is reached; `note` hears "stopped" before, "woke" after."""
    left = times

    def now() -> bool:
        nonlocal left
        left -= 1
        return left == 0

    def stop() -> None:
        note("stopped")
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # at once, before the next line
        note("woke")

    if kernels:

        def at(reached: str) -> None:
            if reached == place and now():
                stop()

        kernel_stops.before_announce(at)
        kernel_stops.within_copies(at)
    elif place == "frame":
        send = TcpMirrorWriter.send

        def send_torn(
            self: TcpMirrorWriter, word: int, value: int, start: int, payload: memoryview, *rest: Any
        ) -> None:
            if len(payload) > 1000 and now():
                self._sock = TornSocket(self._sock, stop)  # type: ignore[assignment]
            send(self, word, value, start, payload, *rest)

        TcpMirrorWriter.send = send_torn  # type: ignore[method-assign, assignment]
    elif place == "put":
        post = nixl_puts.Puts.post

        def post_and_stop(self: nixl_puts.Puts, remote: Any, rail: int, payload: memoryview, *rest: Any) -> bool:
            ended = post(self, remote, rail, payload, *rest)
            if len(payload) > 1000 and now():
                stop()
            return ended

        nixl_puts.Puts.post = post_and_stop  # type: ignore[method-assign, assignment]
    elif place in _WORDS:
        publish = Publisher.publish

        def publish_late(self: Publisher, word: int, count: int, **more: bool) -> None:
            if word == _WORDS[place] and count and now():
                stop()
            publish(self, word, count, **more)

        Publisher.publish = publish_late  # type: ignore[method-assign, assignment]
    else:
        bind = Pipeline.bind

        def torn_bind(self: Pipeline, slot: Slot, *rest: Any) -> None:
            bind(self, slot, *rest)
            views = slot.views
            if not getattr(views, "staged" if place == "copy" else "reduced", ()) or not now():
                return
            slot.course = None  # the next task of this slot gets whole ones
            if place == "copy":
                (part, there), *others = views.staged
                slot.views = views._replace(staged=[(part, TornArray(there, stop)), *others])
            else:
                slot.views = views._replace(reduced=TornList(views.reduced, stop))

        Pipeline.bind = torn_bind  # type: ignore[method-assign]


class _Once:
    """Around `real`; stops in the middle of what is done with it, once."""

    def __init__(self, real: Any, stop: Callable[[], None]) -> None:
        self._real, self._stop = real, stop
        self._used = False

    def _first(self) -> bool:
        first, self._used = not self._used, True
        return first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __len__(self) -> int:
        return len(self._real)


class TornArray(_Once):
    def __setitem__(self, key: Any, values: Any) -> None:
        there, half = self._real[key], len(values) // 2
        there[:half] = values[:half]
        if self._first():
            self._stop()
        there[half:] = values[half:]


class TornList(_Once):
    def __iter__(self) -> Iterator[Any]:
        for number, item in enumerate(self._real):
            if number and self._first():
                self._stop()
            yield item


class TornSocket(_Once):
    def sendmsg(self, buffers: Sequence[memoryview], *rest: Any) -> int:
        largest = max(range(len(buffers)), key=lambda number: len(buffers[number]))
        if len(buffers[largest]) <= 1000 or not self._first():
            return self._real.sendmsg(buffers, *rest)
        half = buffers[largest][: len(buffers[largest]) // 2]
        sent = self._real.sendmsg([*buffers[:largest], half], *rest)
        self._stop()
        return sent
