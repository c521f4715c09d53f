"""The token of a job that torchrun or mp.spawn has started, when FTCOMM_TOKEN is not set.

torch's store authenticates no client, so no secret goes through it. It says where rank 0 keeps the token: in a file
without a name, which the ranks of the same user open through /proc, as they do each other's segments. So they must all
be on one host and in one container; otherwise the user has to set FTCOMM_TOKEN.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat

from ftcomm.errors import InitError

_NAME = "ftcomm-token-"
_PLACE = re.compile(r"([1-9]\d{0,9})/(\d{1,9})/([0-9a-f]{16})")  # pid, descriptor, nonce
_MOST = 256  # bytes of the longest token

MEND = "Set FTCOMM_TOKEN to the same secret on all ranks, as in `export FTCOMM_TOKEN=$(openssl rand -hex 16)`"


class Secret:
    """A fresh token, and the `place` from which the other ranks read it until `close`."""

    def __init__(self) -> None:
        nonce = secrets.token_hex(8)
        self.token = secrets.token_hex(16)
        self._fd = os.memfd_create(_NAME + nonce, os.MFD_CLOEXEC)
        os.fchmod(self._fd, 0o400)
        os.write(self._fd, self.token.encode())
        self.place = f"{os.getpid()}/{self._fd}/{nonce}"

    def close(self) -> None:
        """Let no process read the token from now on; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def read(place: str) -> str:
    """Returns the token at `place`. That comes from torch's store, where any process may have written it, so the file
    has to belong to this user. Raises `InitError`."""
    fields = _PLACE.fullmatch(place)
    why = "that is no place"
    if fields is not None:
        pid, fd, nonce = fields.groups()
        path = f"/proc/{pid}/fd/{fd}"
        try:
            if not os.readlink(path).startswith(f"/memfd:{_NAME}{nonce} "):
                raise FileNotFoundError
            with contextlib.closing(os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")) as file:
                found = os.fstat(file.fileno())
                if stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
                    return file.read(_MOST).decode("ascii")
                why = "it belongs to somebody else"
        except (OSError, UnicodeDecodeError):
            why = "there is none: it runs on another host, in another container, or as another user"
    raise InitError(f"rank 0 says by torch's store that its token is at {place[:64]!r}, and {why}. {MEND}.")
