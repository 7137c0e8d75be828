"""A job over regions of a thousand clients, from its job file to its model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from support.running import Federation, Running, digits_sites, eventually
from support.warm_zygotes import EXECUTED

from region_agent.worker.clients.sampling import ClientSampler
from region_agent.worker.invocation import ClientRounds
from sync.seeding import seed_all
from tests.e2e.conftest import PAIR

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

pytest.importorskip("pyarrow", reason="needs geofed[data]")

CLIENTS = {"shanghai": 1000, "virginia": 500, "frankfurt": 300}
ROUNDS, RATE, BATCH = 4, 0.05, 2
HOW = ClientRounds(fraction=0.1, least=10, epochs=2, batch=BATCH)
_PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
(OWN_TASK,) = re.findall(r"^```python\n(.*?)^```$", _PAGE, re.MULTILINE | re.DOTALL)
"""That of the documentation, which says by `clients` whose each sample is."""
TABLE_TASK = """
import torch


def model(config):
    return torch.nn.Linear(2, 1)


def loss(model, batch):
    x = torch.stack([batch["a"], batch["b"]], 1)
    return torch.nn.functional.mse_loss(model(x).squeeze(1), batch["y"])


def optimizer(parameters, config):
    return torch.optim.SGD(parameters, lr=0.05)
"""
JOB = (
    "train.workers=1", f"train.batch={BATCH}", f"train.end={{steps: {ROUNDS}}}", "train.evaluateEvery=0",
    "clients={fraction: 0.1, min: 10, epochs: 2}", "wan.codec=fp32", "wan.interval=1", "train.seed=0",
)  # fmt: skip


def _samples(region: str) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Clients of one to five samples, each with an offset of its own; those of one client lie together."""
    rng = np.random.default_rng(list(CLIENTS).index(region))
    sizes = rng.integers(1, 6, CLIENTS[region])
    ids = np.repeat(np.arange(CLIENTS[region]), sizes)
    x = rng.standard_normal((len(ids), 2)).astype(np.float32)
    y = (3 * x[:, 0] - 2 * x[:, 1] + 0.3 * rng.standard_normal(CLIENTS[region])[ids]).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(y), ids.tolist()


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    folder = tmp_path_factory.mktemp("clients")
    sites = digits_sites(folder, PAIR, workers=2)
    for site in sites:
        x, y, ids = _samples(site.name)
        torch.save({"x": x, "y": y, "branch": ids}, folder / f"{site.name}.pt")
        lines = [f"{a},{b},{c},p{who}" for (a, b), c, who in zip(x.tolist(), y.tolist(), ids, strict=True)]
        (folder / f"{site.name}.csv").write_text("\n".join(["a,b,y,patient", *lines]) + "\n")
        table = {"kind": "csv", "columns": ["a", "b", "y"], "clients": {"column": "patient"}}
        file = {"uri": str(folder / f"{site.name}.csv")}
        site.config["datasets"]["visits"] = {"format": table, "splits": {"train": file, "test": file}}
        own = {"uri": str(folder / f"{site.name}.pt"), "samples": len(ids), "clients": CLIENTS[site.name]}
        site.config["datasets"]["branches"] = {"splits": {"train": own, "test": own}}
    with pytest.MonkeyPatch.context() as patch:
        # What a client costs is measured here.
        patch.setenv(EXECUTED, "1")
        with Federation(folder / "federation", sites) as made:
            patch.undo()
            yield made


