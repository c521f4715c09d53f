"""Limits how fast a source sends the state: FTCOMM_CATCHUP_MBPS million bytes a second, to all joiners together."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from ftcomm.errors import SettingsError

LEAST = 1.0  # MB/s; at a lower rate a joiner would take a slow block for a lost source


class Throttle:
    """A limit on bytes a second. Thread-safe. `take` blocks, except without a rate."""

    def __init__(
        self,
        rate: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """`rate` is in bytes a second."""
        self._rate, self._clock, self._sleep = rate, clock, sleep
        self._lock = threading.Lock()
        self._free = clock()  # when all bytes taken so far will have passed

    @classmethod
    def from_env(cls, argument: float | None = None) -> Throttle:
        """Makes the throttle from `argument` in MB/s, or the environment. Raises `SettingsError`."""
        text = os.environ.get("FTCOMM_CATCHUP_MBPS") if argument is None else str(argument)
        if not text:
            return cls(None)
        try:
            rate = float(text)
        except ValueError:
            rate = 0.0
        if not LEAST <= rate < float("inf"):
            raise SettingsError(
                f"FTCOMM_CATCHUP_MBPS={text}; expected million bytes a second, at least {LEAST:g}, or unset it."
            )
        return cls(rate * 1e6)

    def take(self, nbytes: int) -> None:
        """Block until `nbytes` may be sent."""
        if self._rate is None:
            return
        with self._lock:
            now = self._clock()
            wait = max(0.0, self._free - now)
            self._free = max(self._free, now) + nbytes / self._rate
        if wait:
            self._sleep(wait)
