"""GLM heads around any network: bounded features, calibrated predictions, a learning policy."""

from torchglb.heads.frozen import FrozenHead, Served
from torchglb.heads.glm_head import GLMHead
from torchglb.heads.neural_policy import NeuralPolicy
from torchglb.heads.unit_ball import UnitBall

__all__ = ["FrozenHead", "GLMHead", "NeuralPolicy", "Served", "UnitBall"]
