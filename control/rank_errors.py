"""The errors of a rank that is not, or no longer, part of its job."""

from __future__ import annotations

from ftcomm.control import messages as m
from ftcomm.control.failed_dials import shortage


class JoinError(RuntimeError):
    """The job cannot be joined; the message says what was tried and the mend."""

    def __init__(self, reason: str, ending: m.Ending = m.Ending.FAILED) -> None:
        super().__init__(reason)
        self.ending = ending


class Gone(RuntimeError):
    """This replica is no longer part of the job."""

    def __init__(self, reason: str, ending: m.Ending = m.Ending.FAILED) -> None:
        super().__init__(reason)
        self.ending = ending


def why_broken(error: BaseException | None) -> str:
    """Returns why the control thread has ended: the system lacks something, or there is a defect."""
    lacks = shortage(error)
    if lacks:
        return f"the control thread cannot go on: {lacks}"
    return f"internal error in the control thread: {error!r}; please report it"


def why_ended(error: BaseException) -> str:
    """Returns why the event loop of the control thread has ended by itself. It passes errors of what runs in it on to
    their tasks, so an `OSError` of its own is that of a descriptor that it waits on."""
    if not isinstance(error, OSError):
        return why_broken(error)
    return (
        f"the control thread has ended: a file descriptor of it was closed ({error}). The script, or a library, has "
        "closed descriptors that it had not opened (os.closerange, a daemonizer); let it close its own, or do so "
        "before ftcomm.init()"
    )
