"""Training state as bytes: any nest of dicts, lists, tensors and arrays as a msgpack skeleton and a list of tensors.

An array of NumPy, CuPy or JAX is in that list as an array of its bytes on the host, so a state without tensors needs
no torch. The skeleton holds everything but the tensors' bytes: names, nesting, plain values, and for each tensor its
place in the list, dtype and shape. Two skeletons can be compared before a single byte of a tensor is moved, so a
replica that was started with another model is refused at once, with the first difference named. Nothing is pickled.

    state = {"model": model, "optimizer": optimizer}       # anything with state_dict and load_state_dict
    flat = flatten(state)                                  # FlatState(skeleton: bytes, tensors: list[Tensor])
    load(flat, state)                                      # the same bits again
    digest(state)                                          # equal on two replicas exactly if their states are
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec
import numpy as np

from ftcomm.arrays import is_cupy, is_torch
from ftcomm.arrays.dtensor import DTensorLayout, Meshes, is_spread, layout, local
from ftcomm.arrays.flat import Bytes
from ftcomm.errors import StateError
from ftcomm.training.kinds import is_module, is_optimizer

if TYPE_CHECKING:
    from torch import Tensor

    Held: TypeAlias = Tensor | Bytes  # the bytes of an array

_FEW = 4  # elements of a row that are sampled; of an array of NumPy, bytes
SAME_SCRIPT = "Start every replica with the same script, model and optimizer, and pass the same `state` on each."


class Stateful(Protocol):
    """An entry of `state`: a module, an optimizer, a scheduler, or any object with these two methods. A step loop also
    takes arrays, tensors, dicts and lists, see `ftcomm.training.entries`."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


@dataclasses.dataclass(frozen=True)
class FlatState:
    """A state taken apart. `tensors` may alias the live state (after `flatten`) or own their memory (`on_host`)."""

    skeleton: bytes
    tensors: list[Held]

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors, without the skeleton."""
        return sum(held.nbytes for held in self.tensors)

    def on_host(self) -> FlatState:
        """Returns a copy in host memory, independent of the live state. Blocks for the copy."""
        return FlatState(self.skeleton, [host_copy(held) for held in self.tensors])

    def views(self) -> list[memoryview]:
        """Returns the bytes of each tensor, writable, without a copy; only for contiguous host tensors (see
        `on_host`)."""
        return [bytes_of(held).data for held in self.tensors]


@dataclasses.dataclass(frozen=True)
class NumPy:
    """A NumPy array or scalar. It travels as its bytes, so that every dtype can."""

    dtype: str
    shape: tuple[int, ...]
    scalar: bool = False

    def of(self, held: Bytes) -> Any:
        """Returns the array in this memory."""
        array = held.view(_numpy_dtype(self.dtype)).reshape(self.shape)
        return array[()] if self.scalar else array


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor without its bytes: its place in the list of tensors, its dtype ("bfloat16") and its shape. If it is
    spread over several ranks, that is the shape of the own part."""

    place: int
    dtype: str
    shape: tuple[int, ...]
    layout: DTensorLayout | None = None
    array: NumPy | None = None  # the array whose bytes these are

    def __str__(self) -> str:
        if self.array is not None:
            return f"an array of {self.array.dtype}{list(self.array.shape)}"
        text = f"{self.dtype}{list(self.shape)}"
        if self.layout is None:
            return text
        whole, placements, mesh = self.layout
        return f"{text}, a part of {list(whole)} as {', '.join(placements)} over the mesh ({mesh}),"


def flatten(state: Mapping[str, Stateful]) -> FlatState:
    """Take `state` apart; the tensors alias the live state. Raises `StateError` on values that cannot be sent."""
    tensors: list[Held] = []
    tree = [
        [name, _kind(obj), type(obj).__qualname__, _encode(obj.state_dict(), name, tensors, False)]
        for name, obj in state.items()
    ]
    return FlatState(msgspec.msgpack.encode(tree), tensors)


