"""What `ftcomm.kernels.host.fp8` has to give, in plain NumPy and in as many arrays as it takes; codes in integers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ftcomm.kernels.host.fp8 import BLOCK, LARGEST, NAN, RECORD, ROUND_UP, SHIFT, TOP


def _e4m3_values() -> np.ndarray:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(exponent > 0, np.ldexp(8.0 + mantissa, exponent - 10), np.ldexp(mantissa, -9))
    value[(code & 0x7F) == 0x7F] = np.nan
    return np.where(code >> 7, -value, value).astype(np.float32)


E4M3_VALUES = _e4m3_values()  # of the 256 codes


def encode(x: torch.Tensor) -> np.ndarray:
    """Records of a tensor of float32, float16 or bfloat16."""
    return _encode(x.float().numpy())


def decode(records: np.ndarray, count: int, dtype: str) -> torch.Tensor:
    """Its elements, rounded to nearest even; one NaN."""
    values = torch.from_numpy(_decode(records)[:count].copy())
    out = values.to(getattr(torch, dtype))
    out[values.isnan()] = torch.nan
    return out


def reduce(sources: Sequence[np.ndarray], op: str) -> np.ndarray:
    """Records of the sum or average in float32, in the order of the sources."""
    with np.errstate(invalid="ignore", over="ignore"):
        acc = _decode(sources[0])
        for source in sources[1:]:
            acc += _decode(source)
        if op == "avg":
            acc /= np.float32(len(sources))
    return _encode(acc)


def _decode(records: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", over="ignore"):
        return (E4M3_VALUES[records["codes"]] * records["scale"][:, None]).reshape(-1)


def _encode(x: np.ndarray) -> np.ndarray:
    padded = np.zeros((-(-len(x) // BLOCK), BLOCK), np.float32)
    padded.reshape(-1)[: len(x)] = x
    bits = padded.view(np.int32)
    # As integers magnitudes have the order of the values, and NaN and infinity come last.
    amax = (bits & 0x7FFFFFFF).max(axis=1, initial=0).astype(np.int64)
    poisoned = amax >= 0x7F800000
    exponent = np.clip(((amax + ROUND_UP) >> 23) - SHIFT, 1, TOP).astype(np.int32)
    inverse = ((254 - exponent) << 23).view(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        magnitude = np.minimum(np.abs(padded) * inverse[:, None], np.float32(LARGEST))
    records = np.empty(len(padded), RECORD)
    records["codes"] = _e4m3(magnitude, bits < 0)
    records["codes"][poisoned] = NAN
    records["scale"] = np.where(poisoned, np.int32(0x7FC00000), exponent << 23).view(np.float32)
    return records


def _e4m3(magnitude: np.ndarray, negative: np.ndarray) -> np.ndarray:
    """To nearest even: what libraries make of a tie or of a subnormal differs."""
    bits = magnitude.view(np.uint32)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20).astype(np.int32) - ((127 - 7) << 3)
    with np.errstate(invalid="ignore"):
        subnormal = np.rint(magnitude * np.float32(512)).astype(np.int32)
    return (np.where(bits < 0x3C800000, subnormal, normal) | (negative << 7)).astype(np.uint8)
