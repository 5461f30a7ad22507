"""What the server has done before workers are forked from it: loaded what all of them need.

Besides the package, that is what Numba imports when the first compiled function is called, so one
is called here; half a second that every worker would spend.
"""

import torch

from torchglb.random_streams import RandomStreams
from torchglb.simulate import processes  # noqa: F401  whose functions the workers run

RandomStreams(0, (), None, torch.device("cpu")).uniform(1, dtype=torch.float64)
