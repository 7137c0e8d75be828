"""`schema`, `version` and `completion`: information about the command itself."""

from __future__ import annotations

import json
import platform
from enum import StrEnum
from typing import Annotated

import typer

from control_plane.cli._options import Output
from control_plane.cli._output import emit
from control_plane.cli._settings import Format


def complete_variable(program: str) -> str:
    """Return the environment variable with which a shell asks for completions, as Typer derives it."""
    return f"_{program.replace('-', '_').upper()}_COMPLETE"


class Shell(StrEnum):
    """Shells that have a completion script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


class Kind(StrEnum):
    """Files that have a schema."""

    JOB = "job"


def schema(
    kind: Annotated[Kind, typer.Argument(help="Kind of file.")] = Kind.JOB, output: Output = Format.TABLE
) -> None:
    """Print the JSON Schema of the job file."""
    from control_plane.spec import json_schema

    emit(json_schema(), table=lambda data: json.dumps(data, indent=2), name=lambda data: str(data["title"]))


def version(output: Output = Format.TABLE) -> None:
    """Print the version."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        number = installed("geofed")
    except PackageNotFoundError:
        number = "0"
    data = {"version": number, "python": platform.python_version()}
    emit(data, table=lambda shown: str(shown["version"]), name=lambda shown: str(shown["version"]))


def completion(
    context: typer.Context,
    shell: Annotated[Shell, typer.Argument(help="Shell to write the script for.", show_default=False)],
) -> None:
    """Print a shell completion script; use it by source <(geofed completion bash)."""
    # Typer's option --show-completion prints the script of the shell that it finds itself in, of no other.
    from typer._completion_shared import get_completion_script

    program = str(context.find_root().info_name)
    script = get_completion_script(prog_name=program, complete_var=complete_variable(program), shell=shell.value)
    print(script)
