"""With ``--log-format json`` every line of a daemon's log is a JSON object, and so are its child processes' lines."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from support.running import Federation, Running, digits_sites, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

JSON_LOG = ("--log-format", "json")


def test_every_line_is_json(tmp_path: Path) -> None:
    """Of the control plane, the agents, a gateway and a parameter server, while a region is away."""
    sites = digits_sites(tmp_path, ("bergen", "oslo"))
    with Federation(tmp_path / "federation", sites, serve_options=JSON_LOG, agent_options=JSON_LOG) as federation:
        running = Running(federation, tmp_path)
        job = running.submit("train.end.epochs=200", "wan.interval=10", "train.evaluateEvery=0")
        running.wait_round(job, 1)
        agent = federation.processes["oslo"]
        agent.terminate()
        agent.wait(timeout=30)
        eventually(lambda: _down(running, job), "bergen logs that oslo is down")
        federation.start_agent("oslo")
        federation.wait_connected(["oslo"])
        # The oldest process is the warm parent; the others are replicas that it has forked.
        min(running.descendants("bergen", "zygote"), key=lambda process: process.pid).kill()
        gateway = federation.region_state("bergen") / "state" / "gateway" / "gateway.log"
        eventually(lambda: "zygote ended" in gateway.read_text(), "the gateway logs that its warm parent has died")
        federation.control_plane("cancel", job, "--yes")
        running.wait_end(job)
        ps = _ps_lines(running, job)
    agents = [_lines(federation.log(f"agent-{name}")) for name in ("bergen", "oslo")]
    logs = {"agent": agents[0] + agents[1], "control plane": _lines(federation.log("control-plane")), "ps": ps}
    logs["gateway"] = _lines(gateway.read_text())
    for name, lines in logs.items():
        assert lines, name
        for line in lines:
            assert datetime.fromisoformat(line["timestamp"]).utcoffset() is not None, name
            assert line["level"] in ("info", "warning", "error"), name
            assert line["event"], name
            assert line["logger"], name
    assert {"partition", "session with the control plane"} <= {line["event"] for line in logs["agent"]}
    assert {line["job"] for line in logs["agent"] if line["event"] == "partition"} == {job}


def _down(running: Running, job: str) -> bool:
    return any(line["event"].startswith("link to oslo is down") for line in _ps_lines(running, job))


def _lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def _ps_lines(running: Running, job: str) -> list[dict[str, Any]]:
    """The lines of parameter servers, which their agents add to the job's log."""
    told = running.federation.control_plane("logs", job, "-o", "jsonl").stdout.splitlines()
    records = [json.loads(line)["data"] for line in told]
    return [json.loads(record["text"]) for record in records if record["source"] == "ps"]
