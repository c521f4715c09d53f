"""One rank of `ftcomm bench first-use`, in an interpreter of its own: prints as JSON what each part of its beginning
took. It imports nothing of ftcomm before it is asked to, and so no part of the bench."""

import json
import sys
import time

PARTS: "dict[str, tuple[float, float]]" = {}  # name -> seconds of the processor, and of the clock


class TimedPart:
    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        self.began = time.process_time(), time.perf_counter()

    def __exit__(self, *_: object) -> None:
        cpu, clock = self.began
        PARTS[self.name] = (time.process_time() - cpu, time.perf_counter() - clock)


with TimedPart("numpy"):
    import numpy as np
before = len(sys.modules)
with TimedPart("import"):
    import ftcomm
with TimedPart("init"):
    ftcomm.init()
x = np.ones(1024, np.float32)
with TimedPart("allreduce"):
    ftcomm.allreduce(x)
print("first-use", json.dumps({"parts": PARTS, "modules": len(sys.modules) - before}), flush=True)
