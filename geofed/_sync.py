"""The client for scripts and notebooks: each method waits for that of the asynchronous client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from control_plane._view import Data
from geofed._client import AsyncClient, AsyncJob, frame, state_dict

if TYPE_CHECKING:
    import pandas as pd
    import torch

_T = TypeVar("_T")


class _Loop:
    """An event loop in a thread of its own, since a notebook has one running already."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="geofed-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Return what a coroutine returns; Ctrl-C cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def close(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Client:
    """A connection to a control plane; a context manager, or ended by ``close()``."""

    def __init__(self, context: str | Path | None = None) -> None:
        """Choose the control plane.

        Args:
            context: a context.json, or a name of `geofed context list`. None: the one that the commands use here.

        Raises ``GeofedError``: UNAVAILABLE if there is none.
        """
        self._loop = _Loop()
        try:
            self._client = self._loop.run(_connected(context))
        except BaseException:
            self._loop.close()
            raise

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection; jobs continue."""
        self._loop.run(self._client.__aexit__(None, None, None))
        self._loop.close()

    def plan(
        self, job_file: str | Path, *, set: Mapping[str, object] | None = None, start: str | Path | Job | None = None
    ) -> Data:
        """Return the plan of a job; see ``AsyncClient.plan``."""
        return self._loop.run(self._client.plan(job_file, set=set, start=_async(start)))

    def submit(
        self,
        job_file: str | Path,
        *,
        set: Mapping[str, object] | None = None,
        name: str | None = None,
        start: str | Path | Job | None = None,
        request_id: str | None = None,
    ) -> Job:
        """Submit a job; see ``AsyncClient.submit``."""
        sent = self._client.submit(job_file, set=set, name=name, start=_async(start), request_id=request_id)
        return Job(self._loop, self._loop.run(sent))

    def job(self, job: str) -> Job:
        """Return a job by its ID, or by its name if that is unique."""
        return Job(self._loop, self._loop.run(self._client.job(job)))

    def jobs(self, *, ended: bool = False, limit: int = 100, labels: Mapping[str, str] | None = None) -> list[Job]:
        """Return the jobs that you may read, the newest first; see ``AsyncClient.jobs``."""
        found = self._loop.run(self._client.jobs(ended=ended, limit=limit, labels=labels))
        return [Job(self._loop, job) for job in found]

    def compare(self, *jobs: str | Job) -> Data:
        """Return the figures of two or more jobs beside each other; see ``AsyncClient.compare``."""
        return self._loop.run(self._client.compare(*(job if isinstance(job, str) else job.id for job in jobs)))

    def sweep(self, sweep_file: str | Path) -> Data:
        """Run the trials of a sweep file; see ``AsyncClient.sweep``."""
        return self._loop.run(self._client.sweep(sweep_file))

    def regions(self) -> list[Data]:
        """Return the regions, as `geofed region list -o json`."""
        return self._loop.run(self._client.regions())


class Job:
    """A job of a ``Client``."""

    def __init__(self, loop: _Loop, job: AsyncJob) -> None:
        self._loop, self._job = loop, job

    def __repr__(self) -> str:
        return repr(self._job)

    @property
    def id(self) -> str:
        """Its ID; after a replan that of the job that continues it."""
        return self._job.id

    @property
    def state(self) -> str:
        """Such as "running" or "succeeded", now."""
        return str(self.view["state"])

    @property
    def view(self) -> Data:
        """The job now, as `geofed describe -o json`."""
        return self._loop.run(self._job.refresh())

    def wait(self, timeout: float | None = None) -> Data:
        """Wait until the job has ended; return its result. See ``AsyncJob.wait``."""
        return self._loop.run(self._job.wait(timeout))

    def rounds(self) -> list[Data]:
        """Return a row for each reported round of each region; see ``AsyncJob.rounds``."""
        return self._loop.run(self._job.rounds())

    def metrics(self) -> pd.DataFrame:
        """Return ``rounds()`` as a pandas frame. Needs pandas."""
        return frame(self.rounds())

    def events(self, *, follow: bool = False) -> Iterator[Data]:
        """Yield the events of the job; with ``follow`` until it has ended."""
        events = self._job.events(follow=follow)
        try:
            while (event := self._loop.run(_next(events))) is not None:
                yield event
        except GeneratorExit:
            # Whoever reads has seen enough.
            self._loop.run(events.aclose())
            raise

    def track(self, *places: str, follow: bool = False) -> Data:
        """Write the metrics of the job's rounds, as `geofed track`; see ``AsyncJob.track``."""
        return self._loop.run(self._job.track(*places, follow=follow))

    def logs(self, *, region: str = "", tail: int = 0, since: str = "") -> list[Data]:
        """Return lines of the job's log; see ``AsyncJob.logs``."""
        return self._loop.run(self._job.logs(region=region, tail=tail, since=since))

    def model(self, round: int | str | None = None) -> dict[str, torch.Tensor]:
        """Return a model as a state dict: of a kept round, "best", or with None the last one. Needs torch."""
        return state_dict(self.model_bytes(round))

    def model_bytes(self, round: int | str | None = None) -> bytes:
        """Return a model as the bytes of a safetensors file, verified by its digest."""
        return self._loop.run(self._job.model_bytes(round))

    def export(
        self,
        path: str | Path,
        *,
        as_: str = "whole",
        round: int | str | None = None,
        region: str | None = None,
        task: str | Path | None = None,
        inputs: Sequence[str] = (),
        overwrite: bool = False,
    ) -> Data:
        """Write a model and its manifest; see ``AsyncJob.export``."""
        written = self._job.export(
            path, as_=as_, round=round, region=region, task=task, inputs=inputs, overwrite=overwrite
        )
        return self._loop.run(written)

    def resume(self, request_id: str | None = None) -> Job:
        """Continue the ended job as a new one; see ``AsyncJob.resume``."""
        return Job(self._loop, self._loop.run(self._job.resume(request_id)))

    def replan(self, reason: str = "") -> Data:
        """End the job, and continue it in a new one over other regions; see ``AsyncJob.replan``."""
        return self._loop.run(self._job.replan(reason))

    def scale(self, workers: Mapping[str, int], reason: str = "") -> Data:
        """Change the numbers of workers of regions; 0 pauses a region."""
        return self._loop.run(self._job.scale(workers, reason))

    def rename(self, name: str) -> Data:
        """Give the job another name; its ID stays."""
        return self._loop.run(self._job.rename(name))

    def share(self, user: str) -> Data:
        """Let another user read the job."""
        return self._loop.run(self._job.share(user))

    def unshare(self, user: str) -> Data:
        """Let a user read the job no longer."""
        return self._loop.run(self._job.unshare(user))

    def delete(self) -> Data:
        """Delete the ended job and all that belongs to it; see ``AsyncJob.delete``."""
        return self._loop.run(self._job.delete())

    def cancel(self, reason: str = "") -> Data:
        """Cancel the job; the models of its evaluated rounds are kept."""
        return self._loop.run(self._job.cancel(reason))

    def finish(self, reason: str = "") -> Data:
        """End the job after the current round with its model."""
        return self._loop.run(self._job.finish(reason))


async def _connected(context: str | Path | None) -> AsyncClient:
    return AsyncClient(context)


def _async(start: str | Path | Job | None) -> str | Path | None:
    return start.id if isinstance(start, Job) else start


async def _next(events: AsyncGenerator[Data, None]) -> Data | None:
    return await anext(events, None)
