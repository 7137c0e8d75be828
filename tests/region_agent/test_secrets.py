"""Which secrets a job may read, and texts without their values."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

import geofed
from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2, common_pb2
from region_agent.approvals import Approvals
from region_agent.config import RegionConfig, load_config
from region_agent.gateway.owner import Owner
from region_agent.gateway.redaction import Redaction
from region_agent.tasks.secrets import check_secrets, give_secrets, remove_secrets

KEY = "ed25519:" + "A" * 43 + "="


def _config(tmp_path: Path, **more: object) -> RegionConfig:
    file = tmp_path / "region.yaml"
    body = {
        "apiVersion": "geofed/v1", "kind": "Region", "metadata": {"name": "oslo"}, "cloud": "test",
        "capacity": {"workers": 1}, **more,
    }  # fmt: skip
    file.write_text(json.dumps(body))
    return load_config(file)


def _task(*secrets: str, user: str = "ann") -> agent_pb2.TaskRef:
    return agent_pb2.TaskRef(secrets=secrets, submission=common_pb2.Submission(user=user))


class _Gateway:
    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}

    async def put_secret(self, name: str, value: bytes) -> None:
        self.held[name] = value

    async def list_secrets(self) -> tuple[str, ...]:
        return tuple(self.held)

    async def delete_secret(self, name: str) -> None:
        del self.held[name]


def test_only_named_users_read_a_secret(tmp_path: Path) -> None:
    config = _config(
        tmp_path,
        policy={"allowUsers": {"ann": KEY, "bob": KEY}},
        secrets={"token": {"file": "token", "users": ["ann"]}, "open": {"file": "open"}},
    )
    check_secrets(config, _task("token", "open"))
    check_secrets(config, _task("open", user="bob"))
    for task, code in ((_task("token", user="bob"), "FORBIDDEN"), (_task("other"), "SECRET_MISSING")):
        with pytest.raises(GeofedError) as raised:
            check_secrets(config, task)
        assert raised.value.code == code
    assert config.catalogue()["secrets"] == ["open", "token"]


@pytest.mark.parametrize(
    ("secrets", "more", "told"),
    [
        ({"token": {}}, {}, "`secrets.token.file` is missing"),
        ({"token": {"file": "t", "users": ["ann"]}}, {}, "policy.allowUsers"),
        ({"Token": {"file": "t"}}, {}, "Token"),
        ({"geofed-aws-access-key-id": {"file": "t"}}, {}, "geofed's own"),
    ],
)
def test_a_secret_that_cannot_be_given_is_an_error_in_the_region_file(
    tmp_path: Path, secrets: object, more: dict[str, object], told: str
) -> None:
    with pytest.raises(GeofedError, match=told) as raised:
        _config(tmp_path, secrets=secrets, **more)
    assert raised.value.code == "CONFIG_INVALID"


def test_values_are_read_when_they_are_given_and_bounded(tmp_path: Path) -> None:
    config, gateway = _config(tmp_path, secrets={"token": {"file": "token"}}), _Gateway()

    def give() -> Redaction:
        return asyncio.run(give_secrets(config, gateway, Owner(), "job", ["token"])).redact  # type: ignore[arg-type]

    for content, told in ((None, "No such file"), (b"", "is empty"), (b"x" * (65 << 10), "longer than 64 KiB")):
        if content is not None:
            (tmp_path / "token").write_bytes(content)
        with pytest.raises(GeofedError, match=told) as raised:
            give()
        assert raised.value.code == "SECRET_MISSING"
    (tmp_path / "token").write_text("first line\nab\nlast\n")
    redact = give()
    assert gateway.held == {"token": b"first line\nab\nlast\n"}
    assert redact("a first line, ab, and the last") == "a [secret token], ab, and the [secret token]"
    assert "first line" not in repr(redact)
    assert Redaction()("first line") == "first line"


def test_regions_and_jobs_that_share_a_platform_have_copies_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, given = _Gateway(), {}
    monkeypatch.setenv("OPENFAAS_SECRETS", str(tmp_path))
    owners = {name: Owner.of(name, b"key") for name in ("oslo", "bergen")}
    for region, job in (("oslo", "one"), ("oslo", "two"), ("bergen", "one")):
        (tmp_path / "value").write_text(f"{region} {job}\n")
        gateway_of_theirs = {"kind": "openfaas", "url": "http://127.0.0.1:1", "image": "i"}
        config = _config(tmp_path, gateway=gateway_of_theirs, secrets={"token": {"file": "value"}, "platform-own": {}})
        asked = give_secrets(config, gateway, owners[region], job, ["token", "platform-own"])  # type: ignore[arg-type]
        given[region, job] = asyncio.run(asked)
    for (region, job), one in given.items():
        assert one.names[1] == "platform-own"
        value = gateway.held[one.names[0]]
        assert value == f"{region} {job}\n".encode()
        # As the function has it: a file with the platform's name of it.
        (tmp_path / one.names[0]).write_bytes(value)
        monkeypatch.setenv("GEOFED_SECRETS", one.env["GEOFED_SECRETS"])
        assert geofed.secret("token") == f"{region} {job}"
        assert one.redact(f"it is {region} {job}") == "it is [secret token]"
    gateway.held["token"] = gateway.held["of-the-operator"] = b"not the agent's"
    asyncio.run(remove_secrets(gateway, owners["oslo"], "one"))  # type: ignore[arg-type]
    left = {"token", "of-the-operator", given["oslo", "two"].names[0], given["bergen", "one"].names[0]}
    assert set(gateway.held) == left
    asyncio.run(remove_secrets(gateway, Owner(), "one"))  # type: ignore[arg-type]
    assert set(gateway.held) == left


def test_what_was_approved_without_a_secret_waits_with_it(tmp_path: Path) -> None:
    approvals = Approvals(tmp_path, "first-run")
    assert approvals.waits("one", _task())
    approvals.approve("one")
    assert not approvals.waits("two", _task())
    assert approvals.waits("three", _task("token"))
    assert [pending.secrets for pending in approvals.pending()] == [["token"]]


def test_a_task_reads_its_secrets_in_a_plain_process_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("value\n")
    monkeypatch.setenv("OPENFAAS_SECRETS", str(tmp_path))
    assert geofed.secret("token") == "value"
    for name in ("other", "../token", ""):
        with pytest.raises(LookupError, match=r"add it to task\.secrets"):
            geofed.secret(name)
