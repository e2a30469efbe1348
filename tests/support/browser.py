"""A headless Chromium of Debian, driven by its own driver."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

from tests.support.brokers import missing
from tests.support.ports import free_port


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Chrome]:
    """A browser with its profile in `folder`; it ends with the block, its processes too."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        missing("Chromium", "apt-get install chromium chromium-driver")
    options = ChromeOptions()
    options.binary_location = str(chromium)
    for argument in (
        "--headless=new",
        "--no-sandbox",  # the sandbox needs another user than root
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-proxy-server",
        "--window-size=1900,1000",
        f"--user-data-dir={folder / 'chromium'}",
    ):
        options.add_argument(argument)
    service = Service(str(driver), port=free_port(), log_output=str(folder / "chromedriver.log"))
    chrome = Chrome(options=options, service=service)
    try:
        chrome.set_page_load_timeout(60)
        yield chrome
    finally:
        chrome.quit()
