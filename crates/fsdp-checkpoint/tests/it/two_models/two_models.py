"""Writes `two_models`: a checkpoint of two models and their optimizers, as torch programs save it.

    python two_models.py
"""

import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.a = torch.nn.Linear(5, 7)
        self.head = torch.nn.Linear(7, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.a(x))) * self.scale


class AppState(Stateful):
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optim = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )


def make(seed, optimizer, steps):
    torch.manual_seed(seed)
    model = Net()
    optimizer = optimizer(model.parameters())
    for _ in range(steps):
        model(torch.randn(3, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return AppState(model, optimizer)


def both(seed, steps):
    def adamw(parameters):
        return torch.optim.AdamW(parameters, lr=0.003)

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    return {
        "generator": make(seed, adamw, steps[0]),
        "discriminator": make(seed + 1, sgd, steps[1]),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    directory = Path(__file__).parent / "checkpoint"
    shutil.rmtree(directory, ignore_errors=True)
    dcp.save(both(1, (3, 2)), checkpoint_id=directory)
