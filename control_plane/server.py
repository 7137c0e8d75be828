"""The control plane's process: open the state, bind the ports, and serve until a stop signal."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from control_plane.blobs import BlobStore
from control_plane.dashboard import Dashboard
from control_plane.oidc import OidcConfig
from control_plane.pki import REGION_LIFE, Authority, GivenAuthority, hash_secret, new_secret, utc_now
from control_plane.service import (
    AGENT_RULES,
    CONTROL_RULES,
    KEEP,
    WAIT,
    AccessConfig,
    AgentHubService,
    ControlService,
    EnrolmentService,
    Federation,
    JobEntry,
    LeaderSilence,
    LeaderState,
    Measurements,
    MetricsExporter,
    Probing,
    Profiling,
    RegionCheck,
    Replanner,
    SignInService,
    StoreThreads,
    Sweeper,
    UserCheck,
    active_jobs,
)
from control_plane.serving._address import advertised_host, bound_socket, split_address
from control_plane.serving._database import locked_database
from control_plane.serving._garbage import collected_later, short_collections
from control_plane.serving._standby import WhileLeading, standby_server
from control_plane.serving._tracker import keep_tracking
from control_plane.serving._web import Web, serving_routes, standby_routes
from control_plane.store import Store, open_store, upgrade_store
from geofed_pb.address import joined
from geofed_pb.errors import GeofedError
from geofed_pb.files.durable import write_durably
from geofed_pb.rpc import reloading_credentials, server_options
from geofed_pb.security.access import AccessInterceptor
from geofed_pb.security.signing import load_or_create_key
from geofed_pb.storage import Keep
from geofed_pb.tasks import awaited, background, log_only
from geofed_pb.v1 import agent_pb2_grpc, control_pb2_grpc

_log = structlog.get_logger("geofed.server")
_WILDCARDS = ("0.0.0.0", "::", "")
GRACE = timedelta(seconds=3)
"""Time for calls in flight to finish after SIGTERM."""
CERTIFICATE_SECONDS = 60.0
"""Interval at which the control plane's certificate is checked, and its files are read again."""
_LOOK_SECONDS = 0.2
"""Time between two looks of a control plane that stands by at the leader's signs of life, each a read of one row: a
failover is later by this time on average."""
_READ_SECONDS = 60.0
"""Time between two reads of the active jobs by a control plane that stands by: a second of one core with 10,000."""
_RETRY_SECONDS = 1.0
"""Time between two attempts to lead again."""
_AUTHORITY = "authority"
"""Key of the fingerprint of the federation's certificate authority in the database."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class ServeConfig:
    """Configuration of `geofed serve`."""

    state_dir: Path
    """Folder of keys, blobs, and the database unless `database_url` is set."""
    listen: str = "127.0.0.1:7443"
    """host:port for users and enrolment; port 0 chooses a free one."""
    agent_listen: str = "127.0.0.1:7444"
    metrics_listen: str = "127.0.0.1:7445"
    advertise: tuple[str, ...] = ()
    """Public hosts, or host:port; the first goes into invitations."""
    peers: tuple[str, ...] = ()
    """Control ports of the other control planes on the same database, as host or host:port; clients and agents try
    them, too."""
    database_url: str | None = None
    lease: timedelta = timedelta(seconds=30)
    federation: str = "geofed"
    """Name of the federation; fixed at the first start."""
    region_certificate_life: timedelta = REGION_LIFE
    given: GivenAuthority | None = None
    """Certificates of the operator's own CA; None: the control plane has a CA of its own."""
    ready_file: Path | None = None
    """File to write the actual ports to once all listen."""
    probe_wait: timedelta = WAIT
    """How long the first plan of a task waits for its probe."""
    keep: Keep = field(default_factory=lambda: KEEP)
    """Retention rules that differ from the default, by kind."""
    admits_by_price: bool = False
    """Whether a deadline is refused that takes far more workers than other promises while little is free."""
    track: tuple[str, ...] = ()
    """Places that the metrics of all jobs are written to (`control_plane.tracking`)."""
    oidc: OidcConfig | None = None
    """Identity provider by which users sign in; None: there is none."""
    log_format: str = "text"
    """Of the process that writes them."""
    stop_signals: tuple[signal.Signals, ...] = field(default=(signal.SIGTERM, signal.SIGINT))


