"""The dashboard, over HTTPS, of a real control plane with agents that report."""

from __future__ import annotations

import asyncio
import re
import ssl
import threading
import time
import xml.etree.ElementTree as Xml
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane._view import job_view
from control_plane.dashboard import _dashboard, _pages, _series, _timeline
from control_plane.dashboard._chart import line_chart, thinned, ticks
from control_plane.dashboard._sessions import LIFE_SECONDS, Sessions
from control_plane.server import ServeConfig
from geofed_pb.v1 import agent_pb2, common_pb2
from tests.control_plane.conftest import Stage, staged
from tests.control_plane.fake_agent import FakeAgent
from tests.control_plane.scenario import bring_up, figures, finish, run, train
from tests.control_plane.test_models import keeps
from tests.control_plane.test_replanner import LONG, come, end_early, ended, rounds
from tests.control_plane.test_signed import as_user, submitted

EVIL = "<script>alert(1)</script>"


@asynccontextmanager
async def browser(stage: Stage, token: str | None = None) -> AsyncIterator[httpx2.AsyncClient]:
    """``token`` None: the operator's."""
    password = stage.context.token_file.read_text().strip() if token is None else token
    trusted = ssl.create_default_context(cafile=str(stage.context.ca_file))
    address = f"https://127.0.0.1:{stage.ports.metrics}"
    async with httpx2.AsyncClient(
        base_url=address, verify=trusted, auth=("me", password) if password else None
    ) as client:
        yield client


def told(serve_config: ServeConfig, scene: Callable[[Stage, FakeAgent, FakeAgent], Awaitable[None]]) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            await scene(stage, a, b)
            for agent in (a, b):
                await agent.close()

    run(scenario())


@pytest.mark.slow
def test_the_pages_follow_a_job_to_its_end(serve_config: ServeConfig, job_file: Path) -> None:
    async def scene(stage: Stage, a: FakeAgent, b: FakeAgent) -> None:
        async with browser(stage) as pages:
            empty = (await pages.get("/")).text
            assert "No jobs are active." in empty
            job = (await stage.submit(job_file)).job.id
            await train(job, a, b)
            for round_ in (1, 2):
                fast = {"samples_per_second": 23_612.0}
                a.report(job, "training", **figures("a", "b", round_) | {"speed": fast})
                await a.settled()
            overview = await pages.get("/")
            assert overview.status_code == 200
            assert f'href="/jobs/{job}"' in overview.text
            assert 'data-live="/live"' in overview.text
            page = (await pages.get(f"/jobs/{job}")).text
            assert f'data-live="/live?job={job}"' in page
            assert "partition.round" in page
            assert '<td class="right">23,612</td>' in page
            charts = {one["name"]: one for one in (await pages.get(f"/jobs/{job}/series")).json()["charts"]}
            (line,) = charts["loss"]["lines"]
            assert (line["region"], line["x"]) == ("a", [1, 2])
            assert line["y"] == [0.5, pytest.approx(1 / 3)]
            assert charts["usd"]["lines"][0]["y"] == [0.25, 0.25]
            assert charts["usd"]["range"][0] <= charts["usd"]["range"][1]
            metrics = (stage.config.state_dir / "metrics.token").read_text()
            bearer = {"headers": {"authorization": f"Bearer {metrics}"}, "auth": None}
            shown = (await pages.get("/metrics", **bearer)).text
            assert f'geofed_partition_loss{{job="{job}",region="a"}} 0.333' in shown
            assert f'geofed_partition_usd{{job="{job}",region="a"}} 0.25' in shown
            await finish(job, a, b)
            assert "epsilon spent" not in page, "the job has no differential privacy"
            assert 'geofed_jobs{state="succeeded"} 1.0' in (await pages.get("/metrics", **bearer)).text
            page = (await pages.get(f"/jobs/{job}")).text
            assert "job.succeeded" in page
            assert "$0.50" in page
            assert "data-live" not in page
            assert "<h2>Result</h2>" in page
            assert "No jobs are active." in (await pages.get("/")).text

    told(serve_config, scene)


