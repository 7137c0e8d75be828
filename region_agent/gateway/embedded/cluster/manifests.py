"""The objects of Kubernetes that a replica is made of: a Job with one pod, and a Secret that the Job owns."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass

from lightkube.models.batch_v1 import JobSpec
from lightkube.models.core_v1 import (
    Capabilities,
    Container,
    EmptyDirVolumeSource,
    EnvVar,
    EnvVarSource,
    KeyToPath,
    LocalObjectReference,
    PodSecurityContext,
    PodSpec,
    PodTemplateSpec,
    ResourceRequirements,
    SeccompProfile,
    SecretKeySelector,
    SecretVolumeSource,
    SecurityContext,
    Toleration,
    Volume,
    VolumeMount,
)
from lightkube.models.meta_v1 import ObjectMeta, OwnerReference
from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import Secret

from region_agent.config import KubernetesGateway
from region_agent.gateway.functions import FunctionSpec

__all__ = ["CONTAINER", "INSTANCE_LABEL", "MOST_SECRET_BYTES", "RUN_LABEL", "ObjectOwner", "job_of", "secret_of"]

CONTAINER = "worker"
"""Name of the container in a pod."""
GATEWAY_LABEL, RUN_LABEL = "geofed.gateway", "geofed.run"
INSTANCE_LABEL = "app.kubernetes.io/instance"
MOST_SECRET_BYTES = 900_000
"""Most bytes of a replica's environment and secrets: Kubernetes takes 1 MiB in an object."""
_SECRETS = "/var/openfaas/secrets"
_CAPACITY_LABEL = "geofed.capacity"
_GRACE_SECONDS = 30
"""Time in which a pod that is evicted may answer its calls."""
_KEPT_SECONDS = 600
"""Time after which Kubernetes removes a Job that has ended, if nobody else does."""
_NO_RIGHTS = SecurityContext(
    allowPrivilegeEscalation=False,
    capabilities=Capabilities(drop=["ALL"]),
    privileged=False,
    readOnlyRootFilesystem=True,
    runAsNonRoot=True,
)


@dataclass(frozen=True)
class ObjectOwner:
    """Whose an object is."""

    mark: str
    """Mark of the region and its federation."""
    run: str
    """Differs between all starts of its gateway."""

    @property
    def labels(self) -> dict[str, str]:
        """Labels by which all objects of the gateway are found."""
        return {GATEWAY_LABEL: self.mark, RUN_LABEL: self.run}

    def name(self, number: int) -> str:
        """Return the name of the objects of a replica."""
        return f"geofed-{self.mark}-{self.run}-{number}"


def _metadata(name: str, spec: FunctionSpec, identity: ObjectOwner) -> ObjectMeta:
    own = {key: value for key, value in spec.labels.items() if key.startswith("geofed.") and value}
    fixed = {
        "app.kubernetes.io/name": "geofed-worker", "app.kubernetes.io/managed-by": "geofed", INSTANCE_LABEL: name,
    }  # fmt: skip
    return ObjectMeta(name=name, labels={**own, **fixed, **identity.labels})


def secret_of(
    name: str,
    spec: FunctionSpec,
    identity: ObjectOwner,
    env: Mapping[str, str],
    files: Mapping[str, bytes],
    job: Job | None = None,
) -> Secret:
    """Return the Secret with a replica's environment and the secrets of its function.

    ``job``: its owner, as the cluster returned it; Kubernetes removes the Secret with it.
    """
    data = {f"env.{key}": value.encode() for key, value in env.items()}
    data |= {f"file.{key}": value for key, value in files.items()}
    metadata = _metadata(name, spec, identity)
    if job is not None and job.metadata is not None:
        metadata.ownerReferences = [
            OwnerReference(apiVersion="batch/v1", kind="Job", name=name, uid=job.metadata.uid or "")
        ]
    encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
    return Secret(metadata=metadata, data=encoded, immutable=True, type="Opaque")


def job_of(
    name: str, spec: FunctionSpec, identity: ObjectOwner, settings: KubernetesGateway, env: Mapping[str, str]
) -> Job:
    """Return the Job of a replica, which runs once: the gateway decides whether there is another."""
    metadata = _metadata(name, spec, identity)
    template = PodTemplateSpec(metadata=ObjectMeta(labels=metadata.labels), spec=_pod_of(name, spec, settings, env))
    once = JobSpec(
        template=template, parallelism=1, completions=1, backoffLimit=0, ttlSecondsAfterFinished=_KEPT_SECONDS
    )
    return Job(metadata=metadata, spec=once)


def _pod_of(name: str, spec: FunctionSpec, settings: KubernetesGateway, env: Mapping[str, str]) -> PodSpec:
    """Return a replica's pod: one container without rights, which reads its secrets and writes to ``/tmp``."""
    preemptible = spec.labels.get(_CAPACITY_LABEL) == "preemptible"
    placement = settings.preemptible if preemptible and settings.preemptible is not None else settings.placement
    secret = [Volume(name="secrets", secret=SecretVolumeSource(secretName=name, defaultMode=0o440, items=[
        KeyToPath(key=f"file.{one}", path=one) for one in spec.secrets
    ]))] if spec.secrets else []  # fmt: skip
    scratch = Volume(name="tmp", emptyDir=EmptyDirVolumeSource(sizeLimit=f"{settings.scratch_mb}M"))
    # Of the container's own memory. A node's 64 MB are too few for processes that pass each other tensors.
    shared = Volume(name="shm", emptyDir=EmptyDirVolumeSource(medium="Memory", sizeLimit=spec.limits.get("memory")))
    mounts = [VolumeMount(name="tmp", mountPath="/tmp"), VolumeMount(name="shm", mountPath="/dev/shm")]
    if secret:
        mounts.append(VolumeMount(name="secrets", mountPath=_SECRETS, readOnly=True))
    container = Container(
        name=CONTAINER,
        image=spec.image,
        env=[
            EnvVar(name=one, valueFrom=EnvVarSource(secretKeyRef=SecretKeySelector(f"env.{one}", name)))
            for one in sorted(env)
        ],
        resources=_resources(spec, settings),
        volumeMounts=mounts,
        securityContext=_NO_RIGHTS,
    )
    return PodSpec(
        containers=[container],
        volumes=[scratch, shared, *secret],
        restartPolicy="Never",
        terminationGracePeriodSeconds=_GRACE_SECONDS,
        automountServiceAccountToken=False,
        enableServiceLinks=False,
        serviceAccountName=settings.service_account,
        imagePullSecrets=[LocalObjectReference(name=one) for one in settings.image_pull_secrets] or None,
        priorityClassName=settings.priority_class,
        runtimeClassName=settings.runtime_class,
        nodeSelector=dict(placement.node_selector) or None,
        tolerations=[
            Toleration(key=one.key, operator=one.operator, value=one.value or None, effect=one.effect)
            for one in placement.tolerations
        ] or None,
        securityContext=PodSecurityContext(
            runAsNonRoot=True,
            runAsUser=settings.user,
            runAsGroup=settings.user,
            fsGroup=settings.user,
            seccompProfile=SeccompProfile(type="RuntimeDefault"),
        ),
    )  # fmt: skip


def _resources(spec: FunctionSpec, settings: KubernetesGateway) -> ResourceRequirements:
    """Requests are the limits, so that a node's memory is not promised twice."""
    wanted = {"cpu": settings.cpu, **{key: spec.limits[key] for key in ("memory", "cpu") if key in spec.limits}}
    if settings.gpus:
        wanted[settings.gpu_resource] = str(settings.gpus)
    return ResourceRequirements(limits=wanted, requests=dict(wanted))
