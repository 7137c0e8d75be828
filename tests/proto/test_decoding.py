"""Messages that no sender may send are refused as they are decoded."""

from __future__ import annotations

from typing import Any

import pytest

from geofed_pb.files.decoding import Undecodable, decoding, too_large
from geofed_pb.v1 import agent_pb2, common_pb2, sync_pb2

LARGEST = (1 << 63) - 1


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda n: agent_pb2.FromAgent(seq=n), "seq"),
        (lambda n: agent_pb2.FromAgent(partition=agent_pb2.PartitionReport(round=n)), "round"),
        (
            lambda n: agent_pb2.FromAgent(
                partition=agent_pb2.PartitionReport(totals=agent_pb2.MeterTotals(sent_bytes={"a": 1, "b": n}))
            ),
            "sent_bytes",
        ),
        (lambda n: sync_pb2.UpdateManifest(merged=[sync_pb2.UpdateManifest(epoch=n)]), "epoch"),
        (lambda n: sync_pb2.OfferReply(have=[sync_pb2.Range(begin=1, end=n)]), "end"),
        (lambda n: common_pb2.BlobRequest(digest="sha256:x", offset=n), "offset"),
    ],
)
def test_a_number_that_no_database_holds_is_found(make: Any, name: str) -> None:
    assert too_large(make(LARGEST)) == ""
    assert too_large(make(LARGEST + 1)) == name
    kind = type(make(1))
    assert decoding(kind.FromString)(make(LARGEST).SerializeToString()) == make(LARGEST)
    refused = decoding(kind.FromString)(make(LARGEST + 1).SerializeToString())
    assert isinstance(refused, Undecodable)
    assert name in refused.reason
