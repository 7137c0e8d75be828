"""The controller of background exchange keeps to what the plan predicts."""

from __future__ import annotations

from sync.ps.controller import Controller
from sync.wan import ExchangeSettings, LinkSample


def test_room_on_the_links_brings_back_no_codec_less_lossy_than_planned() -> None:
    settings = ExchangeSettings(background=1.0, choose_codec=1.0)
    controller = Controller(settings, "ternary", 20, 10_000)
    for sequence in range(200):
        controller.round_over(sequence, 1.0, 4_000_000, {"b": LinkSample(10_000.0, 1.0)}, 0.0)
    assert controller.codec == "ternary"
    for sequence in range(200, 260):
        controller.round_over(sequence, 0.01, 400_000_000, {"b": LinkSample(10.0, 1.0)}, 0.0)
    assert controller.codec == "topk", "a link that is too slow still means fewer bits"
