"""What a parameter-server process is started with: one JSON file, readable by its user only."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from geofed_pb.errors import GeofedError

__all__ = ["PsConfig", "read_config"]


class PsConfig(BaseModel):
    """Settings of one partition's parameter server."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    job: str
    region: str
    regions: tuple[str, ...]
    epoch: int = Field(ge=1)
    attempt: int = Field(ge=1)
    workers: int = Field(ge=1)
    rounds: int = Field(ge=1)
    steps_per_round: int = Field(ge=1)
    evaluate_every: int = Field(ge=0)
    wan_policy: str
    wan_settings: dict[str, float] = {}
    """Of the policy and the exchange."""
    shares: dict[str, float] = {}
    """What each region contributes to the mean where not all updates come together; their sum is 1. Empty: equal."""
    neighbours: tuple[tuple[str, str], ...] = ()
    """Pairs of regions that exchange directly; empty: all do."""
    part_elements: int = Field(default=0, ge=0)
    """The workers hold stages of the model: what they read is put in parts of so many elements. 0: they hold all."""
    codec: str = "fp32"
    """Of our updates; each update says in its frame which one it was made with."""
    channel: str
    channel_address: str
    state_dir: Path
    initial_model: Path | None = None
    """A safetensors file that the job begins with, in the region whose first model counts; none: the workers' own."""
    begun: bool = False
    """The partition has run before: a state folder without a model is one that was lost."""
    worker_listen: str
    exchange_listen: str
    bulk_port: int | None = Field(default=0, ge=0, le=65535)
    """Beside the exchange port, for large updates; 0: the system chooses, None: they go through the exchange port."""
    ready_file: Path
    """Written once all ports listen: {"worker": port, "exchange": port, "bulk": port}, the last one if there is any."""
    token_key: str
    """Key that the agent signs the workers' tokens with."""
    ca_file: Path
    certificate_file: Path
    key_file: Path
    stall_seconds: float = 30.0
    """A transfer fails after this long without progress; it is then tried again from its offset."""


def read_config(path: Path) -> PsConfig:
    """Read the file; raises ``GeofedError("CONFIG_INVALID")``."""
    try:
        return PsConfig.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise GeofedError("CONFIG_INVALID", f"{path}: {error}") from None
