"""Real parameter servers as processes, and workers that drive them without torch."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from support.pki import Authority, write
from support.warm_servers import ServerProcess, WarmServers

from deploy.local import LOOPBACK, reusable_port
from geofed_pb.errors import GeofedError
from geofed_pb.rpc import channel_options, error_of, region_name, with_token
from geofed_pb.v1 import sync_pb2, sync_pb2_grpc, worker_pb2, worker_pb2_grpc
from sync import framing
from sync.channel_clients import FileChannel
from sync.layout import Layout, Slot, Vector
from sync.ps.config import PsConfig
from sync.ps.tokens import WorkerIdentity, sign
from sync.tcp_streams.sockets import Tls

JOB = "job-1"
TOKEN_KEY = "a key of the right length for a test of it"
LAYOUT = Layout((Slot("w", (64,), "float32"),), 1)
_PATIENCE_SECONDS = 30.0


def wait_until(holds: Callable[[], Any], what: str, seconds: float = _PATIENCE_SECONDS) -> Any:
    """The first true value; fails with what was waited for."""
    deadline = time.monotonic() + seconds
    while not (value := holds()):
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.01)
    return value


class Server:
    """One region's parameter server; may be killed and started again on its state. With ``warm`` this forks it."""

    def __init__(self, folder: Path, authority: Authority, region: str, regions: tuple[str, ...], **more: Any) -> None:
        self.folder, self.region = folder, region
        self.folder.mkdir(parents=True)
        self.identity = more.pop("identity", None) or authority.region(region)
        self._warm: WarmServers | None = more.pop("warm", None)
        files = write(self.identity, folder / "identity")
        self.channel_folder = folder / "channel"
        self.settings: dict[str, Any] = {
            "job": JOB, "region": region, "regions": regions, "epoch": 1, "attempt": 1, "workers": 1, "rounds": 2,
            "steps_per_round": 1, "evaluate_every": 0, "wan_policy": "ma", "channel": "file",
            "channel_address": str(self.channel_folder), "state_dir": folder / "state",
            "worker_listen": f"{LOOPBACK}:{reusable_port()}", "exchange_listen": f"{LOOPBACK}:{reusable_port()}",
            "ready_file": folder / "ready.json",
            "token_key": TOKEN_KEY, "ca_file": files[0], "certificate_file": files[1], "key_file": files[2],
            "stall_seconds": 5.0, **more,
        }  # fmt: skip
        self.log = folder / "log"
        self.process: subprocess.Popen[bytes] | ServerProcess | None = None
        self.ports: dict[str, int] = {}

    def launch(self, *, dies_at: int = -1, **changed: Any) -> None:
        """Start the process; does not wait for it. ``dies_at``: see `WarmServers.start`."""
        self.settings |= changed
        config = self.folder / "ps.json"
        config.write_text(PsConfig(**self.settings).model_dump_json())
        (self.folder / "ready.json").unlink(missing_ok=True)
        if self._warm is not None:
            self.process = self._warm.start(config, self.log, dies_at)
            return
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([sys.executable, "-m", "sync.ps", "--config", str(config)], stderr=log)

    def await_ready(self) -> None:
        assert self.process is not None
        ready = self.folder / "ready.json"
        wait_until(lambda: ready.exists() or self._ended(), f"{self.region} to come up")
        self.ports = json.loads(ready.read_text())
        # Another life of it must be found under the same addresses.
        for kind in ("worker", "exchange"):
            self.settings[f"{kind}_listen"] = f"{LOOPBACK}:{self.ports[kind]}"

    def _ended(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
        return False

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.ports['exchange']}"

    @contextmanager
    def exchange(self, identity: Tls | None = None, name: str | None = None) -> Iterator[grpc.Channel]:
        """A line to the exchange port, with this identity or its own."""
        tls = identity or self.identity
        credentials = grpc.ssl_channel_credentials(tls.ca_pem, tls.key_pem, tls.certificate_pem)
        options = [*channel_options(), ("grpc.ssl_target_name_override", name or region_name(self.region))]
        with grpc.secure_channel(self.address, credentials, options=options) as line:
            yield line

    def configure(
        self, *peers: Server, epoch: int = 1, attempt: int = 0, address: str = "", **more: bool
    ) -> sync_pb2.PsStatus:
        proto = [
            sync_pb2.PsPeer(region=p.region, address=address or p.address, epoch=p.settings["epoch"]) for p in peers
        ]
        return self.configure_peers(*proto, epoch=epoch, attempt=attempt, **more)

    def configure_peers(self, *peers: sync_pb2.PsPeer, epoch: int = 1, **more: Any) -> sync_pb2.PsStatus:
        request = sync_pb2.PsConfig(epoch=epoch, peers=peers, **more)
        with self.exchange() as line:
            return sync_pb2_grpc.PsAdminStub(line).Configure(request, timeout=10)

    def status(self) -> sync_pb2.PsStatus:
        return self.configure()

    def model(self, round_: int = 0) -> bytes:
        """The present model, or that of an evaluated round, as a safetensors file."""
        with self.exchange() as line:
            chunks = sync_pb2_grpc.PsAdminStub(line).GetModel(sync_pb2.PsModelRequest(round=round_), timeout=10)
            try:
                return b"".join(chunk.data for chunk in chunks)
            except grpc.RpcError as raised:
                raise error_of(raised) from None

    def token(self, worker: int = 0, attempt: int = 1, **other: Any) -> str:
        place = (other.get("job", JOB), other.get("region", self.region))
        who = WorkerIdentity(*place, worker, attempt, other.get("workers", self.settings["workers"]))
        return sign(who, other.get("key", TOKEN_KEY), other.get("life", timedelta(minutes=5)))


