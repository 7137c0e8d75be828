"""What a plan's choices cost in learning: more samples for a larger batch, and points of the metric for less exchange.

**Batch.** By the gradient noise scale (McCandlish et al., arXiv 1812.06162) the samples to the same model grow with the
global batch B as 1 + B / noise. Plans are therefore compared by what the same progress takes: USD, or seconds, times
that factor. A job that ends after a number of samples makes fewer steps with a larger batch, and ends at a worse model:
by points x steps, as measured, too.

**Exchange.** Long rounds, coarse codecs and late updates cost accuracy, the more the fewer rounds a job has. The points
that a plan gives up against the most careful exchange of the same workers are bounded by the job's tolerance. The terms
are of points x rounds; they were measured (docs/benchmarks/wan-quality.md) with models that lose most: easy tasks lose
a twentieth of it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from scheduler.tuning._profile import TaskProfile
from sync.codec import Automatic, codec_named

__all__ = [
    "PRIOR_NOISE_SAMPLES", "batch_points", "coding_points", "exchange_points", "noise_samples", "samples_factor",
    "step_samples_of",
]  # fmt: skip

Floats = npt.NDArray[np.float64]

PRIOR_NOISE_SAMPLES = 1000.0
"""Gradient noise scale, in samples, of a task that was not profiled: what McCandlish et al. found for MNIST and SVHN,
the smallest of their tasks, so that no batch seems better than it is."""
DRIFT = 100.0
"""Points x rounds that local steps cost: a ResNet lost 2.7 in 38 rounds, a transformer 1.5 in 76."""
FEWER_STEPS = 3000.0
"""Points x steps that a larger global batch costs at the same samples, with the noise scale of the prior. Three batches
in one, 2,000 steps instead of 6,000: a ResNet lost 1.1 points, a transformer 0.4, LeNet 0.06."""
LATE = 12.0
"""Points x rounds that an update costs that is one round late: a quarter of a round cost 0.1 points in 30 rounds."""
_LEAST_LATE, _MOST_LATE = 0.25, 1.0
"""Rounds by which updates in the background are late at least, as measured; what is later is not merged by the plan's
round."""
_CODING = {Automatic.ALWAYS: 0.0, Automatic.BACKGROUND: 30.0, Automatic.UNDER_WAY: 500.0}
"""Points x rounds that a codec costs, by when `auto` may choose it: `int8` none that was measured; `ternary` 0.3 in 38
rounds and 0.4 in 76; `topk` 2 to 5 in 125."""


def noise_samples(profiles: Iterable[TaskProfile]) -> float | None:
    """Return the gradient noise scale of a task: the median over the regions that measured it; None: none has."""
    found = [scale for profile in profiles if (scale := profile.noise_samples)]
    return float(np.median(found)) if found else None


def samples_factor(step_samples: Floats, least_samples: float, noise: float) -> Floats:
    """Return the samples that a global batch needs for the same progress, as a multiple of those of the smallest."""
    return (1 + step_samples / noise) / (1 + least_samples / noise)


def batch_points(factor: Floats, least_samples: float, samples: float) -> Floats:
    """Return the points that larger global batches cost a job of so many samples, by their `samples_factor`.

    With the noise scale of the prior that is `FEWER_STEPS` x (1 / steps - 1 / steps of the smallest batch).
    """
    return FEWER_STEPS * (factor - 1) * (PRIOR_NOISE_SAMPLES + least_samples) / samples


def step_samples_of(points: float, least_samples: float, noise: float, samples: float) -> float:
    """Return the global batch that costs a job of so many samples so many `batch_points`."""
    factor = 1 + points * samples / (FEWER_STEPS * (PRIOR_NOISE_SAMPLES + least_samples))
    return noise * (factor * (1 + least_samples / noise) - 1)


def coding_points(codec: str) -> float:
    """Return the points x rounds that a codec costs."""
    found = codec_named(codec)
    return _CODING.get(found.automatic, 0.0) if found.lossy else 0.0


def exchange_points(rounds: Floats, coding: Floats, late: Floats | float) -> Floats:
    """Return the points that exchange in so many rounds costs.

    Args:
        coding: `coding_points` of the codec.
        late: age of an update where it is merged, in rounds; 0: nothing is late.
    """
    costs = DRIFT + coding
    if isinstance(late, np.ndarray):
        costs = costs + LATE * np.where(late > 0.0, np.clip(late, _LEAST_LATE, _MOST_LATE), 0.0)
    return np.asarray(costs / rounds)
