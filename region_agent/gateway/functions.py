"""Data types of the OpenFaaS REST API: specifications, statuses and answers of functions."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Any

from geofed_pb import address
from geofed_pb.bounds import clean
from geofed_pb.errors import CATALOGUE, GeofedError
from region_agent.gateway.quantities import format_duration

__all__ = [
    "BasicAuth",
    "FunctionSpec",
    "FunctionStatus",
    "Grants",
    "Isolation",
    "LogLine",
    "ReplicaFailure",
    "Response",
    "fixed_scale_labels",
    "timeout_env",
]

SCALE_MIN_LABEL = "com.openfaas.scale.min"
SCALE_MAX_LABEL = "com.openfaas.scale.max"
INTERNAL_HEADER = "X-OpenFaaS-Internal"
"""Header of answers that come from the gateway itself, not from the function."""
EXIT_HEADER = "X-Geofed-Exit"
"""Header with the reason for which a replica ended during a call: "memory", "disk", "timeout", "gone" or "crash"."""
DIGEST_ANNOTATION = "geofed.spec"
"""Annotation with the digest of a function's specification."""
GRANTS_ANNOTATION = "geofed.grants"
"""Annotation with the `Grants` of a function, as JSON."""
MOST_EGRESS = 128
"""Addresses outside of its sandbox to which a function may connect, at most: the kernel passes on 253 sockets at a
time."""
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def is_dns_label(name: str) -> bool:
    """True where OpenFaaS accepts the name for a function, a secret or a namespace."""
    return _DNS_LABEL.fullmatch(name) is not None


def fixed_scale_labels(replicas: int) -> dict[str, str]:
    """Return labels with the same minimum and maximum, so that the gateway's autoscaler changes nothing."""
    return {SCALE_MIN_LABEL: str(replicas), SCALE_MAX_LABEL: str(replicas)}


def timeout_env(limit: timedelta) -> dict[str, str]:
    """Return settings of the watchdog's three timeouts; one left at its default of 30 s would interrupt the call."""
    text = format_duration(limit)
    return {"read_timeout": text, "write_timeout": text, "exec_timeout": text}


@dataclass(frozen=True)
class BasicAuth:
    """User and password of the gateway's system routes."""

    user: str
    """User name, ``admin`` in a standard installation."""
    password: str = field(repr=False)
    """Password; never printed."""

    @classmethod
    def from_files(cls, user_file: Path, password_file: Path) -> BasicAuth:
        """Read both from files, as OpenFaaS keeps them; raises ``CONFIG_INVALID``."""
        try:
            auth = cls(user_file.read_text().strip(), password_file.read_text().strip())
        except OSError as error:
            raise GeofedError("CONFIG_INVALID", f"cannot read the gateway's credentials: {error}") from error
        if not auth.user or not auth.password:
            raise GeofedError("CONFIG_INVALID", f"{user_file} or {password_file} is empty")
        return auth


@dataclass(frozen=True)
class Grants:
    """What a function of the embedded gateway may use outside of its sandbox."""

    read: tuple[str, ...] = ()
    """Files and folders that it may read."""
    write: tuple[str, ...] = ()
    """Files and folders that it may read and write."""
    egress: Mapping[str, str] = field(default_factory=dict)
    """Addresses to which it may connect: ``host:port`` in the sandbox, and the address that it stands for. The latter
    may change while the function runs, with a new deployment; an empty one refuses connections."""
    host_network: bool = False
    """True: it uses this machine's network, without any restriction."""
    identity: str = ""
    """Identifies the folders that it writes to. A running replica keeps those that it has begun with, although others
    have been created in their places since."""

    @property
    def places(self) -> Grants:
        """What a running replica has for good: all but the addresses that those in its sandbox stand for."""
        return replace(self, egress=dict.fromkeys(self.egress, ""))

    def annotations(self) -> dict[str, str]:
        """Return the annotations of a function that has them."""
        body = {
            "read": self.read, "write": self.write, "egress": dict(self.egress), "hostNetwork": self.host_network,
            "identity": self.identity,
        }  # fmt: skip
        return {GRANTS_ANNOTATION: json.dumps(body)}

    @classmethod
    def of(cls, spec: FunctionSpec) -> Grants:
        """Return a function's grants; raises ``ValueError`` with what is wrong."""
        body = json.loads(spec.annotations.get(GRANTS_ANNOTATION, "{}"))
        if not isinstance(body, dict):
            raise ValueError(f"{GRANTS_ANNOTATION} must be a JSON object")
        grants = cls(
            _list(body, "read"),
            _list(body, "write"),
            _texts(body, "egress"),
            bool(body.get("hostNetwork", False)),
            str(body.get("identity", "")),
        )
        for path in (*grants.read, *grants.write):
            if not PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or path == "/":
                raise ValueError(f"{GRANTS_ANNOTATION}: {path!r} is not an absolute path below /")
        if len(grants.egress) > MOST_EGRESS:
            raise ValueError(f"{GRANTS_ANNOTATION}: more than {MOST_EGRESS} addresses")
        for target in (*grants.egress, *filter(None, grants.egress.values())):
            address.split(target)
        return grants


