"""The analyst's door: numbers that agree every way, coverage, refusals by column and row."""

import copy
import json
import math
import pickle
import random
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction

import mpmath
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf
import torch
from analyst_tables import ARMS, FORMULA, TRUTH, clicks
from scipy import optimize, stats

import torchglb as glb
from torchglb.cli import main
from torchglb.errors import InputError, SolverError
from torchglb.estimators import Evidence, TableError
from torchglb.estimators.evidence import whole_space_test
from torchglb.estimators.scaling import ASK
from torchglb.radii import GaussianPrior
from torchglb.testing.policies import Interruption

BURN = 200


def fitted(data=None, **options):
    options = {"family": "bernoulli", "scaler": glb.Scaler(burn_in=BURN)} | options
    formula = options.pop("formula", FORMULA)
    return glb.glm(formula, clicks() if data is None else data, **options)


@pytest.fixture(scope="module")
def fit():
    return fitted()


def by_hand(data):
    """The same by the low-level parts: design, scale, sequence, contrasts."""
    arm = data["arm"].to_numpy()
    dummies = np.stack([arm == a for a in ARMS], axis=1).astype(float)
    age, price = data["age"].to_numpy(), data["price"].to_numpy()
    X = np.column_stack([np.ones(len(data)), age, dummies[:, 1:], dummies * price[:, None]])
    first = X[:BURN]
    low, high = first[:, 1].min(), first[:, 1].max()
    center = np.zeros(7)
    half = np.ones(7)
    center[1], half[1] = (low + high) / 2, (high - low) / 2
    half[4:] = first[:, 4:].max()
    Z = (X[BURN:] - center) / half
    length = 2.0 ** math.ceil(math.log2(np.linalg.norm(Z, axis=1).max()))
    S = 3.0 * 2.0 * length * math.sqrt(7)
    radius = GaussianPrior(scale=math.sqrt(7) / 3.0)
    sequence = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(7, S), 0.05, radius)
    sequence.update(
        torch.from_numpy(Z / length), torch.from_numpy(data["clicked"].to_numpy(float)[BURN:])
    )
    T = np.diag(1.0 / half)
    T[:, 0] -= np.where(np.arange(7) == 0, 0.0, 0.0)
    T[0] = -center / half
    T[0, 0] = 1.0
    directions = T / length  # row j: beta_j = <T_j, theta>
    sizes = np.linalg.norm(directions, axis=1)
    found = sequence.current().interval(torch.from_numpy(directions / sizes[:, None]), tol=1e-11)
    return sizes * found.lower.numpy(), sizes * found.upper.numpy()


# ---- 1: four lines, one command, the low-level parts: the same numbers ---------------------------


