"""Connections of the live view: those of strangers make room."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from ftcomm.dashboard import server
from ftcomm.dashboard.server import DashboardServer

TOKEN = "the-token-of-a-live-view"


@pytest.fixture
def view(monkeypatch: pytest.MonkeyPatch) -> Iterator[DashboardServer]:
    monkeypatch.setattr(server, "MOST", 3)
    view = DashboardServer(cast(Any, None), "127.0.0.1", 0, TOKEN)
    thread = threading.Thread(target=view.serve_forever, args=(0.01,))
    thread.start()
    yield view
    view.shutdown()
    thread.join(60)
    view.server_close()


class Quiet:
    """A feed in which nothing happens."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def watch(self, readers: int) -> None:
        pass

    def newer(self, number: int, timeout: float) -> None:
        time.sleep(0.01)


def ask(connection: http.client.HTTPConnection, path: str = "/") -> int:
    connection.request("GET", path, headers={"Authorization": f"Bearer {TOKEN}"})
    answer = connection.getresponse()
    if path == "/events" and answer.status == 200:
        return 200  # and it goes on
    answer.read()
    return answer.status


def test_strangers_keep_nobody_out(view: DashboardServer) -> None:
    address = view.server_address[:2]
    owner = http.client.HTTPConnection(*address, timeout=60)  # type: ignore[arg-type]
    assert ask(owner) == 200
    silent = [socket.create_connection(address, 60) for _ in range(4)]
    for one in silent[:2]:
        assert one.recv(1) == b"", "the oldest go"
    other = http.client.HTTPConnection(*address, timeout=60)  # type: ignore[arg-type]
    assert ask(other) == 200
    assert silent[2].recv(1) == b""
    assert ask(owner) == 200, "who has shown the token stays"
    for one in (*silent, owner, other):
        one.close()


def test_no_more_are_taken_than_there_is_room_for(view: DashboardServer) -> None:
    owners = [http.client.HTTPConnection(*view.server_address[:2], timeout=60) for _ in range(4)]  # type: ignore[arg-type]
    assert [ask(owner) for owner in owners] == [200, 200, 200, 503]
    for owner in owners:
        owner.close()


def test_open_pages_keep_metrics_in(view: DashboardServer) -> None:
    view.feed, view.pages = cast(Any, Quiet()), threading.BoundedSemaphore(1)
    reader, late, metrics = (http.client.HTTPConnection(*view.server_address[:2], timeout=60) for _ in range(3))  # type: ignore[arg-type]
    assert [ask(reader, "/events"), ask(late, "/events"), ask(metrics)] == [200, 503, 200]
    reader.close()
    while ask(late, "/events") == 503:  # until it is known that the reader has gone
        time.sleep(0.01)
    late.close()
    metrics.close()
