"""Whatever the order, each operation is made once, none waits for ever, and 1F1B keeps few micro-batches."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geofed_pb.errors import GeofedError
from sync.pipeline import Operation, Pipeline, StagePosition, operations

ORDERS = st.sampled_from(["gpipe", "1f1b"])


def dependencies(operation: Operation, stage: int, stages: int) -> tuple[tuple[int, Operation], ...]:
    """Return the passes that must be done before, each with its stage."""
    number = operation.micro_batch
    if operation.kind == "forward":
        return ((stage - 1, operation),) if stage else ()
    own = (stage, Operation("forward", number))
    return (own, (stage + 1, operation)) if stage < stages - 1 else (own,)


@given(order=ORDERS, stages=st.integers(1, 8), micro_batches=st.integers(1, 20))
def test_every_stage_comes_to_its_end(order: str, stages: int, micro_batches: int) -> None:
    left = {stage: list(operations(order, stage, stages, micro_batches)) for stage in range(stages)}
    done: set[tuple[int, Operation]] = set()
    while any(left.values()):
        ready = [stage for stage, todo in left.items() if todo and set(dependencies(todo[0], stage, stages)) <= done]
        assert ready, f"nobody can continue: {left}"
        for stage in ready:
            done.add((stage, left[stage].pop(0)))
    wanted = [Operation(kind, number) for kind in ("forward", "backward") for number in range(micro_batches)]  # type: ignore[arg-type]
    assert done == {(stage, operation) for stage in range(stages) for operation in wanted}


@given(order=ORDERS, stages=st.integers(1, 8), micro_batches=st.integers(1, 20), data=st.data())
def test_a_stage_holds_the_activations_of_few_micro_batches(
    order: str, stages: int, micro_batches: int, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, stages - 1))
    passes = operations(order, stage, stages, micro_batches)
    live = accumulate(1 if operation.kind == "forward" else -1 for operation in passes)
    assert max(live) == (micro_batches if order == "gpipe" else min(micro_batches, stages - stage))


@given(degree=st.integers(1, 5), stages=st.integers(1, 6), micro_batch=st.integers(1, 9), samples=st.integers(1, 50))
def test_places_and_sizes(degree: int, stages: int, micro_batch: int, samples: int) -> None:
    shape = Pipeline(tuple((at, at) for at in range(stages)), degree, micro_batch)
    assert [shape.position(worker) for worker in range(shape.workers)] == [
        StagePosition(stage, replica) for stage in range(stages) for replica in range(degree)
    ]
    assert sum(shape.sizes(samples)) == samples
    assert 0 < min(shape.sizes(samples)) <= max(shape.sizes(samples)) <= micro_batch


@pytest.mark.parametrize(
    "wrong",
    [
        {"stages": ()},
        {"stages": ((1, 2),)},
        {"stages": ((0, 1), (3, 4))},
        {"stages": ((0, 1), (1, 2))},
        {"stages": ((0, 0),), "order": "zigzag"},
        {"stages": ((0, 0),), "rematerialise": (True, False)},
        {"stages": ((0, 0),), "degree": 0},
    ],
)
def test_what_is_no_pipeline(wrong: dict[str, object]) -> None:
    with pytest.raises(GeofedError, match="CONFIG_INVALID"):
        Pipeline(**wrong)  # type: ignore[arg-type]
