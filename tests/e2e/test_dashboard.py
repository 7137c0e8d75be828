"""A walk through the dashboard in Chromium, beside real daemons."""

from __future__ import annotations

import itertools
import json
import re
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from selenium.webdriver import Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select
from support.chromium import (
    NEEDS_CHROMIUM,
    charts,
    chromium,
    click,
    eventually,
    set_scheme,
    set_size,
    sign_in,
    text_of,
)
from support.running import UNHURRIED, Running, named

pytestmark = [pytest.mark.processes, NEEDS_CHROMIUM, pytest.mark.timeout(300)]

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


FOCUSED = """
const e = document.activeElement;
return e === document.body ? "" : e.id || e.name || e.textContent.trim().slice(0, 30);
"""


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chrome]:
    with chromium(tmp_path) as driver:
        yield driver


def title_of(browser: Chrome, chart: str) -> str:
    return str(browser.execute_script(f"return document.querySelector('#chart-{chart} .gtitle').textContent"))


def tabbed(browser: Chrome, presses: int) -> list[str]:
    """What has the focus after each press of the tab key."""
    found = []
    for _ in range(presses):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        found.append(browser.execute_script(FOCUSED))
    return found


def test_a_walk_through_the_dashboard(running: Running, browser: Chrome) -> None:
    context = json.loads(running.federation.context_file.read_text())
    token = Path(context["token_file"]).read_text().strip()
    url = running.federation.dashboard
    first = running.submit("train.end.epochs=3", "metadata.name=short", "train.evaluateEvery=1")
    running.wait_end(first)
    job = running.submit("train.end.epochs=2000", "metadata.name=long", "train.evaluateEvery=2", task=UNHURRIED)
    running.wait_round(job, 2)

    # Whoever has not signed in does so, and is led to where they wanted to go.
    browser.get(f"{url}/jobs/{job}")
    sign_in(browser, "guessed")
    assert "unknown" in eventually(lambda: text_of(browser, "[role=alert]"), "a refusal")
    browser.get(f"{url}/jobs/{job}")
    sign_in(browser, token)
    eventually(lambda: text_of(browser, "h1").startswith("long"), "the job's page")
    refusals = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert all("401" in message for message in refusals), "that the pages to sign in have this status"

    # The page follows the job.
    wanted = {"loss", "test_loss", "accuracy", "seconds", "usd", "wan_bytes", " time", " links"}
    eventually(lambda: wanted <= charts(browser), "all charts")
    before = eventually(lambda: text_of(browser, "[data-part=head] dl"), "figures")
    eventually(lambda: text_of(browser, "[data-part=head] dl") != before, "another round")
    assert "the slowest region" in text_of(browser, "[data-part=time]")
    series = f"return fetch('/jobs/{job}/series').then(answer => answer.json())"
    lines = {line["region"]: line["rounds"] for line in browser.execute_script(series)["timeline"]}
    assert set(lines) == {part["region"] for part in running.describe(job)["partitions"]}
    for rounds in lines.values():
        assert sum(compute for _, _, _, compute, *_ in rounds) > 0
        for (*_, begin, a, b, c, d, e, f), (_, _, following, *_) in itertools.pairwise(rounds):
            assert begin + a + b + c + d + e + f == pytest.approx(following, abs=0.01), "no time is left out"
    for axis in ("step", "time", "round"):
        Select(browser.find_element(By.ID, "axis")).select_by_visible_text(axis)
        eventually(lambda axis=axis: title_of(browser, "loss") == f"loss by {axis}", axis)  # type: ignore[misc]
        shown = browser.execute_script("return document.querySelector('#chart-loss .xtick').textContent")
        assert (":" in shown) == (axis == "time"), "a time of day"
    loaded = browser.execute_script(
        "return performance.getEntriesByType('resource').map(e => [e.name, e.decodedBodySize])"
    )
    assert all(name.startswith(url) for name, _ in loaded), "nothing comes from elsewhere"
    assert max((size for name, size in loaded if "/static/" not in name), default=0) < 200_000

    # Dark and light, wide and narrow, all can be read.
    for scheme in ("light", "dark"):
        set_scheme(browser, scheme)
        for page in (f"/jobs/{job}", "/", f"/jobs/{first}", f"/jobs/{first}/logs?q=a", "/submit?template=text"):
            browser.get(url + page)
            assert browser.execute_script(CONTRASTS) == []
    set_size(browser, 360, 800)
    for page in (f"/jobs/{first}", "/", "/submit?template=text"):
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

    # A job is planned, corrected and submitted from a template, without a mouse.
    browser.get(f"{url}/submit?template=image-classification")
    order = [
        "Skip to the content",
        "geofed",
        "Sign out",
        "template",
        "Use this template",
        "name",
        "dataset",
        "minimise",
    ]
    assert tabbed(browser, 10) == [*order, "text", "Check it and show the plan"]
    browser.find_element(By.ID, "name").send_keys("Wrong Name", Keys.ENTER)
    assert "metadata.name" in eventually(lambda: text_of(browser, "[role=alert]"), "what is wrong")
    assert browser.find_element(By.ID, "text").get_attribute("aria-describedby") == "error"
    browser.find_element(By.ID, "name").clear()
    Select(browser.find_element(By.ID, "minimise")).select_by_value("time")
    browser.find_element(By.ID, "name").send_keys("from-template", Keys.ENTER)
    assert "between regions" in eventually(lambda: text_of(browser, "#plan"), "the plan")
    browser.find_element(By.CSS_SELECTOR, "#plan form button").send_keys(Keys.ENTER)
    eventually(lambda: text_of(browser, "h1").startswith("from-template"), "the job's page")
    submitted = browser.current_url.rpartition("/")[2]
    assert running.describe(submitted)["spec"]["objective"]["minimise"] == "time"
    running.federation.control_plane("cancel", submitted, "--yes")

    # The job is ended here.
    browser.get(f"{url}/jobs/{job}")
    click(browser, "summary")
    click(browser, "form[action$=finish] button")
    assert running.wait_end(job)["state"] == "succeeded"
    eventually(lambda: "succeeded" in text_of(browser, "h1"), "the end")
    eventually(lambda: "measured" in text_of(browser, "[data-part=regions]"), "the costs")
    severe = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert all("/submit/plan" in message and "400" in message for message in severe), "but the wrong name"


