"""Which of its datasets a region offers to the federation, and how large they are: those whose files are there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from geofed_pb.errors import GeofedError
from region_agent.config import RegionConfig
from region_agent.shards.listing import shard_bytes
from region_agent.shards.reading import shard_files

__all__ = ["OfferedDatasets"]

_log = logging.getLogger("geofed.data")
_LOOK_AGAIN_SECONDS = 30.0
_LONGEST_LOOK_SECONDS = 20.0
"""A store that does not answer must not keep the agent from the control plane, nor its jobs from their workers."""


class OfferedDatasets:
    """Looks at each dataset when the agent starts, and at those that could not be read from time to time."""

    def __init__(self, config: RegionConfig, changed: Callable[[], None]) -> None:
        """``changed`` is called when there is more to offer than at the last look."""
        self._config, self._changed = config, changed
        self.withheld: dict[str, GeofedError] = {}
        """By dataset: why it cannot be read."""
        self.sizes: dict[str, dict[str, int]] = {}
        """Bytes of the splits that may be processed elsewhere, by dataset."""
        self._looks: dict[str, asyncio.Future[dict[str, int]]] = {}
        """That have not come to an end in time: another one would wait for the same."""

    @property
    def condition(self) -> str:
        """What is withheld, in words; empty: nothing."""
        return "; ".join(f"dataset {name} is not offered: {error}" for name, error in sorted(self.withheld.items()))

    async def look(self) -> None:
        """At all datasets, at once."""
        await self._look_at(self._config.datasets)

    async def keep_looking(self) -> None:
        """For ever, at what is withheld."""
        while True:
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)
            before = set(self.withheld)
            await self._look_at(before)
            if set(self.withheld) != before:
                self._changed()

    async def _look_at(self, names: Iterable[str]) -> None:
        chosen = sorted(names)
        for name, error in zip(chosen, await asyncio.gather(*map(self._error_of, chosen)), strict=True):
            if error is None and self.withheld.pop(name, None) is not None:
                _log.info("dataset %s can be read now, and is offered to the federation", name)
            elif error is not None and name not in self.withheld:
                _log.warning("dataset %s is not offered to the federation: %s; %s", name, error, error.hint)
                self.withheld[name] = error

    async def _error_of(self, name: str) -> GeofedError | None:
        look = self._looks.pop(name, None) or asyncio.ensure_future(asyncio.to_thread(self._sizes_of, name))
        try:
            self.sizes[name] = await asyncio.wait_for(asyncio.shield(look), _LONGEST_LOOK_SECONDS)
        except TimeoutError:
            self._looks[name] = look
            text = f"the store of dataset {name} did not answer within {_LONGEST_LOOK_SECONDS:.0f} s"
            return GeofedError("SHARD_UNREADABLE", text)
        except GeofedError as error:
            return error
        except OSError as error:
            return GeofedError("SHARD_UNREADABLE", str(error))
        return None

    def _sizes_of(self, name: str) -> dict[str, int]:
        """Blocking."""
        dataset = self._config.datasets[name]
        found = shard_files(dataset, self._config.stores)
        return {} if dataset.residency == "region" else shard_bytes(found)
