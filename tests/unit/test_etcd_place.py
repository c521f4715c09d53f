"""Where etcd is and how to be let in; and what its answers, or those of something else at its port, come to."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftcomm.control.etcd import Etcd, EtcdAway, EtcdPlace, EtcdRefused
from ftcomm.control.store import StoreError

pytestmark = pytest.mark.protocol

SECRET = "hush"
ACCOUNT = {"FTCOMM_ETCD_USER": "me", "FTCOMM_ETCD_PASSWORD": SECRET}


def test_an_address_is_taken_apart() -> None:
    place = EtcdPlace.parse("etcd://a:1,[::1]:2/jobs/one/", {})
    assert (place.endpoints, place.prefix) == ((("a", 1), ("::1", 2)), "/jobs/one")


@pytest.mark.parametrize(
    ("url", "env", "said"),
    [
        ("etcd://etcd/job", {}, "expected host:port, not 'etcd'"),
        ("etcd://a:1,/job", {}, "expected host:port, not ''"),
        ("etcd://a:0/job", {}, "expected host:port"),
        ("etcd://a:1", {}, "a name of their own"),
        ("etcd://a:1//", {}, "a name of their own"),
        (f"etcd://root:{SECRET}@a:1/job", {}, "FTCOMM_ETCD_USER"),
        ("etcd://a:1/job", {"FTCOMM_ETCD_PASSWORD": SECRET}, "FTCOMM_ETCD_USER and FTCOMM_ETCD_PASSWORD: set both"),
        ("etcd://a:1/job", {"FTCOMM_ETCD_CACERT": "/no/such"}, "FTCOMM_ETCD_CACERT=/no/such: there is no such file"),
        ("etcd://a:1/job", {"FTCOMM_ETCD_CERT": __file__}, "FTCOMM_ETCD_CERT and FTCOMM_ETCD_KEY: set both"),
        ("etcd://a:1/job", {"FTCOMM_ETCD_CERT": __file__, "FTCOMM_ETCD_KEY": __file__}, "FTCOMM_ETCD_CACERT"),
        (
            "etcd://a:1/job",
            {"FTCOMM_ETCD_MAX_REQUEST_BYTES": "1.5M"},
            "expected the --max-request-bytes",
        ),
        ("etcd://a:1/job", ACCOUNT, "would go to a for everybody on the way to read; set FTCOMM_ETCD_CACERT"),
        ("etcd://127.0.0.1:1,10.0.0.5:1/job", ACCOUNT, "would go to 10.0.0.5"),
    ],
)
def test_what_cannot_work_is_said(url: str, env: dict[str, str], said: str) -> None:
    with pytest.raises(StoreError) as error:
        EtcdPlace.parse(url, env)
    assert said in str(error.value)
    assert SECRET not in str(error.value)


def test_a_password_is_in_no_text() -> None:
    place = EtcdPlace.parse("etcd://[::1]:1/job", {"FTCOMM_ETCD_USER": "me", "FTCOMM_ETCD_PASSWORD": SECRET})
    assert SECRET not in f"{place} {place!r}"


class Answers(http.server.BaseHTTPRequestHandler):
    status, body = 200, b"{}"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if not self.status:
            self.connection.close()
            return
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join(10)


@pytest.mark.parametrize(
    ("status", "body", "kind", "said"),
    [
        (200, "hello", EtcdRefused, "none of etcd's"),
        (200, "[]", EtcdRefused, "none of etcd's"),
        (404, "404 page not found", EtcdRefused, "no gRPC gateway"),
        (400, {"code": 3, "message": "etcdserver: request is too large"}, EtcdRefused, "request is too large"),
        (403, {"code": 7, "message": "etcdserver: permission denied"}, EtcdRefused, "permission denied"),
        (503, {"code": 14, "message": "etcdserver: no leader"}, EtcdAway, "no leader"),
        (429, {"code": 8, "message": "etcdserver: mvcc: database space exceeded"}, EtcdAway, "space exceeded"),
        (500, "oops", EtcdAway, "oops"),
        (200, {"error": {"grpc_code": 14, "message": "etcdserver: leader changed"}}, EtcdAway, "leader changed"),
        (0, "", EtcdAway, "it closes the connection"),
    ],
)
def test_answers_that_are_none(
    port: int, status: int, body: object, kind: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answers, "status", status)
    monkeypatch.setattr(Answers, "body", body.encode() if isinstance(body, str) else json.dumps(body).encode())
    with pytest.raises(kind) as error:
        Etcd(EtcdPlace.parse(f"etcd://127.0.0.1:{port}/job", {}), 30).grant(5)
    assert f"127.0.0.1:{port}" in str(error.value)
    assert said in str(error.value)


def test_who_answers_is_asked_and_every_other_one_is_named(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answers, "body", b'{"ID": "7", "TTL": "5"}')
    with socket.create_server(("127.0.0.1", 0)) as deaf, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # does not listen, and nobody else gets the port
        gone = closed.getsockname()[1]
        others = f"127.0.0.1:{gone},127.0.0.1:{deaf.getsockname()[1]}"
        asks = Etcd(EtcdPlace.parse(f"etcd://{others},127.0.0.1:{port}/job", {}), 30)
        asks._clients[1].timeout = 0.2  # of the deaf one
        assert asks.grant(5) == (7, 5)
        with pytest.raises(EtcdAway) as error:
            Etcd(EtcdPlace.parse(f"etcd://{others}/job", {}), 0.2).grant(5)
        assert f"127.0.0.1:{gone}: Connection refused; " in str(error.value)
        assert str(error.value).endswith("no answer within its time")


@pytest.mark.parametrize("env", [{}, ACCOUNT | {"FTCOMM_ETCD_CACERT": __file__}])
def test_a_password_goes_by_tls_or_within_the_host(env: dict[str, str]) -> None:
    for host in ("a", "localhost", "127.0.0.1", "[::1]") if env else ("a",):
        EtcdPlace.parse(f"etcd://{host}:1/job", env)
    for host in ("localhost", "127.0.0.1", "[::1]"):
        EtcdPlace.parse(f"etcd://{host}:1/job", ACCOUNT)


def test_no_proxy_of_the_web_hears_of_the_job(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # does not listen, and nobody else gets the port
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{closed.getsockname()[1]}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(Answers, "body", b'{"ID": "7", "TTL": "5"}')
        assert Etcd(EtcdPlace.parse(f"etcd://127.0.0.1:{port}/job", {}), 30).grant(5) == (7, 5)


def test_tls_and_none_are_told_from_each_other(port: int) -> None:
    import certifi

    place = EtcdPlace.parse(f"etcd://127.0.0.1:{port}/job", {"FTCOMM_ETCD_CACERT": str(Path(certifi.where()))})
    with pytest.raises(EtcdAway, match="it does not speak TLS; unset FTCOMM_ETCD_CACERT"):
        Etcd(place, 5).grant(5)
