"""Secrets for a task's code: `geofed.secret`. Function platforms give them as files."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from geofed_pb.bounds import SECRET_NAME

__all__ = ["FILES_VARIABLE", "secret"]

_FOLDER = "/var/openfaas/secrets"
"""Where OpenFaaS puts them; the variable names another folder, as in the embedded gateway's sandbox."""
_VARIABLE = "OPENFAAS_SECRETS"
FILES_VARIABLE = "GEOFED_SECRETS"
"""Names a file for each secret whose file is not named as the secret, as JSON."""


def secret(name: str) -> str:
    """Return a secret of the region that the job file names in `task.secrets`, without white space at its ends.

    In a plain process it is the file of that name in the folder that the variable OPENFAAS_SECRETS names.

    Raises ``LookupError``.
    """
    if re.fullmatch(SECRET_NAME, name):
        files: dict[str, str] = json.loads(os.environ.get(FILES_VARIABLE, "{}"))
        for folder in (os.environ.get(_VARIABLE), _FOLDER):
            if folder and (file := Path(folder) / files.get(name, name)).is_file():
                return file.read_text().strip()
    raise LookupError(f"this task has no secret {name!r}: add it to task.secrets of the job file")
