"""A worker's connection to its parameter server: calls that survive a restart of the server and end with the slice."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import grpc

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import blocking_channel, error_of, with_token
from geofed_pb.v1 import worker_pb2, worker_pb2_grpc
from region_agent.worker.invocation import Invocation

__all__ = ["PsClient", "SliceOver"]

_UNAVAILABLE_SECONDS = 90.0
"""Time after which a worker whose server does not answer fails; the agent then starts another attempt."""
_PROGRESS_TIMEOUT_SECONDS = 0.5
"""Timeout of a progress report; short, since training waits for it."""
_CALL_TIMEOUT_SECONDS = 30.0
"""Timeout of a call. The server answers `pending` earlier than that."""


class SliceOver(Exception):
    """The slice has ended while the worker waits for an answer; the next invocation repeats the call."""


class PsClient:
    """Blocking calls to the parameter server. Use as a context manager.

    All but `stepped` wait until the server has an answer, and raise `SliceOver` at the end of the slice.
    """

    def __init__(self, invocation: Invocation, slice_ends: float) -> None:
        self._channel = blocking_channel(
            invocation.ps_address, ca_pem=invocation.ca_pem.encode(), name=invocation.ps_name
        )
        self._stub: Any = worker_pb2_grpc.WorkerPortStub(self._channel)
        self._metadata = with_token(invocation.token)
        self._slice_ends = slice_ends

    def __enter__(self) -> PsClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def attach(self, request: worker_pb2.AttachRequest) -> worker_pb2.AttachReply:
        """Announce this worker's invocation to the server."""
        reply: worker_pb2.AttachReply = self._call_until_answered(self._stub.Attach, request)
        return reply

    def reduce(self, request: worker_pb2.ReduceRequest) -> worker_pb2.ReduceReply:
        """Merge a step's gradients at the server; returns once all workers' have arrived."""
        reply: worker_pb2.ReduceReply = self._call_until_answered(self._stub.Reduce, request)
        return reply

    def boundary(self, request: worker_pb2.BoundaryRequest) -> worker_pb2.BoundaryReply:
        """Report the end of a round; returns once the server has the model of the next one."""
        reply: worker_pb2.BoundaryReply = self._call_until_answered(self._stub.Boundary, request)
        return reply

    def evaluated(self, request: worker_pb2.EvaluatedRequest) -> None:
        """Report this worker's part of an evaluation."""
        self._call_until_answered(self._stub.Evaluated, request)

    def stepped(self, request: worker_pb2.SteppedRequest) -> None:
        """Report a step once, without a retry. Raises ``GeofedError("FENCED")`` if the attempt is over."""
        try:
            self._stub.Stepped(request, metadata=self._metadata, timeout=_PROGRESS_TIMEOUT_SECONDS)
        except grpc.RpcError as raised:
            error = error_of(raised)
            if error.code == "FENCED":
                raise error from None

    def _call_until_answered(self, method: Callable[..., Any], request: Any) -> Any:
        while True:
            reply = self._call_with_retries(method, request)
            if not reply.pending:
                return reply
            if time.monotonic() > self._slice_ends:
                raise SliceOver

    def _call_with_retries(self, method: Callable[..., Any], request: Any) -> Any:
        """Call until the server answers. All calls are idempotent, so one whose answer was lost is repeated."""
        deadline = time.monotonic() + _UNAVAILABLE_SECONDS
        backoff = 0.05
        while True:
            try:
                return method(request, metadata=self._metadata, timeout=_CALL_TIMEOUT_SECONDS)
            except grpc.RpcError as raised:
                error = error_of(raised)
            if error.code != "UNAVAILABLE" or time.monotonic() > deadline:
                raise GeofedError(error.code, error.message, hint=error.hint)
            time.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(backoff * 2, 2.0)
