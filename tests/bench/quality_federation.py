"""A federation in one process and in virtual time: real gradients, and the parameter servers' own numbers.

Every region has its workers' model and a `Replica`, driven in the order in which `sync.ps.execution.executor` drives
it. An update that a region makes at the end of a round reaches a peer after what was sent to it before, its own framed
bytes at the link's rate and half a round trip. Compute is alike in all regions, t seconds a step; coding costs nothing
here (tests/bench/codecs.py measures it).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from quality_data import Data, split
from quality_models import Workload

from region_agent.worker.training.proximal import ProximalTerm
from sync import framing
from sync.codec import Codec, Float32, codec_named, with_state
from sync.flat import FlatModel
from sync.layout import Vector
from sync.policy import Contribution, policy_named
from sync.ps.execution.replica import Replica, ReplicaState, expanded
from sync.wan import ExchangeSettings, policy_of

__all__ = [
    "REGIONS",
    "Link",
    "Outcome",
    "Samples",
    "Setting",
    "Trainer",
    "alone",
    "asgd_bytes",
    "default_folder",
    "federated",
    "update_bytes",
]

REGIONS = ("ams", "fra", "lon")


@dataclass(frozen=True)
class Link:
    """All links are alike."""

    mbps: float = 100.0
    rtt_ms: float = 30.0
    step_seconds: float = 0.05


@dataclass(frozen=True)
class Setting:
    """A contender: what a plan would say."""

    name: str
    policy: str
    interval: int
    codec: str = "fp32"
    settings: Mapping[str, float] = field(default_factory=dict)
    paces: tuple[float, ...] = (1.0, 1.0, 1.0)
    """Local steps of each region in a round, as a part of the interval."""


@dataclass(frozen=True)
class Outcome:
    """One run."""

    accuracy: float
    """In per cent."""
    loss: float
    bytes_total: int = 0
    """Over all links."""
    bytes_most: int = 0
    """Over the link that carried the most."""
    seconds: float = 0.0
    """Virtual."""
    refused: int = 0
    """Honest updates that the guard did not let pass."""
    diverged: bool = False


@dataclass(frozen=True)
class _Update:
    region: str
    weight: float
    delta: Vector
    last: bool
    steps: float = 0.0
    """Local steps, of which there are different numbers; 0: not told."""


class Samples:
    """Batches of a region's samples, shuffled again in every pass."""

    def __init__(self, data: Data, mine: npt.NDArray[np.int64], batch: int, seed: tuple[int, ...]) -> None:
        self._data, self._mine, self._batch = data, mine, batch
        self._random, self._order = np.random.default_rng(seed), np.zeros(0, np.int64)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        while self._order.size < self._batch:
            self._order = np.concatenate([self._order, self._random.permutation(self._mine)])
        chosen, self._order = torch.from_numpy(self._order[: self._batch]), self._order[self._batch :]
        return self._data.train[0][chosen], self._data.train[1][chosen]


