"""Samples of files with a format: what is read, how it is counted, and what is refused with the file's name."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate

from geofed_pb.errors import GeofedError
from region_agent.shards.indexing import Indexes
from region_agent.worker.data import order, streamed
from region_agent.worker.data.formats import FORMATS, check_format
from region_agent.worker.data.formats import lines as line_files
from region_agent.worker.data.formats import parquet as parquet_files
from region_agent.worker.data.index import BlockIndex, join_indexes, schema_digest
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


@pytest.mark.slow
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
        ("a,b,a\n1,2,3\n", "SHARD_UNREADABLE", r"data\.csv: two columns are called 'a'"),
        ("a;b\n1;2\n", "SHARD_UNREADABLE", r"data\.csv: the first line has one name only, 'a;b'"),
        # The rest of the file would be one value.
        ('a,b\n1,"2\n3,4\n', "SHARD_UNREADABLE", r"data\.csv, byte 4: a quotation mark is not closed"),
        ('a\n"1\n2\n', "SHARD_UNREADABLE", r"data\.csv, byte 2: a quotation mark is not closed"),
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


@pytest.mark.parametrize("delimiter", [";", "\t", "|", ","])
def test_values_are_between_the_delimiter_that_is_stated(tmp_path: Path, delimiter: str) -> None:
    """Also where they hold the others, quotation marks within values or around them, and line ends."""
    values = [["1", "x, y; z\tw|v"], ["2", '12" pizza'], ["3", 'of\n"two" lines'], ["4", ""]]
    with (tmp_path / "data.csv").open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([["a", "b"], *values])
    rows = _rows("csv", tmp_path / "data.csv", delimiter=delimiter)
    assert [[str(int(row["a"])), row["b"]] for row in (rows[at] for at in range(len(rows)))] == values
    (tmp_path / "plain.csv").write_text(delimiter.join("ab") + "\n" + delimiter.join(["1", '12" pizza']) + "\n")
    assert _rows("csv", tmp_path / "plain.csv", delimiter=delimiter)[0]["b"] == '12" pizza'


def test_the_wrong_delimiter_is_told_with_the_right_one(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("a\tb\n1\t2\n")
    with pytest.raises(GeofedError) as refused:
        _rows("csv", tmp_path / "data.csv")
    assert refused.value.hint == 'state what is between the values: `format: {kind: csv, delimiter: "\\t"}`'


def test_stated_types_make_regions_agree_whose_values_would_not(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("age,note,label\n61,seen,1\n47,,0\n")
    (tmp_path / "b.csv").write_text("age,note,label\n,,1\n52,,0\n")
    plain = FormatSpec(kind="csv")
    stated = FormatSpec(kind="csv", types={"age": "float64", "note": "string"})
    specs = (plain, stated)
    found = [[schema_digest(_index(spec, tmp_path / f"{name}.csv").schema) for name in "ab"] for spec in specs]
    assert found[0][0] != found[0][1]
    assert found[1][0] == found[1][1]
    rows = _rows("csv", tmp_path / "b.csv", types=stated.types)
    assert torch.isnan(rows[0]["age"])
    assert (rows[0]["note"], rows[1]["age"].item(), rows[0]["label"].dtype) == ("", 52.0, torch.int64)
    for types, columns, text in (
        ({"age": "int64"}, [], r"b\.csv, byte 15: values of column 'age' are missing, which int64 cannot hold"),
        ({"agee": "int64"}, [], r"b\.csv has no column 'agee' of those that jobs get"),
        ({"age": "float64"}, ["label"], r"b\.csv has no column 'age' of those that jobs get"),
    ):
        with pytest.raises(GeofedError, match=text) as refused:
            _rows("csv", tmp_path / "b.csv", types=types, columns=columns)
        assert refused.value.code == "SHARD_UNREADABLE"
    with pytest.raises(GeofedError, match=r"a\.csv, byte 15: .*invalid value 'seen'"):
        _rows("csv", tmp_path / "a.csv", types={"note": "float64"})


def test_a_number_too_large_for_a_tensor_is_refused_and_does_not_become_negative(tmp_path: Path) -> None:
    most = (1 << 63) - 1
    pq.write_table(pa.table({"id": pa.array([most, 5], pa.uint64())}), tmp_path / "a.parquet")
    assert [int(row["id"]) for row in (_rows("parquet", tmp_path / "a.parquet")[at] for at in (0, 1))] == [most, 5]
    pq.write_table(pa.table({"id": pa.array([most + 1], pa.uint64())}), tmp_path / "b.parquet")
    with pytest.raises(GeofedError, match="column 'id' are larger than int64 can hold") as refused:
        _rows("parquet", tmp_path / "b.parquet")[0]
    assert refused.value.code == "SHARD_UNREADABLE"


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


@pytest.mark.processes
def test_an_agent_loads_no_package_that_reads_data_until_it_has_such_data() -> None:
    program = "import sys, region_agent.daemon; print({'torch', 'pyarrow', 'PIL', 'tokenizers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "set()\n"


def _pixels(label: int, at: int) -> bytes:
    image = Image.new("RGB", (12 + at % 3, 10), (label * 100, at, 0))
    held = io.BytesIO()
    image.save(held, "PNG")
    return held.getvalue()


def _image_folder(folder: Path) -> list[ShardFile]:
    for label, name in enumerate(("cat", "dog")):
        (folder / name).mkdir(parents=True)
        for at in range(20):
            (folder / name / f"{at}.png").write_bytes(_pixels(label, at))
    (folder / "README.txt").write_text("not an image")
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [ShardFile(name=str(path.relative_to(folder)), path=str(path), folder=True) for path in paths]


def _of_files(files: list[ShardFile], **options: Any) -> Rows:
    spec = check_format(FormatSpec(**options))
    return Rows(spec, files, BlockIndex.from_bytes(FORMATS[spec.kind].index(spec, Sources(files)).to_bytes()))


def test_a_folder_of_images_is_labelled_by_its_folders(tmp_path: Path) -> None:
    files = _image_folder(tmp_path)
    rows = _of_files(files, kind="image-folder", size=8)
    assert (len(rows), rows.schema) == (40, {"image": "uint8", "label": "int64, cat dog"})
    batch = rows.batch([0, 39, 21])
    assert (batch["image"].shape, batch["image"].dtype, batch["label"].tolist()) == (
        (3, 3, 8, 8),
        torch.uint8,
        [0, 1, 1],
    )
    assert batch["image"][:, 0, 0, 0].tolist() == [0, 100, 100]
    single = default_collate([rows[at] for at in (0, 39, 21)])
    assert all(torch.equal(single[name], batch[name]) for name in batch)
    turned = _of_files(files, kind="image-folder", size=8, classes=["dog", "cat"])
    assert turned.batch([0, 39])["label"].tolist() == [1, 0]
    with pytest.raises(GeofedError, match="images of a batch have different sizes") as refused:
        _of_files(files, kind="image-folder").batch([0, 1, 2])
    assert refused.value.code == "TASK_INVALID"


def test_faulty_folders_of_images_are_refused_by_the_name_of_the_file(tmp_path: Path) -> None:
    files = _image_folder(tmp_path)
    with pytest.raises(GeofedError, match=r"dog/0\.png: 'dog' is none of the classes cat, bird"):
        _of_files(files, kind="image-folder", classes=["cat", "bird"])
    with pytest.raises(GeofedError, match=r"0\.png lies in no folder that names its class"):
        _of_files([_file(tmp_path / "cat" / "0.png")], kind="image-folder")
    (tmp_path / "cat" / "0.png").write_bytes(_pixels(0, 0)[:45])
    with pytest.raises(GeofedError, match=r"cat/0\.png: ") as refused:
        _of_files(files, kind="image-folder")[0]
    assert refused.value.code == "SHARD_UNREADABLE"


@pytest.mark.parametrize(("grey", "told"), [(0, 0), (255, 0), (256, 1), (32_768, 128), (65_535, 255)])
def test_an_image_of_16_bits_keeps_its_shades(tmp_path: Path, grey: int, told: int) -> None:
    """An X-ray: Pillow's own conversion makes white of all shades but the darkest 255."""
    (tmp_path / "lung").mkdir()
    Image.fromarray(np.full((4, 6), grey, np.uint16)).save(tmp_path / "lung" / "x.png")
    file = ShardFile(name="lung/x.png", path=str(tmp_path / "lung" / "x.png"), folder=True)
    image = _of_files([file], kind="image-folder")[0]["image"]
    assert (image.shape, image.dtype, image.unique().tolist()) == ((3, 4, 6), torch.uint8, [told])


