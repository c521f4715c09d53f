"""`torch.testing._internal.distributed.distributed_test` of the torch that is installed, with WORLD_SIZE ranks.

What gloo can do is asked of both: the module decides by the name of the backend, while it is imported and in its tests,
what to skip, so ftcomm answers to both names. Ranks are forks of a server that has imported torch.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import unittest.mock
from collections.abc import Callable
from typing import Any

import torch
import torch.testing._internal.common_distributed as common

NAME = os.environ["FTCOMM_UPSTREAM_BACKEND"]  # BACKEND itself has to be a name that the module knows
os.environ.setdefault("WORLD_SIZE", "3")
os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp(prefix="upstream-"))
os.environ["BACKEND"] = "gloo"

from torch.testing._internal.distributed import distributed_test as torchs  # noqa: E402


class Name(str):
    """That of ftcomm, and equal to gloo's."""

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


torchs.BACKEND = Name(NAME)
os.environ["BACKEND"] = "mpi"  # for whom alone torch does not ask for eight ranks
common.TIMEOUT_DEFAULT = 100  # seconds for a test
torch.set_num_threads(1)

multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])


def in_environment(environment: dict[str, str], target: Callable[..., None], *args: Any, **more: Any) -> None:
    """That of the test: the server from which this is forked has an older one."""
    os.environ.update(environment)
    target(*args, **more)


class TestDistributed(torchs.TestDistBackend, torchs.DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        if "barrier_timeout" in self._testMethodName:  # a group's has to be above it, as the error of ftcomm says
            shorter = unittest.mock.patch.dict(os.environ, FTCOMM_HEARTBEAT_TIMEOUT="0.5")
            shorter.start()
            self.addCleanup(shorter.stop)
        forks: Any = torch.multiprocessing.get_context("forkserver")

        def process(target: Callable[..., None], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = (dict(os.environ), target, *args)
            return forks.Process(target=in_environment, name=name, args=given, kwargs=kwargs, daemon=True)

        self._start_processes(process)
