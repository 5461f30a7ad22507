"""Random numbers by counting: each replicate has its own stream, whatever batch it runs in.

A draw is a hash of (seed, replicate, counter, entry), by the finaliser of SplitMix64, so all
replicates draw at once, on any device, and a replicate draws the same numbers alone, in a batch of
forty, or after being moved within it. One generator per replicate would need a loop over them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchglb.checks import check_shape, refuse

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB


class RandomStreams:
    """Independent streams of random numbers, one per replicate.

    Args:
        seed: the seed of all streams.
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
        replicates: Tensor | None,
        device: torch.device,
    ) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise refuse("seed", "an integer", repr(seed))
        shape = torch.Size(batch_shape)
        if replicates is None:
            replicates = torch.arange(shape.numel(), device=device).reshape(shape)
        check_shape("replicates", replicates, shape)
        self.seed = seed
        self._names = replicates.to(device=device, dtype=torch.int64)
        self._keys = _mix(_mix(self._names * _GOLDEN + (seed % 2**62)) + _FIRST)
        self._count = 0

    def uniform(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Uniform numbers strictly inside (0, 1), of shape ``(*B, *shape)``."""
        drawn = self.uniform_at(self._count, *shape, dtype=dtype)
        self._count += torch.Size(shape).numel()
        return drawn

    def uniform_at(self, position: int, *shape: int, dtype: torch.dtype) -> Tensor:
        """The numbers that :meth:`uniform` gives from a position on; the streams do not move."""
        counter = torch.arange(torch.Size(shape).numel(), device=self._keys.device) + position
        bits = _mix(self._keys[..., None] + counter * _GOLDEN)
        # the upper 53 bits, centred in their cells; the last cell's centre would round to 1
        fraction = ((_shift(bits, 11).to(torch.float64) + 0.5) * 2.0**-53).clamp_max(1 - 2.0**-53)
        return fraction.reshape((*self._keys.shape, *shape)).to(dtype)

    def normal(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Standard normal numbers of shape ``(*B, *shape)``."""
        uniform = self.uniform(*shape, dtype=torch.float64)
        return torch.special.ndtri(uniform).to(dtype)

    def state_dict(self) -> dict[str, Any]:
        """Seed, names and position of the streams."""
        return {"seed": self.seed, "replicates": self._names.clone(), "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved position."""
        self.__init__(  # type: ignore[misc]
            int(state["seed"]), tuple(self._names.shape), state["replicates"], self._names.device
        )
        self._count = int(state["count"])


def derived_seed(seed: int, purpose: str) -> int:
    """A seed of its own for everything that is random: arms, rewards, each policy.

    Example:
        >>> derived_seed(0, "arms") == derived_seed(0, "rewards")
        False
    """
    digest = hashlib.sha256(f"{seed} {purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2  # below 2^62, as RandomStreams wants it


def _shift(value: Tensor, bits: int) -> Tensor:
    """A logical shift to the right of signed 64-bit numbers."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mix(value: Tensor) -> Tensor:
    """The finaliser of SplitMix64: every output bit depends on every input bit."""
    value = (value ^ _shift(value, 30)) * _FIRST
    value = (value ^ _shift(value, 27)) * _SECOND
    return value ^ _shift(value, 31)
