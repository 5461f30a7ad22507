"""Numba's plumbing: two decorators, a cache that never stands in the way, a word on first use.

The functions that they decorate are plain Python: with ``NUMBA_DISABLE_JIT=1`` they run as such,
slowly and with a debugger. They are written for one problem and loop over its numbers; a batch is a
loop over problems, so what one problem gets never depends on its companions.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import re
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from glob import escape
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

import numba
import numpy as np
from numba.core import config, event, types
from numba.core.caching import IndexDataCacheFile
from numba.extending import intrinsic
from numpy.typing import NDArray

from torchglb.backend.parts import PartCompiler
from torchglb.backend.references import pass_by_reference

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
#: float32 or float64, as they come
Reals = NDArray[Any]
F = TypeVar("F", bound=Callable[..., Any])

#: a product and a sum may be rounded together, once
FUSED = {"contract"}
#: sums may be taken in any order, as vector registers do; no other liberty with IEEE arithmetic
REORDERED = {"reassoc", "contract", "nsz"}


def kernel(function: F) -> F:
    """Compiles a function for others to call; arithmetic is done in the order in which it stands.

    Only what is decorated by :func:`entry` can be called from Python (this here would crash the
    interpreter). It neither makes nor returns arrays: it borrows those that it is given, and
    does not count references, which would take longer to compile than most functions.
    """
    return _part(function, FUSED, _nrt=False)


def vectorised(function: F) -> F:
    """The same for long loops: sums are taken in any order, so that they fill vector registers.

    Such a sum of n terms still errs by at most n roundings. Compensated sums do not belong here:
    what they save is what a reordering takes to be zero.
    """
    return _part(function, REORDERED, _nrt=False)


def allocating(function: F) -> F:
    """A kernel that makes or returns arrays: for entries and its like, not for other kernels."""
    return _part(function, FUSED, _nrt=True)


def inlined(function: F) -> F:
    """For short functions that return views or new memory: part of whoever calls them.

    From Python they are called as what they are. Compiled, they would return named tuples, which
    run Python to be made: a signal that strikes there (Ctrl-C) crashes the interpreter.
    """
    options: dict[str, Any] = {**_OPTIONS, "fastmath": FUSED, "inline": "always"}
    found = numba.njit(**options)(function)
    if found is not function:  # by these Numba knows what it inlines
        kept = {name: getattr(found, name) for name in ("targetoptions", "py_func", "_numba_type_")}
        vars(function).update(kept, dispatcher=found)
    return function


def entry(function: F) -> F:
    """For functions that are called from Python: optimised with all their parts, and cached."""
    return _compiled(function, FUSED, _nrt=True)


def bound(function: F, *arguments: Any) -> F:
    """The code of an entry for arguments of these types, which it is then called with unseen.

    At every call Numba looks up the types of all arguments, which for named tuples of arrays takes
    longer than a small round does. Whoever binds an entry answers for the types: others would be
    read as if they were these.
    """
    if not hasattr(function, "overloads"):  # plain Python
        return function
    types_ = tuple(numba.typeof(argument) for argument in arguments)
    dispatcher: Any = function
    dispatcher.compile(types_)
    return dispatcher.overloads[types_].entry_point


def bound_once(function: F) -> F:
    """An entry that binds itself to the types of its first call: those of all later ones.

    Numbers must always come as the same type; arrays of one dtype, in C order.
    """
    found: list[Any] = []

    def call(*arguments: Any) -> Any:
        if not found:
            found.append(bound(function, *arguments))
        return found[0](*arguments)

    return cast(F, call)


def _part(function: F, fastmath: set[str], **more: Any) -> F:
    options = {**_OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True, **more}
    found = numba.njit(pipeline_class=PartCompiler, fastmath=fastmath, **options)(function)
    if hasattr(found, "get_call_template"):  # not plain Python
        pass_by_reference(found)
    return found


def _compiled(function: F, fastmath: set[str], **more: Any) -> F:
    options: dict[str, Any] = {**_OPTIONS, "fastmath": fastmath, **more}
    try:
        found = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no directory that could be written to: compiled anew in every process
        found = numba.njit(**options)(function)
    if hasattr(found, "_cache"):
        _mend_cache(found._cache, function.__module__)
    return found


_OPTIONS = {"error_model": "numpy", "nogil": True}


#: what a file has whose contents end up in compiled code
_COMPILED = [
    b"\n@" + decorator.__name__.encode()
    for decorator in (kernel, vectorised, allocating, inlined, entry)
] + [b"\nclass CompiledFamily"]


_IMPORT = re.compile(rb"^from (torchglb[\w.]*) import (\([^)]*\)|[^\n]*)", re.MULTILINE)


@cache
def _sources() -> dict[str, tuple[bytes, set[str]]]:
    """Of every module of the package: its source, and the names that it may import modules by."""
    package, found = Path(__file__).parents[1], {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        source, names = path.read_bytes(), set()
        for module, imported in _IMPORT.findall(source):
            room = module.decode()
            names |= {room, *(f"{room}.{name.decode()}" for name in re.findall(rb"\w+", imported))}
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = source, names
    return found


@cache
def fingerprint(module: str) -> str:
    """Of a module and all it imports that has compiled functions: they contain what they call.

    A module of someone else may import anything of the package.
    """
    sources, digest = _sources(), hashlib.sha256()
    known, waiting = {module}, [module]
    if module not in sources:
        known, waiting = set(sources), []
    while waiting:
        new = {name for name in sources[waiting.pop()][1] if name in sources} - known
        known |= new
        waiting.extend(new)
    for name in sorted(known):
        plumbing = name.startswith("torchglb.backend.")
        if plumbing or any(mark in sources[name][0] for mark in _COMPILED):
            digest.update(sources[name][0])
    return digest.hexdigest()


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


class _CodeFiles(IndexDataCacheFile):
    """Compiled code on disk, in files whose names say what is in them.

    Numba numbers them and keeps an index: two processes that compile at once may take the same
    number, and one then gets the code that the other has compiled for other types.
    """

    def __init__(self, numbered: IndexDataCacheFile) -> None:
        vars(self).update(vars(numbered))

    def _name(self, key: tuple[Any, ...]) -> tuple[str, str, str]:
        """What the files of the function begin with, those of its sources, and that of a key."""
        base = self._data_name_pattern.removesuffix("{number:d}.nbc")
        # the stamp is that of its own file, which need not be one of the package's
        sources = _digest(self._version, self._source_stamp, key[-1])[:16]
        return base, f"{base}{sources}.", f"{base}{sources}.{_digest(key)[:32]}.nbc"

    def save(self, key: tuple[Any, ...], data: Any) -> None:
        base, current, name = self._name(key)
        self._save_data(name, data)  # type: ignore[no-untyped-call]
        for other in Path(self._cache_path).glob(f"{escape(base)}*"):
            if not other.name.startswith(current):  # of sources that have changed
                other.unlink(missing_ok=True)

    def load(self, key: tuple[Any, ...]) -> Any:
        try:
            return self._load_data(self._name(key)[2])  # type: ignore[no-untyped-call]
        except Exception:  # there is none, or none that this version can read: compiled anew
            return None


def _mend_cache(cache: Any, module: str) -> None:
    """Makes Numba's cache of one function look at all files it rests on, and survive a full disk.

    By itself it looks at the file of the function alone, and would go on with what the functions
    called from there were before they changed.
    """
    if not hasattr(cache, "_index_key"):  # there is none
        return
    save, key = cache.save_overload, cache._index_key

    def save_if_possible(*arguments: Any) -> None:
        with suppress(OSError):
            save(*arguments)

    def key_of_all(*arguments: Any) -> tuple[Any, ...]:
        return (*key(*arguments), module, fingerprint(module))

    cache.save_overload, cache._index_key = save_if_possible, key_of_all
    cache._cache_file = _CodeFiles(cache._cache_file)


def _is_own(event: Any) -> bool:
    function = getattr(event.data.get("dispatcher"), "py_func", None)
    return str(getattr(function, "__module__", "")).startswith("torchglb.")


class _Announcement(event.Listener):
    """Says once per process that something is being compiled, since that takes a while."""

    def __init__(self) -> None:
        self.said = False

    def on_start(self, event: Any) -> None:
        if not self.said and _is_own(event):
            self.said = True
            sys.stderr.write(
                "torchglb: compiling its kernels for this machine (once, about a minute)\n"
            )

    def on_end(self, event: Any) -> None:
        """Nothing to say."""


class _Patience(event.Listener):
    """Holds Ctrl-C back until a function and its parts are compiled; a second one strikes at once.

    Struck in between, Numba is left half done: it fails at every later call, or forgets the signal.
    Signals are the main thread's alone; other threads compile as they did.
    """

    def __init__(self) -> None:
        self.depth, self.before, self.held = 0, cast(Any, None), cast(Any, None)

    def on_start(self, event: Any) -> None:
        if _is_own(event) and threading.current_thread() is threading.main_thread():
            self.depth += 1
            if self.depth == 1 and callable(before := signal.getsignal(signal.SIGINT)):
                self.before = before
                signal.signal(signal.SIGINT, self._hold)

    def _hold(self, *signal_and_frame: Any) -> None:
        self.held = signal_and_frame
        signal.signal(signal.SIGINT, self.before)
        sys.stderr.write("torchglb: stops when this function is compiled (again: at once)\n")

    def on_end(self, event: Any) -> None:
        if _is_own(event) and threading.current_thread() is threading.main_thread():
            self.depth = max(self.depth - 1, 0)
            if self.depth == 0 and self.before is not None:
                before, held, self.before, self.held = self.before, self.held, None, None
                signal.signal(signal.SIGINT, before)
                if held is not None:
                    before(*held)


event.register("numba:compile", _Announcement())
event.register("numba:compile", _Patience())


def record_type(fields: type) -> np.dtype[Any]:
    """The dtype of records whose fields are the annotations of a class, int or float."""
    kinds = {int: np.int64, float: np.float64}
    return np.dtype([(name, kinds[kind]) for name, kind in get_type_hints(fields).items()])


if config.DISABLE_JIT:  # type: ignore[attr-defined]

    def record(table: Any, place: int) -> Any:
        """One row of a structured array, by reference, with its fields as attributes."""
        return table.view(np.recarray)[place]

    def floats_at(address: int, shape: tuple[int, ...]) -> Floats:
        """The float64 numbers that lie in memory from an address on, as an array."""
        memory = (ctypes.c_double * math.prod(shape)).from_address(address)
        return np.ctypeslib.as_array(memory).reshape(shape)

else:

    @inlined
    def record(table: Any, place: int) -> Any:
        """One row of a structured array, by reference, with its fields as attributes."""
        return table[place]

    @intrinsic
    def _pointer(_: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(types.float64)(address), generate

    @inlined
    def floats_at(address: int, shape: tuple[int, ...]) -> Floats:
        """The float64 numbers that lie in memory from an address on, as an array."""
        return numba.carray(_pointer(address), shape)  # type: ignore[call-arg]
