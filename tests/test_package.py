"""What is shipped: an sdist whose tests run, a wheel that works where nothing else is installed.

Slow: packages are built, and an environment is filled from the index that pip is configured for.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).parent.parent
CONFIGS = PROJECT / "torchglb" / "configs"
PRESETS = {path.name for path in CONFIGS.glob("*.toml")}


def test_presets_are_files_and_not_links():
    assert not CONFIGS.is_symlink()
    assert CONFIGS.is_dir()
    assert {"figure1.toml", "figure4.toml", "digits.toml"} <= PRESETS
    assert not any(path.is_symlink() for path in PROJECT.joinpath("torchglb").rglob("*"))


def test_every_lower_bound_has_its_lowest_version():
    """pyproject.toml and constraints-lowest.txt say the same, but for torch."""
    table = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = table["optional-dependencies"]
    bounds = list(table["dependencies"])
    bounds += [bound for extra in ("plot", "data", "solvers", "table") for bound in extras[extra]]
    lowest = dict(
        line.split("==")
        for line in (PROJECT / "constraints-lowest.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    )
    for bound in bounds:
        name, _, version = bound.partition(">=")
        if name != "torch":
            parts = lowest[name].split(".")
            assert parts[: version.count(".") + 1] == version.split("."), (bound, lowest[name])
            assert all(part == "0" for part in parts[version.count(".") + 1 :]), lowest[name]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The files that belong to the project, without what has been built here."""
    place = tmp_path_factory.mktemp("package") / "source"
    ignored = shutil.ignore_patterns(
        ".git",
        ".venv*",
        "__pycache__",
        "*.egg-info",
        "build",
        "dist",
        "site",
        "results",
        ".*_cache",
    )
    shutil.copytree(PROJECT, place, ignore=ignored)
    return place


def build(source, *what):
    command = [sys.executable, "-m", "build", *what, "--outdir", str(source / "dist"), str(source)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def sdist(source):
    done = build(source, "--sdist")
    assert done.returncode == 0, done.stderr + done.stdout
    (path,) = source.joinpath("dist").glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def unpacked(sdist, tmp_path_factory):
    place = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(place, filter="data")
    (root,) = place.iterdir()
    return root


@pytest.fixture(scope="module")
def wheel(unpacked):
    """Built from the sdist, as an index would."""
    done = build(unpacked, "--wheel")
    assert done.returncode == 0, done.stderr + done.stdout
    (path,) = unpacked.joinpath("dist").glob("*.whl")
    return path


@pytest.mark.slow
def test_a_build_without_presets_fails(source, tmp_path):
    broken = shutil.copytree(source, tmp_path / "broken")
    shutil.rmtree(broken / "torchglb" / "configs")
    done = build(broken, "--wheel")
    assert done.returncode != 0
    assert "expected the presets (*.toml), got none" in done.stderr + done.stdout


@pytest.mark.slow
def test_the_wheel_has_presets_and_template(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {Path(name).name for name in names if name.startswith("torchglb/configs/")} == PRESETS
    assert "torchglb/report/report.html.jinja" in names
    assert "torchglb/py.typed" in names
    assert not any(name.startswith(("tests/", "experiments/")) for name in names)


def python_files(place):
    return sorted(str(path.relative_to(place)) for path in place.rglob("*.py"))


@pytest.mark.slow
def test_the_tests_of_the_sdist_run_from_the_archive(unpacked):
    """All of them are found, and those of rooms that reach far are run."""
    expected, found = (
        sorted(path.relative_to(folder) for path in folder.rglob("*.py"))
        for folder in (PROJECT / "tests", unpacked / "tests")
    )
    assert found == expected
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(unpacked), "OMP_NUM_THREADS": "1"}
    collected = subprocess.run(
        [*command, "--collect-only"], cwd=unpacked, capture_output=True, text=True, env=environment
    )
    assert collected.returncode == 0, collected.stdout[-3000:] + collected.stderr[-3000:]
    some = ["test_imports", "test_random_streams", "test_cli", "report/test_report"]
    some += ["experiments/test_gpu_scaling"]
    done = subprocess.run(
        [*command, *(f"tests/{name}.py" for name in some)],
        cwd=unpacked, capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.slow
def test_the_wheel_runs_where_nothing_else_is_installed(wheel, tmp_path):
    """An empty environment, an empty directory, and the first command of the README."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    install += ["-c", PROJECT / "constraints.txt", f"{wheel}[plot]"]
    done = subprocess.run([str(word) for word in install], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    empty = tmp_path / "empty"
    empty.mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    ran = subprocess.run(
        [str(python.with_name("torchglb")), "run", "figure1", "--quick"],
        cwd=empty, capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert (empty / "results" / "figure1-quick" / "report.html").exists()
    assert (empty / "results" / "figure1-quick" / "figure1.png").exists()
