"""``geofed demo``: three regions on an emulated WAN train one model on real data that stays in its region."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deploy.emulator import Emulator, WanProfile, load_profile
from deploy.local import LocalFederation, RegionSite, links_of
from deploy.shards import read_digits, read_idx, write_shards
from geofed_pb.errors import GeofedError, install_hint

PROFILE = "china-eu-us-3"
ALPHA = 0.5
"""Parameter of the Dirichlet distribution of classes over regions; smaller is more uneven."""
SEED = 1
"""Seed of the digits and of the shards; any number serves, a fixed one makes runs comparable."""
WORKERS = 2
"""Largest number of workers of each region; the demo is made for a machine with two cores."""

PRICES: Mapping[str, Mapping[str, object]] = {
    "shanghai": {
        "source": "Tencent SCF international list; server assumed",
        "asOf": "2023-06",
        "functionUsdPerGbSecond": 0.0000167,
        "functionUsdPerRequest": 0.0000002,
        "serverUsdPerHour": 0.10,
        "egressUsdPerGb": 0.1203,
    },
    "frankfurt": {
        "source": "AWS list, eu-central-1",
        "asOf": "2025-03",
        "functionUsdPerGbSecond": 0.0000166667,
        "functionUsdPerRequest": 0.0000002,
        "serverUsdPerHour": 0.097,
        "egressUsdPerGb": 0.09,
        "egressTo": {"virginia": 0.02},
    },
    "virginia": {
        "source": "AWS list, us-east-1",
        "asOf": "2025-03",
        "functionUsdPerGbSecond": 0.0000166667,
        "functionUsdPerRequest": 0.0000002,
        "serverUsdPerHour": 0.085,
        "egressUsdPerGb": 0.09,
        "egressTo": {"frankfurt": 0.02},
    },
}
CLOUDS = {"shanghai": "tencent", "frankfurt": "aws", "virginia": "aws"}

_SHOWN_DIGEST = 19
"""Characters of a digest that are printed, with `sha256:`; result.json has all."""
MNIST_SETTINGS = (
    "task.config.arch=lenet",
    "task.config.size=28",
    "task.config.lr=0.03",
    "train.end.epochs=4",
    "advanced.wan.interval=60",
)
"""Settings for MNIST, in addition to the template's own, which are for the digits."""


def run_demo(folder: Path, data: Path | None, *, fresh: bool) -> int:
    """Run the demo; return the exit status of the job.

    Args:
        folder: where everything is kept.
        data: a folder with MNIST's IDX files, instead of the digits.
        fresh: forget earlier runs, and what they have measured.
    """
    _require_packages()
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    profile = load_profile(PROFILE)
    regions = _write_data(folder, data, profile)
    with _wan(profile, folder) as emulator, LocalFederation(folder, regions, emulator=emulator) as federation:
        job = _write_job(federation, folder, data)
        status = _submit(federation, job, data)
        result = _result(federation, folder, emulator)
    _print_result(folder, result)
    return status


def _require_packages() -> None:
    """Raise ``GeofedError("USAGE")`` if a package is missing that only some installations need."""
    missing = [name for name in ("torch", "sklearn") if importlib.util.find_spec(name) is None]
    if missing:
        raise GeofedError("USAGE", f"the demo needs {' and '.join(missing)}", hint=install_hint("demo"))


def _say(label: str, text: str) -> None:
    print(f"  {label:<10} {text}", flush=True)


def _write_data(folder: Path, data: Path | None, profile: WanProfile) -> list[RegionSite]:
    source = read_idx(data) if data else read_digits(SEED)
    names = list(profile.regions)
    written = write_shards(source, names, folder / "data", alpha=ALPHA, seed=SEED)
    counts = {name: written[name]["train"]["samples"] for name in names}
    print("geofed demo: three regions train one model, and no image leaves its region")
    _say("data", f"{sum(counts.values())} images: " + ", ".join(f"{name} {count}" for name, count in counts.items()))
    return [RegionSite(name, _region(name, written[name], profile)) for name in names]


