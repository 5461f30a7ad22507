"""The pages of the API reference: one for each room with an ``__all__``, one for the front door."""

import ast
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
PACKAGE = PROJECT / "torchglb"
#: rooms that are plumbing: their names are for the library itself
INTERNAL = frozenset({"backend"})


def declared(path: Path) -> tuple[str, list[str]]:
    """The docstring and the ``__all__`` of a module, read without importing it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
        ):
            names = ast.literal_eval(node.value)
    return ast.get_docstring(tree) or "", names


def public_rooms() -> list[str]:
    """The folders of the package that say what is public, in alphabetical order."""
    return sorted(
        path.parent.name
        for path in PACKAGE.glob("*/__init__.py")
        if declared(path)[1] and path.parent.name not in INTERNAL
    )


def modules_of(room: str) -> set[str]:
    """The names of the modules in a room."""
    return {path.stem for path in (PACKAGE / room).glob("*.py")} | {
        path.parent.name for path in (PACKAGE / room).glob("*/__init__.py")
    }


def block(name: str, **options: object) -> str:
    """The directive by which mkdocstrings writes a name's page."""
    lines = "".join(f"        {key}: {value}\n" for key, value in options.items())
    return f"::: {name}\n    options:\n{lines}\n" if lines else f"::: {name}\n\n"


def front_page() -> str:
    """Every public name of ``torchglb``, and where the rooms are."""
    doc, names = declared(PACKAGE / "__init__.py")
    text = f"# torchglb\n\n{doc}\n\n```python\nimport torchglb as glb\n```\n\n"
    rooms = ", ".join(f"[{room}]({room}.md)" for room in public_rooms())
    text += f"The rooms: {rooms}; and [functions of single modules](modules.md).\n\n"
    for name in sorted(names, key=str.lower):
        # what a room holds stands on its own page, and only there
        alone = {"members": "false"} if (PACKAGE / name).is_dir() else {}
        text += block(f"torchglb.{name}", **alone)
    return text


def room_page(room: str) -> str:
    """Every public name of a room; a module that is public shows its classes and functions."""
    doc, names = declared(PACKAGE / room / "__init__.py")
    text = f"# torchglb.{room}\n\n{doc}\n\n"
    modules = modules_of(room)
    functions = [name for name in names if name not in modules or name in DEFINED.get(room, ())]
    for name in sorted(functions, key=str.lower):
        text += block(f"torchglb.{room}.{name}")
    for name in sorted(set(names) - set(functions)):
        text += f"## Module {name} {{ #{room}-{name} }}\n\n"
        text += block(
            f"torchglb.{room}.{name}",
            show_root_heading="false",
            show_root_toc_entry="false",
            heading_level=3,
        )
    return text


#: names that are a function and a module at once: the function is meant
DEFINED = {"environments": ("replay",), "radii": ("covering", "theorem31", "theorem32")}

#: public modules that are a file and not a room: what users call by their dotted name
MODULES = ("domain", "likelihood", "sequence", "distributed", "theory", "checks")


def modules_page() -> str:
    """The modules at the top of the package."""
    text = "# Single modules\n\nFiles of the package that users may import by their name.\n\n"
    for name in MODULES:
        text += f"## torchglb.{name} {{ #module-{name} }}\n\n"
        text += block(
            f"torchglb.{name}",
            show_root_heading="false",
            show_root_toc_entry="false",
            heading_level=3,
        )
    return text


def pages() -> dict[str, str]:
    """Path in the site's sources -> text."""
    found = {"reference/index.md": front_page()}
    found |= {f"reference/{room}.md": room_page(room) for room in public_rooms()}
    return found | {"reference/modules.md": modules_page()}
