"""Scores on a fixed history, against a plain and slow calculation in NumPy and SciPy.

Nothing of the library is used on the reference side. In the plane the boundary of a convex set is a
curve: it is walked along by root finding on rays, and the best point on it is the support.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch

from torchglb import policies
from torchglb.domain import Ball
from torchglb.families import Bernoulli

S, DELTA, ROUNDS = 6.0, 0.05, 50
LAST = (1, 2, 5, 12, 25, 50)
TOLERANCE = 1e-6

# Fifty rounds: directions by the golden angle, lengths by another irrational, rewards drawn once.
_STEPS = np.arange(ROUNDS)
_ANGLES = 2.399963229728653 * _STEPS
_LENGTHS = 0.4 + 0.6 * ((0.754877666 * _STEPS) % 1.0)
X = _LENGTHS[:, None] * np.stack([np.cos(_ANGLES), np.sin(_ANGLES)], axis=-1)
R = np.array([float(c) for c in "10110101001100101011110100101011010111001011010010"])
_FAN = 2.0 * np.pi * np.arange(7) / 7 + 0.3
ARMS = np.stack([np.cos(_FAN), np.sin(_FAN)], axis=-1) * np.linspace(0.5, 1.0, 7)[:, None]


# ---- the reference -----------------------------------------------------------------------------


def nll(theta, X, r, w=None):
    z = X @ theta
    terms = np.logaddexp(0.0, z) - r * z
    return float(terms.sum() if w is None else w @ terms)


def variance(z):
    return 1.0 / ((1.0 + np.exp(z)) * (1.0 + np.exp(-z)))


def ridge_minimum(X, r, w, ridge):
    """The minimiser over the plane of the weighted loss plus a ridge, by damped Newton steps."""
    theta = np.zeros(2)

    def objective(theta):
        return nll(theta, X, r, w) + 0.5 * ridge * theta @ theta

    for _ in range(200):
        z = X @ theta
        gradient = X.T @ (w * (1.0 / (1.0 + np.exp(-z)) - r)) + ridge * theta
        hessian = (X.T * (w * variance(z))) @ X + ridge * np.eye(2)
        step = np.linalg.solve(hessian, gradient)
        length = 1.0
        while objective(theta - length * step) > objective(theta) + 1e-14 and length > 1e-8:
            length *= 0.5
        theta = theta - length * step
        if np.abs(length * step).max() < 1e-14:
            break
    return theta


def ball_minimum(X, r, w=None, ridge=0.0):
    """The minimiser over the ball: a larger ridge where the one asked for leads outside."""
    w = np.ones(len(r)) if w is None else w
    if len(r) == 0:
        return np.zeros(2)
    least = max(ridge, 1e-9)  # for the rounds without a unique minimiser
    theta = ridge_minimum(X, r, w, least)
    if np.linalg.norm(theta) <= S:
        if ridge == 0.0:
            theta = ridge_minimum(X, r, w, 0.0)
        return theta

    def excess(log_ridge):
        return np.linalg.norm(ridge_minimum(X, r, w, math.exp(log_ridge))) - S

    root = scipy.optimize.brentq(excess, math.log(least), 8.0, xtol=1e-14, rtol=1e-14)
    return ridge_minimum(X, r, w, math.exp(root))


def support(loss, level, center):
    """``max <x, theta>`` over ``{loss <= level, |theta| <= S}`` for every arm."""

    def reach(angle):
        v = np.array([np.cos(angle), np.sin(angle)])
        along = center @ v
        sphere = -along + math.sqrt(max(along**2 + S**2 - center @ center, 0.0))
        if sphere <= 0.0 or loss(center + sphere * v) <= level:
            return center + max(sphere, 0.0) * v
        return center + v * scipy.optimize.brentq(
            lambda t: loss(center + t * v) - level, 0.0, sphere, xtol=1e-15, rtol=1e-14
        )

    grid = np.linspace(0.0, 2.0 * np.pi, 181)
    points = np.array([reach(angle) for angle in grid])
    values = []
    for x in ARMS:
        best = grid[np.argmax(points @ x)]
        found = scipy.optimize.minimize_scalar(
            lambda angle, x=x: -x @ reach(angle),
            bounds=(best - grid[1], best + grid[1]),
            method="bounded",
            options={"xatol": 1e-11},
        )
        values.append(max(-found.fun, (points @ x).max()))
    return np.array(values)


def paper_radius(n):
    """Theorem 3.1 with Table 1, in closed form."""
    slope = 2.0 * S * (1.0 + S / 2.0) * n
    return math.log(1 / DELTA) + 2.0 * math.log(math.e * max(1.0, slope / 2.0))


def ratio_scores(n, radius, copies=1):
    w = np.full(n, float(copies))
    theta = ball_minimum(X[:n], R[:n], w)
    level = nll(theta, X[:n], R[:n], w) + radius
    return support(lambda point: nll(point, X[:n], R[:n], w), level, theta)


# ---- the traces --------------------------------------------------------------------------------


def trace(name, **options):
    """The policy with its scores after 1, 2, 5, ... observations."""
    policy = policies.make(name, family=Bernoulli(), domain=Ball(2, S), delta=DELTA, **options)
    arms = torch.tensor(ARMS)
    for n in range(1, ROUNDS + 1):
        policy.select(arms)
        policy.update(torch.tensor(X[n - 1]), torch.tensor(R[n - 1]))
        if n in LAST:
            yield n, policy, policy.scores(arms).numpy()


def compare(n, scores, expected, *, in_ball=True):
    np.testing.assert_allclose(scores, expected, rtol=0, atol=TOLERANCE, err_msg=f"n = {n}")
    if n == ROUNDS and in_ball:  # the data have something to say: the set is smaller than the ball
        assert (scores < S * np.linalg.norm(ARMS, axis=-1) - 0.01).sum() >= 4


def after_copies(policy, copies):
    """The scores when the whole history has been seen so many times, as one late batch."""
    more = copies - 1
    policy.update(torch.tensor(np.tile(X, (more, 1))), torch.tensor(np.tile(R, more)))
    scores = policy.scores(torch.tensor(ARMS)).numpy()
    # the radius is so large that fewer rows would leave the whole ball
    assert (scores < S * np.linalg.norm(ARMS, axis=-1) - 0.01).sum() >= 4
    return scores


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["ofuglb", "ofuglb-pb", "emk", "ofulog+", "ofulog-r"])
def test_before_the_first_observation_the_set_is_the_ball(name):
    policy = policies.make(name, family=Bernoulli(), domain=Ball(2, S), delta=DELTA)
    compare(0, policy.scores(torch.tensor(ARMS)).numpy(), S * np.linalg.norm(ARMS, axis=-1))
    assert int(policy.select(torch.tensor(ARMS))) == 6


def test_ofuglb():
    for n, _, scores in trace("ofuglb"):
        compare(n, scores, ratio_scores(n, paper_radius(n)))


def test_ofulog_plus():
    def expected(n, copies=1):
        radius = 20.0 * math.log(math.e + S * n * copies / 4.0)
        radius += 2.0 * (math.e - 2.0 + S) * math.log(1 / DELTA)
        return radius, ratio_scores(n, radius, copies)

    for n, policy, scores in trace("ofulog+"):
        radius, values = expected(n)
        assert float(policy.confidence_set().radius) == pytest.approx(radius, abs=TOLERANCE)
        np.testing.assert_allclose(scores, values, rtol=0, atol=TOLERANCE)
    _, values = expected(ROUNDS, copies=12)
    np.testing.assert_allclose(after_copies(policy, 12), values, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("dim", [1, 2, 20])
@pytest.mark.parametrize("S", [1e-3, 1.0, 50.0])
def test_radius_of_ofulog_plus_is_never_below_that_of_a_theorem(dim, S):
    """Theorem 3.1 with n as the Lipschitz constant: what its docstring says is proven."""
    policy = policies.make(
        "ofulog+", family=Bernoulli(), domain=Ball(dim, S), delta=0.9, aggregate=True
    )
    x, n = np.zeros(dim), 0
    for more in (1, 9, 90, 900, 9_000):
        policy.update(np.tile(x, (more, 1)), np.ones(more))
        n += more
        theorem = math.log(1 / 0.9) + dim * math.log(math.e * max(1.0, 2.0 * S * n / dim))
        assert float(policy.confidence_set().radius) >= theorem


def test_ofuglb_pb():
    """Its level lies between the exact mixture and the paper's, and its scores belong to it."""
    for n, policy, scores in trace("ofuglb-pb"):
        level = float(policy.confidence_set().level)
        theta = ball_minimum(X[:n], R[:n])
        least = nll(theta, X[:n], R[:n])
        # -log of the mean of exp(-L) over the ball, by polar quadrature
        node, weight = np.polynomial.legendre.leggauss(60)
        radius, weight = S * (node + 1) / 2, weight * (node + 1) / 2
        angle = 2.0 * np.pi * np.arange(120) / 120
        grid = [[nll([a * np.cos(b), a * np.sin(b)], X[:n], R[:n]) for b in angle] for a in radius]
        mean = (weight[:, None] * np.exp(least - np.array(grid))).sum() / (120 * weight.sum())
        mixture = math.log(1 / DELTA) + least - math.log(mean)
        assert mixture < level < mixture + 0.5
        assert level < least + paper_radius(n)
        compare(n, scores, support(lambda point, n=n: nll(point, X[:n], R[:n]), level, theta))