def _region(name: str, written: dict[str, Any], profile: WanProfile) -> dict[str, Any]:
    splits = {
        split: {"uri": str(Path(part["path"]).resolve()), "samples": part["samples"]} for split, part in written.items()
    }
    return {
        "cloud": CLOUDS[name],
        "capacity": {"workers": WORKERS, "memoryMb": 1024},
        "prices": PRICES[name],
        "datasets": {"digits": {"residency": "region", "splits": splits}},
        # The demo's job code is its own.
        "policy": {"isolation": "prefer"},
        "links": links_of(name, profile),
    }


@contextlib.contextmanager
def _wan(profile: WanProfile, folder: Path) -> Iterator[Emulator | None]:
    reason = Emulator.supported()
    if reason is not None:
        _say("WAN", f"not shaped: all regions share loopback ({reason})")
        yield None
        return
    with Emulator(profile, state_dir=folder / "emulator") as emulator:
        how = {"netem": "tc netem", "hold": "packets held in user space"}
        _say("WAN", f"{profile.name}, emulated with {how.get(emulator.backend, emulator.backend)}")
        yield emulator


def _write_job(federation: LocalFederation, folder: Path, data: Path | None) -> Path:
    job = folder / "job"
    shutil.rmtree(job, ignore_errors=True)
    federation.control_plane("new", "image-classification", str(job), "--name", "mnist" if data else "digits")
    return job / "job.yaml"


def _submit(federation: LocalFederation, job: Path, data: Path | None) -> int:
    settings = [part for setting in (MNIST_SETTINGS if data else ()) for part in ("--set", setting)]
    shown = f"geofed submit {job} --watch" + (" --set …" if settings else "")
    _say("job", f"$ {shown}\n")
    started = time.monotonic()
    command = ["submit", str(job), "--watch", *settings]
    with federation.control_plane_popen(*command, stdin=subprocess.DEVNULL) as process:
        try:
            status = process.wait()
        finally:
            # Also on Ctrl-C: the command must not outlive the federation that it talks to.
            process.kill()
    print(f"\n  {'took':<10} {time.monotonic() - started:.1f} s from the submission to the model\n", flush=True)
    return int(status)


def _result(federation: LocalFederation, folder: Path, emulator: Emulator | None) -> dict[str, Any]:
    """Return the result of the last job, with its model's path and the state of the emulator."""
    jobs = json.loads(federation.control_plane("list", "--all", "-o", "json").stdout)["data"]
    newest = jobs[0]["id"]
    whole: dict[str, Any] = json.loads(federation.control_plane("describe", newest, "-o", "json").stdout)["data"]
    result = dict(whole["result"])
    result["accuracy"] = result["metrics"].get("accuracy")
    result["emulator"] = emulator.status() if emulator else {"backend": "none", "reason": Emulator.supported()}
    if result["state"] == "succeeded":
        path = folder / "model.safetensors"
        federation.control_plane("export", newest, "--output-file", str(path), "--yes")
        result["model"] = {**result["model"], "path": str(path)}
    (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


def _print_result(folder: Path, result: dict[str, Any]) -> None:
    _say("result", str(folder / "result.json"))
    if result["state"] == "succeeded":
        _say("model", f"{result['model']['path']}  {result['model']['digest'][:_SHOWN_DIGEST]}…")
        _say("accuracy", f"{result['accuracy']:.4f} on the test data of all regions")
    _print_next(folder)


def _print_next(folder: Path) -> None:
    """Print the commands that continue from here, which a user can copy; the daemons of the demo have ended."""
    program = "geofed" if shutil.which("geofed") else sys.argv[0]
    state = folder / "control-plane"
    print("\nnext: see this job on the dashboard, https://127.0.0.1:7445/")
    print(f"(sign in with the token in {state / 'admin.token'}):")
    print(f"  {program} serve --state-dir {state}")
    print("then a job of your own, with example data for two regions:")
    print(f"  {program} init first")
