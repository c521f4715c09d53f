"""For all GPU tests: streams of eight ranks in one process must not stand behind each other in a hardware queue.

Set before any test creates the CUDA context; see `ftcomm.device.probe.connections`.
"""

from __future__ import annotations

import os

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
