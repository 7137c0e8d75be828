"""What jobs may release of the region's data: the owner's budgets, enforced by the region's own ledger."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2
from region_agent.config import PrivacyBudget, RegionConfig
from sync.collective import collective_named
from sync.histograms import by_category, without_small_counts
from sync.policy import policy_named
from sync.privacy import LedgerRow, PrivacyLedger, Release, affordable, epsilon_of
from sync.wan import ExchangeSettings

__all__ = [
    "LEDGER",
    "DatasetAccount",
    "PrivacyGuard",
    "accounts_of",
    "is_private",
    "keeps_texts",
    "labels_that_leave",
    "ships_logs",
    "without_quotes",
]

_log = structlog.get_logger("geofed.privacy")
_FEWEST_LABELS = 10
"""Fewest samples of a label whose number leaves the region, whatever its file says: rarer ones tell of few people."""
LEDGER = "privacy"
"""Folder of the ledger in the agent's state directory."""
_QUOTING = frozenset({"TASK_FAILED", "FUNCTION_FAILED", "INTERNAL", "SHARD_UNREADABLE", "LIMIT_EXCEEDED"})
"""Codes of errors whose texts may quote samples, or name their files: those of exceptions of job code, of what a
function answers, and of data that cannot be read."""


def is_private(plan: agent_pb2.PartitionPlan) -> bool:
    """Whether what leaves the region has noise, so that nothing else of the data may leave it."""
    return bool(plan.wan_settings.get("noise"))


def keeps_texts(config: RegionConfig, dataset: str, plan: agent_pb2.PartitionPlan | None = None) -> bool:
    """Whether texts that may quote samples of a dataset stay in the region: the owner or the job limits what is told.

    ``plan``: of the job; None: of a profile or a probe.
    """
    held = config.datasets.get(dataset)
    limited = held is not None and (held.privacy is not None or held.minimum_count is not None)
    return limited or (plan is not None and is_private(plan))


def ships_logs(config: RegionConfig, dataset: str, plan: agent_pb2.PartitionPlan) -> bool:
    """Whether log lines of a job's code leave the region: as its file states, or else where no text has to stay."""
    stated = config.policy.ship_logs
    return not keeps_texts(config, dataset, plan) if stated is None else stated


def without_quotes(error: GeofedError, region: str, name: str) -> GeofedError:
    """Return an error as it may leave the region where `keeps_texts`; its text is in the agent's log. ``name``: of the
    job, profile or probe."""
    if error.code not in _QUOTING:
        return error
    _log.warning("an error whose text stays in the region", job=name, code=error.code, text=error.message)
    text = f"the text of this error stays in {region}, since it may quote data; the log of its agent has it"
    return GeofedError(error.code, text, hint=f"ask the operator of {region}")


