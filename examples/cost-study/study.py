"""What does a shorter time cost? Plans of one job under several objectives, beside what runs of them have taken.

    python study.py --folder study [--profile china-eu-us-3] [--plans-only]

Starts a control plane and the regions of the profile on this machine, over the emulated WAN where that is possible,
with the handwritten digits partitioned over them and list prices. Prints a table, and writes `study.csv` there.
"""

import argparse
import contextlib
import csv
import json
import sys
from pathlib import Path

from deploy.demo import CLOUDS, PRICES
from deploy.emulator import Emulator, load_profile
from deploy.local import LocalFederation, RegionSite, links_of
from deploy.shards import read_digits, write_shards

OBJECTIVES = {
    "cost": ["objective.minimise=cost"],
    "time": ["objective.minimise=time"],
    "cost, one region": ["objective.minimise=cost", "regions.use=[frankfurt]"],
    "cost, fp32": ["objective.minimise=cost", "advanced.wan.codec=fp32"],
    "time, 0.0001 USD": ["objective.minimise=time", "objective.budget=0.0001"],
    "cost, in 1 s": ["objective.minimise=cost", "objective.deadline=1s"],
}
COLUMNS = ["objective", "workers", "planned s", "measured s", "planned USD", "measured USD", "WAN bytes", "accuracy"]


def sites(profile, folder):
    """Region files: shards, capacity, prices, and links as the profile has them."""
    written = write_shards(read_digits(1), list(profile.regions), folder / "data", alpha=0.5, seed=1)
    for name in profile.regions:
        splits = {k: {"uri": str(Path(v["path"]).resolve()), "samples": v["samples"]} for k, v in written[name].items()}
        yield RegionSite(
            name,
            {
                "cloud": CLOUDS[name],
                "capacity": {"workers": 2, "memoryMb": 1024},
                "prices": PRICES[name],
                "datasets": {"digits": {"splits": splits}},
                "policy": {"isolation": "prefer"},
                "links": links_of(name, profile),
            },
        )


def settings(values):
    return [part for value in values for part in ("--set", value)]


def answer(federation, *command):
    """Data of a command, or None and the code of its error."""
    told = json.loads(federation.control_plane(*command, "-o", "json", check=False, timeout=600).stdout)
    return (told["data"], "") if told["status"] == "ok" else (None, told["error"]["code"])


def study(federation, job, run):
    """Rows of the table: one for each objective. All plans are made before the first run, which corrects later ones."""
    answer(federation, "explain", str(job))  # the first plan probes the task
    plans = {name: answer(federation, "explain", str(job), *settings(v)) for name, v in OBJECTIVES.items()}
    for name, (plan, code) in plans.items():
        if plan is None:
            yield {"objective": name, "workers": f"declined: {code}"}
            continue
        workers = ", ".join(f"{part['region']} {part['workers']}" for part in plan["partitions"])
        row = {"objective": name, "workers": workers}
        row |= {
            f"planned {unit}": plan["estimate"][key]["expected"] for unit, key in (("s", "seconds"), ("USD", "usd"))
        }
        if run:
            ended, code = answer(federation, "submit", str(job), *settings(OBJECTIVES[name]), "--yes", "--wait")
            if ended is None:
                yield row | {"measured s": code}
                continue
            result = ended["result"]
            row |= {"measured s": result["seconds"], "measured USD": result["usd"]}
            row |= {"WAN bytes": sum(result["wan_bytes"].values()), "accuracy": result["metrics"]["accuracy"]}
        yield row


def shown(value):
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main():
    parser = argparse.ArgumentParser(description="Plans and runs of a job under several objectives.")
    parser.add_argument("--folder", type=Path, required=True, help="where everything is kept")
    parser.add_argument("--profile", default="china-eu-us-3", help="of the emulator, with the regions of its prices")
    parser.add_argument("--plans-only", action="store_true", help="run nothing: plans alone, in seconds")
    given = parser.parse_args()
    profile, folder = load_profile(given.profile), given.folder
    folder.mkdir(parents=True, exist_ok=True)
    reason = Emulator.supported()
    print(
        f"WAN: {profile.name}, emulated" if reason is None else f"WAN: loopback, not shaped ({reason})", file=sys.stderr
    )
    with contextlib.ExitStack() as stack:
        emulator = None if reason else stack.enter_context(Emulator(profile, state_dir=folder / "emulator"))
        federation = LocalFederation(folder / "federation", [*sites(profile, folder)], emulator=emulator)
        stack.enter_context(federation)
        federation.control_plane("new", "image-classification", str(folder / "job"))
        with (folder / "study.csv").open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, COLUMNS)
            table.writeheader()
            print(" | ".join(COLUMNS))
            for row in study(federation, folder / "job" / "job.yaml", not given.plans_only):
                table.writerow(row)
                print(" | ".join(shown(row.get(column, "")) for column in COLUMNS), flush=True)


if __name__ == "__main__":
    main()
