"""TLS around the connections: who gets through, who does not, and what both are told."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftcomm.control import dropped, handshake, tls, wire
from ftcomm.control import messages as m
from ftcomm.control.links import Link, Listener, listen, serve_messages
from ftcomm.control.liveness import boot, network
from ftcomm.control.sealed import Channel, Keys
from ftcomm.control.tls import Files, Tls, TlsError
from ftcomm.control.views import Address
from tests.rigs.certificates import Authority

TOKEN = "secret"
DEADLINE = 30.0  # s

pytestmark = pytest.mark.protocol


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Asserts that one of a kind was dropped in this test: it may be counted after the other side was told."""
    monkeypatch.setattr(dropped, "_tallies", {})

    def assert_once(kind: str) -> None:
        deadline = time.monotonic() + DEADLINE
        while not dropped.counts() and time.monotonic() < deadline:
            time.sleep(0.005)
        assert dropped.counts() == {kind: 1}

    return assert_once


class Port:
    """Listens with these credentials, and sends back what comes; or, for "link", hears messages."""

    def __init__(self, tls: Tls | None, name: str = "", job: str = "") -> None:
        self._mine, self._name = handshake.Credentials(TOKEN, job, tls), name
        self._sock = listen("127.0.0.1", 0)
        self.address = self._sock.getsockname()
        self.heard: list[m.AnyMessage] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),), daemon=True)

    def __enter__(self) -> Port:
        self._over = asyncio.Event()
        self._thread.start()
        return self

    def __exit__(self, *how: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(DEADLINE)
        self._loop.close()

    async def _run(self) -> None:
        listener = Listener(self._sock, self._mine, self._peer, names={self._name})
        await self._over.wait()
        while listener._strangers:  # what they have done is counted
            await asyncio.sleep(0.005)
        await listener.close()

    async def _peer(self, channel: Channel, opening: handshake.Opening) -> None:
        if opening.purpose == "link":
            await serve_messages(channel, self.heard.append, lambda writer: writer.write(m.encode(m.Heartbeat(9))))
        else:
            channel.setblocking(True)
            threading.Thread(target=self._echo, args=(channel,), daemon=True).start()

    @staticmethod
    def _echo(channel: Channel) -> None:
        with channel, contextlib.suppress(OSError):
            while data := channel.recv(1 << 20):
                channel.sendall(data)


def there(address: tuple[str, int], nonce: str) -> Address:
    return Address(*address, boot(), 1, 3, nonce, network=network())


def dial(port: Port | tuple[str, int], tls: Tls | None, job: str = "", to: str = "") -> Channel:
    address = port.address if isinstance(port, Port) else port
    return wire.connect(
        address, handshake.Credentials(TOKEN, job, tls), "data", {}, DEADLINE, there(address, to) if to else None
    )


def test_an_older_tls_is_refused(authority: Authority, once: Callable[[str], None]) -> None:
    files = authority.files("a")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(files.cert, files.key)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with Port(Tls(files)) as port, socket.create_connection(port.address) as sock:
        with pytest.raises(ssl.SSLError, match=r"(?i)version"):
            context.wrap_socket(sock)
        once("tls")


# -- who gets through ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ca", [False, True], ids=["self-signed", "authority"])
def test_bytes_and_messages_go_through(ca: bool, authority: Authority) -> None:
    server, client = Tls(authority.files("a", ca=ca)), Tls(authority.files("b", ca=ca))
    said = os.urandom(3_000_000)
    with Port(server) as port:
        with dial(port, client) as channel:
            thread = threading.Thread(target=channel.sendall, args=(said,), daemon=True)
            thread.start()
            got = b""
            while len(got) < len(said):
                got += channel.recv(1 << 20)
            assert got == said
            thread.join(DEADLINE)

        async def run() -> list[m.AnyMessage]:
            heard: list[m.AnyMessage] = []
            mine = handshake.Credentials(TOKEN, tls=client)
            link = Link(
                port.address, mine, "link", {}, on_open=lambda: link.send(m.Heartbeat(4)), on_message=heard.append
            )
            while not (heard and port.heard):
                await asyncio.sleep(0.01)
            link.close()
            return heard

        assert asyncio.run(asyncio.wait_for(run(), DEADLINE)) == [m.Heartbeat(9)]
        assert port.heard == [m.Heartbeat(4)]


def test_nothing_can_be_read_on_the_way(authority: Authority) -> None:
    tls = Tls(authority.files())
    with Port(tls) as port, Relay(port.address) as relay:
        with dial(relay.address, tls) as channel:
            channel.sendall(b"a word of the job")
            assert channel.recv(100) == b"a word of the job"
        assert b"a word" not in relay.seen
        assert b"data" not in relay.seen, "the purpose of the opening"
    with Port(None) as port, Relay(port.address) as relay:
        with dial(relay.address, None) as channel:
            channel.sendall(b"a word of the job")
            assert channel.recv(100) == b"a word of the job"
        assert b"a word" in relay.seen


class Relay:
    """Somebody on the way, who does TLS with both sides if he has a certificate."""

    def __init__(self, target: tuple[str, int], own: Files | None = None) -> None:
        self._target, self._own = target, own
        self._port = socket.create_server(("127.0.0.1", 0))
        self.address = self._port.getsockname()
        self.seen = b""

    def __enter__(self) -> Relay:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *how: object) -> None:
        self._port.close()

    def _serve(self) -> None:
        near, _ = self._port.accept()
        far = socket.create_connection(self._target)
        if self._own is not None:
            server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            server.load_cert_chain(*self._own[:2])
            client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
            near, far = server.wrap_socket(near, server_side=True), client.wrap_socket(far)
        for ends in ((near, far), (far, near)):
            threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(1 << 16):
                self.seen += part
                target.sendall(part)
            target.shutdown(socket.SHUT_WR)


