"""A robust merge: the rule, what it does with few regions, and the quarantine of regions that are wrong again and
again."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from sync.layout import Vector
from sync.policy import Contribution
from sync.robust._contract import Combined, RobustRule
from sync.robust._numbers import squared_distance
from sync.robust.trimmed_mean import median

__all__ = ["QUARANTINE_ROUNDS", "SUSPECT_ROUNDS", "RobustMerge"]

_FAR = 3.0
"""A change is suspect if it lies so many times as far from the merged one as the median of all changes."""
SUSPECT_ROUNDS = 5
"""Suspect rounds, less those that were not, after which a region is put in quarantine."""
QUARANTINE_ROUNDS = 20
"""Rounds for which the updates of a region in quarantine are not merged, where a job does not say."""
_PREFIX = "robust/"
_RULE = f"{_PREFIX}rule/"
_REGION = f"{_PREFIX}region/"
_STATE = f"{_PREFIX}state/"
"""Prefix of how far a region's own untrained state is from the model's; with background exchange."""


class RobustMerge:
    """Turns the updates of a round into one. All its state is in the memory that is stored with the model, so that all
    regions judge alike."""

    def __init__(
        self, rule: RobustRule, wrong: int, *, background: bool = False, quarantine: int = QUARANTINE_ROUNDS
    ) -> None:
        """``wrong``: number of regions that may be wrong; 0: as many as the rule withstands. ``background``: regions do
        not begin their rounds from the merged model, but from their own. ``quarantine``: rounds of a quarantine; 0:
        there is none."""
        self._rule, self._wrong, self._background, self._quarantine = rule, wrong, background, quarantine

    @staticmethod
    def owns(name: str) -> bool:
        """Whether an entry of the memory is of a robust merge."""
        return name.startswith(_PREFIX)

    @staticmethod
    def suspicion(memory: Mapping[str, Vector]) -> dict[str, int]:
        """Return the suspect rounds of each region, less those that were not, as far as there are any."""
        regions = {name.removeprefix(_REGION): v for name, v in memory.items() if name.startswith(_REGION)}
        return {region: int(vector[0]) for region, vector in regions.items() if vector[0] >= 1}

    def merge(
        self, contributions: Sequence[Contribution], memory: Mapping[str, Vector], trained: int
    ) -> tuple[list[Contribution], dict[str, Vector], list[tuple[str, str]]]:
        """Return the one update, the entries of the memory after it, and the regions in quarantine with the reason.

        ``contributions`` are finite, and in the order of the regions' names. ``trained``: number of leading coordinates
        that gradients train. Those behind (running means, counters) say nothing about a region's honesty, and are
        merged by their median. In the background a region's changes of them add up to its own values, which nothing
        leads to the model's: there the model gets the median of these values. The sum of the medians of the changes
        would not stay among them, and could make a variance negative.
        """
        kept = {name: vector for name, vector in memory.items() if self.owns(name)}
        contributions = self._from_model(contributions, kept, trained)
        merged, refused = self._split(contributions, kept)
        if not merged:
            return [], kept, refused
        tails = [c.delta[trained:] for c in merged]
        state = median(tails)
        kept |= {name: vector - state for name, vector in kept.items() if name.startswith(_STATE)}
        if len(merged) < 2:
            return merged, kept, refused
        heads = [c.delta[:trained] for c in merged]
        wrong = self._may_be_wrong(len(merged))
        combined = self._combined(heads, wrong, kept)
        kept = {name: vector for name, vector in kept.items() if not name.startswith(_RULE)}
        kept |= {f"{_RULE}{name}": vector for name, vector in combined.memory.items()}
        kept |= self._judged(merged, heads, combined.delta, kept, wrong)
        delta = np.concatenate([combined.delta, state]) if state.size else combined.delta
        return [Contribution("", sum(c.weight for c in merged), delta)], kept, refused

    def _from_model(
        self, contributions: Sequence[Contribution], memory: dict[str, Vector], trained: int
    ) -> list[Contribution]:
        """Return the updates with untrained state that counts from the model's, and keep that in the memory."""
        made: list[Contribution] = []
        for one in contributions:
            tail = one.delta[trained:]
            if self._background and tail.size:
                name = f"{_STATE}{one.region}"
                memory[name] = tail + memory[name] if name in memory else tail.copy()
                one = replace(one, delta=np.concatenate([one.delta[:trained], memory[name]]))
            made.append(one)
        return made

    def _may_be_wrong(self, updates: int) -> int:
        most = self._rule.most(updates)
        return min(self._wrong, most) if self._wrong else most

    def _combined(self, deltas: Sequence[Vector], wrong: int, memory: Mapping[str, Vector]) -> Combined:
        if not wrong:
            # Too few for the rule, since other updates were refused.
            return Combined(median(deltas))
        own = {name.removeprefix(_RULE): vector for name, vector in memory.items() if name.startswith(_RULE)}
        return self._rule.combine(deltas, wrong, own)

    def _split(
        self, contributions: Sequence[Contribution], memory: dict[str, Vector]
    ) -> tuple[list[Contribution], list[tuple[str, str]]]:
        """Separate the updates of regions in quarantine, and count their rounds in the memory."""
        merged: list[Contribution] = []
        refused: list[tuple[str, str]] = []
        for contribution in contributions:
            suspicion, left = memory.get(f"{_REGION}{contribution.region}", np.zeros(2, np.float32))
            if left < 1:
                merged.append(contribution)
                continue
            memory[f"{_REGION}{contribution.region}"] = np.array([suspicion, left - 1], np.float32)
            text = f"in quarantine for {int(left)} rounds: its updates lay more than {_FAR:g} times as far from the "
            refused.append((contribution.region, f"{text}merged ones as the others'"))
        return merged, refused

    def _judged(
        self,
        merged: Sequence[Contribution],
        deltas: Sequence[Vector],
        result: Vector,
        memory: Mapping[str, Vector],
        wrong: int,
    ) -> dict[str, Vector]:
        """Return the entries of the regions whose updates were merged: suspicion, and rounds left in quarantine.

        No more regions are put in quarantine than may be ``wrong``, so that the right ones are never outvoted by it.
        """
        far = [squared_distance(delta, result) for delta in deltas]
        usual = statistics.median(far)
        away = sum(bool(v[1] >= 1) for name, v in memory.items() if name.startswith(_REGION))
        entries: dict[str, Vector] = {}
        for contribution, square in sorted(zip(merged, far, strict=True), key=lambda pair: -pair[1]):
            suspicion = float(memory.get(f"{_REGION}{contribution.region}", np.zeros(2, np.float32))[0])
            suspicion = suspicion + 1 if square > _FAR**2 * usual else max(0.0, suspicion - 1)
            left = 0.0
            if suspicion >= SUSPECT_ROUNDS and self._quarantine and away < wrong:
                suspicion, left, away = 0.0, float(self._quarantine), away + 1
            entries[f"{_REGION}{contribution.region}"] = np.array([suspicion, left], np.float32)
        return entries
