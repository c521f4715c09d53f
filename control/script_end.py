"""The end of a script, as its own process tells it, or as its launcher has seen it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ftcomm.control.decode import learn

_STATUS = 1 << 31
_NOT_OF_A_NAME = re.compile(r"\W")
_LONGEST_NAME = 128  # characters

ErrorName = Annotated[str, Meta(pattern=r"^\w*\Z", max_length=_LONGEST_NAME)]
ExitStatus = Annotated[int, Meta(ge=-_STATUS, lt=_STATUS)]


class ScriptEnd(msgspec.Struct, frozen=True, array_like=True):
    """The end of a script that has not ended well: by an exception of the class `error`, or by exiting with `code`. An
    `error` of `SystemExit` is one of which nobody knows the code."""

    error: ErrorName = ""
    code: ExitStatus | None = None

    def __post_init__(self) -> None:
        if bool(self.error) is (self.code is not None):
            raise ValueError("a script ends by an exception or with a code: give one of both")

    @classmethod
    def by(cls, error: type[BaseException]) -> ScriptEnd:
        """The end by an exception of this class. The name is cut to what messages may carry."""
        return cls(_NOT_OF_A_NAME.sub("_", error.__name__)[:_LONGEST_NAME] or "_")

    @classmethod
    def with_code(cls, code: int) -> ScriptEnd:
        """The exit with this status, of which scripts may make any integer."""
        return cls(code=max(-_STATUS, min(code, _STATUS - 1)))

    @classmethod
    def of_event(cls, event: Mapping[str, Any]) -> ScriptEnd | None:
        """Returns what an event says by `fields`. Raises `msgspec.ValidationError` if that is nothing such."""
        error, code = event.get("error", ""), event.get("code")
        return msgspec.convert([error, code], ScriptEnd) if error or code is not None else None

    @property
    def fields(self) -> dict[str, object]:
        """This as fields of an event."""
        return {"code": self.code} if self.code is not None else {"error": self.error}

    def __str__(self) -> str:
        """Says it to people."""
        if self.code is not None:
            return f"its script exited with code {self.code}"
        if self.error == SystemExit.__name__:
            return "its script raised SystemExit before the end of a step loop"
        return f"its script failed with {self.error}"


learn(ScriptEnd)
