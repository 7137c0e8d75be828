"""State machine of functions and their replicas, without processes, sockets or clock.

A replica is STARTING until it reports ready, READY while it accepts calls, and DRAINING when it may only finish its
present calls. It is removed from the table when it has exited. A function that changes gets a new generation; replicas
of older generations continue serving until the new ones are ready.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import Enum

from geofed_pb.platforms import EDITIONS, Edition
from region_agent.gateway.functions import DIGEST_ANNOTATION, GRANTS_ANNOTATION, SCALE_MIN_LABEL, FunctionSpec, Grants

__all__ = ["FunctionTable", "Refused"]

_FIRST_RESTART_WAIT = timedelta(milliseconds=200)
"""Wait after the first failed start of a replica; it doubles with each further one."""
_LONGEST_RESTART_WAIT = timedelta(seconds=10)
"""Longest wait after a failed start."""


_AGED = -1
"""Generation of replicas that come near their platform's time limit."""


class Refused(Exception):
    """A request that is refused, with the HTTP status and text of the answer."""

    def __init__(self, status: int, text: str, *, exit_reason: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.exit_reason = exit_reason


class ReplicaPhase(Enum):
    """State of a replica."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True)
class Deploy:
    """A client deploys a function, new or existing."""

    spec: FunctionSpec
    """The whole specification."""


@dataclass(frozen=True)
class DeleteFunction:
    """A client deletes a function."""

    name: str
    """Function."""


@dataclass(frozen=True)
class ScaleFunction:
    """A client sets the number of replicas."""

    name: str
    """Function."""
    replicas: int
    """Wanted number, before clamping."""


@dataclass(frozen=True)
class ReplicaReady:
    """A replica is ready for calls."""

    replica: str
    """Replica."""


@dataclass(frozen=True)
class ReplicaExited:
    """A replica's process has ended, for whatever reason."""

    replica: str
    """Replica."""


@dataclass(frozen=True)
class OverLimit:
    """A replica is being killed because it exceeded a limit; it gets no further call."""

    replica: str
    """Replica."""


@dataclass(frozen=True)
class ReplicaNearTimeLimit:
    """A replica comes near its platform's time limit: another one is started, and then takes its place."""

    replica: str
    """Replica."""


@dataclass(frozen=True)
class Expired:
    """A call that a replica begins from now on could exceed the platform's time limit: it gets no further one."""

    replica: str
    """Replica."""


@dataclass(frozen=True)
class RestartDue:
    """The wait after failed starts is over."""

    name: str
    """Function."""
    generation: int
    """Generation whose wait it was."""


@dataclass(frozen=True)
class CallStarted:
    """A call was passed to a replica."""

    replica: str
    """Replica."""


@dataclass(frozen=True)
class CallEnded:
    """A call in a replica has ended."""

    replica: str
    """Replica."""


Event = (
    Deploy
    | DeleteFunction
    | ScaleFunction
    | ReplicaReady
    | ReplicaExited
    | OverLimit
    | ReplicaNearTimeLimit
    | Expired
    | RestartDue
    | CallStarted
    | CallEnded
)


@dataclass(frozen=True)
class StartReplica:
    """Start a process for this replica."""

    replica: str
    """Its name, never used before."""
    spec: FunctionSpec
    """The function it serves."""


@dataclass(frozen=True)
class StopReplica:
    """End the replica's process now."""

    replica: str
    """Replica."""


@dataclass(frozen=True)
class LimitDrain:
    """End the replica's process if it has not finished within the drain time."""

    replica: str
    """Replica."""


@dataclass(frozen=True)
class RestartLater:
    """Report ``RestartDue`` after the wait, since the function's replicas exit before they are ready."""

    due: RestartDue
    """The event to report."""
    wait: timedelta
    """How long to wait."""


Action = StartReplica | StopReplica | LimitDrain | RestartLater


@dataclass
class _Replica:
    name: str
    function: str
    generation: int
    phase: ReplicaPhase = ReplicaPhase.STARTING
    calls: int = 0
    patient: bool = False
    """Whether its calls may end in their own time although it is draining."""


@dataclass
class _Function:
    spec: FunctionSpec
    generation: int
    wanted: int
    invocations: int = 0
    failed_starts: int = 0
    waiting: bool = False


@dataclass
class FunctionTable:
    """The state; ``handle`` is the only way to change it."""

    limits: Edition = field(default_factory=lambda: EDITIONS["none"])
    _functions: dict[str, _Function] = field(default_factory=dict)
    _replicas: dict[str, _Replica] = field(default_factory=dict)
    _counter: int = 0

    def handle(self, event: Event) -> list[Action]:
        """Process an event and return the actions that it requires; a ``Refused`` event changes nothing."""
        match event:
            case Deploy(spec):
                self._deploy(spec)
                return self._reconcile(spec.service)
            case DeleteFunction(name):
                self._function(name)
                del self._functions[name]
                return self._drain(self._of(name))
            case ScaleFunction(name, replicas):
                scaled = self._function(name)
                scaled.wanted = self._clamp(replicas)
                scaled.waiting = scaled.waiting and not (self.limits.bare and replicas)
                return self._reconcile(name)
            case ReplicaReady(name):
                return self._ready(name)
            case ReplicaExited(name):
                return self._exited(name)
            case OverLimit(name):
                return self._condemned(name)
            case ReplicaNearTimeLimit(name):
                return self._aged(name)
            case Expired(name):
                expired = self._replicas.get(name)
                if expired is None:
                    return []
                return self._drain([expired], limit=False) + self._reconcile(expired.function)
            case RestartDue(name, generation):
                function = self._functions.get(name)
                if function is None or function.generation != generation:
                    return []
                function.waiting = False
                return self._reconcile(name)
            case CallStarted(name):
                replica = self._replicas[name]
                replica.calls += 1
                if replica.function in self._functions:
                    self._functions[replica.function].invocations += 1
                return []
            case CallEnded(name):
                return self._call_ended(name)

    # queries

    def names(self) -> list[str]:
        """Names of all functions."""
        return sorted(self._functions)

    def spec(self, name: str) -> FunctionSpec:
        """A function's specification; raises ``Refused`` 404."""
        return self._function(name).spec

    def wanted(self, name: str) -> int:
        """How many replicas it should have."""
        return 0 if self.is_down(name) else self._function(name).wanted

    def is_down(self, name: str) -> bool:
        """Whether its container has ended, and the next call starts another."""
        return self.limits.bare and self._function(name).waiting

    def restart(self, name: str) -> RestartDue:
        """Return the event that starts a function's replicas again."""
        return RestartDue(name, self._function(name).generation)

    def available(self, name: str) -> int:
        """How many replicas count as available."""
        counted = (ReplicaPhase.READY, ReplicaPhase.STARTING) if self.limits.bare else (ReplicaPhase.READY,)
        return sum(replica.phase in counted for replica in self._of(name))

    def invocations(self, name: str) -> int:
        """Calls since it was deployed."""
        return self._function(name).invocations

    def replicas(self, name: str) -> list[str]:
        """All replicas that have not exited."""
        return [replica.name for replica in self._of(name)]

    def pick(self, name: str, max_inflight: int) -> str | None:
        """The replica for the next call: the least loaded, the newest generation first.

        None where no replica is ready yet; raises ``Refused`` 429 where all have ``max_inflight`` calls.
        """
        self._function(name)
        ready = [replica for replica in self._of(name) if replica.phase is ReplicaPhase.READY]
        if not ready:
            return None
        free = [replica for replica in ready if replica.calls < max_inflight]
        if not free:
            raise Refused(
                429, f"function {name}: all {len(ready)} replicas have max_inflight={max_inflight} calls each"
            )
        return min(free, key=lambda replica: (replica.calls, -replica.generation)).name

    # transitions

    def _deploy(self, spec: FunctionSpec) -> None:
        known = self._functions.get(spec.service)
        if known is None:
            most = self.limits.functions
            if most is not None and len(self._functions) >= most:
                raise Refused(400, f"the limit of {most} functions in this edition is reached")
            self._counter += 1
            self._functions[spec.service] = _Function(spec, self._counter, self._initial(spec))
        elif known.spec != spec or self.limits.bare:
            self._counter += 1
            changed = _Function(spec, self._counter, known.wanted, known.invocations)
            if spec.labels.get(SCALE_MIN_LABEL) != known.spec.labels.get(SCALE_MIN_LABEL):
                changed.wanted = self._initial(spec)
            only_labels = replace(spec, labels=known.spec.labels, annotations=known.spec.annotations) == known.spec
            if self.limits.bare:
                # What it may connect to is no part of what OpenFaaS is told.
                only_labels = _without_grants(spec) == _without_grants(known.spec) and spec != known.spec
            if only_labels and Grants.of(spec).places == Grants.of(known.spec).places:
                changed.generation = known.generation
            self._functions[spec.service] = changed

    def _initial(self, spec: FunctionSpec) -> int:
        label = spec.labels.get(SCALE_MIN_LABEL, "1")
        if not label.isdigit():
            raise Refused(400, f"label {SCALE_MIN_LABEL}={label!r} is not a whole number")
        return self._clamp(int(label))

    def _clamp(self, replicas: int) -> int:
        if replicas < 0:
            raise Refused(400, f"the number of replicas is negative: {replicas}")
        replicas = max(replicas, self.limits.least_replicas)
        return replicas if self.limits.replicas is None else min(replicas, self.limits.replicas)

    def _ready(self, name: str) -> list[Action]:
        replica = self._replicas.get(name)
        if replica is None or replica.phase is not ReplicaPhase.STARTING:
            return []
        replica.phase = ReplicaPhase.READY
        function = self._functions.get(replica.function)
        if function is not None and function.generation == replica.generation:
            function.failed_starts = 0
        return self._reconcile(replica.function)

    def _exited(self, name: str) -> list[Action]:
        replica = self._replicas.pop(name, None)
        if replica is None:
            return []
        function = self._functions.get(replica.function)
        if function is None or function.generation != replica.generation or replica.phase is ReplicaPhase.DRAINING:
            return self._reconcile(replica.function)
        if self.limits.bare:
            function.waiting = True
            return []
        if replica.phase is ReplicaPhase.READY:
            return self._reconcile(replica.function)
        function.failed_starts += 1
        if function.waiting:
            return []
        function.waiting = True
        wait = min(_LONGEST_RESTART_WAIT, _FIRST_RESTART_WAIT * 2 ** min(function.failed_starts - 1, 10))
        return [RestartLater(RestartDue(replica.function, function.generation), wait)]

    def _condemned(self, name: str) -> list[Action]:
        replica = self._replicas.get(name)
        if replica is None or replica.phase is not ReplicaPhase.READY:
            return []
        replica.phase = ReplicaPhase.DRAINING
        return self._reconcile(replica.function)

    def _aged(self, name: str) -> list[Action]:
        """Count a replica as one of an older generation: it serves calls until its successor is ready."""
        replica = self._replicas.get(name)
        if replica is None or replica.phase is not ReplicaPhase.READY:
            return []
        replica.generation = _AGED
        return self._reconcile(replica.function)

    def _call_ended(self, name: str) -> list[Action]:
        replica = self._replicas.get(name)
        if replica is None:
            return []
        replica.calls -= 1
        if replica.phase is ReplicaPhase.DRAINING and replica.calls == 0:
            return [StopReplica(name)]
        return []

    def _reconcile(self, name: str) -> list[Action]:
        function = self._functions.get(name)
        if function is None:
            return self._drain(self._of(name))
        alive = [replica for replica in self._of(name) if replica.phase is not ReplicaPhase.DRAINING]
        current = [replica for replica in alive if replica.generation == function.generation]
        actions: list[Action] = []
        if not function.waiting:
            actions += [self._start(function) for _ in range(function.wanted - len(current))]
        if len(current) > function.wanted:
            current.sort(key=lambda replica: (replica.phase is ReplicaPhase.READY, replica.calls))
            actions += self._drain(current[: len(current) - function.wanted])
        ready = sum(replica.phase is ReplicaPhase.READY for replica in current)
        aged = [replica for replica in alive if replica.generation == _AGED]
        if self.limits.bare or ready >= function.wanted:
            actions += self._drain(one for one in alive if one.generation not in (function.generation, _AGED))
        # Each successor takes the place of one as soon as it is ready, so that few more than wanted are there.
        actions += self._drain(aged[: max(0, ready + len(aged) - function.wanted)], limit=False)
        return actions

    def _start(self, function: _Function) -> Action:
        self._counter += 1
        name = f"{function.spec.service}-{self._counter}"
        self._replicas[name] = _Replica(name, function.spec.service, function.generation)
        return StartReplica(name, function.spec)

    def _drain(self, replicas: Iterable[_Replica], *, limit: bool = True) -> list[Action]:
        """Give replicas no further call; ``limit``: those that they have must end within the drain time."""
        actions: list[Action] = []
        for replica in replicas:
            if replica.phase is not ReplicaPhase.DRAINING or (limit and replica.patient):
                replica.phase, replica.patient = ReplicaPhase.DRAINING, not limit
                if not replica.calls:
                    actions.append(StopReplica(replica.name))
                elif limit:
                    actions.append(LimitDrain(replica.name))
        return actions

    def _function(self, name: str) -> _Function:
        if name not in self._functions:
            raise Refused(404, f"function {name} is not deployed")
        return self._functions[name]

    def _of(self, name: str) -> list[_Replica]:
        return [replica for replica in self._replicas.values() if replica.function == name]


def _without_grants(spec: FunctionSpec) -> FunctionSpec:
    own = (GRANTS_ANNOTATION, DIGEST_ANNOTATION)
    return replace(spec, annotations={key: value for key, value in spec.annotations.items() if key not in own})
