"""Tests and intervals: e-values that survive peeking, and fixed-sample profile likelihoods."""

from torchglb.inference.profile import FixedSampleInterval, profile_interval
from torchglb.inference.tests import RunningTest, TestResult, e_bh, likelihood_ratio_test

__all__ = [
    "FixedSampleInterval",
    "RunningTest",
    "TestResult",
    "e_bh",
    "likelihood_ratio_test",
    "profile_interval",
]
