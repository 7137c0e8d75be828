"""Channels are opened by the name in a plan, and their clients are loaded only then."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from geofed_pb.errors import GeofedError
from sync.channel_clients import FileChannel, open_channel

pytestmark = pytest.mark.processes


def test_a_channel_is_opened_by_its_name(tmp_path: Path) -> None:
    assert isinstance(open_channel("file", str(tmp_path)), FileChannel)
    with pytest.raises(GeofedError, match="unknown channel 'x'") as raised:
        open_channel("x", "")
    assert raised.value.code == "CONFIG_INVALID"
    assert raised.value.hint == "known: file, redis, s3"


def test_no_client_is_loaded_before_a_channel_needs_it() -> None:
    look = "import sys, sync.channel; sys.exit(bool({'redis', 'boto3', 'botocore'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", look]).returncode == 0


@pytest.mark.parametrize(("kind", "package"), [("redis", "redis"), ("s3", "boto3")])
def test_a_client_that_is_not_installed_is_named(kind: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name for name in sys.modules if name.startswith(("sync.channel_clients._redis", "sync.channel_clients._s3"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(GeofedError, match=f"needs {package}") as raised:
        open_channel(kind, "")
    assert raised.value.hint == f"in a clone of geofed: pip install '.[{kind}]'"
