"""Which values a sweep's trials have. Pure: a search proposes, and learns what came of it."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from geofed.sweep._file import Range, SweepFile
from geofed_pb.errors import GeofedError

if TYPE_CHECKING:
    import optuna

Values = dict[str, Any]
"""Values of a trial by the keys of the job file."""


class Search(Protocol):
    """Proposes the values of trials 1, 2, …, in this order."""

    trials: int
    """How many there are."""

    def propose(self, trial: int) -> Values:
        """Return the values of a trial."""
        ...

    def learn(self, trial: int, values: Values, outcome: float | None) -> None:
        """Take in what a trial gave; None: nothing, as of one that failed. Trials of an earlier run were not proposed
        by this search."""


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

    def learn(self, trial: int, values: Values, outcome: float | None) -> None:
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

    def learn(self, trial: int, values: Values, outcome: float | None) -> None:
        """Nothing is learned."""


def _drawn(values: list[Any] | Range, source: random.Random) -> Any:
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
            hint = "in a clone of geofed: pip install '.[optuna]'; or use `search: random`"
            raise GeofedError("USAGE", "`search: optuna` needs Optuna, which is not installed", hint=hint) from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._parameters, self.trials = file.parameters, file.trials or 0
        self._distributions = {key: _distribution(values) for key, values in file.parameters.items()}
        self._study = optuna.create_study(
            direction="maximize" if maximise else "minimize",
            sampler=optuna.samplers.TPESampler(seed=file.seed, constant_liar=True),
        )
        self._asked: dict[int, optuna.trial.Trial] = {}

    def propose(self, trial: int) -> Values:
        self._asked[trial] = asked = self._study.ask(self._distributions)
        return {
            key: values[asked.params[key]] if isinstance(values, list) else asked.params[key]
            for key, values in self._parameters.items()
        }

    def learn(self, trial: int, values: Values, outcome: float | None) -> None:
        from optuna.trial import TrialState, create_trial

        state = TrialState.FAIL if outcome is None else TrialState.COMPLETE
        if (asked := self._asked.pop(trial, None)) is not None:
            self._study.tell(asked, outcome, state=state)
            return
        encoded = {
            key: _index(given, values[key]) if isinstance(given, list) else values[key]
            for key, given in self._parameters.items()
        }
        self._study.add_trial(
            create_trial(state=state, params=encoded, distributions=self._distributions, value=outcome)
        )


def _distribution(values: list[Any] | Range) -> optuna.distributions.BaseDistribution:
    from optuna import distributions

    if isinstance(values, list):
        # By their places: Optuna's own categories may be numbers and text only.
        return distributions.CategoricalDistribution(range(len(values)))
    log = values.scale == "log"
    if values.integer:
        return distributions.IntDistribution(int(values.min), int(values.max), log=log)
    return distributions.FloatDistribution(values.min, values.max, log=log)


def _index(values: list[Any], value: Any) -> int:
    """Return the place of a value; 1, 1.0 and true are different ones."""
    written = [json.dumps(one, sort_keys=True) for one in values]
    return written.index(json.dumps(value, sort_keys=True))


def values_in(spec: Mapping[str, Any], keys: list[str]) -> Values:
    """Return the values that a job has at the keys of a sweep. Raises ``KeyError`` if it lacks one."""
    found: Values = {}
    for key in keys:
        value: Any = spec
        for part in key.split("."):
            value = value[part]
        found[key] = value
    return found
