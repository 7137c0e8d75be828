"""Load and validate a job file, and report each error with its line."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from control_plane.spec import _yaml
from control_plane.spec._model import JobSpec
from control_plane.spec._pack import code_digest
from control_plane.spec._yaml import Document, Position, Problem
from geofed_pb.errors import GeofedError

MAX_FILE_BYTES = 1 << 20
"""Limit of a job file's size, and of its normalised form."""
_HINT = "correct the job file; `control-plane schema` prints its JSON Schema"
_SPELLINGS = {("objective", "minimize"): "minimise"}
"""Keys that have another spelling in the normalised form."""


@dataclass(frozen=True)
class LoadedSpec:
    """A job file that has passed all checks that do not need a control plane."""

    spec: JobSpec
    json: str
    """The normalised form, which is submitted."""
    folder: Path
    """Folder of the job file, which is packed with the task module."""
    digest: str
    """"sha256:<hex>" of `json`."""

    @property
    def code_digest(self) -> str:
        """ "sha256:<hex>" of the code files in the job file's folder."""
        return code_digest(self.folder)


def load(path: Path, overrides: Sequence[str] = ()) -> LoadedSpec:
    """Read and validate a job file; `overrides` such as ``a.b=c`` replace keys of the file.

    Raises ``GeofedError``: SPEC_NOT_FOUND, or SPEC_INVALID with one line for each error.
    """
    document = _yaml.parse(_read(path))
    if not document.problems and not isinstance(document.value, dict):
        document.problems.append(Problem(Position(1, 1), "a job file must be a mapping that begins with apiVersion"))
    if document.problems:
        raise _invalid([_line(str(path), problem) for problem in document.problems])
    _normalise_spellings(document)
    origins = _override(document.value, overrides)
    try:
        spec = JobSpec.model_validate(document.value)
    except ValidationError as error:
        raise _invalid(_explain(error, str(path), document, origins)) from None
    text = spec.to_json()
    return LoadedSpec(spec, text, path.resolve().parent, f"sha256:{hashlib.sha256(text.encode()).hexdigest()}")


def parse_json(text: str) -> JobSpec:
    """Parse the normalised form. Raises ``GeofedError("SPEC_INVALID")``."""
    try:
        return JobSpec.model_validate_json(text)
    except ValidationError as error:
        raise _invalid(_explain(error, "job", Document(None, {}, {}, []), {})) from None


def parse_request(text: str) -> JobSpec:
    """Parse the normalised form in a client's request.

    Raises ``GeofedError``: SPEC_INVALID; LIMIT_EXCEEDED if it is too large, since agents receive a part of it in one
    message.
    """
    if (length := len(text.encode())) > MAX_FILE_BYTES:
        hint = "make task.config smaller: put large values into a file next to the task module"
        text = f"the job file has {length:,} bytes and exceeds the limit of {MAX_FILE_BYTES:,}"
        raise GeofedError("LIMIT_EXCEEDED", text, hint=hint)
    return parse_json(text)


