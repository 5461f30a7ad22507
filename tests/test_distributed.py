"""Histories sharded over gloo ranks: the same numbers and choices as in one place.

Two ranks run every case of ``CASES``, sharded, and the first of them whole as well: they are
compared with each other (bit by bit) and with the whole. A third joins them for some cases, and for
what goes wrong. The three processes are started once for all tests.
"""

import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import torchglb as glb
from torchglb import policies
from torchglb.distributed import WHOLE, LostRankError, ProcessShards, sharded
from torchglb.errors import InputError
from torchglb.policies.exact import ExactPolicy
from torchglb.radii import (
    Centred,
    GaussianPrior,
    Mixture,
    PACBayes,
    gaussian_prior_level,
    mixture_level,
    pac_bayes_level,
)

D = torch.float64
AGREEMENT = 1e-10
#: rows in several processes are solved by torch, others by compiled code: both are asked for more
#: digits than are compared
CLOSED = 1e-12
BY_ROWS = PACBayes(increments="rows")


def numbers(seed, *shape):
    return torch.rand(shape, dtype=D, generator=torch.Generator().manual_seed(seed))


def rows(n, d, batch=(2,), seed=0, family=None):
    """Unit features and rewards of a parameter of norm 2."""
    X = torch.nn.functional.normalize(numbers(seed, *batch, n, d) - 0.5, dim=-1)
    theta = 2.0 * torch.nn.functional.normalize(numbers(seed + 1, d) - 0.5, dim=-1)
    family = glb.Bernoulli() if family is None else family
    mean = family.mean(X @ theta)
    if isinstance(family, glb.Bernoulli):
        return X, (numbers(seed + 2, *batch, n) < mean).to(D)
    return X, (mean + numbers(seed + 2, *batch, n)).floor()


def history(n=61, d=3, family=None, **options):
    kept = glb.History(d, (2,), family=family or glb.Bernoulli(), **options)
    X, r = rows(n, d, family=family)
    kept.append(X[:, :7], r[:, :7])
    for s in range(7, n):
        kept.append(X[:, s], r[:, s])
    return kept


def fit(family, solver="newton", **options):
    found = glb.constrained_mle(
        family, history(family=family, **options), glb.Ball(3, 3.0), solver=solver
    )
    return found.theta, found.loss, found.gradient, found.hessian


def loss_parts():
    loss = glb.NegativeLogLikelihood.of(
        glb.Poisson(),
        history(family=glb.Poisson()),
        regularization=0.3,
        tilt=numbers(5, 2, 3),
    )
    one, many = numbers(3, 2, 3), numbers(4, 2, 6, 3)
    return loss(one), loss(many), *loss.value_and_gradient(many), *loss.expand(one)


def native():
    loss = glb.NegativeLogLikelihood.of(glb.Bernoulli(), history())
    at_zero = loss(torch.zeros(2, 3, dtype=D))
    program = glb.SublevelProgram(loss, glb.Ball(3, 3.0), at_zero)
    arms = numbers(6, 2, 5, 3) - 0.5
    found = glb.support(program, arms, tol=CLOSED)
    ball = glb.argmax_ball(program, throw=False)
    # the longest theta of the set is not unique where the set reaches the sphere
    # and a maximiser is known to the root of the gap only: what it attains is compared
    attained = (arms * found.theta).sum(-1)
    return found.upper, found.lower, attained, ball.upper, ball.lower


def levels():
    loss = glb.NegativeLogLikelihood.of(glb.Bernoulli(), history())
    centre, ball = numbers(7, 2, 3) - 0.5, glb.Ball(3, 3.0)
    return (
        pac_bayes_level(loss, ball, 0.05, centre),
        pac_bayes_level(loss, ball, 0.05, centre, increments="aggregated"),
        gaussian_prior_level(loss, 0.05, centre, 2.0),
        mixture_level(loss, ball, 0.05, centre),
    )


