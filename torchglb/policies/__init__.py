"""Bandit policies for batches of replicates: ``make(name, family=, domain=, ...)``.

Every module below registers its policies when it is imported.
"""

from torchglb.policies import (
    ada_ofu_ecolog,
    emk,
    evill,
    glb_omd,
    glm_ucb,
    gloc,
    greedy,
    log_ucb_1,
    lucb_contrast,
    ofuglb,
    ofuglb_contrast,
    ofuglb_e,
    ofuglb_pb,
    oful,
    oful_contrast,
    ofulog_plus,
    ofulog_r,
    ol2m,
    oracle,
    random_choice,
    rs_glincb,
    ts,
)
from torchglb.policies.ada_ofu_ecolog import AdaOFUECOLog
from torchglb.policies.base import Policy
from torchglb.policies.conservative import Conservative
from torchglb.policies.emk import EMK
from torchglb.policies.evill import EVILL, EVILLTheory
from torchglb.policies.glb_omd import GLBOMD, GLBOMDRealised, GLBOMDRows
from torchglb.policies.glm_ucb import GLMUCB
from torchglb.policies.gloc import GLOC
from torchglb.policies.greedy import Greedy
from torchglb.policies.log_ucb_1 import LogUCB1
from torchglb.policies.ofuglb import OFUGLB
from torchglb.policies.ofuglb_e import OFUGLBE
from torchglb.policies.ofuglb_pb import OFUGLBPB
from torchglb.policies.oful import OFUL
from torchglb.policies.ofulog_plus import OFULogPlus
from torchglb.policies.ofulog_r import OFULogR
from torchglb.policies.ol2m import OL2M
from torchglb.policies.oracle import Oracle
from torchglb.policies.random_choice import RandomChoice
from torchglb.policies.registry import (
    available,
    make,
    options_of,
    playing_the_ball,
    register,
    requirements_of,
    summary_of,
)
from torchglb.policies.requirements import Requirements
from torchglb.policies.rs_glincb import RSGLinCB
from torchglb.policies.ts import ThompsonSampling

__all__ = [
    "EMK",
    "EVILL",
    "GLBOMD",
    "GLMUCB",
    "GLOC",
    "OFUGLB",
    "OFUGLBE",
    "OFUGLBPB",
    "OFUL",
    "OL2M",
    "AdaOFUECOLog",
    "Conservative",
    "EVILLTheory",
    "GLBOMDRealised",
    "GLBOMDRows",
    "Greedy",
    "LogUCB1",
    "OFULogPlus",
    "OFULogR",
    "Oracle",
    "Policy",
    "RSGLinCB",
    "RandomChoice",
    "Requirements",
    "ThompsonSampling",
    "ada_ofu_ecolog",
    "available",
    "emk",
    "evill",
    "glb_omd",
    "glm_ucb",
    "gloc",
    "greedy",
    "log_ucb_1",
    "lucb_contrast",
    "make",
    "ofuglb",
    "ofuglb_contrast",
    "ofuglb_e",
    "ofuglb_pb",
    "oful",
    "oful_contrast",
    "ofulog_plus",
    "ofulog_r",
    "ol2m",
    "options_of",
    "oracle",
    "playing_the_ball",
    "random_choice",
    "register",
    "requirements_of",
    "rs_glincb",
    "summary_of",
    "ts",
]
