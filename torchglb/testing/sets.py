"""What every confidence set must do. A test class inherits and says how a set is made."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from torchglb.errors import InputError
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.sets import ConfidenceSet, EllipsoidSet, IntersectionSet, LikelihoodRatioSet

BATCHES = [(), (1,), (3,), (2, 3)]
DTYPES = [torch.float32, torch.float64]


def unit(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.nn.functional.normalize(x, dim=-1).to(dtype)


def pick(confidence_set: ConfidenceSet, index: tuple[int, ...]) -> ConfidenceSet:
    """One element of a batch, as a set without batch axes."""
    if isinstance(confidence_set, IntersectionSet):
        return IntersectionSet([pick(member, index) for member in confidence_set.members])
    if isinstance(confidence_set, EllipsoidSet):
        parts = (confidence_set.theta_hat, confidence_set.shape, confidence_set.gamma)
        chosen = (part[index] for part in parts)
        owner = confidence_set
        return EllipsoidSet(owner.family, owner.domain, *chosen, owner.with_ball)
    assert isinstance(confidence_set, LikelihoodRatioSet)
    owner = confidence_set
    loss = NegativeLogLikelihood(owner.family, *(t[index] for t in owner.likelihood.tensors()))
    level, theta = owner.level[index], owner.theta_hat[index]
    return LikelihoodRatioSet(loss, owner.domain, level, theta, owner.confined)


def sampled(confidence_set: ConfidenceSet, count: int = 20000) -> tuple[Tensor, float]:
    """Uniform points of a set without batch axes, and its volume, by rejection from a box."""
    upper = confidence_set.upper_bound(torch.eye(2).double())
    lower = -confidence_set.upper_bound(-torch.eye(2).double())
    generator = torch.Generator().manual_seed(7)
    u = torch.rand((count, 2), generator=generator, dtype=torch.float64)
    points = lower + (upper - lower) * u
    inside = confidence_set.contains(points)
    box = float((upper - lower).prod())
    return points[inside], box * float(inside.double().mean())


class ConfidenceSetContract:
    """What holds for every set; a subclass says how one is made (d = 2, bounded).

    Example:
        >>> import torchglb as glb
        >>> class TestEllipsoids(ConfidenceSetContract):
        ...     def make(self, batch=(), dtype=torch.float64):
        ...         center, size = torch.zeros(*batch, 2), torch.ones(batch)
        ...         given = (center, torch.eye(2).expand(*batch, 2, 2), size)
        ...         given = [t.to(dtype) for t in given]
        ...         return glb.EllipsoidSet(glb.Bernoulli(), glb.Ball(2, self.S), *given)
        >>> TestEllipsoids().make().center
        tensor([0., 0.], dtype=torch.float64)
    """

    #: whether the bound is the support itself
    exact = True
    #: the radius of the ball
    S = 3.0

    def make(
        self, batch: tuple[int, ...] = (), dtype: torch.dtype = torch.float64
    ) -> ConfidenceSet:
        """A set in the plane with this batch shape and dtype."""
        raise NotImplementedError

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("batch", BATCHES)
    def test_shapes_and_dtypes(self, batch, dtype):
        made = self.make(batch, dtype)
        one, many = unit(*batch, 2, dtype=dtype), unit(*batch, 4, 2, dtype=dtype)
        answers = [
            (made.slack(one), batch),
            (made.slack(many), (*batch, 4)),
            (made.upper_bound(one), batch),
            (made.upper_bound(many), (*batch, 4)),
            (made.interval(one).lower, batch),
            (made.interval(many, scale="mean").upper, (*batch, 4)),
            (made.contrast(one, -one).width, batch),
            (made.contrast(many, -many).width, (*batch, 4)),
            (made.boundary(8), (*batch, 8, 2)),
            (made.volume(), batch),
            (made.center, (*batch, 2)),
        ]
        for value, shape in answers:
            assert value.shape == shape
            assert value.dtype == dtype
            assert bool(torch.isfinite(value).all())
        assert made.contains(many).dtype == torch.bool
        assert made.batch_shape == batch
        assert made.dim == 2

    def test_batched_equals_loop(self):
        made = self.make((2, 3))
        x, points = unit(2, 3, 4, 2, seed=3), 2.0 * unit(2, 3, 5, 2, seed=4)
        interval, slack = made.interval(x, scale="mean"), made.slack(points)
        boundary, volume = made.boundary(16), made.volume()
        for i in range(2):
            for j in range(i, 3, 2):
                alone = pick(made, (i, j))
                for whole, single in [
                    (interval.lower[i, j], alone.interval(x[i, j], scale="mean").lower),
                    (interval.upper[i, j], alone.interval(x[i, j], scale="mean").upper),
                    (slack[i, j], alone.slack(points[i, j])),
                    (boundary[i, j], alone.boundary(16)),
                    (volume[i, j], alone.volume()),
                ]:
                    # the solver closes its gaps to 3e-8, and stops where a batch lets it stop
                    torch.testing.assert_close(whole, single, rtol=1e-7, atol=1e-7)

    def test_an_index_picks_elements(self):
        made, points = self.make((2, 3)), 2.0 * unit(2, 3, 5, 2, seed=4)
        slack, boundary = made.slack(points), made.boundary(16)
        for index in (0, 1, slice(1, 2), slice(0, 2)):
            some = made[index]
            assert some.batch_shape == slack[index].shape[:-1]
            torch.testing.assert_close(some.slack(points[index]), slack[index])
            torch.testing.assert_close(some.boundary(16), boundary[index], rtol=1e-7, atol=1e-7)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_center_is_inside(self, dtype):
        made = self.make((3,), dtype)
        assert bool(made.contains(made.center).all())

    def test_interval_holds_every_point_and_is_attained(self):
        made = self.make()
        points, _ = sampled(made)
        assert len(points) > 1000
        x = unit(6, 2, seed=5)
        values = points @ x.mT
        linear, mean = made.interval(x), made.interval(x, scale="mean")
        assert bool((values <= linear.upper).all())
        assert bool((values >= linear.lower).all())
        means = made.family.mean(values)
        assert bool(((means <= mean.upper) & (means >= mean.lower)).all())
        if self.exact:
            edge = made.boundary(600)
            # every point of the boundary is this close to one of them
            spacing = torch.linalg.vector_norm(edge - edge.roll(1, dims=-2), dim=-1).amax()
            assert float(spacing) < 0.1
            reached, least = (edge @ x.mT).amax(0), (edge @ x.mT).amin(0)
            assert bool((linear.upper - reached <= spacing).all())
            assert bool((least - linear.lower <= spacing).all())

    def test_support_point_attains_the_bound(self):
        made = self.make((3,))
        if isinstance(made, IntersectionSet):
            pytest.skip("an intersection has bounds only")
        x = unit(3, 5, 2, seed=6)
        found = made.support(x)
        assert bool((found.status == 0).all())
        assert bool((found.gap <= 1e-6).all())
        assert bool((found.upper >= found.lower).all())
        torch.testing.assert_close((found.theta * x).sum(-1), found.lower, rtol=0, atol=1e-12)
        inner = made.center[..., None, :] + (1 - 1e-9) * (found.theta - made.center[..., None, :])
        assert bool(made.contains(inner).all())
        torch.testing.assert_close(made.upper_bound(x), found.upper, rtol=0, atol=1e-12)

    def test_boundary_points_are_on_the_boundary(self):
        made = self.make((3,))
        points = made.boundary(60)
        slack = made.slack(made.center[..., None, :] + (1 - 1e-9) * (points - made.center[:, None]))
        assert bool((slack >= 0).all())
        on_sphere = (torch.linalg.vector_norm(points, dim=-1) - self.S).abs() < 1e-9
        assert bool(((slack.abs() < 1e-6) | on_sphere).all())
        middle = points.mean(-2, keepdim=True)
        beyond = middle + 1.001 * (points - middle)
        assert not bool(made.contains(beyond).any())
        # counter-clockwise
        ahead = points.roll(-1, dims=-2)
        area = 0.5 * (points[..., 0] * ahead[..., 1] - points[..., 1] * ahead[..., 0]).sum(-1)
        assert bool((area > 0).all())
        torch.testing.assert_close(area, made.volume(), rtol=0.01, atol=0)

    def test_area_by_monte_carlo(self):
        made = self.make()
        _, area = sampled(made, 40000)
        assert float(made.volume()) == pytest.approx(area, rel=0.03)

    def test_contrast_is_the_interval_of_the_difference(self):
        made = self.make()
        x1, x2 = unit(2, 2, seed=8)
        contrast, interval = made.contrast(x1, x2), made.interval(x1 - x2)
        torch.testing.assert_close(contrast.lower, interval.lower, rtol=0, atol=0)
        torch.testing.assert_close(contrast.width, interval.upper - interval.lower)

    def test_lists_are_taken(self):
        made = self.make()
        expected = made.interval(torch.tensor([0.6, 0.8]).double()).upper
        given = made.interval([0.6, 0.8]).upper
        torch.testing.assert_close(given, expected, rtol=1e-6, atol=1e-6)
        assert bool(made.contains(made.center.tolist()))

    @pytest.mark.parametrize(
        ("question", "message"),
        [
            (lambda made: made.contains(torch.zeros(3).double()), "theta: expected shape"),
            (lambda made: made.contains("here"), "theta: expected a tensor or real numbers"),
            (lambda made: made.contains([math.nan, 0.0]), "theta: expected finite"),
            (lambda made: made.interval([math.inf, 0.0]), "x: expected finite"),
            (lambda made: made.interval([1.0]), "x: expected shape"),
            (lambda made: made.interval([1.0, 0.0], scale="log"), "scale: expected one of"),
            (lambda made: made.contrast([1.0, 0.0], [[1.0, 0.0]]), "x2: expected the shape"),
            (lambda made: made.boundary(2), "num: expected an integer"),
        ],
    )
    def test_refusals(self, question, message):
        with pytest.raises(InputError, match=message):
            question(self.make())
