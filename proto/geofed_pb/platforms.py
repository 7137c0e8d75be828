"""Function platforms: what holds for each of them, and the limits of OpenFaaS's editions.

Data alone: region files, the agent, its gateway and `doctor` derive from this table what they do on a platform.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["EDITIONS", "PLATFORMS", "Edition", "Platform", "edition_of"]


@dataclass(frozen=True)
class Platform:
    """What holds for a function platform."""

    name: str
    """`gateway.kind` of a region file."""
    title: str
    """Name for users, as in "functions of TITLE"."""
    local_files: bool
    """Whether functions run on the agent's machine and are given its files: shards, channels and packages."""
    sandboxed: bool
    """Whether the agent's own gateway puts each function into a sandbox; elsewhere the platform isolates functions."""
    callable_by_others: bool
    """Whether others than the agent may reach a function's port, so that a call has to state a token."""
    dials_out: bool
    """Whether a function connects to the agent to be called, instead of the agent to the function."""
    shared: bool
    """Whether several regions may use one installation, so that names and labels say whose a function is."""
    own_secrets: bool
    """Whether the platform may hold a secret that the agent has not given it."""
    places_preemptible: bool
    """Whether the region file has to state where functions on preemptible capacity are placed."""
    start_seconds: float = 60.0
    """Longest time until the first replicas of a function are ready; region files may change it where images are
    pulled and nodes are added."""
    own_role: bool = True
    """Whether functions may have a role of the platform, which their SDKs find by themselves."""
    has_preemptible: bool = True
    """Whether there may be workers on capacity that the cloud takes away at any time, for another price."""
    memory_mb: tuple[int, int] | None = None
    """Least and most memory of a function, in MB; None: what the machines have."""
    memory_step_mb: int = 1
    """Memory of a function is a multiple of this, in MB."""
    life_seconds: float | None = None
    """Longest life of a replica, which the platform then ends; None: there is no limit."""
    event_bytes: int | None = None
    """Most bytes with which a replica is started: its environment and secrets; None: no limit of the platform."""
    scratch_mb: tuple[int, int] | None = None
    """Least and most disk space of a function, in MB; None: what the machines have."""
    gpus: bool = True
    """Whether functions may be given GPUs."""


PLATFORMS = {
    one.name: one
    for one in (
        Platform(
            "embedded", "the embedded gateway", local_files=True, sandboxed=True, callable_by_others=False,
            dials_out=False, shared=False, own_secrets=False, places_preemptible=False,
        ),
        Platform(
            "docker", "a Docker engine", local_files=True, sandboxed=False, callable_by_others=True, dials_out=False,
            shared=False, own_secrets=False, places_preemptible=False,
        ),
        Platform(
            "openfaas", "OpenFaaS", local_files=False, sandboxed=False, callable_by_others=True, dials_out=False,
            shared=True, own_secrets=True, places_preemptible=True,
        ),
        Platform(
            "kubernetes", "Kubernetes", local_files=False, sandboxed=False, callable_by_others=False, dials_out=True,
            shared=True, own_secrets=False, places_preemptible=True, start_seconds=300.0,
        ),
        Platform(
            "lambda", "AWS Lambda", local_files=False, sandboxed=False, callable_by_others=False, dials_out=True,
            shared=True, own_secrets=False, places_preemptible=False, start_seconds=180.0, own_role=False,
            has_preemptible=False,
            memory_mb=(128, 10240), life_seconds=900.0, event_bytes=1_000_000, scratch_mb=(512, 10240), gpus=False,
        ),
        Platform(
            "scf", "Tencent Cloud SCF", local_files=False, sandboxed=False, callable_by_others=False, dials_out=True,
            shared=True, own_secrets=False, places_preemptible=False, start_seconds=180.0, own_role=False,
            has_preemptible=False,
            memory_mb=(128, 3072), memory_step_mb=128, life_seconds=900.0, event_bytes=130_000, scratch_mb=(512, 512),
            gpus=False,
        ),
    )
}  # fmt: skip
"""By `gateway.kind`."""


@dataclass(frozen=True)
class Edition:
    """Limits of an edition; None: there is no limit."""

    name: str
    """Name in configurations."""
    replicas: int | None = None
    """Most replicas of a function."""
    least_replicas: int = 0
    """Fewest replicas of a function."""
    functions: int | None = None
    """Most functions."""
    scale_from_zero: bool = True
    """Whether a call starts a replica if there is none."""
    bare: bool = False
    """A function is one container without health checks: it counts as available before it listens, one that has ended
    stays down until the next call, and every update restarts it."""
    title: str = ""
    """Name for users."""

    @property
    def workers(self) -> int | None:
        """Most workers of all jobs in a region, if no other function is deployed."""
        return None if self.functions is None or self.replicas is None else self.functions * self.replicas

    def shares(self, workers: int) -> list[int]:
        """Return the replicas of each function that this many workers need."""
        most = self.replicas or max(1, workers)
        return [min(most, workers - begun) for begun in range(0, workers, most)]


EDITIONS = {
    one.name: one
    for one in (
        Edition("none"),
        Edition("pro", title="OpenFaaS Standard or for Enterprises"),
        Edition(
            "ce", replicas=5, least_replicas=1, functions=15, scale_from_zero=False, title="OpenFaaS Community Edition"
        ),
        Edition("faasd", replicas=1, bare=True, title="faasd"),
    )
}
"""By name. `none`: the embedded gateway without the limits of another one."""


def edition_of(provider: Mapping[str, Any], configured: str = "auto") -> Edition:
    """Return the edition of a gateway from the part `provider` of what `GET /system/info` answers.

    A gateway on Kubernetes does not say which edition it is, and counts as the community edition unless the region file
    states another: functions of up to five replicas work on all.
    """
    if configured != "auto":
        return EDITIONS[configured]
    if "profile" in provider:
        return EDITIONS.get(str(provider["profile"]), EDITIONS["none"])
    single = provider.get("orchestration") == "containerd" or str(provider.get("provider", "")).startswith("faasd")
    return EDITIONS["faasd" if single else "ce"]
