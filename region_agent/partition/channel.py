"""The region's channel: where it is, what a job may see of it, and what its use has cost."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit, urlunsplit

from geofed_pb.errors import GeofedError
from region_agent.config import FileChannelConfig, RedisChannelConfig, S3ChannelConfig
from sync.channel import Channel, Usage, open_channel
from sync.collective import ChannelCosts, probe

__all__ = ["METERED", "RegionChannel", "usage_meters"]

METERED = ("puts", "gets", "misses", "looks", "waits", "deletes", "lists", "bytes_in", "bytes_out")
"""Kinds of requests, and bytes, that the account has meters of, each named ``channel_<kind>``."""
_PREFIX = "geofed"
_TRIAL = "doctor"
"""In place of a job; jobs end with a hyphen and digits."""
_USER_RIGHTS = ("resetkeys", "resetchannels", "-@all", "+@read", "+@write", "+@transaction", "+@connection", "+info")
"""Of the Redis user that a job's workers are: nothing but values, and only under the job's keys."""
_Result = TypeVar("_Result")


class RegionChannel:
    """What the agent knows of its channel. Calls block: they are made in a thread."""

    def __init__(
        self, config: FileChannelConfig | RedisChannelConfig | S3ChannelConfig, folder: Path, region: str
    ) -> None:
        """``folder``: where the file channel is. Regions may share a store of any other kind."""
        self._config, self._folder, self._region = config, folder, region

    @property
    def kind(self) -> str:
        return self._config.kind

    def require(self, wanted: str) -> None:
        """Raise ``GeofedError("CONFIG_INVALID")`` where a job asks for another channel than the region has."""
        if wanted not in ("auto", self.kind):
            text = f"the job asks for the channel {wanted}, this region has {self.kind}"
            raise GeofedError("CONFIG_INVALID", text, hint="leave `channel` out, or set it to auto")

    def address(self, job: str = "") -> str:
        """For the agent and the parameter server; without a job, of all jobs."""
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
        """For the job's workers, where job code runs: without the region's own credentials.

        With Redis that asks for a password the job gets a user of its own, which sees the job's keys only; its password
        is made anew each time.
        """
        config = self._config
        if not isinstance(config, RedisChannelConfig) or config.password_file is None:
            return self.address(job)
        user, password = self._user(job), secrets.token_urlsafe(24)
        rights = ("reset", "on", f">{password}", *_USER_RIGHTS, f"~{_PREFIX}/{self._region}/{job}/*")
        _redis_admin(self.address(job), lambda client: client.execute_command("ACL", "SETUSER", user, *rights))
        parts = urlsplit(self.address(job))
        where = parts.netloc.rpartition("@")[2]
        return urlunsplit(parts._replace(netloc=f"{quote(user)}:{quote(password)}@{where}"))

    def worker_env(self) -> dict[str, str]:
        """What the workers' function gets of it."""
        config = self._config
        if isinstance(config, S3ChannelConfig) and config.worker_credentials_file is not None:
            return {"AWS_SHARED_CREDENTIALS_FILE": str(config.worker_credentials_file)}
        return {}

    def open(self, job: str) -> Channel:
        return open_channel(self.kind, self.address(job))

    def _user(self, job: str) -> str:
        return f"{_PREFIX}-{self._region}-{job}"

    def costs(self, job: str) -> tuple[ChannelCosts, Usage]:
        """What requests take from here, measured; and what measuring took."""
        channel = self.open(job)
        try:
            # In the memory of one machine all workers share its cores.
            cores = float(os.cpu_count() or 1) if channel.in_memory else 0.0
            return probe(channel, "probe", cores=cores), channel.usage
        finally:
            channel.close()

    def tried(self) -> dict[str, float]:
        """Write a value as the agent and read it as a worker, then clear up; seconds that each took.

        Raises ``GeofedError``: what is wrong with the channel.
        """
        took, value = {}, b"is it there?"
        mine = self.open(_TRIAL)
        begun = time.monotonic()
        try:
            mine.put("trial", [value])
        except GeofedError:
            # There is nothing to clear up, and it would wait as long once more for who does not answer.
            mine.close()
            raise
        try:
            took["put"] = time.monotonic() - begun
            found = self._as_worker("trial")
            took["get"] = time.monotonic() - begun - took["put"]
            if found is None or bytes(found) != value:
                raise GeofedError("CHANNEL_UNAVAILABLE", "what was put into the channel did not come back")
        finally:
            mine.close()
            self.discard(_TRIAL)
        return took

    def _as_worker(self, key: str) -> memoryview | None:
        channel = open_channel(self.kind, self.worker_address(_TRIAL))
        try:
            return channel.get(key)
        finally:
            channel.close()

    def discard(self, job: str) -> None:
        """Forget all of a job."""
        channel = open_channel(self.kind, self.address())
        try:
            channel.delete_tree(job)
        finally:
            channel.close()
        if isinstance(self._config, RedisChannelConfig) and self._config.password_file is not None:
            _redis_admin(self.address(), lambda client: client.execute_command("ACL", "DELUSER", self._user(job)))


def usage_meters(usage: Mapping[str, float]) -> dict[str, float]:
    """The account's meters of a channel's use."""
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


def _with_prefix(url: str, place: str) -> str:
    parts = urlsplit(url)
    prefix = urlencode({"prefix": f"{_PREFIX}/{place}"}, safe="/")
    return urlunsplit(parts._replace(query="&".join(part for part in (parts.query, prefix) if part)))


def _redis_admin(address: str, ask: Callable[[Any], _Result]) -> _Result:
    import redis

    parts = urlsplit(address)
    client = redis.Redis.from_url(urlunsplit(parts._replace(query="")))
    try:
        return ask(client)
    except redis.exceptions.ResponseError as error:
        hint = "let the region's Redis user run ACL SETUSER and ACL DELUSER"
        raise GeofedError("FORBIDDEN", f"no Redis user for the job could be made: {error}", hint=hint) from None
    except redis.exceptions.RedisError as error:
        raise GeofedError("CHANNEL_UNAVAILABLE", f"{type(error).__name__}: {error}") from None
    finally:
        client.close()
