"""Pages can be read and used by everybody: labels, order, headings and colours, as WCAG 2.2 asks at level AA."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest

from control_plane import dashboard
from control_plane.server import ServeConfig
from tests.control_plane.conftest import Stage
from tests.control_plane.fake_agent import FakeAgent
from tests.control_plane.scenario import figures, finish, train
from tests.control_plane.test_dashboard import browser, told

STATIC = Path(dashboard.__file__).parent / "static"
STYLE, SCRIPT = (STATIC / "style.css").read_text(), (STATIC / "dashboard.js").read_text()
FIELDS = ("input", "select", "textarea")
EMPTY = ("input", "meta", "link", "br")


def luminance(colour: str) -> float:
    if len(colour) == 4:
        colour = "#" + "".join(2 * digit for digit in colour[1:])
    values = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    return sum(v * weight for v, weight in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def schemes() -> list[dict[str, str]]:
    """The style sheet's colours, light and dark."""
    found = [dict(re.findall(r"--(\w+): (#\w+);", block)) for block in re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)]
    assert [len(one) for one in found] == [9, 9]
    return found


@pytest.mark.parametrize("scheme", schemes(), ids=["light", "dark"])
def test_colours_stand_out(scheme: dict[str, str]) -> None:
    for text, ground in itertools.product(("text", "faint", "good", "bad", "busy", "wait"), ("ground", "head")):
        assert contrast(scheme[text], scheme[ground]) >= 4.5, (text, ground)
    drawn = re.findall(r'"(#[0-9a-f]{6})"', SCRIPT)
    assert len(drawn) > 10
    for colour in drawn:
        assert contrast(colour, scheme["ground"]) >= 3.0, f"{colour}, of lines and bars"


@dataclass
class Page(HTMLParser):
    """What a page has of labels, headings, tables and scripts."""

    html: str
    labelled: set[str] = field(default_factory=set)
    """Values of ``for`` of labels."""
    fields: list[tuple[str, bool]] = field(default_factory=list)
    """The id of each visible field, and whether it is within a label or has one by an attribute."""
    headings: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[str] = []
        self.feed(self.html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag not in EMPTY:
            self._open.append(tag)
        if tag == "label" and given.get("for"):
            self.labelled.add(given["for"] or "")
        if tag in FIELDS and given.get("type") != "hidden" and "hidden" not in given:
            self.fields.append((given.get("id") or "", "label" in self._open or "aria-label" in given))
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag == "script" and not (given.get("src") or "").startswith("/static/"):
            self.faults.append("a script that is not the dashboard's")
        if int(given.get("tabindex") or 0) > 0:
            self.faults.append("an order of its own for the tab key")
        if given.get("tabindex") == "0" and not (given.get("role") and given.get("aria-label")):
            self.faults.append(f"what the tab key reaches without a name: {given}")
        self.faults += [f"{name} of {tag}" for name in given if name.startswith("on")]
        for name in ("src", "href", "action"):
            value = given.get(name) or ""
            if value and not value.startswith(("/", "#", "data:,")):
                self.faults.append(f"{value} is elsewhere")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


@pytest.mark.slow
def test_fields_have_labels_and_nothing_comes_from_elsewhere(serve_config: ServeConfig, job_file: Path) -> None:
    async def scene(stage: Stage, a: FakeAgent, b: FakeAgent) -> None:
        job = (await stage.submit(job_file)).job.id
        await train(job, a, b)
        a.report(job, "training", **figures("a", "b", 1))
        await a.settled()
        async with browser(stage, "") as pages:
            asks = [(await pages.get("/")).text]
        async with browser(stage) as pages:
            paths = (
                "/",
                f"/jobs/{job}",
                f"/jobs/{job}/logs",
                f"/compare?job={job}",
                "/submit",
                "/submit?template=text",
            )
            running = [(await pages.get(path)).text for path in paths]
            await finish(job, a, b)
            ended = [(await pages.get(path)).text for path in paths[:2]]
        fields = 0
        for html in (*asks, *running, *ended):
            page = Page(html)
            assert page.faults == []
            assert [name for name, has in page.fields if not has and name not in page.labelled] == []
            fields += len(page.fields)
            assert page.headings[0] == 1
            assert all(below - above <= 1 for above, below in itertools.pairwise(page.headings)), "no level is skipped"
            assert '<html lang="en">' in html
            assert html.index('class="skip"') < html.index("<header>"), "the first that the tab key reaches"
        assert fields >= 15

    told(serve_config, scene)