def test_four_lines_one_command_and_the_low_level_parts_agree(tmp_path, capsys):
    path = tmp_path / "clicks.csv"
    clicks().to_csv(path, index=False)
    data = pl.read_csv(path)
    model = glb.glm(FORMULA, data, family="bernoulli", delta=0.05, scaler=glb.Scaler(burn_in=200))
    summary = model.summary()
    lower, upper = by_hand(clicks())
    assert np.allclose(summary.columns["lower"], lower, rtol=1e-9, atol=1e-12)
    assert np.allclose(summary.columns["upper"], upper, rtol=1e-9, atol=1e-12)
    words = ["analyse", str(path), "--formula", FORMULA, "--family", "bernoulli"]
    assert main([*words, "--burn-in", "200", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    for key in ("estimate", "lower", "upper", "log_e", "p"):
        got = [row[key] for row in rows]
        assert np.allclose(got, summary.columns[key], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("factor", [12.0, 1.0 / 7.0])
def test_other_units_change_estimates_and_intervals_by_their_factor(factor, fit):
    data = clicks()
    data["age"] *= factor
    other, first = fitted(data).summary(), fit.summary()
    for key in ("estimate", "lower", "upper"):
        expected = np.array(first.columns[key], copy=True)
        expected[1] /= factor
        assert np.allclose(other.columns[key], expected, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("kind", [pl.from_pandas, lambda d: pa.table(dict(d)), dict])
def test_every_kind_of_frame_gives_the_same_bits_and_its_own_kind_back(kind, fit):
    data = kind(clicks())
    other = fitted(data)
    one, two = fit.summary().columns, other.summary().columns
    for key in one:
        assert np.array_equal(one[key], two[key]), key
    frame = other.summary().to_frame()
    expected = pd.DataFrame if kind is dict else type(data)
    assert isinstance(frame, expected)
    new = kind(clicks(5, seed=9))
    assert isinstance(other.predict(new), expected)


# ---- 2: coverage, and no look at all rows --------------------------------------------------------


def test_coverage_in_original_units_with_burn_in_and_adaptive_arms():
    """Intervals of all coefficients at three looks; delta = 0.3, so that misses can be seen."""
    runs, misses = 30, 0
    for seed in range(runs):
        data = clicks(460, seed=1000 + seed, adaptive=True)
        levels = glb.Scaler(burn_in=60, ranges={"arm": ARMS})
        model = fitted(data[:200], scaler=levels, delta=0.3, rank="allow")
        missed = False
        for start in (200, 330, 460):
            bounds = model.core.interval(np.eye(7))
            missed |= bool(((bounds.lower > TRUTH) | (bounds.upper < TRUTH)).any())
            if start < 460:
                model.update(data[start : start + 130])
        misses += missed
    assert stats.binomtest(misses, runs, 0.3, alternative="greater").pvalue > 0.01


@pytest.mark.slow
def test_coverage_of_coefficients_at_many_looks():
    runs, misses, misses_of_wald = 200, 0, 0
    for seed in range(runs):
        data = clicks(660, seed=5000 + seed, adaptive=True)
        model = fitted(
            data, scaler=glb.Scaler(burn_in=60, ranges={"arm": ARMS}), delta=0.1, rank="allow"
        )
        seen = model.running(every=60)
        misses += bool(((seen.lower > TRUTH) | (seen.upper < TRUTH)).any())
        misses_of_wald += bool(((seen.fixed_lower > TRUTH) | (seen.fixed_upper < TRUTH)).any())
    assert stats.binomtest(misses, runs, 0.1, alternative="greater").pvalue > 0.01
    # what the fixed-sample interval promises does not survive eleven looks
    assert stats.binomtest(misses_of_wald, runs, 0.1, alternative="greater").pvalue < 0.01


@pytest.mark.parametrize(
    "scaler",
    [
        glb.Scaler(burn_in=BURN),
        glb.Scaler(pilot=clicks(100, seed=5)),
        glb.Scaler(ranges={"age": (18, 90), "price": (0, 80), "arm": ARMS}),
    ],
)
def test_the_scale_does_not_look_at_the_evidence(scaler):
    """Later rows, ten times as far out, leave scale and earlier answers as they were."""
    data = clicks(500)
    wild = data.copy()
    wild.loc[400:, "age"] *= 10.0
    wild.loc[400:, "price"] *= 10.0
    one, two = fitted(data, scaler=scaler), fitted(wild, scaler=scaler)
    for key in ("center", "half", "reach"):
        assert np.array_equal(getattr(one.core.scale, key), getattr(two.core.scale, key))
    early, late = one.running(every=100), two.running(every=100)
    looks = early.n + (BURN if scaler.burn_in else 0) <= 400
    assert looks.sum() >= 2
    # the lengths of rows differ by a power of two: no more than rounding
    assert np.allclose(early.lower[looks], late.lower[looks], rtol=1e-6, atol=1e-9)
    assert np.allclose(early.upper[looks], late.upper[looks], rtol=1e-6, atol=1e-9)


def test_burn_in_rows_are_no_evidence():
    data = clicks(600)
    other = data.copy()
    other.loc[: BURN - 1, "clicked"] = 1 - other.loc[: BURN - 1, "clicked"]
    one, two = fitted(data), fitted(other)
    assert len(one) == 400
    assert np.array_equal(one.summary().columns["lower"], two.summary().columns["lower"])


# ---- 3: classical agreement ----------------------------------------------------------------------


def in_order(result, names):
    return np.array([result.params[name] for name in names])


@pytest.mark.parametrize("family", ["bernoulli", "poisson", "gaussian"])
def test_estimates_equal_those_of_statsmodels(family):
    data = clicks()
    rng = np.random.default_rng(4)
    data["exposure"] = rng.uniform(0.0, 1.0, len(data))
    data["count"] = rng.poisson(np.exp(0.02 * data["age"] + data["exposure"] - 1.0))
    data["gain"] = 500.0 + 3.0 * data["age"] + 20.0 * rng.normal(size=len(data))
    target = {"bernoulli": "clicked", "poisson": "count", "gaussian": "gain"}[family]
    ours = glb.Gaussian(20.0) if family == "gaussian" else family
    theirs = {
        "bernoulli": sm.families.Binomial(),
        "poisson": sm.families.Poisson(),
        "gaussian": sm.families.Gaussian(),
    }[family]
    formula = f"{target} ~ age + C(arm)"
    offset = "exposure" if family != "bernoulli" else None
    model = fitted(data, formula=formula, family=ours, offset=offset)
    rest = data[BURN:]
    given = {} if offset is None else {"offset": rest["exposure"]}
    result = smf.glm(formula, rest, family=theirs, **given).fit(tol=1e-12)
    assert np.allclose(model.coefficients, in_order(result, model.names), rtol=1e-6, atol=1e-8)


def independent_profile(X, y, j, alpha):
    """Ends of the profile interval of a logistic coefficient, by SciPy alone."""

    def loss(beta):
        z = X @ beta
        return float(np.logaddexp(0.0, z).sum() - y @ z)

    def slope(beta):
        return X.T @ (1.0 / (1.0 + np.exp(-(X @ beta))) - y)

    options = {"jac": slope, "method": "BFGS", "options": {"gtol": 1e-9}}
    best = optimize.minimize(loss, np.zeros(X.shape[1]), **options)
    level = loss(best.x) + stats.chi2.ppf(1 - alpha, 1) / 2
    rest = [i for i in range(X.shape[1]) if i != j]

    def profile(value):
        def beta_of(free):
            beta = np.empty(X.shape[1])
            beta[rest], beta[j] = free, value
            return beta

        found = optimize.minimize(
            lambda free: loss(beta_of(free)),
            best.x[rest],
            jac=lambda free: slope(beta_of(free))[rest],
            method="BFGS",
            options={"gtol": 1e-8},
        )
        return found.fun - level

    return [optimize.brentq(profile, best.x[j], best.x[j] + side, xtol=1e-10) for side in (-3, 3)]


def test_profile_intervals_equal_independent_ones():
    rng = np.random.default_rng(2)
    x = rng.normal(size=300)
    y = (rng.random(300) < 1 / (1 + np.exp(-0.5 - x))).astype(float)
    data = {"x": x, "y": y}
    model = glb.glm("y ~ x", data, family="bernoulli", scaler=glb.Scaler(ranges={"x": (-4, 4)}))
    columns = model.summary(intervals="profile").columns
    X = np.column_stack([np.ones(300), x])
    for j in range(2):
        low, high = independent_profile(X, y, j, 0.05)
        assert columns["profile_lower"][j] == pytest.approx(low, abs=1e-6)
        assert columns["profile_upper"][j] == pytest.approx(high, abs=1e-6)


def test_both_intervals_side_by_side(fit):
    columns = fit.summary(intervals="both").columns
    assert (columns["lower"] < columns["profile_lower"]).all()
    assert (columns["upper"] > columns["profile_upper"]).all()


# ---- hypotheses ----------------------------------------------------------------------------------


def test_contrasts_of_levels_with_and_without_a_column(fit):
    found = fit.contrast("C(arm)[B] - C(arm)[A]", "C(arm)[B] - C(arm)[C]", "2*age")
    a, b, c = (fit.summary().row(f"C(arm)[T.{x}]")["estimate"] if x != "A" else 0.0 for x in ARMS)
    assert found.columns["estimate"][0] == pytest.approx(b - a, rel=1e-12)
    assert found.columns["estimate"][1] == pytest.approx(b - c, rel=1e-12)
    assert (found.columns["lower"] < found.columns["estimate"]).all()


def test_e_values_reject_what_the_interval_excludes():
    """E >= 1/delta if and only if the level set misses the hypothesis."""
    model = fitted(formula="clicked ~ age")
    lower, upper = (model.summary().row("age")[key] for key in ("lower", "upper"))
    width = upper - lower
    for value, inside in ((lower - 1e-4 * width, False), (lower + 1e-4 * width, True)):
        found = model.test(f"age = {value:.17g}")
        assert isinstance(found, Evidence)
        assert (found.log_e < math.log(20.0)) == inside
        assert found.p == pytest.approx(min(1.0, math.exp(-found.log_e)))
    one_sided = model.test(f"age <= {lower - width:.17g}")
    assert one_sided.log_e == pytest.approx(model.test(f"age = {lower - width:.17g}").log_e)
    assert model.test(f"age >= {lower - width:.17g}").p == 1.0


@pytest.mark.parametrize("center", [1e6, -1e9])
def test_a_prediction_far_from_zero_is_as_exact_as_its_row(center):
    """``x/half - center/half`` has few digits, and its interval was short by as many widths."""
    rng = np.random.default_rng(0)
    tick, n = 1.0 / 1024, 400  # x in seconds: three milliseconds before and after
    s = rng.integers(-3, 4, n).astype(float)
    y = (rng.random(n) < 0.5).astype(float)
    near, far = (
        glb.glm("y ~ x", {"x": x, "y": y}, family="bernoulli", scaler=glb.Scaler(ranges=ends))
        for x, ends in (
            (s, {"x": (-3.0, 3.0)}),
            (center + tick * s, {"x": (center - 3 * tick, center + 3 * tick)}),
        )
    )
    at = np.array([-3.0, 0.5, 2.0])
    expected = near.predict({"x": at}, interval=True, scale="linear")
    found = far.predict({"x": center + tick * at}, interval=True, scale="linear")
    for key in ("estimate", "lower", "upper"):
        np.testing.assert_allclose(found[key], expected[key], rtol=0, atol=1e-10)


def test_the_certified_minimum_is_below_the_minimum_and_near_it():
    model = fitted(formula="clicked ~ age")
    X, y, _ = model.core.rows()
    value = 0.3  # of the intercept of the scaled rows, whose slope is then free

    def loss(free):
        z = value + X[:, 1] * free[0]
        return float(np.logaddexp(0.0, z).sum() - y @ z)

    least = optimize.minimize(loss, [0.0], method="BFGS", options={"gtol": 1e-10}).fun
    C = np.array([[1.0, float(model.core.scale.center[1])]])  # phi_0 = beta_0 + m beta_1
    current = model.core.current()
    evidence = float(current.level) - current.log_failure
    got = model.core.test(C, value).log_e + evidence
    assert least - 1e-7 < got <= least + 1e-9


@pytest.mark.parametrize(
    "text", ["age", "age = ", "nope = 0", "age = 1 = 2", "age ? 0", "1 = 1", 3, None, []]
)
def test_hypotheses_that_make_no_sense_are_refused(text, fit):
    with pytest.raises(InputError, match="^hypothesis: expected"):
        fit.test(text)


@pytest.mark.parametrize("text", ["nope", "age -", 3, {"age": 1.0}, "age + 1"])
def test_contrasts_that_make_no_sense_are_refused(text, fit):
    with pytest.raises(InputError, match="^contrast: expected"):
        fit.contrast(text)
    with pytest.raises(InputError, match="^contrast: expected"):
        fitted(contrasts=[text])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scaler": 200}, "^scaler: expected .*; got int"),
        ({"scaler": glb.Scaler}, "^scaler: expected .*; got the class Scaler"),
        ({"family": glb.Bernoulli}, "^family: expected a name or a family, got the class Bern"),
        ({"contrasts": 3}, "^contrasts: expected a list of texts"),
        ({"weights": 3}, "^weights: expected the name of a column, got int"),
        ({"weights": np.ones(3)}, "^weights: expected the name of a column, got ndarray"),
        ({"offset": "agee"}, r"^offset: expected a column .* \(did you mean 'age'\?\)"),
        ({"time": 3}, "^time: expected the name of a column, got int"),
        (
            {"scaler": glb.Scaler(burn_in=BURN, ranges={"agee": (18, 90)})},
            r"^ranges: expected a column .* \(did you mean 'age'\?\)",
        ),
    ],
)
def test_options_are_refused_by_name(options, message):
    with pytest.raises(InputError, match=message):
        fitted(**options)


def test_columns_of_several_lengths_are_refused():
    data = {"clicked": [0.0, 1.0], "age": [30.0]}
    with pytest.raises(InputError, match="^data: expected columns of one length"):
        fitted(data, formula="clicked ~ age")


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"unit": "yes"}, "^unit: "), ({"margin": "wide"}, "^margin: "), ({"margin": 0.5}, "^margin")],
)
def test_settings_of_a_scaler_are_refused_by_name(settings, message):
    with pytest.raises(InputError, match=message):
        glb.Scaler(**({"ranges": {"age": (18, 90)}} | settings))


