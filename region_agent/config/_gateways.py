"""The section `gateway` of the region file: the platform of the region's functions.

Docstrings of attributes are the descriptions in the JSON Schema, and in the reference in `docs`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from geofed_pb.platforms import PLATFORMS
from region_agent.config._section import Section
from region_agent.config._types import Float, Int

__all__ = [
    "DockerGateway",
    "EmbeddedGateway",
    "KubernetesGateway",
    "LambdaGateway",
    "OpenFaasGateway",
    "PlacementConfig",
    "ScfGateway",
]


class EmbeddedGateway(Section):
    """Functions are processes of this machine."""

    kind: Literal["embedded"] = "embedded"
    """Kind of the gateway."""
    profile: Literal["none", "ce", "faasd"] = "none"
    """`ce`: the limits of OpenFaaS's community edition. `faasd`: one replica of a function, and faasd's conduct."""


class DockerGateway(Section):
    """Functions are containers of this machine's Docker engine (docs/containers.md)."""

    kind: Literal["docker"]
    """Kind of the gateway."""
    image: Annotated[str, Field(min_length=1)]
    """Image of the worker function; the engine has it, or pulls it."""
    engine: Annotated[str, Field(pattern=r"^unix:///")] = "unix:///var/run/docker.sock"
    """Socket of the engine; the agent's user must be allowed to use it."""
    network: str = ""
    """Docker network of the containers. Default: one of the region's own, from which only this machine is reached."""


class OpenFaasGateway(Section):
    """Functions run on an OpenFaaS installation (docs/production.md)."""

    kind: Literal["openfaas"]
    """Kind of the gateway."""
    url: str
    """Address of the gateway."""
    user_file: Path | None = None
    """File with the user's name."""
    password_file: Path | None = None
    """File with the password."""
    ca_file: Path | None = None
    """File with the authority of the gateway's certificate. Default: the system's authorities."""
    image: str
    """Container image of the worker function."""
    namespace: str = ""
    """Namespace of the functions. Empty: the gateway's own."""
    edition: Literal["auto", "ce", "pro", "faasd"] = "auto"
    """Edition, which limits functions and replicas: `faasd` (one replica of a function), `ce` (five, 15 functions), or
    `pro` (no limit). `auto`: what the gateway says, and on Kubernetes `ce`, which works with all."""
    preemptible_constraints: tuple[str, ...] = ()
    """Placement constraints of functions on preemptible capacity; required with `capacity.preemptible`."""


KubernetesName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]
"""Name of an object in Kubernetes."""
_PART = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
LabelKey = Annotated[str, Field(max_length=317, pattern=rf"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?{_PART}$")]
"""Key of a label, or name of a resource, in Kubernetes."""
LabelValue = Annotated[str, Field(pattern=rf"^({_PART})?$")]
"""Value of a label in Kubernetes."""


class TolerationConfig(Section):
    """A toleration of Kubernetes: it lets functions run on nodes with a taint."""

    key: LabelKey | None = None
    """Key of the taint. Default: every key, with `operator: Exists`."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """`Equal`: the taint has this value. `Exists`: any."""
    value: LabelValue = ""
    """Value of the taint."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint. Default: every effect."""

    @model_validator(mode="after")
    def _check(self) -> TolerationConfig:
        if self.operator == "Exists" and self.value:
            raise ValueError("`operator: Exists` takes no `value`")
        if self.key is None and self.operator != "Exists":
            raise ValueError("without `key`, `operator` must be `Exists`")
        return self


class PlacementConfig(Section):
    """Nodes on which functions run."""

    node_selector: dict[LabelKey, LabelValue] = {}
    """Labels that a node must have."""
    tolerations: Annotated[tuple[TolerationConfig, ...], Field(max_length=32)] = ()
    """Taints that a node may have."""