def _plain() -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Federated averaging in one process: the clients of each region are drawn by themselves, and regions weigh by
    their data. Returns the model, and the samples that each region's clients have processed."""
    seed_all(0)
    module = torch.nn.Linear(2, 1)
    held = {name: _samples(name) for name in PAIR}
    total = sum(len(ids) for _, _, ids in held.values())
    processed = dict.fromkeys(PAIR, 0)
    drawing = {name: ClientSampler(_Ids(held[name][2]), 0, name, HOW) for name in PAIR}
    for number in range(1, ROUNDS + 1):
        start = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        mean = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in start.items()}
        for region, (x, y, ids) in held.items():
            clients = drawing[region].drawn(number)
            assert len(clients) == CLIENTS[region] // 10
            weight = sum(ids.count(client) for client in clients)
            for client in clients:
                module.load_state_dict(start)
                for rows in drawing[region].batches(client, number):
                    processed[region] += len(rows)
                    module.zero_grad()
                    torch.nn.functional.mse_loss(module(x[rows]).squeeze(1), y[rows]).backward()
                    with torch.no_grad():
                        for parameter in module.parameters():
                            assert parameter.grad is not None
                            parameter -= RATE * parameter.grad
                share = ids.count(client) / weight * len(ids) / total
                for name, tensor in module.state_dict().items():
                    mean[name] += share * (tensor - start[name]).double()
        module.load_state_dict({name: (start[name] + mean[name]).float() for name in start})
    return module.state_dict(), processed


class _Ids:
    def __init__(self, clients: list[int]) -> None:
        self.clients = clients

    def __len__(self) -> int:
        return len(self.clients)


