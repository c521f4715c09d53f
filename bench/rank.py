"""One rank of an experiment: python -m ftcomm.bench.rank MODULE:FUNCTION TASK_FILE [ARGUMENT...]

The function is called with the task, a struct of the type that its parameter `task` is annotated with, and the rest.
"""

from __future__ import annotations

import importlib
import sys
import typing
from pathlib import Path

import msgspec


def main(argv: list[str]) -> None:
    module, _, name = argv[1].partition(":")
    function = getattr(importlib.import_module(module), name)
    kind = typing.get_type_hints(function)["task"]
    function(msgspec.json.decode(Path(argv[2]).read_bytes(), type=kind), *argv[3:])


if __name__ == "__main__":
    main(sys.argv)
