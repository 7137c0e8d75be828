"""Cut a text into one shard for each region, and each shard into what is trained and what is tested on.

    python make_data.py --regions shanghai,frankfurt,virginia --out ../shards [--text FILE] [--seed 1]

Without --text it makes one up: sentences from a small grammar, with words of its own for each region, so that no
region's text is like another's. It prints, as JSON, the files and how many samples (stretches) each holds.
"""

import argparse
import json
import random
from pathlib import Path

LENGTH = 48
"""Characters of a sample: the `length` in job.yaml."""
TEST_PART = 0.1
"""Share of each region's text, its end, that is kept for the test."""
SENTENCES = 1500
"""Sentences of the first region's invented text; each further region has 500 more.

A choice that balances what can be learned and the time of a run.
"""

PLACES = ["harbour", "market", "orchard", "station", "library", "valley", "bridge", "garden", "quarry"]
PEOPLE = ["captain", "baker", "teacher", "clerk", "shepherd", "painter", "miller", "doctor", "tailor"]
THINGS = ["lanterns", "letters", "apples", "maps", "ropes", "clocks", "kettles", "stones", "ribbons"]
VERBS = ["counts", "carries", "mends", "sells", "hides", "paints", "gathers", "borrows"]
TIMES = ["before dawn", "at noon", "every evening", "in the rain", "after the harvest", "all winter"]


def invented(region, regions, seed):
    """Return sentences of one region, which prefers its own third of each list."""
    drawn, place = random.Random(f"{seed}/{region}"), regions.index(region)

    def pick(words):
        favourites = words[place % 3 :: 3]
        return drawn.choice(favourites if drawn.random() < 0.7 else words)

    lines = [
        f"The {pick(PEOPLE)} {pick(VERBS)} {drawn.randint(2, 9)} {pick(THINGS)} near the {pick(PLACES)} {pick(TIMES)}."
        for _ in range(SENTENCES + 500 * place)
    ]
    return "\n".join(lines) + "\n"


def cut(text, regions):
    """Cut a text into as many pieces as there are regions, at line ends; the first is the smallest."""
    weights = [2 + index for index in range(len(regions))]
    lines, pieces, start = text.splitlines(keepends=True), {}, 0
    for index, region in enumerate(regions):
        end = round(len(lines) * sum(weights[: index + 1]) / sum(weights))
        pieces[region], start = "".join(lines[start:end]), end
    return pieces


def main():
    """Write the shards, and print where they are."""
    parser = argparse.ArgumentParser(description="Make text shards.")
    parser.add_argument("--regions", required=True, help="names, with commas between them")
    parser.add_argument("--out", type=Path, required=True, help="folder; each region gets one in it")
    parser.add_argument("--text", type=Path, help="a text file (UTF-8); default: a made-up text")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    regions = given.regions.split(",")
    if given.text:
        texts = cut(given.text.read_text(encoding="utf-8"), regions)
    else:
        texts = {region: invented(region, regions, given.seed) for region in regions}
    written = {}
    for region, text in texts.items():
        border = round(len(text) * (1 - TEST_PART))
        written[region] = {}
        for split, part in (("train", text[:border]), ("test", text[border:])):
            path = given.out / region / f"letters-{split}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(part, encoding="utf-8")
            written[region][split] = {"path": str(path), "samples": max(0, (len(part) - 1) // LENGTH)}
    print(json.dumps(written, indent=2))


if __name__ == "__main__":
    main()
