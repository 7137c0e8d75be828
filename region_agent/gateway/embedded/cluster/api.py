"""The cluster's API: a client of one namespace, with the few requests that replicas need."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, cast
from urllib.parse import quote, urlsplit

import httpx2
import msgspec
from lightkube import AsyncClient
from lightkube.config.client_adapter import AsyncClient as http_client
from lightkube.config.client_adapter import ConnectionParams, verify_cluster
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.config.models import User
from lightkube.core.client import FieldSelector, LabelSelector
from lightkube.core.exceptions import ApiError, ConfigError
from lightkube.models.authorization_v1 import ResourceAttributes, SelfSubjectAccessReviewSpec
from lightkube.operators import not_equal
from lightkube.resources.authorization_v1 import SelfSubjectAccessReview
from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import Event, Pod, ResourceQuota, Secret
from lightkube.types import CascadeType

from geofed_pb.errors import GeofedError
from region_agent.config import KubernetesGateway
from region_agent.gateway.client import is_loopback
from region_agent.gateway.embedded.cluster.manifests import CONTAINER, INSTANCE_LABEL, RUN_LABEL, ObjectOwner
from region_agent.gateway.embedded.cluster.pods import error_of

__all__ = ["RIGHTS", "ClusterApi"]

RIGHTS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("batch", "jobs"): ("create", "list", "delete"),
    ("", "secrets"): ("create",),
    ("", "pods"): ("list",),
    ("", "pods/log"): ("get",),
    ("", "events"): ("list",),
    ("", "resourcequotas"): ("list",),
}
"""Verbs that the agent's account needs in the namespace, by API group and resource."""
_SECONDS = 20.0
"""Timeout of a request."""
_AT_ONCE = 500
"""Objects of one page of a list."""
_MANAGER = "geofed"
_ERRORS = (httpx2.HTTPError, ConfigError, msgspec.MsgspecError, OSError, ValueError)


