"""Samples of files with a format: what is read, how it is counted, and what is refused with the file's name."""

from __future__ import annotations

import csv
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from geofed_pb.errors import GeofedError
from region_agent.shards.indexing import Indexes
from region_agent.worker.data import order, streamed
from region_agent.worker.data.formats import FORMATS, check_format
from region_agent.worker.data.formats import lines as line_files
from region_agent.worker.data.formats import parquet as parquet_files
from region_agent.worker.data.index import BlockIndex, join_indexes
from region_agent.worker.data.shard import BatchStream, evaluation_batches
from region_agent.worker.data.sources import Sources
from region_agent.worker.data.spec import FormatSpec
from region_agent.worker.data.streamed import Rows, Streamed
from region_agent.worker.invocation import ShardFile

pa = pytest.importorskip("pyarrow", reason="needs geofed[data]")
pq = pytest.importorskip("pyarrow.parquet", reason="needs geofed[data]")

ROWS = 3000


@pytest.fixture(autouse=True)
def _closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads of the rows that a test reads end with it."""
    made: list[Rows] = []
    begin = Rows.__init__

    def begun(self: Rows, *given: Any) -> None:
        begin(self, *given)
        made.append(self)

    monkeypatch.setattr(Rows, "__init__", begun)
    yield
    for rows in made:
        rows.close()


def _table(rows: int = ROWS) -> Any:
    rng = np.random.default_rng(1)
    return pa.table(
        {
            "id": np.arange(rows),
            "x": pa.array(rng.standard_normal((rows, 3)).tolist(), pa.list_(pa.float32(), 3)),
            "flag": np.arange(rows) % 3 == 0,
            "name": [f"row {at}" for at in range(rows)],
            "gap": pa.array([None if at % 7 == 0 else at / 2 for at in range(rows)], pa.float64()),
        }
    )


def _parquet(path: Path) -> None:
    pq.write_table(_table(), path, row_group_size=40)


def _csv(path: Path) -> None:
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["id", "x", "name"])
        for at in range(ROWS):
            # A whole number in the first half, none in the second; lines end within some values.
            out.writerow([at, at if at < ROWS // 2 else at + 0.5, f'said "{at}",\nand left' if at % 3 == 0 else at])


WRITERS: dict[str, Callable[[Path], None]] = {"parquet": _parquet, "csv": _csv}


def _file(path: Path, **more: Any) -> ShardFile:
    return ShardFile(name=path.name, path=str(path), **more)


def _index(spec: FormatSpec, *paths: Path) -> BlockIndex:
    return FORMATS[spec.kind].index(spec, Sources([_file(path) for path in paths]))


def _rows(kind: str, *paths: Path, **options: Any) -> Rows:
    spec = FormatSpec(kind=kind, **options)
    index = BlockIndex.from_bytes(_index(spec, *paths).to_bytes())
    return Rows(spec, [_file(path) for path in paths], index)


def _ids(batch: Any) -> list[int]:
    return [int(one) for one in batch["id"]]


@pytest.fixture(params=sorted(WRITERS))
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    path = tmp_path / f"data.{request.param}"
    WRITERS[request.param](path)
    return request.param, path


def test_every_sample_is_read_once_by_any_number_of_workers(
    written: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, path = written
    monkeypatch.setattr(order, "SMALL_BYTES", 0)
    monkeypatch.setattr(streamed, "SMALL_BYTES", 0)
    steps: dict[int, list[list[int]]] = {}
    for workers in (1, 3):
        streams = [
            BatchStream(Streamed(rows, rows, 2), 1, "east", worker, workers, 30)
            for worker, rows in enumerate(_rows(kind, path) for _ in range(workers))
        ]
        steps[workers] = [
            [at for stream in streams for at in _ids(stream.batch(step))] for step in range(1, ROWS // 30 + 1)
        ]
    assert sorted(itertools.chain.from_iterable(steps[1])) == list(range(ROWS))
    assert steps[1] == steps[3]


def test_a_step_is_the_same_wherever_an_invocation_begins(written: tuple[str, Path]) -> None:
    kind, path = written

    def drawn(*steps: int) -> list[list[int]]:
        rows = _rows(kind, path)
        stream = BatchStream(Streamed(rows, rows, 2), 1, "east", 0, 1, 32)
        return [_ids(stream.batch(step)) for step in steps]

    assert drawn(1, 2, 3, 150)[2:] == [drawn(3)[0], drawn(150)[0]]


def test_a_batch_is_what_default_collate_makes_of_the_samples(written: tuple[str, Path]) -> None:
    rows = _rows(*written)
    indices = [5, 2999, 0, 41, 5]
    whole, single = rows.batch(indices), default_collate([rows[at] for at in indices])
    assert set(whole) == set(single)
    for name, column in whole.items():
        if isinstance(column, torch.Tensor):
            torch.testing.assert_close(column, single[name], equal_nan=True, rtol=0, atol=0)
            assert column.dtype == single[name].dtype
        else:
            assert column == single[name]


def test_values_have_the_types_of_torch(tmp_path: Path) -> None:
    _parquet(tmp_path / "a.parquet")
    row = _rows("parquet", tmp_path / "a.parquet")[-1]
    assert (row["id"].dtype, row["x"].dtype, row["flag"].dtype, row["gap"].dtype) == (
        torch.int64, torch.float32, torch.bool, torch.float32,
    )  # fmt: skip
    assert (int(row["id"]), row["name"], row["x"].shape) == (ROWS - 1, f"row {ROWS - 1}", (3,))
    assert torch.isnan(_rows("parquet", tmp_path / "a.parquet")[7]["gap"])
    _csv(tmp_path / "a.csv")
    rows = _rows("csv", tmp_path / "a.csv")
    assert rows.schema == {"id": "int64", "x": "double", "name": "string"}
    assert (rows[3]["name"], float(rows[2000]["x"]), float(rows[10]["x"])) == ('said "3",\nand left', 2000.5, 10.0)


def test_only_the_chosen_columns_are_read(tmp_path: Path) -> None:
    _parquet(tmp_path / "a.parquet")
    every, one = _rows("parquet", tmp_path / "a.parquet"), _rows("parquet", tmp_path / "a.parquet", columns=["x"])
    assert list(one[0]) == ["x"]
    every.batch(list(range(ROWS)))
    one.batch(list(range(ROWS)))
    assert one.sources.read_bytes < 0.7 * every.sources.read_bytes
    _csv(tmp_path / "a.csv")
    assert list(_rows("csv", tmp_path / "a.csv", columns=["x", "id"])[0]) == ["x", "id"]


def test_a_folder_is_read_without_the_files_that_systems_write_beside_the_data(tmp_path: Path) -> None:
    for name in ("a", "b"):
        _parquet(tmp_path / f"{name}.parquet")
    (tmp_path / "_SUCCESS").write_text("")
    (tmp_path / ".a.crc").write_text("")
    paths = sorted(tmp_path.iterdir())
    rows = _rows("parquet", *paths)
    assert len(rows) == 2 * ROWS
    assert int(rows[2 * ROWS - 1]["id"]) == ROWS - 1


def test_shards_of_several_regions_become_one(tmp_path: Path) -> None:
    _parquet(tmp_path / "a.parquet")
    pq.write_table(_table(50), tmp_path / "b.parquet")
    spec = FormatSpec(kind="parquet")
    one, other = _index(spec, tmp_path / "a.parquet"), _index(spec, tmp_path / "b.parquet")
    files = [_file(tmp_path / "a.parquet"), _file(tmp_path / "b.parquet", shard="north")]
    rows = Rows(spec, files, join_indexes([("south", 1, one), ("north", 1, other)]))
    assert (len(rows), int(rows[ROWS]["id"]), int(rows[-1]["id"])) == (ROWS + 50, 0, 49)
    pq.write_table(_table(50).drop_columns(["flag"]), tmp_path / "b.parquet")
    with pytest.raises(GeofedError, match=r"south and north differ: flag is bool and missing") as refused:
        join_indexes([("south", 1, one), ("north", 1, _index(spec, tmp_path / "b.parquet"))])
    assert refused.value.code == "SHARD_UNREADABLE"


def test_every_sample_of_a_test_split_is_evaluated_once(written: tuple[str, Path]) -> None:
    rows = _rows(*written)
    found: list[int] = []
    for worker in range(3):
        sizes, batches = evaluation_batches(Streamed(rows, rows, 2), worker, 3, 64)
        for batch in batches:
            found += _ids(batch)
        assert sum(sizes) == ROWS // 3
    assert sorted(found) == list(range(ROWS))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _scrambled(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[200:3000] = os.urandom(2800)
    path.write_bytes(bytes(content))


def _all_rows(path: Path) -> None:
    rows = _rows("parquet", path)
    rows.batch(list(range(0, ROWS, 40)))


@pytest.mark.parametrize("damage", [_cut, _scrambled, lambda path: path.write_bytes(b"")])
def test_a_damaged_file_is_refused_by_its_name(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = tmp_path / "data.parquet"
    _parquet(path)
    damage(path)
    with pytest.raises(GeofedError, match=r"data\.parquet: ") as refused:
        _all_rows(path)
    assert refused.value.code == "SHARD_UNREADABLE"


def test_a_file_that_changes_while_a_job_runs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    _csv(path)
    spec = FormatSpec(kind="csv")
    index = _index(spec, path)
    status = path.stat()
    rows = Rows(spec, [_file(path, version=f"{status.st_size}-{status.st_mtime_ns}")], index)
    assert int(rows[0]["id"]) == 0
    path.write_text(path.read_text().replace("1500", "15000"))
    with pytest.raises(GeofedError, match=r"data\.csv: has changed since the job began"):
        rows[ROWS - 1]


@pytest.mark.parametrize(
    ("content", "code", "text"),
    [
        ("", "SHARD_UNREADABLE", r"data\.csv: the first line has no names of columns"),
        ("a,b\n1,2\n3\n", "SHARD_UNREADABLE", r"data\.csv, byte 4: .*Expected 2 columns, got 1"),
        ("a,b\n1,2\n", "SHARD_UNREADABLE", r"data\.csv has no column 'id', only a, b"),
        ("id\n" + '"' + "x" * 40_000 + "\n", "LIMIT_EXCEEDED", r"data\.csv: the line at byte 3 has more than"),
    ],
)
def test_a_faulty_table_of_text_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, code: str, text: str
) -> None:
    monkeypatch.setattr(line_files, "_MOST_LINE_BYTES", 20_000)
    (tmp_path / "data.csv").write_text(content)
    with pytest.raises(GeofedError, match=text) as refused:
        _rows("csv", tmp_path / "data.csv", columns=["id"] if "id" in text or "id" in content else [])
    assert refused.value.code == code


def test_an_unknown_column_and_other_columns_than_before_are_refused(tmp_path: Path) -> None:
    _parquet(tmp_path / "a.parquet")
    with pytest.raises(GeofedError, match=r"a\.parquet has no column 'label', only id, x") as refused:
        _rows("parquet", tmp_path / "a.parquet", columns=["label"])
    assert refused.value.code == "SHARD_UNREADABLE"
    pq.write_table(_table(5).set_column(0, "id", pa.array(["a"] * 5)), tmp_path / "b.parquet")
    with pytest.raises(GeofedError, match=r"b\.parquet: column 'id' is string, and int64 in the files before it"):
        _rows("parquet", tmp_path / "a.parquet", tmp_path / "b.parquet")
    pq.write_table(pa.table({"when": pa.array([1], pa.timestamp("s"))}), tmp_path / "c.parquet")
    with pytest.raises(GeofedError, match=r"c\.parquet: column 'when' has the type timestamp\[ms\]"):
        _rows("parquet", tmp_path / "c.parquet")
    pq.write_table(pa.table({"id": pa.array([1, None])}), tmp_path / "d.parquet")
    with pytest.raises(GeofedError, match=r"d\.parquet: row group 0: values of column 'id' are null"):
        _rows("parquet", tmp_path / "d.parquet")[0]


def test_a_row_group_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    table = pa.table({"x": np.zeros(20_000_000, np.int8)})
    pq.write_table(table, tmp_path / "bomb.parquet", row_group_size=20_000_000, compression="zstd")
    assert (tmp_path / "bomb.parquet").stat().st_size < 1_000_000
    with pytest.raises(GeofedError, match=r"bomb\.parquet: row group 0 has 305 MiB of 256") as refused:
        _rows("parquet", tmp_path / "bomb.parquet")
    assert (refused.value.code, "row_group_size" in refused.value.hint) == ("LIMIT_EXCEEDED", True)


def test_text_that_a_dictionary_repeats_takes_no_more_memory_than_the_index_says(tmp_path: Path) -> None:
    text = "long " * 200_000
    pq.write_table(pa.table({"text": [text] * 300}), tmp_path / "a.parquet", compression="zstd")
    spec = FormatSpec(kind="parquet")
    index = _index(spec, tmp_path / "a.parquet")
    reader = FORMATS["parquet"].reader(spec, Sources([_file(tmp_path / "a.parquet")]), index)
    assert reader.load(0).nbytes < 4 * len(text)
    assert 300 * len(text) > parquet_files._MOST_GROUP_BYTES


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("parquett", "'parquett' is not one of csv, "),
        ({"kind": "parquet", "colums": ["x"]}, "Extra inputs are not permitted"),
    ],
)
def test_a_format_that_is_not_known_is_refused(format: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_format(FormatSpec.model_validate(format))


def test_an_index_is_made_once_and_again_when_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "data.csv"
    path.write_text("id\n1\n2\n")
    made = []
    plain = FORMATS["csv"].index
    monkeypatch.setattr(FORMATS["csv"], "index", lambda *given: made.append(1) or plain(*given))

    def counted() -> int:
        status = path.stat()
        version = f"{status.st_size}-{status.st_mtime_ns}"
        return Indexes(tmp_path / "kept").of(FormatSpec(kind="csv"), [_file(path, version=version)]).total

    assert (counted(), counted(), len(made)) == (2, 2, 1)
    path.write_text("id\n1\n2\n3\n")
    assert (counted(), len(made)) == (3, 2)
    path.write_text("id\n")
    with pytest.raises(GeofedError, match=r"data\.csv: there are no samples"):
        counted()


def test_a_link_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    _csv(tmp_path / "outside.csv")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").symlink_to(tmp_path / "outside.csv")
    file = ShardFile(name="a.csv", path=str(tmp_path / "in" / "a.csv"), folder=True)
    with pytest.raises(GeofedError, match=r"a\.csv is a link that leads out of its folder"):
        Indexes(tmp_path / "kept").of(FormatSpec(kind="csv"), [file])
