"""Ports for servers that come back to them.

The kernel gives one that was let go to whoever asks for any; so these are of a range that it gives none of, and each
process that runs tests has a part of that for itself.
"""

from __future__ import annotations

import itertools
import os
import socket

_FIRST, _WORKERS = 10_000, 8  # as many as may run at once; Linux gives out the ports from 32,768 on
_EACH = 20_000 // _WORKERS
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
_BEGIN = os.getpid() % _EACH  # so that two runs of the tests on one machine seldom choose the same
_ports = itertools.cycle([_FIRST + _WORKER * _EACH + (_BEGIN + number) % _EACH for number in range(_EACH)])


def free_port() -> int:
    """On which nobody listens, and which nobody gets who does not ask for this very one."""
    for port in itertools.islice(_ports, _EACH):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"all ports from {_FIRST} to {_FIRST + 4 * _EACH} are taken")
