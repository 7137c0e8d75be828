"""The own model of a region, of a job with tensors that stay in their regions: uploaded when a user asks for it."""

from __future__ import annotations

import secrets
from contextlib import aclosing

from control_plane.service.measuring._measurements import Measurements
from control_plane.service.state._entries import JobEntry
from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2

__all__ = ["own_model"]


async def own_model(measurements: Measurements, entry: JobEntry, region: str) -> str:
    """Have a region upload its own model; returns the digest of the file.

    Raises ``GeofedError``: MODEL_NOT_FOUND if the job or the region has none; REGION_LOST or WAIT_TIMEOUT if its agent
    does not answer.
    """
    job, regions = entry.row.id, [part.region for part in entry.plan.partitions]
    if not entry.spec.train.local:
        text = f"all regions of {job} have the same model"
        raise GeofedError("MODEL_NOT_FOUND", text, hint="leave out --region; `train.local` gives regions their own")
    if region not in regions:
        text = f"{region} is no region of {job}"
        raise GeofedError("MODEL_NOT_FOUND", text, hint=f"its regions are {', '.join(regions)}")
    asked = agent_pb2.OwnModel(id=f"own-{secrets.token_hex(8)}", region=region, job=job)
    async with aclosing(measurements.run(agent_pb2.ToAgent(own_model=asked))) as reports:
        async for report in reports:
            if report.model_digest:
                return report.model_digest
    raise GeofedError("MODEL_NOT_FOUND", f"region {region} has not uploaded its model")
