"""What the state of a pod, of its Job's events and of the API's answers means for a replica. Decides only."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from lightkube.core.exceptions import ApiError
from lightkube.models.core_v1 import ContainerState, Event, Pod

from geofed_pb.errors import GeofedError

__all__ = ["PodState", "error_of", "judge", "refusal"]

_NO_IMAGE = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
)
"""Reasons for which a container waits: there is no image."""
_PULLED_AGAIN = frozenset({"ErrImagePull"})
"""Those of them after which it is tried again."""
_NOT_MADE = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
"""Reasons for which a container waits: it cannot be made as its Job states."""
_DISRUPTED = "DisruptionTarget"
_MOST_TEXT = 500
"""Longest text of an error that is passed on, in characters."""


@dataclass(frozen=True)
class PodState:
    """State of a replica's pod."""

    state: str
    """``waiting``, ``running``, ``leaving`` (it is being ended by the cluster), ``failing`` (it waits for what will not
    come by itself), or ``ended``."""
    code: str = ""
    """Code of the error, of a pod that is failing, ended or cannot be placed."""
    text: str = ""
    """Status message: why it waits, or how it ended."""
    reason: str = ""
    """Reason of a container's end, in the words of `X-Geofed-Exit`."""


def judge(pod: Pod) -> PodState:
    """Return what a pod's status says."""
    status = pod.status
    phase = (status.phase if status is not None else None) or "Pending"
    if status is None:
        return PodState("waiting", text="Kubernetes has not looked at it")
    conditions = {one.type: one for one in status.conditions or ()}
    container = next(iter(status.containerStatuses or ()), None)
    state = (container.state if container is not None else None) or ContainerState()
    disrupted = conditions.get(_DISRUPTED)
    leaving = disrupted is not None and disrupted.status == "True"
    if phase in ("Failed", "Succeeded"):
        return _ended(pod, state, f"{disrupted.reason}: {disrupted.message}" if disrupted and leaving else "")
    if leaving or (pod.metadata is not None and pod.metadata.deletionTimestamp is not None):
        told = _short(f"{disrupted.reason}: {disrupted.message}" if disrupted and leaving else "it is being deleted")
        return PodState("leaving", "FUNCTION_EVICTED", f"the cluster ends the pod: {told}", "evicted")
    if state.waiting is not None and state.waiting.reason in _NO_IMAGE:
        reason, told = state.waiting.reason, _short(state.waiting.message or state.waiting.reason)
        text = f"its image cannot be pulled: {told}"
        return PodState("waiting" if reason in _PULLED_AGAIN else "failing", "IMAGE_UNAVAILABLE", text)
    if state.waiting is not None and state.waiting.reason in _NOT_MADE:
        told = _short(state.waiting.message or state.waiting.reason)
        # A Secret may be there a moment later than its pod.
        return PodState("waiting", "CONFIG_INVALID", f"its container cannot be made: {told}")
    scheduled = conditions.get("PodScheduled")
    if scheduled is not None and scheduled.status == "False":
        text = f"no node takes it: {_short(scheduled.message or scheduled.reason or 'no reason is given')}"
        return PodState("waiting", "FUNCTION_UNSCHEDULABLE", text)
    if phase == "Running":
        return PodState("running", text="its container runs")
    return PodState("waiting", text="its container is being made")


def _ended(pod: Pod, state: ContainerState, disruption: str) -> PodState:
    status, ended = pod.status, state.terminated
    assert status is not None
    if ended is not None and ended.reason == "OOMKilled":
        return PodState(
            "ended", "FUNCTION_OUT_OF_MEMORY", f"used more memory than its limit of {_limit(pod)}", "memory"
        )
    if disruption or status.reason in ("Evicted", "Preempting", "NodeLost", "Shutdown", "NodeShutdown", "Terminated"):
        told = _short(disruption or f"{status.reason}: {status.message or 'no message'}")
        return PodState("ended", "FUNCTION_EVICTED", f"was ended by the cluster: {told}", "evicted")
    if ended is None:
        told = _short(f"{status.reason or status.phase}: {status.message or 'no message'}")
        return PodState("ended", "FUNCTION_FAILED", f"did not run: {told}", "crash")
    said = f", {ended.reason}" if ended.reason not in (None, "Error", "Completed") else ""
    return PodState("ended", "FUNCTION_FAILED", f"exited with status {ended.exitCode}{said}", "crash")


def _limit(pod: Pod) -> str:
    containers = pod.spec.containers if pod.spec is not None else ()
    limits = [one.resources.limits for one in containers if one.resources is not None and one.resources.limits]
    return str(next((one["memory"] for one in limits if "memory" in one), "its node")).replace("Mi", " MiB")


def refusal(events: Iterable[Event]) -> GeofedError | None:
    """Return why a Job's controller could make no pod, by the Job's events."""
    failed = [one for one in events if one.reason == "FailedCreate" and one.message]
    return _refused(failed[-1].message or "") if failed else None


def error_of(error: Exception, what: str) -> GeofedError:
    """Return an error of the API, or of the connection to it, as one of ours."""
    if not isinstance(error, ApiError):
        text = str(error) or type(error).__name__
        return GeofedError("GATEWAY_UNAVAILABLE", f"{what}: the cluster's API does not answer: {_short(text)}")
    code, message = error.status.code or 0, _short(error.status.message or error.status.reason or "no message")
    if code == 401:
        hint = "renew the credentials: `gateway.kubeconfig`, or the service account of the agent's pod"
        return GeofedError("UNAUTHENTICATED", f"{what}: the cluster refuses the credentials: {message}", hint=hint)
    if code in (403, 422, 400):
        found = _refused(message)
        return GeofedError(found.code, f"{what}: {found.message}", hint=found.hint)
    if code == 404:
        return GeofedError("CONFIG_INVALID", f"{what}: {message}", hint="see that `gateway.namespace` exists")
    return GeofedError("GATEWAY_UNAVAILABLE", f"{what}: the cluster's API answers {code}: {message}")


def _refused(message: str) -> GeofedError:
    told = _short(message)
    if "exceeded quota" in message or "must specify limits" in message or "failed quota" in message:
        hint = "wait until other jobs of the namespace have ended, raise its ResourceQuota, or lower `capacity`"
        return GeofedError("QUOTA_EXCEEDED", f"the namespace's quota does not allow it: {told}", hint=hint)
    if re.search(r"cannot \w+ resource", message):
        hint = "give the agent's account the rights of deploy/kubernetes/agent.yaml"
        return GeofedError("FORBIDDEN", f"the cluster does not allow it: {told}", hint=hint)
    return GeofedError("CONFIG_INVALID", f"the cluster refuses it: {told}", hint="correct `gateway` in the region file")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MOST_TEXT else f"{line[: _MOST_TEXT - 1]}…"
