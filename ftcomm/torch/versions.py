"""All that differs between the versions of torch that ftcomm works with, 2.11 to 2.15. What is asked is torch itself,
not its version number: the newest that we know is not the newest that there will be. So no version is refused; one that
the tests have not run on is warned of, once a process."""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

TESTED = (2, 11), (2, 15)  # the oldest and the newest that the tests have run on

log = logging.getLogger("ftcomm")


def untested(version: str) -> str:
    """Says what is to be known of torch `version`; empty for one that was tested."""
    here = tuple(int(part) for part in version.split(".")[:2])
    oldest, newest = (f"{major}.{minor}" for major, minor in TESTED)
    if TESTED[0] <= here <= TESTED[1]:
        return ""
    how = "older" if here < TESTED[0] else "newer"
    return (
        f"torch {version} is {how} than those that ftcomm was tested with, {oldest} to {newest}; if a process group "
        "fails with it, take one of these"
    )


if untested(torch.__version__):
    log.warning(untested(torch.__version__))

# The c10d reconfigure contract: groups are made anew from handles, without a store (2.14).
RECONFIGURE = hasattr(c10d, "_reconfigure")

# It attaches torch's flight recorder to groups that name devices, and fails for one that is no C++ backend (2.15).
_RECORDER = getattr(getattr(c10d, "_maybe_attach_flight_recorder", None), "__code__", None)


def premultiplied_by(op: Any) -> Any:
    """The factor of a ReduceOp PREMUL_SUM: a number, or a tensor of one. It has no name before 2.13."""
    return op.factor if hasattr(op, "factor") else op.__getstate__()[1]


def device_types() -> list[torch.device]:
    """Returns the devices that a process group names to the caller of the method that calls this."""
    if sys._getframe(2).f_code is _RECORDER:
        return []
    return [torch.device("cpu"), torch.device("cuda")]
