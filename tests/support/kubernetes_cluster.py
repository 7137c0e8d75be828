"""A cluster of Kubernetes for tests: an API server that refuses what a real one refuses, and nodes that run pods.

A pod's container is a process of this machine with the command of its image, which a test names. It has the container's
environment alone; paths of mounted volumes in that stand for folders of the pod. Its memory is limited by a look every
50 ms. What a container runtime adds, such as a read-only root and another user, is not there.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from lightkube.models.authorization_v1 import SelfSubjectAccessReview
from lightkube.models.batch_v1 import Job
from lightkube.models.core_v1 import PodSpec, Secret
from lightkube.models.meta_v1 import DeleteOptions
from ruamel.yaml import YAML
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from support.kubernetes_rules import Invalid, amount, below_restricted, checked
from support.pki import Authority, write
from support.processes import Start, execute, largest_over

__all__ = ["Cluster", "Node", "agent_role", "manifests", "worker_command"]

_MODELS: dict[str, type[msgspec.Struct]] = {"jobs": Job, "secrets": Secret}
_KINDS = {"jobs": "Job", "secrets": "Secret", "pods": "Pod", "events": "Event", "resourcequotas": "ResourceQuota"}
_MANIFESTS = Path(__file__).parents[2] / "deploy" / "kubernetes" / "agent.yaml"
_ROOTS = ("/api/v1", "/apis/batch/v1")
_LOOK_SECONDS = 0.05


def manifests() -> list[dict[str, Any]]:
    """Return the shipped manifests."""
    return list(YAML(typ="safe").load_all(_MANIFESTS.read_text()))


def agent_role() -> list[dict[str, list[str]]]:
    """Return the rules of the role in the shipped manifests."""
    (role,) = [one for one in manifests() if one["kind"] == "Role"]
    return list(role["rules"])


@dataclass
class Node:
    """A node, with room for pods."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)
    taints: list[dict[str, str]] = field(default_factory=list)
    allocatable: dict[str, str] = field(default_factory=lambda: {"cpu": "64", "memory": "64Gi"})


@dataclass
class _Process:
    running: subprocess.Popen[bytes]
    folder: Path
    limit: float
    ended: dict[str, Any] | None = None
    kill_at: float | None = None


