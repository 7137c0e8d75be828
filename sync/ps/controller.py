"""Applies the WAN controller: passes it the measurements of each round, and keeps the codec and the interval that it
chooses."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from sync.codec import Automatic, codecs
from sync.policy import LONGEST_ROUNDS
from sync.wan import Bounds, ExchangeSettings, LinkSample, Observation, initial, observe

__all__ = ["Controller"]

_MAX_INTERVAL_FACTOR = 16
"""Longest interval, as a multiple of the planned one."""
_KEPT_DECISIONS = 20
"""Latest decisions that are kept to be reported."""


class Controller:
    """The WAN controller of one region, and its latest decisions."""

    def __init__(self, exchange: ExchangeSettings, codec: str, interval_steps: int, steps: int) -> None:
        longest = max(interval_steps, min(_MAX_INTERVAL_FACTOR * interval_steps, steps // LONGEST_ROUNDS))
        known = codecs(Automatic.UNDER_WAY)
        # The plan's codec is the one that its objective is best with: more bytes than planned are never sent.
        choices = known[known.index(codec) :] if exchange.choose_codec and codec in known else (codec,)
        self._bounds = Bounds(interval_steps, longest if exchange.choose_interval else interval_steps, choices)
        self._state = initial(self._bounds, codec)
        self.active = bool(exchange.background) and bool(exchange.choose_codec or exchange.choose_interval)
        self.decisions: deque[str] = deque(maxlen=_KEPT_DECISIONS)

    @property
    def codec(self) -> str:
        """Name of the codec to use now."""
        return self._state.setting.codec

    @property
    def interval_steps(self) -> int:
        """Steps between two exchanges."""
        return self._state.setting.interval_steps

    def round_over(
        self, sequence: int, step_seconds: float, model_bytes: int, links: Mapping[str, LinkSample], coding: float
    ) -> None:
        """Pass the measurements of a round to the controller.

        ``coding`` is the rate, in float32 bytes per second, at which the last update was encoded; 0: not known.
        """
        if not self.active or not links or step_seconds <= 0:
            return
        speeds = {self.codec: coding} if coding else {}
        observation = Observation(step_seconds, model_bytes, links, speeds)
        self._state, change = observe(self._state, observation)
        if change:
            self.decisions.append(f"round {sequence}: {change}")
