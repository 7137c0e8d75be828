"""The job file: what is taken, and how each mistake is told."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import tarfile
import textwrap
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane._advanced import as_stored, as_written
from control_plane._durations import format_duration, parse_duration
from control_plane.core import SendStart
from control_plane.service.rpc._wire import command_of
from control_plane.spec import check_task, json_schema, load, pack, packed_code_digest, parse_json, to_demand
from control_plane.spec.sections import PROBED_BATCH
from control_plane.store import JobRow
from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2
from scheduler import ClientDemand, Plan, Snapshot, plan
from tests.control_plane.conftest import JOB
from tests.control_plane.fake_agent import catalogue

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def errors_of(path: Path, text: str, *overrides: str) -> list[str]:
    path.write_text(text)
    with pytest.raises(GeofedError) as caught:
        load(path, overrides)
    assert caught.value.code == "SPEC_INVALID"
    return [line.replace(str(path), "F") for line in caught.value.message.splitlines()]


def test_a_good_file_is_normalised(job_file: Path) -> None:
    loaded = load(job_file, ["wan.interval=5", "regions.use=[b, a]", "objective.deadline=2h"])
    assert parse_json(loaded.json) == loaded.spec
    assert json.loads(loaded.json)["function"] == {"memoryMb": "auto", "gpus": 1, "sharding": "none", "slice": "auto"}
    assert loaded.folder == job_file.parent
    demand = to_demand(loaded.spec, "j", NOW)
    assert (demand.interval, demand.use, demand.deadline_seconds, demand.steps) == (5, ("b", "a"), 7200.0, 4)
    assert (demand.workers, demand.codec, demand.epochs) == (None, None, None)
    assert load(job_file).digest == load(job_file).digest != loaded.digest


def test_values_keep_their_types(job_file: Path) -> None:
    text = JOB.replace("{width: 8}", "{a: no, b: 1e3, c: null, d: 0x10, e: [1.5, true], f: 2030-01-01}")
    job_file.write_text(text)
    config = load(job_file).spec.task.config
    assert config == {"a": "no", "b": 1000.0, "c": None, "d": 16, "e": [1.5, True], "f": "2030-01-01"}
    assert parse_json(load(job_file).json).task.config == config


def test_all_errors_are_told_at_their_places(job_file: Path) -> None:
    text = """\
apiVersion: geofed/v1
kind: TrainingJob
metadata: {name: Digits}
task: {module: ../task.py}
data: {dataset: digits}
train:
  bacth: 10
  end: {steps: 4, epochs: 1}
wan:
  codec: gzip
