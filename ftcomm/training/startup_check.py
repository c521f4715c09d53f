"""Checks before the first step of a job that all replicas begin at the same step, with the same state in form and bits.

Replicas that differ at the start never agree later, since each applies the same updates to other weights. So each
hashes every leaf of its state, and one small all-reduce compares the results. Only if they differ is more exchanged:
the skeleton of the lowest replica if the models differ, the hashes of all leaves if the values differ. The state of a
replica that comes later is compared when it fetches the state.

    FTCOMM_START, initial_state=     if the values differ
    "check"                          `StateError` on all, which names the replicas and the entries; if one has another
                                     model or optimizer than the lowest, on that one alone: the others train without it
    "lowest"                         all take the state of the lowest replica, as DistributedDataParallel does with
                                     parameters, and its `start`
    "trust"                          the state is not compared, nor its form

In any case the same all-reduce compares where the loops begin, and how they decide (`ftcomm.training.loop_terms`),
since that needs no look at the state.

The hash of a tensor is the sum of its bytes as 64-bit words, computed where it lies. That reads memory once, also on a
GPU. It tells initial weights of another seed apart, but not one order of the same words from another. `ftcomm.verify`
is exact.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ftcomm.collective.checksum import judge, named
from ftcomm.control.rank_name import rank_name
from ftcomm.errors import SettingsError, StateError
from ftcomm.groups.compare import differing, exchange
from ftcomm.training.loop_terms import POLICIES, SIZE, LoopTerms, difference
from ftcomm.training.state import (
    SAME_SCRIPT,
    FlatState,
    Stateful,
    TensorSpec,
    allocate,
    first_difference,
    first_setting,
    flatten,
    leaves,
    load,
)
from ftcomm.training.tensor_sums import WORD, tensor_sums

if TYPE_CHECKING:
    from ftcomm.arrays.flat import Bytes
    from ftcomm.groups.group import Group
    from ftcomm.training.state import Held

log = logging.getLogger("ftcomm")


def policy(asked: str | None) -> str:
    """Returns the policy, by the argument or FTCOMM_START. Raises `SettingsError`."""
    chosen = os.environ.get("FTCOMM_START") or POLICIES[0] if asked is None else asked
    if chosen not in POLICIES:
        raise SettingsError(f"FTCOMM_START={chosen}; expected one of {', '.join(POLICIES)}, or unset it.")
    return chosen


def check_start(group: Group, state: Mapping[str, Stateful], terms: LoopTerms) -> int:
    """Check that all begin alike; returns the step to begin with. Blocks until all replicas have come.

    Raises `StateError` that says what differs; see above for `terms.initial_state`.
    """
    looks = terms.initial_state != "trust"
    flat = flatten(state if looks else {})
    prints = fingerprints(flat)
    names, values = (_digest(repr(said).encode()) for said in (list(prints), prints))
    rows = exchange(group, [*terms.row(), len(flat.skeleton), _digest(flat.skeleton), names, values])
    if not rows:
        return terms.start
    first = min(rows)
    start = _common_start(group, {replica: LoopTerms.of(row[:SIZE].tolist()) for replica, row in rows.items()}, first)
    _check_state(group, state, flat, prints, {replica: row[SIZE:] for replica, row in rows.items()}, terms)
    return start


def _common_start(group: Group, terms: Mapping[int, LoopTerms], first: int) -> int:
    """Returns the step at which all begin. Raises `StateError`, on all, if their terms differ."""
    start = terms[first].start
    if all(theirs.initial_state == "lowest" for theirs in terms.values()):
        mine = terms.get(group.replica)
        if mine is not None and mine.start != start:
            log.warning(
                "%s: was to begin at step %d, and begins at step %d as replica %d does (FTCOMM_START=lowest)",
                *(rank_name(group.replica, group.shard), mine.start, start, first),
            )
        terms = {replica: dataclasses.replace(theirs, start=start) for replica, theirs in terms.items()}
    found = difference(terms)
    if found is not None:
        raise StateError(
            f"The replicas (shard {group.shard} of each) do not begin alike: {found}. Pass the same arguments to the "
            "step loop on all, set the same settings, and let all restore the same checkpoint."
        )
    return start


def _check_state(
    group: Group,
    state: Mapping[str, Stateful],
    flat: FlatState,
    prints: Mapping[str, int],
    rows: Mapping[int, np.ndarray[Any, Any]],
    terms: LoopTerms,
) -> None:
    """Compare the states. Rows hold the length and the digest of the skeleton, and the digests of all names and
    values."""
    if len({row.tobytes() for row in rows.values()}) <= 1:
        return
    policy, first = terms.initial_state, min(rows)
    there = flat.skeleton
    if len({(row[0], row[1]) for row in rows.values()}) > 1:
        there = _of_lowest(group, flat.skeleton, first, int(rows[first][0]))
        if not there:  # it was lost meanwhile; its next life is compared with this one
            return
        difference = first_difference(flat.skeleton, there)
        if difference is None and policy == "check":
            difference = first_setting(flat.skeleton, there)
        said = exchange(group, [1 if difference is None else 2])
        if difference:
            raise StateError(f"The state of replica {first} does not fit here: {difference}. {SAME_SCRIPT}")
        staying = [replica for replica, (ends,) in said.items() if ends == 1]  # those that train on without the others
        rows = {replica: row for replica, row in rows.items() if replica in staying}
    wrong, right = judge({replica: int(row[3]) for replica, row in rows.items()})
    if not wrong:
        return
    if policy == "lowest":
        _take(group, state, flat, there, first)
        return
    where = "in their names"
    if len({row[2] for row in rows.values()}) == 1:
        where = f"in {differing(prints, exchange(group, list(prints.values())))}"
    who = f"the state of {named(wrong)} differs from that of {named(right)}" if right else "none has a majority"
    raise StateError(
        f"The replicas (shard {group.shard} of each) do not begin with the same state: {who}, {where}. Build it alike "
        "on all (torch.manual_seed with one seed, the same checkpoint), or let all take that of the lowest replica: "
        "FTCOMM_START=lowest, initial_state='lowest'."
    )


def fingerprints(flat: FlatState) -> dict[str, int]:
    """Returns the fingerprint of each leaf by its path, in the order of the paths; never 0."""
    sums = _sums(flat.tensors)
    found = {}
    for path, leaf in leaves(flat.skeleton).items():
        said = f"{path} {leaf} {sums[leaf.place]}" if isinstance(leaf, TensorSpec) else f"{path} {leaf!r}"
        found[path] = _digest(said.encode())
    return dict(sorted(found.items()))


def _digest(data: bytes) -> int:
    """Returns a digest that fits an int64 and is never 0."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1 | 1 << 62


