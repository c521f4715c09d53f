"""Wrong arguments are refused before anything is written, and the public calls take each array where it lies."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

from ftcomm import kernels
from ftcomm.kernels.check import MOST_SOURCES, KernelArgumentError
from ftcomm.kernels.device import DEVICE
from ftcomm.kernels.device import copy as device_copy
from ftcomm.kernels.device import forward as device_forward
from ftcomm.kernels.device import reduce as device_reduce
from tests.kernels.samples import assert_equal, placed, values

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # the interpreter's, of overflow

A = torch.arange(100, dtype=torch.float32)
B = A + 1
OUT = torch.zeros(100)


def misaligned(count: int) -> np.ndarray:
    return np.frombuffer(bytearray(4 * count + 4), np.uint8)[1 : 1 + 4 * count].view(np.float32)


READ_ONLY = np.zeros(100, np.float32)
READ_ONLY.flags.writeable = False

WRONG = {
    "not aligned to the element": (
        ([misaligned(100), np.ones(100, np.float32)], OUT.numpy()),
        "a multiple of its ele",
    ),
    "output not aligned": (([A.numpy()], misaligned(100)), "out begins at"),
    "overlap in part": (([A[:50], B[:50]], A[10:60]), r"overlaps sources\[0\]; it has to be that array exactly"),
    "overlap at the end": (([B[:50], A[:50]], A[49:99]), r"overlaps sources\[1\]"),
    "no sources": (([], OUT), "1 to 16 sources are expected, there are 0"),
    "too many sources": (([A] * (MOST_SOURCES + 1), OUT), "there are 17; reduce in several calls"),
    "dtype": (([A.to(torch.complex64)], OUT), "source has the dtype complex64; convert it to one of float64"),
    "other dtype": (([A, B.double()], OUT), r"sources\[1\] has the dtype float64, sources\[0\] has float32; convert"),
    "other dtype of the output": (([A, B], OUT.int()), "out has the dtype int32"),
    "byte order": (([np.zeros(100, ">f4")], OUT), "in the other byte order"),
    "length": (([A, B], OUT[:99]), "out has the number of elements 99"),
    "strided": (([A[::2], B[::2]], OUT[:50]), r"sources\[0\] is not contiguous; pass .contiguous"),
    "sparse": (([torch.eye(10).to_sparse()], OUT), "source is not contiguous"),
    "not an array": (([[1.0, 2.0]], OUT), "source is a list; pass a torch tensor or a NumPy array"),
    "read-only": (([A.numpy()], READ_ONLY), "out is read-only"),
    "another kind of device": (([A.to("meta")], OUT), "source is on the device meta"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("call", [kernels.reduce, device_reduce.reduce])
def test_wrong_arrays(call: Callable[..., None], wrong: str) -> None:
    (sources, out), message = WRONG[wrong]
    before = bytes(np.asarray(out))
    with pytest.raises(KernelArgumentError, match=message):
        call(sources, out)
    assert bytes(np.asarray(out)) == before


@pytest.mark.parametrize("call", [kernels.reduce, device_reduce.reduce])
def test_wrong_words(call: Callable[..., None]) -> None:
    flags = torch.zeros(100, dtype=torch.bool)
    for sources, out, arguments, message in (
        ([A, B], OUT, {"op": "mean"}, "use one of sum, avg"),
        ([flags], flags.clone(), {"op": "avg"}, "the average of bool is not defined"),
        ([A, B], OUT, {"divisor": 2}, "with op='avg' only"),
        ([A, B], OUT, {"op": "avg", "divisor": 0}, "divisor=0"),
        ([A, B], OUT, {"op": "avg", "divisor": 1 << 31}, "divisor=2147483648"),
        ([A, B], OUT, {"op": "avg", "divisor": 1.5}, "divisor=1.5"),
        ([A, B], OUT, {"sms": 0}, "sms=0 is not a number of blocks"),
        ([A, B], OUT, {"sms": True}, "sms=True"),
    ):
        with pytest.raises(KernelArgumentError, match=message):
            call(sources, out, **arguments)
    assert not OUT.any()


@pytest.mark.parametrize("form", [kernels, device_forward])
def test_outputs_of_one_call_do_not_overlap(form: object) -> None:
    out = torch.zeros(100)
    with pytest.raises(KernelArgumentError, match=r"outs\[1\] overlaps outs\[0\]; it has to not overlap it"):
        form.reduce_copy([A, B], [out, out])
    with pytest.raises(KernelArgumentError, match=r"outs\[1\] overlaps outs\[0\]"):
        form.copy_forward(A[:50], [out[:50], out[25:75]])
    with pytest.raises(KernelArgumentError, match=r"at least one output"):
        form.copy_forward(A, [])
    assert not out.any()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("call", [kernels.copy, device_copy.copy])
def test_mixed_devices(call: Callable[..., None]) -> None:
    with pytest.raises(KernelArgumentError, match="out has the device cpu, source has cuda:0; copy"):
        call(A.to("cuda:0"), OUT)


def test_mixed_devices_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no GPU: two tensors of which one says that it lies on another device."""

    class Elsewhere(torch.Tensor):
        device = torch.device("cuda:1")

    with pytest.raises(KernelArgumentError, match=r"sources\[1\] has the device cuda:1, sources\[0\] has cpu"):
        kernels.reduce([A, B.as_subclass(Elsewhere)], OUT)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "bool"])
def test_numpy_and_torch_and_the_device_agree(dtype: str) -> None:
    a, b = values(dtype, 777, 1), values(dtype, 777, 2)
    out = torch.zeros_like(a)
    kernels.reduce([a, b], out)
    as_numpy = np.zeros_like(a.numpy())
    kernels.reduce([a.numpy(), b.numpy()], as_numpy)
    assert_equal(torch.from_numpy(as_numpy), out)
    on_device = torch.zeros_like(placed(a))
    device_reduce.reduce([placed(a), placed(b)], on_device)
    assert_equal(on_device, out)
    kernels.copy(a, on_device.zero_()) if DEVICE == "cpu" else kernels.copy(placed(a), on_device)
    assert_equal(on_device, a)


def test_shapes_do_not_matter_but_the_number_of_elements_does() -> None:
    out = torch.zeros(10, 10)
    kernels.reduce_forward([A, B.reshape(4, 25)], out)
    assert out.reshape(-1).equal(A + B)
    both = [torch.zeros(100), torch.zeros(2, 50)]
    kernels.reduce_copy([A, B], both, "avg", divisor=1)
    kernels.copy_forward(both[0], [out])
    assert both[1].reshape(-1).equal(A + B)
    assert out.reshape(-1).equal(A + B)


def test_importing_the_package_imports_neither_torch_nor_triton() -> None:
    code = "import sys, ftcomm.kernels.check; print([m for m in ('torch', 'triton') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=True)
    assert done.stdout.strip() == "[]"
