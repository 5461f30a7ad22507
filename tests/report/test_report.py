"""Tables, tests and the HTML report of a record."""

import html.parser
import json
import math
import re
import sys

import numpy as np
import pytest
from fake_records import PAPER, fake_record
from scipy import stats

from torchglb import Bernoulli, CustomFamily, Gaussian, Poisson, QuasiBounded
from torchglb.errors import InputError
from torchglb.report import (
    binomial_interval,
    compare,
    estimate,
    holm,
    paired,
    summarise,
    table,
    write_report,
)
from torchglb.report.statistics import MeanError
from torchglb.report.summary import ofuglb_bound
from torchglb.report.tables import number, p_value
from torchglb.simulate import Record

# ---- statistics ------------------------------------------------------------------------------


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_paired_agrees_with_scipy(rng):
    for count in (2, 3, 10, 57):
        a = rng.normal(size=count)
        b = a + 0.2 + 0.5 * rng.normal(size=count)
        found = paired(a, b)
        assert found.t_test == pytest.approx(stats.ttest_rel(a, b).pvalue, rel=1e-12)
        wins = int((a < b).sum())
        assert (found.wins, found.losses) == (wins, count - wins)
        assert found.sign_test == pytest.approx(stats.binomtest(wins, count).pvalue, rel=1e-12)
        assert found.difference.mean == pytest.approx((a - b).mean())
        assert found.difference.error == pytest.approx(stats.sem(a - b))


def test_holm_is_the_closed_test_of_all_intersections(rng):
    """By definition: p of a hypothesis is the largest Bonferroni p of all sets that hold it."""
    for count in (1, 2, 3, 7):
        p = rng.random(count) ** 3
        p[count // 2] = p[0]  # a tie
        subsets = [[j for j in range(count) if mask >> j & 1] for mask in range(1, 1 << count)]
        closed = [
            max(min(1.0, len(s) * min(p[j] for j in s)) for s in subsets if k in s)
            for k in range(count)
        ]
        np.testing.assert_allclose(holm(list(p)), closed, rtol=1e-14)


def test_holm_leaves_out_what_is_no_test():
    assert holm([]) == []
    found = holm([0.02, math.nan, 0.01])
    assert found[0] == found[2] == 0.02
    assert math.isnan(found[1])


def test_holm_keeps_its_promise(rng):
    """Ten true hypotheses: one rejection or more in at most 5% of the tables."""
    tables = rng.random((4000, 10))
    rejected = sum(min(holm(list(row))) <= 0.05 for row in tables)
    assert stats.binomtest(rejected, len(tables), 0.05, alternative="greater").pvalue > 0.05
    plain = sum(row.min() <= 0.05 for row in tables)
    assert plain > 5 * rejected


def test_paired_at_the_edges():
    same = np.array([1.0, 2.0, 3.0])
    equal = paired(same, same)
    assert (equal.t_test, equal.sign_test, equal.wins, equal.losses) == (1.0, 1.0, 0, 0)
    shifted = paired(same, same + 1)
    assert shifted.t_test == 0.0
    assert shifted.sign_test == pytest.approx(0.25)
    tie = paired(np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 5.0]))
    assert (tie.wins, tie.losses) == (2, 0)
    assert tie.sign_test == pytest.approx(0.5)
    single = paired(same[:1], same[1:2])
    assert math.isnan(single.t_test)
    assert math.isnan(single.difference.error)
    with pytest.raises(InputError, match="second"):
        paired(same, same[:2])


def test_binomial_interval_agrees_with_scipy():
    for hits, trials in [(0, 10), (1, 10), (5, 10), (10, 10), (3, 400)]:
        expected = stats.binomtest(hits, trials).proportion_ci(0.95, method="exact")
        assert binomial_interval(hits, trials) == pytest.approx((expected.low, expected.high))
    with pytest.raises(InputError, match="hits"):
        binomial_interval(3, 2)


