"""The region's policy: limits that the region enforces itself, independent of the control plane's plan."""

from __future__ import annotations

import re
from datetime import timedelta

from geofed_pb.bounds import NAME_BYTES, clean
from geofed_pb.errors import GeofedError
from geofed_pb.security.signing import require_signature, statement
from geofed_pb.user_code.images import is_allowed_image
from geofed_pb.v1 import agent_pb2
from region_agent.config import EmbeddedGateway, RegionConfig
from region_agent.gateway.functions import Isolation
from region_agent.partition.calls import gpus_of, sharding_of
from region_agent.shards.weights import check_weights_uri
from region_agent.tasks.environments import check_packages
from region_agent.tasks.secrets import check_secrets
from region_agent.worker.invocation import CALL_GRACE
from sync.codec import MaskedIntegers, codec_named
from sync.ps.tokens import MAX_TOKEN_LIFETIME
from sync.secure import hiding_regions
from sync.wan import ExchangeSettings

__all__ = [
    "check_isolation",
    "check_partition",
    "check_sending",
    "check_user_of_dataset",
    "longest_slice",
    "most_workers",
    "over_quota",
]

_JOB = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_REGION = re.compile(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?")
_LONGEST_SLICE = MAX_TOKEN_LIFETIME - timedelta(minutes=5)
"""Longest slice; a worker's token must stay valid after it, until the end of the step and of waits for an answer."""

_ENDING_SECONDS = 15.0
"""Time of a replica that its platform ends beyond its start and a call: to begin that, and to leave before the end."""


def most_workers(config: RegionConfig, *, preemptible: bool = False) -> int:
    """Return the largest number of workers, preemptible or not, that one job may have in this region."""
    capacity = config.capacity.preemptible if preemptible else config.capacity.workers
    return min(capacity, config.policy.max_workers_per_job or capacity)


def longest_slice(config: RegionConfig) -> float | None:
    """Return the longest slice, in seconds, whose call ends before the platform ends its function; None: any."""
    if config.life_seconds is None:
        return None
    return max(0.0, config.life_seconds - CALL_GRACE.total_seconds() - _start_seconds(config) - _ENDING_SECONDS)


def _start_seconds(config: RegionConfig) -> float:
    # A higher `startSeconds` than the platform's allows for more waiting, not for longer starts.
    return min(config.start_seconds, config.platform.start_seconds)


def check_partition(config: RegionConfig, command: agent_pb2.StartPartition) -> None:
    """Check a partition against the region's policy; raises ``GeofedError`` with the code of the violated rule."""
    plan, dataset = command.plan, config.datasets.get(command.task.dataset)
    _check_names(config, command)
    if not config.policy.accept_jobs:
        raise GeofedError("FORBIDDEN", f"region {config.name} takes no jobs", hint="its policy.acceptJobs is false")
    check_user(config, command.task)
    check_user_of_dataset(config, command.task)
    check_secrets(config, command.task)
    check_packages(config, command.task.requirements)
    check_image(config, command.task.image)
    if command.region != config.name:
        raise GeofedError("RESIDENCY_VIOLATION", f"a partition of {command.region} was sent to {config.name}")
    foreign = [ref.region for ref in plan.shards if ref.region != config.name]
    if foreign and not config.takes_shards:
        text = f"region {config.name} processes no shards of other regions"
        raise GeofedError("FORBIDDEN", text, hint="policy.acceptShards, or a gateway whose functions see no file of it")
    if not all(_REGION.fullmatch(name) for name in foreign) or len(set(foreign)) < len(foreign):
        raise GeofedError("CONFIG_INVALID", "a shard of an invalid region, or the same shard twice")
    own = not plan.shards or len(foreign) < len(plan.shards)
    if own and (dataset is None or "train" not in dataset.splits):
        raise GeofedError("SHARD_UNREADABLE", f"region {config.name} holds no training split of {command.task.dataset}")
    check_secure(config, command)
    most = most_workers(config)
    if plan.workers > most:
        text = f"region {config.name} allows a job {most} workers, the plan has {plan.workers}"
        raise GeofedError("FORBIDDEN", text)
    if not 0 < plan.slice_seconds <= _LONGEST_SLICE.total_seconds():
        valid = MAX_TOKEN_LIFETIME.total_seconds()
        text = f"a slice of {plan.slice_seconds:g} s; a worker's token is valid for {valid:g} s"
        raise GeofedError("LIMIT_EXCEEDED", text, hint=f"function.slice is at most {_LONGEST_SLICE.total_seconds():g}s")
    longest = longest_slice(config)
    if longest is not None and plan.slice_seconds > longest:
        text = f"a slice of {plan.slice_seconds:g} s; {config.platform.title} ends a function of {config.name} after "
        hint = f"function.slice is at most {longest:g}s there, with starts of up to {_start_seconds(config):g} s"
        raise GeofedError("LIMIT_EXCEEDED", f"{text}{config.life_seconds:g} s", hint=hint)
    if plan.memory_mb > config.capacity.memory_mb:
        text = f"region {config.name} allows a function {config.capacity.memory_mb} MB, the plan has {plan.memory_mb}"
        raise GeofedError("FORBIDDEN", text)


def _check_names(config: RegionConfig, command: agent_pb2.StartPartition) -> None:
    """Check the names, digests and addresses that a command brings; raises ``GeofedError("CONFIG_INVALID")``."""
    if not (_JOB.fullmatch(command.job) and _DIGEST.fullmatch(command.task.bundle_digest)):
        # Both are used as names of files.
        raise GeofedError("CONFIG_INVALID", f"invalid job name {command.job!r}, or invalid digest of its bundle")
    gpus_of(command.task)
    sharding_of(command.task)
    if command.task.initial_model and not _DIGEST.fullmatch(command.task.initial_model):
        raise GeofedError("CONFIG_INVALID", "invalid digest of the initial model")
    if command.task.initial_adapter and not (
        _DIGEST.fullmatch(command.task.initial_adapter) and command.task.initial_model and command.task.initial_holds
    ):
        raise GeofedError("CONFIG_INVALID", "invalid digest of an adapter, or an adapter without a user's model")
    if command.task.initial_uri:
        if not command.task.initial_model:
            raise GeofedError("CONFIG_INVALID", "an address of the initial model without its digest")
        check_weights_uri(config, command.task.initial_uri)


def check_user(config: RegionConfig, task: agent_pb2.TaskRef) -> None:
    """Check that a user of `policy.allowUsers` has signed what is to run; raises ``GeofedError("FORBIDDEN")``."""
    allowed, submission = config.policy.allow_users, task.submission
    if allowed is None:
        return
    if submission.user not in allowed:
        text = f"region {config.name} runs no code of user {submission.user or 'unknown'}"
        raise GeofedError("FORBIDDEN", text, hint="its policy.allowUsers lists whose code it runs")
    signed_start = submission.initial_model, submission.initial_adapter
    if task.initial_holds and signed_start != (task.initial_model, task.initial_adapter):
        started = " with ".join(filter(None, (task.initial_model, task.initial_adapter)))
        raise GeofedError("FORBIDDEN", f"user {submission.user} has signed no job that starts from {started}")
    facts = submission.spec_digest, task.bundle_digest, task.module, task.config_json, task.dataset, task.env
    more = task.secrets, task.requirements, task.image, submission.initial_adapter
    signed = statement(*facts, submission.initial_model, *more)
    require_signature(submission, allowed[submission.user], signed)


def check_user_of_dataset(config: RegionConfig, task: agent_pb2.TaskRef) -> None:
    """Check that a user's code may run on a dataset, whose rule names users or the region's own roles.

    The user's signature is checked by `check_user`: such a rule requires `policy.allowUsers`. Raises
    ``GeofedError("FORBIDDEN")``.
    """
    users, user = config.users_of(task.dataset), task.submission.user
    if users is None or (config.policy.allow_users is not None and user in users):
        return
    text = f"region {config.name} runs no code of user {clean(user, NAME_BYTES) or 'unknown'} on {task.dataset}"
    raise GeofedError("FORBIDDEN", text, hint=f"`datasets.{task.dataset}.allow` in its file says whose code may run")


def check_image(config: RegionConfig, image: str) -> None:
    """Check that a task may run in the container image that it names, if any; raises ``IMAGE_REFUSED``."""
    if not image:
        return
    if is_allowed_image(image, config.policy.allow_images):
        if config.policy.approve == "none" or "@" in image:
            return
        # Whoever can push to a tag would change what was approved.
        text = f"region {config.name} approves code, and the image {clean(image, NAME_BYTES)} may change"
        raise GeofedError("IMAGE_REFUSED", text, hint="name it by digest: task.image: NAME@sha256:DIGEST")
    if isinstance(config.gateway, EmbeddedGateway):
        why = f"its functions run on {config.platform.title}, as processes without an image"
        hint = f"leave out task.image, or avoid {config.name}"
        raise GeofedError("IMAGE_REFUSED", f"region {config.name} runs no task in an image: {why}", hint=hint)
    # A name from the control plane, of any content.
    text = f"region {config.name} does not let tasks run in {clean(image, NAME_BYTES)}"
    raise GeofedError("IMAGE_REFUSED", f"{text}: it is not in its policy.allowImages")


def check_secure(config: RegionConfig, command: agent_pb2.StartPartition) -> None:
    """Check that updates leave the region only as `policy.secureRegions` says.

    Regions count if their share in the mean is not small (`hiding_regions`). Raises ``GeofedError``: FORBIDDEN;
    CONFIG_INVALID if the plan's shares are not those of the job's regions.
    """
    fewest, plan = config.policy.secure_regions, command.plan
    if fewest is None:
        return
    # The parameter server refuses other settings than these, so that a masked codec means masked updates.
    settings, _ = ExchangeSettings.of(plan.wan_settings)
    masked, count = settings.secure > 0 and isinstance(codec_named(plan.codec), MaskedIntegers), 0
    if masked:
        if {*plan.shares} != {*command.regions}:
            raise GeofedError("CONFIG_INVALID", "the shares of a plan are not those of the job's regions")
        count = hiding_regions(plan.shares)
    if not masked or count < fewest:
        text = f"region {config.name} takes part only with secure aggregation over at least {fewest} regions"
        has = f"the plan has {count} of more than a small share" if masked else "the job has none"
        raise GeofedError("FORBIDDEN", f"{text}, and {has}", hint="set privacy.secureAggregation, or use more regions")


def over_quota(region: str, used_mb: float, most_mb: int) -> GeofedError:
    """Return the error of a job that takes more disk space than the region gives one."""
    text = f"the job takes {used_mb:,.0f} MB of disk space in region {region}, which gives a job {most_mb:,} MB"
    return GeofedError("LIMIT_EXCEEDED", text, hint="policy.maxDiskMbPerJob in the region's file is the limit")


def check_isolation(config: RegionConfig, isolation: Isolation) -> None:
    """Check that job code is isolated as the region's policy requires; raises ``ISOLATION_UNAVAILABLE``."""
    if config.policy.isolation == "require" and isolation.kind == "none":
        text = f"region {config.name} runs job code in sandboxes only, which this machine cannot: {isolation.reason}"
        raise GeofedError("ISOLATION_UNAVAILABLE", text, hint=isolation.hint)


def check_sending(config: RegionConfig, order: agent_pb2.SendShard, cloud: str | None) -> None:
    """Check that this region's shard may be sent to another region.

    ``cloud``: the other region's cloud as that region states it; None: not known yet.

    Raises ``GeofedError``: RESIDENCY_VIOLATION; SHARD_UNREADABLE if there is no such shard; CONFIG_INVALID.
    """
    if not _JOB.fullmatch(order.job) or not _REGION.fullmatch(order.to):
        raise GeofedError("CONFIG_INVALID", f"invalid job name {order.job!r}, or invalid region name {order.to!r}")
    held = config.datasets.get(order.dataset)
    if held is None or "train" not in held.splits:
        raise GeofedError("SHARD_UNREADABLE", f"region {config.name} holds no training split of {order.dataset}")
    rule = held.residency
    by_cloud = rule == "cloud" and cloud in (None, config.cloud)
    named = not isinstance(rule, str) and order.to in rule
    if not (rule == "anywhere" or by_cloud or named) or order.to == config.name:
        text = f"the shard of {order.dataset} in {config.name} may not go to {order.to}"
        text += f", of cloud {cloud}" if rule == "cloud" and cloud else ""
        stated = rule if isinstance(rule, str) else f"[{', '.join(rule)}]"
        raise GeofedError("RESIDENCY_VIOLATION", text, hint=f"its residency in the file of {config.name} is {stated}")
