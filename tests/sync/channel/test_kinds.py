"""Kinds of channels: each opens, and region files may name each."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import get_args

import pytest

from geofed_pb.errors import GeofedError
from region_agent.config import RegionConfig
from sync.channel import DEFAULT, channel_kind, channel_kinds


def test_region_files_may_name_each_kind() -> None:
    configured = [get_args(one.model_fields["kind"].annotation)[0] for one in get_args(_annotation())]
    assert tuple(configured) == channel_kinds()
    assert RegionConfig.model_fields["channel"].default.kind == DEFAULT


def _annotation() -> object:
    return RegionConfig.model_fields["channel"].annotation


@pytest.mark.parametrize("name", channel_kinds())
def test_it_names_what_opens_it(name: str) -> None:
    assert callable(resolve_name(channel_kind(name).opens))


def test_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(GeofedError, match="unknown channel 'tape'"):
        channel_kind("tape")
