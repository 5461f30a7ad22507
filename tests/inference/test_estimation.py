"""The two estimators of a confidence sequence give the same sets; what is refused leaves no trace."""

import dataclasses

import pytest
import torch

import torchglb as glb
from torchglb.estimate import Estimate
from torchglb.testing.policies import assert_same


def rows_of(family, batch, n, d, generator):
    X = torch.randn((*batch, n, d), generator=generator, dtype=torch.float64)
    X = X / torch.linalg.vector_norm(X, dim=-1, keepdim=True).clamp_min(1.0)
    return X, family.sample(1.5 * X[..., 0], generator)


def both(family, ball, batch=(), **settings):
    return [
        glb.ConfidenceSequence(family, ball, 0.05, batch_shape=batch, estimator=kind, **settings)
        for kind in (glb.Refit(), glb.Incremental())
    ]


@pytest.mark.parametrize("family", [glb.Bernoulli(), glb.Gaussian(), glb.Poisson()], ids=repr)
@pytest.mark.parametrize("ellipsoidal", [False, True])
def test_both_estimators_give_the_same_sets(family, ellipsoidal, generator):
    settings = {"ellipsoidal": ellipsoidal, "ellipsoid": "theorem", "radius": "lipschitz"}
    refit, carried = both(family, glb.Ball(3, 2.0), (2,), **settings)
    X, r = rows_of(family, (2,), 60, 3, generator)
    w = torch.linspace(0.2, 1.0, 60).double().expand(2, 60)
    questions = torch.eye(3).double().expand(2, 3, 3)
    for start in range(0, 60, 20):
        for sequence in (refit, carried):
            part = slice(start, start + 20)
            sequence.update(X[:, part], r[:, part], weight=w[:, part])
        ours, other = (s.current().interval(questions) for s in (carried, refit))
        torch.testing.assert_close(ours.lower, other.lower, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.upper, other.upper, rtol=1e-5, atol=1e-5)


def test_a_carried_estimate_encloses_the_minimum(generator):
    family, ball = glb.Bernoulli(), glb.Ball(2, 3.0)
    sequence = both(family, ball)[1]
    X, r = rows_of(family, (), 200, 2, generator)
    for x, y in zip(X[:150], r[:150], strict=True):
        sequence.update(x, y)
    sequence.update(X[150:], r[150:])
    found = sequence.estimate()
    fit = glb.constrained_mle(family, glb.Rows(X, r), ball, tol=1e-12)
    assert float(found.lower_bound) <= float(fit.loss) + 1e-10
    assert float(found.loss) >= float(fit.loss - fit.gap) - 1e-10
    torch.testing.assert_close(found.theta, fit.theta, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.hessian, fit.hessian, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [glb.Refit(), glb.Incremental()], ids=repr)
def test_a_saved_sequence_goes_on_bit_by_bit(kind, generator):
    family = glb.Bernoulli()
    X, r = rows_of(family, (), 50, 2, generator)

    def new():
        return glb.ConfidenceSequence(family, glb.Ball(2, 2.0), 0.05, estimator=kind)

    one, other = new(), new()
    one.update(X[:30], r[:30])
    one.current()
    other.load_state_dict(one.state_dict())
    for sequence in (one, other):
        sequence.update(X[30:], r[30:])
    assert torch.equal(one.current().level, other.current().level)
    assert torch.equal(one.estimate().theta, other.estimate().theta)


def test_states_of_the_other_estimator_are_refused():
    refit, carried = both(glb.Bernoulli(), glb.Ball(2, 2.0))
    with pytest.raises(glb.InputError, match="estimator"):
        carried.load_state_dict(refit.state_dict())


def test_rows_with_grad_are_refused_by_carried_sums_and_leave_no_trace():
    sequence = both(glb.Bernoulli(), glb.Ball(2, 2.0))[1]
    sequence.update([0.6, 0.8], 1.0)
    sequence.current()
    before = sequence.state_dict()
    with pytest.raises(glb.InputError, match="Refit"):
        sequence.update(torch.tensor([1.0, 0.0], requires_grad=True), 1.0)
    assert len(sequence) == 1
    assert_same(before, sequence.state_dict())


