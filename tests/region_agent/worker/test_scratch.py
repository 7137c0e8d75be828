"""Folders that workers unpack into end with their processes, at the latest when the next one starts."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from region_agent.worker.data.scratch import scratch_folder

_MADE = """
import os
import sys
from pathlib import Path
from region_agent.worker.data.scratch import scratch_folder
folder = scratch_folder(Path(sys.argv[1]))
(folder / "data").write_bytes(bytes(1000))
if os.fork() == 0:
    sys.exit()
os.wait()
print(folder, flush=True)
sys.stdin.read()
"""


@pytest.mark.processes
def test_what_a_killed_worker_left_goes_when_the_next_one_starts(tmp_path: Path) -> None:
    (tmp_path / "another").mkdir()
    lives, killed = (
        subprocess.Popen(
            [sys.executable, "-c", _MADE, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    )
    try:
        in_use, left = (Path(process.stdout.readline().strip()) for process in (lives, killed))  # type: ignore[union-attr]
        killed.kill()
        killed.wait()
        assert left.exists()
        own = scratch_folder(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {"another", in_use.name, own.name}
        assert (in_use / "data").exists(), "although a process that it forked has ended"
        lives.communicate()
        assert not in_use.exists(), "one that ends by itself removes its own"
    finally:
        for process in (lives, killed):
            process.kill()
            process.communicate()


def test_workers_that_start_together_leave_each_others_alone(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(scratch_folder, [tmp_path] * 64))
    assert len(set(folders)) == 64
    assert all(folder.is_dir() for folder in folders)
