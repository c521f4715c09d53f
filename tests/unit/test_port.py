"""A coordinator that goes and comes has its port all the time."""

from __future__ import annotations

import asyncio
import errno
import socket
from pathlib import Path

import pytest

from ftcomm.control.handshake import Credentials
from ftcomm.control.port import Port
from ftcomm.launch.coordinator.embedded import EmbeddedCoordinator
from ftcomm.launch.options import RunOptions


def takes(number: int) -> bool:
    """Whether another program is given this port."""
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", number))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True


def test_a_port_is_kept_between_two_listeners_and_refuses_connections() -> None:
    port = Port("127.0.0.1", 0)
    with port.listen():
        socket.create_connection(("127.0.0.1", port.number)).close()
    number = port.number
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", number))
    assert not takes(number)
    with port.listen() as sock:
        assert sock.getsockname()[1] == number
        socket.create_connection(("127.0.0.1", number)).close()
    port.close()
    assert takes(number)


def test_a_port_that_another_process_listens_at_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = Port("127.0.0.1", other.getsockname()[1])
        with pytest.raises(OSError, match="in use"):
            port.listen()
    with port.listen():
        pass
    port.close()


def test_nobody_is_given_the_port_of_a_coordinator_that_is_restarted(tmp_path: Path) -> None:
    """From the end of the old one on; a connection that another program made from there once ended the job."""
    taken: list[bool] = []

    async def main() -> None:
        options = RunOptions(script="train.py", replicas=1)
        credentials = Credentials("token", "job")
        stops: list[str] = []

        def emit(kind: str) -> None:
            stops.append(kind)
            taken.append(takes(port))

        embedded = EmbeddedCoordinator(options, credentials, "127.0.0.1", tmp_path / "views", print, emit)
        await embedded.start()
        port = int(embedded.server.endpoint.rpartition(":")[2])
        await embedded.restart(0.05)
        assert stops == ["coordinator_stopped", "coordinator_started"]
        assert embedded.server.endpoint.endswith(f":{port}")
        await embedded.stop()
        assert takes(port)

    asyncio.run(main())
    assert taken == [False, False]
