"""A control plane with many regions and jobs: does each operation cost what it concerns, whatever else is there?

    .venv/bin/python tests/bench/scale.py [--quick] [--json PATH] [--agents N] [--jobs N,...] [--seconds N]
        [--ended N] [--database sqlite|postgresql] [--log PATH]

A real control plane process; real sessions over mutual TLS from this process, whose agents obey commands and report
without training. The jobs are copies of five that were submitted and have begun: of 20, 15 have a fixed number of
workers, four leave it to the plan, and one has a deadline besides; each runs in two regions, drawn at random. They are
put into the database while the control plane is down. Then agents and users load it with 5 submissions and 100 reports
a second, beside the heartbeats, on the same cores. On PostgreSQL it is then killed while another one stands by.

With `--quick` it takes 3 minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import shutil
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2
import psutil
from report import Bar, Report, options
from scale_agents import Agent, Figures, stopped

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.small_job import JOB, TASK

from control_plane.client import Context, ControlClient
from control_plane.core import RegionState, region_state_to_json
from control_plane.pki import Authority, utc_now
from control_plane.spec import load, pack
from control_plane.store import Change, JobRow, RegionRow, open_store
from geofed_pb.errors import GeofedError
from tests.control_plane.fake_agent import catalogue, make_request

SUBMISSIONS, REPORTS = 5.0, 100.0
"""A second."""
KINDS = ("train.workers=1",) * 3 + ("", "objective.deadline=30d")
"""Overrides of the job file of each kind; what they have more of is in `_kind`."""
WORKERS = 64
"""Of a region."""
HERE = Path(__file__).parent


@dataclass
class Site:
    """The control plane's folder and database, and all agents."""

    folder: Path
    url: str
    agents: list[Agent]
    figures: Figures
    slow: Path
    files: Files
    templates: list[JobRow] = field(default_factory=list)
    filled: int = 0
    """Jobs that were put into the database."""

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def log(self) -> Path:
        return self.folder / "log"


@dataclass
class Serving:
    """A running control plane."""

    process: psutil.Process
    client: ControlClient
    ports: dict[str, Any]
    served_seconds: float
    """From the start of the process until all agents were welcomed."""
    served_cpu_seconds: float
    """Processor time of the control plane until then."""
    ready_seconds: float


def main() -> int:
    given = options(__doc__, more=_more)
    # Of sessions that are refused, grpc's own tasks complain.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    report = Report("scale", given.quick)
    agents = given.agents or (200 if given.quick else 1000)
    counts = [int(count) for count in given.jobs.split(",")] if given.jobs else [100, 1000 if given.quick else 10_000]
    ended = given.ended if given.ended is not None else (2000 if given.quick else 100_000)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        url = f"sqlite:///{folder}/state/state.db"
        if given.database == "postgresql":
            # Here, since it needs pytest, which runs without it have no use for.
            from support.postgres import postgres_server

            url = stack.enter_context(postgres_server()).database()
        site = _site(Path(folder), url, agents)
        try:
            asyncio.run(_measure(site, counts, ended, given.seconds or (15 if given.quick else 40), report))
        finally:
            if given.log is not None:
                shutil.copyfile(site.log, given.log)
    _judge(report)
    return report.close(given.json)


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--agents", type=int, metavar="N", help="regions; 1000, with --quick 200")
    parser.add_argument("--jobs", metavar="N,...", help="numbers of active jobs; 100 and 10000, with --quick 1000")
    parser.add_argument("--ended", type=int, metavar="N", help="ended jobs; 100000, with --quick 2000")
    parser.add_argument("--log", type=Path, metavar="PATH", help="where to keep the log of the control plane")
    parser.add_argument("--seconds", type=float, metavar="N", help="of load for each number; 40, with --quick 15")
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")


# --- what is there before


def _site(folder: Path, url: str, agents: int) -> Site:
    """Put the regions with their certificates into a new database."""
    state = folder / "state"
    state.mkdir()
    now = utc_now(time.time())
    authority = Authority.open(state / "pki", "geofed", now)
    figures, rows, made = Figures(), [], []
    for number in range(agents):
        name = _region(number)
        key_pem, csr_pem = make_request()
        issued = authority.sign_region(csr_pem, name, now)
        held = json.dumps(asdict(catalogue(name, workers=WORKERS)))
        rows.append(
            RegionRow(
                name, "", "", "", region_state_to_json(RegionState(name)), (issued.serial,), issued.expires
            )
        )  # fmt: skip
        made.append(Agent(name, held, (authority.ca_pem, issued.certificate_pem, key_pem), figures))
    with open_store(url) as store:
        store.commit(Change(regions=tuple(rows)))
    return Site(folder, url, made, figures, folder / "slow.jsonl", Files.made(folder / "job"))


