"""Configuration of a parameter-server process: one JSON file, readable by its user only."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from geofed_pb.errors import GeofedError

__all__ = ["OWN_MODEL", "PsConfig", "read_config"]

OWN_MODEL = "own-model.safetensors"
"""File in the server's folder: the region's own model after the last evaluation, with the tensors that stay here."""


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
    """Settings of the WAN policy and of the exchange."""
    waiting: dict[str, float] = {}
    """Settings of the waiting policy that differ from the defaults (`WaitingSettings`). Agents leave it empty;
    benchmarks measure with it what each rule is worth."""
    shares: dict[str, float] = {}
    """Each region's weight in the mean where updates are merged as they arrive, or `weighs_by_shares`; the sum is 1.
    Empty: all the same."""
    weighs_by_shares: bool = False
    """Whether regions weigh by `shares`, and not by the samples of their rounds."""
    local_steps: dict[str, float] = {}
    """Each region's local steps of a round, as planned, for a WAN policy that normalises; else empty."""
    data_shares: dict[str, float] = {}
    """Each region's share of the data, for the same; their sum is 1."""
    round_samples: dict[str, float] = {}
    """Samples of one round of each region, as planned. An update that states more is refused. Empty: no limit."""
    patience_seconds: float = Field(default=6 * 3600.0, gt=0)
    """The server fails with REGION_LOST once it has been waiting this long for the same update of another region."""
    neighbours: tuple[tuple[str, str], ...] = ()
    """Pairs of regions that exchange directly; empty: all do."""
    part_elements: int = Field(default=0, ge=0)
    """Size of the parts, in elements, in which vectors are put into the channel if the workers hold stages of the
    model; 0: each worker holds the whole model."""
    codec: str = "fp32"
    """Codec of our updates; each update states in its frame which codec encoded it."""
    channel: str
    channel_address: str
    state_dir: Path
    initial_own_model: Path | None = None
    """Safetensors file with first values of the tensors that stay in the region; it need not exist, and `initial_model`
    may have them, too."""
    initial_model: Path | None = None
    """A safetensors file with the model that the job begins with, for the region that provides the initial model; None:
    the workers initialise it."""
    initial_holds: Literal["", "all", "some"] = ""
    """What `initial_model` has of the model if it is a user's file: all tensors and no others, or some and perhaps
    others; "": it is a job's model."""
    initial_adapter: Path | None = None
    """A safetensors file of the user whose tensors replace those of `initial_model`."""
    begun: bool = False
    """Whether the partition has run before: if so, a state folder without a model means that the state was lost."""
    worker_listen: str
    exchange_listen: str
    bulk_port: int | None = Field(default=0, ge=0, le=65535)
    """Port for bulk streams; 0: chosen by the system; None: large updates use the exchange port."""
    ready_file: Path
    """File that is written once all ports listen: {"worker": port, "exchange": port, "bulk": port}, the last one only
    if there is one."""
    token_key: str
    """Key that the agent signs the workers' tokens with."""
    ca_file: Path
    certificate_file: Path
    key_file: Path
    revoked_file: Path | None = None
    """JSON list of the serial numbers of revoked certificates, which the agent keeps up to date."""
    privacy_ledger: Path | None = None
    """Folder of the region's ledger of releases, for a job with differential privacy."""
    stated_bins: dict[str, tuple[float | str, ...]] = {}
    """Lists of the job's ``task.config``, by their keys: bin edges, or categories, of the histogram of that name. Used
    where the noise is on counts."""
    traceparent: str = ""
    """W3C trace context of the partition; empty: no spans are wanted."""
    stall_seconds: float = 30.0
    """Timeout of a transfer without progress; it is then resumed."""


def read_config(path: Path) -> PsConfig:
    """Read the configuration. Raises ``GeofedError("CONFIG_INVALID")``."""
    try:
        return PsConfig.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise GeofedError("CONFIG_INVALID", f"{path}: {error}") from None
