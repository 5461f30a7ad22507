"""What policies for a fixed arm set share: the declared arms, each a contrast named beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from torchglb.checks import check_shape, refuse
from torchglb.policies.base import Policy


class DeclaredArms:
    """The arms of the first choice; later choices must be among the same.

    A contrast may be named at any time before the rewards that it is to be estimated from: rows
    that came before the first choice have weight 0.

    Args:
        policy: whose arms they are.
    """

    def __init__(self, policy: Policy) -> None:
        self._name, self._validate = policy.name, policy.validate
        self._place = (*policy.batch_shape, "K", policy.domain.dim)
        self.arms: Tensor | None = None

    def are_new(self, arms: Tensor) -> bool:
        """Whether arms ``(*B, K, d)`` are the first, which a choice then declares.

        Raises:
            InputError: if other arms were declared before. Values are compared only where the
                policy validates; :meth:`same` keeps bounds valid without.
        """
        if self.arms is None:
            return True
        changed = arms.shape != self.arms.shape
        if changed or (self._validate and not bool((arms == self.arms).all())):
            what = f"{arms.shape[-2]} arms" if changed else "others"
            expected = f"the same arms in every round, which {self._name} needs"
            raise refuse("arms", expected, f"{what} (use oful or ofuglb-pb where arms change)")
        return False

    def same(self, arms: Tensor) -> Tensor | None:
        """Which arms ``(*B, K, d)`` are the declared ones of their place; None if none can be."""
        if self.arms is None or self.arms.shape != arms.shape:
            return None
        return (arms == self.arms).all(-1)

    def matches(self, x: Tensor) -> Tensor:
        """Which declared arms equal ``x (*B, d)``: ``(*B, K)``."""
        assert self.arms is not None
        return (x[..., None, :] == self.arms).all(-1)

    def state_dict(self) -> Tensor | None:
        """The arms."""
        return None if self.arms is None else self.arms.clone()

    def loaded(self, state: Mapping[str, Any], like: Tensor) -> Tensor | None:
        """The arms of a saved state, checked."""
        arms = state["arms"]
        if arms is None:
            return None
        if not isinstance(arms, Tensor) or arms.dtype != like.dtype:
            raise refuse("state['arms']", f"a tensor of dtype {like.dtype}", type(arms).__name__)
        check_shape("state['arms']", arms, self._place)
        return arms.to(like.device).clone()
