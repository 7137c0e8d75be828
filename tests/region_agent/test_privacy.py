"""The owner's budgets: which jobs a region grants releases of its data, and what it tells of them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2, common_pb2
from region_agent.cli import app
from region_agent.config import RegionConfig
from region_agent.partition.report import withhold, withhold_metrics, withhold_small_counts
from region_agent.privacy import LEDGER, PrivacyGuard, accounts_of, ships_logs
from region_agent.state.audit_log import AUDIT_KEY, RegionAudit
from region_agent.state.store import AgentStore
from region_agent.worker.invocation import read_invocation
from sync.privacy import PrivacyLedger, Release, epsilon_of, standard_deviation
from sync.ps.execution.releases import Releases
from sync.wan import ExchangeSettings

DELTA = 1e-5
BUDGET = {"epsilon": 6.0, "delta": DELTA}


def config(budget: dict[str, float] | None = BUDGET, **dataset: Any) -> RegionConfig:
    digits = {"splits": {"train": {"uri": "/nowhere", "samples": 1000}}, "privacy": budget, **dataset}
    elsewhere = {"splits": {"train": {"uri": "/elsewhere", "samples": 1000}}}
    return RegionConfig.model_validate(
        {
            "apiVersion": "geofed/v1", "kind": "Region", "metadata": {"name": "east"}, "cloud": "test",
            "capacity": {"workers": 2}, "datasets": {"digits": digits, "open": elsewhere},
        }
    )  # fmt: skip


def start(job: str = "job-1", dataset: str = "digits", rounds: int = 4, **numbers: float) -> agent_pb2.StartPartition:
    settings = {"noise": 4.0, "clip": 1.0, "delta": DELTA, **numbers}
    plan = agent_pb2.PartitionPlan(workers=2, batch=10, rounds=rounds, steps_per_round=5, wan_policy="ma")
    plan.wan_settings.update(settings)
    task = agent_pb2.TaskRef(dataset=dataset)
    return agent_pb2.StartPartition(job=job, region="east", epoch=1, task=task, plan=plan, regions=["east", "west"])


def cost(rounds: int, noise: float = 4.0) -> float:
    return epsilon_of([(Release(noise / 2), rounds)], DELTA)


def releases(guard: PrivacyGuard, command: agent_pb2.StartPartition) -> Releases:
    """What a parameter server of the job makes its updates private with."""
    numbers, _ = ExchangeSettings.of(command.plan.wan_settings)
    made = Releases.of(guard.folder, command.job, "east", numbers, {}, command.plan.steps_per_round)
    assert made is not None
    return made


def refusal(guard: PrivacyGuard, command: agent_pb2.StartPartition) -> GeofedError:
    with pytest.raises(GeofedError) as told:
        guard.admit(command)
    return told.value


def test_data_with_a_budget_are_for_private_jobs_only(tmp_path: Path) -> None:
    guard = PrivacyGuard(config(), tmp_path)
    assert refusal(guard, start(noise=0.0)).code == "FORBIDDEN"
    guard.admit(start(noise=0.0, dataset="open"))
    assert not (tmp_path / LEDGER).exists()
    guard.admit(start())


@pytest.mark.parametrize(
    "numbers",
    [
        {"clip": 0.0},
        {"delta": 0.0},
        {"background": 1.0},
        {"noise": -1.0},
        {"sampled": 0.5},
        # So little that the computation of epsilon underflows to 0, or fails; so much that it overflows.
        *({"noise": noise} for noise in (1e-300, 1e-160, 1e-155, 1e-9, 1e200)),
        *({"noise": noise, "sampled": 1.0} for noise in (1e-300, 1e-160, 1e-155, 1e-9, 1e200)),
    ],
)
def test_settings_that_hide_nothing_are_refused(tmp_path: Path, numbers: dict[str, float]) -> None:
    assert refusal(PrivacyGuard(config(), tmp_path), start(**numbers)).code == "CONFIG_INVALID"


def test_tensors_without_noise_stay_in_the_region(tmp_path: Path) -> None:
    guard = PrivacyGuard(config(), tmp_path)
    guard.require_own_model("job-1")
    guard.admit(start())
    with pytest.raises(GeofedError, match="trained without noise") as told:
        guard.require_own_model("job-1")
    assert told.value.code == "FORBIDDEN"
    guard.require_own_model("job-2")


def test_the_budget_holds_over_all_jobs_for_ever(tmp_path: Path) -> None:
    assert cost(4) < 6 < cost(8)
    guard = PrivacyGuard(config(), tmp_path)
    guard.admit(start())
    error = refusal(guard, start("job-2"))
    assert error.code == "PRIVACY_EXHAUSTED"
    assert f"{cost(4):.3g} is spent or reserved, 6 allowed" in error.message
    ledger = PrivacyLedger(tmp_path / LEDGER)
    ledger.spend("job-1", 1, 1)
    guard.close("job-1")
    guard.admit(start("job-2"))
    assert [(row.job, row.counted) for row in ledger.rows()] == [("job-1", 1), ("job-2", 4)]
    # Another run of the agent knows the same.
    assert refusal(PrivacyGuard(config(), tmp_path), start("job-3")).code == "PRIVACY_EXHAUSTED"
    PrivacyGuard(config(None), tmp_path).admit(start("job-3"))


@pytest.mark.parametrize(("honest", "part"), [(None, 1.0), (1, 0.5), (2, 0.5**0.5), (4, 1.0), (9, 1.0)])
def test_noise_counts_as_far_as_the_owner_knows_who_adds_it(tmp_path: Path, honest: int | None, part: float) -> None:
    budget = {"epsilon": 900.0, "delta": DELTA} | ({} if honest is None else {"honest_regions": honest})
    guard = PrivacyGuard(config(budget), tmp_path)
    # Four of any five regions add all of the noise, by their variances.
    guard.admit(start(secure=5.0))
    guard.admit(start("job-2"))
    guard.admit(start("job-3", secure=5.0, sampled=1.0))
    alone, plain, sampled = PrivacyLedger(tmp_path / LEDGER).rows()
    assert alone.noise == pytest.approx(4.0 / 2 * part)
    assert (plain.noise, sampled.noise) == (2.0, 4.0), (
        "without secure aggregation, and of samples, all of it is this region's"
    )
    # By the deviation that a parameter server adds: this region's own, and those of honest others, of the same share.
    shares = dict.fromkeys("abcde", 0.2)
    counted = min(4, honest or 4)
    added = math.sqrt(sum(standard_deviation(4.0, 1.0, name, shares, 5) ** 2 for name in list(shares)[:counted]))
    assert alone.noise == pytest.approx(added / 2)


def test_less_honest_regions_exhaust_a_budget_sooner(tmp_path: Path) -> None:
    PrivacyGuard(config(BUDGET), tmp_path / "all").admit(start(secure=5.0))
    error = refusal(PrivacyGuard(config(BUDGET | {"honest_regions": 1}), tmp_path / "one"), start(secure=5.0))
    assert error.code == "PRIVACY_EXHAUSTED"


def test_a_job_that_starts_again_keeps_what_it_has_spent(tmp_path: Path) -> None:
    guard = PrivacyGuard(config(), tmp_path)
    guard.admit(start())
    ledger = PrivacyLedger(tmp_path / LEDGER)
    ledger.spend("job-1", 1, 1)
    guard.close("job-1")
    guard.admit(start())
    (row,) = ledger.rows()
    assert (row.spent, row.last, row.granted, row.open) == (1, 1, 4, True)
    assert refusal(guard, start(noise=5.0)).code == "CONFIG_INVALID"


def test_a_job_that_is_discarded_and_started_again_does_not_repeat_a_round(tmp_path: Path) -> None:
    """Else the mean of its repeats would be the update without noise."""
    guard = PrivacyGuard(config(), tmp_path)
    command = start(rounds=1)
    end, begin = np.full(8, 0.1, np.float32), np.zeros(8, np.float32)
    guard.admit(command)
    releases(guard, command).released(end, begin, 1)
    # A server that was killed before the update was durable: nothing has left.
    releases(guard, command).released(end, begin, 1)
    releases(guard, command).stored(1)
    # The next one finds neither the update nor any other state.
    guard.close(command.job)
    guard.admit(command)
    with pytest.raises(GeofedError, match="round 1 of job-1 was released before") as told:
        releases(guard, command).released(end, begin, 1)
    assert told.value.code == "STATE_INVALID"
    assert [row.spent for row in PrivacyLedger(guard.folder).rows()] == [1]


def test_samples_are_counted_by_steps_and_their_rate(tmp_path: Path) -> None:
    guard = PrivacyGuard(config(), tmp_path)
    guard.admit(start(noise=1.0, sampled=1.0))
    (row,) = PrivacyLedger(tmp_path / LEDGER).rows()
    # Two workers with 10 samples each, of 1000; five steps in each of four rounds.
    assert (row.level, row.noise, row.rate, row.planned) == ("sample", 1.0, 0.02, 20)
    told = guard.spent("job-1")
    assert told == agent_pb2.Privacy(epsilon=0.0, delta=DELTA, releases=0)
    PrivacyLedger(tmp_path / LEDGER).spend("job-1", 1, 5)
    told = guard.spent("job-1")
    assert told is not None
    assert (told.epsilon, told.releases) == (epsilon_of([(Release(1.0, 0.02), 5)], DELTA), 5)


def test_a_job_goes_on_while_an_agent_that_has_started_again_counts_its_samples(tmp_path: Path) -> None:
    PrivacyGuard(config(), tmp_path).admit(start(noise=1.0, sampled=1.0))
    uncounted = config(format={"kind": "csv"}, splits={"train": {"uri": "/nowhere"}})
    guard = PrivacyGuard(uncounted, tmp_path)
    guard.admit(start(noise=1.0, sampled=1.0))
    assert guard.rate("job-1") == 0.02
    assert refusal(guard, start("job-2", noise=1.0, sampled=1.0)).code == "SHARD_UNREADABLE"
    with pytest.raises(GeofedError, match="granted job-2 no release"):
        guard.rate("job-2")


def test_a_job_goes_on_with_its_own_rate_if_the_region_file_has_another_number_of_samples(tmp_path: Path) -> None:
    PrivacyGuard(config(), tmp_path).admit(start(noise=1.0, sampled=1.0))
    guard = PrivacyGuard(config(splits={"train": {"uri": "/nowhere", "samples": 500}}), tmp_path)
    guard.admit(start(noise=1.0, sampled=1.0))
    assert guard.rate("job-1") == 0.02
    guard.admit(start("job-2", noise=1.0, sampled=1.0))
    assert guard.rate("job-2") == 0.04


@pytest.mark.parametrize(
    "change",
    [
        lambda start: start.plan.pipeline.SetInParent(),
        lambda start: setattr(start.plan, "merging_codec", "int8"),
        lambda start: start.plan.merging.update({"staleness": 1.0}),
        lambda start: setattr(start.plan, "collective", "isp"),
        lambda start: start.task.clients.MergeFrom(agent_pb2.ClientRounds(fraction=1.0, steps=5, batch=4)),
        lambda start: setattr(start.task, "precision", "fp16"),
        lambda start: setattr(start.task, "compile", True),
        lambda start: setattr(start.task, "gpus", "auto"),
    ],
    ids=["pipeline", "codec", "staleness", "isp", "clients", "precision", "compile", "gpus"],
)
def test_workers_that_could_not_add_all_of_the_noise_get_no_samples(
    tmp_path: Path, change: Callable[[agent_pb2.StartPartition], object]
) -> None:
    command = start(sampled=1.0)
    change(command)
    assert refusal(PrivacyGuard(config(), tmp_path), command).code == "CONFIG_INVALID"
    command.plan.wan_settings["sampled"] = 0.0
    PrivacyGuard(config(), tmp_path).admit(command)


def test_an_evaluation_is_one_release_of_its_counts(tmp_path: Path) -> None:
    guard, command = PrivacyGuard(config(), tmp_path), start(noise=2.0, measured=1.0)
    assert refusal(guard, command).code == "CONFIG_INVALID", "it trains, and what it measures is not the model's"
    command.task.evaluates_only, command.plan.rounds, command.plan.steps_per_round = True, 1, 1
    guard.admit(command)
    (row,) = PrivacyLedger(tmp_path / LEDGER).rows()
    assert (row.level, row.noise, row.rate, row.planned) == ("sample", 2.0, 1.0, 1)
    exact = start("job-2", noise=2.0)
    exact.task.evaluates_only = True
    assert refusal(guard, exact).code == "CONFIG_INVALID", "its counts would leave without noise"


@pytest.mark.parametrize("sampled", [0.0, 1.0])
def test_a_policy_that_gives_out_changes_under_way_gets_no_samples(tmp_path: Path, sampled: float) -> None:
    command = start(sampled=sampled)
    command.plan.wan_policy = "asgd"
    error = refusal(PrivacyGuard(config(), tmp_path), command)
    assert (error.code, "the policy asgd" in error.message) == ("CONFIG_INVALID", True)


@pytest.mark.parametrize("other", [{"clients": {"fraction": 1.0, "steps": 5, "batch": 4}}, {"stages": [[0, 1]]}])
def test_a_worker_takes_no_call_in_which_others_would_make_its_private_steps(other: dict[str, Any]) -> None:
    private = {"clip": 1.0, "noise": 1.0, "rate": 0.1, "key": "0" * 64}
    text = dict.fromkeys(("job", "region", "token", "ps_address", "ps_name", "ca_pem", "channel"), "x")
    text |= dict.fromkeys(("channel_address", "bundle_key", "module"), "x")
    numbers = {"worker": 0, "workers": 1, "attempt": 1, "region_batch": 4, "steps_per_round": 1, "rounds": 1, "seed": 1}
    call = {**text, **numbers, "slice_seconds": 5.0, "config": {}, "splits": {}, "private": private}
    assert read_invocation(json.dumps(call).encode()).private is not None
    with pytest.raises(GeofedError) as told:
        read_invocation(json.dumps(call | other).encode())
    assert told.value.code == "CONFIG_INVALID"
    read_invocation(json.dumps(call | other | {"private": None}).encode())


def test_a_shard_of_another_region_is_not_accounted_for_here(tmp_path: Path) -> None:
    command = start()
    command.plan.shards.add(region="west")
    assert refusal(PrivacyGuard(config(), tmp_path), command).code == "CONFIG_INVALID"
    with pytest.raises(ValueError, match="residency: region"):
        config(residency="anywhere")


def test_a_lowered_budget_ends_a_job_under_way(tmp_path: Path) -> None:
    PrivacyGuard(config(), tmp_path).admit(start())
    ledger = PrivacyLedger(tmp_path / LEDGER)
    ledger.spend("job-1", 1, 1)
    lower = config({"epsilon": (cost(2) + cost(3)) / 2, "delta": DELTA})
    PrivacyGuard(lower, tmp_path).reconcile({"job-1"})
    assert ledger.rows()[0].granted == 2
    PrivacyGuard(config({"epsilon": 0.1, "delta": DELTA}), tmp_path).reconcile({"job-1"})
    assert ledger.rows()[0].granted == 1, "what is spent is spent"
    PrivacyGuard(config(), tmp_path).reconcile({"job-1"})
    assert ledger.rows()[0].granted == 4
    PrivacyGuard(config(), tmp_path).reconcile(set())
    assert not ledger.rows()[0].open, "the job has ended while the agent was away"


def test_of_two_jobs_under_way_the_first_one_keeps_its_grants(tmp_path: Path) -> None:
    wide = {"epsilon": 100.0, "delta": DELTA}
    guard = PrivacyGuard(config(wide), tmp_path)
    guard.admit(start("job-1"))
    guard.admit(start("job-2"))
    ledger = PrivacyLedger(tmp_path / LEDGER)
    ledger.spend("job-2", 1, 1)
    PrivacyGuard(config({"epsilon": (cost(5) + cost(6)) / 2, "delta": DELTA}), tmp_path).reconcile({"job-1", "job-2"})
    assert [row.granted for row in ledger.rows()] == [4, 1]
    assert cost(sum(row.counted for row in ledger.rows())) <= (cost(5) + cost(6)) / 2


def test_without_the_package_nothing_more_is_granted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PrivacyGuard(config(), tmp_path).admit(start())

    def missing(*_: object) -> float:
        raise GeofedError("UNAVAILABLE", "not installed")

    monkeypatch.setattr("region_agent.privacy.epsilon_of", missing)
    monkeypatch.setattr("region_agent.privacy.affordable", missing)
    guard = PrivacyGuard(config(), tmp_path)
    assert refusal(guard, start("job-2")).code == "UNAVAILABLE"
    guard.reconcile({"job-1"})
    assert PrivacyLedger(tmp_path / LEDGER).rows()[0].granted == 0


def test_a_damaged_ledger_grants_nothing_and_stops_no_agent(tmp_path: Path) -> None:
    guard = PrivacyGuard(config(), tmp_path)
    guard.admit(start())
    (tmp_path / LEDGER / "ledger.json").write_text("{}")
    assert refusal(guard, start("job-2")).code == "STATE_INVALID"
    guard.reconcile({"job-1"})
    guard.close("job-1")
    assert guard.spent("job-1") is None
    guard.admit(start("job-3", dataset="open", noise=0.0))


def test_the_loss_of_the_ledger_with_its_folder_gives_no_new_budget(tmp_path: Path) -> None:
    guard = PrivacyGuard(config(), tmp_path)
    guard.admit(start())
    shutil.rmtree(tmp_path / LEDGER)
    again = PrivacyGuard(config(), tmp_path)
    again.reconcile({"job-1"})
    again.close("job-1")
    for command in (start(), start("job-2"), start("job-3", sampled=1.0)):
        assert refusal(again, command).code == "STATE_INVALID"
    again.admit(start("job-4", dataset="open", noise=0.0))
    shown = CliRunner().invoke(app, ["privacy", "--state-dir", str(tmp_path)])
    assert shown.exit_code != 0
    assert "ledger.json is lost" in str(shown.exception)


def test_the_audit_log_knows_what_a_ledger_without_a_trace_had(tmp_path: Path) -> None:
    """The whole ledger is removed, with the file beside it; the agent starts again."""
    guard = PrivacyGuard(config(), tmp_path)
    guard.admit(start())
    made = releases(guard, start())
    made.released(np.zeros(2, np.float32), np.zeros(2, np.float32), 1)
    made.stored(1)
    log = RegionAudit(AgentStore(tmp_path / "agent.db"), tmp_path / AUDIT_KEY, "east", "1")
    assert log.releases() == {}
    log.note(agent_pb2.PartitionReport(job="job-1", epoch=1, state="finished", privacy=guard.spent("job-1")))
    log.note(agent_pb2.PartitionReport(job="plain", epoch=1, state="finished"))
    assert log.releases() == {"job-1": 1}
    guard.require(log.releases())
    guard.close("job-1")
    assert guard.spent("job-1") is not None
    shutil.rmtree(tmp_path / LEDGER)
    (tmp_path / f"{LEDGER}.jobs").unlink()
    again = PrivacyGuard(config(), tmp_path)
    again.require(log.releases())
    assert refusal(again, start("job-2")).code == "STATE_INVALID"


def test_a_state_that_was_restored_from_a_copy_grants_nothing_until_the_owner_accepts_it(tmp_path: Path) -> None:
    guard = PrivacyGuard(config(), tmp_path)
    guard.admit(start())
    guard.state_restored()
    for asked in (guard, PrivacyGuard(config(), tmp_path)):
        told = refusal(asked, start("job-2"))
        assert told.code == "STATE_INVALID"
        assert "restored from a copy" in told.message
    guard.admit(start("job-3", dataset="open", noise=0.0))
    guard.state_restored()
    # The owner sees what is known, to decide on it.
    shown = CliRunner().invoke(app, ["privacy", "--state-dir", str(tmp_path)])
    assert "job-1  digits, level " in shown.stdout
    assert isinstance(shown.exception, GeofedError)
    assert shown.exception.code == "STATE_INVALID"
    (tmp_path / f"{LEDGER}.restored").unlink()
    PrivacyGuard(config(), tmp_path).admit(start("job-2", rounds=1))
    assert CliRunner().invoke(app, ["privacy", "--state-dir", str(tmp_path)]).exit_code == 0


def test_a_region_without_budgets_and_releases_has_nothing_to_lose(tmp_path: Path) -> None:
    guard = PrivacyGuard(config(None), tmp_path)
    guard.state_restored()
    guard.admit(start())
    guard.state_restored()
    assert refusal(guard, start("job-2")).code == "STATE_INVALID"


def test_a_report_tells_no_loss_of_private_data() -> None:
    message = agent_pb2.PartitionReport(loss=0.5, round_loss=0.5)
    message.logged.values["train_accuracy"] = 0.9
    withhold(message, agent_pb2.Privacy(epsilon=1.0, delta=DELTA, releases=3))
    assert message.loss != message.loss
    assert message.round_loss != message.round_loss
    assert not message.logged.values
    assert message.privacy.releases == 3


def test_lines_of_job_code_leave_the_region_where_nothing_is_limited_or_its_file_says_so() -> None:
    noisy = start().plan
    plain = agent_pb2.PartitionPlan()
    known = config(None)
    assert [ships_logs(known, name, plan) for name in ("digits", "open") for plan in (plain, noisy)] == [
        True, False, True, False,
    ]  # fmt: skip
    assert not ships_logs(config(None, minimumCount=10), "digits", plain)
    assert not ships_logs(config(), "digits", plain)
    assert ships_logs(config(), "open", plain)
    for says in (True, False):
        policy = config().policy.model_copy(update={"ship_logs": says})
        stated = config().model_copy(update={"policy": policy})
        assert {ships_logs(stated, name, plan) for name in ("digits", "open") for plan in (plain, noisy)} == {says}


def test_an_evaluation_of_private_data_tells_no_text() -> None:
    message = agent_pb2.PartitionReport(evaluation=agent_pb2.Evaluation(error="metrics raised KeyError: 'Meier'"))
    withhold(message, None)
    assert message.evaluation.error
    assert "Meier" not in message.evaluation.error


def test_the_command_shows_the_ledger(tmp_path: Path) -> None:
    runner, file = CliRunner(), tmp_path / "east.yaml"
    state = ("--state-dir", str(tmp_path / "state"))
    empty = runner.invoke(app, ["privacy", *state])
    assert empty.exit_code == 0
    guard = PrivacyGuard(config(), tmp_path / "state")
    guard.admit(start())
    PrivacyLedger(guard.folder).spend("job-1", 1, 1)
    file.write_text(json.dumps(json.loads(config().model_dump_json(by_alias=True, exclude_none=True))))
    shown = runner.invoke(app, ["privacy", "--config", str(file), *state])
    assert shown.exit_code == 0, shown.output
    first, second = shown.stdout.splitlines()
    assert first == (
        f"digits  epsilon {cost(1):.3g} spent, {cost(4):.3g} with what open jobs may still spend, "
        "of 6 allowed, at delta 1e-05"
    )
    assert second == f"  job-1  digits, level region: epsilon {cost(1):.3g} at delta 1e-05, by 1 of 4 releases, open"
    told = json.loads(runner.invoke(app, ["privacy", "-o", "json", *state]).stdout)["data"]
    assert told["datasets"][0]["epsilon"] == cost(1)
    assert told["datasets"][0]["budget"] is None
    assert told["jobs"][0]["spent"] == 1


def test_an_account_without_a_budget_is_at_the_smallest_delta(tmp_path: Path) -> None:
    guard = PrivacyGuard(config(None), tmp_path)
    guard.admit(start())
    guard.admit(start("job-2", delta=1e-7))
    rows = [replace(row, spent=2) for row in PrivacyLedger(guard.folder).rows()]
    (account,) = accounts_of(None, rows)
    assert (account.delta, account.budget) == (1e-7, None)
    assert account.epsilon == epsilon_of([(Release(2.0), 4)], 1e-7)


def test_metrics_without_noise_stay() -> None:
    message = agent_pb2.Evaluation(metrics={"loss": 0.5}, samples=90, round=3)
    message.histograms["ward"].CopyFrom(common_pb2.Histogram(categories=["a"], counts=[30]))
    withhold_metrics(message)
    assert (dict(message.metrics), dict(message.histograms), message.samples, message.round) == ({}, {}, 0, 3)
    assert "minimumCount" in message.error
    failed = agent_pb2.Evaluation(error="metrics raised KeyError: 'patient 4711'")
    withhold_metrics(failed)
    assert "4711" not in failed.error
    nothing = agent_pb2.Evaluation(round=2)
    withhold_metrics(nothing)
    assert nothing == agent_pb2.Evaluation(round=2), "no evaluation is due"


def test_an_evaluation_tells_nothing_of_few_samples() -> None:
    def evaluated(samples: int) -> agent_pb2.Evaluation:
        message = agent_pb2.Evaluation(metrics={"loss": 0.5}, samples=samples, round=3)
        message.histograms["ward"].CopyFrom(common_pb2.Histogram(categories=["a", "b", "c"], counts=[30, 12, 2]))
        return message

    few, enough, failed = evaluated(9), evaluated(10), evaluated(10)
    withhold_small_counts(few, 10, {})
    assert (dict(few.metrics), dict(few.histograms), few.samples, few.round) == ({}, {}, 0, 3)
    assert "minimumCount, 10" in few.error
    withhold_small_counts(enough, 10, {})
    assert (dict(enough.metrics), enough.samples, enough.error) == ({"loss": 0.5}, 10, "")
    assert enough.histograms["ward"] == common_pb2.Histogram(categories=["a"], counts=[30], withheld=2)
    failed.samples, failed.error = 0, "metrics raised KeyError: 'patient 4711'"
    withhold_small_counts(failed, 10, {})
    assert (dict(failed.metrics), dict(failed.histograms)) == ({}, {})
    assert "4711" not in failed.error


def test_bin_edges_that_no_job_file_states_stay() -> None:
    def evaluated() -> agent_pb2.Evaluation:
        message = agent_pb2.Evaluation(metrics={"loss": 0.5}, samples=60)
        message.histograms["age"].CopyFrom(common_pb2.Histogram(edges=[0.0, 17.25, 93.5], counts=[30, 30]))
        return message

    computed, stated = evaluated(), evaluated()
    withhold_small_counts(computed, 10, {"edges": [0, 40, 93.5], "lr": 0.1})
    assert not computed.histograms
    assert "the bin edges of age are not in task.config" in computed.error
    withhold_small_counts(stated, 10, {"of": [{"age": [0, 17.25, 93.5]}]})
    assert stated == evaluated()