def _region(number: int) -> str:
    return f"region-{number:04}"


def _fill(site: Site, active: int, ended: int) -> None:
    """Put copies of the template jobs into the database until as many are active, and as many have ended."""
    draw, regions = random.Random(active), len(site.agents)
    by_name = {agent.region: agent for agent in site.agents}
    with open_store(site.url) as store:
        rows: list[JobRow] = []
        for number in range(site.filled, active):
            pair = sorted(draw.sample(range(regions), 2))
            row = _copy(site.templates[_kind(number)], number, (_region(pair[0]), _region(pair[1])))
            rows.append(row)
            for part in json.loads(row.state_json)["partitions"]:
                by_name[part["region"]].take(row.id, part)
        for number in range(ended):
            row = _copy(site.templates[0], 1_000_000 + number, (_region(0), _region(1)))
            state = {**json.loads(row.state_json), "phase": "cancelled", "finished_at": row.created_at}
            ended_at, result = row.created_at, row.plan_json
            ended_row = replace(row, state_json=json.dumps(state), phase="cancelled", ended_at=ended_at)
            rows.append(replace(ended_row, result_json=result))
        for begin in range(0, len(rows), 1000):
            store.commit(Change(jobs=tuple(rows[begin : begin + 1000])))
    site.filled = max(site.filled, active)


def _kind(number: int) -> int:
    """Of 20 jobs one has a deadline, four leave the number of workers to the plan, and the others state it."""
    return 4 if number % 20 == 0 else 3 if number % 5 == 0 else number % 3


def _copy(row: JobRow, number: int, regions: tuple[str, str]) -> JobRow:
    name = f"copy-{number:07}"

    return replace(
        row,
        id=name,
        request_id=name,
        spec_json=_moved(row.spec_json, regions),
        plan_json=_moved(row.plan_json, regions),
        state_json=_moved(row.state_json.replace(row.id, name), regions),
        created_at=row.created_at - 1.0 - number % 100_000 * 1e-3,
    )


# --- the control plane


@contextlib.asynccontextmanager
async def _serving(site: Site) -> AsyncIterator[Serving]:
    """Run the control plane; it is ready once it has welcomed all agents."""
    ready = site.folder / "ready.json"
    ready.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / "scale_server.py"), str(site.state), str(ready), str(site.slow), site.url]
    begun = time.monotonic()
    with site.log.open("ab") as log:
        process = await asyncio.to_thread(subprocess.Popen, command, stdout=log, stderr=log)
    tasks: list[asyncio.Task[None]] = []
    try:
        await _listening(site, process, ready)
        ready_seconds, ports = time.monotonic() - begun, json.loads(ready.read_text())
        address = f"127.0.0.1:{ports['agent']}"
        tasks = [asyncio.create_task(agent.run(address)) for agent in site.agents]
        for agent in site.agents:
            await agent.served.wait()
        served, process_now = time.monotonic() - begun, psutil.Process(process.pid)
        cpu = sum(process_now.cpu_times()[:2])
        async with ControlClient.connect(Context.load(site.state / "context.json")) as client:
            yield Serving(process_now, client, ports, served, cpu, ready_seconds)
    finally:
        process.terminate()
        await stopped(tasks)
        await asyncio.to_thread(process.wait)


async def _listening(site: Site, process: subprocess.Popen[bytes], ready: Path) -> None:
    while not ready.exists():
        if process.poll() is not None:
            raise RuntimeError(site.log.read_text()[-3000:])
        await asyncio.sleep(0.05)


