"""The controller behind `auto`: how often a region sends, in which codec, over how many streams.

It keeps communication under the compute that hides it, at the least loss: of the codecs the least lossy one that fits
at the configured interval; a longer interval only where the smallest does not fit either. Related: Gaia's adaptive
threshold (NSDI 2017), StellaTrain's adaptation to bandwidth (SIGCOMM 2024), WANify's streams (arXiv 2508.12961).

Pure: `observe` takes a state and what a round measured, and gives the next state and what changed, in words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from sync.codec import codec_named, codecs
from sync.wan._streams import StreamState, first_streams, next_streams

__all__ = [
    "Bounds",
    "ControllerState",
    "Decision",
    "LinkSample",
    "Observation",
    "Setting",
    "agreed_interval",
    "initial",
    "observe",
]

LINE_OVERHEAD_FACTOR = 1.05
MAX_FRACTION, MARGIN = 0.8, 0.85
"""Communication over compute that still stays hidden, and what a change must leave of it: a gain of 15 %."""
MAX_CODEC_RATIO = 0.9
"""A codec is taken only where it leaves so much of what a less lossy one takes, or less."""
HOLD_ROUNDS, PAUSE_ROUNDS = 3, 5
"""Rounds for which a condition must hold, and rounds between two changes."""
CAUTION_FACTOR, CALM_FACTOR, MAX_RELAX_ROUNDS, TOO_EARLY_ROUNDS = 4, 8, 96, 100
"""Patience: what it is multiplied by where room was taken too early, how many times itself without a change halve it,
the most that it becomes, and for how many rounds room must last not to have been taken too early."""
MIN_NORMS = 5
"""Before that many there is no telling what is normal."""
NORM_GROWTH, MIN_COSINE, NORM_WINDOW, GUARD_ROUNDS = 4.0, -0.2, 32, 50
"""The quality guard: growth over the median, cosine, norms remembered, rounds for which a step back is kept."""


@dataclass(frozen=True)
class Bounds:
    """What the job file leaves to the controller; what it fixes has one value here, and is never changed."""

    interval_steps: int
    """As configured or planned; never shorter."""
    longest_steps: int
    """Equal to `interval_steps`: the interval is fixed."""
    codecs: tuple[str, ...] = field(default_factory=codecs)
    """The least lossy first; one: it is fixed."""
    streams: int | None = None
    """None: chosen for each link."""

    def __post_init__(self) -> None:
        every = codecs()
        known = [every.index(codec) for codec in self.codecs if codec in every]
        if not known or len(known) != len(self.codecs) or known != sorted(set(known)):
            raise ValueError(f"codecs must be some of {', '.join(every)}, in this order, not {self.codecs}")
        if not 1 <= self.interval_steps <= self.longest_steps:
            raise ValueError(f"an interval of {self.interval_steps} to {self.longest_steps} steps cannot be")


@dataclass(frozen=True)
class LinkSample:
    """One link in one round."""

    goodput_mbps: float | None
    """While it was busy, without the round trips of offers and the opening of the window. None: too little was sent to
    tell; what was known before stays."""
    rtt_ms: float
    backlog_bytes: int = 0
    """Of earlier rounds, not acknowledged yet."""
    updates: int = 1
    """That it carries in a round: its own, and those it passes on."""


@dataclass(frozen=True)
class Observation:
    """What one round of a region measured."""

    step_seconds: float
    """Compute of one local step."""
    model_bytes: int
    """In float32."""
    links: Mapping[str, LinkSample]
    """Those that this region's update crosses, by name; without any there is nothing to decide."""
    codec_bytes_per_second: Mapping[str, float] = field(default_factory=dict)
    """Measured throughput in float32 bytes, by codec."""
    update_norm: float | None = None
    """Of the region's own change of the round, before coding."""
    cosine: float | None = None
    """Between the own and the merged change."""


@dataclass(frozen=True)
class Setting:
    """What a region is to do from the next round on."""

    interval_steps: int
    codec: str
    streams: Mapping[str, int]
    """By link."""