def test_words_in_a_column_of_numbers_are_refused_by_row_later_too(fit):
    model = fitted(clicks(600))
    late = clicks(5, seed=3).assign(age="old")
    for ask in (model.update, model.predict):
        with pytest.raises(TableError, match="^column 'age': expected a number .*, got 'old' in"):
            ask(late)
    assert len(model) == 400


def test_several_equations_are_tested_together(fit):
    together = fit.test(["C(arm)[B] = 0", "C(arm)[C] = 0"])
    assert together.log_e >= fit.test("C(arm)[B] = 0").log_e - 1e-9


# ---- 5: separation, and bad tables ---------------------------------------------------------------


def separated(n=60):
    x = np.linspace(-1.0, 1.0, n)
    return {"x": x, "y": (x > 0).astype(int)}


def test_separated_data_have_honest_intervals():
    scaler = glb.Scaler(ranges={"x": (-1, 1)})
    free = glb.glm("y ~ x", separated(), family="bernoulli", scaler=scaler)
    row = free.summary().row("x")
    assert 0.0 < row["lower"] < math.inf  # the slope is positive: that much is certain
    assert row["upper"] == math.inf  # and any slope, however large, explains the rows
    assert math.isfinite(row["estimate"])
    assert "separated" in free.summary().warnings[0]
    bounded = glb.glm("y ~ x", separated(), family="bernoulli", scaler=scaler, S=20.0)
    row = bounded.summary().row("x")
    assert 0.0 < row["lower"] < row["upper"] <= 20.0
    assert "boundary" in bounded.summary().warnings[0]
    ends = free.predict({"x": [0.9]}, interval=True)
    assert 0.5 < float(ends["lower"].iloc[0]) < float(ends["upper"].iloc[0]) == 1.0


