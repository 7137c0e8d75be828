"""The heads of the audit log that a region keeps: none displaces another, and damage takes no more than it must."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from geofed_pb.security.audit import Head, hash_of
from region_agent.link.audit_heads import WitnessFile

KEY = Ed25519PrivateKey.generate()


def head(seq: int, chain: str = "true", key: Ed25519PrivateKey = KEY) -> dict[str, object]:
    return asdict(Head.sign(key, seq, hash_of(chain, str(seq)), float(seq)))


def kept(path: Path) -> list[int]:
    return [json.loads(line)["seq"] for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_a_flood_of_heads_displaces_no_earlier_one(tmp_path: Path) -> None:
    now = [0.0]
    path = tmp_path / "identity" / "heads"
    witness = WitnessFile(path, lambda: now[0])
    for hour, seq in enumerate((10, 50, 100)):
        now[0] = 3600.0 * hour
        assert witness.add(head(seq)) == ""
    for seq in range(101, 401):
        now[0] += 1.0
        assert witness.add(head(seq)) == ""
    assert kept(path) == [10, 50, 100, 400]
    now[0] += 3600.0
    witness.add(head(401))
    assert WitnessFile(path, lambda: now[0]).add(head(401)) == "", "the last one again"
    assert kept(path) == [10, 50, 100, 400, 401]


def test_a_head_that_contradicts_earlier_ones_is_told_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "heads"
    witness = WitnessFile(path, lambda: 5.0)
    for seq in (1, 2, 3):
        assert witness.add(head(seq)) == ""
    assert kept(path) == [1, 3]
    assert "restored from a backup, or rewritten" in witness.add(head(3, "other"))
    assert "restored from a backup, or rewritten" in witness.add(head(2))
    assert "another key" in witness.add(head(9, key=Ed25519PrivateKey.generate()))
    assert kept(path) == [1, 3, 3, 2, 9]
    assert "no valid head" in witness.add({**head(10), "hash": "0" * 64})
    assert kept(path) == [1, 3, 3, 2, 9]


def test_an_interrupted_write_takes_one_head_and_damage_is_kept_aside(tmp_path: Path) -> None:
    path, now = tmp_path / "heads", [0.0]
    witness = WitnessFile(path, lambda: now[0])
    for seq in (1, 2, 3):
        now[0] += 3600.0
        witness.add(head(seq))
    path.write_bytes(path.read_bytes()[:-20])
    witness = WitnessFile(path, lambda: now[0])
    assert (witness.damage, kept(path)) == ("", [1, 2])
    lines = path.read_text().splitlines()
    path.write_text(f"{lines[0][:40]}\n{lines[1]}\n")
    witness = WitnessFile(path, lambda: now[0])
    assert "1 heads of the audit log" in witness.damage
    assert kept(path) == [2]
    assert (tmp_path / f"heads.damaged-{int(now[0])}").exists()
