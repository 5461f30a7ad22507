"""Golden traces: the baselines against plain, slow NumPy and SciPy that share no code with them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch

from torchglb import policies
from torchglb.domain import Ball
from torchglb.families import Bernoulli, Binomial, Gaussian, Poisson, QuasiBounded
from torchglb.policies.bernstein import noise_bound, ridge_of

Array = np.ndarray
ROUNDS, ARMS, DIM, DELTA, HORIZON = 50, 6, 3, 0.05, 1000
TOLERANCE = 1e-6


def sigmoid(z):
    return 1.0 / (1.0 + np.exp(-z))


def loss(z, r):
    return np.logaddexp(0.0, z) - r * z


@pytest.fixture(autouse=True)
def _one_thread():
    """These problems are so small that a second thread only waits for the first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Trace:
    """A fixed history: the arms of every round, the one that somebody played, its reward."""

    def __init__(self, radius: float, family: str = "bernoulli", dim: int = DIM) -> None:
        rng = np.random.default_rng(7)
        arms = rng.normal(size=(ROUNDS + 1, ARMS, dim))
        arms /= np.linalg.norm(arms, axis=-1, keepdims=True)
        self.arms = arms * rng.uniform(0.4, 1.0, size=(ROUNDS + 1, ARMS, 1))
        direction = rng.normal(size=dim)
        theta = 0.8 * radius * direction / np.linalg.norm(direction)
        self.X = self.arms[:ROUNDS][np.arange(ROUNDS), rng.integers(ARMS, size=ROUNDS)]
        z = self.X @ theta
        draw = {
            "bernoulli": lambda: rng.uniform(size=ROUNDS) < sigmoid(z),
            "gaussian": lambda: z + 0.5 * rng.normal(size=ROUNDS),
            "poisson": lambda: rng.poisson(np.exp(z)),
        }[family]
        self.r = draw().astype(float)

    def run(self, policy):
        """Yields ``n``, the arms of the round, and hands the history to the policy one by one."""
        for n in range(ROUNDS + 1):
            yield n, self.arms[n]
            if n < ROUNDS:
                policy.update(torch.tensor(self.X[n]), torch.tensor(self.r[n]))


def build(name: str, radius: float, family=None, dim: int = DIM, **options):
    return policies.make(
        name,
        family=Bernoulli() if family is None else family,
        domain=Ball(dim, radius),
        **({"delta": DELTA, "horizon": HORIZON} | options),
    )


def scores_of(policy, arms: Array) -> Array:
    return policy.scores(torch.tensor(arms)).numpy()


def minimise(value, slope, start: Array) -> Array:
    """An unconstrained minimiser, polished by solving slope = 0."""
    exact = scipy.optimize.root(slope, start, tol=1e-14)
    if np.abs(slope(exact.x)).max() >= 1e-9:
        rough = scipy.optimize.minimize(value, start, jac=slope, method="BFGS").x
        exact = scipy.optimize.root(slope, rough, tol=1e-14)
    assert np.abs(slope(exact.x)).max() < 1e-9
    return exact.x


def ridge_estimate(X: Array, r: Array, lam: float, tilt: Array | None = None) -> Array:
    tilt = np.zeros(X.shape[1]) if tilt is None else tilt
    return minimise(
        lambda th: loss(X @ th, r).sum() + 0.5 * lam * th @ th - tilt @ th,
        lambda th: X.T @ (sigmoid(X @ th) - r) + lam * th - tilt,
        np.zeros(X.shape[1]),
    )


def logistic_hessian(X: Array, theta: Array, lam: float) -> Array:
    p = sigmoid(X @ theta)
    return (X.T * (p * (1 - p))) @ X + lam * np.eye(X.shape[1])


def norm(x: Array, A: Array) -> float:
    return float(np.sqrt(x @ np.linalg.solve(A, x)))


def nearest_in_ball(point: Array, A: Array, radius: float) -> Array:
    """The point of the ball nearest in the norm of A, by the multiplier of the ball."""
    if np.linalg.norm(point) <= radius:
        return point
    eye = np.eye(len(point))

    def shifted(nu: float) -> Array:
        return np.linalg.solve(A + nu * eye, A @ point)

    top = 1.0
    while np.linalg.norm(shifted(top)) > radius:
        top *= 2
    return shifted(
        scipy.optimize.brentq(lambda nu: np.linalg.norm(shifted(nu)) - radius, 0, top, xtol=1e-14)
    )


# ---- the first eight -----------------------------------------------------------------------------