class Cluster:
    """The whole cluster; a context manager. All its state is in `objects`, by plural, namespace and name."""

    def __init__(
        self, folder: Path, images: Mapping[str, list[str]], *, namespace: str = "workers", start: Start = execute
    ) -> None:
        """``images``: commands of images, by name; ``namespace``: the one that there is; ``start``: starts commands."""
        self.folder, self.images, self.namespace, self.start = folder, dict(images), namespace, start
        self.token = secrets.token_hex(16)
        self.rules = agent_role()
        self.nodes = [Node("node-1")]
        self.quota: dict[str, str] = {}
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.requests: list[tuple[str, str]] = []
        """Method and path of every request."""
        self.down = False
        """Whether the API answers 503."""
        self.breaking_logs = 0
        """How many streams of a log break after their first part, from now on."""
        self.slow: dict[str, float] = {}
        """Seconds that it takes to create an object, by plural; it is created if the client has gone meanwhile, too."""
        self.delayed: list[str] = []
        """Plurals of the objects whose creation has been delayed."""
        self._versions = itertools.count(1)
        self._processes: dict[str, _Process] = {}
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._failure: BaseException | None = None

    def __enter__(self) -> Cluster:
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://localhost:{listener.getsockname()[1]}"
        tls = Authority("a cluster").issue("API", "localhost")
        self._authority, certificate, key = write(tls, self.folder / "tls")
        space = "/namespaces/{namespace}/{plural}"
        routes = [
            Route("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", self._review, methods=["POST"]),
            Route("/api/v1/namespaces/{namespace}/pods/{name}/log", self._log),
            *(Route(f"{root}{space}", self._many, methods=["GET", "POST"]) for root in _ROOTS),
            *(Route(f"{root}{space}/{{name}}", self._one, methods=["DELETE"]) for root in _ROOTS),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes), log_config=None, ws="none", lifespan="off", timeout_graceful_shutdown=1,
            ssl_certfile=certificate, ssl_keyfile=str(key),
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._threads = [
            threading.Thread(target=self._server.run, args=([listener],)),
            threading.Thread(target=self._controllers),
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._server.should_exit = True
        for thread in self._threads:
            thread.join(20)
        for process in self._processes.values():
            _kill(process.running, signal.SIGKILL)
            process.running.wait()
        if self._failure is not None:
            raise self._failure

    def kubeconfig(self, name: str = "kubeconfig", token: str = "") -> Path:
        """Write a kubeconfig for the cluster, with another token if one is given."""
        file = self.folder / name
        authority = base64.b64encode(self._authority.read_bytes()).decode()
        body = {
            "apiVersion": "v1", "kind": "Config", "current-context": "tests",
            "clusters": [{"name": "tests", "cluster": {"server": self.url, "certificate-authority-data": authority}}],
            "users": [{"name": "agent", "user": {"token": token or self.token}}],
            "contexts": [
                {"name": "tests", "context": {"cluster": "tests", "user": "agent", "namespace": self.namespace}}
            ],
        }  # fmt: skip
        file.write_text(json.dumps(body))
        return file

    def of_kind(self, plural: str) -> list[dict[str, Any]]:
        """Return all objects of a kind."""
        with self._lock:
            return [json.loads(json.dumps(one)) for (kind, _, _), one in self.objects.items() if kind == plural]

    def evict(self, pod: str, message: str) -> None:
        """Evict a pod, as a node does that has too little memory."""
        with self._lock:
            self._end(
                self.objects[("pods", self.namespace, pod)],
                {"phase": "Failed", "reason": "Evicted", "message": message},
            )

    def drain(self, pod: str, reason: str) -> None:
        """Delete a pod, as for a node that is taken away: it may end its calls."""
        with self._lock:
            found = self.objects[("pods", self.namespace, pod)]
            found["status"]["conditions"].append(
                {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "the node goes"}
            )
            self._delete_pod(found)

    # the API

    async def _many(self, request: Request) -> Response:
        body = await request.body()
        plural, namespace = request.path_params["plural"], request.path_params["namespace"]
        verb = {"GET": "list", "POST": "create"}[request.method]
        if verb == "create" and plural in self.slow:
            self.delayed.append(plural)
            await asyncio.sleep(self.slow[plural])
        with self._lock:
            if refused := self._refused(request, plural, verb, namespace):
                return refused
            if verb == "list":
                return JSONResponse(self._list(plural, namespace, request.query_params))
            try:
                return self._create(plural, namespace, request, body)
            except Invalid as error:
                return _status(error.status, "Invalid", f"{_KINDS[plural]} is invalid: {error}")

    def _create(self, plural: str, namespace: str, request: Request, given: bytes) -> Response:
        body = _parsed(request, given)
        made = checked(body, _MODELS[plural])
        if (body.get("kind"), body.get("apiVersion")) not in (("Job", "batch/v1"), ("Secret", "v1")):
            raise Invalid("kind and apiVersion do not match the address", 400)
        if made.metadata.namespace not in (None, namespace):
            raise Invalid("the namespace of the object does not match the address", 400)
        key = (plural, namespace, made.metadata.name)
        if key in self.objects:
            return _status(409, "AlreadyExists", f"{plural} {made.metadata.name!r} already exists")
        body["metadata"] |= {"namespace": namespace, **self._stamp()}
        if request.query_params.get("dryRun") != "All":
            self.objects[key] = body
        return JSONResponse(body, 201)

    def _list(self, plural: str, namespace: str, query: Mapping[str, str]) -> dict[str, Any]:
        if plural == "resourcequotas":
            metadata = {"name": "workers", "namespace": namespace}
            items = [{"metadata": metadata, "spec": {"hard": self.quota}}] if self.quota else []
        else:
            items = [one for (kind, space, _), one in self.objects.items() if (kind, space) == (plural, namespace)]
        items = [one for one in items if _selected(one["metadata"].get("labels", {}), query.get("labelSelector", ""))]
        items = [one for one in items if _fields_selected(one, query.get("fieldSelector", ""))]
        return {
            "kind": f"{_KINDS[plural]}List", "apiVersion": "batch/v1" if plural == "jobs" else "v1",
            "metadata": {"resourceVersion": str(next(self._versions))}, "items": items,
        }  # fmt: skip

    async def _one(self, request: Request) -> Response:
        body = await request.body()
        plural, namespace, name = (request.path_params[key] for key in ("plural", "namespace", "name"))
        with self._lock:
            if refused := self._refused(request, plural, "delete", namespace):
                return refused
            if body:
                checked(_parsed(request, body), DeleteOptions)
            found = self.objects.get((plural, namespace, name))
            if found is None:
                return _status(404, "NotFound", f"{plural} {name!r} not found")
            if plural == "jobs" and request.query_params.get("propagationPolicy") != "Background":
                return _status(400, "BadRequest", "this test wants pods to be deleted with their Job")
            del self.objects[(plural, namespace, name)]
            return JSONResponse({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"})

    async def _review(self, request: Request) -> Response:
        body = await request.body()
        with self._lock:
            if self._stranger(request):
                return _status(401, "Unauthorized", "Unauthorized")
            review = _parsed(request, body)
            review.setdefault("metadata", {"name": "review"})
            asked = checked(review, SelfSubjectAccessReview).spec.resourceAttributes
            whole = f"{asked.resource}/{asked.subresource}" if asked.subresource else asked.resource
            allowed = self._allowed(asked.group or "", whole, asked.verb) and asked.namespace == self.namespace
            return JSONResponse({**review, "status": {"allowed": allowed}}, 201)

    async def _log(self, request: Request) -> Response:
        namespace, name = request.path_params["namespace"], request.path_params["name"]
        with self._lock:
            if refused := self._refused(request, "pods/log", "get", namespace):
                return refused
            process = self._processes.get(name)
            if process is None:
                return _status(400, "BadRequest", f'container "worker" in pod "{name}" is waiting to start')
        at_end = request.query_params.get("tailLines") == "0"
        return StreamingResponse(self._lines(process, at_end=at_end), media_type="text/plain")

    async def _lines(self, process: _Process, *, at_end: bool) -> AsyncIterator[bytes]:
        with (process.folder / "log").open("rb") as log:
            if at_end:
                log.seek(0, os.SEEK_END)
            while not self._over.is_set():
                ended = process.running.poll() is not None
                if part := log.read(65536):
                    yield part
                    if self.breaking_logs:
                        self.breaking_logs -= 1
                        raise ConnectionResetError("the stream of a log breaks")
                elif ended:
                    return
                else:
                    await asyncio.sleep(_LOOK_SECONDS)

    def _refused(self, request: Request, resource: str, verb: str, namespace: str) -> Response | None:
        self.requests.append((request.method, request.url.path))
        if self.down:
            return _status(503, "ServiceUnavailable", "the API is down")
        if self._stranger(request):
            return _status(401, "Unauthorized", "Unauthorized")
        group = "batch" if "/apis/batch/" in request.url.path else ""
        if namespace != self.namespace or not self._allowed(group, resource, verb):
            text = f'{resource} is forbidden: User "agent" cannot {verb} resource "{resource}" in API group "{group}"'
            return _status(403, "Forbidden", f'{text} in the namespace "{namespace}"')
        return None

    def _stranger(self, request: Request) -> bool:
        return request.headers.get("Authorization") != f"Bearer {self.token}"

    def _allowed(self, group: str, resource: str, verb: str) -> bool:
        return any(
            group in rule["apiGroups"] and resource in rule["resources"] and verb in rule["verbs"]
            for rule in self.rules
        )

    def _stamp(self) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        version = str(next(self._versions))
        return {"uid": secrets.token_hex(16), "creationTimestamp": now, "resourceVersion": version}

    # controllers and nodes

    def _controllers(self) -> None:
        try:
            while not self._over.wait(_LOOK_SECONDS):
                with self._lock:
                    self._control()
        except BaseException as error:
            self._failure = error

    def _control(self) -> None:
        for (kind, namespace, _), one in list(self.objects.items()):
            if kind == "jobs":
                self._control_job(namespace, one)
            elif kind == "pods":
                self._control_pod(one)
        uids = {one["metadata"]["uid"] for (kind, _, _), one in self.objects.items() if kind == "jobs"}
        for key, one in list(self.objects.items()):
            owners = [owner["uid"] for owner in one["metadata"].get("ownerReferences", ())]
            if owners and not uids & set(owners):
                if key[0] == "pods":
                    self._delete_pod(one)
                else:
                    del self.objects[key]

    def _control_job(self, namespace: str, job: dict[str, Any]) -> None:
        if job.get("status", {}).get("created"):
            return
        name, template = job["metadata"]["name"], job["spec"]["template"]
        spec = msgspec.convert(template["spec"], PodSpec)
        text = ""
        if lacks := below_restricted(spec):
            text = f'pods "{name}-" is forbidden: violates PodSecurity "restricted:latest": {", ".join(lacks)}'
        elif over := self._over_quota(template["spec"]):
            text = f'pods "{name}-" is forbidden: exceeded quota: workers, {over}'
        if text:
            self._event(namespace, job, f"Error creating: {text}")
            return
        pod = f"{name}-{secrets.token_hex(3)[:5]}"
        metadata = {
            "name": pod, "namespace": namespace, **self._stamp(),
            "labels": {**template["metadata"].get("labels", {}), "batch.kubernetes.io/job-name": name},
            "ownerReferences": [{
                "apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"],
                "controller": True, "blockOwnerDeletion": True,
            }],
        }  # fmt: skip
        status = {"phase": "Pending", "conditions": []}
        self.objects[("pods", namespace, pod)] = {
            "kind": "Pod", "apiVersion": "v1", "metadata": metadata, "spec": {**template["spec"]}, "status": status,
        }  # fmt: skip
        job["status"] = {"active": 1, "created": True}

    def _over_quota(self, spec: dict[str, Any]) -> str:
        pods = [one for one in self.of_kind("pods") if one["status"]["phase"] in ("Pending", "Running")]
        for resource, limit in self.quota.items():
            if resource == "pods":
                used, more = float(len(pods)), 1.0
            else:
                which, _, name = resource.partition(".")
                used = sum(_total(one["spec"], which, name) for one in pods)
                more = _total(spec, which, name)
            if used + more > amount(limit):
                return f"requested: {resource}={more:g}, used: {resource}={used:g}, limited: {resource}={limit}"
        return ""

    def _event(self, namespace: str, job: dict[str, Any], message: str) -> None:
        name = f"{job['metadata']['name']}.failed"
        if ("events", namespace, name) in self.objects:
            return
        self.objects[("events", namespace, name)] = {
            "kind": "Event", "apiVersion": "v1", "metadata": {"name": name, "namespace": namespace, **self._stamp()},
            "involvedObject": {"kind": "Job", "name": job["metadata"]["name"], "uid": job["metadata"]["uid"]},
            "reason": "FailedCreate", "message": message, "type": "Warning",
        }  # fmt: skip

    def _control_pod(self, pod: dict[str, Any]) -> None:
        name, status = pod["metadata"]["name"], pod["status"]
        if status["phase"] in ("Failed", "Succeeded"):
            return
        process = self._processes.get(name)
        if process is None:
            if not pod["spec"].get("nodeName"):
                self._schedule(pod)
            if pod["spec"].get("nodeName"):
                self._begin(pod)
            return
        self._look_at(pod, process)

    def _schedule(self, pod: dict[str, Any]) -> None:
        spec, why = pod["spec"], []
        for node in self.nodes:
            wanted = spec.get("nodeSelector", {})
            if not wanted.items() <= node.labels.items():
                why.append("didn't match Pod's node affinity/selector")
            elif any(not _tolerated(taint, spec.get("tolerations", [])) for taint in node.taints):
                why.append("had untolerated taint")
            elif short := self._short(node, spec):
                why.append(f"Insufficient {short}")
            else:
                spec["nodeName"] = node.name
                pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "True"}]
                return
        message = f"0/{len(self.nodes)} nodes are available: {', '.join(f'1 {one}' for one in why)}."
        pod["status"]["conditions"] = [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        ]

    def _short(self, node: Node, spec: dict[str, Any]) -> str:
        there = [
            one["spec"] for one in self.of_kind("pods")
            if one["spec"].get("nodeName") == node.name and one["status"]["phase"] in ("Pending", "Running")
        ]  # fmt: skip
        names = {name for one in spec["containers"] for name in one["resources"].get("requests", {})}
        for resource in sorted(names):
            used = sum(_total(one, "requests", resource) for one in there)
            most = amount(node.allocatable.get(resource, "0"))
            if used + _total(spec, "requests", resource) > most:
                return resource
        return ""

    def _begin(self, pod: dict[str, Any]) -> None:
        (container,) = pod["spec"]["containers"]
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        command = self.images.get(container["image"])
        if command is None:
            tries = pod["status"].get("tries", 0) + 1
            reason = "ErrImagePull" if tries < 4 else "ImagePullBackOff"
            text = f'Back-off pulling image "{container["image"]}": not found'
            self._waiting(pod, reason, text)
            pod["status"]["tries"] = tries
            return
        needed = {one["valueFrom"]["secretKeyRef"]["name"] for one in container["env"]}
        held = {one: self.objects.get(("secrets", namespace, one)) for one in needed}
        if missing := [one for one, found in held.items() if found is None]:
            self._waiting(pod, "CreateContainerConfigError", f'secret "{missing[0]}" not found')
            return
        folder = self.folder / name
        folders = {}
        for volume in pod["spec"].get("volumes", ()):
            folders[volume["name"]] = folder / volume["name"]
            folders[volume["name"]].mkdir(parents=True)
            if "secret" in volume:
                data = (self.objects[("secrets", namespace, volume["secret"]["secretName"])])["data"]
                for item in volume["secret"]["items"]:
                    (folders[volume["name"]] / item["path"]).write_bytes(base64.b64decode(data[item["key"]]))
        mounts = {one["mountPath"]: str(folders[one["name"]]) for one in container["volumeMounts"]}
        env = {"PATH": os.environ["PATH"], "HOSTNAME": name}
        for one in container["env"]:
            found = held[one["valueFrom"]["secretKeyRef"]["name"]]
            assert found is not None
            value = base64.b64decode(found["data"][one["valueFrom"]["secretKeyRef"]["key"]]).decode()
            path = next((at for at in mounts if value == at or value.startswith(f"{at}/")), None)
            env[one["name"]] = value if path is None else mounts[path] + value[len(path) :]
        running = self.start(command, env, folder)
        limit = amount(container["resources"].get("limits", {}).get("memory", "1Ti"))
        self._processes[name] = _Process(running, folder, limit)
        pod["status"] |= {
            "phase": "Running", "podIP": "127.0.0.1",
            "containerStatuses": [_container(container, {"running": {}}, ready=True)],
        }  # fmt: skip

    def _look_at(self, pod: dict[str, Any], process: _Process) -> None:
        if process.kill_at is not None and time.monotonic() > process.kill_at:
            _kill(process.running, signal.SIGKILL)
        status = process.running.poll()
        if status is None:
            if largest_over(process.running.pid, process.limit) is not None:
                _kill(process.running, signal.SIGKILL)
                process.running.wait()
                self._end(pod, {"phase": "Failed"}, {"exitCode": 137, "reason": "OOMKilled"})
            return
        _kill(process.running, signal.SIGKILL)
        code = status if status >= 0 else 128 - status
        ended = {"exitCode": code, "reason": "Completed" if code == 0 else "Error"}
        self._end(pod, {"phase": "Failed" if code else "Succeeded"}, ended)

    def _end(self, pod: dict[str, Any], status: dict[str, Any], ended: dict[str, Any] | None = None) -> None:
        name = pod["metadata"]["name"]
        process = self._processes.get(name)
        if process is not None:
            _kill(process.running, signal.SIGKILL)
            process.running.wait()
        pod["status"] |= status
        if ended is not None:
            pod["status"]["containerStatuses"] = [_container(pod["spec"]["containers"][0], {"terminated": ended})]
        if pod["metadata"].get("deletionTimestamp"):
            self.objects.pop(("pods", pod["metadata"]["namespace"], name), None)

    def _delete_pod(self, pod: dict[str, Any]) -> None:
        """Begin to delete a pod; it goes when its process has ended."""
        if pod["metadata"].get("deletionTimestamp"):
            return
        pod["metadata"]["deletionTimestamp"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        process = self._processes.get(pod["metadata"]["name"])
        if process is None or process.running.poll() is not None:
            self.objects.pop(("pods", pod["metadata"]["namespace"], pod["metadata"]["name"]), None)
            return
        process.running.terminate()
        process.kill_at = time.monotonic() + pod["spec"]["terminationGracePeriodSeconds"]

    @staticmethod
    def _waiting(pod: dict[str, Any], reason: str, message: str) -> None:
        state = {"waiting": {"reason": reason, "message": message}}
        pod["status"]["containerStatuses"] = [_container(pod["spec"]["containers"][0], state)]


def _parsed(request: Request, body: bytes) -> Any:
    if request.headers.get("Content-Type") != "application/json":
        raise Invalid("the body must be JSON", 415)
    return json.loads(body)


def _container(container: dict[str, Any], state: dict[str, Any], *, ready: bool = False) -> dict[str, Any]:
    return {
        "name": container["name"], "image": container["image"], "imageID": "", "ready": ready, "restartCount": 0,
        "state": state,
    }  # fmt: skip


def _total(spec: dict[str, Any], which: str, resource: str) -> float:
    return sum(amount(one["resources"].get(which, {}).get(resource, "0")) for one in spec["containers"])


def _tolerated(taint: dict[str, str], tolerations: list[dict[str, str]]) -> bool:
    return any(
        one.get("key", taint["key"]) == taint["key"]
        and one.get("effect", taint["effect"]) == taint["effect"]
        and (one.get("operator") == "Exists" or one.get("value", "") == taint.get("value", ""))
        for one in tolerations
    )


def _selected(labels: Mapping[str, str], selector: str) -> bool:
    for part in filter(None, selector.split(",")):
        name, equal, value = part.partition("!=") if "!=" in part else part.partition("=")
        if (labels.get(name) == value.lstrip("=")) != (equal != "!="):
            return False
    return True


def _fields_selected(one: dict[str, Any], selector: str) -> bool:
    for part in filter(None, selector.split(",")):
        path, _, value = part.partition("=")
        found: Any = one
        for key in path.split("."):
            found = found.get(key, {})
        if found != value.lstrip("="):
            return False
    return True


def _kill(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _status(code: int, reason: str, message: str) -> JSONResponse:
    body = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code}
    return JSONResponse({**body, "reason": reason, "message": message}, code)


def worker_command(*arguments: str, path: str = "") -> list[str]:
    """Return the entry point of the worker's image, as a command of this machine."""
    variables = ["PYTHONUNBUFFERED=1", *([f"PYTHONPATH={path}"] if path else [])]
    return ["env", *variables, sys.executable, "-m", "region_agent.gateway.container", *arguments]
