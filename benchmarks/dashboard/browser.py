"""The Chromium that is installed, driven by Playwright, which downloads none here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

from edge_sdk.errors import ConfigurationError


@contextmanager
def chromium() -> Iterator[Browser]:
    """A running browser without a window.

    Raises: ConfigurationError if none is installed.
    """
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        raise ConfigurationError("Chromium: not found; install it (apt install chromium)")
    # as root, which continuous integration is, it has no sandbox
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=options)
        try:
            yield browser
        finally:
            browser.close()
