"""What the theory of a policy covers, and the refusal of what it does not."""

from __future__ import annotations

from dataclasses import dataclass

from torchglb.checks import check_count, refuse
from torchglb.families import GLMFamily, check_family


@dataclass(frozen=True)
class Requirements:
    """What a policy's theory covers.

    Attributes:
        families: the family classes covered; empty for every GLM.
        bounded_rewards: whether rewards must have a finite range.
        horizon: whether the horizon T must be known.
        fixed_arms: whether the arm set must be the same in every round.
        pairs: whether the arms must be all pairs of some items (:mod:`torchglb.preferences`).

    Example:
        >>> import torchglb as glb
        >>> glb.policies.requirements_of("rs-glincb").horizon
        True
    """

    families: tuple[type[GLMFamily], ...] = ()
    bounded_rewards: bool = False
    horizon: bool = False
    fixed_arms: bool = False
    pairs: bool = False

    def cover(self, family: GLMFamily) -> bool:
        """Whether rewards of this family are covered."""
        fits = not self.families or isinstance(family, self.families)
        return fits and (is_bounded(family) or not self.bounded_rewards)


def is_bounded(family: GLMFamily) -> bool:
    """Whether rewards have a finite range."""
    low, high = family.reward_range
    return high - low < float("inf")


def check_covered(
    name: str, requires: Requirements, family: GLMFamily, horizon: int | None
) -> None:
    """Refuses a family or a horizon with which the policy of this name has no theory."""
    check_family(family)
    covered = requires.families
    if covered and not isinstance(family, covered):
        names = ", ".join(sorted(c.__name__ for c in covered))
        raise refuse("family", f"one that {name} covers ({names})", type(family).__name__)
    if requires.bounded_rewards and not is_bounded(family):
        low, high = family.reward_range
        expected = f"a family of bounded rewards, which {name} needs"
        raise refuse("family", expected, f"{type(family).__name__} on [{low:g}, {high:g}]")
    if horizon is not None:
        check_count("horizon", horizon, least=1)
    if requires.horizon and horizon is None:
        raise refuse("horizon", f"the number of rounds, which {name} needs", None)
