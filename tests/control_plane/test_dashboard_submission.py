"""Jobs submitted on the dashboard, from templates, over HTTPS."""

from __future__ import annotations

import hashlib
import re
from html import unescape
from pathlib import Path

import httpx2
import pytest

import deploy
from control_plane.dashboard import _submission
from control_plane.server import ServeConfig
from control_plane.spec import load, pack
from geofed_pb.errors import GeofedError
from tests.control_plane.conftest import Stage
from tests.control_plane.fake_agent import FakeAgent
from tests.control_plane.test_dashboard import EVIL, browser, told
from tests.control_plane.test_signed import as_user, submitted

TEMPLATE = Path(deploy.__file__).parent / "templates" / "image-classification"
JOB = (TEMPLATE / "job.yaml").read_text()


def hidden(page: str) -> dict[str, str]:
    """Fields of the form that submits what was planned."""
    form = page[page.index('action="/submit"', page.index('id="plan"')) :]
    return {
        name: unescape(value) for name, value in re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', form)
    }


async def alert(pages: httpx2.AsyncClient, status: int = 400, path: str = "/submit/plan", **form: str) -> str:
    """The error of a draft that cannot be planned."""
    answer = await pages.post(path, data={"template": TEMPLATE.name, "text": JOB} | form)
    assert answer.status_code == status
    (text,) = re.findall(r"<pre>(.*?)</pre>", answer.text, re.DOTALL)
    return unescape(text)


@pytest.mark.slow
def test_a_template_is_planned_and_submitted_once(serve_config: ServeConfig) -> None:
    async def scene(stage: Stage, a: FakeAgent, b: FakeAgent) -> None:
        token = (await stage.client.add_user("ann", role="member")).token
        async with browser(stage, token) as pages:
            assert 'href="/submit"' in (await pages.get("/")).text
            assert f'<option value="{TEMPLATE.name}">' in (await pages.get("/submit")).text
            form = (await pages.get("/submit", params={"template": TEMPLATE.name})).text
            (text,) = re.findall(r"<textarea[^>]*>\n(.*?)</textarea>", form, re.DOTALL)
            assert unescape(text) == JOB
            linked = {"template": TEMPLATE.name, "text": "from a link", "name": "linked"}
            linked_form = (await pages.get("/submit", params=linked)).text
            assert unescape(re.findall(r"<textarea[^>]*>\n(.*?)</textarea>", linked_form, re.DOTALL)[0]) == JOB
            assert "linked" not in linked_form
            assert '<option value="digits">' in form, "datasets of the federation are proposed"
            entered = {"template": TEMPLATE.name, "text": JOB.replace("\n", "\r\n"), "name": "mine", "minimise": "time"}
            planned = await pages.post("/submit/plan", data=entered)
            assert planned.status_code == 200
            assert "<h2>Plan</h2>" in planned.text
            assert not await stage.client.jobs()
            fields = hidden(planned.text)
            elsewhere = {"origin": "https://elsewhere.example"}
            for path in ("/submit", "/submit/plan"):
                assert (await pages.post(path, data=fields, headers=elsewhere)).status_code == 403
            first, second = [await pages.post("/submit", data=fields) for _ in range(2)]
            assert (first.status_code, second.status_code) == (303, 303)
            assert first.headers["location"] == second.headers["location"]
            other = await pages.post("/submit", data=fields | {"name": "other"})
            assert (other.status_code, "REQUEST_CONFLICT" in other.text) == (409, True)
            job = await stage.client.job(first.headers["location"].rpartition("/")[2])
            assert (job.name, job.user) == ("mine", "ann")
            assert '"minimise":"time"' in job.spec_json.replace(" ", "")
            code = await pages.get(f"/jobs/{job.id}/files/task.tar")
            assert code.content == pack(TEMPLATE, "task.py").content

    told(serve_config, scene)