class KubernetesGateway(Section):
    """Functions are Jobs in a namespace of a Kubernetes cluster (docs/kubernetes.md)."""

    kind: Literal["kubernetes"]
    """Kind of the gateway."""
    image: Annotated[str, Field(min_length=1, pattern=r"^[^\s]+$")]
    """Image of the worker function, which the nodes can pull."""
    namespace: KubernetesName | None = None
    """Namespace of the functions. Default: that of the agent's pod, or of the kubeconfig."""
    kubeconfig: Path | None = None
    """Kubeconfig file. Default: the service account of the agent's pod; outside of a cluster `KUBECONFIG`, or
    `~/.kube/config`."""
    context: str | None = None
    """Context in the kubeconfig. Default: its current one."""
    port: Annotated[Int, Field(ge=0, le=65535)] = 0
    """Port of this agent to which functions connect, at `server.workerHost`. 0: any free one."""
    cpu: Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?m?$")] = "1"
    """Cores of a function, as in Kubernetes: `2`, `500m`."""
    gpus: Annotated[Int, Field(ge=0, le=64)] = 0
    """GPUs of a function."""
    gpu_resource: LabelKey = "nvidia.com/gpu"
    """Name of the GPUs' resource."""
    scratch_mb: Annotated[Int, Field(ge=64)] = 10240
    """Most disk space of a function, in MB."""
    placement: PlacementConfig = PlacementConfig()
    """Nodes for functions."""
    preemptible: PlacementConfig | None = None
    """Nodes for functions on preemptible capacity, instead of `placement`; required with `capacity.preemptible`."""
    image_pull_secrets: Annotated[tuple[KubernetesName, ...], Field(max_length=16)] = ()
    """Secrets in the namespace with which the image is pulled."""
    service_account: KubernetesName | None = None
    """Service account of the functions, as for a cloud's workload identity; its token is not mounted. Default: the
    namespace's."""
    priority_class: KubernetesName | None = None
    """Priority class of the functions. Default: the cluster's."""
    runtime_class: KubernetesName | None = None
    """Runtime class of the functions, such as one for gVisor. Default: the cluster's."""
    user: Annotated[Int, Field(ge=1)] = 10001
    """User and group ID of the functions."""
    start_seconds: Annotated[Float, Field(gt=0, le=3600)] = PLATFORMS["kubernetes"].start_seconds
    """Longest time until a function has a node, its image, and has connected."""


_LAMBDA = PLATFORMS["lambda"]
_LIFE_SECONDS = _LAMBDA.life_seconds or 0.0
_SCRATCH_MB = _LAMBDA.scratch_mb or (0, 0)


class LambdaGateway(Section):
    """Functions are invocations of AWS Lambda functions that the agent creates (docs/lambda.md)."""

    kind: Literal["lambda"]
    """Kind of the gateway."""
    image: Annotated[str, Field(pattern=r"^[0-9]{12}\.dkr\.ecr\.[^\s/]+/[^\s]+$")]
    """Image of the worker function in a repository of Amazon ECR in the same AWS region."""
    role: Annotated[str, Field(pattern=r"^arn:aws[a-z-]*:iam::[0-9]{12}:role/[^\s]{1,512}$")]
    """ARN of the role that functions have. Job code can use its rights, so it needs as few as docs/lambda.md says."""
    aws_region: Annotated[str, Field(pattern=r"^[a-z]{2,4}(-[a-z]+)+-[0-9]$")] | None = None
    """AWS region of the functions. Default: that of the agent's AWS configuration."""
    port: Annotated[Int, Field(ge=0, le=65535)] = 0
    """Port of this agent to which functions connect, at `server.workerHost`. 0: any free one."""
    subnets: Annotated[tuple[Annotated[str, Field(pattern=r"^subnet-[0-9a-z]+$")], ...], Field(max_length=16)] = ()
    """Subnets of a VPC to which functions are attached, from which they reach the agent, the channel and the data.
    Default: none; the agent then has a public address."""
    security_groups: Annotated[
        tuple[Annotated[str, Field(pattern=r"^sg-[0-9a-zA-Z]+$")], ...], Field(max_length=5)
    ] = ()
    """Security groups of functions in these subnets; they need to allow no incoming connection."""
    architecture: Literal["x86_64", "arm64"] = "x86_64"
    """Architecture of the image."""
    scratch_mb: Annotated[Int, Field(ge=_SCRATCH_MB[0], le=_SCRATCH_MB[1])] = 2048
    """Disk space of a function, in MB; more than 512 costs extra."""
    life_seconds: Annotated[Int, Field(ge=30, le=int(_LIFE_SECONDS))] = int(_LIFE_SECONDS)
    """Time limit of an invocation, in seconds. A replica is replaced by another invocation before."""
    reserved_concurrency: Annotated[Int, Field(ge=1)] | None = None
    """Concurrent invocations that are reserved for each job's function, and its most: one more than the workers of a
    job at least, and better a quarter more, since some are replaced at the same time. Default: none; functions share
    what the account has."""
    start_seconds: Annotated[Float, Field(gt=0, le=3600)] = _LAMBDA.start_seconds
    """Longest time until a function has been made, its image is there, and an invocation has connected."""

    @model_validator(mode="after")
    def _check(self) -> LambdaGateway:
        if bool(self.subnets) != bool(self.security_groups):
            raise ValueError("`subnets` and `securityGroups` belong together: write both, or none")
        return self


