"""A function for the contract tests: what it does stands in the header X-Do, like ``wait?s=1``."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl


def handle(event: Any, context: Any) -> Any:
    verb, _, arguments = event.headers.get("X-Do", "echo").partition("?")
    return globals()[f"do_{verb}"](event, context, dict(parse_qsl(arguments)))


def do_echo(event: Any, context: Any, given: Any) -> Any:
    return event.body


def do_describe(event: Any, context: Any, given: Any) -> Any:
    return {
        "statusCode": int(given.get("status", "200")),
        "headers": {"X-Probe": "yes"},
        "body": {
            "method": event.method,
            "path": event.path,
            "query": dict(event.query),
            "headers": {key.lower(): value for key, value in event.headers.items()},
            "hostname": context.hostname,
            "pid": os.getpid(),
            "size": len(event.body),
            "thread": threading.current_thread().name,
        },
    }


def do_none(event: Any, context: Any, given: Any) -> Any:
    return None


def do_env(event: Any, context: Any, given: Any) -> Any:
    initial = Path("/proc/self/environ").read_bytes().decode()
    return {"body": {"environ": dict(os.environ), "initial": initial, "cwd": os.getcwd()}}


def do_wait(event: Any, context: Any, given: Any) -> Any:
    """Sleep, after saying so in the file that the body names."""
    if event.body:
        Path(event.body.decode()).write_text(str(os.getpid()))
    time.sleep(float(given.get("s", "60")))
    return "woke"


def do_raise(event: Any, context: Any, given: Any) -> Any:
    raise ValueError("as asked")


def do_crash(event: Any, context: Any, given: Any) -> Any:
    os.kill(os.getpid(), signal.SIGSEGV)


def do_exit(event: Any, context: Any, given: Any) -> Any:
    raise SystemExit(3)


def do_eat(event: Any, context: Any, given: Any) -> Any:
    eaten = bytearray(int(given["mib"]) * 2**20)
    for offset in range(0, len(eaten), 4096):
        eaten[offset] = 1
    time.sleep(float(given.get("s", "30")))
    return str(len(eaten))


def do_print(event: Any, context: Any, given: Any) -> Any:
    print(event.body.decode())
    print("to stderr", file=sys.stderr)
    return "printed"


def do_secret(event: Any, context: Any, given: Any) -> Any:
    return (Path(os.environ["OPENFAAS_SECRETS"]) / given["name"]).read_bytes()


def do_read(event: Any, context: Any, given: Any) -> Any:
    try:
        return {"body": Path(given["path"]).read_bytes()}
    except OSError as error:
        return {"statusCode": 404, "body": type(error).__name__}


def do_overwrite(event: Any, context: Any, given: Any) -> Any:
    """Try to write to a file; the error numbers, then the status of a remount as a new namespace's root."""
    path, got = Path(given["path"]), []
    for way in (lambda: path.write_text("CHANGED"), lambda: os.mkdir(path.with_name("folder"))):
        try:
            way()
            got.append(0)
        except OSError as error:
            got.append(error.errno)
    again = f"mount -o remount,bind,rw {path.parent.parent}; mount -o remount,bind,rw {path.parent}; echo > {path}"
    done = subprocess.run(["unshare", "-Urm", "sh", "-c", again], capture_output=True, check=False)
    return json.dumps([*got, int(done.returncode != 0)])


def do_uncover(event: Any, context: Any, given: Any) -> Any:
    """Try to get at a hidden file by every way that occurs to job code."""
    path = given["path"]
    ways = [
        ["umount", "-l", str(Path(path).parent)],
        ["unshare", "-Urm", "umount", "-l", str(Path(path).parent)],
        ["cat", f"/proc/{os.getppid()}/root{path}"],
        ["nsenter", "-t", str(os.getppid()), "-m", "cat", path],
    ]
    got = [subprocess.run(way, capture_output=True, check=False).stdout.decode() for way in ways]
    own = Path(path).read_text() if Path(path).exists() else ""
    return json.dumps([*got, own])


def do_spawn(event: Any, context: Any, given: Any) -> Any:
    """Leave a child in a session of its own behind."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    return str(child.pid)


def do_touch(event: Any, context: Any, given: Any) -> Any:
    Path("here").write_text("x")
    (Path(os.environ["TMPDIR"]) / "there").write_text("y")
    return "written"


def do_scratch(event: Any, context: Any, given: Any) -> Any:
    return tempfile.mkdtemp(prefix="scratch-")


def do_list(event: Any, context: Any, given: Any) -> Any:
    return json.dumps(sorted(os.listdir(given["path"])))


def do_listen(event: Any, context: Any, given: Any) -> Any:
    """What processes do that pass each other values: listen on a socket in the folder for temporary files."""
    from multiprocessing.connection import Client, Listener

    with Listener(family="AF_UNIX") as listener, Client(listener.address) as sender, listener.accept() as receiver:
        sender.send("heard")
        return receiver.recv()


def do_random(event: Any, context: Any, given: Any) -> Any:
    import numpy as np

    return str(np.random.random())


def do_attack(event: Any, context: Any, given: Any) -> Any:
    from hostile import successes

    return json.dumps(successes(json.loads(event.body)))


def do_hear(event: Any, context: Any, given: Any) -> Any:
    """What a server says; with `mib` how many bytes of so many come back."""
    host, port = given["from"].rsplit(":", 1)
    whole = int(given.get("mib", "0")) << 20
    try:
        with socket.create_connection((host, int(port)), 5) as connection:
            if not whole:
                return connection.recv(100)
            sender = threading.Thread(target=connection.sendall, args=(bytes(whole),))
            sender.start()
            heard = 0
            while heard < whole:
                heard += len(connection.recv(1 << 20))
            sender.join()
            return str(heard)
    except OSError as error:
        return type(error).__name__


def do_fill(event: Any, context: Any, given: Any) -> Any:
    """Write to its own folder until the disk is nearly full."""
    with open("filler", "wb") as file:
        while True:
            system = os.statvfs(".")
            if system.f_bavail * system.f_frsize > 2 << 20:
                file.write(bytes(1 << 20))
                file.flush()
            time.sleep(0.01)