def intervals(radius, ellipsoidal=False, S=3.0):
    sequence = glb.ConfidenceSequence(
        glb.Bernoulli(), glb.Ball(2, S), 0.05, radius, batch_shape=(2,), ellipsoidal=ellipsoidal
    )
    X, r = rows(40, 2)
    found = []
    for start in range(0, 40, 10):
        sequence.update(X[:, start : start + 10], r[:, start : start + 10])
        now = sequence.current()
        ends = now.interval(numbers(9, 2, 4, 2) - 0.5, **({} if ellipsoidal else {"tol": CLOSED}))
        found += [*ends, now.slack(torch.zeros(2, 2, dtype=D))]
    return found


def scores(policy, arms):
    """Those of the policy; where a solver finds them, to more digits than it is asked for there."""
    if isinstance(policy, ExactPolicy):
        return policy.confidence_set().interval(arms, tol=CLOSED).upper
    return policy.scores(arms)


def play(name, family=None, d=3, rounds=6, known=2000, **options):
    """The choices and scores of a short run after ``known`` rows; rewards depend on the choices."""
    family = family or glb.Bernoulli()
    policy = policies.make(
        name, family=family, domain=glb.Ball(d, 2.0), batch_shape=(2,), horizon=rounds, **options
    )
    X, r = rows(known, d, family=family)
    policy.update(X, r)
    theta, found = 1.2 * torch.ones(d, dtype=D) / math.sqrt(d), []
    for t in range(rounds):
        arms = torch.nn.functional.normalize(numbers(100 + t, 2, 6, d) - 0.5, dim=-1)
        if t % 5 == 0:
            found.append(scores(policy, arms))
        chosen = policy.select(arms)
        x = arms[torch.arange(2), chosen]
        mean = family.mean(x @ theta)
        draw = numbers(1000 + t, 2)
        bernoulli = isinstance(family, glb.Bernoulli)
        policy.update(x, (draw < mean).to(D) if bernoulli else (mean + draw).floor())
        found.append(chosen.to(D))
    return found


CASES = {
    "loss": loss_parts,
    "mle logistic": lambda: fit(glb.Bernoulli()),
    "mle poisson": lambda: fit(glb.Poisson()),
    "mle by lbfgs": lambda: fit(glb.Bernoulli(), solver="lbfgs"),
    "mle of merged rows": lambda: fit(glb.Bernoulli(), aggregate=True),
    "native support": native,
    "levels": levels,
    "whole": lambda: history(n=9).whole()[:2],
    # settings whose levels depend on the rows alone: a held posterior is another one where rows are
    # gathered for the search, valid as well and within the radius' tolerance
    "pac-bayes": lambda: intervals(BY_ROWS),
    "mixture": lambda: intervals(Mixture(BY_ROWS)),
    # bounds pay for rounding in a ball of 100 S, whoever sums: with S = 3 some 1e-9
    "gaussian-prior": lambda: intervals(GaussianPrior(increments="rows"), S=0.3),
    "centred": lambda: intervals(Centred(inner=BY_ROWS)),
    "mean-loss": lambda: intervals("mean-loss"),
    "lipschitz": lambda: intervals("lipschitz"),
    "ellipsoid": lambda: intervals(BY_ROWS, ellipsoidal=True),
    "ofuglb": lambda: play("ofuglb"),
    "ofuglb, poisson": lambda: play("ofuglb", glb.Poisson()),
    "ofuglb-pb": lambda: play("ofuglb-pb", radius=BY_ROWS),
    "ofuglb-e": lambda: play("ofuglb-e"),
    "ofuglb-e, gaussian": lambda: play("ofuglb-e", glb.Gaussian(0.5)),
    "ofuglb-e, few rows": lambda: play("ofuglb-e", d=12, known=2, ellipsoid="fixed_point"),
    "evill": lambda: play("evill"),
    "emk": lambda: play("emk", glb.Gaussian(0.1), known=10),
    "rs-glincb": lambda: play("rs-glincb", known=30, scale=1e-3),
    # the proven constants leave the whole ball after so few rows
    "ofulog-r": lambda: play("ofulog-r", constants="public"),
    "glm-ucb": lambda: play("glm-ucb"),
}


# ---- what both processes do ------------------------------------------------------------------------