def test_who_speaks_tls_with_both_sides_gets_past_neither(authority: Authority, tmp_path: Path, once) -> None:
    """Each has proved to hold the token, but for another certificate than the one that the other has seen."""
    tls = Tls(authority.files(ca=False))
    with Port(tls) as port, Relay(port.address, Authority(tmp_path, "other").files(ca=False)) as relay:
        with pytest.raises(handshake.HandshakeError, match="wrong token"):
            dial(relay.address, tls)
        once("token")


# -- who does not ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("server", [True, False], ids=["the server alone", "the client alone"])
def test_tls_on_one_side_alone_is_said_on_both(server: bool, authority: Authority, once, caplog) -> None:
    tls = Tls(authority.files())
    with Port(tls if server else None) as port:
        with pytest.raises(handshake.HandshakeError, match=r"TLS.*FTCOMM_TLS_CERT and FTCOMM_TLS_KEY on all"):
            dial(port, None if server else tls)
        once("tls")
    assert "FTCOMM_TLS_CERT" in caplog.text


def test_a_certificate_of_another_authority_is_refused(authority: Authority, tmp_path: Path, once) -> None:
    other = Tls(Authority(tmp_path, "other").files())
    with Port(Tls(authority.files())) as port, pytest.raises(handshake.HandshakeError, match="certificate is not good"):
        dial(port, other)
    once("tls")


def test_a_client_without_a_certificate_of_the_authority_is_refused(authority: Authority, tmp_path: Path, once) -> None:
    """It looks at no certificate itself."""
    other = Tls(Authority(tmp_path, "other").files(ca=False))
    with Port(Tls(authority.files())) as port, pytest.raises(handshake.HandshakeError, match="FTCOMM_TLS_CA on all"):
        dial(port, other)
    once("tls")


