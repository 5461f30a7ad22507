"""What every radius must do. A test class inherits :class:`RadiusContract` and names its radius."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from scipy import stats
from torch import Tensor

from torchglb.domain import Ball
from torchglb.families import Bernoulli, GLMFamily
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.mle import constrained_mle
from torchglb.radii import Evaluation, Problem, Radius
from torchglb.rows.buffers import Rows

DTYPE = torch.float64


class RadiusContract:
    """Inherited by the test class of every radius.

    Attributes:
        radius: the settings under test.
        families: covered ones.
        weights: whether rows may have weights in [0, 1].
        S: the radius of the ball.
        delta: the failure probability of the coverage test.
        replicates: problems of the coverage test.

    Example:
        >>> from torchglb.radii import Lipschitz
        >>> class TestLipschitz(RadiusContract):
        ...     radius = Lipschitz()
        >>> TestLipschitz().problem(Bernoulli()).delta
        0.2
    """

    radius: ClassVar[Radius]
    families: ClassVar[tuple[GLMFamily, ...]] = (Bernoulli(),)
    weights: ClassVar[bool] = True
    S: ClassVar[float] = 2.0
    delta: ClassVar[float] = 0.2
    replicates: ClassVar[int] = 60

    # ---- tools ---------------------------------------------------------------------------

    def problem(self, family: GLMFamily, batch: tuple[int, ...] = (), **changes: Any) -> Problem:
        """What the radius is asked for: family, ball, delta and batch."""
        settings = {"domain": Ball(2, self.S), "delta": self.delta} | changes
        return Problem(family, batch_shape=batch, **settings)

    def rows(
        self, family: GLMFamily, batch: tuple[int, ...], n: int, seed: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """theta* ``(*B, d)`` in the ball, features and rewards."""
        generator = torch.Generator().manual_seed(seed)
        theta = torch.randn((*batch, 2), generator=generator, dtype=DTYPE)
        theta = 0.8 * self.S * torch.nn.functional.normalize(theta, dim=-1)
        X = torch.randn((*batch, n, 2), generator=generator, dtype=DTYPE)
        X = 0.999 * torch.nn.functional.normalize(X, dim=-1)
        return theta, X, family.sample((X @ theta[..., None])[..., 0], generator)

    def at(self, problem: Problem, X: Tensor, r: Tensor, w: Tensor | None = None) -> Evaluation:
        """The radius after these rows."""
        state = self.radius.update(problem, self.radius.init(problem), X, r, w)
        return self.evaluated(problem, state, X, r, w)

    def evaluated(
        self, problem: Problem, state: Any, X: Tensor, r: Tensor, w: Tensor | None = None
    ) -> Evaluation:
        """The radius on rows that its state has seen, at their constrained MLE."""
        fit = constrained_mle(problem.family, Rows(X, r, w), problem.domain)
        loss = NegativeLogLikelihood(problem.family, X, r, w)
        return self.radius.evaluate(problem, state, loss, fit.estimate())

    # ---- the contract --------------------------------------------------------------------

    @pytest.mark.parametrize("batch", [(), (1,), (2, 3)])
    def test_shapes(self, batch):
        for family in self.families:
            _, X, r = self.rows(family, batch, 12)
            found = self.at(self.problem(family, batch), X, r)
            assert found.level.shape == found.radius.shape == batch
            assert bool(torch.isfinite(found.level).all())
            assert 0 < found.delta_likelihood <= self.delta
            assert found.delta_likelihood + found.delta_lipschitz <= self.delta * (1 + 1e-12)

    def test_an_element_does_not_depend_on_its_companions(self):
        for family in self.families:
            _, X, r = self.rows(family, (3,), 15)
            together = self.at(self.problem(family, (3,)), X, r)
            for b in range(3):
                alone = self.at(self.problem(family), X[b], r[b])
                torch.testing.assert_close(alone.level, together.level[b], rtol=1e-6, atol=1e-6)

    def test_rows_in_parts_are_the_rows(self):
        for family in self.families:
            _, X, r = self.rows(family, (2,), 20)
            problem = self.problem(family, (2,))
            state = self.radius.init(problem)
            for part in (slice(0, 7), slice(7, 8), slice(8, 20)):
                state = self.radius.update(problem, state, X[:, part], r[:, part])
            parts = self.evaluated(problem, state, X, r)
            torch.testing.assert_close(
                parts.level, self.at(problem, X, r).level, rtol=1e-6, atol=1e-6
            )

    def test_states_are_never_changed_in_place(self):
        family = self.families[0]
        _, X, r = self.rows(family, (2,), 10)
        problem = self.problem(family, (2,))
        state = self.radius.update(problem, self.radius.init(problem), X[:, :5], r[:, :5])
        kept = {name: t.clone() for name, t in state.items()}
        self.radius.update(problem, state, X[:, 5:], r[:, 5:])
        self.evaluated(problem, state, X[:, :5], r[:, :5])
        for name, value in kept.items():
            assert torch.equal(value, state[name]), name

    def test_a_smaller_delta_gives_a_larger_level(self):
        for family in self.families:
            _, X, r = self.rows(family, (), 25)
            wide, narrow = (self.at(self.problem(family, delta=d), X, r) for d in (0.01, 0.3))
            assert bool(wide.level > narrow.level)

    def test_rows_of_weight_zero_do_not_widen(self):
        if not self.weights:
            pytest.skip("this radius is stated for rows of weight 1")
        for family in self.families:
            _, X, r = self.rows(family, (), 30)
            w = torch.ones_like(r)
            w[20:] = 0.0
            problem = self.problem(family)
            some, less = self.at(problem, X, r, w), self.at(problem, X[:20], r[:20])
            torch.testing.assert_close(some.level, less.level, rtol=1e-5, atol=1e-5)

    def test_covers_at_all_times(self):
        """theta* leaves the set at one of the times with probability at most delta."""
        for family in self.families:
            batch, n = (self.replicates,), 40
            theta, X, r = self.rows(family, batch, n, seed=5)
            problem = self.problem(family, batch)
            state, missed = self.radius.init(problem), torch.zeros(batch, dtype=torch.bool)
            for start in range(0, n, 8):
                end = start + 8
                state = self.radius.update(problem, state, X[:, start:end], r[:, start:end])
                found = self.evaluated(problem, state, X[:, :end], r[:, :end])
                loss = NegativeLogLikelihood(family, X[:, :end], r[:, :end])
                state, missed = found.state, missed | (loss(theta) > found.level)
            misses = int(missed.sum())
            assert stats.binom.sf(misses - 1, self.replicates, self.delta) > 1e-3, misses
