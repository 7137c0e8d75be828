"""Secrets of functions: those for a task's code, `geofed.secret`, and variables with secret values.

Function platforms give them as files.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from geofed_pb.bounds import SECRET_NAME
from geofed_pb.errors import GeofedError

__all__ = ["FILES_VARIABLE", "OWN_PREFIX", "VARIABLES_VARIABLE", "secret", "set_secret_variables"]

_FOLDER = "/var/openfaas/secrets"
"""Where OpenFaaS puts them; the variable names another folder, as in the embedded gateway's sandbox."""
_VARIABLE = "OPENFAAS_SECRETS"
FILES_VARIABLE = "GEOFED_SECRETS"
"""Names a file for each secret whose file is not named as the secret, as JSON."""
VARIABLES_VARIABLE = "GEOFED_SECRET_VARIABLES"
"""Names the file of the value for each environment variable whose value is a secret, as JSON."""
OWN_PREFIX = "geofed-"
"""Beginning of the names of secrets that are not the region's, but geofed's own."""


def secret(name: str) -> str:
    """Return a secret of the region that the job file names in `task.secrets`, without white space at its ends.

    In a plain process it is the file of that name in the folder that the variable OPENFAAS_SECRETS names.

    Raises ``LookupError``.
    """
    if re.fullmatch(SECRET_NAME, name):
        files: dict[str, str] = json.loads(os.environ.get(FILES_VARIABLE, "{}"))
        if (value := _read(files.get(name, name))) is not None:
            return value
    raise LookupError(f"this task has no secret {name!r}: add it to task.secrets of the job file")


def set_secret_variables() -> None:
    """Set the environment variables whose values the platform gives as secrets, so that no specification has them.

    Raises ``GeofedError("SECRET_MISSING")``.
    """
    files: dict[str, str] = json.loads(os.environ.get(VARIABLES_VARIABLE, "{}"))
    for variable, file in files.items():
        if (value := _read(file)) is None:
            raise GeofedError("SECRET_MISSING", f"this function has no value of {variable}")
        os.environ[variable] = value
    os.environ.pop(VARIABLES_VARIABLE, None)


def _read(name: str) -> str | None:
    for folder in (os.environ.get(_VARIABLE), _FOLDER):
        if folder and (file := Path(folder) / name).is_file():
            return file.read_text().strip()
    return None
