"""Batches that depend on nothing but the seed and the step, and shards that are fetched whole."""

from __future__ import annotations

import collections
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset, default_collate

from geofed_pb.errors import GeofedError
from region_agent.worker.data import fetching as module
from region_agent.worker.data.batches import Batches
from region_agent.worker.data.shard import BatchStream, evaluation_batches, fetch_split, joined, move
from region_agent.worker.invocation import ShardFile, Stretch

_SIZES = st.tuples(st.integers(1, 60), st.integers(1, 4), st.integers(1, 9))


def _streams(size: int, workers: int, batch: int, seed: int = 3) -> list[BatchStream]:
    return [BatchStream(range(size), seed, "east", worker, workers, batch * workers) for worker in range(workers)]


@given(_SIZES, st.integers(0, 1 << 32))
def test_every_epoch_has_every_sample_once(sizes: tuple[int, int, int], seed: int) -> None:
    size, workers, batch = sizes
    streams = _streams(size, workers, batch, seed)
    steps = -(-3 * size // (workers * batch))
    drawn = [index for step in range(1, steps + 1) for stream in streams for index in stream.indices(step)]
    for epoch in range(len(drawn) // size):
        assert sorted(drawn[epoch * size : (epoch + 1) * size]) == list(range(size))
    assert max(Counter(drawn).values()) - min(Counter(drawn).values()) <= 1


@given(_SIZES, st.lists(st.integers(1, 40), max_size=12))
def test_a_step_draws_the_same_whatever_was_drawn_before(sizes: tuple[int, int, int], history: list[int]) -> None:
    size, workers, batch = sizes
    used, fresh = _streams(size, workers, batch)[-1], _streams(size, workers, batch)[-1]
    for step in history:
        used.indices(step)
    assert used.indices(17) == fresh.indices(17)


@given(st.integers(1, 60), st.integers(1, 40), st.integers(1, 9), st.integers(1, 9))
def test_a_step_of_a_region_draws_the_same_however_many_workers_share_it(
    size: int, region_batch: int, one: int, other: int
) -> None:
    def drawn(workers: int) -> list[int]:
        streams = [BatchStream(range(size), 3, "east", worker, workers, region_batch) for worker in range(workers)]
        assert max(stream.count(5) for stream in streams) - min(stream.count(5) for stream in streams) <= 1
        return [index for stream in streams for index in stream.indices(5)]

    one, other = min(one, region_batch), min(other, region_batch)
    assert drawn(one) == drawn(other)


@given(st.data())
def test_where_the_batch_changes_every_sample_still_is_drawn_once_in_turn(data: st.DataObject) -> None:
    """Whoever makes which part of it: any number of workers, that may be another one in each step."""
    size, first = data.draw(st.integers(1, 60)), data.draw(st.integers(4, 12))
    begins = data.draw(st.lists(st.integers(1, 20), max_size=4).map(sorted))
    changes = tuple(Stretch(first_step=step, batch=data.draw(st.integers(4, 12))) for step in begins)
    drawn, total, batches = [], 0, Batches(first, changes)
    for step in range(1, 25):
        workers = data.draw(st.integers(1, 4))
        streams = [BatchStream(range(size), 3, "east", worker, workers, batches) for worker in range(workers)]
        assert sum(stream.count(step) for stream in streams) == batches.of(step)
        assert batches.before(step) == total
        drawn += [index for stream in streams for index in stream.indices(step)]
        total += batches.of(step)
    told = BatchStream(range(size), 3, "east", 0, 1, 1)
    assert drawn == [told.indices(step)[0] for step in range(1, total + 1)]


def test_the_batch_of_a_step_is_that_of_the_last_change_before_it() -> None:
    changes = (Stretch(first_step=5, batch=16, rate=0.5), Stretch(first_step=9, batch=24))
    batches = Batches(32, changes)
    assert [batches.of(step) for step in (1, 4, 5, 8, 9, 99)] == [32, 32, 16, 16, 24, 24]
    assert [batches.rate(step) for step in (4, 5, 9)] == [1.0, 0.5, 1.0]
    with pytest.raises(GeofedError, match="change at steps"):
        Batches(32, changes[::-1])


def test_more_workers_than_samples_in_a_step_are_told() -> None:
    with pytest.raises(GeofedError, match="3 samples a step are too few for 4 workers"):
        BatchStream(range(9), 3, "east", 0, 4, 3)


def test_seed_region_and_epoch_change_the_order() -> None:
    def order(seed: int, region: str, step: int) -> list[int]:
        return BatchStream(range(50), seed, region, 0, 1, 50).indices(step)

    orders = [order(1, "east", 1), order(2, "east", 1), order(1, "west", 1), order(1, "east", 2)]
    assert len({tuple(found) for found in orders}) == 4


def test_an_empty_split_is_told() -> None:
    with pytest.raises(GeofedError, match="training split is empty"):
        BatchStream([], 1, "east", 0, 1, 1)


@given(st.integers(0, 1200), st.integers(1, 5))
def test_the_test_data_is_dealt_out_once(size: int, workers: int) -> None:
    data = TensorDataset(torch.arange(size))
    seen: list[int] = []
    for worker in range(workers):
        sizes, batches = evaluation_batches(data, worker, workers, 4)
        dealt = [[int(value) for value in batch] for (batch,) in batches]
        assert [len(batch) for batch in dealt] == sizes
        assert all(size <= 4 for size in sizes)
        mine = [value for batch in dealt for value in batch]
        seen += mine
    assert sorted(seen) == list(range(size))


class _Doubled(TensorDataset):
    """Gives something else than its tensors hold."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(2 * tensor[index] for tensor in self.tensors)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=3), st.sampled_from(["", "dtype", "shape", "class", "sparse"]))
def test_a_tensor_dataset_is_collated_as_a_data_loader_would(sizes: list[int], odd: str) -> None:
    """Also several of them, and where one is unlike the others in something."""
    shards: list[TensorDataset] = []
    for number, size in enumerate(sizes):
        x, y = torch.randn(size, 3, 2), torch.arange(size) + 100 * number
        last = number == len(sizes) - 1
        if odd == "dtype" and last:
            x = x.double()
        if odd == "shape" and last:
            x = x[:, :, :1].contiguous()
        kind = _Doubled if odd == "class" and last else TensorDataset
        shards.append(kind(x.to_sparse() if odd == "sparse" else x, y))
    data, total = joined(shards), sum(sizes)
    stream = BatchStream(data, 3, "east", 0, 1, total)
    items = [data[index] for index in stream.indices(1)]
    if odd == "sparse" or (odd == "shape" and len(sizes) > 1):
        with pytest.raises(RuntimeError, match=r"sparse tensors|equal size"):
            stream.batch(1)
        return
    wanted, found = default_collate(items), stream.batch(1)
    assert type(found) is type(wanted) is list
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


# Over HTTP


class Store(ThreadingHTTPServer):
    """Serves a few objects, as badly as it is told to."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.objects = {"/a.bin": b"alpha" * 1000, "/b.bin": b"beta"}
        self.troubles: list[str] = []
        self.asked: list[str] = []

    def file(self, name: str, **fields: object) -> ShardFile:
        url = f"http://127.0.0.1:{self.server_address[1]}/{name}?X-Signature=secret"
        return ShardFile(name=name, url=url, **fields)  # type: ignore[arg-type]


class _Answer(BaseHTTPRequestHandler):
    server: Store

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        content = self.server.objects.get(self.path.split("?")[0])
        trouble = self.server.troubles.pop(0) if self.server.troubles else ""
        if trouble == "hang up":
            self.connection.close()
            return
        status = int(trouble) if trouble.isdigit() else 200 if content is not None else 404
        body = (content or b"") if status == 200 else b"<Error>"
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if trouble == "cut" else body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(module, "RETRY_PAUSES_SECONDS", (0.0, 0.0, 0.0))
    with Store() as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def test_one_object_is_a_file(store: Store, tmp_path: Path) -> None:
    path = fetch_split((store.file("a.bin", size=5000),), tmp_path)
    assert Path(path).read_bytes() == store.objects["/a.bin"]


@pytest.mark.parametrize("count", [1, 2])
def test_the_objects_of_a_folder_are_a_folder_however_many(store: Store, tmp_path: Path, count: int) -> None:
    files = [store.file(name, folder=True) for name in ("a.bin", "b.bin")[:count]]
    folder = Path(fetch_split(tuple(files), tmp_path / "into"))
    assert folder == tmp_path / "into"
    assert sorted(path.name for path in folder.iterdir()) == ["a.bin", "b.bin"][:count]


@pytest.mark.parametrize("count", [1, 2])
def test_local_folders_are_used_where_they_are(tmp_path: Path, count: int) -> None:
    (tmp_path / "deep").mkdir()
    names = ["deep/a", "b"][:count]
    for name in names:
        (tmp_path / name).touch()
    files = tuple(ShardFile(name=name, path=str(tmp_path / name), folder=True) for name in names)
    assert fetch_split(files, tmp_path / "into") == str(tmp_path)


@pytest.mark.parametrize("trouble", ["503", "500", "cut", "hang up"])
def test_a_store_in_trouble_is_asked_again(store: Store, tmp_path: Path, trouble: str) -> None:
    store.troubles = [trouble] * 3
    path = fetch_split((store.file("a.bin", size=5000),), tmp_path)
    assert Path(path).read_bytes() == store.objects["/a.bin"]
    assert len(store.asked) == 4


@pytest.mark.parametrize(
    ("name", "troubles", "says", "asked"),
    [
        ("c.bin", [], "c.bin: status 404", 1),
        ("a.bin", ["403"], "a.bin: status 403", 1),
        ("a.bin", ["503"] * 9, "a.bin: status 503", 4),
        ("a.bin", ["hang up"] * 9, "a.bin: RemoteProtocolError", 4),
        ("b.bin", ["longer"] * 9, "b.bin: received 4 of 5 bytes", 4),
    ],
)
def test_what_cannot_be_had_is_told_without_the_signature(
    store: Store, tmp_path: Path, name: str, troubles: list[str], says: str, asked: int
) -> None:
    store.troubles = troubles
    with pytest.raises(GeofedError) as raised:
        fetch_split((store.file(name, size=5 if "longer" in troubles else None),), tmp_path)
    assert (raised.value.code, raised.value.message) == ("SHARD_UNREADABLE", says)
    assert len(store.asked) == asked


def test_what_is_here_is_not_fetched_again(store: Store, tmp_path: Path) -> None:
    for _ in range(2):
        fetch_split((store.file("a.bin", size=5000),), tmp_path)
    assert len(store.asked) == 1
    (tmp_path / "a.bin").write_bytes(b"half")
    fetch_split((store.file("a.bin", size=5000),), tmp_path)
    assert len(store.asked) == 2


@pytest.mark.parametrize("name", ["../outside", "/etc/geofed", "a/../../outside"])
def test_an_object_with_a_name_that_leads_out_is_refused(store: Store, tmp_path: Path, name: str) -> None:
    with pytest.raises(GeofedError) as raised:
        fetch_split((store.file(name, folder=True),), tmp_path / "into")
    assert raised.value.code == "SHARD_UNREADABLE"
    assert store.asked == []


def test_a_missing_local_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(GeofedError, match="not found"):
        fetch_split((ShardFile(name="a", path=str(tmp_path / "a")),), tmp_path)
    with pytest.raises(GeofedError, match="no files"):
        fetch_split((), tmp_path)


class _Whole:
    """Takes a batch at once, and nothing else."""

    def __init__(self, values: list[int]) -> None:
        self._values = values
        self.calls = 0

    def __len__(self) -> int:
        return len(self._values)

    def __getitems__(self, indices: list[int]) -> list[int]:
        self.calls += 1
        return [self._values[index] for index in indices]


@given(st.lists(st.integers(0, 20), min_size=2, max_size=5), st.data())
def test_several_shards_are_one_dataset_in_their_order(sizes: list[int], data: st.DataObject) -> None:
    values = list(range(sum(sizes)))
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    parts = [values[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    shards = [_Whole(part) if number % 2 else part for number, part in enumerate(parts)]
    whole = joined(shards)
    assert len(whole) == len(values)
    if values:
        asked = data.draw(st.lists(st.sampled_from(values)))
        assert whole.__getitems__(asked) == asked
        assert all(shard.calls <= 1 for shard in shards if isinstance(shard, _Whole))
        plain = [index for index in asked if isinstance(shards[_of(starts, sizes, index)], list)]
        assert [whole[index] for index in plain] == plain


def _of(starts: list[int], sizes: list[int], index: int) -> int:
    return next(n for n, start in enumerate(starts) if start <= index < start + sizes[n])


def test_a_single_shard_is_as_it_is() -> None:
    only = [1, 2]
    assert joined([only]) is only


# On another device

Pair = collections.namedtuple("Pair", "x y")
META = torch.device("meta")


class Encoding(collections.UserDict):  # type: ignore[type-arg]
    """As tokenisers give it: it knows how to be moved."""

    def to(self, where: torch.device) -> Encoding:
        self.data = {key: value.to(where) for key, value in self.data.items()}
        return self


class Frozen(Mapping):  # type: ignore[type-arg]
    def __init__(self, held: Any) -> None:
        self._held = held

    def __getitem__(self, key: object) -> Any:
        return self._held[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    name: str = "a"


class Stubborn:
    def to(self, where: object) -> None:
        raise RuntimeError("not today")


@pytest.mark.parametrize(
    "batch",
    [
        [torch.ones(2), torch.ones(1)],
        (torch.ones(2), "text", 3),
        default_collate([Pair(torch.ones(2), 1), Pair(torch.ones(2), 0)]),
        {"a": torch.ones(1), "b": [Pair(torch.ones(2), {"c": torch.ones(1)})]},
        collections.OrderedDict(a=torch.ones(1)),
        collections.defaultdict(list, a=[torch.ones(1)]),
        collections.UserDict(a=torch.ones(1)),
        collections.deque([torch.ones(1)]),
        Encoding(a=torch.ones(1)),
        Frozen({"a": torch.ones(1)}),
        Sample(torch.ones(1)),
        nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)]),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_a_batch_is_moved_whatever_it_is_made_of(batch: Any) -> None:
    moved = move(batch, META)
    assert type(moved) is type(batch)
    assert _devices(moved) == {"meta"}


def _devices(held: Any) -> set[str]:
    if isinstance(held, torch.Tensor):
        return {held.device.type}
    if isinstance(held, nn.utils.rnn.PackedSequence):
        return _devices(held.data)
    if isinstance(held, Mapping):
        return set().union(*map(_devices, held.values()))
    if isinstance(held, list | tuple | collections.deque):
        return set().union(*map(_devices, held))
    return _devices(held.x) if isinstance(held, Sample) else set()


def test_what_holds_no_tensor_stays_as_it_is() -> None:
    for batch in ("text", b"bytes", 3, None, range(3), torch.Size([2, 3]), ["a"], {"a": 1}):
        assert move(batch, META) is batch


def test_an_object_that_cannot_be_moved_is_the_tasks_failure() -> None:
    with pytest.raises(GeofedError, match="moving a batch to meta raised RuntimeError: not today") as raised:
        move([Stubborn()], META)
    assert raised.value.code == "TASK_FAILED"
