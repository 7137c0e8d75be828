"""A partition's life: any order of what can happen to it leads to its end, and never to two worker_groups at once."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.budget import budget

from geofed_pb.errors import CATALOGUE, GeofedError
from region_agent.partition.batches import BatchPlan
from region_agent.partition.events import (
    Action,
    ActionFailed,
    ConfigurePs,
    Deployed,
    Event,
    IdleTick,
    Invoke,
    PartitionConfigured,
    PartitionPrepared,
    PeersKnown,
    Preempted,
    PreparePartition,
    PsEnded,
    PsPeer,
    PsReady,
    PsStatusChanged,
    PsView,
    Publish,
    PublishAsked,
    Published,
    RecordEvent,
    RemoveReplicas,
    Retry,
    RetryLater,
    Scaled,
    ScaleWorkers,
    SendReport,
    ShutDown,
    ShutDownFinished,
    Started,
    StartPs,
    Stopped,
    StoreBatches,
    WorkerEnded,
)
from region_agent.partition.machine import FATAL, PartitionMachine
from region_agent.worker.data.batches import Batches
from region_agent.worker.invocation import Stretch

ROUNDS = 3
PER_ROUND, BATCH = 5, 8
"""Steps in a round, and samples of one worker in one."""
_NONE: tuple[Stretch, ...] = ()
_PASSING = st.sampled_from(["UNAVAILABLE", "FENCED", "FUNCTION_FAILED", "GATEWAY_UNAVAILABLE", "DISK_FULL", "INTERNAL"])


class Region:
    """What a partition has around it: does what the machine asks for when it is told to, or lets it go wrong."""

    def __init__(self, workers: int, attempt: int) -> None:
        batches = BatchPlan(PER_ROUND, workers * BATCH)
        self.machine = PartitionMachine("east", workers, epoch=1, attempt=attempt, batches=batches)
        self.first_batch, self.kept, self.obeyed = workers * BATCH, _NONE, _NONE
        self.called = attempt > 0
        """Steps may have been made."""
        """Stretches that are stored, and those by which steps may have been made."""
        self.fence_round = 0
        """That was completed when the server heard of its attempt."""
        self.unanswered = self.told_to_halt = False
        self.follows = True
        """The batch goes with the workers."""
        self.first_attempt = attempt
        self.preparing = False
        self.replicas = workers
        self.moved = False
        """Of the function, and whether they are preemptible; set when it is deployed."""
        self.deploys_at_once = True
        self.asked: ScaleWorkers | RemoveReplicas | None = None
        """Of the function platform, which has not answered."""
        self.ps = "gone"
        self.round = 0
        self.finished = False
        self.running: set[tuple[int, int]] = set()
        """(worker, attempt) of invocations that have not ended."""
        self.ps_attempt = 0
        self.pauses: list[int] = []
        self.publishing = False
        self.quit = False
        self.reports: list[SendReport] = []
        self.feed(Started(1))

    def feed(self, event: Event) -> None:
        if isinstance(event, Scaled):
            self.follows = event.batch > 0
        for action in self.machine.handle(event):
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        assert not self.quit or isinstance(action, SendReport | ShutDown), f"{action} after the end"
        match action:
            case PreparePartition():
                assert not self.preparing, "prepared twice at once"
                self.preparing = True
            case StartPs():
                assert self.ps_attempt <= action.attempt
                self.ps_attempt = action.attempt
                # The shell starts one at a time, however often it is asked.
                self.ps = "starting" if self.ps == "gone" else self.ps
            case ConfigurePs():
                assert self.ps_attempt <= action.attempt, "an attempt came back"
                if action.attempt > self.ps_attempt:
                    self.fence_round = self.round
                self.ps_attempt = action.attempt
                self.unanswered, self.told_to_halt = True, action.halt
            case StoreBatches():
                self.kept = action.stretches
            case Invoke():
                key = (action.worker, action.attempt)
                assert action.worker < action.workers == self.machine.workers == self.replicas
                assert self.ps == "up"
                assert action.preemptible == self.machine.preemptible == self.moved, "on the wrong machines"
                assert self.asked is None, "they are called before the function is where it is to be"
                assert action.attempt > self.first_attempt
                assert key not in self.running, f"worker {action.worker} is called twice in one attempt"
                self.running.add(key)
                self._check_batches(action)
            case ScaleWorkers() | RemoveReplicas():
                assert action.workers == self.machine.workers
                assert self.asked is None, "one order overtakes another"
                self.asked = action
                if self.deploys_at_once:
                    self.deployed()
            case RetryLater():
                assert 0 < action.seconds <= 15
                self.pauses.append(action.attempt)
            case Publish():
                assert not self.publishing, "published twice at once"
                self.publishing = True
            case SendReport():
                self.reports.append(action)
            case ShutDown():
                self.quit = True
                self.preparing, self.ps, self.publishing, self.asked = False, "gone", False, None
                self.running.clear()
                self.pauses.clear()
                self.feed(ShutDownFinished())
            case RecordEvent():
                known = ("attempt.resumed", "partition.scaled", "partition.batch")
                assert action.kind in known or action.data["code"] in CATALOGUE

    def _check_batches(self, action: Invoke) -> None:
        """What may have been made of the round that was open at the fence, and before, keeps its batch."""
        assert action.stretches == self.kept, "they make steps by what is not stored"
        before, after = (Batches(self.first_batch, stretches) for stretches in (self.obeyed, action.stretches))
        # Within an attempt all are told the same.
        if after_all := [key for key in self.running if key[1] == action.attempt and key[0] != action.worker]:
            assert action.stretches == self.obeyed, after_all
        elif self.obeyed != action.stretches and self.called:
            for step in range(1, (self.fence_round + 1) * PER_ROUND + 1):
                assert before.of(step) == after.of(step), step
        self.obeyed, self.called = action.stretches, True
        far = Batches(self.first_batch, action.stretches).of(10**6)
        follows = self.follows and not self.machine.preempted
        assert not follows or far == self.machine.workers * BATCH, "the batch does not go with the workers"

    # What the region does

    def deployed(self) -> None:
        asked, self.asked = self.asked, None
        if isinstance(asked, ScaleWorkers):
            self.replicas, self.moved = self.machine.workers, self.machine.preemptible
            self.feed(Deployed(self.replicas, self.moved))
        else:
            self.replicas = self.machine.workers
            self.feed(Deployed(None))

    def not_deployed(self, code: str) -> None:
        """Whether anything has changed there is not known."""
        self.asked, self.replicas = None, -1
        self.feed(ActionFailed(GeofedError(code, "x"), "scale"))

    def prepared(self) -> None:
        self.preparing = False
        self.replicas, self.moved = self.machine.workers, self.machine.preemptible
        self.feed(PartitionPrepared())

    def ps_listens(self) -> None:
        self.ps = "up"
        self.feed(PsReady("east:1"))

    def ps_answers(self) -> None:
        self.unanswered = False
        self.feed(PartitionConfigured(self.ps_attempt, self.fence_round, self.told_to_halt))

    def ps_says(self) -> None:
        phase = "finished" if self.finished else "training"
        self.feed(PsStatusChanged(PsView(phase, "", self.round)))

    def ps_dies(self, error: GeofedError) -> None:
        self.ps = "gone"
        self.feed(PsEnded(error))

    def worker_ends(self, key: tuple[int, int], *, slice_over: bool, waits: bool = False) -> None:
        """As an honest worker: fenced where a newer attempt is known, done only after the last round."""
        self.running.discard(key)
        worker, attempt = key
        if attempt < self.ps_attempt:
            # Whether it was in the middle of a round, or had not come to the server yet.
            status, left = ("left", f"w/{attempt}/{worker}/7") if slice_over else ("failed", "")
            self.feed(WorkerEnded(worker, attempt, status, left, GeofedError("FENCED", "newer"), 7))
        elif slice_over:
            waits_for = min(self.round + 1, ROUNDS) if waits else 0
            self.feed(WorkerEnded(worker, attempt, "continue", "w/key", step=7, waits_for=waits_for))
        else:
            self.round, self.finished = ROUNDS, True
            self.feed(WorkerEnded(worker, attempt, "done"))

    def pause_ends(self) -> None:
        self.feed(Retry(self.pauses.pop(0)))

    def published(self) -> None:
        self.publishing = False
        self.feed(Published("sha256:model"))


class AnyOrder(RuleBasedStateMachine):
    """Hypothesis chooses; from some moment on nothing goes wrong any more, and the partition must end."""

    @initialize(workers=st.integers(1, 3), attempt=st.integers(0, 2))
    def begin(self, workers: int, attempt: int) -> None:
        self.region = Region(workers, attempt)
        self.region.deploys_at_once = False
        self.highest = 0

    @rule()
    def preparing_ends(self) -> None:
        if self.region.preparing:
            self.region.prepared()

    @rule(code=_PASSING)
    def preparing_fails(self, code: str) -> None:
        if self.region.preparing:
            self.region.preparing = False
            self.region.feed(ActionFailed(GeofedError(code, "x"), "prepare"))

    @rule()
    def deploying_ends(self) -> None:
        if self.region.asked is not None:
            self.region.deployed()

    @rule(code=_PASSING)
    def deploying_fails(self, code: str) -> None:
        if self.region.asked is not None:
            self.region.not_deployed(code)

    @rule(code=_PASSING)
    def something_else_fails(self, code: str) -> None:
        if not self.region.quit:
            self.region.feed(ActionFailed(GeofedError(code, "x")))

    @rule()
    def the_server_listens(self) -> None:
        if self.region.ps == "starting":
            self.region.ps_listens()

    @rule(code=_PASSING)
    def the_server_dies(self, code: str) -> None:
        if self.region.ps != "gone":
            self.region.ps_dies(GeofedError(code, "x"))

    @rule(progress=st.booleans())
    def the_server_speaks(self, progress: bool) -> None:
        if self.region.ps == "up":
            self.region.round = min(ROUNDS, self.region.round + progress)
            self.region.ps_says()

    @rule()
    def the_server_answers(self) -> None:
        if self.region.ps == "up" and self.region.unanswered:
            self.region.ps_answers()

    @rule()
    def the_job_ends_at_once(self) -> None:
        if not self.region.quit:
            self.region.feed(PeersKnown((), finish=True, halt=True))

    @rule(which=st.integers(0, 99), slice_over=st.booleans(), waits=st.booleans())
    def a_worker_ends(self, which: int, slice_over: bool, waits: bool) -> None:
        running = sorted(self.region.running)
        if running and self.region.ps == "up":
            self.region.worker_ends(running[which % len(running)], slice_over=slice_over, waits=waits)

    @rule(which=st.integers(0, 99), code=_PASSING)
    def a_worker_fails(self, which: int, code: str) -> None:
        running = sorted(self.region.running)
        if running:
            worker, attempt = running[which % len(running)]
            self.region.running.discard((worker, attempt))
            self.region.feed(WorkerEnded(worker, attempt, "failed", error=GeofedError(code, "x")))

    @rule()
    def a_pause_ends(self) -> None:
        if self.region.pauses:
            self.region.pause_ends()

    @rule(epoch=st.integers(1, 4))
    def it_is_started_again(self, epoch: int) -> None:
        self.region.feed(Started(epoch))
        assert self.region.machine.epoch >= epoch or self.region.machine.over

    @rule(workers=st.integers(0, 4))
    def workers_are_taken_away(self, workers: int) -> None:
        before, may = self.region.machine.workers, self.region.machine.preemptible
        self.region.feed(Preempted(workers))
        assert self.region.machine.workers in (before, min(before, workers) if may else before)

    @rule(workers=st.integers(0, 4), preemptible=st.booleans())
    def it_is_scaled(self, workers: int, preemptible: bool) -> None:
        before = self.region.machine.workers
        self.region.feed(Scaled(workers, "because", workers * BATCH, 0.5 + workers / 8, preemptible))
        assert not self.region.machine.preempted or self.region.machine.over
        assert self.region.machine.workers in (before, workers)

    @rule()
    def peers_are_told(self) -> None:
        self.region.feed(PeersKnown((PsPeer("west", 1, "west:1"),)))

    @rule()
    def the_model_is_asked_for(self) -> None:
        self.region.feed(PublishAsked())

    @rule(code=_PASSING)
    def configuring_fails(self, code: str) -> None:
        if self.region.unanswered and self.region.ps == "up":
            self.region.unanswered = False
            self.region.feed(ActionFailed(GeofedError(code, "x"), "configure"))

    @rule(code=_PASSING)
    def publishing_fails(self, code: str) -> None:
        if self.region.publishing:
            self.region.publishing = False
            self.region.feed(ActionFailed(GeofedError(code, "x"), "publish"))

    @precondition(lambda self: hasattr(self, "region") and self.region.machine.state == "training")
    @rule(discard=st.booleans(), really=st.sampled_from([False, False, False, True]))
    def it_is_stopped(self, discard: bool, really: bool) -> None:
        if really:
            self.region.feed(Stopped("enough", discard))
            assert self.region.machine.state == "stopped"

    def teardown(self) -> None:
        if hasattr(self, "region"):
            _all_goes_well(self.region)


def _all_goes_well(region: Region) -> None:
    region.feed(PublishAsked())
    if not region.machine.workers:
        region.feed(Scaled(2, "continue", 2 * BATCH))
    for _ in range(60):
        if region.machine.over:
            break
        if region.preparing:
            region.prepared()
        if region.asked is not None:
            region.deployed()
        if region.ps == "starting":
            region.ps_listens()
        if region.ps == "up":
            if region.unanswered:
                region.ps_answers()
            for key in sorted(region.running):
                region.worker_ends(key, slice_over=False)
            # Workers may wait for the next round.
            region.round = min(ROUNDS, region.round + 1)
            region.ps_says()
        if region.publishing:
            region.published()
        if region.pauses:
            region.pause_ends()
    assert region.machine.over, f"stuck in {region.machine.state}: {vars(region.machine)} {vars(region)}"
    assert region.reports[-1].state == region.machine.state
    if region.machine.state == "published":
        assert region.finished
        assert region.reports[-1].blob_digest == "sha256:model"
    if region.machine.state == "failed":
        assert region.reports[-1].error is not None
        assert region.quit


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=budget(200), stateful_step_count=40, deadline=None)


def _training(workers: int = 2) -> Region:
    region = Region(workers, 0)
    region.prepared()
    region.ps_listens()
    assert region.machine.state == "training"
    assert region.running == {(worker, 1) for worker in range(workers)}
    return region


def test_the_whole_way() -> None:
    region = Region(2, 0)
    _all_goes_well(region)
    states = [report.state for report in region.reports]
    assert states == ["preparing", "ready", "training", "finished", "published"]


@pytest.mark.parametrize("code", sorted(FATAL))
def test_what_trying_again_does_not_mend_fails_at_once(code: str) -> None:
    region = _training()
    region.running.discard((0, 1))
    region.feed(WorkerEnded(0, 1, "failed", error=GeofedError(code, "the reason")))
    assert region.machine.state == "failed"
    last = region.reports[-1]
    assert last.error is not None
    assert (last.error.code, last.condition) == (code, "the reason")


def test_a_model_to_start_from_that_is_not_there_is_not_asked_for_again() -> None:
    region = Region(2, 0)
    region.feed(ActionFailed(GeofedError("MODEL_NOT_FOUND", "the store has none"), "prepare"))
    assert (region.machine.state, region.pauses) == ("failed", [])
    published = _training()
    published.feed(ActionFailed(GeofedError("MODEL_NOT_FOUND", "that of the last round is not kept"), "publish"))
    assert published.machine.state == "training"


def _fail_a_worker(region: Region, code: str) -> None:
    """And let the pause pass."""
    worker, attempt = min(key for key in region.running if key[1] == region.machine.attempt)
    region.running.discard((worker, attempt))
    region.feed(WorkerEnded(worker, attempt, "failed", error=GeofedError(code, "x")))
    for key in sorted(region.running):
        region.worker_ends(key, slice_over=False)
    if region.pauses:
        region.pause_ends()


def test_setbacks_without_progress_end_the_partition() -> None:
    region = _training()
    for _ in range(8):
        _fail_a_worker(region, "FUNCTION_FAILED")
        assert region.machine.state == "training"
    _fail_a_worker(region, "FUNCTION_FAILED")
    assert region.machine.state == "failed"


def test_setbacks_with_progress_between_them_do_not() -> None:
    region = _training()
    for number in range(30):
        _fail_a_worker(region, "FUNCTION_FAILED")
        region.feed(PsStatusChanged(PsView("training", "", number + 1)))
    assert region.machine.state == "training"


def test_a_worker_that_runs_out_of_memory_three_times_ends_the_partition() -> None:
    """Twice is what an evaluation takes that does not fit: once as a whole, and once in smaller batches."""
    region = _training()
    for _ in range(2):
        _fail_a_worker(region, "FUNCTION_OUT_OF_MEMORY")
        assert region.machine.state == "training"
    _fail_a_worker(region, "FUNCTION_OUT_OF_MEMORY")
    assert region.machine.state == "failed"


@pytest.mark.parametrize("code", ["DISK_FULL", "GATEWAY_UNAVAILABLE"])
def test_what_somebody_else_must_mend_is_waited_for(code: str) -> None:
    region = _training()
    for _ in range(100):
        region.ps_dies(GeofedError(code, "no room"))
        assert region.machine.condition == f"{code}: no room; retrying"
        region.pause_ends()
        region.ps_listens()
    assert region.machine.state == "training"


def test_task_code_that_hangs_is_told_and_ended_the_third_time() -> None:
    region = _training()
    region.feed(IdleTick(5.0, 150.0))
    assert region.machine.condition == ""
    region.feed(IdleTick(40.0, 150.0))
    assert region.machine.condition == "no step for 40 s (a call without an answer is ended after 150 s)"
    region.feed(IdleTick(0.0, 150.0))
    assert region.machine.condition == "", "it continues"
    region.feed(PsStatusChanged(PsView("training", "waits for west", region.round)))
    region.feed(IdleTick(40.0, 150.0))
    assert region.machine.condition == "waits for west", "that is what it waits for"
    region.feed(PsStatusChanged(PsView("training", "", region.round)))
    _fail_a_worker(region, "FUNCTION_TIMEOUT")
    assert region.machine.state == "training"
    region.feed(IdleTick(40.0, 150.0))
    idle, tries = region.machine.condition.split("; ")
    assert idle.startswith("no step for 40 s")
    assert tries == "a failure without a completed round in between, the last: FUNCTION_TIMEOUT: x"
    _fail_a_worker(region, "FUNCTION_TIMEOUT")
    assert region.machine.state == "training"
    _fail_a_worker(region, "FUNCTION_TIMEOUT")
    assert region.machine.state == "failed"


def test_what_has_failed_stands_in_the_condition_until_a_round_is_done() -> None:
    region = _training()
    for count in range(1, 4):
        _fail_a_worker(region, "FUNCTION_FAILED")
        times = "a failure" if count == 1 else f"{count} failures"
        assert region.machine.condition == f"{times} without a completed round in between, the last: FUNCTION_FAILED: x"
    region.round += 1
    region.ps_says()
    assert region.machine.condition == ""
    assert region.reports[-1].condition == ""


def test_ports_that_stay_taken_end_the_partition_within_seconds() -> None:
    """The other regions' workers wait for it, and cost money."""
    region = _training()
    waited = 0.0
    for _ in range(20):
        if region.machine.state == "failed":
            break
        actions = region.machine.handle(PsEnded(GeofedError("PORT_IN_USE", "7443 is in use")))
        waited += sum(action.seconds for action in actions if isinstance(action, RetryLater))
        told = next(action for action in actions if isinstance(action, RecordEvent))
        assert told.text == "east: the parameter server ended: 7443 is in use"
    assert region.machine.state == "failed"
    assert region.machine.error is not None
    assert region.machine.error.code == "PORT_IN_USE"
    assert 1 < waited < 15, "a server that is just going has time to let go of them"


