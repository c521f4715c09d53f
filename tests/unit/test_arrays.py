"""`stage`: every kind of array becomes one flat host run, and the result comes back to where the caller expects it.

What an all-reduce does in between is played by writing to `flat`. JAX, DLPack and devices: test_arrays_interop.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ftcomm.arrays import CARRIERS, DTYPES, Staged, stage
from ftcomm.errors import ArgumentError


def add_one(staged: Staged) -> object:
    """Play the op: `flat += 1`, bfloat16 and fp8 as such. Returns what `finish` does, None if there is none."""
    flat = staged.flat
    assert flat.ndim == 1
    assert flat.flags.carray
    assert flat.dtype.isnative
    if staged.dtype in CARRIERS:
        assert flat.dtype == CARRIERS[staged.dtype]
        x = torch.from_numpy(flat).view(getattr(torch, staged.dtype))
        x.copy_(x.float() + 1)
    else:
        assert flat.dtype.name == staged.dtype
        flat += np.ones((), flat.dtype)
    return staged.finish() if staged.finish is not None else None


def torch_address(x: torch.Tensor, staged: Staged) -> bool:
    return x.data_ptr() == staged.flat.__array_interface__["data"][0]


# ---- torch: the caller's own memory -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPES)
def test_torch_dtypes_in_place(name: str) -> None:
    x = torch.zeros(3, 5, dtype=getattr(torch, name))
    staged = stage(x)
    assert (staged.dtype, staged.flat.size, staged.finish) == (name, 15, None)
    assert torch_address(x, staged)
    add_one(staged)
    assert torch.equal(x.float(), torch.ones(3, 5))


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (2, 3, 4)])
def test_torch_shapes_in_place(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape)
    staged = stage(x)
    assert staged.finish is None
    assert staged.flat.shape == (x.numel(),)
    add_one(staged)
    assert torch.equal(x, torch.ones(shape))


def test_torch_requires_grad_leaf_and_not() -> None:
    leaf = torch.nn.Parameter(torch.zeros(4))
    middle = leaf * 2
    for x in (leaf, middle):
        staged = stage(x)
        assert staged.finish is None
        add_one(staged)
        assert x.requires_grad
        assert torch.equal(x.detach(), torch.ones(4))
    middle.sum().backward()
    assert leaf.grad is not None


def test_torch_contiguous_view_touches_nothing_else() -> None:
    base = torch.zeros(10)
    add_one(stage(base[2:5]))
    assert base.tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 0, 0]


def test_torch_inference_tensor() -> None:
    with torch.inference_mode():
        x = torch.zeros(4)
    add_one(stage(x))
    assert x.tolist() == [1, 1, 1, 1]


# ---- torch: through a copy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.uint32])
@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(lambda t: t[:, ::2], id="strided"),
        pytest.param(lambda t: t.t(), id="transposed"),
        pytest.param(lambda t: t[:, 1], id="column"),
        pytest.param(lambda t: t[1:3, 1:3], id="block"),
    ],
)
def test_torch_strided_is_copied_back(dtype: torch.dtype, cut) -> None:
    base = torch.zeros(4, 6, dtype=dtype)
    want = base.clone()
    cut(want).fill_(1)
    x = cut(base)
    staged = stage(x)
    assert not torch_address(x, staged)
    assert add_one(staged) is x
    assert torch.equal(base, want)


def test_torch_order_is_that_of_the_indices() -> None:
    x = torch.arange(6.0).view(2, 3).t()
    assert stage(x).flat.tolist() == [0, 3, 1, 4, 2, 5]


def test_torch_channels_last_is_in_index_order_too() -> None:
    x = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    staged = stage(x)
    assert staged.flat.tolist() == list(range(24))
    assert add_one(staged) is x
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(x, torch.arange(1.0, 25).view(1, 2, 3, 4))


def test_torch_strided_requires_grad() -> None:
    x = torch.nn.Parameter(torch.zeros(3, 4)).t()
    assert add_one(stage(x)) is x
    assert torch.equal(x.detach(), torch.ones(4, 3))


def test_torch_negated_view() -> None:
    x = torch.tensor([1 + 2j]).conj().imag
    assert x.is_neg()
    staged = stage(x)
    assert staged.flat.tolist() == [-2]
    assert add_one(staged) is x
    assert x.tolist() == [-1]


def test_torch_unaligned() -> None:
    x = torch.frombuffer(bytearray(17), dtype=torch.float32, offset=1, count=4)
    assert add_one(stage(x)) is x
    assert x.tolist() == [1, 1, 1, 1]


# ---- torch: refused -----------------------------------------------------------------------------------------------


def fake_tensor() -> torch.Tensor:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


def freed() -> torch.Tensor:
    x = torch.ones(4)
    x.untyped_storage().resize_(0)
    return x


REFUSED_TORCH = {
    "complex": (lambda: torch.ones(2, dtype=torch.complex64), "complex64.*float64.*view_as_real"),
    "fp8": (lambda: torch.ones(2).to(torch.float8_e4m3fnuz), "float8_e4m3fnuz.*bfloat16"),
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), "qint8.*float64"),
    "sparse": (lambda: torch.eye(2).to_sparse(), "to_dense"),
    "csr": (lambda: torch.eye(2).to_sparse_csr(), "to_dense"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "dense tensor"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        r"x\.values\(\)",
    ),
    "meta": (lambda: torch.empty(2, device="meta"), "device meta.*to_empty"),
    "fake": (fake_tensor, "FakeTensor"),
    "expanded": (lambda: torch.ones(1).expand(4), r"share one address.*x\.contiguous\(\)"),
    "overlapping": (lambda: torch.ones(9).as_strided((4, 3), (2, 1)), "share one address"),
    "freed": (freed, "storage was freed"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", REFUSED_TORCH)
def test_torch_refused(case: str) -> None:
    make, message = REFUSED_TORCH[case]
    x = make()
    with pytest.raises(ArgumentError, match=message):
        stage(x)


# ---- NumPy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [d for d in DTYPES if d not in CARRIERS])
def test_numpy_dtypes_in_place(name: str) -> None:
    x = np.zeros((3, 5), name)
    staged = stage(x)
    assert (staged.dtype, staged.finish) == (name, None)
    assert np.shares_memory(x, staged.flat)
    add_one(staged)
    assert (x == np.ones((), name)).all()


@pytest.mark.parametrize("kind", ["longlong", "ulonglong", "intc"])
def test_numpy_c_names(kind: str) -> None:
    x = np.zeros(3, kind)
    assert stage(x).dtype == x.dtype.name


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (2, 3, 4)])
def test_numpy_shapes_in_place(shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, np.float32)
    staged = stage(x)
    assert staged.flat.shape == (x.size,)
    assert add_one(staged) is None
    assert (x == 1).all()


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(lambda a: a[:, ::2], id="strided"),
        pytest.param(lambda a: a.T, id="transposed"),
        pytest.param(lambda a: a[::-1], id="reversed"),
        pytest.param(lambda a: a[1], id="row"),
    ],
)
def test_numpy_views(cut) -> None:
    base = np.zeros((4, 6), np.float32)
    want = base.copy()
    cut(want)[...] = 1
    x = cut(base)
    assert add_one(stage(x)) is (None if x.flags.carray else x)
    assert (base == want).all()


def test_numpy_order_is_that_of_the_indices() -> None:
    assert stage(np.asfortranarray(np.arange(6.0).reshape(2, 3))).flat.tolist() == list(range(6))


def test_numpy_unaligned() -> None:
    x = np.frombuffer(bytearray(17), np.float32, offset=1, count=4)
    assert add_one(stage(x)) is x
    assert x.tolist() == [1, 1, 1, 1]


def test_numpy_matrix_and_memmap(tmp_path) -> None:
    matrix = np.zeros((2, 3), np.float32).view(np.matrix)
    assert add_one(stage(matrix)) is matrix
    assert (np.asarray(matrix) == 1).all()
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(2, 3))
    assert add_one(stage(mapped)) is mapped
    assert (mapped == 1).all()


def test_numpy_bfloat16_of_ml_dtypes() -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    x = np.zeros((2, 3), bfloat16)
    staged = stage(x)
    assert staged.dtype == "bfloat16"
    assert add_one(staged) is x
    assert (x == 1).all()


def read_only() -> np.ndarray:
    x = np.ones(3)
    x.flags.writeable = False
    return x


REFUSED_NUMPY = {
    "read-only": (read_only, r"not writable.*x\.copy\(\)"),
    "broadcast": (lambda: np.broadcast_to(np.ones(1), 4), r"not writable.*x\.copy\(\)"),
    "foreign byte order": (lambda: np.ones(3, ">f4"), ">f4.*byte order"),
    "overlapping": (
        lambda: np.lib.stride_tricks.as_strided(np.ones(9), (4, 3), (16, 8)),
        "share one address",
    ),
    "complex64": (lambda: np.ones(3, np.complex64), r"complex64.*x\.view\(np\.float32\)"),
    "complex128": (lambda: np.ones(3, np.complex128), r"complex128.*x\.view\(np\.float64\)"),
    "object": (lambda: np.array([1, None]), "object.*What can be reduced: float64"),
    "string": (lambda: np.array(["a", "b"]), "dtype str"),
    "datetime": (lambda: np.zeros(3, "M8[s]"), "datetime64"),
    "timedelta": (lambda: np.zeros(3, "m8[s]"), "timedelta64"),
    "struct": (lambda: np.zeros(3, [("a", "f4")]), "void32"),
    "longdouble": (lambda: np.ones(3, np.longdouble), "What can be reduced"),
    "masked": (lambda: np.ma.masked_array(np.ones(3), [0, 1, 0]), "masked.*filled"),
}


@pytest.mark.parametrize("case", REFUSED_NUMPY)
def test_numpy_refused(case: str) -> None:
    make, message = REFUSED_NUMPY[case]
    x = make()
    with pytest.raises(ArgumentError, match=message):
        stage(x)


# ---- no array at all ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "x",
    [1, 1.5, True, 1j, None, "abc", [1.0, 2.0], (1, 2), np.float32(3), bytearray(8), {"a": 1}, torch.float32],
    ids=repr,
)
def test_not_an_array(x: object) -> None:
    with pytest.raises(ArgumentError, match=rf"{type(x).__name__}; it has to be an array.*(torch\.|np\.)"):
        stage(x)


# ---- overlap -----------------------------------------------------------------------------


def test_overlap_check_allows_every_permutation_and_step() -> None:
    base = torch.zeros(4, 5, 6)
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)):
        x = base.permute(order)[1:, ::2, :3]
        assert add_one(stage(x)) is x
    row = torch.zeros(1, 6).expand(1, 6)[:, ::3]  # a stride of a dimension of size 1 says nothing
    assert add_one(stage(row)) is row
