"""For all GPU tests: what `ftcomm.engines.gpu.probe` asks of CUDA, before any test creates the context."""

from __future__ import annotations

import os

from ftcomm.engines.gpu.probe import ENVIRONMENT

for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)
