"""Waits for the end of threads that were told to end, but for none of them for ever."""

from __future__ import annotations

import logging
import threading

log = logging.getLogger("ftcomm")

LIMIT = 10.0  # s; what a thread may be in the middle of takes 2, or 5


def join(thread: threading.Thread, who: str) -> bool:
    """Block until a thread of `who` has ended, which was told to; False, with a line in the log, if it has not within
    `LIMIT` seconds. It then goes on, so what it works with has to stay."""
    thread.join(LIMIT)
    if thread.is_alive():
        log.warning(
            "%s: thread %s was told to end, and has not within %g s. The close goes on without it; please report it, "
            "with the stacks of this process",
            *(who, thread.name, LIMIT),
        )
    return not thread.is_alive()
