"""Ranks that are forked from a process that has loaded torch: to load it takes longer than most of their jobs."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from support.warm_servers import ServerProcess, WarmServers

from region_agent.worker.ranks import process

__all__ = ["main", "warm_ranks"]


@contextlib.contextmanager
def warm_ranks() -> Iterator[Callable[[int, list[str]], ServerProcess]]:
    """What starts a rank, in the place of `region_agent.worker.ranks.group._execute`."""
    with WarmServers(__name__) as parent:

        def start(link: int, paths: list[str]) -> ServerProcess:
            with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as meeting:
                meeting.bind(place := f"{folder}/meeting")
                meeting.listen()
                argv = ["region_agent.worker.ranks", place, json.dumps(paths)]
                rank = parent.run(__name__, argv, Path(os.devnull), os.environ)
                given, _ = meeting.accept()
                with given:
                    socket.send_fds(given, [b"."], [link, 1, 2])
            return rank

        yield start


def main() -> None:
    """In the forked process: take the descriptor and the outputs, and be a rank."""
    _, place, paths = sys.argv
    with socket.socket(socket.AF_UNIX) as meeting:
        meeting.connect(place)
        _, (link, out, err), _, _ = socket.recv_fds(meeting, 1, 3)
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.path[:] = json.loads(paths)
    process.main(link)
