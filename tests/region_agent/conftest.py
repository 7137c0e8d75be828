"""An object store with shards in it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from region_agent.config import StoreConfig

KEY, SECRET = "AKIATESTTESTTEST1234", "a-secret-that-must-not-travel"


@functools.cache
def session() -> Any:
    """It reads what the service understands once for all its clients, which takes a quarter of a second."""
    import boto3

    return boto3.Session(KEY, SECRET, region_name="us-east-1")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def store(endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StoreConfig:
    """A store with two objects under `train/` and one beside it; its keys are where the SDK looks for them."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    client: Any = session().client("s3", endpoint_url=endpoint)
    client.create_bucket(Bucket="shards")
    for name, content in (
        ("train/a.npy", b"a" * 1000),
        ("train/deep/b.npy", b"b"),
        ("train/", b""),
        ("one.npz", b"one"),
    ):
        client.put_object(Bucket="shards", Key=name, Body=content)
    client.close()
    return StoreConfig(endpoint_url=endpoint, region="us-east-1")
