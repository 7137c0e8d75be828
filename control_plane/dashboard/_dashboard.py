"""The dashboard: who may see and do what, over HTTPS. It shows and does what the commands show and do."""

from __future__ import annotations

import asyncio
import base64
import binascii
import importlib.util
import json
import math
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlsplit

from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from control_plane._view import event_view, job_view
from control_plane.dashboard._pages import Pages
from control_plane.dashboard._series import series_of
from control_plane.dashboard._sessions import LIFE_SECONDS, Sessions
from control_plane.service import (
    OPERATOR,
    Caller,
    Federation,
    JobEntry,
    caller_of,
    caller_with,
    cancel,
    event_message,
    finish,
    kept_model,
    scale,
    share,
)
from control_plane.store import Store
from geofed_pb.errors import GeofedError

__all__ = ["Dashboard"]

_COOKIE = "__Host-geofed"
_FORM_BYTES = 64 << 10
"""Limit of a form's size."""
_FORM_FIELDS = 1000
_ROUNDS = 5000
"""Limit of the events behind a job's charts."""
_MOST_COMPARED = 8
_STREAMS = 20
"""Limit of a user's pages that are kept up to date; the others show how things stood when they were loaded."""
_SERIES_SECONDS = 2.0
"""Time for which the charts of a job are kept for whoever looks at it: they are made of thousands of events."""
_MOST_SERIES = 100
_LEAST_SECONDS = 1.0
"""Least time between two events of a stream."""
_KEEP_ALIVE_SECONDS = 15.0
_OVERVIEW_SECONDS = 3.0
_HEADERS = {
    # Plotly sets styles of the elements that it draws.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    # With "no-referrer" browsers state no origin of forms.
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}
_KEPT = _HEADERS | {"Cache-Control": "public, max-age=31536000, immutable"}
_STATUS = {
    "UNAUTHENTICATED": 401, "FORBIDDEN": 403, "JOB_NOT_FOUND": 404, "MODEL_NOT_FOUND": 404, "USER_NOT_FOUND": 404,
    "USAGE": 400, "ILLEGAL_STATE": 409, "LIMIT_EXCEEDED": 429, "STANDBY": 503, "UNAVAILABLE": 503,
}  # fmt: skip
_STATIC = Path(__file__).parent / "static"

_Answer = Callable[[Request, Caller], Awaitable[Response]]


