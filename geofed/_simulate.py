"""Train over several regions on this machine with the real daemons, from a script or a notebook."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deploy.emulator import Emulator, WanProfile, load_profile
from deploy.local import LocalFederation, RegionSite, links_of
from deploy.shards import partition_by_label, partition_evenly
from geofed._client import frame, state_dict
from geofed_pb.errors import GeofedError
from geofed_pb.files.durable import write_durably
from geofed_pb.user_code.modules import drop_task_modules, import_task

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
_MARK = ".geofed-simulation.json"
"""File in a folder that `simulate` has written: the digests that the job's files may have, by path."""
_DRAFT = ".job-"
"""Beginning of the name of the folder in which the job's files are made."""


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
    emulator: str = "none"
    """What delayed packets between the regions: "netem" or "hold" (docs/emulator.md), or "none"."""

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
    regions: int | str | Path | None = None,
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
    """Train a task over regions on this machine: a control plane and an agent for each region, over loopback or an
    emulated WAN. With ``clients``, over so many clients in this process instead, without daemons and without a sandbox.

    Args:
        task: the task module, or a folder with `task.py`.
        data: arrays by split, ``{"train": (x, y), "test": (x, y)}``, which are partitioned over the regions and which
            the task's `dataset` reads from a `.npz` file with `x` and `y`; or files by region and split,
            ``{"home": {"train": path, "test": path}, …}``.
        regions: how many regions arrays are partitioned over, which share the loopback interface (3). Or a profile
            of the emulator, by its name or path, whose regions they are then, with its links between them; see
            `geofed emulator profiles`. It needs root or a user namespace.
        workers: most workers of each region (1).
        clients: how many clients the arrays of `train` are partitioned over; `test` is evaluated as a whole.
        sampling: section `clients` of the job file: how many of them train in a round, and how long.
        config, train, wan: sections `task.config`, `train` and `advanced.wan` of the job file.
        alpha: Dirichlet parameter of the classes over the regions, or the clients; small is uneven; None: evenly.
        seed: of the partition and of the training.
        folder: where everything is kept: a new or empty folder, or that of an earlier simulation; None: a temporary
            one.

    Raises ``GeofedError``, as `geofed submit --wait` fails; EMULATOR_UNSUPPORTED, with what is missing, where no
    emulator can run.
    """
    if clients is not None and (regions is not None or workers is not None):
        text = "give `clients`, which train in this process, or `regions` and `workers`, which are daemons"
        raise GeofedError("CONFIG_INVALID", text)
    if sampling is not None and clients is None:
        raise GeofedError("CONFIG_INVALID", "`sampling` requires `clients`")
    for name, count in (("regions", regions), ("workers", workers), ("clients", clients)):
        if isinstance(count, int) and count < 1:
            raise GeofedError("CONFIG_INVALID", f"`{name}` must be at least 1, not {count}")
    with tempfile.TemporaryDirectory(prefix="geofed-") as temporary:
        root = Path(folder) if folder is not None else Path(temporary)
        settings = {"seed": seed, **(train or {})}
        if clients is not None:
            job = _write_job(root / "job", Path(task), config, settings, wan, dict(sampling or {}))
            return _over_clients(job, root / "data", data, clients, alpha, seed)
        profile = _profile(regions) if isinstance(regions, str | Path) else None
        names = list(profile.regions) if profile else _names(regions)
        job, workers = _write_job(root / "job", Path(task), config, settings, wan), workers or 1
        files = _write_shards(root / "data", data, names, alpha, seed)
        if profile and (strange := sorted(set(files) - set(names))):
            text = f"the data name the region {strange[0]}; the regions of {profile.name} are {', '.join(names)}"
            raise GeofedError("CONFIG_INVALID", text)
        return _train(root, job, _sites(job, files, workers, dict(config or {}), profile), profile)


