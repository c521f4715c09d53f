"""Writes one dump, for a launcher, and says where it is; or why there is none, with exit code 1.

    python -m ftcomm.recorder RECORDINGS RUN CAUSE

It does not import torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ftcomm.recorder.dump import DumpError, write

if __name__ == "__main__":
    recordings, run, cause = sys.argv[1:]
    try:
        print(write(Path(recordings), run, cause))
    except DumpError as error:
        sys.exit(str(error))
