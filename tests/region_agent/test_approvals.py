"""Whose code a region runs, by its own file and by its operator's approval."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any, Literal

import pytest
from structlog.testing import capture_logs
from support.pki import Authority
from typer.testing import CliRunner

from geofed_pb.errors import GeofedError
from geofed_pb.security.signing import Signer
from geofed_pb.v1 import agent_pb2
from region_agent.approvals import Approvals
from region_agent.cli import app
from region_agent.config import DatasetConfig, RegionConfig
from region_agent.daemon import Agent
from region_agent.daemon.jobs import RegionJobs
from region_agent.link.identity import Identity, JoinedFederation
from region_agent.policy import check_partition
from region_agent.profiling import _as_partition
from region_agent.state.store import AgentStore

DIGEST = f"sha256:{'ab' * 32}"


DOCKER = {"kind": "docker", "image": "geofed-worker"}


def config(folder: Path, gateway: dict[str, Any] | None = None, **policy: Any) -> RegionConfig:
    return RegionConfig.model_validate(
        {
            "apiVersion": "geofed/v1", "kind": "Region", "metadata": {"name": "east"}, "cloud": "test",
            "capacity": {"workers": 2}, "channel": {"path": str(folder / "channel")},
            "policy": {"isolation": "none", **policy}, "gateway": gateway or {"kind": "embedded"},
            "datasets": {"digits": {"splits": {"train": {"uri": "/nowhere", "samples": 1}}}},
        }
    )  # fmt: skip


def start(
    job: str = "job-1",
    user: str = "ann",
    signer: Signer | None = None,
    signed: str = "",
    adapter: str = "",
    **task: Any,
) -> agent_pb2.StartPartition:
    facts = {"bundle_digest": DIGEST, "module": "task.py", "config_json": '{"width": 8}', "dataset": "digits"}
    spec = json.dumps(
        {
            "task": {"module": "task.py", "config": {"width": 8}}, "data": {"dataset": task.get("dataset", "digits")},
            "train": {
                "initialModel": {
                    "file": "w", "digest": signed, "adapter": {"file": "a", "digest": adapter} if adapter else None,
                } if signed else None,
            },
        }
    )  # fmt: skip
    ref = agent_pb2.TaskRef(**{**facts, **task})
    if signer is not None:
        ref.submission.CopyFrom(signer.sign(spec, DIGEST))
    ref.submission.user = user
    plan = agent_pb2.PartitionPlan(workers=1, slice_seconds=30, memory_mb=512)
    return agent_pb2.StartPartition(job=job, region="east", epoch=1, task=ref, plan=plan, regions=["east"])


@pytest.fixture
def ann(tmp_path: Path) -> Signer:
    return Signer.load_or_create(tmp_path / "ann.key")


def test_without_a_list_anybodys_code_runs(tmp_path: Path) -> None:
    check_partition(config(tmp_path), start(user="whoever"))


def test_a_list_of_users_is_kept_whatever_the_control_plane_says(tmp_path: Path, ann: Signer) -> None:
    eve = Signer.load_or_create(tmp_path / "eve.key")
    strict = config(tmp_path, allowUsers={"ann": ann.public_key}, gateway=DOCKER, allowImages=["r/"])
    check_partition(strict, start(signer=ann))
    forged = [
        (start(user="bob", signer=ann), "runs no code of user bob"),
        (start(user=""), "runs no code of user unknown"),
        (start(), "user ann is not signed"),
        (start(signer=eve), "signed by another key"),
        (start(signer=ann, bundle_digest=f"sha256:{'cd' * 32}"), "or was changed"),
        (start(signer=ann, module="other.py"), "or was changed"),
        (start(signer=ann, config_json='{"width": 9}'), "or was changed"),
        (start(signer=ann, env={"LD_PRELOAD": "x"}), "or was changed"),
        (start(signer=ann, image="r/a"), "or was changed"),
    ]
    for command, text in forged:
        with pytest.raises(GeofedError, match=text) as caught:
            check_partition(strict, command)
        assert caught.value.code == "FORBIDDEN"
    # Of a file, and of jobs that continue the job that has started from it.
    check_partition(strict, start(signer=ann, signed=DIGEST, initial_model=DIGEST, initial_holds="all"))
    check_partition(strict, start(signer=ann, signed=DIGEST, initial_model=f"sha256:{'cd' * 32}", initial_job="job-0"))
    swapped = start(signer=ann, signed=DIGEST, initial_model=f"sha256:{'cd' * 32}", initial_holds="some")
    with pytest.raises(GeofedError, match="has signed no job that starts from"):
        check_partition(strict, swapped)
    swapped.task.submission.initial_model = swapped.task.initial_model
    with pytest.raises(GeofedError, match="or was changed"):
        check_partition(strict, swapped)
    _adapters_are_signed(strict, ann)
    with pytest.raises(ValueError, match="allowUsers"):
        config(tmp_path, allowUsers={"ann": "no key"})
    with pytest.raises(GeofedError, match="runs no code"):
        check_partition(config(tmp_path, allowUsers={}), start(signer=ann))


@pytest.mark.parametrize(
    ("dataset", "user", "runs"),
    [
        ("digits", "ann", True), ("digits", "eve", True), ("digits", "bob", True),
        ("scans", "ann", True), ("scans", "eve", True), ("scans", "bob", False),
        ("closed", "ann", False), ("closed", "eve", False), ("closed", "bob", False),
    ],
)  # fmt: skip
def test_a_dataset_is_for_its_users_and_roles_of_the_regions_own(
    tmp_path: Path, dataset: str, user: str, runs: bool
) -> None:
    signers = {name: Signer.load_or_create(tmp_path / f"{name}.key") for name in ("ann", "bob", "eve")}
    keys = {name: signer.public_key for name, signer in signers.items()}
    region = config(tmp_path, allowUsers=keys, roles={"oncology": ["ann"], "nobody": []})
    rules: dict[str, Any] = {"scans": {"users": ["eve"], "roles": ["oncology"]}, "closed": {"roles": ["nobody"]}}
    digits = region.datasets["digits"].model_dump()
    for name, rule in rules.items():
        region.datasets[name] = DatasetConfig.model_validate(digits | {"allow": rule})
    command = start(user=user, signer=signers[user], dataset=dataset)
    probe = _as_partition(agent_pb2.ProfileTask(id="probe-1", region="east", task=command.task, limit_seconds=30))
    trained, evaluated = agent_pb2.StartPartition(), agent_pb2.StartPartition()
    for one in (trained, evaluated):
        one.CopyFrom(command)
    evaluated.task.evaluates_only = True
    for one in (trained, evaluated, probe):
        if runs:
            check_partition(region, one)
            continue
        with pytest.raises(GeofedError, match=f"region east runs no code of user {user} on {dataset}") as told:
            check_partition(region, one)
        assert told.value.code == "FORBIDDEN"
        # The name of one who may, as a control plane could claim it.
        one.task.submission.user = "ann"
        with pytest.raises(GeofedError) as told:
            check_partition(region, one)
        assert told.value.code == "FORBIDDEN"


def test_a_dataset_for_some_stays_in_its_region(tmp_path: Path) -> None:
    plain = config(tmp_path).datasets["digits"].model_dump()
    with pytest.raises(ValueError, match="`allow` requires `residency: region`"):
        DatasetConfig.model_validate(plain | {"allow": {"users": ["ann"]}, "residency": "anywhere"})
    digits = {"splits": {"train": {"uri": "/nowhere", "samples": 1}}}
    key = Signer.load_or_create(tmp_path / "ann.key").public_key

    def checked(allow: dict[str, Any], **policy: Any) -> RegionConfig:
        given = config(tmp_path, **policy).model_dump(exclude_none=True)
        return RegionConfig.model_validate(given | {"datasets": {"digits": digits | {"allow": allow}}})

    assert checked({"users": ["ann"]}, allowUsers={"ann": key}).users_of("digits") == {"ann"}
    for allow, policy, text in (
        ({"users": ["ann"]}, {}, "datasets.digits.allow.users`: whose keys are not in `policy.allowUsers`"),
        ({"roles": ["lab"]}, {"allowUsers": {"ann": key}}, "lab is not in `policy.roles`"),
        ({}, {"allowUsers": {"ann": key}, "roles": {"lab": ["bob"]}}, "policy.roles.lab`: whose keys are not"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            checked(allow, **policy)


def _adapters_are_signed(strict: RegionConfig, ann: Signer) -> None:
    """No other adapter, none, or one that the user did not name."""
    other, begun = f"sha256:{'cd' * 32}", {"signer": ann, "initial_model": DIGEST, "initial_holds": "all"}
    check_partition(strict, start(signed=DIGEST, adapter=other, initial_adapter=other, **begun))
    for signed, given in ((other, DIGEST), (other, ""), ("", other)):
        command = start(signed=DIGEST, adapter=signed, initial_adapter=given, **begun)
        with pytest.raises(GeofedError, match=f"has signed no job that starts from {DIGEST}"):
            check_partition(strict, command)
        command.task.submission.initial_adapter = given
        with pytest.raises(GeofedError, match="or was changed"):
            check_partition(strict, command)
    for wrong in ({"initial_adapter": "../x"}, {"initial_adapter": other, "initial_holds": ""}):
        with pytest.raises(GeofedError, match="CONFIG_INVALID"):
            check_partition(strict, start(signed=DIGEST, **{**begun, **wrong}))


def test_a_task_runs_in_an_image_that_the_region_file_allows_alone(tmp_path: Path) -> None:
    allows = config(tmp_path, gateway=DOCKER, allowImages=["r/team/", f"r/one@{DIGEST}"])
    assert allows.catalogue()["images"] == ["r/team/", f"r/one@{DIGEST}"]
    for image in ("", "r/team/worker:2", f"r/one@{DIGEST}"):
        check_partition(allows, start(image=image))
    approves = config(tmp_path, gateway=DOCKER, allowImages=["r/team/"], approve="first-run")
    check_partition(approves, start(image=f"r/team/worker@{DIGEST}"))
    refused = [
        (approves, "r/team/worker:2", "approves code, and the image r/team/worker:2 may change"),
        (allows, "r/one:1", "region east does not let tasks run in r/one:1"),
        (allows, "r/team/\u202ex", r"r/team/\\u202ex: it is not in its policy.allowImages"),
        (config(tmp_path, gateway=DOCKER), "r/team/worker:2", "not in its policy.allowImages"),
        (
            config(tmp_path),
            "r/team/worker:2",
            "its functions run on the embedded gateway, as processes without an image",
        ),
    ]
    for region, image, text in refused:
        with pytest.raises(GeofedError, match=text) as caught:
            check_partition(region, start(image=image))
        assert caught.value.code == "IMAGE_REFUSED"
    with pytest.raises(ValueError, match="functions of the embedded gateway have no image"):
        config(tmp_path, allowImages=["r/team/"])
    with pytest.raises(ValueError, match="is no image, and no beginning of images"):
        config(tmp_path, gateway=DOCKER, allowImages=["r/team*"])


Rule = Literal["none", "first-run", "every"]


@pytest.mark.parametrize("rule", ["first-run", "every"])
def test_an_approval_of_a_job_is_for_its_code_only(tmp_path: Path, ann: Signer, rule: Rule) -> None:
    approvals, other = Approvals(tmp_path, rule), start(signer=ann, bundle_digest=f"sha256:{'cd' * 32}").task
    assert approvals.waits("job-1", start(signer=ann).task)
    mark = approvals.approve("job-1").mark
    assert approvals.waits("job-1", other), "other code with the job's ID"
    assert [one.code for one in approvals.pending()] == [other.bundle_digest]
    assert approvals.waits(mark, other), "a job whose ID is what was approved"
    assert not approvals.waits("job-1", start(signer=ann).task)


@pytest.mark.parametrize(("rule", "again", "other_code"), [("first-run", False, True), ("every", True, True)])
def test_an_approval_is_for_a_job_or_for_the_users_code(
    tmp_path: Path, ann: Signer, rule: Rule, again: bool, other_code: bool
) -> None:
    approvals = Approvals(tmp_path, rule)
    first = start(signer=ann)
    assert approvals.waits("job-1", first.task)
    assert approvals.waits("job-1", first.task)
    (pending,) = approvals.pending()
    assert (pending.job, pending.user, pending.dataset, pending.code) == ("job-1", "ann", "digits", DIGEST)
    assert Approvals(tmp_path).approve("job-1") == pending
    assert not approvals.waits("job-1", first.task)
    assert list(approvals.pending()) == []
    approvals.done("job-1")
    assert approvals.waits("job-2", first.task) is again
    assert approvals.waits("job-3", start(signer=ann, bundle_digest=f"sha256:{'cd' * 32}").task) is other_code
    assert approvals.waits("job-5", start(signer=ann, env={"MODE": "x"}).task) is other_code, "with other variables"
    assert approvals.waits("job-6", start(signer=ann, image="r/a").task) is other_code, "in another image"
    assert approvals.waits("job-4", start(user="bob").task), "another user's run of the same code is another one"
    with pytest.raises(GeofedError, match="JOB_NOT_FOUND"):
        approvals.approve("job-9")
    for name in ("../evil", "", "a/b", "-x"):
        with pytest.raises(GeofedError, match="CONFIG_INVALID"):
            approvals.approve(name)


def test_probes_of_one_code_are_listed_once_and_run_once_it_is_approved(tmp_path: Path, ann: Signer) -> None:
    task = start(signer=ann).task
    first = Approvals(tmp_path, "first-run")
    for number in range(3):
        with pytest.raises(GeofedError, match="waits for the approval"):
            first.require(f"probe-{number}", task)
    (pending,) = first.pending()
    first.approve(pending.job)
    first.require("probe-9", task)
    every = Approvals(tmp_path / "every", "every")
    with pytest.raises(GeofedError, match="nothing is probed"):
        every.require("probe-1", task)
    assert list(every.pending()) == []
    with pytest.raises(GeofedError, match="waits for the approval"):
        every.require("profile-1", task)
    every.approve("profile-1")
    every.require("profile-1", task)
    Approvals(tmp_path / "none", "none").require("probe-1", task)


def test_a_job_waits_for_the_operator_also_over_a_restart_and_then_starts(
    tmp_path: Path, ann: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = Authority().region("east")
    Identity(tmp_path).store(
        JoinedFederation("east", "127.0.0.1:9", "test"), tls.key_pem, tls.certificate_pem, tls.ca_pem
    )
    settings = config(tmp_path, approve="first-run")
    started: list[str] = []
    monkeypatch.setattr(RegionJobs, "_start_partition", lambda self, command: started.append(command.job))

    async def scenario() -> None:
        agent = Agent(settings, tmp_path)
        agent.jobs.start(1, start("job-1", signer=ann))
        agent.jobs.start(2, start("job-2", signer=ann))
        agent.jobs.start_approved()
        assert started == []
        assert [one["job"] for one in agent._status(0.0).pending] == ["job-1", "job-2"]
        agent.jobs.stop(3, agent_pb2.StopPartition(job="job-2", epoch=1))
        agent._store.close()
        again = Agent(settings, tmp_path)
        for row in again._store.open_partitions():
            again.jobs._start_or_wait(agent_pb2.StartPartition.FromString(row.start))
        assert started == []
        listed = CliRunner().invoke(app, ["pending", "--state-dir", str(tmp_path), "-o", "json"])
        assert [one["job"] for one in json.loads(listed.stdout)["data"]] == ["job-1"]
        approve = ["approve", "job-1", "--as", "dr. eve", "--state-dir", str(tmp_path)]
        assert CliRunner().invoke(app, approve).exit_code == 0
        again.jobs.start_approved()
        assert started == ["job-1"]
        again.jobs.start(4, start("job-3", signer=ann))
        assert started == ["job-1", "job-3"], "the code is approved"
        again._store.close()

    asyncio.run(scenario())
    store = AgentStore(tmp_path / "agent.db")
    told = [agent_pb2.FromAgent.FromString(raw).partition for _, raw in store.reports_after(0)]
    store.close()
    assert [(report.job, report.state) for report in told[:3]] == [
        ("job-1", "accepted"), ("job-2", "accepted"), ("job-2", "stopped"),
    ]  # fmt: skip
    assert told[0].condition == "waiting for the approval of east's operator: `geofed agent approve job-1`"


def test_a_start_that_cannot_be_recorded_is_reported_once_until_it_can(
    tmp_path: Path, ann: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = Authority().region("east")
    Identity(tmp_path).store(
        JoinedFederation("east", "127.0.0.1:9", "test"), tls.key_pem, tls.certificate_pem, tls.ca_pem
    )
    started: list[str] = []
    monkeypatch.setattr(RegionJobs, "_start_partition", lambda self, command: started.append(command.job))
    full = [True]

    def starting(*_: object, **__: object) -> None:
        if full[0]:
            raise GeofedError("DISK_FULL", "the region's disk is full")

    async def scenario() -> None:
        agent = Agent(config(tmp_path), tmp_path)
        monkeypatch.setattr(agent._audit, "starting", starting)
        with capture_logs() as logs:
            agent.jobs.start(1, start("job-1", signer=ann))
            for _ in range(3):
                agent.jobs.start_approved()
        assert [line["event"] for line in logs].count("a job waits until its start can be recorded") == 1
        told = agent._hub._latest["partition job-1"].partition
        assert (told.state, told.condition) == (
            "accepted", "waiting until its start can be recorded: the region's disk is full",
        )  # fmt: skip
        assert started == []
        full[0] = False
        agent.jobs.start_approved()
        assert started == ["job-1"]
        agent._store.close()

    asyncio.run(scenario())


def test_whoever_is_not_allowed_is_refused_before_anything_waits(tmp_path: Path, ann: Signer) -> None:
    tls = Authority().region("east")
    Identity(tmp_path).store(
        JoinedFederation("east", "127.0.0.1:9", "test"), tls.key_pem, tls.certificate_pem, tls.ca_pem
    )
    settings = config(tmp_path, approve="every", allowUsers={"bob": ann.public_key})

    async def scenario() -> None:
        agent = Agent(settings, tmp_path)
        agent.jobs.start(1, start("job-1", signer=ann))
        assert list(agent._approvals.pending()) == []
        agent._store.close()

    asyncio.run(scenario())
    store = AgentStore(tmp_path / "agent.db")
    (told,) = [agent_pb2.FromAgent.FromString(raw).partition for _, raw in store.reports_after(0)]
    store.close()
    assert (told.state, told.error.code) == ("refused", "FORBIDDEN")
