"""The end of a round at the parameter server: what is written, and where a new attempt finds it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.at_once import AtOnce

from sync import chunked_values, framing
from sync.channel import ChannelLimits
from sync.channel_clients import FileChannel
from sync.codec import codec_named
from sync.layout import Layout, Slot
from sync.ps.core.actions import LogRoundEnd, MergeUpdates, Restart, StoreOwnUpdate
from sync.ps.core.events import OwnUpdateStored, UpdatesMerged
from sync.ps.core.machine import Setup
from sync.ps.execution import checkpoints
from sync.ps.execution.executor import ActionExecutor
from sync.ps.execution.storage import Storage
from sync.wan import policy_of

SIZE, HALF = 8, 4
SETUP = Setup("a", ("a",), 2, 4, 1, 0)


class Server:
    """The executor over real files; its two workers hold half of the model each."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.channel = folder / "ps", FileChannel(folder / "channel")
        self.start()

    def start(self) -> None:
        self.storage = Storage(self.folder, SETUP)
        self.storage.keep_layout(Layout((Slot("w", (SIZE,), "float32"),), 1))
        policy, codec = policy_of("ma"), codec_named("fp32")
        self.executor = ActionExecutor(SETUP, self.storage, self.channel, policy, codec, part_elements=HALF)

    def hand_over(self, sequence: int, attempt: int = 1) -> StoreOwnUpdate:
        place = f"b/{attempt}/{sequence}"
        for part in range(2):
            half = np.full(HALF, sequence, np.float32)
            self.channel.put(f"{place}/model.{part}", framing.encode({"model": half}))
            self.channel.put(f"{place}/state.{part}", framing.encode({f"{part}/momentum": half}))
        chunked_values.put_index(self.channel, f"{place}/model", [(0, 0, HALF), (1, HALF, SIZE)], parts=2)
        chunked_values.put_owners(self.channel, f"{place}/state", [(0, 0), (1, 1)], parts=2)
        state_key = f"{place}/state" if sequence else ""
        return StoreOwnUpdate(sequence, 1, f"{place}/model", state_key, 1.0, sequence)

    def end(self, sequence: int, attempt: int = 1, *, then: int = 0) -> UpdatesMerged:
        """A round's end; ``then``: the attempt that there is when its update has been made."""
        made = self.executor.do(self.hand_over(sequence, attempt), attempt)
        assert isinstance(made, OwnUpdateStored)
        apply = MergeUpdates(sequence, (made.manifest,), sequence, 1.0, 0, sequence, ())
        done = self.executor.do(apply, then or attempt)
        assert isinstance(done, UpdatesMerged)
        return done

    def momentum(self, key: str, parameter: int) -> float:
        """As a worker of a stage reads it."""
        frame = chunked_values.read_state(self.channel, key, range(parameter, parameter + 1))
        assert frame is not None
        (array,) = frame.tensors.values()
        return float(np.asarray(array)[0])

    def model(self, key: str) -> list[float]:
        read = chunked_values.read_vector(self.channel, key, "model")
        assert read is not None
        return [float(value) for value in read]


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


def test_the_optimisers_state_stays_where_the_workers_have_put_it(server: Server) -> None:
    assert server.end(0).state_key == ""
    for sequence in (1, 2):
        done = server.end(sequence)
        assert done.state_key == f"b/1/{sequence}/state"
        assert not server.channel.has(f"state/{sequence}")
        assert [server.momentum(done.state_key, parameter) for parameter in (0, 1)] == [sequence, sequence]
        assert server.model(done.model_key) == [sequence] * SIZE
        assert (server.folder / f"state-{sequence}.frame").exists(), "it is durable all the same"


def test_it_is_put_again_where_its_attempt_is_over_and_cleared_away(server: Server) -> None:
    server.end(0)
    done = server.end(1, attempt=1, then=2)
    assert done.state_key == "state/1"
    assert not server.channel.has("b/1/1/state")
    assert server.momentum(done.state_key, 1) == 1


