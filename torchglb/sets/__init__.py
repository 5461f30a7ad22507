"""Confidence sets for theta: likelihood-ratio sets, ellipsoids, and their intersections."""

from torchglb.sets.base import ConfidenceSet, Event, IntersectionSet, Interval
from torchglb.sets.centred import CentredSet
from torchglb.sets.ellipsoid import EllipsoidSet
from torchglb.sets.likelihood_ratio import LikelihoodRatioSet
from torchglb.sets.running import Owner, RunningBounds, RunningSet

__all__ = [
    "CentredSet",
    "ConfidenceSet",
    "EllipsoidSet",
    "Event",
    "IntersectionSet",
    "Interval",
    "LikelihoodRatioSet",
    "Owner",
    "RunningBounds",
    "RunningSet",
]
