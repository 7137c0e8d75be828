"""The robust rules ``krum`` and ``multi-krum``: changes that have many others close by (Blanchard et al. 2017, arXiv
1703.02757, sections 4 and 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sync.layout import Vector
from sync.means import weighted_mean
from sync.robust._contract import Combined, RobustRule
from sync.robust._numbers import distances

__all__ = ["METHODS"]


def _by_score(deltas: Sequence[Vector], wrong: int) -> list[int]:
    """Return the numbers of the changes by their scores, the best first: the sum of the squared distances to the
    n - f - 2 closest others."""
    near = len(deltas) - wrong - 2
    scores = []
    for number, row in enumerate(distances(deltas)):
        others = sorted(row[:number] + row[number + 1 :])
        scores.append((sum(others[:near]), number))
    return [number for _, number in sorted(scores)]


def _krum(deltas: Sequence[Vector], wrong: int, memory: Mapping[str, Vector]) -> Combined:
    return Combined(deltas[_by_score(deltas, wrong)[0]].copy())


def _multi_krum(deltas: Sequence[Vector], wrong: int, memory: Mapping[str, Vector]) -> Combined:
    """Return the mean of the n - f - 2 best changes, the largest number for which El Mhamdi et al. 2018 (arXiv
    1802.07927) prove that it converges."""
    best = sorted(_by_score(deltas, wrong)[: max(1, len(deltas) - wrong - 2)])
    return Combined(weighted_mean([deltas[number] for number in best], [1.0] * len(best)))


def _fewest(wrong: int) -> int:
    return 2 * wrong + 3


METHODS = (RobustRule("krum", _krum, _fewest), RobustRule("multi-krum", _multi_krum, _fewest))
