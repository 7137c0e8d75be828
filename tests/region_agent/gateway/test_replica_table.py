"""The function table, without processes."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget

from geofed_pb.platforms import EDITIONS, Edition
from region_agent.gateway import FunctionSpec, fixed_scale_labels
from region_agent.gateway.embedded.replica_table import (
    CallEnded,
    CallStarted,
    DeleteFunction,
    Deploy,
    Expired,
    FunctionTable,
    LimitDrain,
    OverLimit,
    Refused,
    ReplicaExited,
    ReplicaNearTimeLimit,
    ReplicaReady,
    RestartDue,
    RestartLater,
    ScaleFunction,
    StartReplica,
    StopReplica,
)
from region_agent.gateway.functions import Grants

SPEC = FunctionSpec("f", "image:1")


def started(actions) -> list[str]:
    return [action.replica for action in actions if isinstance(action, StartReplica)]


def table_with(replicas: int, limits: Edition | None = None) -> tuple[FunctionTable, list[str]]:
    table = FunctionTable(limits or EDITIONS["none"])
    names = started(table.handle(Deploy(replace(SPEC, labels=fixed_scale_labels(replicas)))))
    for name in names:
        assert table.handle(ReplicaReady(name)) == []
    return table, names


def test_deploy_starts_as_many_as_the_label_says() -> None:
    table, names = table_with(3)
    assert len(set(names)) == 3
    assert (table.wanted("f"), table.available("f")) == (3, 3)


def test_same_deployment_again_changes_nothing() -> None:
    table, _ = table_with(2)
    assert table.handle(Deploy(table.spec("f"))) == []


def test_only_labels_changed_keeps_the_replicas() -> None:
    table, _ = table_with(1)
    changed = replace(table.spec("f"), annotations={"a": "b"})
    assert table.handle(Deploy(changed)) == []
    assert table.spec("f") == changed


def test_changed_function_serves_with_the_old_replicas_until_the_new_are_ready() -> None:
    table, (old,) = table_with(1)
    (new,) = started(table.handle(Deploy(replace(table.spec("f"), env_vars={"A": "1"}))))
    assert table.pick("f", 1) == old
    assert table.handle(ReplicaReady(new)) == [StopReplica(old)]
    assert table.pick("f", 1) == new


def test_exited_replica_is_replaced_at_once() -> None:
    table, (name,) = table_with(1)
    (replacement,) = started(table.handle(ReplicaExited(name)))
    assert replacement != name


def test_replica_that_dies_while_starting_is_replaced_after_growing_waits() -> None:
    table = FunctionTable()
    (name,) = started(table.handle(Deploy(SPEC)))
    waits: list[timedelta] = []
    for _ in range(12):
        (later,) = table.handle(ReplicaExited(name))
        assert isinstance(later, RestartLater)
        waits.append(later.wait)
        (name,) = started(table.handle(later.due))
    assert waits[0] < waits[1] < waits[2]
    assert max(waits) == timedelta(seconds=10)
    table.handle(ReplicaReady(name))
    assert started(table.handle(ReplicaExited(name)))


def test_wait_of_an_older_generation_is_ignored() -> None:
    table = FunctionTable()
    (name,) = started(table.handle(Deploy(SPEC)))
    (later,) = table.handle(ReplicaExited(name))
    assert len(started(table.handle(Deploy(replace(SPEC, image="image:2"))))) == 1
    assert table.handle(later.due) == []
    assert table.handle(RestartDue("unknown", 1)) == []


def test_scaling_down_stops_the_idle_and_drains_the_busy() -> None:
    table, (one, two) = table_with(2)
    table.handle(CallStarted(one))
    assert table.handle(ScaleFunction("f", 1)) == [StopReplica(two)]
    assert table.handle(ScaleFunction("f", 0)) == [LimitDrain(one)]
    with pytest.raises(KeyError):
        table.handle(CallStarted("gone"))
    assert table.pick("f", 1) is None
    assert table.handle(CallEnded(one)) == [StopReplica(one)]


def test_delete_drains() -> None:
    table, (one, two) = table_with(2)
    table.handle(CallStarted(two))
    assert table.handle(DeleteFunction("f")) == [StopReplica(one), LimitDrain(two)]
    assert table.names() == []
    with pytest.raises(Refused):
        table.pick("f", 1)
    assert table.handle(ReplicaExited(one)) == []


def test_pick_takes_the_least_loaded_and_refuses_beyond_max_inflight() -> None:
    table, (one, two) = table_with(2)
    table.handle(CallStarted(one))
    assert table.pick("f", 2) == two
    table.handle(CallStarted(two))
    with pytest.raises(Refused) as caught:
        table.pick("f", 1)
    assert caught.value.status == 429


def test_condemned_replica_gets_no_call_and_is_replaced_at_once() -> None:
    table, (name,) = table_with(1)
    table.handle(CallStarted(name))
    (replacement,) = started(table.handle(OverLimit(name)))
    assert table.handle(OverLimit(name)) == []
    assert table.pick("f", 9) is None
    assert table.handle(CallEnded(name)) == [StopReplica(name)]
    assert table.handle(ReplicaExited(name)) == []
    table.handle(ReplicaReady(replacement))
    assert table.pick("f", 1) == replacement


def test_an_aged_replica_serves_until_its_successor_is_ready_and_ends_its_calls_in_their_own_time() -> None:
    table, (old,) = table_with(1)
    table.handle(CallStarted(old))
    (new,) = started(table.handle(ReplicaNearTimeLimit(old)))
    assert table.handle(ReplicaNearTimeLimit(old)) == []
    assert table.pick("f", 9) == old
    # No limit of the time for its call.
    assert table.handle(ReplicaReady(new)) == []
    assert (table.pick("f", 9), table.available("f")) == (new, 1)
    assert table.handle(CallEnded(old)) == [StopReplica(old)]
    assert table.handle(ReplicaExited(old)) == []
    assert table.replicas("f") == [new]


def test_each_successor_takes_the_place_of_one_aged_replica_as_soon_as_it_is_ready() -> None:
    table, old = table_with(3)
    new = [one for name in old for one in started(table.handle(ReplicaNearTimeLimit(name)))]
    for number in range(3):
        assert table.handle(ReplicaReady(new[number])) == [StopReplica(old[number])]
        assert table.available("f") == 3
        assert table.handle(ReplicaExited(old[number])) == []
    assert table.replicas("f") == new


def test_an_expired_replica_gets_no_call_although_its_successor_is_missing() -> None:
    table, (busy, idle) = table_with(2)
    table.handle(CallStarted(busy))
    assert len(started(table.handle(ReplicaNearTimeLimit(busy)))) == 1
    assert table.handle(Expired(busy)) == []
    assert table.pick("f", 9) == idle
    actions = table.handle(Expired(idle))
    assert actions[0] == StopReplica(idle)
    assert len(started(actions)) == 1
    # A function that is deleted ends it within the drain time.
    assert LimitDrain(busy) in table.handle(DeleteFunction("f"))


def test_limits_clamp_replicas_and_bound_functions() -> None:
    limits = Edition("one", replicas=5, least_replicas=1, functions=1)
    table, _ = table_with(3, limits)
    table.handle(ScaleFunction("f", 99))
    assert table.wanted("f") == 5
    table.handle(ScaleFunction("f", 0))
    assert table.wanted("f") == 1
    with pytest.raises(Refused, match="1 functions"):
        table.handle(Deploy(FunctionSpec("g", "i")))
    with pytest.raises(Refused):
        table.handle(ScaleFunction("f", -1))


def test_a_label_that_is_no_number_is_refused() -> None:
    with pytest.raises(Refused, match="whole number"):
        FunctionTable().handle(Deploy(replace(SPEC, labels={"com.openfaas.scale.min": "two"})))


@settings(max_examples=budget(150), deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["scale", "ready", "exit", "update", "due", "aged", "expired"]), st.integers(0, 5)),
        max_size=40,
    )
)
def test_whatever_happens_the_table_comes_back_to_what_is_wanted(steps) -> None:
    table, alive, waiting = FunctionTable(), [], []

    def take(actions) -> None:
        for action in actions:
            match action:
                case StartReplica(name, _):
                    alive.append(name)
                case StopReplica(name):
                    alive.remove(name)
                    take(table.handle(ReplicaExited(name)))
                case RestartLater(due, _):
                    waiting.append(due)

    take(table.handle(Deploy(SPEC)))
    for verb, number in steps:
        match verb:
            case "scale":
                take(table.handle(ScaleFunction("f", number)))
            case "update":
                take(table.handle(Deploy(replace(SPEC, image=f"image:{number}"))))
            case "due" if waiting:
                take(table.handle(waiting.pop()))
            case "ready" if alive:
                take(table.handle(ReplicaReady(alive[number % len(alive)])))
            case "aged" if alive:
                take(table.handle(ReplicaNearTimeLimit(alive[number % len(alive)])))
            case "expired" if alive:
                take(table.handle(Expired(alive[number % len(alive)])))
            case "exit" if alive:
                take(table.handle(ReplicaExited(alive.pop(number % len(alive)))))
    for _ in range(100):
        while waiting:
            take(table.handle(waiting.pop()))
        for name in list(alive):
            take(table.handle(ReplicaReady(name)))
    assert table.available("f") == table.wanted("f") == len(alive) == len(table.replicas("f"))


def test_new_files_replace_replicas_and_another_address_behind_one_does_not() -> None:
    before = Grants(read=("/data",), egress={"127.0.0.1:1": ""})
    for changed, starts in (
        (replace(before, egress={"127.0.0.1:1": "10.0.0.1:7"}), 0),
        (replace(before, egress={"127.0.0.1:1": "", "127.0.0.1:2": ""}), 1),
        (replace(before, read=("/data", "/more")), 1),
        (replace(before, host_network=True), 1),
    ):
        table = FunctionTable()
        table.handle(Deploy(FunctionSpec("f", "image", annotations=before.annotations())))
        actions = table.handle(Deploy(FunctionSpec("f", "image", annotations=changed.annotations())))
        assert sum(isinstance(action, StartReplica) for action in actions) == starts
