"""The types of ``**options`` name what the functions behind them take: all of it, and nothing else."""

from dataclasses import fields

import pytest

import torchglb as glb
from torchglb import environments, policies
from torchglb.environments.settings import EnvironmentOptions
from torchglb.policies.settings import PolicyOptions
from torchglb.ucb import Conic, Layer, Native
from torchglb.ucb.solvers.settings import (
    BoundSettings,
    ConicSettings,
    LayerSettings,
    NativeSettings,
)

SOLVERS = {Native: NativeSettings, Conic: ConicSettings, Layer: LayerSettings}


@pytest.mark.parametrize("solver", SOLVERS)
def test_options_of_support_are_the_settings_of_its_solvers(solver):
    # the name of the solver stands for the class, so that a setting of this name cannot be given
    own = {field.name for field in fields(solver)} - {"solver"}
    assert set(SOLVERS[solver].__annotations__) == own


def test_bounds_of_sets_take_the_options_of_the_native_solver():
    assert set(BoundSettings.__annotations__) == {"solver", *NativeSettings.__annotations__}


def test_options_of_policies_by_name():
    names = [*policies.available(), *policies.available(pairs=True)]
    known = {option for name in names for option in policies.options_of(name)}
    assert set(PolicyOptions.__annotations__) == known - {"family", "domain"}


def test_options_of_environments_by_name():
    known = {o for name in environments.available() for o in environments.options_of(name)}
    assert set(EnvironmentOptions.__annotations__) == known


def test_a_typo_is_refused_by_name():
    given = dict(family=glb.Bernoulli(), domain=glb.Ball(2, 3.0))
    loss = glb.NegativeLogLikelihood(given["family"], [[1.0, 0.0]], [1.0])
    program = glb.SublevelProgram(loss, given["domain"], 2.0)
    region = glb.ConfidenceSequence(**given, delta=0.1).current()
    for call, message in (
        (lambda: policies.make("ofuglb", **given, dleta=0.1), "'dleta' .did you mean 'delta'"),
        (lambda: environments.make("fixed", family=given["family"], S=1.0, amrs=3), "'arms'"),
        (lambda: glb.support(program, [[1.0, 0.0]], toll=1.0), "'toll' .did you mean 'tol'"),
        (lambda: region.interval([1.0, 0.0], toll=1.0), "'toll' .did you mean 'tol'"),
        (lambda: region.support([[1.0, 0.0]], max_step=1), "did you mean 'max_steps'"),
    ):
        with pytest.raises(glb.InputError, match=message):
            call()
