"""Every route of the dashboard by every role: what the table says is answered, and nothing else."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from control_plane.dashboard import _dashboard
from control_plane.server import ServeConfig
from tests.control_plane.conftest import staged
from tests.control_plane.scenario import bring_up, run
from tests.control_plane.test_dashboard import browser

ALL = frozenset({"viewer", "member", "auditor", "operator"})
MEMBERS = frozenset({"member", "operator"})
READERS, OPERATORS = frozenset({"auditor", "operator"}), frozenset({"operator"})
"""Who may read, and who may change, a job that is another user's and not shared."""
ROUTES = {
    ("GET", "/"): ALL,
    ("GET", "/compare"): READERS,
    ("GET", "/submit"): MEMBERS,
    ("POST", "/submit"): MEMBERS,
    ("POST", "/submit/plan"): MEMBERS,
    ("GET", "/jobs/{job}"): READERS,
    ("GET", "/jobs/{job}/logs"): OPERATORS,
    ("GET", "/jobs/{job}/series"): READERS,
    ("GET", "/jobs/{job}/files/{name}"): OPERATORS,
    ("GET", "/jobs/{job}/models/{round:int}"): OPERATORS,
    ("GET", "/jobs/{job}/delete"): OPERATORS,
    ("POST", "/jobs/{job}/delete"): OPERATORS,
    ("POST", "/jobs/{job}/resume"): OPERATORS,
    ("POST", "/jobs/{job}/{action}"): OPERATORS,
    ("GET", "/live"): READERS,
    ("GET", "/network"): ALL,
}
ANYONE = {
    ("GET", "/signin"),
    ("POST", "/signin"),
    ("GET", "/signin/provider"),
    ("GET", _dashboard._BACK),
    ("POST", "/signout"),
    ("GET", "/static/{name}"),
}


def test_each_route_is_in_the_table() -> None:
    made = _dashboard.Dashboard.routes.fget(Mock())  # type: ignore[attr-defined]
    found = {(method, route.path) for route in made for method in (route.methods or {"GET"}) if method != "HEAD"}
    assert found == ROUTES.keys() | ANYONE


@pytest.mark.parametrize("role", [*sorted(ALL), ""])
def test_the_dashboard_by_every_role(serve_config: ServeConfig, job_file: Path, role: str) -> None:
    """``role`` "": without a token."""

    async def scenario() -> None:
        async with staged(serve_config) as stage:
            agents = await bring_up(stage)
            job = (await stage.submit(job_file)).job.id
            token = (await stage.client.add_user("eve", role=role)).token if role else ""
            own = {"origin": f"https://127.0.0.1:{stage.ports.metrics}"}
            given = {"job": job, "name": "task.tar", "round:int": "0", "action": "no-action"}
            async with browser(stage, token) as pages:
                for (method, route), callers in ROUTES.items():
                    path = route
                    for name, value in given.items():
                        path = path.replace(f"{{{name}}}", value)
                    query = {"job": job} if route in ("/compare", "/live") else {}
                    async with pages.stream(method, path, params=query, headers=own) as answer:
                        status = answer.status_code
                    refused = status in (401, 403) or (status == 404 and role not in callers)
                    assert refused is (role not in callers), f"{method} {path}: {status}"
                    assert (status == 401) is (role == "")
            for agent in agents:
                await agent.close()

    run(scenario())
