"""The controller behind `auto`: it chooses how often a region sends, and with which codec.

It keeps communication short enough to be hidden behind computation, with the least loss: it takes the least lossy codec
that fits at the configured interval, and a longer interval only if the smallest codec does not fit either. Related:
Gaia's adaptive threshold (NSDI 2017), StellaTrain's adaptation to bandwidth (SIGCOMM 2024).

It has no side effects: `observe` takes a state and the measurements of a round, and returns the next state and what
changes and why, in words for users.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sync.codec import codec_named, codecs
from sync.policy import HIDDEN_FRACTION, HIDING_MARGIN, MAX_CODEC_RATIO

__all__ = [
    "Bounds",
    "ControllerState",
    "LinkSample",
    "Observation",
    "Setting",
    "initial",
    "observe",
]

LINE_OVERHEAD_FACTOR = 1.05
"""Bytes on the line per byte of an update: headers of TLS, TCP and IP."""
HOLD_ROUNDS = 3
"""Rounds for which a condition must hold before it causes a change."""
PAUSE_ROUNDS = 5
"""Fewest rounds between two changes."""
CAUTION_FACTOR = 4
"""`ControllerState.relax_rounds` is multiplied by this after a change that was made too early."""
CALM_FACTOR = 8
"""`ControllerState.relax_rounds` is halved after this many times ``relax_rounds`` rounds without a change."""
MAX_RELAX_ROUNDS = 96
"""Upper bound of `ControllerState.relax_rounds`."""
TOO_EARLY_ROUNDS = 100
"""A change to a less lossy setting was made too early if it has to be undone within so many rounds."""
MIN_MBPS = 1e-3
"""Goodput that is assumed of a link that carries nothing."""
UNKNOWN_MBPS = 100.0
"""Goodput that is assumed before the first measurement."""


@dataclass(frozen=True)
class Bounds:
    """What the controller may choose. A setting that the job file fixes has a single value here, and never changes."""

    interval_steps: int
    """The configured or planned interval, which is also the shortest."""
    longest_steps: int
    """The longest interval; equal to ``interval_steps`` if it is fixed."""
    codecs: tuple[str, ...] = field(default_factory=codecs)
    """Codecs, the least lossy first; a single one if it is fixed."""

    def __post_init__(self) -> None:
        every = codecs()
        # With secure aggregation there is a single one.
        every += tuple(codec_named(name).masked for name in every) if len(self.codecs) == 1 else ()
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


@dataclass(frozen=True)
class Observation:
    """Measurements of one round of a region."""

    step_seconds: float
    """Time of one local step, within which an exchange is hidden: computing, merging among the workers, and waiting for
    slower regions."""
    model_bytes: int
    """Size of the model in float32."""
    links: Mapping[str, LinkSample]
    """The links that this region's update is sent over, by name; without any there is nothing to decide."""
    codec_bytes_per_second: Mapping[str, float] = field(default_factory=dict)
    """Measured throughput in float32 bytes, by codec."""


@dataclass(frozen=True)
class Setting:
    """The settings of a region from the next round on."""

    interval_steps: int
    codec: str


_Rung = tuple[int, int]
"""Interval in steps, and index of the codec: settings, ordered by how early they are chosen when links get slower."""


@dataclass(frozen=True)
class ControllerState:
    """The controller's state for one region."""

    bounds: Bounds
    rung: _Rung
    links: Mapping[str, float]
    """The last measured goodput of each link in Mbit/s."""
    changed_ago: int = PAUSE_ROUNDS
    """Rounds since the last change of codec or interval."""
    needed: tuple[_Rung, ...] = ()
    """Cheapest sufficient setting of each of the last consecutive rounds in which the current one was not enough."""
    spare_rounds: int = 0
    """Consecutive rounds for which a less lossy setting or a shorter interval would have been enough."""
    spare_needs: _Rung = (0, 0)
    """Setting that would have been enough for all ``spare_rounds``."""
    relax_rounds: int = HOLD_ROUNDS
    """``spare_rounds`` needed before ``spare_needs`` is chosen; grows after a choice that was too early."""
    relaxed_ago: int = TOO_EARLY_ROUNDS
    """Rounds since a less lossy setting or a shorter interval was last chosen."""
    calm_rounds: int = 0
    """Rounds since the last change, or since ``relax_rounds`` was last shortened."""
    limit_reported: bool = False
    """Whether it has been reported that no setting is enough."""

    @property
    def setting(self) -> Setting:
        """The current settings."""
        interval, codec = self.rung
        return Setting(interval, self.bounds.codecs[codec])


