"""Job code that attacks everything in reach gets nothing of it, and is trained as any other."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import psutil
import pytest
from support import hostile
from support.processes import family
from support.running import UNHURRIED, Running, check_succeeded, named, paths_under
from support.sandboxes import needs_sandboxes

from tests.e2e.conftest import PAIR

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400), needs_sandboxes]
_ATTACK = """
import json as _json
import hostile as _hostile

_dataset = dataset


def dataset(path, split, config):
    print("GAINED " + _json.dumps(_hostile.successes(_json.loads({targets!r}))), flush=True)
    return _dataset(path, split, config)
"""
_MOST_SECRETS = 60


def test_hostile_job_gets_nothing_and_trains(running_pair: Running) -> None:
    """While another job runs in the same region."""
    federation = running_pair.federation
    other = running_pair.submit("train.workers=1", "train.end.epochs=5000", task=UNHURRIED)
    running_pair.wait_round(other, 1)
    task = named("hostile") + _ATTACK.format(
        targets=json.dumps(_targets(federation.folder, federation.processes, other))
    )
    (running_pair.job_folder() / "hostile.py").write_text(Path(hostile.__file__).read_text())
    job = running_pair.submit("train.workers=1", "train.end.epochs=1", task=task)
    described = running_pair.wait_end(job)
    told = federation.control_plane("logs", job).stdout
    federation.control_plane("cancel", other, "--yes")
    check_succeeded(described, accuracy=0.2)
    gained = [line.partition("GAINED ")[2] for line in told.splitlines() if "GAINED " in line]
    assert described["plan"]["isolation"] == dict.fromkeys(PAIR, "bubblewrap")
    listed = json.loads(federation.control_plane("region", "list", "-o", "json").stdout)["data"]
    assert {region["isolation"] for region in listed} == {"bubblewrap"}
    assert len(gained) >= 2, "both regions have tried"
    assert [json.loads(one) for one in gained] == [{}] * len(gained)


def _targets(folder: Path, processes: dict, other: str) -> dict[str, object]:
    """What job code was able to read, change, signal and connect to where it was only kept from some paths."""
    states = [folder / "control-plane", *(folder / "regions").glob("*/state")]
    files = [path for state in states for path in paths_under(state) if path.is_file() and "/r/" not in str(path)]
    daemons = [member for process in processes.values() for member in family(process.pid)]
    ports = {tuple(connection.laddr) for member in daemons for connection in _listening(member)}
    channels = folder.parent / "channels"
    data = sorted((folder.parent / "data").rglob("*.npz"))
    assert files
    assert ports
    return {
        "secrets": [str(path) for path in itertools.islice(sorted(files, key=_interest), _MOST_SECRETS)],
        "folders": [*map(str, states), *(str(path) for path in channels.glob(f"*/{other}"))],
        "read_only": [str(path) for path in (*data, hostile.__file__)],
        "pids": [member.pid for member in daemons],
        "ports": sorted(ports),
        "sockets": [str(path) for state in states for path in paths_under(state) if path.is_socket()],
        "channel": str(channels / "*" / "*"),
        "bomb": False,  # its memory alone would end the worker
    }


def _interest(path: Path) -> tuple[bool, str]:
    return not any(word in path.name for word in ("key", "token", "password", ".db", "context")), str(path)


def _listening(process: psutil.Process) -> list:
    try:
        return [one for one in process.net_connections("inet4") if one.status == psutil.CONN_LISTEN]
    except psutil.Error:
        return []
