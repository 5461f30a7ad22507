"""Release checks, workflows, citation: what keeps the project good is itself kept."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

PROJECT = Path(__file__).parent.parent
sys.path.append(str(PROJECT / "experiments"))

import conftest  # noqa: E402
import mutation  # noqa: E402
import release  # noqa: E402


@pytest.fixture
def project(tmp_path) -> Path:
    """A project that may be released."""
    (tmp_path / "torchglb").mkdir()
    (tmp_path / "torchglb" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    (tmp_path / "CITATION.cff").write_text("version: 1.2.3\n")
    text = "# Changelog\n\n## [1.2.3] - today\n\n- Better.\n\n## [1.2.2]\n\n- Old.\n"
    (tmp_path / "CHANGELOG.md").write_text(text)
    return tmp_path


def test_a_project_that_is_ready_has_no_problems(project):
    assert release.problems(project, "v1.2.3") == []
    assert release.notes_of(project, "1.2.3") == "- Better."
    assert release.notes_of(project, "1.2.2") == "- Old."


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        ("torchglb/__init__.py", "1.2.3", "1.2.2", "torchglb/__init__.py"),
        ("CITATION.cff", "1.2.3", "1.2.30", "CITATION.cff"),
        ("CHANGELOG.md", "## [1.2.3] - today", "## [Unreleased]", "CHANGELOG.md"),
        ("CHANGELOG.md", "- Better.", "", "CHANGELOG.md"),
    ],
)
def test_what_is_forgotten_is_named(project, file, old, new, expected):
    path = project / file
    path.write_text(path.read_text().replace(old, new))
    (sentence,) = release.problems(project)
    assert sentence.startswith(expected)


def test_a_tag_of_another_version_is_refused(project):
    (sentence,) = release.problems(project, "v1.2.4")
    assert sentence == "tag: expected v1.2.3, got v1.2.4"


def test_citation_has_the_version_of_the_package():
    version = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"]
    assert f"version: {version}\n" in (PROJECT / "CITATION.cff").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "path",
    [
        *sorted((PROJECT / ".github" / "workflows").glob("*.yml")),
        PROJECT / ".pre-commit-config.yaml",
    ],
    ids=lambda path: path.name,
)
def test_workflows_are_yaml_that_calls_targets_that_exist(path):
    yaml = pytest.importorskip("yaml")
    text = path.read_text(encoding="utf-8")
    assert yaml.safe_load(text)
    targets = set(re.findall(r"^([a-z-]+):", (PROJECT / "Makefile").read_text(), re.MULTILINE))
    for called in re.findall(r"make PYTHON=python ([a-z-]+)", text):
        assert called in targets
    for script in re.findall(r"experiments/\w+\.py", text):
        assert (PROJECT / script).exists()
    assert "index-url" not in text  # versions come from constraints.txt


def test_every_mutant_still_finds_its_line():
    assert len(mutation.MUTANTS) >= 22
    for mutant in mutation.MUTANTS:
        text = (PROJECT / "torchglb" / mutant.path).read_text(encoding="utf-8")
        assert text.count(mutant.old) == 1, mutant.name
        assert mutant.old != mutant.new
        for test in mutant.tests.split():
            assert (PROJECT / test).exists(), test


def test_the_files_that_are_begun_first_exist():
    for name in conftest.LONGEST:
        assert (PROJECT / "tests" / name).exists(), name
