"""The parameter server's state machine: any order of messages and crashes leads to the same rounds and to the end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.budget import budget
from support.federation_in_miniature import Miniature, Site

from geofed_pb.bounds import MOST_METRICS
from sync.file_transfer.manifest import Manifest, PeerAddress, Verdict
from sync.histograms import Histogram, by_category
from sync.ps.core.actions import Failed, LogRoundEnd, MergeUpdates, Refuse, Reply, StoreOwnUpdate
from sync.ps.core.answers import AttachAnswer
from sync.ps.core.background import Background
from sync.ps.core.events import (
    Attached,
    BoundaryArrived,
    Configured,
    Evaluated,
    Event,
    MetricsStored,
    OwnUpdateStored,
    ReduceArrived,
    ResourceUsage,
    RoundEndLogged,
    UpdatesMerged,
    UpdateStored,
)
from sync.ps.core.machine import Machine, Recovered, Setup
from sync.ps.core.synchronous import Synchronous

_NUMBERS = st.integers(0, 1 << 16)


class AnythingMayHappen(RuleBasedStateMachine):
    """Hypothesis chooses what happens next; afterwards the network is fair and the job must end."""

    @initialize(
        regions=st.integers(1, 3),
        workers=st.integers(1, 2),
        rounds=st.integers(1, 3),
        steps=st.integers(1, 2),
        every=st.integers(0, 2),
        quorum=st.sampled_from([None, None, 0, 0, 1, 2, 3, "same round", "same round"]),
        max_rounds_ahead=st.integers(0, 2),
        ways=st.sampled_from(["mesh", "star", "chain"]),
    )
    def begin(
        self,
        regions: int,
        workers: int,
        rounds: int,
        steps: int,
        every: int,
        quorum: int | str | None,
        max_rounds_ahead: int,
        ways: str,
    ) -> None:
        pairs = {"mesh": (), "star": ((0, 1), (0, 2)), "chain": ((0, 1), (1, 2))}[ways] if regions == 3 else ()
        neighbours = tuple((f"r{a}", f"r{b}") for a, b in pairs)
        self.all = Miniature(
            regions,
            workers,
            rounds,
            steps,
            every,
            quorum=0 if isinstance(quorum, str) else quorum,
            max_rounds_ahead=max_rounds_ahead,
            neighbours=neighbours,
            same_round=isinstance(quorum, str),
        )

    def _site(self, number: int) -> Site:
        return list(self.all.sites.values())[number % len(self.all.sites)]

    @rule(site=_NUMBERS, worker=_NUMBERS)
    def a_worker_goes_on(self, site: int, worker: int) -> None:
        here = self._site(site)
        here.let_work(worker % len(here.workers))

    @rule(times=st.integers(1, 30))
    def much_goes_well(self, times: int) -> None:
        for _ in range(times):
            for name, site in self.all.sites.items():
                self.all.configure(name)
                for index in range(len(site.workers)):
                    if not site.workers[index].call:
                        site.let_work(index)
                while site.work:
                    site.do_work()
                self.all.send(name)
            for message in [self.all.wan.pop(0) for _ in range(len(self.all.wan))]:
                self.all.deliver(message)

    @rule(site=_NUMBERS, worker=_NUMBERS)
    def a_slice_ends(self, site: int, worker: int) -> None:
        here = self._site(site)
        here.end_slice(worker % len(here.workers))

    @rule(site=_NUMBERS)
    def a_worker_is_killed(self, site: int) -> None:
        self._site(site).next_attempt()

    @rule(site=_NUMBERS, workers=st.integers(1, 3))
    def workers_are_added_or_removed(self, site: int, workers: int) -> None:
        here = self._site(site)
        if all(worker.doing != "done" for worker in here.workers):
            here.wanted_workers = workers
            here.next_attempt()

    @rule(site=_NUMBERS, then_crash=st.sampled_from([False, False, False, True]))
    def the_disk_works(self, site: int, then_crash: bool) -> None:
        here = self._site(site)
        if here.work:
            here.do_work(then_crash=then_crash)

    @rule(site=_NUMBERS)
    def the_peer_senders_send(self, site: int) -> None:
        self.all.send(self._site(site).name)

    @rule(which=_NUMBERS, fate=st.sampled_from(["arrives", "arrives", "is doubled", "is lost", "kills"]))
    def a_message(self, which: int, fate: str) -> None:
        wan = self.all.wan
        if not wan:
            return
        message = wan[which % len(wan)]
        if fate != "is doubled":
            wan.remove(message)
        if fate != "is lost":
            self.all.deliver(message, then_crash=fate == "kills")

    @rule(site=_NUMBERS)
    def a_server_dies(self, site: int) -> None:
        self._site(site).crash()

    @rule(site=_NUMBERS, new_attempt=st.booleans(), new_epoch=st.booleans(), damaged=st.booleans())
    def a_server_comes_back(self, site: int, new_attempt: bool, new_epoch: bool, damaged: bool) -> None:
        here = self._site(site)
        if here.machine is not None:
            return
        if damaged:
            here.damage_newest_checkpoint()
        if new_attempt:
            here.next_attempt()
        here.epoch += new_epoch
        here.start()

    @rule(site=_NUMBERS)
    def the_control_plane_gives_a_new_epoch(self, site: int) -> None:
        self._site(site).epoch += 1

    @rule(site=_NUMBERS)
    def the_agent_configures(self, site: int) -> None:
        self.all.configure(self._site(site).name)

    @rule(site=_NUMBERS)
    def the_job_is_to_end(self, site: int) -> None:
        """A region hears that the job's goal is reached; the others need not hear it."""
        self._site(site).told_to_end = True
        self.all.configure(self._site(site).name)

    @rule(site=_NUMBERS, seconds=st.sampled_from([0.0, 1.0, 2.0]))
    def a_region_gets_faster_or_slower(self, site: int, seconds: float) -> None:
        self._site(site).round_seconds = seconds

    @rule(site=_NUMBERS)
    def a_zombie_speaks(self, site: int) -> None:
        self._site(site).zombie_calls()

    @invariant()
    def every_region_has_made_the_same_rounds(self) -> None:
        if hasattr(self, "all"):
            self.all.check()

    def teardown(self) -> None:
        if hasattr(self, "all"):
            self.all.finish()


