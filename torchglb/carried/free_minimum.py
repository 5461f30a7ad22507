"""The minimisers over R^d of N growing losses with a ridge, followed from round to round."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchglb.backend import Floats, Ints
from torchglb.carried.free import THETA, FreeSearches, find_free, search_free_on
from torchglb.carried.free_certificate import FREE
from torchglb.carried.monomials import monomials
from torchglb.carried.search import CarriedSearch
from torchglb.carried.source import RowSource
from torchglb.domain import Ball

#: derivatives of the highest order of a polynomial
LARGEST_ORDER = 1600


class Free(NamedTuple):
    """The minimiser of every problem.

    Attributes:
        theta: ``(N, d)``.
        high: F(theta) is at most this, ``(N,)``.
        hessian: of F there, ``(N, d, d)``.
        hessian_error: of it, relative to the true one there, ``(N,)``.
        distance: of the minimiser, ``<x, u>`` is at most this times ``sqrt(1 + hessian_error)``
            times the length of x in the inverse of ``hessian``, ``(N,)``; infinite if not known.
        length: the same in the Euclidean norm, ``(N,)``.
        leader: the arm with the largest ``<x, theta>``, ``(N,)``, if arms were given.
        certain: whether it is also the minimiser's, ``(N,)``.
        passes: over the history that it took, ``(N,)``.
    """

    theta: Floats
    high: Floats
    hessian: Floats
    hessian_error: Floats
    distance: Floats
    length: Floats
    leader: Ints
    certain: Ints
    passes: Ints


class FreeMinimum(CarriedSearch):
    """``argmin L(theta) + (lambda/2)|theta|^2 - <tilt, theta>`` over R^d, through time.

    Args:
        source: the rows.
        domain: a ball on which the family's constants are taken; minimisers that are not certain
            to lie inside have an infinite ``length``.
        points: A, at which the loss is carried; more than one where tilts change.
        largest: derivatives of the highest order of the polynomials.
    """

    def __init__(
        self, source: RowSource, domain: Ball, points: int = 1, largest: int = LARGEST_ORDER
    ) -> None:
        super().__init__(source, domain, points, largest, FREE)
        self._used = np.zeros((source.problems, points), np.int64)

    def _kept(self) -> dict[str, NDArray[Any]]:
        return {"used": self._used, "clock": self.search["clock"]}

    def find(
        self,
        ridge: Floats,
        tilt: Floats,
        tol: float,
        hessian_tol: float = np.inf,
        arms: Floats | None = None,
        tilt_error: Floats | None = None,
        reference: Floats | None = None,
    ) -> Free:
        """The minimiser to a tolerance; a pass only where no polynomial is good enough.

        Args:
            ridge: lambda > 0 of every problem, ``(N,)``.
            tilt: ``(N, d)``.
            tol: of the distance, relative to 1 + |theta|; rounding may leave it larger.
            hessian_tol: relative error of the Hessian, in the order of semidefinite matrices.
            arms: ``(N, K, d)``: the search ends as soon as the largest ``<x, theta>`` is certain;
                or would be if the tilt were exact.
            tilt_error: by how much each tilt may be off, ``(N,)``, in the dual norm of the Hessian
                of F at
            reference: ``(N, d)``.
        """
        source, carried = self.source, self.carried
        carried.catch_up(source)
        N, d = tilt.shape
        arms = np.empty((N, 0, d)) if arms is None else np.ascontiguousarray(arms, np.float64)
        vectors, hessian = np.zeros((N, 3, d)), np.empty((N, d, d))
        searches = FreeSearches(
            objectives=carried.objectives(ridge, tilt),
            used=self._used,
            state=self.search,
            vectors=vectors,
            hessian=hessian,
            tol=float(tol),
            hessian_tol=float(hessian_tol),
            arms=arms,
            tilt_error=np.zeros(N) if tilt_error is None else tilt_error,
            reference=np.zeros((N, d)) if reference is None else reference,
            used_once=bool(tilt.any()),  # nobody comes back to the minimiser of a random tilt
        )
        if source.is_direct:
            find_free(source.compiled, source.arrays(), searches, monomials(d, 1))
        else:
            self._search_from_here(search_free_on, searches, vectors[:, THETA], source.pass_at)
        state = self.search.copy()
        known = {name: state[name] for name in Free._fields if name not in ("theta", "hessian")}
        return Free(theta=vectors[:, THETA].copy(), hessian=hessian, **known)
