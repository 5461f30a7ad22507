"""Checks used at every public door: each names the argument, what was expected and what came.

Checks of shape, dtype and device never look at values. Checks of values are gathered in a
:class:`ValueChecks` and settled together, with a single host synchronisation.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.errors import InputError
from torchglb.recording import at_hand, is_transformed

FLOATS = (torch.float32, torch.float64)
NUMBERS = (int, float, np.integer, np.floating)
#: what compiled code counts to
LARGEST_COUNT = 2**63 - 1
#: one of some words
Word = TypeVar("Word", bound=str)


def refuse(name: str, expected: str, got: object) -> InputError:
    """The one sentence in which every refusal is written."""
    return InputError(f"{name}: expected {expected}, got {got}")


def renamed(error: InputError, **names: str) -> InputError:
    """A refusal of an argument that the caller knows by another name.

    Example:
        >>> renamed(refuse("r", "a number", "nothing"), r="winner")
        InputError('winner: expected a number, got nothing')
    """
    name, colon, rest = str(error).partition(": ")
    return InputError(names.get(name, name) + colon + rest)


def kind_of(value: object) -> str:
    """The type of what came; a class in the place of an object is told how it becomes one.

    Example:
        >>> kind_of(3), kind_of(int)
        ('int', 'the class int (write int())')
    """
    if isinstance(value, type):
        return f"the class {value.__name__} (write {value.__name__}())"
    return type(value).__name__


def as_tensor(name: str, value: ArrayLike, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of exactly this dtype and device, of whatever holds the same numbers.

    Tensors and NumPy arrays of any real dtype (float16, bfloat16, float32, integers, booleans) are
    widened, which loses nothing. Those that are wider than ``dtype`` (float64 into an object of
    float32) are taken if every entry is a number of ``dtype``, and refused otherwise: rounding them
    is the caller's decision. Numbers and lists of numbers have no dtype of their own and are
    rounded to the nearest; so are NumPy's scalars. A NumPy array is copied, so one that must not be
    written to is as good as any. A tensor on another device is refused.

    Example:
        >>> x = np.float32([0.5, 1.0])
        >>> as_tensor("x", x, dtype=torch.float64, device=torch.device("cpu"))
        tensor([0.5000, 1.0000], dtype=torch.float64)
    """
    if type(value) in USUAL and dtype is torch.float64:
        copied = np.array(value, order="C")
        if copied.dtype == FLOAT64:  # nothing to convert
            found = torch.from_numpy(copied)
            return found if device == CPU else found.to(device)
    if isinstance(value, Tensor):
        if value.device != device:
            raise refuse(name, f"a tensor on device {device}", f"device {value.device}")
        if value.layout is not torch.strided:
            raise refuse(name, "a dense tensor of real numbers", f"{value.dtype}, {value.layout}")
        value = value.resolve_neg()  # what is negated lazily has the other sign in memory
        if value._is_zerotensor():  # zeros that autograd gave no memory
            value = value.clone()
        return value if value.dtype == dtype else _converted(name, value, dtype)
    if isinstance(value, list | tuple) and any(isinstance(part, Tensor) for part in value):
        parts = [as_tensor(name, part, dtype=dtype, device=device) for part in value]
        if len({part.shape for part in parts}) > 1:
            raise refuse(name, "entries of one shape", [tuple(part.shape) for part in parts])
        return torch.stack(parts)
    entries = real_entries(name, value)
    wide = np.float32 if dtype == torch.float32 else np.float64
    with np.errstate(over="ignore"):
        copied = np.array(entries, dtype=wide, order="C")  # in native order, and writable
    has_dtype = not isinstance(value, list | tuple | int | float | np.generic)
    if has_dtype and not np.can_cast(entries.dtype, wide, "safe"):
        back = copied.astype(np.longdouble)
        if not bool(((back == entries) | np.isnan(copied)).all()):
            raise refuse(name, _fitting(dtype), f"dtype {entries.dtype}")
    return torch.from_numpy(copied).to(device=device, dtype=dtype)


