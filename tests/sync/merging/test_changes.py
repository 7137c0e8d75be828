"""ISP: the filter, the lists, and workers that share changes over a modelled channel."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from support.budget import budget
from support.memory_channel import MemoryChannel
from support.virtual_channel import Program, Virtual

from geofed_pb.errors import GeofedError
from sync import framing
from sync.collective import ChannelCosts, Settings
from sync.layout import Vector
from sync.merging import ChangeCollective, Member, SignificanceFilter
from sync.merging.lists import Lists

QUICK = ChannelCosts(0.1, 0.02, 1e8, 1e8, list_seconds=0.05)
tame = st.one_of(st.just(0.0), st.floats(2**-10, 2**10, width=32), st.floats(-(2**10), -(2**-10), width=32))


def changes(size: int, density: float, seed: int) -> Vector:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(size) * (rng.random(size) < density)).astype(np.float32)


# The lists


@settings(max_examples=budget(60), deadline=None)
@given(st.integers(0, 30_000), st.floats(0, 1), st.integers(0, 9), st.sampled_from(["fp32", "bf16", "fp8", "int4"]))
def test_lists_say_what_they_were_told(size: int, density: float, seed: int, values: str) -> None:
    vector, codec = changes(size, density**4, seed), Lists(values)
    frame = framing.decode(b"".join(framing.encode(codec.encode(vector))))
    got = codec.decode(frame.tensors, size)
    if values == "fp32":
        assert np.array_equal(got, vector)
    else:
        least = {"bf16": 0.0, "fp8": 2**-14, "int4": 1 / 7}[values] * np.abs(vector).max(initial=0.0)
        np.testing.assert_allclose(got, vector, rtol={"bf16": 2**-8, "fp8": 2**-4, "int4": 0.0}[values], atol=least)
        residual = vector - got
        assert np.array_equal(residual.astype(np.float64), vector.astype(np.float64) - got)


@pytest.mark.parametrize("one_in", [1, 2, 5, 30, 64, 1000, 100_000])
@pytest.mark.parametrize("values", ["fp32", "bf16", "fp8", "int4"])
def test_an_entry_takes_five_bytes_at_most(one_in: int, values: str) -> None:
    size = 1_000_000
    vector = changes(size, 1 / one_in, 1)
    nbytes = sum(np.asarray(array).nbytes for array in Lists(values).encode(vector).values())
    if values != "fp32" or one_in <= 64:
        assert nbytes <= 5 * np.count_nonzero(vector) + 8
    # Never larger than the dense vector.
    assert nbytes <= size * {"fp32": 4, "bf16": 2, "fp8": 1, "int4": 0.516}[values] + 4


@pytest.mark.parametrize(("one_in", "most"), [(5, 0.8), (20, 0.85), (200, 0.9)])
def test_rows_take_little_more_than_their_values(one_in: int, most: float) -> None:
    """Of an embedding: eight coordinates lie together."""
    rng = np.random.default_rng(1)
    vector = np.repeat(rng.random(100_000) < 1 / one_in, 8) * changes(800_000, 1.0, 2)
    entries = np.count_nonzero(vector)
    (got,) = Lists("int4").encode(vector).values()
    apart = Lists("int4").encode(changes(800_000, 1 / one_in, 1))
    assert got.nbytes < most * entries
    assert got.nbytes * 1.2 < sum(one.nbytes for one in apart.values())
    exact = Lists("fp32")
    assert np.array_equal(exact.decode(exact.encode(vector), vector.size), vector)


@pytest.mark.parametrize("vector", [[3.4e38, -3.4e38, 1], [1e-45, -1e-45], [0, -0.0], [], [-1.99, 1e-9, 2e-5]])
def test_eight_bits_bear_the_ends_of_the_range(vector: list[float]) -> None:
    codec, values = Lists("fp8"), np.array(vector, np.float32)
    got = codec.decode(codec.encode(values), values.size)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, values, rtol=2**-3, atol=2**-14 * float(np.abs(values).max(initial=0.0)))
    chosen = np.arange(2 * values.size) < values.size
    tensors, read = codec.encode_chosen(chosen, values)
    # What is told of an entry is what is read there.
    assert np.array_equal(codec.decode({"l": np.concatenate(tensors["l"])}, chosen.size)[chosen], read)


@pytest.mark.parametrize("vector", [[3.4e38, -3.4e38, 1], [1e-45, -1e-45], [], [-1.99, 1e-9, 2e-5], [7.5, 0.5, 3.75]])
def test_four_bits_bear_the_ends_of_the_range(vector: list[float]) -> None:
    codec, values = Lists("int4"), np.array(vector, np.float32)
    chosen = np.arange(4 * values.size) % 4 == 0
    tensors, read = codec.encode_chosen(chosen, values)
    got = codec.decode({"l": np.concatenate(tensors["l"])}, chosen.size)
    assert np.isfinite(got).all()
    assert np.array_equal(got[chosen], read)
    np.testing.assert_allclose(read, values, rtol=0, atol=max(2**-127, float(np.abs(values).max(initial=0.0)) / 7))


@pytest.mark.parametrize("density", [0.001, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("broken", ["cut", "longer", "kind", "form", "count", "dtype", "none"])
def test_damaged_lists_are_refused(broken: str, density: float) -> None:
    codec, vector = Lists("int4"), changes(5000, density, 3)
    (whole,) = (np.array(array) for array in codec.encode(vector).values())
    tensors: dict[str, Any] = {"l": whole}
    if broken == "none":
        tensors = {"high": whole}
    elif broken == "dtype":
        tensors = {"l": whole.astype(np.float32)}
    elif broken in ("cut", "longer"):
        tensors = {"l": whole[:-1] if broken == "cut" else np.append(whole, whole[:1])}
    else:
        # Of a dense vector, the first byte alone is more than values.
        whole[{"kind": 0, "form": 5, "count": 1}[broken] if density < 1 else 0] ^= 0x40
    with pytest.raises(GeofedError) as raised:
        codec.decode(tensors, 5000)
    assert raised.value.code == "FRAME_INVALID"


@settings(max_examples=budget(150), deadline=None)
@given(st.binary(max_size=60), st.integers(0, 200), st.sampled_from(["fp32", "bf16", "fp8", "int4"]))
def test_any_bytes_are_read_or_refused(raw: bytes, size: int, values: str) -> None:
    with contextlib.suppress(GeofedError):
        assert Lists(values).decode({"l": np.frombuffer(raw, np.uint8)}, size).shape == (size,)


# The filter


@settings(max_examples=budget(60), deadline=None)
@given(
    st.lists(st_numpy.arrays(np.float32, 60, elements=tame), min_size=1, max_size=6),
    st_numpy.arrays(np.float32, 60, elements=tame),
    st.floats(0, 2),
    st.sampled_from(["fp32", "bf16", "fp8", "int4"]),
)
def test_sent_plus_held_back_is_all_change(
    given_in: list[Vector], model: Vector, significance: float, values: str
) -> None:
    kept, codec = SignificanceFilter(60, significance), Lists(values)
    sent, total = np.zeros(60), np.zeros(60)
    for step, change in enumerate(given_in):
        for part in (slice(0, 25), slice(25, 60)):
            read = np.empty(part.stop - part.start, np.float32)
            kept.send(part, change[part].copy(), model[part], step, codec, read)
            sent[part] += read
        total += change
        assert np.array_equal(sent + kept.held, total)
        if values == "fp32":
            bound = significance / math.sqrt(step + 1) * np.maximum(np.abs(model), 1e-6)
            assert (np.abs(kept.held) <= bound * (1 + 1e-6) + 2**-24 * np.abs(total)).all()
    rest = np.empty(60, np.float32)
    kept.flush(slice(0, 60), Lists("fp32"), rest)
    sent += rest
    assert np.array_equal(sent + kept.held, total)


def test_the_published_rule() -> None:
    kept, model = SignificanceFilter(5, 0.5), np.array([1, 1, -1, 0, 0], np.float32)
    change = np.array([0.5, 0.51, -0.6, 0.0, 1e-3], np.float32)
    sent = np.empty(5, np.float32)
    kept.send(slice(0, 5), change, model, 0, Lists("fp32"), sent)
    # As much as the threshold is not more than it; a weight of zero is guarded.
    assert sent.tolist() == [0, np.float32(0.51), np.float32(-0.6), 0, np.float32(1e-3)]
    kept.send(slice(0, 5), np.zeros(5, np.float32), model, 3, Lists("fp32"), sent)
    assert sent.tolist() == [0.5, 0, 0, 0, 0]


# The collective


def share(
    workers: int,
    size: int,
    given_settings: Settings,
    count: int,
    density: float = 0.2,
    every: int = 0,
    *,
    hand_on: bool = False,
) -> tuple[list[Vector], npt.NDArray[np.float64], Virtual]:
    """Workers that make some steps and settle; their models, what they should be, and the channel.

    ``hand_on``: every step is made by another object, which is given the state of the one before.
    """
    virtual = Virtual(QUICK)
    start = changes(size, 1.0, 99)
    models = [start.copy() for _ in range(workers)]
    exact = start.astype(np.float64)
    ones = [ChangeCollective(given_settings, Member(w, workers, 1), MemoryChannel(), "c", size) for w in range(workers)]
    trained = size if given_settings.trained is None else given_settings.trained
    for worker in range(workers):
        for step in range(1, count + 1):
            exact[:trained] += 0.01 * changes(trained, density, 1000 * worker + step).astype(np.float64)

    def program(worker: int) -> Program:
        one, model = ones[worker], models[worker]
        for step in range(1, count + 1):
            if hand_on:
                state, one = one.state(), ChangeCollective(given_settings, one._member, MemoryChannel(), "c", size)
                one.restore(state)
            change = np.zeros(size, np.float32)
            change[:trained] = np.float32(0.01) * changes(trained, density, 1000 * worker + step)
            change[trained:] = worker
            model += change
            merged = yield one.part(step, change, 1.0, model)
            for each in one.merged(merged):
                assert each.weight == workers
                assert not each.vector[trained:].any()
                model += each.vector
            if step == count or (every and step % every == 0):
                merged = yield one.settling(step, model)
                model[:] = merged[0].vector

    for worker in range(workers):
        virtual.add(program(worker), serial=given_settings.faithful)
    virtual.run()
    assert all(worker.ended for worker in virtual.workers)
    return models, exact, virtual


@pytest.mark.slow
@settings(max_examples=budget(25), deadline=None)
@given(
    st.integers(2, 9), st.integers(1, 3000), st.integers(0, 4), st.sampled_from(["fp32", "bf16", "fp8", "int4"]),
    st.booleans(), st.floats(0, 3), st.data(),
)  # fmt: skip
def test_all_end_with_all_changes_in_the_same_bits(
    workers: int, size: int, every: int, codec: str, faithful: bool, significance: float, data: st.DataObject
) -> None:
    chunks = data.draw(st.one_of(st.none(), st.integers(1, workers)))
    given_settings = Settings(
        "isp", chunks=chunks, codec=codec, significance=significance, faithful=faithful and chunks is None
    )
    models, exact, _ = share(workers, size, given_settings, 6, every=every)
    assert len({model.tobytes() for model in models}) == 1
    np.testing.assert_allclose(models[0], exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunks", [None, 3])
def test_with_no_threshold_every_step_is_synchronous(chunks: int | None) -> None:
    workers, size = 4, 500
    ones = [
        ChangeCollective(
            Settings("isp", chunks=chunks, significance=0.0), Member(w, workers, 1), MemoryChannel(), "c", size
        )
        for w in range(workers)
    ]
    virtual, models = Virtual(QUICK), [np.ones(size, np.float32) for _ in range(workers)]

    def program(worker: int) -> Program:
        for step in range(1, 5):
            change = changes(size, 0.5, worker * 100 + step)
            models[worker] += change
            merged = yield ones[worker].part(step, change, 1.0, models[worker])
            for each in ones[worker].merged(merged):
                models[worker] += each.vector

    for worker in range(workers):
        virtual.add(program(worker))
    virtual.run()
    exact = 1.0 + sum(
        changes(size, 0.5, worker * 100 + step).astype(np.float64) for worker in range(workers) for step in range(1, 5)
    )
    for model in models:
        np.testing.assert_allclose(model, exact, atol=1e-5)


def test_owners_hold_back_sums_that_are_not_significant() -> None:
    """A worker continues with its own change until it is published, and all agree on what is."""
    workers, size = 4, 8
    ones = [
        ChangeCollective(Settings("isp", chunks=2, significance=0.4), Member(w, workers, 1), MemoryChannel(), "c", size)
        for w in range(workers)
    ]
    virtual, models = Virtual(QUICK), [np.ones(size, np.float32) for _ in range(workers)]
    seen: list[list[Vector]] = [[] for _ in range(workers)]

    def program(worker: int) -> Program:
        for step in (1, 2):
            # Above a worker's threshold, 0.1: a sum of two is not above an owner's, 0.4; that of step 2 is.
            change = np.where((np.arange(size) == 5) & (worker < 2), 0.15, 0.0).astype(np.float32)
            models[worker] += change
            merged = yield ones[worker].part(step, change, 1.0, models[worker])
            (one,) = ones[worker].merged(merged)
            models[worker] += one.vector
            seen[worker].append(models[worker].copy())

    for worker in range(workers):
        virtual.add(program(worker))
    virtual.run()
    after_one, after_two = ([round(float(models[step][5]), 3) for models in seen] for step in (0, 1))
    assert after_one == [1.15, 1.15, 1.0, 1.0]
    assert after_two == [1.6, 1.6, 1.6, 1.6]


@pytest.mark.parametrize(("chunks", "codec"), [(None, "bf16"), (3, "bf16"), (2, "fp8"), (2, "int4")])
def test_the_next_invocation_holds_back_the_same(chunks: int | None, codec: str) -> None:
    given_settings = Settings("isp", chunks=chunks, codec=codec, significance=1.0)
    whole, exact, _ = share(4, 600, given_settings, 5)
    handed_on, _, _ = share(4, 600, given_settings, 5, hand_on=True)
    assert [model.tobytes() for model in handed_on] == [model.tobytes() for model in whole]
    np.testing.assert_allclose(whole[0], exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunks", [None, 2])
def test_what_gradients_do_not_train_is_averaged_on_settling(chunks: int | None) -> None:
    models, exact, _ = share(3, 1000, Settings("isp", significance=0.7, chunks=chunks, trained=900), 4)
    assert len({model.tobytes() for model in models}) == 1
    np.testing.assert_allclose(models[0][:900], exact[:900], rtol=1e-4, atol=1e-5)
    # Every worker has added its own number four times.
    np.testing.assert_allclose(models[0][900:], exact[900:] + 4 * np.mean([0, 1, 2]), rtol=1e-6)


@pytest.mark.parametrize("chunks", [None, 2])
def test_what_the_channel_holds_does_not_grow(chunks: int | None) -> None:
    held = [
        len(share(4, 1000, Settings("isp", significance=0.7, chunks=chunks), count, every=3)[2].values)
        for count in (6, 12)
    ]
    assert held[0] == held[1] <= 2 * 4 + 2 * 4


def test_ranges_move_fewer_bytes_than_all_to_all() -> None:
    """With 16 workers, whose changes touch the same few coordinates, as popular features do."""
    workers, size = 16, 40_000

    def down(given_settings: Settings) -> float:
        virtual = Virtual(QUICK)
        for worker in range(workers):
            one = ChangeCollective(given_settings, Member(worker, workers, 1), MemoryChannel(), "c", size)

            def program(one: ChangeCollective = one, worker: int = worker) -> Program:
                model = np.ones(size, np.float32)
                for step in range(1, 4):
                    change = np.zeros(size, np.float32)
                    change[:4000] = 10 * changes(4000, 0.3, worker * 100 + step)
                    yield one.part(step, change, 1.0, model)

            virtual.add(program(), serial=given_settings.faithful)
        virtual.run()
        return sum(worker.meter.bytes_out for worker in virtual.workers)

    published = down(Settings("isp", faithful=True, significance=0.5))
    compact = down(Settings("isp", codec="bf16", significance=0.5))
    ranges = down(Settings("isp", chunks=4, codec="bf16", significance=0.5))
    assert compact * 4 < published
    assert ranges * 3 < compact


def test_what_cannot_be_shared_is_refused() -> None:
    with pytest.raises(GeofedError, match="not in int8"):
        ChangeCollective(Settings("isp", significance=0.7, codec="int8"), Member(0, 2, 1), MemoryChannel(), "c", 10)
    one = ChangeCollective(Settings("isp", significance=0.7), Member(0, 2, 1), MemoryChannel(), "c", 10)
    vector: Any = np.zeros(10, np.float32)
    for call in (
        lambda: one.merge(1, vector, 1.0),
        lambda: one.merge(1, vector[:3], 1.0, vector),
        lambda: one.merge(1, vector, -1.0, vector),
        lambda: one.settle(1, vector[:2]),
    ):
        with pytest.raises(GeofedError) as raised:
            call()
        assert raised.value.code == "FRAME_INVALID"
    one.close()


def test_alone_there_is_nothing_to_share() -> None:
    one = ChangeCollective(Settings("isp", significance=0.7), Member(0, 1, 1), MemoryChannel(), "c", 10)
    vector = np.ones(10, np.float32)
    assert one.merge(1, vector, 1.0, vector) == ()
    assert one.settle(1, vector).model is None
    one.close()
