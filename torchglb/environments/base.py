"""What a policy plays against: arms, rewards and regret for a batch of replicates.

Everything random is a function of (seed, replicate, round): nothing has to be saved to continue a
run, and a replicate meets the same world in every batch. Policies that are compared share arms and
luck: the reward is the quantile of the arm's law at a uniform number of (seed, replicate, round).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any, ClassVar, TypeVar, Unpack

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.checks import (
    as_device,
    as_floats,
    check_choice,
    check_count,
    check_dtype,
    check_float,
    check_options,
    check_shape,
    check_sizes,
    refuse,
)
from torchglb.domain import Ball
from torchglb.environments.settings import EnvironmentOptions
from torchglb.families import GLMFamily, check_family
from torchglb.random_streams import RandomStreams, check_seed, derived_seed


class Environment(ABC):
    """A bandit problem for N elements of a batch, each with its own S and replicate.

    Args:
        family: the GLM family of the rewards.
        S: the radius of the ball, one for each element, ``(N)``; its dtype and device are kept.
        replicates: the names of the replicates, whole numbers, ``(N)``; elements of one name share
            arms and luck, whatever their S.
        seed: of everything random.
        dim: d.

    Example:
        >>> from torchglb.families import Bernoulli
        >>> world = make("fixed", family=Bernoulli(), S=3.0, replicates=2, arms=5)
        >>> isinstance(world, Environment), world.arms(0).shape
        (True, torch.Size([2, 5, 2]))
    """

    #: the name in the registry
    name: ClassVar[str]
    #: whether the arms are the same in every round
    fixed: ClassVar[bool] = False
    #: whether every point of the unit ball is an arm
    whole_ball: ClassVar[bool] = False
    #: whether arms are pairs of items, and regret is about the items: no set of rows certifies it
    pairs: ClassVar[bool] = False
    #: whether theta* changes, so that what a set says of it holds for no sum over rounds
    changes: ClassVar[bool] = False
    #: the parameter, ``(N, d)``; None where the rewards follow no GLM that is known
    theta_star: Tensor | None = None

    def __init__(
        self, family: GLMFamily, S: Tensor, replicates: Tensor, *, seed: int = 0, dim: int = 2
    ) -> None:
        check_family(family)
        check_float("S", S)
        check_shape("S", S, ("N",))
        check_shape("replicates", replicates, S.shape)
        self.family = family
        self.S = S
        self.domain = Ball(dim, S)
        self.dim = dim
        self.seed = check_seed(seed)
        self.replicates = replicates.to(S.device)
        self.dtype, self.device = S.dtype, S.device

    def streams(self, purpose: str, shared: bool = False) -> RandomStreams:
        """Random numbers of (seed, purpose, replicate), or of (seed, purpose) if shared."""
        names = torch.zeros_like(self.replicates[:1]) if shared else self.replicates
        seed = derived_seed(self.seed, purpose)
        return RandomStreams(seed, tuple(names.shape), names, self.device)

    @abstractmethod
    def arms(self, t: int) -> Tensor:
        """The arms of round t = 0, 1, ..., ``(N, K, d)``."""

    @abstractmethod
    def rewards(self, t: int, x: Tensor, index: Tensor | None) -> Tensor:
        """The rewards ``(N)`` of the arms that were played.

        Args:
            t: the round.
            x: the arms themselves, ``(N, d)``.
            index: their places among ``arms(t)``, ``(N)``; None if every point is an arm.
        """

    @abstractmethod
    def regret(self, t: int, x: Tensor, index: Tensor | None) -> Tensor:
        """What the arms that were played lose on average to the best one, ``(N)``."""


def picked(values: Tensor, index: Tensor | None) -> Tensor:
    """The entries ``(N)`` of ``values (N, K)``, for the arms that were played."""
    assert index is not None  # only arms of the unit ball have none
    return values.gather(-1, index[:, None])[:, 0]


_ENVIRONMENTS: dict[str, type[Environment]] = {}
_GIVEN = frozenset({"self", "family", "S", "replicates", "seed"})

E = TypeVar("E", bound=type[Environment])


def register(environment: E) -> E:
    """Class decorator: makes an environment known under its ``name``.

    Example:
        >>> @register
        ... class Mine(lookup("fixed")):
        ...     name = "mine"
        >>> "mine" in available()
        True
    """
    if environment.name in _ENVIRONMENTS:
        raise refuse("name", "a name that is not taken", environment.name)
    _ENVIRONMENTS[environment.name] = environment
    return environment


def available() -> list[str]:
    """The names of all environments.

    Example:
        >>> "time-varying" in available()
        True
    """
    return sorted(_ENVIRONMENTS)


def lookup(name: str) -> type[Environment]:
    """The class of a name.

    Example:
        >>> lookup("fixed").name
        'fixed'
    """
    return _ENVIRONMENTS[check_choice("environment", name, tuple(available()))]


def options_of(name: str) -> dict[str, Any]:
    """The options of an environment with their defaults (``inspect.Parameter.empty``: none).

    Example:
        >>> sorted(options_of("fixed"))
        ['arms', 'dim', 'shared_arms', 'theta']
    """
    options: dict[str, Any] = {}
    for cls in lookup(name).__mro__:
        if "__init__" in cls.__dict__ and issubclass(cls, Environment):
            for key, parameter in inspect.signature(cls.__init__).parameters.items():
                named = parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
                if named and key not in _GIVEN:
                    options.setdefault(key, parameter.default)
    return options


def make(
    name: str,
    *,
    family: GLMFamily,
    S: ArrayLike,
    replicates: int | Tensor = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
    **options: Unpack[EnvironmentOptions],
) -> Environment:
    """Builds an environment by name.

    Args:
        name: one of :func:`available`.
        family: the GLM family of the rewards.
        S: one radius, or one for each element.
        replicates: the names of the replicates of the elements; a number R stands for 0..R-1, and
            then S must be a single radius or have R of them.
        seed: of everything random.
        dtype: float64 or float32.
        device: where the tensors live.
        options: of the environment, such as ``dim``, ``arms`` and ``theta``
            (:func:`options_of`); an unknown one is refused, and by a type checker too.

    Example:
        >>> from torchglb.families import Bernoulli
        >>> world = make("time-varying", family=Bernoulli(), S=4.0, replicates=3, arms=20)
        >>> world.arms(0).shape
        torch.Size([3, 20, 2])
    """
    check_options(f"option of {name}", options, options_of(name))
    check_dtype(dtype)
    device = None if device is None else as_device(device)
    if not isinstance(replicates, Tensor):
        replicates = torch.arange(check_count("replicates", replicates, least=1), device=device)
    radius = as_floats("S", check_sizes("S", S, positive=True)).to(dtype=dtype, device=device)
    if radius.ndim == 0:
        radius = radius.expand(replicates.shape)
    own: dict[str, Any] = {**options}
    return lookup(name)(family, radius.clone(), replicates.clone(), seed=seed, **own)
