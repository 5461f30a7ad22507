"""Hooks of mkdocs: pages that are made from the project instead of being written."""

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

import reference
import tutorials

PROJECT = Path(__file__).resolve().parents[2]
ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|obj|ref):<code>[~.]*")


def copied(path: str, **links: str) -> str:
    """A Markdown file of the project, with its links as they are from the site."""
    text = (PROJECT / path).read_text(encoding="utf-8")
    for old, new in links.items():
        text = text.replace(f"]({old}", f"]({new}")
    return text


def made_pages() -> dict[str, str]:
    """Everything that is made, except tutorials."""
    return reference.pages() | {
        "changelog.md": copied("CHANGELOG.md", **{"docs/": ""}),
        "contributing.md": copied("CONTRIBUTING.md", **{"docs/": ""}),
        "experiments.md": copied("experiments/README.md", **{"../docs/": ""}),
    }


def on_config(config: Any) -> Any:
    """Puts the made pages into the navigation."""
    lists = {
        "Tutorials": ["tutorials/index.md", *(f"tutorials/{t.name}.md" for t in tutorials.every())],
        "Reference": list(reference.pages()),
    }
    for section in config["nav"]:
        for title in section:
            section[title] = lists.get(title, section[title])
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the made pages; tutorials are run here, so that what they print is what they printed."""
    made: dict[str, str | bytes] = dict(made_pages())
    for tutorial in tutorials.every():
        made |= tutorials.rendered(tutorial)
    made["tutorials/index.md"] = tutorials.index()
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings name things as :class:`Name`: on a page the role says nothing."""
    return ROLE.sub("<code>", html)


def on_pre_build(config: Any) -> None:
    """The plugin for reading without a server names a script of elsewhere: nothing is fetched."""
    config["extra"].pop("polyfills", None)