def change(**columns):
    data = clicks(300)
    for name, edit in columns.items():
        data[name] = data[name].astype(object)
        for row, value in edit.items():
            data.loc[row, name] = value
    return data


BAD = {
    "unknown column": (clicks(300), {"formula": "clicked ~ agee"}, "did you mean 'age'", None),
    "number that is none": (change(age={260: "old"}), {}, "'age': expected a number", 260),
    "missing": (change(price={255: None}), {}, "'price': expected a value", 255),
    "outside": (change(clicked={299: 2}), {}, "'clicked': expected values in [0, 1]", 299),
    "new level": (change(arm={270: "D"}), {}, "'arm': expected one of the levels", 270),
    "words": (clicks(300), {"formula": "clicked ~ arm"}, "'arm': expected a number", 0),
    "infinite": (
        change(age={280: 0.0}),
        {"formula": "clicked ~ log(age)"},
        "'log(age)': expected finite",
        280,
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_tables_are_refused_by_column_and_row(name):
    data, options, message, row = BAD[name]
    with pytest.raises(InputError) as caught:
        fitted(data, **options)
    assert message in str(caught.value)
    if row is not None:
        assert isinstance(caught.value, TableError)
        assert caught.value.row == row
        assert f"in row {row}" in str(caught.value)


def test_columns_that_depend_on_each_other_are_named():
    data = clicks(400)
    data["double"] = 2.0 * data["age"]
    with pytest.raises(InputError, match=r"age, double, which the 200 rows cannot tell apart"):
        fitted(data, formula="clicked ~ age + double + price")
    model = fitted(data, formula="clicked ~ age + double + price", rank="allow")
    row = model.summary().row("age")
    assert row["lower"] == -math.inf
    assert row["upper"] == math.inf
    assert model.summary().row("price")["upper"] < math.inf


def test_constant_columns_are_refused():
    data = clicks(400)
    data["one"] = 3.0
    with pytest.raises(InputError, match="'one': expected values that differ"):
        fitted(data, formula="clicked ~ one")
    with pytest.raises(InputError, match="Intercept, one, which"):
        fitted(data, formula="clicked ~ one", scaler=glb.Scaler(ranges={"one": (0, 9)}))


def test_missing_rows_may_be_dropped():
    data = change(price={255: None, 260: None})
    model = fitted(data, missing="drop")
    assert len(model) == 98
    assert "2 rows (missing)" in model.summary().facts["left out"]


def test_without_a_scale_the_door_asks_for_one():
    with pytest.raises(InputError, match="burn_in=200"):
        glb.glm(FORMULA, clicks(300), family="bernoulli")
    with pytest.raises(InputError, match="got several"):
        glb.Scaler(burn_in=10, unit=True)
    assert "peeking" in ASK


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ({"age": (18, 90), "arm": ARMS}, "the range of 'price'"),
        ({"age": (18, 90), "price": (0, 9)}, "the levels of 'arm'"),
        ({"age": (90, 18)}, "low < high"),
        ({"arm": ["A"]}, "two or more different levels"),
    ],
)
def test_ranges_that_are_missing_are_named_with_the_line_to_type(ranges, message):
    with pytest.raises(InputError, match=message):
        fitted(clicks(300), scaler=glb.Scaler(ranges=ranges))