@pytest.mark.parametrize("content", [b"", b"no image", b"II*\0"])
def test_what_is_no_image_is_refused_in_plain_words(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "x.png").write_bytes(content)
    file = ShardFile(name="cat/x.png", path=str(tmp_path / "cat" / "x.png"), folder=True)
    with pytest.raises(GeofedError, match=r"cat/x\.png: not an image of JPEG, PNG, WEBP, BMP, GIF$"):
        _of_files([file], kind="image-folder")[0]


@pytest.mark.slow
@pytest.mark.parametrize("side", [9_000, 20_000])
def test_an_image_with_very_many_pixels_is_refused_before_it_is_decoded(tmp_path: Path, side: int) -> None:
    (tmp_path / "cat").mkdir()
    whole = io.BytesIO()
    Image.new("1", (side, side)).save(whole, "PNG")
    (tmp_path / "cat" / "bomb.png").write_bytes(whole.getvalue())
    file = ShardFile(name="cat/bomb.png", path=str(tmp_path / "cat" / "bomb.png"), folder=True)
    with pytest.raises(GeofedError, match=r"cat/bomb\.png: the image has more than 64,000,000 pixels") as refused:
        _of_files([file], kind="image-folder", size=8)[0]
    assert refused.value.code == "LIMIT_EXCEEDED"


