"""Each proof on data: every parameter that obeys the event of a theorem is in the policy's set.

Coverage counts how often the event happens; here nothing is left to chance. For a parameter theta
the noise is ``r - mu(<x, theta>)``, as if theta were the true one: where it obeys the inequality
that holds with probability 1 - delta, the derivation in the docstring of the policy has to put
theta into the set. The events are written down again, in NumPy, from those docstrings.
"""

import math

import numpy as np
import pytest
import scipy.optimize
import scipy.special
import scipy.stats
import torch

import torchglb as glb
from torchglb import policies

DELTA, ROWS = 0.4, 120
LOGISTIC = [("bernoulli", glb.Bernoulli())]
BOUNDED = [*LOGISTIC, ("binomial", glb.Binomial(4)), ("probit", glb.QuasiBounded("probit"))]
SUBGAUSSIAN = [*BOUNDED, ("gaussian", glb.Gaussian(0.5))]
EVERY = [*SUBGAUSSIAN, ("poisson", glb.Poisson()), ("cloglog", glb.QuasiBounded("cloglog"))]


class Play:
    """A policy on rows of its own world, and parameters to be tried.

    Args:
        name: of the policy.
        family: of the rewards.
        dim: d.
        before: called with the policy and each row and reward before the policy sees them.
        S: the radius of the ball.
    """

    def __init__(self, name, family, dim, before=lambda policy, x, r: None, S=2.0):
        generator = torch.Generator().manual_seed(dim)
        self.policy = policies.make(name, family=family, domain=glb.Ball(dim, S), delta=DELTA)
        unit = torch.nn.functional.normalize
        arms = unit(torch.randn((7, dim), generator=generator).double(), dim=-1)
        arms = arms * torch.linspace(0.3, 0.99, 7).double()[:, None]
        theta = 0.8 * S * unit(torch.randn(dim, generator=generator).double(), dim=-1)
        pick = torch.randint(0, 7, (ROWS,), generator=generator)
        r = family.sample(arms[pick] @ theta, generator)
        for x, reward in zip(arms[pick], r, strict=True):
            before(self.policy, x, reward)
            self.policy.update(x, reward)
        near = [theta + s * torch.randn((500, dim), generator=generator) for s in (0.2, 0.6, 2.0)]
        far = S * unit(torch.randn((500, dim), generator=generator).double(), dim=-1)
        points = torch.cat([*near, far])
        length = torch.linalg.vector_norm(points, dim=-1, keepdim=True)
        self.points = points * (S / length).clamp_max(1.0) * (1.0 - 1e-12)
        z = self.points @ arms[pick].mT
        self.X, self.r = arms[pick].numpy(), r.numpy()
        self.mean, self.variance = family.mean(z).numpy(), family.variance(z).numpy()
        self.z, self.losses = z.numpy(), family.nll(z, r).numpy()

    @property
    def noise(self):
        """``sum_s (r_s - mu(<x_s, theta>)) x_s`` of every parameter."""
        return (self.r - self.mean) @ self.X

    def check(self, obeys):
        """All parameters that obey are in the set; and there are some that do, and some outside."""
        inside = self.policy.confidence_set().contains(self.points).numpy()
        assert obeys.sum() > 50
        assert (~obeys).sum() > 20
        assert not (obeys & ~inside).any()


def lengths(v, matrix):
    """``|v|`` in the inverse of a matrix, or of one for each row."""
    return np.sqrt((v * np.linalg.solve(matrix, v[..., None])[..., 0]).sum(-1))


def self_normalised(design, ridge, noise):
    """``sigma sqrt(2 log(1/delta) + log det V - d log lambda)``."""
    growth = np.linalg.slogdet(design)[1] - len(design) * math.log(ridge)
    return noise * math.sqrt(2.0 * math.log(1.0 / DELTA) + growth)


def ends_of(family):
    low, high = family.reward_range
    return 0.5 * (high - low) if high < math.inf else family.sigma


@pytest.mark.parametrize("dim", [2, 4])
def test_oful(dim):
    play = Play("oful", glb.Gaussian(0.5), dim)
    V = np.eye(dim) + play.X.T @ play.X
    play.check(lengths(play.noise, V) <= self_normalised(V, 1.0, 0.5))


@pytest.mark.parametrize("dim", [2, 4])
@pytest.mark.parametrize("family", [f for _, f in BOUNDED], ids=[name for name, _ in BOUNDED])
def test_glm_ucb(family, dim):
    play = Play("glm-ucb", family, dim)
    V = dim * np.eye(dim) + play.X.T @ play.X
    play.check(lengths(play.noise, V) <= self_normalised(V, dim, ends_of(family)))