def _sums(held: Sequence[Held]) -> list[tuple[int, int]]:
    """Returns the sums of the words of each tensor or array and of its remaining bytes."""
    sums = iter(tensor_sums([each for each in held if not isinstance(each, np.ndarray)]))
    return [_sum_of_bytes(each) if isinstance(each, np.ndarray) else next(sums) for each in held]


def _sum_of_bytes(data: Bytes) -> tuple[int, int]:
    whole = data.size // WORD * WORD
    return int(data[:whole].view(np.int64).sum(dtype=np.int64)), int(data[whole:].sum(dtype=np.int64))


def _of_lowest(group: Group, skeleton: bytes, first: int, length: int) -> bytes:
    """Returns the skeleton of replica `first`; empty if that was lost."""
    there = np.zeros(length, np.uint8)
    if group.replica == first:
        there[:] = np.frombuffer(skeleton, np.uint8)
    group.allreduce(there, atomic=True)
    return there.tobytes() if there.any() else b""


def _take(group: Group, state: Mapping[str, Stateful], flat: FlatState, skeleton: bytes, first: int) -> None:
    """Take the state of replica `first`, on all. Raises `LostError` on all if that is lost."""
    mine = group.replica == first
    given = flat.on_host() if mine else allocate(skeleton)
    root = group.roster.index(first)
    for view in given.views():
        if view.nbytes:
            group.broadcast(np.frombuffer(view, np.uint8), root)
    if not mine:
        load(given, state)
        log.warning(
            "%s: began with another state than replica %d, and has taken that (FTCOMM_START=lowest)",
            *(rank_name(group.replica, group.shard), first),
        )
    group.emit("state_taken", of=first, bytes=given.nbytes)
