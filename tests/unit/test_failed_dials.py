"""What a failure to reach a member says, with the errors that the kernel and the interpreter raise."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ftcomm.control import handshake, wire
from ftcomm.control.failed_dials import Cause, cause_of, shortage
from ftcomm.control.links import Link, listen
from ftcomm.control.liveness import boot
from ftcomm.control.peers import Peers
from ftcomm.control.views import Address, Addresses, Member, View

DEADLINE = 60.0  # s
CREDENTIALS = handshake.Credentials("secret")


@pytest.fixture(params=["closes", "resets"])
def besieged(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    """The port of a process that hangs up on everybody."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = listener.accept()
                    if request.param == "resets":
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    sock.close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(DEADLINE)


def test_a_port_that_hangs_up_is_told_from_one_that_nobody_answers(besieged: tuple[str, int]) -> None:
    with pytest.raises(OSError, match=r"closed|reset") as dialled:
        wire.connect(besieged, CREDENTIALS, "data", {}, DEADLINE)
    assert cause_of(dialled.value) is Cause.HUNG_UP

    async def run() -> None:
        down: asyncio.Queue[Exception] = asyncio.Queue()
        link = Link(besieged, CREDENTIALS, "member", {}, on_open=lambda: None, on_down=down.put_nowait)
        for _ in range(5):
            assert cause_of(await down.get()) is Cause.HUNG_UP
        link.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


def test_a_port_that_refuses_says_something_of_the_other() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(OSError, match="refused") as dialled:
        wire.connect(("127.0.0.1", port), CREDENTIALS, "data", {}, DEADLINE)
    assert cause_of(dialled.value) is Cause.OTHER
    assert not shortage(dialled.value)


@pytest.mark.parametrize(
    ("call", "mend"),
    [
        ("wire.connect(('127.0.0.1', 1), handshake.Credentials('t'), 'data', {}, 1.0)", "ulimit -n"),
        ("asyncio.run(links.connected(('127.0.0.1', 1), 1.0))", "ulimit -n"),
        ("os.pidfd_open(os.getpid())", "ulimit -n"),
        ("threading.Thread(target=print).start()", "ulimit -u"),
        ("bytes(1 << 50)", "ulimit -v"),
    ],
)
def test_what_this_process_lacks_says_nothing_of_the_other(call: str, mend: str) -> None:
    """With the errors that a process gets which may have no more of it."""
    script = f"""
import asyncio, os, resource, threading
from ftcomm.control import handshake, links, wire
from ftcomm.control.data_plane import Unreachable
from ftcomm.control.failed_dials import shortage
loop = asyncio.new_event_loop()
asyncio.run = loop.run_until_complete
if "Thread" in {call!r}:
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 20),) * 2)
else:
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
try:
    try:
        {call}
    except Exception as error:
        raise Unreachable(1, "its memory") from error
except Unreachable as error:
    print(shortage(error))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE)
    assert mend in done.stdout, done.stdout + done.stderr


def test_who_has_no_port_left_lacks_it_itself() -> None:
    assert shortage(wire.unreached(OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")))


def test_a_process_that_cannot_be_watched_for_want_of_a_descriptor_is_watched_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says so once. It is no failure to reach a member, by which this rank would end in the end."""
    lacking = True
    pidfd_open = os.pidfd_open

    def opened(pid: int) -> int:
        if lacking:
            raise OSError(errno.EMFILE, "Too many open files")
        return pidfd_open(pid)

    monkeypatch.setattr(os, "pidfd_open", opened)

    async def run() -> None:
        nonlocal lacking
        failed: list[Exception] = []
        ended = asyncio.Event()
        ignore: Any = lambda *told: None  # noqa: E731
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
            there = Address("127.0.0.1", 1, boot(), process.pid, 3, "0" * 32)
            view = View(
                1, None, (Member(0, "a", Addresses.of((there,)), True), Member(1, "b", Addresses.of((there,)), True))
            )
            peers = Peers(
                0,
                0,
                CREDENTIALS,
                on_open=ignore,
                on_message=ignore,
                on_lost=lambda view, replica, reason: ended.set(),
                on_failed=lambda view, replica, reason, error: failed.append(error),
                on_back=ignore,
            )
            peers.connect(view)
            peers.watch(view, [1])
            peers.watch_again()
            assert not [cause for cause in map(shortage, failed) if cause]
            assert caplog.text.count("is not watched yet") == 1
            assert "(ulimit -n)" in caplog.text
            lacking = False
            peers.watch_again()
            process.kill()
            await ended.wait()
            peers.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


def test_who_finds_no_free_port_to_listen_at_is_told_to_give_more(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(socket.socket):
        def bind(self, address: object) -> None:
            raise OSError(errno.EADDRINUSE, "Address already in use")

    monkeypatch.setattr(socket, "socket", Full)
    with pytest.raises(OSError, match="sysctl -w net") as raised:
        listen("127.0.0.1", 0)
    assert raised.value.errno == errno.EADDRINUSE
    with pytest.raises(OSError, match="Address already in use"):  # of the one that the caller has chosen
        listen("127.0.0.1", 5000)