@dataclass(frozen=True)
class FunctionSpec:
    """Specification with which a function is deployed."""

    service: str
    """Name, a DNS label of at most 63 characters."""
    image: str
    """Container image; the embedded gateway maps it to a handler."""
    namespace: str = ""
    """Namespace, empty for the gateway's default."""
    env_process: str = ""
    """Command that the watchdog forks; the embedded gateway keeps it and does not use it."""
    env_vars: Mapping[str, str] = field(default_factory=dict)
    """Environment of the handler."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels, among them the autoscaler's bounds."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Free annotations."""
    secrets: tuple[str, ...] = ()
    """Names of the secrets that the function may read."""
    limits: Mapping[str, str] = field(default_factory=dict)
    """Upper bounds: ``memory``, ``cpu``, ``nvidia.com/gpu``, as Kubernetes quantities."""
    requests: Mapping[str, str] = field(default_factory=dict)
    """Reservations, in the same notation."""
    constraints: tuple[str, ...] = ()
    """Placement constraints."""
    read_only_root: bool = False
    """True mounts the root file system read-only."""

    def marked(self) -> FunctionSpec:
        """Return the specification with its digest as an annotation, by which a later deployment sees that it is the
        same: gateways report only a part of what they are given."""
        plain = {key: value for key, value in self.annotations.items() if key != DIGEST_ANNOTATION}
        body = json.dumps(replace(self, annotations=plain).as_json(), sort_keys=True)
        digest = hashlib.sha256(body.encode()).hexdigest()[:32]
        return replace(self, annotations={**plain, DIGEST_ANNOTATION: digest})

    def as_json(self) -> dict[str, Any]:
        """The body of a deployment request; empty members are left out."""
        members: dict[str, Any] = {
            "service": self.service,
            "image": self.image,
            "namespace": self.namespace,
            "envProcess": self.env_process,
            "envVars": dict(self.env_vars),
            "labels": dict(self.labels),
            "annotations": dict(self.annotations),
            "secrets": list(self.secrets),
            "limits": dict(self.limits),
            "requests": dict(self.requests),
            "constraints": list(self.constraints),
            "readOnlyRootFilesystem": self.read_only_root,
        }
        return {key: value for key, value in members.items() if value}

    @classmethod
    def from_json(cls, body: object) -> FunctionSpec:
        """The specification in a deployment request; raises ``ValueError`` with what is wrong."""
        if not isinstance(body, dict):
            raise ValueError("the body must be a JSON object")
        service, image = body.get("service"), body.get("image")
        if not isinstance(service, str) or not is_dns_label(service):
            raise ValueError(f"service {service!r} is not a DNS label of at most 63 characters")
        if not isinstance(image, str) or not image:
            raise ValueError("image is missing")
        return cls(
            service=service,
            image=image,
            namespace=_text(body, "namespace"),
            env_process=_text(body, "envProcess"),
            env_vars=_texts(body, "envVars"),
            labels=_texts(body, "labels"),
            annotations=_texts(body, "annotations"),
            secrets=_list(body, "secrets"),
            limits=_texts(body, "limits"),
            requests=_texts(body, "requests"),
            constraints=_list(body, "constraints"),
            read_only_root=bool(body.get("readOnlyRootFilesystem", False)),
        )


@dataclass(frozen=True)
class Isolation:
    """How functions are isolated, from what was tried."""

    kind: str
    """``bubblewrap``; ``container`` for functions in containers, which the platform isolates; or ``none``."""
    reason: str = ""
    """Reason why they are not isolated."""
    limits_processes: bool = True
    """Whether the number of a function's processes is limited."""

    @property
    def text(self) -> str:
        """Description for operators."""
        if self.kind == "bubblewrap":
            limits = "" if self.limits_processes else ", no limit of processes"
            return f"bubblewrap: namespaces of users, mounts, processes, IPC and network, system calls filtered{limits}"
        if self.kind == "container":
            return "container, as the function platform is set up"
        return f"none: {self.reason}" if self.reason else "none"

    @property
    def hint(self) -> str:
        """What the operator of a machine without isolation can do."""
        if "bubblewrap is not installed" in self.reason or "libseccomp is not installed" in self.reason:
            return "install it (Debian: apt install bubblewrap libseccomp2), or set policy.isolation in the region file"
        return (
            "allow this user to create user namespaces (docs/production.md, on isolation), or set policy.isolation in "
            "the region file"
        )


