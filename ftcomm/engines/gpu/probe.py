"""Whether FTCOMM_ENGINE=gpu-reduce and gpu-kernel can work in this process, asked before anybody is told of this rank.

What it takes: a driver, a PyTorch that has CUDA, CuPy for the parts of the CUDA runtime that PyTorch does not offer
(IPC handles, pinned and registered memory), and Triton. NVRTC is not needed: Triton brings its own compiler, and no
CuPy kernel is compiled.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping

import torch

from ftcomm.errors import InitError

# 32 hardware queues, see `connections`. Kernels are loaded at the start and not at their first launch: that may wait
# for all that runs ("Lazy Loading" in the CUDA programming guide), hence for an op that waits for what this thread has
# not launched yet.
ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}

CAPABILITY = (7, 0)  # the first whose loads and stores have acquire and release
_HOST = "or use FTCOMM_ENGINE=host, which copies arrays through host memory."


def require_cuda() -> None:
    """Raise `InitError` that says what is missing and what to type.

    Before the first use of CUDA in the process it also asks for what the engine needs of it (`ENVIRONMENT`), unless
    somebody has said otherwise.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    extra = _extra(torch.version.cuda)
    if importlib.util.find_spec("cupy") is None:
        raise InitError(f"FTCOMM_ENGINE=gpu-... needs CuPy, which is not installed: pip install '{extra}', {_HOST}")
    from cupy.cuda import runtime

    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise InitError(_driver(str(error), runtime.driverGetVersion(), runtime.runtimeGetVersion())) from None
    if count == 0:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise InitError(f"FTCOMM_ENGINE=gpu-..., and none is visible (CUDA_VISIBLE_DEVICES={seen}); show one, {_HOST}")
    if torch.version.cuda is None:
        raise InitError(
            f"FTCOMM_ENGINE=gpu-... needs a PyTorch with CUDA; torch {torch.__version__} has none. Install one from "
            f"https://pytorch.org/get-started/locally, {_HOST}"
        )
    if importlib.util.find_spec("triton") is None:
        raise InitError(f"FTCOMM_ENGINE=gpu-... needs Triton, which is not installed: pip install '{extra}', {_HOST}")
    if torch.cuda.get_device_capability() < CAPABILITY:
        name, has = torch.cuda.get_device_name(), ".".join(map(str, torch.cuda.get_device_capability()))
        raise InitError(
            f"FTCOMM_ENGINE=gpu-... needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or higher; "
            f"{name} has {has}. Choose another by torch.cuda.set_device() before ftcomm.init(), {_HOST}"
        )
    reason = connections(os.environ)
    if reason:
        raise InitError(reason)


def connections(env: Mapping[str, str]) -> str | None:
    """Returns why streams cannot run side by side with so few hardware queues; None if they can.

    Streams share CUDA_DEVICE_MAX_CONNECTIONS queues, 8 unless it is set. In a shared queue what an op of another
    rank waits for may stand behind what waits for that op.
    """
    value = env.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if value is None or (value.isdigit() and int(value) >= 8):
        return None
    return (
        f"CUDA_DEVICE_MAX_CONNECTIONS={value}: with so few hardware queues what an op waits for may stand behind what "
        f"waits for that op. Set it to 32 (at least 8) before the program starts, {_HOST}"
    )


def _driver(error: str, driver: int, runtime: int) -> str:
    needed = f"{runtime // 1000}.{runtime % 1000 // 10}"
    if driver == 0:
        return f"FTCOMM_ENGINE=gpu-..., and there is no NVIDIA driver here ({error}). Run where there is a GPU, {_HOST}"
    has = f"{driver // 1000}.{driver % 1000 // 10}"
    if driver // 1000 < runtime // 1000:
        return (
            f"the NVIDIA driver is too old: it serves CUDA {has}, and the installed CuPy needs {needed}. Update the "
            f"driver, or install CuPy for CUDA {driver // 1000}: pip install cupy-cuda{driver // 1000}x, {_HOST}"
        )
    return (
        f"FTCOMM_ENGINE=gpu-..., and the GPUs cannot be used: {error} (driver for CUDA {has}). See nvidia-smi, {_HOST}"
    )


def _extra(cuda: str | None) -> str:
    """The extra of ftcomm that fits a PyTorch for CUDA `cuda`."""
    return f"ftcomm[cuda{cuda.partition('.')[0]}]" if cuda else "ftcomm[cuda12]' or 'ftcomm[cuda13]"
