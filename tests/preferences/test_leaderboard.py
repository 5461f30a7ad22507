"""Leaderboards: the fit, certified contrasts, ranks under adaptive pairing, files that are wrong."""

from __future__ import annotations

import csv
import itertools
import json
import math
import os
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import scipy.optimize
import scipy.stats
import torch

import torchglb as glb
from torchglb.cli import main
from torchglb.errors import InputError
from torchglb.preferences import Battles, battles_of, leaderboard, read_battles
from torchglb.preferences.battle_set import SCALES, BattleSet
from torchglb.preferences.battles import Columns, merged
from torchglb.preferences.bradley_terry import BattleLoss, BattleRows, fit_scores
from torchglb.preferences.kernels import squared_lengths


def drawn(K, n, seed=0, spread=1.0):
    """Scores, and n battles of random pairs: left, right, whether the left one won."""
    generator = np.random.default_rng(seed)
    scores = spread * generator.normal(size=K)
    a = generator.integers(0, K, n)
    b = (a + generator.integers(1, K, n)) % K
    won = (generator.random(n) < 1.0 / (1.0 + np.exp(scores[b] - scores[a]))).astype(float)
    return scores - scores.mean(), a, b, won


def plain(K, n, **settings):
    scores, a, b, won = drawn(K, n, **settings)
    rows = merged(a, b, np.zeros((n, 0)), won, np.ones(n))
    names = tuple(f"m{i}" for i in range(K))
    return scores, Battles(names, rows)


def dense(rows, K):
    """The same loss, as the rest of the library has it: features (e_a - e_b)/2."""
    X = torch.zeros(len(rows.left), K, dtype=torch.float64)
    place = torch.arange(len(X))
    X[place, torch.from_numpy(rows.left)] = 0.5
    X[place, torch.from_numpy(rows.right)] = -0.5
    r, w = torch.from_numpy(rows.wins / rows.weight), torch.from_numpy(rows.weight)
    return glb.NegativeLogLikelihood(glb.Bernoulli(), X, r, w)


def test_the_loss_is_that_of_dense_rows():
    _, battles = plain(7, 300)
    theta = np.linspace(-1.0, 1.5, 7)
    at = BattleLoss(battles.rows, np.zeros(7, np.int64)).at(theta)
    wanted = dense(battles.rows, 7).expand(torch.from_numpy(2.0 * theta))
    assert abs(at.loss - float(wanted.loss)) <= 1e-12 * abs(at.loss)
    np.testing.assert_allclose(at.gradient, 2.0 * wanted.gradient, atol=1e-11)
    np.testing.assert_allclose(at.hessian, 4.0 * wanted.hessian, atol=1e-11)


def test_scores_are_those_of_an_unpenalised_fit():
    _, a, b, won = drawn(12, 3000, seed=4)
    found = leaderboard(battles_of(a.tolist(), b.tolist(), won.tolist()))

    def loss(theta):  # straight from the definition, every battle for itself
        z = theta[a] - theta[b]
        return np.logaddexp(0.0, z).sum() - won @ z

    def slope(theta):
        off = 1.0 / (1.0 + np.exp(theta[b] - theta[a])) - won
        return np.bincount(a, off, 12) - np.bincount(b, off, 12)

    best = scipy.optimize.minimize(loss, np.zeros(12), jac=slope, method="BFGS", tol=1e-11).x
    best -= best.mean()
    mine = dict(zip(found.names, found.scores, strict=True))
    np.testing.assert_allclose([mine[str(i)] for i in range(12)], best, atol=1e-6)
    assert found.inside


def test_controls_are_fitted_too():
    generator = np.random.default_rng(0)
    scores, a, b, _ = drawn(4, 4000)
    f = generator.integers(-2, 3, len(a)).astype(float)
    won = (generator.random(len(a)) < 1 / (1 + np.exp(-(scores[a] - scores[b] + 0.4 * f)))) + 0.0
    found = leaderboard(battles_of(a.tolist(), b.tolist(), won.tolist(), {"length": f.tolist()}))
    ((name, value, low, high),) = found.coefficients
    assert name == "length"
    assert low < 0.4 < high
    assert abs(value - 0.4) < 0.1

    def loss(theta):
        z = theta[a] - theta[b] + theta[4] * f
        return np.logaddexp(0.0, z).sum() - won @ z + 1e-9 * theta[:4].sum() ** 2

    best = scipy.optimize.minimize(loss, np.zeros(5), method="BFGS", tol=1e-9).x
    assert abs(value - best[4]) < 1e-4


