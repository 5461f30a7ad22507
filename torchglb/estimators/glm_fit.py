"""``glm(formula, data)``: from a table to intervals and tests that survive peeking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from torchglb.checks import check_choice, check_text, kind_of, refuse
from torchglb.choices import INTERVALS, OUTSIDE, SCALES, IntervalKind, RowsOutside, ScaleName
from torchglb.errors import InputError
from torchglb.estimators.design import Design, learn, references_of
from torchglb.estimators.facts import facts_of, warnings_of
from torchglb.estimators.hypotheses import Hypothesis, Names
from torchglb.estimators.linear_fit import LinearFit
from torchglb.estimators.marginal import ContrastFit
from torchglb.estimators.offsets import OffsetFit
from torchglb.estimators.packages import needed
from torchglb.estimators.results import Evidence, outward
from torchglb.estimators.running import Running, run_over
from torchglb.estimators.scaling import ASK, Scale, Scaler
from torchglb.estimators.summary import Summary
from torchglb.estimators.tables import Table, blocks, finite, order_of, times_of, without_missing
from torchglb.families import Bernoulli, Gaussian, GLMFamily, Poisson
from torchglb.radii import Radius


def glm(
    formula: str,
    data: Any,
    *,
    family: str | GLMFamily,
    delta: float = 0.05,
    scaler: Scaler | None = None,
    S: float | None = None,
    radius: str | Radius | None = None,
    prior: float = 2.0,
    intervals: IntervalKind = "anytime",
    contrasts: Sequence[str] = (),
    weights: str | None = None,
    offset: str | None = None,
    time: str | None = None,
    missing: RowsOutside = "refuse",
    rank: Literal["refuse", "allow"] = "refuse",
) -> GLMFit:
    """Fits a generalized linear model to a table; its intervals hold however often one looks.

    Rows may have been collected adaptively (bandits, adaptive trials), looked at after every one,
    and stopped when the result pleased: with probability ``1 - delta`` the coefficients lie in
    their intervals at all times at once. What is needed: the model is right, and rows are in the
    order in which they came.

    Args:
        formula: as in ``"clicked ~ age + C(arm) + C(arm):price"``. It is code: never take it from
            where the data come from.
        data: a pandas, polars or Arrow table, or a mapping from names to columns.
        family: ``"bernoulli"``, ``"poisson"``, or a family such as ``torchglb.Gaussian(sigma=2)``,
            ``torchglb.Binomial(10)``.
        delta: one minus the coverage.
        scaler: where the scale of the columns comes from (:class:`Scaler`).
        S: for shorter intervals; none is needed. A bound on ``|x'beta|`` (for Gaussian responses
            on its distance from the middle of their range) over the ball around the scaler's
            region, so also over rows that cannot be: ``|phi| sqrt(sum reach^2) <= S`` for the
            effects phi per half range, as the summary says in numbers. If ``|x'beta| <= M`` in the
            region, the formula is a sum of numbers, an intercept, and k columns of levels, then
            ``S = M sqrt((1 + 4k) sum reach^2)`` is enough; interactions may need more.
        radius: of the confidence sequence; by default ``"gaussian-prior"`` without S and
            ``"pac-bayes"`` with it.
        prior: without S, the standard deviation of a coefficient per half range of its column. It
            decides how long the intervals are, not whether they are right.
        intervals: ``"anytime"``, ``"profile"`` (fixed sample, one look: not for adaptive data), or
            ``"both"``, the price of peeking side by side.
        contrasts: sums of coefficients, such as ``"C(arm)[B] - C(arm)[A]"``, that are named before
            the responses are seen: with S their intervals are as sharp as those of coefficients.
        weights: a column of weights in [0, 1], fixed before the response was seen.
        offset: a column that is added to ``x'beta``.
        time: a column by which rows are put into order.
        missing: ``"refuse"``, or ``"drop"`` rows with a missing value (which must not depend on
            the response).
        rank: ``"refuse"`` columns that depend on each other, or ``"allow"`` them: what the rows do
            not determine then has an infinite interval.

    Returns:
        A :class:`GLMFit`.

    Raises:
        InputError: names the column, the row, what was expected and what came.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> data = {"x": rng.uniform(0, 10, 900), "y": rng.integers(0, 2, 900)}
        >>> fit = glm("y ~ x", data, family="bernoulli", scaler=Scaler(burn_in=100))
        >>> fit.names, len(fit)
        (('Intercept', 'x'), 800)
    """
    if not isinstance(scaler, Scaler):
        raise InputError(f"{ASK}; got {'none' if scaler is None else kind_of(scaler)}")
    check_choice("intervals", intervals, INTERVALS)
    check_choice("missing", missing, OUTSIDE)
    check_choice("rank", rank, ("refuse", "allow"))
    table = Table(data)
    for option, name in (("weights", weights), ("offset", offset)):
        if name is not None:
            table.require([name], option)
    design, scale = learn(formula, table, scaler, time, missing)
    kind = family_of(family)
    core = _core(design, scale, kind, delta, S, radius, prior, offset is not None, contrasts)
    core.response, core.weight_name = design.target, weights or "weight"
    fit = GLMFit(
        design, scaler, core, intervals, {"weights": weights, "offset": offset, "time": time}
    )
    fit.missing, fit.rank = missing, rank
    fit._take(table, start=scaler.burn_in or 0)
    if rank == "refuse" and (names := core.dependent_columns()):
        raise refuse(
            "formula",
            "columns that do not depend on each other (leave some out, or rank='allow')",
            f"{', '.join(names)}, which the {len(core)} rows cannot tell apart",
        )
    return fit


def _core(
    design: Design,
    scale: Scale,
    family: GLMFamily,
    delta: float,
    S: float | None,
    radius: str | Radius | None,
    prior: float,
    has_offset: bool,
    contrasts: Sequence[str],
) -> LinearFit:
    """The kind of fit that the options ask for."""
    if isinstance(contrasts, str) or not isinstance(contrasts, Sequence):
        raise refuse("contrasts", "a list of texts", repr(contrasts))
    names = Names(design.names, references_of(design))
    declared = [names.contrast(text) for text in contrasts]
    if has_offset and not isinstance(family, Gaussian):
        return OffsetFit(scale, family, delta, S=S, radius=radius, prior=prior)
    if S is None:
        return LinearFit(scale, family, delta, radius=radius, prior=prior)
    return ContrastFit(
        scale,
        family,
        delta,
        S=S,
        radius=radius,
        prior=prior,
        declared=np.array(declared) if declared else None,
    )


def family_of(family: str | GLMFamily) -> GLMFamily:
    """A family by its name, or as it is.

    Example:
        >>> family_of("poisson")
        Poisson()
    """
    if isinstance(family, GLMFamily):
        return family
    if family == "gaussian":
        raise refuse("family", "torchglb.Gaussian(sigma=...), with the noise known", "'gaussian'")
    if family == "binomial":
        raise refuse("family", "torchglb.Binomial(trials), with the trials known", "'binomial'")
    check_text("family", family, "a name or a family")
    known = {"bernoulli": Bernoulli, "poisson": Poisson}
    return known[check_choice("family", family, tuple(known))]()


class GLMFit:
    """A fitted model; made by :func:`glm`.

    Attributes:
        design: how rows of a table become rows of the model.
        scaler: where the scale came from.
        core: the fit without a table: a :class:`torchglb.estimators.LinearFit`.
        intervals: which the summary shows.

    Example:
        >>> import numpy as np
        >>> import torchglb as glb
        >>> rng = np.random.default_rng(0)
        >>> data = {"x": rng.uniform(0, 10, 400), "y": rng.integers(0, 2, 400)}
        >>> scaler = glb.estimators.Scaler(burn_in=100)
        >>> fit = glb.glm("y ~ x", data, family="bernoulli", scaler=scaler)
        >>> fit.names, len(fit)
        (('Intercept', 'x'), 300)
        >>> bool(fit.test("x = 0").p <= 1)
        True
    """

    def __init__(
        self,
        design: Design,
        scaler: Scaler,
        core: LinearFit,
        intervals: IntervalKind,
        columns: Mapping[str, str | None],
    ) -> None:
        self.design, self.scaler, self.core, self.intervals = design, scaler, core, intervals
        self._weights, self._offset = columns["weights"], columns["offset"]
        self._time = columns["time"]
        self.missing, self.rank = "refuse", "refuse"
        self.left_out = {"missing": 0, "outside": 0}
        self._last_time: Any = None
        self._table_kind: Table | None = None

    # ---- rows ----------------------------------------------------------------------------

    def __len__(self) -> int:
        """Rows that count as evidence."""
        return len(self.core)

    def update(self, data: Any) -> GLMFit:
        """Adds rows that came later; all or nothing.

        That they came later must not depend on their responses, given the rest of the row and the
        past: where failures are reported later than successes, no interval is valid in between.

        Args:
            data: a table with the columns of the first one.
        """
        table = Table(data)
        table.require([*self.design.columns, *self._extra], "data")
        self._take(table, start=0)
        return self

    @property
    def _extra(self) -> list[str]:
        return [name for name in (self._weights, self._offset) if name is not None]

    def _take(self, table: Table, start: int) -> None:
        order = order_of(table, self._time, self._last_time)
        n, d = max(len(table) - start, 0), self.core.dim
        rows, y, places = np.empty((n, d)), np.empty(n), np.empty(n, dtype=int)
        extra = {name: np.empty(n) for name in self._extra}
        used, columns = 0, [*dict.fromkeys([*self.design.columns, *self._extra])]
        for where, frame in blocks(table, columns, order, start):
            frame, where = without_missing(frame, where, self.missing)
            part = slice(used, used + len(where))
            rows[part] = self.core.scale.rows(self.design.matrix(frame, where))
            y[part] = self.design.response(frame, where)
            for name, values in extra.items():
                values[part] = finite(frame[name], name, where)
            places[part], used = where, part.stop
        weight = extra[self._weights][:used] if self._weights else None
        moved = extra[self._offset][:used] if self._offset else None
        last_time = self._last_time
        if self._time is not None and len(table):
            times = times_of(table, self._time)
            last_time = times[-1] if order is None else times[order[-1]]
        kind = Table(table.frame[:0].to_native())
        outside = self.scaler.outside
        dropped = self.core.append(
            rows[:used], y[:used], weight, places[:used], outside, offset=moved
        )
        # no call from here on: rows that are in would be given again by who thinks they are not
        self.left_out["missing"] += n - used
        self.left_out["outside"] += dropped
        self._last_time, self._table_kind = last_time, kind

    # ---- names ---------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """Of the coefficients."""
        return self.design.names

    @property
    def _names(self) -> Names:
        return Names(self.names, references_of(self.design))

    @property
    def columns_of_words(self) -> list[str]:
        """The columns of the table that do not hold numbers."""
        table = self._table_kind
        return [] if table is None else [name for name in table.columns if table.is_text(name)]

    def _frame(self, columns: Mapping[str, Any]) -> Any:
        assert self._table_kind is not None
        return self._table_kind.like(columns)

    # ---- answers -------------------------------------------------------------------------

    @property
    def coefficients(self) -> np.ndarray:
        """The estimates in the units of the table, ``(d,)``."""
        return self.core.value(np.eye(self.core.dim))

    def summary(
        self, *, intervals: IntervalKind | None = None, simultaneous: bool = False
    ) -> Summary:
        """The table of coefficients.

        Args:
            intervals: as in :func:`glm`, for this table.
            simultaneous: all intervals at once at ``1 - delta``, instead of each by itself.
        """
        eye = np.eye(self.core.dim)
        nulls = [Hypothesis(c, 0.0, "==") for c in eye]
        return self._table(list(self.names), eye, nulls, intervals, simultaneous)

    def contrast(
        self, *texts: str, intervals: IntervalKind | None = None, simultaneous: bool = False
    ) -> Summary:
        """Sums of coefficients, such as ``"C(arm)[B] - C(arm)[A]"``; a row for each."""
        if not texts:
            raise refuse("contrast", "a text such as 'x - z'", "none")
        C = np.array([self._names.contrast(text) for text in texts])
        nulls = [Hypothesis(c, 0.0, "==") for c in C]
        return self._table(list(texts), C, nulls, intervals, simultaneous)

    def test(self, text: str | Sequence[str]) -> Evidence:
        """The e-value and the anytime p-value of ``"price = 0"``, ``"x <= 0.5"``, ``"x = z"``.

        Several equations are tested together.
        """
        several = isinstance(text, Sequence) and not isinstance(text, str)
        texts: list[Any] = list(text) if several else [text]
        if not texts:
            raise refuse("hypothesis", "one or more", texts)
        found = [self._names.hypothesis(each) for each in texts]
        relations = {each.relation for each in found}
        if len(found) > 1 and relations != {"=="}:
            raise refuse("test", "equations only, where there are several", texts)
        C, b = np.array([each.c for each in found]), np.array([each.b for each in found])
        return self.core.test(C, b, found[0].relation)

    def predict(self, data: Any, *, interval: bool = False, scale: ScaleName = "mean") -> Any:
        """The mean response of new rows, or ``x'beta``, as a frame of the kind of ``data``.

        Args:
            data: a table with the columns of the right-hand side of the formula.
            interval: with ends, which hold for all rows and at all times at once.
            scale: ``"mean"`` or ``"linear"``.
        """
        check_choice("scale", scale, SCALES)
        table = Table(data)
        columns = [*self.design.features, *([self._offset] if self._offset else [])]
        table.require(columns, "data")
        parts: dict[str, list[np.ndarray]] = {"estimate": [], "lower": [], "upper": []}
        for where, frame in blocks(table, columns, None):
            frame, where = without_missing(frame, where, "refuse")
            X = self.design.matrix(frame, where)
            add = finite(frame[self._offset], self._offset, where) if self._offset else np.zeros(1)
            found = self.core.interval(X) if interval else None
            value = (self.core.value(X) if found is None else found.estimate) + add
            parts["estimate"].append(value if scale == "linear" else self.core.mean(value))
            if found is not None:
                lower, upper = found.lower, found.upper
                if self._offset:
                    lower, upper = outward(lower, upper, np.ones(1), add)
                if scale == "mean":
                    lower, upper = self.core.mean_ends(lower, upper)
                parts["lower"].append(lower)
                parts["upper"].append(upper)
        keep = ("estimate", "lower", "upper") if interval else ("estimate",)
        return table.like({k: np.concatenate([*parts[k], np.empty(0)]) for k in keep})

    def running(self, *texts: str, every: int | None = None, intersect: bool = False) -> Running:
        """Intervals after every ``every`` rows (about 40 looks by default); 1 for every row.

        Costs a fit and intervals for each look.

        Args:
            texts: contrasts; all coefficients if none is given.
            every: rows between looks.
            intersect: keep the best ends so far, which hold together as well.
        """
        if texts:
            C = np.array([self._names.contrast(text) for text in texts])
        else:
            C = np.eye(self.core.dim)
        return run_over(self.core, C, texts or self.names, every, intersect, self._frame)

    def plot(self, summary: Summary | None = None) -> Any:
        """A forest plot of a summary, by default with the fixed-sample intervals: a figure."""
        needed("matplotlib", "plot")
        from torchglb.plotting import forest_plot

        columns = (self.summary(intervals="both") if summary is None else summary).columns
        keys = ("lower", "upper", "profile_lower", "profile_upper")
        ends = [columns[key] for key in keys if key in columns]
        return forest_plot(columns["name"], columns["estimate"], *ends)

    def plot_running(self, running: Running | None = None) -> Any:
        """Intervals over time, with the fixed-sample ones beside them: a figure."""
        needed("matplotlib", "plot")
        from torchglb.plotting import running_plot

        found = self.running() if running is None else running
        ends = (found.lower, found.upper, found.fixed_lower, found.fixed_upper)
        return running_plot(found.n, found.names, found.estimate, *ends)

    # ---- the table -----------------------------------------------------------------------

    def _table(
        self,
        names: list[str],
        C: np.ndarray,
        nulls: list[Hypothesis],
        intervals: IntervalKind | None,
        simultaneous: bool,
    ) -> Summary:
        intervals = check_choice("intervals", intervals or self.intervals, INTERVALS)
        columns: dict[str, Any] = {"name": names, "estimate": self.core.value(C)}
        if intervals != "profile":
            found = self.core.interval(C) if simultaneous else self.core.marginal(C)
            columns |= {"lower": found.lower, "upper": found.upper}
        if intervals != "anytime":
            fixed = self.core.profile(C)
            columns |= {"profile_lower": fixed.lower, "profile_upper": fixed.upper}
        if intervals != "profile":
            tests = [self.core.test(each.c[None], each.b, each.relation) for each in nulls]
            columns |= {
                "log_e": np.array([test.log_e for test in tests]),
                "p": np.array([test.p for test in tests]),
            }
        facts = facts_of(self, intervals, simultaneous)
        return Summary(columns, facts, warnings_of(self.core), self._frame)
