"""Questions about the hardware that the design depends on, which no document answers.

    python -m tests.gpu.facts                     # all of them, in about a minute; exit code 1 if one has no answer
    python -m tests.gpu.facts --json out.json latency full_queue

Each is asked in a process of its own with a deadline, and the answers are written after each. Kernels that wait do so
for a bounded time. Needs a GPU, CuPy (with NVRTC) and PyTorch.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftcomm.engines.gpu.probe import ENVIRONMENT

DEADLINE = 40.0  # s; of one question

Answer = dict[str, Any]

# Nothing here is loaded at its first launch by accident: `Gpu` launches what must run beside a kernel that spins.
_CODE = r"""
typedef unsigned long long u64;
__device__ __forceinline__ u64 ns() { u64 t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t; }
__device__ __forceinline__ u64 look(const u64* p) {
    u64 v; asm volatile("ld.volatile.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory"); return v; }
__device__ __forceinline__ void say(u64* p, u64 v) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" :: "l"(p), "l"(v) : "memory"); }
extern "C" {
__global__ void nothing() {}
__global__ void tell(u64* flag, u64 value) { say(flag, value); }
// until *flag >= want or so many ms have passed: out = {1 or 2, ns}
__global__ void hold(const u64* flag, u64 want, u64 ms, u64* out) {
    u64 t = ns();
    while (look(flag) < want && ns() - t < ms * 1000000ull) {}
    out[0] = look(flag) >= want ? 1 : 2; out[1] = ns() - t; }
// one more has come; until n have
__global__ void meet(u64* count, u64 n, u64 ms, u64* out) {
    u64 t = ns();
    atomicAdd(count, 1ull);
    while (look(count) < n && ns() - t < ms * 1000000ull) {}
    out[0] = look(count) >= n ? 1 : 2; out[1] = ns() - t; }
__global__ void loads(const u64* p, u64 n, u64* out) {
    u64 sum = 0, t = ns();
    for (u64 i = 0; i < n; i++) { u64 v = look(p + (sum & 1)); sum += v; }  // each waits for the one before
    out[0] = ns() - t; out[1] = sum; }
__global__ void releases(u64* p, u64 n, u64* out) {
    u64 t = ns(); for (u64 i = 0; i < n; i++) say(p, i); out[0] = ns() - t; }
__global__ void fences(u64* p, u64 n, u64* out) {
    u64 t = ns();
    for (u64 i = 0; i < n; i++) { *(volatile u64*)p = i; asm volatile("fence.sc.sys;" ::: "memory"); }
    out[0] = ns() - t; }
// n rounds of a barrier: my word counts, all others have to follow
__global__ void rounds(u64* words, u64 me, u64 members, u64 n, u64 ms, u64* out) {
    u64 t = ns(), r = 1;
    for (; r <= n; r++) {
        say(words + 16 * me, r);
        for (u64 i = 0; i < members; i++) while (look(words + 16 * i) < r && ns() - t < ms * 1000000ull) {}
        if (ns() - t >= ms * 1000000ull) break;
    }
    out[0] = r - 1; out[1] = ns() - t; }
// reads it again and again for so many ms: out = {words that differ, times read}
__global__ void reread(const u64* p, u64 count, u64 want, u64 ms, u64* out) {
    u64 t = ns(), wrong = 0, times = 0;
    do {
        for (u64 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
            wrong += look(p + i) != want;
        times++;
    } while (ns() - t < ms * 1000000ull);
    if (wrong) atomicAdd(out, wrong);
    if (threadIdx.x == 0) atomicAdd(out + 1, times); }
}
"""
_NAMES = ("nothing", "tell", "hold", "meet", "loads", "releases", "fences", "rounds", "reread")


class Gpu:
    def __init__(self) -> None:
        import cupy
        from cupy.cuda import runtime

        self.cupy, self.rt = cupy, runtime
        runtime.setDevice(0)
        module = cupy.RawModule(code=_CODE)
        self._kernels = {name: module.get_function(name) for name in _NAMES}
        self.out = self.pinned(4096)
        self.go("nothing")
        for name, arguments in (("tell", (self.out, 0)), ("hold", (self.out, 0, 0, self.out + 64))):
            self.go(name, *arguments)
        runtime.deviceSynchronize()

    def pinned(self, words: int) -> int:
        """The address of so many words of host memory, all 0."""
        address: int = self.rt.hostAlloc(8 * words, self.rt.hostAllocMapped | self.rt.hostAllocPortable)
        ctypes.memset(address, 0, 8 * words)
        return address

    def device(self, words: int) -> int:
        """The address of so many words of GPU memory, all 0."""
        address: int = self.rt.malloc(8 * words)
        self.rt.memset(address, 0, 8 * words)
        return address

    def stream(self) -> int:
        pointer: int = self.rt.streamCreateWithPriority(self.rt.streamNonBlocking, -100)
        return pointer

    def go(self, name: str, *arguments: int, stream: int = 0, grid: int = 1, block: int = 1) -> None:
        with self.cupy.cuda.ExternalStream(stream) if stream else contextlib.nullcontext():
            self._kernels[name]((grid,), (block,), arguments)


def _word(address: int, i: int = 0) -> int:
    return ctypes.c_uint64.from_address(address + 8 * i).value


def _put(address: int, value: int) -> None:
    ctypes.c_uint64.from_address(address).value = value


def _ms(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return round(1e3 * (time.perf_counter() - began), 3)


# ---- questions ----------------------------------------------------------------------------------------------------

_ATTRIBUTES = {  # CUdevice_attribute
    "virtual memory management": 102,
    "shareable handles by file descriptor": 103,
    "GPUDirect RDMA": 116,
    "GPUDirect RDMA, ways to flush": 117,
    "GPUDirect RDMA, order of writes": 118,
    "GPUDirect RDMA with virtual memory management": 110,
    "multicast": 132,
}


def attributes() -> Answer:
    """What the driver says that this GPU can do."""
    Gpu()
    libcuda = ctypes.CDLL("libcuda.so.1")
    answer: Answer = {}
    for name, number in _ATTRIBUTES.items():
        value = ctypes.c_int()
        error = libcuda.cuDeviceGetAttribute(ctypes.byref(value), number, 0)
        answer[name] = f"CUresult {error}" if error else value.value
    return answer


def latency() -> Answer:
    """What one poll, one release and one full fence cost, by where the word lies: ns."""
    gpu, n = Gpu(), 2000
    answer: Answer = {}
    for where, at in (("GPU memory", gpu.device(64)), ("pinned host memory", gpu.pinned(64))):
        for name in ("loads", "releases", "fences"):
            gpu.go(name, at, n, gpu.out)
            gpu.rt.deviceSynchronize()
            answer[f"{name}, {where}"] = round(_word(gpu.out) / n)
    return answer


def streams() -> Answer:
    """Whether the op streams of eight ranks in one process run side by side, and repairs beside the gates: three
    streams a rank, made in the order of `tests/gpu/ranks.py`."""
    gpu, ranks, each = Gpu(), 8, 3
    made = [gpu.stream() for _ in range(ranks * each)]
    counts, flag = gpu.device(16), gpu.pinned(8)
    for rank in range(ranks):
        gpu.go("meet", counts, ranks, 3000, gpu.out + 128 * rank, stream=made[each * rank])
        gpu.go("hold", flag, 1, 6000, gpu.out + 128 * rank + 32, stream=made[each * rank])
    time.sleep(0.5)
    note, there = gpu.pinned(8), gpu.device(8)
    copies = []
    for rank in range(ranks):  # as an epoch is entered, while gates hold

        def copy(stream: int = made[each * rank + 2]) -> None:
            gpu.rt.memcpyAsync(there, note, 64, gpu.rt.memcpyHostToDevice, stream)
            gpu.rt.streamSynchronize(stream)

        copies.append(_ms(copy))
    for rank in range(ranks):
        gpu.go("meet", counts + 64, ranks, 2000, gpu.out + 128 * rank + 64, stream=made[each * rank + 1])
    time.sleep(0.3)
    _put(flag, 1)
    gpu.rt.deviceSynchronize()
    met, repaired = ([_word(gpu.out + 128 * rank + at) == 1 for rank in range(ranks)] for at in (0, 64))
    return {
        "connections": os.environ["CUDA_DEVICE_MAX_CONNECTIONS"],
        "ops side by side": all(met),
        "repairs beside gates": all(repaired),
        "copies beside gates, ms": copies,
    }


def full_queue() -> Answer:
    """Whether another thread can still launch when the caller's thread has filled its queue behind a gate."""
    gpu = Gpu()
    gate, repair, flag = gpu.stream(), gpu.stream(), gpu.pinned(8)
    gpu.go("hold", flag, 1, 8000, gpu.out, stream=gate)
    done = [0]

    def fill() -> None:
        for i in range(5000):
            gpu.go("nothing", stream=gate)
            done[0] = i + 1

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    time.sleep(1.0)
    answer: Answer = {"launches until the queue was full": done[0]}
    libcuda = ctypes.CDLL("libcuda.so.1")
    for name, call in (
        ("cuStreamQuery of another stream, ms", lambda: libcuda.cuStreamQuery(ctypes.c_void_p(repair))),
        ("a launch on another stream, ms", lambda: gpu.go("nothing", stream=repair)),
        ("its synchronisation, ms", lambda: gpu.rt.streamSynchronize(repair)),
        ("the launch that ends the gate, ms", lambda: gpu.go("tell", flag, 1, stream=repair)),
    ):
        answer[name] = _ms(call)
    thread.join(10)
    gpu.rt.deviceSynchronize()
    answer["the gate was ended by"] = "the flag" if _word(gpu.out) == 1 else "its deadline: no launch could be made"
    return answer


def calls() -> Answer:
    """How long each call takes beside a kernel that spins for a second: ms."""
    import torch

    gpu = Gpu()
    torch.ones(10, device="cuda").add_(1)
    torch.cuda.synchronize()
    page = mmap.mmap(-1, 1 << 20)
    at = ctypes.addressof(ctypes.c_char.from_buffer(page))
    held = gpu.rt.malloc(1 << 20)
    x = torch.ones(1 << 20, device="cuda")
    other = gpu.cupy.RawModule(code='extern "C" __global__ void late() {}')
    other.compile()
    spinning, brief = gpu.stream(), gpu.stream()
    answer: Answer = {}
    for name, call in (
        ("cudaMalloc", lambda: gpu.rt.malloc(1 << 20)),
        ("cudaFree", lambda: gpu.rt.free(held)),
        ("cudaHostAlloc", lambda: gpu.rt.hostAlloc(1 << 20, 3)),
        ("cudaHostRegister", lambda: gpu.rt.hostRegister(at, 1 << 20, 3)),
        ("cudaHostUnregister", lambda: gpu.rt.hostUnregister(at)),
        ("cudaIpcGetMemHandle", lambda: gpu.rt.ipcGetMemHandle(gpu.rt.malloc(4 << 20))),
        ("cudaStreamCreate", gpu.stream),
        ("cudaStreamDestroy", lambda: gpu.rt.streamDestroy(brief)),
        ("first launch of a module", lambda: other.get_function("late")((1,), (1,), ())),
        ("first use of a kernel of torch", lambda: torch.erfinv(x)),
        ("torch.empty of 1 GB", lambda: torch.empty(1 << 30, dtype=torch.uint8, device="cuda")),
        ("torch.cuda.empty_cache", torch.cuda.empty_cache),
    ):
        gpu.go("hold", gpu.out + 2048, 1, 1000, gpu.out, stream=spinning)
        answer[name] = _ms(call)
        gpu.rt.streamSynchronize(spinning)
    return answer


def _exporter(pipe: Any) -> None:
    """A process that dies while a kernel of it spins."""
    gpu = Gpu()
    count = (64 << 20) // 8
    address = gpu.rt.malloc(8 * count)
    gpu.rt.memset(address, 0x5A, 8 * count)
    gpu.rt.deviceSynchronize()
    pipe.send(gpu.rt.ipcGetMemHandle(address))
    gpu.go("hold", gpu.out + 2048, 1, 20000, gpu.out)
    time.sleep(30)


def killed_exporter() -> Answer:
    """Whether memory that a killed process has exported stays as it is, for a kernel that reads it and afterwards."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=_exporter, args=(there,), daemon=True)
    child.start()
    gpu = Gpu()
    if not here.poll(30):
        raise TimeoutError("the exporter did not say where its memory is")
    handle, count, want = here.recv(), (64 << 20) // 8, 0x5A5A5A5A5A5A5A5A
    address, out = gpu.rt.ipcOpenMemHandle(handle), gpu.device(8)
    reader = gpu.stream()
    gpu.go("reread", address, count, want, 3000, out, stream=reader, grid=16, block=256)
    time.sleep(0.7)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    took = _ms(lambda: gpu.rt.streamSynchronize(reader))
    for one in [gpu.rt.malloc(1 << 30) for _ in range(8)]:  # if it was given back, somebody gets it now
        gpu.rt.memset(one, 0xFF, 1 << 30)
    gpu.go("reread", address, count, want, 200, out, stream=reader, grid=16, block=256)
    gpu.rt.deviceSynchronize()
    memory = gpu.cupy.cuda.UnownedMemory(out, 16, None)
    result = gpu.cupy.ndarray(2, "uint64", memptr=gpu.cupy.cuda.MemoryPointer(memory, 0))
    wrong, times = result.get().tolist()
    return {
        "words that were wrong": wrong,
        "readings": times,
        "from the kill to the end of the reader, ms": took,
        "cudaIpcCloseMemHandle, ms": _ms(lambda: gpu.rt.ipcCloseMemHandle(address)),
    }


def _turner(path: str, me: int, members: int, n: int, queue: Any) -> None:
    gpu = Gpu()
    with open(path, "r+b") as file:
        page = mmap.mmap(file.fileno(), 1 << 16)
    at = ctypes.addressof(ctypes.c_char.from_buffer(page))
    gpu.rt.hostRegister(at, 1 << 16, 3)
    address = gpu.rt.pointerGetAttributes(at).devicePointer
    gpu.go("rounds", address, me, members, n, 15000, gpu.out)
    gpu.rt.deviceSynchronize()
    queue.put((_word(gpu.out), _word(gpu.out, 1) / 1e6))


def slices() -> Answer:
    """What a round of flags takes between processes that share the GPU, and so take turns."""
    context = multiprocessing.get_context("spawn")
    answer: Answer = {}
    for members, n in ((2, 40), (8, 20)):
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
            file.truncate(1 << 16)
            queue = context.Queue()
            arguments = [(file.name, me, members, n, queue) for me in range(members)]
            processes = [context.Process(target=_turner, args=each, daemon=True) for each in arguments]
            for process in processes:
                process.start()
            told = [queue.get(timeout=25) for _ in processes]
        done = min(rounds for rounds, _ in told)
        answer[f"{members} processes, ms a round"] = round(max(ms for _, ms in told) / max(1, done), 2)
        answer[f"{members} processes, rounds of {n}"] = done
    return answer


def launch() -> Answer:
    """What the host does for one op: us."""
    import torch

    from ftcomm.engines.gpu.probe import require_cuda
    from tests.gpu.ranks import ON_GPU, Ranks

    require_cuda()
    from ftcomm.engines.gpu_kernel.cuda import CudaDevice
    from ftcomm.engines.gpu_kernel.device import KernelLaunch
    from ftcomm.engines.gpu_kernel.launch import variant
    from ftcomm.engines.gpu_kernel.layout import CUDA
    from ftcomm.engines.gpu_kernel.operation import KernelOperation

    ranks = Ranks(1, CUDA, CudaDevice, deadline=ON_GPU)
    ranks.enter()
    x, device = torch.ones(1024, device="cuda"), ranks.devices[0]
    began = time.perf_counter()
    ranks.launch(0, x, "float32")
    ranks.settle()
    answer: Answer = {"the first op, compiled and loaded, s": round(time.perf_counter() - began, 2)}

    op = KernelOperation(x, "float32", "sum", CUDA.chunk)
    asked = variant(op, device.address(x), CUDA, ranks.view(0))
    launched = KernelLaunch(x, op.count, op.call, 0, 1, None, 1, asked)
    for name, call in (
        ("op without `mark` and `release`", lambda: ranks.launch(0, x, "float32")),
        ("of it the operation", lambda: KernelOperation(x, "float32", "sum", CUDA.chunk)),
        ("of it the variant", lambda: variant(op, device.address(x), CUDA, ranks.view(0))),
        ("of it the number of programs", lambda: device.programs(x.nbytes, 1, None)),
        ("of it `follow`", device.follow),
        ("of it the launch", lambda: device.launch(launched)),
        ("`mark` and `release`", lambda: device.release(device.mark())),
    ):
        took = []
        for _ in range(100):
            took.append(1e3 * _ms(call))
            ranks.settle()
        answer[name] = round(statistics.median(took), 1)
    ranks.close()
    return answer


QUESTIONS: dict[str, Callable[[], Answer]] = {
    question.__name__: question
    for question in (attributes, latency, streams, full_queue, calls, killed_exporter, slices, launch)
}


# ---- asking -------------------------------------------------------------------------------------------------------


def ask(name: str) -> Answer:
    """The answer of a process of its own; `error` if it had none. What it started ends with it."""
    command = [sys.executable, "-m", __spec__.name, "--one", name]
    environment = {**ENVIRONMENT, **os.environ}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            said, _ = process.communicate(timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            return {"error": f"no answer within {DEADLINE:g} s"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    lines = said.splitlines()
    answers = [line for line in lines if line.startswith("{")]  # it may warn of something when it ends
    if process.returncode or not answers:
        return {"error": f"ended with code {process.returncode}", "said": lines[-3:]}
    answer: Answer = json.loads(answers[-1])
    return answer


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--one"]:
        print(json.dumps(QUESTIONS[arguments[1]]()))
        return
    path = None
    if arguments[:1] == ["--json"]:
        path, arguments = Path(arguments[1]), arguments[2:]
    rows: list[Answer] = []
    for name in arguments or QUESTIONS:
        began = time.monotonic()
        answer = ask(name)
        rows.append({"question": name, "seconds": round(time.monotonic() - began, 1), **answer})
        print(f"{name}: {(QUESTIONS[name].__doc__ or '').splitlines()[0]}", flush=True)
        for fact, value in answer.items():
            print(f"    {fact}: {value}", flush=True)
        if path is not None:
            path.write_text(json.dumps(rows))
    if any("error" in row for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
