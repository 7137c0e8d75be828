"""From a command to the control plane and back."""

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
_INSIST_SECONDS = 0.5
LOCAL_CONTEXT = Path(".geofed/control-plane/context.json")


def find_context(given: Path | None) -> Path:
    """The context file: what was given by flag or environment, else this folder's, else the user's."""
    if given is not None:
        return given
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    for path in (LOCAL_CONTEXT, home / "geofed" / "context.json"):
        if path.is_file():
            return path
    raise GeofedError(
        "UNAVAILABLE",
        f"there is no context file: neither {LOCAL_CONTEXT} nor {home / 'geofed' / 'context.json'}",
        hint="start one with `control-plane serve`, or name its context.json by --context or GEOFED_CONTEXT",
    )


def ask_control_plane(
    given: Path | None, conversation: Callable[[ControlClient], Awaitable[_T]], *, detach: str = ""
) -> _T:
    """Run a conversation with the control plane. Ctrl-C ends it with 130; `detach` says what that means."""
    import asyncio

    from control_plane.client import Context, ControlClient

    async def converse() -> _T:
        with _insisting():
            async with ControlClient.connect(Context.load(find_context(given))) as client:
                return await conversation(client)

    try:
        return asyncio.run(converse())
    except (KeyboardInterrupt, asyncio.CancelledError):
        say(f"\n{detach}" if detach else "")
        raise SystemExit(int(Exit.INTERRUPTED)) from None


@contextmanager
def _insisting() -> Iterator[None]:
    """Ctrl-C cancels the conversation again and again until it ends: what is cancelled just as an answer comes in may
    not notice the first time."""
    import asyncio

    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # So it was started: in the background of a script, or under nohup.
        yield
        return
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    again: asyncio.TimerHandle | None = None

    def interrupt() -> None:
        nonlocal again
        task.cancel()
        again = loop.call_later(_INSIST_SECONDS, interrupt)

    try:
        loop.add_signal_handler(signal.SIGINT, interrupt)
    except (NotImplementedError, RuntimeError, ValueError):
        # Not in the main thread, or not on this system: then asyncio's own way has to do.
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        if again is not None:
            again.cancel()


def confirm(question: str, *, yes: bool) -> None:
    """Have the user agree to what cannot be undone; returns only then."""
    if yes:
        return
    if not can_ask():
        raise GeofedError("USAGE", f"{question} Nobody is there to answer.", hint="add --yes")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    try:
        answer = sys.stdin.readline()
    except KeyboardInterrupt:
        raise SystemExit(int(Exit.INTERRUPTED)) from None
    if answer.strip().lower() not in ("y", "yes"):
        raise GeofedError("USAGE", "nothing was done", hint="answer with y to continue")
