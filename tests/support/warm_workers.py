"""Workers in processes of their own, forked from one parent that has loaded torch: to load it takes seconds."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from region_agent.worker.invocation import Invocation

__all__ = ["WarmParent", "WorkerProcess"]


class WarmParent:
    """A context manager; what it has forked ends with it."""

    def __enter__(self) -> WarmParent:
        path = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.warm_workers"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}, text=True,
            start_new_session=True,
        )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def live(self, bodies: Sequence[Invocation], folder: Path) -> WorkerProcess:
        """A process that lives one worker's lives, one after the other: from their first invocations to their ends.
        Its temporary files are in ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        answer = folder / f"answer-{os.urandom(8).hex()}"
        os.mkfifo(answer)
        request = {
            "bodies": [body.model_dump(mode="json") for body in bodies], "folder": str(folder), "answer": str(answer),
        }  # fmt: skip
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        return WorkerProcess(int(stdout.readline()), answer)


class WorkerProcess:
    """One that was forked."""

    def __init__(self, pid: int, answer: Path) -> None:
        # Opens once the process has opened its end, and is at its end when the process is.
        self._pid, self._answer, self._ended = pid, answer.open(), False

    def end(self) -> list[list[dict[str, Any]]]:
        """Wait for it; the outcomes of each life, none where the process died."""
        told = self._answer.read()
        self._ended = True
        return json.loads(told) if told else []

    def close(self) -> None:
        """Kill it, where it has not ended."""
        if not self._ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._answer.read()
            self._ended = True
        self._answer.close()


def _live(request: dict[str, Any]) -> None:
    """In the forked process."""
    import tempfile

    from support.jobs import chain

    # The parent's output is for the numbers of its processes.
    os.dup2(2, 1)
    random.seed()
    os.environ["TMPDIR"] = tempfile.tempdir = request["folder"]
    with open(request["answer"], "w") as answer:
        bodies = map(Invocation.model_validate, request["bodies"])
        lives = [[outcome.model_dump() for outcome in chain(body)] for body in bodies]
        json.dump(lives, answer)


def main() -> None:
    """The parent: a request in each line of standard input, the process's number in each line of output."""
    gc.disable()
    import support.jobs  # noqa: F401 - what it imports is what the forked processes need not

    import region_agent.worker.handler  # noqa: F401 - the same

    gc.enable()
    gc.freeze()
    # Whoever waits for a process reads its answer to the end.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            status = 1
            try:
                _live(json.loads(line))
                status = 0
            except BaseException:  # a forked child must never return into its parent's loop
                import traceback

                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