@dataclass(frozen=True)
class Decision:
    """A change, or that no change can help."""

    what: str
    """"codec", "interval", "streams", "quality" or "limit"."""
    text: str
    """What changes and why, for people."""


_Rung = tuple[int, int]
"""Interval in steps and index of the codec: settings in the order in which they are taken when links get slower."""


@dataclass(frozen=True)
class ControllerState:
    """All that the controller remembers of one region."""

    bounds: Bounds
    rung: _Rung
    links: Mapping[str, StreamState]
    changed_ago: int = PAUSE_ROUNDS
    """Rounds since the last change of codec or interval."""
    needed: tuple[_Rung, ...] = ()
    """What the last rounds in a row needed that the setting did not fit."""
    spare_rounds: int = 0
    """Rounds in a row that left room for less loss or a shorter interval."""
    spare_needs: _Rung = (0, 0)
    """The most that any of these needed."""
    relax_rounds: int = HOLD_ROUNDS
    """Rounds that must leave room in a row; grows when it was taken too early."""
    relaxed_ago: int = TOO_EARLY_ROUNDS
    """Rounds since room was last taken."""
    calm_rounds: int = 0
    """Rounds without a change, since the last one or since the relax_rounds was last shortened."""
    norms: tuple[float, ...] = ()
    """Of the last updates, for each step."""
    suspect_rounds: int = 0
    """Rounds in a row whose updates look bad."""
    ceiling: _Rung | None = None
    """The guard lets nothing beyond it, while it holds."""
    ceiling_rounds: int = 0
    """For how many more rounds."""
    limit_reported: bool = False
    """That no setting fits was said."""

    @property
    def setting(self) -> Setting:
        """What is to be done now."""
        interval, codec = self.rung
        return Setting(interval, self.bounds.codecs[codec], {name: link.streams for name, link in self.links.items()})


def initial(bounds: Bounds, codec: str | None = None) -> ControllerState:
    """The state before the first round; ``codec`` is the one to begin with, None: the least lossy."""
    return ControllerState(bounds, (bounds.interval_steps, bounds.codecs.index(codec) if codec else 0), {})


def agreed_interval(settings: Mapping[str, Setting]) -> int:
    """Where all regions must make their rounds together, the longest interval that any of them needs."""
    return max(setting.interval_steps for setting in settings.values())


def observe(state: ControllerState, seen: Observation) -> tuple[ControllerState, tuple[Decision, ...]]:
    """Take in one round. At most one of codec and interval changes, and not within five rounds of the last change."""
    state, decisions = _with_streams(state, seen)
    state = _with_quality(state, seen)
    if not state.links or seen.step_seconds <= 0:
        return state, decisions
    load = _Load(state, seen)
    state = replace(state, changed_ago=state.changed_ago + 1, relaxed_ago=state.relaxed_ago + 1)
    state = _with_needs(state, load)
    for rule in (_guarded, _tightened, _relaxed):
        if state.changed_ago < PAUSE_ROUNDS:
            break
        changed = rule(state, load)
        if changed is not None:
            return changed[0], (*decisions, changed[1])
    return state, decisions


