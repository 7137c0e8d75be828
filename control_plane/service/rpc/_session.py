"""Outgoing messages of one agent's session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from google.protobuf.message import DecodeError

from control_plane.store import COMMANDS_AT_ONCE, CommandRow
from geofed_pb.bounds import SESSION_MESSAGE_BYTES
from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2


class AgentSession:
    """The control plane's end of an agent's connection; a later session of the same region ends it."""

    def __init__(self, region: str, number: int, command_cursor: int, report_cursor: int) -> None:
        self.region = region
        self.number = number
        self.report_cursor = report_cursor
        """Sequence number of the last report applied when the session began."""
        self._sent = command_cursor
        self._messages: list[agent_pb2.ToAgent] = []
        self._commands = False
        self._ended = False
        self._failure: GeofedError | None = None
        self._wakeup = asyncio.Event()

    def send(self, message: agent_pb2.ToAgent) -> None:
        """Send a message that may be lost with the connection."""
        self._messages.append(message)
        self._wakeup.set()

    def wake(self) -> None:
        """Send the new commands in the store."""
        self._commands = True
        self._wakeup.set()

    def end(self, failure: GeofedError | None = None) -> None:
        """Close the stream, with an error if the agent must know the reason."""
        self._failure = self._failure or failure
        self._ended = True
        self._wakeup.set()

    @property
    def ended(self) -> bool:
        """Whether the stream is being closed."""
        return self._ended

    async def outgoing(
        self,
        load: Callable[[int], Awaitable[list[CommandRow]]],
        refuse: Callable[[CommandRow, GeofedError], Awaitable[None]],
    ) -> AsyncIterator[agent_pb2.ToAgent]:
        """Yield all messages to send until the session ends.

        Args:
            load: returns the stored commands after a sequence number, up to `COMMANDS_AT_ONCE`.
            refuse: called with a command that cannot be sent, and the error.
        """
        while True:
            await self._wakeup.wait()
            self._wakeup.clear()
            if self._ended:
                if self._failure is not None:
                    raise self._failure
                return
            messages, self._messages = self._messages, []
            for message in messages:
                yield message
            if self._commands:
                self._commands = False
                commands = await load(self._sent)
                if len(commands) == COMMANDS_AT_ONCE:
                    self.wake()
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
        return GeofedError("FRAME_INVALID", f"the stored command cannot be parsed: {error}")
    message.seq = command.seq
    if (length := message.ByteSize()) > SESSION_MESSAGE_BYTES:
        hint = "make the job file's task.config smaller"
        text = f"the command has {length:,} bytes and exceeds the limit of {SESSION_MESSAGE_BYTES:,}"
        return GeofedError("LIMIT_EXCEEDED", text, hint=hint)
    return message