def test_ofuglb_e():
    concordance = math.tanh(S / 2)
    lam = 1.0 / (8.0 * S**2 * (1.0 + S * concordance))
    for n, _, scores in trace("ofuglb-e"):
        theta = ball_minimum(X[:n], R[:n])
        gamma = 2.0 * (1.0 + S * concordance) * (4.0 * S**2 * lam + paper_radius(n))
        hessian = (X[:n].T * variance(X[:n] @ theta)) @ X[:n]
        inverse = np.linalg.inv(hessian + lam * np.eye(2))
        bonus = np.sqrt(gamma * np.einsum("ki,ij,kj->k", ARMS, inverse, ARMS))
        compare(n, scores, ARMS @ theta + bonus, in_ball=False)


def test_ofuglb_e_fixed_point():
    concordance = math.tanh(S / 2)
    lam = 1.0 / (8.0 * S**2 * (1.0 + S * concordance))
    for n, _, scores in trace("ofuglb-e", ellipsoid="fixed_point"):
        theta = ball_minimum(X[:n], R[:n])
        norm = np.linalg.norm(theta)
        hessian = (X[:n].T * variance(X[:n] @ theta)) @ X[:n]
        inverse = np.linalg.inv(hessian + lam * np.eye(2))
        reach = np.linalg.norm(X[:n], axis=-1) * (S + norm)
        local = np.sqrt(np.einsum("ki,ij,kj->k", X[:n], inverse, X[:n]))
        D = concordance * reach.max()
        for _ in range(21):
            phi = (D - 1.0 + math.exp(-D)) / D**2
            gamma = paper_radius(n) / phi + lam * (S + norm) ** 2
            D = min(D, concordance * np.minimum(math.sqrt(gamma) * local, reach).max())
        bonus = np.sqrt(gamma * np.einsum("ki,ij,kj->k", ARMS, inverse, ARMS))
        compare(n, scores, ARMS @ theta + bonus, in_ball=False)