def test_an_unreachable_control_plane_does_not_lose_a_finished_job() -> None:
    region = Region(1, 0)
    region.prepared()
    region.ps_listens()
    region.worker_ends((0, 1), slice_over=False)
    region.ps_says()
    region.feed(PublishAsked())
    for _ in range(100):
        region.publishing = False
        region.feed(ActionFailed(GeofedError("UNAVAILABLE", "no route"), "publish"))
        region.pause_ends()
    region.published()
    assert region.machine.state == "published"


def test_a_worker_of_an_older_attempt_changes_nothing() -> None:
    region = _training()
    _fail_a_worker(region, "FUNCTION_FAILED")
    before = dict(vars(region.machine))
    for status in ("done", "continue", "failed"):
        assert region.machine.handle(WorkerEnded(1, 1, status, error=GeofedError("TASK_FAILED", "x"))) == []
    assert vars(region.machine) == before


@pytest.mark.parametrize(
    ("event", "longest"),
    [(PsEnded(GeofedError("DISK_FULL", "x")), 3.0), (ActionFailed(GeofedError("UNAVAILABLE", "x"), "prepare"), 15.0)],
)
def test_pauses_grow_and_are_bounded(event: Event, longest: float) -> None:
    region = _training()
    actions = [action for _ in range(40) for action in region.machine.handle(event)]
    pauses = [action.seconds for action in actions if isinstance(action, RetryLater)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.2, longest)


