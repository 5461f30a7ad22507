"""The rows of a history as a state: what is saved, and what is checked before it is taken over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torchglb.checks import (
    ValueChecks,
    check_count,
    check_float,
    check_shape,
    check_tensors,
    refuse,
)
from torchglb.rows.buffers import RowBuffers, enlarged


def saved_rows(held: RowBuffers) -> dict[str, Any]:
    """All that is needed to continue bit by bit, as plain tensors and numbers.

    Unused rows and the size of the buffers belong to it: sums are rounded in their order.
    """
    return {
        "capacity": held.X.shape[-2],
        "X": held.X[..., : held.used, :].detach().clone(),
        **{name: getattr(held, name)[..., : held.used].detach().clone() for name in _sums(held)},
        "distinct": held.distinct.clone(),
        "observations": held.observations,
        "aggregate": held.merges,
        "unit_weights": held.unit_weights,
    }


def restored_rows(held: RowBuffers, state: Mapping[str, Any]) -> RowBuffers:
    """The buffers of a saved state, in the place of ``held``.

    Args:
        held: gives the shape, dtype, device and kind that the state must have.
        state: of :func:`saved_rows`.
    """
    if bool(state["aggregate"]) != held.merges:
        raise refuse("state", f"aggregate={held.merges}", f"aggregate={state['aggregate']}")
    X, w, distinct = state["X"], state["w"], state["distinct"]
    batch, device = tuple(held.distinct.shape), held.X.device
    checks = ValueChecks()
    for name in ("X", *_sums(held)):
        label, value = f"state['{name}']", state[name]
        check_float(label, value)
        tail = ("n", held.X.shape[-1]) if name == "X" else (X.shape[-2],)
        check_shape(label, value, (*batch, *tail))
        wide = name == "y" and not held.merges and not state["unit_weights"]
        dtype = torch.float64 if wide else held.X.dtype
        if value.dtype != dtype:
            raise refuse(label, f"dtype {dtype}", value.dtype)
        checks.finite(label, value)
    checks.require("state['w']", w >= 0, "non-negative weights", w)
    n = X.shape[-2]
    check_tensors("state", state, {"distinct": held.distinct})
    # compiled code reads, and writes behind, as many rows as this says
    checks.within("state['distinct']", distinct, 0, n, lambda: f"numbers from 0 to {n}")
    checks.settle()
    capacity = check_count("state['capacity']", state["capacity"], least=n)
    observations = check_count("state['observations']", state["observations"], least=n)
    # laid out as before, so that sums are rounded as before
    X = X.detach().to(device).mT.contiguous().mT
    found = held._replace(
        X=X,
        distinct=distinct.to(device).clone(),
        used=n,
        observations=observations,
        unit_weights=bool(state["unit_weights"]),
        recorded=False,
        last=None,
        **{name: state[name].detach().to(device) for name in _sums(held)},
    )
    return enlarged(found, capacity)  # copies them


def _sums(held: RowBuffers) -> tuple[str, ...]:
    return ("w", "y", "w_rest", "y_rest") if held.merges else ("w", "y")