async def _failover(site: Site, serving: Serving, row: dict[str, Any]) -> None:
    """Kill the control plane while another one stands by; add how long it took to ``row``, and what was lost."""
    ready, client, submitted = site.folder / "standby.json", serving.client, list[str]()
    command = [sys.executable, str(HERE / "scale_server.py"), str(site.state), str(ready), str(site.slow), site.url]
    with site.log.open("ab") as log:
        process = await asyncio.to_thread(subprocess.Popen, command, stdout=log, stderr=log)
    tasks: list[asyncio.Task[None]] = []
    try:
        await _listening(site, process, ready)
        standby = psutil.Process(process.pid)
        # It reads the active jobs, until it needs no more time.
        used = -1.0
        while (now := sum(standby.cpu_times()[:2])) > used + 0.2:
            used = now
            await asyncio.sleep(2)
        for number in range(20):
            pair = (_region(number), _region(number + 1))
            request = f"last-{number}"
            submitted.append((await client.submit(site.files.spec(0, pair), site.files.digest, request)).job.id)
            for agent in site.agents[number::20]:
                # With few jobs, some regions have none.
                if (
                    job := next((name for name, run in agent.runs.items() if run.state == "training"), None)
                ) is not None:
                    agent.progress(job)
        acknowledged = {agent.region: agent.acknowledged for agent in site.agents}
        begun = time.monotonic()
        serving.process.kill()
        ports = json.loads(ready.read_text())
        address = f"127.0.0.1:{ports['agent']}"
        for agent in site.agents:
            agent.served.clear()
        tasks = [asyncio.create_task(agent.run(address)) for agent in site.agents]
        told = json.loads((site.state / "context.json").read_text()) | {"address": f"127.0.0.1:{ports['control']}"}
        (site.folder / "standby-context.json").write_text(json.dumps(told))
        async with ControlClient.connect(Context.load(site.folder / "standby-context.json")) as second:
            row["failover_s"] = await _answered(second, submitted[-1]) - begun
            for agent in site.agents:
                await agent.served.wait()
            row["failover_agents_s"] = time.monotonic() - begun
            # What the welcome says was applied.
            row["lost_reports"] = sum(agent.welcomed_at < acknowledged[agent.region] for agent in site.agents)
            found = [await _there(second, job) for job in submitted]
            row["lost_jobs"] = len(found) - sum(found)
        row["failover_cpu_s"] = sum(standby.cpu_times()[:2]) - used
    finally:
        process.terminate()
        await stopped(tasks)
        await asyncio.to_thread(process.wait)


async def _answered(client: ControlClient, job: str) -> float:
    """Return when a question is answered."""
    while True:
        try:
            await client.job(job)
            return time.monotonic()
        except GeofedError:
            await asyncio.sleep(0.1)


async def _there(client: ControlClient, job: str) -> bool:
    try:
        await client.job(job)
    except GeofedError as error:
        if error.code != "JOB_NOT_FOUND":
            raise
        return False
    return True


@dataclass(frozen=True)
class Files:
    """The job file of each kind, for the first two regions, and the code of all."""

    specs: tuple[str, ...]
    code: bytes
    digest: str

    @classmethod
    def made(cls, folder: Path) -> Files:
        folder.mkdir()
        (folder / "job.yaml").write_text(JOB.replace("steps: 4", "steps: 200000"))
        (folder / "task.py").write_text(TASK)
        use = f"regions.use=[{_region(0)},{_region(1)}]"
        loaded = [load(folder / "job.yaml", (use, *filter(None, [override]))) for override in KINDS]
        packed = pack(folder, "task.py")
        return cls(tuple(one.json for one in loaded), packed.content, packed.digest)

    def spec(self, kind: int, regions: tuple[str, str]) -> str:
        return _moved(self.specs[kind], regions)


def _moved(text: str, regions: tuple[str, str]) -> str:
    """Name other regions instead of the first two."""
    return text.replace(_region(0), "FIRST").replace(_region(1), regions[1]).replace("FIRST", regions[0])


async def _make_templates(site: Site) -> None:
    """Submit one job of each kind in the first two regions, and have it train."""
    files, ids, running = site.files, list[str](), set[str]()
    async with _serving(site) as serving:
        await serving.client.put_bundle(files.code, files.digest)
        for number, spec in enumerate(files.specs):
            ids.append((await serving.client.submit(spec, files.digest, f"template-{number}")).job.id)
        async with asyncio.timeout(60):
            async for event in serving.client.watch(""):
                running.update({event.job} if event.kind == "job.running" else ())
                if running >= set(ids):
                    break
        for agent in site.agents[:2]:
            for job_id in ids:
                agent.progress(job_id)
        await asyncio.sleep(0.5)
    with open_store(site.url) as store:
        rows = [store.job(name) for name in ids]
    site.templates = [row for row in rows if row is not None]
    site.filled = len(ids)


