"""Views in etcd: one coordinator at a time decides for a job, on any host, and another can take over.

    PREFIX/owner    the owner, on a lease that it keeps alive: it is gone within seconds after the owner stops
    PREFIX/term     put anew by each new owner, and never removed by one that goes: its revision is the number of a term
    PREFIX/view/0   the last view of an even epoch, in JSON, and
    PREFIX/view/1   that of an odd one: overwritten, so that no job grows
    PREFIX/finished the members of those views that have finished (`ftcomm.control.finishes`); not there in a store of a
                    version that wrote none
    PREFIX/ranks/   the addresses of their members, in shards (`ftcomm.control.stored_views`): written before the first
                    view that needs them, and removed after the last one

A coordinator that is stopped, and wakes up after another one has taken over, can do no harm, for two reasons:

- A transaction writes a view, a shard, or who has finished, only if the owner's key is still the one that the writer
  made, in this term and on this lease, and what it replaces is what it knows: both views, or who had finished. A write
  that comes late, or a second time, changes nothing.
- What needs no view (the refusal of a replica, say) is decided only while the lease is known to be alive. A clock that
  runs on while the host is suspended counts that from the last request, less a tenth for clocks that differ.

An owner that does not know this any more (`doubt`) gives everything up and asks for a new term. It gets one if no other
had the job meanwhile, as after an hour without etcd; otherwise `acquire` raises, with the name of the owner.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from ftcomm.control import etcd, stored_views
from ftcomm.control.decode import decode_with
from ftcomm.control.finishes import NO_FINISHES, Finishes
from ftcomm.control.store import JobOver, Store, StoreError
from ftcomm.control.views import View

AnswerT = TypeVar("AnswerT")

SHORTEST = 2  # s of the shortest lease of etcd
ANSWER_TIMEOUT = 10.0  # s for an etcd that does not answer at the start or at the end
PAUSE = 0.25  # s between two attempts
MOST = 128  # operations that etcd allows in a transaction
MAX_NAME = 256  # characters of the name of a job, as of a `Name` in field_types
LATE = 3.0  # s that a busy etcd may be late to end a lease
REQUESTS, BEATS = 0, 1  # the two threads, so that the lease never waits


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Record(msgspec.Struct, frozen=True):
    """A coordinator, as others see it."""

    id: str
    host: str
    port: int
    pid: int
    lease: int  # s

    def __str__(self) -> str:
        return f"the coordinator on {self.host}, port {self.port} (process {self.pid})"


_RECORD = msgspec.json.Decoder(Record)
_FINISHES = msgspec.json.Decoder(Finishes)


class EtcdStore(Store):
    """The store in etcd. Another coordinator may take over `lease` seconds after an owner has stopped. `standby`: wait
    for that for as long as it takes. All methods belong to one event loop, which never waits for etcd: requests go out
    in threads."""

    def __init__(self, place: etcd.EtcdPlace, port: int, lease: float, standby: bool = False) -> None:
        self.name, self._standby = str(place), standby
        self.views = []
        self._shard = min(stored_views.SHARD, place.request // 2)  # bytes
        self._stored: dict[str, stored_views.StoredView] = {}  # the last two views, by their keys
        self._needless: set[str] = set()  # folders of tables, maybe in part, that no view needs
        self._prefix = place.prefix
        self._owner, self._term = f"{place.prefix}/owner", f"{place.prefix}/term"
        self._finished = f"{place.prefix}/finished"
        seconds = max(SHORTEST, round(lease))
        self._me = Record(secrets.token_hex(8), socket.gethostname(), port, os.getpid(), seconds)
        self._etcd, self._beats = etcd.Etcd(place, max(0.5, seconds / 4)), etcd.Etcd(place, max(0.5, seconds / 4))
        self._threads = [
            concurrent.futures.ThreadPoolExecutor(1, f"ftcomm-etcd-{what}") for what in ("requests", "beats")
        ]
        self._lease = 0
        self._until = float("-inf")  # until then no other can be the owner
        self._number = self._made = 0  # revisions of our term, and of our key as the owner
        self._written = [0, 0]  # revisions of the two views
        self._finishes_written = 0  # revision of who has finished
        self._revisions: list[int] = []  # of etcd, when it was asked the last two times
        self._doubt = asyncio.Event()
        self._keep_task: asyncio.Task[None] | None = None
        self._unheard: set[int] = set()  # threads whose last request got no answer

    def job(self) -> str:
        return self._prefix.strip("/")[-MAX_NAME:]

    # -- to own ------------------------------------------------------------------------------------------------

    @property
    def sure(self) -> bool:
        return not self._doubt.is_set() and now() < self._until

    async def doubt(self) -> None:
        await self._doubt.wait()

    async def acquire(self) -> None:
        """Become the owner. Raises `StoreError`: another one has the job, has taken it over or has ended it, or (at the
        start) etcd does not answer. Without `standby` an owner that may have died is given the time of its lease."""
        if self._keep_task is not None:
            self._keep_task.cancel()
        self._until = float("-inf")
        self._unheard = {REQUESTS} if self._unheard else set()
        began = now()
        since = began  # when we first saw the present owner
        met: Record | None = None
        while True:
            looked = now()
            try:
                there = await self._attempt(met)
            except etcd.EtcdAway as away:
                if not self._number and met is None and now() - began > ANSWER_TIMEOUT:
                    raise StoreError(f"etcd cannot be used ({away}). {_mend(self.name)}") from None
                await asyncio.sleep(PAUSE)
                continue
            if there is None:
                break
            owner, term = there
            if owner is not None and owner != met:
                met, since = owner, now()
                wait = (
                    "takes over when it is gone" if self._standby else f"looks for {owner.lease + LATE:g} s if it lives"
                )
                self.tell(f"{owner} has the job {self._prefix}; this one {wait}")
            elif owner is None and term is None and met is not None:
                self._look_back()
                raise JobOver(f"{met} has ended the job {self._prefix}; there is nothing left to take over")
            if met is not None and owner == met and not self._standby and looked - since > owner.lease + LATE:
                raise StoreError(
                    f"{owner} has the job {self._prefix}; two of one job must not run. Stop that one, let this one "
                    "wait for its end with --standby, or give this job another name in --store"
                )
            await asyncio.sleep(PAUSE)
        self._doubt.clear()
        self._keep_task = asyncio.ensure_future(self._keep())

    async def _attempt(self, met: Record | None) -> tuple[Record | None, Record | None] | None:
        """Try once to become the owner: None if we are. Otherwise returns the owner and the holder of the last term, if
        there are such. Raises `StoreError` if the term was ours and has become another's."""
        if self._lease:  # an earlier term, or an attempt without an answer, left it
            await self._ask(self._etcd.revoke, self._lease)
            self._lease = 0
        number = self._number  # the last term, as we know it
        if not number:
            answer = await self._ask(self._etcd.txn, [], self._looks(), [])
            self._revisions, found = [*self._revisions[-1:], answer.revision], answer.found()
            if self._owner in found or (met is not None and self._term not in found):
                return self._who(found, self._owner), self._who(found, self._term)
            number = found[self._term].mod_revision if self._term in found else 0
        asked = now()
        self._lease, seconds = await self._ask(self._etcd.grant, self._me.lease)
        record = msgspec.json.encode(self._me)
        free = [etcd.created(self._owner, 0), etcd.modified(self._term, number)]
        take = [etcd.put(self._owner, record, self._lease), etcd.put(self._term, record), *self._looks()]
        answer = await self._ask(self._etcd.txn, free, take, self._looks())
        found = answer.found()
        if answer.succeeded:
            self._number = self._made = answer.revision
            await self._read(found)
            self._until = asked + 0.9 * seconds
            return None
        owner, term = self._who(found, self._owner), self._who(found, self._term)
        if term == self._me:  # an earlier attempt did it, whose answer was lost
            self._number = found[self._term].mod_revision
        elif self._number:
            said = f"etcd has not heard this coordinator for its lease of {self._me.lease} s, and"
            if owner is None and term is None:
                self._revisions = [self._number, answer.revision]
                self._look_back()
                raise JobOver(f"{said} the job {self._prefix} was ended by another one")
            raise StoreError(
                f"{said} {owner or term} has taken the job {self._prefix} over; this one decides nothing any more"
            )
        return owner, term

    def _look_back(self) -> None:
        """Tell an etcd that has lost the job from one in which somebody has ended it: its revisions have gone back.
        Raises `StoreError`."""
        before, after = self._revisions[0], self._revisions[-1]
        if after < before:
            raise StoreError(
                f"etcd has lost the job {self._prefix}: it is at revision {after} and was at {before}, so its data "
                "were removed or an old backup was restored. The job goes on without a coordinator; restore what etcd "
                "had, or start a coordinator with another name in --store once the job has ended"
            )

    def _who(self, found: dict[str, etcd.Entry], key: str) -> Record | None:
        try:
            return decode_with(_RECORD, found[key].value) if key in found else None
        except msgspec.DecodeError as error:
            raise StoreError(f"{key} in etcd is nothing of ftcomm ({error}); choose another name in --store") from None

    def _looks(self) -> list[etcd.Json]:
        return [etcd.get(key) for key in (self._owner, self._term, self._finished, *self._view_keys)]

    @property
    def _view_keys(self) -> list[str]:
        return [f"{self._prefix}/view/{parity}" for parity in (0, 1)]

    async def _read(self, found: dict[str, etcd.Entry]) -> None:
        """Read the views that were found, with their tables, which only the owner, this coordinator, may write. Raises
        `StoreError` if a view is not whole."""
        self._written = [found[key].mod_revision if key in found else 0 for key in self._view_keys]
        self._finishes_written = found[self._finished].mod_revision if self._finished in found else 0
        begun = [found[key].create_revision for key in self._view_keys if key in found]
        # What is older than the job is of an earlier one, cleared by a version that knew of no finishes.
        of_the_job = bool(begun) and self._finishes_written > min(begun)
        try:
            self.finishes = decode_with(_FINISHES, found[self._finished].value) if of_the_job else NO_FINISHES
            self._stored = {key: stored_views.decoded(found[key].value) for key in self._view_keys if key in found}
        except msgspec.DecodeError as error:
            raise StoreError(
                f"{self._prefix} in etcd holds no views of this version ({error}); choose another name in --store"
            ) from None
        views = sorted(self._stored.values(), key=lambda view: view.epoch)
        shards: dict[str, bytes] = {}
        for key in dict.fromkeys(key for view in views for key in view.keys(self._prefix)):
            there = (await self._ask(self._etcd.txn, [], [etcd.get(key)], [])).found()  # one, so no answer is large
            shards.update((key, entry.value) for key, entry in there.items())
        try:
            self.views = [stored_views.joined(view, self._prefix, shards) for view in views]
        except stored_views.IncompleteTable as error:
            raise StoreError(
                f"{self._prefix} in etcd: {error}. Somebody else has changed it; restore what etcd had, or start a "
                "coordinator with another name in --store once the job has ended, which goes on without a coordinator"
            ) from None
        names = (await self._ask(self._etcd.txn, [], [etcd.get_names(f"{self._prefix}/ranks")], [])).found()
        self._needless = {*filter(None, (stored_views.folder_of(self._prefix, key) for key in names))}
        self._needless -= self._folders(self._stored.values())

    def _folders(self, views: Iterable[stored_views.StoredView]) -> set[str]:
        return {stored_views.folder(self._prefix, *table) for view in views for table in view.tables.items()}

    async def _keep(self) -> None:
        """Keep the lease alive until that is in doubt."""
        while now() < self._until:
            asked = now()
            try:
                seconds = await self._ask(self._beats.keep_alive, self._lease)
            except (etcd.EtcdAway, etcd.EtcdRefused):
                pass
            else:
                if not seconds or now() >= self._until:  # not sure for a moment, in which decisions were not sent
                    break
                self._until = asked + 0.9 * seconds
            await asyncio.sleep(self._me.lease / 5)
        self._doubt.set()

    # -- to write ----------------------------------------------------------------------------------------------

    def append(self, view: View) -> asyncio.Future[None]:
        return asyncio.ensure_future(self._append(view))

    async def _append(self, view: View) -> None:
        """Append a view, for as long as it takes. After a doubt the caller waits no longer, and has to cancel it."""
        known = {digest: since for each in self._stored.values() for digest, since in each.tables.items()}
        stored, tables = stored_views.divided(view, self._shard, known)
        ours = etcd.created(self._owner, self._made)
        self._needless |= self._folders([stored]) - self._folders(self._stored.values())  # until it is written
        for digest in sorted(tables.keys() - known.keys()):
            for number, shard in enumerate(stored_views.shards_of(tables[digest], self._shard)):
                key = stored_views.key(self._prefix, digest, view.epoch, number)
                await self._write([ours], [etcd.put(key, shard)])
        parity = view.epoch % 2
        key, value = self._view_keys[parity], msgspec.json.encode(stored)
        there = {**self._stored, key: stored}
        self._needless = (self._needless | self._folders(self._stored.values())) - self._folders(there.values())
        gone = sorted(self._needless)[: MOST - 1]
        same = [etcd.modified(self._view_keys[each], self._written[each]) for each in (0, 1)]
        answer = await self._write([ours, *same], [etcd.put(key, value), *map(etcd.delete_all, gone)])
        self._written[parity] = self._revision_of(key, value, answer)
        self._needless.difference_update(gone)
        self.views, self._stored = [*self.views[-1:], view], there

    def write_finishes(self, finishes: Finishes) -> asyncio.Future[None]:
        return asyncio.ensure_future(self._write_finishes(finishes))

    async def _write_finishes(self, finishes: Finishes) -> None:
        value = msgspec.json.encode(finishes)
        compare = [etcd.created(self._owner, self._made), etcd.modified(self._finished, self._finishes_written)]
        answer = await self._write(compare, [etcd.put(self._finished, value)])
        self._finishes_written = self._revision_of(self._finished, value, answer)
        self.finishes = finishes

    def _revision_of(self, key: str, value: bytes, answer: etcd.Txn) -> int:
        """Returns the revision of `value`, which was written with that answer. Raises `StoreError`."""
        if answer.succeeded:
            return answer.revision
        found = answer.found().get(key)
        if found is None or found.value != value:
            raise StoreError(f"{self._prefix} in etcd was changed by somebody else; choose another name in --store")
        return found.mod_revision  # an earlier attempt wrote it, and its answer was lost

    async def _write(self, compare: list[etcd.Json], what: list[etcd.Json]) -> etcd.Txn:
        """Write as the owner, for as long as it takes; returns the answer. Who is the owner no more waits for ever."""
        while True:
            try:
                answer = await self._ask(self._etcd.txn, compare, what, self._looks())
            except etcd.EtcdAway:
                await asyncio.sleep(PAUSE)
                continue
            owner = answer.found().get(self._owner)
            if answer.succeeded or (owner is not None and owner.create_revision == self._made):
                return answer
            self._doubt.set()
            await asyncio.Event().wait()

    async def clear(self) -> None:
        """Remove our keys alone, since keys of other jobs may be below. Says how to do it by hand if etcd does not
        answer."""
        ours = [self._owner, self._term, self._finished, *self._view_keys]
        tables = sorted(self._folders(self._stored.values()) | self._needless)
        gone = [*map(etcd.delete, ours), *map(etcd.delete_all, tables)][:MOST]
        await self._before_the_end(
            lambda: self._etcd.txn([etcd.modified(self._term, self._number)], gone, []),
            f"the views of the job that is over are left in {self.name}; remove them with: etcdctl del KEY, for "
            f"{', '.join(ours)}, and etcdctl del --prefix {self._prefix}/ranks/",
            ANSWER_TIMEOUT,
        )

    async def release(self) -> None:
        if self._keep_task is not None:
            self._keep_task.cancel()
            self._keep_task = None
        lease, self._lease = self._lease, 0
        if lease:
            otherwise = f"the lease ends in {self._me.lease} s by itself"
            await self._before_the_end(lambda: self._etcd.revoke(lease), otherwise, 0)
        self._doubt.set()
        for thread in self._threads:
            thread.shutdown(wait=False)

    async def _before_the_end(self, work: Callable[[], object], otherwise: str, timeout: float) -> None:
        end = now() + timeout
        while True:
            try:
                await self._ask(work)
                return
            except (etcd.EtcdAway, etcd.EtcdRefused) as error:
                if now() > end or isinstance(error, etcd.EtcdRefused):
                    self.tell(f"etcd does not do it ({error}): {otherwise}")
                    return
                await asyncio.sleep(PAUSE)

    # -- to ask ------------------------------------------------------------------------------------------------

    async def _ask(self, work: Callable[..., AnswerT], *args: Any) -> AnswerT:
        thread = BEATS if work == self._beats.keep_alive else REQUESTS
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self._threads[thread], work, *args)
        except etcd.EtcdAway as away:
            if not self._unheard:
                self.tell(
                    f"etcd cannot be used ({away}): training goes on, and no replica can join or be replaced until it "
                    f"can. {_mend(self.name)}"
                )
            self._unheard.add(thread)
            raise
        if thread in self._unheard:
            self._unheard.remove(thread)
            if not self._unheard:
                self.tell("etcd can be used again")
        return answer


def _mend(name: str) -> str:
    return f"Look whether etcd runs, at the addresses in {name}, and lets this host in"
