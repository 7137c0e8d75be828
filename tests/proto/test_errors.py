"""Errors keep their code, message and hint from one process to the other."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

import geofed_pb.errors
from geofed_pb.errors import CATALOGUE, Exit, GeofedError, unforeseen_as_internal
from geofed_pb.rpc import answering, error_of, refuse, server_options, streaming, to_proto
from geofed_pb.v1 import common_pb2, control_pb2, control_pb2_grpc

ROOT = Path(geofed_pb.errors.__file__).resolve().parents[2]


@pytest.mark.parametrize("code", sorted(CATALOGUE))
def test_every_error_says_what_to_do_and_survives_the_wire(code: str) -> None:
    assert len(CATALOGUE[code].hint) > 10
    error = GeofedError(code, "it went wrong", hint="mend it")
    again = error_of(common_pb2.Error.FromString(to_proto(error).SerializeToString()))
    assert (again.code, again.message, again.hint, again.exit) == (code, "it went wrong", "mend it", error.exit)


def test_an_unlisted_code_cannot_leave() -> None:
    with pytest.raises(KeyError):
        GeofedError("NO_SUCH_CODE", "text")
    assert error_of(common_pb2.Error(code="FROM_THE_FUTURE", message="x")).code == "INTERNAL"


def test_every_code_is_used_and_every_code_that_is_used_is_listed() -> None:
    rooms = ["control_plane", "region_agent", "sync", "scheduler", "deploy", "proto"]
    sources = [p.read_text() for room in rooms for p in (ROOT / room).rglob("*.py") if "_pb2" not in p.name]
    text = "\n".join(source for source in sources if "CATALOGUE: dict" not in source)
    raised = set(re.findall(r'(?:GeofedError|Refuse|Failed|Reason)\(\s*(?:[a-z.]+, )?"([A-Z_]+)"', text))
    assert raised <= set(CATALOGUE), f"not in the catalogue: {raised - set(CATALOGUE)}"
    unused = {code for code in CATALOGUE if f'"{code}"' not in text}
    assert not unused, f"in the catalogue, but never raised: {unused}"


def test_the_documentation_holds_every_code_as_it_is() -> None:
    text = (ROOT / "docs" / "errors.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    statuses = {int(row[0]) for row in rows if row[0].isdigit()}
    assert statuses == set(Exit)
    codes = {row[0].strip("`"): row[1:] for row in rows if row[0].startswith("`")}
    assert list(codes) == list(CATALOGUE)
    for code, (status, again, meaning, hint) in codes.items():
        entry = CATALOGUE[code]
        assert (int(status), again == "yes", hint) == (entry.exit, entry.retryable, entry.hint), code
        assert meaning.endswith("."), code


class _Failing(control_pb2_grpc.ControlServicer):
    @answering
    async def GetJob(self, request: control_pb2.JobRequest, context: Any) -> control_pb2.Job:
        if request.job == "bug":
            raise ZeroDivisionError
        if request.job == "long":
            raise GeofedError("TASK_FAILED", "größer " * 1_000_000, hint="kürzer " * 1_000_000)
        if request.job == "full":
            raise OSError(28, "No space left on device", "/state/x")
        raise GeofedError("JOB_NOT_FOUND", f"no job {request.job}")

    @streaming
    async def Watch(self, request: control_pb2.WatchRequest, context: Any) -> AsyncIterator[control_pb2.Event]:
        yield control_pb2.Event(cursor=1)
        raise GeofedError("JOB_NOT_FOUND", "it has gone")


async def _ask(job: str) -> GeofedError:
    server = grpc.aio.server(options=server_options())
    control_pb2_grpc.add_ControlServicer_to_server(_Failing(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        try:
            if job == "stream":
                async for _ in stub.Watch(control_pb2.WatchRequest()):
                    pass
            else:
                await stub.GetJob(control_pb2.JobRequest(job=job))
        except grpc.RpcError as error:
            return error_of(error)
        finally:
            await server.stop(None)
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("job", "code", "exit_status"),
    [
        ("x", "JOB_NOT_FOUND", Exit.NOT_FOUND),
        ("stream", "JOB_NOT_FOUND", Exit.NOT_FOUND),
        ("full", "DISK_FULL", Exit.UNAVAILABLE),
        ("bug", "INTERNAL", Exit.BUG),
        ("long", "TASK_FAILED", Exit.JOB_ENDED_BADLY),
    ],
)
def test_what_a_service_raises_reaches_its_caller(job: str, code: str, exit_status: Exit) -> None:
    error = asyncio.run(_ask(job))
    assert (error.code, error.exit) == (code, exit_status)


def test_a_server_that_is_not_there_is_unavailable() -> None:
    async def ask() -> GeofedError:
        async with grpc.aio.insecure_channel("127.0.0.1:9") as channel:
            try:
                await control_pb2_grpc.ControlStub(channel).GetJob(control_pb2.JobRequest(job="x"), timeout=30)
            except grpc.RpcError as error:
                return error_of(error)
        raise AssertionError

    assert asyncio.run(ask()).code == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("details", "told"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:7501: Failed to connect to remote "
            "host: connect: Connection refused (111)",
            "127.0.0.1:7501: Connection refused (111)",
        ),
        (
            "failed to connect to all addresses; last error: UNAVAILABLE: ipv6:%5B::1%5D:7501: connection attempt timed"
            " out before receiving SETTINGS frame",
            "[::1]:7501: connection attempt timed out before receiving SETTINGS frame",
        ),
        ("Socket closed", "Socket closed"),
    ],
)
def test_who_could_not_be_reached_is_told_in_plain_words(details: str, told: str) -> None:
    nothing = grpc.aio.Metadata()
    error = error_of(grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, details))
    assert (error.code, error.message) == ("UNAVAILABLE", told)


def test_a_write_to_a_call_that_the_server_has_ended_is_no_bug() -> None:
    """The status that the server gave is lost (grpc/grpc#36066), so the client asks again."""

    async def ask() -> set[str]:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((_Ending(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        codes = set()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for _ in range(100):
                try:
                    async for _ in channel.stream_stream("/any/call")(_many()):
                        pass
                except grpc.RpcError as error:
                    codes.add(error_of(error).code)
        await server.stop(None)
        return codes

    assert asyncio.run(ask()) <= {"FORBIDDEN", "UNAVAILABLE"}


class _Ending(grpc.GenericRpcHandler):
    """Ends every call before it has read anything."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        async def end(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
            await refuse(context, GeofedError("FORBIDDEN", "not here"))
            yield b""

        return grpc.stream_stream_rpc_method_handler(end)


async def _many() -> AsyncIterator[bytes]:
    for _ in range(20):
        yield b"x" * 10_000


@pytest.mark.parametrize(
    ("why", "code", "hint"),
    [
        ("self signed in chain", "CERTIFICATE_INVALID", "join again"),
        ("certificate is not yet valid: OK", "CERTIFICATE_INVALID", "this machine's clock says 20"),
        ("certificate has expired: OK", "CERTIFICATE_EXPIRED", "this machine's clock says 20"),
    ],
)
def test_a_certificate_that_is_not_trusted_is_told_as_that(why: str, code: str, hint: str) -> None:
    details = (
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:7443: Ssl handshake failed "
        f"(TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1000007d:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: {why}"
    )
    nothing = grpc.aio.Metadata()
    error = error_of(grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, details))
    assert error.code == code
    assert hint in error.hint


def test_an_unforeseen_exception_is_logged_and_becomes_internal() -> None:
    logged: list[str] = []
    log = lambda: logged.append("logged")  # noqa: E731
    with pytest.raises(GeofedError, match="ZeroDivisionError") as caught, unforeseen_as_internal(log, OSError):
        _ = 1 / 0
    assert caught.value.code == "INTERNAL"
    assert logged == ["logged"]


@pytest.mark.parametrize(
    "raised", [GeofedError("JOB_NOT_FOUND", "x"), FileNotFoundError(), asyncio.CancelledError(), KeyboardInterrupt()]
)
def test_a_foreseen_exception_and_an_interruption_pass(raised: BaseException) -> None:
    logged: list[str] = []
    with pytest.raises(type(raised)) as caught, unforeseen_as_internal(lambda: logged.append("logged"), OSError):
        raise raised
    assert caught.value is raised
    assert logged == []
