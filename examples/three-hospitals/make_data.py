"""Stands for the exports of three hospitals: scikit-learn's breast-cancer measurements (569 patients, 30 numbers).

    python make_data.py --out data

The hospitals have different patients: `north` most with large tumours, `west` most with small ones.
"""

import argparse
import csv
import json
from pathlib import Path

import numpy as np

HOSPITALS = ["north", "south", "west"]
TEST_PART = 0.25
"""Part of a hospital's patients who are kept for evaluation."""


def main():
    """Write two CSV files for each hospital, and print how many patients each has."""
    parser = argparse.ArgumentParser(description="Make the tables of three hospitals.")
    parser.add_argument("--out", type=Path, required=True, help="folder; each hospital gets one in it")
    given = parser.parse_args()
    # Only this script needs it: `pip install '.[demo]'` in a clone.
    from sklearn.datasets import load_breast_cancer

    loaded = load_breast_cancer()
    names = [name.replace(" ", "_") for name in loaded.feature_names]
    drawn = np.random.default_rng(1)
    # By size and chance.
    order = np.argsort(-loaded.data[:, 0] / loaded.data[:, 0].std() + drawn.normal(0, 1.0, len(loaded.data)))
    written = {}
    for hospital, patients in zip(HOSPITALS, np.array_split(order, len(HOSPITALS)), strict=True):
        patients = drawn.permutation(patients)
        border = round(len(patients) * TEST_PART)
        written[hospital] = {}
        for split, part in (("test", patients[:border]), ("train", patients[border:])):
            path = given.out / hospital / f"{split}.csv"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w", newline="", encoding="utf-8") as file:
                table = csv.writer(file, lineterminator="\n")
                table.writerow([*names, "benign"])
                table.writerows([*map(float, loaded.data[one]), int(loaded.target[one])] for one in part)
            written[hospital][split] = len(part)
    print(json.dumps(written))


if __name__ == "__main__":
    main()
