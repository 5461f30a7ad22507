"""A model in the units of its table: rows in, estimates, intervals and tests of contrasts out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from scipy import special
from torch import Tensor

from torchglb.checks import check_positive, check_probability, refuse
from torchglb.choices import Relation, RowsOutside
from torchglb.domain import Ball
from torchglb.errors import InputError, SolverError
from torchglb.estimators.estimate import is_flat, polished, posterior_mode
from torchglb.estimators.evidence import expand, whole_space_test
from torchglb.estimators.results import Bounds, Evidence, GLMEstimate, outward
from torchglb.estimators.scaling import Scale
from torchglb.estimators.tables import refused
from torchglb.families import Gaussian, GLMFamily
from torchglb.inference import FixedSampleInterval, profile_interval
from torchglb.inference.tests import TestResult, anytime_p
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.mle import minimize_likelihood
from torchglb.radii import GaussianPrior, Radius
from torchglb.sequence import ConfidenceSequence
from torchglb.sets import Interval, LikelihoodRatioSet
from torchglb.sets.base import on_mean_scale

#: the balls in which estimates without S are sought, in standard deviations of the prior
FAR = (3.0, 100.0, 1e4)
#: how many times larger balls are in which ends of profile intervals are sought
LARGER = (30.0, 1000.0)
#: how exactly the ends of intervals are found, relative to 1 + their size: few numbers in all rows
#: allow more digits than statistics needs
TOLERANCE, ROUGH_TOLERANCE, FEW = 1e-11, 3e-8, 4_000_000
#: rows that are handed on at a time: bounds the memory beside them
CHUNK = 1 << 13
#: a Gram matrix of unit diagonal with a smaller eigenvalue has columns that depend on each other
DEPENDENT = 1e-11


class LinearFit:
    """A confidence sequence that speaks of the coefficients beta of unscaled rows.

    Rows are scaled (:class:`torchglb.estimators.scaling.Scale`) and divided by a length, so that
    they lie in the unit ball; ``<c, beta>`` is then a contrast of theta, without approximation.
    Without S the length is a power of two that grows with the longest row: the Gaussian prior is
    measured in units of the scale, so nothing depends on it.

    Args:
        scale: of the d columns.
        family: the GLM family.
        delta: the failure probability.
        S: a bound on ``|x'beta|`` over all rows s of length ``|s| <= length``, possible or not
            (:attr:`torchglb.estimators.scaling.Scale.bound`): with phi the coefficients of s,
            ``|phi| length <= S``. None for none.
        radius: as in :class:`torchglb.ConfidenceSequence`; by default ``"gaussian-prior"``
            without S, ``"pac-bayes"`` with it.
        prior: the standard deviation of a coefficient in the units of the scale, without S.

    Example:
        >>> fit = LinearFit(Scale.identity(["x"]), Gaussian(1.0), delta=0.05)
        >>> fit.append(np.ones((400, 1)), np.full(400, 3.0))
        0
        >>> bounds = fit.interval(np.eye(1))
        >>> bool(2.7 < bounds.lower[0] < 3.0 < bounds.upper[0] < 3.3)
        True
    """

    #: columns of the inner problem beside those of the scale
    extra = 0

    def __init__(
        self,
        scale: Scale,
        family: GLMFamily,
        delta: float,
        *,
        S: float | None = None,
        radius: str | Radius | None = None,
        prior: float = 2.0,
    ) -> None:
        self.scale, self.delta = scale, check_probability("delta", delta)
        self.family = family
        #: what messages call the response and the weights
        self.response, self.weight_name = "y", "weight"
        self.S = None if S is None else check_positive("S", S)
        self.prior = check_positive("prior", prior)
        if radius is None:
            radius = "gaussian-prior" if S is None else "pac-bayes"
        elif S is None and radius != "gaussian-prior" and getattr(radius, "confined", True):
            raise refuse("radius", "'gaussian-prior' without S (others need S=...)", repr(radius))
        self.radius = radius
        self._inner = family
        if isinstance(family, Gaussian):
            self._inner = Gaussian(float(family.sigma) / scale.unit)
        self.length = scale.bound if S is not None else 1.0
        self._gram = np.zeros((self.dim + self.extra,) * 2)
        self.sequence = self._new_sequence(self.length)
        self._estimate: GLMEstimate | None = None

    def anew(self) -> LinearFit:
        """The same without rows."""
        new = type(self)(
            self.scale,
            self.family,
            self.delta,
            S=self.S,
            radius=self.radius,
            prior=self.prior,
        )
        new.response, new.weight_name = self.response, self.weight_name
        return new

    def rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Rows in the units of the scale, responses in those of the table, and weights."""
        X, r, w = self.sequence.history.view()
        y0, unit = self._response_scale
        return X.numpy() * self.length, r.numpy() * unit + y0, None if w is None else w.numpy()

    @property
    def tolerance(self) -> float:
        """Of the ends of intervals."""
        return TOLERANCE if len(self) * self.dim <= FEW else ROUGH_TOLERANCE

    @property
    def _is_gaussian(self) -> bool:
        return isinstance(self.family, Gaussian)

    @property
    def dim(self) -> int:
        """d."""
        return len(self.scale.names)

    def __len__(self) -> int:
        """Rows that count as evidence."""
        return len(self.sequence)

    @property
    def _response_scale(self) -> tuple[float, float]:
        """Origin and unit of the response; other families have neither."""
        return (self.scale.y0, self.scale.unit) if self._is_gaussian else (0.0, 1.0)

    def _new_sequence(self, length: float) -> ConfidenceSequence:
        d, radius = self.dim + self.extra, self.radius
        if self.S is not None:
            S = self.S / self._response_scale[1]
        else:
            S = FAR[0] * self.prior * length * math.sqrt(d)
            if radius == "gaussian-prior":
                radius = GaussianPrior(scale=1.0 / FAR[0] * math.sqrt(d))
        return ConfidenceSequence(self._inner, Ball(d, S), self.delta, radius)

    # ---- rows ----------------------------------------------------------------------------

    def append(
        self,
        rows: np.ndarray,
        y: np.ndarray,
        weight: np.ndarray | None = None,
        places: np.ndarray | None = None,
        outside: RowsOutside = "refuse",
        offset: np.ndarray | None = None,
    ) -> int:
        """Adds rows ``(n, d)`` in the units of the scale; all or nothing.

        Args:
            rows: what :meth:`Scale.rows` has made of the rows of the table; not used again by
                whoever calls (it is divided in place, for a table may be large).
            y: responses ``(n,)`` in the units of the table.
            weight: in [0, 1], fixed before the response was seen.
            places: where the rows stand in their table, for messages.
            outside: with S, what to do with rows beyond the scale: ``"refuse"`` or ``"drop"``.
            offset: ``(n,)``, added to ``x'beta``: here for Gaussian responses only, of which it is
                subtracted; :class:`torchglb.estimators.offsets.OffsetFit` takes it for the others.

        Returns:
            How many were left out.
        """
        if offset is not None:
            if not self._is_gaussian:
                raise refuse("offset", "an OffsetFit, for this family", type(self).__name__)
            y = y - offset
        places = np.arange(len(rows)) if places is None else places
        norm = np.sqrt(np.einsum("ij,ij->i", rows, rows))
        beyond = norm > self.length * (1.0 + 1e-12)
        dropped, length = 0, self.length
        if self.S is not None and beyond.any():
            if outside != "drop":
                raise self._beyond(rows, int(np.flatnonzero(beyond)[0]), places)
            dropped, keep = int(beyond.sum()), ~beyond
            rows, y, norm, places = rows[keep], y[keep], norm[keep], places[keep]
            weight = None if weight is None else weight[keep]
        elif beyond.any():
            length = 2.0 ** math.ceil(math.log2(float(norm.max())) + 1e-9)
        self._check_values(y, weight, places)
        y0, unit = self._response_scale
        r = y if unit == 1.0 and y0 == 0.0 else (y - y0) / unit
        gram = self._gram + (rows if weight is None else rows * weight[:, None]).T @ rows
        rows /= length
        sequence = self.sequence if length == self.length else self._moved(length)
        mark = sequence.history.mark()
        try:
            self._fill(sequence, rows, r, weight)
        except BaseException:
            sequence.history.reset(mark)
            if sequence is self.sequence:  # its radius has seen some of the rows
                self.sequence = self._moved(self.length)
            raise
        self.sequence, self.length, self._gram = sequence, length, gram
        self._estimate = None
        return dropped

    def _check_values(self, y: np.ndarray, weight: np.ndarray | None, places: np.ndarray) -> None:
        """Responses in the support and weights in [0, 1], refused by their row."""
        low, high = self.family.reward_range
        inside = (y >= low) & (y <= high)
        kind = f"values in [{low:g}, {high:g}]"
        if self.family.integer_rewards:
            inside, kind = inside & (y == np.round(y)), f"whole {kind}"
        if not inside.all():
            row = int(np.flatnonzero(~inside)[0])
            expected = f"{kind} ({type(self.family).__name__})"
            raise refused(self.response, expected, f"{y[row]:g}", int(places[row]))
        if weight is not None and not ((weight >= 0) & (weight <= 1)).all():
            row = int(np.flatnonzero(~((weight >= 0) & (weight <= 1)))[0])
            expected = "weights in [0, 1], fixed before the response was seen"
            raise refused(self.weight_name, expected, f"{weight[row]:g}", int(places[row]))

    def _beyond(self, rows: np.ndarray, row: int, places: np.ndarray) -> InputError:
        scale = self.scale
        column = int(np.argmax(np.abs(rows[row]) / scale.reach))
        value = rows[row, column] * scale.half[column] + scale.center[column]
        return refused(
            scale.names[column],
            f"values within the scale ({scale.source}), because S rests on it: a wider range,"
            " a larger margin=, or outside='drop'",
            f"{value:g}",
            int(places[row]),
        )

    def _moved(self, length: float) -> ConfidenceSequence:
        """The same rows, divided by another length."""
        history = self.sequence.history
        X, r, w = history.view()
        sequence = self._new_sequence(length)
        ratio = self.length / length
        self._fill(sequence, X.numpy() * ratio, r.numpy(), None if w is None else w.numpy())
        return sequence

    @staticmethod
    def _fill(
        sequence: ConfidenceSequence, rows: np.ndarray, r: np.ndarray, w: np.ndarray | None
    ) -> None:
        sequence.history.reserve(len(rows))
        for first in range(0, len(rows), CHUNK):
            part = slice(first, first + CHUNK)
            x, reward = (torch.from_numpy(np.ascontiguousarray(a[part])) for a in (rows, r))
            weight = None if w is None else torch.from_numpy(np.ascontiguousarray(w[part]))
            sequence.update(x, reward, weight)

    def dependent_columns(self) -> list[str]:
        """Columns that the rows cannot tell apart, or that are 0 in all of them; [] if none."""
        names = self.scale.names
        gram = self._gram[: self.dim, : self.dim]
        size = np.sqrt(np.diag(gram))
        zero = [name for name, length in zip(names, size, strict=True) if not length > 0]
        if zero:
            return zero
        values, vectors = np.linalg.eigh(gram / np.outer(size, size))
        if values[0] > DEPENDENT * len(names):
            return []
        part = np.abs(vectors[:, 0])
        return [name for name, share in zip(names, part, strict=True) if share > 1e-3]

    # ---- what follows --------------------------------------------------------------------

    @property
    def likelihood(self) -> NegativeLogLikelihood:
        """The loss of the scaled rows."""
        return NegativeLogLikelihood.of(self._inner, self.sequence.history)

    def current(self) -> LikelihoodRatioSet:
        """The joint set of theta now."""
        found = self.sequence.current()
        assert isinstance(found, LikelihoodRatioSet)
        return found

    def _directions(self, C: np.ndarray) -> tuple[Tensor, np.ndarray, np.ndarray]:
        """Unit vectors u, factors f and shifts a with ``C beta = f <u, theta> + a``."""
        y0, unit = self._response_scale
        A, shift = self.scale.contrasts(np.atleast_2d(np.asarray(C, float)))
        A, shift = A * (unit / self.scale.unit) / self.length, shift * (1.0 if y0 else 0.0)
        # squares of very small or large numbers are none
        largest = np.abs(A).max(axis=1, initial=0.0)
        largest = np.where(largest > 0, largest, 1.0)
        A = A / largest[:, None]
        length = np.linalg.norm(A, axis=1)
        length = np.where(length > 0, length, 1.0)
        return torch.from_numpy(A / length[:, None]), largest * length, shift

    @property
    def estimate(self) -> GLMEstimate:
        """The maximum-likelihood estimate: within the ball with S, anywhere without."""
        if self._estimate is None:
            self._estimate = self._fitted()
        return self._estimate

    def _fitted(self) -> GLMEstimate:
        loss, domain = self.likelihood, self.sequence.domain
        start = self.current().theta_hat
        S, active = float(domain.max_radius), True
        factors = (FAR[0],) if self.S is not None else FAR
        for factor in (far / FAR[0] for far in factors):
            found = minimize_likelihood(
                loss, Ball(loss.dim, S * factor), start=start, tol=1e-13, throw=False
            )
            start = found.theta
            active = float(start.norm()) >= S * factor * (1.0 - 1e-6)
            if not active:
                break
        radius = S * factor
        theta, hessian = (start, found.hessian) if active else polished(loss, start)
        dispersion, gram = loss.family.dispersion, self._gram / self.length**2
        if self.S is None and (
            active or self.dependent_columns() or is_flat(gram, hessian, dispersion)
        ):
            theta, active = posterior_mode(loss, self.prior * self.length, radius), True
            hessian = expand(loss, theta).hessian
        return GLMEstimate(
            theta.numpy() / self.length,
            hessian.numpy() * self.length**2,
            active,
            radius / self.length,
        )

    def value(self, C: np.ndarray) -> np.ndarray:
        """The estimates of the contrasts, ``(k,)``."""
        u, size, shift = self._directions(C)
        theta = self.estimate.phi * self.length
        return size * (u.numpy() @ theta) + shift

    def interval(self, C: np.ndarray) -> Bounds:
        """Intervals of ``C beta``, ``(k, d)``, valid at all times at once and for all C at once."""
        u, size, shift = self._directions(C)
        joint = self.current()
        # a bound is certified wherever the search for a better one has ended
        found = joint.interval(u, tol=self.tolerance, throw=False)
        if bool((found.lower.isnan() | found.upper.isnan() | (found.lower > found.upper)).any()):
            found = joint.interval(u)
        return Bounds(
            self.value(C), *outward(found.lower.numpy(), found.upper.numpy(), size, shift)
        )

    def profile(self, C: np.ndarray) -> Bounds:
        """Profile-likelihood intervals at ``1 - delta``: for a sample fixed beforehand only."""
        u, size, shift = self._directions(C)
        fitted = self.estimate
        S = self.length * fitted.radius
        before, found = None, self._profile(u, S)
        for factor in () if self.S is not None else LARGER:
            if not bool(found.cut.any()):
                break
            try:
                before, found = found, self._profile(u, S * factor)
            except SolverError:  # so far out that the arithmetic ends
                break
        lower, upper = found.lower.numpy(), found.upper.numpy()
        if self.S is None and bool(found.cut.any()):
            # an end that moves with the ball of the search is none
            cut, far = found.cut.numpy(), np.zeros_like(lower)
            low, high = (
                (far, far) if before is None else (before.lower.numpy(), before.upper.numpy())
            )
            lower = np.where(cut & (lower < low - 0.1 * abs(low)), -np.inf, lower)
            upper = np.where(cut & (upper > high + 0.1 * abs(high)), np.inf, upper)
        return Bounds(self.value(C), size * lower + shift, size * upper + shift)

    def _profile(self, u: Tensor, S: float) -> FixedSampleInterval:
        return profile_interval(
            self._inner,
            self.sequence.history,
            u,
            domain=Ball(u.shape[1], S),
            alpha=self.delta,
            tol=self.tolerance,
        )

    def marginal(self, C: np.ndarray) -> Bounds:
        """Intervals of ``C beta``, each valid at all times with probability ``1 - delta``."""
        return self.interval(C)

    def effects_text(self) -> str:
        """What S says of the coefficients: of all of them together, not of each possible row."""
        most = (self.S or math.inf) / self.length
        return f"effects per half range have a root of summed squares of at most {most:.4g}"

    def interval_text(self, simultaneous: bool) -> str:
        """What is promised of the intervals."""
        return "valid at all times, all of them at once (joint set)"

    def mean(self, z: np.ndarray) -> np.ndarray:
        """The mean response at ``x'beta = z``; at an infinite z the end of its range."""
        low, high = self.family.reward_range
        inner = self.family.mean(torch.from_numpy(np.where(np.isfinite(z), z, 0.0))).numpy()
        return np.where(np.isfinite(z), inner, np.where(z > 0, high, low))

    def mean_ends(self, lower: np.ndarray, upper: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The mean responses at the ends of intervals of ``x'beta``, rounded outwards."""
        found = on_mean_scale(self.family, Interval(*map(torch.from_numpy, (lower, upper))))
        return found.lower.numpy(), found.upper.numpy()

    def wald(self, C: np.ndarray) -> Bounds:
        """The textbook's ``estimate ± z se``: for a large sample fixed beforehand only."""
        _, unit = self._response_scale
        A, _ = self.scale.contrasts(np.atleast_2d(np.asarray(C, float)))
        A = A * (unit / self.scale.unit)
        spread = np.linalg.pinv(self.estimate.hessian, hermitian=True)
        half = special.ndtri(1.0 - self.delta / 2) * np.sqrt(np.einsum("ij,jk,ik->i", A, spread, A))
        middle = self.value(C)
        return Bounds(middle, middle - half, middle + half)

    def test(self, C: np.ndarray, b: Any, relation: Relation = "==") -> Evidence:
        """The e-value against ``C beta = b``, or one inequality, and ``p = min(1, 1/E)``."""
        u, target, doubt = self._hypothesis(C, b)
        joint = self.current()
        if joint.confined:
            found = joint.test(u, torch.from_numpy(target), relation)
        else:
            assert joint.log_failure is not None
            found = whole_space_test(
                joint.likelihood,
                float(joint.level) - joint.log_failure,
                u.numpy(),
                target,
                theta_hat=torch.from_numpy(self.estimate.phi * self.length),
                hessian_hat=torch.from_numpy(self.estimate.hessian / self.length**2),
                relation=relation,
            )
        return self._evidence(found, u, target, doubt)

    def _hypothesis(self, C: np.ndarray, b: Any) -> tuple[Tensor, np.ndarray, np.ndarray]:
        """``C beta = b`` as ``<u, theta> = t``: unit vectors u, t, and how far it may be off."""
        u, size, shift = self._directions(C)
        given = np.atleast_1d(np.asarray(b, float))
        target = (given - shift) / size
        eps = np.finfo(float).eps
        return u, target, 8.0 * eps * ((abs(given) + abs(shift)) / size + abs(target))

    def _evidence(
        self, found: TestResult, u: Tensor, target: np.ndarray, doubt: np.ndarray
    ) -> Evidence:
        """An e-value that pays for what the targets t may be off by.

        The hyperplanes are off by ``|doubt| / (least singular value of u)`` at most, and on them
        the loss is above its tangent at the minimiser found.
        """
        log_e = found.log_e
        away = (1.0 + 1e-6) * float(np.linalg.norm(doubt)) / float(torch.linalg.svdvals(u)[-1])
        if bool(torch.isfinite(log_e)):
            slope = torch.linalg.vector_norm(expand(self.likelihood, found.theta).gradient)
            log_e = log_e - slope * away
        elif log_e > 0:  # nothing of the hypothesis is in the ball, or it is too close to tell
            nearest = float(np.linalg.norm(np.linalg.pinv(u.numpy()) @ target))
            if not nearest - away > self.sequence.domain.max_radius:
                log_e = -log_e
        return Evidence(float(log_e), float(anytime_p(log_e)))
