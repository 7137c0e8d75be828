"""Whose a sample is, by a column or a folder of the data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from geofed_pb.errors import GeofedError
from region_agent.shards.indexing import Indexes
from region_agent.worker.data.formats import check_format
from region_agent.worker.data.index import BlockIndex, join_indexes
from region_agent.worker.data.shard import split_clients
from region_agent.worker.data.spec import FormatSpec
from region_agent.worker.data.streamed import Rows, Streamed
from region_agent.worker.invocation import ShardFile

pa = pytest.importorskip("pyarrow", reason="needs geofed[data]")
pq = pytest.importorskip("pyarrow.parquet", reason="needs geofed[data]")

IDS = [3, 3, 1, 7, 1, 1, 9, 3]


def _files(folder: Path) -> list[ShardFile]:
    return [
        ShardFile(name=str(path.relative_to(folder)), path=str(path), folder=True, size=path.stat().st_size)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]


def _index(tmp_path: Path, spec: dict[str, Any]) -> BlockIndex:
    made = Indexes(tmp_path / "kept").of(check_format(FormatSpec.model_validate(spec)), _files(tmp_path / "in"))
    # It has the clients' names.
    kept = [tmp_path / "kept", *(tmp_path / "kept").iterdir()]
    assert not [path for path in kept if path.stat().st_mode & 0o077]
    return BlockIndex.from_bytes(made.to_bytes())


def _write(tmp_path: Path, kind: str, ids: list[Any], column: str = "patient") -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    if kind == "csv":
        lines = [f"{at},{who}" for at, who in enumerate(ids)]
        (folder / "a.csv").write_text("\n".join([f"x,{column}", *lines[:5]]) + "\n")
        (folder / "b.csv").write_text("\n".join([f"x,{column}", *lines[5:]]) + "\n")
    else:
        table = pa.table({"x": range(len(ids)), column: ids})
        pq.write_table(table[:5], folder / "a.parquet", row_group_size=2)
        pq.write_table(table[5:], folder / "b.parquet", row_group_size=2)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("as_text", [False, True], ids=["integers", "text"])
def test_a_column_names_the_client_and_is_not_given_to_jobs(tmp_path: Path, kind: str, as_text: bool) -> None:
    _write(tmp_path, kind, [f"p{one}" for one in IDS] if as_text else list(IDS))
    spec = {"kind": kind, "columns": ["x"], "clients": {"column": "patient"}}
    index = _index(tmp_path, spec)
    assert index.client_count == 4
    assert index.clients is not None
    assert index.clients.tolist() == [0, 0, 1, 2, 1, 1, 3, 0]
    rows = Rows(FormatSpec.model_validate(spec), _files(tmp_path / "in"), index)
    assert sorted(rows[3]) == ["x"]
    found = split_clients(Streamed(rows, rows, 2))
    assert found is not None
    assert found.tolist() == index.clients.tolist()
    rows.close()
    two = join_indexes([("east", 2, index), ("west", 2, index)])
    assert two.client_count == 8, "clients of two shards are different ones"


@pytest.mark.parametrize("columns", [[], ["x"], ["x", "patient"]], ids=str)
def test_a_column_of_csv_is_text_unless_its_type_is_stated(tmp_path: Path, columns: list[str]) -> None:
    _write(tmp_path, "csv", ["07", "7", "07"])
    spec = {"kind": "csv", "columns": columns, "clients": {"column": "patient"}}
    assert _index(tmp_path, spec).client_count == 2
    for kind, clients in (("string", 2), ("int64", 1)):
        index = _index(tmp_path, {**spec, "types": {"patient": kind}})
        assert index.client_count == clients
        assert ("patient" in index.schema) == (columns != ["x"])
    with pytest.raises(GeofedError, match="has no column 'other' of those that jobs get"):
        _index(tmp_path, {**spec, "types": {"other": "string"}})


def test_a_folder_is_a_client_and_so_is_a_file_in_none(tmp_path: Path) -> None:
    for name, count in {"anna/1.csv": 2, "anna/2.csv": 1, "bert/1.csv": 3, "carl.csv": 1}.items():
        file = tmp_path / "in" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x\n" + "5\n" * count)
    index = _index(tmp_path, {"kind": "csv", "clients": "folder"})
    assert index.clients is not None
    assert index.clients.tolist() == [0, 0, 0, 1, 1, 1, 2]


def test_classes_of_images_lie_in_the_folders_of_clients(tmp_path: Path) -> None:
    for name in ("anna/crow/1.png", "anna/heron/1.png", "bert/crow/1.png"):
        file = tmp_path / "in" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(file)
    spec = {"kind": "image-folder", "clients": "folder"}
    index = _index(tmp_path, spec)
    assert index.clients is not None
    assert index.clients.tolist() == [0, 0, 1]
    rows = Rows(FormatSpec.model_validate(spec), _files(tmp_path / "in"), index)
    assert [int(rows[at]["label"]) for at in range(3)] == [0, 1, 0]
    rows.close()


@pytest.mark.parametrize(
    ("ids", "column", "text"),
    [
        (IDS, "pateint", r"has no column 'patient'"),
        (["a", None, "b"], "patient", r"values of column 'patient' are null"),
        (["a", "", "b"], "patient", r"a sample has no 'patient', which names its client"),
        ([1.5, 2.5], "patient", r"has the type double, which names no clients"),
    ],
)
def test_a_column_that_names_no_clients_is_refused(tmp_path: Path, ids: list[Any], column: str, text: str) -> None:
    _write(tmp_path, "parquet", ids, column)
    with pytest.raises(GeofedError, match=text):
        _index(tmp_path, {"kind": "parquet", "columns": ["x"], "clients": {"column": "patient"}})


def test_only_tables_have_columns(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="image-folder has no columns: state `clients: folder`"):
        check_format(FormatSpec.model_validate({"kind": "image-folder", "clients": {"column": "a"}}))


def test_an_index_with_other_numbers_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, "csv", IDS)
    index = _index(tmp_path, {"kind": "csv", "clients": {"column": "patient"}})
    for wrong in (np.zeros(3, np.int32), np.full(8, -1, np.int32)):
        with pytest.raises(GeofedError, match="not an index of a split"):
            BlockIndex.from_bytes(replace(index, clients=wrong).to_bytes())