def test_an_ellipsoid_pays_for_an_uncertain_hessian_before_it_bounds_the_way():
    """In the fixed point: a larger beta^2 means a longer way, on which the curvature falls more."""
    sequence = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, 3.0), 0.05)
    sequence.update([[1.0, 0.0], [0.6, 0.8], [-0.8, 0.6]] * 20, [1.0, 0.0, 1.0] * 20)
    fit, loss, radius = (
        sequence.estimate(),
        sequence.current().likelihood,
        torch.tensor(4.0).double(),
    )
    error = torch.tensor(0.4).double()
    unsure = dataclasses.replace(fit, hessian_error=error)
    paid = sequence.ellipsoid_radius(loss, unsure, radius, fit.hessian)
    less = sequence.ellipsoid_radius(loss, fit, error.exp() * radius, fit.hessian)
    assert (
        float(paid)
        >= float(less)
        > float(error.exp() * sequence.ellipsoid_radius(loss, fit, radius, fit.hessian))
    )


def test_another_estimator_is_refused_by_name():
    with pytest.raises(glb.InputError, match=r"estimator: expected Refit\(\) or Incremental\(\)"):
        glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, 2.0), 0.05, estimator="refit")


def test_masked_rows_count_for_nothing(generator):
    """Whatever stands in them, and bit by bit."""
    X, r = rows_of(glb.Bernoulli(), (), 12, 2, generator)
    mask = torch.arange(12) % 3 > 0
    masked, plain = (glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, 2.0), 0.05) for _ in "ab")
    spoilt = torch.where(mask, r, torch.nan)
    masked.update(torch.where(mask[:, None], X, torch.inf), spoilt, mask=mask)
    w = mask.double()
    plain.update(X * w[:, None], torch.where(mask, r, 0.0), weight=w)
    assert torch.equal(masked.current().level, plain.current().level)
    alone = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, 2.0), 0.05)
    alone.update(X[mask], r[mask])
    torch.testing.assert_close(masked.current().level, alone.current().level, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("given", "message"),
    [({"mask": [0.5]}, "mask: expected booleans"), ({"weight": [1.5]}, r"weights in \[0, 1\]"),
     ({"mask": [True, False]}, "mask: expected shape")],
)  # fmt: skip
def test_masks_and_weights_that_do_not_fit_leave_no_trace(given, message):
    sequence = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, 2.0), 0.05)
    with pytest.raises(glb.InputError, match=message):
        sequence.update([[0.6, 0.8]], [1.0], **given)
    assert len(sequence) == 0


@pytest.mark.parametrize("batch", [(), (3,)])
def test_rows_that_a_radius_is_shown_late_give_the_same_level(batch, generator):
    """One by one, several at a time, before or after weighted rows: bit by bit the same."""

    def sequence():
        given = (glb.Bernoulli(), glb.Ball(2, 3.0), 0.05, "pac-bayes")
        return glb.ConfidenceSequence(*given, batch_shape=batch)

    at_once, late = sequence(), sequence()
    for t in range(60):
        x = torch.randn(*batch, 2, generator=generator, dtype=torch.float64)
        x = torch.nn.functional.normalize(x, dim=-1)
        r = glb.Bernoulli().sample(x[..., 0], generator)
        weight = torch.full(batch, 0.5, dtype=torch.float64) if t % 13 == 12 else None
        for one in (at_once, late):
            one.update(x, r, weight)
        at_once.sums()  # which shows the radius the row by torch
        if t % 4 == 3:
            level = at_once.height(advance=True).level
            assert torch.equal(late.height().level, level)  # a question
            assert torch.equal(late.height(advance=True).level, level)
    assert all(torch.equal(late.sums()[name], t) for name, t in at_once.sums().items())


def test_a_set_is_made_anew_after_rows_that_a_round_has_shown_the_radius():
    sequence = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, 3.0), 0.05)
    sequence.update([0.6, 0.8], 1.0)
    before = sequence.current()
    sequence.update([[0.6, 0.8]] * 50, [1.0] * 50)
    sequence.height(advance=True)
    assert sequence.current().likelihood.num_rows == 51
    assert before.likelihood.num_rows == 1


def test_a_question_without_grad_leaves_the_graph():
    sequence = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, 3.0), 0.05)
    sequence.update(
        torch.tensor([[0.6, 0.8]] * 3, dtype=torch.float64, requires_grad=True), [1.0] * 3
    )
    with torch.no_grad():
        assert not sequence.current().level.requires_grad
        assert not sequence.height(advance=True).level.requires_grad
    assert sequence.height().level.requires_grad
    assert sequence.current().level.requires_grad


@pytest.mark.parametrize("ask", ["height", "current"])
def test_plain_rows_after_rows_of_a_transform(ask):
    """torch.func.grad has the derivative that autograd has."""

    def level(x):
        sequence = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, 3.0), 0.05)
        sequence.update(x, [1.0, 0.0])
        sequence.update([0.6, 0.8], 1.0)
        return getattr(sequence, ask)().level

    x = torch.tensor([[0.6, 0.8], [0.8, -0.6]], dtype=torch.float64)
    recorded = x.clone().requires_grad_(True)
    (expected,) = torch.autograd.grad(level(recorded), recorded)
    torch.testing.assert_close(torch.func.grad(level)(x), expected)


