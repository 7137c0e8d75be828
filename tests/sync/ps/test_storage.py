"""What a parameter server finds on its disk after it died: the state before or after a step, never a mix."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.budget import budget, stride
from support.small_disk import small_disk

from geofed_pb import linux
from geofed_pb.errors import GeofedError
from geofed_pb.files import durable
from sync import framing
from sync.channel_clients import _buffer_pool
from sync.file_transfer.arrival import Arrival
from sync.file_transfer.manifest import Manifest
from sync.histograms import Histogram
from sync.layout import Layout, Slot, Vector
from sync.ps.core.actions import LogRoundEnd, MergeUpdates, StoreMetrics
from sync.ps.core.machine import Recovered, Setup
from sync.ps.execution.checkpoint_file import PendingCheckpoint
from sync.ps.execution.replica import ReplicaState
from sync.ps.execution.storage import Storage

SETUP = Setup("a", ("a", "b"), 1, 4, 1, 1)
LAYOUT = Layout((Slot("w", (8,), "float32"),), 1)


class Crash(Exception):
    """The process is gone."""


def _storage(folder: Path) -> Storage:
    return Storage(folder, SETUP)


def _update(region: str, sequence: int) -> tuple[Manifest, bytes]:
    delta = np.full(8, sequence + (0.5 if region == "b" else 0.25), np.float32)
    data = b"".join(framing.encode({"delta": delta}))
    return Manifest(region, 1, sequence, framing.digest_of([data]), len(data), 1.0), data


def _recover(storage: Storage) -> tuple[Recovered, Vector]:
    recovered, numbers, entries = storage.recover()
    assert not entries
    return recovered, np.zeros(8, np.float32) if numbers is None else numbers.model


def _merged(storage: Storage, base: Vector, sequence: int) -> Vector:
    manifests = [_update(region, sequence)[0] for region in SETUP.contributors(sequence)]
    deltas = [np.array(framing.decode(storage.update(manifest)).tensors["delta"]) for manifest in manifests]
    return np.asarray(base + np.mean(deltas, axis=0, dtype=np.float32), np.float32)


def _live(storage: Storage, recovered: Recovered, model: Vector) -> None:
    """What a server does from here to the end of its job, skipping what is durable already."""
    storage.keep_layout(LAYOUT)
    have = {(m.region, m.sequence) for m in (*recovered.inbox, *recovered.outbox)}
    for sequence in range(recovered.sequence + 1, SETUP.rounds + 1):
        for region in SETUP.contributors(sequence):
            if (region, sequence) in have:
                continue
            manifest, data = _update(region, sequence)
            if region == "a":
                storage.keep_state(sequence, [b"optimiser state of round %d" % sequence])
                storage.write_update(manifest.sequence, [data], len(data))
                storage.keep_update(manifest)
                continue
            arrival = Arrival(manifest, storage.update_path(region, sequence), reuse=storage.buffer_pool.take)
            for offset in range(arrival.file.prefix, len(data), 100):
                arrival.append(offset, data[offset : offset + 100])
            arrival.complete(lambda *_: None)
        model = _merged(storage, model, sequence)
        applied = MergeUpdates(
            sequence, (), sequence, 10.0 * sequence, sequence, version=sequence, watermarks=(("b", sequence),)
        )
        storage.keep_checkpoint(ReplicaState(model, model), applied)
        storage.keep_metrics(
            StoreMetrics(
                sequence,
                5.0,
                {"accuracy": sequence / 10},
                histograms={"age": Histogram((0.0, 1.0), counts=(sequence,))},
            )
        )
        storage.forget({"a": sequence - 1, "b": sequence - 1})


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Of the model after each round, in a life without a crash."""
    storage, told = _storage(tmp_path_factory.mktemp("whole")), {}
    with pytest.MonkeyPatch.context() as patch:
        keep = storage.keep_checkpoint
        patch.setattr(
            storage, "keep_checkpoint", lambda numbers, apply: told.update({apply.version: keep(numbers, apply)})
        )
        _live(storage, *_recover(storage))
    return told


@pytest.fixture(autouse=True)
def nobody_waits_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A death loses nothing that the kernel has; of a loss of power there are tests in `test_background_deaths`."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda _: None)


