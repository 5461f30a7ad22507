"""Named tuples that Python hands to compiled code by reference, once for many calls.

To read a tuple of thirty arrays from Python's objects takes compiled code as long as a small round
does. Stored where compiled code finds it, a call is given its address only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import numba
import numpy as np
from numba.core import cgutils, config, types
from numba.extending import NativeValue, intrinsic, typeof_impl, unbox

from torchglb.backend.compiled import bound, entry
from torchglb.backend.references import Reference


class Stored:
    """A named tuple as compiled code reads it, at an address.

    It keeps the arrays of the tuple, which must stay where they are; numbers are those of then.
    """

    def __init__(self, value: Any, put: Any, size: int) -> None:
        self.value = value
        self._memory = np.empty(size, np.int8)
        self.address = self._memory.ctypes.data
        put(value, self.address)


class StoredCalls:
    """Calls of entries whose first argument is one stored tuple.

    Args:
        calls: of each an entry, and other arguments, for their types only.
    """

    def __init__(self, *calls: tuple[Any, ...]) -> None:
        self.calls = calls
        self._known: dict[Hashable, tuple[Any, int, list[Any]]] = {}

    def with_stored(self, value: Any, kind: Hashable) -> list[Callable[..., Any]]:
        """The entries with their first argument given, as it lies in memory now.

        Args:
            value: the tuple.
            kind: stands for the types in the tuple, which it takes long to look up: other tuples of
                this kind are read as if they had the same.
        """
        if config.DISABLE_JIT:  # type: ignore[attr-defined]
            return [partial(function, value) for function, *_ in self.calls]
        if kind not in self._known:
            put = bound(_put, value, 0)
            size = put(value, 0)
            found = Stored(value, put, size)
            runs = [bound(function, found, *more) for function, *more in self.calls]
            self._known[kind] = put, size, runs
        put, size, runs = self._known[kind]
        found = Stored(value, put, size)
        return [partial(run, found) for run in runs]


@typeof_impl.register(Stored)
def type_of(found: Stored, context: Any) -> Reference:
    """A reference to a tuple of its type."""
    return Reference(numba.typeof(found.value))


@unbox(Reference)  # type: ignore[untyped-decorator]
def from_python(reference: Reference, found: Any, c: Any) -> NativeValue:
    """Its address."""
    number = c.pyapi.object_getattr_string(found, "address")
    address = c.pyapi.long_as_voidptr(number)
    c.pyapi.decref(number)
    return NativeValue(c.builder.bitcast(address, c.context.get_value_type(reference)))


@entry
def _put(value: Any, address: int) -> int:
    """Writes a tuple to an address, unless that is 0; its size."""
    return _write(value, address)  # type: ignore[call-arg]


@intrinsic
def _write(_: Any, value: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        model = context.data_model_manager[value]
        kind = model.get_data_type()
        owned = _without_owners(context, builder, value, arguments[0])
        pointer = builder.inttoptr(arguments[1], kind.as_pointer())
        with builder.if_then(cgutils.is_not_null(builder, arguments[1])):
            builder.store(model.as_data(builder, owned), pointer)
        return context.get_constant(types.int64, context.get_abi_sizeof(kind))

    return types.int64(value, types.int64), generate


def _without_owners(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """The same without what counts references to its arrays, which is gone after this call."""
    if isinstance(kind, types.Array):
        fields = context.data_model_manager[kind]
        for name in ("meminfo", "parent"):
            none = cgutils.get_null_value(fields.get(builder, value, name).type)
            value = fields.set(builder, value, none, name)
        return value
    if isinstance(kind, types.BaseTuple):
        parts: Any = kind
        for place, part in enumerate(parts):
            old = builder.extract_value(value, place)
            new = _without_owners(context, builder, part, old)
            value = builder.insert_value(value, new, place)
    return value
