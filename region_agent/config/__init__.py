"""The region file, written by the region's operator: its schema, and loading it."""

from typing import Any

from geofed_pb.files import file_schema
from region_agent.config._channels import (
    ChannelPricesConfig,
    FileChannelConfig,
    RedisChannelConfig,
    S3ChannelConfig,
)
from region_agent.config._data import DatasetConfig, ModelsConfig, PrivacyBudget, SplitConfig, StoreConfig
from region_agent.config._gateways import (
    DockerGateway,
    EmbeddedGateway,
    KubernetesGateway,
    LambdaGateway,
    OpenFaasGateway,
    PlacementConfig,
    ScfGateway,
)
from region_agent.config._load import load_config
from region_agent.config._model import RegionConfig, ServerConfig
from region_agent.config._prices import PricesConfig
from region_agent.config._rules import RetentionConfig, TaskPackagesConfig

__all__ = [
    "ChannelPricesConfig",
    "DatasetConfig",
    "DockerGateway",
    "EmbeddedGateway",
    "FileChannelConfig",
    "KubernetesGateway",
    "LambdaGateway",
    "ModelsConfig",
    "OpenFaasGateway",
    "PlacementConfig",
    "PricesConfig",
    "PrivacyBudget",
    "RedisChannelConfig",
    "RegionConfig",
    "RetentionConfig",
    "S3ChannelConfig",
    "ScfGateway",
    "ServerConfig",
    "SplitConfig",
    "StoreConfig",
    "TaskPackagesConfig",
    "json_schema",
    "load_config",
]


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the region file."""
    return file_schema.json_schema(RegionConfig, "geofed region")