@dataclass(frozen=True)
class Ports:
    """Actual ports of a server."""

    control: int
    agent: int
    metrics: int


async def serve(config: ServeConfig) -> None:
    """Run until a stop signal: lead, or stand by while another control plane leads on the same database.

    Raises ``GeofedError``: PORT_IN_USE, CONFIG_INVALID, STATE_INVALID, DISK_FULL; UNAVAILABLE if the database cannot be
    reached at the start.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in config.stop_signals:
        loop.add_signal_handler(number, stop.set)
    has_led = False
    while not stop.is_set():
        async with AsyncExitStack() as stack:
            try:
                served = await _unless(stop, _opened(config, stack))
            except GeofedError as error:
                if not has_led or not error.retryable:
                    raise
                _log.warning("cannot lead again yet", code=error.code, error=error.message)
                await _unless(stop, asyncio.sleep(_RETRY_SECONDS))
                continue
            if served is None:
                break
            _log.info("ready", **asdict(served.ports))
            has_led, config = True, served.config
            with short_collections():
                await _unless(stop, served.lost.wait())
            _log.info("stopping")


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, _T]) -> _T | None:
    """Return the result of the work; None if `stop` is set before, which cancels the work."""
    working = awaited(work)
    tasks = (working, awaited(stop.wait()))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@asynccontextmanager
async def running(config: ServeConfig) -> AsyncIterator[Ports]:
    """Run a control plane while the context is open."""
    async with AsyncExitStack() as stack:
        served = await _opened(config, stack)
        yield served.ports


@dataclass(frozen=True)
class _Served:
    ports: Ports
    lost: asyncio.Event
    """Set once another control plane may lead."""
    config: ServeConfig
    """With the actual ports."""


async def _opened(config: ServeConfig, stack: AsyncExitStack) -> _Served:
    """Lead as soon as no other control plane does, load the state and serve."""
    try:
        known: dict[str, JobEntry] = {}
        config, store, leading = await _lead(config, stack, known)
        state = await _open_state(config, store, leading, stack, known)
        ports = await _listen(config, state, stack)
    except OSError as error:
        raise _as_geofed(error) from error
    return _Served(ports, leading.lost, _at(config, ports))


def _at(config: ServeConfig, ports: Ports) -> ServeConfig:
    """Return the configuration with the actual ports."""
    return replace(
        config,
        listen=joined(split_address(config.listen)[0], ports.control),
        agent_listen=joined(split_address(config.agent_listen)[0], ports.agent),
        metrics_listen=joined(split_address(config.metrics_listen)[0], ports.metrics),
    )


async def _lead(
    config: ServeConfig, stack: AsyncExitStack, known: dict[str, JobEntry]
) -> tuple[ServeConfig, Store, LeaderState]:
    """Open the database and begin to lead; until then, stand by, and keep the active jobs ``known``."""
    _prepare(config.state_dir)
    url, shared = stack.enter_context(locked_database(config.state_dir, config.database_url))
    store = stack.enter_context(open_store(url, upgrade=not shared))
    threads = StoreThreads(store, 1)
    stack.push_async_callback(threads.close)
    async with AsyncExitStack() as standing:
        config = await _take(config, store, threads, standing, known)
    leading = LeaderState(store)
    stack.push_async_callback(_release, threads, leading)
    step_down = _stepping_down(leading)
    stack.push_async_callback(_cancel, background(leading.keep(), step_down))
    if store.shared:
        await asyncio.to_thread(upgrade_store, store)
    return config, store, leading


def _stepping_down(leading: LeaderState) -> Callable[[GeofedError], None]:
    """Return what ends the leadership after a failure of a task, so that all begins again from the stored state."""
    return lambda error: leading.step_down(f"a task has failed: {error}")


async def _take(
    config: ServeConfig,
    store: Store,
    threads: StoreThreads,
    standing: AsyncExitStack,
    known: dict[str, JobEntry],
) -> ServeConfig:
    """Return once this control plane leads. Meanwhile tell everybody who asks that another one does."""
    silence, stands_by = LeaderSilence(), False
    name = f"{_own_address(config)} (process {os.getpid()} on {socket.gethostname()})"
    while True:
        try:
            seen = await threads.run(Store.leadership)
            if not store.shared or silence.may_take(seen):
                if await threads.run(partial(Store.take, seen=seen, holder=name)):
                    return config
            elif not stands_by and (authority := await threads.run(lambda store: store.meta(_AUTHORITY))):
                config = await _stand_by(config, seen.holder, authority, standing)
                stands_by = True
                standing.push_async_callback(_cancel, background(_follow_jobs(threads, known), log_only))
        except GeofedError as error:
            if not error.retryable:
                raise
            _log.warning("the database does not answer", code=error.code, error=error.message)
        await asyncio.sleep(_LOOK_SECONDS)


async def _follow_jobs(threads: StoreThreads, known: dict[str, JobEntry]) -> None:
    """Keep the active jobs ``known``, so that little is left to be parsed when this control plane takes over."""
    while True:
        try:
            read = await active_jobs(threads.run, known)
        except GeofedError as error:
            _log.warning("the jobs could not be read ahead", code=error.code, error=error.message)
        else:
            known.clear()
            known.update(read)
        await asyncio.sleep(_READ_SECONDS)


async def _stand_by(config: ServeConfig, leader: str, authority: str, standing: AsyncExitStack) -> ServeConfig:
    """Listen, and refuse every call; return the configuration with the actual ports."""
    error = GeofedError("STANDBY", f"this control plane stands by; the leader is {leader}")
    now = utc_now(time.time())
    own = config.given or Authority.load(config.state_dir / "pki")
    if own is None or authority not in own.trusts:
        raise _foreign(config)
    certificate, key = own.server_certificate(_own_names(config), now)
    control = await standby_server(error, server_options())
    agents = await standby_server(error, server_options())
    control_port = _bind(control, config.listen, _credentials(own, certificate, key, mutual=False))
    agent_port = _bind(agents, config.agent_listen, _credentials(own, certificate, key, mutual=True))
    web = await standing.enter_async_context(
        Web(standby_routes(error), config.metrics_listen, certificate, key, log_only)
    )
    for server in (control, agents):
        await server.start()
        standing.push_async_callback(server.stop, None)
    standing.push_async_callback(_cancel, background(_follow_certificate(web), log_only))
    ports = Ports(control_port, agent_port, web.port)
    _log.info("standing by", leader=leader, **asdict(ports))
    _write_ready(config, ports, leads=False)
    return _at(config, ports)


async def _release(threads: StoreThreads, leading: LeaderState) -> None:
    """Let another control plane take over at once."""
    if not leading.lost.is_set():
        with contextlib.suppress(GeofedError):
            await threads.run(Store.release)


@dataclass(frozen=True)
class _State:
    federation: Federation
    authority: Authority | GivenAuthority
    token_hash: str
    certificate: Path
    key: Path


async def _open_state(
    config: ServeConfig, store: Store, leading: LeaderState, stack: AsyncExitStack, known: Mapping[str, JobEntry]
) -> _State:
    """Open the keys, and load the state, before any request is served."""
    now = utc_now(time.time())
    name = _named(store, config.federation)
    authority = config.given or Authority.open(config.state_dir / "pki", name, now)
    if config.given is None and store.meta(_AUTHORITY) not in (None, "", *authority.trusts):
        raise _foreign(config)
    store.put_meta(_AUTHORITY, authority.fingerprint)
    certificate, key = authority.server_certificate(_own_names(config), now)
    federation = Federation(store, BlobStore(config.state_dir / "blobs"), time.time, config.lease, name, leading)
    audit_key = config.state_dir / "pki" / "audit.key"
    federation.audit.key = load_or_create_key(audit_key, is_new=store.last_audit() is None)
    federation.issues_certificates = authority.issues
    federation.ca_pem = lambda: authority.ca_pem
    federation.allocation.by_price = config.admits_by_price
    stack.push_async_callback(federation.close)
    with collected_later():
        await federation.load(known)
    return _State(federation, authority, _admin_token(config.state_dir, store), certificate, key)


def _foreign(config: ServeConfig) -> GeofedError:
    text = f"the database belongs to a federation whose keys are not those in {config.state_dir / 'pki'}"
    hint = "control planes on one database need the same state directory, shared or mounted"
    return GeofedError("CONFIG_INVALID", text, hint=hint)


async def _listen(config: ServeConfig, state: _State, stack: AsyncExitStack) -> Ports:
    """Bind all ports before serving on any, since replies on one port contain the others."""
    federation, authority = state.federation, state.authority
    sign_ins = SignInService(federation, config.oidc)
    meter = MetricsExporter(federation)
    interceptors = [meter, WhileLeading(federation.leading)]
    measurements = Measurements(federation)
    probing = Probing(federation, measurements, config.probe_wait)
    stack.push_async_callback(probing.close)
    profiling = Profiling(federation, measurements)
    replanner = Replanner(federation)
    access = AccessConfig(authority, "", config.region_certificate_life)
    sweeper = Sweeper(federation, config.keep)
    dashboard = Dashboard(federation, state.token_hash, sign_ins, probing, replanner, sweeper)
    users = ControlService(federation, profiling, probing, replanner, sweeper, measurements, access, sign_ins)
    enrolment = EnrolmentService(federation, authority, config.region_certificate_life)
    checks = health.aio.HealthServicer()
    of_users = AccessInterceptor(CONTROL_RULES, UserCheck(federation, state.token_hash))
    of_agents = AccessInterceptor(AGENT_RULES, RegionCheck(federation))
    federation.rights_changed = partial(_recheck, of_users, of_agents)
    control = grpc.aio.server(interceptors=[*interceptors, of_users], options=server_options())
    control_pb2_grpc.add_ControlServicer_to_server(users, control)
    control_pb2_grpc.add_EnrolmentServicer_to_server(enrolment, control)
    health_pb2_grpc.add_HealthServicer_to_server(checks, control)
    agents = grpc.aio.server(interceptors=[*interceptors, of_agents], options=server_options())
    hub = AgentHubService(federation, measurements, authority, config.region_certificate_life)
    agent_pb2_grpc.add_AgentHubServicer_to_server(hub, agents)

    files = state.certificate, state.key
    control_port = _bind(control, config.listen, _credentials(authority, *files, mutual=False))
    enrolment.agent_port = _bind(agents, config.agent_listen, _credentials(authority, *files, mutual=True))
    users.access = replace(users.access, address=_reached_at(config, control_port))
    step_down = _stepping_down(federation.leading)
    routes = serving_routes(meter, dashboard, federation.leading, _metrics_hash(config.state_dir))
    web = await stack.enter_async_context(Web(routes, config.metrics_listen, state.certificate, state.key, step_down))
    ports = Ports(control_port, enrolment.agent_port, web.port)
    for server in (control, agents):
        await server.start()
        stack.push_async_callback(server.stop, GRACE.total_seconds())
    stack.callback(federation.stop)
    stack.push_async_callback(_cancel, background(_tick(federation), step_down))
    stack.push_async_callback(_cancel, background(_keep_certificate(config, authority, web), step_down))
    stack.push_async_callback(_cancel, background(replanner.run(), step_down))
    stack.push_async_callback(_cancel, background(sweeper.run(), step_down))
    await checks.set("", health_pb2.HealthCheckResponse.SERVING)
    _write_context(config, state, ports)
    if config.track:
        keeping = keep_tracking(config.state_dir / "context.json", config.track, config.log_format)
        stack.push_async_callback(_cancel, background(keeping, log_only))
    return ports


async def _recheck(*interceptors: AccessInterceptor) -> None:
    """End the calls under way whose callers may not make them any more."""
    for interceptor in interceptors:
        await interceptor.recheck()


def _credentials(
    authority: Authority | GivenAuthority, certificate: Path, key: Path, *, mutual: bool
) -> grpc.ServerCredentials:
    """Return credentials that follow changes of all files: those of the CA may be another control plane's."""
    return reloading_credentials(
        lambda: (key.read_bytes(), certificate.read_bytes(), authority.ca_file.read_bytes() if mutual else None)
    )