def _ended(running: Running, job: str, file: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    described = running.wait_end(job)
    assert described["state"] == "succeeded", described.get("error") or described
    running.federation.control_plane("export", job, "--output-file", str(file))
    return described, safetensors.torch.load_file(file)


def test_a_thousand_clients_are_averaged_as_in_one_process(federation: Federation, tmp_path: Path) -> None:
    running = Running(federation, tmp_path)
    job_file = running.job_folder(TABLE_TASK) / "job.yaml"
    wanted = [part for key in (*JOB, "data.dataset=visits") for part in ("--set", key)]
    eventually(
        lambda: federation.control_plane("explain", str(job_file), *wanted, check=False).returncode == 0,
        "the clients are counted",
        30,
    )
    told = federation.control_plane("explain", str(job_file), *wanted).stdout
    assert "100 of 1,000 in shanghai, 50 of 500 in virginia train in a round" in told
    assert f"{ROUNDS}, each of 1 round of clients" in told, told
    expected, processed = _plain()
    described, found = _ended(running, running.submit("data.dataset=visits", *JOB), tmp_path / "one.safetensors")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
    assert {part["name"]: part["samples"] for part in described["result"]["regions"]} == processed
    logged = [one for one in running.events(described["id"]) if one["kind"] == "partition.logged"]
    told_of = {(one["region"], one["data"]["values"]["clients"]) for one in logged}
    assert told_of == {("shanghai", 100.0), ("virginia", 50.0)}, logged[-1]

    # A worker is killed while it trains: what it has made of the round is made again.
    slow = TABLE_TASK.replace("def loss(model, batch):\n", "def loss(model, batch):\n    time.sleep(0.002)\n")
    job = running.submit("data.dataset=visits", *JOB, task=f"import time\n{slow}")
    running.wait_round(job, 2)
    for worker in running.workers("shanghai"):
        worker.kill()
    described, again = _ended(running, job, tmp_path / "two.safetensors")
    kinds = [one["kind"] for one in running.events(job) if one["region"] == "shanghai"]
    assert "worker-failed" in kinds, kinds
    assert {name: tensor.tolist() for name, tensor in again.items()} == {
        name: tensor.tolist() for name, tensor in found.items()
    }
    assert {part["name"]: part["samples"] for part in described["result"]["regions"]} == processed

    # Two workers divide the clients, which the task's own dataset names.
    job = running.submit("data.dataset=branches", *JOB, "train.workers=2", "function.slice=1s", task=OWN_TASK)
    described, shared = _ended(running, job, tmp_path / "three.safetensors")
    for name, tensor in expected.items():
        torch.testing.assert_close(shared[name], tensor, rtol=1e-5, atol=1e-6)
    assert {part["name"]: part["samples"] for part in described["result"]["regions"]} == processed


def test_the_time_of_rounds_is_forecast_from_what_clients_cost(federation: Federation, tmp_path: Path) -> None:
    """Of each client's time here most is its own, and little that of its samples."""
    running = Running(federation, tmp_path)
    slow = TABLE_TASK.replace("    return torch.optim", "    time.sleep(0.3)\n    return torch.optim")
    task = f"import time\n{slow}"
    wanted = ("data.dataset=visits", *JOB, "clients={fraction: 0.01, epochs: 2}", "train.end={steps: 4}")
    # A task of its own: no run of another version tells its speed.
    wanted += ("task.config={of: slow clients}",)
    job_file = running.job_folder(task) / "job.yaml"
    ran = federation.control_plane(
        "explain", str(job_file), *(part for key in wanted for part in ("--set", key)), "-o", "json", timeout=60
    )
    plan = json.loads(ran.stdout)["data"]
    assert plan["estimate"]["basis"] in ("probed", "likened")
    steps = next(one for one in plan["estimate"]["phases"] if one["name"] == "steps")
    # 10 clients of 0.3 s, one after the other, in each of 4 rounds; and what their samples take on a busy machine.
    assert 0.98 * 4 * 10 * 0.3 < steps["seconds"] < 2 * 4 * 10 * 0.3
    described, _ = _ended(running, running.submit(*wanted, task=task), tmp_path / "slow.safetensors")
    planned = {part["region"]: part["samples_per_second"] for part in plan["partitions"]}
    # Without clients' own costs it would be a hundred times as fast.
    for part in described["result"]["regions"]:
        assert 0.3 < part["samples_per_second"] / planned[part["name"]] < 1.4
    told, took = plan["estimate"]["seconds"], described["result"]["measured"]["seconds"]
    assert told["low"] < took < told["high"], (told, took)


def test_what_clients_need_is_told_before_a_job_begins(federation: Federation, tmp_path: Path) -> None:
    running = Running(federation, tmp_path)
    job_file = running.job_folder() / "job.yaml"
    declined = federation.control_plane("submit", str(job_file), "--set", "clients={fraction: 0.5}", check=False)
    assert declined.returncode == 9, declined.stderr
    assert "region shanghai does not tell how many clients its shard of digits has" in declined.stderr
    wrong = {
        "wan.policy=asgd": "`clients` cannot be used with `advanced.wan.policy: asgd`",
        "collective=isp": "`clients` cannot be used with `advanced.collective: isp`",
        "clients={epochs: 1, steps: 2}": "give either `epochs` or `steps`",
    }
    for setting, text in wrong.items():
        refused = federation.control_plane(
            "validate",
            str(job_file),
            "--set",
            "clients={fraction: 0.5}",
            "--set",
            "wan.interval=1",
            "--set",
            setting,
            check=False,
        )
        assert refused.returncode
        assert text in refused.stderr, refused.stderr


def test_a_masked_sum_of_regions_with_clients_is_that_of_federated_averaging(tmp_path: Path) -> None:
    """Regions weigh by their share of the data there, too."""
    sites = digits_sites(tmp_path, tuple(CLIENTS))
    for site in sites:
        x, y, ids = _samples(site.name)
        torch.save({"x": x, "y": y, "branch": ids}, tmp_path / f"{site.name}.pt")
        own = {"uri": str(tmp_path / f"{site.name}.pt"), "samples": len(ids), "clients": CLIENTS[site.name]}
        site.config["datasets"]["branches"] = {"splits": {"train": own, "test": own}}
    found = []
    with Federation(tmp_path / "federation", sites) as made:
        running = Running(made, tmp_path)
        for secure in ("false", "true"):
            settings = ("data.dataset=branches", f"privacy={{secureAggregation: {secure}}}", *JOB)
            job = running.submit(*settings, task=OWN_TASK)
            found.append(_ended(running, job, tmp_path / f"{secure}.safetensors")[1])
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-4, atol=1e-5)
