"""Histories that outgrow one device or one machine: every rank keeps a share of the rows.

Whatever looks at all rows of a history does so through sums over them (the loss, its gradient, its
Hessian, higher derivatives) or through a maximum. :class:`Shards` completes these over the ranks of
a ``torch.distributed`` process group; everything above stays as it is.

Every rank runs the same program, on the same arms, rewards and seeds. Row i of a history stays on
rank ``i mod W``, the others let it go. A reduction is computed on one rank and broadcast, so that
all ranks go on with the same bits, and take the same decisions and the same reductions. Ranks that
were given different rows would go different ways, and meet in reductions that do not fit: with
``sharded(checked=True)`` they compare what they are given, and the one that differs is named.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from torchglb.checks import refuse


class LostRankError(RuntimeError):
    """Another process of the group is gone; what was being summed is incomplete."""


class Shards:
    """All rows in one place: sums and maxima are complete as they are."""

    @property
    def rank(self) -> int:
        """The number of this process among those that share the rows."""
        return 0

    @property
    def ranks(self) -> int:
        """W, how many share the rows."""
        return 1

    @property
    def is_whole(self) -> bool:
        """Whether all rows are here, without asking anyone."""
        return True

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for what is to be counted once."""
        return self.rank == 0

    def at(self, rows: int) -> Shards:
        """The same for a history of so many rows in all."""
        return self

    def total(self, here: int) -> int:
        """How many rows there are on all ranks, if so many are here."""
        return here

    def owned(self, count: int) -> int:
        """How many of the first ``count`` rows are here."""
        return len(range(self.rank, count, self.ranks))

    def mine(self, before: int) -> slice:
        """Those of new rows that stay here, if there were so many before."""
        return slice((self.rank - before) % self.ranks, None, self.ranks)

    def compare(self, name: str, *tensors: Tensor) -> None:
        """Whether all ranks were given the same tensors, where that is checked."""

    def sum(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Sums over the rows here, completed to sums over all rows."""
        return parts

    def maximum(self, part: Tensor) -> Tensor:
        """A maximum over the rows here, completed to one over all rows."""
        return part

    def gather(self, rows: Tensor, dim: int) -> Tensor:
        """All rows in the order in which they came, from those here."""
        return rows


#: the rows of a history that is not sharded
WHOLE = Shards()


@dataclass(frozen=True)
class ProcessShards(Shards):
    """A share of the rows on every rank of a process group.

    Args:
        group: the process group; the default one if left out.
        rows: how many rows there are on all ranks.
        checked: whether the ranks compare the rows they are given, by a checksum: 32 bytes of each
            rank for each call, and a host that waits for its device.
    """

    group: dist.ProcessGroup | None = None
    rows: int = 0
    checked: bool = False

    def __post_init__(self) -> None:
        if not dist.is_available() or not dist.is_initialized():
            expected = "an initialised process group (torch.distributed.init_process_group)"
            raise refuse("group", expected, "none")

    @property
    def rank(self) -> int:  # noqa: D102
        return dist.get_rank(self.group)

    @property
    def ranks(self) -> int:  # noqa: D102
        return dist.get_world_size(self.group)

    @property
    def is_whole(self) -> bool:  # noqa: D102
        return False

    def at(self, rows: int) -> ProcessShards:  # noqa: D102
        return replace(self, rows=rows)

    def total(self, here: int) -> int:  # noqa: D102
        return self.rows

    def compare(self, name: str, *tensors: Tensor) -> None:
        """Compares checksums.

        Raises:
            InputError: on every rank, naming those that differ from most.
        """
        if not self.checked:
            return
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(str((tuple(tensor.shape), tensor.dtype)).encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        # four numbers of 64 bits: a collective over tensors works for every backend
        words = torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64)
        mine = words.to(tensors[0].device)
        found = [torch.empty_like(mine) for _ in range(self.ranks)]
        self._together(lambda: dist.all_gather(found, mine, group=self.group))
        sums = [tuple(one.tolist()) for one in found]
        usual, count = Counter(sums).most_common(1)[0]
        if count == self.ranks:
            return
        expected = "the same on all ranks"
        if 2 * count > self.ranks:
            different = [str(rank) for rank, one in enumerate(sums) if one != usual]
            got = f"different ones on rank {', '.join(different)}"
        else:
            got = f"different ones on ranks 0 to {self.ranks - 1}, none of them on most"
        raise refuse(name, expected, got)

    def sum(self, *parts: Tensor) -> tuple[Tensor, ...]:  # noqa: D102
        flat = torch.cat([part.reshape(-1) for part in parts])
        self._reduce(flat, dist.ReduceOp.SUM)
        pieces = flat.split([part.numel() for part in parts])
        return tuple(piece.reshape(part.shape) for piece, part in zip(pieces, parts, strict=True))

    def maximum(self, part: Tensor) -> Tensor:  # noqa: D102
        flat = part.clone(memory_format=torch.contiguous_format)
        self._reduce(flat, dist.ReduceOp.MAX)
        return flat

    def _reduce(self, flat: Tensor, operation: dist.ReduceOp.RedOpType) -> None:
        """In place, on one rank, then broadcast: the bits are the same everywhere."""
        transformed = torch._C._functorch.is_functorch_wrapped_tensor(flat)
        if flat.requires_grad or transformed:
            expected = "no derivative and no torch.func transform of a sharded history"
            raise refuse("history", expected, "one that is asked for")

        def reduce_and_broadcast() -> None:
            dist.reduce(flat, op=operation, group=self.group, group_dst=0)
            dist.broadcast(flat, group=self.group, group_src=0)

        self._together(reduce_and_broadcast)

    def _together(self, collective: Callable[[], object]) -> None:
        """What all ranks do at once; if one is gone, that is what the others are told."""
        try:
            collective()
        except RuntimeError as error:  # of gloo and NCCL, whose words differ
            reason = (
                str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            )
            raise LostRankError(
                f"rank {self.rank}: another of the {self.ranks} ranks that share the history has"
                f" ended or does not answer ({reason})"
            ) from error

    def gather(self, rows: Tensor, dim: int) -> Tensor:  # noqa: D102
        dim = dim % rows.ndim
        longest = -(-self.rows // self.ranks)
        padding = list(rows.shape)
        padding[dim] = longest - rows.shape[dim]
        padded = torch.cat([rows, rows.new_zeros(padding)], dim=dim).contiguous()
        shares = [torch.empty_like(padded) for _ in range(self.ranks)]
        self._together(lambda: dist.all_gather(shares, padded, group=self.group))
        # row i is number i // W of rank i mod W
        return torch.stack(shares, dim=dim + 1).flatten(dim, dim + 1).narrow(dim, 0, self.rows)


_CURRENT: ContextVar[Shards] = ContextVar("shards", default=WHOLE)


@contextmanager
def sharded(group: dist.ProcessGroup | None = None, checked: bool = False) -> Iterator[None]:
    """Inside, every new history is sharded over a process group: also those of policies and sets.

    Policies, confidence sequences and programs that are built inside stay sharded for good. Each
    rank builds and uses them in the same way, with the same data and the same seeds.

    Args:
        group: the process group; the default one if left out.
        checked: compare the rows that the ranks are given, and name the rank that differs.

    Raises:
        LostRankError: by whatever uses the history, once a rank has ended.

    Example:
        >>> import tempfile, torchglb as glb
        >>> where = "file://" + tempfile.mkdtemp() + "/store"
        >>> dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
        >>> with sharded():
        ...     history = glb.History(dim=2)
        >>> history.append([[1.0, 0.0], [0.0, 1.0]], [1.0, 0.0])
        >>> glb.constrained_mle(glb.Bernoulli(), history, glb.Ball(2, 3.0), validate=False).theta
        tensor([ 2.1213, -2.1213], dtype=torch.float64)
        >>> dist.destroy_process_group()
    """
    token = _CURRENT.set(ProcessShards(group, checked=checked))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current() -> Shards:
    """Where the rows of a history live that is built now."""
    return _CURRENT.get()