@pytest.mark.parametrize(("K", "n"), [(5, 60), (8, 2000)])
def test_bounds_on_contrasts_hold_and_are_tight(K, n):
    """Against the library's own solver over the same set, where that is a sublevel set."""
    _, battles = plain(K, n, seed=2)
    found = BattleSet(BattleLoss(battles.rows, battles.groups()), 3.0 * K**0.5, 0.05)
    level = found._uniform_level(0.025)
    found.convex = found.convex._replace(lam=0.0, level=level)
    found.region = found.region._replace(cover=1e9 * np.eye(K))  # no help from the ellipsoid
    program = glb.SublevelProgram(
        dense(battles.rows, K), glb.Ball(K, 6.0 * K**0.5), torch.tensor(level, dtype=torch.float64)
    )
    contrasts = np.array([np.eye(K)[i] - np.eye(K)[j] for i, j in [(0, 1), (1, 0), (2, 4)]])
    exact = np.array([found.exact(c) for c in contrasts])
    wanted = glb.support(program, torch.from_numpy(0.5 * contrasts))
    assert (exact >= wanted.lower.numpy()).all()
    np.testing.assert_allclose(exact, wanted.upper.numpy(), rtol=2e-5)


@pytest.mark.parametrize("seed", range(3))
def test_points_of_the_set_obey_all_bounds(seed):
    """Random points: whatever is in the sets is within every bound."""
    generator = np.random.default_rng(seed)
    _, battles = plain(6, 1500, seed=seed)
    loss = BattleLoss(battles.rows, battles.groups())
    found = BattleSet(loss, 3.0 * 6**0.5, 0.05)
    levels = {lam: found._centred_level(lam, 0.025) for lam in SCALES}
    levels[0.0] = found._uniform_level(0.025)
    hat = found.theta
    assert found.convex.lam > 0  # a sharper set is at work
    pairs, inside = found.rough_pairs(), 0
    contrast = np.eye(6)[0] - np.eye(6)[3]
    exact = found.exact(contrast)
    assert exact <= pairs[0, 3]
    cover = np.linalg.cholesky(found.region.cover)
    for _ in range(400):
        away = cover @ generator.normal(size=6)
        theta = loss.centred(hat + away * generator.random() / np.linalg.norm(away) * 3.0)
        value = loss.at(theta, curved=False).loss
        gap = theta - hat
        if all(value - 0.5 * lam * gap @ gap <= level for lam, level in levels.items()):
            inside += 1
            assert ((theta[:, None] - theta[None, :]) <= pairs + 1e-9).all()
            assert theta @ contrast <= exact + 1e-9
    assert inside > 20


def test_the_bound_is_attained():
    """Along the best direction a point of the set comes close to the bound."""
    _, battles = plain(6, 800, seed=1)
    loss = BattleLoss(battles.rows, battles.groups())
    found = BattleSet(loss, 3.0 * 6**0.5, 0.05)
    contrast = np.eye(6)[0] - np.eye(6)[3]
    lam, level, hat = found.convex.lam, found.convex.level, found.theta

    def slack(theta):
        gap = theta - hat
        return level - loss.at(theta, curved=False).loss + 0.5 * lam * gap @ gap

    best = scipy.optimize.minimize(
        lambda t: -contrast @ t, hat, constraints={"type": "ineq", "fun": slack}, method="SLSQP",
        options={"maxiter": 200, "ftol": 1e-10},
    )  # fmt: skip
    assert best.success
    assert abs(contrast @ best.x - found.exact(contrast)) < 1e-4


def test_a_bound_that_no_cut_can_lower_takes_one_pass(monkeypatch):
    """Where the ellipsoid comes from a narrower prior than the set over which maxima are found."""
    K, generator = 200, np.random.default_rng(0)
    scores, (a, b) = generator.normal(size=K), np.triu_indices(K, 1)
    wins = generator.binomial(50, 1.0 / (1.0 + np.exp(scores[b] - scores[a]))).astype(float)
    rows = BattleRows(a, b, np.zeros((len(a), 0)), np.full(len(a), 50.0), wins)
    found = BattleSet(BattleLoss(rows, np.zeros(K, np.int64)), 3.0 * K**0.5, 0.05)
    assert found.region.lam > found.convex.lam
    points, cut = [], found._cut

    def counted(at, contrast):
        points.append(at)
        return cut(at, contrast)

    monkeypatch.setattr(found, "_cut", counted)
    for i, j in ((0, 1), (1, 0), (7, 50)):
        contrast = np.eye(K)[i] - np.eye(K)[j]
        bound = found.exact(contrast)
        assert len(points) == 1
        inside = points.pop()
        assert inside.loss < found.convex.level
        reached = contrast @ (inside.theta - found.theta)
        assert 0.998 * (bound - contrast @ found.theta) <= reached


