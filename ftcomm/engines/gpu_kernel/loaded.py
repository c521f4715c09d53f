"""A kernel of whole ops that is loaded, and its launches: by one call of the driver, where Triton's launcher takes 5 us
of Python to find what is the same each time."""

from __future__ import annotations

import re
import struct
from typing import Any

from triton import knobs

from ftcomm.engines.gpu.driver import Kernel, Pushed

_RUNTIME = knobs.runtime
_ENTRY = re.compile(r"\.entry\s+\w+\s*\(([^)]*)\)")
_64_BITS = re.compile(r"\.param\s+\.[bsu]64\b")


class LoadedKernel:
    """A variant of a kernel for the words of one rank, on the GPU of a context. For one thread at a time.

    `compiled`: what Triton returns of a launch. `words`: the addresses that are its first scalars, `scalars`: how many
    follow, all int64. `constants`: what is compiled in, in the order of the kernel's arguments.
    """

    def __init__(
        self, context: Pushed, compiled: Any, words: tuple[int, ...], scalars: int, constants: tuple[Any, ...]
    ) -> None:
        self._context, self._compiled, self._words, self._constants = context, compiled, words, constants
        self._fill, self._at = struct.Struct(f"{scalars}q").pack_into, 8 * len(words)
        asked, scratch = compiled.metadata, scratch_addresses(compiled, len(words) + scalars)
        self._kernel: Kernel | None = None
        if scratch is not None:
            parameters = (*words, *[0] * (scalars + scratch))
            self._kernel = Kernel(context, compiled.function, 32 * asked.num_warps, asked.shared, parameters)

    def launch(self, programs: int, stream: int, scalars: tuple[int, ...]) -> None:
        """Queue the kernel behind what is on the stream. Raises what the driver refuses."""
        kernel = self._kernel
        if kernel is None or _RUNTIME.launch_enter_hook.calls or _RUNTIME.launch_exit_hook.calls:  # of a profiler
            with self._context:
                self._compiled[programs, 1, 1](*self._words, *scalars, *self._constants, stream=stream)
            return
        self._fill(kernel.parameters, self._at, *scalars)
        kernel.launch(programs, stream)


def scratch_addresses(compiled: Any, scalars: int) -> int | None:
    """Returns how many addresses of scratch memory, which it needs none of, the kernel has behind its scalars. Returns
    None if only Triton knows how to launch it."""
    asked = compiled.metadata
    entry = _ENTRY.search(compiled.asm["ptx"])
    found = entry[1].split(",") if entry else []
    plain = (
        len(found) >= scalars
        and all(_64_BITS.search(parameter) for parameter in found)
        and asked.num_ctas == 1
        and not asked.global_scratch_size
        and not asked.profile_scratch_size
        and not asked.launch_cooperative_grid
        and not asked.launch_pdl
    )
    return len(found) - scalars if plain else None
