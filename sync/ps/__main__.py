"""The parameter-server process: ``python -m sync.ps --config FILE``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import functools
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import grpc.aio

from geofed_pb.errors import GeofedError
from geofed_pb.files.durable import write_durably
from geofed_pb.linux import die_with_parent, keep_freed_memory
from geofed_pb.logs import LOG_FORMATS, configure_logs, describe_process
from geofed_pb.rpc import read_pem, server_options
from geofed_pb.security.access import AccessInterceptor
from geofed_pb.tasks import awaited, background
from geofed_pb.tracing import JobTrace, flush
from geofed_pb.v1 import sync_pb2_grpc, worker_pb2_grpc
from sync.channel_clients import open_channel
from sync.codec import MaskedIntegers, codec_named
from sync.file_transfer.access import EXCHANGE_RULES, PeerCheck, end_revoked
from sync.file_transfer.listening import credentials, listen
from sync.ps.config import PsConfig, read_config
from sync.ps.core.events import Configured
from sync.ps.core.ledger import NO_MODEL
from sync.ps.core.machine import Setup
from sync.ps.core.waiting_settings import WaitingSettings
from sync.ps.engine import Engine
from sync.ps.exchange import ExchangeService, PeerLinks
from sync.ps.execution.executor import ActionExecutor
from sync.ps.execution.releases import CountReleases, Releases
from sync.ps.execution.storage import Storage
from sync.ps.mask_keys import MaskKeys
from sync.ps.rejoin import rejoin
from sync.ps.server import WORKER_RULES, AdminService, WorkerCheck, WorkerService
from sync.secure import FEWEST_REGIONS, hiding_regions
from sync.tcp_streams.revoked import RevokedSerials
from sync.tcp_streams.sockets import Tls
from sync.wan import ExchangeSettings, policy_of

_TRACING = "geofed-parameter-server"
"""Name of the server in traces."""
_STOP_GRACE_SECONDS = 2.0
"""How long calls under way may take when the server stops."""


async def serve(config: PsConfig) -> None:
    """Run a partition's parameter server until it is stopped. Raises ``GeofedError`` if it fails."""
    revoked = RevokedSerials(config.revoked_file)
    identity = functools.partial(_identity, config, revoked)
    identity()
    engine = _engine(config)
    engine.trace = JobTrace.of(config.traceparent, config.job, _TRACING, region=config.region)
    # Of a collector that is away the agent's log tells; a server's log is the job's.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    describe_process(round=lambda: max(0, engine.machine.sequence))
    links = PeerLinks(engine, config, identity)
    admin = AdminService(engine, config, links)
    engine.feed(Configured(config.epoch, config.attempt, ()))
    peers = frozenset(config.regions) - {config.region}
    of_peers = AccessInterceptor(EXCHANGE_RULES, PeerCheck(config.region, lambda: peers, revoked))
    of_workers = AccessInterceptor(WORKER_RULES, WorkerCheck(config))
    workers = grpc.aio.server(interceptors=[of_workers], options=server_options())
    exchange = grpc.aio.server(interceptors=[of_peers], options=server_options())
    worker_pb2_grpc.add_WorkerPortServicer_to_server(WorkerService(engine, config), workers)
    keys = MaskKeys(engine, config, identity) if engine.executor.setup.masked else None
    service = ExchangeService(engine, config, links, keys)
    sync_pb2_grpc.add_ExchangeServicer_to_server(service, exchange)
    sync_pb2_grpc.add_PsAdminServicer_to_server(admin, exchange)
    ports = {
        "worker": listen(workers, config.worker_listen, credentials(identity, mutual=False)),
        "exchange": listen(exchange, config.exchange_listen, credentials(identity, mutual=True)),
    }
    if config.bulk_port is not None:
        ports["bulk"] = _open_bulk(service, config, identity)
    await workers.start()
    await exchange.start()
    links.start()
    if keys is not None:
        background(keys.exchange(), engine.fail, name="exchange mask keys")
    ending = background(end_revoked(revoked, of_peers, lambda: service.bulk), engine.fail)
    if engine.machine.state_lost:
        background(rejoin(engine, config, identity, links.admission), engine.fail, name="rejoin the job")
    write_durably(config.ready_file, [json.dumps(ports).encode()])
    await _until_stopped(admin, engine)
    ending.cancel()
    await links.close()
    await asyncio.gather(workers.stop(_STOP_GRACE_SECONDS), exchange.stop(_STOP_GRACE_SECONDS))
    await engine.close()
    await asyncio.to_thread(flush, _TRACING)
    if engine.failed is not None:
        raise engine.failed


def _engine(config: PsConfig) -> Engine:
    """Make the engine, with the state that is stored."""
    settings, _ = ExchangeSettings.of(config.wan_settings)
    setup = _setup(config, settings)
    channel = open_channel(config.channel, config.channel_address)
    policy = policy_of(config.wan_policy, config.wan_settings)
    storage = Storage(config.state_dir, setup)
    codec, shares = codec_named(config.codec), dict(config.shares)
    executor = ActionExecutor(
        setup,
        storage,
        channel,
        policy,
        codec,
        settings,
        shares,
        config.part_elements,
        config.initial_model,
        config.initial_own_model,
        config.initial_holds,
        Releases.of(config.privacy_ledger, config.job, config.region, settings, shares, config.steps_per_round),
        CountReleases.of(config.privacy_ledger, config.job, settings, config.stated_bins),
        weighs_by_shares=config.weighs_by_shares,
        local_steps=config.local_steps,
        data_shares=config.data_shares,
        initial_adapter=config.initial_adapter,
    )
    engine = Engine(executor, settings)
    engine.patience_seconds = config.patience_seconds
    engine.machine.state_lost = config.begun and engine.machine.sequence == NO_MODEL and not storage.marked
    if engine.machine.state_lost and settings.noise:
        text = "the region's state is lost: an update that was released before would be made again, with other noise"
        raise GeofedError("STATE_INVALID", text, hint="run the job again, with train.initialModel from this one")
    if not engine.machine.state_lost:
        storage.mark()
    return engine