def test_a_higher_epoch_reaches_the_server() -> None:
    region = _training()
    configured = [a for a in region.machine.handle(Started(7)) if isinstance(a, ConfigurePs)]
    assert [action.epoch for action in configured] == [7]
    assert [a for a in region.machine.handle(Started(3)) if isinstance(a, ConfigurePs)] == []


def test_a_server_at_a_new_address_is_told_to_the_control_plane() -> None:
    region = _training()
    region.ps_dies(GeofedError("UNAVAILABLE", "x"))
    region.pause_ends()
    region.ps = "up"
    before = len(region.reports)
    region.feed(PsReady("east:2"))
    assert len(region.reports) == before + 1
    assert region.machine.ps_address == "east:2"


def test_the_end_is_told_when_both_the_server_and_the_last_worker_have_ended() -> None:
    for server_first in (True, False):
        region = _training(workers=1)
        region.finished = True
        steps = [region.ps_says, lambda region=region: region.worker_ends((0, 1), slice_over=False)]
        for step in steps if server_first else reversed(steps):
            assert region.machine.state == "training"
            step()
        assert region.machine.state == "finished"


def test_a_new_attempt_is_told_to_the_server_before_its_workers_are_called() -> None:
    region = _training()
    region.running.discard((0, 1))
    region.feed(WorkerEnded(0, 1, "failed", error=GeofedError("FUNCTION_FAILED", "x")))
    assert region.ps_attempt == 2, "so that the other worker, which may wait there, hears of it"
    region.worker_ends((1, 1), slice_over=False)
    kinds = [type(action) for action in region.machine.handle(Retry(region.pauses.pop()))]
    assert kinds == [ConfigurePs, Invoke, Invoke]