def test_fit_of_separable_battles_stays_in_the_ball():
    rows = BattleRows(
        np.array([0, 1]), np.array([1, 2]), np.zeros((2, 0)), np.full(2, 9.0), np.full(2, 9.0)
    )
    found = fit_scores(BattleLoss(rows, np.zeros(3, np.int64)), 4.0)
    assert not found.inside
    assert abs(np.linalg.norm(found.at.theta) - 4.0) < 1e-6
    board = leaderboard(battles_of(["a"] * 9 + ["b"] * 9, ["b"] * 9 + ["c"] * 9, [1] * 18))
    assert board.names == ("a", "b", "c")
    assert any("won or lost everything" in remark for remark in board.remarks)


def test_unconnected_models_are_said_to_be_so_and_not_ranked():
    left, right = ["a", "b", "x"] * 30, ["b", "c", "y"] * 30
    board = leaderboard(battles_of(left, right, [1, 0.5, 0] * 30))
    assert set(board.names) == {"a", "b", "c"}
    assert board.unconnected == (("x", "y"),)
    assert board.worst_rank.max() == 3
    assert any("no chain of battles" in remark and "x, y" in remark for remark in board.remarks)
    with pytest.raises(InputError, match="unconnected"):
        board.difference("a", "x")
    with pytest.raises(InputError, match="unknown"):
        board.difference("a", "zebra")


def test_order_and_side_do_not_matter():
    _, a, b, won = drawn(5, 200)
    first = leaderboard(battles_of(a.tolist(), b.tolist(), won.tolist()))
    second = leaderboard(battles_of(b.tolist()[::-1], a.tolist()[::-1], (1 - won).tolist()[::-1]))
    assert first.names == second.names
    np.testing.assert_allclose(first.scores, second.scores, atol=1e-10)
    np.testing.assert_allclose(first.difference_upper, second.difference_upper, atol=1e-6)
    np.testing.assert_allclose(first.difference_lower, -first.difference_upper.T)


# ---- validity ----------------------------------------------------------------------------------


def adaptive_run(seed, K=5, rounds=6, batch=60, delta=0.2):
    """Battles of those that are close at the top; whether any look missed scores or ranks."""
    generator = np.random.default_rng(seed)
    scores = generator.normal(size=K)
    order = np.argsort(np.argsort(-scores)) + 1  # true ranks
    left, right, won = [], [], []
    pairs = [(i, j) for i in range(K) for j in range(i)]
    board = None
    for _ in range(rounds):
        if board is None:
            chosen = [pairs[i % len(pairs)] for i in range(batch)]
        else:  # the two that seem best, and those whose order is least clear
            top = [int(name) for name in board.names[:3]]
            chosen = [(top[0], top[1]), (top[1], top[2]), (top[0], top[2])] * (batch // 3)
        for i, j in chosen:
            left.append(str(i))
            right.append(str(j))
            won.append(float(generator.random() < 1 / (1 + np.exp(scores[j] - scores[i]))))
        board = leaderboard(battles_of(left, right, won), delta=delta)
        place = [int(name) for name in board.names]
        true = scores[place][:, None] - scores[place][None, :]
        ranks = order[place]
        wrong = (true < board.difference_lower - 1e-12).any()
        wrong |= (true > board.difference_upper + 1e-12).any()
        wrong |= (ranks < board.best_rank).any() or (ranks > board.worst_rank).any()
        if wrong:
            return True
    return False


def test_ranks_and_differences_hold_at_once_under_adaptive_pairing():
    misses = sum(adaptive_run(seed, rounds=3) for seed in range(12))
    assert scipy.stats.binomtest(misses, 12, 0.2, alternative="greater").pvalue > 0.01


@pytest.mark.slow
def test_ranks_and_differences_hold_at_once_in_300_runs():
    misses = sum(adaptive_run(seed) for seed in range(300))
    assert scipy.stats.binomtest(misses, 300, 0.2, alternative="greater").pvalue > 0.01


# ---- files -------------------------------------------------------------------------------------

HEAD = "model_a,model_b,winner\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r":1: expected one column 'model_a', got an empty file"),
        ("model_a,winner\nx,tie\n", r":1: expected one column 'model_b'"),
        (HEAD + "x,y,tie\nx,y\n", r":3: expected 3 fields, got 2"),
        (HEAD + "x,y,tie\n\nx,y,maybe\n", r":4: winner: expected .* got 'maybe'"),
        (HEAD + "x,y,1.5\n", r":2: winner: .* got '1.5'"),
        (HEAD + "x,y,nan\n", r":2: winner: .* got 'nan'"),
        (HEAD + "x,x,tie\n", r":2: expected two different competitors"),
        (HEAD + ",y,tie\n", r":2: model_a: expected a name"),
        (HEAD, r"battles: expected at least one battle"),
    ],
)
def test_bad_files_are_refused_by_line(tmp_path, text, message):
    path = tmp_path / "battles.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_battles(path, Columns())


