"""What a job's function is given on a platform that others use, too: a token, and copies of secrets."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from geofed_pb.errors import GeofedError
from geofed_pb.platforms import EDITIONS, Edition
from geofed_pb.user_code.secrets import VARIABLES_VARIABLE, set_secret_variables
from geofed_pb.v1 import agent_pb2
from region_agent.config import RegionConfig
from region_agent.gateway import FunctionSpec
from region_agent.gateway.call_token import CallToken
from region_agent.gateway.owner import Owner
from region_agent.gateway.redaction import Redaction
from region_agent.partition.channel import RegionChannel
from region_agent.partition.worker_function import WorkerFunction

TOKEN = CallToken.derived("key of the partition")


class Gateway:
    """Serves calls with the token of the function's environment only, as its container does."""

    def __init__(self) -> None:
        self.functions: dict[str, FunctionSpec] = {}
        self.secrets = {"of-the-operator": b"its own"}
        self.unavailable = 0

    async def edition(self) -> Edition:
        return EDITIONS["ce"]

    async def deploy(self, spec: FunctionSpec) -> None:
        assert set(spec.secrets) <= self.secrets.keys()
        self.functions[spec.service] = spec

    async def scale(self, name: str, replicas: int) -> None: ...

    async def delete(self, name: str) -> None:
        del self.functions[name]

    async def list(self) -> list[Any]:
        return [SimpleNamespace(name=name, spec=spec) for name, spec in self.functions.items()]

    async def put_secret(self, name: str, value: bytes) -> None:
        self.secrets[name] = value

    async def list_secrets(self) -> tuple[str, ...]:
        if self.unavailable:
            self.unavailable -= 1
            raise GeofedError("GATEWAY_UNAVAILABLE", "not now")
        return tuple(self.secrets)

    async def delete_secret(self, name: str) -> None:
        assert not self.functions
        del self.secrets[name]

    async def invoke(self, name: str, body: bytes, *, headers: dict[str, str], timeout: Any) -> Any:
        wanted = self.functions[name].env_vars["GEOFED_CALL_TOKEN"]
        served = headers == {"X-Geofed-Token": wanted} and len(wanted) == 64
        answer = json.dumps({"status": "done", "steps": 7}).encode() if served else b"no"
        return SimpleNamespace(status=200 if served else 403, body=answer)


def _function(folder: Path, gateway: Gateway, changes: dict[str, Any] | None = None) -> WorkerFunction:
    (folder / "token").write_text("a value")
    config = RegionConfig.model_validate(
        {
            "apiVersion": "geofed/v1", "kind": "Region", "metadata": {"name": "east"}, "cloud": "test",
            "capacity": {"workers": 2}, "secrets": {"hub": {"file": str(folder / "token")}, "of-the-operator": {}},
            "gateway": {"kind": "openfaas", "url": "https://gateway.example", "image": "i"}, **(changes or {}),
        }
    )  # fmt: skip
    start = agent_pb2.StartPartition(
        job="job-1", task=agent_pb2.TaskRef(secrets=config.secrets),
        plan=agent_pb2.PartitionPlan(slice_seconds=5.0, memory_mb=512),
    )  # fmt: skip
    machine: Any = SimpleNamespace(workers=2, preemptible=False)
    channel, owner = RegionChannel(config.channel, folder, "east"), Owner.of("east", b"authority")
    return WorkerFunction(start, machine, gateway, config, channel, "image", owner, TOKEN)  # type: ignore[arg-type]


def test_calls_state_the_token_that_the_function_has(tmp_path: Path) -> None:
    async def scenario() -> None:
        gateway = Gateway()
        function = _function(tmp_path, gateway)
        await function.deploy()
        answer = await function.call(0, b"{}")
        assert answer.status == "done"

    asyncio.run(scenario())


@pytest.mark.parametrize("unavailable", [0, 1])
def test_its_secrets_are_its_own_and_leave_with_it(tmp_path: Path, unavailable: int) -> None:
    async def scenario() -> None:
        gateway = Gateway()
        function = _function(tmp_path, gateway)
        await function.give_secrets()
        await function.deploy()
        (spec,) = gateway.functions.values()
        (copy,) = gateway.secrets.keys() - {"of-the-operator"}
        assert spec.secrets == (copy, "of-the-operator")
        assert json.loads(spec.env_vars["GEOFED_SECRETS"]) == {"hub": copy}
        assert copy.startswith(f"hub-{Owner.of('east', b'authority').mark}-")
        gateway.unavailable = unavailable
        await function.delete()
        assert gateway.secrets == {"of-the-operator": b"its own"}

    asyncio.run(scenario())


def test_no_specification_has_the_key_of_the_channel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = {
        "AWS_ACCESS_KEY_ID": "AKIAOFTHEWORKERS",
        "AWS_SECRET_ACCESS_KEY": "of/the+workers",
        "AWS_SESSION_TOKEN": "it=ends",
    }
    file = tmp_path / "key"
    file.write_text("[default]\n" + "".join(f"{name.lower()} = {value}\n" for name, value in key.items()))
    image = "123456789012.dkr.ecr.eu-central-1.amazonaws.com/geofed-worker:1"
    platform = {"kind": "lambda", "image": image, "role": "arn:aws:iam::123456789012:role/geofed-worker"}
    channel = {"kind": "s3", "bucket": "tensors", "workerCredentialsFile": str(file)}

    async def scenario() -> None:
        gateway = Gateway()
        function = _function(tmp_path, gateway, {"gateway": platform, "channel": channel, "secrets": {}})
        await function.give_secrets()
        await function.deploy()
        (spec,) = gateway.functions.values()
        # What the gateway's listing returns, and what takes the values out of the function's output.
        assert not [value for value in key.values() if value in json.dumps(spec.as_json())]
        given = Redaction.of({name: gateway.secrets[name] for name in spec.secrets})
        for redact in (given, function.redact):
            assert not [value for value in key.values() if value in redact(str(key))]
        # As the worker has it.
        (tmp_path / "secrets").mkdir()
        for name in spec.secrets:
            (tmp_path / "secrets" / name).write_bytes(gateway.secrets[name])
        monkeypatch.setenv("OPENFAAS_SECRETS", str(tmp_path / "secrets"))
        for name in key:
            monkeypatch.setenv(name, "another")
        monkeypatch.setenv(VARIABLES_VARIABLE, spec.env_vars[VARIABLES_VARIABLE])
        set_secret_variables()
        assert {name: os.environ[name] for name in key} == key
        assert VARIABLES_VARIABLE not in os.environ
        set_secret_variables()
        monkeypatch.setenv(VARIABLES_VARIABLE, json.dumps({"AWS_ACCESS_KEY_ID": "none"}))
        with pytest.raises(GeofedError) as caught:
            set_secret_variables()
        assert caught.value.code == "SECRET_MISSING"
        await function.delete()
        assert gateway.secrets == {"of-the-operator": b"its own"}

    asyncio.run(scenario())
