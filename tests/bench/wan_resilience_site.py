"""One region of `wan_resilience.py`: a worker whose compute is sleep, and what an agent does for the parameter server.

A round changes the model by a vector that is known beforehand, whole numbers times a power of two at as many places as
the codecs send, so that they send them without a rest, and the sum of all changes is known as well. Every round is told
of in a file, with its times.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import channel_options, region_name
from geofed_pb.v1 import sync_pb2, sync_pb2_grpc, worker_pb2
from region_agent.worker.invocation import Invocation
from region_agent.worker.ps_client import PsClient
from sync import framing
from sync.channel_clients import FileChannel
from sync.layout import Layout, Slot, Vector
from sync.ps.tokens import WorkerIdentity, sign

__all__ = ["JOB", "PORTS", "SiteConfig", "serve", "total", "written"]

JOB = "job-1"
PORTS = {"worker": 7001, "exchange": 7002, "bulk": 7003}
"""The same in all regions, since each has a network of its own."""
_GAP = 64
"""One coordinate in so many changes: `topk` sends no more."""
_BEGIN = 1.0


@dataclass(frozen=True)
class SiteConfig:
    """What a region's process is told."""

    region: str
    push: float
    size: int
    rounds: int
    steps_per_round: int
    step_seconds: float
    token_key: str
    identity: str
    """Folder with the authority's certificate and the region's own, with its key."""
    channel: str
    events: str
    final: str
    """Where the model goes in the end."""
    addresses: dict[str, str]
    """Of all regions' exchange ports."""


def change(push: float, sequence: int, size: int) -> Vector:
    """What a region's round does to the model."""
    found = np.zeros(size, np.float32)
    found[::_GAP] = push * (1 + sequence % 5) * (1 + np.arange(-(-size // _GAP)) % 7)
    return found


def total(pushes: dict[str, float], rounds: int, size: int) -> Vector:
    """The model that all regions must end with."""
    summed = np.zeros(size, np.float64)
    for push in pushes.values():
        for sequence in range(1, rounds + 1):
            summed += change(push, sequence, size)
    return np.asarray(_BEGIN + summed / len(pushes), np.float32)


class _Worker:
    """The worker of a region."""

    def __init__(self, config: SiteConfig) -> None:
        self._config = config
        self._channel = FileChannel(config.channel)
        self._model: Vector = np.full(config.size, _BEGIN, np.float32)
        self._layout = Layout((Slot("w", (config.size,), "float32"),), 1)

    def run(self) -> None:
        with Path(self._config.events).open("a", buffering=1) as events:
            try:
                with PsClient(self._invocation(), time.monotonic() + 1e6) as client:
                    self._train(client, lambda **facts: events.write(json.dumps(facts) + "\n"))
                events.write('{"done": true}\n')
            except GeofedError as error:
                events.write(json.dumps({"failed": f"{error.code}: {error.message}"}) + "\n")

    def _invocation(self) -> Invocation:
        config = self._config
        token = sign(WorkerIdentity(JOB, config.region, 0, 1, 1), config.token_key, timedelta(minutes=15))
        return Invocation(
            job=JOB, region=config.region, worker=0, workers=1, attempt=1, token=token,
            ps_address=f"127.0.0.1:{PORTS['worker']}", ps_name=region_name(config.region),
            ca_pem=Path(config.identity, "ca.pem").read_text(), channel="file", channel_address=config.channel,
            bundle_key="", module="", config={}, splits={}, region_batch=1, steps_per_round=config.steps_per_round,
            rounds=config.rounds, seed=0, slice_seconds=1e6,
        )  # fmt: skip

    def _put(self, key: str) -> str:
        self._channel.put(key, framing.encode({"model": self._model}))
        return key

    def _get(self, key: str, name: str) -> Vector:
        value = self._channel.get(key)
        if value is None:
            raise GeofedError("INTERNAL", f"{key} has gone from the channel")
        return np.array(framing.decode(value).tensors[name], np.float32)

    def _train(self, client: PsClient, tell: Any) -> None:
        config = self._config
        request = worker_pb2.AttachRequest(layout_json=self._layout.to_json(), initial_key=self._put("init/1/0"))
        start = client.attach(request)
        if start.model_key:
            self._model = self._get(start.model_key, "model")
        done, begun = start.round, time.monotonic()
        while done < config.rounds:
            ready = self._model + change(config.push, done + 1, config.size)
            for step in range(1, config.steps_per_round + 1):
                time.sleep(max(0.0, begun + step * config.step_seconds - time.monotonic()))
            self._model, computed = ready, time.monotonic()
            reply = client.boundary(
                worker_pb2.BoundaryRequest(
                    round=done + 1,
                    step=(done + 1) * config.steps_per_round,
                    digest=framing.digest_of([self._model.data.cast("B")]),
                    samples=10.0,
                    loss=1.0,
                    model_key=self._put(f"b/1/{done + 1}/model"),
                )
            )
            if reply.model_key:
                self._model = self._get(reply.model_key, "model")
            elif reply.correction_key:
                self._model = self._model + self._get(reply.correction_key, "correction")
            done, answered = reply.round, time.monotonic()
            tell(round=done, begun=begun, computed=computed, answered=answered)
            begun = answered
        client.evaluated(worker_pb2.EvaluatedRequest(round=done, samples=1.0, metrics={"accuracy": 0.5}))
        np.save(config.final, self._model)


def _ask(config: SiteConfig, introduce: bool) -> dict[str, Any]:
    """Tell the parameter server of its peers, or just ask how it stands."""
    folder = Path(config.identity)
    pem = {name: (folder / f"{name}.pem").read_bytes() for name in ("ca", "key", "certificate")}
    credentials = grpc.ssl_channel_credentials(pem["ca"], pem["key"], pem["certificate"])
    options = [*channel_options(), ("grpc.ssl_target_name_override", region_name(config.region))]
    others = {region: address for region, address in config.addresses.items() if region != config.region}
    peers = [sync_pb2.PsPeer(region=region, address=address, epoch=1) for region, address in others.items()]
    request = sync_pb2.PsConfig(epoch=1, attempt=0, peers=peers if introduce else [])
    with grpc.secure_channel(config.addresses[config.region], credentials, options=options) as line:
        status = sync_pb2_grpc.PsAdminStub(line).Configure(request, timeout=10)
    return {
        "phase": status.phase,
        "condition": status.condition,
        "applied_updates": status.applied_updates,
        "refused": dict(status.refused),
        "links_down": list(status.links_down),
        "codec": status.codec,
        "error": status.error.message,
    }


def serve(path: str) -> int:
    """Obey the lines on standard input: ``train``, ``introduce``, ``status``."""
    config = SiteConfig(**json.loads(Path(path).read_text()))
    for line in sys.stdin:
        if line.strip() == "train":
            threading.Thread(target=_Worker(config).run, daemon=True).start()
            print("{}", flush=True)
            continue
        try:
            print(json.dumps(_ask(config, line.strip() == "introduce")), flush=True)
        except grpc.RpcError as error:
            print(json.dumps({"unreached": str(error)[:300]}), flush=True)
    return 0


def written(config: SiteConfig, path: Path) -> None:
    path.write_text(json.dumps(asdict(config)))
