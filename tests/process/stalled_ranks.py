"""Ranks that stand still at a named point while their control thread lives: what the tests of stalls start with."""

from __future__ import annotations

from typing import Any

from ftcomm.collective.adaptive_timeout import AdaptiveTimeouts
from ftcomm.settings import Settings

from .rank_points import watch_points


def watch_late(settings: Settings, arguments: dict[str, Any]) -> None:
    """`watch_points`; the replicas in `arguments["late"]` complain as late as they may, as if ops were slow."""
    watch_points(settings, arguments)
    if settings.replica in arguments["late"]:
        AdaptiveTimeouts.of = lambda self, nbytes: self.ceiling  # type: ignore[method-assign]
