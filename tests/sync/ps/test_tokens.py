"""Workers' tokens: bound to their partition, good for a while, whatever the wall clock says."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from geofed_pb.errors import GeofedError
from sync.ps.tokens import MAX_TOKEN_LIFETIME, WorkerIdentity, new_key, sign, verify

WORKER = WorkerIdentity("job", "east", 2, 3, 4)


def _metadata(token: str) -> list[tuple[str, str | bytes]]:
    return [("authorization", f"Bearer {token}")]


@pytest.mark.parametrize("hours", [-1, 0, 1, 24 * 400])
def test_the_wall_clock_may_be_set_between_signing_and_verifying(monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    key = new_key()
    token = sign(WORKER, key, timedelta(minutes=1))
    then = time.time() + 3600 * hours
    monkeypatch.setattr(time, "time", lambda: then)
    assert verify(_metadata(token), key, "job", "east") == WORKER


@pytest.mark.parametrize(
    ("later", "says"),
    [(61.0, "expired"), (-MAX_TOKEN_LIFETIME.total_seconds(), "expired")],
    ids=["over", "another start"],
)
def test_a_token_is_good_for_its_life_only(monkeypatch: pytest.MonkeyPatch, later: float, says: str) -> None:
    key = new_key()
    token, then = sign(WORKER, key, timedelta(minutes=1)), time.monotonic() + later
    monkeypatch.setattr(time, "monotonic", lambda: then)
    with pytest.raises(GeofedError, match=says) as raised:
        verify(_metadata(token), key, "job", "east")
    assert raised.value.code == "UNAUTHENTICATED"


@pytest.mark.parametrize(
    ("key", "job", "code"), [("other", "job", "UNAUTHENTICATED"), ("own", "another", "FORBIDDEN")]
)  # fmt: skip
def test_a_token_is_good_for_its_partition_only(key: str, job: str, code: str) -> None:
    keys = {"own": new_key(), "other": new_key()}
    token = sign(WORKER, keys["own"], timedelta(minutes=1))
    with pytest.raises(GeofedError) as raised:
        verify(_metadata(token), keys[key], job, "east")
    assert raised.value.code == code
