"""For all tests."""

from __future__ import annotations

import contextlib
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


with contextlib.suppress(ImportError):  # a machine with a GPU may lack it
    from hypothesis import HealthCheck, settings

    # A busy machine fails no test for being slow. The same examples are drawn each time: what is refused for chance is
    # no help. `--hypothesis-profile=search` draws others.
    settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
    settings.register_profile("search", settings.get_profile("steady"), derandomize=False)
    settings.load_profile("steady")
