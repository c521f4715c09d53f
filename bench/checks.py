"""What every measurement with replicas refuses before it starts anything, in the same words."""

from __future__ import annotations

from ftcomm.bench.header import available_memory
from ftcomm.errors import SettingsError

MAX_REPLICAS = 16


def check_replicas(replicas: int) -> None:
    if not 2 <= replicas <= MAX_REPLICAS:
        raise SettingsError(f"--replicas {replicas}: expected 2 to {MAX_REPLICAS}.")


def check_at_least_one(option: str, value: int) -> None:
    if value < 1:
        raise SettingsError(f"{option} {value}: expected at least 1.")


def check_memory(what: str, need: int, lower: str) -> None:
    """`need` bytes by `what`, in words; `lower` are the options that it follows from."""
    free = available_memory()
    if need > free:
        raise SettingsError(f"{what} need about {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; lower {lower}.")