def _left(region: Region, worker: int, step: int) -> None:
    region.running.discard((worker, 1))
    error = GeofedError("FENCED", "newer")
    region.feed(WorkerEnded(worker, 1, "left", f"w/1/{worker}/{step}", error, step))


def test_all_go_on_from_where_the_furthest_worker_of_a_broken_attempt_was() -> None:
    region = _training(workers=3)
    region.running.discard((0, 1))
    region.feed(WorkerEnded(0, 1, "failed", error=GeofedError("FUNCTION_FAILED", "killed")))
    _left(region, 1, 41)
    _left(region, 2, 42)
    invoked = [a for a in region.machine.handle(Retry(region.pauses.pop())) if isinstance(a, Invoke)]
    assert [(action.worker, action.attempt, action.resume_key) for action in invoked] == [
        (worker, 2, "w/1/2/42") for worker in range(3)
    ]


def test_workers_that_do_not_leave_are_waited_for_some_seconds_only() -> None:
    region = _training()
    region.running.discard((0, 1))
    region.feed(WorkerEnded(0, 1, "failed", error=GeofedError("FUNCTION_FAILED", "killed")))
    seconds = 0.0
    while True:
        actions = region.machine.handle(Retry(region.pauses.pop()))
        again = next((action for action in actions if isinstance(action, RetryLater)), None)
        if again is None:
            break
        seconds += again.seconds
        region.pauses.append(again.attempt)
    assert 4 < seconds < 6
    assert [action.resume_key for action in actions if isinstance(action, Invoke)] == ["", ""]


