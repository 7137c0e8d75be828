"""Parameter servers, their disks, workers and the WAN between them, simulated: only the machines are real.

Everything that can go wrong on the way is a method: calls are lost, messages are delayed, doubled, swapped and dropped,
processes die between any two steps and come back from what was durable then.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from itertools import pairwise

from sync.file_transfer.manifest import Manifest, PeerAddress, Verdict
from sync.ps.core.actions import (
    Action,
    Failed,
    Forget,
    LogRoundEnd,
    MergeGradients,
    MergeUpdates,
    Refuse,
    Reply,
    Restart,
    SendUpdates,
    SetTimer,
    StoreMetrics,
    StoreOwnUpdate,
    SumUp,
)
from sync.ps.core.answers import AttachAnswer, BoundaryAnswer, EvaluatedAnswer, ReduceAnswer
from sync.ps.core.background import Background
from sync.ps.core.events import (
    Attached,
    BoundaryArrived,
    CallGone,
    Configured,
    Evaluated,
    Event,
    GradientsMerged,
    Measured,
    MetricsStored,
    OwnUpdateStored,
    PeerHas,
    PeerUnreachable,
    ReduceArrived,
    Restarted,
    RoundEndLogged,
    SendAttempted,
    StateLost,
    SumGone,
    Summed,
    TimerFired,
    UpdatesMerged,
    UpdateStored,
)
from sync.ps.core.machine import Machine, Recovered, Setup
from sync.ps.core.synchronous import Synchronous
from sync.ps.core.waiting_settings import WaitingSettings
from sync.ps.rejoin import rejoin_plan, rejoin_reply

SETTINGS = WaitingSettings()


@dataclass(frozen=True)
class Checkpoint:
    sequence: int = -1
    step: int = 0
    samples: float = 0.0
    applied: int = 0
    digest: str = ""
    version: int = -1
    marks: tuple[tuple[str, int], ...] = ()
    lasts: tuple[str, ...] = ()
    ends: int = 0
    merged: tuple[Manifest, ...] = ()
    """Every update that was ever merged, in order; with background exchange only."""


@dataclass
class Disk:
    """What survives a crash."""

    checkpoints: list[Checkpoint] = field(default_factory=lambda: [Checkpoint()])
    inbox: dict[tuple[str, int], Manifest] = field(default_factory=dict)
    sums: dict[tuple[str, int, int], Manifest] = field(default_factory=dict)
    """Sums that came from others, by region, first round and last."""
    outbox: dict[int, Manifest] = field(default_factory=dict)
    metrics: StoreMetrics | None = None
    ended: LogRoundEnd | None = None
    marked: bool = False
    """The partition began here, or came back."""
    attempt: int = 1
    """With background exchange: the last that began from here."""


@dataclass
class Worker:
    """One worker of the present attempt: what it will ask next, and the call it waits for."""

    attempt: int
    doing: str = "attach"
    step: int = 0
    round: int = 0
    known: bool = False
    finished: bool = False
    evaluate: bool = False
    until: int = 0
    call: int = 0
    """0: it waits for none."""


@dataclass(frozen=True)
class Message:
    """On its way over the WAN."""

    source: str
    to: str
    what: Manifest | tuple[str, int]
    """An update, or the acknowledgement of one, by its region and sequence."""


Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Ways:
    """Which regions exchange directly, as the control plane says."""

    neighbours: Pairs = ()
    routes: int = 0
    former: Pairs = ()


MODEL_BYTES = 3
"""Of a model in float32; an update has one."""


def _parts_of(manifest: Manifest) -> list[str]:
    """Digests of the updates that one sums up."""
    parts = manifest.digest.split("+")
    assert len(parts) == manifest.rounds
    return parts


class Site:
    """One region."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.name = setup, setup.region
        self.disk = Disk()
        self.channel: set[str] = set()
        self.gave_up = False
        """Whether it has ever continued without a region that was late."""
        self.grace_over_round = -1
        """The last round whose grace time was over."""
        self.told_to_end = False
        """Its agent has heard that the job is to end before its plan, and keeps it."""
        self.halts = False
        """Its agent has heard that the job is to end at once, and keeps it."""
        self.began = False
        self.now = 0.0
        """Seconds of its clock, which moves with its rounds and timers."""
        self.round_seconds = 0.01
        """What its rounds take: so little that nobody is late just because its clock moves."""
        self.timed_round = 0
        self.lives = 0
        """How often the state was lost: an update that is made again is another one."""
        self.epoch, self.attempt = 1, 1
        self.machine: Machine | None = None
        self.work: list[Action] = []
        self.peer_senders: dict[str, dict[tuple[int, str], Manifest]] = {}
        self.sums: set[str] = set()
        """Digests of sums that were made here and are still here."""
        self.failing: set[str] = set()
        """Peers that could not be reached at the last try."""
        self.workers: list[Worker] = []
        self.calls = 0
        self.ghosts: set[int] = set()
        """Calls of attempts that are over; each of them must be answered."""
        self.told: tuple[Machine, Configured] | None = None
        """What the present server was last told, which is told again only where it has changed."""
        self.wanted_workers = setup.workers
        """Workers of the attempts that begin from now on."""
        self.new_worker_group()
        self.start()

    # The process

    def start(self) -> None:
        last, disk = self.disk.checkpoints[-1], self.disk
        recovered = Recovered(
            sequence=last.sequence,
            step=last.step,
            samples=last.samples,
            applied=last.applied,
            model_digest=last.digest,
            model_key=f"model/{last.sequence}",
            inbox=(*disk.inbox.values(), *disk.sums.values()),
            outbox=tuple(disk.outbox.values()),
            metrics=disk.metrics,
            version=last.version,
            marks=last.marks,
            lasts=last.lasts,
            ended=disk.ended,
            correction_key=f"correction/{last.version}" if last.sequence > 0 else "",
            ends=last.ends,
            attempt=disk.attempt,
            model_bytes=MODEL_BYTES,
        )
        self.machine = (Background if self.setup.background else Synchronous)(self.setup, recovered)
        self.machine.state_lost = self.began and last.sequence < 0 and not disk.marked
        disk.marked = disk.marked or not self.machine.state_lost
        self.began = True
        self.feed(Configured(self.epoch, self.attempt, ()))

    def crash(self) -> None:
        self.machine = None
        self.work, self.peer_senders = [], {}
        self.sums, self.failing = set(), set()
        self.ghosts.clear()
        for worker in self.workers:
            worker.call = 0

    def lose_state(self) -> None:
        """Disk and process are gone for good; the agent remembers that there were some."""
        self.crash()
        self.disk = Disk()
        self.lives += 1
        if any(worker.doing == "done" for worker in self.workers):
            # The agent has lost its memory with its disk: it begins the workers again, which measure again.
            self.next_attempt()

    def take_over(self, furthest: Site, updates: tuple[tuple[str, Manifest], ...]) -> None:
        """Continue from another region's checkpoint (`sync.ps.rejoin`)."""
        last = furthest.disk.checkpoints[-1]
        first = self.name == self.setup.regions[0]
        applied = last.sequence * (len(self.setup.regions) - 1) + (not first)
        self.disk.checkpoints = [replace(last, applied=applied)]
        for _, manifest in updates:
            if manifest.region == self.name:
                self.disk.outbox[manifest.sequence] = manifest
            else:
                self.disk.inbox[manifest.region, manifest.sequence] = manifest
        self.retry_calls()
        self.disk.marked = True
        self.work, self.peer_senders = [], {}
        self.start()

    def take_in(self, manifest: Manifest) -> None:
        if manifest.first:
            self.disk.sums[manifest.region, manifest.first, manifest.sequence] = manifest
        else:
            self.disk.inbox[manifest.region, manifest.sequence] = manifest

    def retry_calls(self) -> None:
        """Whoever waits for an answer asks again."""
        self.ghosts.clear()
        for worker in self.workers:
            worker.call = 0

    def damage_newest_checkpoint(self) -> None:
        """Only while it is down. What the round needs must still be there."""
        if len(self.disk.checkpoints) < 2 or self.setup.background:
            return
        lost = self.disk.checkpoints.pop()
        here = {*self.disk.inbox, *((self.name, sequence) for sequence in self.disk.outbox)}
        for region in self.setup.contributors(lost.sequence):
            assert (region, lost.sequence) in here, f"the updates of round {lost.sequence} were forgotten too early"

    def feed(self, event: Event) -> None:
        assert self.machine is not None
        actions = self.machine.handle(event, Measured(self.now))
        if isinstance(self.machine, Background):
            self.gave_up |= bool(self.machine.waiting.membership.absent)
            self.grace_over_round = max(self.grace_over_round, self.machine.waiting.grace_over_round)
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Reply() | Refuse():
                self._answer(action)
            case SendUpdates():
                self.peer_senders[action.peer.region] = {(m.sequence, m.region): m for m in action.manifests}
            case Failed():
                raise AssertionError(f"{self.name}: {action}")
            case SetTimer():
                self.work = [*(one for one in self.work if not isinstance(one, SetTimer)), action]
            case _:
                self.work.append(action)

    def do_work(self, *, then_crash: bool = False) -> None:
        """The next thing for the disk thread; the process may die before it hears that it is done."""
        event = self._do(self.work.pop(0))
        if then_crash:
            self.crash()
        elif event is not None:
            self.feed(event)

    def _do(self, action: Action) -> Event | None:
        disk = self.disk
        match action:
            case MergeGradients():
                assert self.machine is not None
                assert len({key for key, _ in action.parts}) == self.machine.setup.workers
                key = f"g/{action.attempt}/{action.step}"
                self.channel.add(key)
                return GradientsMerged(action.attempt, action.step, key, 1.0)
            case StoreOwnUpdate():
                assert action.sequence not in disk.outbox, "a durable update was made again"
                digest = f"{self.name}:{action.sequence}:{action.model_key}{'*' * self.lives}"
                made = Manifest(
                    self.name, action.epoch, action.sequence, digest, 1, action.weight, action.seen, action.last,
                    ends=action.ends, takes_sums=self.setup.sums, round_seconds=action.round_seconds,
                )  # fmt: skip
                disk.outbox[action.sequence] = made
                return OwnUpdateStored(made)
            case LogRoundEnd():
                assert disk.ended is None or action.sequence == disk.ended.sequence + 1, "a round ended twice"
                assert action.sequence == disk.checkpoints[-1].sequence + 1, "a round ended before the last was merged"
                if self.setup.background:
                    self._nobody_is_left_behind(action.sequence - 1)
                disk.ended = action
                return RoundEndLogged(action)
            case Restart():
                disk.attempt = action.attempt
                return Restarted(action.attempt, f"start/{action.attempt}", "")
            case SetTimer():
                self.now = max(self.now, action.at)
                return TimerFired()
            case MergeUpdates():
                return self._apply(action)
            case SumUp():
                return self._sum_up(action)
            case StoreMetrics():
                disk.metrics = action
                return MetricsStored(action)
            case Forget():
                up_to = dict(action.up_to)
                disk.inbox = {k: m for k, m in disk.inbox.items() if k[1] > up_to[k[0]]}
                disk.outbox = {s: m for s, m in disk.outbox.items() if s > up_to[self.name]}
                disk.sums = {k: m for k, m in disk.sums.items() if k[2] > up_to[k[0]]}
                self.sums -= {*action.sums}
        return None

    def has_bytes_of(self, manifest: Manifest) -> bool:
        if manifest.region == self.name and not manifest.first:
            return manifest.sequence in self.disk.outbox
        if not manifest.first:
            return (manifest.region, manifest.sequence) in self.disk.inbox
        key = manifest.region, manifest.first, manifest.sequence
        return manifest.digest in self.sums or self.disk.sums.get(key, manifest).digest == manifest.digest

    def _sum_up(self, action: SumUp) -> Summed:
        parts = action.manifests
        assert len({part.region for part in parts}) == 1
        assert all(before.sequence + 1 == after.begins for before, after in pairwise(parts))
        if not all(self.has_bytes_of(part) for part in parts):
            return Summed(action.peer, None)
        digest = "+".join(part.digest for part in parts)
        self.sums.add(digest)
        made = replace(parts[-1], digest=digest, total_bytes=MODEL_BYTES, first=parts[0].begins)
        return Summed(action.peer, made)

    def _merge_as_they_come(self, action: MergeUpdates) -> UpdatesMerged:
        base = self.disk.checkpoints[-1]
        assert action.version == base.version + 1
        marks = dict(base.marks) | {self.name: base.sequence} if base.sequence >= 0 else {}
        for manifest in action.manifests:
            before = marks.get(manifest.region, 0 if base.sequence >= 0 else -1)
            assert manifest.begins == before + 1, f"{manifest} after {before}"
            assert self.has_bytes_of(manifest)
            marks[manifest.region] = manifest.sequence
        if action.sequence == 0:
            assert self.machine is not None
            self.disk.attempt = self.machine.attempt
        told = dict(action.watermarks) | {self.name: action.sequence}
        assert all(told[region] == mark for region, mark in marks.items()), (told, marks)
        if not self.setup.quorum and not self.gave_up:
            # Where the job ends before its plan, a region may be done when others begin their last round.
            behind = min(told[region] for region in self.setup.regions if region not in action.lasts)
            together = self.setup.same_round or action.sequence <= SETTINGS.first_rounds_together
            least = action.sequence if together else action.sequence - 1 - self._slack(action.sequence - 1)
            assert behind >= least, "a merge without a region's round, which all waited for"
        digest = ""
        if self.setup.same_round:
            assert len({manifest.sequence for manifest in action.manifests}) == 1, "a merge of several rounds"
            assert all(manifest.sequence == action.version for manifest in action.manifests)
            digest = f"({base.digest}+{'+'.join(manifest.digest for manifest in action.manifests)})"
        merged = (*base.merged, *action.manifests)
        made = Checkpoint(
            action.sequence, action.step, action.samples, action.applied, digest, action.version, action.watermarks,
            action.lasts, action.ends, merged,
        )  # fmt: skip
        self.disk.checkpoints = [made]
        key = f"correction/{action.version}"
        return UpdatesMerged(action, "", f"model/{action.sequence}", "", key, model_bytes=MODEL_BYTES)

    def _slack(self, sequence: int) -> int:
        """Rounds that a region may lack when the one after this is ended."""
        if self.setup.same_round or sequence <= SETTINGS.first_rounds_together:
            return 0
        return SETTINGS.max_lag_rounds if self.grace_over_round >= sequence else 1

    def _nobody_is_left_behind(self, sequence: int) -> None:
        """The workers have ended the round after this one, and continue."""
        assert self.machine is not None
        ledger, done = self.machine.ledger, self.disk.checkpoints[-1].lasts
        for region in self.setup.others:
            if self.setup.quorum or self.gave_up or ledger.has_ended(region) or region in done:
                continue
            lacks = sequence - ledger.newest(region)
            assert lacks <= self._slack(sequence), f"{self.name} continued without {region}, which all wait for"

    def _apply(self, action: MergeUpdates) -> UpdatesMerged:
        if self.setup.background:
            return self._merge_as_they_come(action)
        base = self.disk.checkpoints[-1]
        assert action.sequence == base.sequence + 1, "a round was left out or made twice"
        assert tuple(m.region for m in action.manifests) == self.setup.contributors(action.sequence)
        assert all(m.sequence == action.sequence for m in action.manifests)
        digest = f"({base.digest}+{'+'.join(m.digest for m in action.manifests)})"
        made = Checkpoint(action.sequence, action.step, action.samples, action.applied, digest, ends=action.ends)
        self.disk.checkpoints = [*self.disk.checkpoints, made][-2:]
        return UpdatesMerged(action, digest, f"model/{action.sequence}", f"state/{action.sequence}")

    # The agent

    def new_worker_group(self) -> None:
        self.workers = [Worker(self.attempt) for _ in range(self.wanted_workers)]

    def next_attempt(self) -> None:
        self.attempt += 1
        self.ghosts |= {worker.call for worker in self.workers if worker.call}
        self.new_worker_group()

    def configure(self, peers: tuple[PeerAddress, ...], ways: Ways, *, again: bool = True) -> None:
        """``again``: also if nothing has changed."""
        if self.machine is None:
            return
        told = Configured(self.epoch, self.attempt, peers, ways.neighbours, routes=ways.routes, former=ways.former)
        told = replace(told, finish=self.told_to_end, halt=self.halts)
        if again or self.told is None or self.told[0] is not self.machine or self.told[1] != told:
            self.told = self.machine, told
            self.feed(told)

    # The workers

    def let_work(self, index: int) -> None:
        """Whatever a worker does next: ask, or ask again because nobody has answered."""
        worker = self.workers[index]
        if self.machine is None or worker.doing == "done":
            return
        if worker.call:
            self.give_up_call(index)
        if worker.doing == "step" and self._shortcut(worker):
            return
        if worker.attempt >= self.machine.attempt and len(self.workers) != self.machine.setup.workers:
            # Every token states the number of workers.
            self.feed(Configured(0, worker.attempt, (), workers=len(self.workers)))
        self.calls += 1
        worker.call = self.calls
        request = self._request(worker, index, worker.call, worker.attempt)
        if isinstance(request, BoundaryArrived) and request.sequence > self.timed_round:
            self.timed_round = request.sequence
            self.now += self.round_seconds
        self.feed(request)

    def give_up_call(self, index: int) -> None:
        """The worker hangs up: it has waited too long, or the connection broke."""
        worker = self.workers[index]
        call, worker.call = worker.call, 0
        if call and self.machine is not None:
            self.feed(CallGone(call))

    def end_slice(self, index: int) -> None:
        """The invocation ends; the next one begins with attaching and takes up at the same step."""
        worker = self.workers[index]
        if worker.doing == "done":
            return
        self.give_up_call(index)
        self.workers[index] = replace(worker, doing="attach", call=0)

    def _shortcut(self, worker: Worker) -> bool:
        assert self.machine is not None
        if len(self.workers) == 1 or (
            worker.attempt == self.machine.attempt and f"g/{worker.attempt}/{worker.step + 1}" in self.channel
        ):
            self._made_step(worker)
            return True
        return False

    def _request(self, worker: Worker, index: int, call: int, attempt: int) -> Event:
        target = worker.round + 1
        place = f"{attempt}/{target}"
        match worker.doing:
            case "attach":
                return Attached(call, index, attempt, f"init/{attempt}")
            case "step":
                key = f"g/{attempt}/{worker.step + 1}/{index}"
                return ReduceArrived(call, index, attempt, worker.step + 1, key, 1.0, 0.5)
            case "boundary":
                told = ("", "") if worker.known else (f"model at {place}", f"b/{place}" if index == 0 else "")
                step = worker.until
                return BoundaryArrived(call, index, attempt, target, step, *told, told[1], 1.0, 0.5)
        return Evaluated(call, index, attempt, worker.round, 1.0, {"accuracy": 0.5})

    def _answer(self, action: Reply | Refuse) -> None:
        self.ghosts.discard(action.call)
        index = next((i for i, worker in enumerate(self.workers) if worker.call == action.call), None)
        if index is None:
            return
        worker = self.workers[index]
        worker.call = 0
        if isinstance(action, Refuse):
            # The invocation fails, and the agent begins a new attempt.
            assert action.code == "FENCED", action
            self.next_attempt()
            return
        answer = action.answer
        if isinstance(answer, ReduceAnswer):
            self._made_step(worker)
        elif isinstance(answer, AttachAnswer):
            self._attached(worker, answer)
        elif isinstance(answer, BoundaryAnswer):
            if not self.setup.background:
                worker.step = answer.sequence * self.setup.steps_per_round
            worker.round, worker.until = answer.sequence, answer.until_step
            worker.known, worker.finished = False, answer.finished
            worker.doing = "evaluate" if answer.evaluate else self._next(worker)
        elif isinstance(answer, EvaluatedAnswer):
            worker.doing = self._next(worker)

    def _attached(self, worker: Worker, answer: AttachAnswer) -> None:
        resumes = worker.round == answer.sequence and not answer.boundary and not answer.finished
        missed = worker.round + 1 == answer.sequence and worker.step == answer.step
        if answer.background and not (resumes or missed or answer.model_key or answer.boundary):
            # The place is lost, and the model is not where the others are.
            self.next_attempt()
            return
        worker.until = answer.until_step
        worker.round, worker.known, worker.finished = answer.sequence, answer.boundary, answer.finished
        if not resumes:
            worker.step = answer.step
        worker.doing = "evaluate" if answer.evaluate else self._next(worker)

    def _next(self, worker: Worker) -> str:
        if worker.finished:
            return "done"
        at_end = worker.step >= worker.until
        return "boundary" if worker.known or at_end else "step"

    def _made_step(self, worker: Worker) -> None:
        worker.step += 1
        worker.doing = self._next(worker)

    def zombie_calls(self) -> None:
        """A worker of an attempt that is over says all it can say; none of it may leave a trace."""
        machine = self.machine
        if machine is None or machine.attempt == 1:
            return
        before = copy.deepcopy(_all_of(machine))
        for doing in ("attach", "step", "boundary", "evaluate"):
            for known in (False, True):
                ghost = Worker(machine.attempt - 1, doing, round=max(0, machine.sequence), known=known)
                self.calls += 1
                answered = machine.handle(self._request(ghost, 0, self.calls, ghost.attempt), machine._measured)
                assert [type(action) for action in answered] == [Refuse], answered
        assert _all_of(machine) == before

    @property
    def finished(self) -> bool:
        return self.machine is not None and self.machine.finished


