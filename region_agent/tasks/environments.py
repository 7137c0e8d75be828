"""Packages that tasks require, installed once for each list of them, in folders that the workers can read.

What the workers' own environment has is not installed again, and stays at its version. Only wheels are installed, since
building a package from its sources runs its code, with the rights of the agent. pip itself would build what a wheel
names by a URL, and folders: `region_agent.tasks.wheels_only` runs it so that it builds nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import structlog
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from geofed_pb.bounds import clean
from geofed_pb.errors import GeofedError
from geofed_pb.files.durable import write_durably
from geofed_pb.storage import used_bytes
from geofed_pb.tasks import awaited
from geofed_pb.user_code.requirements import LONGEST_FILE, parse_requirements
from region_agent.config import RegionConfig, TaskPackagesConfig
from region_agent.tasks.folder import TaskFolder

__all__ = ["FOLDER", "Environments", "check_packages"]

FOLDER = "environments"
"""Folder in the state directory."""
_SITE, _FACTS = "site", "environment.json"
_LOOK_SECONDS = 0.5
"""Interval at which the size of what is being installed is measured."""
_PASSED_ON = (
    "PATH", "HOME", "LANG", "LC_ALL", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
)  # fmt: skip
"""Variables of the agent's environment, in any case, that pip gets: what it says is told to users."""
_UNREACHABLE = ("NewConnectionError", "ConnectTimeoutError", "Temporary failure in name resolution", "Max retries")
"""What pip says where the index cannot be reached."""
_NOT_ALLOWED = "`taskPackages` in its region file allows it, or its operator installs them where the workers run"
_log = structlog.get_logger("geofed.packages")


def check_packages(config: RegionConfig, requirements: str) -> None:
    """Check that the region installs packages for tasks, if a job has a requirements file.

    Raises ``GeofedError("PACKAGES_UNAVAILABLE")``.
    """
    if requirements and not config.installs:
        why = "" if config.platform.sandboxed else ": its functions run in images"
        text = f"region {config.name} installs no packages for tasks{why}"
        raise GeofedError("PACKAGES_UNAVAILABLE", text, hint=_NOT_ALLOWED)


