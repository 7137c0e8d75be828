"""Functions as Jobs of a Kubernetes cluster: what they are made of, and what becomes of those that do not run."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from geofed_pb.errors import GeofedError
from region_agent.config import KubernetesGateway, RegionConfig
from region_agent.doctor import examine
from region_agent.gateway import FunctionSpec
from region_agent.gateway.dial_out import ACCEPTED, CERTIFICATE_NAME, DialOut

pytest.importorskip("lightkube")

from lightkube.models.core_v1 import Event, Pod, ResourceQuota
from ruamel.yaml import YAML
from support.kubernetes_cluster import Cluster, Node, agent_role, manifests, worker_command
from support.kubernetes_rules import Invalid, below_restricted, checked
from support.pki import Authority
from support.processes import Start, execute

from region_agent.gateway.embedded.cluster.api import RIGHTS
from region_agent.gateway.embedded.cluster.manifests import ObjectOwner, job_of, secret_of
from region_agent.gateway.embedded.cluster.pods import judge, refusal
from region_agent.gateway.embedded.dialled import DialledConnections
from tests.region_agent.gateway.conftest import HANDLERS, Embedded, Target, open_target, until

pytestmark = [pytest.mark.anyio, pytest.mark.processes]
IMAGES = {"probe": worker_command("--handler", "gateway_probe:handle", path=str(HANDLERS))}
SETTINGS: dict[str, Any] = {"kind": "kubernetes", "image": "probe"}
GPU = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
SPOT = {"nodeSelector": {"pool": "spot"}, "tolerations": [{"key": "spot", "value": "yes", "effect": "NoExecute"}]}


@pytest.fixture
def cluster(tmp_path: Path, start_function: Start) -> Any:
    (tmp_path / "cluster").mkdir()
    with Cluster(tmp_path / "cluster", IMAGES, start=start_function) as cluster:
        yield cluster


@pytest.fixture
def opened(cluster: Cluster, launch: Callable[..., Embedded]) -> Callable[..., Any]:
    @asynccontextmanager
    async def opened(**settings: Any) -> AsyncIterator[Target]:
        section = SETTINGS | {"kubeconfig": str(cluster.kubeconfig())} | settings
        embedded = launch(kubernetes=section, owner="mark", drain_timeout="1s")
        async with open_target(embedded) as target:
            yield target
        embedded.stop()

    return opened


async def refused(target: Target, seconds: float = 60.0, **members: Any) -> GeofedError:
    """Deploy a function that cannot start; returns the error of waiting for it."""
    name = f"refused-{os.getpid()}"
    await target.client.deploy(FunctionSpec(name, members.pop("image", "probe"), **members))
    with pytest.raises(GeofedError) as caught:
        await target.client.wait_ready(name, 1, timedelta(seconds=seconds))
    await target.client.delete(name)
    return caught.value


# What a replica is made of


async def test_a_replica_is_a_job_that_may_do_nothing_but_work(cluster: Cluster, opened: Any) -> None:
    cluster.nodes = [
        Node("cpu"),
        Node("gpu", {"gpu": "h100"}, [{"key": "nvidia.com/gpu", "value": "1", "effect": "NoSchedule"}],
             {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "2"}),
    ]  # fmt: skip
    placement = {"nodeSelector": {"gpu": "h100"}, "tolerations": [GPU]}
    given = {"gpus": 2, "cpu": "4", "placement": placement, "serviceAccount": "workers", "imagePullSecrets": ["pull"]}
    # As in a cluster: the container's command is executed.
    cluster.start = execute
    async with opened(**given) as target:
        await target.client.create_secret("token", b"very secret")
        labels = {"geofed.region": "east", "geofed.job": "digits-1"}
        limits = {"memory": "512Mi"}
        probe = await target.deploy(secrets=("token",), labels=labels, limits=limits, env_vars={"PLAIN": "hidden"})
        assert (await probe("secret?name=token")).body == b"very secret"
        assert json.loads((await probe("env")).body)["environ"].keys().isdisjoint({"GEOFED_DIAL", "GEOFED_DIAL_TOKEN"})
        (job,), (secret,), (pod,) = (cluster.of_kind(plural) for plural in ("jobs", "secrets", "pods"))
        spec = pod["spec"]
        (container,) = spec["containers"]
        assert job["metadata"]["labels"].items() >= {**labels, "geofed.gateway": "mark"}.items()
        assert (job["spec"]["backoffLimit"], job["spec"]["ttlSecondsAfterFinished"]) == (0, 600)
        assert (spec["nodeName"], spec["serviceAccountName"]) == ("gpu", "workers")
        assert (spec["imagePullSecrets"], spec["automountServiceAccountToken"]) == ([{"name": "pull"}], False)
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] == 10001
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["resources"]["limits"] == {"cpu": "4", "memory": "512Mi", "nvidia.com/gpu": "2"}
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        shared = {"medium": "Memory", "sizeLimit": "512Mi"}
        assert {"name": "shm", "emptyDir": shared} in spec["volumes"], "of the container's own memory"
        # Who may read Jobs and pods learns nothing of the job's values.
        assert "hidden" not in json.dumps([job, pod])
        assert secret["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
        assert secret["immutable"]
        assert {path for _, path in cluster.requests if "secret" in path} == {"/api/v1/namespaces/workers/secrets"}
    until(lambda: not any(cluster.of_kind(plural) for plural in ("jobs", "secrets", "pods")))


async def test_a_function_has_the_image_that_it_states(cluster: Cluster, opened: Any) -> None:
    cluster.images["r/team/worker:1"] = IMAGES["probe"]
    async with opened() as target:
        await target.deploy(image="r/team/worker:1")
        (pod,) = cluster.of_kind("pods")
        assert [one["image"] for one in pod["spec"]["containers"]] == ["r/team/worker:1"]


async def test_preemptible_functions_have_nodes_of_their_own(cluster: Cluster, opened: Any) -> None:
    taint = {"key": "spot", "value": "yes", "effect": "NoExecute"}
    cluster.nodes = [Node("own"), Node("spot", {"pool": "spot"}, [taint])]
    async with opened(preemptible=SPOT) as target:
        await target.deploy()
        await target.deploy(labels={"geofed.capacity": "preemptible"})
        assert [one["spec"]["nodeName"] for one in cluster.of_kind("pods")] == ["own", "spot"]


def test_manifests_are_what_the_cluster_takes() -> None:
    settings = KubernetesGateway.model_validate(SETTINGS)
    spec = FunctionSpec("worker", "probe", limits={"memory": "1Gi"}, secrets=("one",))
    identity, env = ObjectOwner("mark", "run"), {"A": "1"}
    import msgspec
    from lightkube.models.batch_v1 import Job
    from lightkube.models.core_v1 import Secret

    job = job_of("a-1", spec, identity, settings, env)
    body = msgspec.to_builtins(job)
    template = checked(body, Job).spec.template.spec
    assert below_restricted(template) == []
    checked(msgspec.to_builtins(secret_of("a-1", spec, identity, env, {"one": b"x"})), Secret)
    # The rules do refuse.
    for change in ({"nodeSelektor": {}}, {"containers": [{"image": "no name"}]}, {"restartPolicy": "Always"}):
        broken = json.loads(json.dumps(body))
        broken["spec"]["template"]["spec"] |= change
        with pytest.raises(Invalid):
            checked(broken, Job)
    template.containers[0].securityContext.allowPrivilegeEscalation = None
    template.securityContext.seccompProfile = None
    assert below_restricted(template) == ["allowPrivilegeEscalation != false", "seccompProfile"]


# What does not run


async def test_an_image_that_cannot_be_pulled_is_told(opened: Any) -> None:
    async with opened() as target:
        error = await refused(target, image="registry.example/none:1")
    assert error.code == "IMAGE_UNAVAILABLE"
    assert 'Back-off pulling image "registry.example/none:1"' in error.message


async def test_a_pod_that_no_node_takes_is_told_after_a_time(cluster: Cluster, opened: Any) -> None:
    cluster.nodes = [Node("small", allocatable={"cpu": "1", "memory": "1Gi"})]
    async with opened(startSeconds=2) as target:
        error = await refused(target, limits={"memory": "4Gi"})
        assert error.code == "FUNCTION_UNSCHEDULABLE"
        assert "within 2 s: no node takes it: 0/1 nodes are available: 1 Insufficient memory" in error.message
        # Once there is a node, the same function runs.
        await target.client.deploy(FunctionSpec("later", "probe", limits={"memory": "4Gi"}))
        cluster.nodes.append(Node("large"))
        await target.client.wait_ready("later", 1, timedelta(seconds=30))


async def test_an_exceeded_quota_is_told(cluster: Cluster, opened: Any) -> None:
    cluster.quota = {"pods": "2", "limits.memory": "1Gi"}
    async with opened() as target:
        error = await refused(target, limits={"memory": "2Gi"})
        assert error.code == "QUOTA_EXCEEDED"
        assert "exceeded quota: workers, requested: limits.memory" in error.message
        await target.deploy(limits={"memory": "512Mi"})


async def test_wrong_credentials_and_missing_rights_are_told(cluster: Cluster, opened: Any) -> None:
    async with opened(kubeconfig=str(cluster.kubeconfig("wrong", token="wrong"))) as target:
        assert (await refused(target)).code == "UNAUTHENTICATED"
    cluster.rules = [rule for rule in cluster.rules if "secrets" not in rule["resources"]]
    async with opened() as target:
        error = await refused(target)
        assert (error.code, "deploy/kubernetes/agent.yaml" in error.hint) == ("FORBIDDEN", True)
    until(lambda: not cluster.of_kind("jobs"))


async def test_an_evicted_pod_is_replaced_and_its_call_told(cluster: Cluster, opened: Any) -> None:
    async with opened() as target:
        probe = await target.deploy()
        host, _ = await probe.process()
        call = asyncio.create_task(probe("wait?s=30"))
        await asyncio.sleep(0.5)
        cluster.evict(host, "The node was low on resource: memory.")
        with pytest.raises(GeofedError) as caught:
            await call
        assert caught.value.code == "FUNCTION_EVICTED"
        assert "low on resource: memory" in caught.value.message
        await target.client.wait_ready(probe.name, 1, timedelta(seconds=20))
        assert (await probe.process())[0] != host


async def test_a_pod_on_a_node_that_goes_ends_its_call_and_gets_no_other(cluster: Cluster, opened: Any) -> None:
    async with opened() as target:
        probe = await target.deploy(env_vars={"max_inflight": "2"})
        host, _ = await probe.process()
        call = asyncio.create_task(probe("wait?s=3"))
        await asyncio.sleep(0.5)
        cluster.drain(host, "DeletionByTaintManager")

        async with asyncio.timeout(20):
            while (await probe.process())[0] == host:
                pass
        assert (await call).body == b"woke"


async def test_an_outage_of_the_api_stops_no_call(cluster: Cluster, opened: Any) -> None:
    async with opened() as target:
        probe = await target.deploy()
        cluster.down = True
        await asyncio.sleep(2.5)
        assert (await probe("echo", b"x")).body == b"x"
        await target.client.delete(probe.name)
        assert cluster.of_kind("jobs")
        cluster.down = False
        until(lambda: not cluster.of_kind("jobs"), 20)


async def test_what_a_killed_gateway_has_left_is_deleted(cluster: Cluster, opened: Any) -> None:
    async with opened() as target:
        await target.deploy()
        assert target.embedded is not None
        target.embedded.kill()
        (left,) = cluster.of_kind("jobs")
    strange = {**left, "metadata": {**left["metadata"], "name": "strange", "labels": {"geofed.gateway": "other"}}}
    cluster.objects[("jobs", "workers", "strange")] = strange
    async with opened():
        until(lambda: [one["metadata"]["name"] for one in cluster.of_kind("jobs")] == ["strange"], 20)


async def test_a_log_whose_stream_breaks_is_not_read_again(cluster: Cluster, opened: Any) -> None:
    async with opened() as target:
        probe = await target.deploy()

        async def printed() -> list[str]:
            return [line.text async for line in target.client.logs(probe.name)]

        async def prints(text: str) -> None:
            # Again and again: what is printed while no stream is open is lost.
            async with asyncio.timeout(20):
                while text not in await printed():
                    await probe("print", text.encode())
                    await asyncio.sleep(0.3)

        await probe("print", b"before")
        async with asyncio.timeout(20):
            while "before" not in await printed():
                pass
        cluster.breaking_logs = 1
        await prints("breaks")
        await asyncio.to_thread(until, lambda: not cluster.breaking_logs)
        await prints("after")
        assert (await printed()).count("before") == 1


async def test_a_gateway_that_stops_leaves_no_job_that_is_being_created(cluster: Cluster, opened: Any) -> None:
    cluster.slow = {"jobs": 1.5}
    async with opened() as target:
        await target.client.deploy(FunctionSpec("late", "probe"))
        until(lambda: cluster.delayed)
        target.embedded.stop()
    await asyncio.sleep(2)
    assert cluster.delayed == ["jobs"]
    until(lambda: not any(cluster.of_kind(plural) for plural in ("jobs", "secrets", "pods")), 5)


async def test_a_job_without_a_secret_of_a_function_that_is_gone_is_deleted(cluster: Cluster, opened: Any) -> None:
    cluster.slow = {"jobs": 1.0}
    cluster.rules = [rule for rule in cluster.rules if "secrets" not in rule["resources"]]
    async with opened() as target:
        await target.client.deploy(FunctionSpec("gone", "probe"))
        until(lambda: cluster.delayed)
        await target.client.delete("gone")
        await asyncio.to_thread(until, lambda: any(path.endswith("/secrets") for _, path in cluster.requests))
        await asyncio.to_thread(until, lambda: not cluster.of_kind("jobs"))


# The connections


async def test_only_the_replica_that_is_expected_may_connect() -> None:
    dialled = DialledConnections(lambda _: None)
    await dialled.start("127.0.0.1", 0)
    dial = dialled.expect("one")
    try:
        context = ssl.create_default_context(cadata=dial.certificate)
        await asyncio.to_thread(lambda: dial.connect(context).close())
        for wrong in (
            DialOut(dial.address, "one", "0" * 64, dial.certificate),
            DialOut(dial.address, "two", dial.token, ""),
        ):
            with pytest.raises(OSError):
                await asyncio.to_thread(wrong.connect, context)
        # Another certificate than the one that was given is not trusted.
        other = DialledConnections(lambda _: None)
        await other.start("127.0.0.1", 0)
        strange = ssl.create_default_context(cadata=other.expect("one").certificate)
        with pytest.raises(ssl.SSLCertVerificationError):
            await asyncio.to_thread(dial.connect, strange)
        await other.stop()
        host, port = dial.address.split(":")
        for noise in (b"\n", b"{}\n", b'{"replica": [], "token": 1}\n', b"x" * 100_000):
            assert await asyncio.to_thread(_answer, context, (host, int(port)), noise) == b""
        dialled.forget("one")
        with pytest.raises(OSError):
            await asyncio.to_thread(dial.connect, context)
    finally:
        await dialled.stop()


@pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.2"], ids=["same-address", "another-address"])
@pytest.mark.parametrize("tls", [True, False], ids=["tls", "tcp"])
async def test_connections_that_say_nothing_keep_no_replica_out(source: str, tls: bool) -> None:
    dialled = DialledConnections(lambda _: None)
    await dialled.start("127.0.0.1", 0)
    dial = dialled.expect("one")
    context = ssl.create_default_context(cadata=dial.certificate)
    host, port = dial.address.split(":")
    silent: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def be_silent() -> None:
        options: dict[str, Any] = {"ssl": context, "server_hostname": CERTIFICATE_NAME} if tls else {}
        silent.append(await asyncio.open_connection(host, int(port), local_addr=(source, 0), **options))

    try:
        for _ in range(20):
            await asyncio.gather(*(be_silent() for _ in range(15)))
        for _ in range(5):
            (await asyncio.to_thread(dial.connect, context)).close()
        # No more than 256 stay open.
        await asyncio.sleep(0.2)
        assert sum(not _closed(reader) for reader, _ in silent) <= 256
    finally:
        for _, writer in silent:
            writer.transport.abort()
        await dialled.stop()


async def test_the_address_with_the_most_silent_connections_loses_its_oldest() -> None:
    dialled = DialledConnections(lambda _: None)
    await dialled.start("127.0.0.1", 0)
    dial = dialled.expect("one")
    host, port = dial.address.split(":")
    opened = {"127.0.0.2": 300, "127.0.0.3": 8}
    silent: dict[str, list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]] = {one: [] for one in opened}
    try:
        for source in reversed(opened):
            for _ in range(opened[source]):
                silent[source].append(await asyncio.open_connection(host, int(port), local_addr=(source, 0)))
        await asyncio.sleep(0.2)
        closed = {source: [_closed(reader) for reader, _ in silent[source]] for source in silent}
        assert not any(closed["127.0.0.3"])
        assert closed["127.0.0.2"] == [True] * 52 + [False] * 248
    finally:
        for _, writer in (pair for pairs in silent.values() for pair in pairs):
            writer.transport.abort()
        await dialled.stop()


def _closed(reader: asyncio.StreamReader) -> bool:
    return reader.at_eof() or reader.exception() is not None


def _answer(context: ssl.SSLContext, place: tuple[str, int], noise: bytes) -> bytes:
    with socket.create_connection(place, 10) as raw, context.wrap_socket(raw, server_hostname=CERTIFICATE_NAME) as line:
        try:
            line.sendall(noise)
            return line.recv(len(ACCEPTED))
        except OSError:
            return b""


# What pods and events mean


@pytest.mark.parametrize(
    ("status", "state", "code", "told"),
    [
        ({}, "waiting", "", "being made"),
        ({"phase": "Running"}, "running", "", "runs"),
        ({"phase": "Failed", "reason": "Evicted", "message": "low disk"}, "ended", "FUNCTION_EVICTED", "low disk"),
        ({"phase": "Failed", "conditions": [
            {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "a pod"}
        ]}, "ended", "FUNCTION_EVICTED", "PreemptionByScheduler: a pod"),
        ({"phase": "Pending", "conditions": [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
        ]}, "waiting", "FUNCTION_UNSCHEDULABLE", "0/3 nodes"),
        ({"phase": "Failed"}, "ended", "FUNCTION_FAILED", "did not run"),
    ],
)  # fmt: skip
def test_verdicts_of_pods(status: dict[str, Any], state: str, code: str, told: str) -> None:
    verdict = judge(Pod.from_dict({"metadata": {"name": "p"}, "status": status}))
    assert (verdict.state, verdict.code) == (state, code)
    assert told in verdict.text


@pytest.mark.parametrize(
    ("container", "state", "code"),
    [
        ({"waiting": {"reason": "ErrImagePull"}}, "waiting", "IMAGE_UNAVAILABLE"),
        ({"waiting": {"reason": "InvalidImageName"}}, "failing", "IMAGE_UNAVAILABLE"),
        ({"waiting": {"reason": "CreateContainerConfigError"}}, "waiting", "CONFIG_INVALID"),
        ({"terminated": {"exitCode": 137, "reason": "OOMKilled"}}, "ended", "FUNCTION_OUT_OF_MEMORY"),
        ({"terminated": {"exitCode": 3, "reason": "Error"}}, "ended", "FUNCTION_FAILED"),
    ],
)
def test_verdicts_of_containers(container: dict[str, Any], state: str, code: str) -> None:
    one = {"name": "worker", "image": "i", "imageID": "", "ready": False, "restartCount": 0, "state": container}
    phase = "Failed" if "terminated" in container else "Pending"
    body = {"metadata": {"name": "p"}, "status": {"phase": phase, "containerStatuses": [one]}}
    verdict = judge(Pod.from_dict(body))
    assert (verdict.state, verdict.code) == (state, code)


def test_a_jobs_events_tell_why_it_has_no_pod() -> None:
    def event(reason: str, message: str) -> Event:
        return Event.from_dict({"involvedObject": {}, "metadata": {}, "reason": reason, "message": message})

    assert refusal([event("SuccessfulCreate", "Created pod")]) is None
    found = refusal([event("FailedCreate", 'pods "a-" is forbidden: violates PodSecurity "restricted:latest": x')])
    assert found is not None
    assert found.code == "CONFIG_INVALID"


# doctor


def _region(cluster: Cluster, **gateway: Any) -> RegionConfig:
    return RegionConfig.model_validate(
        {
            "apiVersion": "geofed/v1", "kind": "Region", "metadata": {"name": "east"}, "cloud": "test",
            "capacity": {"workers": 4, "memoryMb": 1024, "preemptible": 1}, "prices": None,
            "gateway": SETTINGS | {"kubeconfig": str(cluster.kubeconfig()), "preemptible": SPOT} | gateway,
        }
    )  # fmt: skip


async def test_doctor_examines_the_cluster(cluster: Cluster, tmp_path: Path) -> None:
    async def found(**gateway: Any) -> Any:
        return {one.name: one for one in await examine(_region(cluster, **gateway), tmp_path)}["gateway"]

    right = await found()
    assert right.ok, right
    assert "namespace workers: may run functions, no quota" in right.text
    assert not cluster.of_kind("jobs")
    cluster.quota = {"pods": "10", "limits.memory": "5Gi", "requests.cpu": "5"}
    assert (await found()).text.endswith("quota workers suffices")
    cluster.quota["limits.memory"] = "4Gi"
    short = await found()
    assert not short.ok
    assert "quota workers allows 4Gi of limits.memory; 5 workers of 1024 MB need 5120Mi" in short.text
    assert "requests.nvidia.com/gpu" not in short.text
    cluster.quota = {"requests.nvidia.com/gpu": "4"}
    assert "need 5" in (await found(gpus=1)).text
    cluster.rules = [rule for rule in cluster.rules if "jobs" not in rule["resources"]]
    forbidden = await found()
    assert "may not, in namespace workers: create jobs, list jobs, delete jobs" in forbidden.text
    assert "refuses the credentials" in (await found(kubeconfig=str(cluster.kubeconfig("w", token="w")))).text
    assert "cannot be read" in (await found(kubeconfig=str(tmp_path / "none"))).text
    # Another server than the one whose authority the file names.
    strange = cluster.kubeconfig("strange")
    authority = base64.b64encode(Authority("another").pem).decode()
    body = json.loads(strange.read_text())
    body["clusters"][0]["cluster"]["certificate-authority-data"] = authority
    strange.write_text(json.dumps(body))
    assert "CERTIFICATE_VERIFY_FAILED" in (await found(kubeconfig=str(strange))).text
    body["clusters"][0]["cluster"]["server"] = "http://203.0.113.7"
    strange.write_text(json.dumps(body))
    assert "in plaintext; use https://" in (await found(kubeconfig=str(strange))).text


def test_quotas_without_limits_are_enough() -> None:
    from region_agent.gateway.embedded.cluster.examine import shortage

    settings = KubernetesGateway.model_validate(SETTINGS)
    region = RegionConfig.model_validate(
        {
            "apiVersion": "geofed/v1",
            "kind": "Region",
            "metadata": {"name": "a"},
            "cloud": "c",
            "capacity": {"workers": 2},
        }
    )
    quota = ResourceQuota.from_dict({"metadata": {"name": "q"}, "spec": {"hard": {"services": "0", "cpu": "1500m"}}})
    (told,) = shortage(region, settings, [quota])
    assert "quota q allows 1500m of cpu; 2 workers of 2048 MB need 2" in told


def test_the_shipped_manifests_are_what_a_cluster_takes() -> None:
    from lightkube.models import apps_v1, core_v1, networking_v1, rbac_v1

    models: dict[str, Any] = {
        "Namespace": core_v1.Namespace, "ServiceAccount": core_v1.ServiceAccount, "Service": core_v1.Service,
        "Role": rbac_v1.Role, "RoleBinding": rbac_v1.RoleBinding, "NetworkPolicy": networking_v1.NetworkPolicy,
        "StatefulSet": apps_v1.StatefulSet,
    }  # fmt: skip
    every = [(one["kind"], checked(one, models[one["kind"]])) for one in manifests()]
    made = dict(every)
    assert made.keys() == models.keys()
    agent = made["StatefulSet"].spec
    assert below_restricted(agent.template.spec) == []
    assert agent.selector.matchLabels == agent.template.metadata.labels == made["Service"].spec.selector
    assert agent.serviceName == made["Service"].metadata.name
    assert [one.name for one in made["RoleBinding"].subjects] == [agent.template.spec.serviceAccountName]


def test_the_shipped_policy_lets_workers_connect_to_the_ports_of_their_own_agent_alone() -> None:
    made = {(one["kind"], one["metadata"]["name"]): one for one in manifests()}
    agent = made["StatefulSet", "east"]["spec"]
    policies = [one["spec"] for (kind, _), one in made.items() if kind == "NetworkPolicy"]
    dns = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}
    cache = {"ipBlock": {"cidr": "169.254.20.10/32"}}
    everyone = {"podSelector": {}, "ingress": [], "policyTypes": ["Ingress", "Egress"]}
    (shared,) = [one for one in policies if one["podSelector"] == {}]
    assert shared.items() >= everyone.items()
    assert [rule["to"] for rule in shared["egress"]] == [[dns, cache]]
    assert {port["port"] for rule in shared["egress"] for port in rule["ports"]} == {53}
    (own,) = [one for one in policies if one is not shared]
    # As pods of the region are labelled; those of another one are not chosen.
    labels = {"geofed.region": "east", "geofed.job": "digits-1"}
    job = job_of("a-1", FunctionSpec("w", "probe", labels=labels), ObjectOwner("mark", "run"),
                 KubernetesGateway.model_validate(SETTINGS), {})  # fmt: skip
    assert job.spec is not None
    assert job.spec.template.metadata is not None
    assert (job.spec.template.metadata.labels or {}).items() >= own["podSelector"]["matchLabels"].items()
    assert own["podSelector"]["matchLabels"] == {"geofed.region": "east"}
    (rule,) = own["egress"]
    namespace = {"kubernetes.io/metadata.name": made["Namespace", "geofed"]["metadata"]["name"]}
    assert rule["to"] == [{"namespaceSelector": {"matchLabels": namespace}, "podSelector": agent["selector"]}]
    # The ports of the region file in docs/kubernetes.md.
    text = (Path(__file__).parents[3] / "docs" / "kubernetes.md").read_text()
    region = YAML(typ="safe").load(text.split("```yaml\n")[1].split("```")[0])
    first, last = region["server"]["ports"]
    assert rule["ports"] == [
        {"protocol": "TCP", "port": region["gateway"]["port"]}, {"protocol": "TCP", "port": first, "endPort": last},
    ]  # fmt: skip


def test_the_shipped_role_is_what_the_agent_needs() -> None:
    given = {
        (group, resource, verb)
        for rule in agent_role()
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert given == {(*kind, verb) for kind, verbs in RIGHTS.items() for verb in verbs}
