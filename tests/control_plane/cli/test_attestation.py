"""`audit verify-model`: which model, statement and log belong together."""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support.commands import run_here

from geofed_pb.security.attestation import sealed
from geofed_pb.security.audit import GENESIS, Head, entry_line, hash_of, head_line, header_line
from tests.proto.test_attestation import KEY, STATEMENT

MODEL = b"the weights"
DIGEST = hashlib.sha256(MODEL).hexdigest()
ENTRIES = (
    {"kind": "job.submitted", "job": "job", "code": "sha256:" + "cd" * 32},
    {"kind": "job.ended", "job": "job", "state": "succeeded", "model": {"digest": f"sha256:{DIGEST}"}},
)


DATA = {"train": f"hmac-sha256:{'0a' * 32}"}
OF_REGION = (
    {"kind": "job.started", "job": "job", "code": "sha256:" + "cd" * 32},
    {"kind": "job.ended", "job": "job", "data": DATA},
)


def _log(entries: tuple[dict[str, Any], ...], federation: str, region: str = "") -> tuple[str, Head]:
    """Return a log and its head."""
    before, lines = GENESIS, [header_line(federation, region) if region else header_line(federation)]
    for seq, entry in enumerate(entries, start=1):
        text = json.dumps({"seq": seq, **entry})
        before = hash_of(before, text)
        lines.append(entry_line(text, before))
    head = Head.sign(KEY, len(entries), before, 1.0, region)
    return "\n".join([*lines, head_line(head, KEY, federation)]), head


def _files(
    folder: Path,
    state: str = "succeeded",
    federation: str = "north",
    entries: tuple[dict[str, Any], ...] = ENTRIES,
    *,
    of_region: tuple[dict[str, Any], ...] = OF_REGION,
    told: dict[str, Any] | None = None,
    has_head: bool = True,
) -> list[str]:
    """Write a model, its statement, the log of the federation and that of region oslo; return the command's arguments.

    ``told``: what the statement says of Oslo's data.
    """
    text, head = _log(entries, federation)
    (folder / "log").write_text(text)
    (folder / "oslo").write_text(_log(of_region, federation, "oslo")[0])
    # Signed when the job ended.
    _, before = _log(OF_REGION, federation, "oslo")
    statement = copy.deepcopy(STATEMENT)
    statement["subject"][0]["digest"]["sha256"] = DIGEST
    result, of_log = statement["predicate"]["runDetails"]["byproducts"]
    result["annotations"]["state"], of_log["annotations"] = state, asdict(head)
    result["annotations"]["regions"] = [{"name": "oslo", "data": DATA if told is None else told}]
    heads = {"name": "region-audit-heads", "annotations": {"oslo": asdict(before) if has_head else None}}
    statement["predicate"]["runDetails"]["byproducts"].append(heads)
    (folder / "statement").write_text(sealed(KEY, statement))
    (folder / "model").write_bytes(MODEL)
    return ["audit", "verify-model", *(str(folder / name) for name in ("model", "statement")), "--log", f"{folder}/log"]


def test_model_statement_and_log_that_belong_together(tmp_path: Path) -> None:
    found = run_here(*_files(tmp_path), "--public-key", Head.sign(KEY, 0, GENESIS, 1.0).public_key.upper())
    assert (found.returncode, found.stderr) == (0, "")
    assert "job, round 3" in found.stdout


def test_a_regions_own_log_tells_the_same_data(tmp_path: Path) -> None:
    later = {"kind": "job.started", "job": "other", "code": "sha256:00"}
    key = Head.sign(KEY, 0, GENESIS, 1.0).public_key
    argv = [
        *_files(tmp_path, of_region=(*OF_REGION, later)),
        "--public-key",
        key,
        "--region-log",
        str(tmp_path / "oslo"),
    ]
    found = run_here(*argv, "-o", "json")
    assert (found.returncode, found.stderr) == (0, "")
    told = json.loads(found.stdout)["data"]
    assert (told["data"], told["without_region_head"]) == ({"oslo": DATA}, [])


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"told": {"train": f"hmac-sha256:{'0b' * 32}"}}, "states other data of job job"),
        ({"told": {}}, "states other data of job job"),
        ({"has_head": False}, "job has no head of the log of region oslo"),
        ({"of_region": (OF_REGION[0], {**OF_REGION[1], "data": {}})}, "differs from what a witness"),
        ({"of_region": OF_REGION[:1]}, "are missing: a witness has received a head with them"),
    ],
)
def test_a_regions_log_that_tells_something_else(tmp_path: Path, wrong: dict[str, Any], text: str) -> None:
    found = run_here(*_files(tmp_path, **wrong), "--region-log", str(tmp_path / "oslo"))
    assert found.returncode == 8, found.stderr
    assert text in " ".join(found.stderr.split())


def test_a_statement_of_before_regions_told_their_data(tmp_path: Path) -> None:
    found = run_here(*_files(tmp_path, told={}, has_head=False), "-o", "json")
    assert found.returncode == 0, found.stderr
    told = json.loads(found.stdout)["data"]
    assert (told["data"], told["without_region_head"]) == ({"oslo": {}}, ["oslo"])


def test_who_has_signed_must_be_known_from_elsewhere(tmp_path: Path) -> None:
    found = run_here(*_files(tmp_path))
    assert found.returncode == 0
    assert "anybody may have signed this, and have made the log" in found.stderr


def test_a_job_that_has_failed_is_told(tmp_path: Path) -> None:
    ended = {**ENTRIES[1], "state": "failed"}
    found = run_here(*_files(tmp_path, "failed", entries=(ENTRIES[0], ended)))
    assert (found.returncode, "warning: job job has not succeeded, it was failed" in found.stderr) == (0, True)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"federation": "south"}, "is of federation south, job of north"),
        ({"state": "failed"}, "states another code or end of job job"),
        ({"entries": ({**ENTRIES[0], "code": "sha256:00"}, ENTRIES[1])}, "states another code or end"),
        ({"entries": ENTRIES[1:]}, "states another code or end"),
        ({"entries": ({**ENTRIES[0], "job": "other"}, ENTRIES[1])}, "states another code or end"),
        ({"entries": (ENTRIES[0], {**ENTRIES[1], "model": None})}, "has no end of job job with this model"),
    ],
)
def test_a_log_that_tells_something_else(tmp_path: Path, wrong: dict[str, Any], text: str) -> None:
    found = run_here(*_files(tmp_path, **wrong))
    assert found.returncode == 8
    assert text in " ".join(found.stderr.split())
