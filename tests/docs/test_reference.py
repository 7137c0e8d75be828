"""The references of the job file and of the region file say what the schemas say, and leave no key out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel

from control_plane.spec import JobSpec
from deploy.reference import Reference, job_reference, main, region_reference
from region_agent.config import RegionConfig

DOCS = Path(__file__).resolve().parents[2] / "docs"
WRITERS = pytest.mark.parametrize(
    ("write", "model"), [(job_reference, JobSpec), (region_reference, RegionConfig)], ids=["job", "region"]
)


def _keys(kind: Any, path: str = "") -> Iterator[str]:
    """Yield the path of every key of a model, other than of sections that have a heading."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        for field in kind.model_fields.values():
            dotted = f"{path}.{field.alias}".removeprefix(".")
            below = list(_keys(field.annotation, dotted))
            yield from below
            if path or not below:
                yield dotted
    elif get_origin(kind) is dict:
        yield from _keys(get_args(kind)[1], f"{path}.NAME")
    elif get_origin(kind) in (list, tuple):
        yield from _keys(get_args(kind)[0], f"{path}[]")
    else:
        for each in get_args(kind):
            yield from _keys(each, path)


def test_the_pages_are_what_the_schemas_say(tmp_path: Path) -> None:
    main(tmp_path)
    for page in ("job-reference.md", "region-reference.md", "chart-reference.md", "security-rpcs.md"):
        assert (DOCS / page).read_text() == (tmp_path / page).read_text(), "run `make docs`"


@WRITERS
def test_every_key_has_a_row(write: Callable[[], str], model: type[BaseModel]) -> None:
    told = set(re.findall(r"^\| `([^`]+)` \|", write(), re.MULTILINE))
    assert told - {"objective.minimize", "parallelism"} == set(_keys(model))


@pytest.mark.parametrize(
    "row",
    [
        "| `kind` | `TrainingJob` | required |",
        "| `train.seed` | integer 0 to 2^63 - 1 | 0 |",
        "| `train.learningRate.warmup` | number ≥ 0 and < 1 | 0 |",
        "| `objective.soft[].value` | number > 0 and ≤ 1 | 0.5 |",
        "| `regions.use` | list of strings | `[]` |",
        "| `advanced.wan.exchange` | `auto`, `synchronous`, `background` | `auto` |",
        "| `advanced.wan.interval` | `auto` or integer 1 to 2^31 - 1 | `auto` |",
        "| `function.slice` | `auto` or string, like `30s`, `10m`, `1h30m` | `auto` |",
        "| `capacity.memoryMb` | integer ≥ 128 | 2048 |",
        "| `datasets.NAME.splits.NAME.samples` | integer ≥ 0 | – |",
        "| `gateway.caFile` | path | – |",
        "| `channel.pathStyle` | boolean | `false` |",
        "| `prices.egressTo` | mapping of names to numbers ≥ 0 | `{}` |",
        "| `server.ports` | list of 2: integer 1 to 65535 | – |",
    ],
)
def test_types_ranges_and_defaults_are_in_plain_notation(row: str) -> None:
    assert f"\n{row} " in job_reference() + region_reference()


def test_a_key_without_a_description_is_an_error() -> None:
    section = {"description": "a section", "properties": {"key": {"type": "string"}}}
    with pytest.raises(ValueError, match=r"`section\.key` has no description"):
        Reference({"properties": {"section": section}}).page("")