def allocate(skeleton: bytes) -> FlatState:
    """Makes a `FlatState` with uninitialised host tensors, to receive into."""
    wanted = [leaf for *_, tree in _entries(skeleton) for leaf in specs(tree)]
    if [spec.place for spec in wanted] != list(range(len(wanted))):
        raise StateError(f"A state arrived whose {len(wanted)} tensors are not numbered in order. {SAME_SCRIPT}")
    try:
        return FlatState(skeleton, [_empty(spec) for spec in wanted])
    except (RuntimeError, MemoryError, OverflowError, TypeError) as error:
        raise StateError(f"There is no memory for the state of the other replicas: {error}") from error


def load(flat: FlatState, state: Mapping[str, Stateful], leave: Collection[str] = ()) -> None:
    """Load `flat` into `state`, but leave entries of these names as they are. Optimizers keep the tensors of `flat`, so
    do not write to them afterwards.

    Call `first_difference` before. What a `load_state_dict` refuses in spite of that is raised as `StateError`.
    """
    meshes = Meshes(tensor for obj in state.values() for tensor in tensors_in(obj.state_dict()))
    for name, *_, tree in _entries(flat.skeleton):
        if name in leave:
            continue
        got = _fill(tree, flat.tensors, meshes)
        metadata = getattr(state[name].state_dict(), "_metadata", None)
        if metadata is not None:  # the versions of a module's submodules, which state_dict hides in an attribute
            got = collections.OrderedDict(got)
            got._metadata = metadata  # type: ignore[attr-defined]
        load_entry(name, state[name], got)


def load_entry(name: str, of: Stateful, got: Any) -> None:
    """Load what is got into one entry. Raises `StateError` if it refuses that."""
    try:
        of.load_state_dict(got)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise StateError(f"{name} refused the state of the other replicas: {error} {SAME_SCRIPT}") from error


def first_difference(here: bytes, there: bytes) -> str | None:
    """Returns the first reason why the state of skeleton `there` cannot be loaded where `here` is, or None.

    A module must have the same names on both sides, and so must the param_groups of an optimizer. Elsewhere a side may
    have entries that the other lacks (an optimizer that has not stepped yet holds no moments), but what both have must
    agree in kind, and tensors in dtype and shape.
    """
    ours, theirs = _entries(here), _entries(there)
    ours_by_name = {name: (kind, which, tree) for name, kind, which, tree in ours}
    if list(ours_by_name) != [name for name, *_ in theirs]:
        return f"`state` has the entries {[name for name, *_ in theirs]} there and {list(ours_by_name)} here"
    for name, kind, which, tree in theirs:
        own_kind, own_which, own = ours_by_name[name]
        if kind != own_kind:
            return f"{name} is of the kind {kind} there and {own_kind} here"
        if kind == "optimizer" and which != own_which:
            return f"{name} is of the class {which} there and {own_which} here"
        found = _difference(name, own, tree, kind)
        if found:
            return found
    return None


def first_setting(here: bytes, there: bytes) -> str | None:
    """Returns the first setting of an optimizer (a learning rate, a decay) that differs, for states of the same
    form."""
    for (name, kind, _, own), (*_, other) in zip(_entries(here), _entries(there), strict=True):
        groups = zip(own["param_groups"], other["param_groups"], strict=True) if kind == "optimizer" else ()
        for i, (ours, theirs) in enumerate(groups):
            for key, value in theirs.items():
                if not isinstance(value, TensorSpec) and ours[key] != value:
                    return f"{name}.param_groups.{i}.{key} is {value} there and {ours[key]} here"
    return None


def entry(skeleton: bytes, name: str) -> Any:
    """Returns the entry `name` of a state, with a `TensorSpec` in place of each tensor; None if there is none."""
    return next((tree for each, *_, tree in _entries(skeleton) if each == name), None)


def specs(tree: Any) -> list[TensorSpec]:
    """Returns what stands for tensors in an `entry`, or in a part of one."""
    found: list[TensorSpec] = []
    _walk(tree, found.append)
    return found