TestAnythingMayHappen = AnythingMayHappen.TestCase
TestAnythingMayHappen.settings = settings(
    max_examples=budget(100), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def _alone(workers: int = 2, rounds: int = 2, **recovered: object) -> Machine:
    return Synchronous(Setup("a", ("a",), workers, rounds, 1, 0), Recovered(**recovered))  # type: ignore[arg-type]


def _manifest(region: str, sequence: int, epoch: int = 1) -> Manifest:
    return Manifest(region, epoch, sequence, f"{region}{sequence}", 1, 1.0)


def test_all_updates_there_before_a_crash_are_applied_when_it_is_configured() -> None:
    setup = Setup("a", ("a", "b"), 1, 3, 1, 0)
    machine = Synchronous(setup, Recovered(0, inbox=(_manifest("b", 1),), outbox=(_manifest("a", 1),)))
    applied = machine.handle(Configured(1, 2, ()))
    assert [action.sequence for action in applied if hasattr(action, "manifests")] == [1]


def test_a_wait_for_an_update_that_was_lost_is_refused() -> None:
    """An attempt was told that the round's update is on its way; then the server died before it was durable."""
    machine = _alone(workers=1, sequence=0, model_key="model/0")
    waits_only = BoundaryArrived(1, 0, 1, 1, 1, digest="", model_key="", state_key="", samples=0.0, loss=0.0)
    assert [type(action) for action in machine.handle(waits_only)] == [Refuse]


@pytest.mark.parametrize("ended", [False, True])
def test_who_comes_when_its_round_has_ended_is_told_of_no_state_that_others_clear_away(ended: bool) -> None:
    """They do as soon as they hear that the round is over, however slow this one is to read."""
    outbox = (_manifest("a", 2),) if ended else ()
    there = Recovered(1, outbox=outbox, model_key="model/1", state_key="b/1/1/state")
    machine = Synchronous(Setup("a", ("a", "b"), 2, 3, 1, 0), there)
    (reply,) = machine.handle(Attached(1, 0, 1, "init"))
    assert isinstance(reply, Reply)
    assert isinstance(reply.answer, AttachAnswer)
    assert (reply.answer.boundary, reply.answer.state_key) == (ended, "" if ended else "b/1/1/state")


def test_a_worker_that_repeats_a_round_that_the_others_have_ended_is_refused() -> None:
    machine = _alone(sequence=0, model_key="model/0")
    assert machine.handle(BoundaryArrived(1, 0, 1, 1, 1, "d", "b/1/1/model", "", 1.0, 0.0)) == []
    (refused,) = machine.handle(ReduceArrived(2, 1, 1, 1, "g/1/1/1", 1.0, 0.0))
    assert isinstance(refused, Refuse)
    assert refused.code == "FENCED"


def test_workers_with_different_models_fail_the_partition() -> None:
    machine = _alone(sequence=0, model_key="model/0")
    machine.handle(BoundaryArrived(1, 0, 1, 1, 1, "one", "b/1/1/model", "", 1.0, 0.0))
    actions = machine.handle(BoundaryArrived(2, 1, 1, 1, 1, "other", "", "", 1.0, 0.0))
    assert [type(action) for action in actions] == [Failed, Refuse, Refuse]
    assert machine.progress.phase == "failed"
    (refused,) = machine.handle(Attached(3, 0, 2, "init"))
    assert isinstance(refused, Refuse)


def test_a_model_of_another_shape_is_refused() -> None:
    machine = _alone(sequence=0)
    (refused,) = machine.handle(Attached(1, 0, 1, "init", "w is float32 [2] here and float32 [3] there"))
    assert isinstance(refused, Refuse)
    assert refused.code == "TASK_INVALID"
    assert "w is float32 [2] here and float32 [3] there" in refused.text


def test_metrics_count_only_once_they_are_durable() -> None:
    machine = _alone(workers=1, rounds=1, sequence=1)
    (keep,) = machine.handle(Evaluated(1, 0, 1, 1, 10.0, {"accuracy": 0.5}))
    assert machine.progress.phase == "training"
    assert not machine.finished
    (reply,) = machine.handle(MetricsStored(keep))  # type: ignore[arg-type]
    assert reply.call == 1  # type: ignore[union-attr]
    assert machine.finished
    assert machine.progress.metrics == {"accuracy": 0.5}


def test_metrics_are_weighted_by_samples() -> None:
    machine = _alone(rounds=1, sequence=1)
    assert machine.handle(Evaluated(1, 0, 1, 1, 30.0, {"accuracy": 1.0})) == []
    (keep,) = machine.handle(Evaluated(2, 1, 1, 1, 10.0, {"accuracy": 0.0}))
    assert keep.metrics == {"accuracy": 0.75}  # type: ignore[union-attr]
    assert keep.samples == 40.0  # type: ignore[union-attr]


def test_histograms_of_workers_are_summed() -> None:
    machine = _alone(rounds=1, sequence=1)
    ages = [Histogram((0.0, 1.0, 2.0), counts=counts) for counts in ((1, 2), (3, 4))]
    machine.handle(Evaluated(1, 0, 1, 1, 3.0, {}, histograms={"age": ages[0], "ward": by_category({"a": 3}.items())}))
    (keep,) = machine.handle(
        Evaluated(2, 1, 1, 1, 7.0, {}, histograms={"age": ages[1], "ward": by_category({"b": 7}.items())})
    )
    machine.handle(MetricsStored(keep))  # type: ignore[arg-type]
    assert machine.progress.histograms == {
        "age": Histogram((0.0, 1.0, 2.0), counts=(4, 6)),
        "ward": by_category({"a": 3, "b": 7}.items()),
    }


def test_histograms_that_were_cut_off_stay_without_numbers() -> None:
    machine = _alone(workers=1, rounds=1, sequence=1)
    told = {"ward": by_category([("a", 3)], 900)}
    (keep,) = machine.handle(Evaluated(1, 0, 1, 1, 3.0, {}, "only the first are kept", histograms=told))
    machine.handle(MetricsStored(keep))  # type: ignore[arg-type]
    assert machine.progress.histograms == told
    assert machine.progress.metrics_error == "only the first are kept"


def test_where_one_worker_cannot_measure_there_are_no_metrics() -> None:
    machine = _alone(rounds=1, sequence=1)
    machine.handle(Evaluated(1, 0, 1, 1, 30.0, {"accuracy": 1.0}))
    (keep,) = machine.handle(Evaluated(2, 1, 1, 1, 0.0, {}, "metrics raised KeyError: 'y'"))
    machine.handle(MetricsStored(keep))  # type: ignore[arg-type]
    assert machine.finished
    assert (machine.progress.metrics, machine.progress.metrics_samples) == ({}, 0.0)
    assert machine.progress.metrics_error == "metrics raised KeyError: 'y'"


def test_what_workers_measure_is_bounded_together_and_it_is_said() -> None:
    machine = _alone(rounds=1, sequence=1)
    for worker in range(2):
        many = {f"metric {number} of worker {worker}": 1.0 for number in range(MOST_METRICS)}
        actions = machine.handle(Evaluated(worker + 1, worker, 1, 1, 10.0, many))
    machine.handle(MetricsStored(actions[0]))  # type: ignore[arg-type]
    assert len(machine.progress.metrics) == MOST_METRICS
    assert machine.progress.metrics_samples == 20.0
    assert "more than 1,000 metrics" in machine.progress.metrics_error


def test_logged_values_are_means_over_all_values_of_all_workers_once_the_round_is_over() -> None:
    machine = _alone(rounds=4, sequence=0, model_key="model/0")

    def ended(sequence: int, *logged: dict[int, dict[str, tuple[float, int]]]) -> tuple[int, dict[str, float]]:
        for worker, values in enumerate(logged):
            usage = ResourceUsage(0.5, (worker + 1) << 20)
            place = "" if worker else f"b/1/{sequence}/model"
            end = BoundaryArrived(
                worker + 1, worker, 1, sequence, sequence, "d", place, "", 1.0, 0.0, logged=values, usage=usage
            )
            todo = machine.handle(end)
            while todo:
                answer = _done(todo.pop(0))
                todo += machine.handle(answer) if answer is not None else []
        return machine.progress.logged_sequence, machine.progress.logged

    # What a worker says of a round again counts once, and no round is taken that has not begun.
    first = {1: {"norm": (6.0, 3)}}
    assert ended(1, first, {1: {"norm": (2.0, 1), "other": (5.0, 1)}, 9: {"norm": (1.0, 1)}}) == (0, {})
    assert machine.progress.usage == ResourceUsage(1.0, 2 << 20)
    after = {**first, 2: {"norm": (1.0, 1)}}
    expected = {"norm": pytest.approx(2.0), "other": 5.0}
    assert ended(2, after, {2: {"norm": (3.0, 1)}}) == (1, expected)
    # An evaluation is the last that its round has.
    machine.handle(Evaluated(3, 0, 1, 2, 1.0, {}, logged={2: {"norm": (1.0, 1), "completed": (2.0, 1)}}))
    (keep,) = machine.handle(Evaluated(4, 1, 1, 2, 1.0, {}))
    machine.handle(MetricsStored(keep))  # type: ignore[arg-type]
    assert (machine.progress.logged_sequence, machine.progress.logged) == (2, {"norm": 2.0, "completed": 2.0})
    assert ended(3, {}, {}) == (2, {"norm": 2.0, "completed": 2.0})
    assert ended(4, {}, {}) == (3, {})


def test_old_updates_go_out_under_the_new_epoch() -> None:
    machine = Synchronous(Setup("a", ("a", "b"), 1, 3, 1, 0), Recovered(0, outbox=(_manifest("a", 1),)))
    (shipped, *_) = machine.handle(Configured(5, 1, (PeerAddress("b", 1, "b:1"),)))
    assert [manifest.epoch for manifest in shipped.manifests] == [5]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("manifest", "verdict"),
    [
        (_manifest("b", 0), Verdict.HAVE),
        (_manifest("b", 1), Verdict.WANT),
        (_manifest("b", 2), Verdict.WANT),
        (_manifest("b", 3), Verdict.LATER),
        (_manifest("b", 1 << 60), Verdict.LATER),
        (_manifest("b", 1, epoch=0), Verdict.FENCED),
    ],
)
def test_what_is_said_of_an_offer(manifest: Manifest, verdict: Verdict) -> None:
    machine = Synchronous(Setup("a", ("a", "b"), 1, 9, 1, 0), Recovered(0))
    machine.handle(Configured(1, 1, (PeerAddress("b", 1, "b:1"),)))
    assert machine.verdict(manifest) is verdict