# --- the load


async def _measure(site: Site, counts: list[int], ended: int, seconds: float, report: Report) -> None:
    await _make_templates(site)
    print(" ".join(f"{name:>12}" for name in _SHOWN))
    for count in counts:
        await asyncio.to_thread(_fill, site, count, ended)
        # Else the kernel writes the filled database, hundreds of MB, while commits under load wait for the same disk.
        await asyncio.to_thread(os.sync)
        ended = 0
        site.slow.unlink(missing_ok=True)
        async with _serving(site) as serving:
            row = await _loaded(site, serving, count, seconds)
            if count == counts[-1] and site.url.startswith("postgresql"):
                # The agents connect to another one, and are not told by this one.
                await _failover(site, serving, row)
        report.runs.append(row)
        print(" ".join(f"{row[name]:12.1f}" for name in _SHOWN.values()), flush=True)


_SHOWN = {
    "jobs": "jobs", "ready s": "ready_s", "restart s": "restart_s", "its cpu s": "restart_cpu_s",
    "beat p99": "heartbeat_p99_ms", "report p99": "report_p99_ms", "submit p50": "submit_p50_ms",
    "submit p99": "submit_p99_ms", "list ms": "list_ms", "status ms": "status_ms", "overview ms": "overview_ms",
    "metrics ms": "metrics_ms", "MB": "memory_mb", "cores": "cpu", "over 20 ms": "slow_callbacks",
    "longest ms": "slowest_callback_ms",
}  # fmt: skip
"""Titles of the table's columns; latencies are in milliseconds."""


async def _loaded(site: Site, serving: Serving, count: int, seconds: float) -> dict[str, Any]:
    """Load the control plane; return what was measured."""
    await asyncio.sleep(3)
    figures, submitted, failed = site.figures, list[float](), list[str]()
    figures.heartbeats.clear(), figures.reports.clear(), figures.failures.clear()
    used = sum(serving.process.cpu_times()[:2])
    begun, sent = time.monotonic(), figures.sent_reports
    wall = time.time()
    asked: asyncio.Task[None] = asyncio.create_task(_asking(site, serving))
    async with asyncio.TaskGroup() as group:
        group.create_task(_reporting(site, begun + seconds))
        group.create_task(_submitting(site, serving, begun + seconds, count, submitted, failed))
    await stopped([asked])
    took = time.monotonic() - begun
    answers = _ANSWERS.copy()
    _ANSWERS.clear()
    slow = [s for s in _slow(site.slow) if s["at"] >= wall]
    return {
        "jobs": count,
        "agents": len(site.agents),
        "seconds": took,
        "ready_s": serving.ready_seconds,
        "restart_s": serving.served_seconds,
        "restart_cpu_s": serving.served_cpu_seconds,
        "heartbeats": len(figures.heartbeats),
        "heartbeat_p99_ms": _p99(figures.heartbeats),
        "reports": figures.sent_reports - sent,
        "report_p99_ms": _p99(figures.reports),
        "submissions": len(submitted),
        "submit_p50_ms": statistics.median(submitted or [float("nan")]) * 1e3,
        "submit_p99_ms": _p99(submitted),
        # In the order in which they ended, so that a number tells the second.
        "submit_slowest_ms": sorted(((s * 1e3, number) for number, s in enumerate(submitted)), reverse=True)[:10],
        "failures": [*failed[:5], *figures.failures[:5]],
        **{f"{name}_ms": statistics.median(answers.get(name, [float("nan")])) * 1e3 for name in _QUESTIONS},
        "memory_mb": serving.process.memory_info().rss / 1e6,
        "cpu": (sum(serving.process.cpu_times()[:2]) - used) / took,
        "slow_callbacks": len(slow),
        "slowest_callback_ms": max((s["seconds"] for s in slow), default=0.0) * 1e3,
        "slowest": sorted(slow, key=lambda s: -s["seconds"])[:10],
    }