def test_a_model_that_was_asked_for_while_the_server_was_down_is_published_when_it_is_back() -> None:
    region = _training(workers=1)
    region.worker_ends((0, 1), slice_over=False)
    region.ps_says()
    region.ps_dies(GeofedError("UNAVAILABLE", "x"))
    region.feed(PublishAsked())
    assert not region.publishing
    region.machine.handle(Retry(region.pauses.pop()))
    region.ps = "up"
    region.feed(PsReady("east:1"))
    assert region.publishing


def test_a_worker_that_would_only_wait_is_called_when_the_round_is_over() -> None:
    region = _training(2)
    region.worker_ends((0, 1), slice_over=True, waits=True)
    assert region.running == {(1, 1)}
    region.ps_says()
    region.worker_ends((1, 1), slice_over=True)
    assert region.running == {(1, 1)}, "it has steps to make"
    region.round += 1
    region.ps_says()
    assert region.running == {(0, 1), (1, 1)}
    region.worker_ends((0, 1), slice_over=True, waits=True)
    region.ps_dies(GeofedError("UNAVAILABLE", "x"))
    region.pause_ends()
    region.ps_listens()
    assert region.running == {(0, 1), (1, 1)}, "the server does not know any more that it waits"
    region.worker_ends((0, 1), slice_over=True, waits=True)
    region.feed(Scaled(3, "a deadline comes near"))
    assert region.machine._previous.running == {1}, "who waits has ended, and left what it has"
    assert region.machine._previous.resume_key == "w/key"


