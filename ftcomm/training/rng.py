"""Random numbers that a repeated step draws again, and that need no history in a replica that comes back.

The generators of NumPy, Python and torch (if it was imported: the CPU's and, where it is in use, the GPU's) are seeded
anew for every step, from one seed, the step, the replica and the rank. So a step that was discarded has the same
dropout when it is repeated, and replicas differ. A joiner needs only the seed: the state of a generator would belong to
a past step when it arrives.

    state = {"model": model, "optimizer": optimizer, "rng": Rng(seed)}
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ftcomm.groups.group import Group


class Rng:
    """An entry of the `state` of a step loop. With `apart=False` all replicas and ranks draw the same numbers.

    part: the number of what this rank has of the batch of its replica, where ranks with the same number are to draw
        alike, as those of tensor parallelism; None: all ranks differ.
    """

    def __init__(
        self, seed: int = 0, group: Group | None = None, *, apart: bool = True, part: int | None = None
    ) -> None:
        self.seed = seed
        self._group = group
        self._apart = apart
        self._part = part

    def begins(self, step: int) -> None:
        """Seed the generators for `step`; the step loop calls it."""
        who = (0, 0)
        if self._apart:
            group = self._group
            if group is None:
                from ftcomm.groups.default_group import default_group

                group = self._group = default_group()
            who = (group.replica, group.shard if self._part is None else self._part)
        digest = hashlib.blake2b(repr((self.seed, step, who)).encode(), digest_size=12).digest()
        seed = int.from_bytes(digest[:8], "little")
        random.seed(digest)
        np.random.seed(int.from_bytes(digest[8:], "little"))
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.manual_seed(seed)  # also for the GPUs, when they are first used

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seed = int(state["seed"])
