"""The bandits of the paper: arms drawn anew in every round, a fixed arm set, the whole unit ball.

Rewards follow the family at ``<x, theta*>``. Numbers are drawn in blocks of rounds; a block always
starts at a multiple of its length, so a run that is continued computes exactly the same ones.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from torchglb.checks import check_choice, check_count, refuse
from torchglb.environments.base import Environment, picked, register
from torchglb.environments.settings import (
    THETAS,
    BanditSettings,
    EnvironmentSettings,
    FiniteArmsSettings,
    ThetaKind,
)
from torchglb.families import GLMFamily
from torchglb.random_streams import RandomStreams

#: rounds in a block
BLOCK = 128


class Block(NamedTuple):
    """Rounds that are drawn together; B is 1 where all rounds are the same.

    Attributes:
        arms: ``(B, N, K, d)``.
        z: ``<x, theta*>`` of every arm, ``(B, N, K)``.
        mean: the mean reward, ``(B, N, K)``.
        best: the largest of each round, ``(B, N)``.
    """

    arms: Tensor
    z: Tensor
    mean: Tensor
    best: Tensor


class GLMBandit(Environment):
    """Rewards of a GLM at a known theta*.

    Args:
        theta: ``"paper"``: ``(S - 1)/sqrt(d) (1, ..., 1)``; ``"random"``: a random direction for
            each replicate, of the same length S - 1.
        settings: of :class:`Environment`.
    """

    theta_star: Tensor

    def __init__(
        self,
        family: GLMFamily,
        S: Tensor,
        replicates: Tensor,
        *,
        theta: ThetaKind = "paper",
        **settings: Unpack[EnvironmentSettings],
    ) -> None:
        super().__init__(family, S, replicates, **settings)
        check_choice("theta", theta, THETAS)
        S, d = self.S, self.dim
        if not bool((S > 1).all()):
            raise refuse("S", "numbers above 1, for |theta*| = S - 1", S.tolist())
        if theta == "paper":
            direction = torch.ones((len(S), d), dtype=self.dtype, device=self.device)
        else:
            direction = self.streams("theta").normal(d, dtype=self.dtype)
        length = torch.linalg.vector_norm(direction, dim=-1, keepdim=True)
        self.theta_star = (S - 1.0)[:, None] * direction / length
        self._luck = self.streams("rewards")
        self._uniform: tuple[int, Tensor] | None = None  # the block, (N, B)

    def luck(self, t: int) -> Tensor:
        """The uniform numbers of round t, ``(N)``."""
        block, place = divmod(t, BLOCK)
        if self._uniform is None or self._uniform[0] != block:
            drawn = self._luck.uniform_at(block * BLOCK, BLOCK, dtype=self.dtype)
            self._uniform = block, drawn.mT.contiguous()
        return self._uniform[1][place]


class FiniteArms(GLMBandit):
    """K arms, uniform in the unit ball.

    Args:
        arms: K.
        shared_arms: whether all replicates see the same arms, as in the paper.
        settings: of :class:`GLMBandit`.
    """

    def __init__(
        self,
        family: GLMFamily,
        S: Tensor,
        replicates: Tensor,
        *,
        arms: int = 20,
        shared_arms: bool = True,
        **settings: Unpack[BanditSettings],
    ) -> None:
        super().__init__(family, S, replicates, **settings)
        self.count = check_count("arms", arms, least=1)
        if not isinstance(shared_arms, bool):
            raise refuse("shared_arms", "true or false", repr(shared_arms))
        self._source = self.streams("arms", shared=shared_arms)
        self._block: tuple[int, Block] | None = None

    def _draw(self, first: int, rounds: int) -> Block:
        x = uniform_in_ball(self._source, first, rounds, self.count, self.dim, self.dtype)
        arms = x.transpose(0, 1).expand(rounds, len(self.replicates), self.count, self.dim)
        z = (arms * self.theta_star[:, None, :]).sum(-1)
        mean = self.family.mean(z)
        return Block(arms, z, mean, mean.amax(-1))

    def _at(self, t: int) -> tuple[Block, int]:
        """The block of a round and its place there."""
        if self.fixed:
            if self._block is None:
                self._block = 0, self._draw(0, 1)
            return self._block[1], 0
        number, place = divmod(t, BLOCK)
        if self._block is None or self._block[0] != number:
            self._block = number, self._draw(number * BLOCK, BLOCK)
        return self._block[1], place

    def arms(self, t: int) -> Tensor:  # noqa: D102
        block, place = self._at(t)
        return block.arms[place]

    def rewards(self, t: int, x: Tensor, index: Tensor | None) -> Tensor:  # noqa: D102
        block, place = self._at(t)
        return self.family.quantile(picked(block.z[place], index), self.luck(t))

    def regret(self, t: int, x: Tensor, index: Tensor | None) -> Tensor:  # noqa: D102
        block, place = self._at(t)
        return block.best[place] - picked(block.mean[place], index)


@register
class TimeVarying(FiniteArms):
    """K new arms in every round, the same for all policies."""

    name = "time-varying"


@register
class Fixed(FiniteArms):
    """K arms, drawn once."""

    name = "fixed"
    fixed = True


@register
class Incumbent(Fixed):
    """K arms, drawn once; arm 0 is in use already, the second best unless ``rank`` says another.

    Args:
        rank: of arm 0 by its mean reward, from 1 on.
        settings: of :class:`FiniteArms`.
    """

    name = "incumbent"

    def __init__(
        self,
        family: GLMFamily,
        S: Tensor,
        replicates: Tensor,
        *,
        rank: int = 2,
        **settings: Unpack[FiniteArmsSettings],
    ) -> None:
        super().__init__(family, S, replicates, **settings)
        self.rank = check_count("rank", rank, least=1)
        if self.rank > self.count:
            raise refuse("rank", f"at most the number of arms, {self.count}", rank)

    def _draw(self, first: int, rounds: int) -> Block:
        drawn = super()._draw(first, rounds)
        place = drawn.mean.argsort(dim=-1, descending=True, stable=True)[
            ..., self.rank - 1 : self.rank
        ]
        order = torch.arange(self.count, device=self.device).expand(drawn.mean.shape)
        order = order.scatter(-1, place, 0)
        order = torch.cat([place, order[..., 1:]], -1)  # they change places
        arms = drawn.arms.gather(-2, order[..., None].expand(drawn.arms.shape))
        return Block(arms, drawn.z.gather(-1, order), drawn.mean.gather(-1, order), drawn.best)


@register
class WholeBall(GLMBandit):
    """Every point of the unit ball is an arm; the best is ``theta*/|theta*|``."""

    name = "ball"
    fixed = True
    whole_ball = True

    def __init__(
        self,
        family: GLMFamily,
        S: Tensor,
        replicates: Tensor,
        **settings: Unpack[BanditSettings],
    ) -> None:
        super().__init__(family, S, replicates, **settings)
        self._best = self.family.mean(torch.linalg.vector_norm(self.theta_star, dim=-1))

    def arms(self, t: int) -> Tensor:
        """Refused: they cannot be listed."""
        raise refuse("arms", "an environment of finitely many", "the whole unit ball")

    def rewards(self, t: int, x: Tensor, index: Tensor | None) -> Tensor:  # noqa: D102
        return self.family.quantile((x * self.theta_star).sum(-1), self.luck(t))

    def regret(self, t: int, x: Tensor, index: Tensor | None) -> Tensor:  # noqa: D102
        return self._best - self.family.mean((x * self.theta_star).sum(-1))


def uniform_in_ball(
    source: RandomStreams, first: int, rounds: int, count: int, dim: int, dtype: torch.dtype
) -> Tensor:
    """Points ``(*B, rounds, count, d)`` uniform in the unit ball, for rounds first, first + 1, ...

    A point is a normal vector brought to the length ``u^(1/d)``, so a round uses d + 1 numbers of
    the stream for each point.
    """
    used = count * (dim + 1)
    u = source.uniform_at(first * used, rounds, count, dim + 1, dtype=torch.float64)
    direction = torch.special.ndtri(u[..., :dim])
    length = u[..., dim:] ** (1.0 / dim)
    norm = torch.linalg.vector_norm(direction, dim=-1, keepdim=True)
    x = direction * (length / norm.clamp_min(torch.finfo(torch.float64).tiny))
    # rounding may leave the ball by an ulp
    limit = 1.0 - math.ldexp(1.0, -23 if dtype == torch.float32 else -52)
    return (x * limit).to(dtype)