def _normalise_spellings(document: Document) -> None:
    """Rename keys in another spelling, with their positions, unless both spellings are given."""
    for (section, other), key in _SPELLINGS.items():
        held = document.value.get(section)
        if isinstance(held, dict) and other in held and key not in held:
            held[key] = held.pop(other)
            for positions in (document.values, document.keys):
                if (section, other) in positions:
                    positions[section, key] = positions.pop((section, other))


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise GeofedError("SPEC_INVALID", f"{path} is larger than {MAX_FILE_BYTES} bytes; is it a job file?")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise GeofedError("SPEC_NOT_FOUND", f"job file {path} not found") from None
    except UnicodeDecodeError:
        raise GeofedError("SPEC_INVALID", f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise GeofedError("SPEC_NOT_FOUND", f"cannot read {path}: {error.strerror}") from None


def _override(root: dict[str, Any], overrides: Sequence[str]) -> dict[_yaml.Path, str]:
    """Write the overrides into `root`; return by path the override that has set it."""
    origins: dict[_yaml.Path, str] = {}
    for override in overrides:
        dotted, equals, text = override.partition("=")
        keys = dotted.split(".")
        if tuple(keys) in _SPELLINGS:
            keys[-1] = _SPELLINGS[keys[0], keys[-1]]
        if not equals or not all(keys):
            raise GeofedError("SPEC_INVALID", f"--set {override}: write it as key.key=value")
        section = root
        for depth, key in enumerate(keys[:-1], start=1):
            below = section.setdefault(key, {})
            if not isinstance(below, dict):
                raise GeofedError("SPEC_INVALID", f"--set {override}: {'.'.join(keys[:depth])} has no keys")
            section = below
        section[keys[-1]] = _yaml.scalar(text)
        for depth in range(1, len(keys) + 1):
            origins[tuple(keys[:depth])] = f"--set {override}"
    return origins


def _explain(error: ValidationError, source: str, document: Document, origins: dict[_yaml.Path, str]) -> list[str]:
    lines = []
    problems = []
    for found in error.errors(include_url=False):
        path = found["loc"]
        text = _sentence(path, found)
        if path in origins:
            lines.append(f"{origins[path]}: {text}")
        else:
            problems.append(Problem(_position_of(path, found["type"], document), text))
    nowhere = Position(0, 0)
    problems.sort(key=lambda problem: ((problem.position or nowhere).line, (problem.position or nowhere).column))
    return [_line(source, problem) for problem in problems] + lines


def _sentence(path: _yaml.Path, found: Any) -> str:
    dotted = ".".join(map(str, path))
    where = ".".join(map(str, path[:-1])) or "the job file"
    if found["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(path[-1]), _keys_at(path[:-1]), n=1, cutoff=0.5)
        text = f"unknown key `{path[-1]}` in {where}"
        return f"{text}; did you mean `{near[0]}`?" if near else f"{text}; valid keys: {', '.join(_keys_at(path[:-1]))}"
    if found["type"] == "missing":
        return f"`{dotted}` is required"
    if found["type"] == "literal_error":
        near = difflib.get_close_matches(str(found["input"]), _words(found["ctx"]["expected"]), n=1, cutoff=0.5)
        suggestion = f"; did you mean {near[0]}?" if near else ""
        return f"`{dotted}` must be {found['ctx']['expected']}, not {found['input']!r}{suggestion}"
    if found["type"] == "string_pattern_mismatch":
        return f"`{dotted}` must be a DNS label (lower-case letters, digits, hyphens), not {found['input']!r}"
    if found["type"] == "string_type" and isinstance(found["input"], int | float):
        return f"`{dotted}` must be a string, but {found['input']!r} is a {_kind(found['input'])}: put it in quotes"
    if found["type"] in ("model_type", "model_attributes_type", "dict_type") and dotted:
        keys = ", ".join(_keys_at(path))
        return f"`{dotted}` must be a mapping" + (f" with the keys {keys}" if keys else "")
    message = found["msg"].removeprefix("Value error, ")
    return f"`{dotted}`: {message[:1].lower()}{message[1:]}" if dotted else message


def _kind(value: Any) -> str:
    return "boolean" if isinstance(value, bool) else "number"


def _words(expected: str) -> list[str]:
    return [word.strip("' ") for word in expected.replace(" or ", ",").split(",")]


def _keys_at(path: _yaml.Path) -> list[str]:
    model: type[BaseModel] | None = JobSpec
    for key in path:
        if model is None:
            return []
        field = next((f for f in model.model_fields.values() if f.alias == key), None)
        model = _model_in(field.annotation) if field else None
    return [str(field.alias) for field in model.model_fields.values()] if model else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)


def _position_of(path: _yaml.Path, kind: str, document: Document) -> Position | None:
    if kind == "extra_forbidden" and path in document.keys:
        return document.keys[path]
    for end in range(len(path), -1, -1):
        if path[:end] in document.values:
            known = document.keys if kind == "missing" and path[:end] in document.keys else document.values
            return known[path[:end]]
    return None


def _line(source: str, problem: Problem) -> str:
    if problem.position is None:
        return f"{source}: {problem.text}"
    return f"{source}:{problem.position.line}:{problem.position.column}: {problem.text}"


def _invalid(lines: list[str]) -> GeofedError:
    return GeofedError("SPEC_INVALID", "\n".join(lines), hint=_HINT)
