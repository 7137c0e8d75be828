"""Before: a Flower ClientApp that trains a small CNN on a client's handwritten digits."""

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

app = ClientApp()


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 64), nn.ReLU(),
        nn.Linear(64, 10),
    )  # fmt: skip


def read(path):
    with np.load(path) as arrays:
        x, y = arrays["x"].astype(np.float32) / 255, arrays["y"]
    return TensorDataset(torch.from_numpy(x).unsqueeze(1), torch.from_numpy(y))


@app.train()
def train(message: Message, context: Context) -> Message:
    """Take the model, make an epoch, and send the model back."""
    model = make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    data = read(context.node_config["train"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for x, y in DataLoader(data, batch_size=32, shuffle=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    content = RecordDict(
        {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"loss": float(loss.detach()), "num-examples": len(data)}),
        }
    )
    return Message(content=content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Accuracy of the model on the client's test data."""
    model = make_model().eval()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    data = read(context.node_config["test"])
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in DataLoader(data, batch_size=256))
    metrics = MetricRecord({"accuracy": right / len(data), "num-examples": len(data)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=message)