@pytest.mark.filterwarnings("ignore::torchglb.errors.UndeclaredConstantWarning")
def test_bound_is_a_number_where_the_theory_covers_the_family():
    """Vacuous in the paper's own setting, informative once the horizon is long enough."""
    short = ofuglb_bound(Bernoulli(), 4.0, 2, 10_000, 0.05)
    assert short.vacuous
    assert short.value == pytest.approx(10_000 * math.tanh(2.0))  # T (mu(4) - mu(-4))
    assert not ofuglb_bound(Bernoulli(), 4.0, 2, 10**8, 0.05).vacuous
    assert not ofuglb_bound(Gaussian(0.5), 2.0, 2, 10**6, 0.05).vacuous
    assert ofuglb_bound(Poisson(), 2.0, 2, 10_000, 0.05).value > 0
    assert ofuglb_bound(QuasiBounded("probit"), 2.0, 2, 1000, 0.05).vacuous
    assert ofuglb_bound(CustomFamily(lambda z: z**2 / 2), 2.0, 2, 1000, 0.05) is None


# ---- summary and table -----------------------------------------------------------------------


def test_summary_is_what_the_arrays_say(tmp_path):
    record = Record.open(fake_record(tmp_path, replicates=6))
    summary = summarise(record)
    assert summary.reference == "ofuglb"
    for label in PAPER:
        arrays = record.arrays(label)
        for row, S in enumerate(summary.S):
            cell, final = summary.cells[label, S], arrays["regret"][row, :, -1]
            assert cell.regret == (pytest.approx(final.mean()), pytest.approx(stats.sem(final)))
            if label == "ofuglb":
                assert cell.versus is None
            else:
                other = record.arrays("ofuglb")["regret"][row, :, -1]
                assert cell.versus.t_test == pytest.approx(stats.ttest_rel(final, other).pvalue)
            if "area" in arrays:
                assert cell.area.mean == pytest.approx(arrays["area"][row].mean())
                assert cell.missed.hits == int(arrays["missed"][row].sum())
                expected = arrays["passes"][row, :, -1].mean() / 60
                assert cell.passes == pytest.approx(expected)
            else:
                assert (cell.area, cell.missed, cell.passes, cell.certificate) == (None,) * 4
        seconds = arrays["seconds"]
        assert summary.timing[label].total == pytest.approx(seconds.sum())
        assert summary.timing[label].late == pytest.approx(1e3 * np.median(seconds[54:]))
    assert summarise(record, "emk").cells["emk", 4.0].versus is None
    with pytest.raises(InputError, match="reference: expected one of 'ofuglb'"):
        summarise(record, "nobody")


def test_time_of_thinned_rounds_is_weighted(tmp_path):
    """Seconds are averages since the round recorded before."""
    directory = fake_record(tmp_path, labels=("ofuglb",), horizon=4)
    arrays = dict(np.load(directory / "ofuglb.npz"))
    arrays["rounds"] = np.array([1, 10, 100, 1000])
    np.savez(directory / "ofuglb.npz", **arrays)
    np.savez(directory / "timing" / "ofuglb.npz", seconds=np.array([1.0, 2.0, 3.0, 4.0]))
    timing = summarise(Record.open(directory)).timing["ofuglb"]
    assert timing.total == pytest.approx(1 + 9 * 2 + 90 * 3 + 900 * 4)
    assert timing.early == pytest.approx(2000)  # rounds 1, 10, 100
    assert timing.late == pytest.approx(4000)


def test_table_has_every_policy_and_radius(tmp_path):
    record = Record.open(fake_record(tmp_path))
    text = table(record)
    lines = text.splitlines()
    assert "S = 4" in text
    assert "S = 6" in text
    for label in PAPER:
        (line,) = [line for line in lines if line.startswith(f"{label} ")]
        finals = record.arrays(label)["regret"][:, :, -1]
        for row in finals:
            assert number(estimate(row)) in line
    (line,) = [line for line in lines if line.startswith("emk ")]
    assert line.endswith("1/10")
    (line,) = [line for line in lines if line.startswith("evill ")]
    assert line.endswith("-")


