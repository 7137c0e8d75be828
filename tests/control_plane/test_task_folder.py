"""Large task folders: what is sent of them, who may fetch it, how long it is kept, and who does not know them."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from control_plane import blobs
from control_plane.cli._job_file import read_job
from control_plane.cli.commands.submit import Submission, planned
from control_plane.server import ServeConfig
from control_plane.spec import pack
from geofed_pb.errors import GeofedError
from geofed_pb.files.task_folder import LISTED, Part, read_parts
from tests.control_plane.conftest import Stage, staged
from tests.control_plane.fake_agent import FakeAgent
from tests.control_plane.scenario import run

MIB = 1 << 20


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every chunk that the control plane has received."""
    found: list[int] = []
    plain = blobs._append

    def append(descriptor: int, chunk: Any, have: int, total: int) -> int:
        assert len(chunk.data) <= MIB, "a message is bounded"
        found.append(len(chunk.data))
        return plain(descriptor, chunk, have, total)

    monkeypatch.setattr(blobs, "_append", append)
    return found


@pytest.fixture
def large(job_file: Path) -> Path:
    for number, size in enumerate((2 * MIB, 3 * MIB, 5 * MIB)):
        (job_file.parent / f"{number}.bin").write_bytes(bytes([number]) * size)
    return job_file


async def _agents(stage: Stage) -> list[FakeAgent]:
    agents = [await stage.agent(name) for name in "ab"]
    for agent in agents:
        await agent.connect()
    return agents


@pytest.mark.slow
def test_only_what_has_changed_is_sent(serve_config: ServeConfig, large: Path, sent: list[int]) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            agents = await _agents(stage)
            await Submission(*read_job(large, None), "first").send(stage.client)
            assert 10 * MIB < sum(sent) < 10 * MIB + 4096, "three files, and an archive of two small ones"
            sent.clear()
            await Submission(*read_job(large, None), "same").send(stage.client)
            assert not sent
            (large.parent / "1.bin").write_bytes(b"x" * (3 * MIB))
            await planned(stage.client, *read_job(large, None))
            assert 3 * MIB < sum(sent) < 3 * MIB + 4096
            sent.clear()
            await Submission(*read_job(large, None), "changed").send(stage.client)
            assert not sent, "the plan has sent it"
            for agent in agents:
                await agent.close()

    run(scenario())


def test_a_job_is_refused_until_all_of_its_folder_has_arrived(serve_config: ServeConfig, large: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            loaded, packed = read_job(large, None)
            await stage.client.put_bundle(packed.content, packed.digest)
            with pytest.raises(GeofedError, match=r"3 files of the task folder have not arrived, such as 0\.bin"):
                await stage.client.submit(loaded.json, packed.digest, "early")
            (large.parent / "2.bin").write_bytes(bytes(5 * MIB))
            with pytest.raises(GeofedError) as caught:
                await stage.client.put_parts(packed.parts, packed.folder, lambda files, left: None)
            assert caught.value.code == "DIGEST_MISMATCH"
            (large.parent / "2.bin").unlink()
            with pytest.raises(GeofedError, match=r"TASK_INVALID: 2\.bin could not be read"):
                await stage.client.put_parts(packed.parts, packed.folder, lambda files, left: None)

    run(scenario())


@pytest.mark.slow
def test_files_are_kept_while_a_job_refers_to_them(serve_config: ServeConfig, large: Path) -> None:
    kept = serve_config.state_dir

    def there() -> set[int]:
        return {path.stat().st_size for path in kept.rglob("*") if len(path.name) == 64}

    async def scenario() -> None:
        async with staged(serve_config) as stage:
            agents = await _agents(stage)
            first = await Submission(*read_job(large, None), "first").send(stage.client)
            (large.parent / "1.bin").write_bytes(b"x" * (4 * MIB))
            second = await Submission(*read_job(large, None), "second").send(stage.client)
            assert {2 * MIB, 3 * MIB, 4 * MIB, 5 * MIB} <= there()
            for job in (first, second):
                await stage.client.cancel(job["id"])
                for agent in agents:
                    agent.report(job["id"], "stopped")
                    await agent.settled()
            await stage.client.delete(first["id"])
            assert there() & {2 * MIB, 3 * MIB, 4 * MIB, 5 * MIB} == {2 * MIB, 4 * MIB, 5 * MIB}
            await stage.client.delete(second["id"])
            assert not there() & {2 * MIB, 4 * MIB, 5 * MIB}
            for agent in agents:
                await agent.close()

    run(scenario())


@pytest.mark.parametrize(
    "name", ["../x", "/x", "", "a/../b", "a//b", ".geofed/parts.json", "x" * 1001, "a\0b", "é" * 200, "\ud800"]
)
def test_a_list_with_another_place_is_refused(name: str, tmp_path: Path) -> None:
    from control_plane.spec._pack import _archive

    file = tmp_path / "archive"
    file.write_bytes(_archive({}, (Part(name, f"sha256:{'0' * 64}", 1),)))
    with file.open("rb") as archive, pytest.raises(GeofedError, match="TASK_INVALID"):
        read_parts(archive)


def _beginning(size: int, content: bytes) -> bytes:
    """An archive that begins with a listing whose header states a size."""
    entry = tarfile.TarInfo(LISTED)
    entry.size = size
    return gzip.compress(entry.tobuf(tarfile.GNU_FORMAT) + content)


def test_a_negative_size_unpacks_nothing() -> None:
    with pytest.raises(GeofedError, match="TASK_INVALID"):
        read_parts(io.BytesIO(_beginning(-1, b"{}" * 1000)))


def test_a_listing_that_is_nested_without_end_is_refused() -> None:
    nested = b"[" * 200_000
    with pytest.raises(GeofedError, match="TASK_INVALID"):
        read_parts(io.BytesIO(_beginning(len(nested), nested)))


def test_a_folder_that_nobody_would_unpack_is_not_packed(tmp_path: Path) -> None:
    deep = tmp_path / "/".join(["x" * 200] * 6)
    deep.mkdir(parents=True)
    (tmp_path / "task.py").touch()
    (deep / "large").write_bytes(bytes(2 << 20))
    with pytest.raises(GeofedError, match="TASK_INVALID"):
        pack(tmp_path, "task.py")