async def _keep_certificate(config: ServeConfig, authority: Authority | GivenAuthority, web: Web) -> None:
    """Renew the certificate when it is due; new connections use it without a restart."""
    while True:
        await asyncio.sleep(CERTIFICATE_SECONDS)
        try:
            await asyncio.to_thread(authority.server_certificate, _own_names(config), utc_now(time.time()))
            web.reload()
        except (GeofedError, OSError, ValueError) as error:
            _log.warning("the certificate could not be renewed", error=str(error))


async def _follow_certificate(web: Web) -> None:
    """Use the certificate that the leader, which has the same state directory, has renewed."""
    while True:
        await asyncio.sleep(CERTIFICATE_SECONDS)
        try:
            web.reload()
        except (OSError, ValueError) as error:
            # The key and the certificate are replaced one after the other.
            _log.warning("the certificate could not be read again", error=str(error))


async def _tick(federation: Federation) -> None:
    while True:
        await asyncio.sleep(1.0)
        try:
            await federation.tick()
        except GeofedError as error:
            _log.warning("a tick failed", code=error.code, error=error.message)
        except Exception:  # noqa: BLE001 - this task must not end, since leases and promises depend on it
            _log.exception("a tick failed")


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})  # its error, if any, has ended the leadership


def _prepare(state_dir: Path) -> None:
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise GeofedError("CONFIG_INVALID", f"cannot use {state_dir} as state directory: {error.strerror}") from None