function: {slice: 11m}
"""
    assert errors_of(job_file, text) == [
        "F:3:18: `metadata.name` must be a DNS label (lower-case letters, digits, hyphens), not 'Digits'",
        "F:4:16: `task.module`: give the path of a .py file in the job file's folder",
        "F:6:1: `train.batch` is required",
        "F:7:3: unknown key `bacth` in train; did you mean `batch`?",
        "F:8:8: `train.end`: give exactly one of `epochs` and `steps`",
        "F:10:10: `advanced.wan.codec` must be 'auto', 'fp32', 'bf16', 'int8', 'ternary' or 'topk', not 'gzip'",
        "F:11:19: `function.slice`: give a duration of at most 10m",
    ]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("batch: 10", "batch: '10'"), "F:6:16: `train.batch`: must be `auto` or a positive integer"),
        (("batch: 10", "batch: 10, batch: 11"), "F:6:20: duplicate key `batch`; first used in line 6"),
        (("interval: 2", "interval: 0"), "F:7:28: `advanced.wan.interval`: must be `auto` or a positive integer"),
        (
            ("batch: 10", "batch: 10, workers: {a: 0}"),
            "F:6:29: `train.workers`: must be `auto`, a positive integer, or",
        ),
        (
            (
                "batch: 10, end: {steps: 4}}\nadvanced: {wan: {interval: 2}}",
                "batch: 9, balance: speed, end: {steps: 4}}\nadvanced: {wan: {interval: 1}}",
            ),
            "F:1:1: `train.balance: speed` requires rounds of several steps",
        ),
        (("batch: 10", "batch: 10, clipNorm: 0"), "F:6:30: `train.clipNorm`: input should be greater than 0"),
        (
            (
                "batch: 10, end: {steps: 4}}",
                "batch: 10, clipNorm: 1.0, end: {steps: 4}}\nparallelism: {pipeline: {stages: 2}}",
            ),
            "F:1:1: `train.clipNorm` cannot be used with a pipeline",
        ),
        (("batch: 10", "batch: 10, precision: half"), "F:6:31: `train.precision` must be 'fp32', 'bf16' or 'fp16'"),
        (("batch: 10", "batch: 10, accumulate: 0"), "F:6:32: `train.accumulate`: input should be greater than or"),
        (("batch: 10", "batch: 10, accumulate: 11"), "F:6:8: `train`: `accumulate: 11` is more than the `batch` of 10"),
        *(
            (
                ("batch: 10, end: {steps: 4}}", f"batch: 10, {key}, end: {{steps: 4}}}}\n{rest}"),
                f"F:1:1: `train.{told}",
            )
            for key, rest, told in (
                ("precision: bf16", "parallelism: {pipeline: {}}", "precision: bf16` cannot be used with a pipeline"),
                ("accumulate: 2", "parallelism: {pipeline: {}}", "accumulate` cannot be used with a pipeline"),
                (
                    "precision: fp16",
                    "collective: isp",
                    "precision: fp16` cannot be used with `advanced.collective: isp`",
                ),
                (
                    "precision: fp16",
                    "collective: k-reduce\nmerge: {staleness: 1}",
                    "precision: fp16` cannot be used with `advanced.merge.staleness`",
                ),
                (
                    "precision: fp16",
                    "collective: all-reduce\nmerge: {codec: bf16}",
                    "precision: fp16` cannot be used with `advanced.merge.codec: bf16`",
                ),
            )
        ),
        (("interval: 2", "byzantine: 1"), "F:7:17: `advanced.wan`: `byzantine` requires `robust`"),
        (("interval: 2", "quarantine: 0"), "F:7:17: `advanced.wan`: `quarantine` requires `robust`"),
        (("interval: 2", "robust: average"), "F:7:26: `advanced.wan.robust` must be 'none', 'centered-clipping'"),
        (
            ("interval: 2", "robust: median, policy: asgd-ga"),
            "F:7:17: `advanced.wan`: `robust` requires a policy that averages; `policy: asgd-ga` adds the updates that",
        ),
        (
            ("interval: 2", "robust: median, policy: fednova"),
            "F:7:17: `advanced.wan`: `robust` cannot be used with `policy: fednova`",
        ),
        (
            ("interval: 2", "robust: centered-clipping, fragments: 2"),
            "F:7:17: `advanced.wan`: `fragments` cannot be used with `robust: centered-clipping`, which starts from",
        ),
        (
            ("interval: 2", "robust: median, quorum: 2"),
            "F:7:17: `advanced.wan`: `quorum` cannot be used with `robust: median`, which merges the same round of all",
        ),
        (
            ("interval: 2", "robust: krum, exchange: background, staleness: damping"),
            "F:7:17: `advanced.wan`: `staleness` cannot be used with `robust: krum`, which merges the same round of",
        ),
        (
            ("interval: 2", "policy: fedprox, outer: {mu: 0}"),
            "F:7:17: `advanced.wan`: outer mu 0.0 must be in (0, 100]",
        ),
        (
            (
                "batch: 10, end: {steps: 4}}\nadvanced: {wan: {interval: 2}}",
                "batch: 10, end: {steps: 4}}\nadvanced: {wan: {policy: fedprox}}\nparallelism: {pipeline: {stages: 2}}",
            ),
            "F:1:1: `advanced.wan.policy: fedprox` cannot be used with a pipeline",
        ),
        (("lostRegion: 2s", "lostRegion: 2"), "F:8:22: `limits.lostRegion`: must be a duration like 30s, 10m or 1h30m"),
        (("lostRegion: 2s", "lostRegion: 2x"), "F:8:22: `limits.lostRegion`: '2x' is not a valid duration"),
        (("{width: 8}", "{width: .nan}"), "F:4:33: `task.config`: numbers must be finite"),
        (("{width: 8}", "&a {width: *a}"), "F:4:33: an alias (`*name`) stands in the value that it repeats"),
        (("{width: 8}", "!!python/object:os.system {}"), "F:4:33: tags are not supported"),
        (
            ("kind: TrainingJob", "kind: TrainingJob\nprivacy:\n  differential:"),
            "F:4:3: `privacy.differential` has no value: give one, or remove the key",
        ),
        (("kind:", "kind"), "F:3:1: could not find expected"),
        (("geofed/v1", "geofed/v2"), "F:1:13: `apiVersion` must be 'geofed/v1', not 'geofed/v2'; did you mean"),
    ],
)
def test_each_mistake_has_its_sentence(job_file: Path, change: tuple[str, str], told: str) -> None:
    assert errors_of(job_file, JOB.replace(*change))[0].startswith(told)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["privacy.minRegions=4"], "`minRegions` requires `secureAggregation: true`"),
        (["privacy.minRegions=3"], "`minRegions` requires `secureAggregation: true`"),
        (["privacy.minRegions=3", "privacy.secureAggregation=false"], "`minRegions` requires"),
        (["privacy.minRegions=2", "privacy.secureAggregation=true"], "`privacy.minRegions`: input should be greater"),
        (["wan.policy=asgd-ga"], "`advanced.wan.policy: asgd-ga`, which needs each region's update"),
        (["wan.exchange=background"], "`advanced.wan.exchange: background`"),
        (["wan.quorum=2"], "`advanced.wan.quorum`"),
        (["wan.staleness=damping"], "`advanced.wan.staleness: damping`, which looks at each update"),
        (["wan.robust=median"], "`advanced.wan.robust: median`, which looks at each update"),
        (["wan.guard=7"], "`advanced.wan.guard`, which looks at each update"),
        (["wan.fragments=2"], "`advanced.wan.fragments`"),
        (
            ["wan.codec=topk"],
            "`advanced.wan.codec: topk`: what it sends tells which coordinates change; use fp32, bf16, int8",
        ),
        (["wan.codec=ternary"], "`advanced.wan.codec: ternary`"),
        (["regions.use=[a, b]"], "2 regions in `regions.use`: `privacy.minRegions` is 3"),
    ],
)
def test_what_secure_aggregation_cannot_hide_is_refused(job_file: Path, settings: list[str], told: str) -> None:
    secure = [] if settings[0].startswith("privacy") else ["privacy.secureAggregation=true"]
    (error,) = errors_of(job_file, JOB, *settings, *secure)
    assert told in error
    assert not secure or "`privacy.secureAggregation` cannot be used with" in error


def test_a_secure_job_waits_and_is_planned_with_a_masked_codec(job_file: Path) -> None:
    for codec, masked in (("auto", None), ("int8", "int8-masked"), ("fp32", "fp32-masked")):
        spec = load(job_file, ["privacy.secureAggregation=true", f"wan.codec={codec}"]).spec
        demand = to_demand(spec, "j", NOW)
        assert (demand.exchange, demand.codec) == ("synchronous", masked)
        assert demand.wan_settings["secure"] == 3.0
    with pytest.raises(GeofedError, match="must be"):
        load(job_file, ["wan.codec=int8-masked"])


PRIVATE = "privacy.differential={level: sample, epsilon: 3, delta: 1e-5, clipNorm: 1}"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["wan.policy=asgd-ga"], "`advanced.wan.policy: asgd-ga`, which gives out changes under way"),
        (["wan.exchange=background"], "`advanced.wan.exchange: background`: workers continue from a model without"),
        (["wan.exchange=background", "wan.quorum=2"], "`advanced.wan.exchange: background`"),
        (["train.scaling=same-steps"], "`train.scaling"),
        (["data.residency=anywhere"], "`data.residency` other than `region`"),
        (["parallelism={pipeline: {stages: 2}}"], "a pipeline"),
        (["privacy.secureAggregation=true", "wan.codec=int8"], "`secureAggregation` and `advanced.wan.codec: int8`"),
        (["train.precision=bf16"], "`privacy.differential.level: sample` cannot be used with `train.precision: bf16`"),
        (["collective=isp"], "`privacy.differential.level: sample` cannot be used with `advanced.collective: isp`"),
        (["collective=k-reduce", "merge.codec=bf16"], "cannot be used with `advanced.merge.codec: bf16`"),
        (["collective=k-reduce", "merge.staleness=1"], "cannot be used with `advanced.merge.staleness`"),
        (["privacy.differential.noiseMultiplier=1"], "give exactly one of `epsilon` and `noiseMultiplier`"),
        (["privacy.differential.epsilon=0"], "`privacy.differential.epsilon`: input should be greater than 0"),
        (["privacy.differential.delta=1"], "`privacy.differential.delta`: input should be less than 1"),
        (["privacy.differential.clipNorm=0"], "`privacy.differential.clipNorm`: input should be greater than 0"),
        (["privacy.differential.level=user"], "privacy.differential.level"),
        (["privacy.differential.clipNorm=null"], "`privacy.differential.clipNorm` is required"),
    ],
)
def test_what_noise_cannot_be_used_with_is_refused(job_file: Path, settings: list[str], told: str) -> None:
    (error,) = errors_of(job_file, JOB, PRIVATE, *settings)
    assert told in error


def test_a_private_job_waits_and_its_sums_are_not_rounded(job_file: Path) -> None:
    demand = to_demand(load(job_file, [PRIVATE]).spec, "j", NOW)
    assert (demand.exchange, demand.codec, demand.parallelism) == ("synchronous", None, "whole")
    demand = to_demand(load(job_file, [PRIVATE, "privacy.secureAggregation=true"]).spec, "j", NOW)
    assert demand.codec == "fp32-masked"
    of_regions = PRIVATE.replace("sample", "region")
    assert load(job_file, [of_regions, "train.precision=bf16", "collective=isp"]).spec.privacy.differential is not None


CLIENTS = "clients={fraction: 0.2, min: 3}"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["parallelism={pipeline: {}}"], "`clients` cannot be used with a pipeline"),
        (["train.precision=fp16"], "`clients` cannot be used with `train.precision: fp16`"),
        (["train.balance=speed"], "`clients` cannot be used with `train.balance: speed`"),
        (["collective=isp"], "`clients` cannot be used with `advanced.collective: isp`"),
        (["collective=k-reduce", "merge.staleness=1"], "`clients` cannot be used with `advanced.merge.staleness`"),
        (["wan.exchange=background"], "`clients` cannot be used with `advanced.wan.exchange: background`"),
        (["wan.quorum=2"], "`clients` cannot be used with `advanced.wan.quorum`"),
        (["wan.grace=5s"], "`clients` cannot be used with `advanced.wan.grace`"),
        (["wan.staleness=damping"], "`clients` cannot be used with `advanced.wan.staleness: damping`"),
        (["wan.policy=asgd"], "`clients` cannot be used with `advanced.wan.policy: asgd`"),
        (["wan.policy=fednova"], "`clients` cannot be used with `advanced.wan.policy: fednova`"),
        (
            ["privacy.differential={level: sample, epsilon: 3, delta: 1e-5, clipNorm: 1}"],
            "`clients` cannot be used with `privacy.differential.level: sample`",
        ),
        (["clients.fraction=0"], "`clients.fraction`: input should be greater than 0"),
        (["clients={epochs: 1, steps: 2}"], "give either `epochs` or `steps`"),
    ],
)
def test_what_clients_cannot_be_used_with_is_refused(job_file: Path, settings: list[str], told: str) -> None:
    (error,) = errors_of(job_file, JOB, CLIENTS, "wan={}", *settings)
    assert told in error


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["clients={fraction: 0.5}"], "`train.end.steps: 0` trains nothing, and cannot be used with `clients`"),
        (
            ["privacy.differential={level: region, epsilon: 3, delta: 1e-5, clipNorm: 1}"],
            "`privacy.differential.level: region`; with `level: sample` the counts of its histograms have noise",
        ),
        (
            ["privacy.differential={level: sample, epsilon: 3, delta: 1e-5, clipNorm: 1}"],
            "`privacy.differential.clipNorm` is of what is trained",
        ),
        (["train.precision=fp16"], "cannot be used with `train.precision: fp16`"),
        (["parallelism={pipeline: {}}"], "cannot be used with a pipeline"),
        (["train.end.time=5m"], "it has no `goal`, `patience` or `time`"),
    ],
)
def test_what_an_evaluation_cannot_be_used_with_is_refused(job_file: Path, settings: list[str], told: str) -> None:
    (error,) = errors_of(job_file, JOB, "train.end={steps: 0}", "advanced={}", *settings)
    assert told in error


def test_a_batch_may_be_left_to_the_plan(job_file: Path) -> None:
    loaded = load(job_file, ["train.batch=auto", "train.end={epochs: 2}"])
    assert json.loads(loaded.json)["train"]["batch"] == "auto"
    demand = to_demand(loaded.spec, "j", NOW)
    assert (demand.batch, demand.chooses_batch, demand.parallelism) == (PROBED_BATCH, True, "auto")
    given = to_demand(load(job_file).spec, "j", NOW)
    assert (given.batch, given.chooses_batch, given.parallelism) == (10, False, "auto")


@pytest.mark.parametrize(
    ("setting", "divides"),
    [
        ("train.workers=auto", True),
        ("advanced.collective=k-reduce", True),
        ("train.workers=2", False),
        ("train.batch=auto", False),
        ("objective.method=greedy", False),
        ("advanced.collective=isp", False),
        ("clients={fraction: 0.5}", False),
        ("function={gpus: 2, memoryMb: 1024}", False),
    ],
)
def test_workers_divide_a_batch_where_the_plan_chooses_them_and_each_step_learns_the_same(
    job_file: Path, setting: str, *, divides: bool
) -> None:
    loaded = load(job_file, ["train.end={epochs: 2}", "train.workers=auto", setting])
    assert to_demand(loaded.spec, "j", NOW).divides_batch == divides


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["train.end={steps: 4}"], "`train.end.steps`, which are of a given batch: use `train.end.epochs`"),
        (["train.end={steps: 0}", "advanced={}"], "`train.end.steps`"),
        ([CLIENTS, "wan={}"], "`clients`"),
        (["parallelism={pipeline: {stages: 2}}"], "a pipeline"),
        (
            ["privacy.differential={level: sample, epsilon: 8, delta: 1e-5, clipNorm: 1.0}"],
            "`privacy.differential.level: sample`",
        ),
        (
            ["train.scaling=tuned", "train.end.goal={metric: loss, atMost: 0.1}", "train.evaluateEvery=1"],
            "`train.scaling: tuned`",
        ),
        (["train.accumulate=2"], "`train.accumulate`"),
        (["function={gpus: 2, memoryMb: 4096}"], "`function.gpus: 2`"),
        (["objective.method=greedy"], "`objective.method: greedy`"),
    ],
)
def test_what_a_batch_cannot_be_left_to_the_plan_with(job_file: Path, settings: list[str], told: str) -> None:
    found = errors_of(job_file, JOB, "train.batch=auto", "train.end={epochs: 2}", *settings)
    assert any(f"`train.batch: auto` cannot be used with {told}" in error for error in found), found


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["parallelism={pipeline: {stages: 2}}"], "`function.gpus: 2` cannot be used with a pipeline"),
        ([CLIENTS, "wan={}"], "`function.gpus: 2` cannot be used with `clients`"),
        (
            ["privacy.differential={level: sample, epsilon: 8, delta: 1e-5, clipNorm: 1.0}"],
            "`function.gpus: 2` cannot be used with `privacy.differential.level: sample`",
        ),
        (["train.end={steps: 0}", "advanced={}"], "`function.gpus: 2` cannot be used with `train.end.steps: 0`"),
        (["train.batch=1"], "`function.gpus: 2` cannot divide a `train.batch` of 1 samples"),
        (["function.memoryMb=auto"], "`function.gpus: 2` requires `function.memoryMb`"),
        (["function.gpus=0"], "`function.gpus`: input should be greater than or equal to 1"),
        (["function.gpus=65"], "`function.gpus`: input should be less than or equal to 64"),
        (["function.gpus=some"], "`function.gpus` must be"),
    ],
)
def test_what_several_gpus_cannot_be_used_with_is_refused(job_file: Path, settings: list[str], told: str) -> None:
    found = errors_of(job_file, JOB, "function={gpus: 2, memoryMb: 4096}", *settings)
    assert any(told in error for error in found), found


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["function.gpus=1"], "`function.sharding: fsdp` divides a model among the GPUs of a worker"),
        (["train.compile=true"], "cannot be used with `train.compile`"),
        (["train.precision=fp16"], "cannot be used with `train.precision: fp16`"),
        (
            [
                "train.scaling=tuned",
                "train.end={epochs: 5, goal: {metric: loss, atMost: 0.4}}",
                "train.evaluateEvery=1",
            ],
            "cannot be used with `train.scaling: tuned`",
        ),
        (["objective.method=fasdl"], "cannot be used with `objective.method`"),
        (["advanced={wan: {policy: fedprox}}"], "cannot be used with `advanced.wan.policy: fedprox`"),
        (["train.workers=2"], "`function.sharding: fsdp` requires `train.workers: 1`"),
        (["train.workers=auto"], "`function.sharding: fsdp` requires `train.workers: 1`"),
        (["train.workers={a: 1, b: 2}"], "`function.sharding: fsdp` requires `train.workers: 1`"),
        (["parallelism={pipeline: {stages: 2}}"], "cannot be used with a pipeline"),
        ([CLIENTS, "wan={}"], "cannot be used with `clients`"),
        (["function.sharding=zero"], "`function.sharding`"),
    ],
)
def test_what_a_divided_model_cannot_be_used_with_is_refused(job_file: Path, settings: list[str], told: str) -> None:
    shards = "function={gpus: 2, memoryMb: 4096, sharding: fsdp}"
    found = errors_of(job_file, JOB, shards, "train.workers=1", *settings)
    assert any(told in error for error in found), found


def test_a_divided_model_is_planned_with_one_worker_a_region(job_file: Path) -> None:
    spec = load(job_file, ["function={gpus: 2, memoryMb: 4096, sharding: fsdp}", "train.workers=1"]).spec
    demand = to_demand(spec, "j", NOW)
    assert (demand.sharded, demand.workers, demand.parallelism) == (True, 1, "whole")


def test_several_gpus_are_of_one_worker(job_file: Path) -> None:
    for gpus in (2, "auto"):
        spec = load(job_file, [f"function={{gpus: {gpus}, memoryMb: 4096}}", "train.precision=fp16"]).spec
        assert spec.function.gpus == gpus
        assert to_demand(spec, "j", NOW).memory_mb == 4096


def test_an_evaluation_is_planned_as_one_step(job_file: Path) -> None:
    spec = load(job_file, ["train.end={steps: 0}"]).spec
    demand = to_demand(spec, "j", NOW)
    assert (spec.evaluates_only, spec.train.end.steps) == (True, 0)
    assert (demand.steps, demand.parallelism) == (1, "data")


def test_a_task_that_trains_nothing_needs_no_model(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("def metrics(model, batches): ...\n")
    check_task(tmp_path, "task.py", evaluates_only=True)
    with pytest.raises(GeofedError, match="defines no model, no loss"):
        check_task(tmp_path, "task.py")
    (tmp_path / "task.py").write_text("def model(config): ...\n")
    with pytest.raises(GeofedError, match="defines no metrics"):
        check_task(tmp_path, "task.py", evaluates_only=True)


def test_a_job_with_clients_waits_and_exchanges_after_each_of_their_rounds(job_file: Path) -> None:
    demand = to_demand(load(job_file, [CLIENTS, "wan={}"]).spec, "j", NOW)
    assert (demand.exchange, demand.interval, demand.parallelism) == ("synchronous", 1, "whole")
    assert (demand.clients, demand.local) == (ClientDemand(0.2, 3, 1, 0), False)
    settings = ["clients.steps=7", "wan={interval: 4}", "train.accumulate=2", "train.local=['head.*']"]
    demand = to_demand(load(job_file, [CLIENTS, *settings, "privacy.secureAggregation=true"]).spec, "j", NOW)
    assert (demand.interval, demand.clients, demand.local) == (4, ClientDemand(0.2, 3, 1, 7), True)


def test_an_empty_section_of_methods_is_one_without_keys(job_file: Path) -> None:
    below = JOB.replace("advanced: {wan: {interval: 2}}", "wan: {interval: 7}\nadvanced:")
    assert below != JOB
    job_file.write_text(below)
    assert load(job_file, ["wan.codec=int8"]).spec.wan.interval == 7
    job_file.write_text(JOB.replace("advanced: {wan: {interval: 2}}", "advanced:"))
    assert load(job_file).spec.wan.interval == "auto"


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("wam: {interval: 2}", "F:7:1: unknown key `wam` in the file; did you mean `advanced.wan`?"),
        ("WAN: {interval: 2}", "F:7:1: unknown key `WAN` in the file; did you mean `advanced.wan`?"),
        ("advanced: {WAN: {interval: 2}}", "F:7:12: unknown key `WAN` in advanced; did you mean `wan`?"),
    ],
)
def test_a_misspelt_method_is_told_with_its_place(job_file: Path, written: str, told: str) -> None:
    assert errors_of(job_file, JOB.replace("advanced: {wan: {interval: 2}}", written)) == [told]


def test_the_same_key_in_two_forms_is_refused(job_file: Path) -> None:
    told = "--set advanced.wan.interval=6: wan.interval is the same key, and is set as well; keep one"
    assert errors_of(job_file, JOB, "wan.interval=5", "advanced.wan.interval=6") == [told]
    (spelt,) = errors_of(job_file, JOB, "objective.minimise=cost", "objective.minimize=time")
    assert "objective.minimise is the same key" in spelt
    job_file.write_text(JOB)
    assert load(job_file, ["wan.interval=5", "wan.interval=6"]).spec.wan.interval == 6


def test_overrides_are_told_as_such(job_file: Path) -> None:
    assert errors_of(job_file, JOB, "regions.usee=[a]") == [
        "--set regions.usee=[a]: unknown key `usee` in regions; did you mean `use`?"
    ]
    (told,) = errors_of(job_file, JOB, "train.keep=all", "train.seed=1", "train.keep=best", "regions.use=[a]")
    assert told.startswith("--set train.keep=best --set train.seed=1: `train`: `keep` requires `evaluateEvery`")
    assert errors_of(job_file, JOB, "nothing") == ["--set nothing: write it as key.key=value"]
    assert errors_of(job_file, JOB, "kind.x=1") == ["--set kind.x=1: kind has no keys"]


def test_codecs_of_merges_go_with_collectives(job_file: Path) -> None:
    for collective in ("k-reduce", "isp"):
        for codec in ("bf16", "fp8", "int4"):
            loaded = load(job_file, [f"collective={collective}", f"merge.codec={codec}"])
            assert to_demand(loaded.spec, "j", NOW).merging_codec == codec
    (told,) = errors_of(job_file, JOB, "collective=isp", "merge.codec=int8")
    assert "`merge.codec: int8` cannot be used with `collective: isp`; it takes fp32, bf16, fp8, int4" in told


def test_variables_of_a_task_have_names_and_text(job_file: Path) -> None:
    assert load(job_file, ["task.env={MODE: fast, _x1: ''}"]).spec.task.env == {"MODE": "fast", "_x1": ""}
    for wrong, says in (
        ("{A=B: x}", "'A=B' is no name of an environment variable"),
        ("{1A: x}", "'1A' is no name of an environment variable"),
        ("{N: 3}", "task.env"),
    ):
        (told,) = errors_of(job_file, JOB, f"task.env={wrong}")
        assert says in told


def test_a_section_is_a_mapping(job_file: Path) -> None:
    told = {
        "train.initialModel=digits-1": (
            "`train.initialModel` must be a mapping with the keys job, round, file, uri, digest, partial, adapter"
        ),
        "train.end=[4]": "`train.end` must be a mapping with the keys epochs, steps, goal, patience, time",
        "task.config=3": "`task.config` must be a mapping",
    }
    for setting, text in told.items():
        assert errors_of(job_file, JOB, setting) == [f"--set {setting}: {text}"]


def test_deadlines_are_durations_or_times(job_file: Path) -> None:
    objective = "objective.deadline=2030-01-01T02:00:00+01:00"
    assert to_demand(load(job_file, [objective]).spec, "j", NOW).deadline_seconds == 3600.0
    assert "time zone" in errors_of(job_file, JOB, "objective.deadline=2030-01-01T02:00:00")[0]


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("metadata.name=2026", "`metadata.name` must be a string, but 2026 is a number: put it in quotes"),
        ("metadata.labels={version: 1.5}", "`metadata.labels.version` must be a string, but 1.5 is a number"),
        ("metadata.labels={on: true}", "`metadata.labels.on` must be a string, but True is a boolean"),
    ],
)
def test_what_is_no_text_is_told_to_be_put_in_quotes(job_file: Path, setting: str, says: str) -> None:
    assert says in errors_of(job_file, JOB, setting)[0]


def test_dates_are_text(job_file: Path) -> None:
    assert load(job_file, ["metadata.labels={as: 2026-11-05}"]).spec.metadata.labels == {"as": "2026-11-05"}


def test_minimize_is_another_spelling_of_minimise(job_file: Path) -> None:
    loaded = load(job_file, ["objective.minimise=time"])
    assert load(job_file, ["objective.minimize=time"]).json == loaded.json
    job_file.write_text(JOB + "objective: {minimize: time}\n")
    assert load(job_file).json == loaded.json
    assert '"minimize"' not in loaded.json
    assert load(job_file, ["objective.minimise=cost"]).spec.objective.minimise == "cost"
    assert parse_json(loaded.json.replace('"minimise"', '"minimize"')) == loaded.spec
    last = len(JOB.splitlines()) + 1
    (told,) = errors_of(job_file, JOB + "objective: {minimize: money}\n")
    assert told.startswith(f"F:{last}:23: `objective.minimise` must be 'cost' or 'time'")
    (told,) = errors_of(job_file, JOB + "objective: {minimize: time, minimise: time}\n")
    assert "give only one of `minimise` and `minimize`" in told
    properties = json_schema()["$defs"]["Objective"]["properties"]
    assert properties["minimize"]["enum"] == properties["minimise"]["enum"]


def test_workers_are_stated_once_or_by_region(job_file: Path) -> None:
    for told, expected in (("3", 3), ("{a: 2, b: 1}", {"a": 2, "b": 1}), ("auto", None)):
        assert to_demand(load(job_file, [f"train.workers={told}"]).spec, "j", NOW).workers == expected


def test_how_the_learning_rate_goes_reaches_the_agents_as_it_is_written(job_file: Path) -> None:
    snapshot = Snapshot(tuple(catalogue(name) for name in "ab"))
    rates, workers = {}, set()
    for setting in (
        "train.seed=1", "train.learningRate={schedule: cosine, warmup: 0.05}", "train.learningRate={batch: 40}",
    ):  # fmt: skip
        spec = load(job_file, [setting]).spec
        chosen = plan(snapshot, to_demand(spec, "j", NOW))
        assert isinstance(chosen, Plan)
        row = JobRow("j", "j", "r", "sha256:c", "sha256:b", "sha256:t", "{}", "{}", "{}", "planned", 0.0)
        task = command_of(SendStart("a", 1), row, spec, chosen, pytest.fail).start.task
        workers.add(chosen.partitions[0].workers)
        rates[setting] = task.learning_rate if task.HasField("learning_rate") else None
    # Of 10 samples of a worker, where the rate is meant for 40.
    assert workers == {1}
    assert list(rates.values()) == [
        None,
        agent_pb2.LearningRate(schedule="cosine", warmup=0.05, floor=0.0),
        agent_pb2.LearningRate(schedule="constant", scale=0.5),
    ]


def test_a_missing_file_has_its_code(tmp_path: Path) -> None:
    with pytest.raises(GeofedError, match="SPEC_NOT_FOUND"):
        load(tmp_path / "no.yaml")
    assert "mapping" in errors_of(tmp_path / "empty.yaml", "")[0]
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(GeofedError, match="UTF-8"):
        load(tmp_path / "binary.yaml")


@given(st.text(max_size=200))
def test_no_text_breaks_the_reader(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(text, encoding="utf-8", errors="replace")
    with pytest.raises(GeofedError, match="SPEC_INVALID"):
        load(path)


@given(st.integers(1, 10**9))
def test_durations_survive_a_round_trip(milliseconds: int) -> None:
    duration = timedelta(milliseconds=milliseconds)
    assert abs(parse_duration(format_duration(duration)) - duration) < timedelta(microseconds=10)


METHODS = """\
collective: k-reduce
k: 2
channel: redis
merge: {codec: bf16}
wan: {interval: 3, policy: diloco, outer: {lr: 0.5}}
"""
BASE = JOB.replace("advanced: {wan: {interval: 2}}\n", "")


def test_methods_at_the_top_level_are_read_with_a_warning(job_file: Path) -> None:
    job_file.write_text(f"{BASE}advanced:\n{textwrap.indent(METHODS, '  ')}")
    new = load(job_file)
    assert not new.warnings
    job_file.write_text(BASE + METHODS)
    old = load(job_file)
    assert (old.json, old.spec) == (new.json, new.spec)
    assert [line.replace(str(job_file), "F") for line in old.warnings] == [
        f"F:{line}:1: `{key}` is `advanced.{key}` now; move it there"
        for line, key in enumerate(("collective", "k", "channel", "merge", "wan"), start=8)
    ]
    assert old.spec.advanced.k == 2
    job_file.write_text(f"{BASE}k: 2\nadvanced: {{collective: isp}}\n")
    assert (load(job_file).spec.collective, len(load(job_file).warnings)) == ("isp", 1), "at both places"


def test_what_is_stored_has_methods_at_the_top_level_in_the_order_of_earlier_versions(job_file: Path) -> None:
    text = load(job_file).json
    keys = "apiVersion kind metadata task data train clients objective regions collective parallelism k channel merge "
    assert list(json.loads(text)) == f"{keys}wan privacy function limits tracking".split()
    assert parse_json(text).wan.interval == 2
    assert as_stored(as_written(json.loads(text))) == json.loads(text)
    assert as_written(as_written(json.loads(text))) == as_written(json.loads(text))


def test_a_method_is_given_at_one_place(job_file: Path) -> None:
    text = f"{BASE}advanced:\n  k: 2\n  wan: {{interval: 2}}\nwan: {{codec: fp32}}\nk: 2\n"
    assert errors_of(job_file, text) == [
        "F:11:1: `wan` is also given as `advanced.wan`, in line 10; keep one",
        "F:12:1: `k` is also given as `advanced.k`, in line 9; keep one",
    ]
    assert errors_of(job_file, f"{BASE}advanced: 3\nwan: {{}}\n")[0].startswith("F:8:11: `advanced` must be a mapping")
    stored = json.loads(load_text(job_file, JOB))
    with pytest.raises(GeofedError, match="unknown key `wan`"):
        parse_json(json.dumps({**stored, "advanced": {}}))


def load_text(path: Path, text: str) -> str:
    path.write_text(text)
    return load(path).json


@pytest.mark.parametrize("text", [JOB, BASE + METHODS])
def test_options_may_leave_advanced_out(job_file: Path, text: str) -> None:
    job_file.write_text(text)
    short = load(job_file, ["wan.codec=int8", "collective=isp", "k=4", "merge={codec: fp32}"])
    whole = load(
        job_file, ["advanced.wan.codec=int8", "advanced.collective=isp", "advanced.k=4", "advanced.merge={codec: fp32}"]
    )
    assert short.json == whole.json
    assert (short.spec.wan.codec, short.spec.collective, short.spec.advanced.k) == ("int8", "isp", 4)
    assert short.spec.wan.interval in (2, 3), "the file's other keys stay"


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("wan.codec=gzip", "`advanced.wan.codec` must be 'auto',"),
        ("wan.codek=fp32", "unknown key `codek` in advanced.wan; did you mean `codec`?"),
        ("colective=isp", "unknown key `colective` in the file; did you mean `advanced.collective`?"),
        ("interval=2", "unknown key `interval` in the file; did you mean `advanced.wan.interval`?"),
        ("codec=fp32", "did you mean `advanced.merge.codec` or `advanced.wan.codec`?"),
        ("deadline=2h", "did you mean `objective.deadline`?"),
        ("advanced.train=1", "unknown key `train` in advanced; did you mean `train`?"),
    ],
)
def test_a_key_at_a_wrong_place_is_told_its_own(job_file: Path, setting: str, told: str) -> None:
    (error,) = errors_of(job_file, JOB, setting)
    assert error.startswith(f"--set {setting}: ")
    assert told in error


def test_the_schema_names_the_keys_of_the_file() -> None:
    schema = json_schema()
    assert not {"wan", "collective", "k", "channel", "merge"} & set(schema["properties"])
    assert set(schema["$defs"]["Advanced"]["properties"]) == {"wan", "collective", "k", "channel", "merge"}
    assert schema["required"] == ["apiVersion", "kind", "metadata", "task", "data", "train"]
    assert schema["title"] == "geofed training job"
    assert schema["$defs"]["Limits"]["properties"]["lostRegion"]["default"] == "10m"
    assert schema["additionalProperties"] is False


def test_packing_is_the_same_whenever_and_wherever(job_file: Path, tmp_path: Path) -> None:
    folder = job_file.parent
    for name in (".secret", "__pycache__/x.pyc", ".venv/y.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("no")
    os.symlink("/etc/passwd", folder / "outside.txt")
    packed = pack(folder, "task.py")
    os.utime(folder / "task.py", (1, 1))
    assert pack(folder, "task.py") == packed
    with tarfile.open(fileobj=io.BytesIO(packed.content)) as archive:
        assert [(m.name, m.mtime, m.uid, m.uname) for m in archive] == [
            ("job.yaml", 0, 0, ""),
            ("task.py", 0, 0, ""),
        ]
    (folder / "task.py").write_text("changed")
    assert pack(folder, "task.py").digest != packed.digest


def _archive(name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE) -> bytes:
    made, entry = io.BytesIO(), tarfile.TarInfo(name)
    entry.type, entry.size, entry.linkname = kind, len(content), "/etc/passwd" if kind == tarfile.SYMTYPE else ""
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        archive.addfile(entry, io.BytesIO(content))
    return made.getvalue()


_NOUGHTS = gzip.compress(bytes(65 << 20), compresslevel=1)


def _code_of(folder: Path, store: Path) -> str:
    """The code's digest by what is sent."""
    packed = pack(folder, "task.py")
    store.mkdir(exist_ok=True)
    (store / packed.digest).write_bytes(packed.content)
    for part in packed.parts:
        shutil.copy(folder / part.name, store / part.digest)
    return packed_code_digest(store / packed.digest, lambda digest: store / digest)