_SCF = PLATFORMS["scf"]


class ScfGateway(Section):
    """Functions are invocations of functions of Tencent Cloud SCF that the agent creates (docs/scf.md)."""

    kind: Literal["scf"]
    """Kind of the gateway."""
    image: Annotated[str, Field(pattern=r"^[^\s/]+\.(tencentyun|tencentcloudcr)\.com/[^\s]+$")]
    """Image of the worker function in Tencent Container Registry, in the same Tencent Cloud region."""
    image_type: Literal["personal", "enterprise"] = "personal"
    """Kind of the registry."""
    registry_id: Annotated[str, Field(pattern=r"^tcr-[0-9a-z]+$")] | None = None
    """ID of the registry; required with `imageType: enterprise`."""
    tencent_region: Annotated[str, Field(pattern=r"^[a-z]{2}-[a-z]+(-[a-z0-9]+)?$")]
    """Tencent Cloud region of the functions, such as `ap-guangzhou`."""
    namespace: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,28}[A-Za-z0-9]$")] = "default"
    """Namespace of the functions; it has 50 functions at most."""
    role: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.,=@-]{1,128}$")] | None = None
    """Name of the role that functions have. Job code can use its rights. Default: none."""
    port: Annotated[Int, Field(ge=0, le=65535)] = 0
    """Port of this agent to which functions connect, at `server.workerHost`. 0: any free one."""
    vpc: Annotated[str, Field(pattern=r"^vpc-[0-9a-z]+$")] | None = None
    """VPC to which functions are attached. Default: none; the agent then has a public address."""
    subnet: Annotated[str, Field(pattern=r"^subnet-[0-9a-z]+$")] | None = None
    """Subnet of the VPC."""
    life_seconds: Annotated[Int, Field(ge=30, le=int(_SCF.life_seconds or 0))] = int(_SCF.life_seconds or 0)
    """Time limit of an invocation, in seconds. A replica is replaced by another invocation before."""
    reserved_concurrency: Annotated[Int, Field(ge=1)] | None = None
    """Concurrent invocations whose memory is reserved for each job's function, and its most: one more than the workers
    of a job at least, and better a quarter more, since some are replaced at the same time. Default: none; functions
    share what the account has."""
    endpoint: Annotated[str, Field(pattern=r"^https?://[^\s/@]+$")] = "https://scf.tencentcloudapi.com"
    """Address of the API. Within Tencent Cloud's network: `https://scf.internal.tencentcloudapi.com`."""
    start_seconds: Annotated[Float, Field(gt=0, le=3600)] = _SCF.start_seconds
    """Longest time until a function has been made, its image is there, and an invocation has connected."""

    @model_validator(mode="after")
    def _check(self) -> ScfGateway:
        if bool(self.vpc) != bool(self.subnet):
            raise ValueError("`vpc` and `subnet` belong together: write both, or none")
        if (self.image_type == "enterprise") != bool(self.registry_id):
            raise ValueError("`registryId` is for `imageType: enterprise`, which needs it")
        return self
