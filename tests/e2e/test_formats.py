"""A job over data with a format: no code reads it, and no number of samples is stated."""

from __future__ import annotations

import copy
import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.offered import counted, offered
from support.running import Federation, Running, digits_sites, eventually
from support.stores import BUCKET, s3_server

from deploy.local import RegionSite
from tests.e2e.conftest import PAIR

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

pa = pytest.importorskip("pyarrow", reason="needs geofed[data]")
pq = pytest.importorskip("pyarrow.parquet", reason="needs geofed[data]")

SAMPLES = {"shanghai": 600, "virginia": 400}
_BLOCKS = re.findall(
    r"^```python\n(.*?)^```$", (Path(__file__).parents[2] / "docs" / "data.md").read_text(), re.MULTILINE | re.DOTALL
)
TABLE_TASK, IMAGE_TASK, TEXT_TASK = _BLOCKS[:3]
ROWS_TASK = (
    "\n".join([TABLE_TASK, _BLOCKS[3]])
    + """

prefetch = 4
num_workers = 2


def loss(model, batch):
    x, y = batch
    return torch.nn.functional.mse_loss(model(10 * x).squeeze(1), y)
"""
)
"""Those of the documentation; the last one makes samples of the rows."""


def _columns(region: str) -> dict[str, Any]:
    a, b = np.random.default_rng(PAIR.index(region)).standard_normal((2, SAMPLES[region]))
    return {"a": a, "b": b, "y": 3 * a - 2 * b + 1, "note": [f"of {region}"] * SAMPLES[region]}


def _parquet(folder: Path, region: str) -> str:
    folder.mkdir()
    table = pa.table(_columns(region))
    pq.write_table(table[:100], folder / "part-0.parquet", row_group_size=10)
    pq.write_table(table[100:], folder / "part-1.parquet", row_group_size=10)
    return f"{folder}/"


def _csv(folder: Path, region: str) -> str:
    columns = _columns(region)
    with folder.with_suffix(".csv").open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(columns)
        out.writerows(zip(*columns.values(), strict=True))
    return str(folder.with_suffix(".csv"))


def _check_learned(running: Running, task: str, dataset: str, *settings: str, loss: float = 0.05) -> None:
    eventually(
        lambda: {name: counted(running, name, dataset).get("train") for name in PAIR} == SAMPLES,
        "the samples are counted",
        20,
    )
    few = ("train.end.epochs=2", "train.workers=2", "train.batch=10", "function.slice=2s")
    job = running.submit(f"data.dataset={dataset}", *few, *settings, task=task)
    described = running.wait_end(job)
    assert described["state"] == "succeeded", described.get("error") or described
    assert {part["region"] for part in described["partitions"]} == set(PAIR)
    assert described["result"]["metrics"]["loss"] < loss, described["result"]


@pytest.mark.parametrize("write", [_parquet, _csv])
def test_tables_are_trained_on_without_code_that_reads_them(
    running_pair: Running, tmp_path: Path, write: Callable[[Path, str], str]
) -> None:
    kind = write.__name__.removeprefix("_")
    datasets = {}
    for name in PAIR:
        uri = write(tmp_path / f"{name}-{kind}", name)
        datasets[name] = {"format": kind, "splits": {split: {"uri": uri} for split in ("train", "test")}}
    with offered(running_pair, datasets, kind):
        _check_learned(running_pair, TABLE_TASK, kind)


def test_processes_make_the_samples_that_the_worker_would_make(running_pair: Running) -> None:
    """By the task of the documentation, which draws random numbers, in slices."""
    (task,) = (block for block in _BLOCKS if "num_workers = 2" in block)
    settings = ("data.dataset=numbers", "task.config={}", "train.batch=4", "train.seed=3", "train.workers=2")
    settings = (*settings, "train.end={steps: 24}", "wan.interval=8", "wan.exchange=synchronous", "wan.codec=fp32")
    settings = (*settings, "function.slice=1s")
    found = []
    for text in (task, task.replace("num_workers = 2", "num_workers = 0")):
        ended = running_pair.wait_end(running_pair.submit(*settings, task=text))
        assert ended["state"] == "succeeded", ended.get("error") or ended
        found.append(ended["result"]["digests"]["model_parameters"])
    assert found[0] == found[1]


def _s3_federation(folder: Path, endpoint: str) -> Federation:
    """Two regions whose further dataset, `table`, is in a store."""
    stores = {"here": {"endpointUrl": endpoint, "region": "us-east-1"}}
    sites = digits_sites(folder, PAIR, workers=2, stores=stores)
    for site in sites:
        splits = {split: {"uri": f"s3://{BUCKET}/{site.name}/"} for split in ("train", "test")}
        form = {"kind": "parquet", "columns": ["a", "b", "y"]}
        site.config["datasets"]["table"] = {"format": form, "store": "here", "splits": splits}
    return Federation(folder / "federation", sites)


def test_objects_of_a_store_are_read_in_parts(tmp_path: Path) -> None:
    boto3 = pytest.importorskip("boto3")
    with s3_server() as server:
        client = boto3.client("s3", endpoint_url=server.endpoint, region_name="us-east-1")
        for name in PAIR:
            for file in Path(_parquet(tmp_path / name, name)).iterdir():
                client.upload_file(str(file), BUCKET, f"{name}/{file.name}")
        client.close()
        with _s3_federation(tmp_path, server.endpoint) as federation:
            _check_learned(Running(federation, tmp_path), ROWS_TASK, "table")
            # Row groups of 10 samples are read by themselves.
            assert server.counts()["gets"] > 2 * 100


