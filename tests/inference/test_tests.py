"""E-values: golden values, nulls of all kinds against SciPy, and validity under the null."""

import math

import mpmath
import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch

import torchglb as glb
from torchglb.errors import InputError
from torchglb.inference import RunningTest, e_bh
from torchglb.inference.tests import anytime_p, likelihood_ratio_test

DELTA = 0.05


def sequence_of(X, r, S=3.0, family=None, radius="pac-bayes", **settings):
    X, r = (torch.as_tensor(v, dtype=torch.float64) for v in (X, r))
    family = glb.Bernoulli() if family is None else family
    ball = glb.Ball(X.shape[-1], S)
    made = glb.ConfidenceSequence(
        family, ball, DELTA, radius, batch_shape=tuple(X.shape[:-2]), **settings
    )
    made.update(X.to(made.history.dtype), r.to(made.history.dtype))
    return made


def data(generator, n=60, d=3, batch=(), theta=(1.2, -0.8, 0.0)):
    X = torch.randn(*batch, n, d, generator=generator, dtype=torch.float64)
    X = torch.nn.functional.normalize(X, dim=-1)
    p = torch.sigmoid(X @ torch.tensor(theta[:d], dtype=torch.float64))
    return X, (torch.rand(p.shape, generator=generator, dtype=torch.float64) < p).double()


# ---- golden values -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_evidence_and_levels_of_another_delta_are_rounded_upwards(dtype):
    """One row in one dimension: ``level - log(1/delta)`` cancels, and log E came out above it."""
    S = 0.125
    for k in range(60):
        r = 0.003 * k - 0.09
        current = sequence_of([[1.0]], [r], S, glb.Gaussian(), dtype=dtype).current()
        y = float(torch.tensor(r, dtype=dtype).double())
        with mpmath.workdps(40):
            level = mpmath.mpf(float(current.level))
            evidence = level + mpmath.log(mpmath.mpf(DELTA))
            best = mpmath.mpf(min(max(y, -S), S))
            least = best * best / 2 - y * best
            assert float(current.test([1.0], 1.0, "<=").log_e) <= least - evidence
            for delta in (0.01, 0.2):
                other = mpmath.mpf(float(current.at_delta(delta).level))
                assert other >= level + mpmath.log(mpmath.mpf(DELTA) / mpmath.mpf(delta))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_p_values_are_rounded_upwards(dtype):
    """Against 40 digits; no evidence but an infinite one makes a p-value 0."""
    generator = torch.Generator().manual_seed(0)
    log_e = 10.0 ** (6.0 * torch.rand(400, generator=generator, dtype=torch.float64) - 2.0)
    log_e = log_e.to(dtype)
    found, tiny = anytime_p(log_e), torch.finfo(dtype).tiny
    with mpmath.workdps(40):
        for one, p in zip(log_e.tolist(), found.tolist(), strict=True):
            exact = mpmath.exp(-mpmath.mpf(one))
            assert exact <= mpmath.mpf(p) <= max(exact * (1 + 2e-7), tiny)
    ends = anytime_p(torch.tensor([-torch.inf, -1.0, 0.0, torch.inf], dtype=dtype))
    assert ends.tolist() == [1.0, 1.0, 1.0, 0.0]
    assert bool(anytime_p(torch.tensor(torch.nan, dtype=dtype)).isnan())


def test_mixture_by_quadrature():
    """d = 1: ``log E = L(b) + log of the mean of exp(-L) over [-S, S]``, by mpmath."""
    x, S = [1.0] * 12, 2.0
    r = [1.0] * 9 + [0.0] * 3
    current = sequence_of([[v] for v in x], r, S, radius="mixture").current()

    def loss(theta):
        return 12 * mpmath.log1p(mpmath.exp(theta)) - 9 * theta

    with mpmath.workdps(30):
        evidence = -mpmath.log(mpmath.quad(lambda t: mpmath.exp(-loss(t)), [-S, 0, S]) / (2 * S))
        for b in (-1.0, 0.0, 0.3, mpmath.log(3), 1.7):
            expected = float(loss(b) - evidence)
            found = current.test([1.0], float(b))
            assert float(found.log_e) <= expected + 1e-12
            assert float(found.log_e) == pytest.approx(
                expected, abs=2e-3
            )  # the cubature's own error
            assert float(found.p) == pytest.approx(min(1.0, math.exp(-float(found.log_e))))
        # half-spaces: the point is the boundary if the estimate log 3 is beyond it
        for b, relation, at in (
            (0.0, "<=", 0.0),
            (0.0, ">=", mpmath.log(3)),
            (1.5, ">=", 1.5),
            (1.5, "<=", mpmath.log(3)),
        ):
            expected = float(loss(at) - evidence)
            found = current.test([1.0], b, relation)
            assert float(found.log_e) == pytest.approx(expected, abs=2e-3)
            assert float(found.log_e) <= expected + 1e-12


