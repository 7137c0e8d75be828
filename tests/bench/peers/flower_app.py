"""Flower FedAvg as a Flower app: the whole model down and up in chunks, once in every round of local steps.

The model travels as one array, which costs Flower fewer requests than 62 do, and neither side imports PyTorch, since
Flower starts a new process for each message. Rounds are measured from the start of one fit to the start of a later.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from peer import mark, shapes

client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """The local steps of one round."""
    begun = time.time()
    config = context.run_config
    marks = str(context.node_config["marks"])
    done = int(message.content["config"]["server-round"]) - 1
    first, last = int(config["warmup"]), int(config["warmup"]) + int(config["exchanges"])
    steps = int(config["local-steps"])
    model = message.content["arrays"]["model"].numpy()
    if done == first:
        mark(marks, event="begin")
    elif done == last:
        since = json.loads(Path(marks).read_text().splitlines()[0])["time"]
        measured, compute_s = (last - first) * steps, float(config["compute-ms"]) / 1000
        phases = {"compute": measured * compute_s, "exchange": begun - since - measured * compute_s}
        mark(
            marks, event="end", steps=measured, seconds=begun - since, phases=phases, notes={"coordinates": model.size}
        )
    if done < last:
        time.sleep(steps * float(config["compute-ms"]) / 1000)
    content = RecordDict(
        {"arrays": ArrayRecord({"model": Array(model)}), "metrics": MetricRecord({"num-examples": steps})}
    )
    return Message(content=content, reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """FedAvg over all regions."""
    config = context.run_config
    regions = int(config["regions"])
    size = sum(math.prod(shape) for shape in shapes())
    model = np.random.default_rng(0).normal(0, 0.01, size).astype(np.float32)
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=regions, min_available_nodes=regions)
    strategy.start(
        grid,
        ArrayRecord({"model": Array(model)}),
        num_rounds=int(config["warmup"]) + int(config["exchanges"]) + 1,
        train_config=ConfigRecord(),
    )
