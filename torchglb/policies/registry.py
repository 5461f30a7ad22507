"""Policies by name."""

from __future__ import annotations

import inspect
import sys
from typing import Any, TypeVar, Unpack, get_args, get_origin, get_type_hints

from torchglb.checks import check_choice, check_options, refuse
from torchglb.domain import Ball
from torchglb.families import GLMFamily, check_family
from torchglb.policies.base import Policy
from torchglb.policies.conservative import leashed
from torchglb.policies.requirements import Requirements
from torchglb.policies.settings import PolicyOptions

_POLICIES: dict[str, type[Policy]] = {}

P = TypeVar("P", bound=type[Policy])


def register(policy: P) -> P:
    """Class decorator: makes a policy known under its ``name``.

    Example:
        >>> from torchglb.policies import OFUL, available
        >>> @register
        ... class Mine(OFUL):
        ...     name = "mine"
        >>> "mine" in available()
        True
    """
    if policy.name in _POLICIES:
        raise refuse("name", "a name that is not taken", policy.name)
    _POLICIES[policy.name] = policy
    return policy


def available(family: GLMFamily | None = None, *, pairs: bool = False) -> list[str]:
    """The names of all policies, or of those that cover a family.

    Args:
        family: which they should cover.
        pairs: those that compare items in pairs, instead of those that choose an arm.

    Example:
        >>> import torchglb as glb
        >>> "oful" in available(glb.Gaussian()), "oful" in available(glb.Bernoulli())
        (True, False)
    """
    if family is not None:
        check_family(family, " or None")
    names = sorted(name for name, policy in _POLICIES.items() if policy.requires.pairs == pairs)
    return [n for n in names if family is None or _POLICIES[n].requires.cover(family)]


def requirements_of(name: str) -> Requirements:
    """What the theory of a policy covers.

    Example:
        >>> requirements_of("oful").families
        (<class 'torchglb.families.gaussian.Gaussian'>,)
    """
    return _POLICIES[check_choice("name", name, tuple(sorted(_POLICIES)))].requires


def summary_of(name: str) -> str:
    """One line about a policy: of its module, or of its class if it shares the module.

    Example:
        >>> summary_of("oful")
        'OFUL: optimism for linear bandits (Abbasi-Yadkori, Pal and Szepesvari 2011).'
    """
    policy = _POLICIES[check_choice("name", name, tuple(sorted(_POLICIES)))]
    alone = sum(other.__module__ == policy.__module__ for other in _POLICIES.values()) == 1
    module = inspect.getdoc(sys.modules[policy.__module__]) if alone else None
    text = module or inspect.getdoc(policy) or ""
    return text.partition("\n")[0].replace("``", "")


def playing_the_ball() -> list[str]:
    """The names of the policies that can play where every point of the unit ball is an arm.

    Example:
        >>> "ofuglb" in playing_the_ball()
        True
    """
    return [n for n in sorted(_POLICIES) if _POLICIES[n].select_ball is not Policy.select_ball]


def options_of(name: str) -> list[str]:
    """The options that ``make`` takes for a policy.

    Example:
        >>> options_of("oful")[:4]
        ['family', 'domain', 'delta', 'regularization']
    """
    policy = _POLICIES[check_choice("name", name, tuple(sorted(_POLICIES)))]
    options: list[str] = []
    for cls in policy.__mro__:
        if "__init__" in cls.__dict__ and issubclass(cls, Policy):
            found = inspect.signature(cls.__init__).parameters
            for key, parameter in found.items():
                named = parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
                if named and key != "self" and key not in options:
                    options.append(key)
            further = [p for p in found.values() if p.kind is p.VAR_KEYWORD]
            passed_on = _named_settings(cls) if further else []
            if passed_on is not None:  # nothing is passed on that it does not name
                options += [key for key in passed_on if key not in options]
                break
    return [*options, "conservative"]


def _named_settings(policy: type[Policy]) -> list[str] | None:
    """The names of ``**settings: Unpack[...]``; None where they are not said."""
    try:
        hints = get_type_hints(policy.__init__)
    except NameError:  # names that only a type checker sees
        return None
    packed = [hint for hint in hints.values() if get_origin(hint) is Unpack]
    return [key for hint in packed for key in get_args(hint)[0].__annotations__] or None


def make(name: str, *, family: GLMFamily, domain: Ball, **options: Unpack[PolicyOptions]) -> Policy:
    """Builds a policy by name.

    Args:
        name: one of :func:`available`.
        family: the GLM family.
        domain: the ball.
        options: ``delta``, ``horizon``, ``batch_shape``, ``device``, ``dtype``, ``seed``,
            ``replicates``, ``validate``, and the policy's own (:func:`options_of`); an unknown one
            is refused, and by a type checker too
            (:class:`torchglb.policies.settings.PolicyOptions`).
            ``conservative=(baseline, alpha)`` keeps any policy with a confidence set above a share
            of a baseline arm (:class:`torchglb.policies.Conservative`).

    Example:
        >>> import torchglb as glb
        >>> policy = make("ofuglb", family=glb.Bernoulli(), domain=glb.Ball(2, 4.0))
    """
    check_options(f"option of {name}", options, options_of(name))
    own: dict[str, Any] = {**options}  # those of the class, whose names are checked
    leash = own.pop("conservative", None)
    policy = _POLICIES[name](family, domain, **own)
    return policy if leash is None else leashed(policy, leash)
