"""The metadata of a checkpoint are read without running what they say.

`torch.distributed.checkpoint` keeps them as a pickle, and a pickle calls what it names: who may write to the folder of
checkpoints could so run code in every rank. Here it may name the few classes of which metadata are made, and nothing
else; and what comes out must be tensors of the names, shapes and dtypes that are awaited, in files of that folder.
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
    "torch.serialization": {"_get_layout"},  # a look into a table
    "torch": {"Size"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}


class _Unpickler(pickle._Unpickler):
    """That of Python, as the one in C asks nobody before it gives attributes to whatever a pickle says: to a class as
    well, for all of this process."""

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
    """Reads the checkpoint in `path`, which has to hold `tensors`."""

    def __init__(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(path)
        self._folder, self._tensors = path, tensors

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata, checked. Raises `OSError` and `ValueError`."""
        with (self._folder / FILE).open("rb") as file:
            try:
                metadata = _Unpickler(file).load()
            except OSError:
                raise
            except Exception as error:  # whatever a pickle that is none leads to
                raise ValueError(f"{FILE} is not understood: {error}") from None
        self._check(metadata)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def _check(self, metadata: object) -> None:
        if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
            raise ValueError(f"{FILE} holds no metadata")
        for name, tensor in self._tensors.items():
            there = metadata.state_dict_metadata.get(name)
            # What is no tensor there would be unpickled, without any limit.
            if not isinstance(there, TensorStorageMetadata):
                raise ValueError(f"{FILE} has no tensor {name}")
            kind, size = there.properties.dtype, list(there.size)
            if (kind, size) != (tensor.dtype, list(tensor.shape)):
                raise ValueError(f"{name} is {kind} {size} there, {tensor.dtype} {list(tensor.shape)} here")
        for info in metadata.storage_data.values():
            if info.relative_path != Path(info.relative_path).name:
                raise ValueError(f"{FILE} leads out of the folder, to {str(info.relative_path)[:100]!r}")
