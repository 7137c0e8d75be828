"""With ``--log-format json`` every line of a daemon's log is a JSON object, and so are its child processes' lines."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest
from support.running import UNHURRIED, Running, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


def test_every_line_is_json(running_north: Running) -> None:
    """Of the control plane, the agents, a gateway and a parameter server, while a region is away."""
    running, federation = running_north, running_north.federation
    gateway = federation.region_state("bergen") / "state" / "gateway" / "gateway.log"
    daemons = ("control-plane", "agent-bergen", "agent-oslo")

    def logged() -> dict[str, list[str]]:
        """Whole lines, without those of gRPC itself about a test that has spoken to a port in plaintext."""
        texts = {name: federation.log(name) for name in daemons} | {"gateway": gateway.read_text()}
        whole = {name: text.split("\n")[:-1] for name, text in texts.items()}
        return {name: [line for line in lines if "Handshake failed" not in line] for name, lines in whole.items()}

    before = {name: len(lines) for name, lines in logged().items()}
    # In the background there is always an update to send, whenever the other region ends.
    settings = ("train.end.epochs=200", "wan.interval=10", "wan.exchange=background", "train.evaluateEvery=0")
    job = running.submit(*settings, task=UNHURRIED)
    running.wait_round(job, 1)
    agent = federation.processes["oslo"]
    agent.terminate()
    agent.wait(timeout=30)

    def down() -> bool:
        """In the agent's log: an address of another region is nothing that a job's log tells."""
        return any("link to oslo is down" in line for line in logged()["agent-bergen"][before["agent-bergen"] :])

    eventually(down, "bergen logs that oslo is down")
    assert not any("link to oslo is down" in line["event"] for line in _ps_lines(running, job))
    federation.start_agent("oslo")
    federation.wait_connected(["oslo"])
    # The oldest process is the warm parent; the others are replicas that it has forked.
    min(running.descendants("bergen", "zygote"), key=lambda process: process.create_time()).kill()

    def missed() -> bool:
        return any("zygote ended" in line for line in logged()["gateway"][before["gateway"] :])

    eventually(missed, "the gateway logs that its warm parent has died")
    federation.control_plane("cancel", job, "--yes")
    running.wait_end(job)
    logs = {name: [_read(name, line) for line in lines] for name, lines in logged().items()}
    # The agent's log has a server's line about another region's address as the text of its own.
    own = logs["agent-bergen"][before["agent-bergen"] :]
    of_server = [line["event"] for line in own if "link to oslo is down" in line["event"]]
    logs["ps"] = [_read("ps", line) for line in of_server]
    for name, lines in logs.items():
        assert lines, name
        for line in lines:
            assert datetime.fromisoformat(line["timestamp"]).utcoffset() is not None, name
            assert line["level"] in ("info", "warning", "error"), name
            assert line["event"], name
            assert line["logger"], name
    for name in ("agent-bergen", "agent-oslo"):
        assert {line["region"] for line in logs[name]} == {name.removeprefix("agent-")}
    assert {(line["region"], line["job"]) for line in logs["ps"]} == {("bergen", job)}
    assert all(line["round"] >= 1 for line in logs["ps"])
    agents = [line for name in ("agent-bergen", "agent-oslo") for line in logs[name][before[name] :]]
    assert {"partition", "session with the control plane"} <= {line["event"] for line in agents}
    # An agent that starts again also logs the partitions of earlier jobs that it has yet to clean up.
    assert job in {line["job"] for line in agents if line["event"] == "partition"}


def _read(name: str, line: str) -> dict[str, Any]:
    try:
        read: dict[str, Any] = json.loads(line)
    except ValueError:
        raise AssertionError(f"{name} has logged {line!r}") from None
    return read


def _ps_lines(running: Running, job: str) -> list[dict[str, Any]]:
    """The lines of parameter servers, which their agents add to the job's log."""
    told = running.federation.control_plane("logs", job, "-o", "jsonl").stdout.splitlines()
    records = [json.loads(line)["data"] for line in told]
    return [json.loads(record["text"]) for record in records if record["source"] == "ps"]