def leaves(skeleton: bytes) -> dict[str, Any]:
    """Returns the plain values in a state, and a `TensorSpec` for each tensor, by path, as in "model.0.weight"."""
    found: dict[str, Any] = {}

    def visit(node: Any, path: str) -> None:
        if isinstance(node, (dict, list, tuple)):
            for key, entry in node.items() if isinstance(node, dict) else enumerate(node):
                visit(entry, f"{path}.{key}")
        else:
            found[path] = node

    for name, *_, tree in _entries(skeleton):
        visit(tree, name)
    return found


def names(skeleton: bytes) -> list[str]:
    """Returns the path of each tensor, in the order of the tensors."""
    found = {leaf.place: path for path, leaf in leaves(skeleton).items() if isinstance(leaf, TensorSpec)}
    return [found[place] for place in sorted(found)]


def digest(state: Mapping[str, Stateful]) -> str:
    """Returns 32 hex digits over every name, shape, dtype, plain value and byte, independent of the order of dict
    entries."""
    tensors: list[Held] = []
    tree = [[name, _encode(state[name].state_dict(), name, tensors, True)] for name in sorted(state)]
    hasher = hashlib.blake2b(msgspec.msgpack.encode(tree), digest_size=16)
    for tensor in tensors:
        hasher.update(bytes_of(host_copy(tensor)).data)
    return hasher.hexdigest()


def sampled(value: Any, name: str) -> bytes:
    """Returns 16 bytes over every name, shape, dtype and plain value in `value`, and over a few elements of each
    tensor: the first ones of its first row, and the last ones of its last row."""
    tensors: list[Held] = []
    tree = msgspec.msgpack.encode(_encode(value, name, tensors, True))
    hasher = hashlib.blake2b(tree, digest_size=16)
    for held in _few(tensors):
        hasher.update(bytes_of(held).data)
    return hasher.digest()


# -- the skeleton: plain values stand for themselves, everything else is a list that begins with one of these tags --

_TENSOR, _ARRAY, _DICT, _COUNTER, _LIST, _TUPLE, _BIG = "t", "n", "d", "c", "l", "u", "i"
_DIMENSIONS = 32  # dimensions that an array of every NumPy can have


@functools.cache
def _dtypes() -> frozenset[str]:
    """Returns the names of the dtypes of torch."""
    import torch

    return frozenset(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))


def _kind(obj: Stateful) -> str:
    return "module" if is_module(obj) else "optimizer" if is_optimizer(obj) else "other"


def _encode(value: Any, path: str, tensors: list[Held], ordered: bool) -> Any:
    """Encode a value. With `ordered` the entries of dicts are sorted, so that equal states are equal bytes."""
    if value is None or isinstance(value, (bool, bytes)):
        return value
    if isinstance(value, (float, str)):  # also a subclass, such as numpy.float64
        return float(value) if isinstance(value, float) else str(value)
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**64 else [_BIG, str(int(value))]
    if is_torch(value):
        if not is_spread(value) and (value.layout != sys.modules["torch"].strided or value.is_quantized):
            raise StateError(f"{path} is a tensor of layout {value.layout}; a state may hold dense tensors only.")
        part, how = local(value), layout(value)
        tensors.append(part)
        spec = [_TENSOR, len(tensors) - 1, str(part.dtype).removeprefix("torch."), list(part.shape)]
        return spec if how is None else [*spec, list(how)]
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(value, jax.Array) and value.is_fully_addressable:
        value = np.asarray(value)
    if is_cupy(value):
        with value.device:
            value = value.get(order="C")  # blocks until what was queued on the current stream is done
    if isinstance(value, (np.ndarray, np.generic)) and not isinstance(value, np.ma.MaskedArray):
        return _encode_array(value, path, tensors)
    if isinstance(value, Mapping):
        items = sorted(value.items(), key=lambda item: (str(type(item[0])), item[0])) if ordered else value.items()
        pairs = []
        for key, entry in items:
            if isinstance(key, bool) or not isinstance(key, (int, str)):
                raise StateError(f"{path} has the key {key!r}; the keys of a state must be int or str.")
            pairs.append([key, _encode(entry, f"{path}.{key}", tensors, ordered)])
        return [_COUNTER if isinstance(value, collections.Counter) else _DICT, pairs]
    if isinstance(value, (list, tuple)):
        tag = _TUPLE if isinstance(value, tuple) else _LIST
        return [tag, [_encode(entry, f"{path}.{i}", tensors, ordered) for i, entry in enumerate(value)]]
    raise StateError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be sent to another replica. A "
        "state may hold dict, list, tuple, None, bool, int, float, str, bytes, tensors, and arrays of NumPy, CuPy and "
        "JAX; convert it in state_dict()."
    )