@pytest.mark.slow
def test_the_page_of_a_private_job_shows_what_each_region_has_spent(serve_config: ServeConfig, job_file: Path) -> None:
    async def scene(stage: Stage, a: FakeAgent, b: FakeAgent) -> None:
        async with browser(stage) as pages:
            job = (await stage.submit(job_file)).job.id
            await train(job, a, b)
            spent = agent_pb2.Privacy(epsilon=1.53125, delta=1e-5, releases=3)
            a.report(job, "training", **figures("a", "b", 1), privacy=spent)
            await a.settled()
            page = (await pages.get(f"/jobs/{job}")).text
            assert '<th class="right">epsilon spent</th>' in page
            assert '<td class="right">1.531</td>' in page
            view = job_view(await stage.client.job(job))
            assert [part["epsilon"] for part in view["partitions"]] == [1.53125, None]

    told(serve_config, scene)


def test_no_job_that_goes_on_is_hidden_unseen(
    serve_config: ServeConfig, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_pages, "_ACTIVE_JOBS", 1)
    monkeypatch.setattr(_pages, "_ENDED_JOBS", 1)

    async def scene(stage: Stage, a: FakeAgent, b: FakeAgent) -> None:
        first = (await stage.submit(job_file, "r0")).job.id
        await train(first, a, b)
        for agent, other in ((a, "b"), (b, "a")):
            agent.report(first, "training", **figures(agent.region, other, 1))
            await agent.settled()
        second = (await stage.submit(job_file, "r1")).job.id
        async with browser(stage) as pages:
            page = (await pages.get("/")).text
            assert second in page
            assert first not in page
            assert "1 older jobs are active" in page
            assert "2 active, $0.5000 so far; 4 workers at work." in page, "also of the one that is not shown"
            await finish(first, a, b)
            page = (await pages.get("/")).text
            assert first in page
            assert second in page
            assert "older jobs are active" not in page

    told(serve_config, scene)


@pytest.mark.slow
def test_jobs_of_one_name_are_told_apart_and_lead_to_each_other(serve_config: ServeConfig, job_file: Path) -> None:
    async def scene(stage: Stage, a: FakeAgent, b: FakeAgent) -> None:
        job = (await stage.submit(job_file, overrides=LONG)).job.id
        await train(job, a, b)
        c = await come(stage, "c")
        await rounds(job, (a, b), 5)
        await stage.client.replan(job)
        await end_early(job, (a, b), 5)
        after = (await ended(stage, job)).successor
        async with browser(stage) as pages:
            overview = (await pages.get("/")).text
            for one in (job, after):
                assert f'<a href="/jobs/{one}">digits</a><div class="id">{one}</div>' in overview
            first, second = [(await pages.get(f"/jobs/{one}")).text for one in (job, after)]
            assert f'<dt>continues as</dt><dd><a href="/jobs/{after}">' in first
            assert "starts from" not in first
            assert f'<dt>starts from</dt><dd>the model of <a href="/jobs/{job}">' in second
            assert "continues as" not in second
        await c.close()

    told(serve_config, scene)


def test_the_federation_is_drawn_with_the_links_of_jobs_that_one_may_read(
    serve_config: ServeConfig, job_file: Path
) -> None:
    async def scene(stage: Stage, a: FakeAgent, b: FakeAgent) -> None:
        user = (await stage.client.add_user("ann")).token
        job = (await stage.submit(job_file)).job.id
        await train(job, a, b)
        for rate in (50.0, 80.0):
            shown = figures("a", "b", 1 + int(rate > 60))
            link = agent_pb2.LinkReport(rtt_ms=120.0, mbps=rate, streams=4, down=False)
            a.report(job, "training", **shown, links={"b": link})
            await a.settled()
        regions = [{"name": "a", "state": "live"}, {"name": "b", "state": "live"}]
        async with browser(stage) as pages:
            overview = (await pages.get("/")).text
            assert 'data-network="/network"' in overview
            found = (await pages.get("/network")).json()
            assert found["regions"] == regions
            (link,) = [one for one in found["links"] if one["source"] == "a"]
            assert (link["destination"], link["rtt_ms"], link["goodput_mbps"]) == ("b", 120.0, 80.0)
        async with browser(stage, user) as pages:
            assert (await pages.get("/network")).json() == {"regions": regions, "links": []}
        async with browser(stage, "") as pages:
            assert (await pages.get("/network")).status_code == 401

    told(serve_config, scene)


