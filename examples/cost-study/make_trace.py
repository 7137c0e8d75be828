"""A month's jobs of a team, and how fast they are with more workers: for `geofed simulate`.

    python make_trace.py --out traces [--jobs 60] [--seed 1]

Sizes, arrivals and deadlines are drawn; the curve is an assumption, stated below. Put your own measurements there.
"""

import argparse
import csv
import random
from pathlib import Path

STEPS_PER_SECOND = {1: 4.0, 2: 7.4, 4: 12.6, 8: 18.0}
"""Assumed steps a second by number of workers: the time of merging grows with them."""


def main():
    """Write TRACES/month.csv and TRACES/speeds/small-cnn.csv."""
    parser = argparse.ArgumentParser(description="Make a trace of jobs with deadlines.")
    parser.add_argument("--out", type=Path, required=True, help="folder")
    parser.add_argument("--jobs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    drawn, at = random.Random(given.seed), 0.0
    (given.out / "speeds").mkdir(parents=True, exist_ok=True)
    with (given.out / "speeds" / "small-cnn.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["global_batch_size", *STEPS_PER_SECOND], [64, *STEPS_PER_SECOND.values()]])
    columns = [
        "job_id",
        "submission_time",
        "num_iteration",
        "model_name",
        "batch_size",
        "num_gpu",
        "duration",
        "deadline",
    ]
    with (given.out / "month.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(columns)
        for number in range(given.jobs):
            at += drawn.expovariate(1 / 600)
            workers, steps = drawn.choice([1, 2, 4]), drawn.randint(2_000, 40_000)
            seconds = steps / STEPS_PER_SECOND[workers]
            deadline = at + seconds * drawn.uniform(0.8, 2.0)
            table.writerow(
                [f"job-{number}", round(at), steps, "small-cnn", 64, workers, round(seconds), round(deadline)]
            )


if __name__ == "__main__":
    main()
