"""Write columns.json, on which the regions' models agree, from the result of columns.yaml.

geofed submit columns.yaml --wait -o json > measured.json
python columns.py measured.json --label churned
"""

import argparse
import json
import math
from pathlib import Path


def shortened(value):
    """Six significant digits of a number, however small or large."""
    return float(f"{value:.6g}")


def result_of(text):
    """Metrics and histograms in the output of a submission. Raises ``SystemExit`` with its error."""
    try:
        told = json.loads(text)
        if told["status"] == "error":
            raise SystemExit(f"the job has failed: {told['error']['code']}: {told['error']['message']}")
        return told["data"]["result"]["metrics"], told["data"]["result"]["histograms"]
    except (ValueError, KeyError, TypeError):
        raise SystemExit("this is not what `geofed submit columns.yaml --wait -o json` prints") from None


def agreed(metrics, histograms, label):
    """Columns of a job's result: {"label", "numbers": {name: {"mean", "deviation"}}, "levels": {name: [level]}}."""
    numbers = {}
    levels = {name: sorted(held["categories"]) for name, held in sorted(histograms.items())}
    for name, value in sorted(metrics.items()):
        kind, _, rest = name.partition(" ")
        if kind == "present" and rest != label:
            if not value:
                raise SystemExit(f"column {rest} is empty in all regions; leave it out by `format.columns`")
            mean = metrics[f"mean {rest}"] / value
            spread = max(metrics[f"square {rest}"] / value - mean * mean, 0.0)
            numbers[rest] = {"mean": shortened(mean), "deviation": shortened(math.sqrt(spread)) or 1.0}
    if f"present {label}" not in metrics:
        raise SystemExit(f"there is no column {label} of numbers")
    return {"label": label, "numbers": numbers, "levels": levels}


def main():
    """Read the result, and write columns.json beside this file."""
    parser = argparse.ArgumentParser(description="Write columns.json from the result of columns.yaml.")
    parser.add_argument("measured", type=Path, help="what `geofed submit columns.yaml --wait -o json` has printed")
    parser.add_argument("--label", default="churned", help="column of the label, 0 or 1 [churned]")
    given = parser.parse_args()
    found = agreed(*result_of(given.measured.read_text(encoding="utf-8")), given.label)
    text = json.dumps(found, indent=2, ensure_ascii=False) + "\n"
    Path(__file__).with_name("columns.json").write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