def test_only_who_has_a_token_may_look(serve_config: ServeConfig, job_file: Path) -> None:
    async def scene(stage: Stage, a: FakeAgent, b: FakeAgent) -> None:
        job = (await stage.submit(job_file)).job.id
        user = (await stage.client.add_user("ann")).token
        for path in ("/", f"/jobs/{job}", "/jobs/none"):
            for token in ("", "guessed"):
                async with browser(stage, token) as pages:
                    refused = await pages.get(path)
                    assert refused.status_code == 401
                    # A browser without a token gets the page to sign in, not its own box for a password.
                    assert ("www-authenticate" in refused.headers) == bool(token)
                    assert ('action="/signin"' in refused.text) == (not token)
                    assert "digits.yaml" not in refused.text
        async with browser(stage, user) as pages:
            refused = await pages.get(f"/jobs/{job}")
            assert (refused.status_code, "digits.yaml" in refused.text) == (403, False)
            overview = (await pages.get("/")).text
            assert "ann" in overview
            assert job not in overview, "another user's job is occupied capacity only"
            await stage.client.share(job, "ann")
            assert (await pages.get(f"/jobs/{job}")).status_code == 200
            assert job in (await pages.get("/")).text
            gone = await pages.get("/jobs/none")
            assert (gone.status_code, "JOB_NOT_FOUND" in gone.text) == (404, True)
        async with browser(stage, "") as pages:
            for shown in ("Basic !", "Basic", "Bearer x", "Basic /w=="):
                assert (await pages.get("/", headers={"authorization": shown})).status_code == 401
        await stage.client.remove_user("ann")
        async with browser(stage, user) as pages:
            assert (await pages.get("/")).status_code == 401

    told(serve_config, scene)


def test_what_job_code_says_is_text_on_the_page_and_nothing_runs(serve_config: ServeConfig, job_file: Path) -> None:
    async def scene(stage: Stage, a: FakeAgent, b: FakeAgent) -> None:
        job = (await stage.submit(job_file)).job.id
        await train(job, a, b)
        error = common_pb2.Error(code="TASK_FAILED", message=EVIL)
        a.report(job, "failed", error=error, condition=EVIL, loss=float("nan"), evaluation={"metrics": {EVIL: 1.0}})
        await a.settled()
        async with browser(stage) as pages:
            for path in ("/", f"/jobs/{job}"):
                answer = await pages.get(path)
                assert EVIL not in answer.text
                assert answer.headers["content-security-policy"].startswith("default-src 'none'")
            assert "&lt;script&gt;" in answer.text
            for name, kind in (("style.css", "text/css"), ("dashboard.js", "text/javascript")):
                assert (await pages.get(f"/static/{name}")).headers["content-type"].startswith(kind)
            assert (await pages.get("/static/..%2f_pages.py")).status_code == 404
            names = [one["name"] for one in (await pages.get(f"/jobs/{job}/series")).json()["charts"]]
            assert "loss" not in names, "what is not finite is not drawn"

    told(serve_config, scene)


def test_without_plotly_the_loss_is_drawn_without_a_script(
    serve_config: ServeConfig, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_dashboard, "_plotly", lambda: None)

    async def scene(stage: Stage, a: FakeAgent, b: FakeAgent) -> None:
        job = (await stage.submit(job_file)).job.id
        await train(job, a, b)
        for round_ in (1, 2):
            a.report(job, "training", **figures("a", "b", round_))
            await a.settled()
        async with browser(stage) as pages:
            page = (await pages.get(f"/jobs/{job}")).text
        assert "plotly-" not in page
        chart = Xml.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
        (line,) = chart.findall("polyline")
        assert len(line.attrib["points"].split()) == 2

    told(serve_config, scene)


