"""What the functions of a job may use, and what a region does where it cannot isolate them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from geofed_pb import address
from geofed_pb.errors import GeofedError
from region_agent import doctor
from region_agent.config import RegionConfig
from region_agent.gateway.functions import FunctionSpec, Grants, Isolation
from region_agent.isolation import CONTAINER, SERVER_ADDRESS, grants_of, with_server
from region_agent.partition.channel import RegionChannel
from region_agent.policy import check_isolation
from region_agent.worker.invocation import ShardFile

SANDBOX = Isolation("bubblewrap")


def region(**more: Any) -> RegionConfig:
    fields = {
        "apiVersion": "geofed/v1", "kind": "Region", "metadata": {"name": "east"}, "cloud": "test",
        "capacity": {"workers": 2}, **more,
    }  # fmt: skip
    return RegionConfig.model_validate(fields)


def granted(folder: Path, uri: str = "s3://bucket/key", url: str = "", **more: Any) -> Grants:
    held = {"d": {"splits": {"train": {"uri": uri, "samples": 1}}}}
    config = region(datasets=held, **more)
    splits = {"train": (ShardFile(name="x", url=url),)} if url else None
    channel = RegionChannel(config.channel, folder / "channel", "east")
    return grants_of(config, channel, "job-1", config.datasets["d"], splits=splits)


def test_a_job_has_its_shard_and_its_part_of_the_channel(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "beside").write_text("x")
    (tmp_path / "blob").write_text("x")
    (tmp_path / "data" / "link").symlink_to(tmp_path / "blob")
    (tmp_path / "data" / "inside").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "broken").symlink_to("nowhere")
    found = granted(tmp_path, f"{tmp_path}/data/")
    assert found.read == (str(tmp_path / "data"), str(tmp_path / "blob"))
    assert found.write == (str(tmp_path / "channel" / "job-1"),)
    assert found.egress == {}
    assert granted(tmp_path, f"{tmp_path}/beside").read == (str(tmp_path / "beside"),)
    assert granted(tmp_path, f"{tmp_path}/missing").read == ()


@pytest.mark.parametrize(
    ("channel", "expected"),
    [
        ({"kind": "redis", "url": "redis://cache/0", "insecure": True}, ["cache:6379"]),
        ({"kind": "redis", "url": "rediss://[::1]:7000"}, ["[::1]:7000"]),
        (
            {
                "kind": "s3",
                "bucket": "tensors",
                "endpointUrl": "http://store:9000",
                "pathStyle": True,
                "insecure": True,
            },
            ["store:9000"],
        ),
        (
            {"kind": "s3", "bucket": "tensors", "endpointUrl": "https://store"},
            ["store:443", "tensors.store:443"],
        ),
        (
            {"kind": "s3", "bucket": "tensors", "region": "eu-central-1"},
            ["s3.eu-central-1.amazonaws.com:443", "tensors.s3.eu-central-1.amazonaws.com:443"],
        ),
    ],
)
def test_a_job_reaches_its_channel_and_its_store(tmp_path: Path, channel: dict[str, Any], expected: list[str]) -> None:
    found = granted(tmp_path, url="https://data.example:8443/key?signature=x", channel=channel)
    assert sorted(found.egress) == sorted([*expected, "data.example:8443"])
    assert all(inside == outside for inside, outside in found.egress.items())


def test_a_redis_server_behind_a_socket_and_credentials_of_a_bucket_are_files(tmp_path: Path) -> None:
    assert granted(tmp_path, channel={"kind": "redis", "url": "unix:///run/redis.sock"}).write == ("/run/redis.sock",)
    (tmp_path / "credentials").write_text("x")
    channel = {"kind": "s3", "bucket": "tensors", "workerCredentialsFile": str(tmp_path / "credentials")}
    assert granted(tmp_path, channel={**channel, "endpointUrl": "https://store"}).read == (
        str(tmp_path / "credentials"),
    )


def test_the_region_file_adds_addresses_or_gives_the_whole_network(tmp_path: Path) -> None:
    rules = [{"host": "proxy.example", "port": 3128}, {"host": "::1", "port": 80}]
    found = granted(tmp_path, functions={"network": {"egress": rules}})
    assert sorted(found.egress) == ["[::1]:80", "proxy.example:3128"]
    whole = granted(tmp_path, functions={"network": {"egress": rules, "hostNetwork": True}})
    assert whole.host_network
    assert not whole.egress


def test_the_parameter_server_has_one_address_in_every_sandbox(tmp_path: Path) -> None:
    before = with_server(granted(tmp_path), "")
    after = with_server(before, "127.0.0.1:41234")
    assert (before.egress, after.egress) == ({SERVER_ADDRESS: ""}, {SERVER_ADDRESS: "127.0.0.1:41234"})
    assert Grants.of(FunctionSpec("f", "image", annotations=after.annotations())) == after
    assert Grants.of(FunctionSpec("f", "image")) == Grants()


def test_a_region_that_requires_isolation_refuses_jobs_without() -> None:
    lacking = Isolation("none", "bubblewrap is not installed")
    with pytest.raises(GeofedError, match="region east runs job code in sandboxes only") as raised:
        check_isolation(region(), lacking)
    assert raised.value.code == "ISOLATION_UNAVAILABLE"
    assert "apt install bubblewrap" in raised.value.hint
    assert "user namespaces" in Isolation("none", "bwrap: No permissions to create new namespace").hint
    for isolation in (SANDBOX, CONTAINER):
        check_isolation(region(), isolation)
    for policy in ("prefer", "none"):
        check_isolation(region(policy={"isolation": policy}), lacking)


@pytest.mark.processes
@pytest.mark.parametrize("policy", ["require", "prefer", "none"])
def test_doctor_tries_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """Here on a machine without bubblewrap."""
    monkeypatch.setenv("PATH", str(tmp_path))
    checked = doctor._isolation(region(policy={"isolation": policy}))
    if policy == "require":
        with pytest.raises(GeofedError, match="bubblewrap is not installed") as raised:
            asyncio.run(checked)
        assert raised.value.code == "ISOLATION_UNAVAILABLE"
        return
    reason = "bubblewrap is not installed" if policy == "prefer" else "it is switched off"
    assert asyncio.run(checked) == f"none: {reason}"


def test_isolation_is_described() -> None:
    assert SANDBOX.text.startswith("bubblewrap: ")
    assert "no limit of processes" in Isolation("bubblewrap", limits_processes=False).text
    assert CONTAINER.text.startswith("container")
    assert Isolation("none", "it is switched off").text == "none: it is switched off"


@pytest.mark.parametrize("text", ["host", "host:", ":1", "host:x", "host:0", "host:65536", "::1:1:1:1:x:2"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError):
        address.split(text)


def test_addresses_are_split() -> None:
    assert address.split("[::1]:80") == ("::1", 80)
    assert address.split("host.example:443") == ("host.example", 443)
