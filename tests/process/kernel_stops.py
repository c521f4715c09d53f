"""What happens inside the all-reduce kernel, for tests that stop a rank there: FTCOMM_ENGINE=interpreter-kernel.

Under the interpreter a kernel is Python, and finds the functions that it calls among the globals of its module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ftcomm


def before_announce(hook: Callable[[str], None], after: Callable[[str], None] = lambda what: None) -> None:
    """`hook` is called with "posted", "reduced" or "taken" just before a lane says so of a task, `after` just after."""
    from ftcomm.kernels.device import allreduce, lane, words

    announce = lane.announce
    names = {words.POSTED: "posted", words.REDUCED: "reduced", words.TAKEN: "taken"}

    def watched(flag: Any, copy: Any, value: Any) -> Any:
        word = (_number(flag) - _device().own.flags) // 8 % words.LINE
        hook(names[word])
        result = announce(flag, copy, value)
        after(names[word])
        return result

    allreduce.announce = lane.announce = watched


def within_copies(hook: Callable[[str], None]) -> None:
    """`hook` is called with "copy" when half of an input is in the staging, and with "read" when some shards of a
    reduced chunk, not all, are in the result; of elements that travel coded, too."""
    from ftcomm.kernels.device import lane

    shards: list[int] = []  # copied of the chunk that is being gathered

    def copied(copy_span: Callable[..., Any]) -> Callable[..., Any]:
        def copies(source: Any, to: Any, n: Any, *rest: Any) -> Any:
            device = _device()
            if device.own.staging <= _number(to) < device.own.flags:
                copy_span(source, to, n // 2, *rest)
                hook("copy")
            elif shards:
                shards[0] += 1
                if shards[0] == 2:
                    hook("read")
            return copy_span(source, to, n, *rest)

        return copies

    def gathered(gather: Callable[..., Any]) -> Callable[..., Any]:
        def gathers(*arguments: Any) -> Any:
            shards[:] = [0]
            result = gather(*arguments)
            shards.clear()
            return result

        return gathers

    for name in ("copy_span", "encode_span", "decode_span"):
        setattr(lane, name, copied(getattr(lane, name)))
    for name in ("_gather", "_gather_coded"):
        setattr(lane, name, gathered(getattr(lane, name)))


def _device() -> Any:
    return ftcomm.default_group()._engine.device


def _number(value: Any) -> int:
    """Of a scalar of the interpreter."""
    return int(value.handle.data[0])
