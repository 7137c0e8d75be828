"""AWS Lambda for tests: a server that refuses what the real one refuses, and runs invocations as local processes.

Requests are parsed and checked by the service model of botocore: members, types, patterns, bounds and enumerations. The
caller may do what the shipped policy allows. What an execution environment runs is the entry point of the function's
image, which a test names, as a process that has the documented variables and takes its events from a runtime API of its
own. A process that uses more memory than its function has is killed, as by the kernel; one that works beyond its time
limit is killed with all that it has started.
"""

from __future__ import annotations

import contextlib
import http.server
import itertools
import json
import os
import queue
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import botocore.session
import psutil
from botocore.model import OperationModel, ServiceModel, Shape, StructureShape
from botocore.validate import ParamValidator
from support.processes import Start, execute, largest_over

__all__ = ["IMAGE", "ROLE", "Refusal", "Service", "allowed_operations", "function_command"]

ACCOUNT = "123456789012"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/geofed-worker"
IMAGE = f"{ACCOUNT}.dkr.ecr.eu-central-1.amazonaws.com/geofed-worker:1"
REGION = "eu-central-1"
_MODEL = botocore.session.get_session().get_service_model("lambda")
assert isinstance(_MODEL, ServiceModel)
_POLICY = Path(__file__).parents[2] / "deploy" / "lambda" / "agent-policy.json"
_EVENT_BYTES = 1 << 20
_LOOK_SECONDS = 0.05
_PAGE = 50
_PASSWORD = "secret"


def allowed_operations() -> set[str]:
    """Return the operations of Lambda's API that the shipped policy allows."""
    found: set[str] = set()
    for statement in json.loads(_POLICY.read_text())["Statement"]:
        actions = [statement["Action"]] if isinstance(statement["Action"], str) else statement["Action"]
        found |= {one.removeprefix("lambda:") for one in actions if one.startswith("lambda:")}
    return {"Invoke" if one == "InvokeFunction" else one for one in found}