def scipy_minimum(X, r, S, constraints):
    def loss(theta):
        z = X @ theta
        return float((np.logaddexp(0.0, z) - r * z).sum())

    def slope(theta):
        z = X @ theta
        return X.T @ (1 / (1 + np.exp(-z)) - r)

    ball = {"type": "ineq", "fun": lambda t: S * S - t @ t, "jac": lambda t: -2 * t}
    best = math.inf
    for start in (np.zeros(X.shape[1]), 0.3 * np.ones(X.shape[1])):
        found = scipy.optimize.minimize(
            loss, start, jac=slope, method="SLSQP", constraints=[ball, *constraints],
            options={"ftol": 1e-14, "maxiter": 500},
        )  # fmt: skip
        if found.success:
            best = min(best, found.fun)
    return best


NULLS = {
    "a coefficient": ([[0.0, 1.0, 0.0]], [0.0], "=="),
    "a coefficient, not zero": ([[0.0, 2.0, 0.0]], [1.0], "=="),
    "a contrast": ([[1.0, 1.0, -1.0]], [0.2], "=="),
    "a line": ([[1.0, 0.0, 0.5], [0.0, 1.0, -1.0]], [0.4, -0.3], "=="),
    "a point": (np.eye(3).tolist(), [1.0, -0.5, 0.2], "=="),
    "below": ([1.0, 0.0, 0.0], 0.1, "<="),
    "above": ([1.0, 0.5, 0.0], 1.6, ">="),
    "a half-space that holds the estimate": ([1.0, 0.0, 0.0], -0.5, ">="),
}


@pytest.mark.parametrize("null", NULLS)
@pytest.mark.parametrize("S", [1.0, 3.0])
def test_minimum_over_the_null_by_scipy(generator, null, S):
    X, r = data(generator)
    current = sequence_of(X, r, S).current()
    A, b, relation = NULLS[null]
    found = current.test(A, b, relation)
    rows, values = np.atleast_2d(np.array(A)), np.atleast_1d(np.array(b))
    sign = -1.0 if relation == "<=" else 1.0
    kind = "eq" if relation == "==" else "ineq"
    constraint = {
        "type": kind,
        "fun": lambda t: sign * (rows @ t - values),
        "jac": lambda t: sign * rows,
    }
    shortest = np.linalg.pinv(rows) @ values
    if relation == "==" and np.linalg.norm(shortest) > S:
        assert math.isinf(float(found.log_e))
        assert float(found.p) == 0.0
        assert bool(found.theta.isnan().all())
        return
    if null == "a point":
        z = X.numpy() @ np.array(b)
        least = float((np.logaddexp(0.0, z) - r.numpy() * z).sum())
    else:
        least = scipy_minimum(X.numpy(), r.numpy(), S, [constraint])
    if relation != "==" and not math.isfinite(least):
        assert math.isinf(float(found.log_e))  # nothing of the ball is in the half-space
        return
    evidence = float(current.level) - math.log(1 / DELTA)
    assert float(found.log_e) == pytest.approx(least - evidence, abs=1e-6)
    assert float(found.log_e) <= least - evidence + 1e-8
    at = found.theta.numpy()
    assert np.linalg.norm(at) <= S * (1 + 1e-9)
    assert np.all(constraint["fun"](at) >= -1e-7)


def test_half_spaces_beyond_the_ball(generator):
    X, r = data(generator)
    current = sequence_of(X, r, 1.0).current()
    whole = current.test([1.0, 0.0, 0.0], 5.0, "<=")
    least = current.likelihood.value(current.theta_hat)
    expected = float(least - current.level) + math.log(1 / DELTA)
    assert float(whole.log_e) == pytest.approx(expected, abs=1e-7)
    assert float(whole.p) == 1.0
    for b, relation in ((-5.0, "<="), (5.0, ">=")):
        assert math.isinf(float(current.test([1.0, 0.0, 0.0], b, relation).log_e))
    assert float(current.test([1.0, 0.0, 0.0], -5.0, ">=").log_e) == pytest.approx(
        expected, abs=1e-7
    )


def test_batches_are_loops(generator):
    X, r = data(generator, batch=(3,))
    together = sequence_of(X, r).current()
    A = torch.randn(3, 2, 3, generator=generator, dtype=torch.float64)
    b = 0.1 * torch.randn(3, 2, generator=generator, dtype=torch.float64)
    found = together.test(A, b)
    for i in range(3):
        alone = together[i].test(A[i], b[i])
        torch.testing.assert_close(alone.log_e, found.log_e[i], rtol=0, atol=1e-8)
    shared = together.test([[0.0, 0.0, 1.0]], [0.0])
    assert shared.log_e.shape == (3,)


