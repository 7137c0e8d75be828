"""Datasets that a region offers to the federation, which are those with readable files, and their sizes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import structlog

from geofed_pb.errors import GeofedError
from geofed_pb.tasks import awaited
from region_agent.config import DatasetConfig, RegionConfig, load_config
from region_agent.shards.indexing import Indexes, counted
from region_agent.shards.listing import shard_bytes
from region_agent.shards.reading import shard_files
from region_agent.worker.data.index import schema_digest

__all__ = ["OfferedDatasets"]

_log = structlog.get_logger("geofed.data")
_RECHECK_SECONDS = 30.0
"""Interval of checks of datasets that could not be read."""
_FOLLOW_SECONDS = 0.5
"""Interval of looks at the region file; a person who has changed it waits for the effect."""
_CHECK_TIMEOUT_SECONDS = 20.0
"""Timeout of a check, so that a store that does not answer does not delay the agent's start."""


class OfferedDatasets:
    """Checks each dataset when the agent starts, and those that could not be read at an interval."""

    def __init__(self, config: RegionConfig, changed: Callable[[], None], indexes: Indexes) -> None:
        """``changed`` is called when a dataset has become readable."""
        self._config, self._changed, self._indexes = config, changed, indexes
        self.withheld: dict[str, GeofedError] = {}
        """Datasets that cannot be read, with the error."""
        self.sizes: dict[str, dict[str, int]] = {}
        """Bytes of each split, by dataset; empty for data that must stay in the region."""
        self.schemas: dict[str, str] = {}
        """Digests of what the training samples consist of, by dataset, for those with a format."""
        self._checks: dict[str, asyncio.Future[dict[str, int]]] = {}
        """Checks that have timed out but still run; the next check of the dataset waits for the same one."""

    @property
    def condition(self) -> str:
        """Text about the datasets that are not offered; empty if there are none."""
        return "; ".join(f"dataset {name} is not offered: {error}" for name, error in sorted(self.withheld.items()))

    async def check(self) -> None:
        """Check all datasets concurrently."""
        await self._check(self._config.datasets)

    async def follow(self, file: Path) -> None:
        """Take over the datasets of the region file whenever it changes, without end. Its other keys, and a file that
        is not valid, have no effect before the agent starts again."""
        seen, known = _version_of(file), self._config.model_copy()
        while True:
            await asyncio.sleep(_FOLLOW_SECONDS)
            if (now := _version_of(file)) == seen:
                continue
            seen = now
            try:
                fresh = await asyncio.to_thread(load_config, file)
            except GeofedError as error:
                _log.warning("the changed region file has no effect", error=str(error), hint=error.hint)
                continue
            if fresh.model_copy(update={"datasets": known.datasets}) != known:
                _log.warning("of the changed region file only the datasets have an effect until the agent starts again")
            await self.take(fresh.datasets)

    async def take(self, datasets: Mapping[str, DatasetConfig]) -> None:
        """Offer these datasets from now on. Jobs that run keep their files."""
        held = self._config.datasets
        if datasets == held:
            return
        for name in set(held) - set(datasets):
            # The withheld and the sizes first: they name only datasets that there are.
            self.withheld.pop(name, None)
            self.sizes.pop(name, None)
            self.schemas.pop(name, None)
            del held[name]
        held.update(datasets)
        _log.info("the region file has changed", datasets=sorted(held))
        await self.check()
        self._changed()

    async def keep_checking(self) -> None:
        """Check the withheld datasets at an interval, without end."""
        while True:
            await asyncio.sleep(_RECHECK_SECONDS)
            before = set(self.withheld)
            await self._check(before)
            if set(self.withheld) != before:
                self._changed()

    async def _check(self, names: Iterable[str]) -> None:
        chosen = sorted(names)
        for name, error in zip(chosen, await asyncio.gather(*map(self._error_of, chosen)), strict=True):
            if error is None and self.withheld.pop(name, None) is not None:
                _log.info("a dataset can be read now, and is offered to the federation", dataset=name)
            elif error is not None and name not in self.withheld:
                _log.warning(
                    "a dataset is not offered to the federation", dataset=name, error=str(error), hint=error.hint
                )
                self.withheld[name] = error

    async def _error_of(self, name: str) -> GeofedError | None:
        check = self._checks.pop(name, None) or awaited(asyncio.to_thread(self._sizes_of, name))
        try:
            self.sizes[name] = await asyncio.wait_for(asyncio.shield(check), _CHECK_TIMEOUT_SECONDS)
        except TimeoutError:
            self._checks[name] = check
            text = f"the store of dataset {name} did not answer within {_CHECK_TIMEOUT_SECONDS:.0f} s"
            if self._config.datasets[name].format is not None:
                text = f"the samples of dataset {name} are being counted"
            return GeofedError("SHARD_UNREADABLE", text)
        except GeofedError as error:
            return error
        except OSError as error:
            return GeofedError("SHARD_UNREADABLE", str(error))
        return None

    def _sizes_of(self, name: str) -> dict[str, int]:
        """Return the bytes of each split; blocks."""
        dataset = self._config.datasets[name]
        found = shard_files(dataset, self._config.stores)
        if dataset.format is not None:
            indexes = {split: self._indexes.of(dataset.format, files) for split, files in found.items()}
            known = counted(dataset, indexes)
            if self._config.datasets.get(name) is dataset:
                if (train := indexes.get("train")) is not None:
                    self.schemas[name] = schema_digest(train.schema)
                self._config.datasets[name] = known
        return {} if dataset.residency == "region" else shard_bytes(found)


def _version_of(file: Path) -> tuple[int, int] | None:
    """Return what changes with the content of a file; None: it is missing, as while an editor replaces it."""
    try:
        told = file.stat()
    except OSError:
        return None
    return told.st_mtime_ns, told.st_size
