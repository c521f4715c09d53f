"""A forked child of a process that takes part in a job may make no calls."""

from __future__ import annotations

from ftcomm.control import fork
from ftcomm.errors import FtcommError

checked_page = fork.checked_page  # calls look at its first byte themselves, before they call `own_process`


def own_process() -> None:
    """Raises `FtcommError` in a forked child of a process that takes part."""
    if not checked_page[0]:
        if fork.is_child():
            raise FtcommError(fork.refusal())
        checked_page[0] = fork.wiped
