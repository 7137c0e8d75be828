"""Parameter servers of several regions in this process, with the numbers of the real ones and none of their sockets.

Workers are real invocations of the worker function, one after the other; a worker that has to wait for another region
ends its slice and is invoked again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from support.jobs import call, invocation
from support.pki import Authority
from support.server_process import Server

from geofed_pb.v1 import worker_pb2
from region_agent.worker.invocation import Invocation, Outcome, ShardFile
from region_agent.worker.ps_client import SliceOver
from sync import framing
from sync.channel_clients import FileChannel
from sync.codec import codec_named
from sync.layout import Layout, Vector
from sync.policy import Contribution
from sync.ps.execution.export import to_safetensors
from sync.ps.execution.replica import Replica, ReplicaState
from sync.wan import ExchangeSettings, policy_of

__all__ = ["Federation"]


class _Region:
    """One region's server: synchronous exchange, one worker."""

    def __init__(self, federation: Federation, place: Server) -> None:
        self.federation, self.place = federation, place
        self.channel = FileChannel(place.channel_folder)
        self.layout: Layout | None = None
        self.replica: Replica | None = None
        self.round = 0
        self.end: Vector | None = None
        """Of the open round, once the worker has handed it over."""
        self.base: dict[str, Any] = {}
        """Bytes of the tensors that never change, by name."""
        self.state: dict[int, bytes] = {}
        self.evaluated = False

    def begin(self, model: Vector) -> None:
        self.replica = Replica(
            policy_of("ma"), ExchangeSettings(), codec_named("fp32"), ReplicaState(model.copy(), model.copy())
        )
        assert self.layout is not None
        self.replica.trained = self.layout.trainable_size
        self.replica.alone = len(self.federation.regions) == 1
        self.publish()

    def publish(self) -> None:
        assert self.replica is not None
        self.channel.put(f"model/{self.round}", framing.encode({"model": self.replica.model}))
        if self.round in self.state:
            self.channel.put(f"state/{self.round}", [self.state[self.round]])

    @property
    def facts(self) -> dict[str, Any]:
        each, rounds = self.federation.steps_per_round, self.federation.rounds
        state = f"state/{self.round}" if self.round in self.state else ""
        over = self.round >= rounds
        return {
            "round": self.round, "model_key": f"model/{self.round}", "state_key": state,
            "until_step": (self.round + 1) * each,
            "finished": over, "evaluate": over and not self.evaluated,
        }  # fmt: skip

    # What a worker calls

    def __enter__(self) -> _Region:
        return self

    def __exit__(self, *_: object) -> None: ...

    def attach(self, request: worker_pb2.AttachRequest) -> worker_pb2.AttachReply:
        if self.layout is None:
            self.layout = Layout.from_json(request.layout_json)
            if request.base_key:
                frame = self.channel.get(request.base_key)
                assert frame is not None
                self.base = framing.decode(bytes(frame)).tensors
            value = self.channel.get(request.initial_key)
            assert value is not None
            self.federation.first_model(np.array(framing.decode(value).tensors["model"]))
            if self.replica is None:
                self.begin(self.federation.model)
        differs = self.layout.difference(Layout.from_json(request.layout_json))
        assert not differs, f"every invocation makes the same model: {differs}"
        step = self.round * self.federation.steps_per_round
        return worker_pb2.AttachReply(step=step, boundary=self.end is not None, **self.facts)

    def boundary(self, request: worker_pb2.BoundaryRequest) -> worker_pb2.BoundaryReply:
        if self.end is None and request.digest:
            value, state = self.channel.get(request.model_key), self.channel.get(request.state_key)
            assert value is not None
            assert state is not None
            self.end = np.array(framing.decode(value).tensors["model"])
            self.state[request.round] = bytes(state)
        if not self.federation.merged():
            raise SliceOver
        return worker_pb2.BoundaryReply(**self.facts)

    def evaluated_as(self, request: worker_pb2.EvaluatedRequest) -> None:
        if request.error:
            assert self.federation.takes_errors, request.error
            self.federation.errors[self.place.region] = request.error
        self.evaluated = True
        self.federation.metrics[self.place.region] = dict(request.metrics)

    def stepped(self, request: worker_pb2.SteppedRequest) -> None: ...