class Refusal(Exception):
    """What the service answers instead of doing something."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass
class _Function:
    configuration: dict[str, Any]
    tags: dict[str, str]
    created_at: float
    event_config: dict[str, int] = field(default_factory=dict)
    concurrency: int | None = None
    waiting: list[_Event] = field(default_factory=list)


@dataclass
class _Event:
    body: bytes
    due: float
    begun: int = 0
    """How many times it has been run."""


@dataclass
class Environment:
    """An execution environment: one process, which runs one event at a time."""

    function: str
    process: subprocess.Popen[bytes]
    folder: Path
    memory_mb: int
    api: http.server.ThreadingHTTPServer
    events: queue.SimpleQueue[tuple[str, bytes, float]] = field(default_factory=queue.SimpleQueue)
    answers: queue.SimpleQueue[tuple[str, dict[str, Any]]] = field(default_factory=queue.SimpleQueue)
    working: _Event | None = None
    deadline: float = 0.0

    def end(self) -> None:
        """End all its processes."""
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self.process.pid)
            for one in (*root.children(recursive=True), root):
                with contextlib.suppress(psutil.Error):
                    one.kill()
        self.process.wait()
        self.api.shutdown()
        self.api.server_close()


class Service:
    """The service; a context manager. `variables` is what a client's process needs in its environment."""

    def __init__(self, folder: Path, images: Mapping[str, str], start: Start = execute) -> None:
        """``images``: arguments of the function's program for each image, by its URI. ``start``: starts it."""
        self.folder, self.images, self.start = folder, dict(images), start
        self.key = f"AKIA{secrets.token_hex(6).upper()}"
        self.functions: dict[str, _Function] = {}
        self.environments: list[Environment] = []
        self.requests: list[tuple[str, dict[str, Any]]] = []
        """Name and parameters of each accepted request."""
        self.ended: list[tuple[str, str]] = []
        """How invocations have ended: function, and ``success``, ``error``, ``timeout``, ``killed`` or ``expired``."""
        self.roles = {ROLE}
        self.quota = 1000
        self.pending_seconds = 0.3
        self.unknown_seconds = 0.1
        """Time for which a function that was made is not found yet."""
        self.spent_seconds = 0.0
        """Part of its time limit that an invocation has had when its program gets the event."""
        self.failing: dict[str, str] = {}
        """State reason and its code of functions that are made from now on."""
        self.throttled = 0
        """How many requests are refused for their rate, from now on."""
        self.refusing: dict[str, Refusal] = {}
        """Operations that are refused, from now on, and how."""
        self.refused: list[str] = []
        """Operations that were refused so."""
        self.slow: dict[str, float] = {}
        """Seconds after which requests of an operation are answered."""
        self.undeletable: set[str] = set()
        """Functions whose deletion is refused."""
        self.down = False
        self.allowed = allowed_operations()
        """Operations that the caller may use: those of the shipped policy."""
        self.twice = False
        """Whether each event is run twice, as may happen."""
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._numbers = itertools.count(1)
        self._failure: BaseException | None = None

    def __enter__(self) -> Service:
        service = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
                status, headers, answer = service._answer(self.command, self.path, self.headers, body)
                self.send_response(status)
                for key, value in {**headers, "Content-Length": str(len(answer))}.items():
                    self.send_header(key, value)
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_POST = do_PUT = do_DELETE = handle_any

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
        for one in self.environments:
            one.end()
        if self._failure is not None:
            raise self._failure

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables by which a client's process finds the service."""
        return {
            "AWS_ENDPOINT_URL_LAMBDA": self.url, "AWS_ACCESS_KEY_ID": self.key, "AWS_SECRET_ACCESS_KEY": _PASSWORD,
            "AWS_DEFAULT_REGION": REGION, "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }  # fmt: skip

    def working(self) -> list[Environment]:
        """Return the environments that run an event."""
        with self._lock:
            return [one for one in self.environments if one.working is not None and one.process.poll() is None]

    # the API

    def _answer(self, method: str, path: str, headers: Any, body: bytes) -> tuple[int, dict[str, str], bytes]:
        try:
            if self.slow:
                time.sleep(self.slow.get(_parsed(method, path, headers, body)[0].name, 0.0))
            with self._lock:
                if self.down:
                    raise Refusal(503, "ServiceException", "the service is down")
                if self.throttled:
                    self.throttled -= 1
                    raise Refusal(429, "TooManyRequestsException", "Rate Exceeded.")
                self._authenticate(headers)
                operation, given = _parsed(method, path, headers, body)
                if operation.name not in self.allowed:
                    text = f"User: agent is not authorized to perform: lambda:{operation.name}"
                    raise Refusal(403, "AccessDeniedException", text)
                if operation.name in self.refusing:
                    self.refused.append(operation.name)
                    raise self.refusing[operation.name]
                self.requests.append((operation.name, given))
                answer = getattr(self, f"_{_snake(operation.name)}")(given)
        except Refusal as refusal:
            told = {"Type": "User", "message": str(refusal), "Message": str(refusal)}
            return refusal.status, _headers(refusal.code), json.dumps(told).encode()
        if isinstance(answer, int):
            return answer, _headers(), b""
        return int(operation.http.get("responseCode", 200)), _headers(), json.dumps(answer).encode()

    def _authenticate(self, headers: Any) -> None:
        found = re.match(
            r"AWS4-HMAC-SHA256 Credential=(\w+)/\d{8}/([a-z0-9-]+)/lambda/aws4_request, ",
            headers["Authorization"] or "",
        )
        if found is None:
            raise Refusal(403, "MissingAuthenticationToken", "Missing Authentication Token")
        if found[1] != self.key:
            raise Refusal(403, "UnrecognizedClientException", "The security token included in the request is invalid.")
        if found[2] != REGION:
            raise Refusal(403, "InvalidSignatureException", f"Credential should be scoped to {REGION}")

    def _create_function(self, given: dict[str, Any]) -> dict[str, Any]:
        name = given["FunctionName"]
        if name in self.functions:
            raise Refusal(409, "ResourceConflictException", f"Function already exist: {name}")
        if len(name) > 64:
            raise Refusal(400, "ValidationException", "Member must have length less than or equal to 64")
        if given.get("PackageType") != "Image" or {"Runtime", "Handler"} & given.keys():
            raise Refusal(400, "InvalidParameterValueException", "this test's images are container images")
        if not given.get("Timeout", 3) <= 900 or not given.get("MemorySize", 128) <= 10240:
            raise Refusal(
                400, "InvalidParameterValueException", "'Timeout' or 'MemorySize' value failed to satisfy constraint"
            )
        if given["Role"] not in self.roles:
            text = "The role defined for the function cannot be assumed by Lambda."
            raise Refusal(400, "InvalidParameterValueException", text)
        image = given["Code"]["ImageUri"]
        if image not in self.images:
            text = f"Source image {image} does not exist. Provide a valid source image."
            raise Refusal(400, "InvalidParameterValueException", text)
        arn = f"arn:aws:lambda:{REGION}:{ACCOUNT}:function:{name}"
        kept = {key: value for key, value in given.items() if key not in ("Code", "Tags", "Publish")}
        state = {"State": "Pending", "StateReasonCode": "Creating", "StateReason": "The function is being created."}
        configuration = {**kept, "FunctionArn": arn, "Version": "$LATEST", "ImageUri": image, **state}
        if self.failing:
            configuration |= {"State": "Failed", **self.failing}
        self.functions[name] = _Function(configuration, dict(given.get("Tags", {})), time.monotonic())
        return _output("CreateFunction", configuration)

    def _get_function_configuration(self, given: dict[str, Any]) -> dict[str, Any]:
        return _output("GetFunctionConfiguration", self._known(given["FunctionName"]).configuration)

    def _delete_function(self, given: dict[str, Any]) -> int:
        self._function(given["FunctionName"])
        if given["FunctionName"] in self.undeletable:
            raise Refusal(409, "ResourceConflictException", "The function is being changed")
        del self.functions[given["FunctionName"]]
        return 204

    def _list_functions(self, given: dict[str, Any]) -> dict[str, Any]:
        names, begin = sorted(self.functions), int(given.get("Marker", "0"))
        page = names[begin : begin + min(_PAGE, given.get("MaxItems", _PAGE))]
        more = {"NextMarker": str(begin + len(page))} if begin + len(page) < len(names) else {}
        return {
            "Functions": [_output("GetFunctionConfiguration", self.functions[one].configuration) for one in page],
            **more,
        }

    def _list_tags(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"Tags": self._function(given["Resource"].rpartition(":")[2]).tags}

    def _put_function_event_invoke_config(self, given: dict[str, Any]) -> dict[str, Any]:
        self._active(given.pop("FunctionName")).event_config = given
        return given

    def _put_function_concurrency(self, given: dict[str, Any]) -> dict[str, Any]:
        function, wanted = self._active(given["FunctionName"]), given["ReservedConcurrentExecutions"]
        if self._unreserved() - wanted < 100:
            text = (
                "Specified ReservedConcurrentExecutions for function decreases account's UnreservedConcurrentExecution "
                "below its minimum value of [100]."
            )
            raise Refusal(400, "InvalidParameterValueException", text)
        function.concurrency = wanted
        return {"ReservedConcurrentExecutions": wanted}

    def _get_account_settings(self, _: dict[str, Any]) -> dict[str, Any]:
        limit = {"ConcurrentExecutions": self.quota, "UnreservedConcurrentExecutions": self._unreserved()}
        return {"AccountLimit": limit, "AccountUsage": {"FunctionCount": len(self.functions)}}

    def _invoke(self, given: dict[str, Any]) -> int:
        name = given["FunctionName"]
        function, kind = self._active(name), given.get("InvocationType", "RequestResponse")
        if kind == "DryRun":
            return 204
        if kind != "Event":
            raise Refusal(400, "InvalidParameterValueException", "this test starts functions asynchronously")
        body = given.get("Payload", b"")
        if len(body) > _EVENT_BYTES:
            raise Refusal(
                413,
                "RequestTooLargeException",
                "Request must be smaller than 1048576 bytes for the InvokeFunction operation",
            )
        json.loads(body)
        age = function.event_config.get("MaximumEventAgeInSeconds", 21600)
        for _ in range(2 if self.twice else 1):
            function.waiting.append(_Event(body, time.monotonic() + age))
        return 202

    def _function(self, name: str) -> _Function:
        found = self.functions.get(name)
        if found is None:
            text = f"Function not found: arn:aws:lambda:{REGION}:{ACCOUNT}:function:{name}"
            raise Refusal(404, "ResourceNotFoundException", text)
        return found

    def _known(self, name: str) -> _Function:
        """Return a function that may be known everywhere in the service."""
        found = self._function(name)
        if time.monotonic() - found.created_at < self.unknown_seconds:
            raise Refusal(404, "ResourceNotFoundException", f"Function not found: {name}")
        return found

    def _active(self, name: str) -> _Function:
        found = self._known(name)
        if (state := found.configuration["State"]) != "Active":
            text = f"The operation cannot be performed at this time. The function is currently in the state: {state}"
            raise Refusal(409, "ResourceConflictException", text)
        return found

    def _unreserved(self) -> int:
        return self.quota - sum(one.concurrency or 0 for one in self.functions.values())

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
        for one in list(self.environments):
            self._look_at(one, now)
        for name, function in self.functions.items():
            state = function.configuration
            if state["State"] == "Pending" and now - function.created_at > self.pending_seconds:
                state |= {"State": "Active", "LastUpdateStatus": "Successful"}
                del state["StateReason"], state["StateReasonCode"]
            for event in list(function.waiting):
                if now > event.due:
                    function.waiting.remove(event)
                    self.ended.append((name, "expired"))
                elif self._has_room(name, function):
                    function.waiting.remove(event)
                    self._begin(name, function, event)

    def _has_room(self, name: str, function: _Function) -> bool:
        working = [one.function for one in self.environments if one.working is not None]
        if function.concurrency is not None:
            return working.count(name) < function.concurrency
        return (
            len([one for one in working if one in self.functions and self.functions[one].concurrency is None])
            < self._unreserved()
        )

    def _begin(self, name: str, function: _Function, event: _Event) -> None:
        idle = [one for one in self.environments if one.function == name and one.working is None]
        environment = idle[0] if idle else self._environment(name, function)
        event.begun += 1
        timeout = function.configuration.get("Timeout", 3) - self.spent_seconds
        environment.working, environment.deadline = event, time.monotonic() + timeout
        environment.events.put((secrets.token_hex(16), event.body, time.time() + timeout))

    def _environment(self, name: str, function: _Function) -> Environment:
        configuration = function.configuration
        folder = self.folder / f"environment-{next(self._numbers)}"
        (folder / "tmp").mkdir(parents=True)
        api = _runtime_api()
        variables = {
            "PATH": os.environ["PATH"], "LANG": "en_US.UTF-8", "TZ": ":UTC", "TMPDIR": str(folder / "tmp"),
            "AWS_LAMBDA_RUNTIME_API": f"127.0.0.1:{api.server_port}", "AWS_LAMBDA_FUNCTION_NAME": name,
            "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": str(configuration.get("MemorySize", 128)), "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION, "AWS_LAMBDA_FUNCTION_VERSION": "$LATEST",
            "AWS_LAMBDA_INITIALIZATION_TYPE": "on-demand", "AWS_ACCESS_KEY_ID": "ASIAFUNCTION",
            "AWS_SECRET_ACCESS_KEY": "of the function's role", "AWS_SESSION_TOKEN": "of the function's role",
            **configuration.get("Environment", {}).get("Variables", {}), "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        program = configuration["ImageConfig"]["EntryPoint"]
        assert program[0] == "python"
        given = self.images[configuration["ImageUri"]].split()
        paths = [one.removeprefix("path=") for one in given if one.startswith("path=")]
        if paths:
            variables["PYTHONPATH"] = paths[0]
        command = [sys.executable, *program[1:], *configuration["ImageConfig"]["Command"]]
        command += [one for one in given if not one.startswith("path=")]
        process = self.start(command, variables, folder)
        made = Environment(name, process, folder, configuration.get("MemorySize", 128), api)
        api.environment = made  # type: ignore[attr-defined]
        threading.Thread(target=api.serve_forever, args=(0.05,), daemon=True).start()
        self.environments.append(made)
        return made

    def _look_at(self, one: Environment, now: float) -> None:
        with contextlib.suppress(queue.Empty):
            kind, _ = one.answers.get_nowait()
            self._end_event(one, kind)
        if one.process.poll() is not None:
            self._end_event(one, "killed" if one.process.returncode == -signal.SIGKILL else "error")
        elif one.working is not None and now > one.deadline:
            self._end_event(one, "timeout")
        elif one.function not in self.functions and one.working is None:
            pass
        else:
            if (largest := largest_over(one.process.pid, one.memory_mb * 2**20)) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(largest, signal.SIGKILL)
            return
        one.end()
        self.environments.remove(one)

    def _end_event(self, one: Environment, kind: str) -> None:
        event, one.working = one.working, None
        if event is None:
            return
        self.ended.append((one.function, kind))
        function = self.functions.get(one.function)
        if (
            kind != "success"
            and function is not None
            and event.begun <= function.event_config.get("MaximumRetryAttempts", 2)
        ):
            function.waiting.append(event)


def _runtime_api() -> http.server.ThreadingHTTPServer:
    """Return the runtime API of one environment, version 2018-06-01."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            assert self.path == "/2018-06-01/runtime/invocation/next"
            one: Environment = self.server.environment  # type: ignore[attr-defined]
            while True:
                with contextlib.suppress(queue.Empty):
                    identity, body, deadline = one.events.get(timeout=0.2)
                    break
                if one.process.poll() is not None:
                    return
            self.send_response(200)
            self.send_header("Lambda-Runtime-Aws-Request-Id", identity)
            self.send_header("Lambda-Runtime-Deadline-Ms", str(int(deadline * 1000)))
            self.send_header(
                "Lambda-Runtime-Invoked-Function-Arn", f"arn:aws:lambda:{REGION}:{ACCOUNT}:function:{one.function}"
            )
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found = re.fullmatch(r"/2018-06-01/runtime/invocation/[0-9a-f]{32}/(response|error)", self.path)
            assert found is not None, self.path
            one: Environment = self.server.environment  # type: ignore[attr-defined]
            one.answers.put(({"response": "success", "error": "error"}[found[1]], json.loads(body)))
            self.send_response(202)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    return server


# Requests and answers by the service's model


def _parsed(method: str, path: str, headers: Any, body: bytes) -> tuple[OperationModel, dict[str, Any]]:
    parts = urllib.parse.urlsplit(path)
    for name in _MODEL.operation_names:
        operation = _MODEL.operation_model(name)
        pattern = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[^/]+)", re.escape(operation.http["requestUri"].split("?")[0]))
        found = re.fullmatch(pattern.rstrip("/") + "/?", parts.path)
        if operation.http["method"] == method and found is not None:
            break
    else:
        raise Refusal(404, "UnknownOperationException", f"{method} {path}")
    shape, query = operation.input_shape, dict(urllib.parse.parse_qsl(parts.query))
    given: dict[str, Any] = {}
    if shape is None:
        return operation, given
    payload = shape.serialization.get("payload")
    if payload is not None:
        given[payload] = body
    elif body:
        given |= json.loads(body)
    for member, its in shape.members.items():
        place, key = its.serialization.get("location"), its.serialization.get("name", member)
        value = {"uri": found.groupdict().get(key), "querystring": query.get(key), "header": headers.get(key)}.get(
            place
        )
        if value is not None:
            text = urllib.parse.unquote(value)
            given[member] = int(text) if its.type_name == "integer" else text
    problems = [*_problems(shape, given, "")]
    report = ParamValidator().validate(given, shape)
    if report.has_errors():
        problems.append(report.generate_report())
    if problems:
        raise Refusal(400, "ValidationException", f"{len(problems)} validation error detected: {'; '.join(problems)}")
    return operation, given


def _problems(shape: Shape, value: Any, where: str) -> Iterator[str]:
    """Return what breaks a pattern, an enumeration or an upper bound, which botocore's own check leaves to the service,
    and members that the model does not have."""
    told = shape.metadata
    if isinstance(shape, StructureShape) and isinstance(value, dict):
        for member, its in value.items():
            if member not in shape.members:
                yield f"{where}.{member} is unknown"
            else:
                yield from _problems(shape.members[member], its, f"{where}.{member}")
    elif shape.type_name == "list" and isinstance(value, list):
        for one in value:
            yield from _problems(shape.member, one, where)  # type: ignore[attr-defined]
    elif shape.type_name == "map" and isinstance(value, dict):
        for key, one in value.items():
            yield from _problems(shape.key, key, where)  # type: ignore[attr-defined]
            yield from _problems(shape.value, one, where)  # type: ignore[attr-defined]
    size = value if isinstance(value, int) else len(value) if hasattr(value, "__len__") else 0
    if "max" in told and size > told["max"]:
        yield f"{where} exceeds {told['max']}"
    if "enum" in told and value not in told["enum"]:
        yield f"{where} is none of {told['enum']}"
    pattern = told.get("pattern", "")
    for java, own in ((r"\p{L}", "A-Za-z"), (r"\p{Z}", " "), (r"\p{N}", "0-9")):
        pattern = pattern.replace(java, own)
    if pattern and isinstance(value, str) and re.fullmatch(pattern, value) is None:
        yield f"{where} does not match {pattern}"


def _output(operation: str, configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the model says that an operation answers of a function's configuration."""
    shape = _MODEL.operation_model(operation).output_shape
    assert shape is not None
    return {key: value for key, value in configuration.items() if key in shape.members}


def _headers(code: str = "") -> dict[str, str]:
    error = {"x-amzn-ErrorType": code} if code else {}
    return {"Content-Type": "application/json", "x-amzn-RequestId": secrets.token_hex(16), **error}


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def function_command(*arguments: str, path: str = "") -> str:
    """Return what an image adds to the function's entry point."""
    return " ".join([*arguments, *([f"path={path}"] if path else [])])
