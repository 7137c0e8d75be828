"""The asynchronous client: jobs of a control plane, as the commands submit, follow and export them."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from control_plane._durations import parse_since
from control_plane._view import Data, event_view, job_view, log_view, region_view, round_rows
from control_plane.cli._connect import find_context
from control_plane.cli._follow import raise_unless_succeeded, wait_for_job
from control_plane.cli._job_file import read_job
from control_plane.cli.commands.export import Export, chosen, download, write_model
from control_plane.cli.commands.export._options import ExportKind
from control_plane.cli.commands.storage import deletion_view
from control_plane.cli.commands.submit import Submission, declined, planned, random_id, starting_from
from control_plane.cli.commands.views.compare import compared
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

    async def plan(
        self,
        job_file: str | Path,
        *,
        set: Mapping[str, object] | None = None,
        start: str | Path | AsyncJob | None = None,
    ) -> Data:
        """Return the plan of a job: regions, workers, time, bytes and cost with their ranges. Nothing is run.

        Args:
            set: as of ``submit``.
            start: as of ``submit``.

        Raises ``GeofedError``: SPEC_INVALID; INADMISSIBLE or a more exact code, with the reasons.
        """
        loaded, bundle = read_job(Path(job_file), _overrides(set, start))
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
        start: str | Path | AsyncJob | None = None,
        request_id: str | None = None,
    ) -> AsyncJob:
        """Submit a job.

        Args:
            set: keys of the job file to override, such as ``{"train.seed": 2}``; ``advanced`` may be left out.
            name: name of the job, instead of the file's.
            start: an ended job, or a .safetensors file, from whose model it starts, as `geofed submit --from`.
            request_id: submissions with one ID make one job, so that one can be repeated. None: a random one.
        """
        submission = Submission(*read_job(Path(job_file), _overrides(set, start), name), request_id or random_id())
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

    async def compare(self, *jobs: str | AsyncJob) -> Data:
        """Return the figures of two or more jobs, and what differs between their job files, as
        `geofed compare -o json`."""
        return compared([job_view(await self._client.job(name_of(job))) for job in jobs])

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

    async def events(self, *, follow: bool = False) -> AsyncGenerator[Data, None]:
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

    async def logs(self, *, region: str = "", tail: int = 0, since: str = "") -> list[Data]:
        """Return lines of the job's log.

        Args:
            tail: only so many last ones; 0: all.
            since: only those of a last while, such as "10m", or since a time with its zone.

        Raises ``GeofedError``: USAGE for another ``since``.
        """
        try:
            begin = parse_since(since, time.time()) if since else 0.0
        except ValueError as error:
            raise GeofedError("USAGE", f"since: {error}") from None
        lines = self._client.logs(self.id, region=region, tail=tail)
        return [log_view(line) async for line in lines if line.at >= begin]

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

    async def export(
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
        """Write a model, verified by its digest, and a manifest next to it, as `geofed export`; return what it tells.

        Args:
            path: file, or for "peft" and "hub" the folder.
            as_: "whole", "trained", "peft", "state-dict", "hub", "torch-export" or "onnx".
            round: of a kept round, or "best". None: the last one.
            region: whose own model, of a job with ``train.local``.
            task: for "torch-export" and "onnx": your folder of the job file, or the task module. It is run here.
            inputs: for these: the model's inputs, such as "1x128:int64". None: what ``example_input`` returns.
            overwrite: replace other files that are there.

        Raises ``GeofedError``: USAGE, MODEL_NOT_FOUND, DIGEST_MISMATCH, DISK_FULL.
        """
        if as_ not in list(ExportKind):
            raise GeofedError("USAGE", f"as_ is {as_!r}", hint=f"one of {', '.join(ExportKind)}")
        chosen_round = None if round is None else str(round)
        place = None if task is None else Path(task)
        wanted = Export(Path(path), chosen_round, region, ExportKind(as_), place, tuple(inputs))

        def agree(files: str) -> None:
            if not overwrite:
                raise GeofedError("USAGE", f"{files} would be overwritten", hint="pass overwrite=True")

        return await write_model(self._client, self.id, wanted, agree)

    async def resume(self, request_id: str | None = None) -> AsyncJob:
        """Continue the ended job as a new one, from its last kept model; return that.

        Args:
            request_id: requests with one ID make one job, so that one can be repeated. None: a random one.
        """
        reply = await self._client.resume(self.id, request_id or random_id())
        return AsyncJob(self._client, job_view(reply.job))

    async def replan(self, reason: str = "") -> Data:
        """End the running job, and continue its model in a new one over the regions that are available now. Once that
        is there, ``view["successor"]`` is its ID."""
        self.view = job_view(await self._client.replan(self.id, reason))
        return self.view

    async def scale(self, workers: Mapping[str, int], reason: str = "") -> Data:
        """Change the numbers of workers of regions of the running job; 0 pauses a region."""
        self.view = job_view(await self._client.scale(self.id, dict(workers), reason))
        return self.view

    async def rename(self, name: str) -> Data:
        """Give the job another name; its ID stays."""
        self.view = job_view(await self._client.rename(self.id, name))
        return self.view

    async def share(self, user: str) -> Data:
        """Let another user read the job."""
        self.view = job_view(await self._client.share(self.id, user))
        return self.view

    async def unshare(self, user: str) -> Data:
        """Let a user read the job no longer."""
        self.view = job_view(await self._client.share(self.id, user, end=True))
        return self.view

    async def delete(self) -> Data:
        """Delete the ended job with its model, code, log, events and measurements, also in its regions."""
        return deletion_view(await self._client.delete(self.id))

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


def name_of(job: str | AsyncJob) -> str:
    """Return a job's ID, or the name that it is called by."""
    return job if isinstance(job, str) else job.id


def _overrides(set: Mapping[str, object] | None, start: str | Path | AsyncJob | None) -> list[str]:
    begin = [] if start is None else [starting_from(str(start) if isinstance(start, Path) else name_of(start))]
    return [*begin, *(f"{key}={json.dumps(value)}" for key, value in (set or {}).items())]
