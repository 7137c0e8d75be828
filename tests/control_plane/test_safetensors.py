"""The size of a model as it travels, from the head of its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save

from control_plane._safetensors import check_weights, flat_bytes


def test_the_head_is_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(save({"w": np.zeros((3, 4), np.float16), "n": np.array(7, np.int64)}, metadata={"job": "j"}))
    assert flat_bytes(path) == 4 * 13
    path.write_bytes(save({"w": np.zeros(3), "tied": np.zeros(3)}, metadata={"flat_elements": "3"}))
    assert flat_bytes(path) == 4 * 3


@pytest.mark.parametrize("content", [b"", b"safetensors" * 1000, (8).to_bytes(8, "little") + b"[1, 2]  "])
def test_what_is_no_such_file_has_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model").write_bytes(content)
    assert flat_bytes(tmp_path / "model") is None


def _file(path: Path, head: Any, content: bytes = bytes(8)) -> Path:
    text = json.dumps(head).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)
    return path


def _tensor(dtype: Any = "F32", shape: Any = (2,), place: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": place}


def test_weights_are_whole_and_of_known_types(tmp_path: Path) -> None:
    path = tmp_path / "w"
    tensors = {"w": np.zeros((3, 4), ml_dtypes.bfloat16), "n": np.array(7), "none": np.zeros((0, 2), np.float32)}
    path.write_bytes(save(tensors, metadata={"format": "pt"}))
    check_weights(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"it has .* bytes, and by its header"):
        check_weights(path)


@pytest.mark.parametrize(
    ("head", "says"),
    [
        ({"w": _tensor("F8_E8M0")}, "w has the type F8_E8M0"),
        ({"w": _tensor("nan")}, "w has the type nan"),
        ({"w": _tensor(shape=(3,))}, "w is not where"),
        ({"w": _tensor(shape=(-2,))}, "w has no valid shape"),
        ({"w": _tensor(shape=(2.0,))}, "w has no valid shape"),
        ({"w": _tensor(place=(8, 16))}, "w is not where"),
        ({"v": _tensor(), "w": _tensor()}, "w is not where"),
        ({"w": _tensor(place=None)}, "header is damaged"),
        ({"w": _tensor(place=(0,))}, "."),
        ({"w": {}}, "header is damaged"),
        ({"w": 3}, "header is damaged"),
        ({"__metadata__": {}}, "no tensors"),
        ([1], "header is damaged"),
        ("x", "header is damaged"),
    ],
)  # fmt: skip
def test_weights_that_are_not_are_refused_with_the_reason(tmp_path: Path, head: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_weights(_file(tmp_path / "w", head))
