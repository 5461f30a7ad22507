"""Comparisons in pairs: preference sets, duels, leaderboards.

A pair (a, b, winner) is one Bernoulli row ``(x_a - x_b)/2`` in a ball of radius 2 S; ties are half
a win. Choices out of more than two (slates, multinomial outcomes) are not covered.
"""

from torchglb.preferences.battles import Battles, battles_of, read_battles
from torchglb.preferences.duels import DuelResult, DuelWorld, compare_duels, play_duels
from torchglb.preferences.leaderboard import Battle, Leaderboard, leaderboard
from torchglb.preferences.pair_arms import Duels
from torchglb.preferences.pair_head import PairHead
from torchglb.preferences.pair_policies import (
    PAIR_POLICIES,
    Pair,
    PairPolicy,
    in_race,
    make_pair_policy,
)
from torchglb.preferences.pairs import PairHistory, PreferenceSequence, PreferenceSet
from torchglb.preferences.widest import WidestPair, widest_pair

__all__ = [
    "PAIR_POLICIES",
    "Battle",
    "Battles",
    "DuelResult",
    "DuelWorld",
    "Duels",
    "Leaderboard",
    "Pair",
    "PairHead",
    "PairHistory",
    "PairPolicy",
    "PreferenceSequence",
    "PreferenceSet",
    "WidestPair",
    "battles_of",
    "compare_duels",
    "in_race",
    "leaderboard",
    "make_pair_policy",
    "play_duels",
    "read_battles",
    "widest_pair",
]