@pytest.mark.parametrize("radius", [1.0, 4.0])
def test_evill(radius):
    trace = Trace(radius)
    policy = build("evill", radius)
    for n, arms in trace.run(policy):
        X, r = trace.X[:n], trace.r[:n]
        noise = policy.state_dict()["state"]["noise"].numpy()
        H = logistic_hessian(X, ridge_estimate(X, r, 1.0), 1.0)
        tilt = np.linalg.cholesky(H) @ noise
        expected = arms @ ridge_estimate(X, r, 1.0, tilt)
        np.testing.assert_allclose(scores_of(policy, arms), expected, atol=TOLERANCE, rtol=0)
        before = noise.copy()
        policy.select(torch.tensor(arms))  # draws the next perturbation
        assert np.abs(policy.state_dict()["state"]["noise"].numpy() - before).max() > 1e-3


@pytest.mark.parametrize("family", ["gaussian", "poisson"])
def test_evill_of_other_families(family):
    trace = Trace(1.0, family)
    policy = build("evill", 1.0, Gaussian(0.5) if family == "gaussian" else Poisson())
    for n, arms in trace.run(policy):
        if n % 10:
            continue
        X, r = trace.X[:n], trace.r[:n]
        noise = policy.state_dict()["state"]["noise"].numpy()
        if family == "gaussian":
            H = X.T @ X / 0.25 + np.eye(DIM)
            theta = np.linalg.solve(H, X.T @ r / 0.25 + np.linalg.cholesky(H) @ noise)
        else:

            def estimate(tilt, X=X, r=r):
                return minimise(
                    lambda th: (np.exp(X @ th) - r * (X @ th)).sum() + 0.5 * th @ th - tilt @ th,
                    lambda th: X.T @ (np.exp(X @ th) - r) + th - tilt,
                    np.zeros(DIM),
                )

            H = (X.T * np.exp(X @ estimate(np.zeros(DIM)))) @ X + np.eye(DIM)
            theta = estimate(np.linalg.cholesky(H) @ noise)
        np.testing.assert_allclose(scores_of(policy, arms), arms @ theta, atol=TOLERANCE, rtol=0)


def test_constants_of_evill_theory():
    # d = 2, S = 3, delta = 0.05, T = 1000: M = log 60 (> 1 + log(126)/2)
    policy = build("evill-theory", 3.0, dim=2)
    M = max(math.log(60.0), 1 + 0.5 * math.log(126.0))
    lam = 4 / 3 * M
    a = math.sqrt(lam) * 3.5 + 4 / math.sqrt(lam) * M
    C = math.sqrt(2.0) + math.sqrt(2 * math.log(1000 * 3 / 0.05))
    Xi = math.sqrt(2.0) * 6.5
    kappa = 2 + math.exp(3.0) + math.exp(-3.0)
    b = 1 / (22 * (1 + (Xi + Xi**2) * C**2) * C**2 * a * math.sqrt(kappa))
    assert float(policy.regularization) == pytest.approx(lam, rel=1e-12)
    assert float(policy.scale) == pytest.approx(a, rel=1e-12)
    assert float(policy.level) == pytest.approx(b, rel=1e-12)


def estimate_in_ball(X: Array, r: Array, radius: float) -> Array:
    """The multiplier of an active ball is a ridge."""

    def excess(nu: float) -> float:
        return float(np.linalg.norm(ridge_estimate(X, r, nu))) - radius

    if excess(1e-6) < 0:
        return ridge_estimate(X, r, 0.0)
    top = 1.0
    while excess(top) > 0:
        top *= 2
    return ridge_estimate(X, r, scipy.optimize.brentq(excess, 1e-6, top, xtol=1e-14))