@pytest.mark.slow
def test_what_is_wrong_with_a_draft_is_said_as_by_validate(serve_config: ServeConfig, tmp_path: Path) -> None:
    wrong = JOB.replace("batch", "bach", 1)
    assert wrong != JOB
    (tmp_path / "job.yaml").write_text(wrong)
    with pytest.raises(GeofedError) as refused:
        load(tmp_path / "job.yaml")
    said = f"{refused.value.code}: {refused.value.message}".replace(f"{tmp_path}/", "")

    async def scene(stage: Stage, a: FakeAgent, b: FakeAgent) -> None:
        async with browser(stage) as pages:
            for path in ("/submit/plan", "/submit"):
                assert await alert(pages, path=path, text=wrong, request="r") == said
            assert "metadata.name" in await alert(pages, name="Not A Name")
            assert "not found" in await alert(pages, text=JOB.replace("task.py", "other.py"))
            assert "nowhere" in await alert(pages, status=409, path="/submit", dataset="nowhere", request="r")
            planned = await pages.post("/submit/plan", data={"template": TEMPLATE.name, "dataset": "nowhere"})
            assert (planned.status_code, "cannot be admitted" in planned.text) == (200, True)
            assert "Submit this job" not in planned.text
            gone = await pages.post("/submit/plan", data={"template": "../text", "text": JOB})
            assert (gone.status_code, "TEMPLATE_NOT_FOUND" in gone.text) == (404, True)
            assert JOB in unescape(gone.text), "what was entered is not lost"
            longest = JOB + "# 数据\n" * 4_000
            planned = await pages.post("/submit/plan", data={"template": TEMPLATE.name, "text": longest})
            assert (planned.status_code, "<h2>Plan</h2>" in planned.text) == (200, True)
            longer = JOB + "# 数据\n" * 40_000
            for path in ("/submit/plan", "/submit"):
                long = await pages.post(path, data={"template": TEMPLATE.name, "text": longer})
                assert (long.status_code, "48 KiB" in long.text, longer in unescape(long.text)) == (429, True, True)
            moved = JOB.replace("advanced:", "k: 1\nadvanced:", 1)
            planned = await pages.post("/submit/plan", data={"template": TEMPLATE.name, "text": moved})
            assert "job.yaml:" in planned.text
            assert "geofed-template-" not in planned.text
            beyond = await pages.post("/submit/plan", data={"template": TEMPLATE.name, "text": "x" * (1 << 20)})
            assert beyond.status_code == 429
            assert EVIL not in (await pages.post("/submit/plan", data={"template": TEMPLATE.name, "text": EVIL})).text

    told(serve_config, scene)


def test_uploads_by_command_and_here_count_together(serve_config: ServeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_submission, "DAILY_CODE_BYTES", len(pack(TEMPLATE, "task.py").content))

    async def scene(stage: Stage, a: FakeAgent, b: FakeAgent) -> None:
        token = (await stage.client.add_user("ann")).token
        async with as_user(stage, token, None) as ann, browser(stage, token) as pages:
            await ann.put_bundle(b"code", f"sha256:{hashlib.sha256(b'code').hexdigest()}")
            assert "were uploaded within a day" in await alert(pages, 429)

    told(serve_config, scene)


@pytest.mark.parametrize("page", ["security.md", "storage.md"])
def test_the_limit_of_a_day_is_the_one_of_the_docs(page: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    assert f"A user uploads at most {_submission.DAILY_CODE_BYTES >> 30} GiB of code" in " ".join(text.split())


def test_no_file_of_the_control_plane_is_read(serve_config: ServeConfig, tmp_path: Path) -> None:
    (tmp_path / "secret.safetensors").write_bytes(b"secret")

    async def scene(stage: Stage, a: FakeAgent, b: FakeAgent) -> None:
        async with browser(stage) as pages:
            text = JOB.replace("train:\n", f"train:\n  initialModel: {{file: {tmp_path}/secret.safetensors}}\n")
            assert text != JOB
            assert "are not uploaded here" in await alert(pages, text=text)
            outside = JOB.replace("task.py", "../../task.py")
            assert "in the job file's folder" in await alert(pages, text=outside)

    told(serve_config, scene)


def test_who_may_not_submit_gets_no_form(serve_config: ServeConfig) -> None:
    async def scene(stage: Stage, a: FakeAgent, b: FakeAgent) -> None:
        form = {"template": TEMPLATE.name, "text": JOB, "request": "r"}
        for name, role in (("vic", "viewer"), ("eve", "auditor")):
            async with browser(stage, (await stage.client.add_user(name, role=role)).token) as pages:
                assert 'href="/submit"' not in (await pages.get("/")).text
                assert (await pages.get("/submit")).status_code == 403
                for path in ("/submit", "/submit/plan"):
                    assert (await pages.post(path, data=form)).status_code == 403
        async with browser(stage, "") as pages:
            assert (await pages.post("/submit", data=form)).status_code == 401

    told(serve_config, scene)


def test_jobs_of_a_user_who_signs_them_are_submitted_by_command(
    serve_config: ServeConfig, job_file: Path, tmp_path: Path
) -> None:
    async def scene(stage: Stage, a: FakeAgent, b: FakeAgent) -> None:
        token = (await stage.client.add_user("ann")).token
        async with as_user(stage, token, tmp_path / "ann.key") as ann:
            await submitted(ann, job_file, "r1")
        async with browser(stage, token) as pages:
            refused = await pages.get("/submit")
            assert (refused.status_code, "by command, which signs them" in refused.text) == (403, True)
            form = {"template": TEMPLATE.name, "text": JOB, "request": "r2"}
            assert (await pages.post("/submit", data=form)).status_code == 403

    told(serve_config, scene)
