"""Sparse logistic regression: LibSVM and Criteo lines, read as they are written, and what is wrong told by line."""

from __future__ import annotations

import gzip
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.templates import load_template, make_data, measure, train
from torch.utils.data import DataLoader, default_collate

TASK = load_template("sparse-logistic-regression")
import formats  # noqa: E402 - from the template's folder
import records  # noqa: E402

NAME = "sparse-logistic-regression"
SMALL = {"dimension": 100}
CRITEO = "\t".join(["1", *(str(n) for n in range(13)), *(f"{n:08x}" for n in range(26))])


def rows(data: Any) -> list[tuple[float, list[tuple[int, float]]]]:
    """Label and entries of each row."""
    entries = [
        list(zip(data.index[a:b].tolist(), data.value[a:b].tolist(), strict=True)) for a, b in pairwise(data.offset)
    ]
    return list(zip(data.label.tolist(), entries, strict=True))


def read(folder: Path, text: str | bytes, config: dict[str, Any] = SMALL, name: str = "shard.svm") -> Any:
    (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return TASK.dataset(str(folder / name), "train", config)


# LibSVM


def test_libsvm_lines_are_read(tmp_path: Path) -> None:
    text = "+1 0:1 7:0.5\n-1 99:-2e-1 3:+.25\n\n0\n1.0  1:1\t2:3. \n# a comment\n-1 5:5 # another"
    expected = [
        (1, [(0, 1.0), (7, 0.5)]),
        (0, [(99, float(np.float32(-0.2))), (3, 0.25)]),
        (0, []),
        (1, [(1, 1.0), (2, 3.0)]),
        (0, [(5, 5.0)]),
    ]
    assert rows(read(tmp_path, text)) == expected
    assert rows(read(tmp_path, text.replace("\n", "\r\n"))) == expected
    assert rows(read(tmp_path, b"\xef\xbb\xbf" + text.encode())) == expected
    assert rows(read(tmp_path, gzip.compress(text.encode()), name="shard.svm.gz")) == expected


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("2 1:1", "the label must be 1, or 0 or -1; it is '2'"),
        ("yes 1:1", "the label must be a number"),
        ("1:1 2:1", "the label must be a number, of a size up to 3.40282e+38; it is '1:1'"),
        ("1 5", "expected index:value, found '5'"),
        ("1 a:1", "the index in index:value must be a whole number, from 0 on; it is 'a'"),
        ("1 -1:1", "it is '-1'"),
        ("1 1.0:1", "it is '1.0'"),
        ("1 :1", "it is ''"),
        ("1 1: 2:1", "the value in index:value must be a number"),
        ("1 1:1:1", "it is '1:1'"),
        ("1 1:1-2 3:", "it is '1-2'"),
        ("1 1:nan", "it is 'nan'"),
        ("1 1:1e39", "it is '1e39'"),
        ("1 1:1_0", "it is '1_0'"),
        ("1 qid:3 1:1", "it is 'qid'"),
        ("1 \xff:3", r"it is '\\xc3\\xbf'"),
        ("1 100:1", "index 100 is not below config.dimension, 100: raise it to 101 or more"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_what_is_wrong_with_a_libsvm_line_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, text: str, packed: bool
) -> None:
    monkeypatch.setattr(records, "STRETCH", 1000)
    good = b"1 1:1 2:0.5\n\n0 3:1\n" * 200
    whole = good + line.encode() + b"\n" + good
    name = "shard.svm.gz" if packed else "shard.svm"
    with pytest.raises(ValueError) as failure:
        read(tmp_path, gzip.compress(whole, 1) if packed else whole, name=name)
    assert str(failure.value).startswith(f"{tmp_path / name}:601: ")
    assert text in str(failure.value)


NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)
LIBSVM = st.lists(st.tuples(st.sampled_from([0, 1]), st.lists(st.tuples(st.integers(0, 99), NUMBERS), max_size=6)))


@given(LIBSVM, st.sampled_from(["{:d}", "{:+d}"]), st.sampled_from(["\n", "\r\n", " \n"]))
def test_libsvm_rows_are_read_as_they_are_written(written: Any, label: str, end: str) -> None:
    lines = [" ".join([label.format(y), *(f"{i}:{v!r}" for i, v in row)]) + end for y, row in written]
    for read_by in (formats.libsvm_lines, None):
        label_, length, index, value = parse("libsvm", "".join(lines).encode(), read_by)
        assert label_.tolist() == [y for y, _ in written]
        assert length.tolist() == [len(row) for _, row in written]
        assert index.tolist() == [i for _, row in written for i, _ in row]
        assert value.tolist() == [v for _, row in written for _, v in row]


def parse(form: str, text: bytes, at_once: Any) -> Any:
    """All at once where that is possible, or line by line."""
    name, kept = f"{form}_lines", getattr(formats, f"{form}_lines")
    try:
        setattr(formats, name, at_once or (lambda text, dimension: None))
        return formats.read(records.Lines("x", 1, text), form, 100)
    finally:
        setattr(formats, name, kept)


