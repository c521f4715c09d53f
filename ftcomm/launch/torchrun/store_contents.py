"""The contents of torch's store, and the requests of its clients. Pure: bytes in, bytes out.

A replica that comes back finds the keys of its former life, and of the others' groups, which never change. So it meets
under a prefix of its life (`LIFE`): the groups that its ranks make among each other begin anew. A script's own keys are
those of the job in any life.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Collection, Generator
from typing import Any

from ftcomm.control.dropped import printable

LIFE = "life of replica"  # begins the prefix under which a replica meets that came into a running job
LONGEST = 64 << 20  # bytes of the strings of a query, or of a reply, or of a value
ELEMENTS = 1 << 16  # strings, or pairs of them, of a query; strings of a reply
EACH = 200  # bytes that a string takes at most besides its own
MOST = 256 << 20  # bytes of all that is stored; of all queries that have not come to their end; of all unread replies

# What a client asks, by the number that it sends first, and what follows that:
# s: a string, i: an integer, n: 32 bits, S: strings, P: pairs of them.
QUERIES = (
    ("validate", "n"),
    ("set", "ss"),
    ("compare_set", "sss"),
    ("get", "s"),
    ("add", "si"),
    ("check", "S"),
    ("wait", "S"),
    ("num_keys", ""),
    ("delete_key", "s"),
    ("append", "ss"),
    ("multi_get", "S"),
    ("multi_set", "P"),
    ("cancel_wait", ""),
    ("ping", "n"),
    ("queue_push", "ss"),
    ("queue_pop", "s"),
    ("queue_len", "s"),
    ("list_keys", ""),
)
MAGIC = 0x3C85F7CE  # of `validate`, the first query of a connection
READY, NOT_READY = b"\x00", b"\x01"  # in answer to `check`
STOP_WAITING, WAIT_CANCELED = b"\x00", b"\x01"  # to `wait` and `cancel_wait`

_NUMBER = struct.Struct("<q")
_SHORT = struct.Struct("<I")
LIFE_PREFIX = b"/%s " % LIFE.encode()
_GROUP = b"/default_pg/"

Query = tuple[str, list[Any]]  # its name, its fields
StoreReply = tuple[int, bytes]  # to the connection of that number


class QueryError(ValueError):
    """A connection sends something else than a known query."""


class Parser:
    """Parses the queries of one connection, which come in any pieces. It looks at no byte twice."""

    def __init__(self) -> None:
        self._data = bytearray()  # not parsed yet
        self._begin()

    def _begin(self) -> None:
        self._query = _query()
        self._needs = next(self._query)
        self._taken = 0  # bytes that the parsed part of the query takes

    @property
    def held(self) -> int:
        """The bytes that it holds; 0 after the end of a query that nothing follows."""
        return self._taken + len(self._data)

    def feed(self, data: bytes) -> None:
        self._data += data

    def next(self) -> Query | None:
        """Returns the next query; None if more has to come. Raises `QueryError`."""
        at = 0
        try:
            while len(self._data) >= at + self._needs:
                piece = bytes(self._data[at : at + self._needs])
                at += self._needs
                self._taken += self._needs + EACH
                self._needs = self._query.send(piece)
        except StopIteration as end:
            self._begin()
            query: Query = end.value
            return query
        finally:
            del self._data[:at]
        return None


def _query() -> Generator[int, bytes, Query]:
    """Parses one query: yields how many bytes it needs next, and is sent these. Raises `QueryError`."""
    (which,) = yield 1
    if which >= len(QUERIES):
        raise QueryError(f"query {which}, which it does not know; is this torch newer than ftcomm?")
    name, what = QUERIES[which]
    room = LONGEST

    def number() -> Generator[int, bytes, int]:
        return int(_NUMBER.unpack((yield _NUMBER.size))[0])

    def count() -> Generator[int, bytes, int]:
        found = yield from number()
        if not 0 <= found <= ELEMENTS:
            raise QueryError(f"{name} of {found} keys; at most {ELEMENTS} are taken")
        return found

    def string() -> Generator[int, bytes, bytes]:
        nonlocal room
        size = yield from number()
        if not 0 <= size <= LONGEST:
            raise QueryError(f"a string of {size} bytes; at most {LONGEST} are taken")
        room -= size
        if room < 0:
            raise QueryError(f"a query of more than {LONGEST} bytes")
        return (yield size)

    fields: list[Any] = []
    for kind in what:
        if kind == "n":
            fields.append(_SHORT.unpack((yield _SHORT.size))[0])
        elif kind == "i":
            fields.append((yield from number()))
        elif kind == "s":
            fields.append((yield from string()))
        else:
            several: list[Any] = []
            for _ in range((yield from count())):
                one = yield from string()
                several.append(one if kind == "S" else (one, (yield from string())))
            fields.append(several)
    return name, fields


class StoreContents:
    """The content of the store, and what connections wait for. Queries in, replies out; a connection is a number."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        self._missing: dict[int, set[bytes]] = {}  # connection -> the keys that it waits for
        self._waiting: dict[bytes, set[int]] = {}  # key -> the connections that wait for it
        self._size = 0  # bytes that all of these take
        self._valid: set[int] = set()

    def ask(self, connection: int, name: str, fields: list[Any]) -> list[StoreReply]:
        """Returns what is to be sent now. Raises `QueryError` if nothing more can be said to this connection."""
        if name != "validate" and connection not in self._valid:
            raise QueryError("no greeting of torch's store")
        replies: list[StoreReply] = getattr(self, f"_{name}")(connection, *fields)
        return replies

    def gone(self, connection: int) -> None:
        """Note that a connection has ended."""
        self._wait_no_more(connection)
        self._valid.discard(connection)

    def waits_for(self, connection: int) -> list[bytes]:
        return sorted(self._missing.get(connection, ()))

    def _validate(self, connection: int, magic: int) -> list[StoreReply]:
        if magic != MAGIC:
            raise QueryError("the greeting of something else")
        self._valid.add(connection)
        return []

    def _ping(self, connection: int, nonce: int) -> list[StoreReply]:
        return [(connection, _SHORT.pack(nonce))]

    def _set(self, connection: int, key: bytes, value: bytes) -> list[StoreReply]:
        return self._put({_home(key): value})

    def _multi_set(self, connection: int, pairs: list[tuple[bytes, bytes]]) -> list[StoreReply]:
        return self._put({_home(key): value for key, value in pairs})

    def _append(self, connection: int, key: bytes, value: bytes) -> list[StoreReply]:
        key = _home(key)
        old = self._values.get(key, b"")
        if len(old) + len(value) > LONGEST:
            raise QueryError(f"append({shown(key)}) to more than {LONGEST} bytes")
        return self._put({key: old + value})

    def _add(self, connection: int, key: bytes, more: int) -> list[StoreReply]:
        key = _home(key)
        try:
            total = int(self._values.get(key, b"0")) + more
            answer = _NUMBER.pack(total)
        except (ValueError, struct.error):
            raise QueryError(f"add({shown(key)}), whose value is no number") from None
        return [(connection, answer), *self._put({key: b"%d" % total})]

    def _compare_set(self, connection: int, key: bytes, expected: bytes, desired: bytes) -> list[StoreReply]:
        key = _home(key)
        replies = []
        if self._values.get(key, b"") == expected:
            replies = self._put({key: desired})
        return [(connection, _string(self._values.get(key, expected))), *replies]

    def _get(self, connection: int, key: bytes) -> list[StoreReply]:
        return [(connection, _string(self._values.get(_home(key), b"")))]

    def _multi_get(self, connection: int, keys: list[bytes]) -> list[StoreReply]:
        return [(connection, _strings([self._values.get(_home(key), b"") for key in keys]))]

    def _check(self, connection: int, keys: list[bytes]) -> list[StoreReply]:
        return [(connection, NOT_READY if self._absent(keys) else READY)]

    def _wait(self, connection: int, keys: list[bytes]) -> list[StoreReply]:
        self._wait_no_more(connection)
        if missing := self._absent(keys):
            self._grow(sum(map(_cost_of_wait, missing)))
            self._missing[connection] = missing
            for key in missing:
                self._waiting.setdefault(key, set()).add(connection)
            return []
        return [(connection, STOP_WAITING)]

    def _cancel_wait(self, connection: int) -> list[StoreReply]:
        self._wait_no_more(connection)  # also if it was told meanwhile that it need not wait: it reads both
        return [(connection, WAIT_CANCELED)]

    def _num_keys(self, connection: int) -> list[StoreReply]:
        return [(connection, _NUMBER.pack(len(self._values)))]

    def _list_keys(self, connection: int) -> list[StoreReply]:
        return [(connection, _NUMBER.pack(len(self._values)) + _strings(self._values))]

    def _delete_key(self, connection: int, key: bytes) -> list[StoreReply]:
        value = self._values.pop(_home(key), None)
        if value is not None:
            self._size -= _cost(_home(key), value)
        return [(connection, _NUMBER.pack(value is not None))]

    def _queue_push(self, connection: int, key: bytes, value: bytes) -> list[StoreReply]:
        key = _home(key)
        self._grow(_cost(key, value))
        self._queues.setdefault(key, deque()).append(value)
        return self._here(key)

    def _queue_pop(self, connection: int, key: bytes) -> list[StoreReply]:
        queue = self._queues.get(_home(key))
        if queue is None:
            return [(connection, _NUMBER.pack(0))]
        value = queue.popleft()
        self._size -= _cost(_home(key), value)
        if not queue:
            del self._queues[_home(key)]
        return [(connection, _NUMBER.pack(1) + _string(value))]

    def _queue_len(self, connection: int, key: bytes) -> list[StoreReply]:
        return [(connection, _NUMBER.pack(len(self._queues.get(_home(key), ()))))]

    def _put(self, new: dict[bytes, bytes]) -> list[StoreReply]:
        old = sum(_cost(key, self._values[key]) for key in new if key in self._values)
        self._grow(sum(_cost(*each) for each in new.items()) - old)
        self._values.update(new)
        return [reply for key in new for reply in self._here(key)]

    def _grow(self, size: int) -> None:
        if self._size + size > MOST:
            raise QueryError(f"more than the {MOST} bytes that it holds")
        self._size += size

    def _here(self, key: bytes) -> list[StoreReply]:
        """Serve the connections that waited for `key` alone."""
        served = []
        for connection in self._waiting.pop(key, ()):
            self._size -= _cost_of_wait(key)
            self._missing[connection].discard(key)
            if not self._missing[connection]:
                del self._missing[connection]
                served.append(connection)
        return [(connection, STOP_WAITING) for connection in served]

    def _wait_no_more(self, connection: int) -> None:
        for key in self._missing.pop(connection, ()):
            self._size -= _cost_of_wait(key)
            self._waiting[key].discard(connection)
            if not self._waiting[key]:
                del self._waiting[key]

    def _absent(self, keys: list[bytes]) -> set[bytes]:
        return {key for key in map(_home, keys) if key not in self._values and key not in self._queues}