def _tar(path: Path, members: list[tuple[str, bytes]], **more: Any) -> ShardFile:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("README"), io.BytesIO())
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for key, value in more.items():
                setattr(info, key, value)
            archive.addfile(info, io.BytesIO(content) if not more else None)
    return _file(path)


def _npy(array: Any) -> bytes:
    held = io.BytesIO()
    np.save(held, array)
    return held.getvalue()


HUGE = _npy(np.zeros(3)).replace(b"(3,), }         ", b"(9999999999,), }")
"""It claims 80 GB."""


def _samples_of_tar(first: int, last: int) -> list[tuple[str, bytes]]:
    long = "a" * 150
    return [
        part
        for at in range(first, last)
        for part in (
            (f"{long}/{at:05}.cls", b"%d" % at),
            (f"{long}/{at:05}.json", json.dumps({"at": at}).encode()),
            (f"{long}/{at:05}.left.png", _pixels(at % 2, at % 100)),
            (f"{long}/{at:05}.x.npy", _npy(np.full(3, at, ">f4" if at % 2 else "<f4"))),
            (f"{long}/{at:05}.txt", f"ü {at}".encode()),
            (f"{long}/{at:05}.bin", os.urandom(at % 700)),
        )
    ]


@pytest.mark.slow
def test_samples_of_tar_shards_are_read_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "SMALL_BYTES", 0)
    files = [_tar(tmp_path / f"{at}.tar", _samples_of_tar(200 * at, 200 * at + 200)) for at in range(2)]
    rows = _of_files(files, kind="webdataset", size=6)
    assert len(rows) == 400
    assert len(rows.index) > 100
    row = rows[321]
    assert (row["__key__"][-6:], int(row["cls"]), row["json"], row["txt"]) == ("/00321", 321, {"at": 321}, "ü 321")
    assert (row["left.png"].shape, row["x.npy"].tolist(), len(row["bin"])) == ((3, 6, 6), [321.0] * 3, 321)
    streams = [BatchStream(Streamed(rows, rows, 2), 1, "east", worker, 2, 10, lambda found: found) for worker in (0, 1)]
    drawn = [int(one["cls"]) for step in range(1, 41) for stream in streams for one in stream.batch(step)]
    assert sorted(drawn) == list(range(400))


