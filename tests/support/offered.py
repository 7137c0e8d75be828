"""Datasets that the regions of a running federation offer for a while."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.running import Running

__all__ = ["counted", "offered"]


@contextmanager
def offered(running: Running, datasets: dict[str, dict[str, Any]], named: str) -> Iterator[None]:
    """Each region offers a further dataset."""
    files = {name: running.federation.region_state(name) / "region.yaml" for name in datasets}
    before = {name: file.read_text() for name, file in files.items()}
    try:
        for name, file in files.items():
            told = json.loads(before[name])
            told["datasets"][named] = datasets[name]
            file.write_text(json.dumps(told))
        yield
    finally:
        for name, file in files.items():
            file.write_text(before[name])


def counted(running: Running, region: str, dataset: str) -> dict[str, int]:
    told = json.loads(running.federation.control_plane("region", "describe", region, "-o", "json").stdout)["data"]
    (held,) = [one for one in told["datasets"] if one["name"] == dataset] or [{"splits": {}}]
    return {split: part["samples"] for split, part in held["splits"].items()}
