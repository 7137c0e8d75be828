"""Make shards of ratings: made up, or partitioned from a MovieLens file of yours.

    python make_data.py --regions shanghai,frankfurt,virginia --out ../shards [--form dat] [--users 300]
    python make_data.py --regions shanghai,frankfurt,virginia --out ../shards --source ml-1m/ratings.dat

All ratings of a user are in one region. Made-up ones follow hidden factors of rank 4, with noise, in half stars; what
is often rated differs from region to region, and so do the numbers of users. It prints, as JSON, the files and how
many samples each holds; and to stderr what `users`, `items` and `mean` in job.yaml must be.
"""

import argparse
import gzip
import json
import sys
import zlib
from contextlib import ExitStack
from pathlib import Path

import numpy as np

TEST_EVERY = 10
"""One rating of so many is kept for the test: a tenth, as is usual."""
ITEMS, RANK, NOISE = 400, 4, 0.4  # of the made-up ratings
SEPARATORS = {"dat": "::", "csv": ",", "tab": "\t"}
HEADER = "userId,movieId,rating,timestamp"


def made_up(given, regions):
    """Yield (region, user, item, rating, time) of all made-up ratings; a region has more users than the one before."""
    truth, user = np.random.default_rng(given.seed), 0
    item_factors, item_bias = truth.normal(0, 0.6, (ITEMS, RANK)), truth.normal(0, 0.4, ITEMS)
    for place, region in enumerate(regions):
        random = np.random.default_rng([given.seed, place])
        liked = np.roll(1 / (1 + np.arange(ITEMS)) ** 0.6, place * ITEMS // len(regions))
        for _ in range(given.users * (2 + place) // 2):
            user += 1
            factors, bias = random.normal(0, 0.6, RANK), random.normal(0, 0.3)
            seen = random.choice(ITEMS, size=random.integers(20, 80), replace=False, p=liked / liked.sum())
            score = 3.5 + bias + item_bias[seen] + item_factors[seen] @ factors + random.normal(0, NOISE, len(seen))
            for item, rating in zip(seen, np.clip(np.round(2 * score) / 2, 0.5, 5), strict=True):
                yield region, user, int(item) + 1, float(rating), 1_000_000_000 + 60 * user


def dealt(source, regions):
    """Yield the same from a file; a user's region follows from the ID alone. The first region gets the least."""
    shares = np.cumsum([2 + place for place in range(len(regions))])
    with (gzip.open if source.suffix == ".gz" else open)(source, "rt", encoding="ascii") as file:
        for line in file:
            fields = line.strip().replace("::", "\t").replace(",", "\t").split("\t")
            if len(fields) >= 3 and fields[0].isdigit():
                drawn = zlib.crc32(fields[0].encode()) % shares[-1]
                region = regions[int(np.searchsorted(shares, drawn, side="right"))]
                yield region, int(fields[0]), int(fields[1]), float(fields[2]), int((*fields, "0")[3])


def main():
    """Write the shards, and print where they are."""
    parser = argparse.ArgumentParser(description="Make shards of ratings.")
    parser.add_argument("--regions", required=True, help="names, with commas between them")
    parser.add_argument("--out", type=Path, required=True, help="folder; each region gets one in it")
    parser.add_argument("--source", type=Path, help="a MovieLens file of yours; default: made-up ratings")
    parser.add_argument("--form", choices=list(SEPARATORS), default="dat", help="of the shards")
    parser.add_argument("--users", type=int, default=300, help="of the first region, made up")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    regions = given.regions.split(",")
    ending, separator = given.form.replace("tab", "data"), SEPARATORS[given.form]
    written, files, users, items, total = {region: {} for region in regions}, {}, 0, 0, 0.0
    source = dealt(given.source, regions) if given.source else made_up(given, regions)
    with ExitStack() as stack:
        for number, (region, user, item, rating, time) in enumerate(source):
            split = "test" if number % TEST_EVERY == TEST_EVERY - 1 else "train"
            if (region, split) not in files:
                path = given.out / region / f"ratings-{split}.{ending}"
                path.parent.mkdir(parents=True, exist_ok=True)
                files[region, split] = stack.enter_context(path.open("w", encoding="ascii"))
                written[region][split] = {"path": str(path), "samples": 0}
                if given.form == "csv":
                    files[region, split].write(f"{HEADER}\n")
            files[region, split].write(f"{user}{separator}{item}{separator}{rating:g}{separator}{time}\n")
            written[region][split]["samples"] += 1
            users, items, total = max(users, user), max(items, item), total + rating
    print(json.dumps(written, indent=2))
    count = sum(split["samples"] for region in written.values() for split in region.values())
    if count:
        print(f"config: users: {users + 1}, items: {items + 1}, mean: {total / count:.3g}", file=sys.stderr)


if __name__ == "__main__":
    main()