def test_single_precision_errs_downwards(generator):
    X, r = data(generator, n=300)
    X = 0.99 * X
    double = sequence_of(X.float().double(), r).current()
    single = sequence_of(X.float(), r, dtype=torch.float32).current()
    for A, b, relation in NULLS.values():
        exact = double.test(A, b, relation).log_e
        rough = single.test(A, b, relation).log_e
        assert rough.dtype == torch.float32
        # levels differ by what the radius left on the table; minima by rounding
        assert float(rough) <= float(exact) + 0.05


# ---- validity ------------------------------------------------------------------------------------

WORLDS = {
    "bernoulli": (glb.Bernoulli(), 3.0),
    "gaussian": (glb.Gaussian(0.5), 3.0),
    "poisson": (glb.Poisson(), 1.5),
}
TRUE_NULLS = {
    "point": lambda theta: (torch.eye(2, dtype=torch.float64), theta, "=="),
    "coefficient": lambda theta: ([[0.0, 1.0]], theta[:, 1:], "=="),
    "half-space": lambda theta: ([[1.0, 0.0]], theta[:, :1], "<="),
}


@pytest.mark.parametrize("null", TRUE_NULLS)
@pytest.mark.parametrize("world", WORLDS)
def test_true_nulls_are_rarely_rejected(world, null):
    """P(E_t >= 1/alpha for some t) <= alpha, for arms that are chosen against theta*."""
    family, S = WORLDS[world]
    R, alpha = 120, 0.2
    generator = torch.Generator().manual_seed(11)
    arms = torch.nn.functional.normalize(
        torch.randn(R, 6, 2, generator=generator, dtype=torch.float64), dim=-1
    )
    theta = (
        0.6
        * S
        * torch.nn.functional.normalize(
            torch.randn(R, 2, generator=generator, dtype=torch.float64), dim=-1
        )
    )
    sequence = glb.ConfidenceSequence(family, glb.Ball(2, S), DELTA, batch_shape=(R,))
    running = RunningTest(sequence, *TRUE_NULLS[null](theta))
    every, p = torch.arange(R), torch.ones(R, dtype=torch.float64)
    smallest = p
    for t in range(80):
        if t % 4 == 0:
            found = running.look()
            assert bool((found.p <= smallest).all())
            smallest = found.p
            # where the estimate is farthest from the truth: what a forger would ask next
            away = sequence.current().theta_hat - theta
            chosen = (arms @ away[..., None])[..., 0].abs().argmax(-1)
        x = arms[every, chosen]
        sequence.update(x, family.sample((x * theta).sum(-1), generator))
    rejected = int((smallest <= alpha).sum())
    assert scipy.stats.binomtest(rejected, R, alpha, alternative="greater").pvalue >= 0.05


def test_false_nulls_are_rejected(generator):
    X, r = data(generator, n=400)
    current = sequence_of(X, r).current()
    assert float(current.test([1.0, 0.0, 0.0], 0.0).p) < 1e-3
    assert float(current.test([1.0, 0.0, 0.0], 0.0, "<=").p) < 1e-3
    assert float(current.test([1.0, 0.0, 0.0], 0.0, ">=").p) == 1.0
    # and a point is rejected at delta exactly where it is outside of the set
    for b in (0.2, 0.6, 1.0, 1.4):
        point = [b, -0.8, 0.0]
        outside = not bool(current.contains(torch.tensor(point).double()))
        assert (float(current.test(torch.eye(3).double(), point).p) < DELTA) == outside


def test_running_tests_continue(generator):
    X, r = data(generator, n=50)
    sequence = sequence_of(X, r)
    running = RunningTest(sequence, [1.0, 0.0, 0.0], 0.0)
    first = running.look()
    sequence.update([1.0, 0.0, 0.0], 0.0)
    second = running.look()
    assert float(second.log_e) < float(first.log_e)
    assert float(second.p) == float(first.p)
    other = RunningTest(sequence, [1.0, 0.0, 0.0], 0.0)
    other.load_state_dict(running.state_dict())
    assert float(other.look().p) == float(first.p)
    with pytest.raises(InputError, match="state"):
        other.load_state_dict({})


# ---- several hypotheses --------------------------------------------------------------------------


