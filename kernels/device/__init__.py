"""The kernels in Triton: compiled for a GPU, or, where there is none, run by Triton's interpreter for tests.

Triton decides by TRITON_INTERPRET=1 when a kernel is decorated, so the variable has to be set before this package is
imported, and holds for the process.
"""

from __future__ import annotations

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"  # where tensors lie that these kernels work on
