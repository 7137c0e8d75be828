"""Use of gRPC in geofed: channel options, identities in TLS, and errors that are sent with their code.

Every server's certificate contains its role as a DNS name (`control-plane.geofed`, `<region>.region.geofed`). Clients
check that name instead of the address that they connect to, so that addresses may change and NAT works.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import grpc
import grpc.aio

from geofed_pb.bounds import LARGEST_MESSAGE_BYTES, clean
from geofed_pb.errors import CATALOGUE, Exit, GeofedError
from geofed_pb.v1 import common_pb2

__all__ = [
    "CHUNK_BYTES",
    "CONTROL_PLANE_NAME",
    "answering",
    "blocking_channel",
    "channel",
    "channel_options",
    "clock_of",
    "error_of",
    "errors_with_code",
    "peer_address",
    "peer_expiry",
    "peer_region",
    "peer_serial",
    "read_pem",
    "refuse",
    "region_in",
    "region_name",
    "reloading_credentials",
    "server_options",
    "streaming",
    "to_proto",
    "with_token",
]

CHUNK_BYTES = 1 << 20
"""Bytes of a blob in one message."""
CONTROL_PLANE_NAME = "control-plane.geofed"
"""DNS name in the control plane's certificate."""
_REGION_SUFFIX = ".region.geofed"
"""End of the DNS name in a region's certificate."""
_ERROR_KEY = "geofed-error-bin"
"""Key of the error in the trailing metadata of a failed call."""
_CLOCK_KEY = "geofed-clock"
"""Key of the server's clock in the trailing metadata of each answer."""
_STATUS_TEXT_BYTES = 400
"""Longest message in the status of a failed call. gRPC refuses metadata of more than 8 KiB, which contain the error
twice: in the status and in the trailing metadata, both encoded."""
_MESSAGE_BYTES = 3000
"""Longest message of the error in the trailing metadata."""
_HINT_BYTES = 1000
"""Longest hint of the error in the trailing metadata."""
_WRITE_FAILED = "Internal error from Core"
"""Details of a call whose client wrote to it after the server had ended it. The server's own status is then lost
(grpc/grpc#36066), so the error is taken as one of the connection."""
_log = logging.getLogger("geofed.rpc")

_STATUS = {
    Exit.SPEC: grpc.StatusCode.INVALID_ARGUMENT,
    Exit.USAGE: grpc.StatusCode.INVALID_ARGUMENT,
    Exit.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Exit.AUTH: grpc.StatusCode.PERMISSION_DENIED,
    Exit.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Exit.WAIT_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    Exit.CONFLICT: grpc.StatusCode.FAILED_PRECONDITION,
    Exit.INADMISSIBLE: grpc.StatusCode.FAILED_PRECONDITION,
    Exit.JOB_ENDED_BADLY: grpc.StatusCode.FAILED_PRECONDITION,
}


def region_name(region: str) -> str:
    """Return the DNS name in the certificates of a region."""
    return f"{region}{_REGION_SUFFIX}"


def channel_options() -> list[tuple[str, Any]]:
    """Return the options of clients: keep-alive below the idle limits of cloud NATs (at least 240 s), bounded messages,
    and a connection of its own for each channel."""
    return [
        *_message_options(),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 200),
        # An attempt ends before the kernel's third SYN, 3 s after the first, since a new one finds a healed link
        # sooner.
        ("grpc.min_reconnect_backoff_ms", 2_500),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ]


def server_options() -> list[tuple[str, Any]]:
    """Return the options of servers, which match `channel_options`; two servers never share a port."""
    return [
        *_message_options(),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
    ]


def _message_options() -> list[tuple[str, Any]]:
    return [
        ("grpc.max_send_message_length", LARGEST_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", LARGEST_MESSAGE_BYTES),
    ]


def channel(
    address: str, *, ca_pem: bytes, name: str, certificate_pem: bytes | None = None, key_pem: bytes | None = None
) -> grpc.aio.Channel:
    """Open a TLS channel to an address, where the server's certificate must have the name `name`."""
    credentials = grpc.ssl_channel_credentials(ca_pem, key_pem, certificate_pem)
    options = [*channel_options(), ("grpc.ssl_target_name_override", name)]
    return grpc.aio.secure_channel(address, credentials, options=options)


def blocking_channel(address: str, *, ca_pem: bytes, name: str) -> grpc.Channel:
    """Open the same channel for code outside of an event loop."""
    options = [*channel_options(), ("grpc.ssl_target_name_override", name)]
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca_pem), options=options)


