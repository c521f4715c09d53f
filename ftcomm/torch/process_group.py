"""`dist.ProcessGroup` over groups of ftcomm: its members, and when it ends. Its calls are in `collectives`.

It derives from ProcessGroup and not from Backend, because only the former can change its size: every call asks the
group beneath for rank and size, which change at step boundaries with its roster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ftcomm.errors import CollectiveTimeout, FtcommError
from ftcomm.process.own import own_process
from ftcomm.torch.collectives import Collectives
from ftcomm.torch.ddp import adapt
from ftcomm.torch.versions import device_types
from ftcomm.torch.work import Futures


class FtProcessGroup(Collectives):
    """A process group. Do not make one: `dist.init_process_group("ftcomm")` and `dist.new_group` do.

    `calls` is the group beneath, `end` is called once when this is shut down, and `split` makes a group of some of its
    ranks.
    """

    supports_reconfigure = False
    supports_splitting = True
    supports_coalescing = False
    options = None  # a group that is split off has none

    def __init__(
        self,
        calls: Any,
        timeout: float,
        *,
        name: str,
        end: Callable[[], None] = lambda: None,
        split: Callable[[FtProcessGroup, Sequence[int], float, str | None], FtProcessGroup | None] | None = None,
    ) -> None:
        self._calls, self._end, self._split = calls, end, split
        super().__init__(self.rank(), self.size())
        adapt(FtProcessGroup)
        self._timeout = timeout
        self._name, self._desc = name, "undefined"
        self._futures = Futures(getattr(calls, "repeats_step_after", lambda error: False))
        self.splits = 0  # how often a group was split off
        self._gone = ""  # why the group has ended

    # -- who is in it ------------------------------------------------------------------------------------------------

    def rank(self) -> int:
        return int(self._calls.rank)

    def size(self) -> int:
        return len(self._calls.roster)

    def getRank(self) -> int:
        return self.rank()

    def getSize(self) -> int:
        return self.size()

    def name(self) -> str:
        return "ftcomm"

    getBackendName = _get_backend_name = name

    @property
    def group_name(self) -> str:
        return self._name

    def getGroupName(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    setGroupName = _set_group_name

    @property
    def group_desc(self) -> str:
        return self._desc

    def getGroupDesc(self) -> str:
        return self._desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    setGroupDesc = _set_group_desc

    def _get_backend(self, device: torch.device) -> FtProcessGroup:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return device_types()

    # -- groups of it ------------------------------------------------------------------------------------------------

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> FtProcessGroup | None:
        """Make the group of `ranks` of this one for `dist.split_group`, as `dist.new_group` does; None on other
        ranks."""
        self._alive()
        assert self._split is not None, "a group that cannot be split overrides this"
        made = self._split(self, ranks, self._timeout if timeout is None else timeout.total_seconds(), group_name)
        if made is not None and group_desc is not None:
            made._set_group_desc(group_desc)
        return made

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing. `dist.new_group` calls it on ranks outside of the group, which no rank waits for."""

    def get_group_store(self) -> dist.Store:
        """Returns torch's store for the group, which ftcomm does not use."""
        return c10d._get_default_store()

    def merge_remote_group(self, *args: Any, **more: Any) -> Any:
        raise FtcommError(
            f"process group {self._name!r} cannot be merged with another (merge_remote_group): who takes part is what "
            "its job says. Start the processes as replicas of one job (ftcomm run --replicas); they come and go while "
            "the others train."
        )

    # -- how long ----------------------------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout.total_seconds()

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def shutdown(self) -> None:
        """End the group, for `dist.destroy_process_group`; idempotent."""
        self._over("it was destroyed (dist.destroy_process_group)")

    def abort(self) -> None:
        """End the group, for `dist._abort_process_group`; idempotent."""
        self._over("it was aborted")

    def _over(self, why: str) -> None:
        if not self._gone:
            self._gone = why
            self._end()
            self._futures.close()

    def _alive(self) -> None:
        own_process()
        if self._gone:
            raise FtcommError(
                f"process group {self._name!r} does not exist any more: {self._gone}. Call dist.init_process_group, or "
                "dist.new_group, before any collective."
            )
        if self._futures.cut_off:
            # A caller that waits for a future, as DDP does, refills the buffer before the op writes its result.
            raise CollectiveTimeout(
                f"process group {self._name!r} is at its end: {self._futures.cut_off} timed out while it went on in a "
                "buffer that DDP, or a hook, uses again. Start the program again from its last checkpoint, or raise "
                "the timeout of the group (dist.init_process_group(timeout=...))."
            )
