"""The phrases by which a process tells the others how its script has ended, and which they find again in a reason."""

from __future__ import annotations

FAILED = "its script failed with "  # and the name of the error's class
EXITED = "its script exited with code "


def failed_with(error: BaseException) -> str:
    return f"{FAILED}{type(error).__name__}"


def says_failed_with(reason: str, error: type[BaseException]) -> bool:
    """Whether `reason` says that a script has failed with this class of error."""
    return reason.endswith(f"{FAILED}{error.__name__}")
