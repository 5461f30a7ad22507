"""What sums over rows may have lost, for the certificates that rest on compiled sums.

A sum is off by at most so many roundings times eps times the sum of the absolute values of its
terms. There are three sources. A term itself: z is a sum of d products, and exp, log1p and the few
operations after them err by some units in the last place, :data:`TERM`. A pass: chunks of
:data:`~torchglb.families.row_terms.CHUNK` rows are summed in any order, and the chunks one after
the other with compensation, which loses two roundings however many there are. A carried sum: a loss
or a gradient is compensated too; a higher derivative is added to plainly, one rounding per row.
"""

from __future__ import annotations

from torchglb.backend import entry
from torchglb.families.row_terms import CHUNK

#: of one term, but for the d of its inner product
TERM = 24.0


@entry
def compensated(dim: int) -> float:
    """Roundings of a carried or a passed loss or gradient, whatever the number of rows."""
    return CHUNK + TERM + 4.0 + dim


@entry
def plain(dim: int, rows: float) -> float:
    """Roundings of a higher derivative after so many rows."""
    return CHUNK + TERM + 4.0 + dim + rows
