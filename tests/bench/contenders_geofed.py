"""Ours, as `wan_speed.py` runs them: real parameter servers and the real worker loop over the real transport."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from contender import REGIONS, Contender, Scene, Setting
from support.pki import Authority

from scheduler import Capacity, Dataset, Demand, Link, Plan, Prices, Region, Snapshot, Split, plan

__all__ = ["geofed_contenders"]

_REGION = Path(__file__).resolve().parent / "ours" / "region.py"
_MODEL_BYTES = 44_700_000
_SPARE_ROUNDS = 2
"""After what is measured, so that the end of the job is not in it."""

Settings = dict[str, object]


def geofed_contenders(given: argparse.Namespace) -> list[Contender]:
    """`auto`, and each policy by exchange and codec."""
    background = {"background": 1.0}
    rows: dict[str, Settings] = {
        f"ma-{codec}": {"codec": codec, "wan_settings": background} for codec in ("fp32", "bf16", "int8", "topk")
    }
    rows |= {
        "ma-sync-fp32": {"codec": "fp32"},
        "ma-sync-topk": {"codec": "topk"},
        "diloco-int8": {"wan_policy": "diloco", "codec": "int8", "wan_settings": background},
        "diloco-topk": {"wan_policy": "diloco", "codec": "topk", "wan_settings": background},
        "diloco-fragments-int8": {
            "wan_policy": "diloco", "codec": "int8", "wan_settings": {**background, "fragments": 4.0},
        },
        "asgd": {"wan_policy": "asgd", "steps_per_round": 1, "codec": "fp32", "wan_settings": background},
        "asgd-ga-f4": {"wan_policy": "asgd-ga", "steps_per_round": 4, "codec": "fp32", "wan_settings": background},
        "asgd-ga-f8": {"wan_policy": "asgd-ga", "steps_per_round": 8, "codec": "fp32", "wan_settings": background},
        "bsp-topk": {"wan_policy": "bsp", "steps_per_round": 1, "codec": "topk"},
    }  # fmt: skip
    made = [_contender(name, settings, given.waiting) for name, settings in rows.items()]
    return [_contender("auto", None, given.waiting, quick=True), *made]


def _contender(name: str, settings: Settings | None, waiting: dict[str, float], *, quick: bool = False) -> Contender:
    """``settings`` None: what the planner chooses for the setting. ``waiting``: of the waiting policy."""

    def chosen(setting: Setting) -> Settings:
        return _planned(setting) if settings is None else {"steps_per_round": setting.local_steps, **settings}

    def window(setting: Setting) -> tuple[int, int]:
        each = int(str(chosen(setting)["steps_per_round"]))
        if each < setting.local_steps:
            # Links bound these: as many steps would take many minutes.
            return 12, 12
        # The first model travels while its region has begun to train: that is over when the window opens.
        warm, measured = (12, 12) if setting.compute_ms < 200 else (3, 4)
        return -(-warm * setting.local_steps // each), -(-measured * setting.local_steps // each)

    def start(scene: Scene) -> None:
        _start(scene, {**chosen(scene.setting), "waiting": waiting})

    def stop(scene: Scene) -> None:
        for region in REGIONS:
            shutil.rmtree(Path("/dev/shm") / f"geofed-bench-{scene.folder.name}-{region}", ignore_errors=True)

    versions = {"torch": version("torch"), "grpcio": version("grpcio")}
    return Contender(name, "ours", start, window, lambda: versions, stop=stop, quick=quick)


def _start(scene: Scene, settings: Settings) -> None:
    each = int(str(settings["steps_per_round"]))
    authority = Authority()
    for region in REGIONS:
        tls = authority.region(region)
        pems = [tls.ca_pem.decode(), tls.certificate_pem.decode(), tls.key_pem.decode()]
        (scene.folder / f"{region}.json").write_text(json.dumps(pems))
    options = {
        "addresses": ",".join(scene.addresses),
        "compute_ms": scene.setting.compute_ms,
        "local_steps": each,
        "warmup": scene.warmup,
        "exchanges": scene.exchanges,
    }
    rounds = scene.warmup + scene.exchanges + _SPARE_ROUNDS
    told = {
        "regions": REGIONS,
        "addresses": dict(zip(REGIONS, scene.addresses, strict=True)),
        "marks": {region: str(scene.marks(region)) for region in REGIONS},
        "settings": {"rounds": rounds, **settings},
        "options": options,
    }
    (scene.folder / "told.json").write_text(json.dumps(told))
    for region in REGIONS:
        argv = [sys.executable, str(_REGION), "--told", str(scene.folder / "told.json"), "--region", region]
        scene.start(region, argv, {"OMP_NUM_THREADS": "1"})


def _planned(setting: Setting) -> Settings:
    """What `wan: auto` means here: the planner's answer for a long job over these links."""
    prices = Prices("benchmark", "2026-11", 1.67e-5, 2e-7, 0.05, 0.09)
    mbps, rtt = setting.rate_mbps or 10_000.0, setting.rtt_ms or 0.1
    speed = 1000.0 / setting.compute_ms
    regions = tuple(
        Region(
            name,
            "cloud",
            Capacity(1, 4096, speed),
            prices,
            (Dataset("data", {"train": Split(100_000)}),),
            tuple(Link(name, other, rtt, mbps) for other in REGIONS if other != name),
        )
        for name in REGIONS
    )
    demand = Demand("job", "data", batch=1, epochs=1.0, steps=None, seed=0)
    answer = plan(Snapshot(regions, model_bytes=_MODEL_BYTES), demand)
    if not isinstance(answer, Plan):
        raise RuntimeError(f"the planner declined: {asdict(answer)}")
    part = answer.partitions[0]
    return {
        "steps_per_round": part.steps_per_round,
        "wan_policy": answer.wan_policy,
        "wan_settings": answer.wan_settings,
        "codec": answer.codec,
        "shares": answer.shares,
    }