def test_a_new_attempt_may_still_read_where_it_was_told_to_while_the_next_round_is_merged(server: Server) -> None:
    server.end(0)
    told = server.end(1).state_key
    following = server.hand_over(2, 1)
    made = server.executor.do(following, 1)
    assert isinstance(made, OwnUpdateStored)
    # A worker died, and those of attempt 2 were told of round 1. Then another region's update came.
    server.executor.do(MergeUpdates(2, (made.manifest,), 2, 1.0, 0, 2, ()), 2)
    assert server.momentum(told, 1) == 1
    server.end(3, attempt=2)
    assert not server.channel.has(told), "nobody reads it any more"


def test_after_a_crash_it_comes_from_the_disk(server: Server) -> None:
    server.end(0)
    server.end(1)
    server.channel.delete_tree("b")
    server.channel.delete_tree("model")
    server.start()
    recovered = server.executor.recover()
    assert recovered.sequence == 1
    assert server.model(recovered.model_key) == [1] * SIZE
    assert server.momentum(recovered.state_key, 0) == 1


class NeverDurable(AtOnce):
    """The process dies before a checkpoint is."""

    def submit(self, work: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        if work is not checkpoints._flushed:
            return super().submit(work, *given, **named)
        for _, file in given[0].written:
            file.close()
        return Future()


@pytest.mark.parametrize("beside", [AtOnce, NeverDurable])
def test_who_begins_again_from_the_model_is_led_nowhere_after_a_crash_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: type[Executor]
) -> None:
    """A correction made again would be another one under the name of what a replay of the log makes."""
    monkeypatch.setattr(checkpoints, "background_thread", beside)
    setup, channel = replace(SETUP, regions=("a", "b"), workers=1, background=True), FileChannel(tmp_path / "channel")

    def life() -> ActionExecutor:
        storage = Storage(tmp_path / "ps", setup)
        storage.keep_layout(Layout((Slot("w", (SIZE,), "float32"),), 1))
        return ActionExecutor(setup, storage, channel, policy_of("ma"), codec_named("fp32"))

    def ends(executor: ActionExecutor, sequence: int, correction: str) -> str:
        key = f"b/1/{sequence}/model"
        channel.put(key, framing.encode({"model": np.full(SIZE, 2.0 * sequence, np.float32)}))
        if sequence:
            executor.do(LogRoundEnd(sequence, key, "", 1.0, sequence, correction, sequence + 1), 1)
        made = executor.do(StoreOwnUpdate(sequence, 1, key, "", 1.0, sequence, correction), 1)
        assert isinstance(made, OwnUpdateStored)
        marks = (("b", sequence),)
        done = executor.do(MergeUpdates(sequence, (made.manifest,), sequence, 1.0, 0, sequence, marks), 1)
        assert isinstance(done, UpdatesMerged)
        return done.correction_key

    executor = life()
    assert ends(executor, 0, "") == ""
    led = ends(executor, 1, "")
    assert life().recover().correction_key == led
    executor = life()
    executor.recover()
    executor.do(Restart(2), 2)
    again = life()
    assert again.recover().correction_key == ""
    # What it continues to make of that is the same in the next life.
    ends(again, 2, "")
    assert again.replica is not None
    then = life()
    assert then.recover().correction_key
    assert then.replica is not None
    np.testing.assert_array_equal(then.replica.start, again.replica.start)


