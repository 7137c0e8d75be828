"""Differential privacy of updates between real parameter servers."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.server_process import JOB, NumpyWorker, Server, wait_until

from geofed_pb.errors import GeofedError
from sync.histograms import Histogram
from sync.layout import Layout, Slot
from sync.privacy import LedgerRow, PrivacyLedger, epsilon_of
from sync.ps.core.actions import StoreMetrics
from sync.ps.execution.releases import CountReleases, Releases
from sync.wan import ExchangeSettings

pytestmark = pytest.mark.processes

Servers = Callable[..., list[Server]]
Workers = Callable[..., NumpyWorker]
NAMES = ("east", "north", "west")
SHARES = {"east": 0.2, "north": 0.6, "west": 0.2}


def settings(noise: float, clip: float, **more: float) -> dict[str, float]:
    return {"noise": noise, "clip": clip, "delta": 1e-5, "epsilon": 1.0, "sampled": 0.0, **more}


@pytest.fixture
def ledgers(tmp_path: Path) -> dict[str, PrivacyLedger]:
    """Each region's own ledger, which grants the job four releases."""
    made = {name: PrivacyLedger(tmp_path / "ledgers" / name) for name in NAMES}
    for one in made.values():
        row = LedgerRow(JOB, "digits", "region", 1.0, 1.0, 1e-5, planned=4, granted=4)
        one.change(lambda rows, row=row: [row])  # type: ignore[misc]
    return made


@pytest.fixture
def private(servers: Servers, ledgers: dict[str, PrivacyLedger], tmp_path: Path) -> Servers:
    """Makes running servers, each with its own ledger."""
    return functools.partial(servers, *NAMES, each=lambda name: {"privacy_ledger": tmp_path / "ledgers" / name})


def end(pool: list[NumpyWorker]) -> None:
    for worker in pool:
        worker.join(40)
        assert not worker.is_alive(), f"{worker.server.region} hangs: {worker.server.status().condition}"
        assert worker.failure is None, worker.failure
    assert all(np.array_equal(worker.finals[0], pool[0].finals[0]) for worker in pool)


@pytest.mark.parametrize("secure", [False, True])
def test_updates_are_clipped_and_have_the_noise_that_is_paid_for(
    private: Servers, workers: Workers, ledgers: dict[str, PrivacyLedger], secure: bool
) -> None:
    more = {"codec": "fp32-masked", "shares": SHARES} if secure else {}
    numbers = settings(0.5, 0.08, **({"secure": 3.0} if secure else {}))
    made = private(rounds=4, wan_settings=numbers, **more)
    pool = [workers(server, push, samples=10.0) for server, push in zip(made, (1.0, 2.0, -1.0), strict=True)]
    end(pool)
    # Each change has a norm of 8 or more, of 0.08 once it is clipped: 0.01 in each of 64 coordinates.
    weights = SHARES if secure else dict.fromkeys(NAMES, 1 / 3)
    mean = 4 * 0.01 * (weights["east"] + weights["north"] - weights["west"])
    # Under secure aggregation two regions' noise is enough, and all three add it.
    std = 0.04 * math.sqrt(4) * (max(SHARES.values()) * math.sqrt(3 / 2) if secure else math.sqrt(1 / 3))
    noise = pool[0].finals[0].astype(np.float64) - 1.0 - mean
    # Five standard errors of 64 numbers.
    assert abs(noise.mean()) < 5 * std / 8
    assert abs(noise.std() / std - 1) < 5 / math.sqrt(128)
    assert {name: one.rows()[0].spent for name, one in ledgers.items()} == dict.fromkeys(NAMES, 4)


def test_a_server_that_is_killed_pays_once_and_sends_the_same_bytes(
    private: Servers, workers: Workers, ledgers: dict[str, PrivacyLedger]
) -> None:
    made = private(rounds=2, wan_settings=settings(0.1, 1.0))
    east, north, west = made
    pool = [workers(east, 1e-3), workers(north, 2e-3)]
    sent = north.folder / "state" / "outbox" / "1.frame"
    wait_until(lambda: east.status().condition == "waiting for the update of round 1 from west", "the others to wait")
    before = sent.read_bytes()
    north.kill()
    north.launch(epoch=2)
    north.await_ready()
    for server in made:
        server.configure(*(other for other in made if other is not server), epoch=server.settings["epoch"])
    assert sent.read_bytes() == before
    pool.append(workers(west, 3e-3))
    end(pool)
    assert ledgers["north"].rows()[0].spent == 2


def refused(server: Server, code: str) -> None:
    assert server.process is not None
    wait_until(lambda: server.process.poll() is not None, f"{server.region} to end")  # type: ignore[union-attr]
    assert f"error[{code}]" in server.log.read_text()


