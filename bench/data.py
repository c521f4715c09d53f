"""Inputs whose all-reduce everybody can compute alone, for any number of all-reduces in a row on the same array.

Small integers in a pattern of `PERIOD` elements, another one for each rank. The period is a prime, so a chunk that ends
up at another chunk's place does not fit. Sums grow by the number of ranks with each op, so floating point starts small
and the array is filled again (outside of the timing) before it overflows; products are of -1 and 1, or 0 and 1.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch

PERIOD = 251
FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
REDOPS = ("sum", "avg", "min", "max", "product")

_SCALE = {"float64": 2.0**-900, "float32": 2.0**-100, "bfloat16": 2.0**-100, "float16": 2.0**-13}
_HEADROOM = {"float64": 1800, "float32": 200, "bfloat16": 200, "float16": 20}  # bits between the first sum and overflow
_EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Knows what each of `ranks` ranks holds, and what all hold after any number of all-reduces in a row."""

    ranks: int
    dtype: str  # of FLOATS or INTEGERS
    redop: str  # of REDOPS
    coded: bool = False  # with compression="fp8", by which a value changes by up to a 16th of it

    def max_ops(self) -> int:
        """All-reduces in a row before the values leave the range of the dtype."""
        if self.redop != "sum" or self.dtype not in _HEADROOM or self.ranks == 1:
            return 1 << 30
        return int(_HEADROOM[self.dtype] / math.log2(self.ranks))

    def row(self, rank: int) -> np.ndarray:
        """Input of `rank`: (PERIOD,) in `_work`'s dtype."""
        values = np.random.default_rng(rank).integers(0, 8, PERIOD)
        if self.redop == "product":
            values = values % 2 if self.dtype.startswith("uint") else values % 2 * 2 - 1
        scale = _SCALE.get(self.dtype, 1) if self.redop == "sum" else 1
        return values.astype(self._work) * self._work(scale)

    def result(self, ops: int) -> np.ndarray:
        """Returns the values (PERIOD,) after `ops` >= 1 all-reduces in a row."""
        row = self._reduce([self.row(rank) for rank in range(self.ranks)])
        for _ in range(ops - 1):
            after = self._reduce([row] * self.ranks)
            if self.redop != "sum" and np.array_equal(after, row):
                break  # has settled
            row = after
        return row

    def fill(self, x: torch.Tensor, rank: int) -> None:
        """Write the input of `rank` into `x` (count,), without memory of its own."""
        row = self.tensor(self.row(rank)).to(x.device)
        whole = x.numel() // PERIOD * PERIOD
        x[:whole].view(-1, PERIOD).copy_(row)
        x[whole:].copy_(row[: x.numel() - whole])

    def wrong(self, x: torch.Tensor, ops: int, start: int = 0) -> int:
        """Returns how many elements of `x` (count,) are not what `ops` all-reduces give; exact where the arithmetic is.

        `start` is the place of its first element in the whole array.
        """
        row = self.tensor(self.result(ops)).to(x.device).roll(-(start % PERIOD))
        tolerance = torch.zeros(PERIOD, dtype=torch.float64, device=x.device)
        exact = not self.coded and (self.dtype not in _EPSILON or (ops == 1 and self.redop != "avg"))
        if self.coded:
            tolerance = row.double().abs() * ((17 / 16) ** (ops + 1) - 1)  # sums of what is not negative
        elif not exact:
            tolerance = row.double().abs() * (_EPSILON[self.dtype] * self.ranks * ops)
        whole = x.numel() // PERIOD * PERIOD
        bad = 0
        for part in (*x[:whole].view(-1, PERIOD).split(4096), x[whole:].view(1, -1)):
            want = row[: part.shape[1]]
            if exact:
                bad += int((part != want).sum())
            else:  # not <=, so that a NaN is wrong as well
                bad += int((~((part.double() - want.double()).abs() <= tolerance[: part.shape[1]])).sum())
        return bad

    @property
    def _work(self) -> type[np.generic]:
        """The NumPy type in which the expectation is computed: fp64 for floats, integers as they are (they wrap)."""
        return np.float64 if self.dtype in FLOATS else np.dtype(self.dtype).type

    def _reduce(self, rows: list[np.ndarray]) -> np.ndarray:
        if self.redop in ("sum", "avg"):
            total = np.add.reduce(rows, dtype=self._work)
            return total if self.redop == "sum" else total / len(rows)
        how = {"min": np.minimum, "max": np.maximum, "product": np.multiply}[self.redop]
        return how.reduce(rows)

    def tensor(self, row: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(row).to(getattr(torch, self.dtype))


def item_size(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else int(dtype.lstrip("uintfloa")) // 8
