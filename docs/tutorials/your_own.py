# %% text
# # Your own family, radius and policy
#
# Three places where you can put your own mathematics, each in a few lines, and everything else of the library works on it.

# %%
import math
import os

import torch

import torchglb as glb
from torchglb import policies
from torchglb.policies import Policy, register
from torchglb.radii import Evaluation, Radius

SMOKE = "TORCHGLB_SMOKE" in os.environ
ROUNDS = 15 if SMOKE else 400
torch.manual_seed(0)

# %% text
# ## A family
#
# A family is its log-partition function `m`. Mean, variance and all further derivatives come from autograd. Constants on which certificates rest are declared: here the rewards are -1, 0 or 1 with probabilities proportional to `e^-z, 1, e^z`, so `m(z) = log(1 + 2 cosh z)` and `|m'''| <= 2 m''`.

# %%


def log_partition(z):
    return torch.logsumexp(torch.stack([-z, torch.zeros_like(z), z]), dim=0)


def sampler(z, generator=None):
    chances = torch.softmax(torch.stack([-z, torch.zeros_like(z), z], dim=-1), dim=-1)
    drawn = torch.multinomial(chances.reshape(-1, 3), 1, generator=generator)
    return drawn.reshape(z.shape).to(z.dtype) - 1.0


votes = glb.CustomFamily(
    log_partition,
    reward_range=(-1.0, 1.0),
    self_concordance=2.0,  # |E(r - mu)^3| <= 2 E(r - mu)^2, since |r - mu| <= 2
    max_variance=2.0 / 3.0,  # at z = 0
    min_variance=lambda S: float((2 * math.cosh(S) + 4) / (1 + 2 * math.cosh(S)) ** 2),
    sampler=sampler,
)
z = torch.linspace(-2, 2, 5).double()
print("mean    ", votes.mean(z).numpy().round(3))
print("variance", votes.variance(z).numpy().round(3))

# %% text
# ## A radius
#
# Any number `level_t` such that `theta*` satisfies `L_t(theta*) <= level_t` at all times, with probability `1 - delta`. Here is one from a classical argument: let `theta_s` be any estimate that is made before row s is seen. Then `prod_s p(r_s; theta_s)/p(r_s; theta*)` is a martingale of mean 1, so by Ville's inequality
#
#     L_t(theta*) <= log(1/delta) + sum_s loss_s(theta_s)    for all t at once.
#
# What the estimate is matters for the width and not for validity; here it is an online Newton step. The state is a dictionary of tensors.

# %%


class Prequential(Radius):
    def init(self, problem):
        shape, d = problem.batch_shape, problem.dim
        return {
            "paid": torch.zeros(shape).double(),
            "theta": torch.zeros(*shape, d).double(),
            "H": torch.eye(d).double().expand(*shape, d, d).clone(),
        }

    def update(self, problem, state, x, r, w=None):
        family, paid, theta, H = problem.family, state["paid"], state["theta"], state["H"]
        for s in range(x.shape[-2]):
            row, reward = x[..., s, :], r[..., s]
            z = (row * theta).sum(-1)
            weight = 1.0 if w is None else w[..., s]
            paid = paid + weight * family.nll(z, reward)
            H = (
                H
                + (weight * family.variance(z))[..., None, None]
                * row[..., None]
                * row[..., None, :]
            )
            step = torch.linalg.solve(H, row) * (weight * (family.mean(z) - reward))[..., None]
            theta = problem.domain.project(theta - step)
        return {"paid": paid, "theta": theta, "H": H}

    def evaluate(self, problem, state, likelihood, estimate):
        level = problem.log_failure + state["paid"] * (1 + 1e-12)  # rounded upwards
        return Evaluation(level, level - estimate.loss, problem.delta, 0.0, 0.0, state)


theta_star = torch.tensor([1.0, -0.5]).double()
X = torch.nn.functional.normalize(torch.randn(ROUNDS, 2).double(), dim=-1)
r = glb.Bernoulli().sample(X @ theta_star)
for radius in (Prequential(), "pac-bayes"):
    sequence = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, 4.0), 0.05, radius)
    sequence.update(X, r)
    print(radius, sequence.current().interval(torch.tensor([1.0, 0.0]).double(), scale="mean"))

# %% text
# ## A policy
#
# A class over `Policy` with four hooks: scores of arms, learning, and what to save and load. The base class checks what comes in. This one plays greedily except with probability epsilon, and learns by averaging stochastic gradients.

# %%


@register
class EpsilonGreedy(Policy):
    name = "tutorial-epsilon-greedy"

    def __init__(self, family, domain, *args, epsilon=0.1, **settings):
        super().__init__(family, domain, *args, **settings)
        self.epsilon = epsilon
        self.theta = torch.zeros((*self.batch_shape, domain.dim), dtype=self.dtype)

    def _scores(self, arms):
        return (arms @ self.theta[..., None])[..., 0]

    def select(self, arms):
        best, K = self.scores(arms).argmax(-1), arms.shape[-2]
        explore = self.random.uniform(dtype=torch.float64) < self.epsilon
        other = (self.random.uniform(dtype=torch.float64) * K).long().clamp_max(K - 1)
        return torch.where(explore, other, best)

    def _update(self, x, r):
        theta = self.theta
        for s in range(x.shape[-2]):
            residual = r[..., s] - self.family.mean((x[..., s, :] * theta).sum(-1))
            step = 4.0 / (self.rounds + s + 4) ** 0.5
            theta = self.domain.project(theta + step * residual[..., None] * x[..., s, :])
        self.theta = theta  # committed last: an interruption leaves the old estimate

    def _state(self):
        return {"theta": self.theta.clone()}

    def _load(self, state):
        self.theta = state["theta"].clone()


family, regret = glb.Bernoulli(), torch.zeros(8).double()
policy = policies.make(
    "tutorial-epsilon-greedy", family=family, domain=glb.Ball(2, 4.0), batch_shape=(8,)
)
for _ in range(ROUNDS):
    arms = torch.nn.functional.normalize(torch.randn(8, 20, 2).double(), dim=-1)
    x = arms[torch.arange(8), policy.select(arms)]
    policy.update(x, family.sample(x @ theta_star))
    regret += family.mean(arms @ theta_star).amax(-1) - family.mean(x @ theta_star)
print("regret", regret.mean().item())

# %% text
# A new policy for the library inherits `torchglb.testing.PolicyContract`, some thirty tests: batches equal loops, states continue bit by bit, refused or interrupted updates leave no trace. This one passes with
#
#     class TestEpsilonGreedy(PolicyContract):
#         name = "tutorial-epsilon-greedy"
#         greedy = False  # choices are random beyond the scores
#         ball_arms = False  # it cannot maximise over the unit ball
#
# [Contributing](../contributing.md) has the steps.