def test_transforms_that_learn_need_rows_to_learn_from():
    with pytest.raises(InputError, match="center"):
        fitted(formula="clicked ~ center(age)", scaler=glb.Scaler(ranges={"age": (18, 90)}))
    data = clicks(500)
    model = fitted(data, formula="clicked ~ center(age)")
    assert model.coefficients[0] == pytest.approx(
        smf.glm(
            "clicked ~ age",
            data[BURN:].assign(age=data["age"] - data["age"][:BURN].mean()),
            family=sm.families.Binomial(),
        )
        .fit(tol=1e-12)
        .params["Intercept"],
        rel=1e-6,
    )


@pytest.mark.parametrize(
    ("family", "word"), [("gaussian", "sigma"), ("binomial", "trials"), ("gamma", "bernoulli")]
)
def test_families_by_name(family, word):
    with pytest.raises(InputError, match=word):
        fitted(family=family)


@pytest.mark.parametrize("formula", ["age + price", "a + b ~ age", 3, "clicked ~ age +"])
def test_formulas_that_make_no_sense_are_refused(formula):
    with pytest.raises(InputError, match="formula"):
        fitted(formula=formula)


def test_a_bound_claims_a_region_and_rows_beyond_it():
    data = clicks(400)
    data.loc[390, "age"] = 5000.0
    with pytest.raises(TableError, match="'age': expected values within the scale") as caught:
        fitted(data, S=6.0)
    assert caught.value.row == 390
    model = fitted(data, S=6.0, scaler=glb.Scaler(burn_in=BURN, outside="drop"))
    assert len(model) == 199
    assert "1 rows (outside)" in model.summary().facts["left out"]
    assert model.summary().facts["S"].startswith("6 (effects per half range")


# ---- rows over time ------------------------------------------------------------------------------


def test_update_goes_on_as_if_all_rows_had_come_at_once(fit):
    data = clicks()
    parts = fitted(data[:700]).update(data[700:900]).update(data[900:])
    for key in ("estimate", "lower", "upper"):
        assert np.allclose(parts.summary().columns[key], fit.summary().columns[key], rtol=1e-6)


def test_a_refused_update_changes_nothing(fit):
    model = fitted(clicks(600))
    before = model.summary().columns
    bad = clicks(50, seed=3)
    bad.loc[49, "clicked"] = 7
    with pytest.raises(TableError):
        model.update(bad)
    assert len(model) == 400
    assert np.array_equal(model.summary().columns["lower"], before["lower"])


@pytest.mark.parametrize("options", [{}, {"S": 4.0}, {"offset": "moved"}], ids=str)
def test_an_interrupted_update_is_all_or_nothing(options):
    """Whoever gives the rows again must not have them counted twice."""
    rng = np.random.default_rng(0)
    data = pd.DataFrame({"x": rng.uniform(-1, 1, 60), "t": np.arange(60.0), "moved": 0.1})
    data["y"] = rng.integers(0, 2, 60)
    scaler = glb.Scaler(ranges={"x": (-1, 1)})
    options = {"family": "bernoulli", "scaler": scaler, "time": "t", "missing": "drop"} | options
    model = glb.glm("y ~ x", data[:30], **options)
    late = data[30:].copy()
    late.loc[35, "x"] = np.nan
    aware = copy.deepcopy(model)
    calls = Interruption.count(lambda: aware.update(late))
    expected = aware.summary().columns
    chosen = random.Random(0).sample(range(1, calls), min(calls - 1, 20))
    for call in {*chosen, *range(max(1, calls - 10), calls)}:  # the last is that of the counter
        struck = copy.deepcopy(model)
        with pytest.raises(KeyboardInterrupt), Interruption(call):
            struck.update(late)
        assert len(struck) == 30, call
        struck.update(late)
        assert struck.left_out == aware.left_out
        for key in ("lower", "upper", "p"):
            np.testing.assert_array_equal(struck.summary().columns[key], expected[key])


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_continues_bit_by_bit(again):
    data = clicks(600)
    model = fitted(data[:450])
    other = again(model)
    for each in (model, other):
        each.update(data[450:])
    assert np.array_equal(model.summary().columns["upper"], other.summary().columns["upper"])


@pytest.mark.parametrize("options", [{}, {"offset": "zero"}, {"family": "poisson"}])
def test_rows_of_no_weight_say_nothing(options):
    data = clicks(300)
    data["w"] = data["zero"] = 0.0
    model = fitted(data, formula="clicked ~ age", weights="w", rank="allow", **options)
    for row in model.summary().to_dict()["rows"]:
        assert (row["lower"], row["upper"], row["p"]) == ("-inf", "inf", 1.0)


def test_hypotheses_that_depend_on_each_other_are_refused(fit):
    with pytest.raises(InputError, match="test: expected sums .* independent, and not 0"):
        fit.test(["age = 0", "age = 1"])
    with pytest.raises(InputError, match="independent, and not 0"):
        fit.contrast("age - age")


