"""Before the first step of a job: whether all replicas were started with the same model and the same optimizer.

Each hashes the skeleton of its state, one small all-reduce tells everybody every hash. Only if they differ, that of the
lowest replica goes to all, and who finds a difference that matters says so and ends; the others train without it. What
a replica that comes later has is compared when it fetches the state. The bytes of the weights are for `ftcomm.verify`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ftcomm.errors import StateError
from ftcomm.hsdp.compare import exchange
from ftcomm.hsdp.state import SAME_SCRIPT, Stateful, first_difference, first_setting, flatten

if TYPE_CHECKING:
    from ftcomm.group import Group


def check_alike(group: Group, state: Mapping[str, Stateful]) -> None:
    """Blocks until all replicas have come. Raises `StateError` with the first difference from the lowest replica."""
    skeleton = flatten(state).skeleton
    digest = int.from_bytes(hashlib.blake2b(skeleton, digest_size=8).digest(), "little") >> 1
    rows = exchange(group, [len(skeleton), digest])
    if len({row.tobytes() for row in rows.values()}) <= 1:
        return
    first = min(rows)
    there = np.zeros(int(rows[first][0]), np.uint8)
    if group.replica == first:
        there[:] = np.frombuffer(skeleton, np.uint8)
    group.allreduce(there, atomic=True)
    if not there.any():  # it was lost meanwhile; who comes in its place is compared with us
        return
    said = there.tobytes()
    difference = first_difference(skeleton, said) or first_setting(skeleton, said)
    if difference:
        raise StateError(f"The state of replica {first} does not fit here: {difference}. {SAME_SCRIPT}")
