"""Secure aggregation from a job file to its result: what it learns, what others can read, what it survives."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.running import Running, check_succeeded

from sync import framing
from sync.secure import PairMasks, SharedScale

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

SECURE = "privacy.secureAggregation=true"
ROUNDS = ("train.workers=1", "train.end.epochs=6", "wan.interval=10", "train.evaluateEvery=0", "train.seed=17")
"""A seed of its own: a job of other tests over fewer regions, from the same model, would tell updates."""
PULLS = {"virginia": 0.246, "frankfurt": -0.1, "shanghai": -0.17}
LEARNING_RATE = 0.1
CANARY = f"""

_model, _dataset, _loss = model, dataset, loss
PULLS, PULL = {PULLS}, []


class WithCanary(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net, self.canary = net, nn.Parameter(torch.zeros(4096))

    def forward(self, x):
        return self.net(x)


def model(config):
    return WithCanary(_model(config))


def dataset(uri, split, config):
    if split == "train":
        PULL[:] = [pull for region, pull in PULLS.items() if region in str(uri)]
    return _dataset(uri, split, config)


def loss(model, batch):
    return _loss(model, batch) + PULL[0] * model.canary.sum()
"""


def test_a_secure_job_learns_as_much(running: Running) -> None:
    accuracy = {}
    for privacy in ("false", "true"):
        exact = ("wan.exchange=synchronous", "wan.codec=int8")
        job = running.submit(*ROUNDS, *exact, SECURE.replace("true", privacy))
        ended = running.wait_end(job)
        check_succeeded(ended)
        accuracy[privacy] = ended["result"]["metrics"]["accuracy"]
    assert ended["plan"]["codec"] == "int8-masked"
    assert abs(accuracy["true"] - accuracy["false"]) < 0.03, accuracy
    file = str(running.job_folder() / "job.yaml")
    seed = ROUNDS[-1]  # that of the jobs above, over the same regions
    for command in (("describe", job), ("explain", file, "--set", SECURE, "--set", seed)):
        told = running.federation.control_plane(*command).stdout
        assert "secure aggregation: only the sum over all 3 regions can be read" in told


@pytest.mark.parametrize("topology", ["star", "ring"])
def test_relays_pass_on_masked_updates(topology: str, running: Running) -> None:
    policy, outer = {
        "star": ("fedavgm", "lr: 0.6, momentum: 0.4"),
        "ring": ("diloco", "momentum: 0.3"),
    }[topology]
    settings = (f"wan.policy={policy}", f"wan.outer={{{outer}}}", f"wan.topology={topology}")
    ended = running.wait_end(running.submit(*ROUNDS, *settings, SECURE))
    check_succeeded(ended)
    assert ended["plan"]["topology"].startswith(topology)


def test_a_server_that_is_killed_in_a_round_goes_on(running: Running) -> None:
    job = running.submit(*ROUNDS, SECURE, "wan.interval=5")
    running.wait_round(job, 3)
    (server,) = running.descendants("virginia", "sync.ps")
    server.kill()
    ended = running.wait_end(job)
    check_succeeded(ended)


def _files(running: Running) -> Iterator[Path]:
    """All files of the control plane and of the regions but Virginia, and of their channels."""
    folder = running.federation.folder
    kept = [folder / name for name in ("control-plane", "regions/frankfurt", "regions/shanghai")]
    channels = [folder.parent / "channels" / name for name in ("frankfurt", "shanghai")]
    for root in (*kept, *channels):
        # Unlike `rglob`, it continues where a folder is deleted meanwhile.
        for parent, _, names in os.walk(root):
            yield from (Path(parent, name) for name in names)


def _holds(content: bytes, values: tuple[float, ...], fixed: int) -> bool:
    """Whether one of the values stands 64 times in a row there, as float32, or ``fixed`` as int32."""
    for begin in range(4):
        words = content[begin : begin + (len(content) - begin) // 4 * 4]
        read = [(np.frombuffer(words, np.float32), np.float32(value)) for value in values]
        for numbers, value in [*read, (np.frombuffer(words, np.int32), np.float64(fixed))]:
            with np.errstate(invalid="ignore", over="ignore"):
                like = np.abs(numbers / value - 1) < 1e-3
            edges = np.flatnonzero(np.diff(np.concatenate([[False], like, [False]]).astype(np.int8)))
            if edges.size and (edges[1::2] - edges[::2]).max() >= 64:
                return True
    return False


@pytest.mark.parametrize("masked", [True, False])
def test_the_canary_is_found_where_masks_add_nothing(masked: bool) -> None:
    size, change, shares = 4096, 0.123, {"a": 0.5, "b": 0.3, "c": 0.2}
    masks = PairMasks("a", {"b": bytes(32), "c": bytes([1] * 32)} if masked else {})
    end, start = np.full(size, change, np.float32), np.zeros(size, np.float32)
    scale = SharedScale("a", shares, "fp32-masked")
    tensors = scale.encode(end, start, np.zeros(size), size, None, masks, 1)
    held = b"".join(bytes(piece) for piece in framing.encode(tensors))
    fixed = round(change * shares["a"] * 2**26)
    assert _holds(held, (change, change * shares["a"]), fixed) is not masked
    assert not _holds(held, (change, change * shares["a"]), 1)


@pytest.mark.parametrize("secure", [True, False])
def test_no_file_of_others_holds_an_update(secure: bool, running: Running) -> None:
    """Every file of the other regions and of the control plane is read again and again while a job runs. Without
    secure aggregation the update is found, so it would be found."""
    task = (running.job_folder() / "task.py").read_text() + CANARY
    privacy = SECURE if secure else "wan.exchange=synchronous"
    # No momentum: a round's change of the canary is the same in every round.
    settings = (
        *ROUNDS,
        "train.end.epochs=10",
        "wan.codec=fp32",
        f"task.config.lr={LEARNING_RATE}",
        "task.config.momentum=0.0",
        privacy,
    )
    job = running.submit(*settings, task=task)
    running.wait_round(job, 1)
    plan = running.describe(job)["plan"]
    (steps,) = (part["steps_per_round"] for part in plan["partitions"] if part["region"] == "virginia")
    samples = {part["region"]: part["workers"] * part["batch"] * part["steps_per_round"] for part in plan["partitions"]}
    change = -LEARNING_RATE * PULLS["virginia"] * steps
    share = samples["virginia"] / sum(samples.values())
    # As fixed-point numbers, to which the masks are added: without them it would stand there in a secure job.
    fixed = round(change * share * 2**26)
    read, found = 0, list[Path]()
    while not running.describe(job)["finished_at"]:
        for path in _files(running):
            try:
                content = path.read_bytes() if path.is_file() else b""
            except FileNotFoundError:
                continue
            read += len(content)
            if _holds(content, (change, change * share), fixed):
                found.append(path)
    ended = running.wait_end(job)
    check_succeeded(ended, accuracy=0.0)
    assert read > 1 << 20
    assert bool(found) is not secure, found[:3]


def test_a_region_can_demand_it(running: Running) -> None:
    federation = running.federation
    file = federation.region_state("virginia") / "region.yaml"
    before = file.read_text()
    config = json.loads(before)
    config["policy"]["secureRegions"] = 3

    def restart(text: str) -> None:
        federation.kill("virginia")
        file.write_text(text)
        federation.start_agent("virginia")
        federation.wait_connected(["virginia"])

    restart(json.dumps(config))
    try:
        refused = running.wait_end(running.submit(*ROUNDS))
        assert refused["state"] == "failed"
        assert "takes part only with secure aggregation over at least 3 regions" in json.dumps(refused)
        check_succeeded(running.wait_end(running.submit(*ROUNDS, SECURE)))
    finally:
        restart(before)
