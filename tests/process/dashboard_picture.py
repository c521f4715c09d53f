"""Makes the picture of the live view that the documents show: a real job with two kills and a rank that is stopped.

python -m tests.process.dashboard_picture docs/dashboard.png       # a minute; Chromium, and Pillow from the extra dev
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from pathlib import Path

from PIL import Image
from selenium.webdriver.support.ui import WebDriverWait

from tests.process.browser import browser
from tests.process.test_dashboard import PAGE_TIMEOUT, RunningJob

STOPPED = 2, 1  # the rank
FLOOR, HEARTBEAT, TIMEOUT = 8.0, 3.0, 64.0  # s
SIZE = 1440, 1390  # pixels of the window
EVEN = 8.0  # s of training between what happens, for the curves


def take(target: Path) -> None:
    """Takes the picture. Blocks for a minute."""
    with tempfile.TemporaryDirectory(prefix="ftcomm-picture-") as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        options = {"replicas": 5, "ranks_per_replica": 2, "backoff": 3.0}
        times = {"op_timeout": TIMEOUT, "op_timeout_floor": FLOOR, "heartbeat_timeout": HEARTBEAT}
        with (
            RunningJob(Path(folder), "train.py", **options, **times).running() as job,
            browser(Path(folder, "profile"), "--hide-scrollbars") as page,
        ):
            page.set_window_size(*SIZE)
            page.get(job.url)
            for replica, number in ((3, signal.SIGKILL), (1, signal.SIGSEGV)):
                time.sleep(EVEN)
                job.kill(replica, number)
            time.sleep(EVEN)
            pid = job.launcher.pids()[STOPPED]
            os.kill(pid, signal.SIGSTOP)
            try:
                wait = WebDriverWait(page, PAGE_TIMEOUT)
                wait.until(lambda page: page.execute_script("return !$('why').hidden"))
                wait.until(lambda page: page.execute_script("return !$('traffic').hidden"))
                page.save_screenshot(str(target))
            finally:
                os.kill(pid, signal.SIGCONT)
    Image.open(target).convert("RGB").save(target, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    take(parser.parse_args().target)


if __name__ == "__main__":
    main()
