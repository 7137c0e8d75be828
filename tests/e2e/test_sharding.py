"""A job whose workers hold a part of the model in each of two processes, from `submit` to the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from support.failures import told
from support.running import Federation, Running, check_succeeded, digits_sites
from support.stand_in import in_place_of_devices

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

# A worker's GPUs are processes on the CPU.
STAND_IN = in_place_of_devices('module.devices_seen = lambda gpus, *_, **__: (module.torch.device("cpu"),) * gpus')
ONE = ("train.workers=1", "train.end.epochs=1", "regions.use=[bergen]")


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    sites = digits_sites(tmp_path, ["bergen"])
    sites[0].config["capacity"] = {"workers": 1, "memoryMb": 4096}
    (tmp_path / "sitecustomize.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Federation(tmp_path / "federation", sites) as federation:
        monkeypatch.delenv("PYTHONPATH")
        yield Running(federation, tmp_path)


def test_a_job_with_a_divided_model_makes_the_model_of_one_with_whole_ones(running: Running, tmp_path: Path) -> None:
    models = []
    for sharding in ("none", "fsdp"):
        # Slices of a second, so that the state of the optimiser goes from one invocation to the next.
        function = f"function={{gpus: 2, memoryMb: 4096, sharding: {sharding}, slice: 1s}}"
        job = running.submit(function, *ONE)
        check_succeeded(running.wait_end(job), accuracy=0.0)
        logs = running.federation.control_plane("logs", job).stdout
        assert ("each of 2 devices holds a part of the model" in logs) == (sharding == "fsdp")
        file = tmp_path / f"{sharding}.safetensors"
        running.federation.control_plane("export", job, "--output-file", str(file))
        models.append(safetensors.torch.load_file(file))
    whole, parts = models
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=1e-4, atol=1e-5)


def test_a_task_that_cannot_be_divided_is_told_before_there_is_a_job(running: Running) -> None:
    template = (running.job_folder() / "task.py").read_text()
    task = f"{template}\n\ndef on_round(model, completed):\n    print(completed)\n"
    job = running.job_folder(task) / "job.yaml"
    settings = ("function={gpus: 2, memoryMb: 4096, sharding: fsdp}", *ONE)
    asked = [part for setting in settings for part in ("--set", setting)]
    failure = told(running.federation.control_plane("submit", str(job), *asked, check=False))
    assert failure.code == "TASK_INVALID"
    assert "a task that defines on_round, which would see a part of the model" in failure.text
    assert "no job was created" in failure.hint
