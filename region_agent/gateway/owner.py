"""Names and labels of a region's functions and secrets on a platform that other regions and federations use, too."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from region_agent.gateway.functions import FunctionStatus

__all__ = ["Owner", "function_name"]

_MOST_CHARACTERS = 63
"""Longest name of a function or secret."""
_JOB_END = 9
"""Characters at a job's end that make it unique."""
_OWNER_LABEL, _REGION_LABEL, _JOB_LABEL = "geofed.owner", "geofed.region", "geofed.job"


def function_name(job: str, mark: str = "", part: int = 0) -> str:
    """Return the name of a function of a job's workers.

    ``mark``: of the region, where it shares its platform. ``part``: number of the function among those of the job.
    """
    head = f"geofed-{job}"
    tail = (f"-{mark}" if mark else "") + (f"-w{part}" if part else "")
    room = _MOST_CHARACTERS - len(tail)
    if len(head) > room:
        head = head[: room - _JOB_END].rstrip("-") + head[-_JOB_END:]
    return head + tail


@dataclass(frozen=True)
class Owner:
    """A region of a federation, as the owner of functions and secrets."""

    region: str = ""
    """Name of the region."""
    mark: str = ""
    """Differs between all regions of all federations. Empty: the platform is the agent's own."""

    @classmethod
    def of(cls, region: str, authority: bytes) -> Owner:
        """Return the owner for a region of the federation with this public key."""
        return cls(region, hashlib.sha256(region.encode() + b"\0" + authority).hexdigest()[:8])

    def labels(self, job: str) -> dict[str, str]:
        """Return the labels of a function of a job, or of a profile."""
        if not self.mark:
            return {}
        return {_OWNER_LABEL: self.mark, _REGION_LABEL: self.region, _JOB_LABEL: _label(job)}

    def name(self, job: str, part: int = 0) -> str:
        """Return the name of a function of a job's workers."""
        return function_name(job, self.mark, part)

    def of_job(self, functions: Iterable[FunctionStatus], job: str) -> list[str]:
        """Return the names of a job's functions that are this owner's."""
        return [one.name for one in functions if self._owns(one) and one.spec.labels.get(_JOB_LABEL) == _label(job)]

    def orphans(self, functions: Iterable[FunctionStatus], active: Collection[str]) -> list[str]:
        """Return the names of this owner's functions that belong to none of the active jobs and profiles."""
        kept = {_label(job) for job in active}
        return [one.name for one in functions if self._owns(one) and one.spec.labels.get(_JOB_LABEL) not in kept]

    def secret(self, name: str, job: str) -> str:
        """Return the name of a job's copy of a secret, which no other job's function names."""
        tail = self._secret_tail(job)
        if not self.mark or len(name) + len(tail) <= _MOST_CHARACTERS:
            return name + tail
        end = f"-{_digest(name)}{tail}"
        return name[: _MOST_CHARACTERS - len(end)].rstrip("-") + end

    def secrets_of(self, secrets: Iterable[str], job: str) -> list[str]:
        """Return the names of a job's copies that are this owner's."""
        return [name for name in secrets if self.mark and name.endswith(self._secret_tail(job))]

    def orphan_secrets(self, secrets: Iterable[str], active: Collection[str]) -> list[str]:
        """Return the names of this owner's copies that belong to none of the active jobs and profiles."""
        own = re.compile(rf".*-{self.mark}-[0-9a-f]{{8}}")
        kept = tuple(self._secret_tail(job) for job in active)
        return [name for name in secrets if self.mark and own.fullmatch(name) and not name.endswith(kept)]

    def _secret_tail(self, job: str) -> str:
        return f"-{self.mark}-{_digest(job)}" if self.mark else ""

    def _owns(self, function: FunctionStatus) -> bool:
        labels = function.spec.labels
        own = labels.get(_OWNER_LABEL) == self.mark and labels.get(_REGION_LABEL) == self.region
        return bool(self.mark) and own


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _label(job: str) -> str:
    """Return a job's identity as the value of a label, which has 63 characters at most."""
    return job[-_MOST_CHARACTERS:].lstrip("-")
