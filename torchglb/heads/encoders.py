"""One encoder for every replicate of a batch, all of them run and trained at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from torchglb.checks import refuse
from torchglb.heads.embedding import in_dtype_of
from torchglb.policies.saving import taken
from torchglb.random_streams import RandomStreams


class EncoderStack:
    """N encoders of one architecture: every parameter has a leading axis of length N.

    Args:
        base: the architecture, in evaluation mode; its own parameters are not used.
        parameters: by name, ``(N, ...)``.
        buffers: by name, ``(N, ...)``.
    """

    def __init__(
        self, base: nn.Module, parameters: dict[str, Tensor], buffers: dict[str, Tensor]
    ) -> None:
        self.base, self.parameters, self.buffers = base, parameters, buffers

    @classmethod
    def start(
        cls,
        encoder: nn.Module | Callable[[], nn.Module],
        streams: RandomStreams,
        device: torch.device,
    ) -> EncoderStack:
        """The encoders at the beginning.

        Args:
            encoder: a module that all begin with, or a function that builds one with random
                numbers of torch; each replicate then has a seed of its own.
            streams: gives the replicates and their seeds.
            device: where the parameters must be.
        """
        draws = streams.uniform(1, dtype=torch.float64)[..., 0].reshape(-1)
        if isinstance(encoder, nn.Module):
            # its tensors are stacked below, not used: only the structure is copied
            tensors = {id(t): t for t in (*encoder.parameters(), *encoder.buffers())}
            base = copy.deepcopy(encoder, tensors)
            modules = [base] * len(draws)
        elif callable(encoder):
            modules = [_built(encoder, int(draw * 2**53)) for draw in draws.tolist()]
            base = modules[0]
        else:
            raise refuse("encoder", "an nn.Module or a function", type(encoder).__name__)
        base.eval()
        for name, tensor in (*base.named_parameters(), *base.named_buffers()):
            if tensor.device != device:
                place = f"parameters on device {device}"
                raise refuse(
                    f"encoder {type(base).__name__}", place, f"{name} on device {tensor.device}"
                )
        trains = {name: p.requires_grad for name, p in base.named_parameters()}
        parameters = _stacked(dict(m.named_parameters()) for m in modules)
        for name, stack in parameters.items():
            stack.requires_grad_(trains[name])
        return cls(base, parameters, _stacked(dict(m.named_buffers()) for m in modules))

    @property
    def name(self) -> str:
        """What refusals call it."""
        return type(self.base).__name__

    def __call__(self, contexts: Tensor) -> Tensor:
        """What the encoders return, ``(N, K, d)``, for contexts ``(N, K, *E)`` of their own."""

        def run(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
            found = functional_call(self.base, (parameters, buffers), (x,))
            if not isinstance(found, Tensor):
                raise refuse(f"encoder {self.name}", "a tensor of features", type(found).__name__)
            return found

        contexts = in_dtype_of(contexts, self.parameters.values())
        found: Tensor = torch.vmap(run)(self.parameters, self.buffers, contexts)
        return found

    def trainable(self) -> list[Tensor]:
        """The parameters that require grad."""
        return [stack for stack in self.parameters.values() if stack.requires_grad]

    def module(self, replicate: int = 0) -> nn.Module:
        """The encoder of one replicate, as a module of its own."""
        found = copy.deepcopy(self.base)
        tensors = {k: v[replicate].detach() for k, v in (self.parameters | self.buffers).items()}
        found.load_state_dict(tensors, strict=False)  # buffers that are not saved come next
        for name, buffer in found.named_buffers():
            buffer.copy_(tensors[name])
        return found

    def clone(self) -> EncoderStack:
        """The same encoders in memory of their own."""
        return self.restored(self.state_dict())

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """All parameters and buffers."""
        return {
            "parameters": {k: v.detach().clone() for k, v in self.parameters.items()},
            "buffers": {k: v.clone() for k, v in self.buffers.items()},
        }

    def restored(self, state: Mapping[str, Any]) -> EncoderStack:
        """Encoders of this architecture with saved parameters."""
        for kind, mine in (("parameters", self.parameters), ("buffers", self.buffers)):
            if set(state[kind]) != set(mine):
                expected = f"the {kind} {sorted(mine)}"
                raise refuse(f"state['encoders'][{kind!r}]", expected, sorted(state[kind]))
        parameters = {
            name: taken(state["parameters"], name, stack).requires_grad_(stack.requires_grad)
            for name, stack in self.parameters.items()
        }
        buffers = {name: taken(state["buffers"], name, b) for name, b in self.buffers.items()}
        return EncoderStack(self.base, parameters, buffers)


def _built(encoder: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A module built with the random numbers of a seed; torch's own state stays as it was."""
    devices = range(
        torch.cuda.device_count()
    )  # named: torch would ask any other backend for its own
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        module = encoder()
    if not isinstance(module, nn.Module):
        raise refuse("encoder", "a function that returns an nn.Module", type(module).__name__)
    return module


def _stacked(tensors: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    every = list(tensors)
    names = every[0] if every else {}
    return {name: torch.stack([one[name].detach() for one in every]) for name in names}
