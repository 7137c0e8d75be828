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


def _files(
    folder: Path, state: str = "succeeded", federation: str = "north", entries: tuple[dict[str, Any], ...] = ENTRIES
) -> list[str]:
    """Write a model, its statement and the log of the federation; return the command's arguments."""
    before, lines = GENESIS, [header_line(federation)]
    for seq, entry in enumerate(entries, start=1):
        text = json.dumps({"seq": seq, **entry})
        before = hash_of(before, text)
        lines.append(entry_line(text, before))
    head = Head.sign(KEY, len(entries), before, 1.0)
    (folder / "log").write_text("\n".join([*lines, head_line(head)]))
    statement = copy.deepcopy(STATEMENT)
    statement["subject"][0]["digest"]["sha256"] = DIGEST
    result, of_log = statement["predicate"]["runDetails"]["byproducts"]
    result["annotations"]["state"], of_log["annotations"] = state, asdict(head)
    (folder / "statement").write_text(sealed(KEY, statement))
    (folder / "model").write_bytes(MODEL)
    return ["audit", "verify-model", *(str(folder / name) for name in ("model", "statement")), "--log", f"{folder}/log"]


def test_model_statement_and_log_that_belong_together(tmp_path: Path) -> None:
    found = run_here(*_files(tmp_path), "--public-key", Head.sign(KEY, 0, GENESIS, 1.0).public_key.upper())
    assert (found.returncode, found.stderr) == (0, "")
    assert "job, round 3" in found.stdout


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
        ({"state": "failed"}, "tells another code or end of job job"),
        ({"entries": ({**ENTRIES[0], "code": "sha256:00"}, ENTRIES[1])}, "tells another code or end"),
        ({"entries": ENTRIES[1:]}, "tells another code or end"),
        ({"entries": ({**ENTRIES[0], "job": "other"}, ENTRIES[1])}, "tells another code or end"),
        ({"entries": (ENTRIES[0], {**ENTRIES[1], "model": None})}, "has no end of job job with this model"),
    ],
)
def test_a_log_that_tells_something_else(tmp_path: Path, wrong: dict[str, Any], text: str) -> None:
    found = run_here(*_files(tmp_path, **wrong))
    assert found.returncode == 8
    assert text in " ".join(found.stderr.split())
