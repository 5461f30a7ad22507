"""The exact policies and OFUGLB-e: the contract, and what each claims beyond it."""

from __future__ import annotations

from policy_contract import PolicyContract

from torchglb.families import Bernoulli, Gaussian, Poisson

ALL = (Bernoulli(), Gaussian(0.5), Poisson())
REST = (Gaussian(0.5), Poisson())


class TestOFUGLB(PolicyContract):
    name = "ofuglb"
    families = ALL


class TestOFUGLBPB(PolicyContract):
    name = "ofuglb-pb"
    families = ALL


class TestOFUGLBE(PolicyContract):
    name = "ofuglb-e"
    families = ALL


class TestOFUGLBEFixedPoint(PolicyContract):
    name = "ofuglb-e"
    options = {"ellipsoid": "fixed_point"}  # noqa: RUF012


class TestEMK(PolicyContract):
    name = "emk"
    families = ALL


class TestEMKFTRL(PolicyContract):
    name = "emk"
    options = {"regularizer": "ftrl"}  # noqa: RUF012


class TestOFULogPlus(PolicyContract):
    name = "ofulog+"
    uncovered = REST


class TestOFULogR(PolicyContract):
    name = "ofulog-r"
    uncovered = REST
