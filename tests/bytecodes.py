"""Counts the bytecodes that the interpreter runs for one all-reduce, by function.

    python -m tests.bytecodes --torch
    python -m tests.bytecodes --members 4 --bytes 64M

That is what a small op costs, and a task of a large one beside its bytes, and unlike its time the same on a machine
with any load. It is by a group in a step loop whose members share memory; waits and wake-ups of others are not in it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import click
import numpy as np

from ftcomm.bench.sizes import parse_size
from ftcomm.collective.operation import stamp_of
from ftcomm.engines.host_calls import HostCalls
from ftcomm.groups.calls import Calls
from ftcomm.groups.group import Group
from ftcomm.transport.segment import NEAR
from tests.rigs.exchange import mirrored


@contextlib.contextmanager
def mirrored_group(members: int = 2) -> Iterator[Group]:
    """A group in a step loop, the other members of which are its own mirror images, so that no op waits."""
    exchange, segment = mirrored(count=members)
    group = Group.__new__(Group)
    Calls.__init__(group, "", 0, None, HostCalls(members), exchange)
    group._runs, group.drained, group._loop, group._stamp = True, False, threading.get_ident(), stamp_of(0)
    group.internals = SimpleNamespace(lag=0, outside=False)  # type: ignore[assignment]
    try:
        yield group
    finally:
        exchange.fail(RuntimeError("nothing more is called"))
        segment.close()


def bytecodes(call: Callable[[], object]) -> Counter[str]:
    """Returns how many bytecodes each function runs for a call, which has warmed up: of some calls the one that took
    the least, since the interpreter may call back in between, for a collection of garbage."""
    for _ in range(2 * NEAR):
        call()
    return min((_of_one(call) for _ in range(5)), key=Counter.total)


def _of_one(call: Callable[[], object]) -> Counter[str]:
    seen: Counter[str] = Counter()
    before = sys.gettrace()
    sys.settrace(counting(seen))
    try:
        call()
    finally:
        sys.settrace(before)
    return seen


def counting(seen: Counter[str]) -> Callable[[FrameType, str, Any], Any]:
    """Returns what `sys.settrace` takes to count, in `seen`, the bytecodes that a thread runs in each function that is
    called."""

    def within(frame: FrameType, event: str, _: object) -> Any:
        if event == "opcode":
            seen[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"] += 1
        return within

    def begins(frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return within

    return begins


@click.command()
@click.option("--torch", "tensor", is_flag=True, help="Of a tensor of torch, not of a NumPy array.")
@click.option("--members", default=2, show_default=True)
@click.option("--bytes", "size", default="1K", show_default=True, metavar="SIZE")
def main(tensor: bool, members: int, size: str) -> None:
    array: Any = np.zeros(parse_size(size) // 4, np.float32)
    if tensor:
        import torch

        array = torch.from_numpy(array)
    with mirrored_group(members) as group:
        seen = bytecodes(lambda: group.allreduce(array))
    for name, count in seen.most_common():
        click.echo(f"{count:5} {name}")
    click.echo(f"{seen.total():5} in all, by {len(seen)} functions")


if __name__ == "__main__":
    main()