def labels_that_leave(config: RegionConfig, dataset: str, counts: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return labels of a dataset with their number among some samples, in order, as far as they may leave the region.

    None do of a dataset with a budget of differential privacy. Numbers below `_FEWEST_LABELS`, or `minimumCount` if
    that is more, stay here.
    """
    held = config.datasets.get(dataset)
    if held is None or held.privacy is not None:
        return []
    least = max(_FEWEST_LABELS, held.minimum_count or 0)
    kept = without_small_counts(by_category((str(label), count) for label, count in counts.items()), least)
    return sorted((int(label), count) for label, count in zip(kept.categories, kept.counts, strict=True))


@dataclass(frozen=True)
class DatasetAccount:
    """What was spent of a dataset."""

    dataset: str
    epsilon: float
    """Of all releases so far."""
    reserved: float
    """The same, with those that open jobs may still make."""
    delta: float
    """That of the budget or, without one, the smallest of the jobs' own."""
    budget: float | None
    """Epsilon that the owner allows; None: any."""


def accounts_of(config: RegionConfig | None, rows: Sequence[LedgerRow]) -> list[DatasetAccount]:
    """Return what was spent of each dataset in the ledger, or with a budget. Raises ``GeofedError("UNAVAILABLE")``."""
    datasets = config.datasets if config is not None else {}
    budgets = {name: held.privacy for name, held in datasets.items() if held.privacy is not None}
    found = []
    for name in dict.fromkeys([*(row.dataset for row in rows), *budgets]):
        of = [row for row in rows if row.dataset == name]
        budget = budgets.get(name)
        delta = budget.delta if budget is not None else min(row.delta for row in of)
        spent = epsilon_of([(row.release, row.spent) for row in of], delta)
        reserved = epsilon_of(_counted(of), delta)
        found.append(DatasetAccount(name, spent, reserved, delta, None if budget is None else budget.epsilon))
    return found


class PrivacyGuard:
    """Grants the releases of a job before it starts, and reports what it has made. What cannot be told is refused."""

    def __init__(self, config: RegionConfig, state_dir: Path) -> None:
        self._config = config
        self.folder = state_dir / LEDGER
        self._ledger = PrivacyLedger(self.folder)
        self._told: dict[str, tuple[int, agent_pb2.Privacy]] = {}
        """The last answer of `spent` by job, with the releases that it is of."""

    def admit(self, command: agent_pb2.StartPartition) -> None:
        """Grant a job the releases of its plan; one that has them keeps them.

        Raises ``GeofedError``: FORBIDDEN if the dataset has a budget and the job adds no noise; PRIVACY_EXHAUSTED if
        the job would exceed it; UNAVAILABLE without `dp-accounting`; STATE_INVALID if the ledger is damaged;
        CONFIG_INVALID.
        """
        plan, dataset = command.plan, command.task.dataset
        settings, _ = ExchangeSettings.of(plan.wan_settings)
        held = self._config.datasets.get(dataset)
        budget = held.privacy if held is not None else None
        if not settings.noise:
            if budget is not None:
                text = f"region {self._config.name} releases what is made of {dataset} with differential privacy only"
                raise GeofedError("FORBIDDEN", text, hint="set privacy.differential in the job file")
            return
        if held is None or "train" not in held.splits or any(ref.region != self._config.name for ref in plan.shards):
            raise GeofedError("CONFIG_INVALID", "with differential privacy each region trains on its own shard")
        sampled = bool(settings.sampled)
        if bool(settings.measured) is not command.task.evaluates_only:
            # Counts without noise would leave, or a model that the noise is not for.
            raise GeofedError(
                "CONFIG_INVALID", "noise on counts is for a job that trains nothing, and such a job for it"
            )
        if reason := _what_loses_noise(command, sampled=sampled):
            raise GeofedError("CONFIG_INVALID", f"noise of the level {_level(sampled)} cannot be added with {reason}")
        rate = self._rate(command.job, plan, held.splits["train"].samples) if sampled else 1.0
        of_samples = sampled or bool(settings.measured)
        release = Release.of(settings.noise * _part_that_counts(settings, budget), rate, sampled=of_samples)
        planned = plan.rounds * (plan.steps_per_round if sampled else 1)
        asked = LedgerRow(
            command.job, dataset, _level(of_samples), release.noise, release.rate, settings.delta,
            planned=planned, granted=planned, at=time.time(),
        )  # fmt: skip
        # Refused here without it, rather than when the first report is due.
        epsilon_of([(release, 1)], settings.delta)

        def granted(rows: Sequence[LedgerRow]) -> Sequence[LedgerRow]:
            before = next((row for row in rows if row.job == asked.job), None)
            others = [row for row in rows if row.job != asked.job]
            row = asked
            if before is not None:
                if (before.dataset, before.release) != (asked.dataset, asked.release):
                    raise GeofedError("CONFIG_INVALID", f"{asked.job} has released something else here before")
                row = replace(asked, spent=before.spent, last=before.last, stored=before.stored, at=before.at)
            if budget is not None:
                of = [one for one in others if one.dataset == dataset]
                cost = epsilon_of([*_counted(of), (release, max(planned, row.spent))], budget.delta)
                if cost > budget.epsilon:
                    used = epsilon_of(_counted(of), budget.delta)
                    text = f"{planned} releases of {dataset} by {asked.job} would make its epsilon {cost:.3g}"
                    text += f" at delta {budget.delta:g}: {used:.3g} is spent or reserved, {budget.epsilon:g} allowed"
                    raise GeofedError("PRIVACY_EXHAUSTED", text)
            return [row if one is before else one for one in rows] if before is not None else [*rows, row]

        self._ledger.change(granted)

    def require(self, releases: Mapping[str, int]) -> None:
        """From now on, refuse every job with noise if the ledger lacks what the region's audit log has of ended jobs:
        releases by job. So a ledger that is lost with all files beside it is not taken for a new one."""
        self._ledger.require(len(releases), sum(releases.values()))

    def state_restored(self) -> None:
        """From now on, refuse every job with noise, as the state directory is an older copy: releases may be missing.

        Does nothing where there is neither a budget nor a release.
        """
        budgets = any(held.privacy is not None for held in self._config.datasets.values())
        try:
            counts = budgets or bool(self._ledger.rows())
        except GeofedError:
            counts = True
        if counts:
            _log.error("what is spent of privacy is not known any more: jobs with noise are refused")
            self._ledger.doubt()

    def reconcile(self, jobs: Collection[str]) -> None:
        """Bring the grants of open jobs into line with the present budgets, when the agent starts.

        ``jobs``: those that may still run here. What exceeds a lowered budget is not granted any longer, so the job's
        next update is refused. If the ledger is damaged, the jobs' servers refuse theirs.
        """

        def settled(rows: Sequence[LedgerRow]) -> Sequence[LedgerRow]:
            made = [row if row.job in jobs else replace(row, open=False) for row in rows]
            for number, row in enumerate(made):
                held = self._config.datasets.get(row.dataset)
                if not row.open or held is None or held.privacy is None:
                    continue
                budget, others = held.privacy, [one for one in made if one.dataset == row.dataset and one is not row]
                # Of the later open jobs only what they have made: the first ones keep their grants.
                base = [
                    (one.release, one.counted if made.index(one) < number else one.spent) for one in others
                ]  # fmt: skip
                most = affordable(base, row.release, row.planned, budget.epsilon, budget.delta)
                made[number] = replace(row, granted=max(row.spent, most))
            return made

        try:
            if self._ledger.rows():
                self._ledger.change(settled)
        except GeofedError as error:
            _log.error("the grants of releases cannot be checked", error=str(error))
            if error.code == "UNAVAILABLE":
                self._ledger.change(lambda rows: [replace(row, granted=row.spent) for row in rows])

    def close(self, job: str) -> None:
        """Note that a job has ended: what it has not spent is free again."""
        try:
            self._ledger.close(job)
        except GeofedError as error:
            # What it was granted stays reserved.
            _log.error("the end of a job cannot be noted", job=job, error=str(error))

    def _rate(self, job: str, plan: agent_pb2.PartitionPlan, samples: int | None) -> float:
        """Return the probability with which each sample is in a step; ``samples``: of the shard, None: not counted.

        A job that has begun keeps its own, with which its workers draw, also if the region file has another number now.
        """
        try:
            return self.rate(job)
        except GeofedError as error:
            if error.code != "PRIVACY_EXHAUSTED":
                raise
        if samples is None:
            raise GeofedError("SHARD_UNREADABLE", "the samples of the dataset are still being counted")
        return min(1.0, plan.batch * plan.workers / samples) if samples else 1.0

    def rate(self, job: str) -> float:
        """Return the probability with which each sample is in a step of a job, as its releases are accounted for.

        Raises ``GeofedError``: PRIVACY_EXHAUSTED if none are; STATE_INVALID.
        """
        row = next((row for row in self._ledger.rows() if row.job == job), None)
        if row is None:
            raise GeofedError("PRIVACY_EXHAUSTED", f"the region has granted {job} no release of its data")
        return row.rate

    def require_own_model(self, job: str) -> None:
        """Raise ``GeofedError``: FORBIDDEN if the region's own model of a job has tensors that were trained without
        noise (`train.local` with noise on updates only); STATE_INVALID if the ledger is damaged."""
        if any(row.job == job and row.level == "region" for row in self._ledger.rows()):
            text = f"the own model of {job} has tensors that stay in their region, and were trained without noise"
            raise GeofedError("FORBIDDEN", text, hint="with privacy.differential.level: sample all tensors have it")

    def spent(self, job: str) -> agent_pb2.Privacy | None:
        """Return what a job has spent, at its own delta; None: it is not in the ledger, or that cannot be read."""
        try:
            row = next((row for row in self._ledger.rows() if row.job == job), None)
            if row is None:
                return None
            known = self._told.get(job)
            if known is None or known[0] != row.spent:
                epsilon = epsilon_of([(row.release, row.spent)], row.delta)
                told = agent_pb2.Privacy(epsilon=epsilon, delta=row.delta, releases=row.spent)
                known = self._told[job] = row.spent, told
        except GeofedError:
            return None
        return known[1]


def _part_that_counts(settings: ExchangeSettings, budget: PrivacyBudget | None) -> float:
    """Return the part of the noise of a sum that honest regions add, by the data's owner.

    With secure aggregation any ``secure - 1`` regions together add all of it, each by its variance
    (`sync.privacy.standard_deviation`).
    """
    needed = settings.secure - 1
    if (
        budget is None
        or budget.honest_regions is None
        or settings.sampled
        or settings.measured
        or needed <= budget.honest_regions
    ):
        return 1.0
    return math.sqrt(budget.honest_regions / needed)


def _level(sampled: bool) -> str:
    return "sample" if sampled else "region"


def _what_loses_noise(command: agent_pb2.StartPartition, *, sampled: bool) -> str:
    """Return what in a command would let updates leave without all of their noise, as text for users; "": nothing.

    Job files with it are refused by an honest control plane already. Workers merge the whole gradients of a step only
    with the settings that are left, so that all parts of its noise are in the sum.
    """
    plan, task = command.plan, command.task
    if not policy_named(plan.wan_policy).sums:
        return f"the policy {plan.wan_policy}"
    if not sampled:
        return ""
    method = None if plan.collective in ("", "auto") else collective_named(plan.collective)
    refused = (
        # Clients train by themselves, with their samples' plain gradients.
        (task.HasField("clients"), "clients"),
        (plan.HasField("pipeline"), "a pipeline"),
        (plan.merging_codec not in ("", "fp32"), "a codec of gradients"),
        (bool(plan.merging.get("staleness")), "a staleness of gradients"),
        (method is not None and method.shares != "mean", f"the collective {plan.collective}"),
        (task.precision not in ("", "fp32"), f"precision {task.precision}"),
        (task.compile, "a compiled model"),
        (task.gpus not in ("", "1"), "several GPUs of a worker"),
    )
    return next((text for is_refused, text in refused if is_refused), "")


def _counted(rows: Iterable[LedgerRow]) -> list[tuple[Release, int]]:
    return [(row.release, row.counted) for row in rows]