def test_the_page_says_which_region_the_others_wait_for(running: Running, tmp_path: Path) -> None:
    slow = """
import time

_slow, _dataset, _loss = False, dataset, loss


def dataset(uri, split, config):
    global _slow
    _slow = "shanghai" in uri
    return _dataset(uri, split, config)


def loss(model, batch):
    time.sleep(0.1 if _slow else 0.0)
    return _loss(model, batch)
"""
    task = named("one region is slow") + slow
    settings = (
        "train.end.epochs=2000", "train.workers=1", "train.evaluateEvery=0",
        "advanced.wan.policy=ma", "advanced.wan.exchange=synchronous", "advanced.wan.interval=10",
    )  # fmt: skip
    job = running.submit(*settings, task=task)
    running.wait_round(job, 8)
    context = json.loads(running.federation.context_file.read_text())
    token = Path(context["token_file"]).read_text().strip()
    trusted = ssl.create_default_context(cafile=context["ca_file"])
    with httpx2.Client(verify=trusted, auth=("any", token), base_url=running.federation.dashboard) as pages:
        page = pages.get(f"/jobs/{job}").text
        timeline = pages.get(f"/jobs/{job}/series").json()["timeline"]
    running.federation.control_plane("cancel", job, "--yes")
    assert re.search(r"shanghai is the slowest region: mostly computing .* Waiting for others: frankfurt", page)
    parts = {}
    for line in timeline:
        # The first rounds are those in which the workers start.
        sums = [sum(one) for one in zip(*(seconds for _, _, _, *seconds in line["rounds"][3:]), strict=True)]
        parts[line["region"]] = dict(
            zip(("compute", "merge", "exchange", "wait", "evaluate", "other"), sums, strict=True)
        )
    whole = sum(parts["shanghai"].values())
    assert parts["shanghai"]["compute"] > 0.5 * whole
    assert parts["shanghai"]["wait"] < 0.2 * whole
    for region in ("frankfurt", "virginia"):
        assert parts[region]["wait"] > 0.4 * whole
        assert parts[region]["compute"] < 0.3 * whole
