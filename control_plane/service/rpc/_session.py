"""What goes out on the stream of one agent's connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from google.protobuf.message import DecodeError

from control_plane.store import CommandRow
from geofed_pb.bounds import SESSION_MESSAGE_BYTES
from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2


class AgentSession:
    """An agent's connection, seen from the control plane; a later one of the same region ends it."""

    def __init__(self, region: str, number: int, command_cursor: int, report_cursor: int) -> None:
        self.region = region
        self.number = number
        self.report_cursor = report_cursor
        """Last report that was applied when the session began."""
        self._sent = command_cursor
        self._messages: list[agent_pb2.ToAgent] = []
        self._commands = False
        self._ended = False
        self._failure: GeofedError | None = None
        self._news = asyncio.Event()

    def send(self, message: agent_pb2.ToAgent) -> None:
        """Have a message that need not survive the connection sent."""
        self._messages.append(message)
        self._news.set()

    def wake(self) -> None:
        """There are new commands in the store."""
        self._commands = True
        self._news.set()

    def end(self, failure: GeofedError | None = None) -> None:
        """Close the stream, with an error where the agent has to know why."""
        self._failure = self._failure or failure
        self._ended = True
        self._news.set()

    @property
    def ended(self) -> bool:
        """True once the stream is being closed."""
        return self._ended

    async def outgoing(
        self,
        load: Callable[[int], Awaitable[list[CommandRow]]],
        refuse: Callable[[CommandRow, GeofedError], Awaitable[None]],
    ) -> AsyncIterator[agent_pb2.ToAgent]:
        """All that is to be sent, until the session ends; `load(seq)` reads the commands after `seq`, `refuse` takes
        those that cannot be sent."""
        while True:
            await self._news.wait()
            self._news.clear()
            if self._ended:
                if self._failure is not None:
                    raise self._failure
                return
            messages, self._messages = self._messages, []
            for message in messages:
                yield message
            if self._commands:
                self._commands = False
                while commands := await load(self._sent):
                    for command in commands:
                        self._sent = command.seq
                        read = _read(command)
                        if isinstance(read, GeofedError):
                            await refuse(command, read)
                        else:
                            yield read


def _read(command: CommandRow) -> agent_pb2.ToAgent | GeofedError:
    try:
        message = agent_pb2.ToAgent.FromString(command.payload)
    except DecodeError as error:
        return GeofedError("FRAME_INVALID", f"it cannot be read any more: {error}")
    message.seq = command.seq
    if (length := message.ByteSize()) > SESSION_MESSAGE_BYTES:
        hint = "make the job file's task.config smaller"
        text = f"it has {length:,} bytes; {SESSION_MESSAGE_BYTES:,} at most are sent"
        return GeofedError("LIMIT_EXCEEDED", text, hint=hint)
    return message
