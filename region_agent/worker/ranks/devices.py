"""The devices that one worker computes on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from geofed_pb.errors import GeofedError
from region_agent.worker.invocation import Gpus, Invocation

__all__ = ["devices_of", "devices_seen", "own_device", "per_device"]

_HINT = "the region's operator lets functions see its GPUs, or corrects `capacity.devices`; `regions.avoid`"


def devices_seen(
    gpus: Gpus, worker: int = 0, billed: int = 0, numbers: tuple[int, ...] = ()
) -> tuple[torch.device, ...]:
    """Return the devices of a worker that has so many of the GPUs that this process sees; without one, the CPU.

    They are those with the ``numbers`` that the agent gives it. Without such numbers, workers of one machine are
    distributed over its GPUs by their own. "auto": as many as are billed, or else all. ``billed``: GPUs that the region
    bills for the worker. Raises ``GeofedError("GPUS_TOO_FEW")`` if the process sees fewer.
    """
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus != "auto" and gpus > max(1, seen):
        raise GeofedError("GPUS_TOO_FEW", f"`function.gpus: {gpus}`, and a function sees {seen or 'no'} GPUs here")
    _check_billed(billed, seen)
    if not seen:
        return (torch.device("cpu"),)
    if numbers:
        if max(numbers) >= seen:
            text = f"the region's file gives this worker GPU {max(numbers)}, counted from 0, and a function sees {seen}"
            raise GeofedError("GPUS_TOO_FEW", text, hint=_HINT)
        return tuple(torch.device("cuda", number) for number in numbers)
    wanted = (billed or seen) if gpus == "auto" else gpus
    return tuple(torch.device("cuda", (worker * wanted + place) % seen) for place in range(wanted))


def _check_billed(billed: int, seen: int) -> None:
    if billed > seen:
        text = f"the region bills {billed} GPU{'s' * (billed > 1)} for a worker, and a function sees {seen or 'none'}"
        raise GeofedError("GPUS_TOO_FEW", text, hint=_HINT)


def devices_of(call: Invocation) -> tuple[torch.device, ...]:
    """Return the devices of a worker, one for each of its ranks. Raises ``GeofedError("GPUS_TOO_FEW")``."""
    if call.devices:
        return tuple(map(torch.device, call.devices))
    return devices_seen(call.gpus, call.worker, call.billed_gpus, call.gpu_numbers)


def own_device(call: Invocation) -> torch.device:
    """Return the device of the worker's own process, its first one.

    Tensors that job code puts on "cuda" are then on the same GPU.
    """
    own = devices_of(call)[0]
    if own.type == "cuda":
        torch.cuda.set_device(own)
    return own


def per_device(samples: int, devices: Sequence[torch.device] | int) -> int:
    """Return the largest number of so many samples that one of the devices has; 0 stays 0."""
    return -(-samples // (devices if isinstance(devices, int) else len(devices)))
