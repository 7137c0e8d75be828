"""What was history of a task holds for the task, whatever the job is called, and however fast it learns."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.server import ServeConfig
from control_plane.service.measuring._task_history import (
    TaskHistory,
    fixed_shares_of,
    measured_batches,
    speeds_of,
    stage_paces_of,
    task_keys,
)
from control_plane.service.planning._tuning import profile_from_json
from control_plane.spec import load, pack
from control_plane.store import Change, RunRow, WeightRow, open_store
from geofed_pb.v1 import control_pb2
from scheduler.tuning import fit_compute
from tests.control_plane.conftest import staged
from tests.control_plane.fake_agent import profile_of
from tests.control_plane.scenario import run


def keys(job_file: Path, *overrides: str) -> tuple[str, str]:
    loaded = load(job_file, overrides)
    return task_keys(loaded.spec, loaded.code_digest)


@pytest.mark.parametrize("change", ["metadata.name=zz", "task.config.lr=0.02", "train.batch=64", "train.seed=7"])
def test_the_same_task_is_known_under_another_name_rate_and_batch(job_file: Path, change: str) -> None:
    assert keys(job_file, change)[0] == keys(job_file)[0]


@pytest.mark.parametrize("change", ["task.config.width=16", "data.dataset=faces"])
def test_another_task_is_not_taken_for_it(job_file: Path, change: str) -> None:
    assert set(keys(job_file, change)).isdisjoint(keys(job_file))


def test_after_a_change_of_the_code_the_name_counts(job_file: Path) -> None:
    before = keys(job_file)
    (job_file.parent / "README.md").write_text("no code")
    assert keys(job_file) == before
    (job_file.parent / "helpers.py").write_text("WIDTH = 9\n")
    after, zz = keys(job_file), keys(job_file, "metadata.name=zz")
    assert after[0] != before[0]
    assert after[1] == before[1]
    assert set(zz).isdisjoint(before), "a stranger with other code is no kin"


def row(batch: int, speed: float, at: float = 1.0, key: str = "t", kin: str = "k") -> RunRow:
    return RunRow(f"j{at}", "a", key, at, speed, 7, 0.5, kin_key=kin, batch=batch)


def test_runs_of_the_code_count_before_those_of_the_name(tmp_path: Path) -> None:

    with open_store(f"sqlite:///{tmp_path / 'state.db'}") as store:
        store.commit(Change(runs=(row(10, 50.0, 1.0, "old"), row(10, 70.0, 2.0, "t"))))
        assert [found.samples_per_second for found in store.runs("t", "k")] == [70.0]
        assert [found.samples_per_second for found in store.runs("new", "k")] == [70.0, 50.0]
        assert store.runs("new", "other") == []


def test_a_profile_tells_what_another_batch_takes() -> None:
    profile = profile_from_json(json.dumps(profile_of("a", 10)), "a")
    line = fit_compute(profile.steps)
    speed = 10 / (line.fixed_seconds + 10 * line.seconds_per_sample)
    told, guessed = speeds_of([row(10, speed / 2)], 40, {"a": profile})
    # Twice as slow as the profile says it was with 10, so with 40.
    assert math.isclose(told["a"], 40 / (line.fixed_seconds + 40 * line.seconds_per_sample) / 2)
    assert not guessed


def test_what_a_run_has_measured_counts_more_than_a_later_profile() -> None:
    """A profile's worker runs alone on its machine; the newest row is first, as the store gives them."""
    profiled = replace(row(40, 1260.0), profile_json="{}")
    assert speeds_of([profiled, row(40, 391.0), row(40, 494.0)], 40, {}) == ({"a": 391.0}, frozenset())
    assert speeds_of([profiled], 40, {}) == ({"a": 1260.0}, frozenset()), "there was no run"


def test_the_pace_of_stages_is_the_median_of_the_last_runs() -> None:
    def ran(region: str, *paces: float) -> list[RunRow]:
        return [replace(row(10, 50.0), region=region, stage_pace=pace) for pace in paces]

    runs = [*ran("a", 1.2, 0.0, 1.1, 1.6, 1.3, 1.25, 9.0, 9.0), *ran("b", 0.0), *ran("c", 40.0), *ran("d", 0.1)]
    assert stage_paces_of(runs) == {"a": 1.25, "c": 4.0, "d": 0.5}
    assert stage_paces_of([]) == {}


def test_two_batches_make_a_line_and_one_a_guess() -> None:
    runs = [row(10, 10 / 0.3, 2.0), row(30, 30 / 0.5, 1.0)]
    told, guessed = speeds_of(runs, 50, {})
    assert (math.isclose(told["a"], 50 / 0.7), guessed) == (True, frozenset())
    assert speeds_of(runs, 30, {})[0] == {"a": 30 / 0.5}, "what was measured with it counts"
    told, guessed = speeds_of(runs[:1], 20, {})
    assert (math.isclose(told["a"], 20 / 0.45), guessed) == (True, frozenset({"a"}))


def test_a_probe_of_two_batches_tells_more_than_a_guess() -> None:
    probed = WeightRow("t", "b", 0.0, 10, 40, json.dumps([[64, 0.74, 0], [16, 0.26, 0]]), 2.0)
    told, guessed = speeds_of([row(64, 32.0)], 16, {}, probed)
    # Of 2 s for 64, where the probe took 0.74 s.
    assert (told["a"], guessed) == (pytest.approx(16 / (2.0 * 0.26 / 0.74)), frozenset({"a"}))
    one = replace(probed, steps_json=json.dumps([[64, 0.74, 0]]))
    assert speeds_of([row(64, 32.0)], 16, {}, one) == speeds_of([row(64, 32.0)], 16, {})


