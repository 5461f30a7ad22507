"""``torchglb analyse``: a file in; coefficients, a report and figures out."""

from torchglb.analyse.command import add_command, analyse
from torchglb.analyse.files import read_table
from torchglb.analyse.follow import Follower

__all__ = ["Follower", "add_command", "analyse", "read_table"]