RADII = ["pac-bayes", "centred", "mixture", "gaussian-prior", "lipschitz"]


@pytest.mark.parametrize("radius", RADII)
@pytest.mark.parametrize("options", [{}, {"running": True}, {"aggregate": True}], ids=str)
def test_questions_leave_no_trace(radius, options, generator):
    """Later answers and states are those of a sequence that was not asked, bit by bit."""
    given = (glb.Bernoulli(), glb.Ball(2, 3.0), 0.05, radius)
    asked, silent = (glb.ConfidenceSequence(*given, **options) for _ in range(2))
    for _ in range(12):
        x = torch.nn.functional.normalize(torch.randn(2, generator=generator).double(), dim=-1)
        r = glb.Bernoulli().sample(x[0], generator)
        for one in (asked, silent):
            one.update(x, r)
        asked.current().interval(x)
        asked.height()
        asked.on_boundary()
    assert_same(asked.state_dict(), silent.state_dict())
    mine, other = asked.current().interval(x), silent.current().interval(x)
    assert torch.equal(mine.lower, other.lower)
    assert torch.equal(mine.upper, other.upper)


def test_incremental_questions_move_later_answers_within_the_tolerance_of_the_radius(generator):
    given = (glb.Bernoulli(), glb.Ball(2, 3.0), 0.05)
    asked, silent = (glb.ConfidenceSequence(*given, estimator=glb.Incremental()) for _ in range(2))
    for _ in range(40):
        x = torch.nn.functional.normalize(torch.randn(2, generator=generator).double(), dim=-1)
        r = glb.Bernoulli().sample(x[0], generator)
        for one in (asked, silent):
            one.update(x, r)
        asked.current()
    level = silent.current().level
    torch.testing.assert_close(asked.current().level, level, rtol=1e-2, atol=0)


@pytest.mark.parametrize("radius", ["lipschitz", "covering"])
@pytest.mark.parametrize("family", [glb.Gaussian(), glb.Poisson()], ids=repr)
def test_a_radius_that_needs_no_estimate_asks_for_none(radius, family, generator, monkeypatch):
    """Theorem 3.1 holds around any point: a round needs beta^2 alone, and no pass for the level."""
    sequence = glb.ConfidenceSequence(
        family, glb.Ball(3, 2.0), 0.05, radius, estimator=glb.Incremental(), batch_shape=(2,)
    )
    sequence.update(*rows_of(family, (2,), 200, 3, generator))
    expected = sequence.evaluation().radius
    monkeypatch.setattr(type(sequence.fitted), "estimate", None)
    found = sequence.height(advance=True)
    assert found.level is None
    torch.testing.assert_close(found.radius, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("ellipsoid", ["theorem", "fixed_point"])
def test_the_radius_of_an_ellipsoid_pays_for_the_rounding_of_its_hessian(ellipsoid, generator):
    """``|v|^2`` in the Hessian as it is kept may be less than in the exact one."""
    family, ball, d = glb.Gaussian(0.05), glb.Ball(3, 30.0), 3
    X = 0.99 * torch.nn.functional.normalize(torch.randn(200, d, generator=generator), dim=-1)
    r = family.sample(X @ torch.tensor([10.0, -5.0, 2.0]), generator)
    sequence = glb.ConfidenceSequence(
        family, ball, 0.05, ellipsoidal=True, ellipsoid=ellipsoid, dtype=torch.float32
    )
    sequence.update(X, r)
    likelihood = glb.NegativeLogLikelihood(family, X, r)
    exact = X.double().mT @ X.double() / 0.05**2
    theta = torch.linalg.solve(exact, X.double().mT @ r.double() / 0.05**2)
    fit = Estimate(theta.float(), torch.tensor(0.0), torch.tensor(0.0), torch.zeros(d))
    found = sequence.ellipsoid_radius(likelihood, fit, torch.tensor(3.0), exact.float())
    least = 2.0 * 3.0 + float(sequence.ridge) * float(30.0 + theta.norm()) ** 2
    lost = torch.linalg.matrix_norm(exact.float().double() - exact, ord=2)
    assert lost > 0.0
    limit = least * (1.0 - 1e-6) + float(lost) * float(30.0 + theta.norm()) ** 2
    assert float(found) >= limit
