"""A replica works block by block and uses its memory again; neither may be seen in its numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget

from sync.codec import codec_named
from sync.layout import Vector
from sync.ps.replica import _BLOCK, Numbers, Replica
from sync.wan import Contribution, ExchangeSettings, StateAveraged, policy_named

POLICIES = {"ma": {}, "diloco": {}, "asgd": {"damping": 1.0}, "asgd-ga": {"compensation": 0.04}}
"""Each with settings of its own."""
sizes = st.sampled_from([1, 700, _BLOCK - 1, _BLOCK, _BLOCK + 1, 2 * _BLOCK + 77])


def normal(random: np.random.Generator, size: int) -> Vector:
    return random.standard_normal(size, dtype=np.float32)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=budget(10), deadline=None)
@given(size=sizes, trained=st.floats(0, 1), seed=st.integers(0, 99), together=st.booleans())
def test_a_merge_is_the_policys_over_the_whole(name: str, size: int, trained: float, seed: int, together: bool) -> None:
    random, policy = np.random.default_rng(seed), policy_named(name, POLICIES[name])
    first = normal(random, size)
    replica = Replica(policy, ExchangeSettings(guard=0.0), codec_named("fp32"), Numbers(first, first))
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
        numbers = replica.numbers
        kept = {key: vector for key, vector in numbers.memory.items() if not key.startswith("guard/")}
        assert dict.fromkeys(kept) == dict.fromkeys(memory)
        assert all(np.array_equal(kept[key], vector) for key, vector in memory.items())


@settings(max_examples=budget(20), deadline=None)
@given(seed=st.integers(0, 99), doings=st.lists(st.sampled_from(["round", "restart", "late"]), min_size=4, max_size=9))
def test_memory_that_is_used_again_changes_no_number(seed: int, doings: list[str]) -> None:
    """Beside a replica that is made anew for each doing, from what a checkpoint would hold."""
    size, exchange = _BLOCK + 5, ExchangeSettings(background=1.0)
    random = np.random.default_rng(seed)
    first = normal(random, size)
    lasting = Replica(policy_named("ma"), exchange, codec_named("ternary"), Numbers(first, first))
    given_: Vector | None = None
    for turn, doing in enumerate(doings, 1):
        old = lasting.numbers
        known = Numbers(
            old.model.copy(),
            old.start.copy(),
            None if old.residual is None else old.residual.copy(),
            {key: vector.copy() for key, vector in old.memory.items()},
        )
        fresh = Replica(policy_named("ma"), exchange, codec_named("ternary"), known)
        end, other = known.start + normal(random, size) / 64, normal(random, size) / 64
        for replica in (lasting, fresh):
            if doing == "restart":
                replica.restart()
                continue
            made = replica.own(end, turn)
            replica.go_on(end, given_)
            updates = [Contribution("a", 0.5, made.sent), Contribution("b", 0.5, other)]
            late = doing == "late"
            replica.merge(updates[:1] if late else updates, 1.0, own="a", rounds=1, lacking=0.5 if late else 0.0)
        ours, theirs = lasting.numbers, fresh.numbers
        assert np.array_equal(ours.model, theirs.model)
        assert np.array_equal(ours.start, theirs.start)
        assert ours.residual is None or np.array_equal(ours.residual, theirs.residual)
        assert dict.fromkeys(ours.memory) == dict.fromkeys(theirs.memory)
        assert all(np.array_equal(vector, theirs.memory[key]) for key, vector in ours.memory.items())
        assert np.array_equal(lasting.view, fresh.view)
        given_ = lasting.correction()
        assert np.array_equal(given_, lasting.correction(np.full(size, np.nan, np.float32)))
        assert np.array_equal(given_, fresh.correction())
