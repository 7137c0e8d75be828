"""What a pipeline does beside its gradients: a task's loss, evaluation, errors, memory, and what it leaves behind."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from support.memory_channel import MemoryChannel
from support.pipelines import WorkerGroup, in_threads, mse
from torch import nn

from geofed_pb.errors import GeofedError
from sync.pipeline import Layers, Pipeline, model_input
from sync.pipeline._stage_transfers import StageTransfers

STAGES = ((0, 0), (1, 2), (3, 3))


def _layers() -> Layers:
    widths = [3, 8, 8, 8, 2]
    return Layers.declared([lambda at=at: nn.Linear(widths[at], widths[at + 1]) for at in range(4)], 1)


def _batch(samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(samples, 3, generator=draw), torch.randn(samples, 2, generator=draw)


def _metrics(model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
    errors = torch.cat([(model(x) - y).abs().mean(1) for x, y in batches])
    return {"error": float(errors.mean()), "samples": float(len(errors))}


@pytest.mark.parametrize("stages", [((0, 3),), ((0, 1), (2, 3)), STAGES], ids=len)
@pytest.mark.parametrize("count", [0, 1, 7, 40])
def test_evaluation_through_stages_is_that_of_the_whole_model(stages: tuple[tuple[int, int], ...], count: int) -> None:
    """Forty batches are several windows: no stage runs far ahead of the next."""
    batches = [_batch(samples) for samples in [4] * (count - 1) + [2] * bool(count)]
    store, most = MemoryChannel(), 0

    class Watched(MemoryChannel):
        def put(self, key: str, pieces: Any) -> None:
            nonlocal most
            super().put(key, pieces)
            most = max(most, len(self.values))

    with WorkerGroup(Pipeline(stages, 1, 4), _layers(), lambda: Watched(store.values, changed=store.changed)) as group:
        found = in_threads(
            [
                lambda worker=worker: worker.runner.evaluate(
                    "e1", batches if worker.runner.reads_data else (), count, _metrics
                )
                for worker in group.workers
            ]
        )
    whole = _layers().stage(0, 3).eval()
    with torch.no_grad():
        expected = _metrics(whole, batches) if count else {}
    assert found[-1] == pytest.approx(expected)
    assert all(told == {} for told in found[:-1])
    assert store.values == {}
    # For each of two hops two windows, and what is consumed and waits to be deleted with others.
    assert most <= 2 * (2 * 8 + 16)


@pytest.mark.parametrize("count", [5, 40])
def test_metrics_that_fail_leave_no_stage_waiting_and_nothing_behind(count: int) -> None:
    def failing(model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        for number, (x, _) in enumerate(batches):
            model(x)
            if number == 2:
                raise GeofedError("TASK_FAILED", "the labels are not what they were")
        return {}

    def evaluated(worker: Any) -> str:
        try:
            worker.runner.evaluate("e1", batches if worker.runner.reads_data else (), count, failing)
        except GeofedError as error:
            return error.code
        return ""

    batches, store = [_batch(4) for _ in range(count)], MemoryChannel()
    with WorkerGroup(Pipeline(STAGES, 1, 4), _layers(), store.another, timeout_seconds=5.0) as group:
        found = in_threads([lambda worker=worker: evaluated(worker) for worker in group.workers])
    assert found == ["", "", "TASK_FAILED"]
    assert store.values == {}


def _twice(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x) + model(x), y)


def _never(model: nn.Module, batch: Any) -> torch.Tensor:
    return batch[0].sum()


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "says"), [(_twice, "calls the model 2 times"), (_never, "does not call the model")])
def test_a_loss_that_does_not_fit_is_told(loss: Any, says: str) -> None:
    with WorkerGroup(Pipeline(STAGES, 1, 8), _layers(), MemoryChannel().another, loss, timeout_seconds=3.0) as group:
        with pytest.raises(GeofedError) as raised:
            group.step(1, _batch())
        # Those that wait for the stage that failed hear of it by their own patience.
        assert raised.value.code in ("TASK_INVALID", "CHANNEL_TIMEOUT")
        assert says in str(raised.value) or raised.value.code == "CHANNEL_TIMEOUT"


def test_a_model_that_is_called_with_more_than_one_thing_is_told() -> None:
    with pytest.raises(GeofedError, match="with 2 arguments"):
        model_input(lambda model, batch: model(*batch), _batch())


def test_a_task_that_catches_everything_still_hands_over_its_input() -> None:
    def careful(model: nn.Module, batch: Any) -> Any:
        try:
            return model(batch)
        except Exception:
            return None

    assert model_input(careful, 5) == 5


def test_layers_that_pass_on_something_else_are_told() -> None:
    class Dict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"x": x * self.weight}

    layers = Layers.declared([Dict, lambda: nn.Linear(3, 2)], 1)
    with WorkerGroup(Pipeline(((0, 0), (1, 1)), 1, 8), layers, MemoryChannel().another, timeout_seconds=2.0) as group:
        runner = group.workers[0].runner
        with pytest.raises(GeofedError, match="stages pass on a tensor or a tuple of tensors"):
            runner.step(1, 8, [_batch()])


def test_a_stage_that_gives_nothing_is_waited_for_so_long_and_no_longer() -> None:
    with (
        WorkerGroup(Pipeline(STAGES, 1, 8), _layers(), MemoryChannel().another, timeout_seconds=0.3) as group,
        pytest.raises(GeofedError, match="CHANNEL_TIMEOUT"),
    ):
        group.workers[1].runner.step(1, 8, [])


def test_what_the_channel_raises_in_a_lane_reaches_the_step() -> None:
    def broken(what: str, key: str) -> None:
        if what == "put" and "/s1-0/" in key and "-a" in key:
            raise GeofedError("DISK_FULL", "no room")

    store = MemoryChannel(before=broken)
    with (
        WorkerGroup(Pipeline(STAGES, 1, 4), _layers(), lambda: store, timeout_seconds=5.0) as group,
        pytest.raises(GeofedError, match="DISK_FULL"),
    ):
        group.workers[0].runner.step(1, 8, [_batch(4), _batch(4)])


class _Counting(nn.Linear):
    """Counts how many activations of its own are alive."""

    alive = most = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        if torch.is_grad_enabled():
            _Counting.alive += 1
            _Counting.most = max(_Counting.most, _Counting.alive)
            out.register_hook(_Counting.gone)
        return out

    @staticmethod
    def gone(gradient: torch.Tensor) -> None:
        _Counting.alive -= 1


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@pytest.mark.parametrize("again", [False, True], ids=["kept", "made again"])
def test_a_stage_keeps_no_more_micro_batches_than_its_order_says(order: str, again: bool) -> None:
    _Counting.alive = _Counting.most = 0
    layers = Layers.declared([lambda: _Counting(3, 4), lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 2)], 1)
    shape = Pipeline(((0, 0), (1, 1), (2, 2)), 1, 1, order, (again, False, False))
    with WorkerGroup(shape, layers, MemoryChannel().another) as group:
        group.step(1, _batch(10))
    assert _Counting.most == (1 if again else 10 if order == "gpipe" else 3)
    assert _Counting.alive == 0


def test_a_worker_makes_the_layers_of_its_stage_and_no_others() -> None:
    made: list[int] = []

    def layer(at: int) -> nn.Module:
        # A shell, from which names and sizes are read, has no memory.
        if torch.get_default_device().type != "meta":
            made.append(at)
        return nn.Linear(4, 4)

    layers = Layers.declared([lambda at=at: layer(at) for at in range(6)], 1)
    layers.shell()
    layers.stage(2, 3)
    assert made == [2, 3]


def test_a_pipeline_learns_what_one_process_learns() -> None:
    layers, batch = _layers(), _batch(12)
    whole = layers.stage(0, 3)
    alone = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    with WorkerGroup(Pipeline(STAGES, 2, 2), layers, MemoryChannel().another) as group:
        optimizers = [torch.optim.SGD(worker.layers.parameters(), lr=0.1, momentum=0.9) for worker in group.workers]
        for step in range(1, 9):
            loss = group.step(step, batch, then=step < 8)
            for optimizer in optimizers:
                optimizer.step()
            alone.zero_grad()
            expected = mse(whole, batch)
            expected.backward()
            alone.step()
            assert loss == pytest.approx(float(expected.detach()), rel=1e-5)


class SlowPuts(MemoryChannel):
    """Takes its time for each value."""

    def put(self, key: str, pieces: Any) -> None:
        threading.Event().wait(0.02)
        super().put(key, pieces)

    def put_many(self, items: Any) -> None:
        for key, pieces in items.items():
            self.put(key, pieces)


def test_what_was_sent_is_in_the_channel_once_it_is_drained() -> None:
    """A worker drains before its slice ends: what others wait for must not be lost with it."""
    channel = SlowPuts()
    transfers = StageTransfers(channel, timeout_seconds=30.0)
    for number in range(8):
        transfers.send(f"a/{number}", [b"x"])
    transfers.drain()
    transfers.close()
    assert all(channel.has(f"a/{number}") for number in range(8))


def test_draining_does_not_wait_for_ever() -> None:
    transfers = StageTransfers(SlowPuts(), timeout_seconds=0.01)
    for number in range(8):
        transfers.send(f"a/{number}", [b"x"])
    with pytest.raises(GeofedError, match="CHANNEL_TIMEOUT"):
        transfers.drain()
    transfers.close()
