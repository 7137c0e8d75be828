"""The model of another job: read as it was written, refused where it is another's, and what all regions begin with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.server_process import LAYOUT, NumpyWorker, Server

from geofed_pb.errors import GeofedError
from sync.layout import Layout, Slot
from sync.ps.execution.export import from_safetensors, to_safetensors

SLOTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 4), max_size=3), st.sampled_from(("float32", "bfloat16", "int64", "uint8", "bool"))
    ),
    min_size=1,
    max_size=6,
)
N = Slot("n", (), "int64")
TIED = Layout((Slot("a", (2, 3), "float32"), N), 1, (("b", "a"),))


def write(folder: Path, layout: Layout, value: float = 1.0) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(to_safetensors(layout, np.full(layout.size, value, np.float32), {"job": "j"})[0])
    return path


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(SLOTS, st.randoms(use_true_random=False))
def test_what_is_written_is_read_also_in_another_order(tmp_path: Path, drawn: list, order: object) -> None:  # type: ignore[type-arg]
    slots = [Slot(f"s{place}", tuple(shape), dtype) for place, (shape, dtype) in enumerate(drawn)]
    layout = Layout(tuple(slots), len(slots))
    vector = np.arange(layout.size, dtype=np.float32)
    for slot, place in layout.places():
        if slot.dtype == "bool":
            vector[place] %= 2
    path = tmp_path / "model.safetensors"
    path.write_bytes(to_safetensors(layout, vector, {})[0])
    assert np.array_equal(from_safetensors(layout, path), vector)
    order.shuffle(slots)  # type: ignore[attr-defined]
    other = Layout(tuple(slots), 0)
    read = other.tensors(from_safetensors(other, path))
    assert all(np.array_equal(read[name], held) for name, held in layout.tensors(vector).items())


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (replace(TIED, slots=(*TIED.slots, Slot("c", (1,), "float32"))), "has no c$"),
        (replace(TIED, aliases=()), "has b, which the task's lacks"),
        (replace(TIED, slots=(Slot("a", (3, 2), "float32"), N)), r"a .* F32 \[2, 3\], the task's F32 \[3, 2\]"),
        (replace(TIED, slots=(TIED.slots[0], Slot("n", (), "int32"))), r"n .* I64 \[\], the task's I32 \[\]"),
        (replace(TIED, slots=(TIED.slots[0], Slot("n", (), "float32"))), r"n .* I64 \[\], the task's F32 \[\]"),
        (Layout(tuple(Slot(f"x{i}", (), "int32") for i in range(9)), 1), "has no x0, x1, x2 and 6 more and has a, b"),
    ],
)  # fmt: skip
def test_a_model_of_another_shape_is_refused_with_what_differs(tmp_path: Path, changed: Layout, says: str) -> None:
    path = write(tmp_path, TIED)
    with pytest.raises(GeofedError, match=says) as raised:
        from_safetensors(changed, path)
    assert raised.value.code == "MODEL_MISMATCH"
    assert from_safetensors(TIED, path).tolist() == [1.0] * 7


def test_numbers_that_are_none_and_files_that_are_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors.numpy.save({"w": np.full(64, np.nan, np.float32)}))
    with pytest.raises(GeofedError, match="w of the model to start from is not finite"):
        from_safetensors(LAYOUT, path)
    for content in (b"", b"\xff" * 100, write(tmp_path, LAYOUT).read_bytes()[:-9]):
        path.write_bytes(content)
        with pytest.raises(GeofedError, match="FRAME_INVALID"):
            from_safetensors(LAYOUT, path)


@pytest.mark.processes
@pytest.mark.parametrize("background", [False, True])
def test_all_regions_begin_with_it_wherever_the_server_died(
    tmp_path: Path,
    servers: Callable[..., list[Server]],
    workers: Callable[..., NumpyWorker],
    background: bool,
) -> None:
    """Its workers' own model is all ones; what the job begins with, all sevens."""
    wan = {"background": 1.0} if background else {}
    first, second = servers("east", "west", wan_settings=wan, rounds=1)
    first.kill()
    first.launch(initial_model=write(tmp_path, LAYOUT, 7.0))
    first.await_ready()
    for one, other in ((first, second), (second, first)):
        one.configure(other)
    worker_group = [workers(server, 0.0) for server in (second, first)]
    for worker in worker_group:
        worker.join(40)
        assert worker.failure is None, worker.failure
        assert np.array_equal(worker.finals[0], np.full(LAYOUT.size, 7.0, np.float32))


@pytest.mark.processes
def test_a_mismatch_ends_the_server_and_tells_the_worker(
    tmp_path: Path, servers: Callable[..., list[Server]], workers: Callable[..., NumpyWorker]
) -> None:
    (server,) = servers("east", initial_model=write(tmp_path, TIED))
    worker = workers(server, 0.0)
    worker.join(40)
    assert worker.failure is not None
    assert worker.failure.code == "MODEL_MISMATCH"
    assert server.process is not None
    assert server.process.wait(20) != 0
    assert "error[MODEL_MISMATCH]" in server.log.read_text()
