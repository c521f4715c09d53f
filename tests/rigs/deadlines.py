"""For how long a test waits."""

from __future__ import annotations

DEADLINE = 240.0  # s for anything: a bound for what hangs, on a machine however busy, and no measure of what is fast