@pytest.mark.parametrize(("held", "small"), [(2, False), (5, False), (5, True)])
def test_models_that_a_replay_would_need_do_not_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int, small: bool
) -> None:
    """However long checkpoints take: the channel may be memory, and ``small``."""
    monkeypatch.setattr(checkpoints, "_CHECKPOINT_TIME_FRACTION", 1e-12)
    if small:
        monkeypatch.setattr(FileChannel, "limits", ChannelLimits(1 << 40, 16 * held * 4 * SIZE))
    else:
        monkeypatch.setattr(checkpoints, "_REPLAY_BYTES", held * 4 * SIZE)
    monkeypatch.setattr(checkpoints, "background_thread", AtOnce)
    # By the count of calls: on a slow disk the next checkpoint waits as long as the last one took.
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(monotonic=partial(next, count(1.0))))
    setup = replace(SETUP, workers=1, background=True)
    storage, channel = Storage(tmp_path / "ps", setup), FileChannel(tmp_path / "channel")
    storage.keep_layout(Layout((Slot("w", (SIZE,), "float32"),), 1))
    executor = ActionExecutor(setup, storage, channel, policy_of("ma"), codec_named("fp32"))
    most, correction = 0, ""
    for sequence in range(40):
        key = f"b/1/{sequence}/model"
        channel.put(key, framing.encode({"model": np.full(SIZE, sequence, np.float32)}))
        if sequence:
            executor.do(LogRoundEnd(sequence, key, "", 1.0, sequence, correction, sequence + 1), 1)
        made = executor.do(StoreOwnUpdate(sequence, 1, key, "", 1.0, sequence, correction), 1)
        assert isinstance(made, OwnUpdateStored)
        done = executor.do(MergeUpdates(sequence, (made.manifest,), sequence, 1.0, 0, sequence, ()), 1)
        assert isinstance(done, UpdatesMerged)
        correction = done.correction_key
        most = max(most, sum(channel.has(f"b/1/{number}/model") for number in range(1, sequence + 1)))
    # Those since the newest checkpoint, and the one of the round in which the next is made.
    assert most == held + 1


@pytest.mark.slow
def test_what_workers_hand_over_does_not_pile_up_with_background_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt may last for as long as its job, and hand over the optimiser's state again and again."""
    monkeypatch.setattr(checkpoints, "_CHECKPOINT_TIME_FRACTION", 1e12)
    monkeypatch.setattr(checkpoints, "background_thread", AtOnce)
    setup = replace(SETUP, workers=1, background=True)
    storage, channel = Storage(tmp_path / "ps", setup), FileChannel(tmp_path / "channel")
    storage.keep_layout(Layout((Slot("w", (SIZE,), "float32"),), 1))
    executor = ActionExecutor(setup, storage, channel, policy_of("ma"), codec_named("fp32"), part_elements=HALF)
    correction = ""
    for sequence in range(40):
        attempt = 1 + sequence // 10
        place, half = f"b/{attempt}/{sequence}", np.full(HALF, sequence, np.float32)
        channel.put(f"{place}/model", framing.encode({"model": np.full(SIZE, sequence, np.float32)}))
        for part in range(2):
            channel.put(f"{place}/state.{part}", framing.encode({f"{part}/momentum": half}))
        chunked_values.put_owners(channel, f"{place}/state", [(0, 0), (1, 1)], parts=2)
        if sequence:
            executor.do(LogRoundEnd(sequence, f"{place}/model", "", 1.0, sequence, correction, sequence + 1), attempt)
        made = executor.do(
            StoreOwnUpdate(sequence, 1, f"{place}/model", f"{place}/state", 1.0, sequence, correction), attempt
        )
        assert isinstance(made, OwnUpdateStored)
        done = executor.do(MergeUpdates(sequence, (made.manifest,), sequence, 1.0, 0, sequence, ()), attempt)
        assert isinstance(done, UpdatesMerged)
        correction = done.correction_key
    executor.do(Restart(5), 5)
    left = [path for path in (tmp_path / "channel" / "b").rglob("*") if path.is_file()]
    assert [path.name for path in left] == ["model"], "what the newest checkpoint does not hold"
    assert {path.parent.parent.name for path in left} == {"4"}, "attempts that are over leave nothing"
    state = chunked_values.read_state(channel, "state/39")
    assert state is not None
    assert [float(momentum[0]) for _, momentum in sorted(state.tensors.items())] == [39, 39]


def test_the_first_model_is_not_changed_by_the_rounds_after_it(server: Server) -> None:
    """Updates are merged into the server's own memory, not into that which workers read."""
    first = server.end(0)
    replica = server.executor.replica
    assert replica is not None
    server.end(1)
    assert server.model(first.model_key) == [0] * SIZE
    assert (replica.model == 1).all()


def test_what_cannot_be_stored_is_told(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is stored beside something else."""
    server.end(0)

    def full(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(server.storage, "keep_state", full)
    with pytest.raises(OSError, match="no room"):
        server.executor.do(server.hand_over(1), 1)
