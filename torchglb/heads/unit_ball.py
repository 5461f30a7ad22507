"""Features of norm at most 1, which every radius of the library asks for."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchglb.checks import FLOATS, check_choice, check_float, kind_of, refuse
from torchglb.choices import MODES, BallMode


class UnitBall(nn.Module):
    """Maps ``x (..., d)`` into the closed unit ball, whatever comes in.

    With ``c`` a few roundings below 1, so that the norm is at most 1 exactly and not only up to
    rounding:

    - ``"clip"``: ``x`` inside the ball of radius c, ``c x/|x|`` outside. Exact inside, but the
      gradient along x is 0 outside.
    - ``"normalize"``: ``c x/|x|``. The length of x is forgotten; the zero vector, which has no
      direction, stays where it is.
    - ``"smooth"``: ``c x/sqrt(1 + |x|^2)``. One to one, with a gradient everywhere.

    Entries of any finite size are safe, and so are zero vectors; NaN and infinity stay what they
    are, for the next check to find. Nothing here looks at values from the host.

    Args:
        mode: one of the above.
        dtype: convert to this dtype first (a float32 network under a float64 head); None keeps it.

    Example:
        >>> UnitBall("clip")(torch.tensor([[3.0, 4.0], [0.3, 0.4]]))
        tensor([[0.6000, 0.8000],
                [0.3000, 0.4000]])
    """

    def __init__(self, mode: BallMode = "smooth", dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.mode = check_choice("mode", mode, MODES)
        if dtype is not None and dtype not in FLOATS:
            raise refuse("dtype", "torch.float32, torch.float64 or None", dtype)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """The features in the ball, ``(..., d)``."""
        check_float("x", x)
        if x.ndim == 0 or x.shape[-1] == 0:
            raise refuse("x", "shape (..., d) with d >= 1", f"shape {tuple(x.shape)}")
        if self.dtype is not None:
            x = x.to(self.dtype)
        numbers = torch.finfo(x.dtype)
        # a computed |x|^2 is off by at most d roundings; the others are those of the scaling
        most = 1.0 / (1.0 + (x.shape[-1] + 4) * numbers.eps)
        # No square may overflow. The unit is a constant of differentiation: all three maps are the
        # same function of x whatever it is.
        unit = x.detach().abs().amax(-1, keepdim=True)
        if self.mode == "normalize":
            short = unit < numbers.tiny / numbers.eps  # 1/|x| would overflow
            y = x / torch.where(short, 1.0, unit)
            return y * (most / torch.where(short, 1.0, _square(y)).sqrt())
        unit = unit.clamp_min(1.0)
        y = x / unit
        if self.mode == "smooth":
            return y * (most / (unit.square().reciprocal() + _square(y)).sqrt())
        outside = _square(y) > (most / unit).square()
        return torch.where(outside, y * (most / torch.where(outside, _square(y), 1.0).sqrt()), x)

    def extra_repr(self) -> str:
        """The settings, for ``print``."""
        return repr(self.mode) if self.dtype is None else f"{self.mode!r}, dtype={self.dtype}"


def unit_ball(bound: BallMode | UnitBall) -> UnitBall:
    """The map itself, or the one that a mode stands for."""
    found = UnitBall(check_choice("bound", bound, MODES)) if isinstance(bound, str) else bound
    if not isinstance(found, UnitBall):
        raise refuse("bound", "a mode or a UnitBall", kind_of(bound))
    return found


def _square(y: Tensor) -> Tensor:
    return y.square().sum(-1, keepdim=True)