def rs_glincb_reference(trace: Trace, radius: float, scale: float, horizon: int, delta: float):
    """Plain RS-GLinCB: yields scores and choice of every round."""
    dim = trace.X.shape[1]
    size = dim * math.log(horizon / delta)
    lam, gamma = size, 25 * scale * radius * math.sqrt(size)
    kappa = 2 + math.exp(radius) + math.exp(-radius)
    V, H, H_tau = (lam * np.eye(dim) for _ in range(3))
    theta_o = theta_tau = np.zeros(dim)
    warm, other, switches = [], [], 0
    for n in range(ROUNDS + 1):
        arms = trace.arms[n]
        novelty = np.array([norm(x, V) ** 2 for x in arms])
        if novelty.max() >= 1 / (gamma**2 * kappa):
            scores, choice = novelty, int(np.argmax(novelty))
            eliminated = 0
        else:
            width = gamma * math.sqrt(kappa) * np.sqrt(novelty)
            lower, upper = arms @ theta_o - width, arms @ theta_o + width
            scores = np.array(
                [x @ theta_tau + 150 * scale * math.sqrt(size) * norm(x, H_tau) for x in arms]
            )
            eliminated = int((upper < lower.max()).sum())
            choice = int(np.argmax(np.where(upper >= lower.max(), scores, -np.inf)))
        yield scores, choice, switches, eliminated
        if n == ROUNDS:
            return
        x = trace.X[n]
        if norm(x, V) ** 2 >= 1 / (gamma**2 * kappa):
            warm.append(n)
            V = V + np.outer(x, x)
            theta_o = ridge_estimate(trace.X[warm], trace.r[warm], lam)
        else:
            other.append(n)
            p = sigmoid(x @ theta_o)
            H = H + p * (1 - p) / math.e * np.outer(x, x)
            if np.linalg.det(H) > 2 * np.linalg.det(H_tau):
                H_tau, switches = H, switches + 1
                theta_tau = estimate_in_ball(trace.X[other], trace.r[other], radius)


@pytest.mark.parametrize(
    ("radius", "scale", "horizon", "delta", "phases"),
    [
        (2.0, 1.0, HORIZON, DELTA, {True}),  # theory: the warm-up outlasts the trace
        (2.0, 0.002, HORIZON, DELTA, {False}),  # no warm-up at all
        (2.0, 0.025, 1, 0.9, {True, False}),  # a small ridge: both phases, and switches
        (0.2, 0.39, 1, 0.9, {True, False}),  # and the ball is active
    ],
)
def test_rs_glincb(radius, scale, horizon, delta, phases):
    trace = Trace(radius)
    policy = build("rs-glincb", radius, scale=scale, horizon=horizon, delta=delta)
    reference = rs_glincb_reference(trace, radius, scale, horizon, delta)
    warm, last = set(), 0
    for (_, arms), (scores, choice, switches, eliminated) in zip(
        trace.run(policy), reference, strict=True
    ):
        np.testing.assert_allclose(scores_of(policy, arms), scores, atol=TOLERANCE, rtol=0)
        assert int(policy.select(torch.tensor(arms))) == choice
        assert int(policy.switches) == switches
        assert int((~policy.kept(torch.tensor(arms))).sum()) == eliminated
        warm.add(bool(policy.warming_up(torch.tensor(arms))))
        last = switches
    assert warm == phases
    assert last >= 2 if horizon == 1 else last == 0
    if radius < 1:
        estimate = policy.state_dict()["state"]["theta_tau"]
        assert float(torch.linalg.vector_norm(estimate)) == pytest.approx(radius, rel=1e-9)


def proximal(x: Array, rewards: list[float], centre: Array, W: Array, radius: float) -> Array:
    """The step of ECOLog over the ball, by Newton's method and the multiplier of the ball."""
    c = 1 / (2 + radius)
    eye = np.eye(len(x))

    def step(nu: float) -> Array:
        theta = centre.copy()
        for _ in range(60):
            p = sigmoid(x @ theta)
            slope = sum(p - r for r in rewards) * x + 2 * c * W @ (theta - centre) + nu * theta
            bend = len(rewards) * p * (1 - p) * np.outer(x, x) + 2 * c * W + nu * eye
            move = np.linalg.solve(bend, slope)
            theta = theta - move
            if np.abs(move).max() < 1e-15:
                break
        return theta

    free = step(0.0)
    if np.linalg.norm(free) <= radius:
        return free
    top = 1.0
    while np.linalg.norm(step(top)) > radius:
        top *= 2
    return step(
        scipy.optimize.brentq(lambda nu: np.linalg.norm(step(nu)) - radius, 0, top, xtol=1e-14)
    )


