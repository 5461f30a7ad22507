"""A router: which of several models answers a request, when each has a price?

    python experiments/router.py [--quick]

Request -> embedding -> GLM -> choice, in production's order of events:

1. a request comes, its context is embedded together with each model (block features);
2. the policy gives an upper bound on the chance of success of every model; the router maximises
   that minus the model's price;
3. the verdict (1 good, 0 bad) arrives some requests later, whatever it is;
4. the process dies half-way and continues bit by bit;
5. the log of a uniform trial is replayed to compare the router with always taking one model.

The delay does not depend on the verdict: if failures were reported later than successes, the
confidence sets would not be valid.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor, nn

import torchglb as glb
from torchglb.report.tables import aligned

MODELS = ("small", "medium", "large")
PRICES = torch.tensor([0.02, 0.10, 0.25], dtype=torch.float64)
CONTEXT, EMBEDDED, DELAY = 6, 3, 25


class Request(NamedTuple):
    """A context, and the verdict that each model would get."""

    context: Tensor  # (CONTEXT,)
    verdicts: Tensor  # (models,)


class Blocks(nn.Module):
    """A frozen encoder of (context, model): the embedding in the block of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(CONTEXT, EMBEDDED - 1, dtype=torch.float64).requires_grad_(False)

    def forward(self, pairs: Tensor) -> Tensor:
        context, model = pairs[:, :CONTEXT], pairs[:, CONTEXT:]
        hidden = torch.tanh(self.encoder(context))
        with_one = torch.cat([hidden, torch.ones_like(hidden[:, :1])], -1)
        return (model[:, :, None] * with_one[:, None, :]).flatten(1)


def options(context: Tensor) -> Tensor:
    """The context beside each model, ``(models, CONTEXT + models)``."""
    rows = context.expand(len(MODELS), CONTEXT)
    return torch.cat([rows, torch.eye(len(MODELS), dtype=torch.float64)], -1)


def make_head() -> glb.GLMHead:
    torch.manual_seed(0)
    domain = glb.Ball(len(MODELS) * EMBEDDED, 5.0)
    return glb.GLMHead(Blocks(), glb.Bernoulli(), domain, bound="smooth")


class Router:
    """Optimism per request: the largest upper bound on success, minus the price."""

    def __init__(self) -> None:
        self.head = make_head()
        self.waiting: deque[tuple[Tensor, float]] = deque()

    def route(self, request: Request) -> int:
        """The model that answers; learns from the verdicts that have come in."""
        if len(self.waiting) >= DELAY:
            self.head.update(*self.waiting.popleft())
        rows = options(request.context)
        upper = self.head.confidence(rows).upper
        choice = int((upper - PRICES).argmax())
        self.waiting.append((rows[choice], float(request.verdicts[choice])))
        return choice

    def saved(self) -> bytes:
        file = io.BytesIO()
        torch.save({"head": self.head.state_dict(), "waiting": list(self.waiting)}, file)
        return file.getvalue()

    @classmethod
    def restored(cls, state: bytes) -> Router:
        router, found = cls(), torch.load(io.BytesIO(state), weights_only=True)
        router.head.load_state_dict(found["head"])
        router.waiting = deque(found["waiting"])
        return router


def requests(count: int, seed: int) -> list[Request]:
    """Easy requests are solved by all, hard ones by the large model."""
    generator = torch.Generator().manual_seed(seed)
    contexts = torch.randn((count, CONTEXT), generator=generator, dtype=torch.float64)
    skill = torch.tensor([0.5, 1.2, 2.2], dtype=torch.float64)
    chance = torch.sigmoid(skill - 1.5 * contexts[:, :1])
    return [
        Request(*pair)
        for pair in zip(contexts, torch.bernoulli(chance, generator=generator), strict=True)
    ]


def value(request: Request, choice: int) -> float:  # of an answer: its verdict minus its price
    return float(request.verdicts[choice] - PRICES[choice])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    stream = requests(80 if given.quick else 800, seed=1)
    half = len(stream) // 2
    router = Router()
    earned = sum(value(request, router.route(request)) for request in stream[:half])
    again = Router.restored(router.saved())  # the process has died, and starts again
    old, new = (r.head.confidence(options(stream[half].context)).upper for r in (router, again))
    assert torch.equal(old, new), "a restart changes nothing"
    counts = [0] * len(MODELS)
    for request in stream[half:]:
        counts[choice := again.route(request)] += 1
        earned += value(request, choice)
    rows = [["who answers", "value per request"], ["the router", f"{earned / len(stream):.3f}"]]
    for k, name in enumerate(MODELS):
        rows.append([f"always {name}", f"{sum(value(r, k) for r in stream) / len(stream):.3f}"])
    print("\n".join(aligned(rows)))
    print("second half:", ", ".join(f"{n} {c}" for n, c in zip(MODELS, counts, strict=True)))
    generator = torch.Generator().manual_seed(2)
    logged = torch.randint(0, len(MODELS), (len(stream),), generator=generator).tolist()
    replayed, kept = Router(), []
    for request, taken in zip(stream, logged, strict=True):
        rows_ = options(request.context)
        if int((replayed.head.confidence(rows_).upper - PRICES).argmax()) == taken:
            kept.append(value(request, taken))
            replayed.head.update(rows_[taken], float(request.verdicts[taken]))
    print(f"replay on the log: {sum(kept) / len(kept):.3f} per request, {len(kept)} of them agree")
    return 0


if __name__ == "__main__":
    sys.exit(main())
