"""The audit log of a federation: what it says of a job, and what becomes of attempts to change it."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.commands import run_here
from support.running import UNHURRIED, Federation, Running, digits_sites, paths_under

from geofed_pb.security.attestation import opened
from geofed_pb.security.audit import GENESIS, hash_of
from region_agent.link.audit_heads import AUDIT_HEADS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


def entries(file: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [json.loads(line["entry"]) for line in lines if "entry" in line]


def rewritten(database: Path, after: int, last: int) -> None:
    """Change an entry of the stored log, drop those beyond another one, and compute all hashes again, as whoever has
    the database can."""
    with sqlite3.connect(database) as connection:
        connection.execute("DELETE FROM audit WHERE seq > ?", (last,))
        before = GENESIS
        for seq, text in connection.execute("SELECT seq, text FROM audit ORDER BY seq").fetchall():
            changed = text.replace('"digits"', '"others"') if seq > after else text
            before = hash_of(before, changed)
            connection.execute("UPDATE audit SET text = ?, hash = ? WHERE seq = ?", (changed, before, seq))


def check_the_regions_own_log(
    federation: Federation, job: str, ended: dict[str, Any], state_dir: str, log: Path, folder: Path
) -> None:
    """It says the same of the job as the control plane's, which has its heads."""

    def agent(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_here("agent", "audit", *arguments, program="geofed")

    own = folder / "own.jsonl"
    assert agent("export", str(own), "--state-dir", state_dir).returncode == 0
    assert own.stat().st_mode & 0o777 == 0o600, "it names users, data and code"
    of_job = {entry["kind"]: entry for entry in entries(own) if entry["job"] == job}
    assert of_job["job.started"]["code"] == ended["result"]["digests"]["code"]
    assert of_job["job.started"]["dataset"] == "digits"
    end = of_job["job.ended"]
    assert end["state"] == "finished"
    region = json.loads(own.read_text().splitlines()[0])["region"]
    assert set(end["sent_bytes"]) == {"a", "b"} - {region}
    told = agent("verify", str(own), "--witness", str(log), "--region", region)
    assert told.returncode == 0, told.stderr
    assert f"region {region}: " in told.stdout
    seen = federation.control_plane("audit", "verify", str(own), "--witness", str(log), "-o", "json")
    witnessed = json.loads(seen.stdout)["data"]
    assert witnessed["witnessed"] >= 1
    assert witnessed["witnessed_entries"] >= end["seq"]
    with sqlite3.connect(Path(state_dir) / "agent.db") as connection:
        before = GENESIS
        for seq, text in connection.execute("SELECT seq, text FROM audit ORDER BY seq").fetchall():
            changed = text.replace('"digits"', '"others"')
            before = hash_of(before, changed)
            connection.execute("UPDATE audit SET text = ?, hash = ? WHERE seq = ?", (changed, before, seq))
    assert agent("export", str(own), "--state-dir", state_dir).returncode == 0
    assert agent("verify", str(own)).returncode == 0, "by itself it is a log like any other"
    broken = agent("verify", str(own), "--witness", str(log))
    assert (broken.returncode, "differs from what a witness" in broken.stderr) == (8, True), broken.stderr


def check_the_data(running: Running, job: str, ended: dict[str, Any], statement: Path, check: tuple[str, ...]) -> None:
    """The statement names each region's data by its digest, which another content changes, and the region's log has."""
    federation, made = running.federation, opened(statement.read_text())
    told = {one["name"]: one["data"] for one in ended["result"]["regions"]}
    assert made.data == told
    assert sorted(told) == ["a", "b"]
    assert not [name for name, head in made.region_heads.items() if not head]
    dependencies = made.statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    named = {one["name"]: one.get("digest") for one in dependencies}
    assert named["data of a"] == {"hmac-sha256": told["a"]["train"].partition(":")[2]}
    assert {"data of a, test", "data of b, test"} <= set(named)

    folder = federation.region_state("a")
    state, config = folder / "state", folder / "region.yaml"

    def digests() -> dict[str, str]:
        argv = ("digest", "digits", "--config", str(config), "--state-dir", str(state), "-o", "json")
        return dict(json.loads(run_here("agent", *argv, program="geofed").stdout)["data"]["keyed"])

    assert digests() == told["a"]
    train = Path(json.loads(config.read_text())["datasets"]["digits"]["splits"]["train"]["uri"])
    content = train.read_bytes()
    train.write_bytes(content + b" ")
    assert digests()["train"] != told["a"]["train"]
    assert digests()["test"] == told["a"]["test"]
    train.write_bytes(content)

    own = folder / "own.jsonl"
    export = ("audit", "export", str(own), "--state-dir", str(state))
    assert run_here("agent", *export, program="geofed").returncode == 0
    assert federation.control_plane(*check, "--region-log", str(own)).returncode == 0
    with sqlite3.connect(state / "agent.db") as connection:
        rows = connection.execute("SELECT seq, text, hash FROM audit ORDER BY seq").fetchall()
        before = GENESIS
        for seq, text, _ in rows:
            changed = text.replace(told["a"]["train"][-9:], "123456789")
            before = hash_of(before, changed)
            connection.execute("UPDATE audit SET text = ?, hash = ? WHERE seq = ?", (changed, before, seq))
    assert run_here("agent", *export, program="geofed").returncode == 0
    broken = federation.control_plane(*check, "--region-log", str(own), check=False)
    assert (broken.returncode, "differs from what a witness" in broken.stderr) == (8, True), broken.stderr
    with sqlite3.connect(state / "agent.db") as connection:
        connection.executemany("UPDATE audit SET text = ?, hash = ? WHERE seq = ?", [(t, h, s) for s, t, h in rows])


def test_what_was_done_is_recorded_and_cannot_be_changed_unnoticed(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    with Federation(tmp_path / "federation", digits_sites(tmp_path, ["a", "b"])) as federation:
        running, of = Running(federation, tmp_path / "jobs"), federation.control_plane
        token = json.loads(of("user", "add", "ann", "-o", "json").stdout)["data"]["token"]
        job = running.submit("train.end.epochs=1", "train.evaluateEvery=0")
        ended = running.wait_end(job)
        of("share", job, "ann")
        context = json.loads(federation.context_file.read_text())
        (tmp_path / "ann.token").write_text(token)
        (tmp_path / "ann.json").write_text(json.dumps(context | {"token_file": str(tmp_path / "ann.token")}))
        of("export", job, "--output-file", str(tmp_path / "model.safetensors"), "--context", str(tmp_path / "ann.json"))
        refused = of("audit", "export", str(log), "--context", str(tmp_path / "ann.json"), check=False)
        assert (refused.returncode, log.exists()) == (5, False), "only the operator may"
        told = json.loads(of("audit", "export", str(log), "-o", "json").stdout)["data"]
        found = {entry["kind"]: entry for entry in entries(log)}
        submitted, end, read = found["job.submitted"], found["job.ended"], found["job.read"]
        assert (submitted["user"], submitted["dataset"], submitted["job"]) == ("operator", "digits", job)
        assert submitted["code"] == ended["result"]["digests"]["code"]
        assert submitted["spec_and_code"] == ended["result"]["digests"]["spec_and_code"]
        assert set(submitted["regions"]) == {"a", "b"}
        assert end["model"] == ended["result"]["model"]
        assert end["wan_bytes"] == ended["result"]["wan_bytes"]
        assert (read["by"], read["digest"], read["job"]) == ("ann", ended["result"]["model"]["digest"], job)
        assert {"region.invited", "region.enrolled", "user.added", "job.shared"} <= set(found)
        assert told["entries"] == len(entries(log))

        statement, model = tmp_path / "model.intoto.json", tmp_path / "model.safetensors"
        of("user", "add", "bob")
        of("audit", "attest", job, str(statement), "--context", str(tmp_path / "ann.json"))
        check = ("audit", "verify-model", str(model), str(statement), "--public-key", told["public_key"])
        shown = of(*check, "--log", str(log), check=False)
        assert shown.returncode == 8, "the log ends before the statement's head"
        of("audit", "export", str(log))
        good = json.loads(of(*check, "--log", str(log), "-o", "json").stdout)["data"]
        name = f"{job}, round {ended['result']['rounds']}"
        assert (good["job"], good["verified"], good["made_of"][0]) == (job, name, "code")
        assert good["models"][good["verified"]] == read["digest"].removeprefix("sha256:")
        (tmp_path / "other.safetensors").write_bytes(model.read_bytes()[:-1] + b"x")
        other = of("audit", "verify-model", str(tmp_path / "other.safetensors"), str(statement), check=False)
        assert (other.returncode, "is not about" in other.stderr) == (8, True)
        other = of(*check[:4], "--public-key", "00" * 32, check=False)
        assert (other.returncode, "not of the key 0000" in other.stderr) == (8, True)
        unsigned = of("audit", "verify-model", str(model), str(statement), "--log", str(log)).stderr
        assert "without --public-key, anybody may have signed this, and have made the log" in unsigned
        check_the_data(running, job, ended, statement, (*check, "--log", str(log)))
        early = of(
            "audit",
            "attest",
            running.submit("train.end.epochs=900", task=UNHURRIED),
            str(tmp_path / "early"),
            check=False,
        )
        assert (early.returncode, "has not ended" in early.stderr) == (8, True)

        heads = next(path for path in paths_under(federation.folder) if path.match(AUDIT_HEADS))
        state_dir = str(heads.parent.parent)
        argv = [sys.executable, "-m", "geofed.cli", "agent", "audit", "--state-dir", state_dir]
        (tmp_path / "heads").write_bytes(subprocess.run(argv, capture_output=True, check=True).stdout)
        seen = [json.loads(line)["seq"] for line in heads.read_text().splitlines()]
        assert seen[-1] >= end["seq"], "the regions have the head of the job's end"
        of("audit", "export", str(log))  # with all that was recorded since, whose heads they may have, too
        verify = ("audit", "verify", str(log), "--witness", str(tmp_path / "heads"), "--public-key", told["public_key"])
        good = json.loads(of(*verify, "-o", "json").stdout)["data"]
        assert (good["witnessed"], good["witnessed_entries"]) == (len(seen), seen[-1])

        check_the_regions_own_log(federation, job, ended, state_dir, log, tmp_path)

        database = next(federation.control_state.glob("*.db"))
        with sqlite3.connect(database) as connection:
            of_entry = "UPDATE audit SET text = replace(text, ?, ?) WHERE seq = ?"
            connection.execute(of_entry, ("digits", "others", submitted["seq"]))
            connection.commit()
            broken = of("audit", "export", str(log), check=False)
            connection.execute(of_entry, ("others", "digits", submitted["seq"]))
        assert broken.returncode == 8
        assert f"entry {submitted['seq']} is not the one that was recorded here" in broken.stderr
        for after, last, why in (
            (
                0,
                10**6,
                f"up to entry {min(one for one in seen if one >= submitted['seq'])} differs from what a witness",
            ),
            (10**6, end["seq"] - 1, "are missing: a witness has received a head with them"),
        ):
            rewritten(database, after, last)
            assert of("audit", "export", str(log)).returncode == 0, "by itself it is a log like any other"
            found_out = of(*verify, check=False)
            assert (found_out.returncode, why in found_out.stderr) == (8, True), found_out.stderr
