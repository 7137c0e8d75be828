"""Each page of the dashboard by axe-core in Chromium: WCAG 2.2, levels A and AA, light and dark, wide and narrow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from support.chromium import NEEDS_CHROMIUM, charts, chromium, click, eventually, set_scheme, set_size, sign_in, text_of

from control_plane.dashboard import _dashboard
from control_plane.server import ServeConfig
from tests.control_plane.conftest import staged
from tests.control_plane.scenario import bring_up, run, train
from tests.control_plane.test_dashboard_pictures import work

pytestmark = [pytest.mark.processes, NEEDS_CHROMIUM]

AXE = """
const done = arguments[arguments.length - 1];
const tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"];
axe.run(document, {runOnly: {type: "tag", values: tags}}).then(found => done({
  broken: found.violations.map(one => `${one.id}: ${one.help}: ` + one.nodes.map(node => node.html).join(" | ")),
  rules: found.passes.length,
}), error => done({broken: [String(error)], rules: 0}));
"""
FEWEST_RULES = 5
"""A page to which fewer rules apply was not there."""


def script() -> str:
    """axe-core of the installed package, which is not imported: it would start a browser of its own."""
    found = find_spec("axe_playwright_python")
    assert found is not None
    assert found.origin is not None
    return (Path(found.origin).parent / "axe.min.js").read_text(encoding="utf-8")


def broken_rules(browser: Chrome) -> list[str]:
    browser.execute_script(script())
    told: dict[str, Any] = browser.execute_async_script(AXE)
    assert told["broken"] or told["rules"] >= FEWEST_RULES, told
    return list(told["broken"])


def in_every_form(browser: Chrome, name: str, shown: Callable[[], object]) -> list[str]:
    """What is wrong with the page that is open, by its name."""
    found = []
    for scheme in ("light", "dark"):
        for width in (1280, 390):
            set_scheme(browser, scheme)
            set_size(browser, width, 1400)
            eventually(shown, f"{name}, {scheme}")
            found += [f"{name}, {scheme}, {width}: {one}" for one in broken_rules(browser)]
    return found


def walk(url: str, token: str, jobs: list[str], folder: Path, *, drawn: bool) -> list[str]:
    with chromium(folder) as browser:
        browser.get(f"{url}/")
        found = in_every_form(browser, "sign-in", lambda: browser.find_elements(By.ID, "token"))
        sign_in(browser, token)
        eventually(lambda: text_of(browser, "h1") == "Jobs", "the first page")
        for name, path, chart in (
            ("jobs", "/", "federation"),
            ("job", f"/jobs/{jobs[0]}", "loss"),
            ("logs", f"/jobs/{jobs[0]}/logs", ""),
            ("compare", f"/compare?job={jobs[0]}&job={jobs[1]}", ""),
            ("delete", f"/jobs/{jobs[2]}/delete", ""),
            ("no job", "/jobs/none", ""),
            ("templates", "/submit", ""),
            ("submit", "/submit?template=image-classification", ""),
        ):
            browser.get(url + path)
            assert name != "delete" or text_of(browser, "h1").startswith("Delete "), "not the page of an error"
            found += in_every_form(browser, name, lambda chart=chart: not (drawn and chart) or chart in charts(browser))
        click(browser, "form[action^='/submit/plan'] button")
        eventually(lambda: "/submit/plan" in browser.current_url, "the plan")
        return found + in_every_form(browser, "plan", lambda: True)


@pytest.mark.parametrize("drawn", [True, False], ids=["charts by a script", "charts without one"])
def test_every_page_keeps_the_rules_of_wcag_aa(
    serve_config: ServeConfig, job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn: bool
) -> None:
    if not drawn:
        monkeypatch.setattr(_dashboard, "_plotly", lambda: None)

    async def scenario() -> None:
        async with staged(replace(serve_config, lease=timedelta(days=1))) as stage:
            a, b = await bring_up(stage)
            job = (await stage.submit(job_file)).job.id
            other = (await stage.submit(job_file, "r2", ("metadata.name=other",))).job.id
            await train(job, a, b)
            await work(SimpleNamespace(at=0.0), job, a, b)  # type: ignore[arg-type]
            ended = (await stage.submit(job_file, "r3", ("metadata.name=ended",))).job.id
            await stage.client.cancel(ended)
            for agent in (a, b):
                agent.report(ended, "stopped")
                await agent.settled()
            assert (await stage.client.job(ended)).state == "cancelled"
            token = stage.context.token_file.read_text().strip()
            url = f"https://127.0.0.1:{stage.ports.metrics}"
            found = await asyncio.to_thread(walk, url, token, [job, other, ended], tmp_path, drawn=drawn)
            assert not found, "\n".join(found)
            for agent in (a, b):
                await agent.close()

    run(scenario())


def test_a_page_that_breaks_rules_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    faint = '<p style="color: #999; background: #fff">hardly to be read</p>'
    page.write_text(f"<!doctype html><html lang=en><title>t</title><main>{faint}<input></main></html>")
    with chromium(tmp_path) as browser:
        browser.get(page.as_uri())
        assert {one.partition(":")[0] for one in broken_rules(browser)} == {"color-contrast", "label"}
