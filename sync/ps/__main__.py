"""The parameter-server process: ``python -m sync.ps --config FILE``."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import logging
import os
import signal
import sys
from pathlib import Path

import grpc
import grpc.aio

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import read_pem, server_options
from geofed_pb.v1 import sync_pb2_grpc, worker_pb2_grpc
from sync.channel import open_channel
from sync.ps.config import PsConfig, read_config
from sync.ps.engine import open_engine
from sync.ps.link import Tls
from sync.ps.machine import Setup
from sync.ps.server import AdminService, ExchangeService, Links, WorkerService
from sync.ps.storage import write_durably
from sync.wan import policy_named

_PR_SET_PDEATHSIG = 1
_STOP_GRACE_SECONDS = 2.0


async def serve(config: PsConfig) -> None:
    """Run one partition's parameter server until it is told to stop."""
    setup = Setup(
        region=config.region,
        regions=config.regions,
        workers=config.workers,
        rounds=config.rounds,
        steps_per_round=config.steps_per_round,
        evaluate_every=config.evaluate_every,
    )
    tls = Tls(
        read_pem(config.ca_file, "the federation's certificate authority"),
        read_pem(config.certificate_file, "the region's certificate"),
        read_pem(config.key_file, "the region's key"),
    )
    channel = open_channel(config.channel, config.channel_address)
    engine = open_engine(setup, config.state_dir, channel, policy_named(config.wan_policy))
    engine.machine.epoch, engine.machine.attempt = config.epoch, config.attempt
    links = Links(engine, config, tls)
    admin = AdminService(engine, config, links)

    pair = [(tls.key_pem, tls.certificate_pem)]
    workers, exchange = grpc.aio.server(options=server_options()), grpc.aio.server(options=server_options())
    worker_pb2_grpc.add_WorkerPortServicer_to_server(WorkerService(engine, config), workers)
    sync_pb2_grpc.add_ExchangeServicer_to_server(ExchangeService(engine, config, links), exchange)
    sync_pb2_grpc.add_PsAdminServicer_to_server(admin, exchange)
    ports = {
        "worker": _listen(workers, config.worker_listen, grpc.ssl_server_credentials(pair)),
        "exchange": _listen(exchange, config.exchange_listen, _reloading_credentials(config)),
    }
    await workers.start()
    await exchange.start()
    write_durably(config.ready_file, [json.dumps(ports).encode()])
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, admin.stopped.set)
    ends = [asyncio.ensure_future(event.wait()) for event in (admin.stopped, engine.broken)]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()
    await links.close()
    await asyncio.gather(workers.stop(_STOP_GRACE_SECONDS), exchange.stop(_STOP_GRACE_SECONDS))
    await engine.close()
    if engine.failed is not None:
        raise engine.failed


def _reloading_credentials(config: PsConfig) -> grpc.ServerCredentials:
    """Mutual TLS whose certificate is read again when the agent has renewed it."""
    seen: list[float] = []

    def load() -> grpc.ServerCertificateConfiguration:
        seen[:] = [config.certificate_file.stat().st_mtime]
        pair = (config.key_file.read_bytes(), config.certificate_file.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], config.ca_file.read_bytes())

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        return load() if config.certificate_file.stat().st_mtime != seen[0] else None

    # The stubs leave out that None means "as before".
    return grpc.dynamic_ssl_server_credentials(load(), fetch, require_client_authentication=True)  # type: ignore[arg-type]


def _listen(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials) -> int:
    try:
        return server.add_secure_port(address, credentials)
    except RuntimeError:
        raise GeofedError("PORT_IN_USE", f"cannot listen on {address}") from None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sync.ps", description="parameter server of one partition")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--die-with-parent", action="store_true", help="end when the starting process ends")
    arguments = parser.parse_args()
    if arguments.die_with_parent:
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return 1
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(serve(read_config(arguments.config)))
    except GeofedError as error:
        print(f"error[{error.code}]: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return int(error.exit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
