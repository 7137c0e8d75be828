"""Chromium of the system, without a window."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium.common.exceptions import WebDriverException
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By

_PROGRAMS = ("chromium", "chromedriver")
NEEDS_CHROMIUM = pytest.mark.skipif(
    not os.environ.get("CI") and not all(map(shutil.which, _PROGRAMS)),
    reason="needs chromium and chromedriver",
)
SOON = 30.0


@contextmanager
def chromium(folder: Path) -> Iterator[Chrome]:
    """A browser whose profile is in a folder."""
    paths = [shutil.which(program) for program in _PROGRAMS]
    if not all(paths):
        # Selenium would download a browser.
        pytest.fail("needs chromium and chromedriver: apt-get install chromium chromium-driver", pytrace=False)
    program, driver_program = paths
    options = ChromeOptions()
    options.binary_location = program or ""
    for argument in ("--headless=new", "--no-sandbox", "--ignore-certificate-errors", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_argument(f"--user-data-dir={folder / 'profile'}")
    options.add_argument("--window-size=1280,1400")
    options.add_argument("--hide-scrollbars")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=ChromeService(driver_program))
    try:
        yield driver
    finally:
        driver.quit()


def sign_in(browser: Chrome, token: str) -> None:
    """On the page that asks for a token."""
    browser.find_element(By.ID, "token").send_keys(token)
    click(browser, "form.box button")


def click(browser: Chrome, selector: str) -> None:
    """An element that the page may replace between the search and the click."""
    eventually(lambda: browser.find_element(By.CSS_SELECTOR, selector).click() or True, f"a click on {selector}")


def text_of(browser: Chrome, selector: str) -> str:
    """Read in one step, since a page may replace its parts between two; empty where there is no such element."""
    script = "const found = document.querySelector(arguments[0]); return found ? found.innerText.trim() : ''"
    return str(browser.execute_script(script, selector))


def charts(browser: Chrome) -> set[str]:
    """Names of the charts that have lines or bars."""
    drawn = "p.querySelector('.lines path, .bars path')"
    script = f"return [...document.querySelectorAll('.plot')].filter(p => {drawn}).map(p => p.id)"
    return {name.removeprefix("chart-") for name in browser.execute_script(script)}


def set_size(browser: Chrome, width: int, height: int) -> None:
    """Of the page, which a narrow one shows as a telephone does."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 640}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def set_scheme(browser: Chrome, scheme: str) -> None:
    """Light or dark."""
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)


def eventually(holds: Callable[[], Any], what: str) -> Any:
    """What holds within time. Errors of the browser are of a page that is on its way: the last one is the cause."""
    end = time.monotonic() + SOON
    last: WebDriverException | None = None
    while time.monotonic() < end:
        try:
            if found := holds():
                return found
            last = None
        except WebDriverException as error:
            last = error
        time.sleep(0.1)
    raise AssertionError(f"not within {SOON:.0f} s: {what}") from last