@pytest.fixture
def small_files_are_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_buffer_pool, "MIN_BYTES", 0)


class _Operations:
    """Counts what changes the disk; dies before one of them."""

    def __init__(self, patch: pytest.MonkeyPatch, die_before: int) -> None:
        self.count, self._die_before, self._patch = 0, die_before, patch
        for owner, name in ((os, "replace"), (os, "fsync"), (Path, "unlink")):
            self._wrap(owner, name)

    def _wrap(self, owner: object, name: str) -> None:
        real: Callable[..., object] = getattr(owner, name)

        def operation(*arguments: object, **options: object) -> object:
            if self.count == self._die_before:
                raise Crash
            self.count += 1
            return real(*arguments, **options)

        self._patch.setattr(owner, name, operation)


def _check(storage: Storage, recovered: Recovered, digests: dict[int, str]) -> None:
    if recovered.sequence >= 0:
        assert recovered.model_digest == digests[recovered.sequence]
        assert (recovered.step, recovered.applied) == (recovered.sequence, recovered.sequence)
        assert storage.newest_state(recovered.sequence) == b"optimiser state of round %d" % recovered.sequence
    for manifest in (*recovered.inbox, *recovered.outbox):
        if manifest.sequence >= recovered.sequence:
            assert storage.update(manifest) == _update(manifest.region, manifest.sequence)[1]
    if recovered.metrics is not None:
        assert recovered.metrics.metrics == {"accuracy": recovered.metrics.sequence / 10}
        assert recovered.metrics.histograms == {"age": Histogram((0.0, 1.0), counts=(recovered.metrics.sequence,))}


@pytest.mark.slow
@pytest.mark.usefixtures("small_files_are_reused")
@pytest.mark.parametrize(("direct_bytes", "first"), [(0, 0), (16 << 20, 1)], ids=["past the page cache", "through it"])
def test_a_death_before_any_file_operation_loses_and_mixes_nothing(
    tmp_path: Path, digests: dict[int, str], monkeypatch: pytest.MonkeyPatch, direct_bytes: int, first: int
) -> None:
    """Before every other one of a life, the ``first`` of them on."""
    monkeypatch.setattr("sync.ps.execution.checkpoint_file.DIRECT_BYTES", direct_bytes)
    moment, over = first, False
    while not over:
        folder = tmp_path / str(moment)
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Crash):
            storage = _storage(folder)
            _Operations(patch, moment)
            _live(storage, *_recover(storage))
            over = True
        again = _storage(folder)
        recovered, model = _recover(again)
        _check(again, recovered, digests)
        _live(again, recovered, model)
        assert _recover(_storage(folder))[0].model_digest == digests[SETUP.rounds]
        moment += stride(2)
    assert moment > 60, "the life is longer than that"


