"""What an API server of Kubernetes refuses: bodies that its schema does not allow, and pods below a security standard.

The schema is that of Kubernetes 1.37, as `lightkube-models` has it from the OpenAPI document: names and types of all
fields, and which are required. What the document says in words alone is checked here for the objects that geofed makes.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from lightkube.models.batch_v1 import Job
from lightkube.models.core_v1 import PodSpec, Secret

__all__ = ["Invalid", "amount", "below_restricted", "checked"]

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_LABEL_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
_UNITS = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


class Invalid(Exception):
    """A body that is refused, with the status of the answer."""

    def __init__(self, text: str, status: int = 422) -> None:
        super().__init__(text)
        self.status = status


def checked(body: object, model: type[msgspec.Struct]) -> Any:
    """Return a body as an object of the schema; raises ``Invalid`` as with `fieldValidation=Strict`."""
    if not isinstance(body, dict):
        raise Invalid("the body is no object", 400)
    try:
        made = msgspec.convert(body, model, strict=True)
    except msgspec.ValidationError as error:
        raise Invalid(str(error), 400) from None
    for path in _unknown(body, made, model.__name__):
        raise Invalid(f"strict decoding error: unknown field {path}", 400)
    metadata = getattr(made, "metadata", None)
    if metadata is not None:
        if not _NAME.fullmatch(metadata.name or ""):
            raise Invalid(f"metadata.name: {metadata.name!r}")
        _check_labels(metadata.labels)
    if isinstance(made, Job):
        _check_job(made)
    if isinstance(made, Secret):
        _check_secret(made)
    return made


def _unknown(given: Any, made: Any, path: str) -> Iterator[str]:
    if isinstance(made, msgspec.Struct) and isinstance(given, dict):
        fields = {one.encode_name: one.name for one in msgspec.structs.fields(made)}
        for key, value in given.items():
            if key not in fields:
                yield f"{path}.{key}"
            else:
                yield from _unknown(value, getattr(made, fields[key]), f"{path}.{key}")
    elif isinstance(made, list) and isinstance(given, list):
        for number, (one, other) in enumerate(zip(given, made, strict=True)):
            yield from _unknown(one, other, f"{path}[{number}]")
    elif isinstance(made, dict) and isinstance(given, dict):
        for key, value in given.items():
            yield from _unknown(value, made[key], f"{path}.{key}")


def _check_labels(labels: Mapping[str, str] | None) -> None:
    for key, value in (labels or {}).items():
        if not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
            raise Invalid(f"metadata.labels: {key}={value!r}")


def _check_secret(secret: Secret) -> None:
    size = 0
    for key, value in (secret.data or {}).items():
        if not re.fullmatch(r"[-._a-zA-Z0-9]{1,253}", key):
            raise Invalid(f"data: key {key!r}")
        size += len(base64.b64decode(value, validate=True))
    if size > 1 << 20:
        raise Invalid("data: Too long: may not be more than 1048576 bytes")


def _check_job(job: Job) -> None:
    if job.spec is None or job.metadata is None or len(job.metadata.name or "") > 63:
        raise Invalid("spec: Required value, or metadata.name: must be no more than 63 characters")
    template = job.spec.template
    _check_labels(template.metadata.labels if template.metadata else {})
    pod = template.spec
    if pod is None or pod.restartPolicy not in ("Never", "OnFailure"):
        raise Invalid("spec.template.spec.restartPolicy: Required value: valid values: OnFailure, Never")
    if (job.spec.backoffLimit or 0) < 0 or (job.spec.ttlSecondsAfterFinished or 0) < 0:
        raise Invalid("spec: must be greater than or equal to 0")
    volumes = {one.name for one in pod.volumes or ()}
    _check_labels(pod.nodeSelector)
    for one in pod.tolerations or ():
        if one.operator not in (None, "Exists", "Equal") or (one.operator == "Exists" and one.value):
            raise Invalid(f"tolerations: operator {one.operator!r} with value {one.value!r}")
        if one.effect not in (None, "NoSchedule", "PreferNoSchedule", "NoExecute"):
            raise Invalid(f"tolerations: effect {one.effect!r}")
    for container in pod.containers:
        if not _LABEL_NAME.fullmatch(container.name) or not container.image:
            raise Invalid(f"containers: name {container.name!r}, image {container.image!r}")
        names = [one.name for one in container.env or ()]
        if len(names) != len(set(names)) or not all(re.fullmatch(r"[-._a-zA-Z][-._a-zA-Z0-9]*", one) for one in names):
            raise Invalid(f"env: {names}")
        paths = [one.mountPath for one in container.volumeMounts or ()]
        if len(paths) != len(set(paths)) or {one.name for one in container.volumeMounts or ()} - volumes:
            raise Invalid("volumeMounts: must be unique, and of volumes")
        resources = container.resources
        limits, requests = (resources.limits or {}, resources.requests or {}) if resources else ({}, {})
        for resource, wanted in requests.items():
            if resource in limits and amount(wanted) > amount(limits[resource]):
                raise Invalid(f"resources.requests: must be less than or equal to {resource} limit")
        for resource, wanted in limits.items():
            if "/" in resource and requests.get(resource, wanted) != wanted:
                raise Invalid(f"{resource}: limit and request must be equal")
            amount(wanted)


def amount(quantity: str) -> float:
    """Return a quantity as a number."""
    found = _QUANTITY.fullmatch(quantity)
    if not found:
        raise Invalid(f"{quantity!r}: quantities must match the regular expression")
    return float(found[1]) * _UNITS.get(found[2] or "", 1)


def below_restricted(pod: PodSpec) -> list[str]:
    """Return what a pod lacks for the Pod Security Standard `restricted`."""
    found, own = [], pod.securityContext
    if pod.hostNetwork or pod.hostPID or pod.hostIPC:
        found.append("host namespaces")
    for volume in msgspec.to_builtins(pod.volumes or []):
        if not set(volume) - {"name"} <= _VOLUMES:
            found.append(f"restricted volume types (volume {volume['name']!r})")
    for container in pod.containers:
        context = container.securityContext
        if context is None or context.allowPrivilegeEscalation is not False:
            found.append("allowPrivilegeEscalation != false")
        if context is None or context.capabilities is None or context.capabilities.drop != ["ALL"]:
            found.append("unrestricted capabilities")
        if not (context and context.runAsNonRoot) and not (own and own.runAsNonRoot):
            found.append("runAsNonRoot != true")
    if own is None or own.seccompProfile is None or own.seccompProfile.type not in ("RuntimeDefault", "Localhost"):
        found.append("seccompProfile")
    if own is not None and own.runAsUser == 0:
        found.append("runAsUser=0")
    return found