def test_packed_code_is_known_by_what_it_is(job_file: Path, tmp_path: Path) -> None:
    folder, store = job_file.parent, tmp_path / "store"
    (folder / "model").mkdir()
    (folder / "model" / "deep.py").write_text("x = 1")
    (folder / "model.py").write_text("y = 1")
    loaded = load(job_file)
    known = _code_of(folder, store)
    assert known == loaded.code_digest
    (folder / "notes.txt").write_text("no code")
    assert _code_of(folder, store) == known
    (folder / "weights.bin").write_bytes(bytes(2 << 20))
    assert _code_of(folder, store) == known, "also where a file is sent by itself"
    (folder / "model" / "deep.py").write_text("x = 2")
    assert _code_of(folder, store) == load(job_file).code_digest != known
    (folder / "fast.so").write_bytes(bytes(2 << 20))
    known = _code_of(folder, store)
    assert [part.name for part in pack(folder, "task.py").parts] == ["fast.so", "weights.bin"]
    (folder / "fast.so").write_bytes(b"\1" * (2 << 20))
    assert _code_of(folder, store) == load(job_file).code_digest != known


@pytest.mark.parametrize("key", ["module", "requirements"])
def test_a_path_with_a_null_character_is_refused(job_file: Path, key: str) -> None:
    ending = {"module": "py", "requirements": "txt"}[key]
    with pytest.raises(GeofedError, match=f"give the path of a .{ending} file"):
        load(job_file, [f'task.{key}="a\\0.{ending}"'])


