"""The memory in which all groups of a process stage together."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ftcomm.errors import SettingsError

BYTES = 64 << 20


def staging_bytes(env: Mapping[str, str] | None = None) -> int:
    """Returns the bytes of FTCOMM_STAGING_BYTES. Raises `SettingsError`."""
    value = (os.environ if env is None else env).get("FTCOMM_STAGING_BYTES", str(BYTES))
    if not value.isdecimal():
        raise SettingsError(
            f"FTCOMM_STAGING_BYTES={value!r}; expected a number of bytes from 0, or unset it for {BYTES}."
        )
    return int(value)