def test_a_server_whose_update_is_gone_makes_no_other_one(
    private: Servers, workers: Workers, ledgers: dict[str, PrivacyLedger], tmp_path: Path
) -> None:
    """As after its state was deleted with the job, or restored from a copy that lacks the last update."""
    made = private(rounds=2, wan_settings=settings(0.1, 1.0))
    east, north, _ = made
    workers(east, 1e-3)
    workers(north, 2e-3)
    wait_until(lambda: east.status().condition == "waiting for the update of round 1 from west", "the others to wait")
    (row,) = ledgers["north"].rows()
    assert (row.spent, row.stored) == (1, 1)
    north.kill()
    for sent in (north.folder / "state" / "outbox").glob("1.*"):
        sent.unlink()
    north.launch(epoch=2)
    north.await_ready()
    for server in made:
        server.configure(*(other for other in made if other is not server), epoch=server.settings["epoch"])
    workers(north, 2e-3)
    refused(north, "STATE_INVALID")
    assert "round 1 of job-1 was released before" in north.log.read_text()
    assert not list((north.folder / "state" / "outbox").glob("1.*"))


def test_an_update_that_was_stored_when_the_server_ended_counts_as_sent(
    private: Servers, workers: Workers, ledgers: dict[str, PrivacyLedger]
) -> None:
    made = private(rounds=2, wan_settings=settings(0.1, 1.0))
    east, north, _ = made
    workers(east, 1e-3)
    workers(north, 2e-3)
    wait_until(lambda: east.status().condition == "waiting for the update of round 1 from west", "the others to wait")
    north.kill()
    # As if it had ended just before it told the ledger.
    ledgers["north"].change(lambda rows: [replace(row, stored=0) for row in rows])
    north.launch(epoch=2)
    north.await_ready()
    assert ledgers["north"].rows()[0].stored == 1
    north.kill()
    ledgers["north"].change(lambda rows: [replace(row, spent=0, last=0, stored=0) for row in rows])
    north.launch(epoch=3)
    refused(north, "STATE_INVALID")
    assert "it is older than the job" in north.log.read_text()


def test_a_round_that_is_not_granted_never_leaves(
    private: Servers, workers: Workers, ledgers: dict[str, PrivacyLedger]
) -> None:
    ledgers["west"].change(lambda rows: [replace(row, granted=1) for row in rows])
    made = private(rounds=3, wan_settings=settings(0.1, 1.0))
    for server in made:
        workers(server, 1e-3)
    refused(made[2], "PRIVACY_EXHAUSTED")
    assert [path.stem for path in sorted((made[2].folder / "state" / "outbox").glob("*.frame"))][-1] <= "1"
    assert made[0].status().round == 1


def test_a_damaged_ledger_lets_nothing_leave(private: Servers, workers: Workers, tmp_path: Path) -> None:
    (tmp_path / "ledgers" / "west" / "ledger.json").write_text("{}")
    made = private(rounds=2, wan_settings=settings(0.1, 1.0))
    for server in made:
        workers(server, 1e-3)
    refused(made[2], "STATE_INVALID")
    assert not list((made[2].folder / "state" / "outbox").glob("1.*"))


def test_a_server_without_a_ledger_does_not_start() -> None:
    numbers, _ = ExchangeSettings.of(settings(0.1, 1.0))
    with pytest.raises(GeofedError, match="without a ledger"):
        Releases.of(None, JOB, "east", numbers, SHARES, 1)


@pytest.mark.parametrize(("noise", "clip", "text"), [(1.0, 20.0, "exceeds what"), (1e-6, 1.0, "is lost in")])
def test_secure_aggregation_must_be_able_to_hold_the_noise(
    noise: float, clip: float, text: str, tmp_path: Path
) -> None:
    numbers, _ = ExchangeSettings.of(settings(noise, clip, secure=3.0))
    with pytest.raises(GeofedError, match=text) as told:
        Releases.of(tmp_path, JOB, "east", numbers, SHARES, 1)
    assert told.value.code == "CONFIG_INVALID"


def test_state_that_gradients_do_not_train_is_refused(tmp_path: Path) -> None:
    numbers, _ = ExchangeSettings.of(settings(0.1, 1.0))
    releases = Releases.of(tmp_path, JOB, "east", numbers, {}, 1)
    assert releases is not None
    releases.check(Layout((Slot("w", (4,), "float32"),), 1))
    with pytest.raises(GeofedError, match=r"norm\.running_mean is not trained by gradients") as told:
        releases.check(Layout((Slot("w", (4,), "float32"), Slot("norm.running_mean", (4,), "float32")), 1))
    assert (told.value.code, told.value.hint) == ("TASK_INVALID", "use GroupNorm or LayerNorm instead of BatchNorm")


EDGES = (0.0, 20.0, 40.0, 100.0)
STATED = {"age": EDGES, "ward": ("a", "b", "c"), "lr": (0.1, 0.2)}


def counting(folder: Path, granted: int = 1, noise: float = 2.0) -> CountReleases:
    row = LedgerRow(JOB, "digits", "sample", noise, 1.0, 1e-5, planned=granted, granted=granted)
    PrivacyLedger(folder).change(lambda rows: [row])
    numbers, _ = ExchangeSettings.of(settings(noise, 1.0, measured=1.0))
    made = CountReleases.of(folder, JOB, numbers, STATED)
    assert made is not None
    return made