def test_numbers_are_readable():
    assert number(estimate(np.array([1234.5, 1236.5]))) == "1236 ± 1"
    assert number(estimate(np.array([0.0]))) == "0.000000"
    assert number(estimate(np.array([-0.5, -0.25]))) == "-0.3750 ± 0.1250"
    assert p_value(math.nan) == "-"
    assert p_value(0.0) == "0"


# ---- html ------------------------------------------------------------------------------------


class Links(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.found, self.open = [], []

    def handle_starttag(self, tag, attrs):
        self.found += [
            (tag, key, value) for key, value in attrs if key in {"src", "href", "srcset"}
        ]
        if tag not in {"img", "meta", "br", "link"}:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_report_is_one_file(tmp_path):
    record = Record.open(fake_record(tmp_path / "run", title="Arms <b>& sets"))
    path = write_report(record, tmp_path / "deep" / "report.html")
    text = path.read_text(encoding="utf-8")
    links = Links()
    links.feed(text)
    assert links.open == []
    assert len(links.found) == 3
    assert all(value.startswith("data:image/png;base64,") for _, _, value in links.found)
    assert "://" not in text
    assert "@import" not in text
    assert "url(" not in text
    assert "Arms &lt;b&gt;&amp; sets" in text
    listings = re.findall(r"<pre>(.*?)</pre>", text, re.DOTALL)
    found = [json.loads(html.unescape(listing)) for listing in listings]
    assert found == [record.config, record.manifest]
    for label in PAPER:
        for S in (4.0, 6.0):
            assert number(summarise(record).cells[label, S].regret) in text
    for heading in ("Paired comparison with ofuglb", "Coverage", "Areas", "certificate", "Time"):
        assert heading in text
    assert "vacuous" in text


def test_report_without_sets_and_with_one_policy(tmp_path):
    record = Record.open(fake_record(tmp_path / "run", labels=("evill",), dim=5, replicates=1))
    text = write_report(record, tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Coverage" not in text
    assert "Paired comparison" not in text
    assert "evill" in text
    assert "nan" not in re.sub(r"base64,[^\"]*", "", text)


def test_without_a_model_nothing_is_promised(tmp_path):
    directory = fake_record(tmp_path / "run", labels=("ofuglb", "evill"))
    for label in ("ofuglb", "evill"):
        arrays = dict(np.load(directory / f"{label}.npz"))
        del arrays["theta_star"]
        arrays.pop("missed", None)
        np.savez(directory / f"{label}.npz", **arrays)
    record = Record.open(directory)
    assert summarise(record).bound == {}
    text = write_report(record, tmp_path / "report.html").read_text(encoding="utf-8")
    assert "no promise" in text
    assert "With probability" not in text
    assert "Theorem" not in text
    assert "missed" not in table(record)
    assert "With probability" in write_report(
        Record.open(fake_record(tmp_path / "true", labels=("ofuglb",))), tmp_path / "true.html"
    ).read_text(encoding="utf-8")


def test_report_without_matplotlib_says_so(tmp_path, monkeypatch):
    record = Record.open(fake_record(tmp_path / "run", labels=("ofuglb",)))
    for name in [name for name in sys.modules if name.startswith("torchglb.plotting")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = write_report(record, tmp_path / "report.html").read_text(encoding="utf-8")
    assert "matplotlib (the extra" in text
    assert "<img" not in text
    assert "Final regret" in text


# ---- compare ---------------------------------------------------------------------------------


def test_compare_pairs_where_the_random_numbers_agree(tmp_path):
    one = Record.open(fake_record(tmp_path / "a", labels=("ofuglb", "emk"), replicates=6))
    two = Record.open(
        fake_record(
            tmp_path / "b", labels=("emk", "evill"), replicates=4, horizon=80, delta=0.1,
            policy={"emk": {"regularizer": "vaw"}},
        )
    )  # fmt: skip
    text = compare(one, two)
    assert re.search(r"^delta +0.05 +0.1$", text, re.MULTILINE)
    assert re.search(r"^policy.emk.regularizer +- +vaw$", text, re.MULTILINE)
    assert "seed" not in text
    assert "regret at t = 60" in text
    first = one.arrays("emk")["regret"][0, :, -1]
    second = two.arrays("emk")["regret"][0, :, 59]
    expected = p_value(stats.ttest_rel(first[:4], second).pvalue)
    (line,) = [line for line in text.splitlines() if re.match(r"emk +4 ", line)]
    assert line.split()[-2] == expected
    assert "paired t-test" in text
    assert "only in the first: ofuglb" in text
    assert "only in the second: evill" in text


def test_compare_does_not_pair_other_random_numbers(tmp_path):
    one = Record.open(fake_record(tmp_path / "a", labels=("emk",), seed=0))
    two = Record.open(fake_record(tmp_path / "b", labels=("emk",), seed=1))
    text = compare(one, two)
    a, b = (record.arrays("emk")["regret"][0, :, -1] for record in (one, two))
    assert p_value(stats.ttest_ind(a, b, equal_var=False).pvalue) in text
    assert "Welch" in text
    assert "paired" not in text


def test_compare_with_nothing_in_common(tmp_path):
    one = Record.open(fake_record(tmp_path / "a", labels=("emk",)))
    two = Record.open(fake_record(tmp_path / "b", labels=("evill",)))
    assert "no policy is in both" in compare(one, two)
    three = Record.open(fake_record(tmp_path / "c", labels=("emk",), S=(20.0,)))
    assert "no S is in both" in compare(one, three)
    assert "the same" in compare(one, one)


def test_a_number_that_is_none_is_shown_as_such():
    assert number(MeanError(float("nan"), 0.1)) == "nan"
    assert number(MeanError(float("inf"), float("nan"))) == "inf"


# ---- arms that replicates share, and many comparisons -------------------------------------------


def test_the_report_says_whether_replicates_share_arms(tmp_path):
    told = "All replicates see one sequence of arms"
    for name, settings, shared in (
        ("a", {}, True),
        ("b", {"shared_arms": False}, False),
        ("c", {"environment": "ball"}, False),
        ("d", {"environment": "fixed", "shared_arms": True}, True),
    ):
        record = Record.open(fake_record(tmp_path / name, ("ofuglb",), S=(4.0,), **settings))
        assert summarise(record).shared_arms == shared
        page = write_report(record, tmp_path / f"{name}.html").read_text(encoding="utf-8")
        assert (told in page) == shared
        assert ("replicates, which share their arms" in table(record)) == shared


def test_the_report_corrects_its_paired_tests(tmp_path):
    record = Record.open(
        fake_record(tmp_path / "run", ("ofuglb", "ofuglb-pb", "emk"), replicates=3)
    )
    page = write_report(record, tmp_path / "r.html").read_text(encoding="utf-8")
    assert "Holm's method for the 4 comparisons" in page.replace("&#39;", "'")
    regret = {k: record.arrays(k)["regret"][..., -1] for k in record.labels}
    tests = [
        stats.ttest_rel(regret[label][s], regret["ofuglb"][s]).pvalue
        for label in ("ofuglb-pb", "emk")
        for s in range(2)
    ]
    rows = re.findall(r"<tr>(.*?)</tr>", page, flags=re.DOTALL)
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row, flags=re.DOTALL) for row in rows]
    found = [c for c in cells if len(c) == 8]
    assert len(found) == 4
    order = np.argsort(tests)
    corrected = np.empty(4)
    corrected[order] = np.minimum(1, np.maximum.accumulate(np.sort(tests) * [4, 3, 2, 1]))
    for row, plain, expected in zip(found, tests, corrected, strict=True):
        assert row[4].strip() == p_value(plain)
        assert row[5].strip() == p_value(expected)


def test_runs_with_and_without_shared_arms_are_no_pairs(tmp_path):
    first = Record.open(fake_record(tmp_path / "a", ("ofuglb",)))
    same = Record.open(fake_record(tmp_path / "b", ("ofuglb",), shared_arms=True))
    other = Record.open(fake_record(tmp_path / "c", ("ofuglb",), shared_arms=False))
    assert "paired t-test" in compare(first, same)
    assert "corrected (Holm)" in compare(first, same)
    assert "Welch" in compare(first, other)
