"""What a control plane with many jobs does at its start, and what it leaves out."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

from control_plane.core import job_state_from_json, job_state_to_json
from control_plane.server import ServeConfig
from control_plane.service.state._entries import newest
from control_plane.service.state._job_lookup import active_jobs
from control_plane.serving._garbage import collected_later, short_collections
from control_plane.store import Change, open_store
from tests.control_plane.conftest import staged
from tests.control_plane.fake_agent import FakeAgent, join


def test_of_jobs_that_were_read_before_only_what_has_changed_is_parsed_again(
    serve_config: ServeConfig, job_file: Path
) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            agents = [FakeAgent(await join((await stage.client.invite(name)).token)) for name in ("a", "b")]
            for agent in agents:
                await agent.connect()
            jobs = [(await stage.submit(job_file, f"r{number}")).job.id for number in range(3)]
            for agent in agents:
                await agent.close()
        with open_store(f"sqlite:///{serve_config.state_dir}/state.db") as store:

            async def read(query: Any) -> Any:
                return query(store)

            known = await active_jobs(read, {})
            assert list(known) == jobs
            assert newest(known, 2) == [known[jobs[2]], known[jobs[1]]]
            row = known[jobs[0]].row
            changed = replace(job_state_from_json(row.state_json), reason="changed")
            ended = replace(known[jobs[1]].row, phase="failed")
            store.commit(Change(jobs=(replace(row, state_json=job_state_to_json(changed)), ended)))
            again = await active_jobs(read, known)
        assert sorted(again) == sorted({jobs[0], jobs[2]})
        assert again[jobs[0]].state.reason == "changed"
        assert again[jobs[0]].plan is known[jobs[0]].plan
        assert again[jobs[2]].state is known[jobs[2]].state

    asyncio.run(scenario())


def test_what_survives_a_full_collection_is_not_looked_at_again() -> None:
    before, callbacks = gc.get_threshold(), list(gc.callbacks)
    kept = [[number] for number in range(1000)]
    with short_collections():
        more = [[number] for number in range(1000)]
        gc.collect()
        seen = {id(one) for one in gc.get_objects()}
        assert not any(id(one) in seen for one in (*kept, *more))
        loop: list[Any] = []
        loop.append(loop)
        del loop
        assert gc.collect() >= 1, "what came later is collected"
    assert (gc.get_threshold(), gc.callbacks, gc.get_freeze_count()) == (before, callbacks, 0)


def test_nothing_is_collected_while_the_state_is_read_nor_looked_at_right_after() -> None:
    assert gc.isenabled()
    with collected_later():
        read = [[number] for number in range(1000)]
        assert not gc.isenabled()
        with collected_later():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    seen = {id(one) for one in gc.get_objects()}
    assert not any(id(one) in seen for one in read)
    gc.unfreeze()
