"""With background exchange steps continue while a round's end is told: what comes of it, wherever the slices end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.jobs import RESTLESS_TASK, call, chain, invocation, write_samples
from support.pki import Authority
from support.server_process import Server, wait_until
from support.warm_workers import WarmParent, WorkerProcess

from geofed_pb.v1 import worker_pb2
from region_agent.worker import loop
from region_agent.worker.ps_client import SliceOver
from sync import framing
from sync.channel_clients import FileChannel
from sync.flat import FlatModel

pytestmark = pytest.mark.processes

EACH, ROUNDS = 8, 3


class Correcting:
    """Stands where the line to the parameter server stands; corrects the workers after each round."""

    def __init__(self, channel: FileChannel, late: bool) -> None:
        self.channel, self.folder, self._late = channel, channel._folder, late
        self.open = worker_pb2.AttachReply(round=0, step=0, model_key="model/0", until_step=EACH, background=True)
        self.asked: list[int] = []
        self.ends: list[np.ndarray[Any, Any]] = []
        self.metrics: dict[int, dict[str, float]] = {}
        """Of each round's evaluation."""
        self.states = 0
        """States of earlier slices that were still in the channel while a worker trained."""

    def __enter__(self) -> Correcting:
        return self

    def __exit__(self, *_: object) -> None: ...

    def attach(self, request: worker_pb2.AttachRequest) -> worker_pb2.AttachReply:
        if self.open.round == 0 and not self.channel.has("model/0"):
            value = self.channel.get(request.initial_key)
            assert value is not None
            self.channel.put("model/0", [value])
        self.open.evaluate = self.open.round > 0 and self.open.round not in self.metrics
        return self.open

    def boundary(self, request: worker_pb2.BoundaryRequest) -> worker_pb2.BoundaryReply:
        self.asked.append(request.round)
        if self._late and self.asked.count(request.round) == 1:
            # The slice ends before the server has taken it.
            raise SliceOver
        value = self.channel.get(request.model_key)
        assert value is not None
        model = np.array(framing.decode(value).tensors["model"])
        self.ends.append(model)
        key = f"c/{request.round}"
        rng = np.random.default_rng(request.round)
        correction = 0.1 * rng.standard_normal(model.size).astype(np.float32)
        # The last coordinate is BatchNorm's counter of batches.
        correction[-1] = 0.0
        self.channel.put(key, framing.encode({"correction": correction}))
        until = min(request.step + EACH, ROUNDS * EACH)
        finished = request.round == ROUNDS
        self.open = worker_pb2.AttachReply(
            round=request.round, step=request.step, until_step=until, correction_key=key, background=True
        )
        return worker_pb2.BoundaryReply(
            round=request.round, until_step=until, correction_key="" if finished else key, finished=finished,
            evaluate=True,
        )  # fmt: skip

    def evaluated(self, request: worker_pb2.EvaluatedRequest) -> None:
        self.metrics[request.round] = dict(request.metrics)
        self.states += len(list(self.folder.glob("w/1/0/*")))


def _ends(folder: Path, monkeypatch: pytest.MonkeyPatch, slice_seconds: float, late: bool) -> tuple[Any, Any, int]:
    """The models at the ends of rounds, what was measured of them, and how many invocations it took."""
    place = Server(folder, Authority(), "east", ("east",), rounds=ROUNDS, steps_per_round=EACH)
    server = Correcting(FileChannel(place.channel_folder), late)
    monkeypatch.setattr(loop, "PsClient", lambda *_: server)
    body = invocation(place, RESTLESS_TASK, write_samples(folder / "data.npz", 50), slice_seconds=slice_seconds)
    outcomes = chain(body)
    assert outcomes[-1].status == "done", outcomes[-1]
    assert sum(outcome.steps for outcome in outcomes) == ROUNDS * EACH
    assert not server.states, "each takes the memory of a model"
    return np.stack(server.ends), server.metrics, len(outcomes)


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("late", [False, True], ids=["the answer is there at once", "the end is told twice"])
def test_the_model_does_not_depend_on_where_slices_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool, in_memory: bool
) -> None:
    if in_memory:
        monkeypatch.setattr(FileChannel, "in_memory", True)
        # The only copies that a worker alone makes of the model are in the channel.
        monkeypatch.setattr(FlatModel, "vector", None)
    whole, measured, invocations = _ends(tmp_path / "whole", monkeypatch, 100.0, False)
    assert invocations == 1
    cut, again, invocations = _ends(tmp_path / "cut", monkeypatch, 0.001, late)
    assert invocations >= ROUNDS * EACH
    np.testing.assert_array_equal(cut, whole)
    # Workers wait for each other when they evaluate, so that all must do it at the same step.
    assert again == measured


