"""What all answers of the dashboard have in common: headers, statuses, forms, and where they come from."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit

from starlette.requests import Request

from geofed_pb.errors import Exit, GeofedError

__all__ = ["HEADERS", "KEPT", "form_of", "local", "named", "require_same_origin", "status_of"]

_FORM_BYTES = 64 << 10
"""Limit of a form's size as it is sent."""
_FORM_FIELDS = 1000
"""Limit of a form's fields. The largest form here has about 20."""
HEADERS = {
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
KEPT = HEADERS | {"Cache-Control": "public, max-age=31536000, immutable"}
_STATUS = {
    "UNAUTHENTICATED": 401, "FORBIDDEN": 403, "JOB_NOT_FOUND": 404, "MODEL_NOT_FOUND": 404, "USER_NOT_FOUND": 404,
    "USAGE": 400, "SPEC_INVALID": 400, "TASK_INVALID": 400, "TEMPLATE_NOT_FOUND": 404, "REQUEST_CONFLICT": 409,
    "ILLEGAL_STATE": 409, "LIMIT_EXCEEDED": 429, "STANDBY": 503, "UNAVAILABLE": 503,
}  # fmt: skip


def status_of(error: GeofedError, other: int = 500) -> int:
    """Return the HTTP status of an error; ``other``: of one that no user can help."""
    refused = error.exit in (Exit.CONFLICT, Exit.INADMISSIBLE)
    return _STATUS.get(error.code, 409 if refused else other)


async def form_of(request: Request, most_bytes: int = _FORM_BYTES) -> dict[str, str]:
    """Return the fields of a form. Raises ``GeofedError``: LIMIT_EXCEEDED if it is sent as more than ``most_bytes``,
    USAGE if it is none."""
    size = request.headers.get("content-length", "0")
    if not size.isdigit() or int(size) > most_bytes or "transfer-encoding" in request.headers:
        raise GeofedError("LIMIT_EXCEEDED", f"a form has {most_bytes >> 10} KiB at most")
    try:
        return dict(parse_qsl((await request.body()).decode(), max_num_fields=_FORM_FIELDS))
    except ValueError:
        raise GeofedError("USAGE", "the request has no form") from None


def require_same_origin(request: Request) -> None:
    """Refuse forms that another site's page sends in the name of a browser that has signed in."""
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise GeofedError("FORBIDDEN", "the request comes from a page of another site")


def local(path: str) -> str:
    """Return a path of the dashboard; "/" for anything that leads elsewhere."""
    return path if path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable() else "/"


def named(name: str) -> dict[str, str]:
    """Return the header of a file to download."""
    return {"Content-Disposition": f'attachment; filename="{name}"'}
