"""Matrix factorisation: MovieLens' three forms, read as they are written, and what is wrong told by line."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.templates import TEMPLATES, load_template, make_data, measure, train
from torch.utils.data import DataLoader, default_collate

TASK = load_template("matrix-factorisation")
import records  # noqa: E402 - from the template's folder

NAME = "matrix-factorisation"
SMALL = {"users": 1000, "items": 500, "rank": 4}
HEADER = "userId,movieId,rating,timestamp\n"
GOOD = {
    "ratings.dat": ("1::193::5::978300760\n999::0::3.5::978302109\n", 3),
    "ratings.csv": (HEADER + "1,193,5.0,1112486027\n999,0,3.5,1112484676\n", 3),
    "u.data": ("1\t193\t5\t881250949\n999\t0\t3.5\t891717742\n", 3),
    "short.csv": ("1,193,5.0\n999,0,3.5\n", 2),
}
SEPARATORS = {"dat": "::", "csv": ",", "tab": "\t"}


def read(folder: Path, text: str | bytes, name: str = "ratings.dat", **config: Any) -> Any:
    (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return TASK.dataset(str(folder / name), "train", SMALL | config)


def rows(data: Any) -> list[tuple[int, int, float]]:
    return list(zip(data.user.tolist(), data.item.tolist(), data.rating.tolist(), strict=True))


@pytest.mark.parametrize("name", list(GOOD))
def test_ratings_are_read(tmp_path: Path, name: str) -> None:
    text, _ = GOOD[name]
    expected = [(1, 193, 5.0), (999, 0, 3.5)]
    assert rows(read(tmp_path, text, name)) == expected
    assert rows(read(tmp_path, "\n" + text.replace("\n", "\r\n\r\n").rstrip(), name)) == expected
    assert rows(read(tmp_path, b"\xef\xbb\xbf" + text.encode(), name)) == expected
    assert rows(read(tmp_path, gzip.compress(text.encode()), f"{name}.gz")) == expected


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("1,2,3", "expected 4 columns, as in user::item::rating::time; found 3"),
        ("1,2,3,4,5", "found 5"),
        ("x,2,3,4", "the user must be a whole number, from 0 on; it is 'x'"),
        ("1.5,2,3,4", "it is '1.5'"),
        ("-1,2,3,4", "it is '-1'"),
        (",2,3,4", "it is ''"),
        ("1,two,3,4", "the item must be a whole number, from 0 on; it is 'two'"),
        ("1,2,,4", "the rating must be a number, of a size up to 1e+06; it is ''"),
        ("1,2,good,4", "it is 'good'"),
        ("1,2,nan,4", "it is 'nan'"),
        ("1,2,1.2.3,4", "it is '1.2.3'"),
        ("1,2,1e9,4", "it is '1e9'"),
        ("1000,2,3,4", "user 1000 is not below config.users, 1000: raise it to 1001 or more"),
        ("1,500,3,4", "item 500 is not below config.items, 500: raise it to 501 or more"),
        ("99999999999999999999,2,3,4", "the user must be a whole number"),
    ],
)
@pytest.mark.parametrize(("form", "name"), [("dat", "ratings.dat"), ("csv", "r.csv.gz"), ("tab", "u.data")])
def test_what_is_wrong_with_a_line_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, text: str, form: str, name: str
) -> None:
    monkeypatch.setattr(records, "STRETCH", 1000)
    good = "1,2,3,4\n999,499,0.5,4\n\n" * 200
    whole = ("1,2,3,4\n" + good + line + "\n" + good).replace(",", SEPARATORS[form]).encode()
    with pytest.raises(ValueError) as failure:
        read(tmp_path, gzip.compress(whole, 1) if name.endswith(".gz") else whole, name)
    assert str(failure.value).startswith(f"{tmp_path / name}:602: ")
    assert text.replace(TASK.FORMS["dat"], TASK.FORMS[form]) in str(failure.value)


RATINGS = st.lists(st.tuples(st.integers(0, 999), st.integers(0, 499), st.floats(-(10**6), 10**6, width=32)))


@given(RATINGS, st.sampled_from(list(SEPARATORS)), st.booleans(), st.sampled_from(["{:g}", "{!r}"]))
def test_ratings_are_read_as_they_are_written(written: Any, form: str, timed: bool, shown: str) -> None:
    lines = [
        SEPARATORS[form].join([str(user), str(item), shown.format(rating), *(["7"] if timed else [])]) + "\n"
        for user, item, rating in written
    ]
    text = "".join(lines).encode()
    table = TASK.read(records.Lines("x", 1, text), form, 4 if timed else 3, (1000, 500))
    ratings = [float(np.float32(shown.format(rating))) for *_, rating in written]
    assert [column.tolist() for column in table] == [[w[0] for w in written], [w[1] for w in written], ratings]


@given(st.text(alphabet="01.,\n -e", max_size=30))
def test_lines_at_once_are_what_they_are_one_by_one(text: str) -> None:
    whole = f"1,1,1,1\n{text}\n".encode()
    table = TASK.read_at_once(whole, b",", 4, (1000, 500))
    if table is not None:
        slow = list(records.Lines("x", 1, whole).each(lambda line: TASK.read_line(line, "csv", 4, (1000, 500))))
        assert [tuple(row) for row in table.tolist()] == slow


def test_a_folder_as_movielens_packs_it(tmp_path: Path) -> None:
    (tmp_path / "movies.dat").write_text("1::Toy Story (1995)::Animation\n")
    (tmp_path / "ratings.dat").write_text(GOOD["ratings.dat"][0])
    assert len(TASK.dataset(str(tmp_path), "train", SMALL)) == 2
    (tmp_path / "ratings.dat").rename(tmp_path / "a.dat")
    with pytest.raises(ValueError, match=r"movies\.dat:1: .* whole number.* 'Toy Story \(1995\)'"):
        TASK.dataset(str(tmp_path), "train", SMALL)
    (tmp_path / "movies.dat").unlink()
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(GOOD["ratings.csv"][0].encode()))
    assert len(TASK.dataset(str(tmp_path), "train", SMALL)) == 4


@pytest.mark.parametrize("text", ["", "\n\n", HEADER])
def test_an_empty_file_is_told(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"ratings\.csv holds no ratings"):
        read(tmp_path, text, "ratings.csv")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "1 2 3 4",
            "expected user::item::rating::time, or user,item,rating,time, or user, item, rating, time with tabs",
        ),
        ("1::2", "expected user::item::rating::time; found '1::2'"),
        ("movieId,title,genres\n1,Toy Story,Animation", "expected the header userId,movieId,rating,timestamp"),
    ],
)
def test_a_file_of_something_else_is_told(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ValueError) as failure:
        read(tmp_path, f"\n{text}\n", "ratings.csv")
    assert str(failure.value).startswith(f"{tmp_path / 'ratings.csv'}:2: {expected}")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere is not there"):
        TASK.dataset(str(tmp_path / "nowhere"), "train", SMALL)
    with pytest.raises(ValueError, match=r"r\.dat\.gz:1: it cannot be unpacked"):
        read(tmp_path, gzip.compress(b"1::2::3\n" * 1000)[:-9], "r.dat.gz")


def test_settings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.users and config\.items must be set"):
        TASK.model({"users": 10})
    parameters = TASK.model(SMALL).parameters()
    assert isinstance(TASK.optimizer(parameters, {"optimizer": "sgd"}), torch.optim.SGD)
    with pytest.raises(ValueError, match=r"config\.optimizer is 'lion'; it can be adam or sgd"):
        TASK.optimizer(parameters, {"optimizer": "lion"})
    with pytest.raises(ValueError, match=r"config\.format is 'xml'; it can be auto, dat, csv, tab"):
        read(tmp_path, "1::2::3\n", format="xml")
    with pytest.raises(ValueError, match=r"ratings\.dat:1: expected user,item,rating,time; found '1::2::3'"):
        read(tmp_path, "1::2::3\n", format="csv")


def test_the_model_is_the_sum_of_its_parts(tmp_path: Path) -> None:
    data = read(tmp_path, GOOD["ratings.dat"][0])
    batch = default_collate(data.__getitems__([1, 0, 1]))
    assert [part.tolist() for part in batch] == [[[999, 1, 999]], [[0, 193, 0]], [[3.5, 5.0, 3.5]]]
    assert [part.shape for part in next(iter(DataLoader(data, batch_size=2)))] == [(1, 2)] * 3
    one_by_one = default_collate([data[1], data[0], data[1]])
    torch.manual_seed(0)
    model = TASK.model(SMALL | {"mean": 3.0, "l2": 0.5})
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {
        "user": (1000, 4), "item": (500, 4), "user_bias": (1000,), "item_bias": (500,)
    }  # fmt: skip
    with torch.no_grad():
        model.user_bias[999], model.item_bias[0] = 0.25, -1
        u, v = model.user[999], model.item[0]
        predicted = 3 + 0.25 - 1 + float(u @ v)
        assert model(torch.tensor(999), torch.tensor(0)).item() == pytest.approx(predicted)
        only = default_collate(data.__getitems__([1]))
        expected = (3.5 - predicted) ** 2 + 0.5 * float(u @ u + v @ v + 0.25**2 + 1)
        assert TASK.loss(model, only).item() == pytest.approx(expected)
        assert TASK.loss(model, batch).item() == pytest.approx(TASK.loss(model, one_by_one).item())
    told = measure(TASK, model, data)
    # Parts merge to the whole as means over their samples.
    with torch.no_grad():
        parts = [TASK.metrics(model, iter([default_collate(data.__getitems__([i]))])) for i in range(2)]
    assert told == pytest.approx({name: (parts[0][name] + parts[1][name]) / 2 for name in ("mse", "mae")})
    assert TASK.metrics(model, iter([])) == {}


@pytest.mark.parametrize("form", list(SEPARATORS))
def test_it_learns_the_made_up_ratings(tmp_path: Path, form: str) -> None:
    written, told = make_data(NAME, "--regions", "a,b", "--out", str(tmp_path), "--form", form, "--users", "100")
    assert told.startswith("config: users: 251, items: 401, mean: 3.")
    config = {"users": 251, "items": 401, "rank": 4, "lr": 0.02, "l2": 0.03}
    shards = {key: TASK.dataset(split["path"], key, config) for key, split in written["b"].items()}
    assert {key: len(shard) for key, shard in shards.items()} == {k: v["samples"] for k, v in written["b"].items()}
    assert not {*shards["train"].user.tolist()} & {
        *TASK.dataset(written["a"]["test"]["path"], "test", config).user.tolist()
    }
    if form == "dat":
        torch.manual_seed(0)
        model = train(TASK, shards["train"], config, steps=400, batch=128)
        before, after = measure(TASK, TASK.model(config), shards["test"]), measure(TASK, model, shards["test"])
        assert after["mse"] < 0.7 * before["mse"]
        assert after["mae"] < 0.85 * before["mae"]


def test_users_of_a_file_are_dealt_whole(tmp_path: Path) -> None:
    lines = [f"{user},{item},{1 + (user + item) % 5},7" for user in range(90) for item in range(12)]
    (tmp_path / "all.csv").write_text(HEADER + "\n".join(lines))
    argv = ["--regions", "a,b,c", "--out", str(tmp_path), "--source", str(tmp_path / "all.csv"), "--form", "csv"]
    written, told = make_data(NAME, *argv)
    assert told == "config: users: 90, items: 12, mean: 3\n"
    found, users = [], {}
    for region, splits in written.items():
        of_region = [line for split in splits.values() for line in Path(split["path"]).read_text().split("\n")[1:-1]]
        users[region] = {line.partition(",")[0] for line in of_region}
        found += of_region
    assert sorted(found) == sorted(lines)
    assert sum(map(len, users.values())) == len(set.union(*users.values())) == 90


def test_what_both_templates_share_is_the_same() -> None:
    texts = {(TEMPLATES / name / "records.py").read_text() for name in (NAME, "sparse-logistic-regression")}
    assert len(texts) == 1
