"""Submit a job from a template: its code is the template's, its job file is what the user makes of it in a form."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from control_plane._templates import find_template, template_folders, template_view, write_template
from control_plane._view import Data
from control_plane.service import DAILY_CODE_BYTES, Caller, Federation, JobEntry, Probing, answer_plan, submit
from control_plane.spec import JobSpec, PackedTask, check_requirements, check_task, pack, parse_request, parse_text
from geofed_pb.errors import GeofedError
from geofed_pb.files.task_folder import MAX_ARCHIVE_BYTES
from geofed_pb.rpc import CHUNK_BYTES
from geofed_pb.v1 import common_pb2, control_pb2

__all__ = ["MAX_SENT_BYTES", "SubmissionForm", "Submissions", "draft_of", "templates"]

MAX_SENT_BYTES = 1 << 20
"""Limit of a draft as a browser sends it: three bytes for one that is no letter."""
_MAX_DRAFT_BYTES = 48 << 10
"""Limit of its text: to read 1 KiB may take 50 ms, in which the control plane does little else."""
_FILE = "job.yaml"
_SET = {"name": "metadata.name", "dataset": "data.dataset", "minimise": "objective.minimise"}
"""Keys of the job file that the form has fields for."""


@dataclass(frozen=True)
class SubmissionForm:
    """What a user has entered."""

    template: str
    text: str
    """The job file."""
    name: str = ""
    """Replaces the job file's, as the fields below; empty: what the job file says."""
    dataset: str = ""
    minimise: str = ""

    @property
    def overrides(self) -> list[str]:
        """The fields as ``--set`` of the commands."""
        given = {key: getattr(self, field) for field, key in _SET.items()}
        return [f"{key}={json.dumps(value)}" for key, value in given.items() if value]


@dataclass(frozen=True)
class _Checked:
    """A draft that has passed all checks."""

    json: str
    """The normalised job file."""
    spec: JobSpec
    warnings: tuple[str, ...]
    code: PackedTask
    """The template's."""


def templates() -> list[Data]:
    """Return the installed templates, by name."""
    try:
        return [template_view(folder) for folder in template_folders()]
    except GeofedError:
        return []


def draft_of(form: dict[str, str]) -> SubmissionForm:
    """Return what a form states; without a job file that of its template.

    Raises ``GeofedError("TEMPLATE_NOT_FOUND")`` if that is needed.
    """
    template, fields = form.get("template", ""), {name: form.get(name, "").strip() for name in _SET}
    # Browsers end the lines of a text area as in MS-DOS.
    text = form.get("text", "").replace("\r\n", "\n")
    return SubmissionForm(template, text or (find_template(template) / _FILE).read_text(encoding="utf-8"), **fields)


class Submissions:
    """Checks, plans and submits what users have entered, as `geofed validate`, `explain` and `submit` do."""

    def __init__(self, federation: Federation, probing: Probing) -> None:
        self._federation, self._probing = federation, probing
        self._checking = asyncio.Lock()
        """Drafts are checked one after the other: it takes the processor."""

    def require(self, caller: Caller) -> None:
        """Raise ``GeofedError("FORBIDDEN")`` unless the caller may submit jobs here."""
        if not caller.may_submit:
            raise GeofedError("FORBIDDEN", f"{caller.user} may not submit jobs", hint="an operator changes roles")
        user = self._federation.users.get(caller.user)
        if user is not None and user.public_key:
            text = f"the jobs of {caller.user} are signed with a key that only {caller.user} has"
            raise GeofedError("FORBIDDEN", text, hint="submit them by command, which signs them")

    async def plan(self, draft: SubmissionForm, caller: Caller) -> tuple[Data, bool]:
        """Return the plan of a draft, and whether it is admissible; store its code, in case a region probes the task.

        Raises ``GeofedError``: what is wrong with the job file; what `answer_plan` raises.
        """
        checked = await self._checked(draft)
        digest = checked.code.digest
        with self._federation.blobs.held(digest):
            await self._put(checked, caller)
            request = control_pb2.PlanRequest(spec_json=checked.json, bundle_digest=digest)
            text, admissible = await answer_plan(self._federation, self._probing, request, checked.spec, caller.user)
        plan: Data = json.loads(text)
        plan["warnings"] = [*checked.warnings, *plan.get("warnings", [])]
        return plan, admissible

    async def submit(self, draft: SubmissionForm, request_id: str, caller: Caller) -> JobEntry:
        """Submit a draft, once for each request ID; return the job. Raises ``GeofedError``, as `submit`."""
        checked = await self._checked(draft)
        digest = checked.code.digest
        with self._federation.blobs.held(digest):
            await self._put(checked, caller)
            request = control_pb2.SubmitRequest(spec_json=checked.json, bundle_digest=digest, request_id=request_id)
            entry, _ = await submit(self._federation, self._probing, request, checked.spec, caller.user)
        return entry

    async def _checked(self, draft: SubmissionForm) -> _Checked:
        if len(draft.text.encode(errors="replace")) > _MAX_DRAFT_BYTES:
            raise GeofedError(
                "LIMIT_EXCEEDED",
                f"a job file has {_MAX_DRAFT_BYTES >> 10} KiB here at most",
                hint="submit longer ones by command",
            )
        async with self._checking:
            return await asyncio.to_thread(_read, draft)

    async def _put(self, checked: _Checked, caller: Caller) -> None:
        content, digest = checked.code.content, checked.code.digest

        async def chunks() -> AsyncIterator[common_pb2.BlobChunk]:
            for offset in range(0, len(content), CHUNK_BYTES):
                piece = content[offset : offset + CHUNK_BYTES]
                yield common_pb2.BlobChunk(digest=digest, total_bytes=len(content), offset=offset, data=piece)

        # Named apart from the uploads of commands, since both may be under way; they count together.
        await self._federation.blobs.receive(
            chunks(), limit_bytes=MAX_ARCHIVE_BYTES, uploader=f"user {caller.user} on the dashboard",
            daily_bytes=DAILY_CODE_BYTES, account=f"user {caller.user}",
        )  # fmt: skip


def _read(draft: SubmissionForm) -> _Checked:
    spec, warnings = parse_text(draft.text, _FILE, draft.overrides)
    initial = spec.train.initial_model
    if initial is not None and (initial.file is not None or initial.adapter is not None):
        # It would be a file of the control plane's machine.
        key = "file" if initial.file is not None else "adapter.file"
        text = f"train.initialModel.{key}: files of your machine are not uploaded here"
        raise GeofedError("SPEC_INVALID", text, hint="name an ended job, or submit by command")
    with tempfile.TemporaryDirectory(prefix="geofed-template-") as name:
        folder = Path(name)
        write_template(draft.template, folder, None)
        (folder / _FILE).write_text(draft.text, encoding="utf-8")
        try:
            check_task(folder, spec.task.module, evaluates_only=spec.evaluates_only)
            if spec.task.requirements is not None:
                check_requirements(folder, spec.task.requirements)
            code = pack(folder, spec.task.module)
            if code.parts:
                text = f"the template has {code.parts[0].name} and {len(code.parts) - 1} more files above its archive"
                raise GeofedError("LIMIT_EXCEEDED", text, hint="submit it by command")
            text = spec.to_json()
            return _Checked(text, parse_request(text), warnings, code)
        except GeofedError as error:
            raise GeofedError(error.code, error.message.replace(str(folder), "the template"), hint=error.hint) from None
