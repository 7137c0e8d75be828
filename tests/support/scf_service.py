"""Tencent Cloud SCF for tests: a server that refuses what is documented to be refused, and runs events as processes.

Requests are checked by the classes of Tencent's SDK: members and their types, as its docstrings state them, and the
bounds of the API's documentation. Functions are job images: each event is one process of the image's command, which has
the event in an environment variable. A process over its memory is killed, as by the kernel; one beyond its time limit
with all that it has started.
"""

from __future__ import annotations

import contextlib
import http.server
import inspect
import itertools
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from support.lambda_service import Refusal
from support.processes import Start, execute, largest_over
from tencentcloud.scf.v20180416 import models

__all__ = ["IMAGE", "REGION", "Service"]

REGION = "ap-guangzhou"
IMAGE = "ccr.ccs.tencentyun.com/geofed/worker:1"
_EVENT_BYTES = 128 * 1024
_LOOK_SECONDS = 0.05
_NAME = r"[A-Za-z][A-Za-z0-9_-]{0,58}[A-Za-z0-9]"
_REQUIRED = {
    "CreateFunction": {"FunctionName", "Code"}, "GetFunction": {"FunctionName"}, "DeleteFunction": {"FunctionName"},
    "Invoke": {"FunctionName"}, "UpdateFunctionEventInvokeConfig": {"FunctionName", "AsyncTriggerConfig"},
    "PutReservedConcurrencyConfig": {"FunctionName", "ReservedConcurrencyMem"}, "ListFunctions": set(),
    "GetAccount": set(),
}  # fmt: skip


@dataclass
class _Function:
    given: dict[str, Any]
    created_at: float
    status: str = "Creating"
    reasons: list[dict[str, str]] = field(default_factory=list)
    events: dict[str, Any] = field(default_factory=dict)
    reserved_mb: int | None = None
    waiting: list[tuple[str, float]] = field(default_factory=list)


@dataclass
class Running:
    """An event that runs."""

    function: str
    process: subprocess.Popen[bytes]
    folder: Path
    memory_mb: int
    deadline: float

    def end(self) -> None:
        """End all its processes."""
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self.process.pid)
            for one in (*root.children(recursive=True), root):
                with contextlib.suppress(psutil.Error):
                    one.kill()
        self.process.wait()


