"""The radii of the library keep the contract that plugin authors inherit."""

import torchglb as glb
from torchglb import radii, testing


class TestLipschitz(testing.RadiusContract):
    radius = radii.Lipschitz(constant="data")
    families = (glb.Bernoulli(), glb.Gaussian(0.5))


class TestMeanLoss(testing.RadiusContract):
    radius = radii.MeanLoss()


class TestPACBayes(testing.RadiusContract):
    radius = radii.PACBayes()
    families = (glb.Bernoulli(), glb.Poisson())


class TestGaussianPrior(testing.RadiusContract):
    radius = radii.GaussianPrior()


class TestMixture(testing.RadiusContract):
    radius = radii.Mixture()