@pytest.mark.slow
def test_a_browser_signs_in_and_out(serve_config: ServeConfig, job_file: Path) -> None:
    async def scene(stage: Stage, a: FakeAgent, b: FakeAgent) -> None:
        job = (await stage.submit(job_file)).job.id
        token = (await stage.client.add_user("ann")).token
        async with browser(stage, "") as pages:
            wrong = await pages.post("/signin", data={"token": "guessed", "next": "/"})
            assert (wrong.status_code, "unknown in this federation" in wrong.text) == (401, True)
            right = await pages.post("/signin", data={"token": token, "next": f"/jobs/{job}"})
            assert (right.status_code, right.headers["location"]) == (303, f"/jobs/{job}")
            cookie = right.headers["set-cookie"]
            assert all(part in cookie for part in ("__Host-", "HttpOnly", "Secure", "SameSite=lax", "Path=/"))
            assert token not in cookie
            assert "ann" in (await pages.get("/")).text
            elsewhere = {"origin": "https://elsewhere.example"}
            assert (await pages.post("/signout", headers=elsewhere)).status_code == 403
            assert (await pages.get("/")).status_code == 200
            kept = {"cookie": cookie.partition(";")[0]}
            assert (await pages.post("/signout")).status_code == 303
            assert (await pages.get("/", headers=kept)).status_code == 401
            for then in ("//elsewhere.example", "https://elsewhere.example", "/\\elsewhere.example"):
                answer = await pages.post("/signin", data={"token": token, "next": then})
                assert answer.headers["location"] == "/"
            await stage.client.remove_user("ann")
            assert (await pages.get("/")).status_code == 401

    told(serve_config, scene)


def test_pages_show_what_a_role_may_see(serve_config: ServeConfig, job_file: Path) -> None:
    async def scene(stage: Stage, a: FakeAgent, b: FakeAgent) -> None:
        job = (await stage.submit(job_file)).job.id
        contents = (f"/jobs/{job}/logs", f"/jobs/{job}/files/task.tar", f"/jobs/{job}/models/0")
        eve = (await stage.client.add_user("eve", role="auditor")).token
        oli = (await stage.client.add_user("oli", role="operator")).token
        async with browser(stage, eve) as pages:
            assert job in (await pages.get("/")).text
            assert (await pages.get(f"/jobs/{job}")).status_code == 200
            assert [(await pages.get(path)).status_code for path in contents] == [403] * 3
            own = {"origin": f"https://127.0.0.1:{stage.ports.metrics}"}
            assert (await pages.post(f"/jobs/{job}/cancel", headers=own)).status_code == 403
            await stage.client.share(job, "eve")
            assert [(await pages.get(path)).status_code for path in contents[:2]] == [200] * 2
            assert (await pages.post(f"/jobs/{job}/cancel", headers=own)).status_code == 403
        async with browser(stage, oli) as pages:
            assert [(await pages.get(path)).status_code for path in contents[:2]] == [200] * 2
            assert (await pages.post(f"/jobs/{job}/cancel", headers=own)).status_code == 303
            await stage.client.change_user("oli", role="viewer")
            assert (await pages.get(f"/jobs/{job}")).status_code == 403

    told(serve_config, scene)


def test_sessions_end_after_their_time_and_are_bounded() -> None:
    now = 0.0
    sessions = Sessions(lambda: now)
    first = sessions.open("token")
    assert sessions.token_hash(first) == sessions.token_hash(sessions.open("token"))
    now = LIFE_SECONDS + 1.0
    assert sessions.token_hash(first) is None
    other = sessions.open("of somebody else")
    opened = [sessions.open("token") for _ in range(21)]
    assert [sessions.token_hash(secret) is None for secret in (*opened[:2], other)] == [True, False, False]


def test_jobs_are_ended_scaled_and_shared_by_who_may(serve_config: ServeConfig, job_file: Path) -> None:
    async def scene(stage: Stage, a: FakeAgent, b: FakeAgent) -> None:
        job = (await stage.submit(job_file)).job.id
        token = (await stage.client.add_user("ann")).token
        await train(job, a, b)
        async with browser(stage) as pages:
            elsewhere = {"origin": "https://elsewhere.example"}
            assert (await pages.post(f"/jobs/{job}/cancel", headers=elsewhere)).status_code == 403
            assert (await pages.get(f"/jobs/{job}/cancel")).status_code == 405
            assert (await pages.post(f"/jobs/{job}/share", data={"user": "bob"})).status_code == 404
            assert (await pages.post(f"/jobs/{job}/share", data={"user": "ann"})).status_code == 303
            assert "shared with ann" in (await pages.get(f"/jobs/{job}")).text
            assert (await pages.post(f"/jobs/{job}/scale", data={"a": "many"})).status_code == 400
            assert (await pages.post(f"/jobs/{job}/explode")).status_code == 400
            assert (await pages.post(f"/jobs/{job}/share", data={"user": "x" * 70_000})).status_code == 429
        async with browser(stage, token) as pages:
            page = await pages.get(f"/jobs/{job}")
            assert (page.status_code, "Actions" in page.text) == (200, False)
            assert (await pages.post(f"/jobs/{job}/cancel")).status_code == 403
        async with browser(stage) as pages:
            page = (await pages.get(f"/jobs/{job}")).text
            assert "Actions" in page
            assert "Cancel</button> No round was evaluated: nothing is kept." in page
            assert (await pages.post(f"/jobs/{job}/cancel")).status_code == 303
            assert (await stage.client.job(job)).state in ("cancelling", "cancelled")

    told(serve_config, scene)


