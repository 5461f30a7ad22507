"""Small networks for the tests of heads: good ones, and one that does as it is told."""

from __future__ import annotations

import torch
from torch import nn

DTYPE = torch.float64


def network(width: int = 2, seed: int = 0, dtype: torch.dtype = DTYPE) -> nn.Module:
    """From 5 raw numbers to ``width`` features."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, width)).to(dtype)


class Broken(nn.Module):
    """An encoder whose answer can be spoilt at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.answer = lambda features: features

    def forward(self, contexts):
        return self.answer(self.inner(contexts))


#: what a broken encoder does to its features, and the refusal that it must get
FAULTS = {
    "nan": (lambda f: f * torch.nan, "encoder Broken: expected finite values, got nan"),
    "infinity": (lambda f: f / 0.0, "encoder Broken: expected finite values"),
    "width": (lambda f: f[..., :1], r"encoder Broken: expected features of shape \(.*2\), d = 2"),
    "rows": (lambda f: f.repeat(2, 1), "encoder Broken: expected features of shape"),
    "device": (lambda f: f.to("meta"), "encoder Broken: expected features on device cpu"),
    "integers": (lambda f: f.long(), "encoder Broken: expected features of a floating-point dtype"),
    "no tensor": (lambda f: (f, f), "encoder Broken: expected a tensor of features, got tuple"),
}