class ClusterApi:
    """Every method raises ``GeofedError``: ``UNAUTHENTICATED``, ``FORBIDDEN``, ``QUOTA_EXCEEDED``, ``CONFIG_INVALID``,
    ``GATEWAY_UNAVAILABLE``."""

    def __init__(self, settings: KubernetesGateway) -> None:
        config = _config(settings)
        # Without a limit of connections: one follows the log of each replica.
        transport = httpx2.AsyncHTTPTransport(
            verify=verify_cluster(config.cluster, config.user or User(), config.abs_file), limits=httpx2.Limits()
        )
        timeout = httpx2.Timeout(_SECONDS, pool=None)
        self.url = str(config.cluster.server)
        self.namespace: str = settings.namespace or config.namespace
        self._client = AsyncClient(
            config, self.namespace, timeout, field_manager=_MANAGER, transport=transport, trust_env=False
        )
        self._http = http_client(
            config, ConnectionParams(timeout=timeout, transport=cast(Any, transport), trust_env=False)
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()
        await self._http.aclose()

    async def create(self, job: Job, secret_of: Callable[[Job], Secret], *, dry_run: bool = False) -> None:
        """Create a replica's Job and the Secret that it owns; with ``dry_run`` the cluster only checks them.

        The pod waits until its Secret is there. What owns it is there before, so that no Secret is left alone.
        """
        with _told("a function's Job could not be created"):
            made = await self._client.create(job, dry_run=dry_run)
        with _told("a function's Secret could not be created"):
            await self._client.create(secret_of(made), dry_run=dry_run)

    async def delete(self, name: str) -> None:
        """Delete a replica's Job, if it is there; the cluster ends its pod and deletes its Secret."""
        with _told(f"Job {name} could not be deleted"):
            try:
                await self._client.delete(Job, name, cascade=CascadeType.BACKGROUND)
            except ApiError as error:
                if error.status.code != 404:
                    raise

    async def delete_run(self, identity: ObjectOwner) -> None:
        """Delete all Jobs of a gateway's run."""
        await self._delete_all({**identity.labels})

    async def delete_earlier(self, identity: ObjectOwner) -> None:
        """Delete all Jobs of earlier runs of a gateway."""
        await self._delete_all({**identity.labels, RUN_LABEL: not_equal(identity.run)})

    async def _delete_all(self, labels: LabelSelector) -> None:
        with _told("Jobs could not be listed"):
            found = [one async for one in self._client.list(Job, labels=labels, chunk_size=_AT_ONCE)]
        names = [one.metadata.name for one in found if one.metadata is not None and one.metadata.name]
        await asyncio.gather(*(self.delete(name) for name in names))

    async def pods(self, labels: Mapping[str, str]) -> dict[str, dict[str, Pod]]:
        """Return the pods with these labels, by the name of their replica's objects and their own."""
        with _told("pods could not be listed"):
            found = [one async for one in self._client.list(Pod, labels=dict(labels), chunk_size=_AT_ONCE)]
        by_object: dict[str, dict[str, Pod]] = {}
        for pod in found:
            if pod.metadata is not None and (name := (pod.metadata.labels or {}).get(INSTANCE_LABEL)):
                by_object.setdefault(name, {})[pod.metadata.name or ""] = pod
        return by_object

    async def events(self, job: str) -> list[Event]:
        """Return the events of a Job, the oldest first."""
        fields: FieldSelector = {"involvedObject.name": job, "involvedObject.kind": "Job"}
        with _told("events could not be listed"):
            return [one async for one in self._client.list(Event, namespace=self.namespace, fields=fields)]

    async def quotas(self) -> list[ResourceQuota]:
        """Return the namespace's quotas."""
        with _told("quotas could not be listed"):
            return [one async for one in self._client.list(ResourceQuota)]

    @contextlib.asynccontextmanager
    async def log(self, pod: str, *, from_now: bool) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open what a pod prints, until its container ends; ``from_now``: without what it has printed already."""
        query = {"container": CONTAINER, "follow": "true", **({"tailLines": "0"} if from_now else {})}
        url = f"/api/v1/namespaces/{quote(self.namespace)}/pods/{quote(pod)}/log"
        timeout = httpx2.Timeout(_SECONDS, read=None, pool=None)
        with _told(f"the log of {pod} cannot be read"):
            async with self._http.stream("GET", url, params=query, timeout=timeout) as answer:
                if answer.is_error:
                    raise httpx2.HTTPError(f"status {answer.status_code}")
                yield answer.aiter_bytes()

    async def missing_rights(self) -> list[str]:
        """Return the rights of `RIGHTS` that the account does not have, as `VERB RESOURCE`."""
        missing = []
        for (group, resource), verbs in RIGHTS.items():
            whole, _, part = resource.partition("/")
            for verb in verbs:
                asked = ResourceAttributes(
                    group=group, resource=whole, subresource=part or None, verb=verb, namespace=self.namespace
                )
                review = SelfSubjectAccessReview(spec=SelfSubjectAccessReviewSpec(resourceAttributes=asked))
                with _told("the account's rights could not be asked for"):
                    answer = await self._client.create(review)
                if answer.status is None or not answer.status.allowed:
                    missing.append(f"{verb} {resource}")
        return missing


def _config(settings: KubernetesGateway) -> SingleConfig:
    try:
        loaded = KubeConfig.from_file(settings.kubeconfig) if settings.kubeconfig else KubeConfig.from_env()
        config = loaded.get(settings.context) if settings.context else loaded.get()
        if config is None or config.user is None or not config.cluster.server:
            raise ConfigError("it names no cluster and user")
    except (ConfigError, OSError, ValueError, KeyError, TypeError, msgspec.MsgspecError) as error:
        text = f"the cluster's configuration cannot be read: {error}"
        hint = "set `gateway.kubeconfig` and `gateway.context`, or run the agent in the cluster"
        raise GeofedError("CONFIG_INVALID", text, hint=hint) from error
    parts = urlsplit(config.cluster.server)
    if parts.scheme != "https" and not is_loopback(parts.hostname or ""):
        text = f"{config.cluster.server} would send credentials and secrets in plaintext; use https://"
        raise GeofedError("PLAINTEXT_REFUSED", text)
    return config


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except _ERRORS as error:
        raise error_of(error, what) from error