def _sites(
    job: Path,
    files: Mapping[str, Mapping[str, Path]],
    workers: int,
    config: dict[str, object],
    profile: WanProfile | None,
) -> list[RegionSite]:
    """Return the regions, each with the files that it has."""
    with _task_code(job) as samples:
        return [
            RegionSite(name, _region(splits, workers, samples, config, links_of(name, profile) if profile else {}))
            for name, splits in files.items()
        ]


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
    for split, given in data.items():
        x, y = _arrays(split, given)
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
    histograms = {name: asdict(one) for name, one in found.histograms.items()}
    result = {
        "metrics": found.metrics, "histograms": histograms, "samples": samples, "rounds": found.rounds[-1]["round"],
    }  # fmt: skip
    plan = {
        "clients": found.clients, "clients_per_round": found.clients_per_round, "rounds": found.rounds[-1]["round"],
    }  # fmt: skip
    return Simulation(result, plan, found.rounds, found.model)


def _names(regions: object) -> list[str]:
    return [f"region-{one}" for one in range(1, (regions if isinstance(regions, int) else 3) + 1)]


@contextmanager
def _task_code(job: Path) -> Iterator[Any]:
    """Import the task as its workers do, and hand over its `dataset`, until the end.

    Raises ``GeofedError``: TASK_INVALID if there is none; TASK_FAILED for what the task's code raises.
    """
    try:
        module = import_task(job.parent.resolve(), "task.py")
        if not callable(samples := getattr(module, "dataset", None)):
            hint = "define dataset(uri, split, config); `format` of a dataset is a key of regions' files only"
            raise GeofedError("TASK_INVALID", "the task does not define dataset, which `simulate` needs", hint=hint)
        yield samples
    except GeofedError:
        raise
    except (Exception, SystemExit) as error:
        missing = f"install {error.name}" if isinstance(error, ModuleNotFoundError) else None
        text = f"the task raised {type(error).__name__}: {error}"
        raise GeofedError("TASK_FAILED", text, hint=missing) from error
    finally:
        drop_task_modules()


def _profile(name: str | Path) -> WanProfile:
    """Return a profile of the emulator. Raises ``GeofedError`` if there is none, or if it cannot run here."""
    if str(name).isdigit():
        raise GeofedError(
            "CONFIG_INVALID", f"there is no profile {str(name)!r}", hint=f"give the number: regions={name}"
        )
    profile = load_profile(name)
    if (reason := Emulator.supported()) is not None:
        hint = "give `regions` as a number: they then share the loopback interface, which is not shaped"
        raise GeofedError("EMULATOR_UNSUPPORTED", f"the WAN of {profile.name} cannot be emulated: {reason}", hint=hint)
    return profile


def _train(root: Path, job_file: Path, sites: list[RegionSite], profile: WanProfile | None) -> Simulation:
    with ExitStack() as undo:
        wan = undo.enter_context(Emulator(profile, state_dir=root / "emulator")) if profile else None
        federation = undo.enter_context(LocalFederation(root, sites, emulator=wan))
        # By commands: the control plane of an emulated WAN is reached from its network namespace only.
        ask = federation.control_plane_data
        job = ask("submit", str(job_file), "--wait", "--yes", timeout=None)["id"]
        view, rounds = ask("describe", job), ask("history", job)
        path = root / "model.safetensors"
        ask("export", job, "--output-file", str(path), "--yes")
        return Simulation(view["result"], view["plan"], rounds, path.read_bytes(), wan.backend if wan else "none")


