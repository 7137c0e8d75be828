"""The region's channel: its address, a job's access to it, and the cost of its use."""

from __future__ import annotations

import configparser
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

from geofed_pb.address import joined
from geofed_pb.errors import GeofedError
from geofed_pb.platforms import Platform
from region_agent.config import FileChannelConfig, RedisChannelConfig, RegionConfig, S3ChannelConfig
from sync.channel import Channel, Usage
from sync.channel_clients import open_channel
from sync.collective import ChannelCosts
from sync.merging import probe

__all__ = ["METERED", "RegionChannel", "channel_text", "usage_meters"]

METERED = ("puts", "gets", "misses", "looks", "waits", "deletes", "lists", "bytes_in", "bytes_out")
"""Kinds of requests, and bytes, with a meter in the account, each named ``channel_<kind>``."""
_PREFIX = "geofed"
"""Prefix of all keys and users in Redis."""
_REDIS_PORT = 6379
"""Port of Redis where an address names none."""
_CHECK_JOB = "doctor"
"""Used in place of a job's name by `RegionChannel.check`; no job has it, since jobs end with a hyphen and digits."""
_WORKER_COMMANDS = (
    "get", "getex", "getrange", "mget", "set", "exists", "unlink", "pexpire", "xadd", "xread", "multi", "exec",
    "discard", "ping", "info|memory",
)  # fmt: skip
"""All that the Redis user of a job's workers may do, only under the job's keys. Commands that see or change more than
named keys (SCAN, KEYS, FLUSHALL, SWAPDB, CLIENT, CONFIG, scripts, ...) are not among them."""
_Result = TypeVar("_Result")


class RegionChannel:
    """Access to the region's channel. Methods block: call them in a thread."""

    def __init__(
        self, config: FileChannelConfig | RedisChannelConfig | S3ChannelConfig, folder: Path, region: str
    ) -> None:
        """``folder``: where a file channel is stored. Regions may share a store of any other kind."""
        self._config, self._folder, self._region = config, folder, region

    @property
    def kind(self) -> str:
        """Kind of the channel: "file", "redis" or "s3"."""
        return self._config.kind

    def require(self, wanted: str) -> None:
        """Raise ``GeofedError("CONFIG_INVALID")`` if a job requires another kind of channel than the region has."""
        if wanted not in ("auto", self.kind):
            text = f"the job requires the channel {wanted}, this region has {self.kind}"
            raise GeofedError("CONFIG_INVALID", text, hint="leave `advanced.channel` out, or set it to auto")

    def address(self, job: str = "") -> str:
        """Return the address for the agent and the parameter server; without a job, that of all jobs."""
        match self._config:
            case FileChannelConfig():
                return str(self._folder / job)
            case RedisChannelConfig() as config:
                return _with_prefix(_with_password(config), f"{self._region}/{job}".rstrip("/"))
            case S3ChannelConfig() as config:
                options = {"endpoint": config.endpoint_url, "region": config.region}
                given = {name: value for name, value in options.items() if value}
                given |= {"path_style": "1"} if config.path_style else {}
                path = "/".join(part for part in (config.prefix.strip("/"), self._region, job) if part)
                return f"s3://{config.bucket}/{quote(path)}" + (f"?{urlencode(given)}" if given else "")

    def worker_address(self, job: str) -> str:
        """Return the address for the job's workers, which run job code: without the region's own credentials.

        With a password-protected Redis the job gets a user of its own, which can access the job's keys only. Each call
        sets a new password. Raises ``GeofedError("FORBIDDEN")`` if the region's user may not create it.
        """
        config = self._config
        if not isinstance(config, RedisChannelConfig) or config.password_file is None:
            return self.address(job)
        user, password = self._user(job), secrets.token_urlsafe(24)
        commands = (*_WORKER_COMMANDS, f"select|{_database(config.url)}")
        allowed = ("-@all", *(f"+{command}" for command in commands))
        rights = ("reset", "on", f">{password}", "resetchannels", f"~{_PREFIX}/{self._region}/{job}/*", *allowed)
        _redis_admin(self.address(job), lambda client: client.execute_command("ACL", "SETUSER", user, *rights))
        parts = urlsplit(self.address(job))
        host = parts.netloc.rpartition("@")[2]
        return urlunsplit(parts._replace(netloc=f"{quote(user)}:{quote(password)}@{host}"))

    def worker_env(self, platform: Platform) -> tuple[dict[str, str], dict[str, str]]:
        """Return the environment variables that worker functions need for the channel: those that anyone may read, and
        those with secret values.

        Functions that see no file of this machine get what the file with the workers' credentials holds; where
        they may have a role of their own, only if it is here. Raises ``GeofedError("CONFIG_INVALID")``.
        """
        config = self._config
        if not isinstance(config, S3ChannelConfig) or (file := config.worker_credentials_file) is None:
            return {}, {}
        if platform.dials_out and (file.exists() or not platform.own_role):
            return {}, _credentials(file)
        return {"AWS_SHARED_CREDENTIALS_FILE": str(file)}, {}

    def files(self, job: str) -> tuple[list[str], list[str]]:
        """Return files and folders of this machine through which a job's workers access the channel: those that they
        read, and those that they write to."""
        match self._config:
            case FileChannelConfig():
                return [], [self.address(job)]
            case RedisChannelConfig(url=url):
                return [], [urlsplit(url).path] if url.startswith("unix:") else []
            case S3ChannelConfig(worker_credentials_file=file):
                return [str(file)] if file is not None and file.exists() else [], []

    def endpoints(self) -> list[str]:
        """Return the addresses, ``host:port``, to which the workers of any job connect."""
        match self._config:
            case RedisChannelConfig(url=url) if not url.startswith("unix:"):
                parts = urlsplit(url)
                return [joined(parts.hostname or "localhost", parts.port or _REDIS_PORT)]
            case S3ChannelConfig() as config:
                parts = urlsplit(config.endpoint_url or _s3_endpoint(config.region))
                host, port = parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)
                return [joined(host, port), *([] if config.path_style else [joined(f"{config.bucket}.{host}", port)])]
            case _:
                return []

    def open(self, job: str) -> Channel:
        """Open a job's channel; the caller closes it."""
        return open_channel(self.kind, self.address(job))

    def _user(self, job: str) -> str:
        return f"{_PREFIX}-{self._region}-{job}"

    def costs(self, job: str) -> tuple[ChannelCosts, Usage]:
        """Measure latency and rate of the channel's requests; returns them with the requests that this used."""
        channel = self.open(job)
        try:
            # With a channel in one machine's memory all workers share that machine's cores.
            cores = float(os.cpu_count() or 1) if channel.in_memory else 0.0
            return probe(channel, "probe", cores=cores), channel.usage
        finally:
            channel.close()

    def check(self) -> dict[str, float]:
        """Write a value as the agent, read it as a worker, and delete it; returns the seconds of "put" and "get".

        Raises ``GeofedError`` if the channel does not work.
        """
        seconds, value = {}, b"check"
        channel = self.open(_CHECK_JOB)
        begun = time.monotonic()
        try:
            channel.put("check", [value])
        except GeofedError:
            # Nothing was written, and deleting it would only run into the same timeout.
            channel.close()
            raise
        try:
            seconds["put"] = time.monotonic() - begun
            found = self._get_as_worker("check")
            seconds["get"] = time.monotonic() - begun - seconds["put"]
            if found is None or bytes(found) != value:
                raise GeofedError("CHANNEL_UNAVAILABLE", "the value read from the channel is not the one written")
        finally:
            channel.close()
            self.discard(_CHECK_JOB)
        return seconds

    def _get_as_worker(self, key: str) -> memoryview | None:
        channel = open_channel(self.kind, self.worker_address(_CHECK_JOB))
        try:
            return channel.get(key)
        finally:
            channel.close()

    def discard(self, job: str) -> None:
        """Delete everything that a job has stored, and its Redis user."""
        channel = open_channel(self.kind, self.address())
        try:
            channel.delete_tree(job)
        finally:
            channel.close()
        if isinstance(self._config, RedisChannelConfig) and self._config.password_file is not None:
            _redis_admin(self.address(), lambda client: client.execute_command("ACL", "DELUSER", self._user(job)))


