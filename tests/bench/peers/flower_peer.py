"""Flower's own processes: a SuperNode in every region, and the SuperLink in the first, where the app is started."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from peer import Options, parse, parser

PORT = 29540
PROJECT = """\
[project]
name = "bench"
version = "1.0.0"
description = "FedAvg, measured."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "bench"

[tool.flwr.app.components]
serverapp = "flower_app:server_app"
clientapp = "flower_app:client_app"

[tool.flwr.app.config]
warmup = {warmup}
exchanges = {exchanges}
local-steps = {local_steps}
compute-ms = {compute_ms}
regions = {regions}
"""
CONNECTION = """\
[superlink]
default = "bench"

[superlink.bench]
address = "{address}"
insecure = true
"""


def main() -> None:
    made = parser()
    made.add_argument("--folder", type=Path, required=True, help="for the app and for Flower's own files")
    made.add_argument("--chunk-bytes", type=int, default=5 << 20)
    options = parse(made)
    home = options.folder / f"home-{options.rank}"
    home.mkdir(parents=True)
    os.environ |= {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE": str(options.chunk_bytes),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "NO_PROXY": "*",
    }
    link = f"{options.hosts[0]}:{PORT}"
    if options.rank == 0:
        command = ["flower-superlink", "--insecure", "--host", options.host, "--port", str(PORT)]
        subprocess.Popen([*command, "--disable-runtime-dependency-installation"])
    _wait(link)
    node = subprocess.Popen(
        ["flower-supernode", "--insecure", "--superlink", link, "--node-config", f'marks="{options.marks}"']
    )
    if options.rank == 0:
        _run(options, home, link)
    node.wait()


def _run(options: Options, home: Path, link: str) -> None:
    app = home / "app"
    app.mkdir()
    for name in ("flower_app.py", "peer.py"):
        shutil.copy(Path(__file__).parent / name, app)
    (app / "pyproject.toml").write_text(PROJECT.format(**vars(options), regions=len(options.hosts)))
    (home / "config.toml").write_text(CONNECTION.format(address=link))
    subprocess.run(["flwr", "run", str(app), "bench"], check=True)


def _wait(link: str) -> None:
    """Until the SuperLink answers, whatever it says."""
    for _ in range(300):
        try:
            urllib.request.urlopen(f"http://{link}/", timeout=1)
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.2)
        else:
            return


if __name__ == "__main__":
    main()