def _image_folder(folder: Path, region: str) -> dict[str, Any]:
    """Dark crows and bright herons."""
    rng = np.random.default_rng(PAIR.index(region))
    for at in range(SAMPLES[region]):
        name, light = ("crow", 40) if at % 2 else ("heron", 160)
        file = folder / name / f"{at}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(light, light + 60, (9, 7, 3), np.uint8)).save(file)
    form = {"kind": "image-folder", "size": 32, "classes": ["crow", "heron"]}
    return {"format": form, "splits": {split: {"uri": f"{folder}/"} for split in ("train", "test")}}


def _tokenizer() -> str:
    tokenizers = pytest.importorskip("tokenizers", reason="needs geofed[data]")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        ["the wire hums"],
        tokenizers.trainers.BpeTrainer(
            vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    return str(made.to_str())


def _documents(folder: Path, region: str) -> dict[str, Any]:
    folder.mkdir()
    lines = [json.dumps({"body": "the wire hums " * 9}) for _ in range(SAMPLES[region])]
    # Of 127 bytes each, with the end of the document: samples of 127 bytes are as many.
    (folder / "a.jsonl").write_text("\n".join(lines))
    form = {"kind": "jsonl", "field": "body", "sequence": 127}
    return {"format": form, "splits": {split: {"uri": f"{folder}/a.jsonl"} for split in ("train", "test")}}


@pytest.mark.parametrize("kind", ["images", "documents"])
def test_images_and_text_are_trained_on_without_code_that_reads_them(
    running_pair: Running, tmp_path: Path, kind: str
) -> None:
    write, task, loss = {
        "images": (_image_folder, IMAGE_TASK, 0.1),
        "documents": (_documents, f'tokenizer = "tokenizer.json"\n{TEXT_TASK}', 1.0),
    }[kind]
    if kind == "documents":
        (running_pair.job_folder() / "tokenizer.json").write_text(_tokenizer())
    with offered(running_pair, {name: write(tmp_path / name, name) for name in PAIR}, kind):
        _check_learned(running_pair, task, kind, loss=loss)


def test_regions_with_other_columns_take_no_part_in_one_job(running_pair: Running, tmp_path: Path) -> None:
    datasets = {}
    for name in PAIR:
        folder = Path(_parquet(tmp_path / name, name))
        form: dict[str, Any] = {"kind": "parquet"} | ({"columns": ["a", "y"]} if name == "virginia" else {})
        datasets[name] = {"format": form, "splits": {"train": {"uri": f"{folder}/"}}}
    with offered(running_pair, datasets, "differing"):
        eventually(
            lambda: all(counted(running_pair, name, "differing") for name in PAIR), "the samples are counted", 20
        )
        job = running_pair.job_folder(TABLE_TASK) / "job.yaml"
        declined = running_pair.federation.control_plane(
            "submit", str(job), "--set", "data.dataset=differing", check=False
        )
        assert declined.returncode == 9, declined.stderr
        assert "the samples of differing in virginia differ from those in shanghai" in declined.stderr


def _lending(folder: Path) -> Federation:
    """Shanghai and Virginia have data and no worker, Oslo workers and no data."""
    sites = digits_sites(folder, PAIR)
    for site in sites:
        uri = _parquet(folder / f"{site.name}-lent", site.name)
        splits = {split: {"uri": uri} for split in ("train", "test")}
        site.config["datasets"]["lent"] = {"format": "parquet", "residency": ["oslo"], "splits": splits}
        site.config["capacity"] = {"workers": 0}
    oslo = copy.deepcopy(sites[0].config) | {"datasets": {}, "capacity": {"workers": 2, "memoryMb": 1024}}
    oslo["channel"]["path"] = str(folder / "channels" / "oslo")
    return Federation(folder / "federation", [*sites, RegionSite("oslo", oslo)])


def test_shards_of_two_regions_are_read_as_one_where_there_are_workers(tmp_path: Path) -> None:
    with _lending(tmp_path) as federation:
        running = Running(federation, tmp_path)
        eventually(
            lambda: all(counted(running, name, "lent").get("train") == SAMPLES[name] for name in PAIR),
            "the samples are counted",
            20,
        )
        set_to = ("data.dataset=lent", "data.residency=anywhere", "train.end.epochs=2", "train.batch=10")
        described = running.wait_end(running.submit(*set_to, task=TABLE_TASK))
        assert described["state"] == "succeeded", described.get("error") or described
        assert [part["region"] for part in described["partitions"]] == ["oslo"]
        assert described["result"]["metrics"]["loss"] < 0.05, described["result"]
        (region,) = described["result"]["regions"]
        assert region["metrics_samples"] == sum(SAMPLES.values()), region


def test_a_dataset_that_cannot_be_counted_is_notoffered(running_pair: Running, tmp_path: Path) -> None:
    file = tmp_path / "table.parquet"
    file.write_bytes(b"PAR1 no more PAR1")
    splits = {"train": {"uri": str(file)}}
    with offered(running_pair, {"shanghai": {"format": "parquet", "splits": splits}}, "broken"):
        eventually(
            lambda: "table.parquet: " in running_pair.federation.log("agent-shanghai"), "the log names the file", 20
        )
        assert not counted(running_pair, "shanghai", "broken")