def _slow(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        yield from map(json.loads, path.read_text().splitlines())


async def _reporting(site: Site, until: float) -> None:
    draw, due = random.Random(1), time.monotonic()
    while time.monotonic() < until:
        due += 1 / REPORTS
        agent = draw.choice(site.agents)
        jobs = [job for job, run in agent.runs.items() if run.state == "training"]
        if jobs and agent.served.is_set():
            agent.progress(draw.choice(jobs))
        await asyncio.sleep(max(0.0, due - time.monotonic()))


async def _submitting(
    site: Site, serving: Serving, until: float, count: int, took: list[float], failed: list[str]
) -> None:
    draw, due, number = random.Random(2), time.monotonic(), 0
    async with asyncio.TaskGroup() as group:
        while time.monotonic() < until:
            due, number = due + 1 / SUBMISSIONS, number + 1
            pair = sorted(draw.sample(range(len(site.agents)), 2))
            spec = site.files.spec(_kind(number), (_region(pair[0]), _region(pair[1])))
            call = serving.client.submit(spec, site.files.digest, f"r-{count}-{number}")
            group.create_task(_timed(call, took, failed))
            await asyncio.sleep(max(0.0, due - time.monotonic()))


async def _timed(call: Awaitable[Any], took: list[float], failed: list[str]) -> None:
    begun = time.monotonic()
    try:
        await call
        took.append(time.monotonic() - begun)
    except Exception as error:
        failed.append(str(error)[:300])


_ANSWERS: dict[str, list[float]] = {}
_QUESTIONS = ("list", "status", "overview", "metrics", "regions")


async def _asking(site: Site, serving: Serving) -> None:
    """Ask like users and Prometheus, one question after another."""
    context = Context.load(site.state / "context.json")
    base = f"https://127.0.0.1:{serving.ports['metrics']}"
    trusted = ssl.create_default_context(cafile=str(context.ca_file))
    token, scraper = context.token_file.read_text().strip(), (site.state / "metrics.token").read_text().strip()
    async with httpx2.AsyncClient(verify=trusted, timeout=60) as browser:

        async def page() -> None:
            (await browser.get(f"{base}/", auth=("any", token))).raise_for_status()

        async def metrics() -> None:
            answer = await browser.get(f"{base}/metrics", headers={"authorization": f"Bearer {scraper}"})
            answer.raise_for_status()

        questions: dict[str, Callable[[], Awaitable[Any]]] = {
            "list": lambda: serving.client.jobs(ended=True),
            "status": lambda: serving.client.job(site.templates[0].id),
            "overview": page,
            "metrics": metrics,
            "regions": serving.client.regions,
        }
        while True:
            for name, question in questions.items():
                begun = time.monotonic()
                await question()
                _ANSWERS.setdefault(name, []).append(time.monotonic() - begun)
                await asyncio.sleep(1.0)


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98] * 1e3 if len(values) > 1 else float("nan")


def _judge(report: Report) -> None:
    first, last = report.runs[0], report.runs[-1]
    jobs, bar = last["jobs"], Bar.at_most
    report.bars += [
        bar(f"heartbeat p99, {jobs} jobs", last["heartbeat_p99_ms"], "ms", 100),
        bar(f"submit p99, {jobs} jobs", last["submit_p99_ms"], "ms", 250),
        bar(f"submit p99 against {first['jobs']} jobs", last["submit_p99_ms"] / first["submit_p99_ms"], "x", 2),
        *(bar(f"{name}, {jobs} jobs", last[f"{name}_ms"], "ms", 300) for name in ("list", "status", "overview")),
        bar("memory", last["memory_mb"], "MB", 1500),
        bar("restart until all agents are served", last["restart_s"], "s", 10),
        *_failover_bars(last),
        bar("callbacks above 20 ms", last["slow_callbacks"], "", 0),
        bar("failed calls", len(last["failures"]), "", 0),
    ]


def _failover_bars(row: dict[str, Any]) -> list[Bar]:
    if "failover_s" not in row:
        return []
    print(
        f"the standby answered after {row['failover_s']:.1f} s, all agents were served after "
        f"{row['failover_agents_s']:.1f} s, for which it took {row['failover_cpu_s']:.1f} s of a core"
    )
    lost = row["lost_jobs"] + row["lost_reports"]
    return [
        Bar.at_most("failover to the standby", row["failover_s"], "s", 10),
        Bar.at_most("acknowledged jobs and reports that are lost", lost, "", 0),
    ]


if __name__ == "__main__":
    sys.exit(main())