def real_entries(name: str, value: ArrayLike) -> np.ndarray[Any, np.dtype[Any]]:
    """The numbers of an array, of columns of a table or of lists, in the dtype they have.

    Columns that could hold missing values (nullable ones of pandas, those of Arrow) come as objects
    and are float64 if all are there. What is missing or masked is refused: nobody has measured it.
    """
    kind = type(value).__name__
    try:
        entries = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise refuse(name, "a tensor or numbers", f"{kind} ({error})") from None
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        got = f"{np.ma.count_masked(value)} of {value.size} masked (leave those rows out)"
        raise refuse(name, "numbers none of which is masked", got)
    if entries.dtype.kind == "O" and entries.ndim and entries.size:
        others = [e for e in entries.flat if not isinstance(e, (*NUMBERS, np.bool_))]
        if not others:
            try:
                return entries.astype(np.float64)
            except OverflowError as error:
                raise refuse(name, "a tensor or real numbers", f"{kind} ({error})") from None
        got = f"{kind} with the entry {_short(others[0])}"
        raise refuse(name, "a tensor or real numbers", got)
    if entries.dtype.kind not in "biuf":
        raise refuse(name, "a tensor or real numbers", f"{kind} {_short(value)}")
    return entries


def as_floats(name: str, value: ArrayLike) -> Tensor:
    """A float32 or float64 tensor as it is; other numbers widened to float64, where they are."""
    if isinstance(value, Tensor) and value.dtype in FLOATS and value.layout is torch.strided:
        return value
    where = value.device if isinstance(value, Tensor) else torch.device("cpu")
    return as_tensor(name, value, dtype=torch.float64, device=where)


def as_like(name: str, value: ArrayLike, like: Located) -> Tensor:
    """:func:`as_tensor` in the dtype and on the device of another argument."""
    return as_tensor(name, value, dtype=like.dtype, device=like.device)


def as_indices(name: str, value: ArrayLike, device: torch.device) -> Tensor:
    """Whole numbers as a tensor of int64; floats are refused, even whole ones."""
    if not isinstance(value, Tensor):
        try:
            entries = np.asarray(value)
        except (TypeError, ValueError) as error:
            got = f"{type(value).__name__} ({error})"
            raise refuse(name, "whole numbers", got) from None
        if entries.dtype.kind not in "iu":
            raise refuse(name, "whole numbers", f"dtype {entries.dtype}")
        return torch.from_numpy(entries.astype(np.int64)).to(device)
    if value.device != device:
        raise refuse(name, f"a tensor on device {device}", f"device {value.device}")
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise refuse(name, "whole numbers", f"dtype {value.dtype}")
    return value.to(torch.int64)