@pytest.mark.slow
def test_a_job_is_renamed_resumed_and_deleted_by_who_may(
    serve_config: ServeConfig, job_file: Path, tmp_path: Path
) -> None:
    asked = ("train.end={steps: 20}", "wan.interval=2", "train.evaluateEvery=1")

    async def scene(stage: Stage, a: FakeAgent, b: FakeAgent) -> None:
        ann = (await stage.client.add_user("ann", role="member")).token
        async with as_user(stage, ann, None) as client:
            job = (await submitted(client, job_file, "r1", *asked)).id
        at = f"/jobs/{job}"
        await train(job, a, b)
        await keeps(job, a, b, 1, 1)
        async with browser(stage, ann) as pages:
            page = (await pages.get(at)).text
            assert "Cancel</button> Kept: round 1 (accuracy 0.8250)." in page
            assert "Resume" not in page
            assert (await pages.post(f"{at}/rename", data={"name": "Not A Name"})).status_code == 400
            assert (await pages.post(f"{at}/rename", data={"name": "better"})).status_code == 303
            assert (await pages.post(f"{at}/share", data={"user": "ann"})).status_code == 303
            assert "End sharing with ann</button>" in (await pages.get(at)).text
            assert (await pages.post(f"{at}/unshare", data={"user": "ann"})).status_code == 303
            assert (await pages.post(f"{at}/replan")).status_code == 409, "in the same regions"
            for path in ("resume", "delete"):
                early = await pages.post(f"{at}/{path}", data={"request": "r2"})
                assert (early.status_code, "only an ended job" in early.text) == (409, True)
            early = await pages.get(f"{at}/delete")
            assert (early.status_code, "only an ended job" in early.text) == (409, True), "before it asks"
            await pages.post(f"{at}/cancel")
            for agent in (a, b):
                agent.report(job, "stopped")
                await agent.settled()
            page = (await pages.get(at)).text
            assert "<h1>better " in page
            assert "End sharing" not in page
            assert "Resume as a new job</button> It trains the rest, from round 1 on." in page
            (request,) = re.findall(r'name="request" value="([^"]+)"', page)
            first, second = [await pages.post(f"{at}/resume", data={"request": request}) for _ in range(2)]
            assert (first.status_code, second.status_code) == (303, 303)
            assert first.headers["location"] == second.headers["location"] != at
            resumed = await stage.client.job(first.headers["location"].rpartition("/")[2])
            assert (resumed.user, resumed.initial_model.job, resumed.initial_model.round) == ("ann", job, 1)
            for method in ("GET", "POST"):
                refused = await pages.request(method, f"{at}/delete")
                assert refused.status_code == 409, "the other job fetches its model"
            await pages.post(f"/jobs/{resumed.id}/cancel")
            for agent in (a, b):
                agent.report(resumed.id, "stopped")
                await agent.settled()
            asking = (await pages.get(f"{at}/delete")).text
            assert f"{job} has 1 model, which is lost." in asking
            assert (await stage.client.job(job)).state == "cancelled", "to look deletes nothing"
            assert (
                await pages.post(f"{at}/delete", headers={"origin": "https://elsewhere.example"})
            ).status_code == 403
            gone = await pages.post(f"{at}/delete")
            assert (gone.status_code, gone.headers["location"]) == (303, "/")
            assert (await pages.get(at)).status_code == 404
            # Whoever signs jobs may resume them here, too: the signature of the first one holds for both.
            async with as_user(stage, ann, tmp_path / "ann.key") as client:
                signed = (await submitted(client, job_file, "r3", *asked)).id
            for agent in (a, b):
                assert (await agent.command("start", 3)).job == signed
                agent.report(signed, "accepted")
                agent.report(signed, "ready", ps_address=f"{agent.region}.example:9000")
            for agent in (a, b):
                await agent.command("peers", 2)
                agent.report(signed, "training")
            await keeps(signed, a, b, 1, 2)
            await pages.post(f"/jobs/{signed}/cancel")
            for agent in (a, b):
                agent.report(signed, "stopped")
                await agent.settled()
            assert "Resume as a new job</button>" in (await pages.get(f"/jobs/{signed}")).text
            again = await pages.post(f"/jobs/{signed}/resume", data={"request": "r4"})
            assert again.status_code == 303
            rest = again.headers["location"].rpartition("/")[2]
            for agent in (a, b):
                first, second = [await agent.command("start", number) for number in (3, 4)]
                assert (second.job, second.task.submission) == (rest, first.task.submission)
                assert second.task.submission.signature
        bob = (await stage.client.add_user("bob", role="member")).token
        async with browser(stage, bob) as pages:
            for action in ("rename", "unshare", "replan", "resume", "delete"):
                assert (await pages.post(f"/jobs/{resumed.id}/{action}", data={"request": "r5"})).status_code == 403
            assert (await pages.get(f"/jobs/{resumed.id}/delete")).status_code == 403

    told(serve_config, scene)