class _Load:
    """A round's communication, for every setting."""

    def __init__(self, state: ControllerState, seen: Observation) -> None:
        self.bounds = state.bounds
        self._seen = seen
        self._rates = {name: link.goodput_mbps * 1e6 / 8 for name, link in state.links.items()}
        self._seconds = [self._communication(codec) for codec in state.bounds.codecs]
        # A codec pays where it is notably faster than all that lose less: of a small update the round trip is most, and
        # saved bytes over the rate must exceed the codec's own time.
        self._pays = [True]
        for codec, seconds in enumerate(self._seconds[1:], start=1):
            self._pays.append(seconds < MAX_CODEC_RATIO * min(self._seconds[:codec]))

    def _communication(self, codec: str) -> float:
        """Coding and the transfer over the slowest link."""
        seen = self._seen
        speed = seen.codec_bytes_per_second.get(codec) or codec_named(codec).bytes_per_second
        line = seen.model_bytes * codec_named(codec).size_factor * LINE_OVERHEAD_FACTOR
        return seen.model_bytes / speed + max(self._transfer(name, line) for name in seen.links)

    def _transfer(self, name: str, line_bytes: float) -> float:
        link = self._seen.links[name]
        return (link.updates * line_bytes + link.backlog_bytes) / self._rates[name] + link.rtt_ms / 1e3

    def fraction(self, rung: _Rung) -> float:
        """Communication over compute."""
        return self._seconds[rung[1]] / (rung[0] * self._seen.step_seconds)

    def needed(self, fraction: float) -> _Rung:
        """The first setting within a fraction of the compute; where there is none, the longest interval."""
        for codec, pays in enumerate(self._pays):
            rung = self.bounds.interval_steps, codec
            if pays and self.fraction(rung) <= fraction:
                return rung
        fastest = max(codec for codec, pays in enumerate(self._pays) if pays)
        interval = self.bounds.interval_steps
        while self.fraction((interval, fastest)) > fraction and interval < self.bounds.longest_steps:
            interval = min(2 * interval, self.bounds.longest_steps)
        return interval, fastest

    def words(self, rung: _Rung) -> str:
        """How a setting fares, and on which link."""
        line = self._seen.model_bytes * codec_named(self.bounds.codecs[rung[1]]).size_factor * LINE_OVERHEAD_FACTOR
        slowest = max(self._seen.links, key=lambda name: self._transfer(name, line))
        compute = rung[0] * self._seen.step_seconds
        mbps = self._rates[slowest] * 8 / 1e6
        return f"{self._seconds[rung[1]]:.2f} s for {compute:.2f} s of compute, {mbps:.3g} Mbit/s to {slowest}"


def _with_streams(state: ControllerState, seen: Observation) -> tuple[ControllerState, tuple[Decision, ...]]:
    links, decisions = {}, []
    for name, sample in seen.links.items():
        before = state.links.get(name)
        after, why = (
            next_streams(before, sample.goodput_mbps, sample.rtt_ms, fixed=state.bounds.streams)
            if before is not None
            else (first_streams(sample.goodput_mbps, sample.rtt_ms, state.bounds.streams), "")
        )
        if why:
            decisions.append(Decision("streams", f"{after.streams} streams to {name}: {why}"))
        links[name] = after
    return replace(state, links=links), tuple(decisions)


def _with_quality(state: ControllerState, seen: Observation) -> ControllerState:
    """Norms are compared for each step, since a longer interval makes a larger change."""
    bad = seen.cosine is not None and seen.cosine < MIN_COSINE
    norms = state.norms
    if seen.update_norm is not None:
        norm = seen.update_norm / state.rung[0]
        finite = math.isfinite(norm)
        grown = not finite or (len(norms) >= MIN_NORMS and norm > NORM_GROWTH * median(norms))
        bad = bad or grown
        # What is out of line must not move the line, unless it lasts: then it is the new one.
        if finite and (not grown or state.suspect_rounds >= HOLD_ROUNDS):
            norms = (*norms, norm)[-NORM_WINDOW:]
    suspect = state.suspect_rounds + 1 if bad else 0
    left = state.ceiling_rounds if bad else max(0, state.ceiling_rounds - 1)
    ceiling = state.ceiling if left else None
    return replace(state, norms=norms, suspect_rounds=suspect, ceiling=ceiling, ceiling_rounds=left)


