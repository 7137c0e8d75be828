"""What never changes is no part of any vector; what does is never taken for it silently."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from geofed_pb.errors import GeofedError
from sync import framing
from sync.base import frozen_parameters, possibly_constant, written
from sync.channel_clients import FileChannel
from sync.flat import FlatModel, layout_of
from sync.layout import Layout
from sync.ps.execution.base import BaseFiles
from sync.ps.execution.export import BASE_FACT, base_in, from_safetensors, to_safetensors


class Adapted(nn.Module):
    """A frozen matrix with a low-rank addition, statistics, a mask and a count."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.whole = nn.Linear(64, 64, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(64, 2, bias=False), nn.Linear(2, 64, bias=False)
        self.norm = nn.BatchNorm1d(64)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("exact", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("count", torch.tensor(0))
        self.other = self.whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += len(x)
        found: torch.Tensor = self.norm(self.whole(x) + self.up(self.down(x)))
        return found


CONSTANT = {"whole.weight", "mask", "exact"}


def _flat(seed: int = 0) -> FlatModel:
    module = Adapted(seed)
    flat = FlatModel(module, base=CONSTANT)
    flat.base.watch()
    return flat


def _step(module: nn.Module) -> None:
    module.train()(torch.ones(4, 64)).square().mean().backward()


def test_only_what_changes_is_in_a_vector() -> None:
    flat = _flat()
    layout = flat.layout
    assert {slot.name for slot in layout.base} == CONSTANT
    assert layout.aliases == (("other.weight", "whole.weight"),)
    assert {slot.name for slot in layout.slots} >= {"down.weight", "norm.running_mean", "count"}
    trained = sum(p.numel() for p in flat.module.parameters() if p.requires_grad)
    assert layout.trainable_size == trained
    _step(flat.module)
    assert flat.gradient().size == layout.gradient_size < 64 * 64
    assert layout == layout_of(Adapted().to("meta"), CONSTANT) == Layout.from_json(layout.to_json())


def test_what_may_be_constant_is_found_by_a_step() -> None:
    module = Adapted()
    assert frozen_parameters(module) == {"whole.weight"}
    names = possibly_constant(module)
    assert names == {*CONSTANT, "count"}
    assert written(module, names, lambda: _step(module)) == {"count"}

    def same_values() -> None:
        module.mask.fill_(True) if module.mask.all() else module.mask.copy_(module.mask.clone())
        module.whole.weight.data.mul_(2)

    assert written(module, names, same_values) == {"mask", "whole.weight"}, "the one by its values, the other by writes"


CHANGES: dict[str, tuple[Callable[[Any], object], bool]] = {
    "parameter whole.weight of the model was frozen when": (lambda m: _step(m.requires_grad_(True)), False),
    "parameter whole.weight of the model was not changed by": (lambda m: m.whole.weight.data.add_(1), True),
    "buffer mask of the model was not changed by": (lambda m: m.mask.logical_not_(), False),
    "buffer exact of the model was not changed by": (lambda m: setattr(m, "exact", m.exact + 1), False),
}


@pytest.mark.parametrize("says", CHANGES)
def test_a_later_change_is_refused_by_name(says: str) -> None:
    change, unseen = CHANGES[says]
    flat = _flat()
    _step(flat.module)
    flat.gradient()
    flat.base.check(values=True)
    with torch.no_grad():
        change(flat.module) if "frozen" not in says else None
    if "frozen" in says:
        change(flat.module)
    with pytest.raises(GeofedError, match=says) as raised:
        flat.base.check(values=unseen)
    assert raised.value.code == "TASK_INVALID"
    assert raised.value.hint


def test_other_values_are_told_by_name_and_unknown_ones_are_not() -> None:
    one, other = (flat.layout.with_digests(flat.base.digests()) for flat in (_flat(0), _flat(1)))
    assert one.difference(other) == "whole.weight, which is not trained, has other values here than there"
    assert one.difference(other.without_digests) == one.without_digests.difference(other) == ""
    assert Layout.from_json(one.to_json()) == one
    changes = layout_of(Adapted(), CONSTANT - {"mask"})
    assert one.difference(changes) == "mask never changes here and changes there"
    assert changes.difference(one) == "mask changes here and never changes there"


def test_a_base_goes_from_one_module_to_another() -> None:
    one, other = _flat(0), _flat(1)
    held = framing.decode(b"".join(framing.encode(one.base.contents()))).tensors
    other.base.load(held)
    assert other.base.digests() == one.base.digests()
    with pytest.raises(GeofedError, match="mask of the base has 1 bytes"):
        other.base.load({"mask": np.zeros(1, np.uint8)})


def _exported(flat: FlatModel, folder: Path) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(b"".join(to_safetensors(flat.layout, flat.vector(), {"job": "j"}, flat.base.contents())))
    return path


def test_an_export_holds_the_base_and_says_what_it_is(tmp_path: Path) -> None:
    flat = _flat(3)
    path = _exported(flat, tmp_path)
    loaded = Adapted(4)
    loaded.load_state_dict(safetensors.torch.load_file(path), strict=True)
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), flat.module.state_dict().values(), strict=True)
    )
    with safetensors.safe_open(path, framework="numpy") as file:
        assert set(json.loads(file.metadata()[BASE_FACT])) == {*CONSTANT, "other.weight"}
    assert np.array_equal(from_safetensors(flat.layout, path), flat.vector())
    with pytest.raises(GeofedError, match=r"the values of whole\.weight, which is not trained, are not here"):
        to_safetensors(flat.layout, flat.vector(), {})