@dataclass(frozen=True)
class ReplicaFailure:
    """How a replica has ended last, or why it could not start; only the agent's own gateway tells."""

    count: int
    """Number of such ends since the deployment."""
    code: str
    """Code of the error."""
    message: str
    """What happened."""
    hint: str = ""
    """What to do; empty: what the code's hint says."""

    @property
    def error(self) -> GeofedError:
        """The failure as an error."""
        code = self.code if self.code in CATALOGUE else "FUNCTION_FAILED"
        return GeofedError(code, self.message, hint=self.hint or None)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> ReplicaFailure:
        """The failure in an answer; raises ``ValueError`` or ``TypeError``."""
        texts = (clean(str(body.get(key) or "")) for key in ("code", "message", "hint"))
        return cls(int(body.get("count") or 0), *texts)


@dataclass(frozen=True)
class FunctionStatus:
    """A function as the gateway reports it."""

    spec: FunctionSpec
    """Specification, as far as the gateway reports it."""
    replicas: int
    """Wanted number of replicas."""
    available_replicas: int
    """Number of replicas that answer."""
    invocation_count: int
    """Calls since the deployment."""
    created_at: datetime | None
    """Time of the deployment, if the gateway reports it."""
    failure: ReplicaFailure | None = None
    """The last failure of a replica, if the gateway reports it."""

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.spec.service

    def as_json(self) -> dict[str, Any]:
        """The body of a status answer."""
        body = self.spec.as_json()
        body["name"] = body.pop("service")
        body["replicas"] = self.replicas
        body["availableReplicas"] = self.available_replicas
        body["invocationCount"] = self.invocation_count
        if self.failure is not None:
            body["failure"] = asdict(self.failure)
        if self.created_at is not None:
            body["createdAt"] = self.created_at.isoformat().replace("+00:00", "Z")
        return body

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> FunctionStatus:
        """The status in an answer; raises ``ValueError`` where it is none."""
        created, failure = body.get("createdAt"), body.get("failure")
        return cls(
            spec=FunctionSpec.from_json({**body, "service": body.get("name")}),
            replicas=int(body.get("replicas") or 0),
            available_replicas=int(body.get("availableReplicas") or 0),
            invocation_count=int(body.get("invocationCount") or 0),
            created_at=parse_timestamp(created) if isinstance(created, str) and created else None,
            failure=ReplicaFailure.from_json(failure) if isinstance(failure, dict) else None,
        )


@dataclass(frozen=True)
class LogLine:
    """One line that a replica wrote."""

    name: str
    """Function."""
    instance: str
    """Replica."""
    timestamp: datetime
    """When the gateway read it."""
    text: str
    """The line without its newline."""


@dataclass(frozen=True)
class Response:
    """The answer of a function to a synchronous call."""

    function: str
    """The function that answered."""
    status: int
    """HTTP status that the function chose."""
    headers: Mapping[str, str]
    """Headers, their names in lower case."""
    body: bytes
    """Body, whole."""
    call_id: str
    """Identity of the call, which the logs of both sides contain."""

    def raise_for_status(self) -> Response:
        """The response itself, or ``FUNCTION_FAILED`` where the status is 400 or above."""
        if self.status < 400:
            return self
        text = self.body[:500].decode("utf-8", "replace").strip()
        raise GeofedError("FUNCTION_FAILED", f"function {self.function} answered {self.status}: {text or 'no text'}")


def parse_timestamp(text: str) -> datetime:
    """A timestamp of RFC 3339, with Go's nanoseconds cut to microseconds; raises ``ValueError``."""
    return datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text).replace("Z", "+00:00"))


def _text(body: Mapping[str, Any], key: str) -> str:
    value = body.get(key) or ""
    if not isinstance(value, str):
        raise ValueError(f"{key} must be a string")
    return value


def _texts(body: Mapping[str, Any], key: str) -> dict[str, str]:
    value = body.get(key) or {}
    if not isinstance(value, dict) or not all(isinstance(part, str) for pair in value.items() for part in pair):
        raise ValueError(f"{key} must be an object of strings")
    return value


def _list(body: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = body.get(key) or []
    if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
        raise ValueError(f"{key} must be a list of strings")
    return tuple(value)
