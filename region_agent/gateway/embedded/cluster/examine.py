"""Whether a region's functions can run in its cluster, for `geofed agent doctor`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from lightkube.models.core_v1 import ResourceQuota

from geofed_pb.errors import GeofedError
from region_agent.config import KubernetesGateway, RegionConfig
from region_agent.gateway.embedded.cluster.api import ClusterApi
from region_agent.gateway.embedded.cluster.manifests import ObjectOwner, job_of, secret_of
from region_agent.gateway.functions import FunctionSpec
from region_agent.gateway.quantities import parse_cpu, parse_memory_bytes

__all__ = ["examine_cluster", "shortage"]


async def examine_cluster(config: RegionConfig, gateway: KubernetesGateway) -> str:
    """Return what was found; raises ``GeofedError`` for what would keep functions from running."""
    api = ClusterApi(gateway)
    try:
        missing = await api.missing_rights()
        if missing:
            raise GeofedError(
                "FORBIDDEN",
                f"the account may not, in namespace {api.namespace}: {', '.join(missing)}",
                hint="give it the rights of deploy/kubernetes/agent.yaml",
            )
        for spec in _functions(config, gateway):
            identity = ObjectOwner("doctor", "doctor")
            name = identity.name(0)
            env = {"GEOFED_DIAL": "checked"}
            job = job_of(name, spec, identity, gateway, env)
            await api.create(job, partial(secret_of, name, spec, identity, env, {}), dry_run=True)
        quotas = await api.quotas()
    finally:
        await api.close()
    short = shortage(config, gateway, quotas)
    if short:
        raise GeofedError(
            "LIMIT_EXCEEDED", "; ".join(short), hint="lower `capacity`, or have the namespace's ResourceQuota raised"
        )
    names = ", ".join(sorted(one.metadata.name or "" for one in quotas if one.metadata is not None))
    limits = f"quota {names} suffices" if names else "no quota"
    return f"{api.url}, namespace {api.namespace}: may run functions, {limits}"


def _functions(config: RegionConfig, gateway: KubernetesGateway) -> Iterator[FunctionSpec]:
    limits = {"memory": f"{config.capacity.memory_mb}Mi"}
    yield FunctionSpec("doctor", gateway.image, limits=limits)
    if config.capacity.preemptible:
        yield FunctionSpec("doctor", gateway.image, limits=limits, labels={"geofed.capacity": "preemptible"})


def shortage(config: RegionConfig, gateway: KubernetesGateway, quotas: Sequence[ResourceQuota]) -> list[str]:
    """Return in which quotas the region's whole capacity has no room, as sentences."""
    capacity = config.capacity
    workers = capacity.workers + capacity.preemptible
    memory = workers * capacity.memory_mb * 2**20
    cpu = workers * parse_cpu(gateway.cpu)
    gpus = float(workers * gateway.gpus)
    wanted = {
        "pods": float(workers), "count/pods": float(workers), "count/jobs.batch": float(workers),
        "count/secrets": float(workers), "secrets": float(workers),
        **dict.fromkeys(("memory", "requests.memory", "limits.memory"), float(memory)),
        **dict.fromkeys(("cpu", "requests.cpu", "limits.cpu"), cpu),
        f"requests.{gateway.gpu_resource}": gpus,
    }  # fmt: skip
    found = []
    for quota in quotas:
        hard = (quota.spec.hard if quota.spec is not None else None) or {}
        for resource, limit in hard.items():
            if wanted.get(resource, 0.0) > _amount(resource, str(limit)):
                name = quota.metadata.name if quota.metadata is not None else ""
                found.append(
                    f"quota {name} allows {limit} of {resource}; {workers} workers of "
                    f"{capacity.memory_mb} MB need {_shown(resource, wanted[resource])}"
                )
    return found


def _amount(resource: str, quantity: str) -> float:
    if resource.endswith("memory"):
        return float(parse_memory_bytes(quantity))
    return parse_cpu(quantity) if quantity.endswith("m") else float(parse_memory_bytes(quantity))


def _shown(resource: str, amount: float) -> str:
    return f"{amount / 2**20:g}Mi" if resource.endswith("memory") else f"{amount:g}"
