"""torchft's lighthouse for as long as a block lasts, as a program of its own: it writes more than should be shown."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import IO, Any

from ftcomm.errors import FtcommError

JOIN_TIMEOUT = 1000  # ms that it waits for replicas that are alive and have not come to a quorum


@contextlib.contextmanager
def lighthouse(log: IO[Any], min_replicas: int = 1) -> Iterator[str]:
    """Its address. Raises `FtcommError`."""
    command = [sys.executable, "-m", "ftcomm.bench.lighthouse", str(min_replicas)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        if not address:
            raise FtcommError(f"torchft's lighthouse did not start; look at {log.name}")
        yield address
    finally:
        process.kill()
        process.wait(30)


def main() -> None:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=int(sys.argv[1]), join_timeout_ms=JOIN_TIMEOUT)
    print(server.address(), flush=True)
    sys.stdin.read()  # until whoever started it is gone


if __name__ == "__main__":
    main()