@dataclass
class NumpyWorker(threading.Thread):
    """One worker in a thread: every step adds `push` to all weights, whatever the data."""

    server: Server
    push: float
    index: int = 0
    attempt: int = 1
    samples: float = 10.0
    pause: float = 0.0
    """Seconds before a step."""
    layout: Layout = LAYOUT
    begins_again: bool = False
    """Once it is fenced, as an agent has it done: from where the server says, in the next attempt."""
    failure: GeofedError | None = None
    finals: list[Vector] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)
        self.channel = FileChannel(self.server.settings["channel_address"])
        self.model = np.full(self.layout.size, 1.0, np.float32)

    __hash__ = threading.Thread.__hash__

    def run(self) -> None:
        while True:
            try:
                self._train()
            except GeofedError as error:
                if error.code == "FENCED" and self.begins_again:
                    self.attempt += 1
                    continue
                self.failure = error
            return

    def _call(self, method: str, request: Any) -> Any:
        """Ask until there is an answer, over restarts of the server."""
        while not self.stop.is_set():
            options = [*channel_options(), ("grpc.ssl_target_name_override", region_name(self.server.region))]
            credentials = grpc.ssl_channel_credentials(self.server.identity.ca_pem)
            with grpc.secure_channel(f"{LOOPBACK}:{self.server.ports['worker']}", credentials, options=options) as line:
                stub: Any = worker_pb2_grpc.WorkerPortStub(line)
                try:
                    token = with_token(self.server.token(self.index, self.attempt))
                    reply = getattr(stub, method)(request, metadata=token, timeout=20)
                    if not reply.pending:
                        return reply
                except grpc.RpcError as raised:
                    error = error_of(raised)
                    if error.code != "UNAVAILABLE":
                        raise error from None
                    self.stop.wait(0.05)
        raise GeofedError("UNAVAILABLE", "the test has stopped this worker")

    def _put(self, key: str, array: Vector) -> str:
        self.channel.put(key, framing.encode({"model": array}))
        return key

    def _load(self, key: str) -> None:
        value = self.channel.get(key)
        assert value is not None, key
        self.model = np.array(framing.decode(value).tensors["model"], np.float32)

    def _add(self, key: str) -> None:
        value = self.channel.get(key)
        assert value is not None, key
        self.model = self.model + np.array(framing.decode(value).tensors["correction"], np.float32)

    def _train(self) -> None:
        steps = self.server.settings["steps_per_round"]
        initial = self._put(f"init/{self.attempt}/{self.index}", self.model)
        start = self._call("Attach", worker_pb2.AttachRequest(layout_json=self.layout.to_json(), initial_key=initial))
        if start.model_key:
            self._load(start.model_key)
        done, known, finished = start.round, start.boundary, start.finished
        while not finished:
            request = worker_pb2.BoundaryRequest(round=done + 1, step=(done + 1) * steps)
            if not known:
                self.stop.wait(self.pause)
                self.model = self.model + np.float32(self.push * (done + 1))
                request.digest = framing.digest_of([self.model.data.cast("B")])
                request.samples, request.loss = self.samples, 1.0
                if self.index == 0:
                    request.model_key = self._put(f"b/{self.attempt}/{done + 1}/model", self.model)
            reply = self._call("Boundary", request)
            if reply.model_key:
                self._load(reply.model_key)
            elif reply.correction_key:
                self._add(reply.correction_key)
            done, known, finished = reply.round, False, reply.finished
            if reply.evaluate and not finished:
                self._call("Evaluated", worker_pb2.EvaluatedRequest(round=done, samples=1.0, metrics={"accuracy": 0.1}))
        request = worker_pb2.EvaluatedRequest(round=done, samples=1.0, metrics={"accuracy": 0.5})
        self._call("Evaluated", request)
        self.finals.append(self.model)
