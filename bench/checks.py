"""Checks that every measurement with replicas makes before it starts anything, with the same errors."""

from __future__ import annotations

from ftcomm.bench.header import available_memory
from ftcomm.control.limits import MEMBERS
from ftcomm.errors import SettingsError

RANK_MEMORY = 400 << 20  # bytes of a rank before any array or model: torch, and ftcomm's staging


def check_replicas(replicas: int) -> None:
    if not 2 <= replicas <= MEMBERS:
        raise SettingsError(f"--replicas {replicas}: expected 2 to {MEMBERS}.")


def check_at_least_one(option: str, value: int) -> None:
    if value < 1:
        raise SettingsError(f"{option} {value}: expected at least 1.")


def check_memory(what: str, ranks: int, arrays: int, lower: str) -> None:
    """Each of `ranks` has so many bytes of `arrays`; `what` they are in words; options to `lower`."""
    need, free = ranks * (RANK_MEMORY + arrays), available_memory()
    if need > free:
        raise SettingsError(f"{what} need about {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; lower {lower}.")
