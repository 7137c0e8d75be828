"""A model as one vector: everything that it is made of travels, and comes back where it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from geofed_pb.errors import GeofedError
from sync.flat import FlatModel
from sync.layout import Layout, Slot
from sync.module_tensors import Access
from sync.ps.execution.export import to_safetensors


class Everything(nn.Module):
    """Batch norm, a tied parameter, a frozen one, and buffers of several types."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.low = nn.Parameter(torch.randn(4, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.randn(()))
        self.register_buffer("count", torch.tensor(seed + 3, dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("small", torch.tensor([1, 200], dtype=torch.uint8))
        self.register_buffer("scratch", torch.randn(7), persistent=False)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head(self.norm(self.embedding(index))) * self.scale
        return hidden + self.low.float().sum()


def _trained(seed: int) -> Everything:
    module = Everything(seed)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2 + seed):
        optimizer.zero_grad()
        module(torch.tensor([0, 1, 2, 3])).square().mean().backward()
        optimizer.step()
    return module


def _states_equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_a_vector_carries_the_whole_state() -> None:
    trained, fresh = _trained(1), Everything(7)
    assert not _states_equal(trained, fresh)
    vector = FlatModel(trained).vector()
    FlatModel(fresh).load(vector)
    assert _states_equal(trained, fresh)
    assert fresh.head.weight is fresh.embedding.weight
    assert np.array_equal(FlatModel(fresh).vector(), vector)


def test_the_vector_is_a_copy() -> None:
    flat = FlatModel(Everything())
    vector = flat.vector()
    vector[:] = 0
    assert flat.vector().any()


def test_views_are_the_vector_without_a_copy() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    flat = FlatModel(module)
    views = flat.views()
    assert views is not None
    np.testing.assert_array_equal(np.concatenate(views), flat.vector())
    with torch.no_grad():
        module[0].weight[1, 2] = 7.0
    assert 7.0 in views[0]
    # A type that has to be converted, and values that another process holds.
    assert FlatModel(Everything()).views() is None
    flat.use(_Elsewhere(module))
    assert flat.views() is None


def test_the_layout_names_every_tensor_once_and_the_trained_ones_first() -> None:
    layout = FlatModel(Everything()).layout
    names = [slot.name for slot in layout.slots]
    assert names[: layout.trainable] == ["low", "scale", "embedding.weight", "norm.weight", "norm.bias"]
    assert "head.weight" not in names
    assert "scratch" not in names
    assert layout.aliases == (("head.weight", "embedding.weight"),)
    assert layout.trainable_size == 4 + 1 + 15 + 3 + 3
    assert Layout.from_json(layout.to_json()) == layout
    assert Layout.from_json(layout.to_json()).digest == layout.digest


def test_gradients_travel_with_the_rest_of_the_state() -> None:
    module, other = Everything(0), Everything(1)
    module(torch.tensor([0, 1, 2])).sum().backward()
    module.scale.grad = None
    vector = FlatModel(module).gradient()
    flat = FlatModel(other)
    parameters = {
        name: parameter.detach().clone() for name, parameter in other.named_parameters() if parameter.requires_grad
    }
    flat.load_gradient(vector)
    assert other.embedding.weight.grad is not None
    assert torch.equal(other.embedding.weight.grad, module.embedding.weight.grad)  # type: ignore[arg-type]
    assert other.scale.grad is None, "no worker has one: the optimiser is to leave it alone"
    assert torch.equal(other.norm.running_mean, module.norm.running_mean)  # type: ignore[arg-type]
    assert all(torch.equal(dict(other.named_parameters())[name], before) for name, before in parameters.items())


def test_gradients_can_be_put_in_one_part_after_the_other() -> None:
    module, other, whole = Everything(0), Everything(1), Everything(1)
    module(torch.tensor([0, 1, 2])).sum().backward()
    vector, flat = FlatModel(module).gradient(), FlatModel(other)
    cut = flat.layout.slots[0].size + flat.layout.slots[1].size
    flat.load_gradient(vector[:cut])
    assert other.embedding.weight.grad is None
    flat.load_gradient(vector[cut:], cut)
    FlatModel(whole).load_gradient(vector)
    assert np.array_equal(flat.gradient(), FlatModel(whole).gradient())


def test_the_mean_of_two_vectors_is_the_mean_of_the_models() -> None:
    one, other, merged = _trained(1), _trained(2), Everything(9)
    flats = [FlatModel(one), FlatModel(other)]
    FlatModel(merged).load((flats[0].vector() + flats[1].vector()) / 2)
    for name, value in merged.state_dict().items():
        mean = (one.state_dict()[name].double() + other.state_dict()[name].double()) / 2
        expected = mean if value.is_floating_point() else mean.round()
        torch.testing.assert_close(value.double(), expected, rtol=4e-3 if name == "low" else 1e-6, atol=1e-7)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=5))
def test_integers_are_rounded_when_they_are_put_back(values: list[float]) -> None:
    layout = Layout((Slot("w", (1,), "float32"), Slot("n", (len(values),), "int64")), 1)
    cut = layout.tensors(np.array([0.5, *values], np.float32))
    assert cut["n"].dtype == np.int64
    assert cut["n"].tolist() == [round(float(np.float32(value))) for value in values]
    assert cut["w"].tolist() == [0.5]