def test_bad_controls_and_bytes_are_refused(tmp_path):
    path = tmp_path / "battles.csv"
    path.write_text("model_a,model_b,winner,f\nx,y,tie,1\nx,y,tie,long\n")
    with pytest.raises(InputError, match=r":3: f: expected a finite number, got 'long'"):
        read_battles(path, Columns(controls=("f",)))
    path.write_bytes(b"model_a,model_b,winner\n\xff\xfe,y,tie\n")
    with pytest.raises(InputError, match="UTF-8"):
        read_battles(path, Columns())
    with pytest.raises(InputError, match="cannot be read"):
        read_battles(tmp_path / "none.csv", Columns())


def test_a_control_is_part_of_what_is_said():
    table = {"model_a": ["x"] * 30, "model_b": ["y"] * 30, "winner": ["model_a", "model_b"] * 15}
    plain_board = leaderboard(table)
    assert "control" not in plain_board.statement
    board = leaderboard(table | {"length": [0.0] * 30}, controls=["length"])
    assert "largest value of their control" in board.statement
    (remark,) = board.remarks  # nobody has won everything here
    assert "the battles do not determine a control" in remark


@pytest.mark.parametrize(
    ("left", "right", "winner"),
    [("b", "a", "a"), ("b", "a", "b"), ("x", "Left", "Left"), ("tie", "x", "tie"), ("3", "1", "1")],
)
def test_a_result_that_can_be_read_in_two_ways_is_refused(left, right, winner):
    # the competitor a is on the right, where "a" is also a word for the left side
    with pytest.raises(InputError, match="row 0: winner: .* the name of one competitor"):
        battles_of([left], [right], [winner])
    clear = battles_of([left, right], [right, left], [1.0, 0.0])
    assert clear.rows.wins.tolist() in ([2.0], [0.0])
    assert battles_of(["a"], ["b"], ["a"]).rows.wins.tolist() == [1.0]  # both say the same
    assert battles_of([3], [1], [1]).rows.wins.tolist() == [1.0]


def test_results_may_be_written_in_many_ways():
    words = ["model_a", "a", "x", 1, "1.0", "left", "tie", "tie (bothbad)", "model_b", "y", 0]
    rows = {"model_a": ["x"] * 11, "model_b": ["y"] * 11, "winner": words}
    board = leaderboard(rows)
    assert len(board.names) == 2
    assert leaderboard({k: v[:7] for k, v in rows.items()}).names[0] == "x"
    with pytest.raises(InputError, match="a column 'winner'"):
        leaderboard({"model_a": ["x"], "model_b": ["y"]})
    with pytest.raises(InputError, match="row 1: winner"):
        leaderboard({"model_a": ["x", "x"], "model_b": ["y", "y"], "winner": ["tie", "?"]})
    with pytest.raises(InputError, match="frame"):
        leaderboard(7)
    with pytest.raises(InputError, match="controls"):
        leaderboard(rows, controls="length")