def reloading_credentials(load: Callable[[], tuple[bytes, bytes, bytes | None]]) -> grpc.ServerCredentials:
    """Return server credentials that follow changes of key and certificate: each new connection uses the present ones.

    ``load`` returns key, certificate, and the CA of which clients must show a certificate; None: they need none.
    """
    current = [load()]

    def configuration() -> grpc.ServerCertificateConfiguration:
        key, certificate, ca = current[0]
        return grpc.ssl_server_certificate_configuration([(key, certificate)], ca)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        found = load()
        if found == current[0]:
            return None
        current[0] = found
        return configuration()

    mutual = current[0][2] is not None
    # The type stubs don't know that None means "unchanged".
    fetched: Any = fetch
    return grpc.dynamic_ssl_server_credentials(configuration(), fetched, require_client_authentication=mutual)


def with_token(token: str) -> tuple[tuple[str, str], ...]:
    """Return call metadata with a bearer token."""
    return (("authorization", f"Bearer {token}"),)


def peer_region(context: grpc.aio.ServicerContext[Any, Any]) -> str | None:
    """Return the region that the client's certificate is for; None if it has sent none, or one of something else."""
    names = context.auth_context().get("x509_subject_alternative_name") or ()
    return region_in(name.decode(errors="replace") for name in names)


def region_in(names: Iterable[str]) -> str | None:
    """Return the region that one of a certificate's names is of; None if there is none, or more than one."""
    found = {name.removesuffix(_REGION_SUFFIX) for name in names if name.endswith(_REGION_SUFFIX)}
    return found.pop() if len(found) == 1 else None


