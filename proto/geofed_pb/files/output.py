"""Errors of writing a command's output: it is complete, or the command fails with an error."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator

from geofed_pb.errors import Exit, GeofedError

__all__ = ["output_failure", "written_out"]


@contextlib.contextmanager
def written_out() -> Iterator[None]:
    """Context of a whole command that flushes its output at the end.

    Raises ``GeofedError("DISK_FULL")`` if there is no space for it, or for a file that the command writes, and
    ``SystemExit`` if the reader has closed the pipe.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        raise output_failure(error) from None


def output_failure(error: OSError) -> BaseException:
    """Return the exception to raise for a write error; afterwards nothing more is written to standard output."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    if error.filename is not None:
        return GeofedError("DISK_FULL", f"no space left for {error.filename}") if full else error
    if full or isinstance(error, BrokenPipeError):
        # Otherwise the interpreter would flush again at its end.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        # The reader, such as `head`, has read enough.
        return SystemExit(int(Exit.CLOSED_PIPE))
    hint = "redirect standard output elsewhere; the command's effects are not undone"
    return GeofedError("DISK_FULL", "no space left for standard output", hint=hint) if full else error
