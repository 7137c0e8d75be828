"""A job whose model is compiled, in the sandboxed processes of a region's functions."""

from __future__ import annotations

import pytest
from support.compiler import NEEDS_COMPILER
from support.running import Running, check_succeeded, named

pytestmark = [
    NEEDS_COMPILER,
    pytest.mark.e2e,
    pytest.mark.timeout(600),
]

TELLS = """
_loss = loss


def model(config):
    # Each kernel of a convolution takes the compiler seconds.
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def loss(model, batch):
    from torch._dynamo.utils import counters
    value = _loss(model, batch)
    assert counters["stats"]["unique_graphs"] > 1, "one is the check's own"
    return value
"""


def test_a_compiled_job_trains(running: Running) -> None:
    task = named("compiles its model") + TELLS
    settings = ("regions.use=[frankfurt]", "train.workers=1", "train.compile=true", "train.end={steps: 6}")
    # On a machine that others use, too, the compiler takes minutes.
    settings += ("function.slice=5m",)
    ended = running.wait_end(running.submit(*settings, task=task), seconds=500)
    check_succeeded(ended, accuracy=0.0)
