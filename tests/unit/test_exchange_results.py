"""What an exchange computes, with real threads: of all types and ops, of NaNs, coded, and whatever PyTorch is told."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch

from ftcomm.collective.operation import Operation
from ftcomm.kernels.call_codes import COMPRESSIONS
from ftcomm.kernels.dtypes import DTYPES
from ftcomm.settings.tuning import BUILT_IN
from tests.rigs import exchange as exchange_rig
from tests.rigs.exchange import Caller, Member, Rig
from tests.rigs.exchange_calls import HOWS, _switch_often, agree, calls, expected, given, ones, start  # noqa: F401
from tests.rigs.fp8_results import coded

WITH_ROUTES = ("ring", "mixed ring", "rows")


# Of two members, one is reached by the same way whether the group is mixed or not. How torch adds: test_reduce.py.
@pytest.mark.protocol
@pytest.mark.parametrize(
    ("count", "how"),
    [
        (1, "shm"),
        *[(2, how) for how in HOWS if "mixed" not in how and how != "tcp hosts"],
        *[(3, how) for how in HOWS],
        *[(5, how) for how in HOWS if how in WITH_ROUTES],
        *[pytest.param(5, how, marks=pytest.mark.sweep) for how in HOWS if how not in WITH_ROUTES],
    ],
)
def test_all_dtypes_and_ops(count: int, how: str) -> None:
    out: dict[int, list[Operation]] = {}
    with Rig(range(count), how) as rig:
        rig.view(range(count))
        for caller in start(rig, count, calls(count, 60), out).values():
            caller.join()
        agree(out, list(range(count)), count)
        assert all(not member.lost for member in rig.members.values())


@pytest.mark.parametrize("how", ["shm", "alike"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_nans_and_zeros_have_the_same_bits_on_all_members(count: int, how: str) -> None:
    """Where each member sums by itself: it has its own input in its array, which lies elsewhere, and those of the
    others in their staging or its mirrors."""
    chance = np.random.default_rng(count)
    exponents = {"float32": 0x7F80_0000, "float64": 0x7FF0 << 48, "float16": 0x7C00, "bfloat16": 0x7F80}
    todo = [(dtype, op) for dtype in exponents for op in ("sum", "min", "max")]
    bits = []
    for dtype, _ in todo:
        size = DTYPES[dtype].itemsize
        drawn = chance.integers(0, 256, (count, 1002 * size), np.uint8).view(f"uint{8 * size}")
        drawn[:, ::3] &= drawn.dtype.type(1 << 8 * size - 1)  # zeros of both signs
        drawn[:, 1::3] |= drawn.dtype.type(exponents[dtype])  # NaNs with payloads, of both signs
        bits.append(drawn.view(np.uint8))
    out: dict[int, list[np.ndarray]] = {}

    def body(member: Member) -> None:
        me = member.replica
        out[me] = []
        for (dtype, op), inputs in zip(todo, bits, strict=True):
            carrier = DTYPES[dtype].carrier
            place = np.empty(len(inputs[me]) + 64, np.uint8)[8 * me :][: len(inputs[me])].view(carrier)
            place[...] = inputs[me].view(carrier)
            member.exchange.run(Operation(place, dtype, op))
            out[me].append(place)

    with Rig(range(count), how) as rig:
        rig.view(range(count))
        for caller in [Caller.start(body, member) for member in rig.members.values()]:
            caller.join()
    for number, (dtype, op) in enumerate(todo):
        assert len({out[me][number].tobytes() for me in out}) == 1, (dtype, op)


@pytest.mark.parametrize("how", ["shm", "alike", "tcp"])
@pytest.mark.parametrize("op", ["sum", "avg", "min", "max"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_of_two_nans_alone_both_members_keep_the_same(dtype: str, op: str, how: str) -> None:
    """An array of one element is reduced by another loop of NumPy where the result goes to the first input."""
    nan = {"float32": 0x7FC0_0000, "float64": 0x7FF8 << 48, "float16": 0x7E00, "bfloat16": 0x7FC0}[dtype]
    size = DTYPES[dtype].itemsize
    bits = [np.array([nan | sign << 8 * size - 1], f"uint{8 * size}") for sign in (0, 1)]  # that of inf - inf has one
    arrays = {m: bits[m].view(DTYPES[dtype].carrier) for m in range(2)}
    assert arrays[0].tobytes() != arrays[1].tobytes()
    with Rig(arrays, how) as rig:
        rig.view(range(2))
        run = lambda member: member.exchange.run(Operation(arrays[member.replica], dtype, op))  # noqa: E731
        for caller in [Caller.start(run, member) for member in rig.members.values()]:
            caller.join()
    assert arrays[0].tobytes() == arrays[1].tobytes()


@pytest.mark.protocol
@pytest.mark.parametrize("owners", [1, 2])
def test_who_owns_no_slice_of_a_task_that_fills_its_slot_stays(owners: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the last rows in the last slot it is nothing, behind the last byte of that: no reader may take it for a
    payload that lies outside."""
    monkeypatch.setattr(exchange_rig, "ROWS", dataclasses.replace(BUILT_IN, slices=owners))
    arrays = {m: np.full(4 << 20, m + 1, np.float32) for m in range(3)}  # four tasks of 4 MB
    with Rig(arrays, "rows") as rig:
        rig.view(range(3))
        run = lambda member: member.exchange.run(Operation(arrays[member.replica], "float32", "sum"))  # noqa: E731
        for caller in [Caller.start(run, member) for member in rig.members.values()]:
            caller.join()
        assert not [member.lost for member in rig.members.values() if member.lost]
    assert all((array == 6).all() for array in arrays.values())


