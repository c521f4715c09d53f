"""For all tests."""

from __future__ import annotations

import os
import signal

if not os.path.exists("/dev/nvidiactl"):
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is imported


def pytest_configure() -> None:
    """A shell lets what it starts in the background ignore SIGINT, `nohup` lets it ignore SIGHUP, and so would all that
    the tests start and stop."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
