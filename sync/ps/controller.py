"""The controller at work: what a round measured goes in, codec and interval of the next rounds come out."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from sync.codec import Automatic, codecs
from sync.wan import Bounds, ExchangeSettings, LinkSample, Observation, initial, observe

__all__ = ["Controller"]

_LONGEST = 16
"""Times the planned interval."""
_LEAST_ROUNDS = 16
"""That a lengthened interval must leave of the job."""
_TOLD = 20
"""Decisions that are kept for those who ask."""


class Controller:
    """One region's controller, and what it has decided."""

    def __init__(self, exchange: ExchangeSettings, codec: str, interval_steps: int, steps: int) -> None:
        longest = max(interval_steps, min(_LONGEST * interval_steps, steps // _LEAST_ROUNDS))
        known = codecs(Automatic.UNDER_WAY)
        choices = known if exchange.choose_codec and codec in known else (codec,)
        self._bounds = Bounds(interval_steps, longest if exchange.choose_interval else interval_steps, choices, 1)
        self._state = initial(self._bounds, codec)
        self.active = bool(exchange.background) and bool(exchange.choose_codec or exchange.choose_interval)
        self.decisions: deque[str] = deque(maxlen=_TOLD)

    @property
    def codec(self) -> str:
        return self._state.setting.codec

    @property
    def interval_steps(self) -> int:
        return self._state.setting.interval_steps

    def round_over(
        self, sequence: int, step_seconds: float, model_bytes: int, links: Mapping[str, LinkSample], coding: float
    ) -> None:
        """Take in a round; ``coding``: float32 bytes that the last update's codec took in a second, 0: not known."""
        if not self.active or not links or step_seconds <= 0:
            return
        speeds = {self.codec: coding} if coding else {}
        observation = Observation(step_seconds, model_bytes, links, speeds)
        self._state, decisions = observe(self._state, observation)
        self.decisions.extend(f"round {sequence}: {decision.text}" for decision in decisions)