def test_files_logs_and_comparison(serve_config: ServeConfig, job_file: Path) -> None:
    async def scene(stage: Stage, a: FakeAgent, b: FakeAgent) -> None:
        job = (await stage.submit(job_file)).job.id
        await train(job, a, b)
        async with browser(stage) as pages:
            spec = await pages.get(f"/jobs/{job}/files/job.json")
            assert spec.json()["metadata"]["name"] == "digits"
            assert spec.headers["content-disposition"] == f'attachment; filename="{job}-job.json"'
            assert (await pages.get(f"/jobs/{job}/files/plan.json")).json()["partitions"]
            task = await pages.get(f"/jobs/{job}/files/task.tar")
            assert len(task.content) == int(task.headers["content-length"])
            for missing in ("result.json", "error.json", "usd.json"):
                assert (await pages.get(f"/jobs/{job}/files/{missing}")).status_code == 400
            assert (await pages.get(f"/jobs/{job}/models/7")).status_code == 404
            logs = await pages.get(f"/jobs/{job}/logs", params={"q": "<b>", "region": "a"})
            assert (logs.status_code, "&lt;b&gt;" in logs.text) == (200, True)
            both = await pages.get("/compare", params={"job": job})
            assert f'data-series="/jobs/{job}/series"' in both.text
            assert (await pages.get("/compare")).status_code == 400

    told(serve_config, scene)


def test_a_page_is_told_of_changes_until_the_job_ends(serve_config: ServeConfig, job_file: Path) -> None:
    async def scene(stage: Stage, a: FakeAgent, b: FakeAgent) -> None:
        job = (await stage.submit(job_file)).job.id
        await train(job, a, b)
        async with browser(stage) as pages, pages.stream("GET", f"/live?job={job}") as live:
            assert live.headers["content-type"].startswith("text/event-stream")
            lines = live.aiter_lines()
            assert await anext(lines) == "retry: 3000"
            a.report(job, "training", **figures("a", "b", 1))
            await a.settled()
            assert await _next_event(lines) == "change"
            await finish(job, a, b)
            while (told_of := await _next_event(lines)) == "change":
                pass
            assert told_of == "end"

    told(serve_config, scene)


def test_a_page_that_may_not_be_seen_any_more_is_told_nothing(
    serve_config: ServeConfig, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_dashboard, "_OVERVIEW_SECONDS", 0.1)

    async def scene(stage: Stage, a: FakeAgent, b: FakeAgent) -> None:
        job = (await stage.submit(job_file)).job.id
        token = (await stage.client.add_user("ann")).token
        await stage.client.share(job, "ann")
        await train(job, a, b)
        async with browser(stage, token) as pages:
            for path in (f"/live?job={job}", "/live"):
                async with pages.stream("GET", path) as live:
                    lines = live.aiter_lines()
                    assert await anext(lines) == "retry: 3000"
                    if path == "/live":
                        assert await _next_event(lines) == "change"
                        await stage.client.remove_user("ann")
                    else:
                        await stage.client.share(job, "ann", end=True)
                        a.report(job, "training", **figures("a", "b", 1))
                    async with asyncio.timeout(20):
                        assert {line async for line in lines} <= {"", "data:", "event: change"}

    told(serve_config, scene)


