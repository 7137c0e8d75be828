"""JSON Schemas of the files that users write."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

__all__ = ["FileSchema", "json_schema"]


class FileSchema(GenerateJsonSchema):
    """Generator of a file's schema. Keys have no titles, which would only repeat their names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Return False for every key."""
        return False


def json_schema(model: type[BaseModel], title: str, generator: type[FileSchema] = FileSchema) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a file that a model describes, with keys as in the file."""
    schema = model.model_json_schema(schema_generator=generator)
    return {"$schema": generator.schema_dialect, **schema, "title": title}
