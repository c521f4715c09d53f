"""Reads the metadata of a checkpoint without running code from it.

`torch.distributed.checkpoint` keeps metadata as a pickle, and a pickle calls what it names: a writer to the folder of
checkpoints could run code in every rank. Here it may name only the few classes that metadata are made of. The result
must be tensors of the expected names, shapes and dtypes, in files of that folder.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

FILE = ".metadata"

_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},  # only looks into a table
    "torch": {"Size"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}


class _Unpickler(pickle._Unpickler):
    """The unpickler written in Python. The one in C does not ask before it sets attributes, which a pickle could do to
    a class, for all of this process."""

    dispatch = pickle._Unpickler.dispatch.copy()

    def _build(self) -> None:
        whom = self.stack[-2]  # type: ignore[attr-defined]
        if isinstance(whom, type) or not dataclasses.is_dataclass(whom):
            raise pickle.UnpicklingError(f"{FILE} changes {str(whom)[:100]}, which is no part of it")
        self.load_build()  # type: ignore[attr-defined]

    dispatch[pickle.BUILD[0]] = _build  # type: ignore[assignment]

    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{FILE} names {module}.{name}, which is no part of a checkpoint")


class Reader(dcp.FileSystemReader):  # type: ignore[misc]
    """A reader of the checkpoint in `path`, which has to hold `tensors`."""

    def __init__(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(path)
        self._folder, self._tensors = path, tensors

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the metadata, checked. Raises `OSError` and `ValueError`."""
        with (self._folder / FILE).open("rb") as file:
            try:
                metadata = _Unpickler(file).load()
            except OSError:
                raise
            except Exception as error:  # a broken pickle may raise anything
                raise ValueError(f"{FILE} is not understood: {error}") from None
        self._check(metadata)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def _check(self, metadata: object) -> None:
        if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
            raise ValueError(f"{FILE} holds no metadata")
        for name, tensor in self._tensors.items():
            there = metadata.state_dict_metadata.get(name)
            # An entry that is not a tensor would be unpickled without these checks.
            if not isinstance(there, TensorStorageMetadata):
                raise ValueError(f"{FILE} has no tensor {name}")
            kind, size = there.properties.dtype, list(there.size)
            if (kind, size) != (tensor.dtype, list(tensor.shape)):
                raise ValueError(f"{name} is {kind} {size} there, {tensor.dtype} {list(tensor.shape)} here")
        for info in metadata.storage_data.values():
            if info.relative_path != Path(info.relative_path).name:
                raise ValueError(f"{FILE} leads out of the folder, to {str(info.relative_path)[:100]!r}")