_HALT = PeersKnown((), finish=True, halt=True)


def _waiting_for_a_lost_region() -> Region:
    """All workers have ended their slices; no round was evaluated."""
    region = _training(2)
    for key in sorted(region.running):
        region.worker_ends(key, slice_over=True, waits=True)
    region.ps_says()
    assert not region.running
    return region


def _ends(region: Region) -> None:
    assert region.running == {(0, region.machine.attempt), (1, region.machine.attempt)}
    for key in sorted(region.running):
        region.worker_ends(key, slice_over=False)
    region.ps_says()
    assert region.machine.state == "finished"


def test_workers_that_wait_for_a_round_are_called_when_the_job_ends_at_once() -> None:
    region = _waiting_for_a_lost_region()
    region.feed(_HALT)
    assert not region.running, "the server does not know yet"
    region.ps_answers()
    _ends(region)


def test_a_worker_whose_slice_ends_during_a_halt_is_called_again() -> None:
    region = _waiting_for_a_lost_region()
    region.feed(_HALT)
    region.ps_answers()
    region.worker_ends((1, 1), slice_over=True, waits=True)
    assert region.machine.condition == ""
    _ends(region)


def test_a_server_that_dies_during_a_halt_is_told_again_and_then_the_workers_are_called() -> None:
    region = _waiting_for_a_lost_region()
    region.feed(_HALT)
    region.ps_answers()
    region.ps_dies(GeofedError("UNAVAILABLE", "x"))
    region.worker_ends((0, 1), slice_over=True, waits=True)
    assert region.running == {(1, 1)}, "without a server it has nothing to do"
    region.pause_ends()
    region.ps_listens()
    assert region.told_to_halt
    region.worker_ends((0, 1), slice_over=True, waits=True)
    assert region.running == {(1, 1)}, "it was too early"
    region.ps_answers()
    _ends(region)


