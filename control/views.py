"""A view says who takes part in a job, and where the ranks are reached. The coordinator decides it; views are totally
ordered by their epoch."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import operator
from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from ftcomm.control import field_types as t
from ftcomm.control.limits import RANKS

Life = tuple[int, str]  # of a replica: (number, incarnation)


class Address(msgspec.Struct, frozen=True):
    """The place at which one rank can be reached: its listening port, and its shared-memory segment for ranks of the
    same host."""

    host: t.Name
    port: Annotated[int, Meta(ge=0, le=65535)]
    boot: t.Name  # the kernel's boot id: equal on both sides means the same running kernel
    pid: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
    segment: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]  # file descriptor of the segment in process `pid`
    nonce: t.Hex  # proves that an opened segment is the right one
    layout: t.Name = ""  # the layout of the segment, equal in all members of a group
    rack: t.Name = ""  # FTCOMM_RACK: a label for the place of the host
    tuning: t.Name = ""  # the digest and the source of the switch points, equal as well
    arithmetic: t.Name = ""  # equal on both sides means the same bits for the same inputs; "" is equal to nothing
    network: t.Name = ""  # the network namespace, in which a port is one port; "" is equal to nothing
    pids: t.Name = ""  # the process namespace, in which a pid is one process; "" is equal to nothing

    @property
    def ports(self) -> str:
        """Names the ports that a process sees: equal in one network namespace of a kernel. "" is equal to nothing."""
        return f"{self.boot} {self.network}" if self.network else ""

    @property
    def processes(self) -> str:
        """Names the processes that a process sees: equal where they have the same pids. "" is equal to nothing."""
        return f"{self.boot} {self.pids}" if self.pids else ""


_TEXTS = ("host", "boot", "layout", "rack", "tuning", "arithmetic", "network", "pids")
_texts = operator.attrgetter(*_TEXTS)
_NONCE = 16  # bytes

_Index = Annotated[int, Meta(ge=0, le=8 * RANKS)]
_Site = Annotated[tuple[_Index, ...], Meta(min_length=1 + len(_TEXTS), max_length=1 + len(_TEXTS))]


class Addresses(msgspec.Struct, frozen=True, array_like=True):
    """The addresses of consecutive ranks of one replica, from rank `first` on: of all, or of those that concern the
    process that holds it. `addresses[i]` is that of rank i.

    It stays as it was sent, in 26 bytes a rank and what the ranks of a host have in common: nothing is made of an
    address before somebody asks for it, so a job of 100,000 ranks costs its coordinator a few megabytes.
    """

    first: t.Shard
    texts: Annotated[tuple[t.Name, ...], Meta(max_length=len(_TEXTS) * RANKS)]  # each once
    # One for each run of ranks with the same texts: how many ranks there are up to its end, and which texts they have.
    sites: Annotated[tuple[_Site, ...], Meta(max_length=RANKS)]
    ports: Annotated[bytes, Meta(max_length=2 * RANKS)]  # the numbers are little-endian
    pids: Annotated[bytes, Meta(max_length=4 * RANKS)]
    segments: Annotated[bytes, Meta(max_length=4 * RANKS)]
    nonces: Annotated[bytes, Meta(max_length=_NONCE * RANKS)]

    def __post_init__(self) -> None:
        count = len(self.nonces) // _NONCE
        sizes = len(self.ports), len(self.pids), len(self.segments), len(self.nonces)
        end, known, rising = 0, len(self.texts), True
        for site in self.sites:
            rising, end = rising and end < site[0], site[0]
        if sizes != (2 * count, 4 * count, 4 * count, _NONCE * count) or not rising or end != count:
            ends = [site[0] for site in self.sites]
            raise ValueError(
                f"a table of {count} addresses whose columns have {sizes} bytes and whose sites end at {ends}"
            )
        if any(max(site[1:]) >= known for site in self.sites):
            raise ValueError(f"an address names a text beyond the {len(self.texts)} of its table")
        if max(self.pids[3::4], default=0) > 127 or max(self.segments[3::4], default=0) > 127:
            raise ValueError("an address with the number of a process, or of its segment, above 2,147,483,647")

    @classmethod
    def of(cls, addresses: Iterable[Address], first: int = 0) -> Addresses:
        """The table of `addresses`, of the ranks from `first` on."""
        known: dict[str, int] = {}
        sites: list[tuple[int, ...]] = []
        ranks = tuple(addresses)
        for texts, alike in itertools.groupby(ranks, _texts):
            end = (sites[-1][0] if sites else 0) + sum(1 for _ in alike)
            sites.append((end, *[known.setdefault(text, len(known)) for text in texts]))
        return cls(
            first,
            tuple(known),
            tuple(sites),
            b"".join(rank.port.to_bytes(2, "little") for rank in ranks),
            b"".join(rank.pid.to_bytes(4, "little") for rank in ranks),
            b"".join(rank.segment.to_bytes(4, "little") for rank in ranks),
            b"".join(bytes.fromhex(rank.nonce) for rank in ranks),
        )

    def __len__(self) -> int:
        return len(self.nonces) // _NONCE

    def __contains__(self, address: object) -> bool:
        return any(address == known for known in self)

    def has(self, shard: int) -> bool:
        """Whether the address of `shard` is here."""
        return 0 <= shard - self.first < len(self)

    def __getitem__(self, shard: int) -> Address:
        """Raises `IndexError` if the address of that rank is not here."""
        if not self.has(shard):
            raise IndexError(f"the address of shard {shard}, in a table of {len(self)} from shard {self.first} on")
        at = shard - self.first
        return self._at(at, self.sites[bisect.bisect_right(self.sites, at, key=_end)])

    def __iter__(self) -> Iterator[Address]:
        begins = 0
        for site in self.sites:
            for at in range(begins, site[0]):
                yield self._at(at, site)
            begins = site[0]

    def _at(self, at: int, site: tuple[int, ...]) -> Address:
        host, boot, *others = (self.texts[text] for text in site[1:])
        return Address(
            host,
            int.from_bytes(self.ports[2 * at : 2 * at + 2], "little"),
            boot,
            int.from_bytes(self.pids[4 * at : 4 * at + 4], "little"),
            int.from_bytes(self.segments[4 * at : 4 * at + 4], "little"),
            self.nonces[_NONCE * at : _NONCE * (at + 1)].hex(),
            *others,
        )

    def part(self, first: int, count: int) -> Addresses:
        """Returns the part of it with `count` ranks from `first` on, as far as they are here."""
        end = min(first + count, self.first + len(self))
        first = max(first, self.first)
        if (first, end) == (self.first, self.first + len(self)):
            return self
        begins, ends = first - self.first, max(end, first) - self.first
        known: dict[int, int] = {}  # what a text of this table is in the part
        sites = []
        for at in range(bisect.bisect_right(self.sites, (begins, len(self.texts))), len(self.sites)):
            if begins >= ends or (at and self.sites[at - 1][0] >= ends):
                break
            site = self.sites[at]
            sites.append((min(site[0], ends) - begins, *[known.setdefault(text, len(known)) for text in site[1:]]))
        return Addresses(
            first,
            tuple([self.texts[text] for text in known]),
            tuple(sites),
            self.ports[2 * begins : 2 * ends],
            self.pids[4 * begins : 4 * ends],
            self.segments[4 * begins : 4 * ends],
            self.nonces[_NONCE * begins : _NONCE * ends],
        )


def _end(site: tuple[int, ...]) -> int:
    return site[0]


NO_ADDRESSES = Addresses.of(())


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A replica in a view. `incarnation` tells a restarted replica from its dead predecessor."""

    replica: t.ReplicaNumber
    incarnation: t.Name
    ranks: Addresses
    contributing: bool


