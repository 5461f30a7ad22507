"""From raw contexts to checked features, and the raw observations that are kept for another time.

A context has ``context_dims`` axes of its own, ``*E`` (one for a vector, three for an image).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from torchglb.array_like import ArrayLike
from torchglb.checks import (
    ValueChecks,
    as_device,
    as_like,
    check_count,
    check_dtype,
    check_shape,
    real_entries,
    refuse,
)
from torchglb.errors import InputError, TrainingModeWarning
from torchglb.heads.unit_ball import UnitBall
from torchglb.recording import is_transformed
from torchglb.rows.checks import as_weights


@dataclass(frozen=True)
class Door:
    """The checks between an encoder and the GLM.

    Args:
        name: of the encoder, as refusals call it.
        dim: d, the number of features it must return.
        ball: what maps them into the unit ball.
        validate: look at values.
    """

    name: str
    dim: int
    ball: UnitBall
    validate: bool

    def admit(
        self, raw: object, lead: tuple[int, ...], like: Tensor, contexts: Tensor | None = None
    ) -> Tensor:
        """The features ``(*lead, d)`` in the unit ball, of what the encoder returned.

        Args:
            raw: what it returned.
            lead: the leading axes it was given.
            like: gives dtype and device.
            contexts: of which it made that, to be named where they are not finite themselves.
        """
        name = f"encoder {self.name}"
        if not isinstance(raw, Tensor):
            raise refuse(name, "a tensor of features", type(raw).__name__)
        if not raw.is_floating_point():
            raise refuse(name, "features of a floating-point dtype", raw.dtype)
        if torch.promote_types(raw.dtype, like.dtype) == like.dtype:
            raw = raw.to(like.dtype)  # what half precision lost, it lost in the network
        if raw.device != like.device:
            raise refuse(name, f"features on device {like.device}", f"device {raw.device}")
        if tuple(raw.shape) != (*lead, self.dim):
            width = f"features of shape {(*lead, self.dim)}, d = {self.dim} being that of the ball"
            raise refuse(name, width, f"shape {tuple(raw.shape)}")
        features: Tensor = self.ball(raw)
        if features.dtype != like.dtype:
            wanted = f"features of dtype {like.dtype} (UnitBall(dtype=...) converts)"
            raise refuse(name, wanted, raw.dtype)
        if self.validate and not is_transformed(features):
            checks = ValueChecks()
            checks.finite(name, features)
            try:
                checks.settle()
            except InputError:
                if contexts is not None:  # an encoder may replace what is not finite
                    checks = ValueChecks()
                    checks.finite("contexts", contexts)
                    checks.settle()
                raise
        return features


def in_dtype_of(contexts: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """Contexts as a network takes them: floats in the dtype of its parameters."""
    takes = next((p.dtype for p in parameters if p.is_floating_point()), None)
    return contexts.to(takes) if takes is not None and contexts.is_floating_point() else contexts


def at_least_float32(raw: Tensor) -> Tensor:
    """What half precision lost, it lost in the network: a map of features computes in more."""
    return raw.float() if raw.dtype in (torch.float16, torch.bfloat16) else raw


def warn_of_training_mode(module: nn.Module) -> None:
    """Warns of layers whose output, in the mode they are in, is no function of the context."""
    if not module.training:  # parts that are trained alone are meant so
        return
    for name, part in module.named_modules():
        drops = isinstance(part, _DropoutNd) and part.p > 0
        if part.training and (drops or isinstance(part, _BatchNorm)):
            warnings.warn(
                f"{name} ({type(part).__name__}) is in training mode: features are random or depend"
                " on their companions, and intervals mean nothing; call eval() first",
                TrainingModeWarning,
                stacklevel=4,
            )
            return


class Observations(nn.Module):
    """Raw contexts ``(*B, n, *E)``, rewards and weights ``(*B, n)``, in growing buffers.

    A module, so that it moves with the module it is part of.

    Args:
        batch_shape: ``*B``.
        context_dims: the number of axes of one context.
        newest: how many observations are kept, the newest ones; all if None.
        dtype: of the rewards.
        device: of everything.
    """

    contexts: Tensor
    rewards: Tensor
    weights: Tensor

    def __init__(
        self,
        batch_shape: tuple[int, ...],
        context_dims: int,
        newest: int | None,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.batch_shape = torch.Size(batch_shape)
        self.context_dims = check_count("context_dims", context_dims)
        self.newest = newest if newest is None else check_count("replay", newest, least=1)
        check_dtype(dtype)
        rewards = torch.zeros((*self.batch_shape, 0), dtype=dtype, device=as_device(device))
        self.register_buffer("rewards", rewards, persistent=False)
        self.register_buffer("weights", rewards.clone(), persistent=False)
        self.register_buffer("contexts", rewards.clone(), persistent=False)
        self.unit_weights = True  # every weight so far is 1
        self._first, self._end = 0, 0

    def __len__(self) -> int:
        """The number of observations kept, per problem."""
        return self._end - self._first

    @property
    def known(self) -> bool:
        """Whether the shape of a context is known."""
        return self._end > 0

    def rows(self) -> tuple[Tensor, Tensor]:
        """Contexts ``(*B, n, *E)`` and rewards ``(*B, n)``, oldest first."""
        return self._kept(self.contexts), self._kept(self.rewards)

    def row_weights(self) -> Tensor | None:
        """The weights ``(*B, n)`` of :meth:`rows`; None where all are 1."""
        return None if self.unit_weights else self._kept(self.weights)

    def _kept(self, buffer: Tensor) -> Tensor:
        return buffer.narrow(len(self.batch_shape), self._first, len(self))

    def as_contexts(self, given: ArrayLike, what: str = "contexts") -> Tensor:
        """A tensor of whatever holds numbers, of the dtype of earlier contexts."""
        kept = self.contexts
        if isinstance(given, Tensor):
            contexts = given
        else:
            parts = list(given) if isinstance(given, list | tuple) else []
            entries = None
            if not any(isinstance(part, Tensor) for part in parts):
                entries = real_entries(what, given)
            try:
                if entries is None:
                    contexts = torch.stack(list(map(torch.as_tensor, parts)))
                else:
                    # a copy, which may be written to
                    contexts = torch.from_numpy(entries.astype(entries.dtype.newbyteorder("=")))
                contexts = contexts.to(kept.device)
            except (TypeError, ValueError, RuntimeError) as error:
                got = f"{type(given).__name__} ({error})"
                raise refuse(what, "a tensor or numbers", got) from None
        if self.known and contexts.dtype != kept.dtype and contexts.device == kept.device:
            if not kept.is_floating_point():  # indices, say, which no float stands for
                raise refuse(what, f"the dtype of earlier contexts ({kept.dtype})", contexts.dtype)
            contexts = as_like(what, contexts, kept)
        return contexts

    def check(self, contexts: Tensor, what: str = "contexts") -> bool:
        """Refuses contexts that do not fit; returns whether they are one per problem, not K."""
        batch, dims = tuple(self.batch_shape), self.context_dims
        if contexts.device != self.rewards.device:
            place = f"a tensor on device {self.rewards.device}"
            raise refuse(what, place, f"device {contexts.device}")
        single = contexts.ndim == len(batch) + dims
        own = contexts.shape[contexts.ndim - dims :] if contexts.ndim >= dims else ("*E",)
        if self.known:
            own = self.contexts.shape[len(batch) + 1 :]
            if contexts.dtype != self.contexts.dtype:
                wanted = f"the dtype of earlier contexts ({self.contexts.dtype})"
                raise refuse(what, wanted, contexts.dtype)
        check_shape(what, contexts, (*batch, *own) if single else (*batch, "K", *own))
        return single

    def weighted(
        self, contexts: Tensor, rewards: Tensor, weight: ArrayLike | None, mask: ArrayLike | None
    ) -> tuple[Tensor, Tensor | None]:
        """Contexts ``(*B, k, *E)``, 0 where there is no reward, and weights ``(*B, k)``, if any."""
        if weight is None and mask is None:
            return contexts, None
        w = as_weights(rewards, weight, mask, tuple(self.batch_shape))
        seen = (w > 0).reshape(w.shape + (1,) * self.context_dims)
        return torch.where(seen, contexts, torch.zeros_like(contexts)), w

    def append(self, contexts: Tensor, rewards: Tensor, weights: Tensor | None = None) -> None:
        """Keeps ``contexts (*B, k, *E)``, ``rewards`` and ``weights (*B, k)`` that are checked."""
        axis, count = len(self.batch_shape), rewards.shape[-1]
        if not self.known:
            self.contexts = contexts.new_zeros((*self.batch_shape, 0, *contexts.shape[axis + 1 :]))
        if self._end + count > self.rewards.shape[-1]:
            self._make_room(count)
        if weights is not None:
            rewards = torch.where(weights > 0, rewards, 0.0)
            self.unit_weights = self.unit_weights and bool((weights == 1).all())
        ones = torch.ones_like(rewards) if weights is None else weights
        pairs = ((self.contexts, contexts), (self.rewards, rewards), (self.weights, ones))
        for buffer, rows in pairs:
            buffer.narrow(axis, self._end, count).copy_(rows.detach())
        self._end += count
        if self.newest is not None:
            self._first = max(self._first, self._end - self.newest)

    def mark(self) -> tuple[Tensor, Tensor, Tensor, int, int, bool]:
        """Where the observations stand, for :meth:`reset`; costs nothing."""
        buffers = self.contexts, self.rewards, self.weights
        return (*buffers, self._first, self._end, self.unit_weights)

    def reset(self, mark: tuple[Tensor, Tensor, Tensor, int, int, bool]) -> None:
        """Forgets the observations since a mark."""
        self.contexts, self.rewards, self.weights, self._first, self._end, self.unit_weights = mark

    def _make_room(self, count: int) -> None:
        """Moves what is kept to the front of buffers with room for as many rows again."""
        axis, kept = len(self.batch_shape), (*self.rows(), self._kept(self.weights))
        capacity = max(64, 2 * (len(self) + count))

        def moved(old: Tensor) -> Tensor:
            shape = list(old.shape)
            shape[axis] = capacity - len(self)
            return torch.cat([old, old.new_zeros(shape)], dim=axis)

        self.contexts, self.rewards, self.weights = map(moved, kept)
        self._first, self._end = 0, len(self)

    def saved(self) -> dict[str, Tensor] | None:
        """What is kept, as plain tensors; None if nothing is."""
        if not self.known:
            return None
        names = ("contexts", "rewards", "weights")
        return {name: self._kept(getattr(self, name)).clone() for name in names}

    def restored(self, state: Mapping[str, Tensor] | None, infer: bool = False) -> Observations:
        """New observations with these settings and a saved content, which is checked.

        Args:
            state: of :meth:`saved`.
            infer: read the number of axes of a context off the state.
        """
        like, dims, axis = self.rewards, self.context_dims, len(self.batch_shape)
        if infer and state is not None:
            dims = max(0, state["contexts"].ndim - axis - 1)
        fresh = Observations(self.batch_shape, dims, self.newest, like.dtype, like.device)
        if state is None:
            return fresh
        contexts = state["contexts"]
        if fresh.check(contexts.to(like.device), "state['contexts']"):
            shape = tuple(contexts.shape)
            raise refuse("state['contexts']", "shape (*B, n, *E)", f"shape {shape}")
        for name in ("rewards", "weights"):
            check_shape(f"state[{name!r}]", state[name], (*self.batch_shape, contexts.shape[axis]))
            if state[name].dtype != like.dtype:
                raise refuse(f"state[{name!r}]", f"dtype {like.dtype}", state[name].dtype)
        fresh.append(*(state[name].to(like.device) for name in ("contexts", "rewards", "weights")))
        return fresh
