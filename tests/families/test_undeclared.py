"""A constant that was only searched on a grid is a guess: said once, by name. A family is convex."""

import warnings

import pytest
import torch

import torchglb as glb
from torchglb.errors import UndeclaredConstantWarning

DOUBLE = torch.float64


def quadratic():
    return glb.CustomFamily(lambda z: 0.5 * z * z)


USERS = {
    "problem": lambda family: glb.radii.Problem(family, glb.Ball(2, 2.0), 0.05).self_concordance,
    "ball": lambda family: glb.Ball(2, 2.0).constant(family.max_variance, torch.zeros(1)),
    "ellipsoids": lambda family: glb.ConfidenceSequence(
        family, glb.Ball(2, 2.0), 0.05, ellipsoidal=True
    ),
    "least variance": lambda family: family.min_variance(2.0),
}


@pytest.mark.parametrize("use", USERS)
def test_whoever_rests_on_a_guess_is_warned_once(use):
    family = quadratic()
    with pytest.warns(UndeclaredConstantWarning, match="CustomFamily.*is not declared"):
        USERS[use](family)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        USERS[use](family)
    with pytest.warns(UndeclaredConstantWarning):  # another object is another guess
        USERS[use](quadratic())


def test_declared_constants_and_families_of_the_library_are_silent():
    declared = glb.CustomFamily(
        lambda z: 0.5 * z * z, self_concordance=0.0, max_variance=1.0, min_variance=1.0
    )
    known = (glb.Bernoulli(), glb.Binomial(3), glb.Gaussian(0.5), glb.Poisson())
    for family in (declared, *known, glb.QuasiBounded("probit"), glb.QuasiBounded("cloglog")):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for use in USERS.values():
                use(family)
            for order in (3, 4, 5):
                family.derivative_ratio(order, 2.0)


BENT = {
    "constants": lambda family: family.self_concordance(3.0),
    "estimate": lambda family: glb.constrained_mle(family, rows(), glb.Ball(2, 3.0)),
    "support": lambda family: glb.support(
        glb.SublevelProgram(
            glb.NegativeLogLikelihood(family, *rows()),
            glb.Ball(2, 3.0),
            torch.tensor(4.0, dtype=DOUBLE),
        ),
        torch.eye(2, dtype=DOUBLE),
    ),
    "sequence": lambda family: glb.ConfidenceSequence(family, glb.Ball(2, 3.0), 0.05),
}


def rows():
    return glb.Rows(torch.eye(2, dtype=DOUBLE), torch.tensor([0.5, 0.1], dtype=DOUBLE))


@pytest.mark.filterwarnings("ignore::torchglb.errors.UndeclaredConstantWarning")
@pytest.mark.parametrize("use", BENT)
@pytest.mark.parametrize("declared", [False, True])
def test_negative_curvature_is_refused(use, declared):
    """``cos`` bends the wrong way about 0, whatever constants are declared."""
    known = dict(self_concordance=1.0, max_variance=1.0, min_variance=0.1) if declared else {}
    family = glb.CustomFamily(torch.cos, reward_range=(-1.0, 1.0), **known)
    with pytest.raises(glb.InputError, match="log_partition: expected a convex.*curvature"):
        BENT[use](family)


def test_a_flat_stretch_is_convex():
    """A curvature of 0 may be computed a rounding below it."""
    family = glb.CustomFamily(lambda z: z**4, self_concordance=1.0)
    assert glb.constrained_mle(family, rows(), glb.Ball(2, 3.0)).theta.shape == (2,)
