"""PyTorch DistributedDataParallel over gloo, an exchange in every step: plain, with the fp16 hook, with PowerSGD.

A third of a step's compute is its forward pass; the rest is spread over the tensors of the backward pass, so that DDP
sends the first buckets while later gradients are still due. The gradients are there before: computing them is free.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from peer import Course, parse, parser, shapes, sleep_until
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

FORWARD = 1 / 3


class Layer(torch.autograd.Function):
    """Passes its input on; in the backward pass it waits for its share of the compute and hands its gradient over."""

    @staticmethod
    def forward(ctx: Any, signal: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, clock: Clock, at: float):
        ctx.handed = (gradient, clock, at)
        return signal.clone()

    @staticmethod
    def backward(ctx: Any, signal: torch.Tensor):
        gradient, clock, at = ctx.handed
        sleep_until(clock.begun + at)
        return signal, gradient, None, None, None


class Clock:
    begun = 0.0


class Model(torch.nn.Module):
    """The tensors of ResNet-18 and a pass over them that takes the calibrated time."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.randn(shape) * 0.01 for shape in shapes())
        self.gradients = [torch.randn(shape) * 0.01 for shape in shapes()]
        self.clock = Clock()
        self.step_s = step_s

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        self.clock.begun = time.perf_counter()
        sleep_until(self.clock.begun + self.step_s * FORWARD)
        count = len(self.weights)
        for index, (weight, gradient) in enumerate(zip(self.weights, self.gradients, strict=True)):
            at = self.step_s * (FORWARD + (1 - FORWARD) * (count - index) / count)
            signal = Layer.apply(signal, weight, gradient, self.clock, at)
        return signal.sum()


def main() -> None:
    made = parser()
    made.add_argument("--hook", choices=("none", "fp16", "powersgd"), required=True)
    made.add_argument("--bucket-mb", type=int, default=25)
    made.add_argument("--port", type=int, default=29500)
    options = parse(made)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{options.hosts[0]}:{options.port}", rank=options.rank, world_size=len(options.hosts)
    )
    if options.hook == "powersgd":
        # one bucket: its collectives start in callbacks, which overtake each other over gloo where there are several
        dist._DEFAULT_FIRST_BUCKET_BYTES = options.bucket_mb << 20
    course = Course(options, steps_per_exchange=1)
    model = Model(course.step_s)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=options.bucket_mb, gradient_as_bucket_view=True)
    if options.hook == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif options.hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=2, batch_tensors_with_same_shape=True
        )
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    signal = torch.zeros(1, requires_grad=True)
    while course.running:
        begun = time.perf_counter()
        wrapped(signal).backward()
        late = begun + course.step_s
        course.phases["compute"] = course.phases.get("compute", 0.0) + course.step_s
        course.spent("exchange", late)
        course.stepped()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