def _named(store: Store, wanted: str) -> str:
    name = store.meta("federation")
    if name is None:
        store.put_meta("federation", wanted)
    return name or wanted


def _admin_token(state_dir: Path, store: Store) -> str:
    """Return the hash of the operator's token. A token is created at the first start, or if its file is missing."""
    path, known = state_dir / "admin.token", store.meta("admin_token_hash")
    if known is not None and path.exists():
        return known
    token = new_secret()
    write_durably(path, [f"{token}\n".encode()], mode=0o600)
    store.put_meta("admin_token_hash", hash_secret(token))
    return hash_secret(token)


def _metrics_hash(state_dir: Path) -> str:
    """Return the hash of the token of `/metrics`, which is created at the first start, for Prometheus."""
    path = state_dir / "metrics.token"
    if not path.exists():
        write_durably(path, [new_secret().encode()], mode=0o600)
    return hash_secret(path.read_text().strip())


def _own_names(config: ServeConfig) -> list[str]:
    """Return all names that the server's certificate is valid for."""
    listening = split_address(config.listen)[0]
    return [
        "localhost",
        "127.0.0.1",
        "::1",
        socket.gethostname(),
        *(advertised_host(name) for name in (*config.advertise, *config.peers)),
        *([] if listening in _WILDCARDS else [listening]),
    ]


