"""The function that a partition's workers are invocations of: its deployment, its replicas, and calls of it."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta

from pydantic import ValidationError
from tenacity import AsyncRetrying, retry_if_exception, wait_exponential

from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2
from region_agent.config import EmbeddedGateway, OpenFaasGateway, RegionConfig
from region_agent.gateway import FunctionSpec, GatewayClient, fixed_scale_labels, timeout_env
from region_agent.gateway.functions import Grants
from region_agent.gateway.redaction import Redaction
from region_agent.isolation import with_server
from region_agent.partition.channel import RegionChannel
from region_agent.partition.events import Deployed
from region_agent.partition.machine import PartitionMachine
from region_agent.tasks.secrets import give_secrets
from region_agent.worker.invocation import CALL_GRACE, Outcome

__all__ = ["WorkerFunction", "function_name"]

_READY = timedelta(seconds=60)
"""Timeout of the function's first replicas."""
_CAPACITY_LABEL = "geofed.capacity"
"""Label of a function on preemptible capacity."""
_LONGEST_PAUSE_SECONDS = 15.0
"""Longest pause between attempts to delete the function."""


def function_name(job: str) -> str:
    """Return the name of the function of a job's workers."""
    return f"geofed-{job}"[:63].rstrip("-")


class WorkerFunction:
    """The worker function of one partition, on the region's function platform."""

    def __init__(
        self,
        start: agent_pb2.StartPartition,
        machine: PartitionMachine,
        gateway: GatewayClient,
        config: RegionConfig,
        channel: RegionChannel,
        image: str,
    ) -> None:
        self.name = function_name(start.job)
        self._start, self._machine = start, machine
        self._gateway, self._config, self._channel, self._image = gateway, config, channel, image
        self._call_seconds = timedelta(seconds=start.plan.slice_seconds) + CALL_GRACE
        self.redact = Redaction()
        """Takes the values of the job's secrets out of what its workers say."""
        self.grants: Grants | None = None
        """What its replicas may use outside of their sandboxes, besides the parameter server; None: not known yet."""
        self._server = ""
        """Present address of the parameter server; empty: it has none yet."""
        self._deploying = asyncio.Lock()
        """Orders deployments, so that the last one uses the latest number of workers."""

    async def give_secrets(self) -> None:
        """Store the job's secrets at the platform. Raises ``GeofedError("SECRET_MISSING")``."""
        self.redact = await give_secrets(self._config, self._gateway, self._start.task.secrets)

    async def deploy(self) -> Deployed:
        """Deploy the function with a replica for each worker."""
        async with self._deploying:
            workers, preemptible = self._machine.workers, self._machine.preemptible
            await self._gateway.deploy(self._spec(workers, preemptible=preemptible))
            await self._gateway.scale(self.name, workers)
        return Deployed(workers, preemptible)

    async def connect_to_server(self, server: str) -> None:
        """Let the replicas connect to the parameter server at an address from now on."""
        if self._isolated:
            self._server = server
            # The server may be ready first; the first deployment then takes its address.
            if self.grants is not None:
                await self.deploy()

    @property
    def _isolated(self) -> bool:
        return isinstance(self._config.gateway, EmbeddedGateway)

    def _spec(self, workers: int, *, preemptible: bool) -> FunctionSpec:
        capacity_label = {_CAPACITY_LABEL: "preemptible"} if preemptible else {}
        return FunctionSpec(
            service=self.name,
            image=self._image,
            labels={**fixed_scale_labels(workers), **capacity_label},
            annotations=with_server(self.grants or Grants(), self._server).annotations() if self._isolated else {},
            constraints=self._constraints(preemptible=preemptible),
            env_vars={**timeout_env(self._call_seconds), **self._channel.worker_env()},
            secrets=tuple(self._start.task.secrets),
            limits={"memory": f"{self._start.plan.memory_mb}Mi"},
        )

    def _constraints(self, *, preemptible: bool) -> tuple[str, ...]:
        """Return the placement constraints of the function."""
        gateway = self._config.gateway
        if preemptible and isinstance(gateway, OpenFaasGateway):
            return gateway.preemptible_constraints
        return ()

    async def wait_ready(self) -> None:
        """Wait until a replica for each worker is ready."""
        await self._gateway.wait_ready(self.name, self._machine.workers, _READY)

    async def remove_replicas(self) -> None:
        """Remove the replicas beyond the number of workers."""
        async with self._deploying:
            await self._gateway.scale(self.name, self._machine.workers)

    async def call(self, body: bytes) -> Outcome:
        """Call the function once. Only a busy platform is retried, since the call has not begun there."""
        pause = 0.05
        while True:
            try:
                answer = await self._gateway.invoke(self.name, body, timeout=self._call_seconds)
            except GeofedError as error:
                if error.code != "FUNCTION_BUSY":
                    raise
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, 1.0)
                continue
            if answer.status != 200:
                raise self._odd_answer(f"{answer.status}: ", answer.body)
            try:
                outcome = Outcome.model_validate_json(answer.body)
            except ValidationError:
                raise self._odd_answer("", answer.body) from None
            return outcome.model_copy(update={"message": self.redact(outcome.message)})

    def _odd_answer(self, status: str, body: bytes) -> GeofedError:
        text = self.redact(body.decode(errors="replace"))[:200]
        return GeofedError("FUNCTION_FAILED", f"the function answered {status}{text!r}")

    async def delete(self) -> None:
        """Delete the function, and retry as long as the gateway is unavailable: a function left behind costs money."""
        unavailable = retry_if_exception(lambda error: isinstance(error, GeofedError) and error.retryable)
        attempts = AsyncRetrying(retry=unavailable, wait=wait_exponential(multiplier=0.2, max=_LONGEST_PAUSE_SECONDS))
        with contextlib.suppress(GeofedError):
            await attempts(self._gateway.delete, self.name)