def _setup(config: PsConfig, settings: ExchangeSettings) -> Setup:
    # If there is only one region, there is nothing to exchange in the background.
    background = bool(settings.background) and len(config.regions) > 1
    return Setup(
        region=config.region,
        regions=tuple(sorted(config.regions)),
        workers=config.workers,
        rounds=config.rounds,
        steps_per_round=config.steps_per_round,
        evaluate_every=config.evaluate_every,
        background=background,
        quorum=int(settings.quorum),
        max_rounds_ahead=int(settings.lead),
        grace_seconds=settings.grace_seconds,
        same_round=background and bool(settings.robust),
        waiting=WaitingSettings.of(config.waiting),
        rerouted=bool(settings.choose_topology),
        sums=background and not (settings.damping or settings.compensation or settings.robust),
        masked=_masked(config, settings),
    )


def _masked(config: PsConfig, settings: ExchangeSettings) -> str:
    """Return the codec of masked updates; empty: updates are not masked.

    Raises ``GeofedError("CONFIG_INVALID")`` where a sum would tell too much, or the codec does not fit.
    """
    fewest, codec = int(settings.secure), codec_named(config.codec)
    masked = isinstance(codec, MaskedIntegers)
    if not settings.secure and not masked:
        return ""
    text = ""
    if not settings.secure or not masked:
        text = f"codec {config.codec} {'is only' if masked else 'cannot be used'} for secure aggregation"
    elif len(config.regions) < max(fewest, FEWEST_REGIONS):
        least = max(fewest, FEWEST_REGIONS)
        text = f"secure aggregation over {len(config.regions)} regions, where at least {least} are asked for"
    elif {*config.regions} != {*config.shares}:
        text = "secure aggregation without each region's share"
    elif (hiding := hiding_regions(config.shares)) < fewest:
        text = f"secure aggregation over {hiding} regions of more than a small share, where {fewest} are asked for"
    if text:
        raise GeofedError("CONFIG_INVALID", text)
    return config.codec


async def _until_stopped(admin: AdminService, engine: Engine) -> None:
    """Wait for a signal, a call that stops the server, or a failure."""
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, admin.stopped.set)
    ends = [awaited(event.wait()) for event in (admin.stopped, engine.broken)]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()


def _identity(config: PsConfig, revoked: RevokedSerials) -> Tls:
    """Read the TLS identity from its files: the agent renews the certificate while this process runs."""
    return Tls(
        read_pem(config.ca_file, "the federation's certificate authority"),
        read_pem(config.certificate_file, "the region's certificate"),
        read_pem(config.key_file, "the region's key"),
        revoked,
    )


@contextlib.contextmanager
def _only_one(state_dir: Path) -> Iterator[None]:
    """Lock the state folder: two servers with the same state would make two updates of the same round."""
    state_dir.mkdir(parents=True, exist_ok=True)
    with (state_dir / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise GeofedError("ILLEGAL_STATE", f"a parameter server is already running on {state_dir}") from None
        yield


def _open_bulk(service: ExchangeService, config: PsConfig, identity: Callable[[], Tls]) -> int:
    host, port = config.exchange_listen.rpartition(":")[0], config.bulk_port or 0
    try:
        return service.open_bulk(host, port, identity)
    except OSError:
        raise GeofedError("PORT_IN_USE", f"cannot listen on {host}:{port}") from None


def main() -> int:
    keep_freed_memory()
    parser = argparse.ArgumentParser(prog="python -m sync.ps", description="parameter server of one partition")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument(
        "--die-with-parent",
        type=int,
        nargs="?",
        const=0,
        metavar="PID",
        help="end when the starting process ends; its number, since it may be gone by now",
    )
    parser.add_argument("--log-format", choices=LOG_FORMATS, default="text", help="format of the log on stderr")
    arguments = parser.parse_args()
    if arguments.die_with_parent is not None:
        die_with_parent(arguments.die_with_parent or os.getppid())
    configure_logs(arguments.log_format, relayed=True)
    try:
        config = read_config(arguments.config)
        describe_process(job=config.job, region=config.region)
        with _only_one(config.state_dir):
            asyncio.run(serve(config))
    except GeofedError as error:
        return _print_error(error)
    except Exception as error:
        logging.getLogger("geofed.ps").exception("the parameter server failed")
        return _print_error(GeofedError("INTERNAL", f"{type(error).__name__}: {error}"))
    return 0


def _print_error(error: GeofedError) -> int:
    print(f"error[{error.code}]: {error.message}\nhint: {error.hint}", file=sys.stderr)
    return int(error.exit)


if __name__ == "__main__":
    sys.exit(main())