def test_what_S_says_of_the_coefficients():
    # log-odds 0, 2, -2 of three arms: every possible |x'beta| is at most 2, and S = 2.5 says less
    data = {"arm": ["A", "B", "C"] * 40, "y": [0, 1, 0, 1, 1, 0] * 20}
    scaler = glb.Scaler(ranges={"arm": ["A", "B", "C"]})
    options = {"formula": "y ~ C(arm)", "scaler": scaler}
    facts = fitted(data, S=2.5, **options).summary().facts
    assert facts["S"].endswith("at most 1.443)")  # 2.5/sqrt(3), where 2.83 is needed
    enough = 2.0 * math.sqrt((1 + 4 * 2) * 3)
    model = fitted(data, S=enough, **options)
    assert model.core.sequence.domain.radius >= math.sqrt(8.0) * model.core.length


@pytest.mark.parametrize("text", ["{}", "2026-01-{:02d}", "2026-01-{:02d}T08:30+01:00"])
def test_times_in_words_are_no_letters(text):
    data = clicks(300)
    data["age"] = np.arange(300.0)
    day = np.arange(300) // 10 + 1
    data["when"] = [text.format(each) for each in day]
    model = fitted(data, time="when", scaler=glb.Scaler(burn_in=20))
    assert model.core.scale.half[model.names.index("age")] == 9.5  # of the first two days
    with pytest.raises(InputError, match="expected times from"):
        model.update(data[:50])
    data["when"] = [f"{each}/1/2026" for each in day]  # whose first digits say nothing
    with pytest.raises(InputError, match="dates such as 2026-01-31.*'1/1/2026' in row 0"):
        fitted(data, time="when")


def test_rows_are_put_into_the_order_of_time(fit):
    data = clicks()
    data["when"] = np.arange(len(data))
    mixed = data.sample(frac=1.0, random_state=1)
    model = fitted(mixed, time="when")
    assert np.array_equal(model.summary().columns["lower"], fit.summary().columns["lower"])
    with pytest.raises(TableError, match="times from 1199"):
        model.update(data[:3])


def test_running_intervals_are_those_of_each_prefix():
    data = clicks(500)
    seen = fitted(data).running("age", every=100)
    assert seen.n.tolist() == [100, 200, 300]
    for at, rows in enumerate(seen.n):
        found = fitted(data[: BURN + rows]).contrast("age").columns
        assert seen.lower[at, 0] == pytest.approx(found["lower"][0], rel=1e-6)
    best = fitted(data).running("age", every=100, intersect=True)
    assert (np.diff(best.lower[:, 0]) >= 0).all()
    assert list(seen.to_frame()["n"]) == [100, 200, 300]


def test_weights_of_zero_leave_rows_out():
    data = clicks(500)
    data["w"] = np.where(np.arange(500) < 300, 1.0, 0.0)
    short, weighted = fitted(data[:300]), fitted(data, weights="w")
    assert np.allclose(short.coefficients, weighted.coefficients, rtol=1e-7)
    data.loc[400, "w"] = 1.5
    with pytest.raises(TableError, match=r"'w': expected weights in \[0, 1\]"):
        fitted(data, weights="w")


# ---- offsets -------------------------------------------------------------------------------------


def test_an_offset_gives_a_short_interval_before_the_first_event():
    """The joint set has no end then; on the slice it has one, found where the loss is the level."""
    rng = np.random.default_rng(5)
    x, exposure = rng.normal(size=50), -3.0 + 0.1 * rng.normal(size=50)
    data = {"x": x, "o": exposure, "y": np.zeros(50)}
    unit = glb.Scaler(unit=True)
    model = glb.glm("y ~ x - 1", data, family="poisson", offset="o", scaler=unit)
    found = model.core.interval(np.eye(1))
    level = float(model.core.current().level)

    def above(slope):
        return np.exp(exposure + slope * x).sum() - level

    ends = optimize.brentq(above, -20.0, 0.0), optimize.brentq(above, 0.0, 20.0)
    assert ends[0] - 0.01 < found.lower[0] <= ends[0]
    assert ends[1] <= found.upper[0] < ends[1] + 0.01


def test_an_offset_is_a_column_whose_coefficient_is_known():
    rng = np.random.default_rng(8)
    n = 900
    hours, x = rng.uniform(1.0, 8.0, n), rng.uniform(-1.0, 1.0, n)
    data = {"x": x, "log_hours": np.log(hours), "count": rng.poisson(hours * np.exp(0.3 + 0.5 * x))}
    scaler = glb.Scaler(ranges={"x": (-1, 1)})
    model = glb.glm("count ~ x", data, family="poisson", offset="log_hours", scaler=scaler)
    columns = model.summary(intervals="both").columns
    result = sm.GLM(
        data["count"], sm.add_constant(x), family=sm.families.Poisson(), offset=np.log(hours)
    ).fit(tol=1e-12)
    wald = result.conf_int(0.05)
    assert np.allclose(columns["estimate"], result.params, atol=1e-7)
    # the slice is found: profile ends are within a hundredth of a width of Wald's for such n
    assert np.allclose(columns["profile_lower"], wald[:, 0], atol=0.01 * np.ptp(wald, axis=1).max())
    assert ((columns["lower"] < [0.3, 0.5]) & (columns["upper"] > [0.3, 0.5])).all()
    assert (columns["upper"] - columns["lower"] < 6 * np.ptp(wald, axis=1)).all()
    # the test and the interval tell the same
    lower = columns["lower"][1]
    assert model.test(f"x = {lower - 0.002:.17g}").log_e > math.log(20.0)
    assert model.test(f"x = {lower + 0.002:.17g}").log_e < math.log(20.0)
    with pytest.raises(InputError, match="S: expected None"):
        glb.glm("count ~ x", data, family="poisson", offset="log_hours", scaler=scaler, S=5.0)