def _written(folder: Path, data: bytes) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(data)
    return path


def test_what_is_exported_loads_strictly(tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load

    trained, fresh = _trained(1), Everything(5)
    flat = FlatModel(trained)
    data = b"".join(to_safetensors(flat.layout, flat.vector(), {"job": "j"}))
    exported = load(data)
    assert {name: tensor.shape for name, tensor in exported.items()} == {
        name: tensor.shape for name, tensor in trained.state_dict().items()
    }, "a scalar too"
    fresh.load_state_dict(exported, strict=True)
    assert _states_equal(trained, fresh)
    with safe_open(_written(tmp_path, data), "pt") as file:
        assert file.metadata() == {"job": "j", "flat_elements": str(flat.layout.size)}


def test_integers_beyond_float32_travel_exactly() -> None:
    for value in ((1 << 24) + 1, -(1 << 24) - 1, -(1 << 63), (1 << 63) - 1):
        module, other = Everything(), Everything(3)
        module.count.fill_(value)
        FlatModel(other).load(FlatModel(module).vector())
        assert other.count.item() == value


def test_a_complex_parameter_is_refused() -> None:
    module = nn.Linear(2, 2)
    module.extra = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(GeofedError, match="extra of the model is complex"):
        FlatModel(module)


def test_a_model_that_cannot_be_trained_is_refused() -> None:
    with pytest.raises(GeofedError, match="no trainable parameters"):
        FlatModel(nn.Linear(1, 1).requires_grad_(False))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"slots":[],"trainable":1,"aliases":[]}',
        '{"slots":[{"name":"a","shape":[-1],"dtype":"float32"}],"trainable":1,"aliases":[]}',
        '{"slots":[{"name":"a","shape":[1e999],"dtype":"float32"}],"trainable":1,"aliases":[]}',
        '{"slots":[{"name":"a","shape":[1],"dtype":"float32"}],"trainable":1,"aliases":[["b","c"]]}',
        '{"slots":[{"name":"a","shape":[],"dtype":"f"},{"name":"a","shape":[],"dtype":"f"}],"trainable":1,"aliases":[]}',
    ],
)
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(GeofedError) as raised:
        Layout.from_json(text)
    assert raised.value.code == "FRAME_INVALID"


def test_a_vector_of_another_length_is_refused() -> None:
    with pytest.raises(GeofedError):
        Layout((Slot("w", (2,), "float32"),), 1).tensors(np.zeros(3, np.float32))


class _Watched(nn.Module):
    """A layer whose bias is a buffer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 2)
        self.register_buffer("bias_now", self.line.bias.data)


def test_a_buffer_that_is_a_parameters_memory_is_another_name_of_it() -> None:
    flat = FlatModel(_Watched())
    assert flat.layout.aliases == (("bias_now", "line.bias"),)
    before = flat.vector()
    flat.add(np.ones_like(before))
    assert np.array_equal(flat.vector(), before + 1)
    flat.check_names()
    assert set(flat.layout.tensors(before)) == {"line.weight", "line.bias", "bias_now"}


def test_a_name_that_becomes_a_tensor_of_its_own_is_refused() -> None:
    module = _Watched()
    flat = FlatModel(module)
    module.bias_now = torch.zeros(2)
    with pytest.raises(GeofedError, match=r"buffer bias_now of the model was line\.bias's memory .* and is not now"):
        flat.check_names()


class _Elsewhere(Access):
    """Parameters whose values are not in the module."""

    def __init__(self, module: nn.Module) -> None:
        self.values = {id(one): one.detach().clone() for one in module.parameters()}

    def is_whole(self, tensor: torch.Tensor) -> bool:
        return id(tensor) not in self.values

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.values.get(id(tensor), tensor)

    def write(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        self.values.get(id(tensor), tensor.detach()).copy_(values)


def test_values_that_are_elsewhere_are_read_and_written_there() -> None:
    modules = [nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2).double()) for _ in range(2)]
    for module in modules:
        module[0].bias.requires_grad_(False)
    modules[1].load_state_dict(modules[0].state_dict())
    here, there = (FlatModel(module, base=["0.bias"]) for module in modules)
    access = _Elsewhere(modules[1])
    there.use(access)
    before = [one.detach().clone() for one in modules[1].parameters()]
    for flat in (here, there):
        flat.base.watch()
        flat.add(np.arange(flat.layout.size, dtype=np.float32))
        flat.load(flat.vector() * 2)
        flat.load_named({name: tensor + 1e-9 for name, tensor in flat.exact().items()})
        flat.base.check(values=True)
    np.testing.assert_array_equal(there.vector(), here.vector())
    assert here.base.digests() == there.base.digests()
    for one, other, kept in zip(*(module.parameters() for module in modules), before, strict=True):
        assert torch.equal(access.values[id(other)], one), "as exact as in a module"
        assert torch.equal(other, kept), "nothing is written to the module's own"
