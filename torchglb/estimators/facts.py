"""What stands beside a table: how it was made, and what its reader is warned of."""

from __future__ import annotations

from typing import Protocol

from torchglb.choices import IntervalKind
from torchglb.estimators.design import Design
from torchglb.estimators.linear_fit import LinearFit
from torchglb.estimators.scaling import Scaler
from torchglb.families import Gaussian, GLMFamily

PEEKING = (
    "fixed-n: the profile-likelihood interval, right only for one look at a sample whose size and"
    " rows were fixed beforehand"
)


class Fitted(Protocol):
    """A fit to a table."""

    core: LinearFit
    design: Design
    scaler: Scaler
    left_out: dict[str, int]


def facts_of(fit: Fitted, intervals: IntervalKind, simultaneous: bool) -> dict[str, str]:
    """How a table was made: formula, family, rows, settings, kinds of intervals."""
    core = fit.core
    burnt = f" (after {fit.scaler.burn_in} of burn-in)" if fit.scaler.burn_in else ""
    facts = {
        "formula": fit.design.formula,
        "family": family_text(core.family),
        "rows": f"{len(core)}{burnt}",
        "delta": f"{core.delta:g}",
        "S": "none" if core.S is None else f"{core.S:g} ({core.effects_text()})",
        "radius": core.radius if isinstance(core.radius, str) else repr(core.radius),
        "scaling": core.scale.source,
    }
    left = {key: count for key, count in fit.left_out.items() if count}
    if left:
        facts["left out"] = ", ".join(f"{count} rows ({key})" for key, count in left.items())
    if intervals != "profile":
        facts["intervals"] = core.interval_text(simultaneous)
    if intervals != "anytime":
        facts["fixed-n"] = PEEKING.partition(": ")[2]
    return facts


def warnings_of(core: LinearFit) -> list[str]:
    """Where the estimates are not what they seem to be."""
    if names := core.dependent_columns():
        return [
            "the rows do not determine " + ", ".join(names) + ": the estimates are those of the"
            " prior and the rows (posterior mode)"
        ]
    if not core.estimate.at_boundary:
        return []
    if core.S is not None:
        return [
            f"the estimate lies on the boundary of S = {core.S:g}, and the data pull outwards:"
            " all intervals rest on S"
        ]
    return [
        "the data are separated: the likelihood has no maximum, and the estimates are those of the"
        " prior and the rows (posterior mode). The intervals hold all the same; an end that is"
        " infinite has a bound with S=..."
    ]


def family_text(family: GLMFamily) -> str:
    """A family with its numbers."""
    name = type(family).__name__
    if isinstance(family, Gaussian):
        return f"{name}(sigma={family.sigma:g})"
    trials = getattr(family, "trials", 1)
    return f"{name}({trials})" if trials > 1 else name
