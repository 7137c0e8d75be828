"""A region's operator changes its file while the agent runs."""

from __future__ import annotations

import json

import pytest
from support.running import Running, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def test_a_dataset_is_added_and_removed_without_a_restart(running_pair: Running) -> None:
    federation = running_pair.federation
    file = federation.region_state("shanghai") / "region.yaml"
    before = file.read_text()
    changed = json.loads(before)
    changed["datasets"]["later"] = changed["datasets"]["digits"]
    process = federation.processes["shanghai"].pid

    def held() -> set[str]:
        told = json.loads(federation.control_plane("region", "describe", "shanghai", "-o", "json").stdout)["data"]
        return {dataset["name"] for dataset in told["datasets"]}

    try:
        file.write_text(json.dumps(changed))
        eventually(lambda: "later" in held(), "the added dataset is offered", 20, pause=0.5)
        job = running_pair.submit("data.dataset=later", "train.end.epochs=1", "train.evaluateEvery=0")
        described = running_pair.wait_end(job)
        assert (described["state"], [part["region"] for part in described["partitions"]]) == ("succeeded", ["shanghai"])
        file.write_text("{}")
        eventually(lambda: "has no effect" in federation.log("agent-shanghai"), "the agent says what is wrong", 20)
        assert "later" in held()
    finally:
        file.write_text(before)
    eventually(lambda: "later" not in held(), "the removed dataset is not offered", 20, pause=0.5)
    assert federation.processes["shanghai"].pid == process
    assert federation.processes["shanghai"].poll() is None
