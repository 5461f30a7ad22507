"""Random numbers by counting: each replicate has its own stream, whatever batch it runs in.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011),
the one of torch on CUDA devices. It is a bijection of the 128-bit counter for every 64-bit key.
Here the key is the seed, and the counter is (position, replicate): no two replicates ever share a
block, all draw at once, and a replicate draws the same numbers alone, in a batch of forty, or after
being moved within it. A generator with a state would need a loop over the replicates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.backend import Floats, Ints, entry, kernel
from torchglb.checks import as_indices, check_shape, refuse

#: the name of the generator, as states and records carry it, and the one of those without a name
GENERATOR, EARLIER_GENERATOR = "philox4x32-10", "splitmix64"
#: rounds of Philox, its two multipliers, the increments of its keys, and the mask of a 32-bit word
ROUNDS = 10
FIRST_MULTIPLIER, SECOND_MULTIPLIER = 0xD2511F53, 0xCD9E8D57
FIRST_INCREMENT, SECOND_INCREMENT = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF


def philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> tuple[Any, Any, Any, Any]:
    """The four output words of a counter of four 32-bit words under a key of two.

    Words are kept in 64-bit integers. The same lines serve Python's integers, Numba's, and tensors:
    a product of two words that overflows to a negative number still has the right 64 bits, and the
    mask takes off what the shift drags in.
    """
    for _ in range(ROUNDS):
        first, second = c0 * FIRST_MULTIPLIER, c2 * SECOND_MULTIPLIER
        c0, c1, c2, c3 = (
            ((second >> 32) & WORD) ^ c1 ^ k0,
            second & WORD,
            ((first >> 32) & WORD) ^ c3 ^ k1,
            first & WORD,
        )
        k0, k1 = (k0 + FIRST_INCREMENT) & WORD, (k1 + SECOND_INCREMENT) & WORD
    return c0, c1, c2, c3


_compiled_philox = kernel(philox)


@entry
def _draw(names: Ints, seed: Ints, position: int, drawn: Floats) -> None:
    """Fills ``drawn (N, k)`` with the numbers of N streams from a position on."""
    k0, k1 = int(seed[0]), int(seed[1])
    for i in range(drawn.shape[0]):
        n0, n1 = int(names[i]) & WORD, (int(names[i]) >> 32) & WORD
        w0, w1, w2, w3 = 0, 0, 0, 0
        for j in range(drawn.shape[1]):
            place = position + j
            block = place >> 1  # of two numbers
            if j == 0 or place & 1 == 0:
                w0, w1, w2, w3 = _compiled_philox(block & WORD, block >> 32, n0, n1, k0, k1)
            low, high = (w2, w3) if place & 1 else (w0, w1)
            drawn[i, j] = (((high << 21) | (low >> 11)) + 0.5) * 2.0**-53


class RandomStreams:
    """Independent streams of random numbers, one per replicate.

    Args:
        seed: the seed of all streams; its lowest 64 bits are used.
        batch_shape: ``*B``.
        replicates: integer names of the replicates, ``(*B)``; by default 0, 1, 2, ...
        device: where the numbers are drawn.

    Example:
        >>> RandomStreams(0, (2,), None, torch.device("cpu")).normal(3, dtype=torch.float64).shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        seed: int,
        batch_shape: tuple[int, ...],
        replicates: ArrayLike | None,
        device: torch.device,
    ) -> None:
        seed = check_seed(seed)
        shape = torch.Size(batch_shape)
        if replicates is None:
            names = torch.arange(shape.numel(), device=device).reshape(shape)
        elif isinstance(replicates, Tensor):
            names = as_indices("replicates", replicates, replicates.device).to(device).clone()
        else:
            names = as_indices("replicates", replicates, device)
        check_shape("replicates", names, shape)
        self.seed = seed
        self._names = names
        self._key = seed & WORD, (seed >> 32) & WORD
        self._count = 0

    def uniform(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Uniform numbers strictly inside (0, 1), of shape ``(*B, *shape)``."""
        drawn = self.uniform_at(self._count, *shape, dtype=dtype)
        self._count += torch.Size(shape).numel()
        return drawn

    def uniform_at(self, position: int, *shape: int, dtype: torch.dtype) -> Tensor:
        """The numbers that :meth:`uniform` gives from a position on; the streams do not move."""
        count = torch.Size(shape).numel()
        draw = self._on_host if self._names.is_cpu else self._on_device
        # centres of 2^53 cells; the last one's rounds to 1, in float32 those of many cells do
        below_one = 1.0 - torch.finfo(dtype).eps / 2
        drawn = draw(position, count).to(dtype).clamp_max(below_one)
        return drawn.reshape((*self._names.shape, *shape))

    def _on_host(self, position: int, count: int) -> Tensor:
        """Numbers ``(N, count)`` by compiled code."""
        drawn = np.empty((self._names.numel(), count))
        names = self._names.reshape(-1).contiguous().numpy()
        _draw(names, np.array(self._key), position, drawn)
        return torch.from_numpy(drawn)

    def _on_device(self, position: int, count: int) -> Tensor:
        """The same numbers ``(*B, count)`` by tensor operations."""
        names = self._names[..., None]
        place = torch.arange(count, device=names.device) + position
        block = place >> 1
        words = philox(block & WORD, block >> 32, names & WORD, (names >> 32) & WORD, *self._key)
        odd = (place & 1).bool()
        low, high = torch.where(odd, words[2], words[0]), torch.where(odd, words[3], words[1])
        return (((high << 21) | (low >> 11)).to(torch.float64) + 0.5) * 2.0**-53

    def normal(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Standard normal numbers of shape ``(*B, *shape)``."""
        uniform = self.uniform_at(self._count, *shape, dtype=torch.float64)
        drawn = torch.special.ndtri(uniform).to(dtype)
        self._count += torch.Size(shape).numel()  # last: what is interrupted draws nothing
        return drawn

    def state_dict(self) -> dict[str, Any]:
        """Generator, seed, names and position of the streams."""
        return {
            "generator": GENERATOR,
            "seed": self.seed,
            "replicates": self._names.clone(),
            "count": self._count,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved position.

        Raises:
            InputError: if another generator made the numbers so far.
        """
        made_by = state.get("generator", EARLIER_GENERATOR)
        if made_by != GENERATOR:
            raise refuse("state", f"one whose random numbers are of {GENERATOR}", made_by)
        loaded = RandomStreams(
            int(state["seed"]), tuple(self._names.shape), state["replicates"], self._names.device
        )
        loaded._count = int(state["count"])
        vars(self).update(vars(loaded))  # all of it, or nothing


def check_seed(seed: object) -> int:
    """A whole number of any size."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise refuse("seed", "an integer", repr(seed))
    return int(seed)


def derived_seed(seed: int, purpose: str) -> int:
    """A seed of its own for everything that is random: arms, rewards, each policy.

    Example:
        >>> derived_seed(0, "arms") == derived_seed(0, "rewards")
        False
    """
    digest = hashlib.sha256(f"{seed} {purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2  # 62 bits: a non-negative int64 in every record