def _overwritten(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for at in range(20_000, len(content) - 2000, 512):
        content[at : at + 512] = b"x" * 512
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("members", "more", "code", "text"),
    [
        ([("../a.txt", b"")], {}, "SHARD_UNREADABLE", r"'\.\./a\.txt' leads out of the archive"),
        ([("/a.txt", b"")], {}, "SHARD_UNREADABLE", r"'/a\.txt' leads out of the archive"),
        ([("a.txt", b"")], {"type": tarfile.SYMTYPE, "linkname": "/etc"}, "SHARD_UNREADABLE", "not a plain file"),
        ([("a.txt", b"")], {"type": tarfile.CHRTYPE}, "SHARD_UNREADABLE", "not a plain file"),
        ([("a.txt", b""), ("b.cls", b"1")], {}, "SHARD_UNREADABLE", r"sample 'b' has cls, the first one txt"),
        ([("a.txt", b""), ("a.txt", b"")], {}, "SHARD_UNREADABLE", "sample 'a' has too many files"),
        ([("a.npy", _npy(np.zeros(3))[:-8])], {}, "SHARD_UNREADABLE", r"s\.tar, a\.npy: EOF"),
        ([("a.npy", _npy(np.array(["b"])))], {}, "SHARD_UNREADABLE", r"s\.tar, a\.npy: an array of <U1, "),
        ([("a.npy", HUGE)], {}, "SHARD_UNREADABLE", r"s\.tar, a\.npy: not an array"),
        ([("a.npy", _npy(np.array([{}], object)))], {}, "SHARD_UNREADABLE", r"s\.tar, a\.npy: not an array"),
        ([("a.cls", b"one")], {}, "SHARD_UNREADABLE", r"s\.tar, a\.cls: invalid literal"),
        ([("a.json", b"[" * 100_000)], {}, "SHARD_UNREADABLE", r"s\.tar, a\.json: "),
    ],
)  # fmt: skip
def test_faulty_tar_shards_are_refused_by_the_name_of_the_file(
    tmp_path: Path, members: list[tuple[str, bytes]], more: dict[str, Any], code: str, text: str
) -> None:
    file = _tar(tmp_path / "s.tar", members, **more)
    with pytest.raises(GeofedError, match=text) as refused:
        _of_files([file], kind="webdataset")[0]
    assert refused.value.code == code
    assert "s.tar" in refused.value.message


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(path.read_bytes()[:30_000]), _overwritten])
def test_damaged_tar_shards_are_refused(tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    file = _tar(tmp_path / "s.tar", _samples_of_tar(0, 50))
    damage(tmp_path / "s.tar")
    with pytest.raises(GeofedError, match=r"s\.tar: ") as refused:
        _of_files([file], kind="webdataset")
    assert refused.value.code == "SHARD_UNREADABLE"
    (tmp_path / "s.tar.gz").write_bytes(b"")
    with pytest.raises(GeofedError, match=r"s\.tar\.gz: not a \.tar file"):
        _of_files([_file(tmp_path / "s.tar.gz")], kind="webdataset")


LINES = [f"line {at} of a text with ü in it\n" for at in range(4000)]


def _bytes_of(batch: dict[str, torch.Tensor]) -> list[list[int]]:
    kept = [row[row >= 0].tolist() for row in batch["labels"]]
    assert all(ids[: len(row)].tolist() == row for ids, row in zip(batch["input_ids"], kept, strict=True))
    return kept


def test_text_is_packed_into_sequences_that_lose_nothing(tmp_path: Path) -> None:
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    paths[0].write_text("".join(LINES))
    paths[1].write_text("short")
    rows = _of_files([_file(path) for path in paths], kind="text", sequence=64)
    found = list(itertools.chain.from_iterable(_bytes_of(rows.batch(list(range(len(rows)))))))
    whole = [*"".join(LINES).encode(), 256, *b"short", 256]
    assert found == whole
    assert len(rows) < 1.02 * len(whole) / 64 + 2
    assert rows[-1]["input_ids"].tolist()[:6] == [*b"short", 256]
    assert rows[-1]["labels"][6:].eq(-100).all()


def test_lines_of_json_are_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n".join(json.dumps({"id": at, "body": text}) for at, text in enumerate(LINES)))
    rows = _of_files([_file(path)], kind="jsonl", sequence=100, field="body")
    found = list(itertools.chain.from_iterable(_bytes_of(rows.batch(list(range(len(rows)))))))
    assert found == [one for text in LINES for one in (*text.encode(), 256)]


@pytest.mark.parametrize("line", ["{", "[]", '{"text": 1}', '{"other": "x"}', "[" * 100_000])
def test_a_line_that_is_no_document_is_refused_with_its_place(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(GeofedError, match=r"a\.jsonl, byte 17: ") as refused:
        _of_files([_file(path)], kind="jsonl")
    assert refused.value.code == "SHARD_UNREADABLE"


def test_a_tokenizer_makes_the_tokens(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs geofed[data]")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["</s>"], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator(LINES, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in LINES))
    rows = _of_files([_file(path)], kind="jsonl", sequence=256)
    rows.use_tokenizer(tmp_path / "tokenizer.json")
    batch = rows.batch(list(range(len(rows))))
    assert batch["input_ids"].shape[1] < 128
    assert int(batch["labels"].max()) < 400
    text = "".join(made.decode(row, skip_special_tokens=True) for row in _bytes_of(batch))
    # A character that two sequences part is left out.
    assert len(text) > 0.99 * len("".join(LINES))
    assert sum(row.count(made.token_to_id("</s>")) for row in _bytes_of(batch)) == len(LINES)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(GeofedError, match=r"other\.json is no file of a tokenizer"):
        rows.use_tokenizer(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("parquett", "'parquett' is not one of csv, "),
        ({"kind": "parquet", "colums": ["x"]}, "Extra inputs are not permitted"),
        ({"kind": "parquet", "size": 8}, "'size' has no meaning for parquet"),
        ({"kind": "parquet", "types": {"a": "int64"}}, "'types' has no meaning for parquet"),
        ({"kind": "csv", "types": {"a": "int32"}}, "'int64', 'float64', 'bool' or 'string'"),
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
