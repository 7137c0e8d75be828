"""What a manifest may state, whatever bytes it is made of."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget
from support.damage import damaged
from support.pki import Authority

from geofed_pb.errors import GeofedError
from geofed_pb.v1 import sync_pb2
from sync.file_transfer.manifest import Manifest
from sync.file_transfer.signing import sign, verify
from sync.file_transfer.wire import manifest_of, manifest_to_proto
from sync.ps.manifest_limits import ManifestLimits

LIMITS = ManifestLimits(("east", "mars", "west"), 100, 1.02, 1 << 30, {"mars": 32.0})
GOOD = Manifest("mars", 1, 3, "sha256:" + "0" * 64, 256, 32.0, (("east", 2),), settled=3)
HERE = (AUTHORITY := Authority()).region("east")
MARS = AUTHORITY.region("mars")
_WORDS = st.integers(0, (1 << 64) - 1)
_PROTOS = st.builds(
    sync_pb2.UpdateManifest,
    job=st.text(max_size=20),
    region=st.sampled_from(["mars", "west", "", "\x00", "x" * 300]),
    epoch=_WORDS,
    sequence=_WORDS | st.integers(0, 100),
    digest=st.just(GOOD.digest) | st.text(max_size=80),
    total_bytes=_WORDS | st.integers(0, 1000),
    weight=st.floats() | st.floats(0, 40),
    seen=st.dictionaries(st.sampled_from(["east", "mars", "pluto"]), _WORDS, max_size=3),
    stretch=st.integers(0, (1 << 32) - 1),
    settled=_WORDS,
    ends=_WORDS | st.integers(0, 100),
    first=_WORDS | st.integers(0, 100),
    round_seconds=st.floats(),
    signature=st.binary(max_size=80),
    certificate_pem=st.binary(max_size=80) | st.just(MARS.certificate_pem),
)


def test_a_good_manifest_passes() -> None:
    LIMITS.check(GOOD, 1 << 10)
    LIMITS.check(replace(GOOD, weight=32.2), 1 << 10)
    LIMITS.check(replace(GOOD, first=2, weight=64.0), 1 << 10)
    # In the background rounds may be longer than planned, and shares count instead of samples.
    replace(LIMITS, background=True).check(replace(GOOD, weight=32.0 * 8), 1 << 10)
    with pytest.raises(GeofedError, match=r"beyond its 32\.32"):
        LIMITS.check(replace(GOOD, weight=32.4), 1 << 10)


def test_the_size_of_an_update_follows_from_the_model() -> None:
    assert LIMITS.most_bytes_of(1, 1_000_000, 500) == 4_080_000 + (64 << 10)
    assert LIMITS.most_bytes_of(0, 1_000_000, 500) == 4_082_000 + (64 << 10)
    assert LIMITS.most_bytes_of(0, None, 0) == 1 << 30


def _passes(proto: sync_pb2.UpdateManifest) -> bool:
    """Whether a manifest is within the limits; only these errors may be raised, and what passes is bounded."""
    manifest = manifest_of(proto)
    try:
        LIMITS.check(manifest, 1 << 10)
    except GeofedError:
        return False
    most = max(manifest.epoch, manifest.sequence, manifest.stretch, manifest.settled, manifest.ends)
    assert most <= 1 << 31
    assert 0 < manifest.total_bytes <= 1 << 10
    assert 0 < manifest.weight < math.inf
    assert 0 <= manifest.round_seconds < math.inf
    assert 1 <= manifest.rounds <= 101
    return True


@given(_PROTOS)
@settings(max_examples=budget(500))
def test_whatever_passes_is_within_all_bounds(proto: sync_pb2.UpdateManifest) -> None:
    _passes(sync_pb2.UpdateManifest.FromString(proto.SerializeToString()))


@given(_PROTOS)
@settings(max_examples=budget(300))
def test_no_manifest_passes_for_another(proto: sync_pb2.UpdateManifest) -> None:
    """A signature holds for one text only, whatever else is in the message."""
    signed = manifest_to_proto("job", GOOD)
    sign(signed, MARS)
    verify(signed, HERE)
    with pytest.raises(GeofedError) as raised:
        verify(proto, HERE)
    assert raised.value.code == "FORBIDDEN"
    proto.signature, proto.certificate_pem = signed.signature, signed.certificate_pem
    with pytest.raises(GeofedError):
        verify(proto, HERE)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_million_damaged_manifests_are_read_or_refused() -> None:
    """A good one of which some bytes are replaced, inserted or cut off."""
    proto = manifest_to_proto("job", GOOD)
    sign(proto, MARS)
    proto.certificate_pem = b""
    outcomes = {"not a message": 0, "refused": 0, "accepted": 0}
    for data in damaged(proto.SerializeToString(), 1_000_000):
        try:
            read = sync_pb2.UpdateManifest.FromString(data)
        except DecodeError:
            outcomes["not a message"] += 1
            continue
        outcomes["accepted" if _passes(read) else "refused"] += 1
    assert min(outcomes.values()) > 1000, outcomes


def test_a_manifest_survives_the_wire() -> None:
    proto = manifest_to_proto("job", GOOD)
    sign(proto, MARS)
    passed_on = manifest_to_proto("job", manifest_of(proto))
    verify(passed_on, HERE)
    assert passed_on == proto


@pytest.mark.parametrize("signer", ["another authority", "another region", "a region's key as an authority"])
def test_only_the_regions_own_key_signs(signer: str) -> None:
    stranger = {"another authority": Authority("other").region("mars"), "another region": AUTHORITY.region("west")}
    proto = manifest_to_proto("job", GOOD)
    sign(proto, stranger.get(signer, MARS))
    if signer == "a region's key as an authority":
        proto.certificate_pem = Authority("other").region("mars").certificate_pem + MARS.certificate_pem
    with pytest.raises(GeofedError) as raised:
        verify(proto, HERE)
    assert raised.value.code == "FORBIDDEN"


def test_a_renewed_certificate_counts_and_an_old_one_counts_no_longer() -> None:
    proto = manifest_to_proto("job", GOOD)
    for days, holds in ((0, True), (-20, True), (-40, False)):
        begins = timedelta(days=days - 1)
        sign(proto, AUTHORITY.issue("mars", "mars.region.geofed", begins=begins, life=timedelta(days=1, hours=1)))
        if holds:
            verify(proto, HERE)
            continue
        with pytest.raises(GeofedError, match="ended long ago"):
            verify(proto, HERE)