@pytest.mark.parametrize(
    ("bundle", "code"),
    [
        (b"no archive", "TASK_INVALID"),
        (_NOUGHTS, "LIMIT_EXCEEDED"),
        (_NOUGHTS[:100], "TASK_INVALID"),
        (_archive("task.py", kind=tarfile.SYMTYPE), "TASK_INVALID"),
        (_archive("task.py", kind=tarfile.GNUTYPE_SPARSE), "TASK_INVALID"),
    ],
    ids=["no archive", "noughts", "cut off", "a link", "sparse"],
)
def test_a_bundle_that_no_agent_would_take_has_no_code(bundle: bytes, code: str, tmp_path: Path) -> None:
    (tmp_path / "bundle").write_bytes(bundle)
    with pytest.raises(GeofedError) as caught:
        packed_code_digest(tmp_path / "bundle", lambda digest: tmp_path / digest)
    assert caught.value.code == code


def test_a_large_folder_is_refused_with_its_largest_file(job_file: Path) -> None:
    with (job_file.parent / "data.bin").open("wb") as file:
        file.truncate((512 << 20) + 1)
    with pytest.raises(GeofedError, match="the limit is 536,870,912") as caught:
        pack(job_file.parent, "task.py")
    assert caught.value.code == "LIMIT_EXCEEDED"
    assert "data.bin" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def model(config): ...\n", "task.py:1: defines no loss"),
        ("def model(config):\n  return (\n", "task.py:2: "),
        ("def model(): ...\ndef dataset(u, s, c): ...\ndef loss(m, b): ...\n", "task.py:1: model is called with 1"),
    ],
)
def test_a_wrong_task_module_is_told_with_its_line(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "task.py").write_text(text)
    with pytest.raises(GeofedError) as caught:
        check_task(tmp_path, "task.py")
    assert caught.value.code == "TASK_INVALID"
    assert caught.value.message.startswith(told)


