"""Why a test that gloo passes fails on ftcomm."""

from __future__ import annotations

from typing import NamedTuple


class Reason(NamedTuple):
    begin: str  # of the names of the tests
    why: str
    before: tuple[int, int] = (99, 0)  # the first version of torch for which it no longer holds


REASONS = (
    Reason("test_sparse_all_reduce", "sparse tensors are refused"),
    Reason("test_monitored_barrier", "before 2.14 torch lets gloo alone have `dist.monitored_barrier`", (2, 14)),
)


def reason(name: str, torch: str) -> str:
    """Of a test by its name; "" if there is none. `torch` is the version that it ran on."""
    major, minor = (int(part) for part in torch.split(".")[:2])
    test = name.rsplit(".", 1)[-1]
    return next((each.why for each in REASONS if test.startswith(each.begin) and (major, minor) < each.before), "")
