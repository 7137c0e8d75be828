"""torchft over its own ProcessGroupGloo and lighthouse: LocalSGD, DiLoCo in buckets, and streaming DiLoCo.

No gradients are there, so that the inner optimizer's step costs nothing but what torchft hooks onto it. Its 8-bit
exchange needs Triton; a processor without an accelerator sends float32.
"""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from peer import Course, parse, parser, shapes
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo


class Part(torch.nn.Module):
    """Some of the tensors."""

    def __init__(self, chosen: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.randn(shape) * 0.01 for shape in chosen)


def divide(parts: int) -> list[list[tuple[int, ...]]]:
    """The tensors in order, in ``parts`` runs of about the same size."""
    total = sum(torch.Size(shape).numel() for shape in shapes())
    made: list[list[tuple[int, ...]]] = [[] for _ in range(parts)]
    seen = 0
    for shape in shapes():
        size = torch.Size(shape).numel()
        made[min(parts - 1, (seen + size // 2) * parts // total)].append(shape)
        seen += size
    return made


def main() -> None:
    made = parser()
    made.add_argument("--method", choices=("local-sgd", "diloco", "streaming"), required=True)
    made.add_argument("--lighthouse", required=True)
    made.add_argument("--fragments", type=int, default=4)
    made.add_argument("--delay", type=int, default=4, help="steps of compute over which a fragment may travel")
    options = parse(made)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = dist.TCPStore(options.host, 0, is_master=True, wait_for_workers=False)
    fragments = options.fragments if options.method == "streaming" else 1
    parts = [Part(chosen) for chosen in divide(fragments)]
    model = torch.nn.ModuleList(parts)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=120)),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=len(options.hosts),
        use_async_quorum=options.method == "local-sgd",
        timeout=timedelta(seconds=120),
        quorum_timeout=timedelta(seconds=300),
        rank=0,
        world_size=1,
        store_addr=options.host,
        store_port=store.port,
        lighthouse_addr=options.lighthouse,
        replica_id=f"region_{options.rank}",
        hostname=options.host,
        init_sync=False,
    )
    if options.method == "local-sgd":
        method: contextlib.AbstractContextManager[object] = LocalSGD(manager, model, inner, options.local_steps)
    else:
        outer = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in parts]
        method = DiLoCo(
            manager,
            list(parts),
            inner,
            outer,
            options.local_steps,
            use_bucketization=True,
            fragment_sync_delay=options.delay if options.method == "streaming" else 0,
        )
    course = Course(options)
    with method:
        while course.running:
            course.compute()
            begun = time.perf_counter()
            inner.step()
            course.spent("exchange", begun)
            course.stepped({"commits": manager.current_step(), "participants": manager.num_participants()})
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