def initial(bounds: Bounds, codec: str | None = None) -> ControllerState:
    """Return the state before the first round. ``codec`` is the codec to begin with; None: the least lossy one."""
    return ControllerState(bounds, (bounds.interval_steps, bounds.codecs.index(codec) if codec else 0), {})


def observe(state: ControllerState, seen: Observation) -> tuple[ControllerState, str]:
    """Process the measurements of one round; return the next state, and what changes and why ("": nothing).

    At most one of codec and interval changes, and not within `PAUSE_ROUNDS` after the last change. If no change can
    help, this is reported once.
    """
    state = replace(state, links={name: _goodput(state, name, link) for name, link in seen.links.items()})
    if not state.links or seen.step_seconds <= 0:
        return state, ""
    load = _Load(state, seen)
    state = replace(state, changed_ago=state.changed_ago + 1, relaxed_ago=state.relaxed_ago + 1)
    state = _with_needs(state, load)
    if state.changed_ago < PAUSE_ROUNDS:
        return state, ""
    return _tightened(state, load) or _relaxed(state, load) or (state, "")


def _goodput(state: ControllerState, name: str, link: LinkSample) -> float:
    if link.goodput_mbps is not None:
        return max(link.goodput_mbps, MIN_MBPS)
    return state.links.get(name, UNKNOWN_MBPS)


class _Load:
    """The communication time of a round, with every setting."""

    def __init__(self, state: ControllerState, seen: Observation) -> None:
        self.bounds = state.bounds
        self._seen = seen
        self._rates = {name: mbps * 1e6 / 8 for name, mbps in state.links.items()}
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
        return (line_bytes + link.backlog_bytes) / self._rates[name] + link.rtt_ms / 1e3

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


def _with_needs(state: ControllerState, load: _Load) -> ControllerState:
    """Count the rounds for which the setting was not enough, or more than enough."""
    fraction = load.fraction(state.rung)
    over = fraction > HIDDEN_FRACTION
    target = min(HIDDEN_FRACTION, HIDING_MARGIN * fraction)
    needed = (*state.needed, load.needed(target))[-HOLD_ROUNDS:] if over else ()
    enough = load.needed(HIDDEN_FRACTION * HIDING_MARGIN)
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


def _tightened(state: ControllerState, load: _Load) -> tuple[ControllerState, str] | None:
    if len(state.needed) < HOLD_ROUNDS:
        return None
    # The median: a single bad round among three does not decide.
    rung = sorted(state.needed)[HOLD_ROUNDS // 2]
    if rung <= state.rung or load.fraction(rung) > HIDING_MARGIN * load.fraction(state.rung):
        if state.limit_reported:
            return None
        text = f"{_named(state.rung, load)} is the most that may be chosen, but takes {load.words(state.rung)}"
        return replace(state, limit_reported=True), text
    too_early = state.relaxed_ago <= TOO_EARLY_ROUNDS
    relax_rounds = min(CAUTION_FACTOR * state.relax_rounds, MAX_RELAX_ROUNDS) if too_early else state.relax_rounds
    text = f"{_named(rung, load)}: {_named(state.rung, load)} takes {load.words(state.rung)}"
    return replace(_changed(state, rung), relax_rounds=relax_rounds), text


def _relaxed(state: ControllerState, load: _Load) -> tuple[ControllerState, str] | None:
    if state.spare_rounds < state.relax_rounds:
        return None
    rung = state.spare_needs
    if rung >= state.rung:
        return None
    text = f"{_named(rung, load)}: it fits now, taking {load.words(rung)}"
    return replace(_changed(state, rung), relaxed_ago=0), text


def _changed(state: ControllerState, rung: _Rung) -> ControllerState:
    return replace(state, rung=rung, changed_ago=0, calm_rounds=0, needed=(), spare_rounds=0, limit_reported=False)


def _named(rung: _Rung, load: _Load) -> str:
    return f"{load.bounds.codecs[rung[1]]} every {rung[0]} steps"
