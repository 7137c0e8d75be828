from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.running import Running, digits_sites

from deploy.local import LocalFederation

REGIONS = ("frankfurt", "shanghai", "virginia")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """Three regions on loopback; shanghai runs two workers."""
    sites = digits_sites(tmp_path, REGIONS, workers=2)
    with LocalFederation(tmp_path / "federation", sites) as federation:
        yield Running(federation, tmp_path)
