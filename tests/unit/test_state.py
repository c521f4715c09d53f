"""Training state to bytes and back: every kind of value, the same bits, and a name for what does not fit."""

from __future__ import annotations

import collections
import copy
import re
import sys
import types
from typing import NamedTuple

import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ftcomm.errors import StateError
from ftcomm.training.entries import as_entry
from ftcomm.training.startup_check import fingerprints
from ftcomm.training.state import allocate, digest, first_difference, flatten, load
from tests.rigs import cupy_stub


class Box:
    """The smallest thing with a state."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return self.value

    def load_state_dict(self, value):
        self.value = value


def over_the_wire(state):
    """What a joiner ends up with: the skeleton as bytes, and tensors of its own that the bytes were copied into."""
    flat = flatten(state).on_host()
    received = allocate(bytes(flat.skeleton))
    for to, of in zip(received.views(), flat.views(), strict=True):
        to[:] = of
    return received


def round_trip(value):
    box = Box(None)
    load(over_the_wire({"box": Box(value)}), {"box": box})
    return box.value


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
]
DTYPES += [torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]

text = st.text(max_size=12)
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text | st.binary(max_size=12)
values = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(text | st.integers(-(2**63), 2**63 - 1), inner, max_size=5)
    ),
    max_leaves=20,
)


@given(st.dictionaries(text, values, max_size=5))
@settings(deadline=None)
def test_plain_values_come_back_as_they_were(value):
    assert same(value, round_trip(value))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (2, 0, 3)], ids=str)
def test_tensors_of_every_dtype_and_shape(dtype, shape):
    tensor = (torch.randn(shape) * 3).to(dtype)
    (back,) = round_trip({"x": [tensor]})["x"]
    assert back.dtype == dtype
    assert back.shape == tensor.shape
    assert back.reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()


def test_strided_conjugate_and_counter():
    x = torch.randn(4, 6)
    z = torch.randn(3, dtype=torch.complex64)
    back = round_trip({"t": x.t(), "s": x[:, ::2], "z": z.conj(), "c": collections.Counter({3: 2}), "big": 2**70})
    assert torch.equal(back["t"], x.t())
    assert torch.equal(back["s"], x[:, ::2])
    assert torch.equal(back["z"], z.conj())
    assert type(back["c"]) is collections.Counter
    assert back["c"][3] == 2
    assert back["big"] == 2**70


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": {"b": object()}}, r"box\.a\.b is a builtins\.object"),
        ({"a": [1, {1, 2}]}, r"box\.a\.1 is a builtins\.set"),
        ({("tuple",): 1}, r"box has the key \('tuple',\)"),
        ({"a": torch.eye(3).to_sparse()}, r"box\.a is a tensor of layout torch\.sparse_coo"),
    ],
)
def test_what_cannot_be_sent_is_named(value, words):
    with pytest.raises(StateError, match=words):
        flatten({"box": Box(value)})


def training(width=8, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train(state, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        state["optimizer"].zero_grad()
        state["model"](torch.randn(6, 4, generator=generator)).square().sum().backward()
        state["optimizer"].step()
        state["scheduler"].step()


def test_a_training_continues_with_the_same_bits():
    one, other = training(), training(seed=1)
    train(one, 3)
    flat = over_the_wire(one)
    assert first_difference(flatten(other).skeleton, flat.skeleton) is None
    assert digest(one) != digest(other)
    load(flat, other)
    assert digest(one) == digest(other)
    train(one, 3, seed=5)
    train(other, 3, seed=5)
    assert digest(one) == digest(other)


def test_digest_sees_every_change_and_no_order():
    base = {"a": torch.zeros(3), "b": {"x": 1, "y": 2.0}}
    same_again = {"b": {"y": 2.0, "x": 1}, "a": torch.zeros(3)}
    assert digest({"s": Box(base)}) == digest({"s": Box(same_again)})
    changed = [
        {**base, "a": torch.zeros(3, dtype=torch.float64)},
        {**base, "a": torch.zeros(1, 3)},
        {**base, "a": torch.tensor([0.0, 0.0, -0.0])},
        {**base, "b": {"x": 1, "y": 2.5}},
        {"a": base["a"], "c": base["b"]},
    ]
    digests = {digest({"s": Box(value)}) for value in changed}
    assert len(digests) == len(changed)
    assert digest({"s": Box(base)}) not in digests


def change_names(state):
    state["model"] = nn.Sequential(collections.OrderedDict(first=state["model"][0]))


def change_groups(state):
    model = state["model"]
    state["optimizer"] = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[2].parameters()}])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.update(training(width=9)), r"model\.0\.weight is float32\[8, 4\] there and float32\[9, 4\] here"),
        (lambda s: s["model"].double(), r"model\.0\.weight is float32\[8, 4\] there and float64\[8, 4\] here"),
        (change_names, r"model\.0\.weight exists there only"),
        (change_groups, r"optimizer\.param_groups has 1 entries there and 2 here"),
        (
            lambda s: s.update(optimizer=torch.optim.SGD(s["model"].parameters())),
            r"optimizer is of the class AdamW there and SGD here",
        ),
        (lambda s: s.pop("scheduler"), r"`state` has the entries \['model', 'optimizer', 'scheduler'\] there"),
        (lambda s: s.update(scheduler=s["model"]), r"scheduler is of the kind other there and module here"),
    ],
)
def test_the_first_difference_is_named(change, words):
    here, there = training(), training()
    change(here)
    train(there, 1)
    found = first_difference(flatten(here).skeleton, flatten(there).skeleton)
    assert found is not None
    assert re.search(words, found), found


def test_an_object_that_refuses_is_named():
    class Refuses(Box):
        def load_state_dict(self, value):
            raise ValueError("not this one")

    with pytest.raises(StateError, match="box refused the state of the other replicas: not this one"):
        load(over_the_wire({"box": Box({"a": 1})}), {"box": Refuses({})})


@given(st.binary(max_size=60))
@settings(deadline=None)
def test_foreign_bytes_are_an_error_and_nothing_else(noise):
    try:
        allocate(noise)
    except StateError:
        return
    assert noise == b"\x90"  # the empty list: a state without entries


def test_loading_does_not_alias_the_source():
    one, other = training(), training(seed=1)
    train(one, 1)
    before = copy.deepcopy(one["optimizer"].state_dict())
    load(over_the_wire(one), other)
    train(other, 2)
    after = one["optimizer"].state_dict()
    assert same(before["state"], after["state"])


ARRAYS = [
    np.arange(6, dtype=np.float64).reshape(2, 3),
    np.arange(6, dtype=">i4")[::2],
    np.array(3, np.uint64),
    np.zeros((0, 3), np.complex64),
    np.array([True, False]),
    np.array(["2026-11-22"], "datetime64[D]"),
    np.array([1.5, -2.0], ml_dtypes.bfloat16),
    np.float32(1.25),
    np.bool_(True),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}-{array.shape}")
def test_arrays_of_numpy_arrive_as_they_are(array):
    frozen = np.broadcast_to(array, array.shape)  # not writable
    for said in (array, frozen) if isinstance(array, np.ndarray) else (array,):
        got = round_trip({"w": said})["w"]
        assert type(got) is type(array)
        assert (got.dtype, got.shape) == (array.dtype, array.shape)
        assert got.tobytes() == array.tobytes()
        assert digest({"box": Box({"w": said})}) == digest({"box": Box({"w": array})})
    here, there = (flatten({"box": Box({"w": x})}).skeleton for x in (np.zeros(3), np.zeros(4)))
    assert first_difference(here, there) == "box.w is an array of <f8[4] there and an array of <f8[3] here"


@pytest.mark.parametrize(
    "array",
    [np.array([{}]), np.zeros(2, [("a", "f4")]), np.ma.masked_array([1.0])],
    ids=["objects", "struct", "masked"],
)
def test_arrays_that_are_no_plain_numbers_are_refused_by_name(array):
    with pytest.raises(StateError, match=r"box\.w is an? "):
        flatten({"box": Box({"w": array})})


@pytest.mark.parametrize(
    "node",
    [
        ["n", 0, 8, "O", [1], False],  # bytes from elsewhere as addresses
        ["n", 0, 8, "O,f4", [1], False],
        ["n", 0, 8, "<f8", [2], False],
        ["n", 0, 8, "<f8", [-1], False],
        ["n", 0, 0, "V0", [1], False],
        ["n", 0, 8, "nonsense", [1], False],
        ["n", 0, 8, "<f8", [1] * 100, False],
    ],
)
def test_a_skeleton_with_an_array_that_cannot_be_is_refused(node):
    with pytest.raises(StateError, match="not one of ftcomm"):
        allocate(msgspec.msgpack.encode([["box", "other", "Box", node]]))


def test_what_a_script_holds_is_written_into():
    array, tensor, deep = np.zeros(3), torch.zeros(2), {"layers": [np.zeros(2), np.zeros(2)], "epoch": 1, "old": 2}
    state = {name: as_entry(name, value) for name, value in (("a", array), ("t", tensor), ("d", deep))}
    layer = deep["layers"][1]
    newer = {"layers": [np.ones(2), np.ones(2)], "epoch": 7, "new": 3}
    other = {"a": Box(np.ones(3)), "t": Box(torch.ones(2)), "d": Box(newer)}
    load(over_the_wire(other), state)
    assert array.tolist() == [1.0] * 3
    assert tensor.tolist() == [1.0] * 2
    assert layer.tolist() == [1.0] * 2, "names that the script has for an array stay good"
    assert (deep["epoch"], deep["new"], "old" in deep) == (7, 3, False)


def test_arrays_of_cupy_travel_by_the_host_and_are_written_into(monkeypatch):
    cupy = cupy_stub.module()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    alone, deep = cupy.array(0 * values, np.float32), {"w": cupy.array(0 * values, np.float32), "step": 1}
    held = deep["w"]
    here = {"a": as_entry("a", alone), "d": as_entry("d", deep)}
    there = {
        "a": as_entry("a", cupy.array(values, np.float32)),
        "d": as_entry("d", {"w": cupy.array(values + 1, np.float32), "step": 7}),
    }
    assert digest(here) != digest(there)
    assert first_difference(flatten(here).skeleton, flatten(there).skeleton) is None
    load(over_the_wire(there), here)
    assert digest(here) == digest(there)
    assert (alone.get().tolist(), held.get().tolist()) == (values.tolist(), (values + 1).tolist())
    assert (deep["w"] is held, deep["step"]) == (True, 7)
    shape = {"a": as_entry("a", cupy.array(np.zeros(2), np.float32)), "d": here["d"]}
    said = first_difference(flatten(here).skeleton, flatten(shape).skeleton)
    assert said == "a is an array of <f4[2] there and an array of <f4[2, 3] here"


class Moments(NamedTuple):
    """As optax has its states."""

    step: int
    mean: np.ndarray


def test_tuples_and_mappings_that_cannot_be_changed_keep_their_class():
    mean = np.zeros(2)
    held = {"moments": (Moments(0, mean), ()), "frozen": types.MappingProxyType({"a": Moments(0, np.zeros(1))})}
    newer = {"moments": (Moments(3, np.ones(2)), ()), "frozen": types.MappingProxyType({"a": Moments(4, np.ones(1))})}
    load(over_the_wire({"d": Box(newer)}), {"d": as_entry("d", held)})
    moments = held["moments"][0]
    assert type(moments) is Moments
    assert moments.step == 3
    assert moments.mean is mean
    assert mean.tolist() == [1.0] * 2
    assert type(held["frozen"]) is types.MappingProxyType
    assert type(held["frozen"]["a"]) is Moments
    assert held["frozen"]["a"].step == 4


def test_what_cannot_be_held_is_refused_by_name():
    with pytest.raises(StateError, match=r"the entry 'lr' of `state` is a builtins\.float, which"):
        as_entry("lr", 0.1)
    with pytest.raises(StateError, match=r"d\.x is a builtins\.set, which cannot be sent"):
        flatten({"d": as_entry("d", {"x": {1}})})


def test_fingerprints_tell_values_apart_and_nothing_else():
    def of(**state):
        return fingerprints(flatten({name: Box(value) for name, value in state.items()}))

    def ones():
        return {
            "odd": torch.ones(11, dtype=torch.uint8),
            "none": torch.zeros(0),
            "part": torch.ones(40)[3:9],  # does not begin at a whole word
            "across": torch.ones(4, 6).t(),
            "array": np.ones(5, np.float32),
            "plain": [1, "a", None, 0.5],
        }

    same = of(x=ones())
    assert same == of(x=dict(reversed(ones().items())))
    assert list(same) == sorted(same)
    assert all(same.values())
    for name, change in (("odd", 10), ("part", 5), ("across", (3, 2)), ("array", 4), ("plain", 3)):
        state = ones()
        state[name][change] = 2
        other = of(x=state)
        assert {path for path in same if same[path] != other[path]} == {
            f"x.{name}.3" if name == "plain" else f"x.{name}"
        }
    assert of(x=torch.ones(3)) != of(x=torch.ones(3, dtype=torch.float64)) != of(x=torch.ones(1, 3))