class Trainer:
    """A module, its optimiser with a rate that falls linearly to zero after a short rise, and its batches."""

    def __init__(self, workload: Workload, samples: Samples, rate: float, steps: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.workload, self._samples = workload, samples
        self.module = workload.model()
        self.flat = FlatModel(self.module)
        self.proximal: ProximalTerm | None = None
        """What the policy has the workers add to their gradients; its model is set at the begin of each round."""
        self._optimizer = workload.optimizer(self.module, rate)
        rise = max(1, steps // 20)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min((step + 1) / rise, (steps - step) / (steps - rise + 1))
        )

    def step(self) -> bool:
        """False where the loss is not finite any more."""
        self.module.train()
        self._optimizer.zero_grad(set_to_none=True)
        loss = self.workload.loss(self.module, self._samples.next())
        loss.backward()  # type: ignore[no-untyped-call]
        if self.proximal is not None:
            self.proximal.add()
        self._optimizer.step()
        self._schedule.step()
        return bool(torch.isfinite(loss.detach()))

    def outcome(self, data: Data) -> tuple[float, float]:
        return self.workload.quality(self.module, data.test)


def alone(workload: Workload, data: Data, *, batch: int, steps: int, rate: float, seed: int) -> Outcome:
    """All data at one site."""
    trainer = Trainer(workload, Samples(data, np.arange(len(data.labels)), batch, (seed, 0)), rate, steps, seed)
    for _ in range(steps):
        if not trainer.step():
            return Outcome(0.0, math.inf, diverged=True)
    return Outcome(*trainer.outcome(data))


def federated(
    workload: Workload, data: Data, setting: Setting, *,
    alpha: float | None, steps: int, rate: float, seed: int, link: Link = Link(),
) -> Outcome:  # fmt: skip
    """The same number of samples, at three sites."""
    parts = split(data, len(REGIONS), alpha, seed)
    trainers = {
        region: Trainer(workload, Samples(data, part, workload.batch, (seed, at)), rate, round(steps * pace), seed)
        for at, (region, part, pace) in enumerate(zip(REGIONS, parts, setting.paces, strict=True))
    }
    exchange, _ = ExchangeSettings.of(setting.settings)
    kind = _Background if exchange.background else _Synchronous
    federation = kind(setting, exchange, trainers, steps, link)
    with np.errstate(over="ignore", invalid="ignore"):
        fine = federation.run()
    traffic = federation.bytes_sent.values()
    facts = (sum(traffic), max(traffic), federation.seconds, federation.refused)
    if not fine:
        return Outcome(0.0, math.inf, *facts, diverged=True)
    first = trainers[REGIONS[0]]
    first.flat.load(federation.replicas[REGIONS[0]].model)
    return Outcome(*first.outcome(data), *facts)


class _Federation:
    def __init__(
        self, setting: Setting, exchange: ExchangeSettings, trainers: dict[str, Trainer], steps: int, link: Link
    ) -> None:
        self.trainers, self.steps, self.link, self._exchange = trainers, steps, link, exchange
        self.interval, self._paces = setting.interval, dict(zip(REGIONS, setting.paces, strict=True))
        flat = trainers[REGIONS[0]].flat
        # Seeded alike, all have made the same, so nobody sends it (docs/wan.md).
        assert all(np.array_equal(one.flat.vector(), flat.vector()) for one in trainers.values())
        policy, first = policy_of(setting.policy, setting.settings), flat.vector()
        codec = codec_named(setting.codec)
        self.replicas = {region: Replica(policy, exchange, codec, ReplicaState(first, first)) for region in REGIONS}
        for replica in self.replicas.values():
            replica.trained = flat.layout.trainable_size
        if named := policy_named(setting.policy).proximal:
            mu = {**policy_named(setting.policy).settings, **setting.settings}[named]
            for trainer in trainers.values():
                trainer.proximal = ProximalTerm(trainer.flat, mu)
                trainer.proximal.begin_round(first)
        self.bytes_sent = {(a, b): 0 for a in REGIONS for b in REGIONS if a != b}
        self._free = dict.fromkeys(self.bytes_sent, 0.0)
        """When each link has sent what was given to it."""
        self.refused, self.seconds = 0, 0.0

    def run(self) -> bool:
        """False where training has diverged."""
        raise NotImplementedError

    def _send(self, sender: str, peer: str, size: int, now: float) -> float:
        """When it is there."""
        self.bytes_sent[sender, peer] += size
        done = max(now, self._free[sender, peer]) + size * 8 / (self.link.mbps * 1e6)
        self._free[sender, peer] = done
        return done + self.link.rtt_ms / 2e3

    def _own(self, region: str, sequence: int, weight: float, last: bool) -> tuple[_Update, int] | None:
        """A region's update as all decode it, and its size on the wire; None: its model is not finite."""
        end = self.trainers[region].flat.vector()
        if not np.isfinite(end).all():
            return None
        made = self.replicas[region].own_update(end, sequence, last=last)
        facts = {"sequence": float(sequence), "weight": weight, "codec": float(made.codec.mark)}
        if made.part != slice(None):
            facts |= {"from": float(made.part.start), "to": float(made.part.stop)}
        size = sum(piece.nbytes for piece in framing.encode(made.tensors, facts))
        return _Update(region, weight, expanded(made.sent, made.part, end.size), last), size

    def _merge(self, region: str, updates: list[_Update], total: float | None, stale: int = 0) -> None:
        contributions = [
            Contribution(
                u.region, u.weight, u.delta, stale if u.region != region else 0,
                steps=u.steps, data_share=1 / len(REGIONS),
            )
            for u in updates
        ]  # fmt: skip
        self.refused += len(self.replicas[region].merge(contributions, total, own=region))


class _Synchronous(_Federation):
    """All wait for all at the end of a round (`sync.ps.core.synchronous`)."""

    def run(self) -> bool:
        now, done, sequence = 0.0, 0, 0
        while done < self.steps:
            length, sequence = min(self.interval, self.steps - done), sequence + 1
            local = {region: max(1, round(length * pace)) for region, pace in self._paces.items()}
            if not all(trainer.step() for region, trainer in self.trainers.items() for _ in range(local[region])):
                return False
            done, now = done + length, now + length * self.link.step_seconds
            batch = self.trainers[REGIONS[0]].workload.batch
            made = [self._own(region, sequence, float(local[region] * batch), done >= self.steps) for region in REGIONS]
            made = [one and (replace(one[0], steps=float(local[one[0].region])), one[1]) for one in made]
            found = [update for update in made if update is not None]
            if len(found) < len(made):
                return False
            now = max(self._send(u.region, p, size, now) for u, size in found for p in REGIONS if p != u.region)
            for region, replica in self.replicas.items():
                self._merge(region, [update for update, _ in found], None)
                replica.restart()
                self.trainers[region].flat.load(replica.start)
                if (proximal := self.trainers[region].proximal) is not None:
                    proximal.begin_round(replica.start)
        models = [replica.model for replica in self.replicas.values()]
        assert all(np.array_equal(models[0], other) for other in models), "regions differ"
        self.seconds = now
        return True


@dataclass
class _Site:
    """What a region remembers with background exchange."""

    coming: list[tuple[float, _Update]] = field(default_factory=list)
    """With the time at which each arrives, in the order in which they were sent."""
    known: Vector | None = None
    """The correction of the last merge."""
    given: Vector | None = None
    """What the workers are to add a quarter of a round after its end."""
    due: int = 0
    """After which step."""


class _Background(_Federation):
    """Nobody waits: `sync.ps.core.background`, its workers, and the merges after the last round."""

    def run(self) -> bool:
        sites = {region: _Site() for region in REGIONS}
        for trainer in self.trainers.values():
            trainer.flat.load(self.replicas[REGIONS[0]].start)
        sequence, now = 0, 0.0
        for step in range(1, self.steps + 1):
            now += self.link.step_seconds
            for region, trainer in self.trainers.items():
                if not trainer.step():
                    return False
                if sites[region].given is not None and step >= sites[region].due:
                    trainer.flat.add(sites[region].given)
                    sites[region].given = None
            if step % self.interval == 0 or step == self.steps:
                sequence += 1
                if not self._end_round(sites, sequence, now, step == self.steps):
                    return False
                for site in sites.values():
                    site.due = step + max(1, self.interval // 4)
        self.seconds = max(now, *(at for site in sites.values() for at, _ in site.coming))
        for region, site in sites.items():
            for _, update in site.coming:
                self._merge(region, [update], 1.0, stale=1)
        return True

    def _end_round(self, sites: dict[str, _Site], sequence: int, now: float, last: bool) -> bool:
        for region, site in sites.items():
            made = self._own(region, sequence, 1 / len(REGIONS), last)
            if made is None:
                return False
            update, size = made
            replica = self.replicas[region]
            replica.continue_from(self.trainers[region].flat.vector(), site.known)
            site.given = None if last else site.known
            for peer in REGIONS:
                if peer != region:
                    sites[peer].coming.append((self._send(region, peer, size, now), update))
            here = [u for at, u in site.coming if at <= now]
            site.coming = [(at, u) for at, u in site.coming if at > now]
            self._merge(region, [update, *here], 1.0, stale=1)
            site.known = replica.correction()
        return True


def asgd_bytes(workload: Workload, steps: int) -> int:
    """What `asgd` sends over all links: the whole change in fp32 at every step."""
    links = len(REGIONS) * (len(REGIONS) - 1)
    return _framed(Float32(), FlatModel(workload.model()).vector(), 0) * links * steps


def update_bytes(workload: Workload, codec: str) -> int:
    """Of an update; dense codecs give every one the same."""
    flat = FlatModel(workload.model())
    vector = flat.vector()
    return _framed(with_state(codec_named(codec), flat.layout.trainable_size, vector.size), vector, 1)


def _framed(codec: Codec, vector: Vector, sequence: int) -> int:
    pieces = framing.encode(codec.encode(vector), {"sequence": float(sequence), "weight": 0.0, "codec": codec.mark})
    return sum(piece.nbytes for piece in pieces)


def default_folder() -> Path:
    """Where the data of a checkout's neighbour lies."""
    return Path(__file__).resolve().parents[3] / "shared" / "data"
