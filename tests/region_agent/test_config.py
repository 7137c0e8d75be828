"""The region's file: every mistake is named with its line, and paths are taken from its folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2
from region_agent.capacity import preemptible_workers, set_preemptible_workers
from region_agent.cli import app
from region_agent.config import (
    DockerGateway,
    KubernetesGateway,
    OpenFaasGateway,
    RegionConfig,
    SplitConfig,
    json_schema,
    load_config,
)
from region_agent.policy import check_partition, longest_slice, most_workers

WHOLE = """\
apiVersion: geofed/v1
kind: Region
metadata: {name: east}
cloud: aws
capacity: {workers: 4, memoryMb: 1024}
datasets:
  digits:
    splits:
      train: {uri: data/train.npz, samples: 10}
      test: {uri: data/test/, samples: 2}
  far:
    store: minio
    splits:
      train: {uri: "s3://bucket/train/", samples: 5}
stores:
  minio: {endpointUrl: "http://127.0.0.1:9000"}
policy: {maxWorkersPerJob: 3}
"""


def _load(tmp_path: Path, text: str) -> RegionConfig:
    path = tmp_path / "region.yaml"
    path.write_text(text)
    return load_config(path)


def test_a_whole_file(tmp_path: Path) -> None:
    config = _load(tmp_path, WHOLE)
    assert config.name == "east"
    assert config.datasets["digits"].splits["train"].uri == str(tmp_path / "data/train.npz")
    assert config.datasets["digits"].splits["test"].uri == str(tmp_path / "data/test") + "/"
    assert config.datasets["far"].splits["train"].uri == "s3://bucket/train/"


def test_what_may_be_processed_elsewhere_is_told_with_its_size(tmp_path: Path) -> None:
    for rule, told in (("cloud", "cloud"), ("[west, north]", ("west", "north"))):
        text = WHOLE.replace("  digits:\n", f"  digits:\n    residency: {rule}\n")
        config = _load(tmp_path, text)
        assert config.datasets["digits"].residency == told
        digits, far = config.catalogue(sizes={"digits": {"train": 7}})["datasets"]
        assert digits["splits"] == {"train": {"samples": 10, "bytes": 7}, "test": {"samples": 2, "bytes": None}}
        assert far["residency"] == "region"
    with pytest.raises(GeofedError, match="residency"):
        _load(tmp_path, WHOLE.replace("  digits:\n", "  digits:\n    residency: [../west]\n"))
    with pytest.raises(GeofedError, match="residency"):
        _load(tmp_path, WHOLE.replace("  digits:\n", "  digits:\n    residency: nowhere\n"))


def test_a_minimum_count_holds_only_at_home(tmp_path: Path) -> None:
    config = _load(tmp_path, WHOLE.replace("  digits:\n", "  digits:\n    minimumCount: 5\n"))
    assert config.datasets["digits"].minimum_count == 5
    with pytest.raises(GeofedError, match="`minimumCount` requires `residency: region`"):
        _load(tmp_path, WHOLE.replace("  digits:\n", "  digits:\n    minimumCount: 5\n    residency: anywhere\n"))
    with pytest.raises(GeofedError, match="minimumCount"):
        _load(tmp_path, WHOLE.replace("  digits:\n", "  digits:\n    minimumCount: 1\n"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *(("  digits:\n", f"  digits:\n    {key}:\n") for key in ("privacy", "minimumCount", "allow", "residency")),
        *(("policy: {", f"policy: {{{key}: , ") for key in ("secureRegions", "allowUsers", "peerNetworks", "shipLogs")),
        ("policy: {", "secrets: {key: {file: k, users: }}\npolicy: {"),
    ],
)
def test_a_limit_without_a_value_is_not_taken_for_no_limit(tmp_path: Path, old: str, new: str) -> None:
    with pytest.raises(GeofedError) as raised:
        _load(tmp_path, WHOLE.replace(old, new))
    assert raised.value.code == "CONFIG_INVALID"


def test_data_with_a_budget_have_no_other_name(tmp_path: Path) -> None:
    budget = "    privacy: {epsilon: 1, delta: 1.0e-5}\n"
    again = "  same:\n    splits: {all: {uri: x/../data/test, samples: 2}}\nstores:"
    text = WHOLE.replace("  digits:\n", f"  digits:\n{budget}")
    _load(tmp_path, text)
    _load(tmp_path, WHOLE.replace("stores:", again))
    with pytest.raises(GeofedError, match=r"is no bound of .*data/test, which is also in datasets\.same") as told:
        _load(tmp_path, text.replace("stores:", again))
    assert told.value.code == "CONFIG_INVALID"
    with pytest.raises(GeofedError, match="which is also in datasets"):
        _load(tmp_path, text.replace("stores:", again.replace("  same:\n", f"  same:\n{budget}")))


def test_shards_are_taken_where_functions_see_them(tmp_path: Path) -> None:
    assert _load(tmp_path, WHOLE).catalogue()["takes_shards"]
    for old, new in (
        ("policy: {", "policy: {acceptShards: false, "),
        ("policy: {", "policy: {acceptJobs: false, "),
        ("policy: {", "gateway: {kind: openfaas, url: 'http://g', image: i}\npolicy: {"),
    ):
        config = _load(tmp_path, WHOLE.replace(old, new))
        assert not config.catalogue()["takes_shards"]
        command = _command()
        command.plan.shards.add(region="west", bytes=1)
        with pytest.raises(GeofedError) as raised:
            check_partition(config, command)
        assert raised.value.code == "FORBIDDEN"


@pytest.mark.parametrize(
    ("shards", "dataset", "code"),
    [
        (["west"], "digits", ""),
        (["west"], "other", ""),
        (["east", "west"], "digits", ""),
        (["east", "west"], "other", "SHARD_UNREADABLE"),
        (["west", "west"], "digits", "CONFIG_INVALID"),
        (["../west"], "digits", "CONFIG_INVALID"),
        (["/"], "digits", "CONFIG_INVALID"),
    ],
)
def test_other_regions_shards_are_taken_in_order(tmp_path: Path, shards: list[str], dataset: str, code: str) -> None:
    command = _command(task__dataset=dataset)
    for name in shards:
        command.plan.shards.add(region=name)
    if not code:
        check_partition(_load(tmp_path, WHOLE), command)
        return
    with pytest.raises(GeofedError) as raised:
        check_partition(_load(tmp_path, WHOLE), command)
    assert raised.value.code == code


LAMBDA = """\
gateway: {kind: lambda, image: 123456789012.dkr.ecr.eu-west-1.amazonaws.com/w:1,
          role: "arn:aws:iam::123456789012:role/w"}
