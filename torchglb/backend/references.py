"""Named tuples by reference: compiled functions hand on one address instead of all fields.

Numba passes a tuple by value: every function that a tuple of thirty arrays goes through has three
hundred arguments more, which takes most of the time to compile. A part gets one address instead,
and reads fields from there. The tuple lives in the function that made it, which outlives the call;
a part that returned what it was given would return the address of something that is gone.
"""

from __future__ import annotations

from typing import Any

from numba.core import cgutils, types
from numba.core.imputils import impl_ret_borrowed
from numba.core.typing.templates import AttributeTemplate
from numba.extending import (
    infer_getattr,
    lower_cast,
    lower_getattr_generic,
    models,
    register_model,
)


class Reference(types.Type):
    """The type of a reference to a named tuple."""

    def __init__(self, to: Any) -> None:
        self.to = to
        super().__init__(f"Reference({to})")

    def field(self, name: str) -> tuple[int, types.Type]:
        """Its place, and its type: tuples within the tuple are references too."""
        place = self.to.fields.index(name)
        return place, referred(self.to.types[place])


def referred(kind: types.Type) -> types.Type:
    """How a part gets an argument of some type; a constant is a number like any other."""
    kind = types.unliteral(kind)
    return Reference(kind) if isinstance(kind, types.BaseNamedTuple) else kind


def pass_by_reference(part: Any) -> None:
    """Makes a dispatcher take its named tuples by reference; callers need not know."""
    template = part.get_call_template

    def by_reference(arguments: Any, named: Any) -> Any:
        here = tuple(referred(kind) for kind in arguments)
        return template(here, {name: referred(kind) for name, kind in named.items()})

    part.get_call_template = by_reference


@register_model(Reference)
class ReferenceModel(models.PrimitiveModel):
    """It is a pointer."""

    def __init__(self, manager: Any, reference: Reference) -> None:
        pointer = manager.lookup(reference.to).get_data_type().as_pointer()
        super().__init__(manager, reference, pointer)


@lower_cast(types.BaseNamedTuple, Reference)
def refer(context: Any, builder: Any, value: Any, reference: Reference, tuple_: Any) -> Any:
    """Puts a tuple where a part can read it."""
    model = context.data_model_manager[value]
    place = cgutils.alloca_once(builder, model.get_data_type())
    builder.store(model.as_data(builder, tuple_), place)
    return place


@infer_getattr
class ReferenceFields(AttributeTemplate):
    """The types of its fields."""

    key = Reference

    def generic_resolve(  # type: ignore[override]
        self, reference: Reference, name: str
    ) -> types.Type | None:
        """The type of one field, or None if there is no such field."""
        return reference.field(name)[1] if name in reference.to.fields else None


@lower_getattr_generic(Reference)
def read_field(context: Any, builder: Any, reference: Reference, pointer: Any, name: str) -> Any:
    """The value of one field."""
    place, kind = reference.field(name)
    address = cgutils.gep_inbounds(builder, pointer, 0, place)
    if isinstance(reference.to.types[place], types.BaseNamedTuple):
        return address
    value = context.data_model_manager[kind].load_from_data_pointer(builder, address)
    return impl_ret_borrowed(context, builder, kind, value)
