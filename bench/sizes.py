"""Message sizes as nccl-tests writes them: 1K is 1024 bytes."""

from __future__ import annotations

import re

from ftcomm.errors import SettingsError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """`1K`, `64M`, `1.5G`, `512` (case and a trailing B or iB do not matter) -> bytes; raises `SettingsError`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?)(?:I?B)?\s*", text.upper())
    if match is None:
        raise SettingsError(f"{text!r} is no size; expected bytes, or a number with K, M or G, as in 64M.")
    size = float(match[1]) * _UNITS[match[2]]
    if size != int(size):
        raise SettingsError(f"{text!r} is not a whole number of bytes.")
    return int(size)


def format_size(size: int) -> str:
    """The shortest exact form: 1024 -> 1K, 1000 -> 1000."""
    unit = next((u for u in ("G", "M", "K") if size and size % _UNITS[u] == 0), "")
    return f"{size // _UNITS[unit]}{unit}"


def sweep(first: int, last: int, *, factor: int | None = None, step: int | None = None) -> list[int]:
    """Sizes from `first` to `last`, both included where they are met: times `factor`, or plus `step`.

    Raises `SettingsError` on a sweep that is empty or has no end.
    """
    if first < 1:
        raise SettingsError(f"the smallest size is {first} bytes; expected at least 1.")
    if first > last:
        raise SettingsError(
            f"the smallest size (-b {format_size(first)}) is above the largest (-e {format_size(last)}); swap them."
        )
    if factor is not None and step is not None:
        raise SettingsError("-f and -i exclude each other: a sweep multiplies or adds.")
    if factor is not None and factor < 2:
        raise SettingsError(f"-f {factor}: the factor between sizes has to be at least 2.")
    if step is not None and step < 1:
        raise SettingsError(f"-i {step}: the step between sizes has to be at least one byte.")
    sizes = [first]
    while (size := sizes[-1] + step if step is not None else sizes[-1] * (factor or 2)) <= last:
        sizes.append(size)
        if len(sizes) > 10_000:
            raise SettingsError(f"-i {step} makes more than 10000 sizes; choose a larger step.")
    return sizes
