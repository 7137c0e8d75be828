"""The arithmetic of secure aggregation: exact sums, residuals, and what masked updates tell."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geofed_pb.errors import GeofedError
from sync.codec import MaskedIntegers, Tensors, codec_named
from sync.layout import Vector
from sync.secure import MaskKey, PairMasks, SharedScale, check_masked, first_codec

CODECS = ("int8-masked", "bf16-masked", "fp32-masked")


def masks_of(names: list[str], keys: Mapping[str, MaskKey] | None = None) -> dict[str, PairMasks]:
    found = keys or {name: MaskKey() for name in names}
    return {
        name: PairMasks(name, {o: found[name].secret(name, o, found[o].public, "job") for o in names if o != name})
        for name in names
    }


class Federation:
    """Regions that make updates of the same rounds."""

    def __init__(self, shares: list[float], size: int, trained: int, codec: str) -> None:
        self.names = [f"region-{number:03}" for number in range(len(shares))]
        self.shares = dict(zip(self.names, shares, strict=True))
        self.size, self.trained, self.codec = size, trained, codec
        self.masks = masks_of(self.names)
        self.residuals = {name: np.zeros(size, np.float32) for name in self.names}
        self.start = np.zeros(size, np.float32)
        self.scales: Vector | None = None
        self.sequence = 0

    def update(self, name: str, change: Vector) -> Tensors:
        scale = SharedScale(name, self.shares, self.codec)
        end, residual = self.start + change, self.residuals[name]
        return scale.encode(end, self.start, residual, self.trained, self.scales, self.masks[name], self.sequence)

    def round(self, changes: Mapping[str, Vector]) -> Vector:
        self.sequence += 1
        updates = [self.update(name, changes[name]) for name in self.names]
        for tensors in updates:
            check_masked(tensors, self.size, self.trained, self.codec, self.sequence)
        scale = SharedScale(self.names[0], self.shares, self.codec)
        delta, self.scales = scale.decode(updates, self.trained, self.scales)
        return delta

    def mean(self, changes: Mapping[str, Vector]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        total = sum(self.shares.values())
        return sum((self.shares[name] / total * changes[name].astype(np.float64) for name in self.names), np.zeros(1))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_is_merged_and_what_is_left_add_up_to_all_changes(data: st.DataObject) -> None:
    codec = data.draw(st.sampled_from(CODECS))
    shares = data.draw(st.lists(st.floats(0.01, 1.0), min_size=3, max_size=12))
    trained = data.draw(st.integers(1, 1100))
    size = trained + data.draw(st.integers(0, 5))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    federation = Federation(shares, size, trained, codec)
    merged, wanted, largest = np.zeros(size), np.zeros(size), 0.0
    for _ in range(data.draw(st.integers(1, 5))):
        magnitude = 10.0 ** data.draw(st.integers(-6, 0))
        changes = {name: (rng.standard_normal(size) * magnitude).astype(np.float32) for name in federation.names}
        delta = federation.round(changes)
        merged, largest = merged + delta, largest + float(np.abs(delta).max())
        largest += sum(float(np.abs(residual).max()) for residual in federation.residuals.values())
        wanted += federation.mean(changes)
    left = sum(federation.residuals.values(), np.zeros(size))
    # What is merged is rounded to float32, round by round, and so is what is left.
    assert np.abs(merged + left - wanted).max() <= 1e-7 * np.float64(largest)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    count=st.integers(3, 16),
    size=st.integers(1, 700),
    kind=st.sampled_from([np.uint8, np.uint16, np.uint32]),
    seed=st.integers(0, 1 << 32),
    sequence=st.integers(1, 1000),
)
def test_masks_of_all_regions_cancel_exactly(
    count: int, size: int, kind: type[np.unsignedinteger], seed: int, sequence: int
) -> None:
    names = [f"r{number}" for number in range(count)]
    rng = np.random.default_rng(seed)
    masks, plain, total = masks_of(names), np.zeros(size, kind), np.zeros(size, kind)
    for name in names:
        values = rng.integers(0, np.iinfo(kind).max, size, kind, endpoint=True)
        plain += values
        masks[name].add(values, sequence, "masked")
        total += values
    assert np.array_equal(plain, total)


def _uniform(values: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> bool:
    """Whether bytes look uniform: chi squared with 255 degrees of freedom, within five standard deviations."""
    counts = np.bincount(values, minlength=256)
    expected = values.size / 256
    return bool(abs(((counts - expected) ** 2 / expected).sum() - 255) < 5 * (2 * 255) ** 0.5)


@pytest.mark.parametrize("codec", CODECS)
def test_what_all_but_two_regions_see_does_not_depend_on_the_two(codec: str) -> None:
    """They know their own keys, all masked updates and the sum; of two regions only the sum of both."""
    size = 1 << 16
    views = []
    for first, second in ((0.01, 0.02), (0.02, 0.01)):
        federation = Federation([1.0, 1.0, 1.0, 1.0], size, size, codec)
        honest, knowing = federation.names[:2], federation.names[2:]
        values = dict(zip(federation.names, (first, second, 0.005, 0.0), strict=True))
        changes = {name: np.full(size, value, np.float32) for name, value in values.items()}
        delta = federation.round(changes)
        federation.sequence, federation.scales = 2, np.full(size // 512, -14.0, np.float32)
        updates = {name: federation.update(name, changes[name]) for name in federation.names}
        # The others take off the masks that they share with the two: what stays is masked between the two.
        seen = []
        for name in honest:
            mine = np.array(updates[name]["masked"]).view(np.dtype(f"u{updates[name]['masked'].itemsize}"))
            known = {other: federation.masks[name]._secrets[other] for other in knowing}
            mask = np.zeros_like(mine)
            PairMasks(name, known).add(mask, 2, "masked")
            seen.append(mine - mask)
            assert _uniform(seen[-1].view(np.uint8)), name
        views.append((delta, *seen))
    # The two exchanged what they had: the sum is the same, and so is the distribution of all that is seen.
    assert np.array_equal(views[0][0], views[1][0])
    joint = [(one[1] + one[2]) for one in views]
    assert np.array_equal(joint[0], joint[1])
    assert not np.array_equal(views[0][1], views[1][1])


def test_the_round_that_is_made_again_tells_nothing_of_the_region_that_is_gone() -> None:
    """All but two of those that stay join forces, and have what the gone one had sent: no sum that they have, of the
    abandoned round or of the one in its place, holds the update of a single region."""
    size = 1 << 15
    first, again = (Federation([1.0] * count, size, size, "int8-masked") for count in (5, 4))
    views = []
    for federation in (first, again):
        federation.sequence, federation.scales = 2, np.full(size // 512, -14.0, np.float32)
        change = np.full(size, 0.001, np.float32)
        updates = {name: np.asarray(federation.update(name, change)["masked"]) for name in federation.names}
        knowing = federation.names[2:4]
        # They take off their own masks from what the others have sent.
        for name, update in updates.items():
            if name in knowing:
                continue
            mask = np.zeros_like(update)
            PairMasks(name, {other: federation.masks[name]._secrets[other] for other in knowing}).add(mask, 2, "masked")
            views.append((federation is first, name, update - mask))
    gone = first.names[4]
    for is_first, name, seen in views:
        assert _uniform(seen), (is_first, name)
    for one in views:
        for other in views:
            if one[:2] < other[:2] and not (one[0] is other[0] is False):
                assert _uniform(one[2] - other[2]), (one[:2], other[:2])
                assert _uniform(one[2] + other[2]), (one[:2], other[:2])
    abandoned = [seen for is_first, name, seen in views if is_first and name != gone]
    assert _uniform(sum(abandoned, np.zeros(size, np.uint8)))
    # Of the new round they have the sum of the two, as in every round.
    made_again = [seen for is_first, _, seen in views if not is_first]
    assert len(made_again) == 2
    assert not _uniform(sum(made_again, np.zeros(size, np.uint8)))


def test_an_update_without_one_region_tells_nothing() -> None:
    size = 1 << 15
    federation = Federation([1.0] * 5, size, size, "int8-masked")
    federation.sequence, federation.scales = 2, np.full(size // 512, -14.0, np.float32)
    change = np.full(size, 0.001, np.float32)
    updates = [federation.update(name, change) for name in federation.names]
    for missing in range(5):
        part = sum((np.asarray(u["masked"]) for n, u in enumerate(updates) if n != missing), np.zeros(size, np.uint8))
        assert _uniform(part)
    assert not _uniform(sum((np.asarray(u["masked"]) for u in updates), np.zeros(size, np.uint8)))


@pytest.mark.slow
def test_in_ten_thousand_patterns_of_drop_outs_each_round_that_is_completed_is_exact() -> None:
    """Regions go before or after they have sent a round's update; the others make it again, with new keys."""
    rng = np.random.default_rng(11)
    groups = {count: [masks_of([f"r{number}" for number in range(count)]) for _ in range(2)] for count in range(3, 9)}
    completed = refused = left = 0
    for pattern in range(10_000):
        count, fewest, size = int(rng.integers(4, 9)), int(rng.integers(3, 5)), 8
        sequence = int(rng.integers(1, 1 << 20))
        # Of the last one that goes, the update may have come to any of the others, and to any of these not.
        sent = {f"r{number}": masks for number, masks in enumerate(groups[count][0].values())}
        values = {name: rng.integers(0, 1 << 32, size, np.uint32) for name in sent}
        while len(sent) >= fewest and rng.random() < 0.6:
            gone = str(rng.choice(sorted(sent)))
            received = {name: values[name].copy() for name in sent if name != gone or rng.random() < 0.5}
            for name, update in received.items():
                sent[name].add(update, sequence, "masked")
            # Whoever had all of them would have completed the round. The others' alone are not their sum.
            received.pop(gone, None)
            part = sum(received.values(), np.zeros(size, np.uint32))
            assert not np.array_equal(part, sum((values[name] for name in received), np.zeros(size, np.uint32)))
            kept = [name for name in sent if name != gone]
            left += 1
            if len(kept) < max(fewest, 3):
                sent = {}
                break
            fresh = iter(groups[len(kept)][left % 2].values())
            sent, sequence = {name: next(fresh) for name in kept}, 1
        if not sent:
            refused += 1
            continue
        total = np.zeros(size, np.uint32)
        for name, masks in sent.items():
            update = values[name].copy()
            masks.add(update, sequence, "masked")
            total += update
        assert np.array_equal(total, sum((values[name] for name in sent), np.zeros(size, np.uint32))), pattern
        completed += 1
    assert min(completed, refused) > 500, (completed, refused, left)