def test_only_the_first_region_may_give_the_first_model() -> None:
    machine = Synchronous(Setup("b", ("a", "b", "c"), 1, 9, 1, 0))
    assert machine.verdict(_manifest("c", 0)) is Verdict.LATER
    assert machine.verdict(_manifest("a", 0)) is Verdict.WANT


def test_progress_names_whom_a_round_waits_for() -> None:
    machine = Synchronous(Setup("a", ("a", "b"), 1, 3, 1, 0), Recovered(0))
    machine.handle(OwnUpdateStored(_manifest("a", 1)))
    assert machine.progress.phase == "exchanging"
    assert machine.progress.condition == "waiting for the update of round 1 from b"


def test_the_loss_of_a_round_is_that_rounds() -> None:
    """In the background the last round counts only once the other region's last update is merged, too."""
    setup = Setup("a", ("a", "b"), 1, 2, 1, 0, background=True)
    there = Recovered(0, attempt=1, marks=(("b", 0),), correction_key="correction/0")
    machine = Background(setup, there)
    machine.handle(Configured(1, 1, ()))
    seen: list[tuple[int, float | None]] = []

    def heard(event: Event) -> None:
        todo = machine.handle(event)
        while todo:
            answer = _done(todo.pop(0))
            todo += machine.handle(answer) if answer is not None else []

    for sequence, loss in ((1, 0.5), (2, 0.25)):
        place = f"b/1/{sequence}/model"
        heard(BoundaryArrived(1, 0, 1, sequence, sequence, "d", place, "", 1.0, loss))
        seen.append((machine.progress.sequence, machine.progress.round_loss))
        heard(UpdateStored(replace(_manifest("b", sequence), last=sequence == 2)))
    assert seen == [(1, 0.5), (1, 0.5)]
    assert (machine.progress.sequence, machine.progress.round_loss) == (2, 0.25)


def _done(action: object) -> Event | None:
    """What a server's disk answers."""
    match action:
        case LogRoundEnd():
            return RoundEndLogged(action)
        case StoreOwnUpdate():
            return OwnUpdateStored(replace(_manifest("a", action.sequence), last=action.last))
        case MergeUpdates():
            return UpdatesMerged(action, "", f"model/{action.sequence}", "", "correction")
    return None