def _write_job(
    folder: Path,
    task: Path,
    config: Mapping[str, object] | None,
    train: Mapping[str, object],
    wan: Mapping[str, object] | None,
    clients: Mapping[str, object] | None = None,
) -> Path:
    job = {
        "apiVersion": "geofed/v1",
        "kind": "TrainingJob",
        "metadata": {"name": "simulation"},
        "task": {"module": "task.py", "config": dict(config or {})},
        "data": {"dataset": _DATASET},
        "train": {"batch": 32, "end": {"epochs": 1}, **train},
        **({"advanced": {"wan": dict(wan)}} if wan else {}),
        **({"clients": dict(clients)} if clients is not None else {}),
    }
    root = folder.parent
    _check_folder(root, task)
    root.mkdir(parents=True, exist_ok=True)
    # The task may be in the folder that is replaced, so it is read before anything is removed.
    with tempfile.TemporaryDirectory(prefix=_DRAFT, dir=root) as drafts:
        draft = Path(drafts) / "job"
        try:
            if task.is_dir():
                shutil.copytree(task, draft, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                draft.mkdir()
                shutil.copy(task, draft / "task.py")
        except (OSError, shutil.Error) as error:
            reason = getattr(error, "strerror", None) or error
            raise GeofedError("SPEC_NOT_FOUND", f"cannot read the task {task}: {reason}") from None
        if not (draft / "task.py").is_file():
            raise GeofedError("SPEC_NOT_FOUND", f"there is no task.py in {task}")
        # JSON is valid YAML.
        (draft / "job.yaml").write_text(json.dumps(job, indent=2))
        new, old = _digests(draft), _digests(folder)
        # If this process is killed in between, there are files of either.
        _mark(root, {path: [*{by.get(path, "") for by in (old, new)}] for path in old | new})
        if folder.exists():
            shutil.rmtree(folder)
        draft.rename(folder)
        _mark(root, {path: [digest] for path, digest in new.items()})
    return folder / "job.yaml"


def _mark(root: Path, digests: dict[str, list[str]]) -> None:
    write_durably(root / _MARK, [json.dumps(digests, indent=2).encode()], mode=0o644)


def _check_folder(root: Path, task: Path) -> None:
    """Refuse a folder in which files would be replaced that no simulation has written."""
    if task.is_dir() and root.resolve().is_relative_to(task.resolve()):
        text = f"`folder` is in the folder of the task, {task}, which is sent as code"
        raise GeofedError("CONFIG_INVALID", text, hint="give a folder elsewhere")
    hint = "give a new or an empty folder"
    if root.exists() and not root.is_dir():
        raise GeofedError("CONFIG_INVALID", f"`folder` is a file: {root}", hint=hint)
    # A simulation that was killed leaves its draft.
    if not root.exists() or all(path.name.startswith(_DRAFT) for path in root.iterdir()):
        return
    try:
        written = json.loads((root / _MARK).read_text())
    except (OSError, ValueError):
        written = None
    if not isinstance(written, dict) or not all(isinstance(digests, list) for digests in written.values()):
        raise GeofedError("CONFIG_INVALID", f"{root} holds files that `simulate` has not written", hint=hint)
    if other := sorted(path for path, digest in _digests(root / "job").items() if digest not in written.get(path, ())):
        text = f"{root / 'job' / other[0]} was added or changed since `simulate` wrote the folder"
        raise GeofedError("CONFIG_INVALID", text, hint=hint)


def _digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts[len(folder.parts) :]
    }


def _arrays(split: str, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(arrays, str) or len(arrays) != 2:
        raise GeofedError("CONFIG_INVALID", f"{split} must be a pair of arrays, samples and their labels")
    x, y = (np.asarray(one) for one in arrays)
    if not x.ndim or not y.ndim or len(x) != len(y):
        text = f"{split} must have a label for each sample; the arrays have the shapes {x.shape} and {y.shape}"
        raise GeofedError("CONFIG_INVALID", text)
    return x, y


def _write_shards(
    folder: Path, data: Mapping[str, Any], names: list[str], alpha: float | None, seed: int
) -> dict[str, dict[str, Path]]:
    """Return the file of each region and split; arrays are partitioned and written first."""
    if data and all(isinstance(splits, Mapping) for splits in data.values()):
        return {region: {split: Path(path).resolve() for split, path in by.items()} for region, by in data.items()}
    files: dict[str, dict[str, Path]] = {name: {} for name in names}
    for split, given in data.items():
        x, y = _arrays(split, given)
        if len(y) < len(names):
            text = f"{len(y)} samples of {split} cannot be partitioned over {len(names)} regions"
            raise GeofedError("CONFIG_INVALID", text)
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


def _region(
    splits: Mapping[str, Path], workers: int, dataset: Any, config: dict[str, object], links: Mapping[str, Any]
) -> dict[str, Any]:
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
        "links": dict(links),
    }
