"""Train over several regions on this machine with the real daemons, from a script or a notebook."""

from __future__ import annotations

import json
import runpy
import shutil
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deploy.local import LocalFederation, RegionSite
from deploy.shards import partition_by_label, partition_evenly
from geofed._client import frame, state_dict
from geofed._sync import Client
from geofed_pb.errors import GeofedError

if TYPE_CHECKING:
    import pandas as pd
    import torch

Arrays = tuple[Any, Any]
"""Samples and their labels: numpy arrays, tensors, or what numpy makes arrays of."""
Files = Mapping[str, str | Path]
"""A file or folder for each split."""
_FREE = {
    "source": "this machine",
    "asOf": "2026-11",
    **dict.fromkeys(("functionUsdPerGbSecond", "functionUsdPerRequest", "serverUsdPerHour", "egressUsdPerGb"), 0),
}
_DATASET = "data"


@dataclass(frozen=True)
class Simulation:
    """A finished training."""

    result: dict[str, Any]
    """Metrics, bytes between the regions, times; as `geofed describe -o json` has it. With clients in this process:
    ``metrics``, ``samples`` and ``rounds``."""
    plan: dict[str, Any]
    """The plan of the job. With clients in this process: ``clients``, ``clients_per_round`` and ``rounds``."""
    _rounds: list[dict[str, Any]]
    _model: bytes

    def rounds(self) -> list[dict[str, Any]]:
        """Return a row for each reported round of each region; see ``AsyncJob.rounds``."""
        return self._rounds

    def metrics(self) -> pd.DataFrame:
        """Return ``rounds()`` as a pandas frame. Needs pandas."""
        return frame(self._rounds)

    def model(self) -> dict[str, torch.Tensor]:
        """Return the trained model as a state dict."""
        return state_dict(self._model)


def simulate(
    task: str | Path,
    data: Mapping[str, Arrays] | Mapping[str, Files],
    *,
    regions: int | None = None,
    workers: int | None = None,
    clients: int | None = None,
    sampling: Mapping[str, object] | None = None,
    config: Mapping[str, object] | None = None,
    train: Mapping[str, object] | None = None,
    wan: Mapping[str, object] | None = None,
    alpha: float | None = None,
    seed: int = 1,
    folder: str | Path | None = None,
) -> Simulation:
    """Train a task over regions on this machine: a control plane and an agent for each region, over loopback. With
    ``clients``, over so many clients in this process instead, without daemons and without a sandbox.

    Args:
        task: the task module, or a folder with `task.py`.
        data: arrays by split, ``{"train": (x, y), "test": (x, y)}``, which are partitioned over the regions and which
            the task's `dataset` reads from a `.npz` file with `x` and `y`; or files by region and split,
            ``{"home": {"train": path, "test": path}, …}``.
        regions: how many regions arrays are partitioned over (3).
        workers: most workers of each region (1).
        clients: how many clients the arrays of `train` are partitioned over; `test` is evaluated as a whole.
        sampling: section `clients` of the job file: how many of them train in a round, and how long.
        config, train, wan: sections `task.config`, `train` and `wan` of the job file.
        alpha: Dirichlet parameter of the classes over the regions, or the clients; small is uneven; None: evenly.
        seed: of the partition and of the training.
        folder: where everything is kept; None: a temporary one.

    Raises ``GeofedError``, as `geofed submit --wait` fails.
    """
    if clients is not None and (regions is not None or workers is not None):
        text = "give `clients`, which train in this process, or `regions` and `workers`, which are daemons"
        raise GeofedError("CONFIG_INVALID", text)
    if sampling is not None and clients is None:
        raise GeofedError("CONFIG_INVALID", "`sampling` requires `clients`")
    with tempfile.TemporaryDirectory(prefix="geofed-") as temporary:
        root = Path(folder) if folder is not None else Path(temporary)
        settings = {"seed": seed, **(train or {})}
        if clients is not None:
            job = _write_job(root / "job", Path(task), config, settings, wan, dict(sampling or {}))
            return _over_clients(job, root / "data", data, clients, alpha, seed)
        job, workers = _write_job(root / "job", Path(task), config, settings, wan), workers or 1
        files = _write_shards(root / "data", data, regions or 3, alpha, seed)
        samples = runpy.run_path(str(job.with_name("task.py")))["dataset"]
        sites = [
            RegionSite(name, _region(splits, workers, samples, dict(config or {}))) for name, splits in files.items()
        ]
        # A notebook's own thread runs an event loop already.
        with ThreadPoolExecutor(max_workers=1) as thread:
            return thread.submit(_train, root, job, sites).result()


