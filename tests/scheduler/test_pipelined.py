"""Plans of models in stages: when there are stages, what follows for workers and steps, and what is declined."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler import BatchPlanner, Capacity, Declined, Plan, PlannedPartition, Planner, Snapshot, plan, tried_batches
from scheduler._pipelined import staged
from scheduler.pipeline import cuts_of, evaluate, pipeline_options, played
from scheduler.tuning import StepPoint, TaskProfile
from tests.scheduler.test_plan import demand, planned
from tests.scheduler.test_tuned import profile, there

pytestmark = pytest.mark.slow

LAYERS = 6


def deep(name: str, *, peak_mb: float = 300.0, layer_mb: float = 40.0) -> TaskProfile:
    """A model of equal layers."""
    layer = {
        "kind": "Linear",
        "parameter_bytes": layer_mb * 1e6,
        "state_bytes": 0.0,
        "activation_bytes": 2e5,
        "output_bytes": 1e5,
        "forward_alpha_seconds": 0.001,
        "forward_beta_seconds": 0.002,
        "backward_alpha_seconds": 0.001,
        "backward_beta_seconds": 0.004,
    }
    layers = tuple({**layer, "name": str(number)} for number in range(LAYERS))
    steps = tuple(StepPoint(b, 1024, 0.01 + 0.036 * b, peak_mb + b) for b in (8, 16, 32, 64))
    return replace(profile(name), steps=steps, layers=layers, model_bytes=int(LAYERS * layer_mb * 1e6))


def snapshot(peak_mb: float, *, workers: int = 12, memory_mb: int = 1024) -> Snapshot:
    regions = tuple(replace(there(n), capacity=Capacity(workers, memory_mb)) for n in "ab")
    return Snapshot(regions, model_bytes=4_000_000, profiles={n: deep(n, peak_mb=peak_mb) for n in "ab"})


def cut(found: Plan, sentences: int = 0) -> list[PlannedPartition]:
    """``sentences``: of why, beside those of the stages."""
    parts = [part for part in found.partitions if part.pipeline is not None]
    for part in parts:
        shape = part.pipeline
        assert shape is not None
        assert [stage.first for stage in shape.stages] == [0, *(stage.last + 1 for stage in shape.stages[:-1])]
        assert shape.stages[-1].last == LAYERS - 1
        assert part.workers == len(shape.stages) * shape.degree
        assert all(stage.needed_mb <= stage.memory_mb == part.memory_mb for stage in shape.stages)
        assert len(shape.why) == 2 * len(shape.stages) + sentences
    return parts


def test_a_model_that_fits_stays_whole_and_one_that_does_not_is_cut() -> None:
    assert not cut(planned(snapshot(300.0, memory_mb=2048), demand()))
    assert not cut(planned(snapshot(900.0), demand(parallelism="data", memory_mb=1024)))
    # A step alone would fit into the second: what merges it would not.
    for there_is in (snapshot(900.0), snapshot(700.0)):
        parts = cut(planned(there_is, demand()))
        assert [part.region for part in parts] == ["a", "b"]
        assert all(len(part.pipeline.stages) > 1 for part in parts if part.pipeline)


def test_a_model_that_no_function_holds_is_declined_where_it_cannot_be_cut_unless_the_job_file_insists() -> None:
    answer = plan(snapshot(900.0), demand(parallelism="whole"))
    assert isinstance(answer, Declined)
    assert [reason.code for reason in answer.reasons] == ["INADMISSIBLE"] * 2
    assert "a step of 32 samples does not fit into a function of 1024 MB in a, as profiled" in answer.reasons[0].text
    assert "use a smaller train.batch" in answer.reasons[0].remedy
    for insists in (demand(parallelism="data"), demand(parallelism="whole", memory_mb=1024)):
        assert not cut(planned(snapshot(900.0), insists))


def test_of_the_batches_to_choose_from_those_that_no_function_holds_are_planned_in_stages() -> None:
    there_is, wanted = snapshot(300.0, memory_mb=1024), demand(epochs=3.0, steps=None, chooses_batch=True)
    found = BatchPlanner(lambda _: Planner(there_is), tried_batches(there_is, wanted, (16, 32))).plan(wanted)
    assert isinstance(found, Plan), found
    assert len(found.batches) > 1
    assert {part.batch for part in cut(found)} == {found.batch}


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_the_job_file_may_ask_for_stages(stages: int) -> None:
    asked = demand(parallelism="pipeline", stages=stages, workers=6)
    for part in cut(planned(snapshot(300.0, memory_mb=10240), asked)):
        assert part.pipeline is not None
        assert len(part.pipeline.stages) == stages
        assert part.workers == 6


@pytest.mark.parametrize("replicas", [1, 2])
def test_stages_that_share_cores_take_as_long_as_these_have_to_do(replicas: int) -> None:
    """And with many cores as long as with their own."""
    asked = demand(parallelism="pipeline", stages=3, workers=3 * replicas, activations="fp32")

    def seconds(cores: float) -> float:
        there_is = snapshot(900.0, memory_mb=3072)
        shared = tuple(replace(r, capacity=replace(r.capacity, cores=cores)) for r in there_is.regions)
        shape = cut(planned(replace(there_is, regions=shared), asked))[0].pipeline
        assert shape is not None
        assert shape.degree == replicas
        assert ("share" in shape.why[0]) == (cores == 1.0)
        return shape.step_seconds

    # Forward and backward pass of all layers, of each replica's batch; messages come on top, and where there are two
    # replicas what they put and get of a stage's gradient.
    compute = replicas * LAYERS * asked.batch * 0.006
    merge = (replicas - 1) * 2 * (LAYERS / 3 * 40e6) / 1e8
    assert compute < seconds(1.0) < 1.6 * compute + merge
    assert seconds(64.0) == seconds(0.0) < seconds(1.0)


def test_the_optimisers_step_counts() -> None:
    def seconds(update: float) -> float:
        there_is = snapshot(900.0)
        layers = tuple({**layer, "update_seconds": update} for layer in deep("a").layers)
        profiles = {name: replace(known, layers=layers) for name, known in there_is.profiles.items()}
        asked = demand(parallelism="pipeline", stages=3, workers=3)
        shape = cut(planned(replace(there_is, profiles=profiles), asked))[0].pipeline
        assert shape is not None
        return shape.step_seconds

    assert seconds(0.5) >= seconds(0.0) + 0.5


def test_steps_and_shares_count_replicas_not_workers() -> None:
    whole = planned(snapshot(300.0), demand(workers=2, parallelism="data", epochs=3, steps=None))
    split = planned(snapshot(300.0), demand(workers=4, parallelism="pipeline", stages=2, epochs=3, steps=None))
    assert cut(split)
    assert (split.rounds, split.interval) == (whole.rounds, whole.interval)
    assert split.shares == whole.shares


def test_the_estimate_rests_on_the_pipelines_step() -> None:
    found = planned(snapshot(900.0), demand())
    part = cut(found)[0]
    assert part.pipeline is not None
    steps = found.rounds * max(other.steps_per_round for other in found.partitions)
    assert found.estimate.seconds.expected >= steps * part.pipeline.step_seconds * 0.99


def test_what_runs_have_found_a_step_to_take_counts_and_is_told() -> None:
    asked = demand(parallelism="pipeline", stages=3, workers=6)
    first, later = (
        planned(replace(snapshot(900.0, memory_mb=3072), stage_paces=paces), asked) for paces in ({}, {"a": 1.25})
    )
    (a, b), (a_before, b_before) = (
        [part.pipeline for part in told.partitions if part.pipeline is not None] for told in (later, first)
    )
    assert b == b_before, "another region's runs say nothing of it"
    assert a.step_seconds == pytest.approx(1.25 * a_before.step_seconds)
    assert (a.pace, a.stages, a.micro_batch) == (1.25, a_before.stages, a_before.micro_batch)
    assert a.why == (
        *a_before.why,
        "a step is expected to take 1.25 times as long as in the profile, as in earlier runs",
    )
    assert later.partitions[0].samples_per_second == pytest.approx(first.partitions[0].samples_per_second / 1.25)
    assert later.estimate.seconds.expected > first.estimate.seconds.expected


def test_time_takes_no_slower_stages_than_cost() -> None:
    fast, cheap = (
        cut(planned(snapshot(300.0), demand(minimise=m, parallelism="pipeline", workers=6)))[0]
        for m in ("time", "cost")
    )
    assert fast.pipeline is not None
    assert cheap.pipeline is not None
    assert fast.pipeline.step_seconds / fast.replicas <= cheap.pipeline.step_seconds / cheap.replicas * 1.02


@pytest.mark.parametrize(
    ("there_is", "why"),
    [
        (Snapshot(tuple(there(n) for n in "ab")), "no profile"),
        (
            Snapshot(tuple(there(n) for n in "ab"), profiles={n: replace(profile(n), layers=()) for n in "ab"}),
            "no layers",
        ),
        (snapshot(300.0, memory_mb=256), "no cut"),
    ],
)
def test_a_pipeline_that_cannot_be_is_declined_with_what_to_do(there_is: Snapshot, why: str) -> None:
    answer = plan(there_is, demand(parallelism="pipeline"))
    assert isinstance(answer, Declined)
    assert all(why in reason.text and reason.remedy for reason in answer.reasons)


def test_a_model_that_no_function_holds_in_any_way_is_declined() -> None:
    """Rather than run out of memory: the region's functions are too small for the least stage, or nothing is known of
    the layers."""
    answer = plan(snapshot(900.0, memory_mb=256), demand())
    assert isinstance(answer, Declined)
    assert {reason.code for reason in answer.reasons} == {"INADMISSIBLE"}
    assert all("no cut that fits" in reason.text for reason in answer.reasons)
    known = snapshot(900.0, memory_mb=512)
    bare = {
        name: replace(told, layers=(), layers_note="it is no nn.Sequential") for name, told in known.profiles.items()
    }
    answer = plan(replace(known, profiles=bare), demand())
    assert isinstance(answer, Declined)
    assert "it is no nn.Sequential" in answer.reasons[0].text
    assert "declare its layers" in answer.reasons[0].remedy


def _wide(output_bytes: float) -> Snapshot:
    """Models whose layers pass on so much of each sample."""
    found = snapshot(900.0)
    layers = tuple({**layer, "output_bytes": output_bytes} for layer in deep("a").layers)
    profiles = {n: replace(one, layers=layers) for n, one in found.profiles.items()}
    return replace(found, profiles=profiles)


@pytest.mark.parametrize("minimise", ["time", "cost"])
def test_stages_send_bfloat16_where_that_is_worth_it(minimise: str) -> None:
    for output_bytes, codec in ((1e3, "fp32"), (3e6, "bf16")):
        told = {codec: cut(planned(_wide(output_bytes), demand(minimise=minimise, activations=codec))) for codec in
                ("fp32", "bf16", None)}  # fmt: skip
        fixed = {name: parts[0].pipeline for name, parts in told.items()}
        assert all(shape is not None for shape in fixed.values())
        assert [fixed[name].activation_codec for name in ("fp32", "bf16")] == ["fp32", "bf16"]  # type: ignore[union-attr]
        assert fixed[None].activation_codec == codec  # type: ignore[union-attr]


def test_a_codec_of_merges_is_counted() -> None:
    asked = demand(workers=8, parallelism="pipeline", stages=2, collective="scatter-reduce")
    full, half = (
        cut(planned(snapshot(300.0, memory_mb=10240), replace(asked, merging_codec=codec)))[0].pipeline
        for codec in ("fp32", "bf16")
    )
    assert full is not None
    assert half is not None
    assert full.degree > 1
    assert half.step_seconds < full.step_seconds


def test_who_asks_for_too_small_functions_is_told_so_and_not_that_the_region_has_no_others() -> None:
    answer = plan(snapshot(300.0, memory_mb=10240), demand(memory_mb=64))
    assert isinstance(answer, Declined)
    reason = answer.reasons[0]
    assert "in functions of 64 MB, as function.memoryMb asks for" in reason.text
    assert "gives a function at most" not in reason.text
    assert "raise function.memoryMb: the region gives 10240 MB" in reason.remedy


def test_micro_batches_suit_the_replicas_that_there_are() -> None:
    """One replica needs small ones to keep shared cores busy; several may do with larger ones, which cost less."""
    there_is = snapshot(900.0, memory_mb=3072)
    regions = tuple(replace(r, capacity=replace(r.capacity, cores=2.0, workers=8)) for r in there_is.regions)
    found = staged(regions[0], replace(there_is, regions=regions), demand(parallelism="pipeline", stages=4))
    assert found is not None
    one, two = found.shape(1), found.shape(2)
    assert one.micro_batch < demand().batch
    for shape in (one, two):
        problem = replace(found.problem, batch=demand().batch * shape.degree, degrees=(shape.degree,))
        cuts = cuts_of(found.problem, found.plan)
        others = [evaluate(problem, way, cuts) for way in pipeline_options(problem)]
        assert shape.step_seconds == min(played(problem, plan).seconds for plan in others if plan is not None)


def test_what_messages_take_counts_once_for_every_cut_and_way() -> None:
    def seconds(message: float, stages: int) -> float:
        there_is = snapshot(900.0, memory_mb=3072)
        profiles = {name: replace(known, message_seconds=message) for name, known in there_is.profiles.items()}
        asked = demand(parallelism="pipeline", stages=stages, workers=stages, activations="fp32")
        shape = cut(planned(replace(there_is, profiles=profiles), asked))[0].pipeline
        assert shape is not None
        return shape.step_seconds

    # One that takes no longer than its requests adds nothing; of a longer one all must pass there and back.
    assert seconds(0.0, 3) == seconds(1e-6, 3)
    assert seconds(0.5, 3) >= seconds(0.0, 3) + 4 * 0.3
    assert seconds(0.5, 1) == seconds(0.0, 1)


def test_what_comes_last_is_merged_apart_but_where_requests_are_saved() -> None:
    there_is = snapshot(900.0, memory_mb=3072)
    found = {}
    for name in ("redis", "s3"):
        known = there_is.profiles["a"]
        profiles = {**there_is.profiles, "a": replace(known, channel=replace(known.channel, name=name))}
        cut = staged(there_is.regions[0], replace(there_is, profiles=profiles), demand(parallelism="pipeline"))
        assert cut is not None
        found[name] = cut.problem.merges_apart
    assert found == {"redis": True, "s3": False}


def test_stages_and_replicas_are_chosen_together_and_each_decision_tells_what_else_there_was() -> None:
    """The function sizes that hold more layers in fewer stages, too; none is forbidden by what a step costs alone."""
    there_is = snapshot(900.0, memory_mb=3072)
    asked = demand(parallelism="pipeline", minimise="time")
    found = planned(there_is, asked)
    number = len(cut(found)[0].pipeline.stages)  # type: ignore[union-attr]
    told: dict[str, list[tuple[str, str]]] = {}
    for one in found.alternatives:
        told.setdefault(one.decision.split()[0], []).append((one.text, one.why_not))
    for decision in ("replicas", "stages", "memory", "micro-batch"):
        assert len(told[decision]) == 2, decision
        assert all(" s and $" in text and why for text, why in told[decision])
    assert [text.split(" ")[0] for text, _ in told["activations"]] == ["bf16"]
    assert {"recomputed", "order"} <= told.keys()
    for other in {1, 2, 3, 4} - {number}:
        beside = plan(there_is, replace(asked, stages=other))
        if isinstance(beside, Plan) and beside.learning.points <= asked.tolerance:
            assert beside.estimate.seconds.expected >= 0.99 * found.estimate.seconds.expected
    fixed = planned(there_is, replace(asked, stages=number, activations="fp32"))
    named = {one.decision.split()[0] for one in fixed.alternatives}
    assert not {"stages", "activations"} & named
    assert "micro-batch" in named


def test_the_time_told_of_another_micro_batch_is_that_of_a_plan_with_it() -> None:
    found = planned(snapshot(900.0, memory_mb=3072), demand(parallelism="pipeline", stages=3, workers=3))
    own = cut(found)[0].pipeline
    assert own is not None
    (told, _) = (one for one in found.alternatives if one.decision.startswith("micro-batch"))
    seconds = float(told.text.split(": ")[1].split(" s")[0])
    there_is = snapshot(900.0, memory_mb=3072)
    one = staged(there_is.regions[0], there_is, demand(parallelism="pipeline", stages=3, workers=3))
    assert one is not None
    size = int(told.text.split(" ")[0])
    (shape,) = (s for v in one.variants(1) if v.problem.micro_batches == (size,) for s in [v.shape(1)])
    assert shape.micro_batch == size != own.micro_batch
    steps = found.rounds * max(part.steps_per_round for part in found.partitions)
    more = steps * (shape.step_seconds - own.step_seconds)
    assert seconds == pytest.approx(found.estimate.seconds.expected + more, abs=1.0)