@pytest.mark.parametrize("radius", [0.5, 3.0])
def test_ada_ofu_ecolog_with_public_constants(radius):
    trace = Trace(radius)
    policy = build("ada-ofu-ecolog", radius, constants="public")
    theta, W, excess, active = np.zeros(DIM), radius * np.eye(DIM), 0.0, 0
    for n, arms in trace.run(policy):
        t, stiff = n + 1, 2 + radius
        nu = 0.5 + 2 * math.log(2 * math.sqrt(1 + t / (4 * radius)) / DELTA)
        u = stiff * nu / 4 + radius**2 / stiff
        sigma = 4 * radius**2 + 2 * stiff * (u + excess) + 4 * math.log(1 + t)
        expected = [x @ theta + math.sqrt(sigma) * norm(x, W) for x in arms]
        np.testing.assert_allclose(scores_of(policy, arms), expected, atol=TOLERANCE, rtol=0)
        # the bonus belongs to <x, theta>; added to the mean, as in public code, it is no bound
        if n:
            mixed = [sigmoid(x @ theta) + math.sqrt(sigma) * norm(x, W) for x in arms]
            assert np.abs(scores_of(policy, arms) - mixed).max() > 0.1
        if n < ROUNDS:
            x, r = trace.X[n], trace.r[n]
            bar = proximal(x, [0.0, 1.0], theta, W, radius)
            theta = proximal(x, [r], theta, W, radius)
            active += np.linalg.norm(theta) > radius * (1 - 1e-9)
            excess += loss(x @ bar, r) - loss(x @ theta, r)
            p = sigmoid(x @ theta)
            W = W + p * (1 - p) * np.outer(x, x)
    assert active > 5 if radius < 1 else active == 0


def log_odds_step(rewards, z0: float, q: float, low: float, high: float) -> float:
    """The minimiser of the losses plus ``(z - z0)^2 / ((2 + D) q)`` over the interval."""

    def value(z: float) -> float:
        return sum(loss(z, r) for r in rewards) + (z - z0) ** 2 / ((2 + high - low) * q)

    found = scipy.optimize.minimize_scalar(
        value, bounds=(low, high), method="bounded", options={"xatol": 1e-12}
    )
    ends = min((value(z), z) for z in (low, float(found.x), high))
    return ends[1]


@pytest.mark.parametrize(("radius", "pushed"), [(0.5, False), (3.0, False), (30.0, True)])
def test_ada_ofu_ecolog(radius, pushed):
    """The second estimate is the policy's own (tested below); everything else is done again."""
    trace = Trace(radius)
    if pushed:  # one arm that always succeeds: the log-odds go where one reward could change much
        trace.X, trace.r = 0 * trace.X + np.array([0.6, 0.8, 0.0]), np.ones(ROUNDS)
    policy = build("ada-ofu-ecolog", radius)
    theta, W, excess, spent = np.zeros(DIM), radius * np.eye(DIM), 0.0, 0
    for n, arms in trace.run(policy):
        square = radius**3 + (2 + 2 * radius) * math.log(2 / DELTA) + excess
        expected = [x @ theta + math.sqrt(square) * norm(x, W) for x in arms]
        np.testing.assert_allclose(scores_of(policy, arms), expected, atol=1e-5, rtol=0)
        assert int(policy.spent) == spent
        if n < ROUNDS:
            x, r = trace.X[n], trace.r[n]
            low, high = (float(end) for end in policy.interval_of(torch.tensor(x)))
            assert -radius * np.linalg.norm(x) - 1e-12 <= low < high
            assert high <= radius * np.linalg.norm(x) + 1e-12
            z0, q = x @ theta, norm(x, W) ** 2
            bar = log_odds_step([0.0, 1.0], z0, q, low, high)
            ends = [log_odds_step([u], z0, q, low, high) for u in (0.0, 1.0)]
            variance = [sigmoid(z) * sigmoid(-z) for z in (bar, *ends)]
            if variance[0] > 2 * min(variance[1:]):
                spent += 1
                continue
            after = log_odds_step([r], z0, q, low, high)
            excess += (2 + high - low) * (loss(bar, r) - loss(after, r)) - (after - z0) ** 2 / q
            free = theta + (after - z0) / q * np.linalg.solve(W, x)
            W = W + sigmoid(after) * sigmoid(-after) * np.outer(x, x)
            theta = nearest_in_ball(free, W, radius)
    assert spent > 3 if pushed else spent == 0


# ---- mirror descent ------------------------------------------------------------------------------

#: log-partition, mean, variance, 1/g, R on the ball, R of the theorem, max variance
MIRROR = {
    "bernoulli": (
        lambda z: np.logaddexp(0.0, z), sigmoid, lambda z: sigmoid(z) * sigmoid(-z), 1.0,
        lambda S: math.tanh(S / 2), 1.0, lambda S: 0.25,
    ),
    "gaussian": (
        lambda z: z * z / 2, lambda z: z, lambda z: 1.0 + 0 * z, 4.0, lambda S: 0.0, 0.0,
        lambda S: 1.0,
    ),
    "poisson": (np.exp, np.exp, np.exp, 1.0, lambda S: 1.0, 1.0, math.exp),
}  # fmt: skip