@pytest.mark.slow
def test_of_ten_thousand_patterns_of_missing_regions_only_whole_rounds_can_be_read() -> None:
    """Each region's update comes or does not, in any order, some more than once after a restart."""
    rng = np.random.default_rng(7)
    groups = {count: masks_of([f"r{number}" for number in range(count)]) for count in range(3, 9)}
    whole = 0
    for pattern in range(10_000):
        masks = groups[int(rng.integers(3, 9))]
        sequence, size = int(rng.integers(1, 1 << 20)), 8
        plain, total = np.zeros(size, np.uint32), np.zeros(size, np.uint32)
        there = rng.random(len(masks)) < 0.9
        for number in rng.permutation(len(masks)):
            values = rng.integers(0, 1 << 32, size, np.uint32)
            plain += values
            made = [values.copy() for _ in range(int(rng.integers(1, 3)))]
            for again in made:
                masks[f"r{number}"].add(again, sequence, "masked")
                assert np.array_equal(again, made[0])
            if there[number]:
                total += made[0]
        assert np.array_equal(plain, total) == all(there), pattern
        whole += all(there)
    assert 3_000 < whole < 8_000


def test_rounds_and_parts_have_masks_of_their_own() -> None:
    (masks, *_) = masks_of(["a", "b", "c"]).values()
    made = []
    for sequence, part in ((1, "masked"), (2, "masked"), (1, "state"), (1, "largest")):
        values = np.zeros(64, np.uint8)
        masks.add(values, sequence, part)
        made.append(values.tobytes())
    assert len(set(made)) == len(made)


