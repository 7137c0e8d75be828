"""The calibrated compute as a task module: a model of ResNet-18's tensors whose loss sleeps.

The marks of `peers/peer.py` are left from inside the steps, so that everything between them counts: the worker's own
loop, the ends of rounds, and whatever waits for the network.
"""

import sys
import time

import torch

sys.path.append(PEERS)  # noqa: F821 - put before this text by region.py

from peer import Course, Options, shapes, sleep_until

course = None


class Tensors(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.all = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(shape) * 0.01) for shape in shapes()])
        self.noise = [torch.randn(shape) * 1e-4 for shape in shapes()]


def model(config):
    global course
    course = Course(Options(**config["options"]))
    return Tensors()


def dataset(uri, split, config):
    return torch.utils.data.TensorDataset(torch.zeros(1024, 1))


class Loss(torch.autograd.Function):
    """A gradient of the last tensor only: what a backward pass costs is in the sleep."""

    @staticmethod
    def forward(context, last):
        context.save_for_backward(last)
        return last.sum() * 0.0

    @staticmethod
    def backward(context, gradient):
        (last,) = context.saved_tensors
        return torch.zeros_like(last)


def loss(model, batch):
    if model.begun:
        course.stepped()
    model.begun = True
    begun = time.perf_counter()
    if course.done % 10 == 0:
        # What is sent must be a change: it belongs to the compute, and is in its time.
        with torch.no_grad():
            for parameter, noise in zip(model.all, model.noise, strict=True):
                parameter.add_(noise)
    sleep_until(begun + course.step_s)
    return Loss.apply(model.all[-1])


Tensors.begun = False


def optimizer(parameters, config):
    return torch.optim.SGD(parameters, lr=0.1)
