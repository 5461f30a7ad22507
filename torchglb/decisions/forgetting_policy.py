"""OFUGLB that forgets: optimism over the confidence set of the rows that still count.

For environments that change. Each round costs passes over the rows that are kept, at most
``log(1e-6)/log(gamma)`` or n of them, whatever t is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchglb.decisions.forgetting import Forgetting, ForgettingSequence
from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.policies import Policy
from torchglb.radii import Radius
from torchglb.sets import LikelihoodRatioSet


class ForgettingOFUGLB(Policy):
    """OFUGLB with ``forgetting=Discount(gamma)`` or ``Window(n)``.

    Args:
        family: the GLM family.
        domain: the ball.
        delta: the failure level, spent time by time.
        batch_shape: ``*B``.
        forgetting: what is forgotten.
        radius: of the sets.
        seed: unused randomness, as every policy has it.
        replicates: names of the replicates.
        validate: look at the values of what is passed in.

    Example:
        >>> import torchglb as glb
        >>> from torchglb.decisions import Window
        >>> policy = ForgettingOFUGLB(glb.Bernoulli(), glb.Ball(2, 3.0), forgetting=Window(100))
        >>> policy.update([1.0, 0.0], 1.0)
        >>> policy.select(torch.eye(2).double())
        tensor(0)
    """

    name = "ofuglb-forgetting"

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        delta: float = 0.05,
        batch_shape: tuple[int, ...] = (),
        *,
        forgetting: Forgetting,
        radius: str | Radius = "pac-bayes",
        seed: int = 0,
        replicates: Tensor | None = None,
        validate: bool = True,
    ) -> None:
        super().__init__(
            family,
            domain,
            delta,
            None,
            batch_shape,
            seed=seed,
            replicates=replicates,
            validate=validate,
        )
        self.sequence = ForgettingSequence(
            family, domain, delta, forgetting, radius, tuple(batch_shape)
        )

    def confidence_set(self) -> LikelihoodRatioSet:
        """The set of the rows that count: an immutable snapshot."""
        return self.sequence.current()

    @torch.no_grad()
    def _scores(self, arms: Tensor) -> Tensor:
        return self.confidence_set().upper_bound(arms, throw=False)

    def _update(self, x: Tensor, r: Tensor) -> None:
        self.sequence.update(x, r)

    def _state(self) -> dict[str, Any]:
        return self.sequence.state_dict()

    def _load(self, state: Mapping[str, Any]) -> None:
        self.sequence.load_state_dict(state)