@given(st.text(alphabet="01 :.-+e\n\t9#", max_size=40))
def test_libsvm_lines_at_once_are_what_they_are_one_by_one(text: str) -> None:
    same_at_once("libsvm", f"1 1:1\n{text}\n".encode())


def same_at_once(form: str, text: bytes) -> None:
    arrays = getattr(formats, f"{form}_lines")(text, 100)
    if arrays is not None:
        for fast, slow in zip(arrays, parse(form, text, None), strict=True):
            assert fast.tolist() == slow.tolist()


# Criteo


def test_criteo_lines_are_read(tmp_path: Path) -> None:
    numbers = ["", "0", "-3", "12345678", "123456789", *["1"] * 8]
    line = "\t".join(["0", *numbers, "", "ABCDEF01", "0", "abcdef01", *["68fd1e64"] * 22])
    data = read(tmp_path, f"{CRITEO}\n{line}\n\n{CRITEO}", {"dimension": 1013}, "day.tsv")
    (_, first), (label, entries), (_, third) = rows(data)
    assert first == third
    assert data.label.tolist() == [1, 0, 1]
    assert label == 0
    assert [index for index, _ in entries[:13]] == list(range(13))
    logs = [0, 0, -np.log1p(3), np.log1p(12345678), np.log1p(123456789), *[np.log1p(1)] * 8]
    assert [value for _, value in entries] == pytest.approx([*logs, *[1.0] * 26])
    hashed = [index for index, _ in entries[13:]]
    assert all(13 <= index < 1013 for index in hashed)
    # The same category is another feature in another column; the buckets never change.
    assert len(set(hashed[4:])) > 20
    assert hashed[:5] == [69, 822, 692, 392, 251]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (CRITEO.partition("\t")[2], "expected 40 columns: a label, 13 whole numbers and 26 hex"),
        (CRITEO + "\t1", "found 41"),
        ("\t" + CRITEO.partition("\t")[2], "the label must be 0 or 1; it is ''"),
        ("2" + CRITEO[1:], "it is '2'"),
        ("01" + CRITEO[1:], "it is '01'"),
        (CRITEO.replace("\t12\t", "\t1.5\t"), "number I13 must be whole, or empty; it is '1.5'"),
        (CRITEO.replace("\t12\t", "\t-\t"), "number I13 must be whole, or empty; it is '-'"),
        (CRITEO.replace("\t12\t", "\tf\t"), "it is 'f'"),
        (CRITEO.replace("00000002", "0000000g"), "category C3 must have up to 8 hexadecimal digits, or be empty"),
        (CRITEO.replace("00000002", "123456789"), "it is '123456789'"),
        (CRITEO.replace("00000002", "-1"), "it is '-1'"),
        (CRITEO.replace("00000002", "\N{BLACK STAR}"), "category C3"),
    ],
)
def test_what_is_wrong_with_a_criteo_line_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, text: str
) -> None:
    monkeypatch.setattr(records, "STRETCH", 1000)
    good = f"{CRITEO}\n" * 20
    with pytest.raises(ValueError) as failure:
        read(tmp_path, f"{good}{line}\n{good}", name="day.tsv")
    assert str(failure.value).startswith(f"{tmp_path / 'day.tsv'}:21: ")
    assert text in str(failure.value)


FIELD = st.one_of(st.just(""), st.integers(-(10**10), 10**10).map(str))
CATEGORY = st.one_of(st.just(""), st.integers(0, 2**32 - 1).map("{:08x}".format), st.sampled_from(["0", "F", "aB"]))
CRITEO_ROW = st.tuples(st.sampled_from("01"), *[FIELD] * 13, *[CATEGORY] * 26)


@given(st.lists(CRITEO_ROW, max_size=3))
def test_criteo_rows_are_read_as_they_are_written(written: Any) -> None:
    text = "".join("\t".join(row) + "\n" for row in written).encode()
    same_at_once("criteo", text)
    label, length, index, value = parse("criteo", text, None)
    assert label.tolist() == [int(row[0]) for row in written]
    assert length.tolist() == [39] * len(written)
    numbers = value.reshape(-1, 39)[:, :13].astype(np.float64)
    back = np.sign(numbers) * np.expm1(np.abs(numbers))
    expected = np.array([[int(n or 0) for n in row[1:14]] for row in written], np.float64).reshape(-1, 13)
    np.testing.assert_allclose(back, expected, rtol=1e-4)
    for row, buckets in zip(written, index.reshape(-1, 39)[:, 13:], strict=True):
        known = [int(c, 16) if c else formats.MISSING for c in row[14:]]
        every = [int(formats.hashed(np.uint64(c), np.uint64(n), 87)) + 13 for n, c in enumerate(known, 1)]
        assert buckets.tolist() == every


@given(st.integers(0, len(CRITEO) - 1), st.sampled_from("\t\n g-.0f"))
def test_criteo_lines_at_once_are_what_they_are_one_by_one(place: int, put: str) -> None:
    same_at_once("criteo", f"{CRITEO}\n{CRITEO[:place]}{put}{CRITEO[place + 1 :]}\n".encode())


