"""The tests of torchft that make process groups, from its wheel. With ftcomm each group that they make is one of ours
(see `torchft_groups`); all else is theirs. Those that ask for GPUs skip without one."""

from __future__ import annotations

import importlib
import os
import unittest

import pytest
import torch.distributed as dist

pytest.importorskip("torchft")
if not hasattr(dist.ProcessGroup, "reconfigure"):
    pytest.skip("it needs the reconfigure contract, of torch 2.14", allow_module_level=True)

MODULES = (
    "process_group_test",  # each collective, alone and after a member has gone, by threads and by processes
    "reconfigure_test",  # the contract of torch, and the worker that resizes, aborts and recovers
    "parameter_server_test",
    "manager_integ_test",  # DDP with a Manager, through failures that are injected
    "local_sgd_integ_test",  # LocalSGD and DiLoCo in the same way
)


from tests.upstream import torchft_groups  # noqa: E402

torchft_groups.allow_long_starts()
for name in MODULES:
    module = importlib.import_module(f"torchft.{name}")
    if os.environ["FTCOMM_UPSTREAM_BACKEND"] == "ftcomm":
        torchft_groups.put(module)
    for test in vars(module).values():
        if isinstance(test, type) and issubclass(test, unittest.TestCase) and test.__module__ == module.__name__:
            globals()[test.__name__] = test
