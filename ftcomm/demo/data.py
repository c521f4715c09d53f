"""Real text that every machine has: the source of the Python standard library of the running interpreter."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "__pycache__"}
HELD_OUT = 16  # every 16th file is kept for validation
ENOUGH = 8 << 20  # bytes of text


def library_text() -> tuple[np.ndarray, np.ndarray]:
    """Returns (training text, validation text) as uint8, of different files; equal in all replicas of one Python."""
    train: list[bytes] = []
    held_out: list[bytes] = []
    size = 0
    for number, file in enumerate(_files(sysconfig.get_path("stdlib"))):
        text = file.read_bytes()
        (held_out if number % HELD_OUT == HELD_OUT - 1 else train).append(text)
        size += len(text)
        if size > ENOUGH:
            break
    return tuple(np.frombuffer(b"".join(texts), np.uint8) for texts in (train, held_out))  # type: ignore[return-value]


def _files(root: str) -> list[Path]:
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - LEFT_OUT)  # pruned here: site-packages may hold far more than the library
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def batch(text: np.ndarray, seed: int, step: int, replica: int, size: int, context: int) -> Tensor:
    """Returns int64 [size, context + 1], a pure function of the arguments: there is no position to save or restore."""
    starts = np.random.default_rng([seed, step, replica]).integers(0, len(text) - context - 1, size)
    return windows(text, starts, context)


def windows(text: np.ndarray, starts: np.ndarray, context: int) -> Tensor:
    return torch.from_numpy(text[starts[:, None] + np.arange(context + 1)].astype(np.int64))
