"""What tests of an exchange have in common: inputs of a member, what has to come of them, and a script of calls."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from ftcomm.collective.compression import unsupported_compression
from ftcomm.collective.operation import Operation
from ftcomm.kernels.call_codes import COMPRESSIONS
from ftcomm.kernels.dtypes import DTYPES, OPS, unsupported
from ftcomm.kernels.host.reduce import Reducer, operand
from tests.rigs.exchange import DEADLINE, Caller, Rig
from tests.rigs.fp8_results import coded

HOWS = ("shm", "tcp", "alike", "mixed", "ring", "mixed ring", "hosts", "tcp hosts", "rows")


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    """Threads change places every 0.1 ms instead of 5, for more interleavings."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


def given(seed: int, replica: int, number: int, count: int, dtype: str) -> np.ndarray:
    """The input of a member for an op, as its carrier."""
    values = np.random.default_rng((seed, replica, number)).integers(0, 100, count, np.uint8)
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(DTYPES[dtype].carrier)


def expected(arrays: list[np.ndarray], dtype: str, op: str) -> np.ndarray:
    out = np.empty_like(arrays[0])
    Reducer().get(dtype, op)([operand(dtype, a) for a in arrays], operand(dtype, out))
    return out


def check(op: Operation, seed: int) -> None:
    """Every chunk is the reduction of exactly those inputs that it names."""
    covered = 0
    whole = functools.cache(lambda m: given(seed, m, op.number, op.count, op.dtype))
    for start, stop, who in op.spans():
        inputs = [whole(m)[start:stop] for m in who]
        want = (coded if op.compression == "fp8" else expected)(inputs, op.dtype, op.op)
        assert op.array[start:stop].tobytes() == want.tobytes()
        assert start == covered
        covered = stop
    assert covered == op.count


def calls(seed: int, total: int, largest: int = 300_000) -> list[tuple[int, str, str]]:
    chance = random.Random(seed)
    out = []
    while len(out) < total:
        dtype, op = chance.choice(list(DTYPES)), chance.choice(OPS)
        if unsupported(dtype, op) is None:
            out.append((chance.choice((0, 1, 7, 300, 20_000, chance.randint(1, largest))), dtype, op))
    return out


def script(
    rig: Rig, replica: int, seed: int, todo: list[tuple[int, str, str]], out: dict[int, list[Operation]]
) -> None:
    """What a user's script does: a mix of synchronous and asynchronous calls, the same on all members."""
    exchange = rig.members[replica].exchange
    chance = random.Random(seed + 1)
    ops = out[replica] = []
    for number, (count, dtype, redop) in enumerate(todo):
        array = given(seed, replica, number, count, dtype)
        wire = COMPRESSIONS[number % len(COMPRESSIONS)]
        wire = "input" if unsupported_compression(dtype, redop, wire) else wire
        op = Operation(array, dtype, redop, atomic=number % 2 == 1, compression=wire)
        ops.append(op)
        (exchange.submit if chance.random() < 0.5 else exchange.run)(op)
    exchange.wait_all(DEADLINE)


def start(rig: Rig, seed: int, todo: list[tuple[int, str, str]], out: dict[int, list[Operation]]) -> dict[int, Caller]:
    return {m: Caller.start(script, rig, m, seed, todo, out) for m in rig.members}


def agree(out: dict[int, list[Operation]], members: list[int], seed: int) -> None:
    for ops in zip(*(out[m] for m in members), strict=True):
        for op in ops:
            if op.error is not None:
                raise op.error
            assert op.array.tobytes() == ops[0].array.tobytes()
            assert op.spans() == ops[0].spans()
        check(ops[0], seed)
        assert not ops[0].atomic or len(ops[0].spans()) <= 1


def ones(count: int = 4) -> Operation:
    return Operation(np.ones(count), "float64", "sum")
