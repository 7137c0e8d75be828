"""A function's container as a process: what OpenFaaS asks of it, and how it leaves."""

from __future__ import annotations

import http.client
import json
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

from region_agent.gateway.call_token import CallToken
from region_agent.gateway.dial_out import is_open
from tests.region_agent.gateway.conftest import until

pytestmark = pytest.mark.processes

HANDLERS = Path(__file__).parent / "handlers"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def _ask(
    port: int, path: str, do: str = "echo", body: bytes = b"", timeout: str = "", **more: str
) -> tuple[int, bytes]:
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        line.request("POST", path, body, {"X-Do": do} | ({"X-Timeout": timeout} if timeout else {}) | more)
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
            until(lambda: _ask(port, "/_/ready")[0] == 200)
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


def test_only_calls_with_its_token_are_served() -> None:
    port, token = _free_port(), CallToken.derived("key")
    with _container(port, **token.env):
        for headers in ({}, CallToken.derived("another key").headers, {"X-Geofed-Token": "\xe9"}):
            status, text = _ask(port, "/", body=b"not for me", **headers)
            assert (status, b"no token" in text) == (403, True)
        assert _ask(port, "/", body=b"back", **token.headers) == (200, b"back")
        assert (_ask(port, "/_/health")[0], _ask(port, "/_/ready")[0]) == (200, 200)
        # A body that is announced by a stranger is not waited for.
        with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
            line.sendall(b"POST / HTTP/1.1\r\nContent-Length: 999999999\r\n\r\n")
            assert line.recv(100).startswith(b"HTTP/1.1 403")
        assert token.value not in _ask(port, "/", "env", **token.headers)[1].decode()
        assert token.value not in repr(token)


def test_calls_that_exceed_their_time_are_ended_and_the_next_one_is_served() -> None:
    port = _free_port()
    with _container(port, exec_timeout="500ms"):
        before = json.loads(_ask(port, "/", "describe")[1])["pid"]
        assert _ask(port, "/", "wait?s=30")[0] == 504
        # The process is replaced; a call that comes meanwhile waits for it.
        assert json.loads(_ask(port, "/", "describe", timeout="10s")[1])["pid"] != before
        assert _ask(port, "/", "wait?s=30", timeout="100ms")[0] == 504
        assert _ask(port, "/", timeout="soon")[0] == 400


def test_a_call_ends_when_its_caller_has_gone(tmp_path: Path) -> None:
    port = _free_port()
    with _container(port):
        began = tmp_path / "began"
        with socket.create_connection(("127.0.0.1", port)) as line:
            body = str(began).encode()
            line.sendall(b"POST / HTTP/1.1\r\nX-Do: wait?s=60\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            until(began.exists)
            assert _ask(port, "/")[0] == 429
        until(lambda: _ask(port, "/", body=b"next") == (200, b"next"))


def test_a_caller_is_known_to_wait_however_many_files_are_open() -> None:
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1_024)]
    try:
        near, far = socket.socketpair()
        with near:
            assert near.fileno() > 1_024
            assert is_open(near)
            far.close()
            assert not is_open(near)
        assert not is_open(near)
    finally:
        for file in files:
            os.close(file)


def test_a_crash_is_an_answer_with_its_reason() -> None:
    port = _free_port()
    with _container(port):
        status, text = _ask(port, "/", "crash")
        assert (status, text) == (500, b"the function was killed by SIGSEGV")
        assert _ask(port, "/", body=b"again") == (200, b"again")


def test_it_can_be_stopped_while_its_handler_is_loading(tmp_path: Path) -> None:
    (tmp_path / "slow_probe.py").write_text("import time; time.sleep(60)")
    argv = [sys.executable, "-m", "region_agent.gateway.container", "--host", "127.0.0.1", "--handler", "slow_probe:x"]
    port = _free_port()
    environment = {**os.environ, "port": str(port), "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "serving" in process.stderr.readline()
        assert (_ask(port, "/_/health")[0], _ask(port, "/_/ready")[0]) == (200, 503)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_a_handler_that_cannot_be_loaded_ends_the_container() -> None:
    argv = [sys.executable, "-m", "region_agent.gateway.container", "--host", "127.0.0.1", "--handler", "no_such:x"]
    environment = {**os.environ, "port": str(_free_port())}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=30)
    assert (done.returncode, "ModuleNotFoundError" in done.stderr) == (1, True), done.stderr


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
