"""All-reduce inside `jax.jit`, of a whole pytree.

    import ftcomm.jax

    @jax.jit
    def train(params, batch):
        gradients = jax.grad(loss)(params, batch)
        gradients = ftcomm.jax.allreduce(gradients, "avg")     # survives the death of the others
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients)

    kept = {"params": params}
    for step in ftcomm.steps(1000, {"kept": kept}):
        kept["params"] = train(kept["params"], batch(step))

The compiled program calls back to the host, where the all-reduce runs as any other, so arrays of a GPU are copied there
and back. Calls of all programs of a process keep the order in which they were dispatched. JAX returns before a program
has run; the step loop waits for it before it settles a step, so that every call belongs to the step it was made in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import io_callback

from ftcomm.errors import ArgumentError
from ftcomm.kernels.dtypes import OPS
from ftcomm.process import pending

if TYPE_CHECKING:
    from ftcomm.groups.group import Group

_failed: Exception | None = None  # what a call has failed with, which JAX tells as text


def allreduce(tree: Any, op: str = "sum", *, group: Group | None = None) -> Any:
    """Returns `tree` with each array reduced over the replicas; the others' trees have the same shapes and dtypes.

    tree: a pytree of arrays, inside `jax.jit` or outside. Its shapes and dtypes stay; float, integer and bool arrays.
    op: as of `ftcomm.allreduce`.
    group: default: the default group of the time when the program runs.

    In a program it blocks the program, not its caller. Where no step loop follows, call `jax.effects_barrier()` before
    `ftcomm.shutdown` or calls outside of programs. Not under `vmap`, `grad` or several devices: reduce gradients, not
    the loss. Raises `ArgumentError` while it is traced. An error of the op, such as `MismatchError`, ends the program
    as an error of JAX, and the step loop raises the original. One thread a process.
    """
    if op not in OPS:
        raise ArgumentError(f"op={op!r} of ftcomm.jax.allreduce; expected one of {', '.join(OPS)}.")
    leaves, structure = jax.tree.flatten(tree)
    for leaf in leaves:
        if not hasattr(leaf, "dtype") or not isinstance(leaf.dtype, np.dtype):
            kind = f"{type(leaf).__name__} and dtype {getattr(leaf, 'dtype', None)}"
            raise ArgumentError(
                f"a leaf of type {kind} in ftcomm.jax.allreduce; expected arrays of numbers. "
                "Pass jnp.asarray(value), or jax.random.key_data(key)."
            )
    if not leaves:
        return tree
    if _settle not in pending.waits:
        pending.waits.append(_settle)

    def reduce(*arrays: Any) -> list[Any]:
        global _failed
        try:
            with pending.calls():
                return _reduce(arrays, op, group)
        except Exception as error:
            _failed = error
            raise

    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    return jax.tree.unflatten(structure, io_callback(reduce, shapes, *leaves, ordered=True))


def _reduce(arrays: tuple[Any, ...], op: str, group: Group | None) -> list[Any]:
    if group is None:
        from ftcomm.groups.default_group import default_group

        group = default_group()
    works = [group.allreduce(np.array(each, order="C"), op, async_op=True) for each in arrays]
    return [work.wait() for work in works]


def _settle() -> None:
    """Wait until all programs that call back have run, and raise what a call has failed with."""
    global _failed
    try:
        jax.effects_barrier()
    except Exception as error:
        failed, _failed = _failed, None
        raise (failed or error) from None
