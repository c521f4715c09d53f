"""`stage` for arrays that are neither torch nor NumPy on the CPU: JAX, and whatever speaks DLPack."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from ftcomm.arrays import stage
from ftcomm.errors import ArgumentError

from .test_arrays import add_one, read_only

# ---- JAX ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def jax():
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    return pytest.importorskip("jax")


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "int32", "uint8", "bool"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_jax_gives_a_new_array(jax, name: str, shape: tuple[int, ...]) -> None:
    x = jax.numpy.zeros(shape, name)
    staged = stage(x)
    assert staged.dtype == name
    new = add_one(staged)
    assert isinstance(new, jax.Array)
    assert (new.shape, new.dtype, new.sharding) == (x.shape, x.dtype, x.sharding)
    assert (np.asarray(new) == 1).all()
    assert (np.asarray(x) == 0).all()


def test_jax_float64(jax) -> None:
    """In a process of its own: 64-bit types are a switch of the whole process."""
    script = """
import numpy as np, jax
jax.config.update("jax_enable_x64", True)
from ftcomm.arrays import stage
staged = stage(jax.numpy.zeros(3, "float64"))
staged.flat += 1
new = staged.finish()
print(staged.dtype, new.dtype, new.tolist())
"""
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=230, env=env, check=True
    )
    assert done.stdout.split(maxsplit=2) == ["float64", "float64", "[1.0, 1.0, 1.0]\n"]


def test_jax_sharded_over_devices_keeps_its_sharding() -> None:
    pytest.importorskip("jax")
    script = """
import numpy as np, jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ftcomm.arrays import stage
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("i",)), PartitionSpec("i"))
staged = stage(jax.device_put(np.zeros(8, "f4"), sharding))
staged.flat += 1
new = staged.finish()
print(len(jax.devices()), new.sharding == sharding, new.tolist() == [1] * 8)
"""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=230, env=env, check=True
    )
    assert done.stdout.split() == ["4", "True", "True"]


def test_jax_refused(jax) -> None:
    with pytest.raises(ArgumentError, match=r"traced.*outside jit"):
        jax.jit(lambda x: stage(x).flat)(jax.numpy.zeros(3))
    with pytest.raises(ArgumentError, match="complex64"):
        stage(jax.numpy.zeros(3, "complex64"))
    with pytest.raises(ArgumentError, match="float8_e4m3fnuz"):
        stage(jax.numpy.zeros(3, "float8_e4m3fnuz"))
    with pytest.raises(ArgumentError, match=r"key.*key_data"):
        stage(jax.random.key(0))
    gone = jax.numpy.zeros(3)
    gone.delete()
    with pytest.raises(ArgumentError, match="deleted"):
        stage(gone)


# ---- other libraries, by DLPack -----------------------------------------------------------------------------------


class Exported:
    """What another array library shows: DLPack over `values`, device included."""

    def __init__(self, values: np.ndarray, device: tuple[int, int] = (1, 0)) -> None:
        self.values = values
        self.device = device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **kwargs: object) -> object:
        return self.values.__dlpack__(**kwargs)


class Namespaced(Exported):
    def __array_namespace__(self, api_version: str | None = None) -> type[Namespaced]:
        return Namespaced

    @staticmethod
    def from_dlpack(x: np.ndarray) -> Namespaced:
        return Namespaced(np.from_dlpack(x))


def test_dlpack_writable_is_in_place() -> None:
    x = Exported(np.zeros((2, 3), np.float32))
    staged = stage(x)
    assert np.shares_memory(staged.flat, x.values)
    assert add_one(staged) is x
    assert (x.values == 1).all()


def test_dlpack_strided_is_copied_back() -> None:
    x = Exported(np.zeros((2, 6), np.float32)[:, ::2])
    assert add_one(stage(x)) is x
    assert (x.values == 1).all()


def test_dlpack_read_only_gives_a_new_array() -> None:
    x = Namespaced(read_only())
    new = add_one(stage(x))
    assert isinstance(new, Namespaced)
    assert new.values.tolist() == [2, 2, 2]
    assert x.values.tolist() == [1, 1, 1]


def test_dlpack_refused() -> None:
    with pytest.raises(ArgumentError, match=r"read-only.*np\.array"):
        stage(Exported(read_only()))
    with pytest.raises(ArgumentError, match=r"DLPack device \(2, 0\).*torch.from_dlpack"):
        stage(Exported(np.ones(3), (2, 0)))
    with pytest.raises(ArgumentError, match="complex64"):
        stage(Exported(np.ones(3, np.complex64)))
    with pytest.raises(ArgumentError, match="NumPy cannot read"):
        stage(Exported(torch.ones(3, dtype=torch.bfloat16)))  # type: ignore[arg-type]
