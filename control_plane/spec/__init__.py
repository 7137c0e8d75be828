"""The job file: its schema, parsing it, and packing the code next to it."""

from datetime import timedelta
from typing import Any

from control_plane._durations import format_duration
from control_plane.spec._demand import batch_of, to_demand
from control_plane.spec._load import LoadedSpec, key_path, load, parse_json, parse_request, parse_text
from control_plane.spec._model import JobSpec
from control_plane.spec._pack import PackedTask, pack, packed_code_digest
from control_plane.spec._task import check_requirements, check_task
from control_plane.spec.sections import MOST_KEPT, StartsFrom
from geofed_pb.files import file_schema

__all__ = [
    "MOST_KEPT",
    "JobSpec",
    "LoadedSpec",
    "PackedTask",
    "StartsFrom",
    "batch_of",
    "check_requirements",
    "check_task",
    "json_schema",
    "key_path",
    "load",
    "pack",
    "packed_code_digest",
    "parse_json",
    "parse_request",
    "parse_text",
    "to_demand",
]


class _JobSchema(file_schema.FileSchema):
    """Generator of the job file's schema, in which durations are written as in the file."""

    def encode_default(self, dft: Any) -> Any:
        return format_duration(dft) if isinstance(dft, timedelta) else super().encode_default(dft)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the job file, for editors."""
    return file_schema.json_schema(JobSpec, "geofed training job", _JobSchema)
