"""What one is told where FTCOMM_ENGINE=gpu-reduce and gpu-kernel cannot work, and the pure parts of the CUDA device."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys

import numpy as np
import pytest
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from ftcomm.engines.gpu.probe import _driver, _extra, connections, require_cuda
from ftcomm.engines.gpu_kernel.layout import EXPORT_WORDS
from ftcomm.errors import InitError, TransportError
from ftcomm.kernels.device import words as w

pytest.importorskip("cupy")  # an optional dependency; it imports without a driver
from ftcomm.engines.gpu_kernel import memory
from ftcomm.engines.gpu_kernel.memory import Export, Shared, staging_place

no_driver = pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a driver")

EXPORT = Export(b"n" * 16, 7, 8192, 0, 1 << 27, 0x7F0000000000, 3, bytes(range(16)), bytes(range(64)))


def test_nobody_changes_the_size_of_shared_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even through /proc, where others open it for writing: it would end its owner by SIGBUS."""
    monkeypatch.setattr(memory.runtime, "hostRegister", lambda *what: None)
    monkeypatch.setattr(memory.runtime, "hostUnregister", lambda *what: None)
    monkeypatch.setattr(memory.driver, "mapped_address", lambda host: 0)
    shared = Shared.create(8192, b"n" * 16)
    with open(f"/proc/{os.getpid()}/fd/{shared.fd}", "r+b") as file:
        for size in (0, 4096, 16384):
            with pytest.raises(PermissionError):
                os.ftruncate(file.fileno(), size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(file.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    shared.close()
    shared.stop()


@no_driver
def test_no_driver() -> None:
    with pytest.raises(InitError, match=r"there is no NVIDIA driver here \(cudaErrorInsuff.*FTCOMM_ENGINE=host"):
        require_cuda()


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(InitError, match=r"needs CuPy, which is not installed: pip install 'ftcomm\[cuda1[23]\]'"):
        require_cuda()


@pytest.mark.parametrize(
    ("driver", "runtime", "said"),
    [
        (0, 12090, "no NVIDIA driver"),
        (11080, 12090, r"too old: it serves CUDA 11.8, .* CuPy needs 12.9.*pip install cupy-cuda11x"),
        (12020, 13000, r"too old: it serves CUDA 12.2, .* CuPy needs 13.0.*pip install cupy-cuda12x"),
        (12020, 12090, r"cannot be used: cudaErrorX.*driver for CUDA 12.2.*nvidia-smi"),  # a minor version is no reason
    ],
)
def test_driver(driver: int, runtime: int, said: str) -> None:
    with pytest.raises(InitError, match=said):
        raise InitError(_driver("cudaErrorX: broken", driver, runtime))


def test_extra() -> None:
    assert _extra("12.8") == "ftcomm[cuda12]"
    assert _extra("13.0") == "ftcomm[cuda13]"
    assert "cuda12" in _extra(None)
    assert "cuda13" in _extra(None)


@pytest.mark.parametrize(("value", "bad"), [(None, False), ("8", False), ("32", False), ("1", True), ("x", True)])
def test_hardware_queues(value: str | None, bad: bool) -> None:
    reason = connections({} if value is None else {"CUDA_DEVICE_MAX_CONNECTIONS": value})
    assert (reason is not None) == bad
    if reason is not None:
        assert f"CUDA_DEVICE_MAX_CONNECTIONS={value}" in reason
        assert "32" in reason


@no_driver
def test_memory_that_cannot_be_pinned_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    create = os.memfd_create
    monkeypatch.setattr(os, "memfd_create", lambda *how: made.append(create(*how)) or made[-1])
    with pytest.raises(TransportError, match="cannot reserve 8 KB of pinned host memory: cudaError"):
        Shared.create(8192, b"n" * 16)
    assert len(made) == 1
    with contextlib.suppress(OSError):  # nobody has that number now, or another file
        assert "ftcomm-lanes" not in os.readlink(f"/proc/self/fd/{made[0]}")


def test_memory_of_somebody_else_is_refused() -> None:
    fd = os.memfd_create("other")
    try:
        os.ftruncate(fd, 8192)
        with pytest.raises(TransportError, match="holds the words of another rank"):
            Shared.open(os.getpid(), EXPORT._replace(fd=fd))
        with pytest.raises(TransportError, match="has another size"):
            Shared.open(os.getpid(), EXPORT._replace(fd=fd, size=4096))
    finally:
        os.close(fd)
    with pytest.raises(TransportError, match=f"cannot map and register /proc/{os.getpid()}/fd/{fd}"):
        Shared.open(os.getpid(), EXPORT._replace(fd=fd))


def test_export() -> None:
    words = EXPORT.pack()
    assert len(words) == EXPORT_WORDS
    assert all(0 <= word < 1 << 64 for word in words)
    assert Export.unpack(words) == EXPORT


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=4, max_size=4))
def test_staging_place(peers: list[list[bool]]) -> None:
    all_can = all(peers[i][j] for i in range(4) for j in range(4) if i != j)
    place, reason = staging_place("auto", peers)
    assert (place, reason is None) == (("device", True) if all_can else ("host", False))
    assert staging_place("host", peers) == ("host", None)
    assert staging_place("device", peers) == ("device", None)


def test_what_is_said_without_peer_access() -> None:
    place, reason = staging_place("auto", [[True, True, True], [True, True, False], [True, True, True]])
    assert place == "host"
    assert reason is not None
    assert reason.startswith("GPU 1 cannot read the memory of GPU 2 (no peer access): staging in pinned host memory")


@no_driver
@pytest.mark.parametrize("second", [0, 16])
@pytest.mark.parametrize("name", ["allreduce", "coded allreduce", "collective"])
def test_a_kernel_can_be_loaded_without_touching_anything(name: str, second: int) -> None:
    """What CudaDevice launches first of every variant: OPEN says that all is over, so no other address is looked at."""
    from ftcomm.kernels.device.allreduce import allreduce, collective

    ctl, state, view = (np.zeros(size, np.int64) for size in (w.CTL_WORDS, w.STATE_WORDS, w.VIEW_WORDS))
    ctl[w.OPEN] = w.CLOSED
    before = [words.copy() for words in (ctl, state, view)]
    constants = {
        **{"T": tl.float32, "OP": 0, "W": 2, "ALIGNED": True, "LANES": 4, "CHUNK": 1 << 16},
        **{"BLOCK": 1024, "COPIED": 1024, "THREADS": 32},
    }
    kernel, own, rest = (allreduce, {"ONE_SHOT": 1 << 12, "CODED": name.startswith("coded")}, ())
    if name == "collective":
        kernel, own, rest = collective, {"ROWS": 1}, (7, second)
    nowhere = 16  # an address that cannot be read
    addresses = [words.ctypes.data for words in (ctl, state, view)]
    for values in ((nowhere, second, 9, 100_000, 7, 0, 0), (0,) * 7):
        kernel[(1,)](*addresses, *values, *rest, **constants, **own)
    assert all((words == was).all() for words, was in zip((ctl, state, view), before, strict=True))


SCALARS = """
from ftcomm.kernels.device.allreduce import allreduce, collective

for p in (*allreduce.params, *collective.params):
    assert p.is_constexpr or (p.annotation_type == "i64" and p.do_not_specialize), p.name
print("done")
"""


def test_no_value_of_a_scalar_makes_another_variant() -> None:
    """Or it would have to be compiled and loaded in the middle of a training."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", SCALARS], capture_output=True, text=True, timeout=230, env=env, check=False
    )
    assert ran.stdout.strip() == "done", ran.stderr
