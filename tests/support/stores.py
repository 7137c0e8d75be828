"""Real stores for tests: Debian's redis-server, and moto's S3 server."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from unittest import mock
from urllib.parse import urlencode

BUCKET = "channel"
_KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}


@dataclass
class RedisServer:
    """A redis-server of its own, reached over a socket file or over TCP."""

    process: subprocess.Popen[str]
    socket_path: Path
    port: int
    password: str | None

    def unix(self, prefix: str, **more: object) -> str:
        return f"unix://{self._user}{self.socket_path}?{urlencode({'prefix': prefix, **more})}"

    def tcp(self, prefix: str) -> str:
        return f"redis://{self._user}127.0.0.1:{self.port}/0?prefix={prefix}"

    @property
    def _user(self) -> str:
        return f":{self.password}@" if self.password else ""

    def command(self, *words: str) -> str:
        """What redis-cli answers."""
        argv = ["redis-cli", "-s", str(self.socket_path), *words]
        environment = {**os.environ, **({"REDISCLI_AUTH": self.password} if self.password else {})}
        return subprocess.run(argv, capture_output=True, text=True, check=True, env=environment).stdout

    def calls(self) -> dict[str, int]:
        """How often each command was carried out since the last reset."""
        lines = [line for line in self.command("INFO", "commandstats").splitlines() if line.startswith("cmdstat_")]
        parted = (line.removeprefix("cmdstat_").split(":calls=") for line in lines)
        return {name: int(facts.split(",")[0]) for name, facts in parted}

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout
        self.process.stdout.close()


def _cannot(why: str) -> NoReturn:
    """Skips a test; benchmarks, which have no pytest, end."""
    if pytest := sys.modules.get("pytest"):
        pytest.skip(why)
    raise SystemExit(f"this cannot run here: {why}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_redis(folder: Path, *options: str, port: int = 0, password: str | None = None) -> RedisServer:
    """Start a redis-server that keeps nothing on disk; returns when it is ready."""
    if shutil.which("redis-server") is None or shutil.which("redis-cli") is None:
        _cannot("redis-server is not installed: apt-get install redis-server")
    port = port or _free_port()
    path = folder / "redis.sock"
    argv = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--unixsocket", str(path)]
    argv += ["--save", "", "--appendonly", "no", "--dir", str(folder), *options]
    argv += ["--requirepass", password] if password else []
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout
    said = []
    for line in process.stdout:
        said.append(line)
        if "accept connections at" in line:
            return RedisServer(process, path, port, password)
    process.wait()
    raise AssertionError("".join(said))


@contextmanager
def redis_server(folder: Path, *options: str, password: str | None = None) -> Iterator[RedisServer]:
    server = start_redis(folder, *options, password=password)
    try:
        yield server
    finally:
        server.kill()


@dataclass(frozen=True)
class S3Server:
    """moto's S3 server, with one bucket."""

    endpoint: str

    def address(self, prefix: str, **more: object) -> str:
        options = {"endpoint": self.endpoint, "region": "us-east-1", "path_style": 1, **more}
        return f"s3://{BUCKET}/{prefix}?{urlencode(options)}"

    def counts(self) -> dict[str, int]:
        """Requests by kind since the last call."""
        with urllib.request.urlopen(f"{self.endpoint}/-/counts") as answer:
            counts: dict[str, int] = json.load(answer)
        return counts


@contextmanager
def s3_server() -> Iterator[S3Server]:
    if importlib.util.find_spec("moto") is None:
        _cannot("moto is not installed: pip install 'moto[server]'")
    program = Path(__file__).with_name("s3_server.py")
    process = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        endpoint = f"http://127.0.0.1:{int(process.stdout.readline())}"
        with mock.patch.dict(os.environ, _KEYS):
            request = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")
            urllib.request.urlopen(request).close()
            server = S3Server(endpoint)
            server.counts()
            yield server
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()
