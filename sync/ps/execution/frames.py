"""What the frame of an update holds, and the check of a received one before it is acknowledged."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from geofed_pb.errors import GeofedError
from sync import framing
from sync.codec import Codec, codec_by_mark
from sync.layout import Layout
from sync.mapped_files import windows
from sync.secure import check_masked, first_codec

__all__ = ["LAYOUT", "WHOLE", "UpdateShape", "check_received", "sent_layout", "shape_of"]

LAYOUT = "layout"
"""Name of the tensor that holds the model's layout, as JSON, in the update of the initial model."""
WHOLE = "whole"
"""Fact of a frame that holds a whole model instead of a change."""


@dataclass(frozen=True)
class UpdateShape:
    """How the tensors of an update are decoded."""

    codec: Codec
    part: slice
    """The coordinates that it covers."""
    size: int
    """Number of these coordinates."""
    whole: bool
    """Whether it holds a model, not a change."""


def shape_of(frame: framing.Frame, layout: Layout | None) -> UpdateShape:
    """Return how an update is decoded. Raises ``GeofedError("FRAME_INVALID")``.

    The initial model may arrive from another region before the first worker has reported the ``layout``.
    """
    delta = frame.tensors.get("delta")
    if layout is None and delta is None:
        raise GeofedError("FRAME_INVALID", "an update holds no values")
    size = layout.size if layout is not None else delta.size if delta is not None else 0
    part = slice(None)
    if "from" in frame.facts:
        part = slice(_whole_number(frame, "from"), _whole_number(frame, "to"))
        if not 0 <= part.start < part.stop <= size:
            raise GeofedError("FRAME_INVALID", f"an update covers coordinates {part.start} to {part.stop} of {size}")
        size = part.stop - part.start
    trained = None if layout is None else layout.trainable_size - (part.start or 0)
    return UpdateShape(codec_by_mark(_whole_number(frame, "codec"), trained), part, size, WHOLE in frame.facts)


def _whole_number(frame: framing.Frame, name: str) -> int:
    value = frame.facts.get(name, -1.0)
    if not value.is_integer():
        raise GeofedError("FRAME_INVALID", f"an update states {name} {value}")
    return int(value)


def sent_layout(frame: framing.Frame) -> Layout | None:
    """Return the layout that an initial model is sent with; None: there is none. Raises
    ``GeofedError("FRAME_INVALID")``."""
    sent = frame.tensors.get(LAYOUT)
    if sent is None:
        return None
    return Layout.from_json(np.asarray(sent, np.uint8).tobytes().decode(errors="replace"))


def check_received(path: Path, sequence: int, layout: Layout | None, masked: str = "") -> None:
    """Check that a received update can be merged. Raises ``GeofedError("FRAME_INVALID")``.

    ``masked``: the job's codec with secure aggregation, else empty.

    Values of changes may be infinite: the guard refuses such an update when it is merged, in all regions alike.
    """
    with path.open("rb") as file:
        # The mapping is freed with the last array that refers to it.
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    try:
        _check(framing.decode(memoryview(mapped)), sequence, layout, masked)
    except GeofedError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever any codec raises is a fault of the update
        raise GeofedError("FRAME_INVALID", f"{type(error).__name__}: {error}") from None


def _check(frame: framing.Frame, sequence: int, layout: Layout | None, masked: str) -> None:
    if masked and sequence:
        if layout is None or frame.facts.get("codec") != first_codec(masked, sequence).mark:
            raise GeofedError("FRAME_INVALID", "an update that is not masked in a job with secure aggregation")
        check_masked(frame.tensors, layout.size, layout.trainable_size, masked, sequence)
        return
    if sequence == 0:
        # Another layout than that of our own workers is told as their mismatch, when the model is merged.
        layout = sent_layout(frame) or layout
    shape = shape_of(frame, layout)
    if shape.whole:
        raise GeofedError("FRAME_INVALID", "an update of another region holds a model instead of a change")
    if sequence:
        shape.codec.check(frame.tensors, shape.size)
    else:
        model = shape.codec.decode(frame.tensors, shape.size)
        if shape.part != slice(None) or not all(np.isfinite(model[part]).all() for part in windows(model.size, model)):
            raise GeofedError("FRAME_INVALID", "the model that the job begins with is not finite or not whole")