@contextmanager
def _pair(folder: Path, workers: int = 1, **settings: Any) -> Iterator[tuple[Server, Server]]:
    """The servers of two regions that exchange two rounds, east with so many workers."""
    authority, names = Authority(), ("east", "west")
    more: dict[str, Any] = {"rounds": 2, "steps_per_round": EACH, **settings}
    east = Server(folder / "east", authority, "east", names, workers=workers, **more)
    west = Server(folder / "west", authority, "west", names, **more)
    try:
        for server in (east, west):
            server.launch()
        for server in (east, west):
            server.await_ready()
        east.configure(west)
        west.configure(east)
        yield east, west
    finally:
        east.kill()
        west.kill()


def test_workers_whose_slices_end_elsewhere_evaluate_at_the_same_step(tmp_path: Path, warm: WarmParent) -> None:
    """Else one waits in an evaluation for another that waits for its gradients."""
    data = write_samples(tmp_path / "data.npz", 50)
    with _pair(tmp_path, 2, evaluate_every=1, wan_settings={"background": 1.0}) as (east, west):
        bodies = [
            invocation(
                server, RESTLESS_TASK, data, worker, slice_seconds=seconds, collective="k-reduce", merging={"k": 2}
            )
            for server, worker, seconds in ((east, 0, 0.001), (east, 1, 300.0), (west, 0, 300.0))
        ]
        processes = [warm.live([body], tmp_path / "scratch") for body in bodies]
        try:
            told = [process.end()[0] for process in processes]
        finally:
            for process in processes:
                process.close()
        assert [life[-1]["status"] for life in told] == ["done"] * 3
        assert [len(life) for life in told[1:]] == [1, 1]
        assert len(told[0]) >= 2 * EACH
        assert east.status().phase == west.status().phase == "finished"


def test_workers_that_come_when_all_rounds_are_merged_only_measure(tmp_path: Path, warm: WarmParent) -> None:
    """Workers may become more or fewer after their last round has ended, while another region's is lacking."""
    data = write_samples(tmp_path / "data.npz", 50)
    # With a quorum of itself east merges its own last round before west's are there.
    alone = {"background": 1.0, "quorum": 1.0}
    with _pair(tmp_path, wan_settings=alone) as (east, west), ExitStack() as group:

        def east_works(attempt: int) -> WorkerProcess:
            body = invocation(east, RESTLESS_TASK, data, attempt=attempt, token=east.token(0, attempt))
            process = warm.live([body], tmp_path / "scratch")
            group.callback(process.close)
            return process

        first = east_works(1)
        body = invocation(west, RESTLESS_TASK, data, slice_seconds=0.001)
        while (outcome := call(body)).step < 2 * EACH - 1:
            body = body.model_copy(update={"resume_key": outcome.resume_key})
        wait_until(lambda: east.status().condition == "waiting for the last updates from west", "the end of east")
        east.configure(west, attempt=2)
        assert first.end()[0][-1]["code"] == "FENCED"
        assert chain(body.model_copy(update={"resume_key": outcome.resume_key}))[-1].status == "done"
        wait_until(lambda: east.status().applied_updates == 2, "all rounds to be merged")
        (last,) = east_works(2).end()[0]
        assert (last["status"], last["steps"]) == ("done", 0), last
        assert east.status().phase == "finished"
