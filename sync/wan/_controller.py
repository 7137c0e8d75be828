"""The controller behind `auto`: it chooses how often a region sends, with which codec, and over how many streams.

It keeps communication short enough to be hidden behind computation, with the least loss: it takes the least lossy codec
that fits at the configured interval, and a longer interval only if the smallest codec does not fit either. Related:
Gaia's adaptive threshold (NSDI 2017), StellaTrain's adaptation to bandwidth (SIGCOMM 2024), WANify's streams (arXiv
2508.12961).

It has no side effects: `observe` takes a state and the measurements of a round, and returns the next state and the
changes, in words.
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
"""Bytes on the line per byte of an update: headers of TLS, TCP and IP."""
MAX_FRACTION = 0.8
"""Communication over computing time up to which communication counts as hidden."""
MARGIN = 0.85
"""A change must reduce the communication at least to this fraction of what it was."""
MAX_CODEC_RATIO = 0.9
"""A codec is chosen only if its communication takes at most this fraction of that of every less lossy codec."""
HOLD_ROUNDS = 3
"""Rounds for which a condition must hold before it causes a change."""
PAUSE_ROUNDS = 5
"""Fewest rounds between two changes."""
CAUTION_FACTOR = 4
"""`ControllerState.relax_rounds` is multiplied by this after a change that was made too early."""
CALM_FACTOR = 8
"""It is halved after this many times its rounds without a change."""
MAX_RELAX_ROUNDS = 96
"""Upper bound of it."""
TOO_EARLY_ROUNDS = 100
"""A change to a less lossy setting was made too early if it has to be undone within so many rounds."""
MIN_NORMS = 5
"""Norms that must be known before a larger one counts as unusual."""
NORM_GROWTH = 4.0
"""Quality guard: an update is bad if its norm exceeds the median by more than this factor ..."""
MIN_COSINE = -0.2
"""... or its cosine with the merged change is below this."""
NORM_WINDOW = 32
"""Norms that the median is taken of."""
GUARD_ROUNDS = 50
"""Good rounds for which the guard's restriction is kept."""


@dataclass(frozen=True)
class Bounds:
    """What the controller may choose. A setting that the job file fixes has a single value here, and never changes."""

    interval_steps: int
    """The configured or planned interval, which is also the shortest."""
    longest_steps: int
    """The longest interval; equal to ``interval_steps`` if it is fixed."""
    codecs: tuple[str, ...] = field(default_factory=codecs)
    """Codecs, the least lossy first; a single one if it is fixed."""
    streams: int | None = None
    """Streams of each link; None: chosen by measurement."""

    def __post_init__(self) -> None:
        every = codecs()
        known = [every.index(codec) for codec in self.codecs if codec in every]
        if not known or len(known) != len(self.codecs) or known != sorted(set(known)):
            raise ValueError(f"codecs must be some of {', '.join(every)}, in this order, not {self.codecs}")
        if not 1 <= self.interval_steps <= self.longest_steps:
            raise ValueError(f"an interval of {self.interval_steps} to {self.longest_steps} steps is invalid")


@dataclass(frozen=True)
class LinkSample:
    """Measurements of one link in one round."""

    goodput_mbps: float | None
    """Goodput while the link was busy, without the round trips of offers and TCP's slow start. None: too little was
    sent to measure it; the last known value stays."""
    rtt_ms: float
    backlog_bytes: int = 0
    """Bytes of earlier rounds that are not acknowledged yet."""
    updates: int = 1
    """Updates that it carries in a round: the region's own, and those that it passes on."""


@dataclass(frozen=True)
class Observation:
    """Measurements of one round of a region."""

    step_seconds: float
    """Computing time of one local step."""
    model_bytes: int
    """Size of the model in float32."""
    links: Mapping[str, LinkSample]
    """The links that this region's update is sent over, by name; without any there is nothing to decide."""
    codec_bytes_per_second: Mapping[str, float] = field(default_factory=dict)
    """Measured throughput in float32 bytes, by codec."""
    update_norm: float | None = None
    """Norm of the region's own change in the round, before encoding."""
    cosine: float | None = None
    """Cosine between the region's own change and the merged one."""


