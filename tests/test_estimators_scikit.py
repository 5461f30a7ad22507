"""scikit-learn's own contract, and what the estimators promise beyond it."""

import numpy as np
import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from torchglb.estimators.scikit import GLMClassifier, GLMRegressor


@parametrize_with_checks([GLMClassifier(), GLMRegressor()])
def test_scikit_learn_contract(estimator, check):
    check(estimator)
