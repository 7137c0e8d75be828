"""Processes that a fork server starts are what executing Python would have started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.processes import alive

pytestmark = pytest.mark.processes

PROGRAM = """
import json, os, signal, sys, time
from geofed_pb.linux import die_with_parent

_fork, _forks = os.fork, []

def fork():
    _forks.append(1)
    if len(_forks) == 2 and "FULL" in os.environ:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return _fork()

os.fork = fork  # in the server, which imports this

def main():
    parent = int(sys.argv[sys.argv.index("--die-with-parent") + 1])
    die_with_parent(parent)
    if "wait" in sys.argv:
        print("waits", file=sys.stderr, flush=True)
        time.sleep(600)
    print(json.dumps({
        "argv": sys.argv[1:-2], "environment": dict(os.environ), "parent": parent == os.getppid(),
        "stdin": sys.stdin.read(), "ints": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "terms": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "open": sorted(os.listdir("/proc/self/fd")),
        "line": open("/proc/self/cmdline").read().replace(chr(0), " ").strip(),
    }), file=sys.stderr)
    print("to standard output", flush=True)
    if "raise" in sys.argv:
        raise ValueError("the program's own")
    return 7
"""
OWNER = """
import asyncio, json, os, signal, sys, time
from pathlib import Path
from geofed_pb import fork_server
from geofed_pb.fork_server import ExecStarter, ForkServer
forking = sys.argv[1] == "fork"
starter = ForkServer.fork(("program.__main__",)) if forking else ExecStarter()

async def run(*arguments, **options):
    process = await starter.start("program", *arguments, **options)
    text = (await process.stderr.read()).decode() if process.stderr else ""
    return {"status": await process.wait(), "returncode": process.returncode, "text": text}

def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

async def main():
SCENARIO
asyncio.run(main())
"""


def _owner(folder: Path, how: str, scenario: str) -> subprocess.Popen[str]:
    (folder / "program").mkdir(exist_ok=True)
    (folder / "program" / "__init__.py").touch()
    (folder / "program" / "__main__.py").write_text(PROGRAM + "\nif __name__ == '__main__':\n    sys.exit(main())\n")
    body = "\n".join(f"    {line}" for line in scenario.strip().splitlines())
    argv = [sys.executable, "-c", OWNER.replace("SCENARIO", body), how]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OF_THE_OWNER": "1"}
    return subprocess.Popen(argv, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def _told(folder: Path, how: str, scenario: str) -> Any:
    with _owner(folder, how, scenario) as owner:
        out, _ = owner.communicate(timeout=60)
    assert owner.returncode == 0
    return json.loads(out)


EVERY_WAY = """
kept = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ["PYTHONPATH"], "GIVEN": "2"}
with open("log", "wb") as log:
    told = [await run("--number", "5"), await run(environment=kept), await run("raise"), await run(stderr=log)]
print(json.dumps([*told, Path("log").read_text()]))
"""


def test_a_forked_process_is_what_executing_python_starts(tmp_path: Path) -> None:
    told = {how: _told(tmp_path, how, EVERY_WAY) for how in ("fork", "exec")}
    for how, (plain, kept, raised, to_file, log) in told.items():
        assert [one["status"] for one in (plain, kept, raised, to_file)] == [7, 7, 70 if how == "fork" else 1, 7]
        assert plain["returncode"] == 7
        said = json.loads(plain["text"])
        assert said["argv"] == ["--number", "5"]
        assert said["parent"]
        assert said["ints"]
        assert said["terms"]
        assert said["stdin"] == ""
        assert "-m program --number 5 --die-with-parent" in said["line"]
        assert said["environment"]["OF_THE_OWNER"] == "1"
        environment = json.loads(kept["text"])["environment"]
        assert (environment["GIVEN"], "OF_THE_OWNER" in environment) == ("2", False)
        assert "ValueError: the program's own" in raised["text"]
        assert (to_file["text"], "to standard output" in log, '"argv"' in log) == ("", True, True)


def test_a_forked_process_has_no_descriptor_of_the_server(tmp_path: Path) -> None:
    told = _told(
        tmp_path,
        "fork",
        """
