"""What makes Triton's interpreter faster changes nothing that it computes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ftcomm.kernels.device import INTERPRETED

pytestmark = [pytest.mark.protocol, pytest.mark.skipif(not INTERPRETED, reason="of the interpreter")]

if INTERPRETED:
    from ftcomm.engines.gpu.interpreter import interpreter, tl


def operands() -> list[Any]:
    """Scalars and blocks of each kind, pointers, and integers of either sign and of any size."""
    kinds = (tl.int1, tl.int32, tl.int64, tl.uint8, tl.uint64, tl.float16, tl.float32, tl.float64)
    found: list[Any] = [0, 1, -1, 300, 1 << 40, True, 2.5]
    for kind in (*kinds, tl.pointer_type(tl.int64)):
        values = np.arange(4).astype(interpreter._get_np_dtype(kind))
        found.append(tl.tensor(interpreter.TensorHandle(values[:1], kind), kind))
        found.append(tl.tensor(interpreter.TensorHandle(values, kind), tl.block_type(kind, [4])))
    return found


def outcome(check: Callable[..., Any], *arguments: Any) -> object:
    try:
        pair = check(*arguments)
    except Exception as error:
        return type(error), str(error)
    return [(each.type.name, each.handle.data.dtype, each.handle.data.tolist()) for each in pair]


@pytest.mark.parametrize(
    "how", [(), (True, True), (True, False), (False, False, True, True), (True, True, False)], ids=str
)
def test_operands_are_brought_to_the_types_to_which_triton_brings_them(how: tuple[bool, ...]) -> None:
    semantic = interpreter.interpreter_semantic
    real, ours = type(semantic).binary_op_type_checking_impl, semantic.binary_op_type_checking_impl
    for left, right in itertools.product(operands(), repeat=2):
        wanted = outcome(real, semantic, left, right, *how)
        for _ in range(2):  # the second time as it is remembered
            assert outcome(ours, left, right, *how) == wanted, (left, right)


def test_constants_are_taken_out_of_all_that_holds_some() -> None:
    inner = tl.constexpr(3)
    assert [tl.core._unwrap_if_constexpr(each) for each in (inner, [inner], (inner, 4), 5, None)] == [
        3, [3], (3, 4), 5, None
    ]  # fmt: skip
    assert tl.core._unwrap_if_constexpr(tl.tuple([inner, inner])).values == [3, 3]