@pytest.mark.parametrize("regularizer", ["ftrl", "vaw"])
def test_emk(regularizer):
    flattest = variance(S)
    V, paid, weights = np.eye(2), 0.0, []
    reference = {}
    for s in range(ROUNDS):
        x = X[s]
        weights.append(1.0 / (1.0 + 0.25 * 2.0 * S**2 * x @ np.linalg.solve(V, x)))
        V = V + flattest * np.outer(x, x)
        past, rewards, w = X[:s], R[:s], np.ones(s)
        if regularizer == "vaw":  # both rewards that x could have
            past, rewards = np.vstack([past, x, x]), np.append(rewards, [1.0, 0.0])
            w = np.ones(s + 2)
        theta = ball_minimum(past, rewards, w, ridge=1.0)
        paid += weights[-1] * nll(theta, x[None], R[s : s + 1])
        if s + 1 in LAST:
            reference[s + 1] = (paid + math.log(1 / DELTA), np.array(weights))
    for n, policy, scores in trace("emk", regularizer=regularizer):
        level, w = reference[n]
        assert float(policy.confidence_set().level) == pytest.approx(level, abs=TOLERANCE)
        center = ball_minimum(X[:n], R[:n], w)
        expected = support(lambda point, n=n, w=w: nll(point, X[:n], R[:n], w), level, center)
        compare(n, scores, expected)


def test_ofulog_r():
    def expected(n, copies=1):
        lam, w = 2.0 * math.log(2.0 + n * copies), np.full(n, float(copies))
        theta = ridge_minimum(X[:n], R[:n], w, lam)
        hessian = (X[:n].T * (w * variance(X[:n] @ theta))) @ X[:n] + lam * np.eye(2)
        ratio = scipy.stats.chi2.cdf(2 * lam, 2) / scipy.stats.chi2.cdf(lam, 2)
        c = math.log(1 / DELTA) + 0.5 * np.linalg.slogdet(hessian)[1] - math.log(lam)
        c += math.log(ratio)
        root = math.sqrt(lam)
        g = min(root * (0.5 + S) + 2.0 * c / root, root * S + c)

        def loss(point):
            return nll(point, X[:n], R[:n], w) + 0.5 * lam * point @ point

        level = loss(theta) + (g + g * g / lam) ** 2
        return level, support(loss, level, theta)

    for n, policy, scores in trace("ofulog-r", constants="public"):
        level, values = expected(n)
        assert float(policy.confidence_set().level) == pytest.approx(level, abs=1e-4)
        np.testing.assert_allclose(scores, values, rtol=0, atol=TOLERANCE)
    _, values = expected(ROUNDS, copies=400)
    np.testing.assert_allclose(after_copies(policy, 400), values, rtol=0, atol=TOLERANCE)