@pytest.mark.protocol
@pytest.mark.parametrize("contributing", [{0}, {1}, {0, 2}, {1, 2}])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_input_of_a_member_that_catches_up_does_not_count(count: int, contributing: set[int]) -> None:
    contributing = {m for m in contributing if m < count}
    if not contributing:
        contributing = {count - 1}
    out: dict[int, list[Operation]] = {}
    with Rig(range(count)) as rig:
        rig.view(range(count), contributing)
        for caller in start(rig, 7, calls(7, 30), out).values():
            caller.join()
        agree(out, list(range(count)), 7)
        for op in out[0]:
            assert {who for _, _, who in op.spans()} <= {tuple(sorted(contributing))}


@pytest.mark.parametrize("how", HOWS)
def test_what_is_coded_has_the_same_bits_by_every_way(how: str) -> None:
    """And of two members with one that does not contribute, in one-shot, two-shot, and where all else goes around."""
    kinds = (("sum", "float32"), ("avg", "bfloat16"), ("sum", "float16"))
    cases = [(op, count, dtype) for count in (0, 1, 257, 40_000, 300_001) for op, dtype in kinds]
    with Rig(range(3), how, verify=how in ("shm", "tcp")) as rig:
        rig.view(range(3), (0, 2))
        for op, count, dtype in cases:
            inputs = [coded_input(m, count, dtype) for m in range(3)]
            want = coded_result(count, dtype, op)
            ops = {
                m: Operation(inputs[m].copy(), dtype, op, compression="fp8", atomic=how == "tcp") for m in rig.members
            }
            for caller in [Caller.start(rig.members[m].exchange.run, made) for m, made in ops.items()]:
                caller.join()
            for made in ops.values():
                assert made.error is None, (op, count, dtype)
                assert made.array.tobytes() == want.tobytes(), (op, count, dtype)
        assert not any(member.divergences for member in rig.members.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("how", ["ring", "mixed ring"])
def test_halves_go_around_and_are_rounded_once(how: str, dtype: str) -> None:
    """By float32 partial sums; what is averaged is no half before the last of its chain has divided it."""
    inputs = {m: given(1, m, 0, 300_001, dtype) for m in range(3)}
    with Rig(range(3), how) as rig:
        rig.view(range(3))
        ops = {m: Operation(inputs[m].copy(), dtype, "avg", compression="fp32") for m in rig.members}
        for caller in [Caller.start(rig.members[m].exchange.run, op) for m, op in ops.items()]:
            caller.join()
        for op in ops.values():
            algorithms = rig.members[0].exchange.core.stream.pipeline.algorithms
            assert algorithms.of(op) is algorithms.route
            assert op.array.tobytes() == expected(list(inputs.values()), dtype, "avg").tobytes()


@functools.cache
def coded_result(count: int, dtype: str, op: str) -> np.ndarray:
    return coded([coded_input(m, count, dtype) for m in (0, 2)], dtype, op)


@functools.cache
def coded_input(replica: int, count: int, dtype: str) -> np.ndarray:
    """Magnitudes over many binades; a NaN, an infinity, a zero block and subnormals where there is room for them."""
    chance = np.random.default_rng((replica, count))
    values = chance.standard_normal(count).astype(np.float32) * np.exp2(chance.integers(-30, 10, count), dtype="f4")
    for first, what in ((512, np.nan), (1024, np.inf), (1536, 0.0), (2048, 1e-42)):
        values[first : first + (256 if not what or what < 1 else 1)] = what
    if dtype == "float32":
        return values
    return torch.from_numpy(values).to(getattr(torch, dtype)).view(torch.int16).numpy().view(DTYPES[dtype].carrier)


@pytest.mark.parametrize("wire", COMPRESSIONS)
def test_neither_modes_nor_defaults_of_pytorch_change_a_result(wire: str) -> None:
    """Of the thread that makes the first op of a kind, whose views and scratch memory stay for later ones."""
    inputs = {m: coded_input(m, 3000, "bfloat16") for m in range(3)}
    want = coded(list(inputs.values()), "bfloat16", "sum") if wire == "fp8" else None

    def call(member: int) -> list[Operation]:
        ops = [Operation(inputs[member].copy(), "bfloat16", "sum", compression=wire) for _ in range(2)]
        with torch.inference_mode(), torch.device("meta"):
            rig.members[member].exchange.run(ops[0])
        rig.members[member].exchange.run(ops[1])
        return ops

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with Rig(range(3)) as rig:
            rig.view(range(3))
            results: list[list[Operation]] = []
            for caller in [Caller.start(lambda m: results.append(call(m)), m) for m in rig.members]:
                caller.join()
    finally:
        torch.set_default_dtype(before)
    if want is None:
        want = expected(list(inputs.values()), "bfloat16", "sum")
    for first, second in results:
        assert first.error is second.error is None
        assert first.array.tobytes() == second.array.tobytes() == want.tobytes()


def test_a_group_of_one_has_the_same_bits_as_if_it_had_lost_the_others() -> None:
    x = coded_input(0, 3000, "float32")
    with Rig(range(1)) as rig:
        rig.view((0,))
        op = Operation(x.copy(), "float32", "avg", compression="fp8")
        rig.members[0].exchange.run(op)
    assert op.array.tobytes() == coded([x], "float32", "avg").tobytes()


def test_overflow_warns_nobody(recwarn: pytest.WarningsRecorder) -> None:
    with Rig(range(1)) as rig:
        rig.view((0,))
        op = Operation(np.full(4, 3e38, np.float32), "float32", "sum")
        rig.members[0].exchange.run(op)
    with Rig(range(2)) as rig:
        rig.view((0, 1))
        ops = [Operation(np.full(4, 3e38, np.float32), "float32", "sum") for _ in range(2)]
        for caller in [Caller.start(rig.members[m].exchange.run, op) for m, op in enumerate(ops)]:
            caller.join()
        assert np.isinf(ops[0].array).all()
    assert not [warning for warning in recwarn if issubclass(warning.category, RuntimeWarning)]  # which NumPy's are
