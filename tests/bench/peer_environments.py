"""Virtual environments of the peers, each with its own published packages, since what they need conflicts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = {
    "torchft": ("torchft==0.2.0", "torch==2.13.0", "numpy==2.4.6"),
    # 1.42.0 needs a newer certifi than there was at the time
    "flwr": ("flwr==1.41.0",),
    # 1.1.12 with numpy 2.4 averages nothing in 8 bit: it calls int() on an array of one, which numpy 2.4 refuses
    "hivemind": ("hivemind==1.1.12", "torch==2.13.0", "numpy==2.3.5", "setuptools<81"),
}


def default_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "geofed" / "bench-peers"


def python(folder: Path, name: str) -> Path:
    """The interpreter that has a peer's packages."""
    return folder / name / "bin" / "python"


def prepare(folder: Path, name: str) -> None:
    """Install a peer where that was not done yet. Raises RuntimeError with what pip said."""
    done = folder / name / "installed.json"
    wanted = [sys.version.split()[0], *REQUIREMENTS[name]]
    if done.exists() and json.loads(done.read_text()) == wanted:
        return
    print(f"installing {name} into {folder / name}", flush=True)
    shutil.rmtree(folder / name, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder / name)], check=True)
    pip = [str(python(folder, name)), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    ran = subprocess.run([*pip, *REQUIREMENTS[name]], capture_output=True, text=True)
    if ran.returncode != 0:
        errors = [line for line in ran.stderr.splitlines() if "ERROR" in line] or ran.stderr.splitlines()[-3:]
        raise RuntimeError(f"{name} could not be installed: {' '.join(errors)[:600]}")
    done.write_text(json.dumps(wanted))


def versions(interpreter: str | Path, packages: tuple[str, ...]) -> dict[str, str]:
    """Versions of packages as an interpreter has them."""
    code = "import importlib.metadata as m, json, sys; print(json.dumps({p: m.version(p) for p in sys.argv[1:]}))"
    ran = subprocess.run([str(interpreter), "-c", code, *packages], capture_output=True, text=True)
    return dict(json.loads(ran.stdout)) if ran.returncode == 0 else {}
