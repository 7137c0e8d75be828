"""A walk through the dashboard in Chromium, beside real daemons."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from support.running import Running

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        not os.environ.get("CI") and not (shutil.which("chromium") and shutil.which("chromedriver")),
        reason="needs chromium and chromedriver",
    ),
]

SOON = 30.0
CONTRASTS = """
const rgb = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
const light = (c) => c.slice(0, 3).map((v) => v / 255)
  .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
  .reduce((sum, v, n) => sum + v * [0.2126, 0.7152, 0.0722][n], 0);
const ground = (e) => {
  for (; e; e = e.parentElement) {
    const c = rgb(getComputedStyle(e).backgroundColor);
    if (c.length === 3 || c[3] > 0) return c;
  }
  return [255, 255, 255];
};
return [...document.querySelectorAll("main *, header *")]
  .filter((e) => e.offsetParent && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
  .map((e) => {
    const [a, b] = [light(rgb(getComputedStyle(e).color)), light(ground(e))].sort((x, y) => y - x);
    return [e.tagName + " " + e.textContent.trim().slice(0, 30), (a + 0.05) / (b + 0.05)];
  })
  .filter(([, ratio]) => ratio < 4.5);
"""
"""Texts that do not stand out from what is behind them as WCAG 2.2 asks at level AA (success criterion 1.4.3)."""


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--ignore-certificate-errors", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_argument(f"--user-data-dir={tmp_path / 'profile'}")
    options.add_argument("--window-size=1280,1400")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=ChromeService(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def eventually(holds: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + SOON
    while time.monotonic() < end:
        try:
            if found := holds():
                return found
        except StaleElementReferenceException:
            pass
        time.sleep(0.1)
    raise AssertionError(f"not within {SOON:.0f} s: {what}")


def text_of(browser: Chrome, selector: str) -> str:
    return browser.find_element(By.CSS_SELECTOR, selector).text


def charts(browser: Chrome) -> set[str]:
    """Names of the charts that have lines."""
    script = "return [...document.querySelectorAll('.plot')].filter(p => p.querySelector('.lines path')).map(p => p.id)"
    return {name.removeprefix("chart-") for name in browser.execute_script(script)}


def test_a_walk_through_the_dashboard(running: Running, browser: Chrome) -> None:
    context = json.loads(running.federation.context_file.read_text())
    token = Path(context["token_file"]).read_text().strip()
    url = running.federation.dashboard
    first = running.submit("train.end.epochs=3", "metadata.name=short", "train.evaluateEvery=1")
    running.wait_end(first)
    job = running.submit("train.end.epochs=2000", "metadata.name=long", "train.evaluateEvery=2")
    running.wait_round(job, 2)

    # Whoever has not signed in does so, and is led to where they wanted to go.
    browser.get(f"{url}/jobs/{job}")
    browser.find_element(By.ID, "token").send_keys("guessed")
    browser.find_element(By.CSS_SELECTOR, "form.box button").click()
    assert "unknown" in eventually(lambda: text_of(browser, "[role=alert]"), "a refusal")
    browser.get(f"{url}/jobs/{job}")
    browser.find_element(By.ID, "token").send_keys(token)
    browser.find_element(By.CSS_SELECTOR, "form.box button").click()
    eventually(lambda: text_of(browser, "h1").startswith("long"), "the job's page")
    refusals = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert all("401" in message for message in refusals), "that the pages to sign in have this status"

    # The page follows the job.
    wanted = {"loss", "test_loss", "accuracy", "seconds", "usd", "wan_bytes"}
    eventually(lambda: wanted <= charts(browser), "all charts")
    before = text_of(browser, "[data-part=head] dl")
    eventually(lambda: text_of(browser, "[data-part=head] dl") != before, "another round")
    loaded = browser.execute_script(
        "return performance.getEntriesByType('resource').map(e => [e.name, e.decodedBodySize])"
    )
    assert all(name.startswith(url) for name, _ in loaded), "nothing comes from elsewhere"
    assert max((size for name, size in loaded if "/static/" not in name), default=0) < 200_000

    # Dark and light, wide and narrow, all can be read.
    for scheme in ("light", "dark"):
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        for page in (f"/jobs/{job}", "/", f"/jobs/{first}", f"/jobs/{first}/logs?q=a"):
            browser.get(url + page)
            assert browser.execute_script(CONTRASTS) == []
    narrow = {"width": 360, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", narrow)
    for page in (f"/jobs/{first}", "/"):
        browser.get(url + page)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 360
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    # Two jobs beside each other.
    browser.get(url)
    for box in browser.find_elements(By.CSS_SELECTOR, "input[name=job]")[:2]:
        box.click()
    eventually(lambda: browser.find_elements(By.CSS_SELECTOR, "input[name=job]:checked")[1:], "two ticks")
    browser.find_element(By.XPATH, "//button[contains(., 'Compare')]").click()
    eventually(lambda: {"loss", "accuracy"} <= charts(browser), "charts of both")

    # The job is ended here.
    browser.get(f"{url}/jobs/{job}")
    browser.find_element(By.CSS_SELECTOR, "summary").click()
    browser.find_element(By.CSS_SELECTOR, "form[action$=finish] button").click()
    assert running.wait_end(job)["state"] == "succeeded"
    eventually(lambda: "succeeded" in text_of(browser, "h1"), "the end")
    assert "measured" in text_of(browser, "[data-part=regions]")
    assert [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