def _encode_array(value: Any, path: str, tensors: list[Held]) -> Any:
    dtype = value.dtype
    name = dtype.name if dtype.kind == "V" else dtype.str  # dtypes of ml_dtypes are known by name
    try:
        known = _numpy_dtype(name) == dtype
    except (TypeError, ValueError):
        known = False
    if not known:
        raise StateError(f"{path} is an array of dtype {dtype}; a state may hold arrays of plain numbers only.")
    array = np.ascontiguousarray(value)  # no copy if it is contiguous
    tensors.append(array.reshape(-1).view(np.uint8))
    return [_ARRAY, len(tensors) - 1, array.nbytes, name, list(value.shape), isinstance(value, np.generic)]


def _numpy_dtype(name: str) -> np.dtype[Any]:
    """Returns the dtype of that name. Raises `TypeError` or `ValueError` for names that foreign bytes must not use."""
    dtype = np.dtype(name)
    if dtype.hasobject or dtype.names is not None or dtype.subdtype is not None or not dtype.itemsize:
        raise ValueError(f"an array of {name}")
    return dtype


def _entries(skeleton: bytes) -> list[tuple[str, str, str, Any]]:
    """Returns (name, kind, class, tree with `TensorSpec` in place of tensors) of each entry. Raises `StateError` on
    foreign bytes."""
    try:
        entries = msgspec.msgpack.decode(skeleton, type=list[tuple[str, str, str, Any]])
        return [(name, kind, which, _decode(tree)) for name, kind, which, tree in entries]
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise StateError(f"A state arrived that is not one of ftcomm {error!r}. {SAME_SCRIPT}") from error


def _decode(node: Any) -> Any:
    if not isinstance(node, list):
        return node
    match node:
        case [str(tag), int(place), str(dtype), [*shape]] if tag == _TENSOR:
            if dtype not in _dtypes() or not all(isinstance(n, int) and n >= 0 for n in shape):
                raise ValueError(f"tensor {dtype}{shape}")
            return TensorSpec(place, dtype, tuple(shape))
        case [str(tag), int(place), str(dtype), [*shape], [*how]] if tag == _TENSOR:
            plain = _decode([tag, place, dtype, shape])
            return dataclasses.replace(plain, layout=msgspec.convert(how, DTensorLayout))
        case [str(tag), int(place), int(nbytes), str(dtype), [*shape], bool(scalar)] if tag == _ARRAY:
            if not all(isinstance(n, int) and n >= 0 for n in shape) or len(shape) > _DIMENSIONS:
                raise ValueError(f"array {dtype}{shape}")
            if math.prod(shape) * _numpy_dtype(dtype).itemsize != nbytes:
                raise ValueError(f"array {dtype}{shape} of {nbytes} bytes")
            return TensorSpec(place, "uint8", (nbytes,), array=NumPy(dtype, tuple(shape), scalar))
        case [str(tag), [*pairs]] if tag in (_DICT, _COUNTER):
            made: dict[Any, Any] = collections.Counter() if tag == _COUNTER else {}
            made.update({key: _decode(value) for key, value in pairs})
            return made
        case [str(tag), [*values]] if tag in (_LIST, _TUPLE):
            decoded = [_decode(value) for value in values]
            return tuple(decoded) if tag == _TUPLE else decoded
        case [str(tag), str(digits)] if tag == _BIG:
            return int(digits)
    raise ValueError(f"entry {str(node)[:60]}")