def _over_clients(
    job: Path, folder: Path, data: Mapping[str, Any], clients: int, alpha: float | None, seed: int
) -> Simulation:
    # Torch is needed here, and not where daemons train.
    from deploy.in_process import train_clients

    if "train" not in data or any(isinstance(arrays, Mapping) for arrays in data.values()):
        raise GeofedError("CONFIG_INVALID", "`clients` needs arrays: {'train': (x, y), 'test': (x, y)}")
    names = [str(number) for number in range(clients)]
    splits: dict[str, Path] = {}
    owners: list[int] = []
    for split, (x, y) in data.items():
        x, y = np.asarray(x), np.asarray(y)
        if split == "train":
            if not 0 < clients <= len(y):
                text = f"{len(y)} samples cannot be partitioned over {clients} clients"
                raise GeofedError("CONFIG_INVALID", text)
            even = partition_evenly(len(y), names, seed=seed)
            places = even if alpha is None else partition_by_label(y, names, alpha=alpha, seed=seed, min_samples=1)
            order = np.concatenate([places[name] for name in names])
            owners = np.repeat(np.arange(clients), [len(places[name]) for name in names]).tolist()
            x, y = x[order], y[order]
        splits[split] = folder / f"{split}.npz"
        splits[split].parent.mkdir(parents=True, exist_ok=True)
        np.savez(splits[split], x=x, y=y)
    found = train_clients(job, {split: path.resolve() for split, path in splits.items()}, owners)
    samples = found.rounds[-1]["samples"]
    result = {"metrics": found.metrics, "samples": samples, "rounds": found.rounds[-1]["round"]}
    plan = {
        "clients": found.clients, "clients_per_round": found.clients_per_round, "rounds": found.rounds[-1]["round"],
    }  # fmt: skip
    return Simulation(result, plan, found.rounds, found.model)


def _train(root: Path, job_file: Path, sites: list[RegionSite]) -> Simulation:
    with LocalFederation(root, sites) as federation, Client(federation.context_file) as client:
        job = client.submit(job_file)
        result = job.wait()
        return Simulation(result, job.view["plan"], job.rounds(), job.model_bytes())


def _write_job(
    folder: Path,
    task: Path,
    config: Mapping[str, object] | None,
    train: Mapping[str, object],
    wan: Mapping[str, object] | None,
    clients: Mapping[str, object] | None = None,
) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    try:
        if task.is_dir():
            shutil.copytree(task, folder)
        else:
            folder.mkdir(parents=True)
            shutil.copy(task, folder / "task.py")
    except OSError as error:
        raise GeofedError("SPEC_NOT_FOUND", f"cannot read the task {task}: {error.strerror}") from None
    job = {
        "apiVersion": "geofed/v1",
        "kind": "TrainingJob",
        "metadata": {"name": "simulation"},
        "task": {"module": "task.py", "config": dict(config or {})},
        "data": {"dataset": _DATASET},
        "train": {"batch": 32, "end": {"epochs": 1}, **train},
        **({"wan": dict(wan)} if wan else {}),
        **({"clients": dict(clients)} if clients is not None else {}),
    }
    # JSON is valid YAML.
    path = folder / "job.yaml"
    path.write_text(json.dumps(job, indent=2))
    return path


def _write_shards(
    folder: Path, data: Mapping[str, Any], regions: int, alpha: float | None, seed: int
) -> dict[str, dict[str, Path]]:
    """Return the file of each region and split; arrays are partitioned and written first."""
    if data and all(isinstance(splits, Mapping) for splits in data.values()):
        return {region: {split: Path(path).resolve() for split, path in by.items()} for region, by in data.items()}
    names = [f"region-{number}" for number in range(1, regions + 1)]
    files: dict[str, dict[str, Path]] = {name: {} for name in names}
    for split, (x, y) in data.items():
        x, y = np.asarray(x), np.asarray(y)
        if alpha is not None and split == "train":
            places = partition_by_label(y, names, alpha=alpha, seed=seed)
        else:
            places = partition_evenly(len(y), names, seed=seed)
        for name, chosen in places.items():
            path = folder / name / f"{split}.npz"
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez(path, x=x[chosen], y=y[chosen])
            files[name][split] = path.resolve()
    return files


def _region(splits: Mapping[str, Path], workers: int, dataset: Any, config: dict[str, object]) -> dict[str, Any]:
    held = {
        split: {"uri": str(path), "samples": len(dataset(str(path), split, config))} for split, path in splits.items()
    }
    return {
        "cloud": "local",
        "capacity": {"workers": workers},
        "prices": _FREE,
        "datasets": {_DATASET: {"splits": held}},
        # The task is the user's own, on the user's own machine.
        "policy": {"isolation": "prefer"},
    }