@settings(max_examples=budget(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(deaths=st.lists(st.integers(0, 40), max_size=6))
def test_many_deaths_in_a_row(
    tmp_path_factory: pytest.TempPathFactory, digests: dict[int, str], deaths: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("many")
    last = -1
    for death in deaths:
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Crash):
            storage = _storage(folder)
            recovered, model = _recover(storage)
            _check(storage, recovered, digests)
            assert recovered.sequence >= last, "a round that was durable is gone"
            last = recovered.sequence
            _Operations(patch, death)
            _live(storage, recovered, model)
    storage = _storage(folder)
    _live(storage, *_recover(storage))
    assert _recover(_storage(folder))[0].model_digest == digests[SETUP.rounds]


def _lived(folder: Path) -> Path:
    storage = _storage(folder)
    _live(storage, *_recover(storage))
    return max(folder.glob("checkpoint-*.frame"), key=lambda path: int(path.name.split("-")[1]))


def _damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_damaged_checkpoint_is_made_again_from_the_one_before(tmp_path: Path, digests: dict[int, str]) -> None:
    _damage(_lived(tmp_path))
    storage = _storage(tmp_path)
    recovered, model = _recover(storage)
    assert recovered.sequence == SETUP.rounds - 1
    assert recovered.model_digest == digests[SETUP.rounds - 1]
    here = {(m.region, m.sequence) for m in (*recovered.inbox, *recovered.outbox)}
    assert here == {("a", SETUP.rounds), ("b", SETUP.rounds)}
    _live(storage, recovered, model)
    assert _recover(_storage(tmp_path))[0].model_digest == digests[SETUP.rounds]


@pytest.mark.parametrize("damage", ["cut", "empty", "other"])
def test_every_kind_of_damage_is_seen(tmp_path: Path, damage: str) -> None:
    newest = _lived(tmp_path)
    data = newest.read_bytes()
    newest.write_bytes({"cut": data[: len(data) // 2], "empty": b"", "other": b"x" * len(data)}[damage])
    assert _recover(_storage(tmp_path))[0].sequence == SETUP.rounds - 1


def test_a_damaged_checkpoint_without_its_updates_is_told_and_not_passed_over(tmp_path: Path) -> None:
    """The peers have been told that the round is done: they would never send its updates again."""
    _damage(_lived(tmp_path))
    (tmp_path / "inbox" / "b" / f"{SETUP.rounds}.json").unlink()
    with pytest.raises(GeofedError, match="its updates were deleted") as raised:
        _recover(_storage(tmp_path))[0]
    assert raised.value.code == "STATE_INVALID"


def test_when_no_checkpoint_is_whole_it_is_told(tmp_path: Path) -> None:
    _lived(tmp_path)
    for path in tmp_path.glob("checkpoint-*.frame"):
        _damage(path)
    with pytest.raises(GeofedError) as raised:
        _recover(_storage(tmp_path))[0]
    assert raised.value.code == "STATE_INVALID"


@pytest.mark.parametrize("name", ["metrics.json", f"inbox/b/{SETUP.rounds}.json", f"outbox/{SETUP.rounds}.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": 1}'])
def test_damaged_records_are_told(tmp_path: Path, name: str, content: str) -> None:
    _lived(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(GeofedError) as raised:
        _recover(_storage(tmp_path))[0]
    assert raised.value.code == "STATE_INVALID"


def test_an_update_that_changed_on_disk_never_enters_the_model(tmp_path: Path) -> None:
    _lived(tmp_path)
    storage = _storage(tmp_path)
    manifest = _recover(storage)[0].inbox[0]
    _damage(storage.update_path("b", manifest.sequence))
    with pytest.raises(GeofedError) as raised:
        storage.update(manifest)
    assert raised.value.code == "STATE_INVALID"


def test_an_update_is_hashed_once_in_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _lived(tmp_path)
    storage, hashed, real = _storage(tmp_path), [], framing.digest_of
    recovered = _recover(storage)[0]
    manifests = (*recovered.inbox, *recovered.outbox)
    known = [(manifest, _update(manifest.region, manifest.sequence)[1]) for manifest in manifests]
    made = _update("a", SETUP.rounds + 1)
    monkeypatch.setattr(framing, "digest_of", lambda pieces: hashed.append(real(pieces)) or hashed[-1])
    assert storage.write_update(made[0].sequence, [made[1]], len(made[1])) == made[0].digest
    storage.keep_update(made[0])
    for manifest, data in 2 * [*known, made]:
        assert storage.update(manifest) == data
    assert hashed == [manifest.digest for manifest in manifests]


def test_a_residual_does_not_outlive_the_machines_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not flushed, so that its file may hold anything then."""
    _storage(tmp_path).keep_residual(3, np.arange(8, dtype=np.float32))
    again = _storage(tmp_path)
    found = again.residual(3)
    assert found is not None
    assert np.array_equal(found, np.arange(8.0))
    assert again.residual(2) is None
    monkeypatch.setattr("sync.ps.execution.storage._boot_id", lambda: b"another start")
    assert again.residual(3) is None


def test_what_a_dead_process_left_half_written_is_removed(tmp_path: Path) -> None:
    _lived(tmp_path)
    left = [tmp_path / ".metrics.json.partial", tmp_path / "inbox" / "b" / ".9.json.partial"]
    for path in left:
        path.write_bytes(b"half")
    _recover(_storage(tmp_path))[0]
    assert not any(path.exists() for path in left)


# Files that are written again


def _background(folder: Path) -> Storage:
    storage = Storage(folder, replace(SETUP, background=True))
    storage.keep_layout(LAYOUT)
    return storage


def _checkpoint(storage: Storage, version: int, *, residual: bool = False, complete: bool = False) -> Path:
    model = np.full(8, version, np.float32)
    held = np.full(8, version, np.float32) if residual else None
    apply = MergeUpdates(version, (), version, 1.0 * version, version, version=version, complete=complete)
    ended = LogRoundEnd(version, f"b/1/{version}/model", "", 1.0, version, "", version + 1) if version else None
    storage.keep_checkpoint(ReplicaState(model, model, held), apply, ended)
    (newest,) = storage.folder.glob(f"checkpoint-{version}-*")
    return newest


@pytest.mark.usefixtures("small_files_are_reused")
def test_in_the_background_a_checkpoint_is_written_over_one_that_is_not_needed_any_more(tmp_path: Path) -> None:
    storage = _background(tmp_path)
    # Two are kept, a third one is to be written again: each third file is the same, longer or shorter.
    inodes = [_checkpoint(storage, version, residual=version % 4 < 2).stat().st_ino for version in range(12)]
    assert inodes[3:] == inodes[:-3]
    assert len(set(inodes[:3])) == 3
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2
    recovered, numbers, _ = _background(tmp_path).recover()
    assert recovered.version == 11
    assert numbers is not None
    np.testing.assert_array_equal(numbers.model, np.full(8, 11, np.float32))
    assert numbers.residual is None


@pytest.mark.usefixtures("small_files_are_reused")
def test_the_newest_checkpoints_are_whole_wherever_writing_one_again_breaks_off(tmp_path: Path) -> None:
    for survived in range(200):
        folder = tmp_path / str(survived)
        storage = _background(folder)
        for version in range(4):
            _checkpoint(storage, version)
        with pytest.MonkeyPatch.context() as patch:
            _Operations(patch, survived)
            try:
                _checkpoint(storage, 4, residual=True)
            except Crash:
                died = True
            else:
                died = False
        recovered, numbers, _ = _background(folder).recover()
        assert recovered.version in ((3, 4) if died else (4,))
        assert numbers is not None
        np.testing.assert_array_equal(numbers.model, np.full(8, recovered.version, np.float32))
        assert not list(folder.glob(".*.partial"))
        if not died:
            assert survived > 4, "a checkpoint takes more than that"
            return
    raise AssertionError("a checkpoint has no end")


@pytest.mark.usefixtures("small_files_are_reused")
def test_the_last_checkpoint_leaves_nothing_to_be_written_again(tmp_path: Path) -> None:
    storage = _background(tmp_path)
    for version in range(5):
        _checkpoint(storage, version)
    assert list(tmp_path.glob("spare/*"))
    _checkpoint(storage, 5, complete=True)
    assert not list(tmp_path.glob("spare/*"))


def test_a_large_checkpoint_is_the_one_that_a_small_limit_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for limit in (0, 1 << 20):
        monkeypatch.setattr("sync.ps.execution.checkpoint_file.DIRECT_BYTES", limit)
        monkeypatch.setattr(durable, "_DIRECT_BYTES", 4096)
        storage = _storage(tmp_path / str(limit))
        model = np.arange(5000, dtype=np.float32)
        apply = MergeUpdates(1, (), 1, 10.0, 1, version=1, watermarks=(("b", 1),))
        digest = storage.keep_checkpoint(ReplicaState(model, model), apply)
        (path,) = storage.folder.glob("checkpoint-*")
        made.append((digest, path.name, path.read_bytes()))
    assert made[0] == made[1]


# Beside other work


class _Kernel:
    """One that fails to write back, after some windows."""

    def __init__(self, error: int, fine: int) -> None:
        self.error, self.fine, self.asked = error, fine, 0

    def sync_file_range(self, descriptor: int, at: ctypes.c_int64, size: ctypes.c_int64, flags: int) -> int:
        self.asked += 1
        if self.asked <= self.fine:
            return 0
        ctypes.set_errno(self.error)
        return -1


def _draft(storage: Storage, model: Vector) -> PendingCheckpoint:
    return storage.begin_checkpoint(
        ReplicaState(model, model), MergeUpdates(1, (), 1, 10.0, 1, version=1, watermarks=(("b", 1),))
    )


def test_a_checkpoint_made_beside_is_the_one_made_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "_WINDOW_BYTES", 100)
    model = np.arange(200, dtype=np.float32)
    made = []
    for beside in (False, True):
        storage = _background(tmp_path / str(beside))
        draft = _draft(storage, model)
        draft.write()
        draft.flush(throttled=beside)
        storage.finish_checkpoint(draft)
        (path,) = storage._checkpoints()
        made.append((path[1].name, path[1].read_bytes()))
    assert made[0] == made[1]


@pytest.mark.parametrize("fine", [0, 3])
def test_a_disk_that_fails_while_it_is_written_back_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fine: int
) -> None:
    monkeypatch.setattr(durable, "_WINDOW_BYTES", 100)
    kernel = _Kernel(errno.EIO, fine)
    monkeypatch.setattr(linux, "_libc", kernel)
    storage = _background(tmp_path)
    draft = _draft(storage, np.zeros(200, np.float32))
    draft.write()
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        draft.flush(throttled=True)
    assert kernel.asked == fine + 1
    assert not list(tmp_path.glob("checkpoint-*"))


def test_without_writing_back_in_windows_all_is_flushed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = _Kernel(errno.ENOSYS, 0)
    monkeypatch.setattr(linux, "_libc", kernel)
    storage = _background(tmp_path)
    draft = _draft(storage, np.zeros(200, np.float32))
    draft.write()
    draft.flush(throttled=True)
    assert kernel.asked == 1
    assert len(list(tmp_path.glob("checkpoint-*"))) == 1


# A full disk


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "small", bytes_=1 << 16) as folder:
        yield folder


@pytest.mark.processes
def test_a_full_disk_is_told_and_the_old_state_stays(full: Path) -> None:
    storage = _storage(full)
    model = np.ones(8, np.float32)
    storage.keep_checkpoint(ReplicaState(model, model), MergeUpdates(0, (), 0, 0.0, 0, version=0))
    ones = np.ones(1 << 16, np.float32)
    with pytest.raises(GeofedError) as raised:
        storage.keep_checkpoint(ReplicaState(ones, ones), MergeUpdates(1, (), 1, 0.0, 1, version=1))
    assert raised.value.code == "DISK_FULL"
    recovered = _recover(_storage(full))[0]
    assert recovered.sequence == 0
    assert not list(full.glob(".*.partial")), "the room that the half-written file took is free again"


def test_incomplete_updates_that_cannot_be_continued_are_deleted(tmp_path: Path) -> None:
    """All but the newest of a number, those of a complete update, and those of another job's region."""
    inbox = tmp_path / "inbox" / "b"
    inbox.mkdir(parents=True)
    stranger = tmp_path / "inbox" / "mars"
    stranger.mkdir()
    (stranger / "1.0.part").write_bytes(b"?")
    for age, name in enumerate(("3.old", "3.new", "2.late")):
        for kind in ("part", "have"):
            (inbox / f"{name}.{kind}").write_text("[]")
            os.utime(inbox / f"{name}.{kind}", (age, age))
    manifest, data = _update("b", 2)
    (inbox / "2.frame").write_bytes(data)
    (inbox / "2.json").write_text(json.dumps(asdict(manifest)))
    Storage(tmp_path, SETUP).recover()
    assert {path.name for path in inbox.iterdir()} == {"2.frame", "2.json", "3.new.part", "3.new.have"}
    assert not stranger.exists()


def test_updates_are_forgotten_while_others_are_received(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sync.ps.execution.storage.check_received", lambda *_: None)
    storage, failed = _storage(tmp_path), list[BaseException]()
    manifest = _update("b", 1)[0]

    def receive() -> None:
        for number in range(1, 3001):
            storage.inspect(replace(manifest, sequence=number), tmp_path)

    def forget() -> None:
        try:
            for last in range(1, 60):
                storage.forget({"b": last})
        except RuntimeError as error:
            failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=receive), threading.Thread(target=forget)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failed
