"""Bandits made of real data: handwritten digits, tumours, visits to the doctor.

The tables come with scikit-learn and statsmodels (the extra ``data``); nothing is downloaded. A row
of a table becomes a point of the unit ball: its columns are standardised and turned onto their
principal axes, rows longer than most are drawn in, and a constant is added, so that

``x = (1, z / q) / sqrt(2)``, ``|z| <= q``, q the 95% quantile of the lengths.

No GLM is true for these rewards: theta* is unknown, and no set is promised to hold it.
"""

from __future__ import annotations

import importlib
import math
from functools import lru_cache
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor

from torchglb.checks import ValueChecks, check_choice, check_count, refuse
from torchglb.domain import Ball
from torchglb.environments.base import Environment, picked, register
from torchglb.environments.settings import (
    TASKS,
    RowsSettings,
    SeedSettings,
    TableSettings,
    Task,
)
from torchglb.errors import InputError
from torchglb.families import GLMFamily, Poisson
from torchglb.mle import constrained_mle
from torchglb.rows.buffers import Rows

#: rows longer than this share of all are drawn in
QUANTILE = 0.95


class Dataset(NamedTuple):
    """A data set.

    Attributes:
        features: ``(n, p)``.
        target: a class 0, 1, ... or a count, ``(n)``.
    """

    features: np.ndarray
    target: np.ndarray


@lru_cache(maxsize=8)
def load_table(name: str) -> Dataset:
    """``"digits"`` (10 classes), ``"breast-cancer"`` (1: malignant) or ``"randhie"`` (visits).

    Example:
        >>> load_table("digits").features.shape
        (1797, 64)
    """
    check_choice("name", name, tuple(_LOADERS))
    return _LOADERS[name]()


def _digits() -> Dataset:
    found = _need("sklearn.datasets", "scikit-learn").load_digits()
    return Dataset(found.data.astype(np.float64), found.target)


def _breast_cancer() -> Dataset:
    found = _need("sklearn.datasets", "scikit-learn").load_breast_cancer()
    return Dataset(found.data.astype(np.float64), 1 - found.target)  # there, 1 is benign


def _randhie() -> Dataset:
    found = _need("statsmodels.datasets.randhie", "statsmodels").load_pandas()
    return Dataset(found.exog.to_numpy(np.float64), found.endog.to_numpy(copy=True))


_LOADERS = {"digits": _digits, "breast-cancer": _breast_cancer, "randhie": _randhie}


def _need(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"this data set comes with {package}, which is not installed ({error}):"
            f" pip install {package}"
        ) from None


@lru_cache(maxsize=8)
def unit_ball_rows(name: str, dim: int) -> Tensor:
    """The rows of a table as points of the unit ball, ``(n, dim)``, the first entry constant.

    Args:
        name: of :func:`load_table`.
        dim: the number of principal axes that are kept, and one.
    """
    table = load_table(name).features
    spread = table.std(0)
    table = table[:, spread > 0]
    standard = (table - table.mean(0)) / table.std(0)
    _, size, axes = np.linalg.svd(standard, full_matrices=False)
    rank = int((size > 1e-10 * size[0]).sum())
    if not 2 <= dim <= rank + 1:
        raise refuse("dim", f"between 2 and {rank + 1} for {name}", dim)
    largest = axes[np.arange(len(axes)), np.abs(axes).argmax(1)]
    z = standard @ (axes * np.sign(largest)[:, None])[: dim - 1].T  # one sign on every machine
    length = np.linalg.norm(z, axis=1, keepdims=True)
    q = np.quantile(length, QUANTILE)
    z = z / np.maximum(length, q)
    rows = np.hstack([np.ones((len(z), 1)), z]) / math.sqrt(2.0)
    return torch.from_numpy(rows * (1.0 - 2.0**-52))  # rounding may leave the ball by an ulp


class TableBandit(Environment):
    """K rows of a table are shown in every round; playing one pays its value.

    Args:
        arms: K.
        dim: d; the constant is one of them.
        settings: of :class:`Environment`.
    """

    def __init__(
        self,
        family: GLMFamily,
        S: Tensor,
        replicates: Tensor,
        *,
        arms: int = 10,
        dim: int = 11,
        **settings: Unpack[SeedSettings],
    ) -> None:
        super().__init__(family, S, replicates, dim=dim, **settings)
        self.count = check_count("arms", arms, least=1)
        self._shown = self.streams("rows")
        self._round: tuple[int, Tensor] | None = None
        like: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        self._rows = unit_ball_rows(self.name, self._row_dim()).to(**like)
        if self.dtype != torch.float64:
            self._rows = self._rows * (1.0 - torch.finfo(self.dtype).eps)
        self._values = torch.from_numpy(self._pay(load_table(self.name).target)).to(**like)
        checks = ValueChecks()
        self.family.require_rewards(checks, self._values)
        checks.settle()

    def _row_dim(self) -> int:
        """The features of a row."""
        return self.dim

    def _pay(self, target: np.ndarray) -> np.ndarray:
        """What each row pays, ``(n)``."""
        return target.astype(np.float64)

    def _draw(self, t: int, count: int) -> Tensor:
        """The numbers ``(N, count)`` of the rows of round t, uniform."""
        if self._round is None or self._round[0] != t:
            u = self._shown.uniform_at(t * count, count, dtype=torch.float64)
            self._round = t, (u * len(self._rows)).long()
        return self._round[1]

    def arms(self, t: int) -> Tensor:  # noqa: D102
        return self._rows[self._draw(t, self.count)]

    def rewards(self, t: int, x: Tensor, index: Tensor | None) -> Tensor:  # noqa: D102
        return picked(self._values[self._draw(t, self.count)], index)

    def regret(self, t: int, x: Tensor, index: Tensor | None) -> Tensor:
        """The best value on show less the one that was played."""
        shown = self._values[self._draw(t, self.count)]
        return shown.amax(-1) - picked(shown, index)