class Federation:
    """Several regions that train one model."""

    def __init__(self, folder: Path, regions: tuple[str, ...], *, steps_per_round: int, rounds: int) -> None:
        authority = Authority()
        self.steps_per_round, self.rounds = steps_per_round, rounds
        self.regions = {
            name: _Region(
                self,
                Server(folder / name, authority, name, regions, rounds=rounds, steps_per_round=steps_per_round),
            )
            for name in regions
        }
        self.metrics: dict[str, dict[str, float]] = {}
        self.takes_errors = False
        """An evaluation may fail."""
        self.errors: dict[str, str] = {}
        """Of evaluations, by region."""
        self._first: Vector | None = None

    def client(self, call: Invocation, slice_ends: float) -> Any:
        """Takes the place of `PsClient`."""
        region = self.regions[call.region]
        return _Line(region)

    @property
    def model(self) -> Vector:
        assert self._first is not None
        return self._first

    def first_model(self, model: Vector) -> None:
        """The first region's counts."""
        if self._first is None:
            self._first = model

    def merged(self) -> bool:
        """Merge the round if all regions have ended it; whether the caller's is over."""
        regions = list(self.regions.values())
        if any(region.end is None for region in regions):
            return False
        updates = []
        for region in regions:
            assert region.replica is not None
            assert region.end is not None
            made = region.replica.own_update(region.end, region.round + 1, last=region.round + 1 == self.rounds)
            updates.append(Contribution(region.place.region, 1.0, made.sent.copy(), whole=made.whole))
        for region in regions:
            assert region.replica is not None
            assert not region.replica.merge(updates, None, own=region.place.region, rounds=1)
            region.replica.restart()
            region.round, region.end = region.round + 1, None
            region.publish()
        return True

    def train(
        self,
        task: str,
        config: dict[str, Any],
        *,
        seed: int,
        batch: int,
        slice_seconds: float,
        at_once: int = 0,
        **call_fields: Any,
    ) -> None:
        """Invoke all workers in turn until the job is done."""
        bodies = {}
        for name, region in self.regions.items():
            data = region.place.folder / f"{name}.bin"
            data.write_bytes(b"x")
            body = invocation(region.place, task, data, config=config, seed=seed, slice_seconds=slice_seconds)
            files = (ShardFile(name=data.name, path=str(data)),)
            bodies[name] = body.model_copy(
                update={
                    "region_batch": batch,
                    "splits": {"train": files, "test": files},
                    "job": f"job-{name}",
                    "keeps_base": True,
                    **({"batch": at_once} if at_once else {}),
                    **call_fields,
                }
            )
        while bodies:
            for name in list(bodies):
                # A region continues until it has to wait: to load another's task takes longer than a step.
                while name in bodies:
                    outcome: Outcome = call(bodies[name])
                    assert outcome.status in ("continue", "done"), outcome
                    if outcome.status == "done":
                        del bodies[name]
                        break
                    bodies[name] = bodies[name].model_copy(update={"resume_key": outcome.resume_key})
                    if self.regions[name].end is not None:
                        break

    def exported(self) -> bytes:
        """The model's file, which is the same in all regions."""
        files = set()
        for region in self.regions.values():
            assert region.layout is not None
            assert region.replica is not None
            files.add(b"".join(to_safetensors(region.layout, region.replica.model, {}, region.base)))
        (data,) = files
        return data


class _Line:
    """What a worker has of its region's server."""

    def __init__(self, region: _Region) -> None:
        self._region = region

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *_: object) -> None: ...

    def attach(self, request: worker_pb2.AttachRequest) -> worker_pb2.AttachReply:
        return self._region.attach(request)

    def boundary(self, request: worker_pb2.BoundaryRequest) -> worker_pb2.BoundaryReply:
        return self._region.boundary(request)

    def evaluated(self, request: worker_pb2.EvaluatedRequest) -> None:
        self._region.evaluated_as(request)

    def stepped(self, request: worker_pb2.SteppedRequest) -> None: ...
