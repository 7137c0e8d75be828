"""The job file: its schema, parsing it, and packing the code next to it."""

from typing import Any

from control_plane.spec._demand import to_demand
from control_plane.spec._load import LoadedSpec, load, parse_json, parse_request
from control_plane.spec._model import JobSpec
from control_plane.spec._pack import MAX_BUNDLE_BYTES, pack, packed_code_digest
from control_plane.spec._task import check_task

__all__ = [
    "MAX_BUNDLE_BYTES",
    "JobSpec",
    "LoadedSpec",
    "check_task",
    "json_schema",
    "load",
    "pack",
    "packed_code_digest",
    "parse_json",
    "parse_request",
    "to_demand",
]


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the job file, for editors."""
    schema = JobSpec.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "geofed training job", **schema}
