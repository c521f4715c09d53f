"""Headless Chromium, as Debian's packages chromium and chromium-driver have it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

# It asks nobody but the page, and needs no GPU. Root may start it without a sandbox only.
ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1440,1040"),
)


def chromium() -> tuple[str, str]:
    """The paths of the browser and its driver; skips a test that has none."""
    found = shutil.which("chromium"), shutil.which("chromedriver")
    if None in found:
        pytest.skip("no browser to look with; Debian, Ubuntu: apt install chromium chromium-driver")
    return found  # type: ignore[return-value]


@contextlib.contextmanager
def browser(profile: Path, *arguments: str) -> Iterator[webdriver.Chrome]:
    """A browser with an empty profile."""
    binary, driver = chromium()
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in (*ARGUMENTS, f"--user-data-dir={profile}", *arguments):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options=options, service=Service(driver))
    try:
        opened.set_page_load_timeout(100)
        opened.set_script_timeout(100)
        yield opened
    finally:
        opened.quit()
