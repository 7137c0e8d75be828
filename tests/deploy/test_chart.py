"""The Helm chart: what Helm renders is what Kubernetes takes, and what the daemons take."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from lightkube.models import apps_v1, core_v1, networking_v1, policy_v1, rbac_v1
from ruamel.yaml import YAML
from support.commands import run_here
from support.helm import CHART, Rendered, rendered
from support.kubernetes_cluster import agent_role, manifests
from support.kubernetes_rules import amount, below_restricted, checked

from deploy.reference import chart_reference
from region_agent.config import load_config

pytestmark = pytest.mark.processes
PAGE = Path(__file__).resolve().parents[2] / "docs" / "helm.md"
MODELS = {
    "v1": core_v1, "apps/v1": apps_v1, "networking.k8s.io/v1": networking_v1, "policy/v1": policy_v1,
    "rbac.authorization.k8s.io/v1": rbac_v1,
}  # fmt: skip


def _region(**changed: Any) -> dict[str, Any]:
    """Values of one region, at Lambda but for the sections that are changed."""
    return {"controlPlane": {"enabled": False}, "regions": {"east": {"file": {**LAMBDA, **changed}}}}


POSTGRES = {"ports": [{"protocol": "TCP", "port": 5432}]}
PROXIED = {"nginx.ingress.kubernetes.io/proxy-next-upstream": "http_503 non_idempotent"}
NEAR = {"podSelector": {"matchLabels": {"app.kubernetes.io/instance": "geofed-north"}}}
OTHER_REGION = {
    "cloud": "aws", "capacity": {"workers": 2}, "channel": {"kind": "redis", "url": "rediss://redis:6379"},
    "gateway": {"kind": "openfaas", "url": "https://gateway.example.org", "image": "worker",
                "userFile": "/var/run/geofed/files/user", "passwordFile": "/var/run/geofed/files/password"},
    "server": {"workerHost": "10.0.0.1", "ports": [7500, 7502]},
}  # fmt: skip
LAMBDA = {
    "cloud": "aws", "capacity": {"workers": 2}, "channel": {"kind": "redis", "url": "rediss://redis:6379"},
    "gateway": {"kind": "lambda", "image": "123456789012.dkr.ecr.eu-central-1.amazonaws.com/worker:1",
                "role": "arn:aws:iam::123456789012:role/worker", "port": 7446},
    "server": {"workerHost": "10.0.1.5", "ports": [7500, 7502]},
}  # fmt: skip
WRONG = {
    "controlPlane.advertise: name the control plane": {},
    "need PostgreSQL": {"controlPlane": {"advertise": ["a", "b"]}},
    "share a volume": {"controlPlane": {"advertise": ["a", "b"], "databaseSecret": "d", "egress": [POSTGRES]}},
    "where the database": {"controlPlane": {"advertise": ["a"], "databaseSecret": "d"}},
    "let it in by controlPlane.dashboardFrom": {
        "controlPlane": {"advertise": ["a"]}, "ingress": {"enabled": True, "host": "h"},
    },
    "this release has no control plane": {"controlPlane": {"enabled": False}, "ingress": {"enabled": True}},
    "name the Secret with ca.crt": {
        "controlPlane": {"advertise": ["a"], "dashboardFrom": [{"podSelector": {}}]},
        "serviceMonitor": {"enabled": True},
    },
    "state a range": {"controlPlane": {"enabled": False}, "regions": {"east": {"file": {"cloud": "aws"}}}},
    "additional properties 'advertised' not allowed": {"controlPlane": {"advertised": ["a"]}},
    "missing property 'file'": {"controlPlane": {"enabled": False}, "regions": {"east": {}}},
    "'not' failed": {
        "controlPlane": {"enabled": False}, "regions": {"workers": {"file": OTHER_REGION}},
    },
    "type": {"controlPlane": {"advertise": ["a"], "service": {"type": "NodePort"}}},
    "does not match pattern": {"controlPlane": {"advertise": ["fed.example.org:8443"]}},
    "an embedded gateway would refuse every job": _region(gateway={}),
    "a pod has no Docker engine": _region(gateway={"kind": "docker", "image": "worker"}),
    "regions.east.file.gateway.port: state a port": _region(gateway={"kind": "scf"}),
    "workerHost: state the address at which functions of lambda": _region(server={"ports": [7500, 7502]}),
    "regions.east.workerEgress: say where": _region(gateway={"kind": "kubernetes", "image": "w", "port": 7446}),
}  # fmt: skip


def _page_values() -> list[dict[str, Any]]:
    blocks = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [YAML(typ="safe").load(block) for block in blocks]


@cache
def _all() -> dict[str, Rendered]:
    """The examples of the page, everything that the chart can have, and mistakes."""
    first, second, _ = _page_values()
    most = {
        "controlPlane": {
            "advertise": ["fed-a.example.org", "fed-b.example.org"], "databaseSecret": "database",
            "tlsSecret": "own-ca", "options": ["--keep=models=90d"], "egress": [POSTGRES],
            "storage": {"accessMode": "ReadWriteMany", "className": "shared"},
            "service": {"annotations": {"a": "b"}, "sourceRanges": ["203.0.113.0/24"]},
            "dashboardFrom": [{"namespaceSelector": {"matchLabels": {"name": "ingress"}}}],
        },
        "ingress": {"enabled": True, "host": "geofed.example.org", "className": "nginx", "tlsSecret": "web"},
        "serviceMonitor": {"enabled": True, "secret": "metrics", "labels": {"release": "prometheus"}},
        "imagePullSecrets": ["pull"],
        "regions": {
            "east": second["regions"]["east"],
            "west": {
                "file": OTHER_REGION, "secret": "west-files", "environmentSecret": "west-environment",
                "tokenSecret": "west-token", "serviceAccountAnnotations": {"role": "r"},
                "resources": {"limits": {"memory": "8Gi"}},
                "service": {"type": "LoadBalancer", "sourceRanges": ["203.0.113.0/24"], "from": [NEAR]},
            },
            "south": {"file": LAMBDA, "service": {"type": "LoadBalancer", "sourceRanges": ["10.0.0.0/16"]}},
            "alone": {"file": {**OTHER_REGION, "gateway": {"kind": "embedded"}, "policy": {"isolation": "none"}}},
        },
        "agent": {
            "nodeSelector": {"pool": "agents"}, "tolerations": [{"operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
        },
    }  # fmt: skip
    plain = {**second, "networkPolicy": {"enabled": False}, "workers": {"createNamespace": False}}
    good = {"control plane": first, "region": second, "most": most, "plain": plain}
    for name, change in (("other datasets", {"datasets": {}}), ("other cloud", {"cloud": "azure"})):
        good[name] = {"controlPlane": {"enabled": False}, "regions": {"west": {"file": OTHER_REGION | change}}}
    return dict(zip([*good, *WRONG], rendered(*good.values(), *WRONG.values()), strict=True))


GOOD = pytest.mark.parametrize("name", ["control plane", "region", "most", "plain"])


def _objects(name: str) -> Iterator[tuple[dict[str, Any], Any]]:
    """Each object that Kubernetes has a schema of, as it is and as its model."""
    for one in _all()[name].objects:
        if one["apiVersion"] in MODELS:
            yield one, checked(one, getattr(MODELS[one["apiVersion"]], one["kind"]))


@GOOD
def test_helm_and_kubernetes_find_nothing_wrong(name: str) -> None:
    assert (_all()[name].error, _all()[name].lint) == ("", [])
    objects = _all()[name].objects
    names = [(one["kind"], one["metadata"]["name"], one["metadata"].get("namespace")) for one in objects]
    assert len(set(names)) == len(names)
    assert {one["apiVersion"] for one in objects} - set(MODELS) <= {"monitoring.coreos.com/v1"}
    assert len(list(_objects(name))) >= len(objects) - 1


@pytest.mark.parametrize("reason", WRONG)
def test_what_cannot_work_is_refused_with_its_reason(reason: str) -> None:
    assert reason in _all()[reason].error


@GOOD
def test_pods_have_no_more_than_they_need(name: str) -> None:
    for _, made in _objects(name):
        if not isinstance(made, apps_v1.StatefulSet):
            continue
        pod = made.spec.template.spec
        assert below_restricted(pod) == []
        (container,) = pod.containers
        assert container.securityContext.readOnlyRootFilesystem
        assert pod.securityContext.runAsUser == 10001
        assert container.livenessProbe
        assert amount(container.resources.limits["memory"]) >= 2**31
        volumes = {one.name for one in pod.volumes} | {
            one.metadata.name for one in made.spec.volumeClaimTemplates or ()
        }
        assert {one.name for one in container.volumeMounts} == volumes
        assert {"/var/lib/geofed", "/tmp"} <= {one.mountPath for one in container.volumeMounts}
        # No secret is in an object of the chart: they are named.
        assert not container.env
    assert "Secret" not in {one["kind"] for one, _ in _objects(name)}


@GOOD
def test_what_refers_to_something_finds_it(name: str) -> None:
    result = _all()[name]
    pods = [(one, one["spec"]["template"]) for one in result.objects if one["kind"] == "StatefulSet"]
    for one, pod in pods:
        spec = pod["spec"]
        result.one("ServiceAccount", spec["serviceAccountName"])
        assert result.one("Service", one["spec"]["serviceName"])["spec"]["clusterIP"] == "None"
        assert one["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        for volume in spec["volumes"]:
            if "configMap" in volume:
                result.one("ConfigMap", volume["configMap"]["name"])
            if claim := volume.get("persistentVolumeClaim"):
                result.one("PersistentVolumeClaim", claim["claimName"])
    labels = [pod["metadata"]["labels"] for _, pod in pods]
    for one in result.objects:
        spec = one.get("spec", {})
        selector = {
            "Service": lambda spec=spec: spec["selector"],
            "PodDisruptionBudget": lambda spec=spec: spec["selector"]["matchLabels"],
            "NetworkPolicy": lambda spec=spec: spec["podSelector"].get("matchLabels"),
        }.get(one["kind"], lambda: None)()
        if selector and one["metadata"].get("namespace") is None:
            own = {key: value for key, value in selector.items() if not key.startswith("statefulset.")}
            assert len([each for each in labels if own.items() <= each.items()]) == 1, one
        if one["kind"] == "RoleBinding":
            result.one("Role", one["roleRef"]["name"], one["metadata"]["namespace"])
            result.one("ServiceAccount", one["subjects"][0]["name"], one["subjects"][0]["namespace"])


def test_the_control_plane_starts_with_options_that_there_are() -> None:
    told = run_here("serve", "--help").stdout
    arguments = _all()["most"].one("StatefulSet", "geofed-control-plane")["spec"]["template"]["spec"]["containers"][0]
    options = [one.partition("=") for one in arguments["args"][1:]]
    assert [name for name, _, _ in options if name not in told] == []
    chosen = {name: value for name, _, value in options}
    assert f"--database-url-file {chosen['--database-url-file']}\n" in PAGE.read_text()
    for number, host in enumerate(("fed-a", "fed-b")):
        service = _all()["most"].one("Service", f"geofed-control-plane-{number}")
        assert service["spec"]["selector"]["statefulset.kubernetes.io/pod-name"] == f"geofed-control-plane-{number}"
        assert f"{host}.example.org lead to the Service geofed-control-plane-{number}" in _all()["most"].notes


def test_each_control_plane_advertises_the_name_that_leads_to_it(tmp_path: Path) -> None:
    def container(name: str) -> dict[str, Any]:
        (one,) = _all()[name].one("StatefulSet", "geofed-control-plane")["spec"]["template"]["spec"]["containers"]
        return dict(one)

    assert "--advertise=fed.example.org" in container("control plane")["args"]
    assert "command" not in container("control plane")
    (tmp_path / "control-plane").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "control-plane").chmod(0o755)
    argv = [*container("most")["command"], *container("most")["args"]]
    for pod, names in {
        "geofed-control-plane-0": "--advertise=fed-a.example.org --peer=fed-b.example.org",
        "geofed-control-plane-1": "--advertise=fed-b.example.org --peer=fed-a.example.org",
    }.items():
        environment = {"HOSTNAME": pod, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = subprocess.run(argv, capture_output=True, text=True, env=environment)
        assert done.stdout.strip() == " ".join([*container("most")["args"], names])
    done = subprocess.run(
        argv, capture_output=True, text=True, env={**environment, "HOSTNAME": "geofed-control-plane-2"}
    )
    assert (done.returncode, done.stdout) == (2, "")


def test_control_planes_are_reached_where_they_run() -> None:
    def pod(name: str, of: str = "control-plane") -> dict[str, Any]:
        return dict(_all()[name].one("StatefulSet", f"geofed-{of}")["spec"]["template"]["spec"])

    assert pod("control plane")["hostAliases"] == [{"ip": "127.0.0.1", "hostnames": ["fed.example.org"]}]
    assert "hostAliases" not in pod("most")
    (term,) = pod("most")["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    labels = _all()["most"].one("StatefulSet", "geofed-control-plane")["spec"]["selector"]
    assert term["podAffinityTerm"] == {"topologyKey": "kubernetes.io/hostname", "labelSelector": labels}
    assert "affinity" not in pod("control plane")
    chosen = {key: pod("most", "west")[key] for key in ("nodeSelector", "tolerations", "affinity")}
    assert chosen == {
        "nodeSelector": {"pool": "agents"}, "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
    }  # fmt: skip
    annotations = _all()["most"].one("Ingress", "geofed-control-plane")["metadata"]["annotations"]
    assert annotations.items() >= PROXIED.items()
    (endpoint,) = _all()["most"].one("ServiceMonitor", "geofed-control-plane")["spec"]["endpoints"]
    assert endpoint["honorLabels"], "else the label `job` of a metric is renamed"


def test_the_notes_name_the_secret_of_an_invitation() -> None:
    assert "in the Secret west-token," in _all()["most"].notes
    assert "in the Secret geofed-east," in _all()["most"].notes


def test_the_pod_of_the_page_restores_into_what_the_control_plane_has() -> None:
    *_, pod = _page_values()
    made = checked(pod, core_v1.Pod)
    assert below_restricted(made.spec) == []
    served = _all()["control plane"].one("StatefulSet", "geofed-control-plane")["spec"]["template"]["spec"]
    (ours,), (theirs,) = pod["spec"]["containers"], served["containers"]
    assert ours["image"] == theirs["image"]
    assert ours["volumeMounts"] == theirs["volumeMounts"]
    assert pod["spec"]["volumes"] == served["volumes"]
    assert pod["spec"]["securityContext"].items() <= served["securityContext"].items()
    (line,) = re.findall(r"-- control-plane restore (.*)$", PAGE.read_text(), re.MULTILINE)
    told = run_here("restore", "--help").stdout
    assert [word for word in line.split() if word.startswith("--") and word not in told] == []
    assert f"--database-url-file={line.split()[-1]}" in theirs["args"]


def test_an_agent_gets_a_region_file_that_it_takes(tmp_path: Path) -> None:
    for region in ("east", "west", "south", "alone"):
        file = tmp_path / "region.yaml"
        file.write_text(_all()["most"].one("ConfigMap", f"geofed-{region}")["data"]["region.yaml"])
        config = load_config(file)
        assert config.name == region
        host = {"east": "geofed-east-0.geofed-east.geofed.svc.cluster.local", "south": "10.0.1.5"}.get(
            region, "10.0.0.1"
        )
        assert config.server.worker_host == host


def test_a_changed_region_file_restarts_its_agent_unless_only_datasets_change() -> None:
    def mark(name: str) -> str:
        template = _all()[name].one("StatefulSet", "geofed-west")["spec"]["template"]
        return str(template["metadata"]["annotations"]["checksum/region"])

    assert mark("most") == mark("other datasets") != mark("other cloud")


def test_a_region_has_the_ports_of_its_file_and_no_others() -> None:
    result = _all()["most"]
    exchange = result.one("Service", "geofed-west-exchange")["spec"]
    assert [port["port"] for port in exchange["ports"]] == [7500, 7501, 7502]
    assert exchange["loadBalancerSourceRanges"] == ["203.0.113.0/24"]
    (rule,) = result.one("NetworkPolicy", "geofed-west")["spec"]["ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": 7500, "endPort": 7502}]
    assert rule["from"] == [{"ipBlock": {"cidr": "203.0.113.0/24"}}, NEAR]
    cloud = result.one("Service", "geofed-south-exchange")["spec"]
    assert [port["port"] for port in cloud["ports"]] == [7500, 7501, 7502, 7446]
    (rule,) = result.one("NetworkPolicy", "geofed-south")["spec"]["ingress"]
    assert rule["ports"][1:] == [{"protocol": "TCP", "port": 7446}]
    worker = result.one("NetworkPolicy", "geofed-east", "geofed-workers")["spec"]
    file = YAML(typ="safe").load(result.one("ConfigMap", "geofed-east")["data"]["region.yaml"])
    first, last = file["server"]["ports"]
    assert worker["egress"][0]["ports"] == [
        {"protocol": "TCP", "port": file["gateway"]["port"]}, {"protocol": "TCP", "port": first, "endPort": last},
    ]  # fmt: skip
    assert "Role" not in {one["kind"] for one in result.objects if one["metadata"]["name"] == "geofed-west"}


def test_the_plain_manifests_and_the_chart_give_an_agent_the_same() -> None:
    result = _all()["region"]
    for one in manifests():
        checked(one, getattr(MODELS[one["apiVersion"]], one["kind"]))
    assert result.one("Role", "geofed-east", "geofed-workers")["rules"] == agent_role()

    def confined(found: dict[str, Any]) -> tuple[Any, ...]:
        pod = found["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        context = {key: value for key, value in pod["securityContext"].items() if key != "fsGroupChangePolicy"}
        parts = ("securityContext", "livenessProbe", "resources")
        return context, pod["terminationGracePeriodSeconds"], *(container[part] for part in parts)

    (plain,) = [one for one in manifests() if one["kind"] == "StatefulSet"]
    assert confined(result.one("StatefulSet", "geofed-east")) == confined(plain)


def test_the_values_are_those_that_are_documented() -> None:
    values = YAML(typ="safe").load((CHART / "values.yaml").read_text())

    def defaults(schema: dict[str, Any]) -> Any:
        if "properties" in schema:
            return {key: defaults(each) for key, each in schema["properties"].items()}
        return schema["default"]

    schema = YAML(typ="safe").load((CHART / "values.schema.json").read_text())
    assert defaults(schema) == values
    page = chart_reference()
    for key in ("controlPlane.storage.claim", "regions.NAME.file", "workers.createNamespace"):
        assert f"| `{key}` |" in page
