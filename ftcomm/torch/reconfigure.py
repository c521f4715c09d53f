"""The c10d reconfigure contract (torch >= 2.14): a process group that is made anew from handles, as often as necessary.

    dist.init_process_group("ftcomm", store=..., rank=..., world_size=..., enable_reconfigure=True)
    handle = dist._get_reconfigure_handle()          # a string, to be brought to the others by any means
    dist._reconfigure(uuid, handles).wait()          # rank by place in the list; a fresh uuid each time

The caller (torchft's Manager, say) decides on membership, without a coordinator of ftcomm. Between two reconfigurations
the group is a static one: a loss ends all ops with `LostError`, `abort` does the same on purpose, and the next
reconfiguration mends either. The handle stays the same as long as the process group lives.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from ftcomm.errors import ArgumentError, CollectiveTimeout, FtcommError, TransportError
from ftcomm.groups.static_endpoint import Endpoint, parse
from ftcomm.groups.static_group import StaticGroup
from ftcomm.torch.process_group import FtProcessGroup
from ftcomm.torch.replicas import FinishedWork
from ftcomm.torch.work import FtWork
from ftcomm.transport.address import is_loopback

MEET = 60.0  # s to wait for all, unless the call says otherwise


def _mend(handles: Sequence[str]) -> str:
    """Returns what to set if these handles are those of several hosts."""
    if not any(is_loopback(parse(handle).host) for handle in handles):
        return ""
    return (
        " Handles have the loopback address where FTCOMM_HOST is not set: if the members are on several hosts, set "
        "FTCOMM_HOST on each to its address or interface that the others reach."
    )


class _Before:
    """Stands in for a group before the first one: the rank and size from torch, and no calls."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.roster = rank, tuple(range(size))


class ReconfigurableGroup(FtProcessGroup):
    """A group that can be reconfigured. Do not make one: `dist.init_process_group("ftcomm", ...,
    enable_reconfigure=True)` does."""

    supports_reconfigure = True
    supports_splitting = False
    supports_abort_hooks = True

    def __init__(self, rank: int, size: int, timeout: float, *, name: str) -> None:
        super().__init__(_Before(rank, size), timeout, name=name)
        self._endpoint = Endpoint()  # at FTCOMM_HOST
        self._group: StaticGroup | None = None
        self._used: set[int] = set()
        self._hooks: dict[int, Callable[[], None]] = {}

    def get_reconfigure_handle(self) -> str:
        return self._endpoint.handle

    def reconfigure(self, opts: Any) -> FtWork:
        """Meet the members of `opts.handles`; blocks until they have come, or `opts.timeout` has passed. The returned
        work raises errors from `wait`; they leave the group without members, to be reconfigured again."""
        part = _Outcome()
        try:
            self._begin(opts)
        except Exception as error:
            part = _Outcome(error)
        return self._work("reconfigure", [part], [], None)

    def _begin(self, opts: Any) -> None:
        gone = self._submission.gone
        if gone:
            raise FtcommError(f"process group {self.group_name!r} does not exist any more: {gone}")
        uuid = int(opts.uuid)
        if uuid in self._used:
            raise ArgumentError(f"uuid {uuid} was already used for process group {self.group_name!r}; take a fresh one")
        self._used.add(uuid)
        self._leave()
        given: timedelta | None = getattr(opts, "timeout", None)
        seconds = MEET if given is None or given.total_seconds() <= 0 else given.total_seconds()
        handles = list(opts.handles)
        if isinstance(opts.handles, (set, frozenset)):
            handles.sort()  # any order will do that is the same everywhere
        try:
            group = StaticGroup.from_handles(
                self._endpoint,
                f"torch {uuid}",
                handles,
                op_timeout=self._submission.timeout,
                timeout=seconds,
                transport=os.environ.get("FTCOMM_TRANSPORT", "auto"),
            )
        except TransportError as error:
            raise TransportError(f"{error}{_mend(handles)}") from error
        self._group = self._submission.group = group

    def _leave(self) -> None:
        """End the group of the last reconfiguration, if it is still there."""
        if self._group is not None:
            self._group.close()

    def abort(self) -> None:
        """End every op in flight with `LostError`, here and on the others. The handle stays valid for a
        reconfiguration."""
        for hook in list(self._hooks.values()):
            hook()
        if self._group is not None:
            self._group.abort()

    def get_error(self) -> Any:
        from torch._C._distributed_c10d import ErrorType

        error = None if self._group is None else self._group.error
        if error is None:
            return ErrorType.SUCCESS
        return ErrorType.TIMEOUT if isinstance(error, CollectiveTimeout) else ErrorType.COMM_ERROR

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        self._hooks[hook_id] = hook

    def unregister_abort_hook(self, hook_id: int) -> None:
        self._hooks.pop(hook_id, None)

    def split_group(self, *args: Any, **more: Any) -> Any:
        raise FtcommError(
            f"process group {self.group_name!r} was made with enable_reconfigure=True and cannot be split: its ranks "
            "are those of the last handles. Make another such group, of the handles of the ranks in question."
        )

    def shutdown(self) -> None:
        super().shutdown()
        self._leave()
        self._endpoint.close()

    def _alive(self) -> None:
        super()._alive()
        if self._group is None:
            raise FtcommError(
                f"process group {self.group_name!r} was made with enable_reconfigure=True and has no members yet; call "
                "dist._reconfigure(uuid, handles).wait() before any collective"
            )


class _Outcome(FinishedWork):
    """A call that has ended, with or without an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def wait(self, timeout: float | None = None) -> None:
        if self._error is not None:
            raise self._error