def test_other_terms_are_another_secret() -> None:
    one, other = MaskKey(), MaskKey()
    agreed = one.secret("a", "b", other.public, "job")
    assert agreed == other.secret("b", "a", one.public, "job")
    assert agreed != one.secret("a", "b", other.public, "job 2")
    assert agreed != one.secret("a", "c", other.public, "job")
    assert agreed != one.secret("b", "a", other.public, "job")
    assert MaskKey(one.private).public == one.public


@pytest.mark.parametrize(("victim", "copied"), [("c", "a"), ("c", "z"), ("m", "a")])
def test_a_region_that_copies_a_key_takes_off_no_mask(victim: str, copied: str) -> None:
    """Under the victim's two secrets with one key, its masks neither cancel nor double, on either side of the names."""
    size, liar = 1 << 15, "p"
    keys = {name: MaskKey() for name in (victim, copied)}
    secrets = {o: keys[victim].secret(victim, o, keys[copied].public, "job") for o in (copied, liar)}
    assert len(set(secrets.values())) == 2
    values = np.full(size, 3, np.uint8)
    PairMasks(victim, secrets).add(values, 1, "masked")
    assert _uniform(values)
    # Twice the same mask has only even numbers.
    assert set((values & 1).tolist()) == {0, 1}


def test_a_key_with_which_nothing_is_secret_is_refused() -> None:
    for public in (bytes(32), b"short"):
        with pytest.raises(GeofedError, match="PEER_INVALID"):
            MaskKey().secret("a", "b", public, "job")