def peer_serial(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Return the serial number of the client's certificate in hexadecimal; empty if it has sent none."""
    return _shown(context)[0]


def peer_expiry(context: grpc.aio.ServicerContext[Any, Any]) -> float:
    """Return the end of the client's certificate in Unix seconds; 0 if it has sent none."""
    return _shown(context)[1]


def _shown(context: grpc.aio.ServicerContext[Any, Any]) -> tuple[str, float]:
    for pem in context.auth_context().get("x509_pem_cert") or ():
        return _parsed(pem)
    return "", 0.0


@functools.lru_cache(maxsize=1024)
def _parsed(pem: bytes) -> tuple[str, float]:
    # Imported here, since commands of users import this module and need no certificates.
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate(pem)
    return f"{certificate.serial_number:x}", certificate.not_valid_after_utc.timestamp()


def peer_address(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Return the IP address that the client connects from; empty if it is none, as over a Unix socket."""
    kind, _, rest = unquote(context.peer()).partition(":")
    return rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else ""


def to_proto(error: GeofedError) -> common_pb2.Error:
    """Convert an error to its message."""
    return common_pb2.Error(code=error.code, message=error.message, hint=error.hint, retryable=error.retryable)


def error_of(error: grpc.RpcError | common_pb2.Error) -> GeofedError:
    """Return the error of a failed call; for a failure of the connection or of a certificate, the nearest code."""
    if isinstance(error, common_pb2.Error):
        code = error.code if error.code in CATALOGUE else "INTERNAL"
        return GeofedError(code, error.message, hint=error.hint or None)
    for key, value in _trailing(error):
        if key == _ERROR_KEY:
            return error_of(common_pb2.Error.FromString(value))
    raw = _details(error)
    details = _plain(raw)
    status = error.code() if hasattr(error, "code") else grpc.StatusCode.UNKNOWN
    if "CERTIFICATE_VERIFY_FAILED" in raw or "certificate" in raw.lower():
        return _certificate_error(raw)
    if status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
        return GeofedError("UNAVAILABLE", details or str(status))
    if status is grpc.StatusCode.UNAUTHENTICATED:
        return GeofedError("UNAUTHENTICATED", details)
    if status is grpc.StatusCode.UNIMPLEMENTED:
        return GeofedError("ILLEGAL_STATE", "the server is of an earlier version without this", hint="upgrade it first")
    if status is grpc.StatusCode.INTERNAL and raw == _WRITE_FAILED:
        return GeofedError("UNAVAILABLE", "the server ended the call while a message was being sent")
    return GeofedError("INTERNAL", details or str(status))


def _certificate_error(raw: str) -> GeofedError:
    """Return the error for a refused certificate; its validity is checked with this machine's clock."""
    now = f"this machine's clock says {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    if "not yet valid" in raw.lower():
        hint = f"{now}, which is before the certificate's validity: correct the clock, then try again"
        return GeofedError("CERTIFICATE_INVALID", raw, hint=hint)
    if "expired" in raw.lower():
        hint = f"{now}; correct it if that is wrong, otherwise: {CATALOGUE['CERTIFICATE_EXPIRED'].hint}"
        return GeofedError("CERTIFICATE_EXPIRED", raw, hint=hint)
    return GeofedError("CERTIFICATE_INVALID", raw)


def clock_of(trailing: Iterable[tuple[str, str | bytes]] | None) -> float | None:
    """Return the server's clock in Unix seconds from its answer's trailing metadata; None: an older server."""
    clock = next((value for key, value in trailing or () if key == _CLOCK_KEY), None)
    try:
        return float(clock) if isinstance(clock, str) else None
    except ValueError:
        return None


def _clock() -> tuple[str, str]:
    return _CLOCK_KEY, f"{time.time():.3f}"


def _trailing(error: grpc.RpcError) -> Sequence[Any]:
    metadata = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    return tuple(metadata) if metadata else ()


def _details(error: grpc.RpcError) -> str:
    return (error.details() or "") if hasattr(error, "details") else str(error)


_NOT_CONNECTED = re.compile(
    r"(?:failed to connect to all addresses|.*last error).*?ipv[46]:(\S+?): (?:.*: )?(.+)", re.S
)


def _plain(details: str) -> str:
    """Shorten gRPC's text about a failed connection to the address and the reason."""
    found = _NOT_CONNECTED.fullmatch(details)
    return f"{unquote(found[1])}: {found[2]}" if found else details


_Servicer = TypeVar("_Servicer")


async def refuse(context: grpc.aio.ServicerContext[Any, Any], error: GeofedError) -> None:
    """End a call with an error and its code."""
    status = _STATUS.get(error.exit, grpc.StatusCode.INTERNAL)
    message = to_proto(error)
    message.message, message.hint = clean(error.message, _MESSAGE_BYTES), clean(error.hint, _HINT_BYTES)
    trailing = ((_ERROR_KEY, message.SerializeToString()), _clock())
    await context.abort(status, clean(error.message, _STATUS_TEXT_BYTES), trailing)


async def _abort_unforeseen(context: grpc.aio.ServicerContext[Any, Any], method: str, error: Exception) -> None:
    if isinstance(error, OSError) and error.errno == 28:
        await refuse(context, GeofedError("DISK_FULL", f"no space left: {error.filename or 'state directory'}"))
    _log.exception("%s failed", method)
    await refuse(context, GeofedError("INTERNAL", f"{type(error).__name__} in {method}"))


@contextlib.asynccontextmanager
async def errors_with_code(context: grpc.aio.ServicerContext[Any, Any], method: str) -> AsyncIterator[None]:
    """End a call with the code of the error that its method raises."""
    try:
        yield
    except GeofedError as error:
        await refuse(context, error)
    except (asyncio.CancelledError, grpc.aio.AbortError):
        raise
    except Exception as error:  # noqa: BLE001 - no error may leave the process without a code
        await _abort_unforeseen(context, method, error)


def answering(
    method: Callable[[_Servicer, Any, Any], Awaitable[Any]],
) -> Callable[[_Servicer, Any, Any], Awaitable[Any]]:
    """Wrap a servicer method that returns one message, so that its errors reach the caller with their code."""

    @functools.wraps(method)
    async def call(self: _Servicer, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        async with errors_with_code(context, method.__qualname__):
            answer = await method(self, request, context)
            context.set_trailing_metadata((_clock(),))
            return answer

    return call


def streaming(
    method: Callable[[_Servicer, Any, Any], AsyncIterator[Any]],
) -> Callable[[_Servicer, Any, Any], AsyncIterator[Any]]:
    """Wrap a servicer method that yields messages, so that its errors reach the caller with their code."""

    @functools.wraps(method)
    async def call(self: _Servicer, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        async with errors_with_code(context, method.__qualname__):
            async for message in method(self, request, context):
                yield message

    return call


def read_pem(path: Path, what: str) -> bytes:
    """Read a key or certificate; raises ``GeofedError("UNAUTHENTICATED")`` if it is missing."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise GeofedError("UNAUTHENTICATED", f"{what} is missing: {path}") from None
