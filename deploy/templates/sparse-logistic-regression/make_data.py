"""Make shards for sparse logistic regression: made up, or partitioned from a file of yours.

    python make_data.py --regions shanghai,frankfurt,virginia --out ../shards [--form criteo] [--samples 4000]
    python make_data.py --regions shanghai,frankfurt,virginia --out ../shards --source train.txt.gz

Made-up samples follow one hidden model, the same in all regions; what is frequent differs from region to region, and
so do the numbers of samples. A file of yours is cut, line by line, into one stretch for each region. It prints, as
JSON, the files and how many samples each holds.
"""

import argparse
import gzip
import json
import math
from contextlib import ExitStack
from pathlib import Path

import numpy as np

TEST_EVERY = 10
"""One line of so many is kept for the test: a tenth, as is usual."""
FEATURES = 1000
"""Features of the made-up LibSVM samples; few, so that some thousand samples suffice to learn them."""
CATEGORIES = 200
"""Categories of each made-up Criteo column; few, so that some thousand samples suffice to learn them."""


def skewed(random, count, place, size):
    """Draw `size` of `count` indices, some of them often; each region has other frequent ones."""
    rank = np.minimum(random.zipf(1.3, size) - 1, count - 1)
    return (rank * 7 + place * 13) % count


def libsvm_lines(random, truth, place, samples):
    """Yield made-up samples in LibSVM's format, with labels by a logistic model."""
    weight = truth.normal(0, 1, FEATURES)
    for _ in range(samples):
        index = np.unique(skewed(random, FEATURES, place, random.integers(8, 25)))
        value = np.round(random.lognormal(0, 0.5, len(index)), 3)
        label = random.random() < 1 / (1 + math.exp(-float(weight[index] @ value) / 2))
        yield " ".join([f"{2 * label - 1:+d}", *(f"{i}:{v:g}" for i, v in zip(index, value, strict=True))])


def criteo_lines(random, truth, place, samples):
    """Yield made-up samples in Criteo's format, with labels by a logistic model."""
    weight, slope = truth.normal(0, 0.7, (26, CATEGORIES)), truth.normal(0, 0.2, 13)
    names = truth.integers(0, 1 << 32, (26, CATEGORIES))
    columns = np.arange(26)
    for _ in range(samples):
        number = np.floor(random.lognormal(2, 1.5, 13)).astype(int)
        number[random.random(13) < 0.2] = 0
        chosen = skewed(random, CATEGORIES, place, 26)
        score = weight[columns, chosen].sum() / 2 + slope @ (np.log1p(number) - 2) - 1
        label = random.random() < 1 / (1 + math.exp(-float(score)))
        numbers = ["" if n == 0 and random.random() < 0.5 else str(n) for n in number]
        yield "\t".join([str(int(label)), *numbers, *(f"{name:08x}" for name in names[columns, chosen])])


def made_up(given, regions):
    """Yield (region, line) of all made-up samples; a region has more of them than the one before."""
    lines = criteo_lines if given.form == "criteo" else libsvm_lines
    for place, region in enumerate(regions):
        samples = given.samples * (2 + place) // 2
        random, truth = np.random.default_rng([given.seed, place]), np.random.default_rng(given.seed)
        for line in lines(random, truth, place, samples):
            yield region, line


def cut(source, regions):
    """Yield (region, line) of a file; the first region gets the least."""
    opener = gzip.open if source.suffix == ".gz" else open
    with opener(source, "rt", encoding="ascii") as file:
        total = sum(1 for line in file if line.strip())
    ends = [total * (2 * n + n * (n - 1) // 2) for n in range(1, len(regions) + 1)]
    with opener(source, "rt", encoding="ascii") as file:
        place = 0
        for number, line in enumerate(line for line in file if line.strip()):
            while (number + 1) * ends[-1] > ends[place] * total:
                place += 1
            yield regions[place], line.rstrip("\r\n")


def main():
    """Write the shards, and print where they are."""
    parser = argparse.ArgumentParser(description="Make shards for sparse logistic regression.")
    parser.add_argument("--regions", required=True, help="names, with commas between them")
    parser.add_argument("--out", type=Path, required=True, help="folder; each region gets one in it")
    parser.add_argument("--source", type=Path, help="a file of yours (LibSVM, Criteo); default: made-up samples")
    parser.add_argument("--form", choices=["libsvm", "criteo"], default="libsvm", help="of made-up samples")
    parser.add_argument("--samples", type=int, default=4000, help="of the first region, made up")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    regions = given.regions.split(",")
    written, files = {region: {} for region in regions}, {}
    with ExitStack() as stack:
        for number, (region, line) in enumerate(
            cut(given.source, regions) if given.source else made_up(given, regions)
        ):
            split = "test" if number % TEST_EVERY == TEST_EVERY - 1 else "train"
            if (region, split) not in files:
                path = given.out / region / f"clicks-{split}.txt"
                path.parent.mkdir(parents=True, exist_ok=True)
                files[region, split] = stack.enter_context(path.open("w", encoding="ascii"))
                written[region][split] = {"path": str(path), "samples": 0}
            files[region, split].write(f"{line}\n")
            written[region][split]["samples"] += 1
    print(json.dumps(written, indent=2))


if __name__ == "__main__":
    main()
