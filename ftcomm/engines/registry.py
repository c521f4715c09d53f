"""Opens the engine that FTCOMM_ENGINE names. Imports no more than the choice needs.

    engine                               who drives an op                          who reduces
    host                                 this process                              it
    gpu-reduce, interpreter-reduce       this process                              a kernel
    gpu-kernel, interpreter-kernel       a kernel, among replicas of one host      it

`interpreter-...` are the same kernels in Triton's interpreter, without a GPU, for tests.
"""

from __future__ import annotations

from collections.abc import Callable

from ftcomm.engines.base import JobEngine
from ftcomm.engines.host import HostEngine
from ftcomm.settings import Settings
from ftcomm.settings.engines import AUTO
from ftcomm.transport.segment import Segment


def open_engine(settings: Settings) -> JobEngine:
    """Raises `SettingsError` or `InitError` if the engine cannot be had here, `TransportError` without memory."""
    settings.check_engine()
    return OPENERS[AUTO if settings.engine == "auto" else settings.engine](settings)


def _gpu_reduce(settings: Settings) -> JobEngine:
    from ftcomm.engines.gpu.probe import require_cuda

    require_cuda()
    from ftcomm.engines.gpu_reduce.engine import reduce_engine
    from ftcomm.engines.gpu_reduce.mapped import CudaReduceDevice

    return reduce_engine(settings, CudaReduceDevice(settings.max_sms))


def _interpreter_reduce(settings: Settings) -> JobEngine:
    from ftcomm.engines.gpu_reduce.interpreted import InterpretedReduceDevice  # first: Triton is to interpret

    # isort: split
    from ftcomm.engines.gpu_reduce.engine import reduce_engine

    return reduce_engine(settings, InterpretedReduceDevice(settings.max_sms))


def _gpu_kernel(settings: Settings) -> JobEngine:
    from ftcomm.engines.gpu.probe import require_cuda

    require_cuda()
    from ftcomm.engines.gpu_kernel.cuda import CudaDevice
    from ftcomm.engines.gpu_kernel.engine import KernelEngine
    from ftcomm.engines.gpu_kernel.layout import CUDA

    segment = Segment(CUDA)
    return KernelEngine(settings, segment, CudaDevice(segment, staging=settings.staging))


def _interpreter_kernel(settings: Settings) -> JobEngine:
    from ftcomm.engines.gpu_kernel.interpreted import InterpretDevice  # first: Triton is to interpret

    # isort: split
    from ftcomm.engines.gpu_kernel.engine import KernelEngine
    from ftcomm.engines.gpu_kernel.layout import INTERPRETED

    segment = Segment(INTERPRETED)
    return KernelEngine(settings, segment, InterpretDevice(segment))


OPENERS: dict[str, Callable[[Settings], JobEngine]] = {
    "host": HostEngine.of_job,
    "gpu-reduce": _gpu_reduce,
    "gpu-kernel": _gpu_kernel,
    "interpreter-reduce": _interpreter_reduce,
    "interpreter-kernel": _interpreter_kernel,
}
