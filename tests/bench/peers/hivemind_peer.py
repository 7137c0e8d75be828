"""hivemind's averager over its own DHT and p2pd: whole models, butterfly all-reduce, 16 or 8 bit."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import hivemind
import torch
from hivemind.averaging.partition import AllreduceException
from hivemind.compression import Float16Compression, Quantile8BitQuantization, Uniform8BitQuantization
from peer import Course, parse, parser, shapes

SAMPLED_EVERY = 4096
TOLERANCE = 0.2
"""An average of 1, 3 and 9 is 4.33; a sample that nobody averaged is off by more than 1."""
KINDS = {
    "fp16": Float16Compression(),
    "uniform8": Uniform8BitQuantization(),
    "quantile8": Quantile8BitQuantization(),
}


def main() -> None:
    made = parser()
    made.add_argument("--compression", choices=sorted(KINDS), required=True)
    made.add_argument("--meeting", required=True, help="file through which the first region tells its DHT's address")
    made.add_argument("--matchmaking-s", type=float, default=2.0)
    options = parse(made)
    torch.set_num_threads(1)
    torch.manual_seed(options.rank)
    meeting = Path(options.meeting)
    while options.rank and not meeting.exists():
        time.sleep(0.05)
    initial = meeting.read_text().split() if options.rank else []
    dht = hivemind.DHT(
        initial_peers=initial,
        host_maddrs=[f"/ip4/{options.host}/tcp/0"],
        start=True,
        use_auto_relay=False,
        use_relay=False,
        use_ipfs=False,
        ensure_bootstrap_success=True,
    )
    if not options.rank:
        made_path = meeting.with_suffix(".part")
        made_path.write_text(" ".join(str(address) for address in dht.get_visible_maddrs()))
        made_path.rename(meeting)
    # every region starts from its own constant, so that an average tells who took part in it
    own, mean = 3.0**options.rank, sum(3.0**rank for rank in range(len(options.hosts))) / len(options.hosts)
    averager = hivemind.DecentralizedAverager(
        [torch.full(shape, own) + torch.randn(shape) * 1e-3 for shape in shapes()],
        dht,
        prefix="bench",
        target_group_size=len(options.hosts),
        min_group_size=len(options.hosts),
        initial_group_bits="",
        min_matchmaking_time=options.matchmaking_s,
        request_timeout=max(0.2, options.matchmaking_s / 2),
        compression=KINDS[options.compression],
        start=True,
    )
    course = Course(options)
    notes: dict[str, object] = {"whole_models": 0, "exchanges": 0, "off_by": 0.0}
    # on and on, until it is ended: a region that another still needs for its average may not leave
    while True:
        course.compute()
        if (course.done + 1) % options.local_steps == 0:
            begun = time.perf_counter()
            with contextlib.suppress(AllreduceException, TimeoutError):
                averager.step(timeout=60, allow_retries=True)
            course.spent("exchange", begun)
            begun = time.perf_counter()
            with averager.get_tensors() as tensors:
                samples = [tensor.view(-1)[::SAMPLED_EVERY] for tensor in tensors]
                off = max(float((sample - mean).abs().max()) for sample in samples)
                for sample in samples:
                    sample.fill_(own)
            notes["whole_models"] += off < TOLERANCE  # type: ignore[operator]
            notes["exchanges"] += 1  # type: ignore[operator]
            notes["off_by"] = max(off, notes["off_by"])  # type: ignore[type-var]
            course.spent("check", begun)
        course.stepped(notes)


if __name__ == "__main__":
    main()
