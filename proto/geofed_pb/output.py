"""What a command prints has arrived, or the command says why not."""

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
    """Around a whole command: at its end all that it printed is written.

    Raises ``GeofedError("DISK_FULL")`` where there is no space for it, also for a file that the command writes, and
    ``SystemExit`` where nobody reads it.
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
    """What to raise for an error of writing; after it nothing more is written to standard output."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    if error.filename is not None:
        return GeofedError("DISK_FULL", f"no space left for {error.filename}") if full else error
    if full or isinstance(error, BrokenPipeError):
        # Else the interpreter would try again at its end.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        # `| head` has what it wanted.
        return SystemExit(int(Exit.CLOSED_PIPE))
    hint = "send standard output elsewhere; what the command has done stands"
    return GeofedError("DISK_FULL", "no space left for standard output", hint=hint) if full else error
