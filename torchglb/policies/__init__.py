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
    ofuglb_e,
    ofuglb_pb,
    oful,
    ofulog_plus,
    ofulog_r,
    ol2m,
    oracle,
    random_choice,
    rs_glincb,
    ts,
)
from torchglb.policies.base import Policy, Requirements
from torchglb.policies.registry import (
    available,
    make,
    options_of,
    playing_the_ball,
    register,
    requirements_of,
    summary_of,
)

__all__ = [
    "Policy",
    "Requirements",
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
    "ofuglb_e",
    "ofuglb_pb",
    "oful",
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
