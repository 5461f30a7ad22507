"""Small dense linear algebra for one problem: matrices of some ten rows, no library calls."""

from __future__ import annotations

import math

from torchglb.backend.compiled import Floats, kernel, vectorised

EPS = 2.220446049250313e-16
TINY = 1e-300


@kernel
def exponential(x: float) -> float:
    """``e^x``, infinite beyond all numbers: plain Python raises there, and a cap is no bound."""
    return math.exp(x) if x <= 709.0 else math.inf


@kernel
def copy_vector(source: Floats, target: Floats) -> None:
    """Writes one vector over another (a loop: array assignments take seconds to compile)."""
    for i in range(source.shape[0]):
        target[i] = source[i]


@vectorised
def dot(u: Floats, v: Floats) -> float:
    """``<u, v>``."""
    total = 0.0
    for i in range(u.shape[0]):
        total += u[i] * v[i]
    return total


@kernel
def length(v: Floats) -> float:
    """``|v|``, also where its square would underflow or overflow."""
    square = dot(v, v)
    if 1e-290 < square < 1e290 or (square == 0.0 and _largest(v) == 0.0):
        return math.sqrt(square)
    scale = _largest(v)
    if not 0.0 < scale < math.inf:
        return scale
    total = 0.0
    for i in range(v.shape[0]):
        part = v[i] / scale
        total += part * part
    return scale * math.sqrt(total)


@kernel
def distance(u: Floats, v: Floats) -> float:
    """``|u - v|``, or 0 where its square would underflow."""
    total = 0.0
    for i in range(u.shape[0]):
        total += (u[i] - v[i]) * (u[i] - v[i])
    return math.sqrt(total)


@kernel
def _largest(v: Floats) -> float:
    largest = 0.0
    for i in range(v.shape[0]):
        size = abs(v[i])
        if math.isnan(size):  # which no comparison would keep
            return size
        largest = max(largest, size)
    return largest


@kernel
def cholesky(matrix: Floats, shift: float, factor: Floats) -> bool:
    """The lower factor of ``M + shift I``; False where it is not positive definite."""
    d = matrix.shape[0]
    for j in range(d):
        pivot = matrix[j, j] + shift
        for k in range(j):
            pivot -= factor[j, k] * factor[j, k]
        if not pivot > 0.0:
            return False
        root = math.sqrt(pivot)
        factor[j, j] = root
        inverse = 1.0 / root
        for i in range(j + 1, d):
            entry = matrix[i, j]
            for k in range(j):
                entry -= factor[i, k] * factor[j, k]
            factor[i, j] = entry * inverse
    return True


@kernel
def forward(factor: Floats, b: Floats, y: Floats) -> None:
    """``L y = b``; b and y may be the same."""
    for i in range(factor.shape[0]):
        rest = b[i]
        for k in range(i):
            rest -= factor[i, k] * y[k]
        y[i] = rest / factor[i, i]


@kernel
def backward(factor: Floats, y: Floats, x: Floats) -> None:
    """``L' x = y``; x and y may be the same."""
    for i in range(factor.shape[0] - 1, -1, -1):
        rest = y[i]
        for k in range(i + 1, factor.shape[0]):
            rest -= factor[k, i] * x[k]
        x[i] = rest / factor[i, i]


@kernel
def solve_factored(factor: Floats, b: Floats, x: Floats) -> None:
    """``L L' x = b``; b and x may be the same."""
    forward(factor, b, x)
    backward(factor, x, x)


@kernel
def matrix_trace(matrix: Floats) -> float:
    """The sum of the diagonal."""
    total = 0.0
    for i in range(matrix.shape[0]):
        total += matrix[i, i]
    return total


@kernel
def inverse_trace(factor: Floats, y: Floats) -> float:
    """The trace of ``(L L')^-1``, which is at least one over the least eigenvalue."""
    d, total = factor.shape[0], 0.0
    for j in range(d):
        for i in range(j, d):
            rest = 1.0 if i == j else 0.0
            for k in range(j, i):
                rest -= factor[i, k] * y[k]
            y[i] = rest / factor[i, i]
            total += y[i] * y[i]
    return total


@kernel
def solve_general(matrix: Floats, b: Floats, size: int) -> bool:
    """``M x = b`` by elimination with pivots, in place; False where M is singular."""
    for j in range(size):
        pivot, largest = j, abs(matrix[j, j])
        for i in range(j + 1, size):
            if abs(matrix[i, j]) > largest:
                pivot, largest = i, abs(matrix[i, j])
        if not 0.0 < largest < math.inf:
            return False
        if pivot != j:
            for k in range(j, size):
                matrix[j, k], matrix[pivot, k] = matrix[pivot, k], matrix[j, k]
            b[j], b[pivot] = b[pivot], b[j]
        inverse = 1.0 / matrix[j, j]
        for i in range(j + 1, size):
            multiple = matrix[i, j] * inverse
            if multiple != 0.0:
                for k in range(j + 1, size):
                    matrix[i, k] -= multiple * matrix[j, k]
                b[i] -= multiple * b[j]
    for i in range(size - 1, -1, -1):
        rest = b[i]
        for k in range(i + 1, size):
            rest -= matrix[i, k] * b[k]
        b[i] = rest / matrix[i, i]
    return True


@kernel
def minimize_on_ball(
    hessian: Floats,
    gradient: Floats,
    theta: Floats,
    radius: float,
    factor: Floats,
    b: Floats,
    y: Floats,
    u: Floats,
) -> float:
    """``argmin g'(u - theta) + (u - theta)' H (u - theta)/2`` over ``|u| <= S``, into u.

    With a multiplier ``nu >= 0`` of the ball, ``(H + nu I) u = H theta - g``; either nu = 0 and u
    is inside, or ``|u| = S``. ``1/|u(nu)|`` is concave and increasing, so that Newton's iteration
    from the left never overshoots.

    Returns:
        nu, also where it only stands for a curvature that H does not have.
    """
    d = theta.shape[0]
    for i in range(d):
        total = -gradient[i]
        for j in range(d):
            total += hessian[i, j] * theta[j]
        b[i] = total
    nu = 0.0
    if not cholesky(hessian, 0.0, factor):
        nu = 8.0 * d * EPS * max(matrix_trace(hessian), 0.0) + TINY
        for _ in range(320):  # from 1e-300 to any curvature
            if cholesky(hessian, nu, factor):
                break
            nu *= 100.0
    size = 0.0
    for _ in range(100):
        solve_factored(factor, b, u)
        size = length(u)
        if not size > radius * (1.0 + 1e-14):
            break
        forward(factor, u, y)
        step = (size * size / max(dot(y, y), TINY)) * (size / radius - 1.0)
        if not step > 1e-15 * nu:
            break
        nu += step
        if not cholesky(hessian, nu, factor):
            break
    if size > radius:
        for i in range(d):
            u[i] *= radius / size
    return nu


@kernel
def frank_wolfe_gap(theta: Floats, gradient: Floats, radius: float) -> float:
    """``<grad, theta> + S |grad|``, without cancellation for theta on the sphere.

    With ``v = -S grad/|grad|`` it equals ``|grad| ((S^2 - |theta|^2) + |theta - v|^2) / (2 S)``.
    """
    steep, squared, apart = length(gradient), 0.0, 0.0
    if not steep > 0.0:
        return steep
    for i in range(theta.shape[0]):
        squared += theta[i] * theta[i]
        away = theta[i] + radius * (gradient[i] / steep)
        apart += away * away
    size = math.sqrt(squared)
    inside = (radius - size) * (radius + size)
    return steep * (max(inside, 0.0) + apart) / (2.0 * radius)
