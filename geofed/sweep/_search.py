"""Which values a sweep's trials have. Pure: a search proposes, and learns what came of it."""

from __future__ import annotations

import itertools
import json
import math
import random
from typing import TYPE_CHECKING, Any, Protocol

from geofed.sweep._file import ParameterRange, SweepFile
from geofed_pb.errors import GeofedError, install_hint

if TYPE_CHECKING:
    import optuna

Values = dict[str, Any]
"""Values of a trial by the keys of the job file."""


class Search(Protocol):
    """Proposes the values of trials 1, 2, …; those of an earlier run are recalled before the first is proposed."""

    trials: int
    """How many there are."""

    def propose(self, trial: int) -> Values:
        """Return the values of a trial."""
        ...

    def stored(self, trial: int) -> str:
        """Return the text by which a later run recalls the values of a proposed trial; empty: it needs none."""
        ...

    def recall(self, trial: int, stored: str) -> Values:
        """Return the values of a trial of an earlier run; none if the text does not tell them."""
        ...

    def learn(self, trial: int, outcome: float | None) -> None:
        """Take in what a trial gave; None: nothing, as of one that failed."""
        ...


def search_of(file: SweepFile, maximise: bool) -> Search:
    """Return the search of a sweep file. Raises ``GeofedError("USAGE")`` if Optuna is missing."""
    if file.search == "grid":
        return Grid(file)
    return Random(file) if file.search == "random" else Optuna(file, maximise)


class Grid:
    """Every combination; the last parameter varies fastest."""

    def __init__(self, file: SweepFile) -> None:
        lists = [values for values in file.parameters.values() if isinstance(values, list)]
        self._combinations = [
            dict(zip(file.parameters, combination, strict=True)) for combination in itertools.product(*lists)
        ]
        self.trials = len(self._combinations)

    def propose(self, trial: int) -> Values:
        return self._combinations[trial - 1]

    def stored(self, trial: int) -> str:
        return ""

    def recall(self, trial: int, stored: str) -> Values:
        return self.propose(trial)

    def learn(self, trial: int, outcome: float | None) -> None:
        """Nothing is learned."""


class Random:
    """Independent draws, which depend on nothing but the seed, the trial's number and the parameter."""

    def __init__(self, file: SweepFile) -> None:
        self._file, self.trials = file, file.trials or 0

    def propose(self, trial: int) -> Values:
        return {
            key: _drawn(values, random.Random(f"{self._file.seed}/{trial}/{key}"))
            for key, values in self._file.parameters.items()
        }

    def stored(self, trial: int) -> str:
        return ""

    def recall(self, trial: int, stored: str) -> Values:
        return self.propose(trial)

    def learn(self, trial: int, outcome: float | None) -> None:
        """Nothing is learned."""


def _drawn(values: list[Any] | ParameterRange, source: random.Random) -> Any:
    if isinstance(values, list):
        return source.choice(values)
    if values.integer and values.scale == "linear":
        return source.randint(int(values.min), int(values.max))
    if values.scale == "linear":
        return source.uniform(values.min, values.max)
    # Whole numbers are rounded, so the ends get half a step more: each number has the part of its own neighbourhood.
    beyond = 0.5 if values.integer else 0.0
    low, high = math.log(values.min - beyond), math.log(values.max + beyond)
    drawn = math.exp(source.uniform(low, high))
    drawn = min(max(drawn, values.min), values.max)
    return round(drawn) if values.integer else drawn


class Optuna:
    """Optuna's tree-structured Parzen estimator (Bergstra et al. 2011). Trials that run meanwhile count as bad ones
    (``constant_liar``), so that parallel ones differ."""

    def __init__(self, file: SweepFile, maximise: bool) -> None:
        try:
            import optuna
        except ModuleNotFoundError:
            hint = f"{install_hint('optuna')}; or use `search: random`"
            raise GeofedError("USAGE", "`search: optuna` needs Optuna, which is not installed", hint=hint) from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._file, self._parameters, self.trials = file, file.parameters, file.trials or 0
        self._distributions = {key: _distribution(values) for key, values in file.parameters.items()}
        self._study = optuna.create_study(direction="maximize" if maximise else "minimize")
        self._asked: dict[int, optuna.trial.Trial] = {}

    def propose(self, trial: int) -> Values:
        from optuna.samplers import TPESampler

        # A seed for each trial: with one for all, a sweep that continues would draw its first values once more.
        seed = random.Random(f"{self._file.seed}/{trial}").getrandbits(32)
        self._study.sampler = TPESampler(seed=seed, constant_liar=True)
        self._asked[trial] = asked = self._study.ask(self._distributions)
        return {
            key: values[asked.params[key]] if isinstance(values, list) else asked.params[key]
            for key, values in self._parameters.items()
        }

    def stored(self, trial: int) -> str:
        return json.dumps([self._asked[trial].params[key] for key in self._parameters])

    def recall(self, trial: int, stored: str) -> Values:
        try:
            given = json.loads(stored)
        except (ValueError, RecursionError):
            return {}
        if not isinstance(given, list) or len(given) != len(self._parameters):
            return {}
        if not all(map(_may_be, self._parameters.values(), given)):
            return {}
        self._study.enqueue_trial(dict(zip(self._parameters, given, strict=True)))
        return self.propose(trial)

    def learn(self, trial: int, outcome: float | None) -> None:
        from optuna.trial import TrialState

        if (asked := self._asked.pop(trial, None)) is not None:
            self._study.tell(asked, outcome, state=TrialState.FAIL if outcome is None else TrialState.COMPLETE)


def _distribution(values: list[Any] | ParameterRange) -> optuna.distributions.BaseDistribution:
    from optuna import distributions

    if isinstance(values, list):
        # By their places: Optuna's own categories may be numbers and text only.
        return distributions.CategoricalDistribution(range(len(values)))
    log = values.scale == "log"
    if values.integer:
        return distributions.IntDistribution(int(values.min), int(values.max), log=log)
    return distributions.FloatDistribution(values.min, values.max, log=log)


def _may_be(values: list[Any] | ParameterRange, given: object) -> bool:
    """Whether a number is one that Optuna draws: a place in a list, or a value of a range."""
    if type(given) is not int and (type(given) is not float or isinstance(values, list) or values.integer):
        return False
    return 0 <= given < len(values) if isinstance(values, list) else values.min <= given <= values.max
