"""A worker's line to its parameter server: calls that outlive a restart of the server, and end at the slice."""

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

_UNREACHABLE_SECONDS = 90.0
"""After this long without any answer the worker gives up; the agent then decides."""
_NEWS_SECONDS = 0.5
"""Training does not wait longer to be told of."""
_CALL_SECONDS = 30.0
"""Above the server's patience, so that `pending` comes first."""


class SliceOver(Exception):
    """The invocation's time is up while it waits for an answer; nothing is lost by ending here."""


class PsClient:
    """Blocking calls to the parameter server. Use as a context manager."""

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
        reply: worker_pb2.AttachReply = self._until_settled(self._stub.Attach, request)
        return reply

    def reduce(self, request: worker_pb2.ReduceRequest) -> worker_pb2.ReduceReply:
        reply: worker_pb2.ReduceReply = self._until_settled(self._stub.Reduce, request)
        return reply

    def boundary(self, request: worker_pb2.BoundaryRequest) -> worker_pb2.BoundaryReply:
        reply: worker_pb2.BoundaryReply = self._until_settled(self._stub.Boundary, request)
        return reply

    def evaluated(self, request: worker_pb2.EvaluatedRequest) -> None:
        self._until_settled(self._stub.Evaluated, request)

    def stepped(self, request: worker_pb2.SteppedRequest) -> None:
        """Tell of a step, if the server is there to hear of it; raises what it refuses."""
        try:
            self._stub.Stepped(request, metadata=self._metadata, timeout=_NEWS_SECONDS)
        except grpc.RpcError as raised:
            error = error_of(raised)
            if error.code == "FENCED":
                raise error from None

    def _until_settled(self, method: Callable[..., Any], request: Any) -> Any:
        while True:
            reply = self._answered(method, request)
            if not reply.pending:
                return reply
            if time.monotonic() > self._slice_ends:
                raise SliceOver

    def _answered(self, method: Callable[..., Any], request: Any) -> Any:
        """Call until there is an answer; all calls are idempotent, so a lost answer is asked for again."""
        gives_up = time.monotonic() + _UNREACHABLE_SECONDS
        backoff = 0.05
        while True:
            try:
                return method(request, metadata=self._metadata, timeout=_CALL_SECONDS)
            except grpc.RpcError as raised:
                error = error_of(raised)
            if error.code != "UNAVAILABLE" or time.monotonic() > gives_up:
                raise GeofedError(error.code, error.message, hint=error.hint)
            time.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(backoff * 2, 2.0)
