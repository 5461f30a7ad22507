"""scikit-learn's doors: a classifier and a regressor whose intervals survive peeking."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.metrics import d2_tweedie_score, r2_score
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from torchglb.checks import check_count, check_flag, refuse
from torchglb.estimators.linear_fit import LinearFit
from torchglb.estimators.scaling import Scale
from torchglb.families import Bernoulli, Binomial, Gaussian, GLMFamily, Poisson


class _GLMEstimator(BaseEstimator):
    """What both share: rows in, coefficients with intervals out."""

    delta: float
    S: float | None
    prior: float
    burn_in: int
    fit_intercept: bool

    def _family(self) -> GLMFamily:
        raise NotImplementedError

    def _restart(self) -> None:
        if hasattr(self, "fit_"):
            del self.fit_
        self._pilot: tuple[np.ndarray, np.ndarray, np.ndarray | None] | None = None

    def _add(self, X: np.ndarray, y: np.ndarray, weight: np.ndarray | None) -> None:
        """Rows of the burn-in until it is full, then rows of evidence."""
        check_count("burn_in", self.burn_in)
        X, y, weight = repeated(X, y, weight)
        if not hasattr(self, "fit_"):
            if self._pilot is not None:
                before, rest = self._pilot, X
                X, y = np.vstack([before[0], X]), np.append(before[1], y)
                if weight is not None or before[2] is not None:
                    weight = np.append(_ones(before[2], len(before[0])), _ones(weight, len(rest)))
            if self.burn_in and len(X) <= self.burn_in:
                self._pilot = X, y, weight
                return
            self._begin(X[: self.burn_in], y[: self.burn_in])
            self._pilot = None
            X, y = X[self.burn_in :], y[self.burn_in :]
            weight = None if weight is None else weight[self.burn_in :]
        self.fit_.append(self.fit_.scale.rows(self._columns(X)), y, weight)
        self._publish()

    def _begin(self, X: np.ndarray, y: np.ndarray) -> None:
        """The scale of the burn-in; columns as they are without one."""
        first = 0 if check_flag("fit_intercept", self.fit_intercept) else None
        names = [f"x{j}" for j in range(self.n_features_in_)]
        scale = Scale.identity([*(["Intercept"] if self.fit_intercept else []), *names], first)
        if self.burn_in:
            low, high = X.min(axis=0), X.max(axis=0)
            center = 0.5 * (low + high) if self.fit_intercept else np.zeros_like(low)
            half = 0.5 * (high - low) if self.fit_intercept else np.maximum(abs(low), abs(high))
            ends = (float(y.min()), float(y.max()))
            scale = Scale(
                scale.names,
                self._padded(center, 0.0),
                self._padded(np.where(half > 0, half, 1.0), 1.0),
                self._padded(np.full(len(half), 2.0), 1.0),
                first,
                0.5 * (ends[0] + ends[1]) if self.fit_intercept else 0.0,
                0.5 * (ends[1] - ends[0]) if ends[0] < ends[1] else 1.0,
                f"the first {self.burn_in} rows, which are no evidence",
            )
        self.fit_ = LinearFit(scale, self._family(), self.delta, S=self.S, prior=self.prior)
        self.fit_.weight_name = "sample_weight"

    def _padded(self, values: np.ndarray, intercept: float) -> np.ndarray:
        return np.concatenate([[intercept], values]) if self.fit_intercept else values

    def _columns(self, X: np.ndarray) -> np.ndarray:
        return np.column_stack([np.ones(len(X)), X]) if self.fit_intercept else X.copy()

    coef_: np.ndarray
    intercept_: Any

    def _publish(self) -> None:
        beta = self.fit_.value(np.eye(self.fit_.dim))
        self.intercept_ = float(beta[0]) if self.fit_intercept else 0.0
        self.coef_ = beta[1:] if self.fit_intercept else beta

    def _ready(self, X: Any) -> np.ndarray:
        check_is_fitted(self, "fit_")
        return self._columns(validate_data(self, X, reset=False, dtype=np.float64))

    @property
    def coef_interval_(self) -> np.ndarray:
        """Ends of the intervals of :attr:`coef_`, ``(d, 2)``: valid at all times at once."""
        check_is_fitted(self, "fit_")
        first = 1 if self.fit_intercept else 0
        found = self.fit_.marginal(np.eye(self.fit_.dim)[first:])
        return np.column_stack([found.lower, found.upper])

    def predict_interval(self, X: Any) -> np.ndarray:
        """Ends for the mean response of rows, ``(n, 2)``: valid for all rows and times at once."""
        rows = self._ready(X)
        found = self.fit_.interval(rows)
        return np.column_stack(self.fit_.mean_ends(found.lower, found.upper))


class GLMClassifier(ClassifierMixin, _GLMEstimator):
    """Logistic regression with intervals that hold for adaptive data and under peeking.

    Two classes. By default columns are taken as they are, with a Gaussian prior of standard
    deviation ``prior`` on each coefficient: the intervals are right for any data, and short if one
    unit of a column matters somewhat. A :class:`sklearn.preprocessing.StandardScaler` in front
    would look at all rows; ``burn_in`` does not.

    Args:
        delta: one minus the coverage.
        S: a bound on ``|x'beta|`` over all rows of the ball that these are in, possible or not
            (:func:`torchglb.glm`); needs rows in the unit ball, or a burn-in.
        prior: standard deviation of a coefficient in the units of the scale.
        burn_in: first rows that give the scale and are no evidence.
        fit_intercept: whether the model has an intercept.

    Attributes:
        coef_: ``(1, d)``.
        intercept_: ``(1,)``.
        coef_interval_: ``(d, 2)``.
        classes_: the two classes; probabilities are those of the second.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> X = rng.normal(size=(500, 2))
        >>> y = rng.random(500) < 1 / (1 + np.exp(-2 * X[:, 0]))
        >>> model = GLMClassifier().fit(X, y)
        >>> bool(model.coef_interval_[0, 0] > 0)
        True
    """

    def __init__(
        self,
        *,
        delta: float = 0.05,
        S: float | None = None,
        prior: float = 2.0,
        burn_in: int = 0,
        fit_intercept: bool = True,
    ) -> None:
        self.delta, self.S, self.prior = delta, S, prior
        self.burn_in, self.fit_intercept = burn_in, fit_intercept

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags

    def _family(self) -> GLMFamily:
        return Bernoulli()

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> GLMClassifier:
        """Starts anew with these rows.

        Args:
            X: ``(n, d)``, in the order in which they came.
            y: ``(n,)``, of two classes.
            sample_weight: in [0, 1], fixed before y was seen; above 1, repeated observations.
        """
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        kind = type_of_target(y, input_name="y", raise_unknown=True)
        if kind != "binary":
            raise ValueError(
                f"Only binary classification is supported. The type of the target is {kind}."
            )
        self.classes_ = np.unique(y)
        if len(self.classes_) < 2:
            raise ValueError("Classifier can't train when only one class is present.")
        self._restart()
        return self._go_on(X, y, sample_weight)

    def partial_fit(
        self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None
    ) -> GLMClassifier:
        """Goes on with more rows.

        Args:
            X: ``(n, d)``.
            y: ``(n,)``.
            classes: both classes, at the first call.
            sample_weight: in [0, 1].
        """
        first = not hasattr(self, "classes_")
        X, y = validate_data(self, X, y, dtype=np.float64, reset=first)
        if first:
            if classes is None:
                raise ValueError("classes must be passed on the first call to partial_fit.")
            self.classes_ = np.unique(classes)
            if len(self.classes_) != 2:
                raise ValueError(f"Only binary classification is supported, got {classes}.")
            self._restart()
        return self._go_on(X, y, sample_weight)

    def _go_on(self, X: np.ndarray, y: np.ndarray, sample_weight: Any) -> GLMClassifier:
        known = np.isin(y, self.classes_)
        if not known.all():
            raise refuse("y", f"the classes {self.classes_.tolist()}", y[~known][0])
        weight = _weights(sample_weight, X)
        self._add(X, (y == self.classes_[1]).astype(np.float64), weight)
        return self

    def _publish(self) -> None:
        super()._publish()
        self.coef_, self.intercept_ = self.coef_[None], np.array([self.intercept_])

    def decision_function(self, X: Any) -> np.ndarray:
        """``x'beta``, ``(n,)``."""
        rows = self._ready(X)
        beta = np.append(self.intercept_, self.coef_) if self.fit_intercept else self.coef_[0]
        return rows @ beta

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities of the two classes, ``(n, 2)``."""
        z = self.decision_function(X)
        p = self.fit_.mean(z)
        return np.column_stack([1.0 - p, p])

    def predict(self, X: Any) -> np.ndarray:
        """The likelier class, ``(n,)``."""
        z = self.decision_function(X)
        return self.classes_[(z > 0).astype(int)]


class GLMRegressor(RegressorMixin, _GLMEstimator):
    """A Gaussian, Poisson or binomial regression with intervals that survive peeking.

    Args:
        family: ``"gaussian"``, ``"poisson"`` or ``"binomial"``.
        sigma: the standard deviation of Gaussian noise, which must be known; a bound will do.
        trials: of binomial responses.
        delta: one minus the coverage.
        S: a bound on ``|x'beta|`` over all rows of the ball that these are in, possible or not
            (:func:`torchglb.glm`); needs rows in the unit ball, or a burn-in.
        prior: standard deviation of a coefficient in the units of the scale.
        burn_in: first rows that give the scale and are no evidence.
        fit_intercept: whether the model has an intercept.

    Example:
        >>> X = np.linspace(0, 1, 300)[:, None]
        >>> model = GLMRegressor(sigma=0.5).fit(X, 2.0 * X[:, 0])
        >>> bool(model.coef_interval_[0, 0] > 0.5)
        True
    """

    def __init__(
        self,
        *,
        family: Literal["gaussian", "poisson", "binomial"] = "gaussian",
        sigma: float = 1.0,
        trials: int = 1,
        delta: float = 0.05,
        S: float | None = None,
        prior: float = 2.0,
        burn_in: int = 0,
        fit_intercept: bool = True,
    ) -> None:
        self.family, self.sigma, self.trials = family, sigma, trials
        self.delta, self.S, self.prior = delta, S, prior
        self.burn_in, self.fit_intercept = burn_in, fit_intercept

    def _family(self) -> GLMFamily:
        if self.family == "gaussian":
            return Gaussian(self.sigma)
        if self.family == "poisson":
            return Poisson()
        if self.family == "binomial":
            return Binomial(self.trials)
        raise refuse("family", "'gaussian', 'poisson' or 'binomial'", repr(self.family))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = self.family != "gaussian"
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> GLMRegressor:
        """Starts anew with these rows.

        Args:
            X: ``(n, d)``, in the order in which they came.
            y: ``(n,)``.
            sample_weight: in [0, 1], fixed before y was seen; above 1, repeated observations.
        """
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        self._restart()
        self._add(X, y.astype(np.float64), _weights(sample_weight, X))
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> GLMRegressor:
        """Goes on with more rows."""
        first = not hasattr(self, "n_features_in_")
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, reset=first)
        if first:
            self._restart()
        self._add(X, y.astype(np.float64), _weights(sample_weight, X))
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The mean response, ``(n,)``."""
        rows = self._ready(X)
        beta = np.append(self.intercept_, self.coef_) if self.fit_intercept else self.coef_
        return self.fit_.mean(rows @ beta)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R^2; for Poisson responses the share of the deviance that is explained."""
        found = self.predict(X)
        if self.family == "poisson":
            return float(d2_tweedie_score(y, found, sample_weight=sample_weight, power=1))
        return float(r2_score(y, found, sample_weight=sample_weight))


def repeated(
    X: np.ndarray, y: np.ndarray, weight: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Rows of weight ``k + f`` as k rows of weight 1 and one of weight f in [0, 1).

    A weight above 1 is how scikit-learn writes repeated observations; a likelihood ratio to a
    power above 1 would be no martingale.

    Example:
        >>> repeated(np.zeros((1, 1)), np.ones(1), np.array([2.5]))[2]
        array([1. , 1. , 0.5])
    """
    if weight is None or not (weight > 1.0).any():
        return X, y, weight
    if (weight < 0).any():
        raise refuse("sample_weight", "numbers of at least 0", weight.min())
    whole = np.floor(weight).astype(int)
    part = weight - whole
    times = whole + (part > 0)
    which = np.repeat(np.arange(len(y)), times)
    last = np.cumsum(times)[times > 0] - 1
    spread = np.ones(len(which))
    spread[last] = np.where(part[times > 0] > 0, part[times > 0], 1.0)
    return X[which], y[which], spread


def _ones(weight: np.ndarray | None, rows: int) -> np.ndarray:
    return np.ones(rows) if weight is None else weight


def _weights(sample_weight: Any, X: np.ndarray) -> np.ndarray | None:
    return None if sample_weight is None else _check_sample_weight(sample_weight, X)