def test_after_a_restart_of_the_agent_the_job_still_ends_at_once() -> None:
    region = Region(2, 1)
    region.feed(_HALT)
    region.prepared()
    region.ps_listens()
    assert region.told_to_halt
    for key in sorted(region.running):
        region.worker_ends(key, slice_over=True, waits=True)
    assert not region.running, "they were called before the server was told"
    region.ps_answers()
    _ends(region)


def test_a_halt_that_the_server_has_not_heard_is_told_again() -> None:
    region = _waiting_for_a_lost_region()
    region.feed(_HALT)
    for _ in range(20):
        region.unanswered = False
        region.feed(ActionFailed(GeofedError("UNAVAILABLE", "timed out"), "configure"))
        region.pause_ends()
        assert region.unanswered
        assert not region.running
    region.ps_answers()
    _ends(region)


def test_more_workers_go_on_from_where_the_others_were() -> None:
    region = _training(2)
    region.feed(Scaled(3, "a deadline comes near"))
    assert region.ps_attempt == 2
    region.pause_ends()
    assert region.running == {(0, 1), (1, 1)}, "nobody begins before the others have left what they have"
    region.worker_ends((1, 1), slice_over=True)
    region.worker_ends((0, 1), slice_over=True)
    region.pause_ends()
    assert region.running == {(worker, 2) for worker in range(3)}
    assert region.replicas == 3
    assert region.machine._previous.resume_key == ""


def test_a_partition_pauses_and_goes_on() -> None:
    region = _training(2)
    region.feed(Scaled(0, "others are in a hurry"))
    assert region.reports[-1].condition == "paused: others are in a hurry"
    for worker in range(2):
        region.worker_ends((worker, 1), slice_over=True)
    region.pause_ends()
    assert (region.running, region.replicas) == (set(), 0)
    region.feed(PsStatusChanged(PsView("finished")))
    assert region.machine.state == "training"
    region.feed(Scaled(1))
    region.pause_ends()
    assert region.running == {(0, 3)}
    assert (region.replicas, region.reports[-1].condition) == (1, "")
    _all_goes_well(region)
    assert region.machine.state == "published"


def test_what_is_left_goes_on_where_workers_are_taken_away() -> None:
    region = _training(3)
    region.feed(Scaled(3, "they cost less", preemptible=True))
    for worker in range(3):
        region.worker_ends((worker, 1), slice_over=True)
    region.pause_ends()
    assert region.running == {(worker, 2) for worker in range(3)}
    region.feed(Preempted(1))
    assert (region.machine.workers, region.machine.preempted) == (1, True)
    region.feed(Preempted(2))
    assert region.machine.workers == 1, "none comes back by itself"
    for worker in range(3):
        region.feed(WorkerEnded(worker, 2, "failed" if worker else "left", f"at-{worker}" * (not worker), step=7))
        region.running.discard((worker, 2))
    region.pause_ends()
    assert region.running == {(0, 3)}
    region.feed(Scaled(1, "", preemptible=True))
    assert not region.machine.preempted
    assert region.running == {(0, 3)}, "it is as it was told to be"
    region.feed(Scaled(1, "its deadline"))
    assert region.machine.attempt == 4, "on other machines others take over"


def _moved(region: Region, workers: int, *, preemptible: bool) -> None:
    """All of them leave what they have, and others are to continue."""
    region.feed(Scaled(workers, "a test", preemptible=preemptible))
    for key in sorted(region.running):
        region.worker_ends(key, slice_over=True)
    region.pause_ends()


def test_workers_that_stay_are_not_taken_away() -> None:
    region = _training(4)
    _moved(region, 4, preemptible=True)
    region.feed(Scaled(4, "its promised deadline needs workers that stay"))
    region.feed(Preempted(2))
    assert (region.machine.workers, region.machine.preempted) == (4, False)


def test_it_says_which_order_it_obeys_and_runs_its_calls_where_that_one_says() -> None:
    region = _training(2)
    region.feed(Scaled(2, "cheaper", preemptible=True, order=7))
    region.feed(Preempted(1))
    assert (region.machine.order, region.machine.preempted) == (7, True)
    region.feed(Scaled(2, "more are back", preemptible=True, order=8))
    assert (region.machine.order, region.machine.preempted) == (8, False)
    almost = _training(2)
    almost.worker_ends((0, 1), slice_over=False)
    almost.feed(Scaled(4, order=1))
    assert (almost.machine.workers, almost.machine.order) == (2, 0), "it does not obey"


