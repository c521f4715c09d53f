"""Finds the bytes of each tensor in the files of `torch.distributed.checkpoint`, so that they are read without pickle.

torch's `.metadata` is a pickle, and so is the description of each tensor in front of its bytes: reading these would let
a writer to the folder run code. So the rank that writes a checkpoint looks up in its own files where the bytes begin,
and leaves that as JSON. A reader goes there at once, and takes names, dtypes and shapes from the skeleton.

    index               {"skeleton": CRC-32, "tensors": [{"file": "__0_0.distcp", "offset": 640, "crc": CRC-32}, ...]}
    __0_0.distcp        for each tensor a zip archive, as of `torch.save`: data.pkl, ..., data/0 (its bytes), ...
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
from torch.distributed.checkpoint.metadata import Metadata

from ftcomm.errors import FtcommError

_LOCAL = struct.Struct("<26xHH")  # the header in front of a zip's member: the lengths of its name and its extra field


class Extent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The place of the bytes of a tensor, and their CRC-32."""

    file: str
    offset: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    crc: int


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The CRC-32 of the skeleton, and the places of the tensors in its order."""

    skeleton: int
    tensors: list[Extent]


def find(path: Path, names: Sequence[str], views: Sequence[memoryview], metadata: Metadata) -> list[Extent]:
    """Returns where the tensors of these names, with these bytes, have been written in `path`. Raises `OSError`, and
    `FtcommError` if torch has written them in another way than the one that is known."""
    written = {index.fqn: info for index, info in metadata.storage_data.items()}
    places = []
    for name, view in zip(names, views, strict=True):
        info = written[name]
        with (path / info.relative_path).open("rb") as file:
            part = io.BufferedReader(_Part(file, info.offset, info.length))
            (member,) = [x for x in zipfile.ZipFile(part).infolist() if x.filename.endswith("/data/0")]
            if member.compress_type != zipfile.ZIP_STORED or member.file_size != view.nbytes:
                raise FtcommError(f"torch has written {name} as {member}, expected {view.nbytes} bytes as they are")
            part.seek(member.header_offset)
            before = member.header_offset + _LOCAL.size + sum(_LOCAL.unpack(part.read(_LOCAL.size)))
        places.append(Extent(info.relative_path, info.offset + before, zlib.crc32(view)))
    return places


def fill(path: Path, names: Sequence[str], views: Sequence[memoryview], places: Sequence[Extent]) -> None:
    """Reads the tensors into `views`. Raises `OSError`, and `ValueError` if they are not what was written."""
    if len(places) != len(views):
        raise ValueError(f"its index has {len(places)} tensors, its skeleton {len(views)}")
    changed = []
    for name, view, place in zip(names, views, places, strict=True):
        if place.file != Path(place.file).name:
            raise ValueError(f"its index leads out of the folder, to {place.file[:100]!r}")
        with (path / place.file).open("rb") as file:
            file.seek(place.offset)
            if file.readinto(view) < view.nbytes or zlib.crc32(view) != place.crc:
                changed.append(name)
    if changed:
        raise ValueError(
            f"{len(changed)} of {len(views)} tensors in its .distcp files have changed since they were written, "
            f"{', '.join(changed[:3])}: their checksums are others"
        )


class _Part(io.RawIOBase):
    """A reader of `length` bytes of `file` from `start`."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        data = self._file.read(max(0, min(len(buffer), self._length - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