class View(msgspec.Struct, frozen=True):
    """The members of a job, from the epoch on. With `proposal` 0 the view is in force at once: it is the first one, or
    follows a loss. Otherwise the members have agreed on it under that number, and it is in force from the boundary of
    `step` on. A member that has not run yet starts with `step`."""

    epoch: t.Epoch
    step: t.Step | None
    members: Annotated[tuple[Member, ...], t.MANY]  # ascending by replica
    why: t.Text = ""
    proposal: t.ProposalNumber = 0

    def __post_init__(self) -> None:
        if any(one.replica >= next_.replica for one, next_ in itertools.pairwise(self.members)):
            raise ValueError(f"the members of a view are {self.replicas}, expected in ascending order")

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(m.replica for m in self.members)

    @property
    def contributing(self) -> frozenset[int]:
        return frozenset(m.replica for m in self.members if m.contributing)

    def member(self, replica: int) -> Member | None:
        at = bisect.bisect_left(self.members, replica, key=_number)
        return self.members[at] if at < len(self.members) and self.members[at].replica == replica else None

    def bare(self) -> View:
        """Returns the view without addresses, for one who knows them or needs none."""
        members = (msgspec.structs.replace(member, ranks=NO_ADDRESSES) for member in self.members)
        return msgspec.structs.replace(self, members=tuple(members))

    def digest(self) -> bytes:
        """Returns what tells this view from any other: the same for all, whichever addresses they know."""
        return hashlib.blake2b(_encoder.encode(self.bare()), digest_size=t.DIGEST).digest()

    def has(self, replica: int, incarnation: str) -> bool:
        member = self.member(replica)
        return member is not None and member.incarnation == incarnation


_encoder = msgspec.msgpack.Encoder()


def _number(member: Member) -> int:
    return member.replica