def test_e_bh_by_hand():
    e = torch.tensor([[120.0, 1.0, 35.0, 18.0], [30.0, 30.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    # m/(alpha k) = 80, 40, 26.7, 20 for alpha = 0.05
    expected = torch.tensor([[1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]).bool()
    assert torch.equal(e_bh(e.log(), 0.05), expected)
    # a later one that is enough takes all before it along: 40, 20, 13.3, 10 for alpha = 0.1
    e = torch.tensor([15.0, 14.0, 13.5, 2.0])
    assert e_bh(e.log(), 0.1).tolist() == [True, True, True, False]
    infinite = torch.tensor([math.inf, -math.inf])
    assert e_bh(infinite, 0.1).tolist() == [True, False]
    assert e_bh(torch.zeros(0), 0.1).shape == (0,)


def test_e_bh_keeps_the_false_discovery_rate(generator):
    """Half of 20 nulls are true; e-values are likelihood ratios that share their noise."""
    runs, m, alpha = 2000, 20, 0.2
    shared = torch.randn(runs, 1, generator=generator, dtype=torch.float64)
    own = torch.randn(runs, m, generator=generator, dtype=torch.float64)
    noise = math.sqrt(0.7) * shared + math.sqrt(0.3) * own
    effect = torch.tensor([0.0, 3.0]).double().repeat(m // 2)
    log_e = 3.0 * (noise + effect) - 4.5
    rejected = e_bh(log_e, alpha)
    false = (rejected & (effect == 0)).sum(-1)
    share = false / rejected.sum(-1).clamp_min(1)
    assert float(share.mean()) <= alpha + 3 * float(share.std()) / runs**0.5
    assert float((rejected & (effect > 0)).sum()) > 0.1 * runs * m / 2


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("A", "b", "relation", "message"),
    [
        ([1.0, 0.0], 0.0, "==", "A: expected shape"),
        ([1.0, 0.0, 0.0], [0.0, 1.0], "==", "b: expected"),
        (np.zeros((1, 3)).tolist(), [0.0], "==", "A: expected rows that are independent"),
        ([[1.0, 0.0, 0.0], [2.0, 0.0, 0.0]], [0.0, 0.0], "==", "A: expected rows that are indep"),
        ([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], [0.0, 0.0], "<=", "A: expected one row"),
        ([1.0, 0.0, 0.0], 0.0, "<", "relation: expected one of"),
        ([math.nan, 0.0, 0.0], 0.0, "==", "A: expected finite"),
        ([1.0, 0.0, 0.0], math.inf, "==", "b: expected finite"),
    ],
)
def test_bad_hypotheses_are_refused(generator, A, b, relation, message):
    current = sequence_of(*data(generator, n=5)).current()
    with pytest.raises(InputError, match=message):
        current.test(A, b, relation)


def test_sets_that_cannot_test_are_refused(generator):
    X, r = data(generator, n=5)
    with pytest.raises(InputError, match="keeps to the ball"):
        sequence_of(X, r, radius="gaussian-prior").current().test([1.0, 0.0, 0.0], 0.0)
    split = sequence_of(X, r, family=glb.Gaussian(1.0), radius="lipschitz").current()
    with pytest.raises(InputError, match="does not depend on delta"):
        split.test([1.0, 0.0, 0.0], 0.0)
    with pytest.raises(InputError, match="alpha"):
        e_bh(torch.zeros(2), 1.5)
    with pytest.raises(InputError, match="log_e: expected numbers"):
        e_bh(torch.tensor([math.nan]), 0.1)


@pytest.mark.parametrize("angle", [1e-6, 1e-9, 1e-12, 1e-14])
def test_nearly_equal_rows_of_a_hypothesis_err_downwards(angle):
    """What solving for the only point of H0 loses is paid; nor is a point of the ball overlooked."""
    torch.manual_seed(0)
    S, X = 4.0, torch.nn.functional.normalize(torch.randn(400, 2).double(), dim=-1)
    loss = glb.NegativeLogLikelihood(glb.Gaussian(0.1), X, X[:, 0])
    A, zero = torch.tensor([[1.0, 0.0], [1.0, angle]]).double(), torch.zeros(()).double()
    exact = mpmath.matrix(A.tolist())
    inside = 0
    for _ in range(20):
        b = A @ (torch.nn.functional.normalize(torch.randn(2).double(), dim=-1) * (1 - 1e-9) * S)
        found = likelihood_ratio_test(
            loss, glb.Ball(2, S), zero, A, b, theta_hat=torch.eye(2).double()[0]
        )
        with mpmath.workdps(50):
            point = mpmath.lu_solve(exact, mpmath.matrix(b.tolist()))
            z = [point[0] * x + point[1] * y for x, y in X.tolist()]
            pairs = zip(z, X[:, 0].tolist(), strict=True)
            least = sum((t * t / 2 - t * r) for t, r in pairs) / mpmath.mpf(0.1) ** 2
            if mpmath.norm(point) <= S:
                inside += 1
                assert found.log_e.item() <= least
    assert inside > 0