@pytest.mark.parametrize("name", ["glb-omd", "glb-omd-realised", "glb-omd-rows"])
@pytest.mark.parametrize("family", MIRROR)
@pytest.mark.parametrize("radius", [0.4, 2.0])
def test_mirror_descent(name, family, radius):
    trace = Trace(radius, family)
    law = {"bernoulli": None, "gaussian": Gaussian(0.5), "poisson": Poisson()}[family]
    policy = build(name, radius, law)
    m, mean, variance, scale, R, published, largest = MIRROR[family]
    eta = {
        "glb-omd": 1 + published * radius,
        "glb-omd-realised": 1 + R(radius) * radius,
        "glb-omd-rows": 1.0,
    }[name]
    lam = {
        "glb-omd": max(
            14 * DIM * eta * published**2, 6 * eta * published * radius * largest(radius) * scale
        )
        or 1.0,
        "glb-omd-realised": float(DIM),
        "glb-omd-rows": 1.0,
    }[name]
    spread = 1.0 if name == "glb-omd-rows" else 1.5
    nodes, weights = np.polynomial.hermite.hermgauss(20)  # the physicists', for exp(-t^2)

    def row_loss(z, r):
        return scale * (m(z) - r * z)

    theta, H, b = np.zeros(DIM), lam * np.eye(DIM), np.zeros(DIM)
    excess, projections = 0.0, 0
    for n, arms in trace.run(policy):
        if name == "glb-omd":
            centre = theta
            square = 4 * lam * radius**2 + 2 * eta * math.log(1 / DELTA)
            growth = math.log(1 + largest(radius) * scale * n / lam)
            square += DIM * (6 * eta**2 + eta) * growth
        else:
            centre = theta - eta * np.linalg.solve(H, b)
            square = lam * radius**2 + 2 * eta * math.log(1 / DELTA) + excess
            square += eta**2 * b @ np.linalg.solve(H, b) - 2 * eta * b @ theta
        assert float(policy.squared_radius()) == pytest.approx(square, rel=1e-7)
        expected = [x @ centre + math.sqrt(square) * norm(x, H) for x in arms]
        np.testing.assert_allclose(scores_of(policy, arms), expected, atol=TOLERANCE, rtol=1e-7)
        if n == ROUNDS:
            break
        x, r = trace.X[n], trace.r[n]
        z = x @ theta
        A = H + eta * scale * variance(z) * np.outer(x, x)
        free = theta - eta * scale * (mean(z) - r) * np.linalg.solve(A, x)
        projections += np.linalg.norm(free) > radius
        after = nearest_in_ball(free, A, radius)
        there = x @ after
        a = scale * (mean(there) - mean(z) - variance(z) * (there - z))
        points = z + math.sqrt(2 * spread * eta * x @ np.linalg.solve(H, x)) * nodes
        mixed = -math.log(weights @ np.exp(-row_loss(points, r)) / math.sqrt(math.pi))
        excess += 2 * eta * (mixed - row_loss(there, r) + a * there)
        excess -= (after - theta) @ H @ (after - theta)
        weight = scale * variance(there)
        if name == "glb-omd-rows":
            y = np.linspace(-1, 1, 20_001) * radius * np.linalg.norm(x)
            y = y[np.abs(y - there) > 1e-3]
            weight = scale * np.min(
                2 * (m(y) - m(there) - mean(there) * (y - there)) / (y - there) ** 2
            )
        b = b + a * x
        H = H + weight * np.outer(x, x)
        theta = after
    assert projections > 0 or radius > 1 or name == "glb-omd"  # whose lambda is large


# ---- the rest of the table -----------------------------------------------------------------------


def small_ball_estimate(X: Array, r: Array, lam: float, radius: float) -> Array:
    """The minimiser of a logistic loss with a ridge over the ball, whose multiplier is a ridge."""
    free = ridge_estimate(X, r, lam)
    if np.linalg.norm(free) <= radius:
        return free

    def excess(nu: float) -> float:
        return float(np.linalg.norm(ridge_estimate(X, r, lam + nu))) - radius

    return ridge_estimate(X, r, lam + scipy.optimize.brentq(excess, 0.0, 1e4, xtol=1e-14))


