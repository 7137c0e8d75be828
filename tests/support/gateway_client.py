"""A client of the whole gateway API: what the agent does not ask for, and the contract of gateways has."""

from __future__ import annotations

import base64
import uuid

import httpx2

from region_agent.gateway import GatewayClient


class WholeClient(GatewayClient):
    """`GatewayClient`, with asynchronous calls, secrets, health and namespaces."""

    async def invoke_async(
        self,
        name: str,
        body: bytes = b"",
        *,
        callback_url: str | None = None,
        call_id: str | None = None,
    ) -> str:
        """Queue a call and return its call id; the answer is POSTed to ``callback_url``."""
        headers = {"X-Call-Id": call_id or str(uuid.uuid4())}
        if callback_url:
            headers["X-Callback-Url"] = callback_url
        request = self._http.build_request(
            "POST", f"/async-function/{self._route(name)}", content=body, headers=headers
        )
        answer = await self._attempts(request, idempotent=False)
        if answer.status_code != 202:
            raise self._failure(answer, name)
        return str(answer.headers.get("X-Call-Id", headers["X-Call-Id"]))

    async def create_secret(self, name: str, value: bytes) -> None:
        """Store a secret under a new name."""
        await self._send("POST", "/system/secrets", json_body=self._secret(name, value))

    async def update_secret(self, name: str, value: bytes) -> None:
        """Replace a secret; running replicas keep the value that they were started with."""
        await self._send("PUT", "/system/secrets", json_body=self._secret(name, value))

    def _secret(self, name: str, value: bytes) -> dict[str, str]:
        raw = base64.b64encode(value).decode()
        return {"name": name, "namespace": self._namespace, "rawValue": raw}

    async def health(self) -> bool:
        """Whether the gateway reports that it is healthy; never raises."""
        try:
            return (await self._http.get("/healthz")).status_code == 200
        except (httpx2.HTTPError, OSError):
            return False

    async def namespaces(self) -> tuple[str, ...]:
        """Namespaces that hold functions."""
        return tuple((await self._send("GET", "/system/namespaces")).json() or ())
