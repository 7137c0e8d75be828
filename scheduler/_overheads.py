"""The time that a job takes besides its steps; if its model runs in stages to create, distribute, store and load it.

Each item is bytes over rates that a profile has measured: of the channel, of durable storage, and of memory that a
process uses for the first time, which the kernel clears page by page; with models of some hundred megabytes that is
noticeable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scheduler._model import PipelineShape

if TYPE_CHECKING:
    from scheduler.tuning import TaskProfile


__all__ = ["Overheads", "overheads"]

SERVER_SECONDS = 1.0
"""Seconds until a parameter server is ready: it loads its code, and its workers find it."""
LINE_BYTES_PER_SECOND = 500e6
"""Rate of the finished model on its way from the parameter server to the agent and to the control plane: what two
processes of one machine reach with messages over TLS, measured with a model of a gigabyte."""


@dataclass(frozen=True)
class Overheads:
    """Seconds of one partition; all fields are at least 0."""

    first_model: float = 0.0
    """From the start of the functions until their workers have the initial model: stages create their layers and store
    them, the parameter server reads the model and stores it again."""
    first_step: float = 0.0
    """Additional time of the first step and of the end of the first round, in which gradients, the optimiser's state
    and the parameter server's buffers get their memory."""
    round_end: float = 0.0
    """From the last step of a round until all workers have the next model."""
    round_work: float = 0.0
    """What a round takes besides its steps, whether or not workers wait for its end: evaluations."""
    leave: float = 0.0
    """At the end of an invocation: each worker stores its state."""
    enter: float = 0.0
    """At the begin of the next invocation: each worker creates its layers and loads the state. Only here do both count
    in its time slice."""
    again: float = 0.0
    """Between the two, until the function runs again."""
    result: float = 0.0
    """From the end of the last round until the control plane has the model."""

    @property
    def slice_end(self) -> float:
        """Total cost of an invocation's end."""
        return self.leave + self.again + self.enter


def overheads(pipeline: PipelineShape | None, profile: TaskProfile | None) -> Overheads:
    """Return the overheads of a partition in stages; of others only that of an invocation's repetition; none that the
    profile has not measured."""
    if profile is None:
        return Overheads()
    if pipeline is None:
        return Overheads(again=profile.again_seconds)
    if min(profile.stored_bytes_per_second, profile.fresh_bytes_per_second) <= 0.0:
        return Overheads()
    fresh = 1 / profile.fresh_bytes_per_second
    stored = 1 / profile.stored_bytes_per_second
    # A value in the memory of one machine is made of new pages, too.
    its = profile.channel
    up, down = 1 / its.up_bytes_per_second + (fresh if its.cores else 0.0), 1 / its.down_bytes_per_second
    held = [_held(profile, stage.first, stage.last) for stage in pipeline.stages]
    models, states = [one.model for one in held], [one.state for one in held]
    cores, degree = its.cores, pipeline.degree

    def apart(shares: list[float], replicas: int = 1) -> float:
        """Return the time of work that all stages do at once: the largest stage's, or all stages' where they share
        cores."""
        return max(max(shares), sum(shares) * replicas / cores if cores else 0.0)

    both = [model + state for model, state in zip(models, states, strict=True)]
    model, state = sum(models), sum(states)
    making = apart([one.make_seconds for one in held], degree)
    # What a worker reads it copies, and that into its parameters.
    reading = apart(models, degree) * (down + fresh)
    publishing = model * max(stored, up)
    return Overheads(
        # The server reads the model into memory that it has not had, and stores it as an update and as a checkpoint.
        first_model=SERVER_SECONDS + making + apart(models) * up + model * (fresh + stored) + publishing + reading,
        # The server's is that of what it reads the next model into, of the update, and of the merged model.
        first_step=apart(both, degree) * fresh + 3 * model * fresh,
        # The first stage ends its last step when all others have handed theirs over. While the server makes the update,
        # it stores the optimiser's state, and while it stores the model, it puts that into the channel.
        round_end=both[0] * up + max(state, model) * stored + publishing + reading,
        leave=apart(both, degree) * up,
        # The process that serves the function stays, and with it its memory.
        enter=making + apart(both, degree) * down,
        again=profile.again_seconds,
        # A copy of it, the file that it becomes, and the agent's copy; then the control plane keeps it.
        result=model * (3 * fresh + 2 / LINE_BYTES_PER_SECOND + stored),
    )


@dataclass(frozen=True)
class _Held:
    """Bytes that one stage holds."""

    model: float
    state: float
    """The optimiser's."""
    make_seconds: float


def _held(profile: TaskProfile, first: int, last: int) -> _Held:
    layers = profile.layers[first : last + 1]

    def total(name: str) -> float:
        return sum(float(layer.get(name, 0.0)) for layer in layers)

    return _Held(total("parameter_bytes") + total("state_bytes"), total("optimizer_bytes"), total("make_seconds"))
