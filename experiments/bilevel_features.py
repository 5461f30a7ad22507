"""Trains an encoder through the constrained MLE, on held-out likelihood, by implicit gradients.

Few-shot tasks on digits: a task is a set of five classes, the reward of an image is whether its
class is among them, and the head sees 10 images. With the encoder's features phi, the task's head
is the constrained MLE of those 10 rows with a ridge lambda, and what counts is the likelihood of
other images of the task: the outer loss of a bilevel problem, in the encoder and in lambda. Three
ways to train, each for the same processor time, on the same stream of tasks (40 sets of classes):

- implicit: the held-out loss of the exact head, differentiated through the constrained MLE.
- unrolled: the head is replaced by 10 projected gradient steps, and those are differentiated.
- two-stage: every training task has a head that is trained along with the encoder on all images
  of its tasks; the few-shot problem is never looked at. Its lambda is chosen from a grid
  afterwards, on the held-out loss of training tasks, in time that is not counted.

The judge: 100 tasks of other sets of classes, on images that nobody trained on. Their heads are
constrained MLEs of 10 rows; for the unrolled encoder also its own 10 steps, if those do better.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from _neural import digits, paired, parser_of, save
from torch import Tensor, nn

import torchglb as glb
from torchglb.plotting.neural import race_plot

FAMILY, DIM, S = glb.Bernoulli(), 6, 6.0
BALL = glb.Ball(DIM, S)
ASKED, TASKS, KNOWN_SETS = 20, 32, 40
UNROLLED_STEPS = 10
RIDGES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
IMPLICIT, UNROLLED, TWO_STAGE = "implicit", "unrolled", "two-stage"


class Batch(NamedTuple):
    """Images ``(tasks, n, 64)`` with rewards ``(tasks, n)``, to fit and to ask; which tasks."""

    seen: Tensor
    seen_rewards: Tensor
    asked: Tensor
    asked_rewards: Tensor
    task: Tensor


class Tasks:
    """A stream of few-shot tasks over some images and some sets of classes."""

    def __init__(
        self, images: Tensor, classes: Tensor, sets: Tensor, shots: int, seed: int
    ) -> None:
        self.images, self.classes, self.sets, self.shots = images, classes, sets, shots
        self.draw = torch.Generator().manual_seed(seed)

    def batch(self, tasks: int, asked: int) -> Batch:
        which = torch.randint(len(self.sets), (tasks,), generator=self.draw)
        shots, count = self.shots, self.shots + asked
        orders = [torch.randperm(len(self.images), generator=self.draw) for _ in range(tasks)]
        rows = torch.stack([order[:count] for order in orders]).to(self.images.device)
        which = which.to(self.images.device)
        rewards = self.sets[which].gather(-1, self.classes[rows])
        images = self.images[rows]
        return Batch(
            images[:, :shots], rewards[:, :shots], images[:, shots:], rewards[:, shots:], which
        )


def held_out(encoder: nn.Module, theta: Tensor, batch: Batch) -> Tensor:
    """The mean loss of the asked images under heads ``theta (tasks, d)``."""
    z = (encoder(batch.asked) @ theta[..., None])[..., 0]
    return FAMILY.nll(z, batch.asked_rewards).mean()


def exact_head(encoder: nn.Module, batch: Batch, ridge: Tensor) -> Tensor:
    rows = glb.Rows(encoder(batch.seen), batch.seen_rewards)
    # a rough solution will do: what makes it differentiable are Newton steps, which polish it
    return glb.constrained_mle(
        FAMILY, rows, BALL, regularization=ridge, tol=1e-5, validate=False
    ).theta


def unrolled_head(encoder: nn.Module, batch: Batch, ridge: Tensor) -> Tensor:
    """Projected gradient descent from 0 with the step 1/L: features of norm 1, m'' <= 1/4."""
    X, r = encoder(batch.seen), batch.seen_rewards
    theta = X.new_zeros((X.shape[0], DIM))
    for _ in range(UNROLLED_STEPS):
        slope = FAMILY.mean((X @ theta[..., None])[..., 0]) - r
        gradient = (slope[..., None] * X).sum(-2) + ridge * theta
        theta = BALL.project(theta - gradient / (X.shape[-2] / 4.0 + ridge))
    return theta


def network(seed: int, device: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, DIM), glb.UnitBall("smooth")
    return nn.Sequential(*layers).to(device=device, dtype=torch.float64)


class Method(NamedTuple):
    """An encoder, all that is trained with it, the loss of a batch, and the logarithm of lambda."""

    encoder: nn.Module
    parameters: list[Tensor]
    loss: Callable[[Batch], Tensor]
    log_ridge: Tensor


def methods(seed: int, device: str) -> dict[str, Method]:
    """The three ways; all encoders start alike, and so do the ridges."""
    like: dict[str, Any] = {"dtype": torch.float64, "device": device}
    one, two, three = (network(seed, device) for _ in range(3))
    first, second, third = (torch.full((), -2.0, **like) for _ in range(3))
    for learnt in (first, second):
        learnt.requires_grad_()
    heads = torch.zeros(KNOWN_SETS, DIM, requires_grad=True, **like)

    def implicit(batch: Batch) -> Tensor:
        return held_out(one, exact_head(one, batch, first.exp()), batch)

    def unrolled(batch: Batch) -> Tensor:
        return held_out(two, unrolled_head(two, batch, second.exp()), batch)

    def pooled(batch: Batch) -> Tensor:
        images = torch.cat([batch.seen, batch.asked], dim=1)
        rewards = torch.cat([batch.seen_rewards, batch.asked_rewards], dim=1)
        theta = BALL.project(heads[batch.task])
        return FAMILY.nll((three(images) @ theta[..., None])[..., 0], rewards).mean()

    return {
        IMPLICIT: Method(one, [*one.parameters(), first], implicit, first),
        UNROLLED: Method(two, [*two.parameters(), second], unrolled, second),
        TWO_STAGE: Method(three, [*three.parameters(), heads], pooled, third),
    }


@torch.no_grad()
def judged(name: str, method: Method, judge: Batch, tuning: Batch) -> float:
    encoder, ridge = method.encoder, method.log_ridge.exp()
    if name == TWO_STAGE:
        ridges = [torch.full_like(ridge, value) for value in RIDGES]
        losses = [held_out(encoder, exact_head(encoder, tuning, x), tuning) for x in ridges]
        ridge = ridges[int(torch.stack(losses).argmin())]
    found = [held_out(encoder, exact_head(encoder, judge, ridge), judge)]
    if name == UNROLLED:
        found.append(held_out(encoder, unrolled_head(encoder, judge, ridge), judge))
    return float(min(found))


def train(
    name: str, method: Method, tasks: Tasks, judge: Batch, seconds: float, looks: int
) -> tuple[list[float], int]:
    """The judge's loss at equal steps of processor time, and the gradient steps made."""
    optimizer = torch.optim.Adam(method.parameters, lr=3e-3)
    tuning = tasks.batch(100, 50)
    found, spent, steps = [judged(name, method, judge, tuning)], 0.0, 0
    for look in range(1, looks + 1):
        while spent < seconds * look / looks:
            began = time.process_time()
            loss = method.loss(tasks.batch(TASKS, ASKED))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            spent, steps = spent + time.process_time() - began, steps + 1
        found.append(judged(name, method, judge, tuning))
    return found, steps


