"""Tensors that a parameter server does not exchange: the base of the model, for workers whose task does not make it and
for the export, and first values of those that stay in the region."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from geofed_pb.files.durable import write_durably
from sync import framing
from sync.channel import Channel
from sync.framing import Array
from sync.layout import Layout
from sync.ps.execution.export import base_in, local_in

__all__ = ["BaseFiles"]

_KEY = "base/values"
"""Channel key of the tensors that workers load."""


class BaseFiles:
    """The tensors that never change, from a file that the job names or as the workers have made them. Must be used from
    one thread at a time.

    ::

        base-GROUP.frame   the bytes of each tensor that the workers of a group have made
    """

    def __init__(
        self,
        folder: Path,
        channel: Channel,
        given: Path | None,
        own: Path | None = None,
        holds: str = "",
        adapter: Path | None = None,
    ) -> None:
        """``given``: safetensors file that may hold the base; None: the workers make it.
        ``holds``: what it has of the model: see `PsConfig.initial_holds`.
        ``adapter``: file whose tensors replace those of ``given``.
        ``own``: file with first values of the tensors that stay in the region, instead of ``given``; it need not exist.
        """
        self._folder, self._channel, self._given, self._own, self._holds = folder, channel, given, own, holds
        self._adapter = adapter
        self._digests: dict[str, str] | None = None
        """Digests of the tensors in the file; None: not computed yet."""

    def completed(self, layout: Layout) -> Layout:
        """Return a worker's layout with the digests of the base that it is to have.

        Raises ``GeofedError("MODEL_MISMATCH")`` if the file has other tensors.
        """
        if self._digests is None:
            found = self._given_to_workers(layout)
            self._digests = {name: hashlib.sha256(content.data).hexdigest() for name, content in found.items()}
        return layout.without_digests.with_digests(layout.base_digests | self._digests)

    def publish(self, layout: Layout) -> str:
        """Put the file's tensors into the channel and return their key; "": the workers keep their own."""
        if not self._digests:
            return ""
        if not self._channel.has(_KEY):
            self._channel.put(_KEY, framing.encode(self._given_to_workers(layout)))
        return _KEY

    def take(self, key: str) -> None:
        """Make the tensors durable that workers have put into the channel; they are the same in every attempt."""
        number = int(key.rpartition("-")[2]) if key.rpartition("-")[2].isdecimal() else 0
        path = self._folder / f"base-{number}.frame"
        if not path.exists() and (value := self._channel.get(key)) is not None:
            framing.decode(value)
            write_durably(path, [value])
        self._channel.delete(key)

    def contents(self, layout: Layout) -> dict[str, Array]:
        """Return the bytes of each tensor of the base, as far as they are known here."""
        found = self._in_file(layout)
        if len(found) == len(layout.base):
            return found
        made: dict[str, Array] = {}
        for path in sorted(self._folder.glob("base-*.frame")):
            made |= framing.decode(np.memmap(path, np.uint8, "r").data).tensors
        return made | found

    def _given_to_workers(self, layout: Layout) -> dict[str, Array]:
        # The agent may still copy the region's own file while the server starts; workers connect later.
        own = self._own if self._own is not None and self._own.exists() else self._given
        adapter = self._adapter if own == self._given else None
        local = {} if own is None or not layout.local else local_in(layout, own, adapter)
        return self._in_file(layout) | local

    def _in_file(self, layout: Layout) -> dict[str, Array]:
        return {} if self._given is None or not layout.base else base_in(
            layout, self._given, self._holds, self._adapter
        )  # fmt: skip