@pytest.mark.parametrize("radius", [0.3, 2.0])
@pytest.mark.parametrize("constants", ["proven", "public"])
def test_glm_ucb(radius, constants):
    trace = Trace(radius)
    if radius < 1:
        trace.r[:] = 1.0  # pulls the estimate out of the ball
    policy = build("glm-ucb", radius, constants=constants)
    kappa = 2 + math.exp(radius) + math.exp(-radius)
    active = 0
    for n, arms in trace.run(policy):
        X, r = trace.X[:n], trace.r[:n]
        V = DIM * np.eye(DIM) + X.T @ X
        theta = small_ball_estimate(X, r, DIM, radius)
        active += np.linalg.norm(theta) > radius * (1 - 1e-9)
        growth = 2 * math.log(1 / DELTA) + np.linalg.slogdet(V)[1] - DIM * math.log(DIM)
        if constants == "proven":
            around = kappa * (0.5 * math.sqrt(growth) + math.sqrt(DIM) * radius)
            bonus = 0.25 * around
            region = policy.confidence_set()
            assert float(region.gamma) == pytest.approx(around**2, rel=1e-7)
            np.testing.assert_allclose(region.shape.numpy(), V, rtol=1e-12, atol=1e-12)
        else:
            bonus = 0.25 * kappa * math.sqrt(growth) + math.sqrt(DIM) * radius
            assert policy.confidence_set() is None
        expected = [sigmoid(x @ theta) + bonus * norm(x, V) for x in arms]
        np.testing.assert_allclose(scores_of(policy, arms), expected, atol=TOLERANCE, rtol=0)
    assert active > 20 if radius < 1 else active == 0


def test_glm_ucb_with_a_dispersion_and_a_steep_mean():
    """Probit rewards have a dispersion, and eight trials a mean so steep that kappa is 1."""
    x = torch.tensor([0.6, 0.0, 0.8], dtype=torch.float64)
    for family, S in ((QuasiBounded("probit"), 1.0), (Binomial(8), 0.2)):
        policy = build("glm-ucb", S, family)
        policy.update(x, 1.0)
        width = 1.0 if S == 1.0 else 8.0
        least = scipy.stats.norm.pdf(1.0) if S == 1.0 else 8 * sigmoid(S) * sigmoid(-S)
        g = family.dispersion
        growth = 2 * math.log(1 / DELTA) + math.log(1 + 1 / DIM)  # one row of length 1
        inside = width / 2 / g * math.sqrt(growth) + math.sqrt(DIM) * S
        expected = max(1.0, g / least) * inside
        assert float(policy.radius()) == pytest.approx(expected, rel=1e-6)
        assert (S == 0.2) == (g / least < 1.0)


def bernstein(X: Array, lam: float) -> float:
    """The bound on the noise: plain, with the design's determinant from its eigenvalues."""
    dim, rho = X.shape[1], X.shape[1] * math.log(2.0)
    eigenvalues = np.linalg.eigvalsh(X.T @ X)
    found = []
    for b in (math.sqrt(lam) / 2, 1.0):
        if b >= math.sqrt(lam):
            continue
        cdf = scipy.stats.chi2(dim).cdf
        c = math.log(1 / DELTA) + 0.5 * np.log1p(eigenvalues / (4 * rho)).sum()
        c += math.log(cdf(2 * rho)) - math.log(cdf(2 * rho * (1 - b / math.sqrt(lam)) ** 2))
        found.append(b + c / b)
    return min(found)


@pytest.mark.parametrize("radius", [0.3, 2.0])
def test_log_ucb_1(radius):
    trace = Trace(radius)
    if radius < 1:
        trace.r[:] = 1.0  # pulls the estimate out of the ball
    policy = build("log-ucb-1", radius)
    kappa = 2 + math.exp(radius) + math.exp(-radius)
    active = 0
    for n, arms in trace.run(policy):
        X, r = trace.X[:n], trace.r[:n]
        lam = DIM * math.log(2 + n)
        theta = small_ball_estimate(X, r, lam, radius)
        active += np.linalg.norm(theta) > radius * (1 - 1e-9)
        w = bernstein(X, lam)
        # y <= w sqrt(1 + min(2S, (y + sqrt(lam) S)/sqrt(lam))), solved by iteration from above
        y = 1e6
        for _ in range(200):
            y = w * math.sqrt(1 + min(2 * radius, y / math.sqrt(lam) + radius))
        around = math.sqrt(kappa) * (y + math.sqrt(lam) * radius)
        V = DIM * np.eye(DIM) + X.T @ X
        region = policy.confidence_set()
        assert float(region.gamma) == pytest.approx(around**2, rel=1e-7)
        np.testing.assert_allclose(region.shape.numpy(), V, rtol=1e-12, atol=1e-12)
        expected = [sigmoid(x @ theta) + 0.25 * around * norm(x, V) for x in arms]
        np.testing.assert_allclose(scores_of(policy, arms), expected, atol=TOLERANCE, rtol=0)
    assert active > 20 if radius < 1 else active == 0


