"""Fuzzes a parser, or ``all``, with libFuzzer, by atheris: ``python -m tests.fuzz NAME [-runs=N] [-seed=N] [INPUT]``.

A crash, an input that takes longer than ten seconds, or more memory than the target declares ends it with a status
other than 0. The input is then in the working directory; given as an argument, it is tried again.
"""

from __future__ import annotations

import resource
import sys
import tempfile
from functools import partial
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["control_plane", "geofed_pb", "json", "region_agent", "sync", "tarfile"]):
    from tests.fuzz.targets import ALL, TARGETS, Target, parse

_INPUT_SECONDS = 10
"""Limit of one input's time; no parser takes a tenth of a second for a valid one."""


def _all() -> Target:
    seeds = [bytes([at]) + seed for at, target in enumerate(TARGETS.values()) for seed in target.seeds]
    return Target(partial(parse, ALL), tuple(seeds), longest=min(target.longest for target in TARGETS.values()))


def main() -> None:
    """Fuzz the target that the command line names."""
    name, *options = sys.argv[1:]
    target = _all() if name == ALL else TARGETS[name]
    for seed in target.seeds:
        parse(name, seed)
    used_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    limits = [f"-timeout={_INPUT_SECONDS}", f"-max_len={target.longest}", f"-rss_limit_mb={used_mb + target.memory_mb}"]
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(target.seeds):
            Path(corpus, str(number)).write_bytes(seed)
        given = [option for option in options if not option.startswith("-")]
        flags = [option for option in options if option.startswith("-")]
        atheris.Setup([sys.argv[0], *limits, *flags, *(given or [corpus])], lambda data: parse(name, data))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
