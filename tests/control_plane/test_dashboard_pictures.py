"""Pictures of the dashboard's pages in Chromium, with the same figures and times at each run."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from selenium.webdriver import Chrome
from support.chromium import NEEDS_CHROMIUM, charts, chromium, eventually, set_scheme, set_size, sign_in, text_of
from support.golden import like, require_like

from control_plane import server
from control_plane.dashboard import _pages
from control_plane.server import ServeConfig
from control_plane.service import Federation
from control_plane.service.jobs import _submission
from geofed_pb.v1 import agent_pb2, common_pb2
from tests.control_plane.conftest import Stage, staged
from tests.control_plane.fake_agent import FakeAgent
from tests.control_plane.scenario import bring_up, figures, run, train

pytestmark = [pytest.mark.processes, NEEDS_CHROMIUM]

GOLDEN = Path(__file__).parent / "golden"
START = 1_767_225_600.0
"""2026-01-01."""
MOST_BYTES = 60_000
FONT = """
const style = document.createElement("style");
style.textContent = '* { font-family: "DejaVu Sans" !important; }';
const add = () => document.documentElement ? document.documentElement.append(style) : setTimeout(add, 0);
add();
"""
"""Debian's Chromium takes what `system-ui` is from the machine's fonts."""

PARTS = """
return [...document.querySelectorAll("header, [data-part], .plot, .scroll")].map(e => {
  const r = e.getBoundingClientRect();
  return [e.id || e.dataset.part || e.ariaLabel || e.tagName, r.left, r.top, r.right, r.bottom];
}).filter(([, left, top, right, bottom]) => right > left && bottom > top && top < innerHeight);
"""
"""Parts of the page that can be seen, with their boxes in pixels."""


class Clock:
    """The real one until it is set: certificates are checked by the machine's time."""

    def __init__(self, real: Any) -> None:
        self._real, self.at = real, 0.0

    def __call__(self) -> float:
        return self.at or float(self._real())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(server.time.time)

    def federation(store: Any, blobs: Any, _: Any, *more: Any) -> Federation:
        return Federation(store, blobs, clock, *more)

    numbers = itertools.count(1)
    monkeypatch.setattr(server, "Federation", federation)
    monkeypatch.setattr(_pages, "time", SimpleNamespace(time=clock))
    monkeypatch.setattr(_submission.secrets, "token_hex", lambda size: f"{next(numbers):0{2 * size}x}")
    return clock


async def work(clock: Clock, job: str, a: FakeAgent, b: FakeAgent) -> None:
    """Twelve rounds, in which a region waits for the slower one."""
    for number in range(1, 13):
        clock.at += 30.0
        for agent, other, parts in ((a, b, (9.0, 1.5, 4.0, 13.0)), (b, a, (21.0, 2.5, 4.0, 0.5))):
            told = figures(agent.region, other.region, number)
            told["evaluation"]["metrics"] = {"accuracy": 1.0 - 0.9 / (number + len(other.region) + parts[0] / 9)}
            told["loss"] = told["round_loss"] = parts[0] / 9 / number
            names = ("compute", "merge", "exchange", "wait")
            spent = common_pb2.RoundTime(**{name: number * one for name, one in zip(names, parts, strict=True)})
            link = agent_pb2.LinkReport(rtt_ms=120.0, mbps=85.0, streams=4, down=False)
            agent.report(job, "training", **told, time=spent, links={other.region: link})
            await agent.settled()


def take_and_compare(browser: Chrome, url: str, token: str, job: str, kept: Path) -> None:
    browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": FONT})
    browser.get(f"{url}/")
    sign_in(browser, token)
    eventually(lambda: text_of(browser, "h1") == "Jobs", "the first page")
    seen: dict[str, Image.Image] = {}
    for name, path, scheme, width, height in (
        ("jobs-light", "/", "light", 1280, 900),
        ("job-light", f"/jobs/{job}", "light", 1280, 2000),
        ("job-dark", f"/jobs/{job}", "dark", 1280, 2000),
        ("job-narrow", f"/jobs/{job}", "light", 390, 2600),
    ):
        set_scheme(browser, scheme)
        set_size(browser, width, height)
        browser.get(url + path)
        if path == "/":
            eventually(lambda: "federation" in charts(browser), "the picture of the federation")
        else:
            eventually(lambda: {"loss", "accuracy", "usd", " time", " links"} <= charts(browser), "all charts")
        browser.execute_script("return document.fonts.ready")
        seen[name] = require_like(browser.get_screenshot_as_png(), GOLDEN / f"{name}.png", kept)
        require_that_parts_count(seen[name], browser.execute_script(PARTS), GOLDEN / f"{name}.png")
    assert not like(seen["job-dark"], seen["job-light"])


def require_that_parts_count(picture: Image.Image, parts: list[list[Any]], golden: Path) -> None:
    """Assert that the tolerance is not so large that a page with something missing passes."""
    assert len(parts) > 3
    with Image.open(golden) as stored:
        for part, *sides in (["the page", 0, 0, *picture.size], *parts):
            left, top, right, bottom = (round(side) for side in sides)
            without = picture.copy()
            if part == "actions":
                # It is one line between others; without it, what is below moves up.
                without.paste(picture.crop((0, bottom, *picture.size)), (0, top))
            else:
                without.paste(picture.getpixel((picture.width - 3, picture.height - 3)), (left, top, right, bottom))
            assert not like(without, stored), f"{golden.name} passes without {part}"


def pictures(url: str, token: str, job: str, folder: Path) -> None:
    with chromium(folder) as browser:
        take_and_compare(browser, url, token, job, folder)


def test_pages_look_as_they_did(serve_config: ServeConfig, job_file: Path, clock: Clock, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        a, b = await bring_up(stage)
        clock.at = START
        job = (await stage.submit(job_file)).job.id
        await train(job, a, b)
        await work(clock, job, a, b)
        token = stage.context.token_file.read_text().strip()
        url = f"https://127.0.0.1:{stage.ports.metrics}"
        await asyncio.to_thread(pictures, url, token, job, tmp_path)
        for agent in (a, b):
            await agent.close()

    async def scenario() -> None:
        # Long, since the clock is set back once the agents are there.
        async with staged(replace(serve_config, lease=timedelta(days=1))) as stage:
            await scene(stage)

    run(scenario())


def test_pictures_are_small() -> None:
    assert {file.name for file in GOLDEN.iterdir() if file.stat().st_size > MOST_BYTES} == set()


@pytest.mark.parametrize("golden", sorted(GOLDEN.iterdir()), ids=lambda path: path.stem)
def test_a_few_pixels_are_tolerated_and_an_empty_page_is_not(golden: Path) -> None:
    with Image.open(golden) as stored:
        whole = stored.convert("RGB").resize((2 * stored.width, 2 * stored.height))
        ground = whole.getpixel((whole.width - 3, whole.height - 3))
        assert like(whole, stored)
        # As by another version of the browser.
        moved = Image.new("RGB", whole.size, ground)
        moved.paste(whole, (3, 3))
        assert like(moved, stored)
        assert not like(Image.new("RGB", whole.size, ground), stored)


def test_no_browser_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: None)
    with pytest.raises(pytest.fail.Exception, match="apt-get install chromium"), chromium(tmp_path):
        pass
