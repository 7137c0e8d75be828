"""A replica works block by block and uses its memory again; neither may be seen in its numbers."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget

from sync.codec import Decoding, codec_named
from sync.layout import Vector
from sync.policy import Contribution, StateAveraged
from sync.ps.execution.replica import _BLOCK_ELEMENTS, Replica, ReplicaState, expanded
from sync.wan import ExchangeSettings, policy_of

POLICIES = {"ma": {}, "diloco": {}, "asgd": {"damping": 1.0}, "asgd-ga": {"compensation": 0.04}}
"""Each with settings of its own."""
sizes = st.sampled_from([1, 700, _BLOCK_ELEMENTS - 1, _BLOCK_ELEMENTS, _BLOCK_ELEMENTS + 1, 2 * _BLOCK_ELEMENTS + 77])


def normal(random: np.random.Generator, size: int) -> Vector:
    return random.standard_normal(size, dtype=np.float32)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=budget(10), deadline=None)
@given(size=sizes, trained=st.floats(0, 1), seed=st.integers(0, 99), together=st.booleans())
def test_a_merge_is_the_policys_over_the_whole(name: str, size: int, trained: float, seed: int, together: bool) -> None:
    random, policy = np.random.default_rng(seed), policy_of(name, POLICIES[name])
    first = normal(random, size)
    replica = Replica(policy, ExchangeSettings(guard=0.0), codec_named("fp32"), ReplicaState(first, first))
    replica.trained = int(trained * size)
    plain = StateAveraged(policy, replica.trained) if replica.trained < size else policy
    model, memory, total = first, dict[str, Vector](), None if together else 1.0
    for turn in range(3):
        drift = normal(random, size)
        parts = [Contribution(r, 0.25, normal(random, size), turn, drift if r == "b" else None) for r in ("a", "b")]
        outer = plain.merge(model, parts, memory, total)
        model, memory = outer.model, dict(outer.memory)
        assert replica.merge(parts, total, own="a") == ()
        assert np.array_equal(replica.model, model)
        numbers = replica.state
        kept = {key: vector for key, vector in numbers.memory.items() if not key.startswith("guard/")}
        assert dict.fromkeys(kept) == dict.fromkeys(memory)
        assert all(np.array_equal(kept[key], vector) for key, vector in memory.items())


@settings(max_examples=budget(20), deadline=None)
@given(seed=st.integers(0, 99), doings=st.lists(st.sampled_from(["round", "restart", "late"]), min_size=4, max_size=9))
def test_memory_that_is_used_again_changes_no_number(seed: int, doings: list[str]) -> None:
    """Beside a replica that is made again for each doing, from what a checkpoint would hold."""
    size, exchange = _BLOCK_ELEMENTS + 5, ExchangeSettings(background=1.0)
    random = np.random.default_rng(seed)
    first = normal(random, size)
    lasting = Replica(policy_of("ma"), exchange, codec_named("ternary"), ReplicaState(first, first))
    given_: Vector | None = None
    for turn, doing in enumerate(doings, 1):
        old = lasting.state
        known = ReplicaState(
            old.model.copy(),
            old.start.copy(),
            None if old.residual is None else old.residual.copy(),
            {key: vector.copy() for key, vector in old.memory.items()},
        )
        fresh = Replica(policy_of("ma"), exchange, codec_named("ternary"), known)
        end, other = known.start + normal(random, size) / 64, normal(random, size) / 64
        for replica in (lasting, fresh):
            if doing == "restart":
                replica.restart()
                continue
            made = replica.own_update(end, turn)
            replica.continue_from(end, given_)
            updates = [Contribution("a", 0.5, made.sent), Contribution("b", 0.5, other)]
            late = doing == "late"
            replica.merge(updates[:1] if late else updates, 1.0, own="a", rounds=1, lacking=0.5 if late else 0.0)
        ours, theirs = lasting.state, fresh.state
        assert np.array_equal(ours.model, theirs.model)
        assert np.array_equal(ours.start, theirs.start)
        assert ours.residual is None or np.array_equal(ours.residual, theirs.residual)
        assert dict.fromkeys(ours.memory) == dict.fromkeys(theirs.memory)
        assert all(np.array_equal(vector, theirs.memory[key]) for key, vector in ours.memory.items())
        assert np.array_equal(lasting.view, fresh.view)
        given_ = lasting.correction()
        assert np.array_equal(given_, fresh.correction())


@settings(max_examples=budget(20), deadline=None)
@given(size=st.integers(1, 40), fragments=st.integers(1, 12), policy=st.sampled_from(["ma", "asgd"]))
def test_fragments_take_turns_and_nothing_is_lost(size: int, fragments: int, policy: str) -> None:
    """Each round sends one part, in turn; what has changed elsewhere waits, and the last round sends all."""
    random, rounds = np.random.default_rng(size), 2 * fragments + 1
    first = normal(random, size)
    exchange = ExchangeSettings(fragments=float(fragments), guard=0.0)
    replica = Replica(policy_of(policy), exchange, codec_named("fp32"), ReplicaState(first, first))
    changed, seen = np.zeros(size), np.zeros(size, int)
    for sequence in range(1, rounds + 1):
        last = sequence == rounds
        step = normal(random, size)
        changed += step
        made = replica.own_update(replica.start + step, sequence, last=last)
        parts = 1 if last or fragments > size else fragments
        begin, stop, _ = made.part.indices(size)
        assert (begin, stop) == (size * (sequence % parts) // parts, size * (sequence % parts + 1) // parts)
        assert made.sent.shape == (stop - begin,)
        seen[begin:stop] += 1
        whole = expanded(made.sent, made.part, size)
        assert np.array_equal(whole[made.part], made.sent)
        assert not whole[:begin].any()
        assert not whole[stop:].any()
        replica.merge([Contribution("a", 1.0, whole)], None, own="a", rounds=1)
        replica.restart()
    assert (seen >= 2).all()
    np.testing.assert_allclose(replica.model, first + changed, rtol=1e-4, atol=1e-5)


def test_small_changes_wait_until_they_are_significant_or_the_job_ends() -> None:
    first = np.ones(4, np.float32)
    exchange = ExchangeSettings(significance=0.1, guard=0.0)
    replica = Replica(policy_of("asgd"), exchange, codec_named("int8"), ReplicaState(first, first))
    small = np.float32([0.5, 0.01, 0.0, -0.5])
    made = replica.own_update(first + small, 1)
    assert made.codec.name == "sparse"
    assert made.sent.tolist() == [0.5, 0.0, 0.0, -0.5]
    replica.merge([Contribution("a", 1.0, made.sent)], None, own="a", rounds=1)
    replica.restart()
    made = replica.own_update(replica.start, 2, last=True)
    assert made.codec.name == "int8", "the last update says all that there is"
    assert made.sent[1] == pytest.approx(0.01, rel=0.02)


@pytest.mark.parametrize(("codec", "used"), [("topk", "int8"), ("int8", "int8"), ("fp32", "fp32")])
def test_the_last_update_holds_back_as_little_as_it_can(codec: str, used: str) -> None:
    first = np.zeros(600, np.float32)
    replica = Replica(policy_of("ma"), ExchangeSettings(guard=0.0), codec_named(codec), ReplicaState(first, first))
    change = normal(np.random.default_rng(0), 600)
    assert replica.own_update(change, 1).codec.name == codec
    replica = Replica(policy_of("ma"), ExchangeSettings(guard=0.0), codec_named(codec), ReplicaState(first, first))
    made = replica.own_update(change, 1, last=True)
    assert made.codec.name == used
    assert replica.codec.name == codec, "it is the usual one again"
    np.testing.assert_allclose(made.sent, change, atol=0.02 * float(np.abs(change).max()))


@pytest.mark.parametrize("policy", ["ma", "asgd", "diloco"])
def test_a_region_that_trains_alone_goes_on_from_where_it_ended_bit_for_bit(policy: str) -> None:
    random = np.random.default_rng(1)
    first = normal(random, 500)
    replica = Replica(policy_of(policy), ExchangeSettings(), codec_named("fp32"), ReplicaState(first, first))
    replica.alone = True
    for sequence in range(1, 4):
        end = normal(random, 500) * np.float32(1e-3) ** sequence
        made = replica.own_update(end, sequence)
        assert made.whole == (policy != "diloco")
        replica.merge([Contribution("a", 1.0, made.sent, whole=made.whole)], None, own="a", rounds=1)
        replica.restart()
        assert np.array_equal(replica.model, end) == (policy != "diloco")


@pytest.mark.parametrize("own", ["a", "b"])
def test_in_the_background_the_guard_judges_all_updates_but_the_regions_own(own: str) -> None:
    """Its workers have made the steps: refusing them would part their model from the server's."""
    first = np.zeros(4, np.float32)
    replica = Replica(policy_of("ma"), ExchangeSettings(guard=10.0), codec_named("fp32"), ReplicaState(first, first))
    for round_ in range(4):
        size = 1.0 if round_ < 3 else 1e6
        update = Contribution("a", 1.0, np.full(4, size, np.float32), round_)
        refused = replica.merge([update], 2.0, own=own)
        assert [region for region, _ in refused] == (["a"] if round_ == 3 and own == "b" else [])


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_merge_needs_no_memory_of_the_models_size(codec: str) -> None:
    """Beside the model: neither for the next one, nor for what the updates decode to."""
    random, size = np.random.default_rng(3), 64 * _BLOCK_ELEMENTS
    begin = normal(random, size)
    way, changes = codec_named(codec), [normal(random, size) for _ in range(3)]
    encoded = [way.encode(change) for change in changes]
    updates = [
        Contribution(name, 1.0, np.empty(0, np.float32), later=Decoding(way, tensors, size))
        for name, tensors in zip("abc", encoded, strict=True)
    ]
    expected = [Contribution(name, 1.0, way.decode(one, size)) for name, one in zip("abc", encoded, strict=True)]
    plain = Replica(policy_of("ma"), ExchangeSettings(), way, ReplicaState(begin.copy(), begin.copy()))
    assert plain.merge(expected, None, own="a") == ()
    replica = Replica(policy_of("ma"), ExchangeSettings(), way, ReplicaState(begin, begin), owned=True)
    tracemalloc.start()
    try:
        assert replica.merge(updates, None, own="a") == ()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < begin.nbytes / 4
    assert np.array_equal(replica.model, plain.model)


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_an_update_whose_values_nobody_wants_is_encoded_alike(codec: str) -> None:
    random, size, way = np.random.default_rng(4), _BLOCK_ELEMENTS + 9, codec_named(codec)
    begin, end = normal(random, size), normal(random, size)
    made = [
        Replica(policy_of("ma"), ExchangeSettings(), way, ReplicaState(begin, begin)).own_update(end, 1, decoded=wanted)
        for wanted in (True, False)
    ]
    assert made[1].sent.size == (0 if way.lossy else size)
    assert all(np.array_equal(made[0].tensors[name], array) for name, array in made[1].tensors.items())
