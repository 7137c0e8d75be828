"""Make a table for each region: customers who leave or stay, with missing values and categories.

    python make_data.py --regions shanghai,frankfurt,virginia --out ../shards [--table FILE.csv] [--seed 1]

Without --table it makes one up. Regions have different customers: each has a contract that no other one has, ages
differ, and the first region knows the income of few. --table partitions rows of a CSV file of yours at random. It
prints, as JSON, the files and how many rows each holds.
"""

import argparse
import csv
import json
import math
import random
from pathlib import Path

ROWS = 900
"""Rows of the first region's invented table; each further region has 300 more.

A choice that balances what can be learned and the time of a run.
"""
TEST_PART = 0.2
"""Part of each region's rows that is kept for the test."""
COLUMNS = ["age", "income", "visits", "contract", "device", "churned"]
DEVICES = {"phone": 0.0, "desktop": -0.6, "tablet": 0.4}


def invented(region, regions, seed):
    """Rows of one region. Whoever pays much for few visits leaves, which no sum over single columns tells."""
    drawn, place = random.Random(f"{seed}/{region}"), regions.index(region)
    rows = []
    for _ in range(ROWS + 300 * place):
        age = min(max(round(drawn.gauss(38 + 6 * (place % 3), 12)), 18), 95)
        income = round(math.exp(drawn.gauss(10.3, 0.4)), 2)
        visits = max(round(drawn.gauss(12, 6)), 0)
        contract = drawn.choices(["monthly", "yearly", f"local-{place + 1}"], [5, 3, 2])[0]
        device = drawn.choice([*DEVICES])
        few, rich = visits < 12, income > 30_000
        score = 1.6 * (1 if few == rich else -1) - 0.03 * (age - 42) + DEVICES[device]
        score += {"monthly": 0.8, "yearly": -0.8}.get(contract, 0.0)
        left = int(drawn.random() < 1 / (1 + math.exp(-score)))
        rows.append([
            "" if drawn.random() < 0.1 else age,
            "" if drawn.random() < (0.6 if place == 0 else 0.05) else income,
            visits,
            contract,
            "" if drawn.random() < 0.1 else device,
            left,
        ])  # fmt: skip
    return rows


def dealt(file, regions, seed):
    """Columns, and rows of each region, of a CSV file; each region has as many, in random order."""
    with file.open(newline="", encoding="utf-8") as lines:
        columns, *rows = csv.reader(lines)
    random.Random(seed).shuffle(rows)
    return columns, {region: rows[place :: len(regions)] for place, region in enumerate(regions)}


def main():
    """Write the tables, and print where they are."""
    parser = argparse.ArgumentParser(description="Make tables of customers.")
    parser.add_argument("--regions", required=True, help="names, with commas between them")
    parser.add_argument("--out", type=Path, required=True, help="folder; each region gets one in it")
    parser.add_argument("--table", type=Path, help="a CSV file, names in its first line; default: a made-up table")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    regions = given.regions.split(",")
    if given.table:
        columns, tables = dealt(given.table, regions, given.seed)
    else:
        columns, tables = COLUMNS, {region: invented(region, regions, given.seed) for region in regions}
    written = {}
    for region, rows in tables.items():
        border = round(len(rows) * (1 - TEST_PART))
        written[region] = {}
        for split, part in (("train", rows[:border]), ("test", rows[border:])):
            path = given.out / region / f"customers-{split}.csv"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerows([columns, *part])
            written[region][split] = {"path": str(path), "samples": len(part)}
    print(json.dumps(written, indent=2))


if __name__ == "__main__":
    main()
