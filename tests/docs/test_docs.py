"""The site: every public name has a page, every tutorial runs, every page is reachable."""

import html
import inspect
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote

import pytest

PROJECT = Path(__file__).parents[2]
BUILD = PROJECT / "docs" / "_build"
sys.path.insert(0, str(BUILD))

import reference  # noqa: E402
import tutorials  # noqa: E402

SCRIPTS = sorted((PROJECT / "docs" / "tutorials").glob("*.py"))


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, str]:
    """The tutorials, run in small, in one process of their own: they register policies."""
    folder = tmp_path_factory.mktemp("tutorials")
    environment = os.environ | {
        "TORCHGLB_SMOKE": "1",
        "PYTHONPATH": str(PROJECT),
        "PYTHONWARNINGS": "error::UserWarning",
        "OMP_NUM_THREADS": "1",
    }
    names = [path.stem for path in SCRIPTS]
    done = subprocess.run(
        [sys.executable, str(BUILD / "tutorials.py"), *names],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir())  # nothing is left behind
    return dict(zip(names, done.stdout.split("\f"), strict=False))


@pytest.mark.slow  # `make docs` runs them whole
@pytest.mark.parametrize("script", SCRIPTS, ids=[path.stem for path in SCRIPTS])
def test_tutorial_runs_in_small(script, pages):
    page = pages[script.stem]
    assert page.startswith("# ")
    assert "```text" in page  # it printed something


def test_every_tutorial_is_in_the_order():
    assert {path.stem for path in SCRIPTS} == set(tutorials.ORDER)


def test_every_public_name_has_a_place_in_the_reference():
    pages = reference.pages()
    front = import_module("torchglb")
    for name in front.__all__:
        assert f"::: torchglb.{name}\n" in pages["reference/index.md"], name
    for room in reference.public_rooms():
        for name in import_module(f"torchglb.{room}").__all__:
            assert f"::: torchglb.{room}.{name}\n" in pages[f"reference/{room}.md"], (room, name)


def test_every_public_name_and_method_has_a_docstring():
    """But for the tests of a contract, whose names say it."""
    missing = []
    for room in ("", *reference.public_rooms()):
        module = import_module(f"torchglb.{room}".rstrip("."))
        for name in module.__all__:
            found = getattr(module, name)
            if (callable(found) or type(found).__name__ == "module") and not found.__doc__:
                missing.append(f"{module.__name__}.{name}")
            for method in vars(found) if inspect.isclass(found) else ():
                part = inspect.getattr_static(found, method)
                asked = callable(part) or isinstance(part, property | classmethod | staticmethod)
                public = asked and not method.startswith(("_", "test_"))
                if public and not inspect.getdoc(getattr(found, method)):
                    missing.append(f"{module.__name__}.{name}.{method}")
    assert not missing


def test_citations_of_the_mathematics_exist():
    """Docstrings say ``MATH 4.2``; the site's page has that section."""
    text = (PROJECT / "docs" / "mathematics.md").read_text(encoding="utf-8")
    sections = set(re.findall(r"^#+ (\d+(?:\.\d+)?)", text, re.MULTILINE))
    cited = set()
    for path in (PROJECT / "torchglb").rglob("*.py"):
        for numbers in re.findall(
            r"MATH(?:\.md)?,? (?:section )?([\d.]*\d)", path.read_text(encoding="utf-8")
        ):
            cited.add(numbers)
    assert cited
    assert cited <= sections, cited - sections


def test_images_and_pages_that_are_linked_exist():
    for page in (PROJECT / "docs").glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            made = target.startswith(("reference/", "tutorials/")) or target in {
                "changelog.md",
                "contributing.md",
                "experiments.md",
            }
            assert made or (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_router_is_short_enough_to_read():
    script = PROJECT / "experiments" / "router.py"
    assert len(script.read_text(encoding="utf-8").splitlines()) < 150


def dead_links(site: Path) -> list[str]:
    """Links of built pages to pages, files or anchors that are not there."""
    texts = {page.resolve(): page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    anchors = {page: set(re.findall(r'\b(?:id|name)="([^"]+)"', t)) for page, t in texts.items()}
    dead = []
    for page, text in texts.items():
        for url in re.findall(r'\b(?:href|src)="([^"]*)"', text):
            path, _, anchor = unquote(html.unescape(url)).partition("#")
            if re.match(r"[a-z]+:|//", path):
                continue
            top = site if path.startswith("/") else page.parent  # 404.html is shown anywhere
            target = (top / path.lstrip("/")).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            known = anchor in anchors.get(target, ()) or not anchor.strip("_")
            if not (target.exists() and (known or target not in anchors)):
                dead.append(f"{page.relative_to(site.resolve())}: {url}")
    return dead


@pytest.mark.slow
def test_the_site_builds_strictly(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(PROJECT), "TORCHGLB_SMOKE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "-d", str(tmp_path / "site")],
        capture_output=True,
        text=True,
        cwd=PROJECT,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 30
    for page in pages:  # nothing is fetched from elsewhere
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="(https?:[^"]+)"', text)
        assert not [url for url in loaded if "canonical" not in url], page
        assert "theta<em>" not in text, page  # two stars of theta* are no emphasis
    assert not dead_links(tmp_path / "site")


def test_dead_links_are_found(tmp_path):
    (tmp_path / "there.html").write_text('<a id="here"></a>')
    page = '<a href="{}">'
    for url in ("there.html", "there.html#here", "https://elsewhere.org/x", "#", ""):
        (tmp_path / "page.html").write_text(page.format(url))
        assert not dead_links(tmp_path), url
    for url in ("nowhere.html", "there.html#nowhere", "#nowhere", "picture.png"):
        (tmp_path / "page.html").write_text(page.format(url))
        assert dead_links(tmp_path) == [f"page.html: {url}"]
