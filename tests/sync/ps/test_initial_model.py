"""The model of another job: read as it was written, refused where it is another's, and what all regions begin with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.server_process import LAYOUT, NumpyWorker, Server

from geofed_pb.errors import GeofedError
from sync.coordinates import array_dtype
from sync.layout import Layout, Slot
from sync.ps.execution.export import base_in, from_safetensors, local_in, to_safetensors

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
    path.write_bytes(b"".join(to_safetensors(layout, np.full(layout.size, value, np.float32), {"job": "j"})))
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
    path.write_bytes(b"".join(to_safetensors(layout, vector, {})))
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


def _saved(folder: Path, **tensors: npt.NDArray[Any]) -> Path:
    path = folder / "weights.safetensors"
    path.write_bytes(safetensors.numpy.save(tensors))
    return path


HALF = np.array([[1.5, -2.0, 3.0], [0.0, 4.0, 5.0]], ml_dtypes.bfloat16)


@pytest.mark.parametrize("name", ["a", "b"])
def test_of_tied_tensors_a_users_file_needs_one_and_types_are_converted(tmp_path: Path, name: str) -> None:
    path = _saved(tmp_path, n=np.array(7), **{name: HALF})
    assert from_safetensors(TIED, path, "all").tolist() == [1.5, -2.0, 3.0, 0.0, 4.0, 5.0, 7.0]
    with pytest.raises(GeofedError, match="MODEL_MISMATCH"):
        from_safetensors(TIED, path)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.float32, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("wanted", ["float32", "float64", "float16", "bfloat16", "float8_e4m3fn"])
def test_every_floating_point_type_becomes_every_other(tmp_path: Path, dtype: Any, wanted: str) -> None:
    layout = Layout((Slot("a", (2, 2), wanted),), 1)
    path = _saved(tmp_path, a=np.array([[1.5, -2.0], [0.25, 4.0]], dtype))
    assert from_safetensors(layout, path, "all").tolist() == [1.5, -2.0, 0.25, 4.0]
    base = Layout((), 0, base=layout.slots)
    found = base_in(base, path, "all")["a"].view(array_dtype(wanted))
    assert found.astype(np.float64).tolist() == [1.5, -2.0, 0.25, 4.0]


def test_what_a_type_cannot_hold_is_refused(tmp_path: Path) -> None:
    layout = Layout((Slot("a", (2,), "float16"),), 1)
    for dtype in (np.float64, np.float32):
        with pytest.raises(GeofedError, match="a of the model to start from has values that the task's F16 cannot"):
            from_safetensors(layout, _saved(tmp_path, a=np.array([1.0, 1e6], dtype)), "all")


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"a": HALF}, "has no n$"),
        ({"n": np.array(7)}, "has no a$"),
        ({"a": HALF, "m": np.array(7)}, "has no n and has m, which the task's lacks$"),
        ({"model.a": HALF, "n": np.array(7)}, "has no a and has model.a, .*; did you mean model.a to be a\\?"),
        ({"a": HALF, "n": np.array(7), "x": HALF}, "has x, which the task's lacks$"),
        ({"a": HALF.T.copy(), "n": np.array(7)}, r"a .* is BF16 \[3, 2\], the task's F32 \[2, 3\]"),
        ({"a": HALF, "n": np.array(7.0)}, r"n .* is F64 \[\], the task's I64 \[\]"),
        ({"a": HALF, "b": HALF + HALF, "n": np.array(7)}, "a and b are one tensor of the task's model, and differ"),
    ],
)
def test_a_users_file_that_does_not_fit_is_refused_with_what_differs(
    tmp_path: Path, tensors: dict[str, Any], says: str
) -> None:
    with pytest.raises(GeofedError, match=says) as raised:
        from_safetensors(TIED, _saved(tmp_path, **tensors), "all")
    assert raised.value.code == "MODEL_MISMATCH"


def test_a_part_of_a_model_leaves_the_rest_as_it_was_initialised(tmp_path: Path) -> None:
    own = np.full(7, 9.0, np.float32)
    assert from_safetensors(TIED, _saved(tmp_path, b=HALF, x=HALF), "some", own).tolist()[-2:] == [5.0, 9.0]
    assert from_safetensors(TIED, _saved(tmp_path, n=np.array(7)), "some", own).tolist() == [9.0] * 6 + [7.0]
    assert own.tolist() == [9.0] * 7
    with pytest.raises(GeofedError, match=r"has no a, n and has fc.a, which .*; did you mean fc.a to be a") as raised:
        from_safetensors(TIED, _saved(tmp_path, **{"fc.a": HALF}), "some", own)
    assert "state_dict" in raised.value.hint
    with pytest.raises(GeofedError, match=r"a .* is BF16 \[3, 2\]"):
        from_safetensors(TIED, _saved(tmp_path, a=HALF.T.copy()), "some", own)


def test_tensors_that_stay_in_their_region_may_come_from_a_users_file(tmp_path: Path) -> None:
    layout = replace(TIED, local=(Slot("head", (2,), "float32"),))
    path = _saved(tmp_path, a=HALF, n=np.array(7), head=np.array([1.0, 2.0], np.float16))
    assert local_in(layout, path)["head"].view(np.float32).tolist() == [1.0, 2.0]
    assert from_safetensors(layout, path, "all")[-1] == 7.0
    with pytest.raises(GeofedError, match=r"has no head$"):
        from_safetensors(layout, _saved(tmp_path, a=HALF, n=np.array(7)), "all")


ADAPTED = Layout(
    (Slot("x.lora_A.default.weight", (1, 2), "float32"), Slot("x.lora_B.default.weight", (2, 1), "float32")), 2,
    (("tied", "w"),), base=(Slot("w", (2,), "float32"),),
)  # fmt: skip


def _adapter(folder: Path, **tensors: list[Any]) -> Path:
    path = folder / "adapter.safetensors"
    path.write_bytes(safetensors.numpy.save({name: np.array(held, np.float32) for name, held in tensors.items()}))
    return path


@pytest.mark.parametrize("form", ["{}.default.weight", "base_model.model.{}.weight"])
def test_an_adapters_tensors_replace_those_of_the_weights(tmp_path: Path, form: str) -> None:
    """Under the task's names, or those of `peft`; what neither has is initialised, if it may be."""
    whole = _saved(tmp_path, w=np.ones(2), tied=np.ones(2), **{"x.lora_A.default.weight": np.full((1, 2), 9.0)})
    adapter = _adapter(tmp_path, **{form.format("x.lora_A"): [[1, 2]], form.format("x.lora_B"): [[3], [4]]})
    assert from_safetensors(ADAPTED, whole, "all", adapter=adapter).tolist() == [1.0, 2.0, 3.0, 4.0]
    assert base_in(ADAPTED, whole, "all", adapter)["w"].view(np.float32).tolist() == [1.0, 1.0]
    with pytest.raises(GeofedError, match=r"has no x.lora_B.default.weight$"):
        from_safetensors(ADAPTED, whole, "all")
    half = _adapter(tmp_path, **{form.format("x.lora_B"): [[3], [4]], "w": [5, 6]})
    own = np.zeros(ADAPTED.size, np.float32)
    assert from_safetensors(ADAPTED, whole, "some", own, half).tolist() == [9.0, 9.0, 3.0, 4.0]
    assert base_in(ADAPTED, whole, "some", half)["w"].view(np.float32).tolist() == [5.0, 6.0]


