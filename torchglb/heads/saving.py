"""Saved heads: what was computed with which network, and loads that fail without a trace."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchglb.checks import refuse
from torchglb.policies.saving import taken
from torchglb.recording import is_transformed
from torchglb.sequence import ConfidenceSequence

#: the same network embeds one context and many with other roundings, but not with more than these
ROUNDINGS = 4096


@dataclass(frozen=True)
class Computed:
    """A confidence sequence and an estimate that are those of one network.

    Attributes:
        network: its :func:`fingerprint`.
        sequence: of the features of all observations.
        theta: the estimate ``(*B, d)``, if it was asked for.
    """

    network: str | None
    sequence: ConfidenceSequence
    theta: Tensor | None

    def state_dict(self) -> dict[str, Any]:
        """As plain tensors, numbers and words."""
        return {
            "network": self.network,
            "sequence": self.sequence.state_dict(),
            "theta": None if self.theta is None else self.theta.clone(),
        }

    @classmethod
    def of(cls, state: Mapping[str, Any], empty: ConfidenceSequence, rows: int) -> Computed:
        """From a saved state, which is checked.

        Args:
            state: of :meth:`state_dict`.
            empty: a sequence of the head's settings, which continues from the state.
            rows: how many observations the head has.
        """
        empty.load_state_dict(state["sequence"])
        if len(empty) != rows:
            raise refuse("state['computed']", f"features of {rows} observations", len(empty))
        if state["theta"] is None:
            return cls(state["network"], empty, None)
        like = empty.history.X.new_zeros((*empty.history.batch_shape, empty.history.dim))
        return cls(state["network"], empty, taken(state, "theta", like))

    def is_of(self, module: nn.Module, embed: Callable[[], Tensor]) -> bool:
        """Whether this network is the one, by its fingerprint and by what it does.

        The same layers and weights may be put to another use, which no fingerprint shows.

        Args:
            module: the network.
            embed: the features ``(*B, n, d)`` of the observations.
        """
        if self.network is None or self.network != fingerprint(module):
            return False
        dtypes = [p.dtype for p in module.parameters() if p.is_floating_point()]
        (X, _, w), features = self.sequence.history.view(), embed()
        if X.shape != features.shape:  # a share of the rows: the others are on other ranks
            return False
        roundings = ROUNDINGS * torch.finfo(dtypes[0] if dtypes else features.dtype).eps
        same = ((X - features).abs() <= roundings).all(-1)
        return bool((same if w is None else same | (w == 0)).all())  # masked rows are 0


def fingerprint(module: nn.Module) -> str | None:
    """A word for the layers, modes, weights and buffers of a network; None if they are not to see.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> before = fingerprint(layer)
        >>> with torch.no_grad():
        ...     _ = layer.bias.add_(1.0)
        >>> fingerprint(layer) == before
        False
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    if any(is_transformed(t) or t.is_meta or t.layout is not torch.strided for _, t in named):
        return None
    digest = hashlib.blake2b(repr(module).encode(), digest_size=16)
    for part in module.modules():
        digest.update(f"{type(part).__qualname__} {part.training}".encode())
    for name, tensor in named:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        entries = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(entries.numpy().data)
    return digest.hexdigest()


@contextmanager
def unchanged_on_failure(module: nn.Module) -> Iterator[None]:
    """Whatever goes wrong inside leaves the module and its parts as they were, weights included.

    Torch alone would have loaded all that came before the fault.
    """
    held = ("_parameters", "_buffers", "_modules")
    kept = [(m, vars(m) | {name: vars(m)[name].copy() for name in held}) for m in module.modules()]
    values = [(t, t.detach().clone()) for t in (*module.parameters(), *module.buffers())]
    try:
        yield
    except BaseException:
        for part, attributes in kept:
            vars(part).update(attributes)
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)
        raise