def test_a_good_task_module_passes(job_file: Path) -> None:
    check_task(job_file.parent, "task.py")


@pytest.mark.parametrize(
    "text",
    [
        "from parts import *\n",
        "from .parts import model, dataset, loss\n",
        "try:\n  from parts import model\nexcept ImportError:\n  def model(c): ...\ndataset, loss = print, print\n",
        "if True:\n  def model(c): ...\n  loss: object = model\nwith open('x') as dataset: ...\n",
    ],
)
def test_functions_may_come_from_anywhere(tmp_path: Path, text: str) -> None:
    (tmp_path / "task.py").write_text(text)
    check_task(tmp_path, "task.py")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["k=0"], "`k` requires `collective: isp` or `collective: k-reduce`"),
        (["collective=k-reduce", "k=0"], "`k: 0` requires `collective: isp`"),
        (["collective=isp", "k=-1"], "must be `auto` or an integer that is not negative"),
        (["merge.step=mean"], "`merge.step` requires `collective: isp`"),
        (["collective=k-reduce", "merge.ratio=2"], "`merge.ratio` requires `merge.staleness`"),
        (
            ["collective=k-reduce", "merge.staleness=1", "merge.ratio=2"],
            "`merge.ratio` requires a number as `k`: with `auto` all workers may merge a part",
        ),
        (
            ["collective=isp", "merge.step=mean", "parallelism.pipeline.stages=2"],
            "`advanced.merge.step`",
        ),
        (["collective=k-reduce", "merge.step=mean"], "`merge.step` requires `collective: isp`"),
    ],
)
def test_what_workers_share_fits_the_collective(job_file: Path, settings: list[str], told: str) -> None:
    (error,) = errors_of(job_file, JOB, *settings)
    assert told in error


def test_a_plan_keeps_how_changes_are_shared(job_file: Path) -> None:
    for settings, merging in (
        (["k=0"], {"k": 0.0}),
        (["k=2", "merge.step=mean"], {"k": 2.0, "mean": 1.0}),
        (["merge.step=sum"], {}),
    ):
        assert to_demand(load(job_file, ["collective=isp", *settings]).spec, "j", NOW).merging == merging
