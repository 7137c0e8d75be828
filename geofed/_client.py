"""The asynchronous client: jobs of a control plane, as the commands submit, follow and export them."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from control_plane._view import Data, event_view, job_view, log_view, region_view, round_rows
from control_plane.cli._connect import find_context
from control_plane.cli._follow import raise_unless_succeeded, wait_for_job
from control_plane.cli._job_file import read_job
from control_plane.cli.commands.export import chosen, download
from control_plane.cli.commands.submit import Submission, declined, planned, random_id
from control_plane.client import Context, ControlClient
from geofed_pb.errors import GeofedError, install_hint

if TYPE_CHECKING:
    import pandas as pd
    import torch


class AsyncClient:
    """A connection to a control plane; an asynchronous context manager."""

    def __init__(self, context: str | Path | None = None) -> None:
        """Choose the control plane; nothing is sent yet.

        Args:
            context: a context.json, or a name of `geofed context list`. None: the one that the commands use here.

        Raises ``GeofedError``: UNAVAILABLE if there is none.
        """
        given = context or os.environ.get("GEOFED_CONTEXT")
        self._client = ControlClient.connect(Context.load(find_context(Path(given) if given else None)))

    @classmethod
    def of(cls, client: ControlClient) -> AsyncClient:
        """Return a client over a connection that its caller ends."""
        made = cls.__new__(cls)
        made._client = client
        return made

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.__aexit__(kind, error, trace)

    async def plan(self, job_file: str | Path, *, set: Mapping[str, object] | None = None) -> Data:
        """Return the plan of a job: regions, workers, time, bytes and cost with their ranges. Nothing is run.

        Raises ``GeofedError``: SPEC_INVALID; INADMISSIBLE or a more exact code, with the reasons.
        """
        loaded, bundle = read_job(Path(job_file), _overrides(set))
        reply = await planned(self._client, loaded, bundle)
        plan: Data = json.loads(reply.plan_json)
        if not reply.admissible:
            raise declined(plan["reasons"])
        return plan

    async def submit(
        self,
        job_file: str | Path,
        *,
        set: Mapping[str, object] | None = None,
        name: str | None = None,
        request_id: str | None = None,
    ) -> AsyncJob:
        """Submit a job.

        Args:
            set: keys of the job file to override, such as ``{"train.seed": 2}``; ``advanced`` may be left out.
            name: name of the job, instead of the file's.
            request_id: submissions with one ID make one job, so that one can be repeated. None: a random one.
        """
        submission = Submission(*read_job(Path(job_file), _overrides(set), name), request_id or random_id())
        return AsyncJob(self._client, await submission.send(self._client))

    async def job(self, job: str) -> AsyncJob:
        """Return a job by its ID, or by its name if that is unique."""
        return AsyncJob(self._client, job_view(await self._client.job(job)))

    async def jobs(
        self, *, ended: bool = False, limit: int = 100, labels: Mapping[str, str] | None = None
    ) -> list[AsyncJob]:
        """Return the jobs that you may read, the newest first.

        Args:
            ended: also ended ones.
            labels: only jobs that have these labels.
        """
        found = await self._client.jobs(ended=ended, limit=limit, labels=labels or {})
        return [AsyncJob(self._client, job_view(job)) for job in found]

    async def sweep(self, sweep_file: str | Path) -> Data:
        """Run the trials of a sweep file, and return them with the best one, as `geofed sweep -o json`.

        Cancelled, it leaves the trials that run; called again, it continues with them.

        Raises ``GeofedError``: SPEC_NOT_FOUND, SPEC_INVALID; USAGE if Optuna is wanted and missing.
        """
        from geofed.sweep import load_sweep, run_sweep

        return await run_sweep(self, load_sweep(Path(sweep_file)))

    async def regions(self) -> list[Data]:
        """Return the regions, as `geofed region list -o json`."""
        return [region_view(region) for region in await self._client.regions()]


class AsyncJob:
    """A job. What it was when it was last looked at is in ``view``."""

    def __init__(self, client: ControlClient, view: Data) -> None:
        self._client = client
        self.view = view
        """As `geofed describe -o json`."""

    def __repr__(self) -> str:
        return f"<job {self.id}: {self.state}>"

    @property
    def id(self) -> str:
        """Its ID; after a replan that of the job that continues it."""
        return str(self.view["id"])

    @property
    def state(self) -> str:
        """Such as "running" or "succeeded", when it was last looked at."""
        return str(self.view["state"])

    async def refresh(self) -> Data:
        """Look at the job; return its view."""
        self.view = job_view(await self._client.job(self.id))
        return self.view

    async def wait(self, timeout: float | None = None) -> Data:
        """Wait until the job has ended; return its result: metrics, model, bytes, cost.

        Args:
            timeout: seconds to wait; the job continues.

        Raises ``GeofedError``: JOB_FAILED, JOB_CANCELLED, WAIT_TIMEOUT.
        """
        try:
            self.view = await asyncio.wait_for(wait_for_job(self._client, self.id), timeout)
        except TimeoutError:
            raise GeofedError("WAIT_TIMEOUT", f"job {self.id} has not ended within {timeout:g} s") from None
        raise_unless_succeeded(self.view)
        result: Data = self.view["result"]
        return result

    async def rounds(self) -> list[Data]:
        """Return a row for each round that a region has reported; of very short ones not all are. A row has step,
        samples, loss and metrics; ``test_loss`` is the loss on the test data."""
        return round_rows([event async for event in self.events()])

    async def metrics(self) -> pd.DataFrame:
        """Return ``rounds()`` as a pandas frame. Needs pandas."""
        return frame(await self.rounds())

    async def events(self, *, follow: bool = False) -> AsyncIterator[Data]:
        """Yield the events of the job; with ``follow`` until it has ended."""
        async for event in self._client.watch(self.id, follow=follow):
            yield event_view(event)

    async def track(self, *places: str, follow: bool = False) -> Data:
        """Write the metrics of the job's rounds, as `geofed track`.

        Args:
            places: FILE.csv, FILE.jsonl, tensorboard:FOLDER, mlflow:URI, wandb:FOLDER or otlp:URL.
            follow: until the job has ended.
        """
        from control_plane.tracking import track_job

        return await track_job(self._client, self.id, list(places), follow=follow)

    async def logs(self, *, region: str = "", tail: int = 0) -> list[Data]:
        """Return lines of the job's log; ``tail``: only the last ones."""
        return [log_view(line) async for line in self._client.logs(self.id, region=region, tail=tail)]

    async def model(self, round: int | str | None = None) -> dict[str, torch.Tensor]:
        """Return a model as a state dict. Needs torch.

        Args:
            round: of a kept round, or "best". None: the last one.
        """
        return state_dict(await self.model_bytes(round))

    async def model_bytes(self, round: int | str | None = None) -> bytes:
        """Return a model as the bytes of a safetensors file, verified by its digest."""
        view = await self.refresh()
        view = {**view, "model": chosen(view, None if round is None else str(round))}
        with tempfile.TemporaryDirectory(prefix="geofed-model-") as folder:
            path = Path(folder) / "model.safetensors"
            await download(self._client, view, path)
            return path.read_bytes()

    async def cancel(self, reason: str = "") -> Data:
        """Cancel the job; the models of its evaluated rounds are kept."""
        self.view = job_view(await self._client.cancel(self.id, reason))
        return self.view

    async def finish(self, reason: str = "") -> Data:
        """End the job after the current round with its model."""
        self.view = job_view(await self._client.finish(self.id, reason))
        return self.view


def frame(rows: list[Data]) -> pd.DataFrame:
    """Return rows as a pandas frame. Raises ``GeofedError("USAGE")`` without pandas."""
    try:
        import pandas as pd
    except ModuleNotFoundError:
        hint = f"{install_hint('pandas')}; rounds() returns the same as a list"
        raise GeofedError("USAGE", "metrics() needs pandas, which is not installed", hint=hint) from None
    return pd.DataFrame(rows)


def state_dict(content: bytes) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file. Raises ``GeofedError("USAGE")`` without torch."""
    try:
        from safetensors.torch import load
    except ModuleNotFoundError:
        hint = f"{install_hint('worker')}; model_bytes() returns a safetensors file"
        raise GeofedError("USAGE", "model() needs torch, which is not installed", hint=hint) from None
    tensors: dict[str, Any] = load(content)
    return tensors


def _overrides(set: Mapping[str, object] | None) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in (set or {}).items()]