def sets_of_classes(seed: int, device: str) -> tuple[Tensor, Tensor]:
    """Rewards by class ``(sets, 10)``: sets to train on, and all others."""
    members = torch.tensor(list(itertools.combinations(range(10), 5)))
    rewards = torch.zeros(len(members), 10, dtype=torch.float64).scatter_(1, members, 1.0)
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(seed))
    rewards = rewards[order].to(device)
    return rewards[:KNOWN_SETS], rewards[KNOWN_SETS:]


def run(options: argparse.Namespace) -> dict[str, list[list[float]]]:
    images, classes = digits(options.device)
    curves: dict[str, list[list[float]]] = {}
    for seed in range(options.seed, options.seed + options.seeds):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
        mine, unseen = (part.to(options.device) for part in order.split([1200, len(images) - 1200]))
        known, other = sets_of_classes(seed, options.device)
        judge = Tasks(images[unseen], classes[unseen], other, options.shots, seed).batch(100, 200)
        for name, method in methods(seed, options.device).items():
            tasks = Tasks(images[mine], classes[mine], known, options.shots, seed)
            found, steps = train(name, method, tasks, judge, options.seconds, options.looks)
            curves.setdefault(name, []).append(found)
            print(
                f"seed {seed} {name:10} {steps:>6} steps in {options.seconds:g} s:"
                f" loss on new tasks {found[0]:.4f} -> {found[-1]:.4f}",
                flush=True,
            )
    return curves


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__, "4 s per method, 2 seeds", "bilevel_features.png")
    parser.add_argument("--seconds", type=float, help="processor time of each method and seed")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--shots", type=int, default=10, help="rows that a head is fitted to")
    parser.add_argument("--looks", type=int, default=12)
    options = parser.parse_args(arguments)
    options.seconds = options.seconds or (4.0 if options.quick else 20.0)
    options.seeds = options.seeds or (2 if options.quick else 5)
    torch.set_num_threads(1)
    curves = run(options)
    for name, rows in curves.items():
        final = [row[-1] for row in rows]
        print(f"{name:10} {sum(final) / len(final):.4f} after {options.seconds:g} s")
    for other in (UNROLLED, TWO_STAGE):
        pairs = zip(curves[IMPLICIT], curves[other], strict=True)
        gains = torch.tensor([theirs[-1] - mine[-1] for mine, theirs in pairs])
        print(f"{IMPLICIT} ends below {other} by {paired(gains)}")
    times = [options.seconds * look / options.looks for look in range(options.looks + 1)]
    save(race_plot(times, curves), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
