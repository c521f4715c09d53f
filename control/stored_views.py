"""Views as etcd keeps them, whose values are small: a view names the table of addresses of each member by its digest,
and the table lies beside it in shards. Pure.

    PREFIX/ranks/DIGEST/EPOCH/N    shard N of the table (`Addresses` in msgpack) with that digest

A table is that of one life of a replica, so it is written once, before the view of EPOCH, whatever later views that
life is in. One that was removed and is needed again has another place, so what comes late can do it no harm.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from ftcomm.control import field_types as t
from ftcomm.control.decode import decode_with
from ftcomm.control.views import Addresses, Member, View

SHARD = 1 << 19  # bytes of the longest one


class StoredMember(msgspec.Struct, frozen=True):
    replica: t.ReplicaNumber
    incarnation: t.Name
    contributing: bool
    table: t.Hex  # digest
    since: t.Epoch  # of the view before which the table was written
    shards: Annotated[int, Meta(ge=1, le=1 << 12)]


class StoredView(msgspec.Struct, frozen=True):
    epoch: t.Epoch
    step: t.Step | None
    members: Annotated[tuple[StoredMember, ...], t.MANY]
    why: t.Text = ""
    proposal: t.ProposalNumber = 0

    def __post_init__(self) -> None:
        if any(one.replica >= next_.replica for one, next_ in itertools.pairwise(self.members)):
            raise ValueError("the members of a view are not in ascending order")

    @property
    def tables(self) -> dict[str, int]:
        """The digests of the tables of its members, and the epochs since which these are there."""
        return {member.table: member.since for member in self.members}

    def keys(self, prefix: str) -> list[str]:
        """The keys of all shards of these tables."""
        shards = ((x, number) for x in self.members for number in range(x.shards))
        return [key(prefix, member.table, member.since, number) for member, number in shards]


class IncompleteTable(ValueError):
    """The addresses of a member are not there as they were written."""


_VIEW = msgspec.json.Decoder(StoredView)
_TABLE = msgspec.msgpack.Decoder(Addresses)
_encoder = msgspec.msgpack.Encoder()


def divided(view: View, size: int, known: Mapping[str, int]) -> tuple[StoredView, dict[str, bytes]]:
    """Returns what is stored of a view, and its tables by their digests; in shards of `size` bytes. `known` are the
    tables that are there, with the epochs since which they are."""
    tables: dict[str, bytes] = {}
    members = []
    for member in view.members:
        table = _encoder.encode(member.ranks)
        digest = _digest(table)
        tables[digest] = table
        where = digest, known.get(digest, view.epoch), -(-len(table) // size)
        members.append(StoredMember(member.replica, member.incarnation, member.contributing, *where))
    return StoredView(view.epoch, view.step, tuple(members), view.why, view.proposal), tables


def shards_of(table: bytes, size: int) -> Iterator[bytes]:
    return (table[at : at + size] for at in range(0, len(table), size))


def decoded(value: bytes) -> StoredView:
    """Decodes the value of a view. Raises `msgspec.DecodeError`."""
    view: StoredView = decode_with(_VIEW, value)
    return view


def joined(stored: StoredView, prefix: str, values: Mapping[str, bytes]) -> View:
    """Returns the whole view, from the values of the keys of its shards. Raises `IncompleteTable`."""
    members = tuple(
        Member(member.replica, member.incarnation, _table(stored.epoch, member, prefix, values), member.contributing)
        for member in stored.members
    )
    return View(stored.epoch, stored.step, members, stored.why, stored.proposal)


def _table(epoch: int, member: StoredMember, prefix: str, values: Mapping[str, bytes]) -> Addresses:
    keys = [key(prefix, member.table, member.since, number) for number in range(member.shards)]
    what = f"the addresses of replica {member.replica} in the view of epoch {epoch}"
    missing = [name for name in keys if name not in values]
    if missing:
        raise IncompleteTable(f"{what} are not whole: {missing[0]} is missing")
    table = b"".join(values[name] for name in keys)
    if _digest(table) != member.table:
        raise IncompleteTable(f"{what} are not those that were written: their digest is not {member.table}")
    try:
        ranks: Addresses = decode_with(_TABLE, table)
    except msgspec.DecodeError as error:
        raise IncompleteTable(f"{what} are not of this version: {error}") from None
    return ranks


def _digest(table: bytes) -> str:
    return hashlib.blake2b(table, digest_size=t.DIGEST).hexdigest()


def folder(prefix: str, digest: str, since: int) -> str:
    return f"{prefix}/ranks/{digest}/{since}"


def key(prefix: str, digest: str, since: int, number: int) -> str:
    return f"{folder(prefix, digest, since)}/{number}"


def folder_of(prefix: str, name: str) -> str | None:
    """Returns the folder of the table that the key `name` has a shard of; None if it is no such key."""
    found = re.fullmatch(rf"({re.escape(prefix)}/ranks/[0-9a-f]{{32}}/[0-9]+)/[0-9]+", name)
    return found[1] if found else None
