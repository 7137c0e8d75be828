from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.lasting import Lasting
from support.running import Running, digits_sites

from deploy.local import LocalFederation

REGIONS = ("frankfurt", "shanghai", "virginia")


def _three_regions(folder: Path) -> LocalFederation:
    return LocalFederation(folder / "federation", digits_sites(folder, REGIONS, workers=2))


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lasting]:
    """Three regions on loopback; shanghai runs two workers."""
    with Lasting(_three_regions, tmp_path_factory) as federation:
        yield federation


@pytest.fixture
def running(lasting: Lasting, request: pytest.FixtureRequest, tmp_path: Path) -> Running:
    """The module's three regions, in order and without a job."""
    return lasting.running(request, tmp_path)
