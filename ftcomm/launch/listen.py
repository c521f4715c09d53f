"""The address of a live view. Light, since the command line imports it."""

from __future__ import annotations

from typing import NamedTuple

from ftcomm.errors import SettingsError

LOOPBACK = "127.0.0.1"


class Listen(NamedTuple):
    """The address of a live view; port 0 is any free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Listen:
        """Takes `8265`, `10.0.0.1:8265` or `[::1]:8265`. Raises `SettingsError`."""
        host, _, port = text.rpartition(":")
        if not port.isdigit() or int(port) > 65535:
            raise SettingsError(f"{text!r} is no address for the live view; expected PORT or HOST:PORT, as in 8265.")
        return cls(host.strip("[]") or LOOPBACK, int(port))
