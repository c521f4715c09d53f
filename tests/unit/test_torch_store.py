"""torch's store without torch: queries in pieces, waits, lives of a replica, and what is refused. What each query is
answered is compared with torch's own in tests/torch/test_store.py."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import struct
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ftcomm.control import dropped
from ftcomm.launch.torchrun import store as torch_store
from ftcomm.launch.torchrun import store_contents
from ftcomm.launch.torchrun.store import TorchStore
from ftcomm.launch.torchrun.store_contents import MAGIC, QUERIES, Parser, QueryError, StoreContents

pytestmark = pytest.mark.protocol

NUMBER = {name: number for number, (name, _) in enumerate(QUERIES)}
LIFE = b"/life of replica 1, ab"


def string(data: bytes) -> bytes:
    return struct.pack("<q", len(data)) + data


def query(name: str, *strings: bytes) -> bytes:
    return bytes([NUMBER[name]]) + b"".join(map(string, strings))


def wait(*keys: bytes) -> bytes:
    return bytes([NUMBER["wait"]]) + struct.pack("<q", len(keys)) + b"".join(map(string, keys))


PING = bytes([NUMBER["ping"]]) + b"ping"
GREETING = bytes([NUMBER["validate"]]) + struct.pack("<I", MAGIC)


@pytest.fixture
def keys() -> StoreContents:
    keys = StoreContents()
    for connection in (1, 2):
        assert keys.ask(connection, "validate", [MAGIC]) == []
    return keys


def test_a_query_comes_in_pieces() -> None:
    whole = wait(b"/one", b"", b"/two") + query("get", b"/one")
    for size in range(1, len(whole)):
        parser, found = Parser(), []
        for at in range(0, len(whole), size):
            parser.feed(whole[at : at + size])
            while (each := parser.next()) is not None:
                found.append(each)
        assert found == [("wait", [[b"/one", b"", b"/two"]]), ("get", [b"/one"])]
        assert parser.held == 0


def test_no_byte_of_a_query_is_looked_at_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting:
        size, calls = 8, 0

        def unpack(self, data: bytes) -> tuple[int]:
            self.calls += 1
            return (int.from_bytes(data, "little", signed=True),)

    number = Counting()
    whole, parser = wait(*[b""] * 1000), Parser()
    monkeypatch.setattr(store_contents, "_NUMBER", number)
    for at in range(len(whole) - 1):
        parser.feed(whole[at : at + 1])
        assert parser.next() is None
        assert parser.held > at
    parser.feed(whole[-1:])
    assert parser.next() == ("wait", [[b""] * 1000])
    assert number.calls == 1001


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (bytes([len(QUERIES)]), "is this torch newer"),
        (bytes([NUMBER["get"]]) + struct.pack("<q", -1), "a string of -1 bytes"),
        (bytes([NUMBER["get"]]) + struct.pack("<q", 1 << 60), "at most"),
        (bytes([NUMBER["wait"]]) + struct.pack("<q", 65537), "wait of 65537 keys; at most 65536"),
        (query("get", b"")[:1] + struct.pack("<q", (64 << 20) + 1), "at most"),
        (query("set", b"/k") + struct.pack("<q", (64 << 20) - 1), "a query of more than"),
    ],
)
def test_what_is_no_query(data: bytes, why: str) -> None:
    parser = Parser()
    parser.feed(data)
    with pytest.raises(QueryError, match=why):
        parser.next()


def test_who_does_not_greet_is_refused() -> None:
    with pytest.raises(QueryError, match="no greeting"):
        StoreContents().ask(1, "get", [b"/k"])
    with pytest.raises(QueryError, match="something else"):
        StoreContents().ask(1, "validate", [MAGIC + 1])


def test_a_wait_ends_with_the_last_of_its_keys(keys: StoreContents) -> None:
    assert keys.ask(1, "wait", [[b"/a", b"/b", b"/q"]]) == []
    assert keys.ask(2, "set", [b"/b", b"x"]) == []
    assert keys.ask(2, "queue_push", [b"/q", b"x"]) == []
    assert keys.waits_for(1) == [b"/a"]
    assert keys.ask(2, "add", [b"/a", 1]) == [(2, struct.pack("<q", 1)), (1, store_contents.STOP_WAITING)]
    assert keys.ask(1, "wait", [[b"/a", b"/b", b"/q"]]) == [(1, store_contents.STOP_WAITING)]


def test_nobody_hears_of_a_wait_that_is_over(keys: StoreContents) -> None:
    keys.ask(1, "wait", [[b"/a"]])
    assert keys.ask(1, "cancel_wait", []) == [(1, store_contents.WAIT_CANCELED)]
    keys.ask(1, "wait", [[b"/a"]])
    keys.gone(1)
    assert keys.ask(2, "set", [b"/a", b""]) == []


def test_keys_of_a_script_are_the_same_in_each_life_and_those_of_groups_are_not(keys: StoreContents) -> None:
    keys.ask(1, "set", [b"/default_pg/0//mine", b"old"])
    keys.ask(1, "set", [b"/default_pg/0//1//cpu//0/0", b"stale"])
    assert keys.ask(2, "get", [LIFE + b"/default_pg/0//mine"]) == [(2, string(b"old"))]
    assert keys.ask(2, "check", [[LIFE + b"/default_pg/0//1//cpu//0/0"]]) == [(2, store_contents.NOT_READY)]
    assert keys.ask(1, "wait", [[b"/default_pg/0//new"]]) == []
    assert keys.ask(2, "set", [LIFE + b"/default_pg/0//new", b""]) == [(1, store_contents.STOP_WAITING)]


def test_a_long_key_of_a_life_takes_little_memory(keys: StoreContents) -> None:
    key = LIFE + b"/default_pg/0//" + b"x" * (1 << 20)
    tracemalloc.start()
    try:
        keys.ask(1, "check", [[key]])
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_it_does_not_take_all_memory(keys: StoreContents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_contents, "MOST", 216)
    for _ in range(3):
        keys.ask(1, "set", [b"/k", b"12345678"])
    with pytest.raises(QueryError, match="more than the 216 bytes"):
        keys.ask(1, "append", [b"/k", b"1234567"])
    keys.ask(1, "delete_key", [b"/k"])
    keys.ask(1, "queue_push", [b"/k", b"12345678901234"])
    keys.ask(1, "queue_pop", [b"/k"])
    keys.ask(1, "set", [b"/k", b"12345678901234"])


@pytest.mark.parametrize("what", ["set", "queue_push"])
def test_entries_without_a_byte_take_memory(keys: StoreContents, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(store_contents, "MOST", 2 * 200 + 1)
    keys.ask(1, what, [b"", b""])
    keys.ask(1, what, [b"a", b""])
    with pytest.raises(QueryError, match="more than the 401 bytes"):
        keys.ask(1, what, [b"b", b""])


def test_keys_that_somebody_waits_for_take_memory(keys: StoreContents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_contents, "MOST", 1000)
    for _ in range(3):  # each way in which a wait ends gives it back
        keys.ask(1, "wait", [[b"/a", b"/b"]])
        with pytest.raises(QueryError, match="more than the 1000 bytes"):
            keys.ask(2, "wait", [[b"/c"]])
        keys.ask(1, "wait", [[b"/b", b"/c"]])
        keys.ask(1, "cancel_wait", [])
        keys.ask(1, "wait", [[b"/a"]])
        assert keys.ask(2, "set", [b"/a", b""])[0] == (1, store_contents.STOP_WAITING)
        keys.ask(2, "delete_key", [b"/a"])
        keys.ask(1, "wait", [[b"/a", b"/b"]])
        keys.gone(1)
        keys.ask(1, "validate", [MAGIC])
    keys.ask(2, "set", [b"/a", b"x" * 700])


def test_who_sets_too_much_at_once_sets_nothing(keys: StoreContents, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise those who wait for the first of the keys are never told."""
    monkeypatch.setattr(store_contents, "MOST", 1000)
    keys.ask(1, "wait", [[b"/a"]])
    with pytest.raises(QueryError, match="more than the 1000 bytes"):
        keys.ask(2, "multi_set", [[(b"/a", b""), (b"/b", b"x" * 500)]])
    assert keys.ask(2, "check", [[b"/a"]]) == [(2, store_contents.NOT_READY)]


