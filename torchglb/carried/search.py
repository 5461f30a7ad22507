"""What the searches for minimisers share, over the ball and over R^d: sums, passes, saving."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchglb.backend import Floats
from torchglb.carried.carried_loss import CarriedLoss, choose_order
from torchglb.carried.kernels import Workspace, workspace
from torchglb.carried.minimum import PASS
from torchglb.carried.model import dense
from torchglb.carried.monomials import Packed, monomials
from torchglb.carried.source import RowSource
from torchglb.checks import check_tensors
from torchglb.domain import Ball


class CarriedSearch(ABC):
    """The minimisers of N growing losses, followed from round to round.

    Args:
        source: the rows.
        domain: a ball on which the family's constants are taken.
        points: A, at which the loss is carried.
        largest: derivatives of the highest order of the polynomials.
        kind: dtype of the state of a search.

    Attributes:
        carried: the loss at these points.
        search: the state of every search, ``(N,)``.
    """

    def __init__(
        self, source: RowSource, domain: Ball, points: int, largest: int, kind: np.dtype[Any]
    ) -> None:
        self.source = source
        order = choose_order(source.family, domain.dim, domain.max_radius, largest)
        self.carried = CarriedLoss(source.family, domain, source.problems, points, order)
        self.search = np.zeros(source.problems, kind)

    @abstractmethod
    def _kept(self) -> dict[str, NDArray[Any]]:
        """What is kept from one search to the next beside the sums, as views by name."""

    def _search_from_here(
        self,
        search_on: Callable[..., int],
        searches: Any,
        points: Floats,
        make_pass: Callable[[int, Floats, Packed, Workspace], float],
    ) -> None:
        """All searches where compiled code cannot read the rows: passes are made from here.

        Args:
            search_on: goes on with one problem until it is done or needs a pass.
            searches: of all problems.
            points: where each wants its pass, ``(N, d)``.
            make_pass: at the point of one problem.
        """
        table, linear = self.carried.table, monomials(self.carried.dim, 1)
        work, memory = workspace(table.dim, table.count), dense(table.dim, table.count)
        for b in range(self.source.problems):
            self.search["passes"][b] = self.search["answered"][b] = 0
            trace = 0.0
            while asked := search_on(b, searches, work, trace, memory):
                trace = make_pass(b, points[b], table if asked == PASS else linear, work)
                self.search["answered"][b] = asked

    def copy(self) -> Self:
        """With sums of its own, over the same rows."""
        new = copy.copy(self)
        new.carried = self.carried.copy()
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                setattr(new, name, value.copy())
        return new

    # ---- saving --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Everything needed to continue bit by bit."""
        kept = {name: torch.from_numpy(value.copy()) for name, value in self._kept().items()}
        return {**self.carried.state_dict(), **kept}

    def check_state(self, name: str, state: Mapping[str, Any]) -> None:
        """Refuses a state of another kind."""
        check_tensors(name, state, self.state_dict())
        self.carried.check_state(name, state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state."""
        self.check_state("state", state)
        self.carried.load_state_dict(state)
        for name, value in self._kept().items():
            value[:] = state[name].detach().numpy()
