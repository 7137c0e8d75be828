"""Plans of jobs whose regions hold many clients."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import Capacity, ClientDemand, Dataset, Region, Snapshot, Split
from sync.policy import clients_of_round
from tests.scheduler.test_plan import PRICES, declined, demand, planned

WANTED = ClientDemand(fraction=0.1, least=5, epochs=2)


def _region(name: str, samples: int, clients: int | None, workers: int = 8, speed: float = 1000.0) -> Region:
    held = Dataset("digits", {"train": Split(samples, clients=clients)})
    return Region(name, "cloud", Capacity(workers, 2048, speed), PRICES, (held,))


@settings(deadline=None)  # the first plan of a process takes longer
@given(
    shape=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=4),
    fraction=st.floats(0.01, 1.0),
    steps=st.integers(0, 5),
    rounds=st.integers(1, 200),
)
def test_all_regions_make_the_same_rounds_and_weigh_by_their_data(
    shape: list[tuple[int, int, int]], fraction: float, steps: int, rounds: int
) -> None:
    regions = [_region(f"r{at}", clients * each, clients, workers) for at, (clients, each, workers) in enumerate(shape)]
    wanted = ClientDemand(fraction, 1, 0 if steps else 2, steps)
    chosen = planned(
        Snapshot(tuple(regions)), demand(batch=4, epochs=None, steps=rounds, interval=1, exchange="synchronous",
                                         clients=wanted)
    )  # fmt: skip
    assert (chosen.rounds, chosen.interval) == (rounds, 1)
    total = sum(part.samples for part in chosen.partitions)
    for part, (clients, each, _) in zip(chosen.partitions, shape, strict=True):
        drawn = clients_of_round(clients, fraction, 1)
        assert (part.clients, part.clients_per_round, part.steps_per_round) == (clients, drawn, 1)
        assert part.workers <= drawn, "no worker is without a client"
        made = drawn * (steps * min(4, each) if steps else 2 * each)
        assert part.batch == max(1, math.ceil(made / part.workers - 1e-9))
        assert chosen.shares[part.region] == part.samples / total
    assert not [text for text in chosen.warnings if "passes over its data" in text]


def test_epochs_are_passes_of_all_clients() -> None:
    chosen = planned(
        Snapshot((_region("a", 5000, 1000),)),
        demand(batch=4, epochs=10.0, interval=1, exchange="synchronous", clients=WANTED),
    )
    # A round passes twice over a tenth of the data.
    assert chosen.rounds == 50


@pytest.mark.parametrize("workers", [1, 2, 6, 8, 9])
def test_rounds_do_not_depend_on_the_number_of_workers(workers: int) -> None:
    chosen = planned(
        Snapshot((_region("a", 100, 100, workers=16),)),
        demand(batch=4, epochs=10.0, interval=1, exchange="synchronous", clients=ClientDemand(0.1, 1, 1),
               workers=workers),
    )  # fmt: skip
    assert chosen.rounds == 100
    assert chosen.partitions[0].workers == workers


def test_no_more_workers_than_clients_of_a_round() -> None:
    wanted = demand(batch=4, epochs=1.0, interval=1, exchange="synchronous", clients=ClientDemand(0.1, 1, 1),
                    workers=16)  # fmt: skip
    (part,) = planned(Snapshot((_region("a", 1000, 100, workers=16),)), wanted).partitions
    assert (part.clients_per_round, part.workers, part.most_workers) == (10, 10, 10)


def test_a_region_that_does_not_know_its_clients_takes_no_part() -> None:
    told = declined(Snapshot((_region("a", 5000, 1000), _region("b", 5000, None))), demand(clients=WANTED))
    assert "region b does not tell how many clients its shard of digits has" in told["INADMISSIBLE"]


def test_a_round_that_takes_longer_than_an_invocation_may_is_warned_of() -> None:
    slow = _region("a", 500_000, 1000, workers=1, speed=100.0)
    wanted = demand(batch=4, epochs=None, steps=3, interval=1, exchange="synchronous", clients=WANTED)
    (told,) = [text for text in planned(Snapshot((slow,)), wanted).warnings if "a round of clients" in text]
    assert "takes a about 1000 s" in told
    fast = replace(slow, capacity=Capacity(1, 2048, 100_000.0))
    assert not [text for text in planned(Snapshot((fast,)), wanted).warnings if "a round of clients" in text]


def test_memory_counts_what_rounds_of_clients_hold() -> None:
    wanted = {"batch": 4, "epochs": None, "steps": 5, "interval": 1, "exchange": "synchronous", "clients": WANTED}
    regions = (_region("a", 5000, 1000),)
    known = Snapshot(regions, model_bytes=100 << 20, held_bytes=600 << 20)
    assert planned(known, demand(**wanted)).partitions[0].memory_mb == 1536, "320 MB, and 48 bytes a parameter"
    local = replace(known, model_bytes=1 << 20)
    assert planned(local, demand(local=True, **wanted)).partitions[0].memory_mb == 1536, "as much is trained"
    assert planned(local, demand(**wanted)).partitions[0].memory_mb == 1024
    (told,) = planned(known, demand(memory_mb=512, **wanted)).warnings
    assert told.startswith("functions of 512 MB in a cannot hold the model: its tensors, gradients and sums of clients")
    assert "stages" not in told