@pytest.mark.parametrize("when", [{"ended": True}, {"early": True}], ids=["expired", "not valid yet"])
@pytest.mark.parametrize("server", [True, False], ids=["of the server", "of the client"])
def test_a_certificate_out_of_its_time_is_refused_with_the_mend(
    server: bool, when: dict[str, bool], authority: Authority, once, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one becomes while its process runs, or by a clock that is wrong: its own process would not start with it."""
    good = Tls(authority.files("good"))
    monkeypatch.setattr(tls, "_try", lambda *contexts: None)
    bad = Tls(authority.files("bad", **when))
    said = r"FTCOMM_TLS_CA on all processes .* valid now"
    with Port(bad if server else good) as port, pytest.raises(handshake.HandshakeError, match=said):
        dial(port, good if server else bad)
    once("tls")


def test_a_certificate_may_name_any_host(authority: Authority) -> None:
    """The token proves who is there, so addresses may change; see docs/security.md."""
    mine, other = Tls(authority.files("a", host="192.0.2.1")), Tls(authority.files("b", host="elsewhere.test"))
    with Port(other) as port, dial(port, mine) as channel:
        channel.sendall(b"x")
        assert channel.recv(1) == b"x"


def test_a_record_that_is_sent_again_within_tls_ends_the_connection(authority: Authority, once) -> None:
    tls = Tls(authority.files())
    with Port(tls) as port, dial(port, tls) as channel:
        record = channel.record(b"a word")
        channel.detach().sendall(record + record)
        with contextlib.suppress(OSError):
            assert channel.recv(100) in (b"a word", b"")
            assert channel.recv(100) == b""
    once("mac")


def test_a_flipped_bit_and_an_end_within_tls_end_the_connection(authority: Authority, once) -> None:
    tls = Tls(authority.files())
    with Port(tls) as port:
        channel = dial(port, tls)
        spoilt = bytearray(channel.record(b"a word"))
        spoilt[-1] ^= 1
        channel.detach().sendall(spoilt)
        with contextlib.suppress(OSError):
            assert channel.recv(100) == b""
        channel.close()
        with dial(port, tls) as channel:
            channel.detach().sendall(channel.record(b"a word")[:-1])
            channel.shutdown(socket.SHUT_WR)
            assert channel.recv(100) == b""
        once("mac")


# -- at the start ----------------------------------------------------------------------------------------------------


def spoil(files: Files, what: str, tmp_path: Path) -> tuple[Files, str]:
    other = Authority(tmp_path, "other")
    return {
        "no file": (files._replace(cert=str(tmp_path / "none.pem")), "FTCOMM_TLS_CERT=.*none.pem: No such file"),
        "no key": (files._replace(key=str(tmp_path / "none.pem")), "FTCOMM_TLS_KEY=.*none.pem: No such file"),
        "no certificate": (files._replace(cert=files.key), "do not serve"),
        "another key": (files._replace(key=other.files().key), "do not serve: KEY_VALUES_MISMATCH"),
        "wrong authority": (files._replace(ca=str(other.file)), "not good by FTCOMM_TLS_CA=.*other.pem"),
        "no authority": (files._replace(ca=files.key), "FTCOMM_TLS_CA=.* does not serve"),
        "expired": (other.files(ended=True), "certificate has expired"),
        "expired, self-signed": (other.files(ca=False, ended=True), "certificate has expired"),
        "not valid yet": (other.files("early", early=True), "certificate is not yet valid"),
        "not valid yet, self-signed": (other.files("early", ca=False, early=True), "certificate is not yet valid"),
    }[what]


WHAT = ["no file", "no key", "no certificate", "another key", "wrong authority", "no authority"]
TIMES = ["expired", "expired, self-signed", "not valid yet", "not valid yet, self-signed"]


@pytest.mark.parametrize("what", [*WHAT, *TIMES])
def test_files_of_no_use_are_named_at_the_start(what: str, authority: Authority, tmp_path: Path) -> None:
    files, said = spoil(authority.files(), what, tmp_path)
    with pytest.raises(TlsError, match=said):
        Tls(files)


def test_a_certificate_may_be_renewed_while_the_job_runs(authority: Authority, caplog) -> None:
    files = authority.files(ca=False)
    tls = Tls(files)
    before = tls.server().binding
    Path(files.cert).write_text("half of it")
    os.utime(files.cert, ns=(1, 1))
    assert tls.server().binding == before
    assert "serves on" in caplog.text
    authority.files(ca=False)  # the same files, another certificate
    with Port(tls) as port, dial(port, tls) as channel:
        channel.sendall(b"x")
        assert channel.recv(1) == b"x"
    assert tls.server().binding != before


def test_notes_in_a_file_of_certificates_need_not_be_utf_8(authority: Authority, caplog) -> None:
    files = authority.files(ca=False)
    tls = Tls(files)
    before = tls.server().binding
    renewed = Path(authority.files(ca=False).cert)  # the same file
    renewed.write_bytes("# für unseren Rechner\n".encode("latin-1") + renewed.read_bytes())
    assert tls.server().binding != before
    assert not caplog.text


def test_a_certificate_of_another_kind_costs_no_connection(authority: Authority, caplog) -> None:
    """OpenSSL reads `X509 CERTIFICATE` as well."""
    files = authority.files(ca=False)
    tls = Tls(files)
    before = tls.server().binding
    there = Path(files.cert)
    there.write_text(there.read_text().replace("CERTIFICATE-----", "X509 CERTIFICATE-----"))
    os.utime(there, ns=(1, 1))
    assert tls.server().binding == before
    assert "serves on" in caplog.text


def test_a_key_is_not_shown() -> None:
    assert "the key" not in repr(Keys(b"the key", client=True))


# -- job and target --------------------------------------------------------------------------------------------------


@pytest.fixture
def named() -> Iterator[Port]:
    with Port(None, name="that of its address", job="mine") as port:
        yield port


def test_another_job_with_the_same_token_is_refused_by_name(named: Port, once) -> None:
    with pytest.raises(handshake.Refused, match=r"of the job 'yours', expected 'mine'.*: export FTCOMM_JOB=mine"):
        dial(named, None, job="yours")
    once("job")
    dial(named, None, job="mine").close()


def test_who_names_no_job_is_told_what_to_export(named: Port, once) -> None:
    with pytest.raises(handshake.Refused, match=r"it names no job, expected 'mine'.*: export FTCOMM_JOB=mine\. "):
        dial(named, None)
    once("job")


def test_an_address_that_is_out_of_date_reaches_nobody_else(named: Port, once) -> None:
    with pytest.raises(handshake.ProcessReplaced, match="another process listens there now"):
        dial(named, None, job="mine", to="that of one before")
    once("target")
    dial(named, None, job="mine", to="that of its address").close()


def test_no_token_is_in_what_is_shown(named: Port) -> None:
    assert TOKEN not in repr(handshake.Credentials(TOKEN, "mine"))
    with pytest.raises(handshake.HandshakeError) as refused:
        wire.connect(named.address, handshake.Credentials("another secret of mine", "mine"), "data", {}, DEADLINE)
    assert "another secret" not in str(refused.value)
    assert TOKEN not in str(refused.value)
