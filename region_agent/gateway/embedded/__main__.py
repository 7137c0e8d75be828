"""``python -m region_agent.gateway.embedded``: run the embedded gateway as a process."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import socket
import ssl
import sys
from pathlib import Path
from types import FrameType

import structlog
import uvicorn

from geofed_pb import linux
from geofed_pb.errors import Exit, GeofedError
from geofed_pb.files.durable import write_durably
from geofed_pb.logs import LOG_FORMATS, configure_logs
from region_agent.gateway.embedded.app import create_app
from region_agent.gateway.embedded.config import PROFILES, Config, load
from region_agent.gateway.embedded.provider import Provider
from region_agent.gateway.unix_sockets import short_path

_GRACE_S = 2
"""Time for open requests to end at the shutdown, in seconds."""
_OVERRIDES = (
    "state_dir",
    "listen",
    "ready_file",
    "auth_user_file",
    "auth_password_file",
    "tls_cert",
    "tls_key",
    "profile",
)


def main(arguments: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; returns the exit status."""
    options = _parser().parse_args(arguments)
    if options.die_with_parent is not None:
        linux.die_with_parent(options.die_with_parent or os.getppid())
    linux.become_subreaper()
    configure_logs(options.log_format)
    try:
        config = _config(options)
        config.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        listener, url = _bind(config)
        with listener:
            asyncio.run(_serve(config, listener, url))
    except GeofedError as error:
        print(f"{error}\n{error.hint}", file=sys.stderr)
        return int(error.exit)
    return int(Exit.OK)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m region_agent.gateway.embedded",
        description="Serve the OpenFaaS REST API over processes of this machine.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="JSON or TOML; options below override it")
    parser.add_argument("--listen", metavar="HOST:PORT|unix:PATH", help="port 0 picks a free one")
    parser.add_argument("--state-dir", type=Path, metavar="DIR", help="secrets, logs and replicas' directories")
    parser.add_argument("--ready-file", type=Path, metavar="FILE", help="receives the URL and pid as JSON when ready")
    parser.add_argument("--auth-user-file", type=Path, metavar="FILE")
    parser.add_argument("--auth-password-file", type=Path, metavar="FILE")
    parser.add_argument("--tls-cert", type=Path, metavar="PEM")
    parser.add_argument("--tls-key", type=Path, metavar="PEM")
    parser.add_argument("--log-format", choices=LOG_FORMATS, default="text", help="format of the log on stderr")
    parser.add_argument("--profile", choices=list(PROFILES))
    parser.add_argument(
        "--die-with-parent",
        type=int,
        nargs="?",
        const=0,
        metavar="PID",
        help="end when the starting process ends; with its pid, also where it ended before this was set",
    )
    return parser


def _config(options: argparse.Namespace) -> Config:
    given = {key: value for key in _OVERRIDES if (value := getattr(options, key)) is not None}
    if options.config is not None:
        base = load(options.config)
    elif "state_dir" in given:
        base = Config(state_dir=given["state_dir"])
    else:
        raise GeofedError("CONFIG_INVALID", "give --config or --state-dir")
    config = dataclasses.replace(base, **given)
    return dataclasses.replace(config, state_dir=config.state_dir.resolve()).validate()


def _bind(config: Config) -> tuple[socket.socket, str]:
    """The listening socket and the URL that reaches it."""
    if config.listen.startswith("unix:"):
        path = config.listen.removeprefix("unix:")
        Path(path).unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        try:
            with short_path(Path(path)) as short:
                listener.bind(short)
        except OSError as error:
            hint = "its folder must exist"
            raise GeofedError("CONFIG_INVALID", f"cannot listen on unix:{path}: {error}", hint=hint) from error
        os.chmod(path, 0o600)
        listener.listen(1024)
        return listener, f"unix://{path}"
    host, _, port = config.listen.rpartition(":")
    bare = host.strip("[]")
    if ":" in bare:
        host = f"[{bare}]"
    try:
        family = socket.getaddrinfo(bare, int(port), type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((bare, int(port)), family=family)
    except OSError as error:
        raise GeofedError("PORT_IN_USE", f"cannot listen on {config.listen}: {error}") from error
    # Inherited by accepted connections; asyncio sets it only on sockets that it has created itself.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    scheme = "https" if config.tls_cert else "http"
    return listener, f"{scheme}://{host}:{listener.getsockname()[1]}"


class _Server(uvicorn.Server):
    """A server that ends log streams at its shutdown; they would keep their connections open without end."""

    def __init__(self, config: uvicorn.Config, provider: Provider) -> None:
        super().__init__(config)
        self._provider = provider

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._provider.logs.end()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if (ready_file := self._provider.config.ready_file) is not None:
            ready_file.unlink(missing_ok=True)
        await super().shutdown(sockets)


async def _serve(config: Config, listener: socket.socket, url: str) -> None:
    log = structlog.get_logger("gateway")

    def ready() -> None:
        # The socket is already listening, so a client that reads the file can connect immediately.
        if config.ready_file is not None:
            write_durably(config.ready_file, [json.dumps({"url": url, "pid": os.getpid()}).encode()])
        log.info("ready", url=url, profile=config.profile)

    app, provider = create_app(config, ready)
    settings = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="on",
        http="h11",
        ws="none",
        ssl_certfile=config.tls_cert,
        ssl_keyfile=config.tls_key,
        timeout_graceful_shutdown=_GRACE_S,
        timeout_keep_alive=75,
    )
    settings.load()
    if settings.ssl is not None:
        settings.ssl.minimum_version = ssl.TLSVersion.TLSv1_2
    await _Server(settings, provider).serve(sockets=[listener])


if __name__ == "__main__":
    sys.exit(main())
