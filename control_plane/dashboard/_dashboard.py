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
from itertools import chain
from pathlib import Path
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from control_plane._view import event_view, job_view
from control_plane.dashboard._http import HEADERS, KEPT, form_of, local, named, require_same_origin, status_of
from control_plane.dashboard._pages import Pages
from control_plane.dashboard._provider_sign_in import LIFE_SECONDS as PROVIDER_SECONDS
from control_plane.dashboard._provider_sign_in import ProviderSignIn
from control_plane.dashboard._series import series_of
from control_plane.dashboard._sessions import LIFE_SECONDS, Sessions
from control_plane.dashboard._submission import MAX_SENT_BYTES, SubmissionForm, Submissions, draft_of
from control_plane.pki import new_secret
from control_plane.service import (
    OPERATOR,
    Caller,
    Federation,
    JobEntry,
    Probing,
    Replanner,
    SignInService,
    Sweeper,
    caller_of,
    caller_with,
    cancel,
    event_message,
    finish,
    kept_model,
    rename,
    replan,
    require_deletable,
    resume,
    scale,
    share,
)
from control_plane.store import Store
from geofed_pb.errors import GeofedError

__all__ = ["Dashboard"]

_COOKIE = "__Host-geofed"
_STATE_COOKIE = "__Host-geofed-sign-in"
_BACK = "/signin/provider/back"
"""Path to which the identity provider sends browsers back."""
_SAMPLED = 1000
"""Limit of the events of a kind behind a job's charts: of more, every n-th."""
_TIMED = 600
"""Limit of the rounds in the timelines of a job's regions, with equal numbers for each: the last ones."""
_MOST_COMPARED = 8
"""Limit of the jobs on one page of comparison: more lines in a chart cannot be told apart."""
_STREAMS = 20
"""Limit of a user's pages that are kept up to date; the others show how things stood when they were loaded."""
_SERIES_SECONDS = 2.0
"""Least time for which the charts of a job are kept for whoever looks at it: they are made of thousands of events."""
_SERIES_TIMES = 10.0
"""They are kept for so many times the time that they took, if that is longer."""
_MOST_SERIES = 100
"""Limit of the jobs whose charts are kept in memory."""
_LEAST_SECONDS = 1.0
"""Least time between two events of a stream."""
_KEEP_ALIVE_SECONDS = 15.0
"""Longest pause in a stream: proxies close connections on which nothing is sent for 30 to 60 s."""
_OVERVIEW_SECONDS = 3.0
"""Least time between two versions of the overview, which concerns all jobs and regions."""
_REASON = "requested on the dashboard"
_STATIC = Path(__file__).parent / "static"

_Answer = Callable[[Request, Caller], Awaitable[Response]]


