"""What other rooms may use of a package is what it lists; a change of it is meant, or it is a mistake."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SURFACES = {
    "control_plane.clouds": {
        "CLOUDS",
        "Cloud",
        "CloudRegion",
        "Confidence",
        "FunctionPrices",
        "Price",
        "Provenance",
        "Purchase",
        "RegionPrices",
        "Shard",
        "ShardList",
        "StorePrices",
        "Unit",
        "open_cloud",
        "open_price_file",
        "region_prices",
    },
    "deploy.emulator": {"CONTROL", "Emulator", "Link", "Profile", "load_profile", "profile_names"},
    "region_agent.gateway": {
        "BasicAuth",
        "CallbackReceiver",
        "CallbackResult",
        "FunctionSpec",
        "FunctionStatus",
        "GatewayClient",
        "LogLine",
        "Response",
        "RetryPolicy",
        "fixed_scale_labels",
        "timeout_env",
    },
    "scheduler": {
        "Alternative",
        "Capacity",
        "Cost",
        "Dataset",
        "Declined",
        "Demand",
        "Estimate",
        "Link",
        "LinkTable",
        "Partition",
        "Path",
        "Plan",
        "Prices",
        "Range",
        "Reason",
        "Region",
        "Restaffing",
        "Snapshot",
        "Split",
        "Staffed",
        "Topologies",
        "Topology",
        "choose_topology",
        "estimate",
        "evaluate_topology",
        "link_table",
        "plan",
        "rechosen",
        "restaff",
        "weigh_topologies",
    },
    "scheduler.placement": {
        "Bill",
        "Device",
        "Federation",
        "Index",
        "Job",
        "Outcome",
        "Partition",
        "Placement",
        "Refusal",
        "Region",
        "Shard",
        "UnknownPriceError",
        "audit",
        "cheapest_single_region",
        "federation",
        "greedy",
        "load_power_matching",
        "place",
        "place_fastest",
    },
    "sync.channel": {
        "NODE_PRICES",
        "REQUEST_PRICES",
        "Channel",
        "FileChannel",
        "Limits",
        "NodePrice",
        "RequestPrices",
        "Usage",
        "cost_usd",
        "fence_key",
        "node_cost_usd",
        "open_channel",
    },
    "sync.codec": {
        "BFloat16",
        "ChunkedTopK",
        "Codec",
        "ErrorFeedback",
        "Float32",
        "Int8Blocks",
        "Mixed",
        "Sparse",
        "Tensors",
        "Ternary",
        "codec_named",
        "codec_of",
        "with_state",
    },
    "sync.collective": {
        "PATTERNS",
        "Buckets",
        "ChannelCosts",
        "Choice",
        "Collective",
        "Estimate",
        "Fold",
        "Member",
        "Merge",
        "Merged",
        "Reducing",
        "Settings",
        "Settled",
        "Sharing",
        "SignificanceFilter",
        "State",
        "best_chunks",
        "choose",
        "chunk_bounds",
        "estimate",
        "least_seconds",
        "open_collective",
        "owners",
        "probe",
        "succession",
        "unequal_batches",
        "weighted_mean",
        "weighted_sum",
    },
    "sync.flat": {"FlatModel"},
    "sync.framing": {"Array", "Buffer", "Frame", "decode", "digest_of", "encode"},
    "sync.layout": {"Layout", "Slot", "Vector"},
    "sync.wan": {
        "Bounds",
        "Contribution",
        "Damped",
        "DelayCompensated",
        "DiLoCo",
        "ExchangeSettings",
        "GradientSum",
        "Guard",
        "LinkSample",
        "ModelAverage",
        "Observation",
        "Outer",
        "Policy",
        "StateAveraged",
        "initial",
        "observe",
        "policy_named",
        "significant",
    },
}


@pytest.mark.parametrize("name", sorted(SURFACES))
def test_the_surface_is_frozen(name: str) -> None:
    module = importlib.import_module(name)
    assert set(module.__all__) == SURFACES[name]
    visible = {
        attribute
        for attribute, value in vars(module).items()
        if not attribute.startswith("_") and not hasattr(value, "__path__") and type(value).__name__ != "module"
    }
    borrowed = {a for a in visible - SURFACES[name] if getattr(vars(module)[a], "__module__", "") != name}
    assert visible - borrowed <= SURFACES[name], "visible, but not listed"


def test_no_package_is_called_proto() -> None:
    """It would take the place of proto-plus, which every google-cloud package needs."""
    assert not (ROOT / "proto" / "__init__.py").exists()
