"""The live view as a process of a launcher: `python -m ftcomm.dashboard SOCKET HOST PORT`."""

from __future__ import annotations

import sys
from pathlib import Path

from ftcomm.dashboard.commands import serve
from ftcomm.errors import FtcommError

if __name__ == "__main__":
    try:
        serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    except FtcommError as error:
        print(f"no live view: {error}", flush=True)
        sys.exit(1)
