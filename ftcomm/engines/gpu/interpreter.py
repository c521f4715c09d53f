"""Triton's interpreter in place of a GPU: kernels on host memory, for tests.

To be imported before anything else imports Triton, which decides when a kernel is decorated. The interpreter keeps its
state in globals, so one kernel runs at a time in a process.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # counts from the first import of triton on

import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

from ftcomm.errors import SettingsError
from ftcomm.kernels.device import INTERPRETED

__all__ = ["interpreter", "tl"]  # for who imports Triton by this

if not (INTERPRETED and isinstance(tl.sum, interpreter.InterpretedFunction)):
    raise SettingsError(
        "FTCOMM_ENGINE=interpreter-... comes too late: Triton was imported before, to compile. Set TRITON_INTERPRET=1 "
        "in the environment, or choose another engine."
    )


def _patch_once() -> None:
    """The interpreter patches triton.language for a launch, and again for every call of a function in it, which finds
    nothing left to patch and takes 0.5 ms to do so: two thirds of an op. Here only the first call of each module does.
    """
    real = interpreter._patch_lang
    modules: set[int] = set()  # patched in this launch; one at a time

    def patch(fn: Any) -> Any:
        outermost, module = not modules, id(fn.__globals__)
        if module in modules:
            return None
        modules.add(module)
        scope = real(fn)
        if outermost:
            restore = scope.restore

            def leave() -> None:
                modules.clear()
                restore()

            scope.restore = leave
        return scope

    interpreter._patch_lang = patch


def _compute_once() -> None:
    """Skip what the interpreter computes for nothing, or again for each operation: two fifths of its time. It looks
    for overflows of integers, of which it tells with `debug` alone; and makes each type of a block, its shape and its
    counterpart in NumPy anew."""
    builder, block, tensor = interpreter.interpreter_builder, tl.block_type, tl.tensor
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    block.to_ir = lambda self, builder: self  # that of an equal type
    block.with_element_ty = _by_names(block.with_element_ty)
    interpreter._get_np_dtype = _by_names(interpreter._get_np_dtype)
    made = tensor.__init__
    shapes: dict[str, tuple[Any, Any]] = {}  # by the name of the type: of a tensor, and how many elements it has

    def make(self: Any, handle: Any, type: Any) -> None:
        if type.name in shapes:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = shapes[type.name]
        else:
            made(self, handle, type)
            shapes[type.name] = self.shape, self.numel

    tensor.__init__ = make


def _check_once() -> None:
    """Remember for which types both sides of an operation stay what they are, and the tensors made of integers. The
    interpreter works both out anew in each operation, though they depend on types and values alone."""
    tensor, semantic = tl.tensor, interpreter.interpreter_semantic
    real = semantic.binary_op_type_checking_impl
    alike: set[tuple[Any, ...]] = set()  # types of two tensors that stay what they are
    made: dict[tuple[Any, ...], Any] = {}  # type of a tensor that does, and an integer -> the tensor of that

    def check(left: Any, right: Any, *how: bool, **named: bool) -> tuple[Any, Any]:
        kinds = type(left), type(right)
        if named or kinds not in ((tensor, tensor), (tensor, int)):
            return real(left, right, *how, **named)  # type: ignore[no-any-return]
        if kinds[1] is int:
            key = left.type.name, right, how
            if key not in made:
                same, one = real(left, right, *how)
                if same is not left:
                    return same, one
                if len(made) > 4096:
                    made.clear()
                made[key] = one
            return left, made[key]
        key = left.type.name, right.type.name, how
        if key in alike:
            return left, right
        pair = real(left, right, *how)
        if pair[0] is left and pair[1] is right:
            alike.add(key)
        return pair  # type: ignore[no-any-return]

    semantic.binary_op_type_checking_impl = check


def _unwrap_once() -> None:
    """Remember which types have no constants in them. The interpreter asks four times of each argument."""
    real = core._unwrap_if_constexpr
    plain: dict[type, bool] = {}  # whether values of that type have nothing to be taken out

    def unwrap(value: Any) -> Any:
        kind = type(value)
        if kind not in plain:
            plain[kind] = not issubclass(kind, (tl.constexpr, list, tuple, core.tuple))
        return value if plain[kind] else real(value)

    core._unwrap_if_constexpr = unwrap


def _call_once() -> None:
    """Call the built-ins of the language at once. The interpreter calls each through two functions, of which one checks
    what the other has given it."""
    semantic, guard = interpreter.interpreter_semantic, core.builtin(lambda: None).__code__

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner = member.__wrapped__ if getattr(member, "__code__", None) is guard else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch


def _by_names(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which remembers what it has returned for types of these names; not all types have a hash."""
    found: dict[tuple[str, ...], Any] = {}

    def remembered(*types: Any) -> Any:
        names = tuple([each.name for each in types])
        if names not in found:
            found[names] = function(*types)
        return found[names]

    return remembered


_patch_once()
_compute_once()
_check_once()
_unwrap_once()
_call_once()
