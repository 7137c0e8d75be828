"""Code and models that the agent gets from the control plane, or sends to it."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from geofed_pb.errors import GeofedError
from geofed_pb.files.durable import disk_full_as_error, write_durably
from geofed_pb.files.task_folder import read_parts
from geofed_pb.v1 import agent_pb2
from region_agent.link.control_plane_stream import ControlPlaneStream
from region_agent.own_model import own_model_file
from region_agent.partition.server.process import PsProcess
from region_agent.state.audit_log import RegionAudit
from region_agent.tasks.folder import BUNDLES, TaskFolder
from sync.framing import digest_of

__all__ = ["Blobs"]


class Blobs:
    """Transfers of code and models, which are recorded in the region's audit log where something leaves it."""

    def __init__(self, hub: ControlPlaneStream, audit: RegionAudit, state_dir: Path) -> None:
        self._hub, self._audit, self._state_dir = hub, audit, state_dir
        self._turn = asyncio.Lock()

    async def task_folder(self, digest: str) -> TaskFolder:
        """Return a packed task folder; each of its files is kept, and downloaded only once."""
        folder = self._state_dir / BUNDLES
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        archive = await self._archive(folder, digest)
        parts = await asyncio.to_thread(read_parts, io.BytesIO(archive))
        wanted = {one.digest: folder / one.digest.removeprefix("sha256:") for one in parts}
        async with self._turn:  # one file may belong to two folders, and is written by one download only
            for path in wanted.values():
                with suppress(FileNotFoundError):
                    os.utime(path)
            await self._hub.fetch_files(wanted)
        return TaskFolder(archive, parts, folder)

    async def _archive(self, folder: Path, digest: str) -> bytes:
        kept = folder / digest.removeprefix("sha256:")
        if kept.exists() and digest_of([data := kept.read_bytes()]) == digest:
            with suppress(FileNotFoundError):
                os.utime(kept)  # its retention begins again
            return data
        data = await self._hub.fetch_blob(digest)
        write_durably(kept, [data])
        return data

    async def publish_model(self, job: str, ps: PsProcess, round_: int = 0) -> str:
        """Upload a server's model, of the end (0) or of an evaluated round; return its digest.

        It goes through a file, since a model of gigabytes has no room in the agent's memory.
        """
        hashed = hashlib.sha256()
        with disk_full_as_error(self._state_dir), tempfile.TemporaryFile(dir=self._state_dir, buffering=0) as file:
            async for chunk in ps.model(round_):
                hashed.update(chunk.data)
                await asyncio.to_thread(file.write, chunk.data)
            digest = f"sha256:{hashed.hexdigest()}"
            self._audit.sending_model(job, digest, round_)
            await self._hub.put_blob(file, digest)
        return digest

    async def upload_own_model(self, command: agent_pb2.OwnModel) -> str:
        """Upload the region's own model of a job; return its digest. Raises ``GeofedError("MODEL_NOT_FOUND")``."""
        try:
            file = own_model_file(self._state_dir / "jobs" / Path(command.job).name).open("rb", buffering=0)
        except OSError:
            text = f"region {command.region} has no model of its own of {command.job}"
            hint = "it has one after the first evaluation, and for as long as its `retention` says"
            raise GeofedError("MODEL_NOT_FOUND", text, hint=hint) from None
        with file:
            digest = f"sha256:{(await asyncio.to_thread(hashlib.file_digest, file, 'sha256')).hexdigest()}"
            self._audit.sending_model(command.job, digest, own=True)
            await self._hub.put_blob(file, digest)
        return digest
