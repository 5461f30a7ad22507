"""What the scripts around neural encoders share: their options, the digits, the picture."""

import argparse
from pathlib import Path
from typing import Any

import scipy.stats
import torch
from torch import Tensor

RESULTS = Path(__file__).resolve().parent.parent / "results"


def parser_of(doc: str | None, quick: str, out: str) -> argparse.ArgumentParser:
    """The options of every script; ``quick`` says what is smaller in quick mode."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--out", type=Path, default=RESULTS / out, help="the picture")
    return parser


def digits(device: str) -> tuple[Tensor, Tensor]:
    """The 1797 images of scikit-learn's digits, ``(1797, 64)`` in [0, 1], and their classes."""
    from sklearn.datasets import load_digits

    images, classes = load_digits(return_X_y=True)
    return (
        torch.tensor(images / 16.0, dtype=torch.float64, device=device),
        torch.tensor(classes, device=device),
    )


def paired(gains: Tensor) -> str:
    """The mean of paired differences ``(seeds)``, its 95% interval, and how many are positive."""
    line, count = f"{gains.mean():.4g}", len(gains)
    if count > 1:
        half = scipy.stats.t.ppf(0.975, count - 1) * gains.std().item() / count**0.5
        line += f" +- {half:.2g} (95%, Student, {count} pairs)"
    return f"{line}, better in {int((gains > 0).sum())} of {count}"


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"picture: {path.name}")