def test_hashing_is_even() -> None:
    drawn = np.random.default_rng(0).integers(0, 1 << 32, (4000, 26)).astype(np.uint64)
    counts = np.bincount(formats.hashed(drawn, np.arange(1, 27, dtype=np.uint64), 1000).ravel().astype(int))
    assert len(counts) == 1000
    assert 50 < counts.min() < counts.max() < 170  # 104 on average


# Files, batches and settings


def test_a_folder_may_hold_both_forms(tmp_path: Path) -> None:
    (tmp_path / "a.svm").write_text("1 1:1\n")
    (tmp_path / "b.tsv.gz").write_bytes(gzip.compress(f"\n{CRITEO}\n".encode()))
    (tmp_path / "README").write_text("not data")
    assert [len(entries) for _, entries in rows(TASK.dataset(str(tmp_path), "train", SMALL))] == [1, 39]


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n"])
def test_an_empty_file_is_told(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"shard\.svm holds no samples"):
        read(tmp_path, text)


def test_what_is_wrong_with_a_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere is not there"):
        TASK.dataset(str(tmp_path / "nowhere"), "train", SMALL)
    with pytest.raises(FileNotFoundError, match="holds no files that end in"):
        TASK.dataset(str(tmp_path), "train", SMALL)
    whole = gzip.compress(b"1 1:1\n" * 1000)
    for broken in (whole[:-9], whole[:20] + b"xxxx" + whole[24:], b"1 1:1\n"):
        with pytest.raises(ValueError, match=r"cut\.svm\.gz:1: it cannot be unpacked"):
            read(tmp_path, broken, name="cut.svm.gz")


def test_a_line_without_an_end_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "LONGEST_LINE", 1 << 20)
    with pytest.raises(ValueError, match=r"shard\.svm:2: the line is longer than"):
        read(tmp_path, b"1 1:1\n" + b" " * (3 << 20))


def test_settings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.dimension must be set"):
        TASK.model({})
    with pytest.raises(ValueError, match=r"config\.format is 'csv'; it can be auto, libsvm or criteo"):
        read(tmp_path, "1 1:1\n", {"dimension": 100, "format": "csv"})
    with pytest.raises(ValueError, match=r"shard\.svm:1: expected 40 columns"):
        read(tmp_path, "1 1:1\n", {"dimension": 100, "format": "criteo"})


def test_rows_of_any_length_collate(tmp_path: Path) -> None:
    data = read(tmp_path, "1 1:2 3:4\n0\n0 5:6\n")
    index, value, label = default_collate(data.__getitems__([2, 0, 1]))
    assert index.tolist() == [[[5, 0], [1, 3], [0, 0]]]
    assert value.tolist() == [[[6, 0], [2, 4], [0, 0]]]
    assert label.tolist() == [[0, 1, 0]]
    one_by_one = default_collate([data[2], data[0], data[1]])
    assert [part.tolist() for part in one_by_one] == [part[0].tolist() for part in (index, value, label)]
    assert [part.shape[1] for part in next(iter(DataLoader(data, batch_size=2)))[:2]] == [2, 2]
    model = TASK.model(SMALL)
    with torch.no_grad():
        model.weight[5], model.weight[0], model.bias[0] = 0.5, 9, 1
        assert model(index, value).tolist() == [[4, 1, 1]]
        assert model(*one_by_one[:2]).tolist() == [4, 1, 1]
        assert TASK.metrics(model, iter([])) == {}


@pytest.mark.parametrize(("form", "dimension"), [("libsvm", 1000), ("criteo", 20_013)])
def test_it_learns_the_made_up_samples(tmp_path: Path, form: str, dimension: int) -> None:
    written, _ = make_data(NAME, "--regions", "a,b", "--out", str(tmp_path), "--form", form, "--samples", "1500")
    config = {"dimension": dimension, "lr": 0.01}
    shards = {key: TASK.dataset(told["path"], key, config) for key, told in written["a"].items()}
    assert {key: len(shard) for key, shard in shards.items()} == {k: v["samples"] for k, v in written["a"].items()}
    assert written["b"]["train"]["samples"] == 1.5 * written["a"]["train"]["samples"]
    model = train(TASK, shards["train"], config, steps=150, batch=64)
    before, after = measure(TASK, TASK.model(config), shards["test"]), measure(TASK, model, shards["test"])
    assert before["loss"] == pytest.approx(np.log(2))
    assert after["loss"] < 0.95 * before["loss"]
    assert after["accuracy"] > 0.6
    assert measure(TASK, model, shards["train"])["loss"] < 0.8 * before["loss"]


def test_a_file_of_the_users_is_cut_without_loss(tmp_path: Path) -> None:
    lines = [f"1 {number % 90}:1" for number in range(500)]
    (tmp_path / "all.svm.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    written, _ = make_data(NAME, "--regions", "a,b,c", "--out", str(tmp_path), "--source", str(tmp_path / "all.svm.gz"))
    sizes = [sum(split["samples"] for split in splits.values()) for splits in written.values()]
    assert sizes == [111, 166, 223]
    found = [
        line for splits in written.values() for s in splits.values() for line in Path(s["path"]).read_text().split("\n")
    ]
    assert sorted(filter(None, found)) == sorted(lines)
