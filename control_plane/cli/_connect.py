"""Connect a command to the control plane."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from control_plane.cli._output import say
from control_plane.cli._settings import can_ask
from geofed_pb.errors import Exit, GeofedError

if TYPE_CHECKING:
    from control_plane.client import ControlClient

_T = TypeVar("_T")
_CANCEL_INTERVAL_SECONDS = 0.5
"""Time between two attempts to cancel a request after Ctrl-C."""
LOCAL_CONTEXT = Path(".geofed/control-plane/context.json")
"""Context file that `geofed serve` writes with its default state directory."""


def find_context(given: Path | None) -> Path:
    """Return the context file: the one given by option or environment, as a file or by its name, else this folder's,
    else the current one, else the user's.

    Raises ``GeofedError("UNAVAILABLE")`` if there is none.
    """
    if given is not None:
        return given if given.is_file() else named_contexts().get(str(given), given)
    for path in (LOCAL_CONTEXT, current_context(), _user_folder() / "context.json"):
        if path.is_file():
            return path
    raise GeofedError(
        "UNAVAILABLE",
        f"no context file found: neither {LOCAL_CONTEXT} nor {_user_folder() / 'context.json'} exists, and "
        "`geofed context list` has none",
        hint="start a control plane with `geofed serve`, or pass its context.json by --context or GEOFED_CONTEXT",
    )


def _user_folder() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "geofed"


def contexts_folder() -> Path:
    """Return the folder of the contexts that have a name."""
    return _user_folder() / "contexts"


def credentials_folder() -> Path:
    """Return the folder of what sign-ins have brought, by the name of their contexts."""
    return _user_folder() / "credentials"


def current_context() -> Path:
    """Return the link to the context that `context use` has chosen; it exists only if one was."""
    return _user_folder() / "current-context.json"


def named_contexts() -> dict[str, Path]:
    """Return the files of the contexts by their names."""
    return {path.stem: path for path in contexts_folder().glob("*.json")}


def complete_context(incomplete: str) -> list[str]:
    """Return names of contexts for the shell's completion."""
    return sorted(name for name in named_contexts() if name.startswith(incomplete))


def ask_control_plane(given: Path | None, request: Callable[[ControlClient], Awaitable[_T]], *, detach: str = "") -> _T:
    """Connect to the control plane and return what `request` returns.

    Ctrl-C prints `detach` and exits with status 130.
    """
    import asyncio

    from control_plane.client import Context, ControlClient

    async def connected() -> _T:
        with _cancelled_by_ctrl_c():
            async with ControlClient.connect(Context.load(find_context(given))) as client:
                return await request(client)

    try:
        return asyncio.run(connected())
    except (KeyboardInterrupt, asyncio.CancelledError):
        say(f"\n{detach}" if detach else "")
        raise SystemExit(int(Exit.INTERRUPTED)) from None


@contextmanager
def _cancelled_by_ctrl_c() -> Iterator[None]:
    """Have Ctrl-C cancel the current task, repeatedly until it ends: a task that is cancelled just as a reply arrives
    may miss the first cancellation."""
    import asyncio

    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # The command was started with SIGINT ignored: in the background of a script, or under nohup.
        yield
        return
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    again: asyncio.TimerHandle | None = None

    def interrupt() -> None:
        nonlocal again
        task.cancel()
        again = loop.call_later(_CANCEL_INTERVAL_SECONDS, interrupt)

    try:
        loop.add_signal_handler(signal.SIGINT, interrupt)
    except (NotImplementedError, RuntimeError, ValueError):
        # Signal handlers work only in the main thread and not on every system; asyncio's default handling remains.
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        if again is not None:
            again.cancel()


def confirm(question: str, *, yes: bool) -> None:
    """Ask the user to confirm an action that cannot be undone; return only if the answer is yes.

    Raises ``GeofedError("USAGE")`` if the answer is no, or if there is no terminal to ask on.
    """
    if yes:
        return
    if not can_ask():
        raise GeofedError("USAGE", f"{question} Cannot ask: no terminal, or --no-input.", hint="add --yes")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    try:
        answer = sys.stdin.readline()
    except KeyboardInterrupt:
        raise SystemExit(int(Exit.INTERRUPTED)) from None
    if answer.strip().lower() not in ("y", "yes"):
        raise GeofedError("USAGE", "not confirmed; nothing was done", hint="answer y to continue")
