"""The program of a growing history that is solved anew in every round, as on a device."""

import copy
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch

import torchglb as glb
from torchglb.ucb import RefitProgram


class ByTorch(glb.Bernoulli):
    """Without compiled derivatives: what a device runs."""

    def compiled(self):
        return None


def played(family, rounds=6):
    generator = torch.Generator().manual_seed(3)
    program = RefitProgram(family, glb.Ball(2, 3.0), (2,))
    for _ in range(rounds):
        x = torch.nn.functional.normalize(
            torch.randn(2, 2, generator=generator, dtype=torch.float64), dim=-1
        )
        program.append(x, torch.bernoulli(torch.full((2,), 0.5).double(), generator=generator))
        program.argmax(arms(generator), 1.0)
    return program, generator


def arms(generator):
    x = torch.randn(2, 5, 2, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(x, dim=-1)


@pytest.mark.parametrize("family", [glb.Bernoulli(), ByTorch()])
def test_bounds_are_those_of_a_static_solve(family):
    program, generator = played(family)
    x = arms(generator)
    choice = program.argmax(x, 1.0, tol=1e-9)
    exact = glb.support(program.program(1.0), x, tol=1e-10)
    assert (choice.upper >= exact.lower).all()
    assert (choice.lower <= exact.upper).all()
    assert (choice.upper - choice.lower).max() < 1e-8
    assert torch.equal(choice.index, exact.upper.argmax(-1))


@pytest.mark.parametrize("family", [glb.Bernoulli(), ByTorch()])
def test_copies_continue_bit_by_bit(family):
    program, generator = played(family)
    x = arms(generator)
    fresh = RefitProgram(family, glb.Ball(2, 3.0), (2,))
    fresh.load_state_dict(program.state_dict())
    others = [copy.deepcopy(program), fresh]
    if type(family) is glb.Bernoulli:
        others.append(pickle.loads(pickle.dumps(program)))
    first = program.argmax(x, 1.0)
    for other in others:
        again = other.argmax(x, 1.0)
        assert torch.equal(again.upper, first.upper)
        assert torch.equal(again.lower, first.lower)


def test_the_minimum_is_pure():
    program, generator = played(ByTorch())
    twin, x = copy.deepcopy(program), arms(generator)
    program.minimum()
    program.minimum(0.5)
    assert torch.equal(program.argmax(x, 1.0).upper, twin.argmax(x, 1.0).upper)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"radius": float("nan")}, "radius"),
        ({"radius": -1.0}, "radius"),
        ({"radius": torch.tensor([1.0, -1.0]).double()}, "radius"),
        ({"radius": 1.0, "regularization": -1.0}, "regularization"),
        ({"radius": 1.0, "regularization": float("nan")}, "regularization"),
        ({"radius": 1.0, "tol": float("nan")}, "tol"),
        ({"radius": 1.0, "value_tol": -1.0}, "value_tol"),
        ({}, "radius, level"),
    ],
)
def test_bad_numbers_are_refused_and_leave_no_trace(options, name):
    program, generator = played(ByTorch(), 2)
    x, before = arms(generator), program.state_dict()
    with pytest.raises(glb.InputError, match=name):
        program.argmax(x, **options)
    after = program.state_dict()
    for key in ("start", "passes"):
        assert torch.equal(before[key], after[key])


def test_an_empty_set_raises_unless_asked_not_to():
    for kind in (RefitProgram, glb.AnchoredProgram):
        program = kind(glb.Bernoulli(), glb.Ball(2, 2.0), (2,))
        program.append([[[1.0, 0.0]]] * 2, [[1.0]] * 2)
        for ask in (program.argmax, program.bound):
            with pytest.raises(glb.SolverError, match=r"INFEASIBLE.*\(1,\)"):
                ask([[[1.0, 0.0]]] * 2, level=[3.0, 0.0])
            found = ask([[[1.0, 0.0]]] * 2, level=np.array([3.0, 0.0]), throw=False)
            assert found.status.tolist() == [0, int(glb.Status.INFEASIBLE)]


