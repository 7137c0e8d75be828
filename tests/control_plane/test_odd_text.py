"""No text from outside, in whatever field of whatever message, stops the control plane or is shown as it came."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from control_plane.server import ServeConfig
from geofed_pb.errors import GeofedError
from geofed_pb.rpc import error_of
from geofed_pb.v1 import agent_pb2, control_pb2, control_pb2_grpc
from tests.control_plane.conftest import Stage, staged
from tests.control_plane.scenario import bring_up, run, train

ODD = "a\0b\x1b[2Jc\u202ed\u2066e\u2028f\r\n" + "g" * 5000
"""NUL, a terminal's escape sequence, a change of direction, the end of a line, and more than any limit."""
_NOT_THEIR_FAULT = {"INTERNAL", "UNAVAILABLE"}


def _paths(kind: Descriptor, seen: tuple[str, ...] = ()) -> Iterator[tuple[FieldDescriptor, ...]]:
    """Every path to a text field of a message."""
    for field in kind.fields:
        if field.type == FieldDescriptor.TYPE_STRING:
            yield (field,)
        elif field.message_type is not None and field.message_type.full_name not in seen:
            for rest in _paths(field.message_type, (*seen, kind.full_name)):
                yield (field, *rest)


def _put(message: Message, path: tuple[FieldDescriptor, ...], text: str) -> None:
    field, *rest = path
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        values = getattr(message, field.name)
        if rest[0].name == "key" and field.message_type.fields_by_name["value"].message_type is not None:
            values[text].SetInParent()
        elif rest[0].name == "key":
            is_text = field.message_type.fields_by_name["value"].type == FieldDescriptor.TYPE_STRING
            values[text] = "text" if is_text else 1
        elif len(rest) > 1:
            _put(values["key"], tuple(rest[1:]), text)
        else:
            values["key"] = text
    elif rest:
        inner = getattr(message, field.name)
        inner = inner.add() if field.is_repeated else inner
        _put(inner, tuple(rest), text)
    elif field.is_repeated:
        getattr(message, field.name).append(text)
    else:
        setattr(message, field.name, text)


async def _error(stage: Stage, method: MethodDescriptor, message: Message) -> GeofedError | None:
    """The error of a call; None if there is none, or none within the time of a call that follows."""
    call: Any = getattr(control_pb2_grpc.ControlStub(stage.client._channel), method.name)
    sent = call(message, metadata=stage.client._metadata, timeout=5)
    try:
        if method.server_streaming:
            async for _ in sent:
                pass
        else:
            await sent
    except grpc.aio.AioRpcError as raised:
        if raised.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            return error_of(raised)
    return None


def _told(path: tuple[FieldDescriptor, ...]) -> str:
    return ".".join(field.name for field in path)


def _shown(text: str) -> bool:
    """Whether a terminal shows a text as it is, line by line."""
    hidden = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return all(unicodedata.category(letter) not in hidden or letter in "\t\n" for letter in text)


@pytest.fixture(params=["sqlite", "postgresql"])
def anywhere(serve_config: ServeConfig, request: pytest.FixtureRequest) -> ServeConfig:
    """A control plane on each of the databases."""
    if request.param == "sqlite":
        return serve_config
    return replace(serve_config, database_url=request.getfixturevalue("postgres").database())


@pytest.mark.slow
def test_every_text_of_an_agent_is_stored_or_passed_over(anywhere: ServeConfig) -> None:
    kinds = [path for path in _paths(agent_pb2.FromAgent.DESCRIPTOR) if path[0].name != "hello"]
    assert len(kinds) > 20

    async def scenario() -> None:
        async with staged(anywhere) as stage:
            a, _ = await bring_up(stage)
            for path in kinds:
                message = agent_pb2.FromAgent()
                _put(message, path, ODD)
                a.send(message)
            a.send(agent_pb2.FromAgent(happening=agent_pb2.Happening(kind="ps-ended", text="it is back")))
            await a.settled()
            events = [event async for event in stage.client.watch("", follow=False)]
            assert events[-1].kind == "ps-ended"
            for event in events:
                assert all(map(_shown, (event.kind, event.job, event.region, event.text, event.data_json))), event

    run(scenario())


@pytest.mark.slow
def test_every_text_of_a_user_is_taken_or_refused_with_a_code(anywhere: ServeConfig) -> None:
    service = control_pb2.DESCRIPTOR.services_by_name["Control"]
    methods = [method for method in service.methods if not method.client_streaming]
    assert len(methods) > 15

    async def scenario() -> None:
        async with staged(anywhere) as stage:
            await bring_up(stage)
            for method in methods:
                for path in _paths(method.input_type):
                    message = GetMessageClass(method.input_type)()
                    _put(message, path, ODD)
                    if (error := await _error(stage, method, message)) is None:
                        continue
                    assert error.code not in _NOT_THEIR_FAULT, f"{method.name} {_told(path)}: {error}"
                    assert _shown(error.message + error.hint), f"{method.name} {_told(path)}: {error!r}"
            assert len(await stage.client.regions()) == 2

    run(scenario())


@pytest.mark.slow
def test_any_text_in_a_job_file_reaches_the_agents_as_it_is(anywhere: ServeConfig, job_file: Path) -> None:
    config = {"prompt": ODD}
    spec = job_file.read_text().replace("config: {width: 8}", f"config: {json.dumps(config)}")
    job_file.write_text(spec)

    async def scenario() -> None:
        async with staged(anywhere) as stage:
            a, b = await bring_up(stage)
            job = (await stage.submit(job_file)).job.id
            await train(job, a, b)
            start = await a.command("start")
            assert json.loads(start.task.config_json) == config

    run(scenario())