@pytest.mark.parametrize("dim", [2, 4])
@pytest.mark.parametrize("name", ["log-ucb-1", "ofulog-r"])
def test_noise_of_logistic_rewards(name, dim):
    play = Play(name, glb.Bernoulli(), dim, S=3.0)
    rho, lam = dim * math.log(2.0), dim * math.log(2.0 + ROWS)
    growth = np.linalg.slogdet(np.eye(dim) + play.X.T @ play.X / (4.0 * rho))[1]
    chi, root = scipy.stats.chi2(dim), math.sqrt(lam)
    bounds = []
    for b in (0.5 * root, 1.0):
        tails = chi.cdf(2.0 * rho) / chi.cdf(2.0 * rho * (1.0 - b / root) ** 2)
        bounds.append(b + (math.log(tails / DELTA) + 0.5 * growth) / b)
    outer = play.X[:, :, None] * play.X[:, None, :]
    H = np.tensordot(play.variance, outer, 1) + lam * np.eye(dim)
    obeys = lengths(play.noise, H) <= min(bounds)
    if name == "ofulog-r":  # whose set is nearly all of the ball
        inside = play.policy.confidence_set().contains(play.points).numpy()
        assert not (obeys & ~inside).any()
    else:
        play.check(obeys)


@pytest.mark.parametrize("dim", [2, 4])
@pytest.mark.parametrize("family", [f for _, f in SUBGAUSSIAN], ids=[n for n, _ in SUBGAUSSIAN])
def test_gloc(family, dim):
    """The self-normalised bound of a scalar martingale, before it is solved for."""
    predicted = []
    play = Play("gloc", family, dim, lambda policy, x, r: predicted.append(x @ policy.theta))
    away = np.array([float(z) for z in predicted]) - play.z
    A, sum_of = (away**2).sum(-1), ((play.r - play.mean) * away).sum(-1)
    bound = np.sqrt(2.0 * (1.0 + A) * np.log(np.sqrt(1.0 + A) / DELTA))
    play.check(np.abs(sum_of) <= ends_of(family) * bound)


@pytest.mark.parametrize("dim", [2, 4])
@pytest.mark.parametrize("name", ["glb-omd-realised", "glb-omd-rows"])
@pytest.mark.parametrize("family", [f for _, f in EVERY], ids=[name for name, _ in EVERY])
def test_realised_radii(family, name, dim):
    """``sum_s l_s(theta) <= log(1/delta) + sum_s m_s``, m_s the loss mixed over 20 nodes."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(20)
    mixed = []

    def before(policy, x, r):
        descent = policy._descent
        form = float(x @ descent.H.solve(x)) * float(descent.step) * policy.spread
        z = float(x @ descent.theta) + math.sqrt(form) * nodes
        loss = family.nll(torch.from_numpy(z), r).numpy()
        mixed.append(-scipy.special.logsumexp(-loss, b=weights / weights.sum()))

    play = Play(name, family, dim, before)
    play.check(play.losses.sum(-1) <= math.log(1.0 / DELTA) + sum(mixed))


@pytest.mark.parametrize("dim", [2, 4])
@pytest.mark.parametrize("S", [4.0, 40.0])
def test_ada_ofu_ecolog(S, dim):
    """Both events: the powers of likelihood ratios, and the intervals of the second estimate."""
    spans, spent = [], []

    def before(policy, x, r):
        low, high = (float(end) for end in policy.interval_of(x))
        q = float(x @ policy._V.solve(x))
        z, D, pull = float(x @ policy.theta), high - low, 0.5 * (2.0 + high - low) * q
        # two imaginary losses: z_bar + pull (2 sigma(z_bar) - 1) = z
        ends = z - pull, z + pull
        free = scipy.optimize.brentq(lambda v: v - z + pull * math.tanh(0.5 * v), *ends)
        spans.append((low, high, D, min(max(free, low), high)))
        spent.append(int(policy.spent))

    play = Play("ada-ofu-ecolog", glb.Bernoulli(), dim, before, S)
    low, high, D, middle = np.array(spans).T
    kept = np.diff([*spent, int(play.policy.spent)]) == 0
    loss = np.logaddexp(0.0, middle) - play.r * middle
    powers = ((2.0 + D) * (play.losses - loss))[:, kept].sum(-1)
    within = ((play.z >= low - 1e-9) & (play.z <= high + 1e-9)).all(-1)
    play.check(within & (powers <= (2.0 + 2.0 * S) * math.log(2.0 / DELTA)))
