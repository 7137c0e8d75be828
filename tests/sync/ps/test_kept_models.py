"""The models of the last evaluated rounds: a parameter server hands them out, also after it was killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from support.server_process import LAYOUT, NumpyWorker, Server

from geofed_pb.errors import GeofedError
from sync.ps.core.machine import Setup
from sync.ps.execution.storage import Storage


def values(file: bytes) -> set[float]:
    return {float(value) for array in safetensors.numpy.load(file).values() for value in array.reshape(-1)}


def facts(file: bytes) -> dict[str, str]:
    length = int.from_bytes(file[:8], "little")
    told: dict[str, str] = json.loads(file[8 : 8 + length])["__metadata__"]
    return told


@pytest.mark.processes
@pytest.mark.parametrize("background", [False, True])
def test_the_last_evaluated_rounds_are_handed_out(
    servers: Callable[..., list[Server]], workers: Callable[..., NumpyWorker], background: bool
) -> None:
    wan = {"background": 1.0} if background else {}
    (server,) = servers("east", rounds=6, evaluate_every=1, wan_settings=wan)
    server.configure()
    worker = workers(server, 1.0)
    worker.join(40)
    assert worker.failure is None, worker.failure
    server.kill()
    server.launch()
    server.await_ready()
    with pytest.raises(GeofedError, match="the model of round 1 is not kept"):
        server.model(1)
    # All ones at first; round n adds n. In the background the merge of a round may follow its evaluation.
    for round_, value in ((3, 7.0), (5, 16.0)):
        kept = server.model(round_)
        assert values(kept) <= ({value - round_, value} if background else {value})
        assert facts(kept)["round"] == str(round_)
    assert values(server.model()) == {22.0}


@pytest.mark.processes
def test_without_evaluations_nothing_is_kept(
    servers: Callable[..., list[Server]], workers: Callable[..., NumpyWorker]
) -> None:
    (server,) = servers("east", rounds=2)
    server.configure()
    workers(server, 1.0).join(40)
    with pytest.raises(GeofedError, match="the model of round 2 is not kept"):
        server.model(2)
    assert not list(server.folder.glob("state/round-*"))


def test_a_damaged_or_missing_file_is_no_model(tmp_path: Path) -> None:
    storage = Storage(tmp_path, Setup("a", ("a",), 1, 4, 1, 1))
    model = np.arange(LAYOUT.size, dtype=np.float32)
    storage.keep_model(2, model)
    kept = storage.model_of(2)
    assert kept is not None
    assert np.array_equal(kept, model)
    (path,) = tmp_path.glob("round-*")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert storage.model_of(2) is None
    path.write_bytes(data[:20])
    assert storage.model_of(2) is None
    assert storage.model_of(3) is None
    storage.folder = tmp_path / "nowhere"
    storage.keep_model(3, model)
