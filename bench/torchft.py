"""torchft beside us: its lighthouse, as a program of its own that writes more than should be shown, and its manager."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import IO, TYPE_CHECKING, Any

from ftcomm.errors import FtcommError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

TIMEOUT = timedelta(seconds=30)  # of a peer's op; the default of gloo is half an hour, of torchft a minute
JOIN_TIMEOUT = 1000  # ms that it waits for replicas that are alive and have not come to a quorum


def manager(
    replica: int,
    store: TCPStore,
    state: Callable[[], Any] | None = None,
    load: Callable[[Any], None] | None = None,
    *,
    least: int = 1,
    **options: Any,
) -> Any:
    """Makes the manager of the only rank of a replica, over gloo; it goes on with `least` replicas."""
    from torchft import Manager, ProcessGroupGloo

    return Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=least,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        hostname="localhost",
        replica_id=f"replica_{replica}_",
        **options,
    )


@contextlib.contextmanager
def lighthouse(log: IO[Any], min_replicas: int = 1) -> Iterator[str]:
    """Runs a lighthouse, and yields its address. Raises `FtcommError`."""
    command = [sys.executable, "-m", "ftcomm.bench.torchft", str(min_replicas)]
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