def measured(**more: Any) -> StoreMetrics:
    age = Histogram(EDGES, (), (4000, 0, 3000))
    ward = Histogram((), ("b", "a"), (5000, 2000))
    return replace(StoreMetrics(1, 7000.0, {"mean": 0.5}, histograms={"age": age, "ward": ward}), **more)


def test_counts_have_noise_for_as_many_histograms_as_a_sample_is_in(tmp_path: Path) -> None:
    """Their deviation over many evaluations, and nothing else of the evaluation leaves."""
    counts, draws = counting(tmp_path, granted=400), []
    for sequence in range(400):
        found = counts.released(measured(sequence=sequence))
        assert (found.metrics, found.samples, found.error) == ({}, 0.0, "")
        assert found.histograms["ward"].categories == ("a", "b", "c"), "all that are stated, whether any has samples"
        age, ward = found.histograms["age"], found.histograms["ward"]
        assert min(*age.counts, *ward.counts) >= 0
        draws.append([age.counts[0] - 4000, age.counts[2] - 3000, ward.counts[0] - 2000, ward.counts[1] - 5000])
    # Two histograms; and five standard errors of 1,600 numbers, which rounding makes no wider than by 1/12.
    expected = math.sqrt(2.0**2 * 2 + 1 / 12)
    assert abs(np.std(draws) / expected - 1) < 5 / math.sqrt(2 * 1600)
    assert abs(np.mean(draws)) < 5 * expected / 40


def test_an_evaluation_costs_what_dp_accounting_says_of_it(tmp_path: Path) -> None:
    dp = pytest.importorskip("dp_accounting")
    counts = counting(tmp_path, granted=3)
    for sequence in range(3):
        counts.stored(counts.released(measured(sequence=sequence)))
    (row,) = PrivacyLedger(tmp_path).rows()
    accountant = dp.rdp.RdpAccountant()
    accountant.compose(dp.GaussianDpEvent(2.0), 3)
    assert (row.spent, epsilon_of([(row.release, row.spent)], 1e-5)) == (3, accountant.get_epsilon(1e-5))
    with pytest.raises(GeofedError) as told:
        counts.released(measured(sequence=3))
    assert told.value.code == "PRIVACY_EXHAUSTED"


def test_an_evaluation_is_made_once_with_its_noise(tmp_path: Path) -> None:
    counts = counting(tmp_path, granted=2)
    counts.released(measured())
    # The process was killed before it was stored: nothing has left, and nothing more is spent.
    found = counts.released(measured())
    counts.stored(found)
    counts.stored(found)
    assert PrivacyLedger(tmp_path).rows()[0].spent == 1
    with pytest.raises(GeofedError) as told:
        counts.released(measured())
    assert told.value.code == "STATE_INVALID", "the mean of such repeats would have no noise"


@pytest.mark.parametrize(
    ("histogram", "text"),
    [
        ({"age": Histogram((0.0, 17.25, 100.0), (), (1, 2))}, "the bin edges of age are not in task.config.age"),
        ({"height": Histogram(EDGES, (), (1, 2, 3))}, "the bin edges of height are not in task.config.height"),
        ({"ward": Histogram((), ("a", "Meier"), (1, 2))}, "a category of ward is not in task.config.ward"),
        ({"name": Histogram((), ("Meier",), (1,))}, "a category of name is not in task.config.name"),
        ({"age": Histogram(EDGES, (), (4000, 4000, 1))}, "more counts than there are samples"),
        ({"ward": Histogram((), ("a",), (1,), withheld=1)}, "or has left some out"),
    ],
)
def test_what_the_job_does_not_state_is_not_released(
    tmp_path: Path, histogram: dict[str, Histogram], text: str
) -> None:
    counts = counting(tmp_path)
    with pytest.raises(GeofedError, match=re.escape(text)) as told:
        counts.released(measured(histograms=histogram))
    assert (told.value.code, "Meier" in told.value.message) == ("TASK_INVALID", False)
    assert PrivacyLedger(tmp_path).rows()[0].spent == 0


def test_an_evaluation_that_fails_costs_and_tells_nothing(tmp_path: Path) -> None:
    counts = counting(tmp_path)
    for wrong in (measured(error="metrics raised X"), measured(histograms={})):
        found = counts.released(wrong)
        counts.stored(found)
        assert (found.metrics, found.histograms, found.samples) == ({}, {}, 0.0)
    assert PrivacyLedger(tmp_path).rows()[0].spent == 0
    numbers, _ = ExchangeSettings.of(settings(2.0, 1.0, measured=1.0))
    frozen = Releases.of(tmp_path, JOB, "east", numbers, {}, 1)
    assert frozen is not None
    before = np.ones(4, np.float32)
    assert frozen.released(before * 2, before, 1).tobytes() == before.tobytes(), "nothing is trained, so nothing leaves"