class ClassificationBandit(TableBandit):
    """Classification with bandit feedback: the reward says only whether the choice was right.

    Args:
        task: ``"find"``: K rows are shown, and the one that is played pays 1 if it is of the class
            ``target``. ``"label"``: one row is shown, the arms are its possible classes, and the
            right one pays 1; arm k has the features of the row in its k-th block and zeros
            elsewhere, so d is the number of classes times the features of a row.
        target: the class to find.
        settings: of :class:`TableBandit`.
    """

    classes: ClassVar[int]

    def __init__(
        self,
        family: GLMFamily,
        S: Tensor,
        replicates: Tensor,
        *,
        task: Task = "find",
        target: int = 1,
        **settings: Unpack[TableSettings],
    ) -> None:
        self.task = check_choice("task", task, TASKS)
        self.target = check_count("target", target)
        if target >= self.classes:
            raise refuse("target", f"a class from 0 to {self.classes - 1}", target)
        super().__init__(family, S, replicates, **settings)
        if task == "label":
            if self.count != self.classes:
                raise refuse("arms", f"{self.classes}, one for each class", self.count)
            truth = torch.from_numpy(load_table(self.name).target.astype(np.int64))
            self._truth = truth.to(self.device)

    def _row_dim(self) -> int:
        if self.task == "find":
            return self.dim
        if self.dim % self.classes or self.dim < 2 * self.classes:
            expected = f"a multiple of the {self.classes} classes, twice that at least"
            raise refuse("dim", expected, self.dim)
        return self.dim // self.classes

    def _pay(self, target: np.ndarray) -> np.ndarray:
        return (target == self.target).astype(np.float64)

    def arms(self, t: int) -> Tensor:  # noqa: D102
        if self.task == "find":
            return super().arms(t)
        row = self._rows[self._draw(t, 1)]  # (N, 1, p)
        blocks = torch.eye(self.classes, dtype=self.dtype, device=self.device)
        return (blocks[:, :, None] * row[..., None, :]).flatten(-2)

    def rewards(self, t: int, x: Tensor, index: Tensor | None) -> Tensor:  # noqa: D102
        if self.task == "find":
            return super().rewards(t, x, index)
        assert index is not None
        return torch.eq(self._truth[self._draw(t, 1)[:, 0]], index).to(self.dtype)

    def regret(self, t: int, x: Tensor, index: Tensor | None) -> Tensor:
        """1 for a miss where a hit was possible."""
        if self.task == "find":
            return super().regret(t, x, index)
        return 1.0 - self.rewards(t, x, index)


@register
class Digits(ClassificationBandit):
    """Handwritten digits, 8 by 8 pixels (scikit-learn)."""

    name = "digits"
    classes = 10


@register
class BreastCancer(ClassificationBandit):
    """Tumours, benign (0) or malignant (1), by 30 measurements (scikit-learn)."""

    name = "breast-cancer"
    classes = 2


@register
class RandHIE(TableBandit):
    """Visits to the doctor in the RAND health insurance experiment (statsmodels), for Poisson.

    K people are shown, and playing one pays the number of visits. The counts of two alike people
    differ by luck, so the regret is measured with the means of the Poisson model that fits the
    whole table best among ``|theta| <= S``.

    Args:
        settings: of :class:`TableBandit`.
    """

    name = "randhie"

    def __init__(
        self,
        family: GLMFamily,
        S: Tensor,
        replicates: Tensor,
        *,
        dim: int = 10,
        **settings: Unpack[RowsSettings],
    ) -> None:
        super().__init__(family, S, replicates, dim=dim, **settings)
        if not isinstance(self.family, Poisson):
            raise refuse("family", "Poisson for randhie", type(self.family).__name__)
        fit = torch.stack([_fitted(self.name, dim, S) for S in self.S.double().tolist()])
        self._fit = fit.to(dtype=self.dtype, device=self.device)

    def regret(self, t: int, x: Tensor, index: Tensor | None) -> Tensor:
        """The largest fitted mean on show less that of the arm that was played."""
        mean = self.family.mean((self.arms(t) * self._fit[:, None, :]).sum(-1))
        return mean.amax(-1) - picked(mean, index)


@lru_cache(maxsize=16)
def _fitted(name: str, dim: int, S: float) -> Tensor:
    """The best Poisson model of a table in the ball, ``(dim)``."""
    target = torch.from_numpy(load_table(name).target.astype(np.float64))
    rows = Rows(unit_ball_rows(name, dim), target)
    return constrained_mle(Poisson(), rows, Ball(dim, S)).theta