def _walk(tree: Any, leaf: Callable[[TensorSpec], Any]) -> Any:
    if isinstance(tree, TensorSpec):
        return leaf(tree)
    if isinstance(tree, dict):
        made = type(tree)()
        made.update({key: _walk(value, leaf) for key, value in tree.items()})
        return made
    if isinstance(tree, (list, tuple)):
        return type(tree)(_walk(value, leaf) for value in tree)
    return tree


def _fill(tree: Any, tensors: list[Held], meshes: Meshes) -> Any:
    def tensor(spec: TensorSpec) -> Any:
        part: Any = tensors[spec.place]
        if spec.array is not None:
            return spec.array.of(part)
        return part if spec.layout is None else meshes.whole(part, spec.layout)

    return _walk(tree, tensor)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in any nest of dicts, lists and tuples."""
    if is_torch(value):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from tensors_in(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from tensors_in(entry)


def _difference(path: str, own: Any, other: Any, kind: str) -> str | None:
    if isinstance(own, TensorSpec) and isinstance(other, TensorSpec):
        same = dataclasses.replace(own, place=other.place) == other
        return None if same else f"{path} is {other} there and {own} here"
    if isinstance(own, TensorSpec) or isinstance(other, TensorSpec):
        return f"{path} is {_describe(other)} there and {_describe(own)} here"
    # plain on one side and nested on the other (a lazily set attribute) is no difference
    if isinstance(own, dict) and isinstance(other, dict):
        if kind in ("module", "param_groups") and (odd := set(own) ^ set(other)):
            name = next(key for key in [*other, *own] if key in odd)
            return f"{path}.{name} exists {'there' if name in other else 'here'} only"
        for key in other:
            inner = "param_groups" if kind == "optimizer" and key == "param_groups" else kind
            if key in own and (found := _difference(f"{path}.{key}", own[key], other[key], inner)):
                return found
    elif isinstance(own, (list, tuple)) and isinstance(other, (list, tuple)):
        if kind == "param_groups" and len(own) != len(other):
            return f"{path} has {len(other)} entries there and {len(own)} here"
        for i, (a, b) in enumerate(zip(own, other, strict=False)):
            if found := _difference(f"{path}.{i}", a, b, kind):
                return found
    return None


def _describe(value: Any) -> str:
    return str(value) if isinstance(value, TensorSpec) else f"a {type(value).__name__}"


def _empty(spec: TensorSpec) -> Held:
    if spec.array is not None:
        return np.empty(spec.shape, np.uint8)
    import torch

    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))


def _few(tensors: list[Held]) -> list[Held]:
    """Returns a few elements of each tensor, in host memory; those of a device in one copy."""
    found: list[Held] = []
    there: dict[Any, list[Tensor]] = {}
    for held in tensors:
        if isinstance(held, np.ndarray):
            found.append(np.concatenate([held[:_FEW], held[-_FEW:]]))
        elif held.numel():
            import torch

            whole = held if held.ndim else held.reshape(1)
            first, last = (whole[(index,) * (whole.ndim - 1)] for index in (0, -1))
            there.setdefault(held.device, []).extend(
                part.resolve_conj().resolve_neg().contiguous().view(torch.uint8)
                for part in (first[:_FEW], last[-_FEW:])
            )
    for parts in there.values():
        import torch

        found.append(torch.cat(parts).cpu())
    return found


def bytes_of(held: Held) -> Bytes:
    """Returns the bytes of what is contiguous and in host memory, without a copy."""
    if isinstance(held, np.ndarray):
        return held
    import torch

    flat: Bytes = held.reshape(-1).view(torch.uint8).numpy()
    return flat


def host_copy(tensor: Held) -> Held:
    """Returns a contiguous copy in host memory that shares nothing with `tensor`."""
    if isinstance(tensor, np.ndarray):
        return tensor.copy()
    import torch

    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return copy.copy_(tensor.resolve_conj().resolve_neg())
