"""The functions that a partition's workers are invocations of: their deployment, their replicas, and calls of them.

There is one, with a replica for each worker, or several where the platform limits the replicas of a function.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TypeVar

from pydantic import ValidationError
from tenacity import AsyncRetrying, retry_if_exception, wait_exponential

from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2
from region_agent.config import OpenFaasGateway, RegionConfig
from region_agent.gateway import FunctionSpec, GatewayClient, fixed_scale_labels, timeout_env
from region_agent.gateway.call_token import CallToken
from region_agent.gateway.functions import Grants
from region_agent.gateway.owner import Owner
from region_agent.gateway.redaction import Redaction
from region_agent.isolation import with_server
from region_agent.partition.channel import RegionChannel
from region_agent.partition.events import Deployed
from region_agent.partition.machine import PartitionMachine
from region_agent.tasks.secrets import GivenSecrets, give_secrets, remove_secrets
from region_agent.worker.invocation import CALL_GRACE, Outcome

__all__ = ["WorkerFunction"]

_Value = TypeVar("_Value")
_CAPACITY_LABEL = "geofed.capacity"
"""Label of a function on preemptible capacity."""
_LONGEST_PAUSE_SECONDS = 15.0
"""Longest pause between attempts to delete the function."""
_TEMPORARY = frozenset({"GATEWAY_UNAVAILABLE", "FUNCTION_TIMEOUT"})
"""Codes of failures after which a deletion is tried again, without limit."""


class WorkerFunction:
    """The worker functions of one partition, on the region's function platform."""

    def __init__(
        self,
        start: agent_pb2.StartPartition,
        machine: PartitionMachine,
        gateway: GatewayClient,
        config: RegionConfig,
        channel: RegionChannel,
        image: str,
        owner: Owner,
        token: CallToken,
    ) -> None:
        self._owner, self._token = owner, token
        self._replicas: dict[str, int] = {}
        """Replicas of each deployed function, in the order of the workers that they run."""
        self._per_function = 1
        """Replicas of each function but the last."""
        self._doubtful: set[str] = set()
        """Functions with a failed call: one that has ended may be called only when it listens again."""
        self._start, self._machine = start, machine
        self._gateway, self._config, self._channel, self._image = gateway, config, channel, image
        self._ready = timedelta(seconds=config.start_seconds)
        """Longest time until the function's first replicas are ready."""
        self._call_seconds = timedelta(seconds=start.plan.slice_seconds) + CALL_GRACE
        self._secrets = GivenSecrets()
        self.grants: Grants | None = None
        """What its replicas may use outside of their sandboxes, besides the parameter server; None: not known yet."""
        self._server = ""
        """Present address of the parameter server; empty: it has none yet."""
        self._deploying = asyncio.Lock()
        """Orders deployments, so that the last one uses the latest number of workers."""

    async def give_secrets(self) -> None:
        """Store the job's secrets, and its key of the channel, at the platform.

        Raises ``GeofedError``: SECRET_MISSING; CONFIG_INVALID.
        """
        names = self._start.task.secrets
        self._secrets = await give_secrets(
            self._config,
            self._gateway,
            self._owner,
            self._start.job,
            names,
            *self._channel.worker_env(self._config.platform),
        )

    @property
    def redact(self) -> Redaction:
        """Takes the values of the job's secrets out of what its workers say."""
        return self._secrets.redact

    async def deploy(self) -> Deployed:
        """Deploy a replica for each worker; what the functions have beyond that they keep."""
        async with self._deploying:
            workers, preemptible = self._machine.workers, self._machine.preemptible
            for name, replicas in (await self._wanted(workers)).items():
                await self._gateway.deploy(self._spec(name, replicas, preemptible=preemptible))
                if self._replicas.get(name, 0) != replicas:
                    await self._gateway.scale(name, replicas)
                    self._replicas[name] = replicas
        return Deployed(workers, preemptible)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the functions that are deployed."""
        return tuple(self._replicas)

    async def _wanted(self, workers: int) -> dict[str, int]:
        """Return the functions that this many workers need, with their replicas."""
        shares = (await self._gateway.edition()).shares(workers) or [0]
        self._per_function = max(1, shares[0])
        return {self._owner.name(self._start.job, part): share for part, share in enumerate(shares)}

    async def connect_to_server(self, server: str) -> None:
        """Let the replicas connect to the parameter server at an address from now on."""
        if self._config.platform.sandboxed:
            self._server = server
            # The server may be ready first; the first deployment then takes its address.
            if self.grants is not None:
                await self.deploy()

    def _spec(self, name: str, replicas: int, *, preemptible: bool) -> FunctionSpec:
        capacity_label = {_CAPACITY_LABEL: "preemptible"} if preemptible else {}
        return FunctionSpec(
            service=name,
            image=self._image,
            labels={**fixed_scale_labels(replicas), **capacity_label, **self._owner.labels(self._start.job)},
            annotations=self._annotations(),
            constraints=self._constraints(preemptible=preemptible),
            env_vars={
                **timeout_env(self._call_seconds),
                **self._token.env,
                **self._secrets.env,
            },
            secrets=self._secrets.names,
            limits={"memory": f"{self._start.plan.memory_mb}Mi"},
        )

    def _annotations(self) -> dict[str, str]:
        grants = self.grants or Grants()
        if self._config.platform.sandboxed:
            return with_server(grants, self._server).annotations()
        return grants.annotations() if self._config.platform.local_files else {}

    def _constraints(self, *, preemptible: bool) -> tuple[str, ...]:
        """Return the placement constraints of the function."""
        gateway = self._config.gateway
        if preemptible and isinstance(gateway, OpenFaasGateway):
            return gateway.preemptible_constraints
        return ()

    async def wait_ready(self) -> None:
        """Wait until a replica for each worker is ready."""
        wanted = await self._wanted(self._machine.workers)
        await asyncio.gather(*(self._gateway.wait_ready(name, count, self._ready) for name, count in wanted.items()))

    async def remove_replicas(self) -> None:
        """Remove the replicas, and the functions, beyond the number of workers."""
        async with self._deploying:
            wanted = await self._wanted(self._machine.workers)
            for name, replicas in wanted.items():
                await self._gateway.scale(name, replicas)
                self._replicas[name] = replicas
            for name in self._replicas.keys() - wanted.keys():
                await _deleted(self._gateway.delete, name)
                del self._replicas[name]

    async def call(self, worker: int, body: bytes) -> Outcome:
        """Call a worker's function once.

        Only what has not begun is called again: by a busy platform, as long as another call may take, and of a function
        that the platform has lost, once.
        """
        name = self._owner.name(self._start.job, worker // self._per_function)
        busy_until, pause, lost = time.monotonic() + self._call_seconds.total_seconds(), 0.05, False
        while True:
            try:
                if name in self._doubtful:
                    await self._gateway.wait_answering(name, self._ready)
                    self._doubtful.discard(name)
                answer = await self._gateway.invoke(name, body, headers=self._token.headers, timeout=self._call_seconds)
            except GeofedError as error:
                if error.code == "FUNCTION_BUSY" and time.monotonic() + pause < busy_until:
                    await asyncio.sleep(pause)
                    pause = min(pause * 1.5, 1.0)
                    continue
                if error.code == "FUNCTION_NOT_FOUND" and not lost:
                    lost = True
                    self._replicas.pop(name, None)
                    await self.deploy()
                    self._doubtful.add(name)
                    continue
                self._doubtful.add(name)
                raise
            if answer.status == 200 and not answer.body:
                # What a gateway answers for a function that it could not start in time.
                self._doubtful.add(name)
                raise GeofedError("GATEWAY_UNAVAILABLE", f"function {name} did not start")
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
        """Delete the functions and their secrets, and retry as long as the gateway is unavailable.

        A function that is left behind costs money.
        """
        names = set(self._replicas) or {self._owner.name(self._start.job)}
        if self._owner.mark:
            with contextlib.suppress(GeofedError):
                names |= set(self._owner.of_job(await _persistent(self._gateway.list), self._start.job))
        for name in sorted(names):
            await _deleted(self._gateway.delete, name)
        self._replicas.clear()
        if self._start.task.secrets or self._config.platform.dials_out:
            with contextlib.suppress(GeofedError):  # what is left is found by its name later
                await _persistent(remove_secrets, self._gateway, self._owner, self._start.job)


async def _deleted(delete: Callable[[str], Awaitable[None]], name: str) -> None:
    # One that cannot be deleted is found by its labels later.
    with contextlib.suppress(GeofedError):
        await _persistent(delete, name)


async def _persistent(work: Callable[..., Awaitable[_Value]], *arguments: object) -> _Value:
    unavailable = retry_if_exception(lambda error: isinstance(error, GeofedError) and error.code in _TEMPORARY)
    wait = wait_exponential(multiplier=0.2, max=_LONGEST_PAUSE_SECONDS)
    return await AsyncRetrying(retry=unavailable, wait=wait, reraise=True)(work, *arguments)