def _database(url: str) -> int:
    """Return the number of the database in a Redis address."""
    parts = urlsplit(url)
    text = dict(parse_qsl(parts.query)).get("db", "0") if parts.scheme == "unix" else parts.path.strip("/") or "0"
    return int(text) if text.isdecimal() else 0


def channel_text(config: RegionConfig) -> str:
    """Return the kind of the region's channel, with a note if it is unencrypted."""
    return f"{config.channel.kind}{', unencrypted (insecure: true)' if config.channel.plaintext else ''}"


def _s3_endpoint(region: str | None) -> str:
    """Return the address of AWS's store in a region, as the workers' SDK finds it."""
    import boto3

    address: str = boto3.client("s3", region_name=region).meta.endpoint_url
    return address


def usage_meters(usage: Mapping[str, float]) -> dict[str, float]:
    """Return the use of a channel as meters of the account."""
    return {f"channel_{kind}": float(usage[kind]) for kind in METERED if usage.get(kind)}


def _with_password(config: RedisChannelConfig) -> str:
    if config.password_file is None:
        return config.url
    try:
        password = config.password_file.read_text().strip()
    except OSError as error:
        raise GeofedError("CONFIG_INVALID", f"channel.passwordFile: {error}") from None
    parts = urlsplit(config.url)
    return urlunsplit(parts._replace(netloc=f"{quote(config.user)}:{quote(password)}@{parts.netloc}"))


def _with_prefix(url: str, path: str) -> str:
    parts = urlsplit(url)
    prefix = urlencode({"prefix": f"{_PREFIX}/{path}"}, safe="/")
    return urlunsplit(parts._replace(query="&".join(part for part in (parts.query, prefix) if part)))


def _redis_admin(address: str, command: Callable[[Any], _Result]) -> _Result:
    import redis

    parts = urlsplit(address)
    client = redis.Redis.from_url(urlunsplit(parts._replace(query="")))
    try:
        return command(client)
    except redis.exceptions.ResponseError as error:
        hint = "allow the region's Redis user to run ACL SETUSER and ACL DELUSER"
        raise GeofedError("FORBIDDEN", f"cannot create a Redis user for the job: {error}", hint=hint) from None
    except redis.exceptions.RedisError as error:
        raise GeofedError("CHANNEL_UNAVAILABLE", f"{type(error).__name__}: {error}") from None
    finally:
        client.close()


def _credentials(file: Path) -> dict[str, str]:
    """Return the credentials of the first profile in a file, as environment variables."""
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(file.read_text())
        profile = parser[parser.sections()[0]]
        names = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
        found = {name.upper(): profile[name] for name in names if name in profile}
    except FileNotFoundError:
        text = f"channel.workerCredentialsFile: {file} is not on the agent's machine, so functions get no key"
        raise GeofedError("CONFIG_INVALID", text, hint="put a key for this bucket only there") from None
    except (OSError, ValueError, IndexError, configparser.Error) as error:
        raise GeofedError("CONFIG_INVALID", f"{file} is no file with AWS credentials: {type(error).__name__}") from None
    if len(found) < 2:
        text = f"{file} has no aws_access_key_id and aws_secret_access_key in its first profile"
        raise GeofedError("CONFIG_INVALID", text)
    return found