class Environments:
    """The installed environments of one agent. Not thread-safe: call it on the event loop."""

    def __init__(self, state_dir: Path, config: RegionConfig) -> None:
        self._folder, self._config = state_dir / FOLDER, config
        self._users: dict[str, str] = {}
        """Environment of each job that uses one, by job."""
        self._turn = asyncio.Lock()

    async def prepare(self, job: str, folder: TaskFolder, requirements: str) -> Path | None:
        """Return the folder with the packages that a task requires, for a job until `release`; install it if needed.

        ``requirements``: path of the file in the task folder; empty: it requires none.

        Raises ``GeofedError``: TASK_INVALID; PACKAGES_UNAVAILABLE with the reason, as a sentence.
        """
        if not requirements:
            return None
        check_packages(self._config, requirements)
        settings = self._config.task_packages
        assert settings is not None
        # No more of it than a requirements file may have.
        content = await asyncio.to_thread(folder.read, requirements, LONGEST_FILE + 1)
        wanted = parse_requirements(content, requirements)
        present = await asyncio.to_thread(_present)
        _check_versions(wanted, present, self._config.name)
        key = await asyncio.to_thread(_key, wanted, present, settings)
        self._users[job] = key
        try:
            async with self._turn:
                if not (self._folder / key / _FACTS).exists():
                    await self._install(key, wanted, present, settings)
        except BaseException:
            self.release(job)
            raise
        os.utime(self._folder / key)
        return self._folder / key / _SITE

    def release(self, job: str) -> None:
        """Note that a job has ended: its environment may be removed when there is no space for another one."""
        self._users.pop(job, None)

    async def _install(
        self, key: str, wanted: Sequence[str], present: Mapping[str, str], settings: TaskPackagesConfig
    ) -> None:
        place = self._folder / f".{key}.partial"
        await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)
        place.mkdir(parents=True, mode=0o700)
        begun = time.monotonic()
        try:
            async with asyncio.timeout(settings.seconds):
                locked = await self._resolve(place, wanted, present, settings)
                if locked:
                    await self._download(place, locked, settings)
        except TimeoutError:
            text = f"the packages of the task were not installed within {settings.seconds:g} s"
            raise self._unavailable(text, "`taskPackages.seconds` in the region's file is the limit") from None
        else:
            (place / _SITE).mkdir(exist_ok=True)
            size = await asyncio.to_thread(used_bytes, place)
            facts = {"requirements": wanted, "installed": locked, "bytes": size}
            write_durably(place / _FACTS, [json.dumps(facts).encode()])
            place.rename(self._folder / key)
            seconds = round(time.monotonic() - begun, 1)
            _log.info("packages installed", environment=key, packages=len(locked), bytes=size, seconds=seconds)
            await asyncio.to_thread(self._make_space, settings.keep_mb)
        finally:
            await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)

    async def _resolve(
        self, place: Path, wanted: Sequence[str], present: Mapping[str, str], settings: TaskPackagesConfig
    ) -> list[str]:
        """Return what must be installed besides what is there, as lines with versions and digests."""
        found = [Requirement(one) for one in wanted]
        lines = []
        for one in found:
            if one.marker is None or one.marker.evaluate():
                one.marker = None
                lines.append(str(one))
        (place / "wanted.txt").write_text("\n".join(lines))
        # What the workers already import must not be there in another version.
        (place / "constraints.txt").write_text("\n".join(f"{name}=={version}" for name, version in present.items()))
        report = place / "report.json"
        await self._pip(
            place, settings, "--dry-run", "--report", str(report), "--requirement", str(place / "wanted.txt"),
            "--constraint", str(place / "constraints.txt"),
        )  # fmt: skip
        installed = json.loads(await asyncio.to_thread(report.read_text))["install"]
        names = [canonicalize_name(str(one["metadata"]["name"])) for one in installed]
        allowed = None if settings.allow is None else {canonicalize_name(name) for name in settings.allow}
        if allowed is not None and (other := sorted(set(names) - allowed)):
            text = f"tasks may not install {', '.join(other)}"
            raise self._unavailable(text, "`taskPackages.allow` in the region's file lists what they may")
        digests = [one["download_info"]["archive_info"]["hashes"]["sha256"] for one in installed]
        versions = [one["metadata"]["version"] for one in installed]
        return [
            f"{name}=={of} --hash=sha256:{digest}" for name, of, digest in zip(names, versions, digests, strict=True)
        ]

    async def _download(self, place: Path, locked: Sequence[str], settings: TaskPackagesConfig) -> None:
        (place / "locked.txt").write_text("\n".join(locked))
        await self._pip(
            place, settings, "--no-deps", "--require-hashes", "--requirement", str(place / "locked.txt"),
            "--target", str(place / _SITE),
        )  # fmt: skip

    async def _pip(self, place: Path, settings: TaskPackagesConfig, *arguments: str) -> None:
        """Run pip, within the limits of size. Raises ``GeofedError("PACKAGES_UNAVAILABLE")``."""
        given = [
            "--only-binary",
            ":all:",
            "--no-input",
            "--disable-pip-version-check",
            "--no-cache-dir",
            "--retries",
            "1",
        ]
        given += ["--no-index"] if settings.index is None else ["--index-url", settings.index]
        given += [] if settings.wheels is None else ["--find-links", str(settings.wheels)]
        environment = {name: value for name, value in os.environ.items() if name.upper() in _PASSED_ON}
        environment |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PIP_CONFIG_FILE": os.devnull}
        (temporary := place / "tmp").mkdir(exist_ok=True)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "region_agent.tasks.wheels_only", "--isolated", "install", *given, *arguments,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            env={**environment, "TMPDIR": str(temporary)}, cwd=place,
        )  # fmt: skip
        output = awaited(process.communicate())
        try:
            while not (await asyncio.wait({output}, timeout=_LOOK_SECONDS))[0]:
                await self._check_size(place, settings)
            told = (await output)[0].decode(errors="replace")
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await asyncio.gather(output, return_exceptions=True)
        await asyncio.to_thread(shutil.rmtree, temporary, ignore_errors=True)
        if process.returncode:
            _log.warning("packages could not be installed", told=clean(told[-2000:]))
            raise self._unavailable(*_reason(told, settings))
        await self._check_size(place, settings)

    async def _check_size(self, place: Path, settings: TaskPackagesConfig) -> None:
        if await asyncio.to_thread(used_bytes, place) > settings.max_mb << 20:
            text = f"the packages of the task take more than {settings.max_mb:,} MB"
            raise self._unavailable(text, "`taskPackages.maxMb` in the region's file is the limit")

    def _unavailable(self, text: str, hint: str | None = None) -> GeofedError:
        return GeofedError("PACKAGES_UNAVAILABLE", f"region {self._config.name}: {text}", hint=hint)

    def _make_space(self, keep_mb: int) -> None:
        """Remove the environments that were used least recently and that no job uses, until the others fit."""
        used = set(self._users.values())
        found = [path for path in self._folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
        found.sort(key=lambda path: path.stat().st_mtime)
        total = sum(sizes := [used_bytes(path) for path in found])
        for path, size in zip(found, sizes, strict=True):
            if total > keep_mb << 20 and path.name not in used:
                shutil.rmtree(path, ignore_errors=True)
                total -= size


def _present() -> dict[str, str]:
    """Return the versions of the packages that the workers have without any requirements, by name."""
    found: dict[str, str] = {}
    for one in importlib.metadata.distributions():
        # Damaged ones have no name.
        if name := one.metadata["Name"]:
            found.setdefault(canonicalize_name(name), one.version)
    return dict(sorted(found.items()))


def _check_versions(wanted: Sequence[str], present: Mapping[str, str], region: str) -> None:
    """Check that nothing is required in another version than the workers have."""
    for one in map(Requirement, wanted):
        version = present.get(one.name)
        applies = one.marker is None or one.marker.evaluate()
        if applies and version is not None and not one.specifier.contains(version, prereleases=True):
            text = f"the task requires {one.name}{one.specifier}, but the workers of region {region} have {version}"
            raise GeofedError("PACKAGES_UNAVAILABLE", text, hint=f"require a version of {one.name} that {version} fits")


def _key(wanted: Sequence[str], present: Mapping[str, str], settings: TaskPackagesConfig) -> str:
    """Return a name for what the requirements amount to here: with this Python, these packages and these sources."""
    wheels = sorted(path.name for path in settings.wheels.glob("*.whl")) if settings.wheels is not None else []
    sources = [settings.index, wheels, settings.allow]
    facts = [wanted, dict(present), platform.python_version(), sysconfig.get_platform(), sources]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _reason(told: str, settings: TaskPackagesConfig) -> tuple[str, str | None]:
    """Return why pip has failed, as a sentence, and a hint."""
    if any(sign in told for sign in _UNREACHABLE):
        return f"the package index {settings.index} cannot be reached", None
    if "No module named 'pip" in told:
        return "pip is not installed in the agent's environment", "its operator installs pip there"
    lines = [line.removeprefix("ERROR: ") for line in told.splitlines() if line.startswith("ERROR: ")]
    missing = next((line for line in lines if line.startswith("No matching distribution found for ")), None)
    if missing is not None:
        name = missing.removeprefix("No matching distribution found for ").strip()
        where = " or ".join(str(one) for one in (settings.index, settings.wheels) if one is not None)
        return f"there is no wheel of {name} for Python {platform.python_version()} in {where}", None
    conflict = next((line for line in lines if line.startswith("Cannot install ")), None)
    if conflict is not None:
        return f"{clean(conflict, 500)} The workers' own packages stay at their versions", None
    return f"pip has failed: {clean(lines[-1] if lines else told.strip()[-300:], 500)}", None
