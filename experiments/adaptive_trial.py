"""An adaptive trial: response-adaptive allocation, interim analyses, early stopping.

Patients of different severity come one by one. Each gets the treatment that has done best so far
with probability 0.7, else one at random: the classical interval is not valid for such data, whoever
looks. After every block the trial is analysed and stops for success as soon as some treatment is
surely better than the control.

    python experiments/adaptive_trial.py            # one trial
    python experiments/adaptive_trial.py --repeat 200   # coverage under stopping, some minutes
    python experiments/adaptive_trial.py --quick
"""

import argparse
import sys

import numpy as np

import torchglb as glb

ARMS = ["control", "low", "high"]
EFFECTS = np.array([0.0, 0.1, 1.4])
SEVERITY = -1.0  # log-odds of recovery per unit
FORMULA = "recovered ~ severity + C(arm)"
SCALER = glb.Scaler(ranges={"severity": (0.0, 2.0), "arm": ARMS})
CONTRASTS = ("C(arm)[low] - C(arm)[control]", "C(arm)[high] - C(arm)[control]")


class Trial:
    """A trial that goes on: what was seen decides who gets what."""

    def __init__(self, seed: int, effects: np.ndarray) -> None:
        self.rng, self.effects = np.random.default_rng(seed), effects
        self.recovered, self.treated = np.ones(3), 2.0 * np.ones(3)

    def block(self, n: int) -> dict[str, list[float | str]]:
        """The next n patients."""
        rows: dict[str, list[float | str]] = {"severity": [], "arm": [], "recovered": []}
        for _ in range(n):
            severity = float(self.rng.uniform(0.0, 2.0))
            best = int(np.argmax(self.recovered / self.treated))
            arm = best if self.rng.random() < 0.7 else int(self.rng.integers(3))
            z = 0.5 + SEVERITY * severity + self.effects[arm]
            outcome = float(self.rng.random() < 1.0 / (1.0 + np.exp(-z)))
            self.recovered[arm] += outcome
            self.treated[arm] += 1.0
            rows["severity"].append(severity)
            rows["arm"].append(ARMS[arm])
            rows["recovered"].append(outcome)
        return rows


def run(seed: int, effects: np.ndarray, blocks: int, size: int, talk: bool) -> bool:
    """One trial; whether the intervals at its end hold the true effects."""
    trial = Trial(seed, effects)
    fit = glb.glm(FORMULA, trial.block(size), family="bernoulli", scaler=SCALER, rank="allow")
    for look in range(1, blocks + 1):
        found = fit.contrast(*CONTRASTS)
        lower = found.columns["lower"]
        if talk:
            ends = ", ".join(
                f"{name.split('[')[1].split(']')[0]} [{low:.2f}, {high:.2f}]"
                for name, low, high in zip(found.names, lower, found.columns["upper"], strict=True)
            )
            print(f"look {look}, {len(fit)} patients: effect over control {ends}")
        if (lower > 0).any() or look == blocks:
            break
        fit.update(trial.block(size))
    if talk:
        print()
        print(fit.summary(intervals="both"))
    truth = effects[1:] - effects[0]
    return bool(((lower <= truth) & (truth <= found.columns["upper"])).all())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small version of it")
    parser.add_argument("--repeat", type=int, default=0, help="trials, to count the misses")
    parser.add_argument("--seed", type=int, default=2)
    options = parser.parse_args(arguments)
    blocks, size = (3, 60) if options.quick else (25, 100)
    run(options.seed, EFFECTS, blocks, size, talk=True)
    if options.repeat:
        held = [run(1000 + k, EFFECTS, blocks, size, talk=False) for k in range(options.repeat)]
        print(f"\nthe intervals at the stop held both effects in {sum(held)} of {len(held)} trials")
    return 0


if __name__ == "__main__":
    sys.exit(main())
