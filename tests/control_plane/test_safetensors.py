"""The size of a model as it travels, from the head of its file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from control_plane._safetensors import flat_bytes


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
