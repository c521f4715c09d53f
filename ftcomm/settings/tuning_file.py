"""The file of `ftcomm bench tune`, with which `ftcomm.settings.tuning` is made for a machine or a network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ftcomm.errors import SettingsError
from ftcomm.settings.tuning import BUILT_IN, EVER, MEMBERS, Points, Tuning

Sizes = dict[Annotated[int, Meta(ge=2, le=MEMBERS)], Annotated[int, Meta(ge=0, le=EVER)]]  # members -> bytes
Names = Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(max_length=4096)]


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file that `ftcomm bench tune` writes. For numbers of members that are not in it the built-in size holds."""

    version: Annotated[int, Meta(ge=1, le=1)]
    one_shot_on_one_host: Sizes = {}
    one_shot_between_hosts: Sizes = {}
    direct_before_ring: Sizes = {}
    direct_before_two_levels: Sizes = {}
    tree_between_hosts: Sizes = {}  # 0: none
    tree_on_one_host: Sizes = {}
    ring_through_racks: Names = []  # in this order; those that are not in it come behind
    ring_through_hosts: Names = []  # by address; within a rack
    measured: dict[str, Any] = {}  # where, when and by what; for people


_FILE = msgspec.json.Decoder(File)


def load(path: str) -> Tuning:
    """Reads the file. Raises `SettingsError` on one that is none."""
    name = f"FTCOMM_TUNING={path}"
    try:
        file = _FILE.decode(Path(path).read_bytes())
    except OSError as error:
        raise SettingsError(f"{name}: {error.strerror or error}; name a file that `ftcomm bench tune` wrote.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{name} is no tuning file ({error}); make it anew by `ftcomm bench tune`.") from None
    return Tuning(
        _over(BUILT_IN.one_host, file.one_shot_on_one_host),
        _over(BUILT_IN.hosts, file.one_shot_between_hosts),
        _over(BUILT_IN.ring, file.direct_before_ring),
        _over(BUILT_IN.two_levels, file.direct_before_two_levels),
        tuple(file.ring_through_racks),
        tuple(file.ring_through_hosts),
        _over(BUILT_IN.tree, file.tree_between_hosts),
        _over(BUILT_IN.tree_on_one_host, file.tree_on_one_host),
        source=path,
    )


def _over(built_in: Points, measured: dict[int, int]) -> Points:
    return tuple(sorted({**dict(built_in), **measured}.items()))