others = [await starter.start("program", "wait") for _ in range(3)]
print(json.dumps(await run()))
""",
    )
    # Standard input, output and error, and the listing itself.
    assert json.loads(told["text"])["open"] == ["0", "1", "2", "3"]


def test_processes_get_signals_and_tell_of_their_end(tmp_path: Path) -> None:
    told = _told(
        tmp_path,
        "fork",
        """
statuses = []
for how in ("terminate", "kill"):
    process = await starter.start("program", "wait")
    assert await process.stderr.readline() == b"waits\\n" and process.returncode is None
    getattr(process, how)()
    statuses.append(await process.wait())
    try:
        process.kill()
    except ProcessLookupError:
        statuses.append("gone")
print(json.dumps(statuses))
""",
    )
    assert told == [-15, "gone", -9, "gone"]


def test_a_server_that_is_killed_takes_its_processes_along_and_others_start_all_the_same(tmp_path: Path) -> None:
    told = _told(
        tmp_path,
        "fork",
        """
process = await starter.start("program", "wait")
await process.stderr.readline()
os.kill(starter.pid, signal.SIGKILL)
first = await process.wait()
deadline = time.monotonic() + 10
while is_alive(process.pid) and time.monotonic() < deadline:
    await asyncio.sleep(0.01)
print(json.dumps([first, is_alive(process.pid), (await run())["status"], (await run())["status"]]))
""",
    )
    assert told == [-9, False, 7, 7]


def test_where_no_process_can_be_forked_the_others_run_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULL", "1")
    scenario = """
process = await starter.start("program", "wait")
await process.stderr.readline()
try:
    await starter.start("program")
except OSError as error:
    told = [error.errno]
print(json.dumps([*told, process.returncode, is_alive(process.pid), (await run())["status"]]))
"""
    assert _told(tmp_path, "fork", scenario) == [11, None, True, 7]


def test_a_start_that_is_cancelled_leaves_no_process(tmp_path: Path) -> None:
    scenario = """
made, begin = [], fork_server._Forked.begin
def cancelled(forked, pid, pidfd):
    made.append(pid)
    begin(forked, pid, pidfd)
    if len(made) == 1:
        starting.cancel()
fork_server._Forked.begin = cancelled
for turns in (None, 1):
    starting = asyncio.ensure_future(starter.start("program", "wait"))
    if turns:
        while not starter._processes:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        starting.cancel()
    await asyncio.wait([starting])
    assert starting.cancelled()
await run()  # later than what was asked for before
deadline = time.monotonic() + 10
while any(map(is_alive, made[:-1])) and time.monotonic() < deadline:
    await asyncio.sleep(0.01)
print(json.dumps([len(made) > 1, any(map(is_alive, made))]))
"""
    assert _told(tmp_path, "fork", scenario) == [True, False]


def test_a_request_that_is_too_large_is_executed(tmp_path: Path) -> None:
    scenario = """
environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH")} | {"LONG": "x" * 100_000, "TOO": "x" * 60_000}
print(json.dumps([(await run(environment=environment))["status"], (await run())["status"]]))
"""
    assert _told(tmp_path, "fork", scenario) == [7, 7]


def test_all_end_with_the_owner(tmp_path: Path) -> None:
    scenario = """
processes = [await starter.start("program", "wait") for _ in range(3)]
for process in processes:
    await process.stderr.readline()
print(json.dumps([starter.pid, *(process.pid for process in processes)]), flush=True)
await asyncio.sleep(600)
"""
    with _owner(tmp_path, "fork", scenario) as owner:
        assert owner.stdout is not None
        there = [psutil.Process(pid) for pid in json.loads(owner.stdout.readline())]
        assert all(map(alive, there))
        owner.kill()
        deadline = time.monotonic() + 10
        while any(map(alive, there)):
            assert time.monotonic() < deadline, "they outlive their owner"
            time.sleep(0.01)
