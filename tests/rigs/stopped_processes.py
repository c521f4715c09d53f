"""Processes that can be stopped, let go on and killed: one that listens, and a member as the others see it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from ftcomm.control import liveness
from ftcomm.control.handshake import Credentials
from ftcomm.control.views import Address
from tests.rigs.deadlines import DEADLINE

CREDENTIALS = Credentials("secret")


# Listens, accepts one connection and reads all that comes; it says at which port, and "x" for each part that it reads.
BODY = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
taken, _ = listener.accept()
while taken.recv(4096):
    print("x", flush=True)
"""


# A member as the others see it: says for what each connection is, once it is past its handshake.
MEMBER = """
import asyncio
from ftcomm.control.links import Listener, listen, serve_messages
from ftcomm.control.handshake import Credentials, HandshakeError

async def main():
    async def come(conn, opening):
        print(opening.purpose, flush=True)
        await serve_messages(conn, lambda message: None, lambda writer: None)

    sock = listen("127.0.0.1", 0)
    listener = Listener(sock, Credentials("secret"), come, names={"0" * 32})
    print(sock.getsockname()[1], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


class Peer:
    def __init__(self, body: str = BODY) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", body], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = ("127.0.0.1", int(self.process.stdout.readline()))

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        until(lambda: liveness.state(self.process.pid) == "T")

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


def at(peer: Peer, nonce: str = "0" * 32, boot: str = "another kernel") -> Address:
    """Its address as another host has it; `boot` of this one: as its own host has it."""
    here = {"network": liveness.network(), "pids": liveness.pids()} if boot == liveness.boot() else {}
    return Address(*peer.address, boot, peer.process.pid, 3, nonce, **here)
