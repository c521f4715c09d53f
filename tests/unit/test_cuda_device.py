"""What a GPU's device says when the driver, Triton or the memory refuse: calls of theirs are played here."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl

pytest.importorskip("cupy")  # an optional dependency; it imports without a driver
from ftcomm.engines.gpu_kernel import cuda, memory
from ftcomm.engines.gpu_kernel.cuda import CudaDevice
from ftcomm.engines.gpu_kernel.device import KernelLaunch
from ftcomm.engines.gpu_kernel.memory import Export, open_staging
from ftcomm.errors import FtcommError, TransportError
from ftcomm.kernels.device.variant import Variant
from tests import launch_path
from tests.bytecodes import bytecodes

VARIANT = Variant(tl.float32, 0, 2, True, 64, 256 << 10, 64 << 10, False)
LAUNCH = KernelLaunch(torch.zeros(4), 4, 7, 0, 1, None, 1, VARIANT)
EXPORT = Export(b"n" * 16, 7, 8192, 0, 1 << 27, 0x7F0000000000, 3, bytes(range(16)), bytes(range(64)))
SHARED: Any = SimpleNamespace(address=4096)
NO_DRIVER_CALL = contextlib.nullcontext


def raising(error: BaseException) -> Callable[..., Any]:
    def call(*_: object, **__: object) -> Any:
        raise error

    return call


def device() -> CudaDevice:
    """One that is made, but by no driver."""
    made: Any = object.__new__(CudaDevice)
    made._index, made._captures = 0, None
    made._op = SimpleNamespace(cuda_stream=7)
    made._table = SimpleNamespace(words=range(8))
    made._words = SimpleNamespace(addresses=(1, 2, 3))
    made._context, made._loaded = SimpleNamespace(pushed=NO_DRIVER_CALL(), current=NO_DRIVER_CALL), {}
    return made


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError(2, "No such file or directory", "gcc"), r"'gcc'.*needs a C compiler .* apt install gcc"),
        (subprocess.CalledProcessError(1, ["gcc", "launcher.c"]), r"'gcc', 'launcher.c'.*needs a C compiler .* CC"),
        (RuntimeError("PTX was compiled with an unsupported toolchain"), "cannot be launched: PTX was compiled"),
        (torch.OutOfMemoryError("CUDA out of memory"), "cannot be launched: CUDA out of memory"),
    ],
)
def test_a_kernel_that_cannot_be_made(error: BaseException, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler for Triton's launcher, one that fails, an old driver, no memory to load it into."""
    monkeypatch.setattr(CudaDevice, "_load", raising(error))
    with pytest.raises(FtcommError, match=said):
        device().launch(LAUNCH)


def test_a_launch_that_the_driver_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does from a failed kernel on, whoever had launched that."""
    refuses = SimpleNamespace(launch=raising(RuntimeError("CUDA error: an illegal memory access was encountered")))
    monkeypatch.setattr(CudaDevice, "_load", lambda *_: refuses)
    array: Any = SimpleNamespace(nbytes=16, data_ptr=lambda: 16, record_stream=lambda stream: None)
    with pytest.raises(FtcommError, match="cannot be launched: CUDA error: an illegal memory access"):
        device().launch(KernelLaunch(array, 4, 7, 0, 1, None, 1, VARIANT))


def test_ranks_that_share_a_gpu_share_its_multiprocessors() -> None:
    made: Any = device()
    made._multiprocessors, made._uuid, made._lock, made._leaving = 132, b"ours", threading.Lock(), []
    made._peers = {str(i): SimpleNamespace(export=SimpleNamespace(uuid=uuid)) for i, uuid in enumerate((b"ours", b"x"))}
    made._count_programs()
    assert made.programs(1 << 30, 128, 128) == 64  # 65 fit
    made.leave(SimpleNamespace(nonce="1"))
    assert made.programs(1 << 30, 128, 128) == 64
    made.leave(SimpleNamespace(nonce="0"))
    assert made.programs(1 << 30, 128, 128) == 128
    made._peers = {str(i): SimpleNamespace(export=SimpleNamespace(uuid=b"ours")) for i in range(132)}
    made._count_programs()
    with pytest.raises(FtcommError, match=r"133 ranks share a GPU of 132 multiprocessors.*fewer ranks"):
        made.programs(1 << 30, 128, 128)


def test_a_launch_takes_few_bytecodes() -> None:
    """What the host does for each op (`python -m tests.launch_path`), as its time depends on the machine."""
    with launch_path.core_without_driver() as core:
        op = launch_path.an_op(64 << 10)
        launch_path.load(core, op)
        seen = bytecodes(lambda: core.launch(op, launch_path.VIEW))
    assert seen.total() <= 392, seen.most_common()


def test_a_context_that_is_lost(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(cuda, "stream_ended", raising(RuntimeError("cuStreamQuery: CUDA_ERROR_ILLEGAL_ADDRESS")))
    with pytest.raises(FtcommError, match=r"cannot be used any more: cuStreamQuery: .*; restart this process"):
        device().check()
    assert not device().settle(0.1)
    assert "the GPU cannot be used any more: cuStreamQuery" in caplog.text


def test_no_memory_for_the_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was pinned for it is given back: another attempt may ask for less."""
    given_back: list[str] = []
    lanes = SimpleNamespace(
        address=4096, fd=7, size=8192, close=lambda: given_back.append("closed"), stop=lambda: given_back.append("fd")
    )
    monkeypatch.setattr(cuda.Shared, "create", lambda *_: lanes)
    monkeypatch.setattr(cuda.runtime, "malloc", raising(cuda.runtime.CUDARuntimeError(2)))
    with pytest.raises(TransportError, match=r"cannot set aside \d+ MB of GPU memory .*FTCOMM_STAGING=host on all"):
        device()._allocate(SimpleNamespace(nonce="ab" * 16), "device")  # type: ignore[arg-type]
    assert given_back == ["closed", "fd"]


MEND = r"nvidia-smi topo -p2p r.*set FTCOMM_STAGING=host on all ranks"


def test_memory_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with an IPC namespace of its own, or a GPU that each process sees alone and that has no peers."""
    refused = RuntimeError("cuIpcOpenMemHandle_v2: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")
    monkeypatch.setattr(memory.driver, "open_ipc", raising(refused))
    with pytest.raises(TransportError, match=f"process 99 cannot be opened here: cuIpcOpen.*{MEND}"):
        open_staging(99, EXPORT, SHARED, 0)


def test_no_peer_access_within_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = memory.runtime.CUDARuntimeError(217)  # cudaErrorPeerAccessUnsupported
    monkeypatch.setattr(memory.runtime, "deviceEnablePeerAccess", raising(refused))
    with pytest.raises(TransportError, match=f"cannot be opened here: cudaErrorPeerAccessUnsupported.*{MEND}"):
        open_staging(os.getpid(), EXPORT, SHARED, 0)
    assert open_staging(os.getpid(), EXPORT._replace(device=0), SHARED, 0) == (EXPORT.pointer, False)


def test_staging_in_host_memory_needs_no_peer_access(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.driver, "open_ipc", raising(RuntimeError("is not asked for")))
    assert open_staging(99, EXPORT._replace(staging_at=512), SHARED, 0) == (4096 + 512, False)
