"""A bandit policy on features that are learnt while it plays."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from torchglb.array_like import ArrayLike
from torchglb.checks import (
    NUMBERS,
    ValueChecks,
    as_tensor,
    check_count,
    check_options,
    check_shape,
    refuse,
)
from torchglb.choices import BallMode
from torchglb.domain import Ball
from torchglb.errors import InputError, SolverError
from torchglb.families import GLMFamily
from torchglb.heads.embedding import Door, Observations
from torchglb.heads.encoders import EncoderStack
from torchglb.heads.unit_ball import UnitBall, unit_ball
from torchglb.policies import Policy, make
from torchglb.policies.saving import taken
from torchglb.policies.settings import PolicySettings
from torchglb.random_streams import RandomStreams
from torchglb.sets.base import ConfidenceSet

#: the seeds of the policies that follow one another lie this far apart
SEED_STEP = 1_000_003


class NeuralPolicy(Policy):
    """Learns a representation from its own observations, and explores with any policy on top.

    Every ``train_every`` observations: (1) ``steps`` gradient steps on the GLM likelihood
    ``m(z) - r z``, ``z = <phi(c), theta>``, in the encoder's parameters and a theta in the ball,
    on minibatches of the raw contexts that are kept; (2) all of them are embedded anew; (3) a fresh
    policy gets the embedded history, and goes on choosing.

    Which guarantees hold:

    - With ``train_every=None`` the representation is fixed. If the rewards are of the family with a
      theta* in the ball for these features, all that the inner policy promises holds.
    - With training, nothing of that is promised: the features of the past then depend on its
      rewards, so confidence sets need not contain anything true, and regret bounds do not apply.
      Optimism is a heuristic there, though a useful one: measure it (experiments/neural_digits.py).

    Every replicate has an encoder of its own, and all of them run and train at once. The encoder
    runs in evaluation mode: dropout and batch statistics would make features random, or dependent
    on their companions.

    Args:
        encoder: a module from ``(N, *E)`` to ``(N, d)``, where every replicate begins with a copy;
            or a function without arguments that builds one, for a random start of its own in each.
        policy: a name of :func:`torchglb.policies.available`, or a function that is called like
            ``make`` without the name, for example ``partial(make, "ofuglb-e", radius="mixture")``.
        family: the GLM family of the rewards.
        domain: the ball of theta, of dimension d.
        delta: the failure level.
        train_every: observations from one training to the next; None never trains.
        optimizer: builds a ``torch.optim`` optimizer from a list of parameters. One that treats
            parameters entry by entry (SGD, Adam and their kin) keeps replicates independent.
        replay: how many raw observations are kept, the newest ones; all if None. Those that are
            older are forgotten at the next training.
        steps: gradient steps of one training.
        minibatch: observations of one step.
        growth: at least 1; trainings also lie this factor apart, so with 1.5 there are only
            O(log T) of them.
        bound: how features get into the unit ball: a mode of :class:`UnitBall`, or one.
        context_dims: the number of axes in ``*E``.
        chunk: so many contexts are embedded at a time, which bounds the memory.
        settings: those of :class:`torchglb.policies.Policy`.

    Example:
        >>> import torchglb as glb
        >>> network = nn.Linear(5, 2).double()
        >>> policy = NeuralPolicy(network, "ofuglb-e", glb.Bernoulli(), glb.Ball(2, 3.0))
        >>> contexts = torch.randn(4, 5).double()
        >>> policy.update(contexts[policy.select(contexts)], 1.0)
    """

    name = "neural"

    def __init__(
        self,
        encoder: nn.Module | Callable[[], nn.Module],
        policy: str | Callable[..., Policy],
        family: GLMFamily,
        domain: Ball,
        delta: float = 0.05,
        *,
        train_every: int | None = 100,
        optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None,
        replay: int | None = None,
        steps: int = 100,
        minibatch: int = 64,
        growth: float = 1.0,
        bound: BallMode | UnitBall = "smooth",
        context_dims: int = 1,
        chunk: int = 4096,
        **settings: Unpack[PolicySettings],
    ) -> None:
        check_options("setting", settings, PolicySettings.__annotations__)
        super().__init__(family, domain, delta, **settings)
        if train_every is not None:
            check_count("train_every", train_every, least=1)
        self.train_every = train_every
        self.steps = check_count("steps", steps, least=1)
        self.minibatch = check_count("minibatch", minibatch, least=1)
        self.chunk = check_count("chunk", chunk, least=1)
        if isinstance(growth, bool) or not isinstance(growth, NUMBERS) or not growth >= 1.0:
            raise refuse("growth", "a number of at least 1", repr(growth))
        self.growth = float(growth)
        self._build: Callable[..., Policy] = (
            partial(make, policy) if isinstance(policy, str) else policy
        )
        self._settings = {"delta": delta, **settings}
        self._optimize = optimizer or partial(torch.optim.Adam, lr=1e-3)
        self.encoders = EncoderStack.start(encoder, self.random, self.device)
        self._door = Door(self.encoders.name, domain.dim, unit_ball(bound), self.validate)
        self._theta = torch.zeros(
            (self.batch_shape.numel(), domain.dim),
            dtype=self.dtype,
            device=self.device,
            requires_grad=True,
        )
        self._optimizer = self._new_optimizer(self.encoders, self._theta)
        self.observations = Observations(
            tuple(self.batch_shape), context_dims, replay, self.dtype, self.device
        )
        self.trainings = 0
        self._due = train_every or 0  # the number of observations at which training is next
        self.inner = self._new_inner(0)

    def _new_optimizer(self, encoders: EncoderStack, theta: Tensor) -> torch.optim.Optimizer:
        return self._optimize([*encoders.trainable(), theta])

    def _new_inner(self, trainings: int) -> Policy:
        """A policy that knows nothing, with random numbers of its own."""
        seed = self.random.seed + SEED_STEP * trainings
        made = self._build(
            family=self.family, domain=self.domain, **self._settings | {"seed": seed}
        )
        if not isinstance(made, Policy):
            raise refuse(
                "policy", "a name, or a function that builds a Policy", type(made).__name__
            )
        if made.requires.fixed_arms:  # the features of an arm change with every training
            raise refuse("policy", "one whose arms may change", f"{made.name}, for fixed arms")
        return made

    # ---- choosing ------------------------------------------------------------------------

    @torch.no_grad()
    def features(self, contexts: ArrayLike) -> Tensor:
        """The features ``(*B, d)`` or ``(*B, K, d)`` of contexts ``(*B, *E)``, ``(*B, K, *E)``."""
        contexts = self.observations.as_contexts(contexts)
        if self.observations.check(contexts):
            return self._embed(contexts.unsqueeze(len(self.batch_shape)))[..., 0, :]
        return self._embed(contexts)

    def select(self, arms: ArrayLike) -> Tensor:
        """The index ``(*B)`` of the arm to play, of raw contexts ``arms (*B, K, *E)``."""
        arms = self._check_arms(arms)
        return self.inner.select(self.features(arms))

    def _scores(self, arms: Tensor) -> Tensor:
        return self.inner.scores(self.features(arms))

    def _check_arms(self, arms: ArrayLike) -> Tensor:
        arms = self.observations.as_contexts(arms, "arms")
        if self.observations.check(arms, "arms"):
            raise refuse("arms", "shape (*B, K, *E)", f"shape {tuple(arms.shape)}")
        return arms

    def _embed(self, contexts: Tensor, encoders: EncoderStack | None = None) -> Tensor:
        """Features ``(*B, n, d)`` of contexts ``(*B, n, *E)``, in chunks of rows."""
        flat = self._flat(contexts)
        run, (problems, count) = encoders or self.encoders, flat.shape[:2]
        parts = [
            self._door.admit(run(part), (problems, part.shape[1]), self._theta)
            for part in flat.split(max(1, self.chunk // problems), dim=1)
        ]
        return torch.cat(parts, dim=1).reshape(*self.batch_shape, count, self.domain.dim)

    def _flat(self, rows: Tensor) -> Tensor:
        """Rows ``(*B, ...)`` of the N replicates, ``(N, ...)``."""
        return rows.reshape(self.batch_shape.numel(), *rows.shape[len(self.batch_shape) :])

    # ---- learning ------------------------------------------------------------------------

    def update(
        self,
        x: ArrayLike,
        r: ArrayLike,
        weight: ArrayLike | None = None,
        mask: ArrayLike | None = None,
    ) -> None:
        """Adds an observation: the raw context ``x (*B, *E)`` that was played and its reward.

        Or k of them, ``(*B, k, *E)`` and ``(*B, k)``. They may come late and out of order, as long
        as the delay does not depend on the reward, given the context and the past. Trains when it
        is time to.

        Args:
            x: the raw contexts.
            r: their rewards.
            weight: in [0, 1], where the inner policy takes weights; else refused.
            mask: as :meth:`torchglb.policies.Policy.update` says.

        Raises:
            InputError: on contexts, features or rewards that do not fit; nothing is then changed.
            SolverError: a training ended in features that are not finite. The observations are
                kept, encoder and policy are those from before, and the next training comes at its
                usual time.
        """
        r = as_tensor("r", r, dtype=self.dtype, device=self.device)
        axis, x = len(self.batch_shape), self.observations.as_contexts(x, "x")
        if self.observations.check(x, "x"):
            x = x.unsqueeze(axis)
            check_shape("r", r, self.batch_shape)
            r = r[..., None]
        check_shape("r", r, x.shape[: axis + 1])
        x, w = self.observations.weighted(x, r, weight, mask)
        self._learn(x, r, w, weighs=weight is not None)

    def _update(self, x: Tensor, r: Tensor) -> None:
        self._learn(x, r, None)

    def _learn(self, x: Tensor, r: Tensor, w: Tensor | None, weighs: bool = False) -> None:
        """Learns rows with weights ``(*B, k)``, which are those of a mask unless ``weighs``."""
        mask, features = None if w is None else w > 0, self.features(x)
        mark, before = self.observations.mark(), self.inner.rounds
        try:
            self.observations.append(x, r, w)
            self.inner.update(features, r, w if weighs else None, mask)
        except BaseException:
            if self.inner.rounds == before:  # what is not learnt is not kept either
                self.observations.reset(mark)
            else:
                self.rounds += r.shape[-1]
            raise
        self.rounds += r.shape[-1]
        if self.train_every is not None and self.rounds >= self._due:
            self._due = max(self.rounds + self.train_every, math.ceil(self.growth * self.rounds))
            self.train()

    def train(self) -> None:
        """Trains the encoder now, embeds the history anew and rebuilds the inner policy.

        Raises:
            SolverError: as :meth:`update`.
        """
        if not len(self.observations):
            raise refuse("train", "at least one observation", "none")
        encoders, theta = self.encoders.clone(), self._theta.detach().clone().requires_grad_()
        optimizer = self._new_optimizer(encoders, theta)
        optimizer.load_state_dict(_copied(self._optimizer.state_dict()))
        random = copy.copy(self.random)  # it counts; its tensors never change
        self._descend(encoders, theta, optimizer, random)
        contexts, rewards = self.observations.rows()
        inner = self._new_inner(self.trainings + 1)
        try:
            with torch.no_grad():
                inner.update(self._embed(contexts, encoders), rewards, *self._weights_for(inner))
            if self.validate:
                checks = ValueChecks()
                checks.finite("theta of the training", theta)
                checks.settle()
        except InputError as error:
            raise SolverError(
                f"training {self.trainings + 1} went astray: {error}; encoder and policy are those"
                " from before (a smaller learning rate may help)"
            ) from error
        self.encoders, self._theta, self._optimizer = encoders, theta, optimizer
        self.random, self.inner = random, inner
        self.trainings += 1

    def _weights_for(self, inner: Policy) -> tuple[Tensor | None, Tensor | None]:
        """Weight and mask of the rows that are kept, as a policy takes them."""
        w = self.observations.row_weights()
        if w is None:
            return None, None
        return w if inner.takes_weights else None, w > 0

    def _descend(
        self,
        encoders: EncoderStack,
        theta: Tensor,
        optimizer: torch.optim.Optimizer,
        random: RandomStreams,
    ) -> None:
        """The gradient steps of one training."""
        contexts, rewards = (self._flat(rows) for rows in self.observations.rows())
        weights = self.observations.row_weights()
        w = torch.ones_like(rewards) if weights is None else self._flat(weights)
        problems, count = rewards.shape
        radius = self.domain.radius_like(theta).expand(self.batch_shape).reshape(problems, 1)
        everyone = torch.arange(problems, device=self.device)[:, None]
        door = replace(self._door, validate=False)  # the outcome is looked at, not every step
        for _ in range(self.steps):
            some, r, share = contexts, rewards, w
            if count > self.minibatch:
                uniform = self._flat(random.uniform(self.minibatch, dtype=torch.float64))
                place = (uniform * count).long().clamp_max(count - 1)
                some, r = contexts[everyone, place], rewards[everyone, place]
                share = w[everyone, place]
            features = door.admit(encoders(some), tuple(r.shape), theta)
            z = (features @ theta[..., None])[..., 0]
            # summed over replicates, so that each gets the gradient that it gets alone
            loss = (share * self.family.nll(z, r)).mean(-1).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():  # back into the ball
                length = torch.linalg.vector_norm(theta, dim=-1, keepdim=True)
                theta.mul_((radius / length.clamp_min(torch.finfo(theta.dtype).tiny)).clamp_max(1))

    # ---- what it knows -------------------------------------------------------------------

    def confidence_set(self) -> ConfidenceSet | None:
        """The inner policy's set, for the features as they are now; see above what it is worth."""
        return self.inner.confidence_set()

    def on_boundary(self) -> Tensor | None:
        """That of the inner policy, for the features as they are now."""
        return self.inner.on_boundary()

    def estimate(self) -> Tensor | None:
        """The inner policy's estimate of theta, for the features as they are now."""
        return self.inner.estimate()

    # ---- saving --------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        return {
            "encoders": self.encoders.state_dict(),
            "theta": self._theta.detach().clone(),
            "optimizer": _copied(self._optimizer.state_dict()),
            "observations": self.observations.saved(),
            "trainings": self.trainings,
            "due": self._due,
            "inner": self.inner.state_dict(),
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        encoders = self.encoders.restored(state["encoders"])
        theta = taken(state, "theta", self._theta).requires_grad_()
        optimizer = self._new_optimizer(encoders, theta)
        try:
            optimizer.load_state_dict(_copied(state["optimizer"]))
        except ValueError as error:
            raise refuse("state['optimizer']", "that of the same optimizer", error) from None
        observations = self.observations.restored(state["observations"])
        trainings, due = int(state["trainings"]), int(state["due"])
        inner = self._new_inner(trainings)
        inner.load_state_dict(state["inner"])
        self.encoders, self._theta, self._optimizer = encoders, theta, optimizer
        self.observations, self.inner = observations, inner
        self.trainings, self._due = trainings, due


def _copied(state: Any) -> Any:
    """A nested state with tensors of its own."""
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, Mapping):
        return {name: _copied(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map(_copied, state))
    return state
