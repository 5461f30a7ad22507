"""The program of a growing history that is solved anew in every round, as on a device."""

import copy
import pickle

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