def shown(key: bytes) -> str:
    """Returns `key` for a line of a log, shortened."""
    return repr(printable(key[:201].decode(errors="replace"), 200))


def _string(data: bytes) -> bytes:
    return _NUMBER.pack(len(data)) + data


def _strings(several: Collection[bytes]) -> bytes:
    """Returns the strings of one reply. Raises `QueryError`."""
    if len(several) > ELEMENTS or sum(map(len, several)) > LONGEST:
        raise QueryError(f"a query for more than {ELEMENTS} strings or {LONGEST} bytes at once")
    return b"".join(map(_string, several))


def _cost(key: bytes, value: bytes) -> int:
    """The bytes that an entry takes."""
    return len(key) + len(value) + EACH


def _cost_of_wait(key: bytes) -> int:
    """The bytes that a key takes for which one connection waits: it is in two sets."""
    return len(key) + 2 * EACH


def _home(key: bytes) -> bytes:
    """Returns the key under which `key` lies: a script's own keys are those of the job, in any life of its replica.

    torch puts a "/" before a key, the name of a group before the group's, and two slashes between that and what is
    below."""
    at = key.find(b"/", len(LIFE_PREFIX))
    if not (key.startswith(LIFE_PREFIX) and key.startswith(_GROUP, at)):
        return key
    group, below, name = key[at + len(_GROUP) :].partition(b"//")
    return key[at:] if below and b"/" not in group and b"//" not in name else key