def refusals():
    """Every refusal of a sharded history, as messages."""
    found = []

    def refused(call):
        try:
            call()
        except InputError as error:
            found.append(str(error))
        else:
            found.append("accepted")

    kept, X = history(), numbers(1, 2, 3)
    before = len(kept)
    refused(lambda: kept.append(0.1 * X.clone().requires_grad_(), torch.ones(2, dtype=D)))
    assert len(kept) == before
    loss = glb.NegativeLogLikelihood.of(glb.Bernoulli(), kept)
    refused(lambda: loss(X.clone().requires_grad_()))
    refused(lambda: torch.func.grad(lambda t: loss.value(t).sum())(X))
    program = glb.SublevelProgram(loss, glb.Ball(3, 3.0), loss(0 * X) + 1.0)
    refused(lambda: glb.support(program, X[:, None], solver="conic"))
    refused(lambda: glb.constrained_mle(glb.Bernoulli(), glb.History(3), glb.Ball(3, 3.0)))
    refused(lambda: history(n=5, aggregate=True).whole())
    whole = glb.History(3, (2,)).state_dict()
    whole.pop("shard")
    refused(lambda: kept.load_state_dict(whole))
    refused(lambda: kept.load_state_dict(kept.state_dict() | {"shard": [0, 3]}))
    return found


def saved_and_continued():
    """A history that is saved, loaded and continued, and where its rows are."""
    X, r = rows(11, 3)
    kept, other = glb.History(3, (2,)), glb.History(3, (2,))
    kept.append(X[:, :8], r[:, :8])
    other.load_state_dict(kept.state_dict())
    other.append(X[:, 8:], r[:, 8:])
    return [*other.whole()[:2], X, r], len(other), other.X.shape[-2]


def of_two(rank):
    report = {}
    for name, case in CASES.items():
        alone = case() if rank == 0 else None
        with sharded(checked=True):
            shared = case()
        report[name] = {"alone": alone, "shared": [t.clone() for t in shared]}
    with sharded():
        report["refusals"] = refusals()
        report["saved"] = saved_and_continued()
    return report


#: the cases of three ranks
SOME = ("loss", "mle logistic", "mle poisson", "ofuglb-e")


def of_three():
    with sharded(checked=True):
        return {name: [t.clone() for t in CASES[name]()] for name in SOME}


def disturbed(rank, fault):
    """Rank 1 is given another row, or rank 2 dies: the error, and how many rows there are then."""
    with sharded(checked=True):
        kept = glb.History(3, (2,))
    X, r = rows(8, 3)
    kept.append(X[:, :4], r[:, :4])
    if fault == "died" and rank == 2:
        os._exit(7)
    if fault == "differs" and rank == 1:
        r = r.clone()
        r[0, 5] = 1 - r[0, 5]
    try:
        kept.append(X[:, 4:], r[:, 4:])
        glb.constrained_mle(glb.Bernoulli(), kept, glb.Ball(3, 3.0), validate=False)
    except (InputError, LostRankError) as error:
        return f"{type(error).__name__}: {error}", len(kept)
    return "no error", len(kept)


def main(rank, folder):
    torch.set_num_threads(1)

    def meet(name, ranks):
        store = f"file://{folder}/{name}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)

    report, done = {}, Path(folder, "done")
    if rank < 2:
        meet("two", 2)
        report["two"] = of_two(rank)
        dist.destroy_process_group()
        done.touch()
    while not done.exists():  # gloo would wait by asking without a pause
        time.sleep(0.05)
    meet("three", 3)
    report["three"] = of_three()
    dist.destroy_process_group()
    meet("differs", 3)
    report["differs"] = disturbed(rank, "differs")
    dist.destroy_process_group()
    torch.save(report, f"{folder}/{rank}.pt")
    meet("died", 3)
    report["died"] = disturbed(rank, "died")
    torch.save(report, f"{folder}/{rank}.pt")
    # gloo cannot take down a group that has lost a rank: now and then its threads abort the
    # process when the interpreter ends, long after the report is on disk
    os._exit(0)


