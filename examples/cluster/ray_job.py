"""A replica as a Ray task each, and their coordinator on the node of this driver.

    python ray_job.py --replicas 4 train.py

Ray starts a task again when its process or its node dies, and so the replica, under its own number.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys

import ray


@ray.remote(max_retries=-1, retry_exceptions=True)
def replica(number: int, environment: dict[str, str], script: list[str]) -> None:
    environment = {**os.environ, **environment, "FTCOMM_REPLICA": str(number)}
    subprocess.run([sys.executable, *script], env=environment, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--gpus", type=float, default=1, help="of each replica; 0 on nodes without")
    parser.add_argument("--port", type=int, default=29400)
    parser.add_argument("script", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    ray.init()
    here = ray.util.get_node_ip_address()
    environment = {
        "FTCOMM_COORDINATOR": f"{here}:{arguments.port}",
        "FTCOMM_REPLICAS": str(arguments.replicas),
        "FTCOMM_TOKEN": secrets.token_hex(16),
        "FTCOMM_JOB": secrets.token_hex(8),
    }
    command = ["ftcomm", "coordinator", "--host", here, "--port", str(arguments.port)]
    command += ["--replicas", str(arguments.replicas)]
    with subprocess.Popen(command, env={**os.environ, **environment}) as coordinator:
        try:
            task = replica.options(num_gpus=arguments.gpus)
            ray.get([task.remote(number, environment, arguments.script) for number in range(arguments.replicas)])
        finally:
            coordinator.terminate()


if __name__ == "__main__":
    main()