def test_those_that_are_left_are_not_replaced_before_they_have_left_what_they_have() -> None:
    region = _training(4)
    _moved(region, 4, preemptible=True)
    region.deploys_at_once = False
    region.feed(Preempted(2))
    assert region.asked == RemoveReplicas(2)
    # The control plane wants as many as before, before the others are gone.
    region.feed(Scaled(4, "more are back", preemptible=True))
    region.replicas = 2
    for key in sorted(region.running):
        region.worker_ends(key, slice_over=True)
    while region.pauses:
        region.pause_ends()
    assert not region.running, "the platform has not answered"
    region.asked = None
    region.feed(Deployed(None))
    assert region.asked == ScaleWorkers(4)
    region.deployed()
    assert len(region.running) == 4


def test_a_move_that_fails_is_made_again_before_anybody_is_called() -> None:
    region = _training(4)
    region.deploys_at_once = False
    _moved(region, 4, preemptible=True)
    for _ in range(3):
        assert region.asked == ScaleWorkers(4)
        assert not region.running
        region.not_deployed("GATEWAY_UNAVAILABLE")
        region.pause_ends()
    region.deployed()
    assert len(region.running) == 4


def test_a_partition_that_is_almost_done_is_not_scaled() -> None:
    region = _training(2)
    region.worker_ends((0, 1), slice_over=False)
    region.feed(Scaled(4))
    assert region.machine.workers == 2
    _all_goes_well(region)


def _scaled_to(region: Region, workers: int, completed: int) -> list[tuple[int, int]]:
    """Their work goes over to others; who is called then."""
    region.feed(Scaled(workers, "a test", workers * BATCH, 0.5))
    region.round = completed
    for key in sorted(region.running):
        region.worker_ends(key, slice_over=True)
    region.pause_ends()
    region.ps_answers()
    return sorted(region.running)


def test_the_batch_changes_with_the_round_after_the_one_that_is_open_at_the_fence() -> None:
    region = _training(4)
    region.round = 2
    assert _scaled_to(region, 2, 2) == [(0, 2), (1, 2)]
    assert region.kept == (Stretch(first_step=3 * PER_ROUND + 1, batch=2 * BATCH, rate=0.5),)


def test_nobody_is_called_before_the_server_has_told_where_it_stands() -> None:
    region = _training(4)
    region.feed(Scaled(2, "a test", 2 * BATCH, 0.5))
    for key in sorted(region.running):
        region.worker_ends(key, slice_over=True)
    region.pause_ends()
    assert not region.running
    region.ps_answers()
    assert region.running == {(0, 2), (1, 2)}


def test_a_server_that_does_not_say_where_it_stands_is_asked_again() -> None:
    region = _training(4)
    unheard = ActionFailed(GeofedError("UNAVAILABLE", "timed out"), "configure")
    assert region.machine.handle(unheard) == [], "nobody waits for it"
    region.feed(Scaled(2, "a test", 2 * BATCH, 0.5))
    for key in sorted(region.running):
        region.worker_ends(key, slice_over=True)
    region.pause_ends()
    for _ in range(20):
        region.unanswered = False
        region.feed(unheard)
        assert region.reports[-1].condition == "UNAVAILABLE: timed out; retrying"
        region.pause_ends()
        assert region.unanswered
        assert region.machine.condition == "UNAVAILABLE: timed out; retrying", "as long as it waits"
        assert not region.running
    region.ps_answers()
    assert region.running == {(0, 2), (1, 2)}
    assert region.machine.condition == ""


def test_a_server_that_could_not_be_told_before_anybody_waited_for_it_is_asked_once_they_do() -> None:
    region = Region(1, 1)
    region.feed(Scaled(2, "a test", 2 * BATCH))
    region.ps_listens()
    region.unanswered = False
    region.feed(ActionFailed(GeofedError("UNAVAILABLE", "timed out"), "configure"))
    region.prepared()
    assert region.unanswered
    region.ps_answers()
    assert region.running == {(0, 2), (1, 2)}


def test_a_change_that_never_was_in_force_is_replaced() -> None:
    region = _training(4)
    _scaled_to(region, 2, 0)
    _scaled_to(region, 3, 0)
    assert region.kept == (Stretch(first_step=PER_ROUND + 1, batch=3 * BATCH, rate=0.5),)


def test_before_the_first_step_the_batch_changes_at_once() -> None:
    region = Region(4, 0)
    region.feed(Scaled(2, "there is no room", 2 * BATCH, 0.5))
    region.prepared()
    region.ps_listens()
    assert region.running == {(0, 1), (1, 1)}
    assert region.kept == (Stretch(first_step=1, batch=2 * BATCH, rate=0.5),)
