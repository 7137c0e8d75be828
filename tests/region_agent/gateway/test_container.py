"""A function's container as a process: what OpenFaaS asks of it, and how it leaves."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.region_agent.gateway.conftest import until

pytestmark = pytest.mark.processes

HANDLERS = Path(__file__).parent / "handlers"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def _ask(port: int, path: str, do: str = "echo", body: bytes = b"") -> tuple[int, bytes]:
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        line.request("POST", path, body, {"X-Do": do})
        answer = line.getresponse()
        return answer.status, answer.read()
    finally:
        line.close()


@contextmanager
def _container(port: int, **settings: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "port": str(port), "write_timeout": "20s", **settings}
    environment["PYTHONPATH"] = os.pathsep.join(part for part in (str(HANDLERS), os.environ.get("PYTHONPATH")) if part)
    argv = [sys.executable, "-m", "region_agent.gateway.container", "--host", "127.0.0.1"]
    process = subprocess.Popen(
        [*argv, "--handler", "gateway_probe:handle"], env=environment, stderr=subprocess.PIPE, text=True
    )
    with process:
        try:
            assert process.stderr is not None
            assert "serving gateway_probe:handle" in process.stderr.readline()
            yield process
        finally:
            process.kill()


def test_one_call_at_a_time_and_none_is_lost_when_it_leaves(tmp_path: Path) -> None:
    port = _free_port()
    with _container(port) as process, ThreadPoolExecutor() as calling:
        assert _ask(port, "/_/health") == (200, b"OK")
        assert _ask(port, "/_/ready") == (200, b"OK")
        assert _ask(port, "/anything", body=b"back") == (200, b"back")
        assert _ask(port, "/", "raise")[0] == 500
        begun = tmp_path / "begun"
        running = calling.submit(_ask, port, "/", "wait?s=4", str(begun).encode())
        until(begun.exists)
        assert _ask(port, "/", body=b"two")[0] == 429
        assert _ask(port, "/_/ready")[0] == 429
        assert _ask(port, "/_/health") == (200, b"OK")
        process.send_signal(signal.SIGTERM)
        until(lambda: _ask(port, "/_/health")[0] == 503)
        assert _ask(port, "/", body=b"late")[0] == 503
        assert running.result() == (200, b"woke")
        assert process.wait(10) == 0


@pytest.mark.parametrize(("name", "value", "code"), [("port", "x", 2), ("write_timeout", "soon", 2), ("port", "", 2)])
def test_wrong_settings_are_told(name: str, value: str, code: int) -> None:
    argv = [sys.executable, "-m", "region_agent.gateway.container"]
    done = subprocess.run(argv, env={**os.environ, name: value}, capture_output=True, text=True, timeout=30)
    assert (done.returncode, "error[CONFIG_INVALID]" in done.stderr) == (code, True), done.stderr


def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        argv = [sys.executable, "-m", "region_agent.gateway.container"]
        environment = {**os.environ, "port": str(taken.getsockname()[1])}
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=30)
    assert (done.returncode, "error[PORT_IN_USE]" in done.stderr) == (6, True), done.stderr
