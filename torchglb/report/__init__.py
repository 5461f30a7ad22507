"""What a record says: tables for a terminal, a self-contained HTML file, comparisons."""

from torchglb.report.html import write_report
from torchglb.report.leaderboard import leaderboard_text, write_leaderboard
from torchglb.report.statistics import Estimate, Paired, binomial_interval, estimate, holm, paired
from torchglb.report.summary import Summary, summarise
from torchglb.report.tables import compare, table

__all__ = [
    "Estimate",
    "Paired",
    "Summary",
    "binomial_interval",
    "compare",
    "estimate",
    "holm",
    "leaderboard_text",
    "paired",
    "summarise",
    "table",
    "write_leaderboard",
    "write_report",
]