@pytest.fixture(scope="module")
def all_reports():
    """Of the three ranks, the last of which dies in the end."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        running = [
            subprocess.Popen(
                [sys.executable, __file__, folder, str(rank)],
                stderr=subprocess.PIPE,
                env=environment,
            )
            for rank in range(3)
        ]
        try:
            for process, code in zip(running, (0, 0, 7), strict=True):
                error = process.communicate(timeout=300)[1].decode()
                assert process.returncode == code, error
        finally:
            for process in running:
                process.kill()
        return [torch.load(f"{folder}/{rank}.pt") for rank in range(3)]


@pytest.fixture(scope="module")
def reports(all_reports):
    """What two ranks found."""
    return [report["two"] for report in all_reports[:2]]


# ---- three ranks, one of which goes wrong ------------------------------------------------------------


@pytest.mark.parametrize("case", SOME)
def test_three_ranks_agree_with_one(case, reports, all_reports):
    found = [report["three"][case] for report in all_reports]
    for one, three in zip(reports[0][case]["alone"], found[0], strict=True):
        torch.testing.assert_close(three, one, rtol=AGREEMENT, atol=AGREEMENT)
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


def test_the_rank_that_was_given_another_row_is_named(all_reports):
    for report in all_reports:
        error, kept = report["differs"]
        expected = "InputError: rows: expected the same on all ranks, got different ones on rank 1"
        assert error == expected
        assert kept == 4  # the refused rows are nowhere


def test_a_rank_that_dies_is_an_error_that_says_so(all_reports):
    for rank, report in enumerate(all_reports[:2]):
        assert report["died"][0].startswith(
            f"LostRankError: rank {rank}: another of the 3 ranks that share the history has ended"
        )
    assert "died" not in all_reports[2]


# ---- what they must have found ----------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_agree_with_one(case, reports):
    alone, first = reports[0][case]["alone"], reports[0][case]["shared"]
    assert len(alone) == len(first) > 0
    for one, two in zip(alone, first, strict=True):
        torch.testing.assert_close(two, one, rtol=AGREEMENT, atol=AGREEMENT)


@pytest.mark.parametrize("case", CASES)
def test_both_ranks_have_the_same_bits(case, reports):
    first, second = (report[case]["shared"] for report in reports)
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith(("ofu", "emk", "ev"))])
def test_scores_tell_arms_apart(case, reports):
    """The agreement above is not that of bounds at the ball, which no row has touched."""
    scores = [t for t in reports[0][case]["shared"] if t.ndim == 2]
    assert scores
    assert all((t.amax(-1) - t.amin(-1) > 0.05).all() for t in scores)


def test_rows_are_shared_out_evenly_and_survive_a_save(reports):
    shares = []
    for report in reports:
        (X, r, all_X, all_r), count, here = report["saved"]
        assert torch.equal(X, all_X)
        assert torch.equal(r, all_r)
        assert count == 11
        shares.append(here)
    assert shares == [6, 5]


def test_what_cannot_be_sharded_is_refused(reports):
    for report in reports:
        expected = [
            "without derivatives",
            "no derivative",
            "no derivative",
            "'native' for a sharded history",
            "checked on arrival",
            "not both sharded and aggregated",
            "state: expected the entries",
            "state['shard']: expected the share",
        ]
        for message, words in zip(report["refusals"], expected, strict=True):
            assert words in message


def test_a_process_group_is_needed():
    with pytest.raises(InputError, match="init_process_group"), sharded():
        pass


def test_outside_the_context_a_history_is_whole():
    assert glb.History(2).shards is WHOLE


def test_shares_are_disjoint_and_complete(monkeypatch):
    """Whatever blocks rows arrive in, each stays on one rank, in order."""
    for ranks in (1, 2, 3, 5):
        kept = {rank: [] for rank in range(ranks)}
        for rank, mine in kept.items():
            monkeypatch.setattr(dist, "is_initialized", lambda: True)
            monkeypatch.setattr(dist, "get_rank", lambda group, rank=rank: rank)
            monkeypatch.setattr(dist, "get_world_size", lambda group, ranks=ranks: ranks)
            shards, before = ProcessShards(), 0
            for size in (1, 4, 0, 7, 2):
                mine += list(range(before, before + size))[shards.mine(before)]
                before += size
                assert shards.owned(before) == len(mine)
            assert mine == list(range(rank, before, ranks))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(int(sys.argv[2]), sys.argv[1])