class Service:
    """The service; a context manager. `variables` is what a client's process needs in its environment."""

    def __init__(self, folder: Path, images: Mapping[str, str], start: Start = execute) -> None:
        """``images``: further arguments of each image's command, and ``path=`` for its modules, by its address.
        ``start``: starts the command."""
        self.folder, self.images, self.start = folder, dict(images), start
        self.key = f"AKID{secrets.token_hex(6)}"
        self.functions: dict[str, _Function] = {}
        self.running: list[Running] = []
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.ended: list[tuple[str, str]] = []
        """How events have ended: function, and ``success``, ``error``, ``killed``, ``timeout`` or ``expired``."""
        self.memory_mb = 128_000
        self.pending_seconds = 0.3
        self.unknown_seconds = 0.1
        """Time for which a function that was made is not found yet."""
        self.conflicts = 0
        """How many times a function that is active cannot be set up yet."""
        self.refusing: dict[str, Refusal] = {}
        """Actions that are refused, from now on, and how."""
        self.refused: list[str] = []
        """Actions that were refused so."""
        self.failing: list[dict[str, str]] = []
        self.throttled = 0
        self.denied: set[str] = set()
        self.twice = False
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._numbers = itertools.count(1)
        self._failure: BaseException | None = None

    def __enter__(self) -> Service:
        service = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                answer = json.dumps({"Response": {**service._answer(self.headers, body), "RequestId": "r"}}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._threads = [
            threading.Thread(target=self._server.serve_forever, args=(0.05,)),
            threading.Thread(target=self._run),
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._server.shutdown()
        for thread in self._threads:
            thread.join(20)
        self._server.server_close()
        for one in self.running:
            one.end()
        if self._failure is not None:
            raise self._failure

    @property
    def variables(self) -> dict[str, str]:
        """Credentials, as the SDK takes them from the environment."""
        return {"TENCENTCLOUD_SECRET_ID": self.key, "TENCENTCLOUD_SECRET_KEY": "secret"}

    # the API

    def _answer(self, headers: Any, body: bytes) -> dict[str, Any]:
        action = headers["X-TC-Action"]
        try:
            with self._lock:
                if self.throttled:
                    self.throttled -= 1
                    raise Refusal(0, "RequestLimitExceeded", "Your current request times equals to 20 in a second")
                signed = re.match(
                    r"TC3-HMAC-SHA256 Credential=(\w+)/[\d-]+/scf/tc3_request, ", headers["Authorization"]
                )
                if signed is None or signed[1] != self.key:
                    raise Refusal(0, "AuthFailure.SecretIdNotFound", "The SecretId is not found.")
                if (headers["X-TC-Version"], headers["X-TC-Region"]) != ("2018-04-16", REGION):
                    raise Refusal(0, "UnsupportedRegion", "the region is not supported")
                if action in self.denied:
                    raise Refusal(0, "UnauthorizedOperation.CAM", f"no permission for scf:{action}")
                given = json.loads(body)
                _check(f"{action}Request", given, action)
                if missing := _REQUIRED[action] - given.keys():
                    raise Refusal(0, "MissingParameter", ", ".join(missing))
                if action in self.refusing:
                    self.refused.append(action)
                    raise self.refusing[action]
                self.requests.append((action, given))
                return dict(getattr(self, f"_{action}")(given))
        except Refusal as refusal:
            return {"Error": {"Code": refusal.code, "Message": str(refusal)}}

    def _CreateFunction(self, given: dict[str, Any]) -> dict[str, Any]:
        name, memory = given["FunctionName"], given.get("MemorySize", 128)
        image = given["Code"].get("ImageConfig", {})
        if re.fullmatch(_NAME, name) is None:
            raise Refusal(0, "InvalidParameterValue.FunctionName", name)
        if name in self.functions:
            raise Refusal(0, "ResourceInUse.Function", "the function exists")
        if memory != 64 and (memory % 128 or not 128 <= memory <= 3072):
            raise Refusal(0, "InvalidParameterValue.MemorySize", str(memory))
        if not 1 <= given.get("Timeout", 3) <= 900:
            raise Refusal(0, "LimitExceeded.Timeout", str(given["Timeout"]))
        if image.get("ImagePort") != -1 or given.get("Type") != "Event":
            raise Refusal(0, "InvalidParameterValue.Port", "the images of this test are job images of event functions")
        if image.get("ImageUri") not in self.images:
            raise Refusal(0, "InvalidParameterValue.ImageUri", f"{image.get('ImageUri')} does not exist")
        made = self.functions[name] = _Function(given, time.monotonic())
        if self.failing:
            made.status, made.reasons = "CreateFailed", self.failing
        return {}

    def _GetFunction(self, given: dict[str, Any]) -> dict[str, Any]:
        one = self._function(given)
        if time.monotonic() - one.created_at < self.unknown_seconds:
            raise Refusal(0, "ResourceNotFound.Function", f"{given['FunctionName']} does not exist")
        kept = {key: one.given[key] for key in ("FunctionName", "MemorySize", "Timeout", "Tags")}
        return {**kept, "Status": one.status, "StatusDesc": "", "StatusReasons": one.reasons}

    def _DeleteFunction(self, given: dict[str, Any]) -> dict[str, Any]:
        self._function(given)
        del self.functions[given["FunctionName"]]
        return {}

    def _ListFunctions(self, given: dict[str, Any]) -> dict[str, Any]:
        names = [one for one in sorted(self.functions) if given.get("SearchKey", "") in one]
        page = names[given.get("Offset", 0) :][: min(given.get("Limit", 20), 100)]
        listed = [{"FunctionName": one, "Tags": self.functions[one].given.get("Tags", [])} for one in page]
        return {"Functions": listed, "TotalCount": len(names)}

    def _UpdateFunctionEventInvokeConfig(self, given: dict[str, Any]) -> dict[str, Any]:
        if self.conflicts:
            self.conflicts -= 1
            raise Refusal(0, "FailedOperation.OperationConflict", "the function is being changed")
        self._active(given).events = given["AsyncTriggerConfig"]
        return {}

    def _PutReservedConcurrencyConfig(self, given: dict[str, Any]) -> dict[str, Any]:
        if self._reserved() + given["ReservedConcurrencyMem"] > self.memory_mb - 12_800:
            raise Refusal(0, "LimitExceeded.FunctionReservedConcurrencyMemory", "it exceeds the quota")
        self._active(given).reserved_mb = given["ReservedConcurrencyMem"]
        return {}

    def _GetAccount(self, _: dict[str, Any]) -> dict[str, Any]:
        usage = {"TotalConcurrencyMem": self.memory_mb, "TotalAllocatedConcurrencyMem": self._reserved()}
        return {"AccountUsage": usage, "AccountLimit": {"NamespacesCount": 5}}

    def _Invoke(self, given: dict[str, Any]) -> dict[str, Any]:
        function, event = self._active(given), given.get("ClientContext", "{}")
        if given.get("InvocationType") != "Event":
            raise Refusal(0, "InvalidParameterValue.InvokeType", "this test starts functions asynchronously")
        if len(event.encode()) > _EVENT_BYTES:
            raise Refusal(0, "InvalidParameter.RequestTooLarge", "128 KB is the most")
        json.loads(event)
        due = time.monotonic() + function.events.get("MsgTTL", 21600)
        function.waiting += [(event, due)] * (2 if self.twice else 1)
        return {"Result": {"FunctionRequestId": secrets.token_hex(16), "Log": "", "RetMsg": ""}}

    def _function(self, given: Mapping[str, Any]) -> _Function:
        found = self.functions.get(given["FunctionName"])
        if found is None:
            raise Refusal(0, "ResourceNotFound.Function", f"{given['FunctionName']} does not exist")
        return found

    def _active(self, given: Mapping[str, Any]) -> _Function:
        found = self._function(given)
        if found.status != "Active":
            raise Refusal(0, "FailedOperation.FunctionStatusError", f"the function is {found.status}")
        return found

    def _reserved(self) -> int:
        return sum(one.reserved_mb or 0 for one in self.functions.values())

    # execution

    def _run(self) -> None:
        try:
            while not self._over.wait(_LOOK_SECONDS):
                with self._lock:
                    self._look()
        except BaseException as error:
            self._failure = error

    def _look(self) -> None:
        now = time.monotonic()
        for one in list(self.running):
            self._look_at(one, now)
        for name, function in self.functions.items():
            if function.status == "Creating" and now - function.created_at > self.pending_seconds:
                function.status = "Active"
            for waits in list(function.waiting):
                if now > waits[1]:
                    function.waiting.remove(waits)
                    self.ended.append((name, "expired"))
                elif self._has_room(name, function):
                    function.waiting.remove(waits)
                    self._begin(name, function, waits[0])

    def _has_room(self, name: str, function: _Function) -> bool:
        memory, reserved = function.given.get("MemorySize", 128), function.reserved_mb
        if reserved is not None:
            return sum(one.memory_mb for one in self.running if one.function == name) + memory <= reserved
        own = {one for one, its in self.functions.items() if its.reserved_mb is not None}
        shared = [one for one in self.running if one.function not in own]
        return sum(one.memory_mb for one in shared) + memory <= self.memory_mb - self._reserved()

    def _begin(self, name: str, function: _Function, event: str) -> None:
        image, folder = function.given["Code"]["ImageConfig"], self.folder / f"instance-{next(self._numbers)}"
        (folder / "tmp").mkdir(parents=True)
        given = self.images[image["ImageUri"]].split()
        paths = os.pathsep.join(one.removeprefix("path=") for one in given if one.startswith("path="))
        variables = {
            "PATH": os.environ["PATH"], "TMPDIR": str(folder / "tmp"), "TENCENTCLOUD_RUNENV": "SCF", "USER": "qcloud",
            "SCF_FUNCTIONNAME": name, "SCF_FUNCTIONVERSION": "$LATEST", "TENCENTCLOUD_REGION": REGION,
            "TENCENTCLOUD_SECRETKEY": "of the function's role", "SCF_CUSTOM_CONTAINER_EVENT": event,
            **dict.fromkeys(["PYTHONPATH"] if paths else [], paths),
        }  # fmt: skip
        assert image["Command"] == "python"
        command = [sys.executable, *image["Args"].split(), *(one for one in given if not one.startswith("path="))]
        process = self.start(command, variables, folder)
        deadline = time.monotonic() + function.given.get("Timeout", 3)
        self.running.append(Running(name, process, folder, function.given.get("MemorySize", 128), deadline))

    def _look_at(self, one: Running, now: float) -> None:
        status = one.process.poll()
        if status is None and now < one.deadline:
            if (largest := largest_over(one.process.pid, one.memory_mb * 2**20)) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(largest, signal.SIGKILL)
            return
        kind = "timeout" if status is None else {0: "success", -signal.SIGKILL: "killed"}.get(status, "error")
        one.end()
        self.running.remove(one)
        self.ended.append((one.function, kind))
        function = self.functions.get(one.function)
        if kind != "success" and function is not None:
            # Repeated twice, unless that is switched off.
            assert function.events.get("RetryConfig") == [{"RetryNum": 0}]


def _check(name: str, given: Any, where: str) -> None:
    """Check a value by a class of the SDK; raises `Refusal`."""
    types = _types(name)
    if not isinstance(given, dict):
        raise Refusal(0, "InvalidParameter", f"{where} is no object")
    for key, value in given.items():
        kind, place = types.get(key), f"{where}.{key}"
        if kind is None:
            raise Refusal(0, "UnknownParameter", f"{place} is unknown")
        many = kind.startswith("list of ")
        inner = kind.removeprefix("list of ").removeprefix(":class:`").rstrip("`").rpartition(".")[2]
        if many and not isinstance(value, list):
            raise Refusal(0, "InvalidParameter", f"{place} is no list")
        for one in value if many else [value]:
            plain = {"str": str, "int": int, "float": (int, float), "bool": bool}.get(inner)
            if plain is None:
                _check(inner, one, place)
            elif not isinstance(one, plain) or (isinstance(one, bool) and inner != "bool"):
                raise Refusal(0, "InvalidParameter", f"{place} is not of type {inner}")


def _types(name: str) -> dict[str, str]:
    """Return the members of a class of the SDK with their types, by its docstring."""
    found = getattr(models, name, None)
    if found is None:
        raise Refusal(0, "InvalidAction", name)
    if "__init__" not in vars(found):
        return {}
    return dict(re.findall(r":type (\w+): (.+)", inspect.getsource(found.__init__)))
