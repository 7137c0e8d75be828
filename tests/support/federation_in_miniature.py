"""Parameter servers, their disks, workers and the WAN between them, simulated: only the machines are real.

Everything that can go wrong on the way is a method: calls are lost, messages are delayed, doubled, swapped and dropped,
processes die between any two steps and come back from what was durable then.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace

from sync.ps.events import (
    Action,
    Applied,
    Apply,
    AttachAnswer,
    Attached,
    BoundaryAnswer,
    BoundaryArrived,
    CallGone,
    Configured,
    Evaluated,
    EvaluatedAnswer,
    Event,
    Failed,
    Forget,
    Keep,
    Kept,
    Manifest,
    Merge,
    Merged,
    Peer,
    PeerHas,
    Prepare,
    Prepared,
    ReduceAnswer,
    ReduceArrived,
    Refuse,
    Reply,
    Ship,
    Stored,
    Verdict,
)
from sync.ps.machine import Machine, Recovered, Setup


@dataclass(frozen=True)
class Checkpoint:
    sequence: int = -1
    step: int = 0
    samples: float = 0.0
    applied: int = 0
    digest: str = ""


@dataclass
class Disk:
    """What survives a crash."""

    checkpoints: list[Checkpoint] = field(default_factory=lambda: [Checkpoint()])
    inbox: dict[tuple[str, int], Manifest] = field(default_factory=dict)
    outbox: dict[int, Manifest] = field(default_factory=dict)
    metrics: Keep | None = None


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
    call: int = 0
    """0: it waits for none."""


@dataclass(frozen=True)
class Message:
    """On its way over the WAN."""

    source: str
    to: str
    what: Manifest | int
    """An update, or the acknowledgement of one, by its sequence."""


class Site:
    """One region."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.name = setup, setup.region
        self.disk = Disk()
        self.channel: set[str] = set()
        self.epoch, self.attempt = 1, 1
        self.machine: Machine | None = None
        self.work: list[Action] = []
        self.couriers: dict[str, dict[int, Manifest]] = {}
        self.workers: list[Worker] = []
        self.calls = 0
        self.ghosts: set[int] = set()
        """Calls of attempts that are over; each of them must be answered."""
        self.new_crew()
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
            inbox=tuple(disk.inbox.values()),
            outbox=tuple(disk.outbox.values()),
            metrics=disk.metrics,
        )
        self.machine = Machine(self.setup, recovered)
        self.feed(Configured(self.epoch, self.attempt, ()))

    def crash(self) -> None:
        self.machine = None
        self.work, self.couriers = [], {}
        self.ghosts.clear()
        for worker in self.workers:
            worker.call = 0

    def damage_newest_checkpoint(self) -> None:
        """Only while it is down. What the round needs must still be there."""
        if len(self.disk.checkpoints) < 2:
            return
        lost = self.disk.checkpoints.pop()
        here = {*self.disk.inbox, *((self.name, sequence) for sequence in self.disk.outbox)}
        for region in self.setup.contributors(lost.sequence):
            assert (region, lost.sequence) in here, f"the updates of round {lost.sequence} were forgotten too early"

    def feed(self, event: Event) -> None:
        assert self.machine is not None
        for action in self.machine.handle(event):
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Reply() | Refuse():
                self._answer(action)
            case Ship():
                self.couriers.setdefault(action.peer.region, {}).update({m.sequence: m for m in action.manifests})
            case Failed():
                raise AssertionError(f"{self.name}: {action}")
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
            case Merge():
                assert len({key for key, _ in action.parts}) == self.setup.workers
                key = f"g/{action.attempt}/{action.step}"
                self.channel.add(key)
                return Merged(action.attempt, action.step, key, 1.0)
            case Prepare():
                assert action.sequence not in disk.outbox, "a durable update was made anew"
                digest = f"{self.name}:{action.sequence}:{action.model_key}"
                made = Manifest(self.name, action.epoch, action.sequence, digest, 1, action.weight)
                disk.outbox[action.sequence] = made
                return Prepared(made)
            case Apply():
                return self._apply(action)
            case Keep():
                disk.metrics = action
                return Kept(action)
            case Forget():
                disk.inbox = {k: m for k, m in disk.inbox.items() if m.sequence > action.inbox_up_to}
                disk.outbox = {s: m for s, m in disk.outbox.items() if s > action.outbox_up_to}
        return None

    def _apply(self, action: Apply) -> Applied:
        base = self.disk.checkpoints[-1]
        assert action.sequence == base.sequence + 1, "a round was left out or made twice"
        assert tuple(m.region for m in action.manifests) == self.setup.contributors(action.sequence)
        assert all(m.sequence == action.sequence for m in action.manifests)
        digest = f"({base.digest}+{'+'.join(m.digest for m in action.manifests)})"
        made = Checkpoint(action.sequence, action.step, action.samples, action.applied, digest)
        self.disk.checkpoints = [*self.disk.checkpoints, made][-2:]
        return Applied(action, digest, f"model/{action.sequence}", f"state/{action.sequence}")

    # The agent

    def new_crew(self) -> None:
        self.workers = [Worker(self.attempt) for _ in range(self.setup.workers)]

    def next_attempt(self) -> None:
        self.attempt += 1
        self.ghosts |= {worker.call for worker in self.workers if worker.call}
        self.new_crew()

    def configure(self, peers: tuple[Peer, ...]) -> None:
        if self.machine is not None:
            self.feed(Configured(self.epoch, self.attempt, peers))

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
        self.calls += 1
        worker.call = self.calls
        self.feed(self._request(worker, index, worker.call, worker.attempt))

    def give_up_call(self, index: int) -> None:
        """The worker hangs up: its patience is over, or the connection broke."""
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
        if self.setup.workers == 1 or (
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
                return Attached(call, index, attempt, "layout", f"init/{attempt}")
            case "step":
                key = f"g/{attempt}/{worker.step + 1}/{index}"
                return ReduceArrived(call, index, attempt, worker.step + 1, key, 1.0, 0.5)
            case "boundary":
                told = ("", "") if worker.known else (f"model at {place}", f"b/{place}" if index == 0 else "")
                step = target * self.setup.steps_per_round
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
            worker.round, worker.step = answer.sequence, answer.sequence * self.setup.steps_per_round
            worker.known, worker.finished = False, answer.finished
            worker.doing = "evaluate" if answer.evaluate else self._next(worker)
        elif isinstance(answer, EvaluatedAnswer):
            worker.doing = self._next(worker)

    def _attached(self, worker: Worker, answer: AttachAnswer) -> None:
        resumes = worker.round == answer.sequence and not answer.boundary and not answer.finished
        worker.round, worker.known, worker.finished = answer.sequence, answer.boundary, answer.finished
        if not resumes:
            worker.step = answer.step
        worker.doing = "evaluate" if answer.evaluate else self._next(worker)

    def _next(self, worker: Worker) -> str:
        if worker.finished:
            return "done"
        at_end = worker.step >= (worker.round + 1) * self.setup.steps_per_round
        return "boundary" if worker.known or at_end else "step"

    def _made_step(self, worker: Worker) -> None:
        worker.step += 1
        worker.doing = self._next(worker)

    def zombie_calls(self) -> None:
        """A worker of an attempt that is over says all it can say; none of it may leave a trace."""
        machine = self.machine
        if machine is None or machine.attempt == 1:
            return
        before = copy.deepcopy(vars(machine))
        for doing in ("attach", "step", "boundary", "evaluate"):
            for known in (False, True):
                ghost = Worker(machine.attempt - 1, doing, round=max(0, machine.sequence), known=known)
                self.calls += 1
                answered = machine.handle(self._request(ghost, 0, self.calls, ghost.attempt))
                assert [type(action) for action in answered] == [Refuse], answered
        assert vars(machine) == before

    @property
    def finished(self) -> bool:
        return self.machine is not None and self.machine.finished


class Miniature:
    """All regions, and the WAN."""

    def __init__(self, regions: int, workers: int, rounds: int, steps: int, evaluate_every: int) -> None:
        names = tuple(f"r{index}" for index in range(regions))
        self.sites = {n: Site(Setup(n, names, workers, rounds, steps, evaluate_every)) for n in names}
        self.wan: list[Message] = []
        self.rounds: dict[int, str] = {}
        """Digest of the model after each round, wherever it was seen first."""

    def configure(self, name: str) -> None:
        peers = tuple(Peer(site.name, site.epoch, site.name) for site in self.sites.values() if site.name != name)
        self.sites[name].configure(peers)

    def send(self, name: str) -> None:
        """Every courier of a region puts the first of its updates on the wire, again if it was there before."""
        for to, waiting in self.sites[name].couriers.items():
            if waiting:
                self.wan.append(Message(name, to, waiting[min(waiting)]))

    def deliver(self, message: Message, *, then_crash: bool = False) -> None:
        site = self.sites[message.to]
        if site.machine is None:
            return
        if isinstance(message.what, int):
            waiting = site.couriers.get(message.source, {})
            if message.what in waiting:
                del waiting[message.what]
                site.feed(PeerHas(message.source, message.what))
            return
        verdict = site.machine.verdict(message.what)
        if verdict is Verdict.WANT:
            site.disk.inbox[message.what.region, message.what.sequence] = message.what
            if then_crash:
                site.crash()
                return
            site.feed(Stored(message.what))
        if verdict in (Verdict.WANT, Verdict.HAVE):
            self.wan.append(Message(message.to, message.source, message.what.sequence))

    def check(self) -> None:
        """What must hold at every moment."""
        for site in self.sites.values():
            for made in site.disk.checkpoints:
                if made.sequence < 0:
                    continue
                digest = self.rounds.setdefault(made.sequence, made.digest)
                assert made.digest == digest, f"{site.name} has another model after round {made.sequence}"
                setup = site.setup
                first = site.name == setup.regions[0]
                remote = made.sequence * (len(setup.regions) - 1) + (0 if first else 1)
                assert made.applied == remote, f"{made.applied} remote updates in a model that has room for {remote}"
                assert made.step == made.sequence * setup.steps_per_round

    def finish(self) -> None:
        """From now on nothing breaks: everything must come to its end, and nobody may wait for ever."""
        for _ in range(400):
            if all(site.finished and all(w.doing == "done" for w in site.workers) for site in self.sites.values()):
                break
            for name, site in self.sites.items():
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
        else:
            raise AssertionError(
                f"stuck: {[(s.machine and s.machine.progress, s.workers) for s in self.sites.values()]}"
            )
        for site in self.sites.values():
            assert site.machine is not None
            assert site.machine.progress.phase == "finished"
            assert not site.ghosts, "calls of an older attempt wait for ever"
            assert site.machine.sequence == site.setup.rounds
            assert site.disk.metrics is not None
            assert site.disk.metrics.sequence == site.setup.rounds