class Dashboard:
    """The routes of one federation's dashboard."""

    def __init__(
        self,
        federation: Federation,
        operator_hash: str,
        sign_ins: SignInService,
        probing: Probing,
        replanner: Replanner,
        sweeper: Sweeper,
    ) -> None:
        """``operator_hash``: hash of the operator's token."""
        self._federation, self._operator_hash, self._sign_ins = federation, operator_hash, sign_ins
        self._probing, self._replanner, self._sweeper = probing, replanner, sweeper
        self._sessions = Sessions(time.monotonic)
        self._by_provider = ProviderSignIn(sign_ins)
        self._plotly = _plotly()
        script = f'<script src="/static/plotly-{version("plotly")}.js" defer></script>\n' if self._plotly else ""
        self._pages = Pages(federation, script, self._by_provider.provider_host)
        self._submissions = Submissions(federation, probing)
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
            Route("/submit", self._page(self._draft)),
            Route("/submit", self._guarded(self._submit, changes=True), methods=["POST"]),
            Route("/submit/plan", self._guarded(self._plan, changes=True), methods=["POST"]),
            Route(job, self._page(self._job)),
            Route(f"{job}/logs", self._page(self._logs)),
            Route(f"{job}/series", self._guarded(self._series)),
            Route(f"{job}/files/{{name}}", self._guarded(self._file)),
            Route(f"{job}/models/{{round:int}}", self._guarded(self._model)),
            Route(f"{job}/delete", self._page(self._deletion)),
            Route(f"{job}/delete", self._guarded(self._delete, changes=True), methods=["POST"]),
            Route(f"{job}/resume", self._guarded(self._resume, changes=True), methods=["POST"]),
            Route(f"{job}/{{action}}", self._guarded(self._act, changes=True), methods=["POST"]),
            Route("/live", self._guarded(self._live)),
            Route("/network", self._guarded(self._network)),
            Route("/signin", self._sign_in, methods=["GET", "POST"]),
            Route("/signin/provider", self._to_provider),
            Route(_BACK, self._from_provider),
            Route("/signout", self._sign_out, methods=["POST"]),
            Route("/static/{name}", self._static),
        ]

    # Who calls

    def _guarded(self, answer: _Answer, *, changes: bool = False) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            try:
                if changes:
                    require_same_origin(request)
                return await answer(request, self._caller(request))
            except GeofedError as error:
                return self._refused(request, error)

        return guarded

    def _page(self, page: Callable[[Request, Caller], Awaitable[str]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request, caller: Caller) -> Response:
            return HTMLResponse(await page(request, caller), headers=HEADERS)

        return self._guarded(answer)

    def _refused(self, request: Request, error: GeofedError) -> Response:
        status, given = status_of(error), "authorization" in request.headers
        if status == 401 and not given:
            here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
            page = self._pages.sign_in("", here if request.method == "GET" else "/")
            return HTMLResponse(page, status_code=401, headers=HEADERS)
        more = {"WWW-Authenticate": 'Basic realm="geofed", charset="UTF-8"'} if status == 401 else {}
        return HTMLResponse(self._pages.error(error), status_code=status, headers=HEADERS | more)

    def _caller(self, request: Request) -> Caller:
        """Return the caller of a session or, for scripts, with a token in the header: as bearer, or as password."""
        shown, users = request.headers.get("authorization", ""), self._federation.users.values()
        if not shown:
            known = self._sessions.token_hash(request.cookies.get(_COOKIE, ""))
            if known is None:
                raise GeofedError("UNAUTHENTICATED", "sign in")
            return caller_with(known, self._operator_hash, users, self._federation.clock())
        kind, _, value = shown.partition(" ")
        if kind.lower() == "basic":
            try:
                _, _, token = base64.b64decode(value, validate=True).decode().partition(":")
            except (binascii.Error, UnicodeDecodeError):
                token = ""
            shown = f"Bearer {token}"
        return caller_of(shown, self._operator_hash, users, self._federation.clock())

    async def _sign_in(self, request: Request) -> Response:
        if request.method == "GET":
            return HTMLResponse(self._pages.sign_in("", local(request.query_params.get("next", ""))), headers=HEADERS)
        try:
            require_same_origin(request)
            form = await form_of(request)
            token, then = form.get("token", "").strip(), local(form.get("next", ""))
            users, at = self._federation.users.values(), self._federation.clock()
            caller_of(f"Bearer {token}", self._operator_hash, users, at)
        except GeofedError as error:
            return self._not_signed_in(error)
        return await self._signed_in(request, token, then)

    async def _signed_in(self, request: Request, token: str, then: str, *, by_provider: bool = False) -> Response:
        await self._end_session(request)
        answer = RedirectResponse(then, 303, headers=HEADERS)
        secret = self._sessions.open(token, owns_token=by_provider)
        answer.set_cookie(_COOKIE, secret, max_age=LIFE_SECONDS, secure=True, httponly=True, samesite="lax")
        return answer

    async def _to_provider(self, request: Request) -> Response:
        try:
            own = self._sign_ins.dashboard_url
            back = f"{own}{_BACK}" if own else str(request.url.replace(path=_BACK, query="", fragment=""))
            url, state = await self._by_provider.begin(back, local(request.query_params.get("next", "")))
        except GeofedError as error:
            return self._not_signed_in(error)
        answer = RedirectResponse(url, 303, headers=HEADERS)
        answer.set_cookie(_STATE_COOKIE, state, max_age=PROVIDER_SECONDS, secure=True, httponly=True, samesite="lax")
        return answer

    async def _from_provider(self, request: Request) -> Response:
        try:
            cookie = request.cookies.get(_STATE_COOKIE, "")
            token, then = await self._by_provider.complete(request.query_params, cookie)
            answer = await self._signed_in(request, token, then, by_provider=True)
        except GeofedError as error:
            answer = self._not_signed_in(error)
        answer.delete_cookie(_STATE_COOKIE, secure=True, httponly=True, samesite="lax")
        return answer

    def _not_signed_in(self, error: GeofedError) -> Response:
        page = self._pages.sign_in(error.message, "/")
        return HTMLResponse(page, status_code=status_of(error), headers=HEADERS)

    async def _sign_out(self, request: Request) -> Response:
        try:
            require_same_origin(request)
            await self._end_session(request)
        except GeofedError as error:
            return self._refused(request, error)
        answer = RedirectResponse("/signin", 303, headers=HEADERS)
        answer.delete_cookie(_COOKIE, secure=True, httponly=True, samesite="lax")
        return answer

    async def _end_session(self, request: Request) -> None:
        """End the browser's session, if it has one, and revoke a token that the provider's word has brought it."""
        token_hash = self._sessions.close(request.cookies.get(_COOKIE, ""))
        if token_hash is not None:
            await self._sign_ins.sign_out(token_hash)

    # What is shown

    async def _find(self, name: str, caller: Caller, right: str = "read") -> JobEntry:
        entry = await self._federation.lookup.find_job(name, caller.may_read)
        caller.require(right, entry.row)
        return entry

    async def _job(self, request: Request, caller: Caller) -> str:
        return await self._pages.job(await self._find(request.path_params["job"], caller), caller)

    async def _logs(self, request: Request, caller: Caller) -> str:
        entry, asked = await self._find(request.path_params["job"], caller, "contents"), request.query_params
        await self._federation.note_read(entry, caller.user, "")
        return await self._pages.logs(entry, caller, asked.get("q", ""), asked.get("region", ""))

    async def _compare(self, request: Request, caller: Caller) -> str:
        names = list(dict.fromkeys(request.query_params.getlist("job")))
        if not 1 <= len(names) <= _MOST_COMPARED:
            raise GeofedError("USAGE", f"choose 1 to {_MOST_COMPARED} jobs", hint="tick them on the first page")
        return self._pages.compare([await self._find(name, caller) for name in names], caller)

    async def _series(self, request: Request, caller: Caller) -> Response:
        entry = await self._find(request.path_params["job"], caller)
        # One after the other: many viewers must not take the time that the control plane needs.
        async with self._making:
            until, body = self._series_kept.get(entry.row.id, (-math.inf, b""))
            if (begun := time.monotonic()) > until:
                body = await self._made_series(entry)
                made = time.monotonic()
                kept_seconds = max(_SERIES_SECONDS, _SERIES_TIMES * (made - begun))
                self._series_kept[entry.row.id] = made + kept_seconds, body
                self._series_kept.move_to_end(entry.row.id)
                while len(self._series_kept) > _MOST_SERIES:
                    self._series_kept.popitem(last=False)
        return Response(body, media_type="application/json", headers=HEADERS)

    async def _network(self, _: Request, caller: Caller) -> Response:
        return JSONResponse(await asyncio.to_thread(self._pages.network, caller), headers=HEADERS)

    async def _made_series(self, entry: JobEntry) -> bytes:
        job, read = entry.row.id, self._federation.read
        view = job_view(self._federation.describe(entry))
        each = max(2, _TIMED // (len(view["partitions"]) or 1))
        kinds = ("partition.round", "partition.logged", "partition.evaluated")
        *found, timed = await asyncio.gather(
            *(read(partial(Store.sampled_events, job=job, kind=kind, most=_SAMPLED)) for kind in kinds),
            read(partial(Store.newest_of_regions, job=job, kind="partition.round", each=each)),
        )

        def made() -> bytes:
            charts, rounds = [[event_view(event_message(row)) for row in rows] for rows in (chain(*found), timed)]
            return json.dumps(series_of(view, charts, rounds)).encode()

        return await asyncio.to_thread(made)

    async def _file(self, request: Request, caller: Caller) -> Response:
        entry, name = await self._find(request.path_params["job"], caller), request.path_params["name"]
        if name == "task.tar":
            caller.require("contents", entry.row)
            await self._federation.note_read(entry, caller.user, entry.row.bundle_digest)
            return await self._blob(entry.row.bundle_digest, f"{entry.row.id}-task.tar")
        view, key = (
            job_view(self._federation.describe(entry)),
            {"job.json": "spec"}.get(name, name.removesuffix(".json")),
        )
        if key not in ("spec", "plan", "result") or view[key] is None:
            raise GeofedError("USAGE", f"job {entry.row.id} has no file {name[:80]!r}")
        text = json.dumps(view[key], indent=2) + "\n"
        return Response(text, media_type="application/json", headers=HEADERS | named(f"{entry.row.id}-{name}"))

    async def _model(self, request: Request, caller: Caller) -> Response:
        entry = await self._find(request.path_params["job"], caller, "contents")
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
        headers = HEADERS | named(name) | {"Content-Length": str(size)}
        return StreamingResponse(chunks, media_type="application/octet-stream", headers=headers)

    async def _static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if self._plotly is not None and name == f"plotly-{version('plotly')}.js":
            return FileResponse(self._plotly, media_type="text/javascript", headers=KEPT)
        kind = {"style.css": "text/css", "dashboard.js": "text/javascript"}.get(name)
        if kind is None:
            return Response("not found", 404, headers=HEADERS)
        return Response((_STATIC / name).read_bytes(), media_type=kind, headers=HEADERS)

    # What is done

    async def _act(self, request: Request, caller: Caller) -> Response:
        entry, by = await self._find(request.path_params["job"], caller, "change"), caller.user or OPERATOR
        federation, job = self._federation, entry.row.id
        form, action = await form_of(request), request.path_params["action"]
        user = form.get("user", "").strip()
        if action == "cancel":
            await cancel(federation, entry, _REASON, by)
        elif action == "finish":
            await finish(federation, entry, _REASON, by)
        elif action == "scale":
            await scale(federation, job, _workers(form), _REASON, by)
        elif action == "replan":
            await replan(federation, self._replanner, entry, _REASON, by)
        elif action == "rename":
            await rename(federation, entry, form.get("name", "").strip(), by)
        elif action in ("share", "unshare"):
            await share(federation, entry, user, by, end=action == "unshare")
        else:
            raise GeofedError("USAGE", f"a job has no action {action[:80]!r}")
        return RedirectResponse(f"/jobs/{quote(job)}", 303, headers=HEADERS)

    async def _resume(self, request: Request, caller: Caller) -> Response:
        entry, form = await self._find(request.path_params["job"], caller, "change"), await form_of(request)
        given, by = form.get("request", ""), caller.user or OPERATOR
        resumed, _ = await resume(self._federation, self._probing, entry.row.id, given, by)
        return RedirectResponse(f"/jobs/{quote(resumed.row.id)}", 303, headers=HEADERS)

    async def _deletion(self, request: Request, caller: Caller) -> str:
        entry = await self._find(request.path_params["job"], caller, "change")
        require_deletable(self._federation.jobs, entry, caller)
        return self._pages.deletion(entry, caller)

    async def _delete(self, request: Request, caller: Caller) -> Response:
        entry = await self._find(request.path_params["job"], caller, "change")
        await self._sweeper.delete_job(entry.row.id, caller)
        return RedirectResponse("/", 303, headers=HEADERS)

    async def _draft(self, request: Request, caller: Caller) -> str:
        self._submissions.require(caller)
        # Nothing else, so that no link enters a job file in somebody's name.
        template = request.query_params.get("template")
        return self._pages.submit(caller, None if template is None else draft_of({"template": template}))

    async def _plan(self, request: Request, caller: Caller) -> Response:
        self._submissions.require(caller)
        draft = draft_of(await form_of(request, MAX_SENT_BYTES))
        try:
            plan, admissible = await self._submissions.plan(draft, caller)
        except GeofedError as error:
            return self._unplanned(caller, draft, error)
        # Sent with what was planned, so that a second press of the button makes no second job.
        page = self._pages.submit(caller, draft, plan=plan, request_id=new_secret() if admissible else "")
        return HTMLResponse(page, headers=HEADERS)

    async def _submit(self, request: Request, caller: Caller) -> Response:
        self._submissions.require(caller)
        form = await form_of(request, MAX_SENT_BYTES)
        draft = draft_of(form)
        try:
            entry = await self._submissions.submit(draft, form.get("request", ""), caller)
        except GeofedError as error:
            return self._unplanned(caller, draft, error)
        return RedirectResponse(f"/jobs/{quote(entry.row.id)}", 303, headers=HEADERS)

    def _unplanned(self, caller: Caller, draft: SubmissionForm, error: GeofedError) -> Response:
        page = self._pages.submit(caller, draft, error=error)
        return HTMLResponse(page, status_code=status_of(error, 409), headers=HEADERS)

    # What changes

    async def _live(self, request: Request, caller: Caller) -> Response:
        """Stream a server-sent event whenever one of the named jobs has changed, and at the end of all; without a name
        every few seconds, since not even the time of other users' events is told."""
        names = request.query_params.getlist("job")[:_MOST_COMPARED]
        jobs = [(await self._find(name, caller)).row.id for name in names]
        if self._streams[caller.user] >= _STREAMS:
            raise GeofedError("LIMIT_EXCEEDED", f"{_STREAMS} pages are kept up to date already")
        headers = HEADERS | {"X-Accel-Buffering": "no"}
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


def _workers(form: dict[str, str]) -> dict[str, int]:
    """Return the workers that a form states by region. Raises ``GeofedError("USAGE")``."""
    try:
        return {name: int(value) for name, value in form.items()}
    except ValueError:
        raise GeofedError("USAGE", "the number of workers must be a whole number") from None


def _plotly() -> Path | None:
    """Return the script of Plotly, which draws the charts; None if it is not installed."""
    found = importlib.util.find_spec("plotly")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        script = Path(folder) / "package_data" / "plotly.min.js"
        if script.is_file():
            return script
    return None