def _with_needs(state: ControllerState, load: _Load) -> ControllerState:
    """Count how long the setting has been too much, or more than is needed."""
    probing = any(link.before_mbps is not None for link in state.links.values())
    fraction = load.fraction(state.rung)
    over = fraction > MAX_FRACTION
    # While streams are being tried out, a low goodput says little.
    target = min(MAX_FRACTION, MARGIN * fraction)
    needed = (*state.needed, load.needed(target))[-HOLD_ROUNDS:] if over and not probing else ()
    enough = load.needed(MAX_FRACTION * MARGIN)
    if enough < state.rung:
        spare_needs = max(enough, state.spare_needs) if state.spare_rounds else enough
        state = replace(state, spare_rounds=state.spare_rounds + 1, spare_needs=spare_needs)
    else:
        state = replace(state, spare_rounds=0)
    # Once taken too early makes cautious, but not for ever.
    calm = state.calm_rounds + 1
    relax_rounds = (
        max(HOLD_ROUNDS, state.relax_rounds // 2) if calm > CALM_FACTOR * state.relax_rounds else state.relax_rounds
    )
    return replace(
        state,
        needed=needed,
        relax_rounds=relax_rounds,
        calm_rounds=calm if relax_rounds == state.relax_rounds else 0,
        limit_reported=state.limit_reported and over,
    )


def _guarded(state: ControllerState, load: _Load) -> tuple[ControllerState, Decision] | None:
    """Back to a shorter interval, else a less lossy codec, even where that is slower."""
    interval, codec = state.rung
    if state.suspect_rounds < HOLD_ROUNDS:
        return None
    if interval > load.bounds.interval_steps:
        rung = max(interval // 2, load.bounds.interval_steps), codec
    elif codec > 0:
        rung = interval, codec - 1
    else:
        return None
    state = replace(state, ceiling=rung, ceiling_rounds=GUARD_ROUNDS)
    why = f"for {HOLD_ROUNDS} rounds updates grew or went against the merged ones; kept for {GUARD_ROUNDS} good rounds"
    return _changed(state, rung), Decision("quality", f"{_named(rung, load)} even if slower: {why}")


def _tightened(state: ControllerState, load: _Load) -> tuple[ControllerState, Decision] | None:
    if len(state.needed) < HOLD_ROUNDS:
        return None
    # The middle one: a single bad round among three does not decide.
    rung = sorted(state.needed)[HOLD_ROUNDS // 2]
    if state.ceiling is not None:
        rung = min(rung, state.ceiling)
    if rung <= state.rung or load.fraction(rung) > MARGIN * load.fraction(state.rung):
        if state.limit_reported:
            return None
        held = " as long as the quality guard holds" if state.ceiling is not None else ""
        text = f"{_named(state.rung, load)} is all that may be chosen{held}, but takes {load.words(state.rung)}"
        return replace(state, limit_reported=True), Decision("limit", text)
    too_early = state.relaxed_ago <= TOO_EARLY_ROUNDS
    relax_rounds = min(CAUTION_FACTOR * state.relax_rounds, MAX_RELAX_ROUNDS) if too_early else state.relax_rounds
    what = "codec" if rung[0] == state.rung[0] else "interval"
    text = f"{_named(rung, load)}: {_named(state.rung, load)} takes {load.words(state.rung)}"
    return replace(_changed(state, rung), relax_rounds=relax_rounds), Decision(what, text)


def _relaxed(state: ControllerState, load: _Load) -> tuple[ControllerState, Decision] | None:
    if state.spare_rounds < state.relax_rounds:
        return None
    rung = state.spare_needs
    if state.ceiling is not None:
        rung = min(rung, state.ceiling)
    if rung >= state.rung:
        return None
    what = "codec" if rung[0] == state.rung[0] else "interval"
    text = f"{_named(rung, load)}: there is room, it takes {load.words(rung)}"
    return replace(_changed(state, rung), relaxed_ago=0), Decision(what, text)


def _changed(state: ControllerState, rung: _Rung) -> ControllerState:
    return replace(state, rung=rung, changed_ago=0, calm_rounds=0, needed=(), spare_rounds=0, limit_reported=False)


def _named(rung: _Rung, load: _Load) -> str:
    return f"{load.bounds.codecs[rung[1]]} every {rung[0]} steps"