def test_charts_and_times_of_rounds_do_not_hold_the_control_plane_up(
    serve_config: ServeConfig, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(*given: Any) -> dict[str, Any]:
        threads.append(threading.current_thread())
        time.sleep(0.2)
        return _series.series_of(*given)

    def means_of(*given: Any) -> dict[str, tuple[float, ...]]:
        threads.append(threading.current_thread())
        return _timeline.means_of(*given)

    threads: list[threading.Thread] = []
    monkeypatch.setattr(_dashboard, "series_of", slowly)
    monkeypatch.setattr(_pages, "means_of", means_of)
    monkeypatch.setattr(_dashboard, "_SERIES_SECONDS", 0.0)
    monkeypatch.setattr(_dashboard, "_SERIES_TIMES", 1000.0)

    async def scene(stage: Stage, a: FakeAgent, b: FakeAgent) -> None:
        job = (await stage.submit(job_file)).job.id
        async with browser(stage) as pages:
            for _ in range(3):
                assert (await pages.get(f"/jobs/{job}/series")).status_code == 200
            assert len(threads) == 1, "they are kept for a time in proportion to what they took"
            assert (await pages.get(f"/jobs/{job}")).status_code == 200
        assert len(threads) == 2
        assert threading.main_thread() not in threads

    told(serve_config, scene)


def test_metrics_with_names_of_other_figures_change_no_chart(serve_config: ServeConfig, job_file: Path) -> None:
    async def scene(stage: Stage, a: FakeAgent, b: FakeAgent) -> None:
        job = (await stage.submit(job_file)).job.id
        await train(job, a, b)
        odd = {"region": 1.0, "at": 2.0, "usd": 3.0, "constructor": 4.0}
        evaluation = {"metrics": odd, "round": 1, "samples": 1}
        a.report(job, "training", **figures("a", "b", 1) | {"evaluation": evaluation})
        await a.settled()
        async with browser(stage) as pages:
            charts = {one["name"]: one for one in (await pages.get(f"/jobs/{job}/series")).json()["charts"]}
        assert charts["constructor"]["lines"][0]["y"] == [4.0]
        assert charts["usd"]["lines"][0]["y"] == [0.25]
        assert {"region", "at"}.isdisjoint(charts)

    told(serve_config, scene)


async def _next_event(lines: AsyncIterator[str]) -> str:
    async with asyncio.timeout(20):
        async for line in lines:
            if line.startswith("event: "):
                return line.removeprefix("event: ")
    raise AssertionError("the stream has ended")


# Charts

NUMBERS = st.floats(allow_nan=True, allow_infinity=True)
POINTS = st.lists(st.tuples(NUMBERS, NUMBERS), max_size=20)


@given(series=st.dictionaries(st.text(min_size=1, max_size=5), POINTS, max_size=4))
def test_any_numbers_make_a_chart_whose_points_lie_in_it(series: dict[str, list[tuple[float, float]]]) -> None:
    plain = {name.encode("ascii", "xmlcharrefreplace").decode(): points for name, points in series.items()}
    small = {name: [(x, y) for x, y in points if abs(x) < 1e100 and abs(y) < 1e100] for name, points in plain.items()}
    text = line_chart(small, x_name="round", y_name="loss & more")
    if not text:
        assert not any(small.values())
        return
    chart = Xml.fromstring("".join(character for character in text if character.isprintable()))
    _, _, width, height = map(float, chart.attrib["viewBox"].split())
    for line in chart.findall("polyline"):
        for x, y in (map(float, pair.split(",")) for pair in line.attrib["points"].split()):
            assert 0 <= x <= width
            assert 0 <= y <= height


@given(low=st.floats(-1e6, 1e6), span=st.floats(1e-3, 1e6))
def test_ticks_are_few_and_span_the_range(low: float, span: float) -> None:
    found = ticks(low, low + span)
    assert 2 <= len(found) <= 8
    assert found[0] <= low + 1e-9 * max(1, abs(low))
    assert found[-1] >= low + span - 1e-9 * max(1, abs(low + span))


@pytest.mark.parametrize("count", [0, 1, 299, 300, 301, 5000])
def test_many_points_are_thinned_evenly_to_the_last(count: int) -> None:
    points = [(float(number), 0.0) for number in range(count)]
    kept = thinned(points)
    assert len(kept) == min(count, 300)
    assert kept[:1] == points[:1]
    assert kept[-1:] == points[-1:]