def test_a_file_has_the_base_whole_or_not_at_all(tmp_path: Path) -> None:
    flat = _flat()
    path = _exported(flat, tmp_path)
    tensors = safetensors.torch.load_file(path)
    trained = {name: tensor for name, tensor in tensors.items() if name not in {*CONSTANT, "other.weight"}}
    for kept, found in (({}, set()), ({"mask": tensors["mask"]}, None)):
        safetensors.torch.save_file({**trained, **kept}, path)
        assert np.array_equal(from_safetensors(flat.layout, path), flat.vector())
        if found is not None:
            assert base_in(flat.layout, path) == {}
        else:
            with pytest.raises(GeofedError, match=r"has no exact, whole\.weight"):
                base_in(flat.layout, path)


def test_a_server_keeps_what_workers_make_and_gives_what_a_file_holds(tmp_path: Path) -> None:
    (tmp_path / "channel").mkdir()
    channel, flat = FileChannel(tmp_path / "channel"), _flat()
    made = BaseFiles(tmp_path, channel, None)
    layout = made.completed(flat.layout.with_digests(flat.base.digests()))
    assert made.publish(layout) == ""
    for _ in range(2):
        channel.put("init/1/base-0", framing.encode(flat.base.contents()))
        made.take("init/1/base-0")
        assert not channel.has("init/1/base-0")
    assert {name: bytes(held.data) for name, held in BaseFiles(tmp_path, channel, None).contents(layout).items()} == {
        name: bytes(held.data) for name, held in flat.base.contents().items()
    }
    other = _flat(1)
    given = BaseFiles(tmp_path / "given", channel, _exported(other, tmp_path))
    layout = given.completed(layout)
    assert layout.base_digests == other.base.digests(), "whatever the worker has made"
    stored = channel.get(given.publish(layout))
    assert stored is not None
    flat.base.load(framing.decode(stored).tensors)
    assert flat.base.digests() == layout.base_digests


def test_a_part_of_the_base_is_given_and_the_rest_is_what_workers_make(tmp_path: Path) -> None:
    (tmp_path / "channel").mkdir()
    channel, flat = FileChannel(tmp_path / "channel"), _flat()
    path = tmp_path / "weights.safetensors"
    given = {"other.weight": torch.full((64, 64), 2.0, dtype=torch.bfloat16), "elsewhere": torch.zeros(3)}
    safetensors.torch.save_file(given, path)
    base = BaseFiles(tmp_path, channel, path, holds="some")
    own = flat.base.digests()
    layout = base.completed(flat.layout.with_digests(own))
    channel.put("init/1/base-0", framing.encode(flat.base.contents()))
    base.take("init/1/base-0")
    stored = channel.get(base.publish(layout))
    assert stored is not None
    flat.base.load(framing.decode(stored).tensors)
    assert torch.equal(flat.module.state_dict()["whole.weight"], torch.full((64, 64), 2.0))
    assert flat.base.digests() == layout.base_digests
    assert {name for name, digest in own.items() if digest == layout.base_digests[name]} == {"mask", "exact"}
    again = BaseFiles(tmp_path, channel, path, holds="some").contents(layout)
    assert {name: bytes(held.data) for name, held in again.items()} == {
        name: bytes(held.data) for name, held in flat.base.contents().items()
    }
    with pytest.raises(GeofedError, match=r"has no count, down\.weight"):
        BaseFiles(tmp_path, channel, path, holds="all").completed(flat.layout)
