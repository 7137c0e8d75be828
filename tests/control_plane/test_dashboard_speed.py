"""Pages of the dashboard beside 1,000 jobs, one of which has reported thousands of rounds: small, and soon there."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from control_plane.server import ServeConfig
from control_plane.store import Change, EventRow, JobRow, LogRow, open_store
from tests.control_plane.conftest import staged
from tests.control_plane.scenario import bring_up, figures, finish, run, train
from tests.control_plane.test_dashboard import browser
from tests.control_plane.test_listing import regions_with_datasets

ACTIVE, ENDED, ROUNDS = 300, 700, 4000
MOST_BYTES, MOST_SECONDS = 200_000, 0.2


def _copies(row: JobRow, name: str, count: int) -> Iterator[JobRow]:
    for number in range(count):
        one = f"{name}-{number:05}"
        state = row.state_json.replace(row.id, one)
        yield replace(row, id=one, name=one, request_id=one, created_at=1000.0 + number, state_json=state)


def _events(job: str) -> Iterator[EventRow]:
    """Of a job in two regions whose task logs twenty values."""
    for number in range(1, ROUNDS + 1):
        for region in ("a", "b"):
            told = {
                "round": number, "step": number * 20, "samples": number * 640, "loss": 1 / number, "cpu_cores": 1.93,
                "memory_bytes": 314_000_000 + number, "usd": number * 1e-3, "wan_bytes": number * 96_125,
                "compute_seconds": 3.1234567, "merge_seconds": 0.5, "exchange_seconds": 1.0, "wait_seconds": 0.25,
                "evaluate_seconds": 0.125,
            }  # fmt: skip
            logged = {f"value/{name}": number / (name + 1) for name in range(20)}
            for kind, data in (("round", told), ("logged", {"round": number, "values": logged})):
                text = f"{region}: {kind} of round {number}"
                yield EventRow(10_000.0 + 6 * number, job, region, f"partition.{kind}", text, json.dumps(data))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_pages_are_small_and_answered_soon(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            job = (await stage.submit(job_file)).job.id
            await train(job, a, b)
            a.report(job, "training", **figures("a", "b", 1))
            await a.settled()
            with open_store(f"sqlite:///{serve_config.state_dir / 'state.db'}") as store:
                active = store.job(job)
            await finish(job, a, b)
            with open_store(f"sqlite:///{serve_config.state_dir / 'state.db'}") as store:
                ended = store.job(job)
            assert ended is not None
            assert active is not None
            await a.close()
            await b.close()
        with open_store(f"sqlite:///{serve_config.state_dir / 'state.db'}") as store:
            jobs = (*_copies(ended, "ended", ENDED), *_copies(active, "active", ACTIVE))
            long = "active-00000"
            store.commit(Change(jobs=jobs, regions=tuple(regions_with_datasets(300))))
            store.commit(Change(events=tuple(_events(long))))
            lines = tuple(LogRow(1000.0 + n, long, "a", "worker 0", f"line {n} " + "x" * 100) for n in range(3000))
            store.commit(Change(logs=lines))
        async with staged(serve_config) as stage, browser(stage) as pages:
            told = {}
            for path in (
                "/", f"/jobs/{long}", f"/jobs/{ended.id}", f"/jobs/{long}/logs",
                f"/jobs/{long}/logs?q=line+29", f"/jobs/{long}/series", f"/compare?job={long}&job={ended.id}",
                "/submit", "/submit?template=text", "/static/dashboard.js", "/static/style.css",
            ):  # fmt: skip
                seconds, size = [], 0
                for _ in range(5):
                    # Of this process, which serves: other work on the machine does not count.
                    begun = time.process_time()
                    answer = await pages.get(path)
                    seconds.append(time.process_time() - begun)
                    assert answer.status_code == 200
                    size = len(answer.content)
                told[path] = size, statistics.median(seconds), max(seconds)
            print(told)
            found = (await pages.get(f"/jobs/{long}/series")).json()
            assert min(len(one["x"]) for one in found["charts"][0]["lines"]) > 50
            assert found["axes"]["a"]["round"][-1] == found["axes"]["a"]["step"][-1] / 20 == ROUNDS
            for _, _, _, *parts in found["timeline"][0]["rounds"][1:]:
                assert parts[-1] == pytest.approx(sum(parts) / 6, rel=0.01), "a sixth of each round is not counted"
            assert {path: one for path, one in told.items() if one[0] > MOST_BYTES or one[1] > MOST_SECONDS} == {}

    run(scenario())
