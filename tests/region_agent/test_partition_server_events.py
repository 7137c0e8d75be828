"""Decisions and refusals become events, each once."""

from __future__ import annotations

from geofed_pb.v1 import sync_pb2
from region_agent.partition.server.events import ServerEvents


def test_a_decision_is_told_once_however_often_it_is_repeated() -> None:
    server_events, texts = ServerEvents(), [f"round {n}: codec int8, as fp32 takes too long" for n in (3, 9)]
    (first,) = server_events.new_in(sync_pb2.PsStatus(decisions=texts[:1]))
    assert (first.kind, first.text, first.data) == ("wan.decision", texts[0], {"round": 3})
    assert [told.text for told in server_events.new_in(sync_pb2.PsStatus(decisions=texts))] == texts[1:]
    server_events.server_started()
    assert server_events.new_in(sync_pb2.PsStatus()) == []
    assert server_events.new_in(sync_pb2.PsStatus(decisions=texts)) == []
    assert [told.data for told in server_events.new_in(sync_pb2.PsStatus(decisions=["of no round"]))] == [{}]


def test_refused_updates_are_told_as_they_are_counted() -> None:
    server_events = ServerEvents()
    reasons = {"west": "it is not finite"}
    (one,) = server_events.new_in(sync_pb2.PsStatus(refused={"west": 1}, refusal_reasons=reasons))
    assert (one.kind, one.data) == ("update.refused", {"source": "west", "count": 1})
    assert one.text == "an update of west was not merged: it is not finite"
    assert server_events.new_in(sync_pb2.PsStatus(refused={"west": 1})) == []
    told = server_events.new_in(sync_pb2.PsStatus(refused={"west": 3, "east": 1}))
    assert [(t.data["source"], t.data["count"]) for t in told] == [("east", 1), ("west", 2)]
    server_events.server_started()
    assert len(server_events.new_in(sync_pb2.PsStatus(refused={"west": 1}))) == 1