def test_no_reply_is_too_large(keys: StoreContents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_contents, "LONGEST", 100)
    monkeypatch.setattr(store_contents, "ELEMENTS", 10)
    keys.ask(1, "set", [b"/k", b"x" * 50])
    assert keys.ask(1, "multi_get", [[b"/k"] * 2]) == [(1, string(b"x" * 50) * 2)]
    with pytest.raises(QueryError, match="more than 10 strings or 100 bytes at once"):
        keys.ask(1, "multi_get", [[b"/k"] * 3])
    with pytest.raises(QueryError, match="more than 100 bytes"):
        keys.ask(1, "append", [b"/k", b"x" * 51])
    keys.ask(1, "multi_set", [[(b"%d" % each, b"") for each in range(10)]])
    with pytest.raises(QueryError, match="at once"):
        keys.ask(1, "list_keys", [])


def serve(client: Any) -> list[str]:
    """What the store tells while `client(reader, writer)` talks to it."""
    told: list[str] = []

    async def main() -> None:
        store = TorchStore("127.0.0.1", told.append)
        await store.start()
        try:
            reader, writer = await asyncio.open_connection(store.host, store.port)
            await asyncio.wait_for(client(reader, writer, told), 30)
            writer.close()
        finally:
            await store.close()

    asyncio.run(main())
    return told