def test_what_a_step_takes_at_least_is_told_by_profiles_runs_and_the_probe() -> None:
    probed = WeightRow("t", "b", 0.0, 10, 40, json.dumps([[64, 0.74, 0], [16, 0.26, 0]]), 2.0)
    profile = profile_from_json(json.dumps(profile_of("a", 10)), "a")
    line = fit_compute(profile.steps)
    runs = [row(10, 10 / 0.3, 2.0), row(30, 30 / 0.5, 1.0)]
    for told, by in (({}, {"a": profile}), ({}, {})):
        assert fixed_shares_of("ab", [], 40, by, None) == told, "no run tells how fast a worker is"
    assert fixed_shares_of("ab", runs, 30, {}, None) == {"a": pytest.approx(0.2 / 0.5)}
    assert fixed_shares_of("ab", runs, 30, {}, probed) == {
        "a": pytest.approx(0.2 / 0.5), "b": pytest.approx(0.1 / 0.4),
    }  # fmt: skip
    fixed = line.fixed_seconds / (line.fixed_seconds + 40 * line.seconds_per_sample)
    assert fixed_shares_of("a", runs, 40, {"a": profile}, probed) == {"a": pytest.approx(fixed)}


def test_the_speed_of_a_batch_that_workers_divided_is_no_guess() -> None:
    probed = WeightRow("t", "b", 0.0, 10, 40, json.dumps([[64, 0.74, 0], [16, 0.26, 0]]), 2.0)
    told, guessed = speeds_of([row(16, 32.0)], 64, {}, probed)
    assert (told["a"], guessed) == (pytest.approx(64 / (0.5 * 0.74 / 0.26)), frozenset())
    assert speeds_of([row(16, 32.0)], 40, {}, probed)[1] == {"a"}


def test_batches_are_measured_by_runs_profiles_and_the_probe() -> None:
    probed = WeightRow("t", "b", 0.0, 10, 40, json.dumps([[64, 0.74, 0], [16, 0.26]]), 2.0)
    profile = profile_from_json(json.dumps(profile_of("a", 10)), "a")
    runs = (row(100, 32.0), row(50, 0.0), row(0, 32.0), replace(row(7, 32.0), profile_json="{}"))
    assert measured_batches(TaskHistory(runs, probed), {"a": profile}) == {5, 10, 20, 16, 64, 100}
    assert measured_batches(TaskHistory(), {}) == frozenset()


@given(st.lists(st.tuples(st.integers(1, 4096), st.floats(0.1, 1e6)), min_size=1, max_size=4), st.integers(1, 4096))
def test_no_step_is_shorter_with_more_samples_and_no_sample_longer(runs: list[tuple[int, float]], batch: int) -> None:
    rows = [row(size, speed, float(-number)) for number, (size, speed) in enumerate(runs)]
    speed = speeds_of(rows, batch, {})[0]["a"]
    same = next((one for one in rows if one.batch == batch), None)
    if same is not None:
        assert speed == same.samples_per_second
        return
    newest = rows[0]
    grown = batch > newest.batch
    assert (
        (speed >= newest.samples_per_second * (1 - 1e-9))
        if grown
        else (speed <= newest.samples_per_second * (1 + 1e-9))
    )
    step, was = batch / speed, newest.batch / newest.samples_per_second
    assert step >= was * (1 - 1e-9) if grown else step <= was * (1 + 1e-9)


@pytest.mark.slow
def test_a_plan_of_another_name_rests_on_what_was_measured(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            agent = await stage.agent("a")
            await agent.connect()
            first = load(job_file)
            key, kin = task_keys(first.spec, first.code_digest)
            with open_store(f"sqlite:///{serve_config.state_dir / 'state.db'}") as store:
                store.commit(Change(runs=(row(10, 123.0, 1.0, key, kin),)))

            async def basis(*overrides: str) -> str:
                loaded = load(job_file, overrides)
                told = await stage.client.plan(loaded.json, loaded.code_digest)
                return str(json.loads(told.plan_json)["estimate"]["basis"])

            assert await basis() == "measured"
            assert await basis("metadata.name=zz", "task.config.lr=0.5") == "measured"
            assert await basis("metadata.name=zz", "train.batch=20") == "other batch"
            assert await basis("task.config.width=9") == "stated"
            await agent.close()

    run(scenario())


def test_whose_code_a_job_is_made_of_is_read_from_it_and_nobody_may_say_otherwise(
    serve_config: ServeConfig, job_file: Path
) -> None:
    """Else one user's runs would count as measurements of another's task."""

    async def scenario() -> None:
        async with staged(serve_config) as stage, await stage.agent("a"):
            loaded = load(job_file)
            own, kin = task_keys(loaded.spec, loaded.code_digest)
            packed = pack(loaded.folder, loaded.spec.task.module)
            content, digest = packed.content, packed.digest
            await stage.client.put_bundle(content, digest)
            request = control_pb2.SubmitRequest(request_id="r1", spec_json=loaded.json, bundle_digest=digest)
            claimed = b"\x22\x05other"  # field 4, which had a client say it
            request = control_pb2.SubmitRequest.FromString(request.SerializeToString() + claimed)
            job = (await stage.client._stub.Submit(request, metadata=stage.client._metadata)).job
            with open_store(f"sqlite:///{serve_config.state_dir / 'state.db'}") as store:
                stored = store.job(job.id)
            assert stored is not None
            assert stored.task_key == own != kin

    run(scenario())
