"""What a forked child does not have of its parent's, and is not allowed to do."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import selectors
import socket
import stat
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from ftcomm.control import fork, handshake, wire
from ftcomm.errors import FtcommError
from ftcomm.process.own import own_process
from ftcomm.transport.segment import HEADER, POSTED, Segment

_libc = ctypes.PyDLL(None)


def in_child(body: Callable[[], Any], fork: Callable[[], int] = os.fork) -> Any:
    """What `body` returns in a forked child, as JSON."""
    near, far = os.pipe()
    pid = fork()
    if pid == 0:
        try:
            answer = body()
        except BaseException:
            answer = traceback.format_exc()
        os.write(far, json.dumps(answer).encode())
        os._exit(0)
    os.close(far)
    with open(near, "rb") as answers:
        said = json.loads(answers.read() or b'"it died"')
    os.waitpid(pid, 0)
    return said


@pytest.fixture
def participant() -> Iterator[object]:
    class Rank:
        pass

    rank = Rank()
    fork.take_part(rank, "replica 3 shard 1")
    yield rank
    fork.part(rank)


def test_a_connection_is_the_parents_alone() -> None:
    closed = fork.keep_from_children(
        selectors.DefaultSelector()
    )  # which has no number to give any more, and says so by an error
    closed.close()
    near, far = socket.socketpair()
    fork.keep_from_children(near)

    def child() -> list[str]:
        said = []
        for what in (lambda: near.send(b"lie"), lambda: near.shutdown(socket.SHUT_RDWR)):
            try:
                what()
            except OSError as error:
                said.append(error.strerror)
        near.close()
        return said

    with near, far:
        assert in_child(child) == ["Socket operation on non-socket"] * 2
        near.send(b"truth")
        assert far.recv(100) == b"truth"


def test_a_connection_ends_with_the_parents_end_of_it() -> None:
    """The child lives on."""
    near, far = socket.socketpair()
    fork.keep_from_children(near)
    go_on, may = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(go_on, 1)
        os._exit(0)
    # The first thing that the child does with it is to let go of it, so the end is seen, be it a moment later.
    near.close()
    try:
        poll = select.poll()
        poll.register(far, select.POLLIN)
        assert poll.poll(30_000), "the child keeps the connection open"
        assert far.recv(100) == b""
    finally:
        os.write(may, b"!")
        os.waitpid(pid, 0)
        far.close()
        os.close(go_on)
        os.close(may)


def test_a_child_of_another_thread_has_no_part_of_a_connection_that_is_being_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would keep the connection open after the death of its parent, and nobody would see that."""
    kinds = []

    class ForksWhileItConnects(socket.socket):
        def connect(self, there: Any) -> None:
            super().connect(there)
            kinds.append(in_child(lambda: stat.S_ISSOCK(os.fstat(self.fileno()).st_mode)))

    with socket.create_server(("127.0.0.1", 0)) as port:
        monkeypatch.setattr(socket, "socket", ForksWhileItConnects)
        with pytest.raises(handshake.HandshakeError):
            wire.connect(port.getsockname(), handshake.Credentials("secret"), "data", {}, 0.1)
    assert kinds == [False]


def test_what_the_child_opens_is_not_closed_by_what_it_inherited() -> None:
    """Numbers stay taken, so an object of the parent that dies in the child closes nothing of the child's."""
    near, far = socket.socketpair()
    fork.keep_from_children(near)
    number = near.fileno()

    def child() -> bool:
        nonlocal near
        mine = os.open(os.devnull, os.O_RDONLY)
        near.close()
        os.fstat(mine)
        return mine != number

    with far:
        assert in_child(child) is True
        near.close()


def test_what_the_child_takes_out_of_a_selector_stays_in_the_parents() -> None:
    near, far = socket.socketpair()
    with near, far, fork.keep_from_children(selectors.DefaultSelector()) as selector:
        selector.register(near, selectors.EVENT_READ)
        in_child(lambda: selector.unregister(near) and None)
        far.send(b"!")
        assert selector.select(30)


def test_a_segment_is_the_parents_alone() -> None:
    segment = Segment()
    segment.words[POSTED] = 7

    def child() -> list[int]:
        seen = int(segment.words[POSTED])
        segment.words[POSTED] = 1 << 40
        segment._bytes[HEADER:] = 255
        return [seen, os.readlink(f"/proc/self/fd/{segment.fd}") == os.devnull]

    assert in_child(child) == [0, True]
    assert segment.words[POSTED] == 7
    assert not np.any(segment._bytes[HEADER:])
    segment.close()


def test_memory_of_the_child_is_not_unmapped_by_what_it_inherited() -> None:
    """At the place of a segment there is private memory until that is unmapped, so nothing else can be."""
    memory = mmap.mmap(-1, 1 << 20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    fork.keep_memory_from_children(memory, address)

    def child() -> bool:
        mine = [mmap.mmap(-1, 1 << 20) for _ in range(8)]
        places = [ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in mine]
        return all(abs(place - address) >= 1 << 20 for place in places)

    assert in_child(child) is True


def test_who_takes_part_may_call_and_its_children_may_not(participant: object) -> None:
    own_process()

    def child() -> str:
        try:
            own_process()
        except FtcommError as error:
            fork.part(participant)  # what was inherited cannot be ended
            own = in_child(lambda: fork.is_child())
            return f"{error} {own}"
        return "it may"

    said = in_child(child)
    assert "forked child of process" in said
    assert str(os.getpid()) in said
    assert "replica 3 shard 1" in said
    assert "spawn or forkserver" in said
    assert said.endswith("True"), "a child of a child may"


def test_a_fork_behind_the_interpreters_back_is_seen(participant: object) -> None:
    def child() -> bool:
        try:
            own_process()
        except FtcommError:
            return True
        return False

    assert in_child(child, _libc.fork) is True


UNWIPED = """
import ctypes, mmap, os

class Old(mmap.mmap):
    def madvise(self, *_):
        raise OSError(22, "Invalid argument")

mmap.mmap = Old
from ftcomm.control import fork
from ftcomm.process.own import own_process
fork.take_part(fork, "a rank")
own_process()
pid = ctypes.PyDLL(None).fork()
if pid == 0:
    try:
        own_process()
    except Exception as error:
        os._exit(7)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
own_process()
"""


def test_a_fork_behind_the_interpreters_back_is_seen_where_the_kernel_wipes_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", UNWIPED], capture_output=True, text=True, check=False, timeout=230)
    assert (done.stdout, done.returncode) == ("7\n", 0), done.stderr


def test_children_are_free_when_nobody_takes_part(participant: object) -> None:
    fork.part(participant)
    assert in_child(lambda: own_process()) is None
    assert in_child(lambda: fork.refusal()) == ""