@pytest.mark.parametrize("weight", [1.0, 0.7])
@pytest.mark.parametrize("d", [1, 3])
def test_merged_rows_in_float32_keep_their_digits(d, weight):
    """Sums of merged rewards have more digits than float32: rounded, they move the minimum."""
    S, radius = 3.0, 0.1
    for seed in (0, 18):
        generator = torch.Generator().manual_seed(seed)
        family, ball = glb.Gaussian(0.1), glb.Ball(d, S)
        base = 0.9 * torch.nn.functional.normalize(torch.randn(4, d, generator=generator), dim=-1)
        X = base[torch.randint(0, 4, (3000,), generator=generator)]
        r, w = torch.rand(3000, generator=generator), torch.full((3000,), weight)
        program = RefitProgram(family, ball, aggregate=True, dtype=torch.float32)
        program.append(X, r, w)
        loss = glb.NegativeLogLikelihood(family, X.double(), r.double(), w.double())
        fit = glb.constrained_mle(family, glb.Rows(loss.X, loss.r, loss.w), ball)
        found, low = program.minimum(), fit.loss - fit.gap
        assert found.lower_bound.dtype == torch.float32
        assert found.lower_bound.double() <= fit.loss
        assert low <= found.loss.double()
        x = 0.9 * torch.nn.functional.normalize(torch.randn(4, d, generator=generator), dim=-1)
        choice = program.argmax(x, radius, throw=False)
        assert choice.upper.dtype == choice.lower.dtype == torch.float32
        inner, outer = (
            glb.support(glb.SublevelProgram(loss, ball, level), x.double(), tol=1e-10)
            for level in (low + radius, fit.loss + radius)
        )
        assert (choice.upper.double() >= inner.lower).all()
        assert (choice.lower.double() <= outer.upper).all()
        assert (choice.upper - choice.lower).max() < 0.1
        assert (glb.support(program.program(radius), x).upper >= inner.lower).all()


def test_a_level_that_rounding_hides_is_no_certain_choice():
    """In float32 the minimum of a loss of 200 is known to some 1e-5."""
    generator = torch.Generator().manual_seed(0)
    x = torch.nn.functional.normalize(torch.randn(300, 2, generator=generator), dim=-1)
    program = RefitProgram(glb.Bernoulli(), glb.Ball(2, 3.0), dtype=torch.float32)
    program.append(x, torch.randint(2, (300,), generator=generator).float())
    choice = program.argmax(x[:4], radius=1e-9, throw=False)
    assert choice.lower.isneginf().all()
    assert int(choice.status) == glb.Status.INACCURATE
    wide = program.argmax(x[:4], radius=1.0)
    assert torch.isfinite(wide.lower).all()
    assert int(wide.status) == glb.Status.CONVERGED


@pytest.mark.parametrize("make", [RefitProgram, glb.AnchoredProgram])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("question", ["argmax", "bound"])
def test_what_is_not_finite_stays_in_its_problem(make, bad, place, question):
    program = make(glb.Bernoulli(), glb.Ball(2, 3.0), (2,))
    program.append([[1.0, 0.0], [0.6, 0.8]], [1.0, 0.0])
    x = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]]] * 2).double()
    x[1, place, 0] = bad
    choice = getattr(program, question)(x, 1.0, throw=False)
    assert choice.status.tolist() == [glb.Status.CONVERGED, glb.Status.NONFINITE]
    with pytest.raises(glb.SolverError, match="NONFINITE"):
        getattr(program, question)(x, 1.0)


@pytest.mark.parametrize("kind", [glb.AnchoredProgram, RefitProgram])
def test_the_level_of_a_program_is_not_below_minimum_plus_radius(kind):
    """Of a large radius the sum is rounded by more than the minimum is uncertain by."""
    program = kind(glb.Bernoulli(), glb.Ball(2, 3.0))
    program.append([[1.0, 0.0], [0.6, 0.8]], [1.0, 0.0])
    loss = Fraction(float(program.minimum().loss))
    for k in range(20):
        radius = 1e7 * (1.0 + k / 7)
        assert loss + Fraction(radius) <= Fraction(float(program.program(radius).level))