def test_log_ucb_1_with_public_constants():
    radius = 2.0
    trace = Trace(radius)
    policy = build("log-ucb-1", radius, constants="public")
    assert policy.confidence_set() is None
    kappa = 2 + math.exp(radius) + math.exp(-radius)
    for n, arms in trace.run(policy):
        X, r = trace.X[:n], trace.r[:n]
        lam = DIM * math.log(2 + n)
        theta = ridge_estimate(X, r, lam)
        H = logistic_hessian(X, theta, lam)
        F = scipy.stats.chi2(DIM).cdf
        c = math.log(1 / DELTA) + 0.5 * np.linalg.slogdet(H)[1] - DIM / 2 * math.log(lam)
        c += math.log(F(2 * lam) / F(lam))
        g = min(math.sqrt(lam) / 2 + 2 / math.sqrt(lam) * c, 1 + c)
        width = min(math.sqrt(1 + 2 * radius) * g, g + g**2 / math.sqrt(lam))
        bonus = 0.25 * math.sqrt(kappa) * width + math.sqrt(lam) * radius
        V = DIM * np.eye(DIM) + X.T @ X
        expected = [sigmoid(x @ theta) + bonus * norm(x, V) for x in arms]
        np.testing.assert_allclose(scores_of(policy, arms), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("radius", [0.5, 3.0])
def test_level_of_ofulog_r(radius):
    trace = Trace(radius)
    policy = build("ofulog-r", radius)
    for n, _ in trace.run(policy):
        X, r = trace.X[:n], trace.r[:n]
        lam = DIM * math.log(2 + n)
        theta = ridge_estimate(X, r, lam)
        least = loss(X @ theta, r).sum() + 0.5 * lam * theta @ theta
        g = math.sqrt(lam) * radius + bernstein(X, lam)
        level = float(policy.confidence_set().level)
        assert level == pytest.approx(least + (g + g * g / math.sqrt(lam)) ** 2, rel=1e-8)


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("observations", [0, pytest.param(3, marks=pytest.mark.slow), 10_000])
@pytest.mark.parametrize("information", [0.0, 2.0, 3000.0])
def test_noise_bound_holds_for_the_mixture_itself(dim, observations, information):
    """The largest noise that the mixture allows, by quadrature, is below the bound, not far."""
    rho, lam = ridge_of(dim, 0), ridge_of(dim, observations)
    bends = np.array([information, 0.3 * information])[:dim] + rho  # of H + rho I
    if dim == 1:
        xi = np.linspace(-1, 1, 200_001)[:, None]
        weight = np.full(len(xi), xi[1, 0] - xi[0, 0])
    else:
        radius, angle = np.linspace(0, 1, 4001)[1:], np.linspace(0, 2 * np.pi, 401)[:-1]
        xi = np.stack([np.outer(radius, np.cos(angle)), np.outer(radius, np.sin(angle))], -1)
        weight = np.repeat(radius * (radius[1] - radius[0]) * (angle[1] - angle[0]), 400)
        xi = xi.reshape(-1, 2)
    prior = weight @ np.exp(-rho * (xi**2).sum(-1))

    def log_mixture(noise: Array) -> float:
        exponent = xi @ noise - (xi**2) @ bends
        top = exponent.max()
        return top + math.log(weight @ np.exp(exponent - top) / prior)

    bound = float(noise_bound(torch.tensor(np.log(bends / rho).sum()), dim, DELTA, lam))
    for direction in np.eye(dim):
        size = scipy.optimize.brentq(
            lambda s, d=direction: log_mixture(s * d) - math.log(1 / DELTA), 0.0, 1e5
        )
        allowed = size / math.sqrt(direction @ (bends - rho + lam))
        assert allowed <= bound
    assert bound <= 4.0 * allowed


@pytest.mark.parametrize("family", ["bernoulli", "gaussian", "poisson"])
@pytest.mark.parametrize("radius", [0.2, 2.0])
@pytest.mark.parametrize("constants", ["proven", "public"])
def test_gloc(family, radius, constants):
    trace = Trace(radius, family)
    public = constants == "public"
    mean, least, noise, law = {
        "bernoulli": (
            sigmoid,
            1 / (2 + math.exp(radius) + math.exp(-radius)),
            radius if public else 0.5,
            None,
        ),
        "gaussian": (lambda z: z, 1.0, 0.5, Gaussian(0.5)),
        "poisson": (
            np.exp,
            math.exp(-radius),
            math.exp(radius) if public else math.exp(radius / 2),
            Poisson(),
        ),
    }[family]
    policy = build("gloc", radius, law, constants=constants)
    theta, moment, V = np.zeros(DIM), np.zeros(DIM), DIM * np.eye(DIM)
    B, squares, projections = 2 * least * radius**2 * DIM, 0.0, 0
    for n, arms in trace.run(policy):
        ratio = noise / least
        inside = 1 + 2 * B / least + 4 * ratio**4 / DELTA**2
        square = 1 + 4 / least * B + 8 * ratio**2 * math.log(2 * math.sqrt(inside) / DELTA)
        centre = np.linalg.solve(V, moment)
        if not public:
            square += DIM * radius**2 - (squares - centre @ moment)
        expected = [x @ centre + math.sqrt(square) * norm(x, V) for x in arms]
        np.testing.assert_allclose(scores_of(policy, arms), expected, atol=TOLERANCE, rtol=1e-12)
        np.testing.assert_allclose(policy.theta.numpy(), theta, atol=TOLERANCE, rtol=0)
        if n < ROUNDS:
            x, r = trace.X[n], trace.r[n]
            z = x @ theta
            grad = (mean(z) - r) * x
            V = V + np.outer(x, x)
            moment, squares = moment + z * x, squares + z * z
            B += grad @ np.linalg.solve(V, grad) / (2 * least)
            free = theta - np.linalg.solve(V, grad) / least
            projections += np.linalg.norm(free) > radius
            theta = nearest_in_ball(free, V, radius)
    assert projections < ROUNDS  # some iterates stay inside, and are left alone
    assert projections > 0 or radius == 2.0


@pytest.mark.parametrize("radius", [0.3, 2.0])
def test_ol2m(radius):
    trace = Trace(radius)
    policy = build("ol2m", radius)
    b = 1 / (2 * (1 + math.exp(radius)))
    theta, Z, projections = np.zeros(DIM), DIM * np.eye(DIM), 0
    for n, arms in trace.run(policy):
        t = n + 1
        square = 8 * radius + DIM * radius**2
        square += (8 / b + 16 * radius / 3) * math.log(4 * math.log(t + 1) * t**2 / DELTA)
        square += 2 / b * (np.linalg.slogdet(Z)[1] - DIM * math.log(DIM))
        expected = [x @ theta + math.sqrt(square) * norm(x, Z) for x in arms]
        np.testing.assert_allclose(scores_of(policy, arms), expected, atol=TOLERANCE, rtol=0)
        if n:
            mixed = [sigmoid(x @ theta) + math.sqrt(square) * norm(x, Z) for x in arms]
            assert np.abs(scores_of(policy, arms) - mixed).max() > 0.1
        if n < ROUNDS:
            x, r = trace.X[n], trace.r[n]
            Z = Z + b / 2 * np.outer(x, x)
            free = theta - np.linalg.solve(Z, (sigmoid(x @ theta) - r) * x)
            projections += np.linalg.norm(free) > radius
            theta = nearest_in_ball(free, Z, radius)
    assert projections > 0 if radius < 1 else projections == 0


def test_oful():
    radius, sigma = 2.0, 0.5
    trace = Trace(radius, "gaussian")
    policy = build("oful", radius, Gaussian(sigma), regularization=0.7)
    for n, arms in trace.run(policy):
        X, r = trace.X[:n], trace.r[:n]
        V = 0.7 * np.eye(DIM) + X.T @ X
        theta = np.linalg.solve(V, X.T @ r)
        growth = 2 * math.log(1 / DELTA) + np.linalg.slogdet(V)[1] - DIM * math.log(0.7)
        radius_now = sigma * math.sqrt(growth) + math.sqrt(0.7) * radius
        expected = [x @ theta + radius_now * norm(x, V) for x in arms]
        np.testing.assert_allclose(scores_of(policy, arms), expected, atol=TOLERANCE, rtol=0)


def test_thompson_sampling_and_greedy():
    trace = Trace(2.0)
    policy, greedy = build("ts", 2.0), build("greedy", 2.0)
    for n, arms in trace.run(policy):
        X, r = trace.X[:n], trace.r[:n]
        theta = ridge_estimate(X, r, 1.0)
        noise = policy.state_dict()["state"]["noise"].numpy()
        factor = np.linalg.cholesky(logistic_hessian(X, theta, 1.0))
        sample = theta + np.linalg.solve(factor.T, noise)
        np.testing.assert_allclose(scores_of(policy, arms), arms @ sample, atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(scores_of(greedy, arms), arms @ theta, atol=TOLERANCE, rtol=0)
        if n < ROUNDS:
            greedy.update(torch.tensor(trace.X[n]), torch.tensor(trace.r[n]))