def _write_context(config: ServeConfig, state: _State, ports: Ports) -> None:
    """Write `context.json`, by which commands find this control plane, and the ready file."""
    host = split_address(config.listen)[0]
    local = joined({"::": "::1", "0.0.0.0": "127.0.0.1", "": "127.0.0.1"}.get(host, host), ports.control)
    context = {
        "address": _reached_at(config, ports.control) if config.advertise or config.peers else local,
        "ca_file": str(state.authority.ca_file.resolve()),
        "token_file": str((config.state_dir / "admin.token").resolve()),
        "federation": state.federation.name,
    }
    write_durably(config.state_dir / "context.json", [json.dumps(context, indent=2).encode()], mode=0o644)
    _write_ready(config, ports, leads=True)


def _write_ready(config: ServeConfig, ports: Ports, *, leads: bool) -> None:
    if config.ready_file is not None:
        address = _own_address(config, ports.control)
        facts = {**asdict(ports), "pid": os.getpid(), "address": address, "leads": leads}
        write_durably(config.ready_file, [json.dumps(facts).encode()], mode=0o644)


def _bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials) -> int:
    host, port = split_address(address)
    bound_socket(host, port).close()  # for the reason, which grpc's error lacks
    try:
        return server.add_secure_port(joined(host, port), credentials)
    except RuntimeError:
        raise GeofedError("PORT_IN_USE", f"cannot listen on {address}") from None


def _own_address(config: ServeConfig, port: int | None = None) -> str:
    """Return the host:port at which others reach this control plane."""
    port = split_address(config.listen)[1] if port is None else port
    if not config.advertise:
        host = split_address(config.listen)[0]
        return joined(socket.gethostname() if host in _WILDCARDS else host, port)
    return _with_port(config.advertise[0], port)


def _reached_at(config: ServeConfig, port: int) -> str:
    """Return the addresses for invitations and contexts, separated by commas."""
    return ",".join([_own_address(config, port), *(_with_port(peer, port) for peer in config.peers)])


def _with_port(address: str, port: int) -> str:
    """Return an address with a port; unchanged if it has one."""
    host = advertised_host(address)
    return joined(host, port) if host in (address, address.strip("[]")) else address


def _as_geofed(error: OSError) -> GeofedError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return GeofedError("DISK_FULL", f"no space left for {error.filename or 'the state directory'}")
    return GeofedError("CONFIG_INVALID", f"{error.filename or 'the state directory'}: {error.strerror}")
