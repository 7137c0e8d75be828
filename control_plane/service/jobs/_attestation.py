"""Where a job's models come from, as a statement that the control plane signs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from control_plane._view import time_text
from control_plane.store import JobRow
from geofed_pb.errors import GeofedError
from geofed_pb.security.attestation import FEDERATION, PREDICATE, REGION_HEADS, STATEMENT, data_name
from geofed_pb.security.audit import Head

__all__ = ["statement_of"]

_BUILD = "urn:geofed:job:v1"
"""Kind of the build, in SLSA's words; docs/audit.md describes it."""


def statement_of(row: JobRow, federation: str, head: Head, region_heads: Mapping[str, Any]) -> dict[str, Any]:
    """Return the provenance of an ended job's models: what they were made of, by whom, and how.

    Args:
        head: of the audit log, signed after the job's end.
        region_heads: the last head of each region's own audit log that the region has reported with the job.

    Raises ``GeofedError``: ILLEGAL_STATE if the job has not ended, MODEL_NOT_FOUND if it has no model.
    """
    if not row.result_json:
        text = f"job {row.id} has not ended"
        raise GeofedError("ILLEGAL_STATE", text, hint=f"wait for it with `geofed wait {row.id}`")
    result, spec = json.loads(row.result_json), json.loads(row.spec_json)
    rounds: dict[str, list[str]] = {}
    for one in result["models"]:
        if one["digest"]:
            rounds.setdefault(one["digest"], []).append(str(one["round"]))
    models = {digest: f"{row.id}, round {', '.join(those)}" for digest, those in rounds.items()}
    if result["model"] is not None:
        models.setdefault(result["model"]["digest"], row.id)
    if not models:
        raise GeofedError("MODEL_NOT_FOUND", f"job {row.id} has no model")
    regions = [part["name"] for part in result["regions"]]
    return {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": _digest(digest)} for digest, name in models.items()],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": _BUILD,
                "externalParameters": {"spec": spec, "user": row.user or "operator"},
                "internalParameters": {
                    "plan": {"sha256": hashlib.sha256(row.plan_json.encode()).hexdigest()},
                    "residency": result["residency"],
                },
                "resolvedDependencies": _made_of(row, spec, result),
            },
            "runDetails": {
                "builder": {"id": f"{FEDERATION}{federation}", "version": {"geofed": version("geofed")}},
                "metadata": {
                    "invocationId": row.id,
                    "startedOn": time_text(row.created_at),
                    "finishedOn": time_text(row.ended_at),
                },
                "byproducts": [
                    {"name": "result", "annotations": result},
                    {"name": "audit-head", "annotations": asdict(head)},
                    {"name": REGION_HEADS, "annotations": {name: region_heads.get(name) for name in regions}},
                ],
            },
        },
    }


def _made_of(row: JobRow, spec: dict[str, Any], result: dict[str, Any]) -> list[dict[str, Any]]:
    dataset, initial = spec["data"]["dataset"], result["initial_model"]
    found: list[dict[str, Any]] = [{"name": "code", "digest": _digest(row.bundle_digest)}]
    if initial is not None:
        found.append({"name": "initial model", "digest": _digest(initial["digest"]), "annotations": initial})
        if initial.get("adapter"):
            found.append({"name": "initial adapter", "digest": _digest(initial["adapter"])})
    for part in result["regions"]:
        facts = {name: part[name] for name in ("samples", "steps", "privacy")}
        # Results of earlier versions have no digests.
        digests, uri = part.get("data", {}), f"urn:geofed:{part['name']}:{dataset}"
        train = {"digest": _digest(digests["train"])} if "train" in digests else {}
        found.append({"name": data_name(part["name"]), "uri": uri, **train, "annotations": facts})
        found += [
            {"name": data_name(part["name"], split), "uri": f"{uri}:{split}", "digest": _digest(digest)}
            for split, digest in sorted(digests.items())
            if split != "train"
        ]
    return found


def _digest(text: str) -> dict[str, str]:
    algorithm, _, value = text.rpartition(":")
    return {algorithm or "sha256": value}