def test_the_command_prints_and_writes(tmp_path, capsys):
    path = tmp_path / "battles.csv"
    _, a, b, won = drawn(4, 400)
    lines = [
        f"<m{i}>,<m{j}>,{'model_a' if w else 'model_b'}\n"
        for i, j, w in zip(a, b, won, strict=True)
    ]
    path.write_text(HEAD + "".join(lines) + "lone,other,tie\n")
    assert main(["leaderboard", str(path), "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "With probability at least 0.95" in shown
    assert "lone, other" in shown
    page = (tmp_path / "out" / "leaderboard.html").read_text()
    assert "&lt;m0&gt;" in page
    assert "<m0>" not in page
    assert "data:image/png" in page
    with (tmp_path / "out" / "leaderboard.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == 4
    assert float(table[0]["lower"]) < float(table[0]["score"]) < float(table[0]["upper"])
    with (tmp_path / "out" / "leaderboard-differences.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 6
    path.write_text(HEAD + "x,y,?\n")
    assert main(["leaderboard", str(path)]) == 2
    assert "battles.csv:2: winner" in capsys.readouterr().err


@pytest.mark.slow
def test_two_hundred_models_and_a_million_battles(tmp_path):
    _, a, b, won = drawn(200, 10**6)
    path = tmp_path / "battles.csv"
    with path.open("w") as file:
        file.write(HEAD)
        file.writelines(f"m{i},m{j},{w:g}\n" for i, j, w in zip(a, b, won, strict=True))
    # in a process of its own: the largest memory of this one may be that of another test. Linux
    # counts what a process was before it became another program as its own, but not in VmHWM
    code = """
import json, re, sys
from pathlib import Path
from torchglb import leaderboard
board, status = leaderboard(sys.argv[1]), Path("/proc/self/status")
memory = re.search(r"VmHWM:\\s*(\\d+) kB", status.read_text())[1] if status.exists() else 0
print(json.dumps({"memory": int(memory)} | dict(zip(board.names, board.scores.tolist()))))
"""
    command, said = [sys.executable, "-c", code, str(path)], tmp_path / "said.json"
    with said.open("w") as file:
        child = subprocess.Popen(command, stdout=file)
        _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    assert used.ru_utime + used.ru_stime < 30.0  # whatever else the machine does
    scores = json.loads(said.read_text())
    assert 0 <= scores.pop("memory") < 1e6  # kB
    theta = np.array([scores.pop(f"m{i}") for i in range(200)])
    assert not scores
    off = 1.0 / (1.0 + np.exp(theta[b] - theta[a])) - won
    slope = np.bincount(a, off, 200) - np.bincount(b, off, 200)
    assert np.abs(slope).max() < 1e-6  # curvature is some thousand: to 1e-9 in the scores


MISSING = {
    "none": [None],
    "text": pd.array([None], dtype="string"),
    "number": [math.nan],
    "time": [pd.NaT],
}


@pytest.mark.parametrize("kind", MISSING)
def test_a_missing_name_is_no_competitor(kind):
    frame = {"model_a": [*MISSING[kind], "x", "y"], "model_b": ["y", "z", "z"], "winner": [1, 1, 0]}
    with pytest.raises(InputError, match="row 0: model_a: expected a name, got nothing"):
        leaderboard(frame)


def test_numbers_of_competitors_have_one_name():
    """A column with a gap had 2.0 where the other one has 2: two competitors."""
    frame = {"model_a": [1, 1, 2] * 5, "model_b": [2.0, 3.0, 3.0] * 5, "winner": ["tie"] * 15}
    assert sorted(leaderboard(frame).names) == ["1", "2", "3"]


def test_lengths_of_battles_pay_for_what_cancels():
    """A posterior that is narrow along a battle and wide across it."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        wide = rng.normal(size=(4, 1)) * 1e-3 + 1e3
        root = np.concatenate([wide, 1e-4 * rng.normal(size=(4, 4))], axis=1)
        cover = root @ root.T
        cover = 0.5 * (cover + cover.T)
        left, right, found = np.array([0, 2]), np.array([1, 0]), np.empty(2)
        controls = rng.normal(size=(2, 1))
        squared_lengths(left, right, controls, cover, found)
        for p in range(2):
            x = [Fraction(0)] * 4
            x[left[p]], x[right[p]], x[3] = Fraction(1), Fraction(-1), Fraction(controls[p, 0])
            pairs = itertools.product(range(4), repeat=2)
            exact = sum(x[i] * x[j] * Fraction(cover[i, j]) for i, j in pairs)
            assert Fraction(found[p]) >= max(exact, 0)