def _converted(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in another dtype, if nothing is lost."""
    if value.is_complex() or value.layout is not torch.strided or value.is_quantized:
        raise refuse(name, "a dense tensor of real numbers", f"{value.dtype}, {value.layout}")
    found = value.to(dtype)
    # torch promotes no dtype of eight bits to another, and every float is wider
    tiny = value.is_floating_point() and value.dtype.itemsize == 1
    if tiny or (torch.promote_types(value.dtype, dtype) == dtype and value.dtype not in UNSURE):
        return found
    if is_transformed(value):  # nobody may look
        raise refuse(name, f"dtype {dtype}", f"{value.dtype}")
    if value.is_floating_point():
        same = (found.to(value.dtype) == value) | value.isnan()
    else:
        limit = 2 ** (24 if dtype == torch.float32 else 53)
        same = (value.long() <= limit) & (value.long() >= -limit)
    if not bool(same.all()):
        raise refuse(name, _fitting(dtype), f"dtype {value.dtype}")
    return found


#: of what single rows mostly consist
USUAL, FLOAT64 = (np.ndarray, np.float64, float), np.dtype(np.float64)
CPU = torch.device("cpu")
#: whole numbers of these may be too long for a float
UNSURE = (torch.int32, torch.int64)


def _fitting(dtype: torch.dtype) -> str:
    return f"dtype {dtype}, or numbers that it holds exactly (round them yourself: .to({dtype}))"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def check_float(name: str, value: Tensor) -> None:
    """Refuses anything but a float32 or float64 tensor."""
    if not isinstance(value, Tensor):
        raise refuse(name, "a tensor", type(value).__name__)
    if value.dtype not in FLOATS:
        raise refuse(name, "dtype float32 or float64", value.dtype)


def check_dtype(dtype: object) -> None:
    """Refuses any dtype but float32 and float64."""
    if dtype not in FLOATS:
        raise refuse("dtype", "torch.float32 or torch.float64", repr(dtype))


def check_shape(name: str, value: Tensor, shape: Sequence[int | str]) -> None:
    """Refuses a shape that differs; a string entry stands for a free axis and gives its name."""
    actual = tuple(value.shape)
    if actual == shape:
        return
    fits = len(actual) == len(shape)
    for want, have in zip(shape, actual, strict=False):
        fits = fits and (want == have or isinstance(want, str))
    if not fits:
        wanted = "(" + ", ".join(str(s) for s in shape) + ("," if len(shape) == 1 else "") + ")"
        raise refuse(name, f"shape {wanted}", f"shape {actual}")


class Located(Protocol):
    """Whatever has a dtype and a device."""

    @property
    def dtype(self) -> torch.dtype: ...  # noqa: D102
    @property
    def device(self) -> torch.device: ...  # noqa: D102


def check_same(name: str, value: Tensor, other_name: str, other: Located) -> None:
    """Refuses anything but a tensor with the dtype and device of another argument."""
    if not isinstance(value, Tensor):
        raise refuse(name, "a tensor", type(value).__name__)
    if value.dtype != other.dtype:
        raise refuse(name, f"the dtype of {other_name} ({other.dtype})", value.dtype)
    if value.device != other.device:
        raise refuse(name, f"the device of {other_name} ({other.device})", value.device)


def check_tensors(name: str, given: Mapping[str, Any], like: Mapping[str, Tensor]) -> None:
    """Refuses a table of tensors without the entries, shapes and dtypes of another."""
    if missing := sorted(set(like) - set(given)):
        raise refuse(name, f"the entries {sorted(like)}", f"no {missing}")
    for key, mine in like.items():
        entry = f"{name}[{key!r}]"
        if not isinstance(given[key], Tensor) or given[key].dtype != mine.dtype:
            kind = getattr(given[key], "dtype", type(given[key]).__name__)
            raise refuse(entry, f"a tensor of dtype {mine.dtype}", kind)
        if given[key].layout is not torch.strided:
            raise refuse(entry, "a dense tensor", given[key].layout)
        check_shape(entry, given[key], mine.shape)


def check_entries(name: str, state: object, wanted: Iterable[str]) -> None:
    """Refuses what is no mapping with these entries."""
    if not isinstance(state, Mapping):
        raise refuse(name, "what state_dict() gave", type(state).__name__)
    if missing := set(wanted) - set(state):
        raise refuse(name, "the entries of state_dict()", f"no {sorted(missing)}")


def check_positive(name: str, value: object) -> float:
    """A finite number above zero."""
    if isinstance(value, bool) or not isinstance(value, NUMBERS):
        raise refuse(name, "a positive number", repr(value))
    if not 0.0 < float(value) < float("inf"):
        raise refuse(name, "a positive finite number", value)
    return float(value)


def check_tolerance(name: str, value: object) -> float:
    """A finite number of at least zero."""
    if isinstance(value, bool) or not isinstance(value, NUMBERS):
        raise refuse(name, "a non-negative number", repr(value))
    if not 0.0 <= float(value) < float("inf"):
        raise refuse(name, "a non-negative finite number", value)
    return float(value)


def check_count(name: str, value: int, least: int = 0) -> int:
    """A whole number of at least ``least`` that compiled code can count to."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise refuse(name, f"an integer of at least {least}", repr(value))
    if value > LARGEST_COUNT:
        raise refuse(name, f"an integer from {least} to 2**63 - 1", repr(value))
    return int(value)


def check_sizes(
    name: str, value: ArrayLike, *, positive: bool = False, finite: bool = True
) -> float | Tensor:
    """A number as it is, or a tensor of whatever holds numbers; none is negative or NaN.

    Nobody looks at values on a device, which would have to be waited for.

    Args:
        name: of the argument.
        value: a number, or numbers.
        positive: refuse 0 too,
        finite: and infinity.

    Example:
        >>> check_sizes("S", 3), check_sizes("S", [1, 2])
        (3.0, tensor([1., 2.], dtype=torch.float64))
    """
    expected = ("positive" if positive else "non-negative") + (" finite" if finite else "")
    refuse_flag(name, value)
    tensor = as_floats(name, value)
    if at_hand(sizes := tensor.detach()):
        checks = ValueChecks()
        holds = (sizes > 0.0) if positive else (sizes >= 0.0)
        holds = holds & (sizes < math.inf) if finite else holds
        checks.require(name, holds, f"{expected} numbers", sizes)
        checks.settle()
    return float(value) if isinstance(value, NUMBERS) else tensor


def check_size_tensor(name: str, value: ArrayLike, *, finite: bool = True) -> Tensor:
    """:func:`check_sizes` as a tensor; a number is one of float64."""
    return as_floats(name, check_sizes(name, value, finite=finite))


def check_numbers(
    name: str, values: object, low: float, high: float, *, closed: bool = False
) -> tuple[float, ...]:
    """One or more numbers in (low, high), or in [low, high) if ``closed``, as a tuple.

    Example:
        >>> check_numbers("shapes", [0, 2.5], 0.0, 8.0, closed=True)
        (0.0, 2.5)
    """
    if isinstance(values, np.ndarray | Tensor):
        values = values.tolist()
    expected = f"one or more numbers in {'[' if closed else '('}{low:g}, {high:g})"
    if isinstance(values, NUMBERS):
        raise refuse(name, f"{expected}, as a tuple", f"{values!r} (write ({values!r},))")
    if not isinstance(values, list | tuple) or not values:
        raise refuse(name, expected, repr(values))
    for value in values:
        number = isinstance(value, NUMBERS) and not isinstance(value, bool)
        if not (number and (low < value < high or (closed and value == low))):
            raise refuse(name, expected, repr(values))
    return tuple(float(value) for value in values)


def check_text(name: str, value: object, expected: str) -> None:
    """Refuses what is no text."""
    if not isinstance(value, str):
        raise refuse(name, expected, kind_of(value))


def check_flag(name: str, value: object) -> bool:
    """True or False; a word such as "no" would count as true."""
    if not isinstance(value, bool | np.bool_):
        raise refuse(name, "True or False", repr(value))
    return bool(value)


def refuse_flag(name: str, value: object) -> None:
    """Refuses True and False in the place of numbers."""
    if isinstance(value, bool | np.bool_):
        raise refuse(name, "numbers", repr(value))


def as_device(value: torch.device | str | int | None) -> torch.device:
    """The device that is meant; None is torch's default one."""
    try:
        return torch.zeros(0, device=value).device
    except (RuntimeError, TypeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        expected = "a device of this machine, such as 'cpu' or 'cuda:0'"
        raise refuse("device", expected, f"{value!r} ({reason})") from None


def check_batch_shape(value: object) -> tuple[int, ...]:
    """A tuple of sizes; a bare number is refused."""
    if (
        not isinstance(value, Sequence)
        or isinstance(value, str)
        or any(isinstance(n, bool) or not isinstance(n, int | np.integer) for n in value)
        or any(n < 0 for n in value)
    ):
        expected = "a tuple of non-negative integers, such as (4,)"
        raise refuse("batch_shape", expected, repr(value))
    return tuple(int(n) for n in value)


def check_probability(name: str, value: float) -> float:
    """A number strictly between 0 and 1."""
    if isinstance(value, bool) or not isinstance(value, NUMBERS):
        raise refuse(name, "a number in (0, 1)", repr(value))
    if not 0.0 < float(value) < 1.0:
        raise refuse(name, "a number in (0, 1)", value)
    return float(value)


def check_choice(name: str, value: Word, choices: Sequence[Word]) -> Word:
    """One of the listed words."""
    if value not in choices:
        raise refuse(name, "one of " + ", ".join(map(repr, choices)), with_nearest(value, choices))
    return value


def check_options(name: str, options: Iterable[str], known: Iterable[str]) -> None:
    """Refuses options that are not known, and says which one may have been meant."""
    known = sorted(known)
    for option in options:
        if option not in known:
            raise refuse(name, "one of " + ", ".join(known), with_nearest(option, known))


def with_nearest(value: object, known: Sequence[str]) -> str:
    """A word that is not known, with the known one that looks most like it.

    Example:
        >>> with_nearest("dleta", ["delta", "seed"])
        "'dleta' (did you mean 'delta'?)"
    """
    close = difflib.get_close_matches(value, known, 1) if isinstance(value, str) else []
    return f"{value!r} (did you mean {close[0]!r}?)" if close else repr(value)


class ValueChecks:
    """Collects conditions on values and settles them with one host synchronisation.

    Example:
        >>> x = torch.ones(3)
        >>> checks = ValueChecks()
        >>> checks.finite("x", x)
        >>> checks.settle()
    """

    def __init__(self) -> None:
        # what a CPU knows at once is a bool already
        self._holds: list[bool | Tensor] = []
        self._explain: list[Callable[[], InputError | None]] = []

    def require(self, name: str, holds: Tensor, expected: str, value: Tensor) -> None:
        """Asks that ``holds`` is true everywhere; on failure shows the first offending entry."""
        self._add(holds.all(), lambda: _first_offender(name, holds, expected, value))

    def finite(self, name: str, value: Tensor) -> None:
        """Asks for no NaN and no infinity."""
        entries = _at_hand(value)
        self._add(
            # either makes a sum not finite, at a fraction of the price of looking at every entry
            torch.isfinite(value.sum()) if entries is None else bool(np.isfinite(entries).all()),
            lambda: _first_offender(name, torch.isfinite(value), "finite values", value),
        )

    def within(
        self, name: str, value: Tensor, low: float, high: float, expected: Callable[[], str]
    ) -> None:
        """Asks for ``low <= value <= high``; a NaN is not within. ``expected`` says so in words."""
        if not value.numel():
            return
        entries = _at_hand(value)
        self._add(
            (value.amin() >= low) & (value.amax() <= high)
            if entries is None
            else bool(low <= entries.min() and entries.max() <= high),
            lambda: _first_offender(name, (value >= low) & (value <= high), expected(), value),
        )

    def settle(self) -> None:
        """Raises the first refused condition, if any."""
        waiting = [holds for holds in self._holds if isinstance(holds, Tensor)]
        answers = iter(torch.stack(waiting).tolist() if waiting else ())
        for holds, explain in zip(self._holds, self._explain, strict=True):
            known = next(answers) if isinstance(holds, Tensor) else holds
            if not known and (error := explain()) is not None:
                raise error

    def _add(self, holds: bool | Tensor, explain: Callable[[], InputError | None]) -> None:
        if holds is not True:
            self._holds.append(holds)
            self._explain.append(explain)


def _at_hand(value: Tensor) -> np.ndarray[Any, Any] | None:
    """The entries as NumPy sees them; None on a device, and within a torch.func transform."""
    plain = value.detach()  # within a transform this is wrapped even if the value is not
    return plain.numpy() if at_hand(plain) else None


def _first_offender(name: str, holds: Tensor, expected: str, value: Tensor) -> InputError | None:
    """The refusal of the first entry for which ``holds`` is false; None if it holds everywhere."""
    offenders = torch.nonzero(~holds)
    if not len(offenders):
        return None
    where = tuple(offenders[0].tolist())
    place = f" at index {where}" if where else ""
    return refuse(name, expected, f"{value.expand(holds.shape)[where].tolist()}{place}")
