"""The part of a model that a job has trained, as a file of its own: as safetensors, or in the layout of PEFT."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from geofed_pb.errors import GeofedError

__all__ = ["write_peft", "write_trained"]

_PIECE_BYTES = 8 << 20
"""Bytes that are copied at a time."""
_PEFT_PREFIX = "base_model.model."
_LORA = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
"""A LoRA tensor's name, as `peft` and tasks in plain PyTorch have it."""


class _File:
    """A whole model's safetensors file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            self.head: dict[str, Any] = json.loads(file.read(length))
        self._begin = 8 + length
        self.facts: dict[str, str] = self.head.pop("__metadata__", {})
        constant = set(json.loads(self.facts.pop("base", "[]")))
        self.trained = [name for name in self.head if name not in constant]

    def write(self, target: Path, names: Mapping[str, str]) -> None:
        """Write the tensors of these names under others."""
        head: dict[str, object] = {"__metadata__": self.facts}
        at = 0
        for name, new in names.items():
            start, stop = self.head[name]["data_offsets"]
            head[new] = {**self.head[name], "data_offsets": (at, at + stop - start)}
            at += stop - start
        text = json.dumps(head, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with target.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                for piece in self._pieces(*self.head[name]["data_offsets"]):
                    file.write(piece)

    def _pieces(self, start: int, stop: int) -> Iterator[bytes]:
        with self._path.open("rb") as file:
            file.seek(self._begin + start)
            for at in range(start, stop, _PIECE_BYTES):
                yield file.read(min(_PIECE_BYTES, stop - at))


def write_trained(whole: Path, target: Path) -> dict[str, object]:
    """Write what was exchanged while the model was trained: all but the base. Return digest and bytes."""
    model = _File(whole)
    model.write(target, {name: name for name in model.trained})
    return _told(target)


def write_peft(whole: Path, folder: Path, config: Mapping[str, Any]) -> dict[str, object]:
    """Write `adapter_model.safetensors` and `adapter_config.json` into a folder. Return the digest and bytes of the
    first.

    The trained tensors must be pairs ``MODULE.lora_A.weight`` (rank x in) and ``MODULE.lora_B.weight`` (out x rank).
    ``config``: the task's, whose `alpha` (or `lora_alpha`) is LoRA's; default: the rank.
    Raises ``GeofedError("MODEL_MISMATCH")`` if others were trained.
    """
    model = _File(whole)
    rank, modules = _ranks(model)
    alpha = config.get("lora_alpha", config.get("alpha", rank))
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "adapter_model.safetensors"
    model.write(target, {name: _peft_name(name) for name in model.trained})
    settings = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": modules,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return _told(target)


def _ranks(model: _File) -> tuple[int, list[str]]:
    """Return the rank of all pairs, and the names of their modules in PEFT."""
    pairs: dict[str, dict[str, list[int]]] = {}
    for name in model.trained:
        found = _LORA.fullmatch(name)
        if found is None or len(model.head[name]["shape"]) != 2:
            text = (
                f"{name} was trained, and is no matrix of a LoRA adapter (MODULE.lora_A.weight, MODULE.lora_B.weight)"
            )
            raise _unfit(text)
        pairs.setdefault(found["module"].removeprefix(_PEFT_PREFIX), {})[found["side"]] = model.head[name]["shape"]
    ranks = set()
    for module, sides in pairs.items():
        if sides.keys() != {"A", "B"} or sides["A"][0] != sides["B"][1]:
            raise _unfit(f"{module} has no pair of lora_A (rank x in) and lora_B (out x rank)")
        ranks.add(sides["A"][0])
    if len(ranks) != 1:
        raise _unfit(f"the adapters have ranks {sorted(ranks)}, not one")
    return ranks.pop(), sorted(pairs)


def _unfit(text: str) -> GeofedError:
    return GeofedError("MODEL_MISMATCH", text, hint="--as trained writes any tensors that were trained")


def _peft_name(name: str) -> str:
    plain = name.removeprefix(_PEFT_PREFIX).replace(".default.weight", ".weight")
    return _PEFT_PREFIX + plain


def _told(path: Path) -> dict[str, object]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"digest": f"sha256:{digest}", "bytes": path.stat().st_size}