"""
SCF = "gateway: {kind: scf, image: ccr.ccs.tencentyun.com/n/w:1, tencentRegion: ap-guangzhou}\n"
PRICES = """\
prices: {source: t, asOf: 2026-11, functionUsdPerGbSecond: 0.1, functionUsdPerRequest: 0, serverUsdPerHour: 1,
         egressUsdPerGb: 1%s}
"""


def test_preemptible_workers_have_a_price_and_a_place(tmp_path: Path) -> None:
    there = WHOLE.replace("memoryMb: 1024", "memoryMb: 1024, preemptible: 2")
    with pytest.raises(GeofedError, match="preemptibleUsdPerGbSecond` is missing"):
        _load(tmp_path, there + PRICES % "")
    told = there + PRICES % ", preemptibleUsdPerGbSecond: 0.02"
    config = _load(tmp_path, told)
    assert config.catalogue()["capacity"]["preemptible"] == 2
    assert config.catalogue(1)["capacity"]["preemptible"] == 1
    assert (most_workers(config), most_workers(config, preemptible=True)) == (3, 2)
    gateway = "gateway: {kind: openfaas, url: 'http://g', image: i%s}\n"
    with pytest.raises(GeofedError, match="preemptibleConstraints` is missing"):
        _load(tmp_path, told + gateway % "")
    _load(tmp_path, told + gateway % ", preemptibleConstraints: ['life=spot']")


@pytest.mark.parametrize("date", ["2026-11", "2026-11-05", "'2026-11-05'"])
def test_a_date_needs_no_quotes(tmp_path: Path, date: str) -> None:
    config = _load(tmp_path, WHOLE + (PRICES % "").replace("2026-11", date))
    assert config.prices is not None
    assert config.prices.as_of == date.strip("'")


@pytest.mark.parametrize("gpus", ["65", "0", "-1", "all", "1.5"])
def test_a_number_of_gpus_that_cannot_be_is_refused_before_it_is_stored(tmp_path: Path, gpus: str) -> None:
    with pytest.raises(GeofedError, match="is no number of GPUs") as raised:
        check_partition(_load(tmp_path, WHOLE), _command(task__gpus=gpus))
    assert raised.value.code == "CONFIG_INVALID"


def test_a_way_to_divide_a_model_that_is_not_known_is_refused_before_it_is_stored(tmp_path: Path) -> None:
    check_partition(_load(tmp_path, WHOLE), _command(task__sharding="fsdp"))
    with pytest.raises(GeofedError, match="unknown sharding 'zero'") as raised:
        check_partition(_load(tmp_path, WHOLE), _command(task__sharding="zero"))
    assert raised.value.code == "CONFIG_INVALID"


def test_devices_have_a_price_and_are_enough_for_the_workers(tmp_path: Path) -> None:
    there = WHOLE.replace("memoryMb: 1024", "memoryMb: 1024, devices: {kind: a GPU, count: %d}")
    told = PRICES % ", deviceUsdPerSecond: 0.001"
    with pytest.raises(GeofedError, match="deviceUsdPerSecond` is missing"):
        _load(tmp_path, there % 8 + PRICES % "")
    with pytest.raises(GeofedError, match=r"`capacity.devices.count` is 1 for . workers"):
        _load(tmp_path, there % 1 + told)
    config = _load(tmp_path, there % 8 + told)
    assert [config.worker_devices(gpus) for gpus in (1, 2, "auto")] == [1, 2, 8]
    devices = {"kind": "a GPU", "count": 8, "memory_mb": None, "of_function": None, "kept": 0}
    assert config.catalogue()["capacity"]["devices"] == devices
    spot = PRICES % ", deviceUsdPerSecond: 0.001, preemptibleUsdPerGbSecond: 0.1"
    kept = _load(tmp_path, there.replace("memoryMb", "preemptible: 3, memoryMb") % 8 + spot)
    assert [kept.worker_devices(gpus) for gpus in (1, 2, "auto")] == [1, 2, 5]
    there_now = kept.catalogue(preemptible=1)["capacity"]
    assert (there_now["preemptible"], there_now["devices"]["kept"]) == (1, 3), "a device may go with its worker"
    assert config.catalogue()["prices"]["device_usd_per_second"] == 0.001
    assert config.machine_devices == 8
    docker = config.model_copy(update={"gateway": DockerGateway(kind="docker", image="worker")})
    cluster = config.model_copy(update={"gateway": KubernetesGateway(kind="kubernetes", image="worker", gpus=2)})
    platform = config.model_copy(
        update={"gateway": OpenFaasGateway(kind="openfaas", url="http://faas", image="worker")}
    )
    assert [one.machine_devices for one in (docker, cluster, platform)] == [8, 0, 0], "a pod sees its own"
    plain = _load(tmp_path, WHOLE + PRICES % "")
    assert (plain.worker_devices("auto"), plain.machine_devices) == (0, 0)
    with pytest.raises(GeofedError, match=r"`capacity.devices` must be left out: functions of AWS Lambda have no GPU"):
        _load(tmp_path, there % 8 + told + LAMBDA)
    assert "device_usd_per_second" not in plain.catalogue()["prices"]


def test_the_catalogue_tells_the_limits_of_the_platform(tmp_path: Path) -> None:
    def limits(text: str) -> list[float | None]:
        config = _load(tmp_path, text)
        capacity = config.catalogue(slice_seconds=longest_slice(config))["capacity"]
        return [capacity[key] for key in ("slice_seconds", "least_memory_mb", "memory_step_mb")]

    assert limits(WHOLE) == [None, 1, 1]
    # 900 s, less two minutes for a step and waits, a start, and 15 s.
    assert limits(WHOLE + LAMBDA) == [585.0, 128, 1]
    assert limits(WHOLE + LAMBDA.replace("}", ", startSeconds: 30}")) == [735.0, 128, 1]
    assert limits(WHOLE + SCF) == [585.0, 128, 128]
    with pytest.raises(GeofedError, match="is 1000: Tencent Cloud SCF gives a function a multiple of 128 MB"):
        _load(tmp_path, WHOLE.replace("memoryMb: 1024", "memoryMb: 1000") + SCF)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("asOf: 2026-11", "asOf: 2026", "`prices.asOf` must be a string, but 2026 is a number: put it in quotes"),
        ("source: t", "source: 1.5", "`prices.source` must be a string, but 1.5 is a number: put it in quotes"),
        ("asOf: 2026-11", "asOf: 2026-11-05T10:00:00Z", "`prices.asOf`: string should match"),
        ("asOf: 2026-11", "asOf: 2026-13-45", "`prices.asOf`: '2026-13-45' is not a date"),
    ],
)
def test_what_is_no_text_is_told_to_be_put_in_quotes(tmp_path: Path, old: str, new: str, says: str) -> None:
    with pytest.raises(GeofedError) as raised:
        _load(tmp_path, WHOLE + (PRICES % "").replace(old, new))
    assert raised.value.code == "CONFIG_INVALID"
    assert says in raised.value.message


@pytest.mark.parametrize(
    ("uri", "ok"),
    [
        ("s3://b/k#1/?x", True), ("s3://b/", True), ("file:///d/x", True), ("a://b", False), ("cos://b/k", False),
        ("s3://b", False), ("s3:///k", False), ("data/a#b", True),
    ],
)  # fmt: skip
def test_addresses_of_shards_are_looked_at(uri: str, ok: bool) -> None:
    told = {"uri": uri, "samples": 1}
    if ok:
        assert SplitConfig.model_validate(told).uri == uri
    else:
        with pytest.raises(ValidationError):
            SplitConfig.model_validate(told)


def test_hosts_may_be_ipv6_addresses(tmp_path: Path) -> None:
    hosts = "advertise: '::1'\nserver: {exchangeHost: '::', workerHost: '[::1]'}\n"
    config = _load(tmp_path, WHOLE + hosts)
    assert (config.advertise, config.server.exchange_host, config.server.worker_host) == ("[::1]", "[::]", "[::1]")
    with pytest.raises(GeofedError, match=r"`advertise`: '10\.0\.0\.1:70' is neither a name nor an address"):
        _load(tmp_path, WHOLE + "advertise: 10.0.0.1:70\n")


def test_processes_of_one_machine_share_its_cores(tmp_path: Path) -> None:
    def cores(text: str) -> float:
        told: float = _load(tmp_path, text).catalogue()["capacity"]["cores"]
        return told

    openfaas = "gateway: {kind: openfaas, url: 'http://g', image: i}\n"
    assert cores(WHOLE) == len(os.sched_getaffinity(0))
    assert cores(WHOLE + openfaas) == 0
    stated = WHOLE.replace("memoryMb: 1024", "memoryMb: 1024, cores: 6")
    assert cores(stated) == cores(stated + openfaas) == 6


def test_how_many_are_left_is_said_in_a_file(tmp_path: Path) -> None:
    assert preemptible_workers(tmp_path, 4) == 4
    for said, left in ((2, 2), (9, 4), (0, 0)):
        set_preemptible_workers(tmp_path, said)
        assert preemptible_workers(tmp_path, 4) == left
    (tmp_path / "preemptible").write_text("some")
    assert preemptible_workers(tmp_path, 4) == 0, "what is not known is not used"


def test_the_catalogue_tells_no_path_and_no_store(tmp_path: Path) -> None:
    told = str(_load(tmp_path, WHOLE).catalogue())
    assert "digits" in told
    assert str(tmp_path) not in told
    assert "s3://" not in told
    assert "9000" not in told


def test_paths_are_taken_from_the_files_folder(tmp_path: Path) -> None:
    more = "channel: {path: shm}\ngateway: {kind: openfaas, url: 'http://g', image: i, userFile: u, passwordFile: /p}\n"
    config = _load(tmp_path, WHOLE + more)
    assert config.channel.path == tmp_path / "shm"
    assert config.gateway.kind == "openfaas"
    assert (config.gateway.user_file, config.gateway.password_file) == (tmp_path / "u", Path("/p"))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("cloud: aws", "cloud: ''", "region.yaml:4:8: `cloud`: string should have at least 1 character"),
        (
            "workers: 4",
            "workers: -1",
            "region.yaml:5:21: `capacity.workers`: input should be greater than or equal to 0",
        ),
        ("workers: 4", "workers: true", "region.yaml:5:21: `capacity.workers`: input should be a valid integer"),
        ("workers: 4", "workers: '4'", "region.yaml:5:21: `capacity.workers`: input should be a valid integer"),
        (
            "maxWorkersPerJob: 3",
            "maxWorkersPerJob: 0",
            "region.yaml:17:28: `policy.maxWorkersPerJob`: input should be greater than or equal to 1",
        ),
        (
            "samples: 10",
            "sample: 10",
            "region.yaml:9:36: unknown key `sample` in datasets.digits.splits.train; did you mean `samples`?",
        ),
        (
            ", samples: 10",
            "",
            "region.yaml:9:14: `datasets.digits.splits.train.samples` is required without a `format`",
        ),
        ("name: east", "name: ../east", "region.yaml:3:18: `metadata.name` must be a DNS label"),
        ("store: minio", "store: mini", "region.yaml:12:12: `datasets.far.store`: 'mini' is not in stores"),
        (
            "policy: {",
            "gateway: {kind: embedded, profil: ce}\npolicy: {",
            "region.yaml:17:27: unknown key `profil` in gateway; did you mean `profile`?",
        ),
        ("policy: {", "gateway: {kind: other}\npolicy: {", "region.yaml:17:10: `gateway`: input tag 'other'"),
        (
            "policy: {",
            "server: {ports: ['9', 12]}\npolicy: {",
            "region.yaml:17:18: `server.ports.0`: input should be a valid integer",
        ),
        (
            "policy: {",
            "server: {ports: [9, 9]}\npolicy: {",
            "region.yaml:17:17: `server.ports`: 9 to 9 has fewer than two ports",
        ),
        ("kind: Region", "kind: Regio", "region.yaml:2:7: `kind` must be 'Region', not 'Regio'; did you mean Region?"),
        ("capacity: {workers: 4, memoryMb: 1024}\n", "", "region.yaml:1:1: `capacity` is required"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert WHOLE.count(old) == 1
    with pytest.raises(GeofedError) as raised:
        _load(tmp_path, WHOLE.replace(old, new))
    assert raised.value.code == "CONFIG_INVALID"
    assert says in raised.value.message


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(GeofedError) as raised:
        _load(tmp_path, WHOLE.replace("workers: 4", "workers: -1").replace("cloud: aws", "clout: aws"))
    assert len(raised.value.message.splitlines()) == 3


@pytest.mark.parametrize("content", [b"", b"- a", b"a: [", b"\xff\xfe\x00", b"a: 1\na: 2\n"])
def test_what_is_no_region_file_is_told(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "region.yaml"
    path.write_bytes(content)
    with pytest.raises(GeofedError) as raised:
        load_config(path)
    assert raised.value.code == "CONFIG_INVALID"
    assert "region.yaml" in raised.value.message


@pytest.mark.slow
def test_the_schema_is_printed() -> None:
    printed = CliRunner().invoke(app, ["schema"])
    assert printed.exit_code == 0
    assert json.loads(printed.stdout) == json_schema()
    assert json_schema()["required"] == ["apiVersion", "kind", "metadata", "cloud", "capacity"]
    assert json_schema()["title"] == "geofed region"


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(GeofedError, match=r"there is no .*nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")


# The region's own word


def _command(**changed: object) -> agent_pb2.StartPartition:
    command = agent_pb2.StartPartition(
        job="job-1",
        region="east",
        task=agent_pb2.TaskRef(dataset="digits", bundle_digest="sha256:" + "a" * 64),
        plan=agent_pb2.PartitionPlan(workers=2, memory_mb=512, slice_seconds=30.0),
    )
    for path, value in changed.items():
        *parts, name = path.split("__")
        target = command
        for part in parts:
            target = getattr(target, part)
        setattr(target, name, value)
    return command


@pytest.mark.parametrize(
    ("secure", "regions", "text"),
    [
        (0.0, ("east", "north", "west"), "and the job has none"),
        (3.0, ("east", "north", "west"), "at least 4 regions, and the plan has 3 of more than a small share"),
        (3.0, ("east", "east", "north", "west"), "and the plan has 3 of more than a small share"),
        (0.0, ("east",), "and the job has none"),
        (3.0, ("east", "north", "south", "west"), ""),
    ],
)
def test_a_region_takes_only_jobs_that_mask_its_updates(
    tmp_path: Path, secure: float, regions: tuple[str, ...], text: str
) -> None:
    config = _load(tmp_path, WHOLE.replace("maxWorkersPerJob: 3", "maxWorkersPerJob: 3, secureRegions: 4"))
    command = _command()
    command.regions.extend(regions)
    command.plan.wan_settings["secure"] = secure
    command.plan.codec = "int8-masked"
    command.plan.shares.update(dict.fromkeys(regions, 1 / len(set(regions))))
    if not text:
        check_partition(config, command)
        return
    with pytest.raises(GeofedError, match="FORBIDDEN") as raised:
        check_partition(config, command)
    assert raised.value.message.endswith(text)


SHARES = {"east": 0.25, "north": 0.25, "south": 0.25, "west": 0.25}


@pytest.mark.parametrize(
    ("secure", "codec", "shares", "text"),
    [
        (0.5, "int8-masked", SHARES, "wan setting secure is 0.5"),
        (2.0, "int8-masked", SHARES, "wan setting secure is 2;"),
        (float("nan"), "int8-masked", SHARES, "wan setting secure is nan"),
        (3.0, "int8", SHARES, "and the job has none"),
        (3.0, "bogus", SHARES, "bogus"),
        (3.0, "int8-masked", {}, "shares of a plan are not those"),
        (3.0, "int8-masked", {**SHARES, "x": 0.1}, "shares of a plan are not those"),
        (3.0, "int8-masked", {**SHARES, "west": 0.0}, "the share of west is 0.0"),
        (3.0, "int8-masked", {**SHARES, "west": -1.0}, "the share of west is -1.0"),
        (3.0, "int8-masked", {**SHARES, "west": float("inf")}, "the share of west is inf"),
        (3.0, "int8-masked", {**SHARES, "west": float("nan")}, "the share of west is nan"),
        (3.0, "int8-masked", {**SHARES, "west": 0.01}, "the plan has 3 of more than a small share"),
        (3.0, "int8-masked", {"east": 1.0, "north": 1e-9, "south": 1e-9, "west": 1e-9}, "the plan has 1 of more"),
        (3.0, "int8-masked", {**SHARES, "west": 0.03}, ""),
    ],
)
def test_a_plan_that_would_not_hide_updates_is_refused(
    tmp_path: Path, secure: float, codec: str, shares: dict[str, float], text: str
) -> None:
    config = _load(tmp_path, WHOLE.replace("maxWorkersPerJob: 3", "maxWorkersPerJob: 3, secureRegions: 4"))
    command = _command(plan__codec=codec)
    command.regions.extend(SHARES)
    command.plan.wan_settings["secure"] = secure
    command.plan.shares.update(shares)
    if not text:
        check_partition(config, command)
        return
    with pytest.raises(GeofedError) as raised:
        check_partition(config, command)
    assert raised.value.code in ("FORBIDDEN", "CONFIG_INVALID")
    assert text in raised.value.message


def test_a_plan_within_the_rules_is_taken(tmp_path: Path) -> None:
    check_partition(_load(tmp_path, WHOLE), _command())


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"region": "west"}, "RESIDENCY_VIOLATION"),
        ({"task__dataset": "other"}, "SHARD_UNREADABLE"),
        ({"plan__workers": 4}, "FORBIDDEN"),
        ({"plan__memory_mb": 2048}, "FORBIDDEN"),
        ({"plan__slice_seconds": 0.0}, "LIMIT_EXCEEDED"),
        ({"plan__slice_seconds": 3600.0}, "LIMIT_EXCEEDED"),
        ({"plan__slice_seconds": float("nan")}, "LIMIT_EXCEEDED"),
        ({"job": "../../etc"}, "CONFIG_INVALID"),
        ({"job": ""}, "CONFIG_INVALID"),
        ({"task__bundle_digest": "sha256:../../../etc/shadow"}, "CONFIG_INVALID"),
    ],
)
def test_what_the_region_does_not_let_be_is_refused(tmp_path: Path, changed: dict[str, object], code: str) -> None:
    with pytest.raises(GeofedError) as raised:
        check_partition(_load(tmp_path, WHOLE), _command(**changed))
    assert raised.value.code == code


def test_a_region_may_take_no_jobs(tmp_path: Path) -> None:
    config = _load(tmp_path, WHOLE.replace("maxWorkersPerJob: 3", "acceptJobs: false"))
    with pytest.raises(GeofedError, match="takes no jobs"):
        check_partition(config, _command())
