"""How many replicates of a bandit a device plays at once: replicate-rounds per second.

``python experiments/gpu_scaling.py --device cuda``

OFUGLB and OFUGLB-e on the paper's time-varying logistic bandit (K = 20), for a sweep of replicates
and dimensions. A replicate-round is one choice and one update of one replicate. Every policy has
seen the same rows before the clock starts; what is measured follows on a few rounds that warm up.
"""

import argparse
import sys
import time

import torch
from torch import Tensor

import torchglb as glb
from torchglb import policies

POLICIES = ("ofuglb", "ofuglb-e")
ARMS, RADIUS, DELTA = 20, 4.0, 0.05
FAMILY = glb.Bernoulli()


def unit_vectors(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    """Vectors uniform on the sphere, on the device of the generator."""
    x = torch.randn(shape, generator=generator, dtype=dtype, device=generator.device)
    return torch.nn.functional.normalize(x, dim=-1)


def wait_for(device: torch.device) -> None:
    """Until the device has done everything it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def rate(
    name: str,
    d: int,
    replicates: int,
    *,
    rounds: int,
    known: int,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
) -> float:
    """Replicate-rounds per second of one policy.

    Args:
        name: of the policy.
        d: the dimension.
        replicates: how many run at once.
        rounds: how many are timed, after a quarter as many that are not.
        known: rows that the policy has seen before.
        device: where everything lives.
        dtype: float64 or float32.
        seed: of arms and rewards.
    """
    generator = torch.Generator(device).manual_seed(seed)
    theta = torch.full((d,), (RADIUS - 1) / d**0.5, dtype=dtype, device=device)
    policy = policies.make(
        name,
        family=FAMILY,
        domain=glb.Ball(d, RADIUS),
        delta=DELTA,
        batch_shape=(replicates,),
        validate=False,
        dtype=dtype,
        device=device,
    )
    X = unit_vectors(generator, replicates, known, d, dtype=dtype)
    policy.update(X, FAMILY.sample(X @ theta, generator))
    everyone = torch.arange(replicates, device=device)

    def play(count: int) -> None:
        for _ in range(count):
            arms = unit_vectors(generator, replicates, ARMS, d, dtype=dtype)
            x = arms[everyone, policy.select(arms)]
            policy.update(x, FAMILY.sample(x @ theta, generator))

    play(max(1, rounds // 4))
    wait_for(device)
    began = time.perf_counter()
    play(rounds)
    wait_for(device)
    return rounds * replicates / (time.perf_counter() - began)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small sweep: does it run at all?")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    parser.add_argument("--replicates", type=int, nargs="+", help="1 10 100 1000")
    parser.add_argument("--dims", type=int, nargs="+", help="2 5 10 20")
    parser.add_argument("--rounds", type=int, help="timed rounds; 40")
    parser.add_argument("--known", type=int, help="rows seen before; 1000")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    small = options.quick
    options.replicates = options.replicates or ([1, 4] if small else [1, 10, 100, 1000])
    options.dims = options.dims or ([2, 3] if small else [2, 5, 10, 20])
    options.rounds = options.rounds or (2 if small else 40)
    options.known = options.known or (20 if small else 1000)
    if min(options.rounds, options.known, *options.replicates, *options.dims) < 1:
        parser.error("--replicates, --dims, --rounds and --known must be at least 1")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    print(f"device {device}{threads}, {options.dtype}, K = {ARMS}, S = {RADIUS:g}")
    print(f"rows seen before: {options.known}; rounds timed: {options.rounds}")
    print("replicate-rounds per second:")
    print(f"{'d':>4} {'replicates':>11}" + "".join(f"{name:>12}" for name in POLICIES))
    for d in options.dims:
        for replicates in options.replicates:
            rates = [
                rate(
                    name,
                    d,
                    replicates,
                    rounds=options.rounds,
                    known=options.known,
                    device=device,
                    dtype=dtype,
                    seed=options.seed,
                )
                for name in POLICIES
            ]
            row = "".join(f"{value:>12.0f}" for value in rates)
            print(f"{d:>4} {replicates:>11}{row}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
