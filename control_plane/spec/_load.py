"""Load and validate a job file, and report each error with its line."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from control_plane._advanced import ADVANCED, SECTION, moved_path
from control_plane._safetensors import check_weights
from control_plane.spec._model import JobSpec
from control_plane.spec._pack import code_digest
from control_plane.spec.sections._base import STORED
from geofed_pb.errors import GeofedError
from geofed_pb.files import strict_yaml

MAX_FILE_BYTES = 1 << 20
"""Limit of a job file's size, and of its normalised form."""
_HINT = "correct the job file; `geofed schema` prints its JSON Schema"
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
    weights: Mapping[str, Path] = field(default_factory=dict)
    """Files of `train.initialModel` by their digests, by which `json` names them."""
    warnings: tuple[str, ...] = ()
    """Lines about keys at places where files should not have them any more."""

    @property
    def code_digest(self) -> str:
        """ "sha256:<hex>" of the code files in the job file's folder."""
        return code_digest(self.folder)


def load(path: Path, overrides: Sequence[str] = ()) -> LoadedSpec:
    """Read and validate a job file; `overrides` such as ``a.b=c`` replace keys of the file.

    Raises ``GeofedError``: SPEC_NOT_FOUND, or SPEC_INVALID with one line for each error.
    """
    folder = path.resolve().parent
    spec, warnings = parse_text(_read(path), str(path), overrides)
    spec, weights = _with_weights(spec, folder)
    text = spec.to_json()
    return LoadedSpec(spec, text, folder, f"sha256:{hashlib.sha256(text.encode()).hexdigest()}", weights, warnings)


def parse_text(text: str, name: str, overrides: Sequence[str] = ()) -> tuple[JobSpec, tuple[str, ...]]:
    """Validate the text of a job file, which errors call ``name``; no file is read. Return it, and its warnings.

    Raises ``GeofedError("SPEC_INVALID")`` with one line for each error.
    """
    try:
        document = strict_yaml.parse(text, name)
        origins: dict[strict_yaml.Path, str] = {}
        warnings: tuple[str, ...] = ()
        if isinstance(document.value, dict):
            _normalise_spellings(document)
            warnings = _move_to_advanced(document)
            origins = _override(document.value, overrides)
        return strict_yaml.validate(JobSpec, document, origins), warnings
    except strict_yaml.InvalidYaml as error:
        raise _invalid(error) from None


def _with_weights(spec: JobSpec, folder: Path) -> tuple[JobSpec, dict[str, Path]]:
    """Check the files that a job starts from, if there are any, and put their names and digests into the spec; return
    their paths by digest, too. Reads the whole files. Raises ``GeofedError("SPEC_INVALID")``."""
    initial, found = spec.train.initial_model, dict[str, Path]()
    if initial is None:
        return spec, found
    adapter = initial.adapter
    if initial.file is not None:
        path, digest = _checked(folder / initial.file, initial.digest, "file")
        initial, found[digest] = initial.model_copy(update={"file": path.name, "digest": digest}), path.resolve()
    if adapter is not None:
        path, digest = _checked(folder / adapter.file, adapter.digest, "adapter.file")
        adapter, found[digest] = adapter.model_copy(update={"file": path.name, "digest": digest}), path.resolve()
    train = spec.train.model_copy(update={"initial_model": initial.model_copy(update={"adapter": adapter})})
    return spec.model_copy(update={"train": train}), found


