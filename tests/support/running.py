"""A real federation on this machine, with the digits partitioned over its regions, and ways to watch and break it."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import psutil
from support.commands import Elsewhere, run_here
from support.processes import family, running_as
from support.warm_servers import WarmServers

import deploy
from control_plane._view import event_view, job_view
from control_plane.cli._follow import wait_for_job
from control_plane.client import Context, ControlClient
from deploy.emulator import Emulator
from deploy.local import CONTROL_SITE, LocalFederation, RegionSite
from deploy.shards import read_digits, write_shards
from geofed_pb.errors import GeofedError

PRICES = {
    "source": "test",
    "asOf": "2026-01",
    "functionUsdPerGbSecond": 0.0000166667,
    "functionUsdPerRequest": 0.0000002,
    "serverUsdPerHour": 0.05,
    "egressUsdPerGb": 0.09,
}
TEMPLATES = Path(deploy.__file__).parent / "templates"
JOB_SECONDS = 120.0
_Answer = TypeVar("_Answer")


def digits_sites(
    folder: Path, regions: Sequence[str], *, workers: int = 1, alpha: float = 0.5, **more: Any
) -> list[RegionSite]:
    """Regions that hold the digits, unevenly by default; `more` goes into each region's file."""
    written = write_shards(read_digits(1), list(regions), folder / "data", alpha=alpha, seed=1)
    sites = []
    for name in regions:
        splits = {split: {"uri": part["path"], "samples": part["samples"]} for split, part in written[name].items()}
        config = {
            "cloud": "test",
            "capacity": {"workers": workers, "memoryMb": 1024},
            "prices": PRICES,
            "datasets": {"digits": {"splits": splits}},
            "policy": {"isolation": "prefer"},
            # A job that a test breaks off keeps its tensors for the agent's next start; they go with the test's folder.
            "channel": {"kind": "file", "path": str(folder / "channels" / name)},
            **more,
        }
        sites.append(RegionSite(name, config))
    return sites


def paths_under(folder: Path) -> list[Path]:
    """Files and folders under a folder of running daemons, which may delete some meanwhile: `rglob` would raise."""
    return [Path(place, name) for place, folders, files in os.walk(folder) for name in (*folders, *files)]


def named(name: str) -> str:
    """The shipped job's task as one of its own, which no other test has had run: a federation knows what each took."""
    return f"{(TEMPLATES / 'image-classification' / 'task.py').read_text()}\n# {name}\n"


UNHURRIED = (
    named("unhurried")
    + """
import time

_loss = loss


def loss(model, batch):
    time.sleep(0.01)
    return _loss(model, batch)
"""
)
"""The same task, whose steps take longer and compute hardly more often: for a job that is there while something else
happens, which would have to share the processors with it."""


@functools.cache
def warm_daemons() -> WarmServers:
    """The parent of daemons; it ends with this process."""
    modules = (
        "control_plane.cli.main", "control_plane.server", "region_agent.cli", "region_agent.daemon",
        "region_agent.gateway.embedded.__main__", "region_agent.gateway.serverless.invocation", "sync.ps.__main__",
    )  # fmt: skip
    parent = WarmServers(*modules, zygotes=True, waits_for_disk=False)
    atexit.register(parent.__exit__)
    return parent.__enter__()


class WarmFederation(LocalFederation):
    """Real daemons, forked from a process that has imported what they need."""

    def _popen(self, site: str, module: str, arguments: list[str], log_name: str) -> subprocess.Popen[bytes]:
        """Fork the daemon from a process that has imported it, unless it enters namespaces of another user."""
        environment, network = {**os.environ, "GEOFED_CONTEXT": str(self.context_file)}, None
        if self.emulator is not None:
            entered = self.emulator.command(site, ())
            if any(option.startswith("--user=") for option in entered):
                return super()._popen(site, module, arguments, log_name)
            environment = self.emulator.environment(environment)
            (network,) = (Path(option.removeprefix("--net=")) for option in entered if option.startswith("--net="))
        self.folder.mkdir(parents=True, exist_ok=True)
        argv = [module.split(".")[0].replace("_", "-"), *arguments]
        process = warm_daemons().run(module, argv, self.folder / f"{log_name}.log", environment, network=network)
        return cast("subprocess.Popen[bytes]", process)


