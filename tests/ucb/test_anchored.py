"""The anchored program over a growing history: the same choices as from scratch, at no pass."""

import math

import pytest
import torch

import torchglb as glb
from torchglb.optim import Status
from torchglb.ucb import native_support

DELTA = 0.05


@pytest.fixture(autouse=True)
def one_thread():
    """These problems are so small that a second thread only waits for the first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def theorem_31(t, d, S):
    """beta^2 of Theorem 3.1 for the logistic model, before the observation of round t."""
    L = (1 + S / 2) * (t - 1)
    return math.log(1 / DELTA) + d * math.log(max(math.e, 2 * math.e * S * L / d))


class Bandit:
    """Replicates of a bandit with new arms in every round, all from one generator.

    Half of the parameters point along the diagonal, the others anywhere; all have norm S - 1.
    """

    def __init__(self, family, d, S, replicates, K=20, seed=0, fixed=False):
        self.family, self.d, self.K = family, d, K
        self.generator = torch.Generator().manual_seed(seed)
        self.batch = (replicates,)
        theta = torch.randn(replicates, d, generator=self.generator, dtype=torch.float64)
        theta[: (replicates + 1) // 2] = 1.0
        self.theta = (S - 1) * torch.nn.functional.normalize(theta, dim=-1)
        self.fixed = self._draw() if fixed else None

    def _draw(self):
        shape = (*self.batch, self.K, self.d)
        x = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        length = torch.rand((*shape[:-1], 1), generator=self.generator, dtype=torch.float64)
        return torch.nn.functional.normalize(x, dim=-1) * length ** (1 / self.d)

    def arms(self):
        return self._draw() if self.fixed is None else self.fixed

    def play(self, arms, index):
        x = arms[torch.arange(arms.shape[0]), index]
        return x, self.family.sample((x * self.theta).sum(-1), self.generator)


class FromScratch:
    """Every round solved anew: the estimate, then every arm to tolerance."""

    def __init__(self):
        self.rounds, self.ties = 0, 0

    def check(self, program, arms, index, *, radius=None, level=None, ridge=0.0):
        family, domain = program.family, program.domain
        rows = program.history.rows()
        fit = glb.constrained_mle(
            family, rows, domain, regularization=ridge, tol=1e-12, throw=False, validate=False
        )
        B = fit.loss + radius if level is None else level
        loss = glb.NegativeLogLikelihood(family, *rows, regularization=ridge)
        scratch = glb.SublevelProgram(loss, domain, B)
        result = native_support(scratch, arms, center=fit.theta, tol=1e-7, throw=False)
        assert (result.status == Status.CONVERGED).all(), result.status
        value = result.upper
        best, winner = value.max(-1)
        chosen = value.gather(-1, index[:, None])[:, 0]
        differs = index != winner
        # a different arm only where it ties, up to both gaps and the tolerance of the level
        assert (best - chosen)[differs].le(1e-6 * (1 + best.abs())[differs]).all(), best - chosen
        self.rounds += index.numel()
        self.ties += int(differs.sum())


def check_bounds(choice):
    """The winner is certain: its lower bound beats all other upper bounds, up to the tolerance."""
    lead = choice.lower.gather(-1, choice.index[:, None])
    rivals = choice.upper.scatter(-1, choice.index[:, None], -torch.inf)
    assert (choice.status == Status.CONVERGED).all()
    assert (choice.lower <= choice.upper).all()
    assert (rivals - lead <= 1e-7 * (1 + lead.abs())).all()


def check_carried(program):
    """Everything carried forward against a recomputation from the history."""
    for anchor in range(program._rounds.anchors.number):
        program.self_check(anchor)


def check_minimum(program, ridge=0.0):
    """theta lies in the ball, and its loss is within ``level_tol`` of the smallest."""
    minimum = program.minimum(ridge)
    rows = program.history.rows()
    fit = glb.constrained_mle(
        program.family, rows, program.domain, regularization=ridge, tol=1e-13, throw=False
    )
    loss = glb.NegativeLogLikelihood(program.family, *rows, regularization=ridge)
    rounding = 1e-12 * (1 + fit.loss.abs())
    assert program.domain.contains(minimum.theta).all()
    assert (loss(minimum.theta) <= minimum.loss + rounding).all()
    assert (minimum.loss <= fit.loss + program.level_tol + rounding).all()
    assert (minimum.loss - minimum.lower_bound <= program.level_tol).all()
    assert (minimum.lower_bound <= fit.loss + rounding).all()


def run(bandit, S, rounds, *, radius=theorem_31, every=1, **options):
    """Plays the rounds, comparing with a solve from scratch; returns the program and its passes."""
    d = bandit.d
    program = glb.AnchoredProgram(bandit.family, glb.Ball(d, S), bandit.batch, **options)
    scratch, passes = FromScratch(), []
    for t in range(1, rounds + 1):
        arms = bandit.arms()
        beta2 = radius(t, d, S)
        choice = program.argmax(arms, radius=beta2)
        check_bounds(choice)
        if t % every == 0:
            scratch.check(program, arms, choice.index, radius=beta2)
        passes.append(choice.passes)
        program.append(*bandit.play(arms, choice.index))
    assert scratch.ties <= 0.01 * scratch.rounds
    return program, torch.stack(passes)


# ---- the same choices -----------------------------------------------------------------------


@pytest.mark.parametrize(("d", "S"), [(2, 4.0), (5, 4.0), (2, 10.0)])
def test_bernoulli_run_equals_from_scratch(d, S):
    program, passes = run(Bandit(glb.Bernoulli(), d, S, 4), S, 150)
    check_carried(program)
    check_minimum(program)
    assert (program.passes >= passes.sum(0)).all()  # the check of the minimum may take one more
    assert passes[50:].mean() < {2: 1.0, 5: 5.0}[d]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("d", "anchors", "limit"),
    # by default there are fewer anchors at d = 10, and a pass more: together that is faster
    [(2, None, 0.3), (5, None, None), (10, None, None), (10, 1000, 3.0)],
)
def test_long_run_equals_from_scratch(d, anchors, limit):
    """2000 rounds: the same arm as from scratch in every one, at almost no pass."""
    S = 4.0
    program, passes = run(Bandit(glb.Bernoulli(), d, S, 4), S, 2000, anchors=anchors)
    check_carried(program)
    check_minimum(program)
    average = passes[500:].mean(0)
    print(f"d = {d}: passes per round {average.tolist()}")
    if limit is not None:
        assert average.mean() <= limit


@pytest.mark.parametrize("family", [glb.Gaussian(0.5), glb.Poisson()], ids=["gaussian", "poisson"])
@pytest.mark.parametrize("d", [2, 4])
def test_other_families_equal_from_scratch(family, d):
    S = 2.5

    def radius(t, d, S):
        return 3.0 + d * math.log(1 + t)

    program, _ = run(Bandit(family, d, S, 3), S, 100, radius=radius)
    check_carried(program)
    check_minimum(program)


@pytest.mark.parametrize("d", [1, 3])
def test_few_dimensions_and_few_anchors(d):
    program, _ = run(Bandit(glb.Bernoulli(), d, 3.0, 3, K=5), 3.0, 60, anchors=4)
    check_carried(program)


def test_fixed_arms_with_aggregation_choose_the_same():
    """Rows merged by arm: the loss is the same function, so are the choices."""
    d, S, rounds = 3, 4.0, 120
    chosen = []
    for aggregate in (False, True):
        bandit = Bandit(glb.Bernoulli(), d, S, 3, K=6, fixed=True)
        program = glb.AnchoredProgram(
            glb.Bernoulli(), glb.Ball(d, S), bandit.batch, aggregate=aggregate
        )
        indices = []
        for t in range(1, rounds + 1):
            arms = bandit.arms()
            index = program.argmax(arms, radius=theorem_31(t, d, S)).index
            indices.append(index)
            program.append(*bandit.play(arms, index))
        check_carried(program)
        check_minimum(program)
        chosen.append(torch.stack(indices))
        assert len(program.history) == rounds
        rows = program.history.X.shape[-2]
        assert rows <= 6 if aggregate else rows == rounds
    assert torch.equal(*chosen)


def test_weighted_losses_with_a_given_level():
    """The level of EMK: the weighted losses of past estimates, plus ``log 1/delta``."""
    d, S = 3, 3.0
    bandit = Bandit(glb.Bernoulli(), d, S, 3)
    program = glb.AnchoredProgram(glb.Bernoulli(), glb.Ball(d, S), bandit.batch)
    scratch = FromScratch()
    level = torch.full(bandit.batch, math.log(1 / DELTA)).double()
    for _ in range(100):
        arms = bandit.arms()
        choice = program.argmax(arms, level=level)
        check_bounds(choice)
        scratch.check(program, arms, choice.index, level=level)
        estimate = program.minimum().theta
        x, r = bandit.play(arms, choice.index)
        w = 0.25 + 2.0 * torch.rand(bandit.batch, generator=bandit.generator).double()
        level = level + w * program.family.nll((x * estimate).sum(-1), r)
        program.append(x, r, w)
    assert scratch.ties <= 2
    check_carried(program)
    check_minimum(program)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_ridge_that_changes_every_round(as_tensor):
    """OFULog-r: the regularisation grows with the history."""
    d, S = 3, 4.0
    bandit = Bandit(glb.Bernoulli(), d, S, 3)
    program = glb.AnchoredProgram(glb.Bernoulli(), glb.Ball(d, S), bandit.batch)
    scratch = FromScratch()
    for t in range(1, 101):
        arms = bandit.arms()
        ridge = d * math.log(2 + len(program.history))
        if as_tensor:
            ridge = torch.tensor([ridge, 2 * ridge, 1.0]).double()
        choice = program.argmax(arms, radius=theorem_31(t, d, S), regularization=ridge)
        check_bounds(choice)
        scratch.check(program, arms, choice.index, radius=theorem_31(t, d, S), ridge=ridge)
        program.append(*bandit.play(arms, choice.index))
        if t % 20 == 0:
            check_minimum(program, ridge)
    assert scratch.ties <= 2
    check_carried(program)


def test_winner_to_its_own_tolerance():
    d, S = 3, 4.0
    bandit = Bandit(glb.Bernoulli(), d, S, 3)
    program = glb.AnchoredProgram(glb.Bernoulli(), glb.Ball(d, S), bandit.batch)
    for t in range(1, 41):
        arms = bandit.arms()
        stated = program.program(radius=theorem_31(t, d, S))
        choice = program.argmax(arms, level=stated.level, value_tol=1e-6)
        own = choice.upper.gather(-1, choice.index[:, None])[:, 0]
        lower = choice.lower.gather(-1, choice.index[:, None])[:, 0]
        assert (own - lower <= 1e-6 * (1 + own.abs())).all()
        exact = native_support(stated, arms)
        slack = 1e-12 * (1 + exact.upper.abs())
        assert (choice.upper >= exact.lower - slack).all()
        assert (choice.lower <= exact.upper + slack).all()
        program.append(*bandit.play(arms, choice.index))


# ---- bounds ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [glb.Bernoulli(), glb.Poisson(), glb.Gaussian(0.5)])
def test_all_bounds_hold(family):
    """Not only the winner's: every arm's value lies between its bounds, in every round."""
    d, S = 3, 3.0
    bandit = Bandit(family, d, S, 3, K=8)
    program = glb.AnchoredProgram(family, glb.Ball(d, S), bandit.batch, anchors=16)
    for t in range(1, 61):
        arms = bandit.arms()
        stated = program.program(radius=2.0 + math.log(1 + t))
        choice = program.argmax(arms, level=stated.level)
        exact = native_support(stated, arms, tol=1e-10, throw=False)
        slack = 1e-12 * (1 + exact.upper.abs())
        assert (choice.upper >= exact.lower - slack).all(), t
        assert (choice.lower <= exact.upper + slack).all(), t
        program.append(*bandit.play(arms, choice.index))


def test_program_is_that_of_the_history():
    bandit = Bandit(glb.Bernoulli(), 2, 3.0, 2)
    program = glb.AnchoredProgram(glb.Bernoulli(), glb.Ball(2, 3.0), bandit.batch)
    for _ in range(30):
        arms = bandit.arms()
        program.append(*bandit.play(arms, program.argmax(arms, radius=2.0).index))
    minimum = program.minimum(0.5)
    stated = program.program(radius=2.0, regularization=0.5)
    torch.testing.assert_close(stated.level, minimum.loss + 2.0, rtol=0, atol=1e-6)
    assert torch.equal(stated.likelihood.X, program.history.X)
    given = program.program(level=torch.tensor([30.0, 31.0]).double())
    assert torch.equal(given.level, torch.tensor([30.0, 31.0]).double())


# ---- batches, state, input ------------------------------------------------------------------


def test_replicates_equal_single_runs():
    d, S, rounds = 3, 4.0, 60
    together = glb.AnchoredProgram(glb.Bernoulli(), glb.Ball(d, S), (3,))
    alone = [glb.AnchoredProgram(glb.Bernoulli(), glb.Ball(d, S)) for _ in range(3)]
    bandit = Bandit(glb.Bernoulli(), d, S, 3)
    for t in range(1, rounds + 1):
        arms = bandit.arms()
        choice = together.argmax(arms, radius=theorem_31(t, d, S))
        for b, program in enumerate(alone):
            single = program.argmax(arms[b], radius=theorem_31(t, d, S))
            assert single.index.shape == ()
            assert single.upper.shape == (20,)
            assert single.index == choice.index[b]
            assert single.passes == choice.passes[b]
            torch.testing.assert_close(single.upper, choice.upper[b], rtol=1e-9, atol=1e-9)
        x, r = bandit.play(arms, choice.index)
        together.append(x, r)
        for b, program in enumerate(alone):
            program.append(x[b], r[b])
    for b, program in enumerate(alone):
        assert program.passes == together.passes[b]


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_batch_shapes(shape, generator):
    program = glb.AnchoredProgram(glb.Bernoulli(), glb.Ball(2, 3.0), shape)
    for _ in range(20):
        arms = torch.randn(*shape, 5, 2, generator=generator).double()
        arms = torch.nn.functional.normalize(arms, dim=-1)
        choice = program.argmax(arms, radius=1.0)
        assert choice.index.shape == choice.passes.shape == choice.status.shape == shape
        assert choice.upper.shape == choice.lower.shape == (*shape, 5)
        program.append(arms[..., 0, :], torch.ones(shape).double())
    minimum = program.minimum()
    assert minimum.theta.shape == (*shape, 2)
    assert minimum.loss.shape == minimum.lower_bound.shape == program.passes.shape == shape


def test_many_rows_at_once_equal_one_by_one(generator):
    X = torch.nn.functional.normalize(torch.randn(2, 30, 3, generator=generator).double(), dim=-1)
    r = (torch.rand(2, 30, generator=generator) < 0.5).double()
    w = torch.rand(2, 30, generator=generator).double()
    arms = torch.nn.functional.normalize(torch.randn(2, 6, 3, generator=generator).double(), dim=-1)
    a, b = (glb.AnchoredProgram(glb.Bernoulli(), glb.Ball(3, 4.0), (2,)) for _ in range(2))
    for program in (a, b):  # anchors that are worth carrying
        program.argmax(arms, radius=1.0)
    a.append(X, r, w)
    for s in range(30):
        b.append(X[:, s], r[:, s], w[:, s])
    for program in (a, b):
        check_carried(program)
    one, other = (program.argmax(arms, radius=1.0) for program in (a, b))
    assert torch.equal(one.index, other.index)
    torch.testing.assert_close(a.minimum().loss, b.minimum().loss, rtol=1e-7, atol=1e-6)


def test_saved_state_continues_bit_by_bit():
    d, S = 3, 4.0
    bandit = Bandit(glb.Bernoulli(), d, S, 2)

    def fresh():
        return glb.AnchoredProgram(glb.Bernoulli(), glb.Ball(d, S), bandit.batch)

    def play(program, rounds):
        outputs = []
        for t in range(rounds):
            arms = bandit.arms()
            choice = program.argmax(arms, radius=5.0 + math.log(1 + t), regularization=0.1)
            program.append(*bandit.play(arms, choice.index))
            outputs.append(torch.cat([choice.upper, choice.lower, choice.passes[:, None]], -1))
        return torch.stack(outputs)

    program = fresh()
    play(program, 40)
    saved, dice = program.state_dict(), bandit.generator.get_state()
    first = play(program, 30)
    bandit.generator.set_state(dice)
    copy = fresh()
    copy.load_state_dict(saved)
    second = play(copy, 30)
    assert torch.equal(first, second)
    assert torch.equal(program.passes, copy.passes)
    # a third time: neither run has touched what was saved
    bandit.generator.set_state(dice)
    again = fresh()
    again.load_state_dict(saved)
    assert torch.equal(play(again, 30), first)


def test_state_of_another_shape_is_refused_and_changes_nothing():
    program = glb.AnchoredProgram(glb.Bernoulli(), glb.Ball(2, 3.0), (2,), anchors=8)
    other = glb.AnchoredProgram(glb.Bernoulli(), glb.Ball(2, 3.0), (2,), anchors=16)
    program.append(torch.eye(2).double(), torch.ones(2).double())
    before = program.minimum().loss
    with pytest.raises(glb.InputError, match="anchors"):
        program.load_state_dict(other.state_dict())
    state = program.state_dict()
    del state["anchors"]
    with pytest.raises(glb.InputError, match="anchors"):
        program.load_state_dict(state)
    assert len(program.history) == 1
    assert torch.equal(program.minimum().loss, before)


def test_float32_run(generator):
    program = glb.AnchoredProgram(
        glb.Bernoulli(), glb.Ball(2, 3.0), (2,), level_tol=1e-2, dtype=torch.float32
    )
    for _ in range(40):
        arms = torch.nn.functional.normalize(torch.randn(2, 5, 2, generator=generator), dim=-1)
        stated = program.program(radius=2.0)
        choice = program.argmax(arms, level=stated.level, tol=1e-3)
        assert choice.upper.dtype == torch.float32
        assert (choice.status == Status.CONVERGED).all()
        exact = native_support(stated, arms, throw=False)
        assert (choice.upper >= exact.lower - 1e-5).all()
        assert (choice.lower <= exact.upper + 1e-5).all()
        program.append(
            arms[torch.arange(2), choice.index], (torch.rand(2, generator=generator) < 0.7).float()
        )


def test_one_arm_and_no_observation():
    program = glb.AnchoredProgram(glb.Bernoulli(), glb.Ball(2, 3.0))
    choice = program.argmax(torch.tensor([[0.6, 0.8]]).double(), radius=1.0, value_tol=1e-9)
    assert choice.index == 0
    torch.testing.assert_close(choice.upper, torch.tensor([3.0]).double())
    torch.testing.assert_close(choice.lower, torch.tensor([3.0]).double())


def test_infeasible_level_and_nan_stay_in_their_element():
    bandit = Bandit(glb.Bernoulli(), 2, 3.0, 4)
    programs = [
        glb.AnchoredProgram(glb.Bernoulli(), glb.Ball(2, 3.0), (4,), validate=False)
        for _ in range(2)
    ]
    for t in range(30):
        arms = bandit.arms()
        choice = programs[0].argmax(arms, radius=2.0)
        x, r = bandit.play(arms, choice.index)
        programs[0].append(x, r)
        programs[1].argmax(arms, radius=2.0, throw=False)
        if t == 20:
            x = x.clone()
            x[3] = torch.nan
        programs[1].append(x, r)
    arms = bandit.arms()
    level = programs[0].minimum().loss + 2.0
    good = programs[0].argmax(arms, level=level)
    level[1] = 0.0  # no Bernoulli history has a loss below zero
    with pytest.raises(glb.SolverError, match=r"INFEASIBLE.*\(1,\)"):
        programs[1].argmax(arms, level=level)
    bad = programs[1].argmax(arms, level=level, throw=False)
    assert bad.status.tolist() == [0, int(Status.INFEASIBLE), 0, int(Status.NONFINITE)]
    assert torch.equal(bad.index[::2], good.index[::2])
    torch.testing.assert_close(bad.upper[::2], good.upper[::2], rtol=1e-9, atol=1e-9)


def test_bad_arguments_are_refused():
    program = glb.AnchoredProgram(glb.Bernoulli(), glb.Ball(2, 3.0), (2,))
    arms = torch.eye(2).double().expand(2, 2, 2)
    with pytest.raises(glb.InputError, match="arms: expected shape"):
        program.argmax(arms[0], radius=1.0)
    with pytest.raises(glb.InputError, match="exactly one"):
        program.argmax(arms)
    with pytest.raises(glb.InputError, match="exactly one"):
        program.argmax(arms, radius=1.0, level=torch.ones(2).double())
    with pytest.raises(glb.InputError, match="at least one arm"):
        program.argmax(arms[:, :0], radius=1.0)
    with pytest.raises(glb.InputError, match="level_tol"):
        glb.AnchoredProgram(glb.Bernoulli(), glb.Ball(2, 3.0), level_tol=0.0)
    with pytest.raises(glb.InputError, match="r: expected"):
        program.append(arms[:, 0], torch.tensor([0.0, 2.0]).double())
    assert len(program.history) == 0
    check_carried(program)


def test_rows_and_arms_that_require_grad_leave_no_graph():
    """The history keeps the graph of its rows; what is carried forward must not grow one."""
    program = glb.AnchoredProgram(glb.Bernoulli(), glb.Ball(2, 3.0), (2,), anchors=8)
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    arms = scale * torch.eye(2, dtype=torch.float64).expand(2, 2, 2)
    for _ in range(5):
        choice = program.argmax(arms, radius=1.0)
        program.append(arms[torch.arange(2), choice.index], torch.ones(2).double())
        assert not choice.upper.requires_grad
    state = program.state_dict()
    assert not any(t.requires_grad for t in (state["anchors"]["sums"], state["minimum"]["sums"]))
    assert not program.minimum().loss.requires_grad
    # and the graph of the rows is there for the solver that differentiates
    stated = program.program(level=torch.full((2,), 6.0, dtype=torch.float64))
    value = glb.support(stated, arms).upper.sum()
    (slope,) = torch.autograd.grad(value, scale)
    assert torch.isfinite(slope)
    assert slope != 0


@pytest.mark.parametrize("S", [0.5, 4.0, 30.0])
def test_an_arm_that_was_played_is_bounded(S):
    """Its direction is exactly that of a cut, and the cut may lie beyond the sphere."""
    family, ball = glb.Bernoulli(), glb.Ball(2, S)
    arms = torch.tensor([[0.6, 0.8], [-0.6, -0.8], [1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    program = glb.AnchoredProgram(family, ball)
    for t in range(6):
        choice = program.argmax(arms, radius=3.0)
        assert choice.status == Status.CONVERGED
        exact = native_support(program.program(3.0), arms)
        assert bool((choice.upper >= exact.lower - 1e-12).all())
        assert bool((choice.upper <= S * torch.linalg.vector_norm(arms, dim=-1) + 1e-12).all())
        alone = program.argmax(arms[:1], radius=3.0, value_tol=1e-9)
        torch.testing.assert_close(alone.upper[0], exact.upper[0], rtol=0, atol=1e-7 * (1 + S))
        program.append(arms[0], float(t % 2))


@pytest.mark.parametrize("arm", [[torch.inf, 0.0], [-torch.inf, torch.inf], [torch.nan, 0.0]])
@pytest.mark.parametrize("question", ["argmax", "bound"])
def test_an_arm_without_end_is_never_called_converged(arm, question):
    program = glb.AnchoredProgram(glb.Bernoulli(), glb.Ball(2, 3.0))
    program.append([[1.0, 0.0], [0.6, 0.8]], [1.0, 0.0])
    choice = getattr(program, question)([arm, [1.0, 0.0]], radius=1.0, throw=False)
    assert choice.status == glb.Status.NONFINITE
    assert choice.lower[1] <= choice.upper[1]


@pytest.mark.parametrize("height", [0.0, 1e-4, 1e-2])
def test_a_minimum_that_was_not_found_makes_no_point_feasible(height):
    """Where R_s is large, as that of cloglog, a search may be given up: its bound on F is no F."""
    family, ball = glb.QuasiBounded("cloglog"), glb.Ball(2, 6.0)
    for seed in range(20):
        draw = torch.Generator().manual_seed(seed)
        c, w, arms = (torch.rand(s, generator=draw).double() for s in ((40, 1), 40, (4, 2)))
        X, r = (c - 0.5).expand(40, 2), (torch.rand(40, generator=draw) < 0.5).double()
        program = glb.AnchoredProgram(family, ball)
        for part in (slice(0, 2), slice(2, 39), slice(39, 40)):
            program.append(X[part], r[part], 10.0 ** (4.0 * w[part] - 2.0))
            program.bound(arms, radius=10.0, throw=False)
        choice = program.bound(arms, radius=height, throw=False)
        rows = glb.Rows(*program.history.view())
        least = glb.constrained_mle(family, rows, ball, throw=False)
        loss = glb.NegativeLogLikelihood.of(family, rows)
        exact = glb.support(
            glb.SublevelProgram(loss, ball, least.loss + height + 1e-9), arms, throw=False
        )
        # it ends at the carried point, where F is known
        assert float(program.minimum().loss - least.loss) < 1e-6
        assert height == 0.0 or torch.isfinite(choice.lower).all()
        assert (choice.lower <= exact.upper + (1e-2 if height == 0.0 else 0.0)).all()
        assert (choice.upper >= exact.lower - 1e-2).all()  # of a level that is higher by 1e-9
