"""What an invocation is told to be: the event with which the gateway starts a replica."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Base64Bytes, BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from geofed_pb.errors import GeofedError
from region_agent.gateway.dial_out import DialOut

__all__ = ["Order", "order_of"]

_FileName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]
"""Name of a secret, which becomes the name of a file."""


class Order(BaseModel):
    """The replica that an invocation is to be."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    """Version of this format; an image of another version refuses the event."""
    address: str
    """``host:port`` of the gateway."""
    replica: str
    """Name of the replica."""
    token: str
    """Token of the replica."""
    certificate: str
    """The gateway's certificate, PEM."""
    env: dict[str, str] = {}
    """Environment of the handler."""
    secrets: dict[_FileName, Base64Bytes] = {}
    """Secrets of the function, by name."""
    memory_mb: Annotated[int, Field(ge=1)]
    """Memory of the function, in MB."""
    life_seconds: Annotated[float, Field(gt=0)]
    """Longest life of the replica."""

    @property
    def dial(self) -> DialOut:
        """Where it connects to."""
        return DialOut(self.address, self.replica, self.token, self.certificate)


def order_of(event: bytes) -> Order:
    """Parse an event; raises ``GeofedError("CONFIG_INVALID")``, which repeats no value of it."""
    try:
        return Order.model_validate_json(event)
    except ValidationError as error:
        places = ", ".join(sorted({".".join(map(str, one["loc"][:1])) for one in error.errors()}))
        hint = "the agent and `gateway.image` have to be of the same version"
        raise GeofedError(
            "CONFIG_INVALID", f"the event is none of this version of geofed: {places}", hint=hint
        ) from None
