"""The words from which arguments choose, as types; a door refuses others by name."""

from __future__ import annotations

from typing import Literal, get_args

#: of an interval: ``<x, theta>``, or the mean of a reward
ScaleName = Literal["linear", "mean"]
SCALES: tuple[ScaleName, ...] = get_args(ScaleName)
#: of a null hypothesis
Relation = Literal["==", "<=", ">="]
RELATIONS: tuple[Relation, ...] = get_args(Relation)
#: which constant stands in an ellipsoid's radius: the sharper one, or Theorem 3.2 as printed
EllipsoidKind = Literal["fixed_point", "theorem"]
ELLIPSOIDS: tuple[EllipsoidKind, ...] = get_args(EllipsoidKind)
#: how the program of an arm is solved
ProgramSolver = Literal["native", "conic", "layer"]
#: how the minimum of a loss is found
FitSolver = Literal["newton", "lbfgs"]
FIT_SOLVERS: tuple[FitSolver, ...] = get_args(FitSolver)
#: what is done with a row that should not be there
RowsOutside = Literal["refuse", "drop"]
OUTSIDE: tuple[RowsOutside, ...] = get_args(RowsOutside)
#: how a network's features get into the unit ball
BallMode = Literal["clip", "normalize", "smooth"]
MODES: tuple[BallMode, ...] = get_args(BallMode)
#: the infimum in Theorem 3.1
Infimum = Literal["exact", "closed_form"]
INFIMA: tuple[Infimum, ...] = get_args(Infimum)
#: whose Lipschitz constant: that of Table 1, or one from the data
LipschitzConstant = Literal["table1", "data"]
LIPSCHITZ_CONSTANTS: tuple[LipschitzConstant, ...] = get_args(LipschitzConstant)
#: what the increments of a posterior are summed over; a radius may decide by itself
Increments = Literal["rows", "aggregated"]
INCREMENTS: tuple[Increments, ...] = get_args(Increments)
RadiusIncrements = Literal["auto", "rows", "aggregated"]
RADIUS_INCREMENTS: tuple[RadiusIncrements, ...] = get_args(RadiusIncrements)
#: the shape of a posterior
PosteriorShape = Literal["pearson", "uniform"]
POSTERIORS: tuple[PosteriorShape, ...] = get_args(PosteriorShape)
#: which intervals a fitted model shows
IntervalKind = Literal["anytime", "profile", "both"]
INTERVALS: tuple[IntervalKind, ...] = get_args(IntervalKind)