# ---- the summary ---------------------------------------------------------------------------------


def test_the_summary_says_what_it_rests_on(fit):
    text = str(fit.summary())
    for part in ("Bernoulli", "1000 (after 200 of burn-in)", "S: none", "gaussian-prior", "0.05"):
        assert part in text
    assert text.count("\n") > 14
    assert fit.summary().row("age")["estimate"] == fit.coefficients[1]


def test_names_from_a_table_are_escaped():
    data = pd.DataFrame(clicks(400)).rename(columns={"age": "<script>_&%"})
    model = fitted(data, formula="clicked ~ `<script>_&%`")
    found = model.summary()
    assert "<script>" not in found._repr_html_()
    assert "&lt;script&gt;" in found._repr_html_()
    assert r"<script>\_\&\%" in found.to_latex()
    assert found.to_latex().count(r"\\") == 3


def test_a_formula_is_never_read_from_the_data(tmp_path):
    """A column whose name is code is a name."""
    evil = f"__import__('pathlib').Path({str(tmp_path / 'made')!r}).touch()"
    data = clicks(400)
    data[evil] = 1.0
    fitted(data).summary()
    assert not (tmp_path / "made").exists()


def test_import_does_not_load_the_packages_of_the_door():
    script = (
        "import sys, torchglb; loaded = {'formulaic', 'narwhals', 'pandas', 'sklearn'} & set(sys.modules);"
        "sys.exit(', '.join(loaded) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "narwhals", None)
    with pytest.raises(InputError, match=r"narwhals.*torchglb\[table\]"):
        fitted()


# ---- width ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_width_against_wald_is_printed(capsys):
    for n in (1_000, 10_000, 100_000):
        model = fitted(clicks(n + BURN, seed=1), formula="clicked ~ age + C(arm)")
        eye = np.eye(4)
        anytime, wald = model.core.interval(eye), model.core.wald(eye)
        ratio = (anytime.upper - anytime.lower) / (wald.upper - wald.lower)
        with capsys.disabled():
            print(f"n = {n}: anytime/Wald width {np.round(ratio, 2)}")
        assert (ratio > 1.0).all()
        assert (ratio < 6.0).all()


def plain(n=300, **columns):
    """x in [2, 6] and y of log odds x - 4, as a mapping."""
    rng = np.random.default_rng(0)
    x = rng.uniform(2, 6, n)
    y = (rng.uniform(size=n) < 1 / (1 + np.exp(4 - x))).astype(float)
    return {"x": x, "y": y} | columns


def ends_of(fit):
    found = fit.core.interval(np.eye(fit.core.dim))
    return np.array([found.lower, found.estimate, found.upper])


@pytest.mark.parametrize("formula", ["y ~ 0 + Intercept + x", "y ~ Intercept + x"])
def test_a_column_may_not_be_called_as_the_constant(formula):
    """Taken for it, its coefficient was that of another model: -4.07 instead of -0.13."""
    data = plain(Intercept=np.random.default_rng(1).uniform(1, 9, 300))
    with pytest.raises(InputError, match="another name for the column 'Intercept'"):
        fitted(data, formula=formula)


@pytest.mark.parametrize("kind", ["polars", "arrow", "pandas", "integers"])
def test_objects_that_are_numbers_are_no_categories(kind):
    """Of decimals, and of integers that no machine word holds, each would be a level."""
    data = plain()
    data["x"] = np.round(data["x"])  # few values, all of them in the burn-in
    frame = pl.DataFrame(data).with_columns(pl.col("x").cast(pl.Decimal(20, 2)))
    many = [int(x) * 10**25 for x in data["x"]]
    table = {
        "polars": frame,
        "arrow": frame.to_arrow(),
        "pandas": pd.DataFrame(data | {"x": [Decimal(str(x)) for x in data["x"]]}),
        "integers": pd.DataFrame(data | {"x": pd.Series(many, dtype=object)}),
    }[kind]
    unit = np.array([1.0, 1e25 if kind == "integers" else 1.0])
    found = fitted(table, formula="y ~ x")
    assert found.names == ("Intercept", "x")
    usual = fitted(data, formula="y ~ x")
    assert np.allclose(ends_of(found) * unit, ends_of(usual), rtol=1e-9)
    rows = {"x": table["x"]}
    both = found.predict(rows)["estimate"], usual.predict({"x": data["x"]})["estimate"]
    assert np.allclose(*both, rtol=1e-9)


def test_long_numbers_may_be_levels():
    """Two that differ beyond what float64 holds stay two."""
    levels = [10**25 + i % 2 for i in range(300)]
    found = fitted(plain(arm=pd.Series(levels, dtype=object)), formula="y ~ C(arm)")
    assert len(found.names) == 2


STRANGE = {
    "complex": ({"x": plain()["x"] + 1j}, {}, "'x': expected real numbers"),
    "spans of time": ({"x": pd.to_timedelta(plain()["x"], "D")}, {}, "'x': expected numbers"),
    "offset": ({"o": np.where(np.arange(300) == 250, np.inf, 0)}, {"offset": "o"}, "in row 250"),
    "weight": ({"w": np.where(np.arange(300) == 250, np.inf, 1)}, {"weights": "w"}, "in row 250"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_numbers_that_are_none_are_refused_by_name(name):
    columns, options, message = STRANGE[name]
    with pytest.raises(TableError, match=message):
        fitted(plain(**columns), formula="y ~ x", **options)


def test_columns_of_one_name_are_refused():
    frame = pd.DataFrame(np.ones((300, 3)), columns=["x", "x", "y"])
    with pytest.raises(InputError, match="columns of different names"):
        fitted(frame, formula="y ~ x")


@pytest.mark.parametrize("text", ["x/0 = 1", "x = 1e400", "1e400*x = 0"])
def test_numbers_of_a_hypothesis_are_finite(text):
    with pytest.raises(InputError, match="sum of the coefficients"):
        fitted(plain(), formula="y ~ x").test(text)


@pytest.mark.parametrize("unit", [1e-300, 1e300])
def test_units_of_any_size(unit):
    data = plain()
    usual = ends_of(fitted(data, formula="y ~ x"))
    found = ends_of(fitted(data | {"x": data["x"] * unit}, formula="y ~ x"))
    assert np.allclose(found * np.array([1.0, unit]), usual, rtol=1e-9)


@pytest.mark.parametrize("share", [1e-6, 1e-8, 1e-10, 1e-12, 1e-14])
def test_equations_that_nearly_depend_on_each_other_pay_for_it(share):
    """Both say that x is 1 and Intercept is -4.25, up to the rounding of 1 - 4.25 share."""
    found = fitted(plain(3000), formula="y ~ x")
    exact = found.test(["x = 1", "Intercept = -4.25"]).log_e
    nearly = found.test(["x = 1", f"x + {share!r}*Intercept = {1 - 4.25 * share!r}"]).log_e
    assert nearly <= exact
    if share >= 1e-8:
        assert nearly >= exact - 0.01


def logistic(z):
    with mpmath.workdps(40):
        return 1 / (1 + mpmath.exp(-mpmath.mpf(float(z))))


def test_ends_on_the_mean_scale_are_rounded_outwards():
    found = fitted(plain(600), formula="y ~ x")
    rows = {"x": np.linspace(-30, 30, 400)}
    linear = found.predict(rows, interval=True, scale="linear")
    means = found.predict(rows, interval=True)
    low = zip(means["lower"], linear["lower"], strict=True)
    high = zip(means["upper"], linear["upper"], strict=True)
    assert all(mpmath.mpf(float(end)) <= logistic(z) for end, z in low)
    assert all(mpmath.mpf(float(end)) >= logistic(z) for end, z in high)


def test_an_offset_moves_ends_outwards():
    rng = np.random.default_rng(2)
    data = plain(600, o=rng.normal(size=600))
    found = fitted(data, formula="y ~ x", offset="o", family=glb.Gaussian(0.5))
    rows = {"x": rng.uniform(2, 6, 200), "o": rng.normal(size=200)}
    still = found.core.interval(np.column_stack([np.ones(200), rows["x"]]))
    moved = found.predict(rows, interval=True, scale="linear")
    for row, o in enumerate(rows["o"]):
        low, high = (Fraction(float(end[row])) + Fraction(float(o)) for end in still[1:])
        assert Fraction(float(moved["lower"][row])) <= low
        assert Fraction(float(moved["upper"][row])) >= high


@pytest.mark.parametrize("number", [1000000.31, 1000000.77, 999999.1])
def test_the_number_of_a_hypothesis_may_be_off_by_a_rounding(number):
    """Far from 0 it is: of the shift of the table, and of the number less that shift."""
    rng = np.random.default_rng(0)
    data = {"x": rng.uniform(0, 10, 400), "y": 1e6 + rng.normal(size=400)}
    core = fitted(data, formula="y ~ x", family=glb.Gaussian(1.0)).core
    C, joint = np.array([[1.0, 0.0]]), core.current()
    u, (target,), (doubt,) = core._hypothesis(C, number)
    found = core.test(C, number).log_e
    for off in (-0.1, 0.0, 0.1):
        given = (joint.likelihood, float(joint.level) - joint.log_failure, u.numpy())
        at_hat = torch.from_numpy(core.estimate.phi * core.length)
        moved = np.array([target + off * doubt])
        exact = float(whole_space_test(*given, moved, theta_hat=at_hat).log_e)
        assert exact - 1e-6 * (1.0 + abs(exact)) <= found <= exact


def test_a_hypothesis_at_the_edge_of_the_ball_is_not_refuted_by_a_rounding():
    rng = np.random.default_rng(0)
    data = {"x": rng.uniform(0, 10, 400), "y": 1e6 + rng.normal(size=400)}
    core = fitted(data, formula="y ~ x", family=glb.Gaussian(1.0), S=30.0).core
    for C in (np.array([[1.0, 0.0]]), np.array([[1.0, 0.5]])):  # one is declared, one is not
        _, size, shift = core._directions(C)
        edge = float(shift[0] + size[0] * core.sequence.domain.max_radius)
        assert core.test(C, float(np.nextafter(edge, np.inf))).log_e < np.inf
        assert core.test(C, edge + 1e-6 * abs(edge)).log_e == np.inf


def test_an_offset_that_no_coefficients_allow_is_said():
    """Its coefficient is -1, not 1: the joint set has nothing in common with the slice."""
    rng = np.random.default_rng(1)
    x, o = rng.uniform(0, 3, 3000), rng.normal(size=3000)
    data = {"x": x, "o": o, "y": rng.poisson(np.exp(0.5 + 0.2 * x - o)).astype(float)}
    found = fitted(data, formula="y ~ x", offset="o", family="poisson")
    with pytest.raises(SolverError, match="offset"):
        found.summary()
