"""Dealing data out: nothing is lost, nothing doubled, the same seed gives the same shards."""

from __future__ import annotations

import gzip
import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget

from deploy.shards import (
    Labelled,
    SourceDataset,
    partition_by_label,
    partition_evenly,
    read_digits,
    read_idx,
    write_shards,
)
from geofed_pb.errors import GeofedError

REGIONS = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=6, unique=True)


@given(
    labels=st.lists(st.integers(0, 9), min_size=24, max_size=300),
    regions=REGIONS,
    alpha=st.floats(0.01, 100),
    seed=st.integers(0, 2**32 - 1),
    min_samples=st.integers(1, 4),
)
@settings(max_examples=budget(80), deadline=None)
def test_every_sample_is_in_exactly_one_shard(
    labels: list[int], regions: list[str], alpha: float, seed: int, min_samples: int
) -> None:
    array = np.array(labels, np.int64)
    dealt = partition_by_label(array, regions, alpha=alpha, seed=seed, min_samples=min_samples)
    assert sorted(np.concatenate(list(dealt.values())).tolist()) == list(range(len(labels)))
    assert min(len(part) for part in dealt.values()) >= min_samples
    again = partition_by_label(array, regions, alpha=alpha, seed=seed, min_samples=min_samples)
    assert all(np.array_equal(dealt[region], again[region]) for region in regions)


@given(count=st.integers(0, 200), regions=REGIONS, seed=st.integers(0, 2**32 - 1))
@settings(max_examples=budget(50), deadline=None)
def test_even_shards_differ_by_one_sample_at_most(count: int, regions: list[str], seed: int) -> None:
    dealt = partition_evenly(count, regions, seed=seed)
    assert sorted(np.concatenate(list(dealt.values())).tolist()) == list(range(count))
    sizes = [len(part) for part in dealt.values()]
    assert max(sizes) - min(sizes) <= 1


def test_what_cannot_be_dealt_is_refused() -> None:
    with pytest.raises(GeofedError, match="LIMIT_EXCEEDED"):
        partition_by_label(np.zeros(10, np.int64), ["a", "b"], alpha=1, seed=1)
    for regions in ([], ["a", "a"]):
        with pytest.raises(GeofedError, match="CONFIG_INVALID"):
            partition_by_label(np.zeros(100, np.int64), regions, alpha=1, seed=1)


def test_the_digits_are_uneven_in_size_and_in_classes(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    source = read_digits(1)
    written = write_shards(source, ["a", "b", "c"], tmp_path, alpha=0.5, seed=1)
    train = [written[region]["train"] for region in "abc"]
    assert sum(part["samples"] for part in train) + len(source.test.y) == 1797
    assert max(part["samples"] for part in train) > 1.5 * min(part["samples"] for part in train)
    assert any(max(part["classes"]) > 3 * min(part["classes"]) for part in train)
    with np.load(written["a"]["train"]["path"], allow_pickle=False) as arrays:
        assert arrays["x"].shape == (train[0]["samples"], 8, 8)
        assert (arrays["x"].dtype, arrays["y"].dtype) == (np.uint8, np.int64)


def write_idx(path: Path, array: np.ndarray) -> None:
    head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(head + array.astype(np.uint8).tobytes()))


@pytest.fixture
def idx_folder(tmp_path: Path) -> Path:
    for prefix, count in (("train", 70), ("t10k", 10)):
        write_idx(tmp_path / f"{prefix}-images-idx3-ubyte.gz", np.arange(count * 4).reshape(count, 2, 2) % 256)
        write_idx(tmp_path / f"{prefix}-labels-idx1-ubyte.gz", np.arange(count) % 10)
    return tmp_path


def test_idx_files_are_read(idx_folder: Path) -> None:
    source = read_idx(idx_folder)
    assert source.train.x.shape == (70, 2, 2)
    assert source.test.y.tolist() == list(range(10))


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda path: path.unlink(), "holds no train-images"),
        (lambda path: path.write_bytes(b"no gzip"), "train-images-idx3-ubyte.gz"),
        (lambda path: path.write_bytes(gzip.compress(b"abc")), "ends within its header"),
        (lambda path: path.write_bytes(gzip.compress(bytes(16))), "is not an IDX file of bytes in 3 dimensions"),
        (lambda path: write_idx(path, np.zeros((71, 2, 2))), "71 images, but 70 labels"),
        (lambda path: path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-1])), "its header says"),
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), "train-images-idx3-ubyte.gz"),
    ],
)
def test_what_is_wrong_with_an_idx_file_is_told_with_its_name(idx_folder: Path, damage: object, text: str) -> None:
    assert callable(damage)
    damage(idx_folder / "train-images-idx3-ubyte.gz")
    with pytest.raises(GeofedError, match="SHARD_UNREADABLE") as failure:
        read_idx(idx_folder)
    assert text in failure.value.message


def test_the_command_prints_what_it_wrote(idx_folder: Path) -> None:
    options = ["--source", str(idx_folder), "--regions", "a,b", "--out", str(idx_folder / "out")]
    done = subprocess.run([sys.executable, "-m", "deploy.shards", *options], capture_output=True, text=True, check=True)
    written = json.loads(done.stdout)
    assert written["a"]["train"]["samples"] + written["b"]["train"]["samples"] == 70
    assert Path(written["b"]["test"]["path"]).is_file()
    bad = subprocess.run([sys.executable, "-m", "deploy.shards", *options[2:], "--source", "/"], capture_output=True)
    assert bad.returncode == 1
    assert b"error[SHARD_UNREADABLE]" in bad.stderr


def test_a_source_is_plain_arrays() -> None:
    part = Labelled(np.zeros((3, 2, 2), np.uint8), np.array([0, 1, 2]))
    assert SourceDataset(part, part).train.take(np.array([2])).y.tolist() == [2]