def test_who_sends_something_else_is_cut_off_and_told_of() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, told: list[str]) -> None:
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert await reader.read(1) == b""

    (said,) = serve(client)
    assert "torch's store has closed a connection from 127.0.0.1:" in said


def test_who_floods_it_does_not_flood_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropped, "WINDOW", 1e9)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, told: list[str]) -> None:
        host, port = writer.get_extra_info("peername")[:2]
        key = b"\n" + b"x" * 10_000
        for _ in range(20):
            other_reader, other = await asyncio.open_connection(host, port)
            other.write(GREETING + query("set", key, b"no number") + query("add", key) + struct.pack("<q", 1))
            with contextlib.suppress(ConnectionError):
                assert await other_reader.read(1) == b""
            other.close()

    said = serve(client)
    assert len(said) == 10
    assert all("add('?xxx" in line and len(line) < 500 for line in said)


def test_queries_that_never_end_do_not_take_all_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who holds most of it goes, not who comes last."""
    monkeypatch.setattr(torch_store, "MOST", 6000)
    large, small = query("set", b"/k", b"x" * 2000), query("set", b"/l", b"x" * 800)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, told: list[str]) -> None:
        host, port = writer.get_extra_info("peername")[:2]
        for _ in range(2):  # what was refused, or has come to its end, takes no room any more
            writer.write(GREETING + PING + small[:-1])
            assert await reader.readexactly(4) == b"ping"
            other_reader, other = await asyncio.open_connection(host, port)
            other.write(GREETING + PING + large[:-1])
            assert await other_reader.readexactly(4) == b"ping"
            third_reader, third = await asyncio.open_connection(host, port)
            third.write(GREETING + PING + small[:-1])
            assert await third_reader.readexactly(4) == b"ping"
            with contextlib.suppress(ConnectionError):
                assert await other_reader.read(1) == b""
            other.close()
            for each_reader, each in ((reader, writer), (third_reader, third)):
                each.write(b"x" + query("delete_key", b"/l"))
                assert await each_reader.readexactly(8) == struct.pack("<q", 1)
            third.close()

    said = serve(client)
    assert len(said) == 2
    assert all("more than there is room for until it has come to its end" in line for line in said)


def test_a_query_has_to_come_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_store, "DEADLINE", 0.01)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, told: list[str]) -> None:
        writer.write(GREETING + query("set", b"/k", b"v") + query("get", b"/k")[:-1])
        with contextlib.suppress(ConnectionError):
            assert await reader.read(1) == b""

    (said,) = serve(client)
    assert "a query that has not come to its end in 0.01 s" in said


def test_who_says_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_store, "SILENT", 0.01)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, told: list[str]) -> None:
        with contextlib.suppress(ConnectionError):
            assert await reader.read(1) == b""

    (said,) = serve(client)
    assert "nothing for 0.01 s" in said


def test_connections_do_not_take_all_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks stays, and those go that ask nothing, or come last."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (6, 6))  # room for three
    told: list[str] = []

    async def opened(store: TorchStore, sent: bytes) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection(store.host, store.port)
        writer.write(sent)
        kept.append(writer)
        return reader

    async def client(store: TorchStore) -> None:
        asks = await opened(store, GREETING + PING)
        assert await asks.readexactly(4) == b"ping"
        silent = [await opened(store, b"") for _ in range(2)]
        second = await opened(store, GREETING + PING)
        assert await second.readexactly(4) == b"ping", "there is room for it"
        with contextlib.suppress(ConnectionError):
            assert await silent[0].read(1) == b""
        third = await opened(store, GREETING + PING)
        assert await third.readexactly(4) == b"ping"
        with contextlib.suppress(ConnectionError):
            assert await silent[1].read(1) == b""
        last = await opened(store, GREETING + PING)
        with contextlib.suppress(ConnectionError):
            assert await last.read(1) == b""
        kept[0].write(PING)
        assert await asks.readexactly(4) == b"ping"

    kept: list[asyncio.StreamWriter] = []
    asyncio.run(with_store(client, told))
    assert all("ulimit -n" in line for line in told)


async def with_store(client: Callable[[TorchStore], Awaitable[None]], told: list[str]) -> None:
    store = TorchStore("127.0.0.1", told.append)
    await store.start()
    try:
        await asyncio.wait_for(client(store), 60)
    finally:
        await store.close()


async def connect(store: TorchStore) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that takes little before it reads."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (store.host, store.port))
    return await asyncio.open_connection(sock=sock)


def test_who_does_not_read_is_not_answered_further() -> None:
    value, count, told = b"x" * (1 << 20), 40, list[str]()

    async def client(store: TorchStore) -> None:
        (reader, writer), (other_reader, other) = await connect(store), await connect(store)
        writer.write(GREETING + query("set", b"/k", value) + query("get", b"/k") * count + PING)
        other.write(GREETING)
        while not any(link.unread for link in store._links.values()):
            await asyncio.sleep(0.001)
        for _ in range(100):
            other.write(PING)
            assert await other_reader.readexactly(4) == b"ping"
        assert max(link.unread for link in store._links.values()) < 2 * len(value)
        for _ in range(count):
            assert await reader.readexactly(8 + len(value)) == string(value)
        assert await reader.readexactly(4) == b"ping"
        writer.close()
        other.close()

    asyncio.run(with_store(client, told))
    assert told == []


def test_unread_replies_of_many_do_not_take_all_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_store, "MOST", 40 << 20)
    told: list[str] = []

    async def client(store: TorchStore) -> None:
        clients = [await connect(store) for _ in range(5)]
        clients[0][1].write(GREETING + query("set", b"/k", b"x" * (16 << 20)) + PING)
        assert await clients[0][0].readexactly(4) == b"ping"
        for _, writer in clients[1:]:
            writer.write(GREETING + query("get", b"/k"))
        while not told:
            await asyncio.sleep(0.001)
        assert sum(link.unread for link in store._links.values()) <= 40 << 20
        clients[0][1].write(PING)
        assert await clients[0][0].readexactly(4) == b"ping"
        for _, writer in clients:
            writer.close()

    asyncio.run(with_store(client, told))
    assert all("until it has read it" in line for line in told)


def test_many_queries_of_one_do_not_keep_the_others_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_store, "SLICE", 0.0)
    seen = set[bytes]()

    async def client(store: TorchStore) -> None:
        reader, writer = await connect(store)
        writer.write(GREETING + (query("add", b"/k") + struct.pack("<q", 1)) * 200 + PING)
        answers = asyncio.ensure_future(reader.readexactly(200 * 8 + 4))
        while not answers.done():
            seen.add(store._keys._values.get(b"/k", b""))
            await asyncio.sleep(0)
        assert answers.result().endswith(struct.pack("<q", 200) + b"ping")
        writer.close()

    asyncio.run(with_store(client, []))
    assert len(seen) > 100


def test_nobody_waits_mutely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_store, "SLOW", 0.01)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, told: list[str]) -> None:
        key = LIFE + b"/default_pg/0//1//cpu//0/0"
        writer.write(GREETING + wait(key))
        while not told:
            await asyncio.sleep(0.001)
        writer.write(query("set", key, b""))
        assert await reader.readexactly(1) == store_contents.STOP_WAITING

    (said,) = serve(client)
    assert "'/life of replica 1, ab/default_pg/0//1//cpu//0/0', which nobody has set" in said
    assert "only with ranks of its own" in said
