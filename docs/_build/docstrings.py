"""Docstrings as the site reads them: an ``Example:`` of ours is a section of doctests."""

import re
from typing import Any

from griffe import Extension

SECTION = re.compile(r"^(\s*)Example:[ ]*$", re.MULTILINE)


class Examples(Extension):
    """Renames ``Example:`` to ``Examples:``, the heading under which doctests are recognised."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Changes the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = SECTION.sub(r"\1Examples:", obj.docstring.value)