def _checked(path: Path, stated: str | None, key: str) -> tuple[Path, str]:
    """Return the path of a file of weights, and its digest, which must be the stated one, if any."""
    try:
        check_weights(path)
        with path.open("rb") as file:
            digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    except OSError as error:
        raise _wrong_weights(key, f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise _wrong_weights(key, f"{path} is no file of safetensors: {error}") from None
    if stated not in (None, digest):
        raise _wrong_weights(key, f"{path} has the digest {digest}, not {stated}")
    return path, digest


def _wrong_weights(key: str, text: str) -> GeofedError:
    return GeofedError("SPEC_INVALID", f"train.initialModel.{key}: {text}", hint="name a whole .safetensors file")


def parse_json(text: str, *, stored: bool = False) -> JobSpec:
    """Parse the normalised form. Raises ``GeofedError("SPEC_INVALID")``.

    ``stored``: of a job that an earlier version may have admitted; what only later ones refuse is no error.
    """
    try:
        return JobSpec.model_validate_json(text, context=STORED if stored else None)
    except ValidationError as error:
        text = strict_yaml.explain(error, JobSpec, strict_yaml.Document("job"), {})
        raise GeofedError("SPEC_INVALID", text, hint=_HINT) from None


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


def _normalise_spellings(document: strict_yaml.Document) -> None:
    """Rename keys in another spelling, with their positions, unless both spellings are given."""
    for (section, other), key in _SPELLINGS.items():
        held = document.value.get(section)
        if isinstance(held, dict) and other in held and key not in held:
            held[key] = held.pop(other)
            document.move((section, other), (section, key))


def _move_to_advanced(document: strict_yaml.Document) -> tuple[str, ...]:
    """Move keys that are below `advanced` now, with their positions; return a warning for each that was elsewhere.

    Raises ``InvalidYaml`` for keys that are at both places.
    """
    if document.value.get(SECTION, {}) is None:
        # The mapping that a user has left empty.
        document.value[SECTION] = {}
    old = [key for key in document.value if key in ADVANCED]
    section = document.value.setdefault(SECTION, {}) if old else None
    if not isinstance(section, dict):
        return ()
    twice = [key for key in old if key in section]
    if twice:
        lines = {key: document.line((SECTION, key)) for key in twice}
        texts = {key: f"`{key}` is also given as `{SECTION}.{key}`, in line {lines[key]}; keep one" for key in twice}
        raise strict_yaml.InvalidYaml("\n".join(document.error_at_key((key,), text) for key, text in texts.items()))
    warnings = [document.error_at_key((key,), f"`{key}` is `{SECTION}.{key}` now; move it there") for key in old]
    for key in old:
        section[key] = document.value.pop(key)
        document.move((key,), moved_path((key,)))
    return tuple(warnings)


def key_path(dotted: str) -> tuple[str, ...]:
    """Return the place in the file of a key as users name it: keys below `advanced` also without it, and in every
    spelling."""
    keys = moved_path(tuple(dotted.split(".")))
    return (*keys[:-1], _SPELLINGS.get(keys, keys[-1]))


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


def _override(root: dict[str, Any], overrides: Sequence[str]) -> dict[strict_yaml.Path, str]:
    """Write the overrides into `root`; return by path the override that has set it. Keys below `advanced` may be named
    without it: options are typed, and such names are not ambiguous."""
    origins: dict[strict_yaml.Path, dict[tuple[str, ...], str]] = {}
    forms: dict[tuple[str, ...], str] = {}
    for override in overrides:
        dotted, equals, text = override.partition("=")
        keys = key_path(dotted)
        if not equals or not all(keys):
            raise GeofedError("SPEC_INVALID", f"--set {override}: write it as key.key=value")
        if (form := forms.setdefault(keys, dotted)) != dotted:
            raise GeofedError("SPEC_INVALID", f"--set {override}: {form} is the same key, and is set as well; keep one")
        section = root
        for depth, key in enumerate(keys[:-1], start=1):
            below = section.setdefault(key, {})
            if not isinstance(below, dict):
                raise GeofedError("SPEC_INVALID", f"--set {override}: {'.'.join(keys[:depth])} has no keys")
            section = below
        section[keys[-1]] = strict_yaml.scalar(text)
        for depth in range(1, len(keys) + 1):
            # What is wrong with a section may be in any of those that set something of it.
            origins.setdefault(keys[:depth], {})[keys] = f"--set {override}"
    return {path: " ".join(given.values()) for path, given in origins.items()}


def _invalid(error: strict_yaml.InvalidYaml) -> GeofedError:
    return GeofedError("SPEC_INVALID", str(error), hint=_HINT)