@dataclass(frozen=True)
class Setting:
    """The settings of a region from the next round on."""

    interval_steps: int
    codec: str
    streams: Mapping[str, int]
    """Streams of each link."""


@dataclass(frozen=True)
class Decision:
    """A change, or the statement that no change can help."""

    what: str
    """"codec", "interval", "streams", "quality" or "limit"."""
    text: str
    """What changes and why, for users."""


_Rung = tuple[int, int]
"""Interval in steps, and index of the codec: settings, ordered by how early they are chosen when links get slower."""


@dataclass(frozen=True)
class ControllerState:
    """The controller's state for one region."""

    bounds: Bounds
    rung: _Rung
    links: Mapping[str, StreamState]
    changed_ago: int = PAUSE_ROUNDS
    """Rounds since the last change of codec or interval."""
    needed: tuple[_Rung, ...] = ()
    """Settings that the last consecutive rounds needed, if the current one was not enough."""
    spare_rounds: int = 0
    """Consecutive rounds for which a less lossy setting or a shorter interval would have been enough."""
    spare_needs: _Rung = (0, 0)
    """The setting that would have been enough for all of these."""
    relax_rounds: int = HOLD_ROUNDS
    """Such rounds that are needed before it is chosen; grows when that was too early."""
    relaxed_ago: int = TOO_EARLY_ROUNDS
    """Rounds since a less lossy setting or a shorter interval was last chosen."""
    calm_rounds: int = 0
    """Rounds since the last change, or since ``relax_rounds`` was last shortened."""
    norms: tuple[float, ...] = ()
    """Norms of the last updates, per local step."""
    suspect_rounds: int = 0
    """Consecutive rounds with bad updates."""
    ceiling: _Rung | None = None
    """The most lossy setting that the quality guard allows; None: no restriction."""
    ceiling_rounds: int = 0
    """Good rounds for which this restriction is still kept."""
    limit_reported: bool = False
    """Whether it has been reported that no setting is enough."""

    @property
    def setting(self) -> Setting:
        """The current settings."""
        interval, codec = self.rung
        return Setting(interval, self.bounds.codecs[codec], {name: link.streams for name, link in self.links.items()})


def initial(bounds: Bounds, codec: str | None = None) -> ControllerState:
    """Return the state before the first round. ``codec`` is the codec to begin with; None: the least lossy one."""
    return ControllerState(bounds, (bounds.interval_steps, bounds.codecs.index(codec) if codec else 0), {})


def agreed_interval(settings: Mapping[str, Setting]) -> int:
    """Return the longest interval that any region needs, for exchanges in which all regions have the same rounds."""
    return max(setting.interval_steps for setting in settings.values())


