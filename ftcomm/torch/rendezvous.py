"""Decides where the processes of a torch program meet: in the job that `ftcomm run` has started, or at torch's own
store.

FTCOMM_COORDINATOR is set       the job is joined here; rank and size are those of its first view. Nothing of ours goes
                                through torch's store: it is for groups of other backends, and for the script
                                (`job_store`)
MASTER_ADDR, RANK, ...          torch meets as ever (torchrun, mp.spawn); rank 0 starts a coordinator, and torch's
                                store carries its address and the job's name to the others. It carries no secret: the
                                token is FTCOMM_TOKEN, or lies where the ranks of one host can read it (`secret`)
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, cast
from urllib.parse import parse_qs, quote, unquote, urlparse

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ftcomm.control.links import BACKLOG
from ftcomm.control.rank_name import rank_name
from ftcomm.errors import InitError, SettingsError
from ftcomm.launch.torchrun.store_contents import LIFE
from ftcomm.process import ending
from ftcomm.settings import MAX_LABEL, Settings, own, split_endpoint
from ftcomm.settings.launchers import numbered
from ftcomm.torch.secret import MEND, Secret, read
from ftcomm.transport.address import own_address

if TYPE_CHECKING:
    from ftcomm.groups.group import Group

_BY_ENVIRONMENT = "FTCOMM_TOKEN"  # said in place of where the token lies

_met = 0  # how often this process has begun to meet by torch's store; all ranks do it as often
_ours: Group | None = None  # joined for a process group, and so to be left with it


class NoStore(dist.Store):  # type: ignore[misc]
    """Stands where a job has no store, which groups of "ftcomm" do not need."""

    def _none(self, *_: Any) -> NoReturn:
        raise InitError(
            "this job has no store for torch, which groups of other backends than ftcomm and keys of a script need. "
            "Start it with `ftcomm run`, which has one, or set FTCOMM_STORE=host:port of a torch.distributed.TCPStore "
            "that outlives the ranks."
        )

    set = get = add = wait = check = compare_set = delete_key = append = multi_get = multi_set = num_keys = _none


_no_store = NoStore()  # torch keeps no reference to what it is in Python


def env_rendezvous(
    url: str, torchs: Callable[..., Iterator[Any]], options: dict[str, Any]
) -> Iterator[tuple[dist.Store, int, int]]:
    """Meet as torch's rendezvous for `env://` does; returns (store, rank, size). `torchs` is its own handler."""
    if not in_job():
        try:
            yield from torchs(_numbered(url), **options)
        except ValueError as error:
            if "expected, but not set" not in str(error):
                raise
            raise ValueError(f"{error}. A launcher sets it: `ftcomm run --replicas 4 SCRIPT`, or torchrun.") from None
        return
    group = joined()
    rank, size = place(group)
    asked = {name: int(values[0]) for name, values in parse_qs(urlparse(url).query).items()}
    if asked.get("rank", rank) != rank or asked.get("world_size", size) != size:
        raise InitError(
            f"init_process_group(rank={asked.get('rank', rank)}, world_size={asked.get('world_size', size)}) in a job "
            f"in which this is rank {rank} of {size}: replicas {', '.join(map(str, group.members))} of "
            f"{group.shards} ranks each, this is {rank_name(group.replica, group.shard)}. Leave "
            "rank and world_size out, `ftcomm run` knows them."
        )
    yield job_store(group, size, torchs, url, options), rank, size
    raise InitError("a process group cannot meet a second time; call init_process_group again")


def job_store(
    group: Group, size: int, torchs: Callable[..., Iterator[Any]], url: str, options: dict[str, Any]
) -> dist.Store:
    """torch's store of a job that has been joined: the one that FTCOMM_STORE names, or that of a torchrun for each
    replica, or one that says that there is none."""
    endpoint = os.environ.get("FTCOMM_STORE", "")
    if not endpoint:
        if "MASTER_ADDR" in os.environ:
            return cast(dist.Store, next(torchs(_numbered(url), **options))[0])
        return dist.HashStore() if size == 1 else _no_store
    host, port = split_endpoint(endpoint, "FTCOMM_STORE")
    store = dist.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=options.get("timeout", default_pg_timeout)
    )
    if not group.internals.outside:
        return store
    member = group.view.member(group.replica)
    return dist.PrefixStore(f"{LIFE} {group.replica}, {'' if member is None else member.incarnation}", store)


def _numbered(url: str) -> str:
    """`url` for torch's own rendezvous, which knows torchrun's numbering alone, with that of another launcher."""
    if "RANK" in os.environ or urlparse(url).query or (found := numbered(os.environ)) is None:
        return url
    return f"{url}?rank={found[0]}&world_size={found[1]}"


def place(group: Group) -> tuple[int, int]:
    """Returns (rank, size) of this process in the world of the job: replicas as in the roster, times their ranks."""
    shards = group.shards
    return group.roster.index(group.replica) * shards + group.shard, len(group.roster) * shards


def in_job() -> bool:
    """Whether `ftcomm.init` has been called here, or `ftcomm run` has started this process."""
    group = sys.modules.get("ftcomm.groups.default_group")
    return "FTCOMM_COORDINATOR" in os.environ or (group is not None and group.existing_group() is not None)


