"""Parts of compiled functions: they become machine code only inside the entries that call them.

By itself Numba optimises every function together with all that it calls and makes machine code of
it, so that a function six calls deep is compiled seven times. A part is left as it stands when it
has been translated to LLVM's language; the entry above it optimises all its parts at once.
"""

from __future__ import annotations

from typing import Any

from numba.core import types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler


class _WithoutEnvironments:
    """A code generator for parts, which are never called from Python and need no environment."""

    def __init__(self, codegen: Any) -> None:
        self._codegen = codegen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codegen, name)

    def set_env(self, name: str, environment: Any) -> None:
        """There is no machine code that could use one."""


class PartLibrary(JITCodeLibrary):
    """The code of one part: to be linked into others, neither optimised nor emitted."""

    @property
    def codegen(self) -> Any:
        """Who generates the code."""
        return _WithoutEnvironments(self._codegen)

    def get_pointer_to_function(self, name: str) -> int:
        """None: there is no machine code."""
        return 0

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


class PartCompiler(Compiler):
    """Numba's compiler, with such a library."""

    def __init__(self, typing: Any, target: Any, library: Any, *more: Any) -> None:
        super().__init__(typing, target, library, *more)
        if library is None:
            self.state.library = PartLibrary(target.codegen(), "torchglb")

    def compile_extra(self, function: Any) -> Any:
        """Refuses to return what is only borrowed: nobody counts references to it."""
        found = super().compile_extra(function)
        if not self.state.flags.nrt and holds_arrays(found.signature.return_type):
            raise TypeError(
                f"{function.__qualname__} returns {found.signature.return_type}; a kernel returns "
                "numbers: decorate it with @inlined or @allocating"
            )
        return found


def holds_arrays(kind: Any) -> bool:
    """Whether values of this type are, or have, arrays or references."""
    if isinstance(kind, types.BaseTuple):
        parts: Any = kind
        return any(holds_arrays(part) for part in parts)
    return not isinstance(kind, types.Number | types.Boolean | types.NoneType | types.Omitted)
