"""Serves the live view: the page, its events, and metrics. A thread a connection, of the standard library's server.

    /                 the page (page/index.html, page.css, page.js)
    /events           server-sent events: a JSON object a second with the fields of `Overview` and `Stragglers` that
                      have changed
    /overview         the `Overview` once, whole
    /rank             ?replica=R&shard=S&ranks=N: what a rank does, in lines, if its recording lies on this host; of N
                      ranks from K on the one that waits longest
    /stack            ?replica=R&shard=S: where its threads stand, likewise
    /metrics          for Prometheus

It only reads. Each request is judged by `ftcomm.dashboard.access` before anything else.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import msgspec

from ftcomm.control.connection_limit import ConnectionLimit
from ftcomm.dashboard.access import Access, Reply
from ftcomm.dashboard.feed import Changes, Feed
from ftcomm.dashboard.metrics import prometheus_text
from ftcomm.errors import FtcommError

MOST = 64  # connections at once
PAGES = 48  # of them that get events; what is left is for metrics, and for what a page asks for besides
KEEPALIVE = 15.0  # s without an event after which a comment shows that the connection lives
SILENT = 30.0  # s for a request to come, or for a reader to take what is sent
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
# The page loads nothing from elsewhere, is in no frame, and runs no script but its own file.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Body(NamedTuple):
    """A whole answer."""

    kind: str  # of the content
    data: bytes
    status: HTTPStatus = HTTPStatus.OK


class DashboardServer(ThreadingHTTPServer):
    """The server of one job. `serve_forever` blocks; `shutdown` from another thread ends it."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, feed: Feed, host: str, port: int, token: str) -> None:
        """Listen. Raises `OSError`."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.feed = feed
        super().__init__((host, port), DashboardHandler)
        self.access = Access(host, self.server_address[1], token)
        self._limit = ConnectionLimit[socket.socket](MOST)
        self._limiting = threading.Lock()  # guards that
        self.pages = threading.BoundedSemaphore(PAGES)

    @property
    def url(self) -> str:
        """The address of the page, without the token."""
        host = f"[{self.access.host}]" if ":" in self.access.host else self.access.host
        return f"http://{host}:{self.access.port}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._limiting:
            excess = self._limit.come(request, client_address[0])
        if excess is not None and excess.key is request:
            with contextlib.suppress(OSError):
                request.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self.shutdown_request(request)
            return
        if excess is not None:
            with contextlib.suppress(OSError):
                excess.key.shutdown(socket.SHUT_RDWR)  # its thread ends
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._limiting:
                self._limit.gone(request)

    def proved(self, connection: socket.socket) -> None:
        """Note that a connection has shown the token. Any thread."""
        with self._limiting:
            self._limit.proved(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a reader that goes away is no error of ours."""


class DashboardHandler(BaseHTTPRequestHandler):
    """One connection."""

    server: DashboardServer
    timeout = SILENT
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "ftcomm", ""

    def do_GET(self) -> None:
        judged = self.server.access.judge(self.path, lambda name: self.headers.get(name, ""))
        if judged.reply in (Reply.LOGIN, Reply.SERVED):
            self.server.proved(self.connection)
        if judged.reply is Reply.LOGIN:
            self._login()
        elif judged.reply is not Reply.SERVED:
            status = HTTPStatus(judged.reply.value)
            self._answer(Body("text/plain", f"{judged.why}\n".encode(), status))
        elif (path := self.path.partition("?")[0]) == "/events":
            self._events()
        else:
            self._answer(self._found(path))

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: an address may hold the token."""

    def _found(self, path: str) -> Body:
        """Returns what there is at `path`."""
        pages: Mapping[str, Callable[[], Body]] = {
            "/": lambda: _file("index.html"),
            "/page.css": lambda: _file("page.css"),
            "/page.js": lambda: _file("page.js"),
            "/overview": lambda: _json(self.server.feed.now()),
            "/rank": self._rank,
            "/stack": self._stack,
            "/metrics": lambda: _metrics(self.server.feed),
        }
        found = pages.get(path)
        if found is None:
            return Body("text/plain", b"there is no such page\n", HTTPStatus.NOT_FOUND)
        return found()

    def _rank(self) -> Body:
        asked = self._numbers(replica="", shard="", ranks="1")
        return _asked_wrongly("rank") if asked is None else _json(self.server.feed.detail(*asked))

    def _stack(self) -> Body:
        asked = self._numbers(replica="", shard="")
        return _asked_wrongly("stack") if asked is None else _json(self.server.feed.stack(*asked))

    def _numbers(self, **names: str) -> list[int] | None:
        """Returns the numbers in the query, or what they are without one; None if one is missing or no number."""
        asked = parse_qs(self.path.partition("?")[2])
        numbers = [asked.get(name, [default])[0] for name, default in names.items()]
        good = all(number.isascii() and number.isdigit() and len(number) < 7 for number in numbers)
        return [int(number) for number in numbers] if good else None

    def _login(self) -> None:
        access = self.server.access
        self.send_response(HTTPStatus.SEE_OTHER)
        self.send_header("Location", "/")
        self.send_header("Set-Cookie", f"{access.cookie}={access.token}; HttpOnly; SameSite=Strict; Path=/")
        self._end(0)

    def _answer(self, body: Body) -> None:
        self.send_response(body.status)
        self.send_header("Content-Type", f"{body.kind}; charset=utf-8")
        if body.status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self._end(len(body.data))
        self.wfile.write(body.data)

    def _end(self, length: int) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def _events(self) -> None:
        """Send events, unless that many readers get them already."""
        pages = self.server.pages
        if not pages.acquire(blocking=False):
            said = f"{PAGES} pages are open already; close one\n".encode()
            self._answer(Body("text/plain", said, HTTPStatus.SERVICE_UNAVAILABLE))
            return
        try:
            self._stream()
        finally:
            pages.release()

    def _stream(self) -> None:
        """Send events until the reader goes or the job ends."""
        feed, changes, number = self.server.feed, Changes(), 0
        self.close_connection = True
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream")
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        feed.watch(1)
        try:
            while True:
                newer = feed.newer(number, KEEPALIVE)
                if newer is not None:
                    number, *seen = newer
                    self.wfile.write(b"data: " + changes.of(*seen) + b"\n\n")
                elif feed.ended.is_set():
                    self.wfile.write(b"event: ended\ndata: {}\n\n")
                    return
                else:
                    self.wfile.write(b": here\n\n")
        except OSError:
            pass  # the reader has gone
        finally:
            feed.watch(-1)


def _json(found: Any) -> Body:
    return Body("application/json", msgspec.json.encode(found))


def _asked_wrongly(page: str) -> Body:
    return Body("text/plain", f"expected /{page}?replica=0&shard=0\n".encode(), HTTPStatus.BAD_REQUEST)


def _file(name: str) -> Body:
    return Body(TYPES[name.rpartition(".")[2]], files("ftcomm.dashboard").joinpath("page", name).read_bytes())


def _metrics(feed: Feed) -> Body:
    try:
        return Body("text/plain; version=0.0.4", prometheus_text(feed.now()))
    except FtcommError as error:
        return Body("text/plain", f"{error}\n".encode(), HTTPStatus.NOT_IMPLEMENTED)
