"""Catalogue of errors: every failure that a user can get has a stable code, a message and a hint.

An error is sent between processes as ``(code, message, hint)``: in gRPC as trailing metadata in addition to the status,
over HTTP as a JSON body. The code determines the exit status of the command and whether a retry can help; the message
says what happened; the hint says what to do.

    GeofedError
    └── raised with a code of CATALOGUE; nothing subclasses it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

from geofed_pb.bounds import clean

__all__ = ["CATALOGUE", "OUTAGE", "Entry", "Exit", "GeofedError", "install_hint", "unforeseen_as_internal"]


class Exit(IntEnum):
    """Process exit statuses, the same for every command."""

    OK = 0
    JOB_ENDED_BADLY = 1
    USAGE = 2
    SPEC = 3
    NOT_FOUND = 4
    AUTH = 5
    UNAVAILABLE = 6
    WAIT_TIMEOUT = 7
    CONFLICT = 8
    INADMISSIBLE = 9
    BUG = 10
    INTERRUPTED = 130
    CLOSED_PIPE = 141
    """Status that a shell reports for a program ended by SIGPIPE: the reader has closed the pipe."""


def install_hint(extra: str) -> str:
    """Return how the packages of an extra are installed: from a clone, since the package index has no geofed."""
    return f"in a clone of geofed: pip install '.[{extra}]'"


@dataclass(frozen=True)
class Entry:
    """Properties of an error code."""

    exit: Exit
    """Exit status of a command that ends with this error."""
    retryable: bool
    """Whether the same call may succeed later without a change by the caller."""
    hint: str
    """Default hint, where the code that raises the error gives none."""


CATALOGUE: dict[str, Entry] = {
    # the job file and the task module
    "SPEC_INVALID": Entry(Exit.SPEC, False, "correct the job file; `geofed schema` prints what it may hold"),
    "SPEC_NOT_FOUND": Entry(Exit.SPEC, False, "check the path; `geofed new TEMPLATE DIR` writes a job to start from"),
    "TASK_INVALID": Entry(
        Exit.SPEC, False, "correct the task module; docs/job-file.md says what its functions take and return"
    ),
    "TASK_FAILED": Entry(Exit.JOB_ENDED_BADLY, False, "`geofed logs JOB` shows the traceback of the task module"),
    "DATASET_UNKNOWN": Entry(Exit.INADMISSIBLE, False, "`geofed region list` shows which datasets the regions hold"),
    "SHARD_UNREADABLE": Entry(
        Exit.JOB_ENDED_BADLY, False, "check the shard's path and permissions in the region's configuration"
    ),
    "SAMPLES_MISMATCH": Entry(
        Exit.JOB_ENDED_BADLY, False, "correct the split's samples in the region's file, and start its agent again"
    ),
    "MODEL_MISMATCH": Entry(
        Exit.JOB_ENDED_BADLY,
        False,
        "name a job or file that has the tensors of the task's model, or leave train.initialModel out",
    ),
    "ISOLATION_UNAVAILABLE": Entry(
        Exit.INADMISSIBLE,
        False,
        "the region's operator installs bubblewrap; `geofed agent doctor` there says what is missing",
    ),
    "PACKAGES_UNAVAILABLE": Entry(
        Exit.INADMISSIBLE, False, "correct the task's requirements file, or ask the region's operator for the packages"
    ),
    "IMAGE_REFUSED": Entry(
        Exit.INADMISSIBLE,
        False,
        "the region's operator allows it by `policy.allowImages` of the region file, or avoid the region",
    ),
    "SECRET_MISSING": Entry(
        Exit.INADMISSIBLE, False, "the region's operator adds it to `secrets` of the region file, or avoid the region"
    ),
    "RESIDENCY_VIOLATION": Entry(
        Exit.INADMISSIBLE, False, "the region's policy does not let this data be used so; ask its operator"
    ),
    "PRIVACY_EXHAUSTED": Entry(
        Exit.INADMISSIBLE,
        False,
        "use more noise or fewer rounds, or ask the data's owner; `geofed agent privacy` there shows what is spent",
    ),
    "INADMISSIBLE": Entry(Exit.INADMISSIBLE, False, "the reasons name what would have to change"),
    "QUOTA_EXCEEDED": Entry(Exit.INADMISSIBLE, True, "wait until one of your jobs has ended, or ask the operator"),
    # identity
    "UNAUTHENTICATED": Entry(Exit.AUTH, False, "use the token or certificate of this federation"),
    "FORBIDDEN": Entry(Exit.AUTH, False, "this identity may not do that"),
    "TOKEN_INVALID": Entry(Exit.AUTH, False, "make a new one with `geofed region invite NAME`"),
    "CERTIFICATE_EXPIRED": Entry(
        Exit.AUTH, False, "invite the region again: `geofed region invite NAME`, then `geofed agent join`"
    ),
    "CERTIFICATE_INVALID": Entry(Exit.AUTH, False, "the two sides do not share a certificate authority; join again"),
    "PLAINTEXT_REFUSED": Entry(Exit.AUTH, False, "use TLS; plaintext is never accepted"),
    # jobs
    "JOB_NOT_FOUND": Entry(Exit.NOT_FOUND, False, "`geofed list --all` shows all jobs, ended ones too"),
    "REGION_NOT_FOUND": Entry(Exit.NOT_FOUND, False, "`geofed region list` shows the regions"),
    "USER_NOT_FOUND": Entry(Exit.NOT_FOUND, False, "`geofed user list` shows the users"),
    "TEMPLATE_NOT_FOUND": Entry(Exit.NOT_FOUND, False, "`geofed template list` shows the templates"),
    "MODEL_NOT_FOUND": Entry(Exit.NOT_FOUND, False, "`geofed status JOB` shows which models are kept"),
    "REQUEST_CONFLICT": Entry(Exit.CONFLICT, False, "use a new --request-id for a different job"),
    "ILLEGAL_STATE": Entry(Exit.CONFLICT, False, "the job's state does not allow this; see `geofed status JOB`"),
    "JOB_FAILED": Entry(Exit.JOB_ENDED_BADLY, False, "`geofed events JOB` shows what happened"),
    "JOB_CANCELLED": Entry(Exit.JOB_ENDED_BADLY, False, "submit it again to run it"),
    "WAIT_TIMEOUT": Entry(Exit.WAIT_TIMEOUT, True, "the job continues; wait again with a longer --timeout"),
    "PEER_INVALID": Entry(
        Exit.JOB_ENDED_BADLY,
        False,
        "run the job again without the region that the message names, and ask its operator; evidence is in the state "
        "directory of the job's parameter servers",
    ),
    "REGION_LOST": Entry(Exit.JOB_ENDED_BADLY, True, "see that the region's agent runs and reaches the control plane"),
    # services and processes
    "UNAVAILABLE": Entry(Exit.UNAVAILABLE, True, "see that the control plane runs and that its address is right"),
    "AUDIT_BROKEN": Entry(
        Exit.CONFLICT, False, "ask the operator for the log again; if it stays so, it is not what was recorded"
    ),
    "STANDBY": Entry(
        Exit.UNAVAILABLE, True, "ask the control plane that leads; a context's address may list both, with a comma"
    ),
    "GATEWAY_UNAVAILABLE": Entry(
        Exit.UNAVAILABLE, True, "see that the function gateway runs and that its address is right"
    ),
    "FUNCTION_FAILED": Entry(Exit.JOB_ENDED_BADLY, True, "`geofed logs JOB` shows what the function wrote"),
    "FUNCTION_NOT_FOUND": Entry(Exit.NOT_FOUND, False, "the gateway does not know it; deploy it first"),
    "FUNCTION_BUSY": Entry(
        Exit.UNAVAILABLE, True, "every replica has its most calls in flight; wait, or scale the function"
    ),
    "FUNCTION_TIMEOUT": Entry(
        Exit.JOB_ENDED_BADLY,
        True,
        "raise the function's and the gateway's time-outs together, or shorten the time slice",
    ),
    "FUNCTION_EVICTED": Entry(
        Exit.UNAVAILABLE, True, "the platform ended it, as for a node that is removed; it is started again"
    ),
    "FUNCTION_UNSCHEDULABLE": Entry(
        Exit.UNAVAILABLE, False, "the platform has no room for it: add nodes, or lower `capacity` and memory"
    ),
    "IMAGE_UNAVAILABLE": Entry(
        Exit.UNAVAILABLE, False, "check the image's name, and that the platform may pull it: `gateway.image`"
    ),
    "FUNCTION_OUT_OF_MEMORY": Entry(
        Exit.JOB_ENDED_BADLY,
        False,
        "raise `function.memoryMb`, or let a step need less: `train.accumulate: 2` (the batch stays the same),"
        " `train.precision: bf16`, a smaller `train.batch`; after `geofed profile` plans cut a large model into stages",
    ),
    "GPU_MEMORY": Entry(
        Exit.INADMISSIBLE,
        False,
        "let a step need less: `train.accumulate: 2` (the batch stays the same), `train.precision: bf16`, a smaller"
        " `train.batch`; have fewer workers on each GPU; or leave out the region: `regions.avoid`",
    ),
    "GPUS_TOO_FEW": Entry(
        Exit.INADMISSIBLE, False, "set a smaller `function.gpus`, or `auto`, or leave out the region: `regions.avoid`"
    ),
    "FENCED": Entry(Exit.CONFLICT, False, "a newer attempt has taken over; this one must stop"),
    "PORT_IN_USE": Entry(Exit.UNAVAILABLE, False, "stop what listens there, or choose another address"),
    "DISK_FULL": Entry(Exit.UNAVAILABLE, True, "free space in the state directory; nothing was lost"),
    "STATE_INVALID": Entry(
        Exit.BUG, False, "the state directory is damaged or of a newer version; restore it or start a new one"
    ),
    "CONFIG_INVALID": Entry(Exit.USAGE, False, "correct the configuration file"),
    "USAGE": Entry(Exit.USAGE, False, "`--help` shows how the command is used"),
    "PRICE_UNKNOWN": Entry(
        Exit.INADMISSIBLE, False, "give the price in the region's configuration; unknown is never taken for zero"
    ),
    # clouds
    "CLOUD_SDK_MISSING": Entry(Exit.USAGE, False, f"all of them: {install_hint('clouds')}"),
    "CLOUD_REGION_UNKNOWN": Entry(
        Exit.NOT_FOUND, False, "`geofed catalogue regions --cloud CLOUD` shows the regions of a cloud"
    ),
    "CLOUD_UNAVAILABLE": Entry(Exit.UNAVAILABLE, True, "try again later; see the network and the cloud's status page"),
    "CLOUD_REFUSED": Entry(Exit.USAGE, False, "the message has what the cloud said"),
    # data on the wire
    "FRAME_INVALID": Entry(Exit.BUG, False, "the two sides run different versions, or the bytes were damaged"),
    "DIGEST_MISMATCH": Entry(Exit.BUG, True, "the bytes were damaged on the way; they are sent again"),
    "TRANSFER_STALLED": Entry(Exit.UNAVAILABLE, True, "no byte arrived for too long; see the link"),
    "CHANNEL_TIMEOUT": Entry(
        Exit.UNAVAILABLE, True, "see that those who put it still run; where they are only slow, wait longer"
    ),
    "CHANNEL_UNAVAILABLE": Entry(
        Exit.UNAVAILABLE, True, "see that the channel's store runs and that its address is right"
    ),
    "LIMIT_EXCEEDED": Entry(Exit.USAGE, False, "make it smaller, or raise the limit in the configuration"),
    # the emulator
    "EMULATOR_UNSUPPORTED": Entry(
        Exit.UNAVAILABLE, False, "run as root, or where user namespaces are allowed; or run without shaping"
    ),
    "EMULATOR_OFF": Entry(Exit.NOT_FOUND, False, "start it with `geofed emulator up PROFILE`"),
    "CALIBRATION_FAILED": Entry(
        Exit.JOB_ENDED_BADLY, True, "the machine is too busy for this profile; a measurement would not be valid"
    ),
    # geofed itself
    "INTERNAL": Entry(Exit.BUG, False, "a bug in geofed; run again with --debug and report it"),
}


OUTAGE = frozenset({"UNAVAILABLE", "STANDBY"})
"""Codes of a control plane that does not answer now; another one may, or the same one later."""


class GeofedError(Exception):
    """A failure with a code of the catalogue.

    Message and hint are cleaned and bounded (`geofed_pb.bounds.clean`), so that the error can be stored, sent and
    shown, whatever text the user's code has raised. Raises ``KeyError`` for a code that is not in the catalogue, so
    that no unlisted code can leave a process.
    """

    def __init__(self, code: str, message: str, *, hint: str | None = None) -> None:
        self.entry = CATALOGUE[code]
        self.code = code
        self.message = clean(message)
        self.hint = self.entry.hint if hint is None else clean(hint)
        super().__init__(self.message)

    @property
    def exit(self) -> Exit:
        """Exit code of a command that ends with this error."""
        return self.entry.exit

    @property
    def retryable(self) -> bool:
        """Whether trying again may help."""
        return self.entry.retryable

    def as_dict(self) -> dict[str, object]:
        """Return the error for the JSON envelope of a command."""
        return {"code": self.code, "message": self.message, "hint": self.hint, "retryable": self.retryable}

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


@contextmanager
def unforeseen_as_internal(log: Callable[[], object], *foreseen: type[Exception]) -> Iterator[None]:
    """Raise ``GeofedError("INTERNAL")`` in place of any exception but ``GeofedError`` and those ``foreseen``.

    It is for work whose every failure must be reported with a code. ``log`` is called while the exception is handled,
    so that it can log the traceback.
    """
    passing: tuple[type[Exception], ...] = (GeofedError, *foreseen)
    try:
        yield
    except passing:
        raise
    except Exception as error:
        log()
        raise GeofedError("INTERNAL", f"{type(error).__name__}: {error}") from error
