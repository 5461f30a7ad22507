"""What a record says: tables for a terminal, a self-contained HTML file, comparisons."""

from torchglb.report.html import write_report
from torchglb.report.leaderboard import leaderboard_text, write_leaderboard
from torchglb.report.statistics import MeanError, Paired, binomial_interval, estimate, holm, paired
from torchglb.report.summary import RunSummary, summarise
from torchglb.report.tables import compare, table

__all__ = [
    "MeanError",
    "Paired",
    "RunSummary",
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