class Federation(WarmFederation):
    """Real daemons; the commands of `control-plane` run in this process. Where a WAN is emulated, one process for all
    of them is in the network namespace of the control plane."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._elsewhere = Elsewhere(functools.partial(self._spawn, CONTROL_SITE))
        self._kept: tuple[asyncio.AbstractEventLoop, ControlClient] | None = None
        """A connection to the control plane, for `ask`."""

    def control_plane(
        self, *arguments: str, check: bool = True, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        here = functools.partial(run_here, GEOFED_CONTEXT=str(self.context_file))
        done = (here if self.emulator is None else self._elsewhere.run)(*arguments)
        if check and done.returncode:
            raise GeofedError("INTERNAL", f"{' '.join(done.args)} ended with {done.returncode}:\n{done.stderr}")
        return done

    def ask(self, request: Callable[[ControlClient], Awaitable[_Answer]]) -> _Answer:
        """Over one connection, kept until a request fails: tests look ten times a second, and to connect takes four
        times as long as to look."""
        if self._kept is None:
            loop = asyncio.new_event_loop()
            self._kept = loop, loop.run_until_complete(self._connected())
        loop, client = self._kept
        try:
            return loop.run_until_complete(request(client))
        except BaseException:
            self._disconnect()
            raise

    async def _connected(self) -> ControlClient:
        return await ControlClient.connect(Context.load(self.context_file)).__aenter__()

    def _disconnect(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            loop, client = kept
            loop.run_until_complete(client.__aexit__(None, None, None))
            loop.close()

    def start_control_plane(self) -> None:
        self._disconnect()
        super().start_control_plane()

    def close(self) -> None:
        self._disconnect()
        self._elsewhere.close()
        super().close()


class Running:
    """A federation while it runs, seen as its user and its operator see it."""

    def __init__(self, federation: LocalFederation, folder: Path) -> None:
        self.federation, self._folder = federation, folder

    def job_folder(self, task: str | None = None) -> Path:
        """The shipped image job, with another task module where one is given."""
        job = self._folder / "job"
        if not job.exists():
            shutil.copytree(TEMPLATES / "image-classification", job)
        if task is not None:
            (job / "task.py").write_text(task)
        return job

    def submit(self, *settings: str, task: str | None = None) -> str:
        """Submit the job; its id."""
        arguments = [part for setting in settings for part in ("--set", setting)]
        job = self.job_folder(task) / "job.yaml"
        return self.federation.control_plane("submit", str(job), *arguments, "-o", "name").stdout.strip()

    def describe(self, job: str) -> dict[str, Any]:
        """What `control-plane describe` tells, without its process where that is not needed: tests look often."""

        async def look(client: ControlClient) -> dict[str, Any]:
            return job_view(await client.job(job))

        if self.federation.emulator is None:
            return self.federation.ask(look)
        told = json.loads(self.federation.control_plane("describe", job, "-o", "json").stdout)
        described: dict[str, Any] = told["data"]
        return described

    def events(self, job: str) -> list[dict[str, Any]]:
        """What `control-plane events` tells."""

        async def look(client: ControlClient) -> list[dict[str, Any]]:
            return [event_view(event) async for event in client.watch(job, follow=False)]

        if self.federation.emulator is None:
            return self.federation.ask(look)
        lines = self.federation.control_plane("events", job, "-o", "jsonl").stdout.splitlines()
        return [json.loads(line)["data"] for line in lines]

    def wait_round(self, job: str, least: int, region: str | None = None, seconds: float = 60.0) -> None:
        """Until the regions (or one) have completed so many rounds, as their own agents and the hub tell."""

        def there() -> bool:
            parts = self.describe(job)["partitions"]
            return bool(parts) and all(p["round"] >= least for p in parts if region in (None, p["region"]))

        eventually(there, f"round {least} of {job}", seconds)

    def wait_round_or_end(self, job: str, least: int) -> None:
        """Until all regions have completed so many rounds, or the job has ended."""

        def there() -> bool:
            now = self.describe(job)
            rounds = [part["round"] for part in now["partitions"]]
            return bool(now["finished_at"]) or (bool(rounds) and min(rounds) >= least)

        eventually(there, f"round {least} of {job} or its end", 120.0)

    def wait_step(self, job: str, least: int, region: str) -> None:
        """Until a region has made so many steps."""

        def there() -> bool:
            return any(p["step"] >= least for p in self.describe(job)["partitions"] if p["region"] == region)

        eventually(there, f"step {least} of {job} in {region}")

    def wait_end(self, job: str, seconds: float = JOB_SECONDS) -> dict[str, Any]:
        """Wait as `control-plane wait` does, for so long at most; how the job ended, or stands."""

        async def wait(client: ControlClient) -> None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(wait_for_job(client, job), seconds)

        if self.federation.emulator is None:
            self.federation.ask(wait)
        else:
            arguments = ("wait", job, "--timeout", f"{seconds:.0f}s")
            self.federation.control_plane(*arguments, check=False, timeout=seconds + 30)
        return self.describe(job)

    def descendants(self, region: str, having: str) -> list[psutil.Process]:
        """Processes of a region whose command line holds a text."""
        return running_as(having, family(self.federation.processes[region].pid)[1:])

    def workers(self, region: str) -> list[psutil.Process]:
        """A region's function replicas: the warm parent forks them."""
        found = []
        for parent in self.descendants(region, "zygote"):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += parent.children()
        return found


def expected_updates(described: dict[str, Any]) -> dict[str, int]:
    """Remote updates that each region must have applied: one from every other region in each round, and the model
    that all began with, where it came from elsewhere."""
    planned = described["plan"]["rounds"]
    early = described["result"]["ended_early"]
    made = {part["region"]: part["round"] if early else planned for part in described["partitions"]}
    first, total = min(made), sum(made.values())
    return {name: total - rounds + (name != first) for name, rounds in made.items()}


def check_succeeded(described: dict[str, Any], accuracy: float = 0.8) -> None:
    """It has its model, every update was applied exactly once, and the account is whole. The shipped job has so few
    rounds over shards so uneven that its accuracy is 0.87 to 0.99 as updates happen to come, whatever the code."""
    result = described["result"]
    assert described["state"] == "succeeded", described.get("error") or described
    assert result["metrics"]["accuracy"] >= accuracy, result["metrics"]
    assert result["applied_updates"] == expected_updates(described)
    assert result["model"]["digest"].startswith("sha256:")
    assert result["usd"] > 0


def eventually(condition: Callable[[], object], what: str, seconds: float = 60.0, pause: float = 0.1) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(pause)


def supported_emulator() -> str | None:
    """Why no WAN can be emulated here, or None."""
    return Emulator.supported()
