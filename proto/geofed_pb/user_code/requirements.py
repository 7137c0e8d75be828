"""Requirements files of tasks: names of packages with versions, and nothing that leads an installer elsewhere."""

from __future__ import annotations

from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from geofed_pb.bounds import clean
from geofed_pb.errors import GeofedError

__all__ = ["LONGEST_FILE", "parse_requirements"]

LONGEST_FILE = 64 << 10
"""Bytes of a requirements file at most."""
_MOST = 200
"""Most requirements of a file."""
_HINT = "write one package on a line, such as scipy==1.14.1"


def parse_requirements(content: bytes, name: str) -> tuple[str, ...]:
    """Return the requirements of a file in a normal form, sorted.

    Raises ``GeofedError("TASK_INVALID")`` with the line that is none, or that names an option, a URL or a path.
    """
    if len(content) > LONGEST_FILE:
        raise GeofedError("TASK_INVALID", f"{name} is larger than {LONGEST_FILE >> 10} KiB", hint=_HINT)
    found: set[str] = set()
    for number, line in enumerate(content.decode("utf-8", errors="replace").splitlines(), start=1):
        text = line.partition(" #")[0].strip()
        if not text or text.startswith("#"):
            continue
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            raise GeofedError(
                "TASK_INVALID", f"{name}:{number}: {clean(text, 200)!r} names no package", hint=_HINT
            ) from None
        if requirement.url is not None:
            told = f"{name}:{number}: {requirement.name} is given by a URL; packages are installed by name"
            raise GeofedError("TASK_INVALID", told, hint=_HINT)
        # What follows "===" is any text: installers take it for a path, or put variables of their environment into it.
        if any(one.operator == "===" for one in requirement.specifier):
            told = f"{name}:{number}: {requirement.name} is given by ===; packages are installed by versions"
            raise GeofedError("TASK_INVALID", told, hint=_HINT)
        if requirement.marker is not None:
            try:
                requirement.marker.evaluate()
                Requirement(str(requirement))
            except (InvalidRequirement, InvalidVersion, SyntaxError, UndefinedComparison, UndefinedEnvironmentName):
                told = f"{name}:{number}: the condition of {requirement.name} cannot be evaluated"
                raise GeofedError("TASK_INVALID", told, hint=_HINT) from None
        requirement.name = canonicalize_name(requirement.name)
        found.add(str(requirement))
    if not found or len(found) > _MOST:
        told = f"{name} names no package" if not found else f"{name} has more than {_MOST} packages"
        raise GeofedError("TASK_INVALID", told, hint=_HINT)
    return tuple(sorted(found))