def test_a_change_beyond_the_range_comes_later() -> None:
    size = 600
    federation = Federation([1.0, 1.0, 1.0], size, size, "int8-masked")
    small, large = np.full(size, 1e-5, np.float32), np.full(size, 1.0, np.float32)
    federation.round(dict.fromkeys(federation.names, small))
    merged = federation.round(dict.fromkeys(federation.names, large))
    assert merged.max() < 1e-3
    nothing = np.zeros(size, np.float32)
    merged = merged + federation.round(dict.fromkeys(federation.names, nothing))
    assert merged == pytest.approx(1.0, rel=0.02)


def test_state_is_not_limited_by_the_scale_of_parameters() -> None:
    federation = Federation([2.0, 1.0, 1.0], 520, 515, "int8-masked")
    change = np.full(520, 1e-4, np.float32)
    change[515:] = 200.0
    for _ in range(3):
        assert federation.round(dict.fromkeys(federation.names, change))[515:] == pytest.approx(200.0, rel=1e-6)


@pytest.mark.parametrize("codec", CODECS)
def test_a_running_variance_that_decays_never_becomes_negative(codec: str) -> None:
    """Below minus its epsilon, normalisation would divide by the root of a negative number."""
    size = 64
    federation = Federation([2.0, 1.0, 1.0], 512 + size, 512, codec)
    federation.start = np.concatenate([np.zeros(512), np.geomspace(1.0, 1e-6, size)]).astype(np.float32)
    kept = dict(zip(federation.names, (0.9, 0.5, 0.3), strict=True))
    for _ in range(150):
        ends = {name: federation.start * np.float32(part) for name, part in kept.items()}
        delta = federation.round({name: end - federation.start for name, end in ends.items()})
        federation.start = federation.start + delta
        assert federation.start[512:].min() >= -1e-8
    assert federation.start[512:].max() < 1e-8


def test_counters_are_exact() -> None:
    federation = Federation([0.2, 0.6, 0.2], 520, 515, "int8-masked")
    change = np.zeros(520, np.float32)
    for counted in (1.0, 3.0, 1e6 + 1, 2.0**24 - 1, 2.0**30, -(2.0**30)):
        change[515:] = counted
        merged = federation.round(dict.fromkeys(federation.names, change))[515:]
        assert merged.tolist() == [counted] * 5


@pytest.mark.parametrize("codec", CODECS)
def test_other_arrays_are_refused(codec: str) -> None:
    federation = Federation([1.0, 1.0, 1.0], 700, 690, codec)
    tensors = dict(federation.update("region-000", np.zeros(700, np.float32)))
    federation.sequence = 1
    check_masked(tensors, 700, 690, codec, 1)
    if codec != "fp32-masked":
        with pytest.raises(GeofedError, match="masked"):
            check_masked(tensors, 700, 690, codec, 2)
    for name in tensors:
        for other in ({**tensors, name: tensors[name][1:]}, {**tensors, name: tensors[name].astype(np.float32)}):
            if other[name].size != tensors[name].size or tensors[name].size:
                with pytest.raises(GeofedError, match="FRAME_INVALID"):
                    check_masked(other, 700, 690, codec, 1)


def test_codecs_of_secure_aggregation() -> None:
    for name in ("fp32", "bf16", "int8"):
        masked = codec_named(codec_named(name).masked)
        assert isinstance(masked, MaskedIntegers)
        assert not masked.offered
        assert first_codec(masked.name, 1).bits == 32
        assert first_codec(masked.name, 2) is masked
        with pytest.raises(GeofedError, match="without secure aggregation"):
            masked.check({}, 1)
        with pytest.raises(TypeError):
            masked.encode(np.zeros(1, np.float32))
    assert not codec_named("topk").masked
    with pytest.raises(GeofedError, match="cannot be used with secure aggregation"):
        first_codec("int8", 2)
