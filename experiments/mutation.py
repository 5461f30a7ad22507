"""Mutation test of the certificates: ``python experiments/mutation.py [--only TEXT] [--list]``.

In a copy of the project one line that a certificate rests on is damaged (a sign flipped, a term
dropped), and the tests that should notice are run. A mutant that survives is a hole in the tests.
Compiled functions are compiled anew where they changed, so all of it takes a while.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Mutant:
    """One damage.

    Attributes:
        name: what it does, in words.
        path: of the file, in the package.
        old: the text that stands there once.
        new: what it becomes.
        tests: files, and after a space an expression for pytest's ``-k``.
    """

    name: str
    path: str
    old: str
    new: str
    tests: str


MUTANTS = (
    Mutant(
        "Theorem 3.1 without its last d",
        "radii/theorems/theorem31.py",
        "    log_form = dim * torch.log(slope.clamp_min(dim) / dim) + dim\n",
        "    log_form = dim * torch.log(slope.clamp_min(dim) / dim)\n",
        "tests/radii/test_lipschitz.py",
    ),
    Mutant(
        "Theorem 3.2 without the gap of the estimate",
        "radii/theorems/theorem32.py",
        "return factor * (4.0 * S * S * regularization + radius + gap)",
        "return factor * (4.0 * S * S * regularization + radius)",
        "tests/radii/test_certificates.py tests/radii/test_lipschitz.py",
    ),
    Mutant(
        "the ridge of 3.2 not paid for",
        "radii/theorems/theorem32.py",
        "    ridge = lam * (S + center_norm).square()",
        "    ridge = 0.0 * lam",
        "tests/radii/test_certificates.py tests/radii/test_lipschitz.py",
    ),
    Mutant(
        "phi(D) with a wrong sign",
        "radii/theorems/theorem32.py",
        "(safe + torch.expm1(-safe)) / safe.square()",
        "(safe - torch.expm1(-safe)) / safe.square()",
        "tests/radii/test_certificates.py tests/radii/test_lipschitz.py",
    ),
    Mutant(
        "pac-bayes without the divergence",
        "radii/posterior/candidates.py",
        "return log_failure + divergence + at.loss + added + slack",
        "return log_failure + at.loss + added + slack",
        "tests/radii/test_posteriors.py",
    ),
    Mutant(
        "pac-bayes without the increments",
        "radii/posterior/candidates.py",
        "return log_failure + divergence + at.loss + added + slack",
        "return log_failure + divergence + at.loss + slack",
        "tests/radii/test_posteriors.py",
    ),
    Mutant(
        "a Gaussian prior that forgets where the posterior lies",
        "radii/posterior/candidates.py",
        "return 0.5 * (inverse_trace - point.shape[-1] + log_det + square) + LINEAR_ALGEBRA",
        "return 0.5 * (inverse_trace - point.shape[-1] + log_det) + LINEAR_ALGEBRA",
        "tests/radii/test_certificates.py",
    ),
    Mutant(
        "a Frank-Wolfe gap without the ball",
        "optim/ball.py",
        "return steepness * ((inside > 0) * inside + distance * distance) / (2.0 * radius)",
        "return steepness * (distance * distance) / (2.0 * radius)",
        "tests/optim/test_optim.py tests/mle/test_constrained.py",
    ),
    Mutant(
        "values that are feasible without paying for rounding",
        "ucb/bounds.py",
        "return (x * point).sum(-1) - paid * radius * length(x)",
        "return (x * point).sum(-1) + paid * radius * length(x)",
        "tests/test_payments.py",
    ),
    Mutant(
        "a cut that does not pay",
        "ucb/bounds.py",
        "return offset + paid, paid",
        "return offset - paid, paid",
        "tests/test_payments.py",
    ),
    Mutant(
        "e-values that err upwards",
        "inference/tests.py",
        "log_e = lower - evidence - 2.0 * eps * size",
        "log_e = lower - evidence + 2.0 * eps * size",
        "tests/test_payments.py",
    ),
    Mutant(
        "e-values against the wrong evidence",
        "inference/tests.py",
        "log_e = lower - evidence - 2.0 * eps * size",
        "log_e = lower + evidence - 2.0 * eps * size",
        "tests/inference/test_tests.py",
    ),
    Mutant(
        "sums that lose nothing",
        "rounding.py",
        "    return 1.0 + 0.5 * (BLOCK + tree)\n",
        "    return 1.0\n",
        "tests/test_rounding.py tests/docs/test_docstrings.py",
    ),
    Mutant(
        "rounding downwards",
        "rounding.py",
        "    return nearest + short\n",
        "    return nearest\n",
        "tests/test_rounding.py tests/test_float32.py",
    ),
    Mutant(
        "forms in an inverse whose residual costs nothing",
        "backend/inverse_forms.py",
        "    return form, doubt + 2 * (d + 2) * EPS * sizes + left / least\n",
        "    return form, 2 * (d + 2) * EPS * sizes\n",
        "tests/sets/test_rounding.py",
    ),
    Mutant(
        "a least eigenvalue that nobody has certified",
        "backend/inverse_forms.py",
        "    if not cholesky(matrix, -guess, factor):\n        return 0.0\n",
        "    guess *= 8.0\n",
        "tests/backend/test_inverse_forms.py",
    ),
    Mutant(
        "carried sums that lose nothing",
        "carried/rounding.py",
        "    return CHUNK + TERM + 4.0 + dim\n",
        "    return 0.0\n",
        "tests/carried/test_carried_loss.py tests/ucb/test_incremental.py",
    ),
    Mutant(
        "a carried loss without its remainder",
        "carried/taylor.py",
        "        growth * local / FACTORIAL[order + 1],\n",
        "        0.0 * known,\n",
        "tests/carried/test_carried_loss.py tests/ucb/test_incremental.py",
    ),
    Mutant(
        "a carried gradient without its remainder",
        "carried/taylor.py",
        "        known * math.sqrt(local) / FACTORIAL[order],\n",
        "        0.0 * known,\n",
        "tests/carried/test_carried_loss.py tests/ucb/test_incremental.py",
    ),
    Mutant(
        "a compiled cut that is rounded down",
        "ucb/kernels.py",
        "chord * math.sqrt(across) + rounding",
        "chord * math.sqrt(across) - rounding",
        "tests/test_payments.py",
    ),
    Mutant(
        "compiled points that are feasible by rounding",
        "ucb/kernels.py",
        "safe = level - 8.0 * EPS * (2.0 * abs(level) + abs(center_loss))",
        "safe = level + 8.0 * EPS * (2.0 * abs(level) + abs(center_loss))",
        "tests/test_payments.py",
    ),
    Mutant(
        "a centred prior that does not pay for being chosen",
        "radii/posterior/centred.py",
        "return at.loss + costs[..., 0] - math.log(weight * delta)",
        "return at.loss + costs[..., 0] - math.log(delta)",
        "tests/radii/test_centred.py",
    ),
    Mutant(
        "centred priors whose weights add up to more than one",
        "radii/posterior/centred.py",
        "each = math.log((1.0 - self.uniform) / self.scales)",
        "each = math.log(1.0 - self.uniform)",
        "tests/radii/test_centred.py tests/sets/test_centred.py",
    ),
    Mutant(
        "a logistic family that is less curved than it says",
        "families/bernoulli.py",
        "return math.tanh(0.5 * radius)",
        "return math.tanh(0.25 * radius)",
        "tests/families/test_families.py",
    ),
    Mutant(
        "the least curvature of a logistic row taken on the wrong side",
        "families/bernoulli.py",
        "(outwards * (e / (1.0 + e)) - log1p(e))",
        "(outwards * (1.0 / (1.0 + e)) - log1p(e))",
        "tests/ucb/test_minorant.py",
    ),
    Mutant(
        "rows that leave the ball outwards less than they may",
        "families/row_terms.py",
        "ball * reach - abs(z)",
        "ball * reach - 2.0 * abs(z)",
        "tests/ucb/test_minorant.py",
    ),
    Mutant(
        "a minorant used beyond its reach",
        "ucb/incremental/minorant.py",
        "    if inside and (whole or _is_within(round_, found, reach)):\n",
        "    if inside:\n",
        "tests/ucb/test_minorant.py",
    ),
    Mutant(
        "a minorant of rows that were replaced",
        "ucb/incremental/rounds.py",
        "            self._minorants[:] = 0.0\n",
        "",
        "tests/ucb/test_minorant.py",
    ),
    Mutant(
        "an ellipsoid of half the slack",
        "ucb/incremental/minorant.py",
        "    slack = level.high - loss + paid\n",
        "    slack = 0.5 * (level.high - loss) + paid\n",
        "tests/ucb/test_minorant.py",
    ),
)


def survives(copy: Path, mutant: Mutant | None, tests: str) -> bool:
    """Whether the tests pass with the damage (or, with None, without any)."""
    path = copy / "torchglb" / mutant.path if mutant else None
    whole = path.read_text(encoding="utf-8") if path else ""
    if path and mutant:
        if whole.count(mutant.old) != 1:
            raise SystemExit(f"{mutant.path}: expected once, got {whole.count(mutant.old)}")
        path.write_text(whole.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests.split()],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
    finally:
        if path:
            path.write_text(whole, encoding="utf-8")
    if done.returncode not in (0, 1):
        raise SystemExit(done.stdout + done.stderr)
    return done.returncode == 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="those whose name or file contains this")
    parser.add_argument("--list", action="store_true", help="name them and stop")
    parser.add_argument("--no-baseline", action="store_true", help="trust that the tests pass")
    options = parser.parse_args(arguments)
    chosen = [m for m in MUTANTS if options.only in m.name or options.only in m.path]
    if options.list:
        print("\n".join(f"{m.path}: {m.name}" for m in chosen))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "torchglb-mutant"
        shutil.copytree(
            PROJECT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "results", "site")
        )
        if not options.no_baseline:
            tests = " ".join(dict.fromkeys(" ".join(m.tests for m in chosen).split()))
            if not survives(copy, None, tests):
                raise SystemExit("the tests fail without any mutant: mend them first")
        print("| certificate damaged | file | noticed | s |\n|---|---|---|---|", flush=True)
        alive = 0
        for mutant in chosen:
            began = time.perf_counter()
            survived = survives(copy, mutant, mutant.tests)
            alive += survived
            answer = "**no**" if survived else "yes"
            seconds = time.perf_counter() - began
            print(f"| {mutant.name} | `{mutant.path}` | {answer} | {seconds:.0f} |", flush=True)
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