def test_an_adapter_makes_no_weights_fit_that_are_another_models(tmp_path: Path) -> None:
    own = np.zeros(ADAPTED.size, np.float32)
    fits = _adapter(tmp_path, **{"x.lora_A.weight": [[1, 2]], "x.lora_B.weight": [[3], [4]]})
    with pytest.raises(GeofedError, match=r"has model.w, .*; did you mean model.w to be w"):
        from_safetensors(ADAPTED, _saved(tmp_path, **{"model.w": np.ones(2)}), "some", own, fits)
    twice = _adapter(tmp_path, **{"x.lora_A.weight": [[1, 2]], "base_model.model.x.lora_A.weight": [[1, 3]]})
    with pytest.raises(GeofedError, match="under two names"):
        from_safetensors(ADAPTED, _saved(tmp_path, w=np.ones(2)), "some", own, twice)


@pytest.mark.parametrize("holds", ["all", "some"])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("y.lora_B.weight", r"the adapter .* has y.lora_B.weight, which the task's model lacks; did you mean y.lora_B"),
        (
            "x.lora_B.weight",
            r"x.lora_B.default.weight of the model to start from is F32 \[1, 2\], the task's .* \[2, 1\]",
        ),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_by_its_tensors_name(
    tmp_path: Path, name: str, says: str, holds: str
) -> None:
    whole = _saved(tmp_path, w=np.ones(2), **{"x.lora_A.default.weight": np.ones((1, 2))})
    adapter = _adapter(tmp_path, **{name: [[3, 4]]})
    with pytest.raises(GeofedError, match=says) as raised:
        from_safetensors(ADAPTED, whole, holds, np.zeros(ADAPTED.size, np.float32), adapter)
    assert raised.value.code == "MODEL_MISMATCH"


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
def test_a_part_of_a_model_is_what_a_job_begins_with(
    tmp_path: Path, servers: Callable[..., list[Server]], workers: Callable[..., NumpyWorker]
) -> None:
    """The workers' own model is all ones; the file has another tensor only, which is refused, or the model's."""
    name, shape = LAYOUT.slots[0].name, LAYOUT.slots[0].shape
    path = _saved(tmp_path, **{name: np.full(shape, 7.0, np.float16), "more": HALF})
    (server,) = servers("east", rounds=1, initial_model=path, initial_holds="some")
    worker = workers(server, 0.0)
    worker.join(40)
    assert worker.failure is None, worker.failure
    expected = np.ones(LAYOUT.size, np.float32)
    expected[: LAYOUT.slots[0].size] = 7.0
    assert np.array_equal(worker.finals[0], expected)


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