def joined() -> Group:
    """The default group; if there is none yet, it joins the job that the environment names."""
    global _ours
    import ftcomm.groups.default_group

    if ftcomm.groups.default_group.existing_group() is None:
        _ours = ftcomm.groups.default_group.init()
    return ftcomm.groups.default_group.default_group()


def leave() -> None:
    """The end of the world's process group, and of our part in the job if it has begun with it. Unless the script is on
    its way out with an error, or has ended with one, this rank has done its work."""
    global _ours
    group, _ours = _ours, None
    import ftcomm.groups.default_group

    well = sys.exc_info()[0] is None and not (ending.over() and ending.failure())
    if group is not None and ftcomm.groups.default_group.existing_group() is group and well:
        ftcomm.groups.default_group.shutdown()


def join_by_environment(timeout: timedelta | None = None) -> Group:
    """`join_by_store` with the store of the launcher that the environment names."""
    timeout = default_pg_timeout if timeout is None else timeout
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    return join_by_store(store, rank, size, timeout)


def join_by_store(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Group:
    """The default group of a program that some other launcher has started, with a coordinator of its own."""
    global _ours, _met
    import ftcomm.groups.default_group

    group = ftcomm.groups.default_group.existing_group()
    if group is not None:
        return group
    shards = _shards(size)
    host = _host()
    asked = own(os.environ)  # raises before a coordinator is started, which would wait for somebody to come
    asked["init_timeout"] = min(asked["init_timeout"], timeout.total_seconds())
    # torchrun keeps its store from attempt to attempt, and a program may meet in it again after it has left.
    keys = f"ftcomm/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_met}"
    _met += 1
    with contextlib.ExitStack() as meanwhile:
        token = os.environ.get("FTCOMM_TOKEN", "")
        if rank == 0:
            from ftcomm.launch.coordinator.sidecar import start

            place = _BY_ENVIRONMENT
            if not token:
                secret = meanwhile.enter_context(contextlib.closing(Secret()))
                token, place = secret.token, secret.place
            asked["job"] = job = asked["job"] or secrets.token_hex(8)
            endpoint = start(size // shards, shards, token, job, host)
            store.set(f"{keys}/coordinator", f"{endpoint} {place} {quote(job)}")
        else:
            endpoint, place, job = told(store.get(f"{keys}/coordinator"))
            token = _token(token, place)
            asked["job"] = asked["job"] or job
        _ours = _join(store, keys, endpoint, token, rank, shards, size, host, asked)
    return _ours


def _token(own: str, place: str) -> str:
    """`own` is FTCOMM_TOKEN here, `place` what rank 0 says of its token. Raises `InitError`."""
    if (place == _BY_ENVIRONMENT) != bool(own):
        here, there = ("is set here, and", "not on rank 0") if own else ("is not set here, but it is", "on rank 0")
        raise InitError(f"FTCOMM_TOKEN {here} {there}. {MEND}.")
    return own or read(place)


def _join(
    store: dist.Store,
    keys: str,
    endpoint: str,
    token: str,
    rank: int,
    shards: int,
    size: int,
    host: str,
    asked: dict[str, Any],
) -> Group:
    import ftcomm.groups.default_group

    leader, listener = "", None
    if shards > 1:
        key = f"{keys}/leader/{rank // shards}"
        if rank % shards == 0:
            listener = socket.create_server((host, 0), backlog=BACKLOG)
            store.set(key, f"{host}:{listener.getsockname()[1]}")
        leader = store.get(key).decode()
    settings = Settings(
        coordinator=endpoint,
        token=token,
        replica=rank // shards,
        replicas=size // shards,
        shard=rank % shards,
        ranks_per_replica=shards,
        leader=leader,
        leader_fd=None if listener is None else listener.detach(),
        host=host,
        **asked,
    )
    settings.check()
    return ftcomm.groups.default_group.init(settings)


def told(value: bytes) -> tuple[str, str, str]:
    """The endpoint of the coordinator, where its token lies, and the name of the job, as rank 0 has put them into
    torch's store, to which anybody may write. Raises `InitError`."""
    parts = value.decode("ascii", "replace").split(" ")
    endpoint, place, quoted = parts if len(parts) == 3 else ("", "", "")
    host, _, port = endpoint.rpartition(":")
    job = unquote(quoted)
    lengths = 1 <= len(host) <= 255 and len(port) <= 5 and 1 <= len(place) <= 64 and 1 <= len(job) <= MAX_LABEL
    if not (lengths and port.isdecimal()):
        raise InitError(
            f"torch's store holds {len(value)} bytes where the address of the coordinator should be; is it the store "
            "of another program?"
        )
    return endpoint, place, job


def _shards(size: int) -> int:
    text = os.environ.get("FTCOMM_RANKS_PER_REPLICA", "1")
    if not text.isdigit() or int(text) < 1 or size % int(text):
        raise SettingsError(
            f"FTCOMM_RANKS_PER_REPLICA={text!r} in a world of {size} ranks: a world is replicas x ranks of each. Start "
            "a multiple of it, or set it to what divides the world."
        )
    return int(text)


def _host() -> str:
    """The address of this host by which the others reach it: that of the way to torch's store."""
    master, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "1"))
    return own_address(os.environ.get("FTCOMM_HOST", ""), (master, port), "MASTER_ADDR")