class Dashboard:
    """The routes of one federation's dashboard."""

    def __init__(self, federation: Federation, operator_hash: str) -> None:
        """``operator_hash``: hash of the operator's token."""
        self._federation, self._operator_hash = federation, operator_hash
        self._sessions = Sessions(time.monotonic)
        self._plotly = _plotly()
        script = f'<script src="/static/plotly-{version("plotly")}.js" defer></script>\n' if self._plotly else ""
        self._pages = Pages(federation, script)
        self._streams: Counter[str] = Counter()
        self._series_kept: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self._making = asyncio.Lock()

    @property
    def routes(self) -> list[Route]:
        """All routes; without a token only the sign-in page and static files are served."""
        job = "/jobs/{job}"
        return [
            Route("/", self._page(self._pages.overview)),
            Route("/compare", self._page(self._compare)),
            Route(job, self._page(self._job)),
            Route(f"{job}/logs", self._page(self._logs)),
            Route(f"{job}/series", self._guarded(self._series)),
            Route(f"{job}/files/{{name}}", self._guarded(self._file)),
            Route(f"{job}/models/{{round:int}}", self._guarded(self._model)),
            Route(f"{job}/{{action}}", self._guarded(self._act, changes=True), methods=["POST"]),
            Route("/live", self._guarded(self._live)),
            Route("/signin", self._sign_in, methods=["GET", "POST"]),
            Route("/signout", self._sign_out, methods=["POST"]),
            Route("/static/{name}", self._static),
        ]

    # Who calls

    def _guarded(self, answer: _Answer, *, changes: bool = False) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            try:
                if changes:
                    _require_same_origin(request)
                return await answer(request, self._caller(request))
            except GeofedError as error:
                return self._refused(request, error)

        return guarded

    def _page(self, page: Callable[[Request, Caller], Awaitable[str]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request, caller: Caller) -> Response:
            return HTMLResponse(await page(request, caller), headers=_HEADERS)

        return self._guarded(answer)

    def _refused(self, request: Request, error: GeofedError) -> Response:
        status, given = _STATUS.get(error.code, 500), "authorization" in request.headers
        if status == 401 and not given:
            here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
            page = self._pages.sign_in("", here if request.method == "GET" else "/")
            return HTMLResponse(page, status_code=401, headers=_HEADERS)
        more = {"WWW-Authenticate": 'Basic realm="geofed", charset="UTF-8"'} if status == 401 else {}
        return HTMLResponse(self._pages.error(error), status_code=status, headers=_HEADERS | more)

    def _caller(self, request: Request) -> Caller:
        """Return the caller of a session or, for scripts, with a token in the header: as bearer, or as password."""
        shown, users = request.headers.get("authorization", ""), self._federation.users.values()
        if not shown:
            known = self._sessions.token_hash(request.cookies.get(_COOKIE, ""))
            if known is None:
                raise GeofedError("UNAUTHENTICATED", "sign in")
            return caller_with(known, self._operator_hash, users)
        kind, _, value = shown.partition(" ")
        if kind.lower() == "basic":
            try:
                _, _, token = base64.b64decode(value, validate=True).decode().partition(":")
            except (binascii.Error, UnicodeDecodeError):
                token = ""
            shown = f"Bearer {token}"
        return caller_of(shown, self._operator_hash, users)

    async def _sign_in(self, request: Request) -> Response:
        if request.method == "GET":
            return HTMLResponse(self._pages.sign_in("", _local(request.query_params.get("next", ""))), headers=_HEADERS)
        try:
            _require_same_origin(request)
            form = await _form(request)
            token, then = form.get("token", "").strip(), _local(form.get("next", ""))
            caller_of(f"Bearer {token}", self._operator_hash, self._federation.users.values())
        except GeofedError as error:
            status = _STATUS.get(error.code, 500)
            return HTMLResponse(self._pages.sign_in(error.message, "/"), status_code=status, headers=_HEADERS)
        answer = RedirectResponse(then, 303, headers=_HEADERS)
        secret = self._sessions.open(token)
        answer.set_cookie(_COOKIE, secret, max_age=LIFE_SECONDS, secure=True, httponly=True, samesite="lax")
        return answer

    async def _sign_out(self, request: Request) -> Response:
        try:
            _require_same_origin(request)
        except GeofedError as error:
            return self._refused(request, error)
        self._sessions.close(request.cookies.get(_COOKIE, ""))
        answer = RedirectResponse("/signin", 303, headers=_HEADERS)
        answer.delete_cookie(_COOKIE, secure=True, httponly=True, samesite="lax")
        return answer

    # What is shown

    async def _find(self, name: str, caller: Caller, right: str = "read") -> JobEntry:
        entry = await self._federation.find_job(name, caller.may_read)
        caller.require(right, entry.row)
        return entry

    async def _job(self, request: Request, caller: Caller) -> str:
        return await self._pages.job(await self._find(request.path_params["job"], caller), caller)

    async def _logs(self, request: Request, caller: Caller) -> str:
        entry, asked = await self._find(request.path_params["job"], caller), request.query_params
        return await self._pages.logs(entry, caller, asked.get("q", ""), asked.get("region", ""))

    async def _compare(self, request: Request, caller: Caller) -> str:
        names = list(dict.fromkeys(request.query_params.getlist("job")))
        if not 1 <= len(names) <= _MOST_COMPARED:
            raise GeofedError("USAGE", f"choose 2 to {_MOST_COMPARED} jobs", hint="tick them on the first page")
        return self._pages.compare([await self._find(name, caller) for name in names], caller)

    async def _series(self, request: Request, caller: Caller) -> Response:
        entry = await self._find(request.path_params["job"], caller)
        # One after the other: many viewers must not take the time that the control plane needs.
        async with self._making:
            made, body = self._series_kept.get(entry.row.id, (-math.inf, b""))
            if time.monotonic() - made > _SERIES_SECONDS:
                body = await self._made_series(entry)
                self._series_kept[entry.row.id] = time.monotonic(), body
                self._series_kept.move_to_end(entry.row.id)
                while len(self._series_kept) > _MOST_SERIES:
                    self._series_kept.popitem(last=False)
        return Response(body, media_type="application/json", headers=_HEADERS)

    async def _made_series(self, entry: JobEntry) -> bytes:
        found = await asyncio.gather(
            *(
                self._federation.read(partial(Store.newest_events, job=entry.row.id, kind=kind, limit=_ROUNDS))
                for kind in ("partition.round", "partition.logged", "partition.evaluated")
            )
        )
        job, rows = job_view(self._federation.describe(entry)), [row for rows in found for row in rows]

        def made() -> bytes:
            return json.dumps(series_of(job, [event_view(event_message(row)) for row in rows])).encode()

        return await asyncio.to_thread(made)

    async def _file(self, request: Request, caller: Caller) -> Response:
        entry, name = await self._find(request.path_params["job"], caller), request.path_params["name"]
        if name == "task.tar":
            await self._federation.note_read(entry, caller.user, entry.row.bundle_digest)
            return await self._blob(entry.row.bundle_digest, f"{entry.row.id}-task.tar")
        view, key = (
            job_view(self._federation.describe(entry)),
            {"job.json": "spec"}.get(name, name.removesuffix(".json")),
        )
        if key not in ("spec", "plan", "result") or view[key] is None:
            raise GeofedError("USAGE", f"job {entry.row.id} has no file {name[:80]!r}")
        text = json.dumps(view[key], indent=2) + "\n"
        return Response(text, media_type="application/json", headers=_HEADERS | _named(f"{entry.row.id}-{name}"))

    async def _model(self, request: Request, caller: Caller) -> Response:
        entry = await self._find(request.path_params["job"], caller)
        model = kept_model(entry, request.path_params["round"] or None)
        await self._federation.note_read(entry, caller.user, model.digest)
        return await self._blob(model.digest, f"{entry.row.id}-round-{model.round}.safetensors")

    async def _blob(self, digest: str, name: str) -> Response:
        size = self._federation.blobs.size(digest)
        if size is None:
            raise GeofedError(
                "MODEL_NOT_FOUND", f"{name} is not kept any more", hint="`geofed storage` shows the rules"
            )
        chunks = (chunk.data async for chunk in self._federation.blobs.send(digest, 0))
        headers = _HEADERS | _named(name) | {"Content-Length": str(size)}
        return StreamingResponse(chunks, media_type="application/octet-stream", headers=headers)

    async def _static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if self._plotly is not None and name == f"plotly-{version('plotly')}.js":
            return FileResponse(self._plotly, media_type="text/javascript", headers=_KEPT)
        kind = {"style.css": "text/css", "dashboard.js": "text/javascript"}.get(name)
        if kind is None:
            return Response("not found", 404, headers=_HEADERS)
        return Response((_STATIC / name).read_bytes(), media_type=kind, headers=_HEADERS)

    # What is done

    async def _act(self, request: Request, caller: Caller) -> Response:
        entry, by = await self._find(request.path_params["job"], caller, "change"), caller.user or OPERATOR
        form, action, job = await _form(request), request.path_params["action"], entry.row.id
        if action == "cancel":
            await cancel(self._federation, entry, "requested on the dashboard", by)
        elif action == "finish":
            await finish(self._federation, entry, "requested on the dashboard", by)
        elif action == "scale":
            await scale(self._federation, job, _workers(form), "requested on the dashboard", by)
        elif action == "share":
            await share(self._federation, entry, form.get("user", "").strip(), by)
        else:
            raise GeofedError("USAGE", f"a job has no action {action[:80]!r}")
        return RedirectResponse(f"/jobs/{quote(job)}", 303, headers=_HEADERS)

    # What changes

    async def _live(self, request: Request, caller: Caller) -> Response:
        """Stream a server-sent event whenever one of the named jobs has changed, and at the end of all; without a name
        every few seconds, since not even the time of other users' events is told."""
        names = request.query_params.getlist("job")[:_MOST_COMPARED]
        jobs = [(await self._find(name, caller)).row.id for name in names]
        if self._streams[caller.user] >= _STREAMS:
            raise GeofedError("LIMIT_EXCEEDED", f"{_STREAMS} pages are kept up to date already")
        headers = _HEADERS | {"X-Accel-Buffering": "no"}
        return StreamingResponse(self._changes(request, caller, jobs), media_type="text/event-stream", headers=headers)

    async def _changes(self, request: Request, caller: Caller, jobs: Sequence[str]) -> AsyncIterator[str]:
        federation, shown = self._federation, -1
        self._streams[caller.user] += 1
        try:
            yield "retry: 3000\n\n"
            while not federation.stopping:
                seen = federation.events_notifier.count
                # Sessions end, rights change, and another control plane may lead.
                federation.leading.check()
                if self._caller(request) != caller:
                    return
                for job in jobs:
                    await self._find(job, caller)
                newest = await self._newest(jobs)
                if newest != shown >= 0:
                    yield "event: change\ndata:\n\n"
                shown = newest
                if jobs and not any(job in federation.jobs for job in jobs):
                    yield "event: end\ndata:\n\n"
                    return
                try:
                    if not jobs:
                        await asyncio.sleep(_OVERVIEW_SECONDS)
                        raise TimeoutError
                    await asyncio.wait_for(federation.events_notifier.wait(seen), _KEEP_ALIVE_SECONDS)
                    await asyncio.sleep(_LEAST_SECONDS)
                except TimeoutError:
                    # Reports without events change figures, too; and a stream without bytes looks dead to proxies.
                    yield "event: change\ndata:\n\n"
        except GeofedError:
            return
        finally:
            self._streams[caller.user] -= 1

    async def _newest(self, jobs: Sequence[str]) -> int:
        """Return the newest cursor of the jobs' events."""
        found = [await self._federation.read(partial(Store.newest_events, job=job, limit=1)) for job in jobs]
        return max((rows[-1].cursor for rows in found if rows), default=0)


async def _form(request: Request) -> dict[str, str]:
    """Return the fields of a form. Raises ``GeofedError``: LIMIT_EXCEEDED if it is too long, USAGE if it is none."""
    size = request.headers.get("content-length", "0")
    if not size.isdigit() or int(size) > _FORM_BYTES or "transfer-encoding" in request.headers:
        raise GeofedError("LIMIT_EXCEEDED", f"a form has {_FORM_BYTES >> 10} KiB at most")
    try:
        return dict(parse_qsl((await request.body()).decode(), max_num_fields=_FORM_FIELDS))
    except ValueError:
        raise GeofedError("USAGE", "the request has no form") from None


def _workers(form: dict[str, str]) -> dict[str, int]:
    """Return the workers that a form states by region. Raises ``GeofedError("USAGE")``."""
    try:
        return {name: int(value) for name, value in form.items()}
    except ValueError:
        raise GeofedError("USAGE", "the number of workers must be a whole number") from None


def _require_same_origin(request: Request) -> None:
    """Refuse forms that another site's page sends in the name of a browser that has signed in."""
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise GeofedError("FORBIDDEN", "the request comes from a page of another site")


def _local(path: str) -> str:
    """Return a path of the dashboard; "/" for anything that leads elsewhere."""
    return path if path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable() else "/"


def _named(name: str) -> dict[str, str]:
    return {"Content-Disposition": f'attachment; filename="{name}"'}


def _plotly() -> Path | None:
    """Return the script of Plotly, which draws the charts; None if it is not installed."""
    found = importlib.util.find_spec("plotly")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        script = Path(folder) / "package_data" / "plotly.min.js"
        if script.is_file():
            return script
    return None
