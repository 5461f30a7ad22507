"""Comparisons in pairs: preference sets, duels, leaderboards.

A pair (a, b, winner) is one Bernoulli row ``(x_a - x_b)/2`` in a ball of radius 2 S; ties are half
a win. Choices out of more than two (slates, multinomial outcomes) are not covered.
"""

from torchglb.preferences.battles import Battles, battles_of, read_battles
from torchglb.preferences.leaderboard import Battle, Leaderboard, leaderboard

__all__ = ["Battle", "Battles", "Leaderboard", "battles_of", "leaderboard", "read_battles"]