def observe(state: ControllerState, seen: Observation) -> tuple[ControllerState, tuple[Decision, ...]]:
    """Process the measurements of one round; return the next state and the changes.

    At most one of codec and interval changes, and not within five rounds after the last change.
    """
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
    """The communication time of a round, with every setting."""

    def __init__(self, state: ControllerState, seen: Observation) -> None:
        self.bounds = state.bounds
        self._seen = seen
        self._rates = {name: link.goodput_mbps * 1e6 / 8 for name, link in state.links.items()}
        self._seconds = [self._communication(codec) for codec in state.bounds.codecs]
        # A codec pays off if it is notably faster than all less lossy ones: for small updates the round trip dominates,
        # and the time that saved bytes would take must exceed the codec's own time.
        self._pays = [True]
        for codec, seconds in enumerate(self._seconds[1:], start=1):
            self._pays.append(seconds < MAX_CODEC_RATIO * min(self._seconds[:codec]))

    def _communication(self, codec: str) -> float:
        """Return the time to encode an update and to send it over the slowest link."""
        seen = self._seen
        speed = seen.codec_bytes_per_second.get(codec) or codec_named(codec).bytes_per_second
        line = seen.model_bytes * codec_named(codec).size_factor * LINE_OVERHEAD_FACTOR
        return seen.model_bytes / speed + max(self._transfer(name, line) for name in seen.links)

    def _transfer(self, name: str, line_bytes: float) -> float:
        link = self._seen.links[name]
        return (link.updates * line_bytes + link.backlog_bytes) / self._rates[name] + link.rtt_ms / 1e3

    def fraction(self, rung: _Rung) -> float:
        """Return the ratio of communication to computing time."""
        return self._seconds[rung[1]] / (rung[0] * self._seen.step_seconds)

    def needed(self, fraction: float) -> _Rung:
        """Return the first setting whose ratio is at most ``fraction``; if there is none, the one with the longest
        interval."""
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
        """Describe the times of a setting, and the slowest link."""
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
    """Update the quality guard. Norms are compared per step, since a longer interval makes a larger change."""
    bad = seen.cosine is not None and seen.cosine < MIN_COSINE
    norms = state.norms
    if seen.update_norm is not None:
        norm = seen.update_norm / state.rung[0]
        finite = math.isfinite(norm)
        grown = not finite or (len(norms) >= MIN_NORMS and norm > NORM_GROWTH * median(norms))
        bad = bad or grown
        # An unusual norm must not change the median, unless it persists.
        if finite and (not grown or state.suspect_rounds >= HOLD_ROUNDS):
            norms = (*norms, norm)[-NORM_WINDOW:]
    suspect = state.suspect_rounds + 1 if bad else 0
    left = state.ceiling_rounds if bad else max(0, state.ceiling_rounds - 1)
    ceiling = state.ceiling if left else None
    return replace(state, norms=norms, suspect_rounds=suspect, ceiling=ceiling, ceiling_rounds=left)


def _with_needs(state: ControllerState, load: _Load) -> ControllerState:
    """Count the rounds for which the setting was not enough, or more than enough."""
    probing = any(link.before_mbps is not None for link in state.links.values())
    fraction = load.fraction(state.rung)
    over = fraction > MAX_FRACTION
    # While the number of streams is being probed, a low goodput is no reason for a change.
    target = min(MAX_FRACTION, MARGIN * fraction)
    needed = (*state.needed, load.needed(target))[-HOLD_ROUNDS:] if over and not probing else ()
    enough = load.needed(MAX_FRACTION * MARGIN)
    if enough < state.rung:
        spare_needs = max(enough, state.spare_needs) if state.spare_rounds else enough
        state = replace(state, spare_rounds=state.spare_rounds + 1, spare_needs=spare_needs)
    else:
        state = replace(state, spare_rounds=0)
    # Caution after a change that came too early fades in time.
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
    """Go back to a shorter interval, or else a less lossy codec, even if that is slower."""
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
    # The median: a single bad round among three does not decide.
    rung = sorted(state.needed)[HOLD_ROUNDS // 2]
    if state.ceiling is not None:
        rung = min(rung, state.ceiling)
    if rung <= state.rung or load.fraction(rung) > MARGIN * load.fraction(state.rung):
        if state.limit_reported:
            return None
        held = " as long as the quality guard holds" if state.ceiling is not None else ""
        text = f"{_named(state.rung, load)} is the most that may be chosen{held}, but takes {load.words(state.rung)}"
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
    text = f"{_named(rung, load)}: it fits now, taking {load.words(rung)}"
    return replace(_changed(state, rung), relaxed_ago=0), Decision(what, text)


def _changed(state: ControllerState, rung: _Rung) -> ControllerState:
    return replace(state, rung=rung, changed_ago=0, calm_rounds=0, needed=(), spare_rounds=0, limit_reported=False)


def _named(rung: _Rung, load: _Load) -> str:
    return f"{load.bounds.codecs[rung[1]]} every {rung[0]} steps"