def _all_of(machine: Machine) -> tuple[dict[str, object], ...]:
    ledger = machine.ledger
    return vars(machine) | {"ledger": None}, vars(ledger) | {"sums": None}, vars(ledger.sums)


def around(names: list[str], cut: set[frozenset[str]]) -> Pairs:
    """A tree of the pairs that are not cut, grown from the first region."""
    reached, found = {names[0]}, []
    while len(reached) < len(names):
        pair = next((a, b) for a in sorted(reached) for b in names if b not in reached and frozenset((a, b)) not in cut)
        reached.add(pair[1])
        found.append((min(pair), max(pair)))
    return tuple(sorted(found))


class Miniature:
    """All regions, and the WAN."""

    def __init__(
        self,
        regions: int,
        workers: int,
        rounds: int,
        steps: int,
        evaluate_every: int,
        *,
        quorum: int | None = None,
        max_rounds_ahead: int = 0,
        neighbours: Pairs = (),
        rerouted: bool = False,
        sums: bool = False,
        same_round: bool = False,
    ) -> None:
        """``quorum`` None: synchronous exchange."""
        names = tuple(f"r{index}" for index in range(regions))
        more = {
            "background": quorum is not None and regions > 1,
            "quorum": quorum or 0,
            "max_rounds_ahead": max_rounds_ahead,
            "same_round": same_round and regions > 1,
        }
        more |= {"rerouted": rerouted, "sums": sums and more["background"]}
        self.sites = {n: Site(Setup(n, names, workers, rounds, steps, evaluate_every, **more)) for n in names}
        self.ways = Ways(neighbours)
        """As the control plane wants them."""
        self.told = dict.fromkeys(names, self.ways)
        """What each agent was last told, and keeps."""
        self.cut: set[frozenset[str]] = set()
        """Pairs of regions between which nothing arrives any more."""
        self.lost = ""
        """A region whose state is lost, until it has come back."""
        self.deaf = ""
        """A region whose agent hears no more of ways."""
        self.wan: list[Message] = []
        self.rounds: dict[int, str] = {}
        """Digest of the model after each round, wherever it was seen first."""

    def configure(self, name: str, *, again: bool = True) -> None:
        """``again``: also if nothing has changed."""
        peers = tuple(
            PeerAddress(site.name, site.epoch, site.name) for site in self.sites.values() if site.name != name
        )
        self.sites[name].configure(peers, self.told[name], again=again)

    # A region that has lost its state

    def lose_state(self, name: str) -> None:
        """With its lines, what was on them is gone as well."""
        self.sites[name].lose_state()
        self.lost = name
        disks = [site.disk for site in self.sites.values() if site.name != name]
        merged = max(disk.checkpoints[-1].sequence for disk in disks)
        # A round that it had merged before anybody else had its update of it is made again, and may be another one.
        self.rounds = {
            sequence: digest
            for sequence, digest in self.rounds.items()
            if sequence <= merged or any((name, sequence) in disk.inbox for disk in disks)
        }
        self.wan = [message for message in self.wan if name not in (message.source, message.to)]

    def rejoin(self, name: str) -> None:
        """It asks all others, if all can answer, and continues from what the furthest has."""
        here = self.sites[name]
        if here.machine is None or not here.machine.state_lost or not here.machine.ledger.peers:
            return
        others = [self.sites[near] for near in here.machine.ledger.regions_to_ask()]
        if any(site.machine is None for site in others):
            return
        if any(frozenset((name, site.name)) in self.cut for site in others):
            return
        for site in others:
            site.feed(StateLost(name))
        way = rejoin_plan(
            here.machine, {site.name: rejoin_reply(site.machine, "job", "") for site in others if site.machine}
        )
        if way is None:
            return
        if way.furthest:
            here.take_over(self.sites[way.furthest], way.updates)
        else:
            here.machine.state_lost, here.disk.marked = False, True
            here.retry_calls()
        self.lost = ""
        self.configure(name)

    # Ways that change

    def reroute(self, pairs: Pairs) -> None:
        """The control plane chooses other ways, unless not all regions know the last ones."""
        if not self.ways.former:
            self.ways = Ways(pairs, self.ways.routes + 1, self._spelled(self.ways.neighbours))

    def tell_ways(self, name: str, *, again: bool = True) -> None:
        """An agent hears of the ways; once all servers know them, the former ones are over."""
        if name != self.deaf:
            self.told[name] = self.ways
        self.configure(name, again=again)
        knowing = [s.machine is not None and s.machine.progress.routes >= self.ways.routes for s in self.sites.values()]
        if self.ways.former and all(knowing):
            self.ways = Ways(self.ways.neighbours, self.ways.routes + 1)

    def _spelled(self, pairs: Pairs) -> Pairs:
        names = sorted(self.sites)
        return pairs or tuple((a, b) for a in names for b in names if a < b)

    def send(self, name: str) -> None:
        """Every sender of a region puts the first of its updates on the wire, again if it was there before."""
        site = self.sites[name]
        for to in sorted(site.peer_senders):
            waiting = site.peer_senders.get(to)
            if not waiting or site.machine is None:
                continue
            manifest = waiting[min(waiting)]
            if not site.has_bytes_of(manifest):
                del waiting[min(waiting)]
                site.feed(SumGone(manifest))
                continue
            cut = frozenset((name, to)) in self.cut
            if not cut or to not in site.failing:
                # A link that is cut under an update may have carried it.
                site.feed(SendAttempted(to, manifest))
                self.wan.append(Message(name, to, manifest))
            if cut:
                site.failing.add(to)
                site.feed(PeerUnreachable(to))
            else:
                site.failing.discard(to)

    def deliver(self, message: Message, *, then_crash: bool = False) -> None:
        site = self.sites[message.to]
        if site.machine is None or frozenset((message.source, message.to)) in self.cut:
            return
        if isinstance(message.what, tuple):
            waiting, (origin, sequence) = site.peer_senders.get(message.source, {}), message.what
            if (sequence, origin) in waiting:
                del waiting[sequence, origin]
                site.feed(PeerHas(message.source, sequence, origin))
            return
        verdict = site.machine.verdict(message.what, message.source)
        if verdict is Verdict.WANT:
            site.take_in(message.what)
            if then_crash:
                site.crash()
                return
            site.feed(UpdateStored(message.what))
        if verdict in (Verdict.WANT, Verdict.HAVE):
            self.wan.append(Message(message.to, message.source, (message.what.region, message.what.sequence)))
        elif verdict is Verdict.LATER and message.source in self.sites and site.machine is not None:
            self._tell_next(message.source, message.to, message.what.region, site.machine)

    def _tell_next(self, sender: str, name: str, origin: str, machine: Machine) -> None:
        """The answer says what is here of that region."""
        if self.sites[sender].machine is not None:
            self.sites[sender].feed(PeerHas(name, machine.ledger.newest(origin), origin))

    def check(self) -> None:
        """What must hold at every moment."""
        for site in self.sites.values():
            for made in site.disk.checkpoints:
                if made.sequence >= 0 and site.setup.same_round:
                    digest = self.rounds.setdefault(made.version, made.digest)
                    assert made.digest == digest, f"{site.name} has another model after merge {made.version}"
                if made.sequence < 0 or site.setup.background:
                    continue
                digest = self.rounds.setdefault(made.sequence, made.digest)
                assert made.digest == digest, f"{site.name} has another model after round {made.sequence}"
                setup = site.setup
                first = site.name == setup.regions[0]
                remote = made.sequence * (len(setup.regions) - 1) + (0 if first else 1)
                assert made.applied == remote, f"{made.applied} remote updates in a model that has room for {remote}"
                assert made.step == made.sequence * setup.steps_per_round

    def finish_without(self, gone: str) -> None:
        """A region dies and never comes back: the others are told so, one after another, and must end at once."""
        self.sites[gone].crash()
        others = {name: site for name, site in self.sites.items() if name != gone}
        for site in others.values():
            site.halts = True
        for _ in range(100):
            if all(site.finished and all(w.doing == "done" for w in site.workers) for site in others.values()):
                return
            for name, site in others.items():
                if site.machine is None:
                    site.start()
                self.configure(name)
                for index in range(len(site.workers)):
                    if not site.workers[index].call:
                        site.let_work(index)
                while site.work:
                    site.do_work()
                self.send(name)
            while self.wan:
                self.deliver(self.wan.pop(0))
            self.check()
        raise AssertionError(f"stuck: {[(s.machine and s.machine.progress, s.workers) for s in others.values()]}")

    def finish(self) -> None:
        """From now on nothing breaks: everything must come to its end, and nobody may wait for ever.

        What is cut stays cut, and the control plane leads around it; to do so it must be heard. Else whom it does not
        reach stays as it is.
        """
        self.deaf = "" if self.cut else self.deaf
        if any(site.told_to_end for site in self.sites.values()):
            # The control plane tells all, sooner or later; no region ends because another one says so.
            for site in self.sites.values():
                site.told_to_end = True
        for _ in range(400):
            if all(site.finished and all(w.doing == "done" for w in site.workers) for site in self.sites.values()):
                break
            for name, site in self.sites.items():
                if site.machine is None:
                    site.start()
                # Not each time: a server that waits must wake by itself.
                self.tell_ways(name, again=False)
                self.rejoin(name)
                here = {frozenset(pair) for pair in self._spelled(self.ways.neighbours)}
                if here & self.cut:
                    self.reroute(around(sorted(self.sites), self.cut))
                for index in range(len(site.workers)):
                    if not site.workers[index].call:
                        site.let_work(index)
                while site.work:
                    site.do_work()
                self.send(name)
            while self.wan:
                self.deliver(self.wan.pop(0))
            self.check()
        else:
            raise AssertionError(
                f"stuck: {[(s.machine and s.machine.progress, s.workers) for s in self.sites.values()]}"
            )
        for site in self.sites.values():
            assert site.machine is not None
            assert site.machine.progress.phase == "finished"
            assert not site.ghosts, "calls of an older attempt wait for ever"
            assert site.machine.sequence <= site.setup.rounds
            assert site.disk.metrics is not None
            assert site.disk.metrics.sequence == site.machine.sequence
        made = [site.machine.sequence for site in self.sites.values() if site.machine is not None]
        if not any(site.told_to_end for site in self.sites.values()):
            assert set(made) == {next(iter(self.sites.values())).setup.rounds}
        merged = [site.disk.checkpoints[-1].merged for site in self.sites.values() if site.setup.background]
        merged = [[part for manifest in mine for part in _parts_of(manifest)] for mine in merged]
        for mine in merged:
            # Every update of every region, each once: the sum is the same everywhere.
            assert len(set(mine)) == len(mine)
            assert set(mine) == set(merged[0])
            assert len(mine) == 1 + sum(made)
        # All wait for all, so they end together.
        assert merged or len(set(made)) == 1
