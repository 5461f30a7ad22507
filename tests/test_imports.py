"""The rooms of torchglb look only downwards, and heavy packages have one door each."""

import ast
import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import torchglb

PROJECT = Path(__file__).parent.parent
PACKAGE = PROJECT / "torchglb"

# From the ground up. A module imports only from its own room and from rooms before it.
ROOMS = (
    "errors",
    "recording",
    "turns",
    "choices",
    "array_like",
    "checks",
    "identity",
    "rounding",
    "arrays",
    "distributed",
    "backend",
    "linalg",
    "random_streams",
    "families",
    "domain",
    "rows",
    "likelihood",
    "forgetting",
    "optim",
    "estimate",
    "carried",
    "compiled_rows",
    "mle",
    "ucb",
    "radii",
    "inference",
    "sets",
    "contrasts",
    "sequence",
    "contrast_sequence",
    "policies",
    "heads",
    "environments",
    "decisions",
    "preferences",
    "theory",
    "plugins",
    "simulate",
    "plotting",
    "estimators",
    "testing",
    "report",
    "analyse",
    "cli",
    "__main__",
    "warm",
)

# Every other package of the outside world that the library may import anywhere ...
EVERYWHERE = frozenset({"torch", "numpy", "scipy", "numba"})
# ... and those that only some files may.
DOORS = {
    "cvxpy": frozenset({"ucb/solvers/conic/cones.py", "ucb/solvers/conic/layer.py"}),
    "cvxpylayers": frozenset({"ucb/solvers/conic/layer.py"}),
    "matplotlib": frozenset(
        {
            "plotting/confidence.py",
            "plotting/estimates.py",
            "plotting/experiment.py",
            "plotting/leaderboard.py",
            "plotting/neural.py",
            "plotting/radii.py",
        }
    ),
    "jinja2": frozenset({"report/analysis.py", "report/html.py"}),
    "pandas": frozenset({"estimators/design.py", "estimators/tables.py"}),
    "ray": frozenset({"simulate/ray_executor.py"}),
    "rich": frozenset({"report/tables.py", "simulate/progress.py"}),
    "mpmath": frozenset({"testing/families.py"}),
    "pytest": frozenset(f"testing/{name}.py" for name in ("families", "policies", "radii", "sets")),
    "shtab": frozenset({"cli.py"}),
    "sklearn": frozenset({"environments/datasets.py", "estimators/scikit.py"}),
    "statsmodels": frozenset({"environments/datasets.py"}),
}
#: parts that several policies stand on; none of them is a policy
SHARED_POLICY_MODULES = frozenset(
    {
        "base",
        "bernstein",
        "conservative",
        "design",
        "exact",
        "fitted",
        "fixed_arms",
        "geometry",
        "mean_ucb",
        "mirror_descent",
        "online",
        "rank_one",
        "registry",
        "requirements",
        "saving",
        "settings",
    }
)
BELOW_BASE = frozenset({"requirements", "saving"})
POLICY_COLLECTORS = frozenset({"policies/__init__.py", "policies/registry.py"})


def imported_names(source: str, path: str) -> list[tuple[int, str]]:
    """Returns (line, absolute dotted name) of every import in a module, wherever it stands.

    `from a import b` gives `a.b`. Imports inside functions and under TYPE_CHECKING count, and so do
    `importlib.import_module` and `__import__` of a literal name.
    """
    parts = ("torchglb", *Path(path).with_suffix("").parts)
    package = parts[:-1]  # of torchglb/ucb/bounds.py and of torchglb/ucb/__init__.py: torchglb.ucb
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            if node.level:
                base = [*package[: len(package) - node.level + 1], *base]
            found += [(node.lineno, ".".join([*base, alias.name])) for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else None
            name = node.func.id if isinstance(node.func, ast.Name) else name
            target = node.args[0].value
            if name in {"import_module", "__import__"} and isinstance(target, str):
                found.append((node.lineno, importlib.util.resolve_name(target, ".".join(package))))
    return found


def violations(path: str, source: str) -> list[str]:
    """Returns one sentence per import that breaks the rules.

    Args:
        path: of the module, relative to the package, with forward slashes: "ucb/bounds.py".
        source: its text.
    """
    if path == "__init__.py":
        own_room = None  # the front door sees every room
    else:
        own_room = Path(path).parts[0].removesuffix(".py")
        if own_room not in ROOMS:
            return [
                f"{path}: {own_room!r} is not a known room: place it in ROOMS "
                "(tests/test_imports.py), above everything that it imports"
            ]
    problems = []
    for line, name in imported_names(source, path):
        problem = _problem(path, own_room, name.split("."))
        if problem:
            problems.append(f"{path}:{line}: {problem}")
    return problems


def _problem(path: str, own_room: str | None, target: list[str]) -> str | None:
    top = target[0]
    if top in DOORS:
        return None if path in DOORS[top] else f"{top} belongs only in {sorted(DOORS[top])}"
    if top != "torchglb":
        if top in EVERYWHERE or top in sys.stdlib_module_names:
            return None
        return f"{top} is not a dependency of the library"
    room = target[1] if len(target) > 1 else None
    if room not in ROOMS:
        if own_room is None and room is not None:
            return None if room.startswith("__") else f"{room!r} is not a known room"
        return "imports from the front door of torchglb: import from the room that defines it"
    if own_room is None:
        return None
    if ROOMS.index(room) > ROOMS.index(own_room):
        return f"{own_room} looks up into {room}"
    if own_room == room == "policies" and path not in POLICY_COLLECTORS:
        module = target[2] if len(target) > 2 else None
        shared = BELOW_BASE if path == "policies/base.py" else SHARED_POLICY_MODULES
        if module not in shared:
            return f"policies never import each other (shared: {', '.join(sorted(shared))})"
    return None


MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES)
def test_imports_point_downwards(path):
    found = violations(path, (PACKAGE / path).read_text(encoding="utf-8"))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("linalg.py", "from torchglb.mle import constrained_mle", "looks up into mle"),
        ("linalg.py", "from .mle import constrained_mle", "looks up into mle"),
        ("linalg.py", "from . import mle", "looks up into mle"),
        ("linalg.py", "import torchglb.mle as m", "looks up into mle"),
        ("families/base.py", "from ..rows.history import History", "looks up into rows"),
        ("families/__init__.py", "from ..rows.history import History", "looks up into rows"),
        ("families/base.py", "from torchglb import rows", "looks up into rows"),
        ("optim/loop.py", "def f():\n    from torchglb import mle", "looks up into mle"),
        ("optim/loop.py", "import importlib\nimportlib.import_module('torchglb.mle')", "into mle"),
        ("optim/loop.py", "import_module('..mle', __package__)", "looks up into mle"),
        ("optim/loop.py", "if TYPE_CHECKING:\n    from torchglb.mle import X", "looks up into mle"),
        ("ucb/solvers/native.py", "from torchglb.sets import ConfidenceSet", "looks up into sets"),
        ("policies/base.py", "from torchglb.environments import Arms", "looks up into environ"),
        ("likelihood.py", "import torchglb", "front door"),
        ("likelihood.py", "from torchglb import History", "front door"),
        ("likelihood.py", "from . import History", "front door"),
        ("policies/a.py", "from torchglb.policies.b import B", "never import each other"),
        ("policies/a.py", "from .b import B", "never import each other"),
        ("policies/a.py", "from . import b", "never import each other"),
        ("policies/a.py", "from torchglb.policies import B", "never import each other"),
        ("policies/base.py", "from .a import A", "never import each other"),
        ("policies/base.py", "from .registry import register", "never import each other"),
        ("ucb/solvers/native.py", "import cvxpy as cp", "cvxpy belongs only in"),
        ("mle/fit.py", "from cvxpy.atoms import norm", "cvxpy belongs only in"),
        ("__init__.py", "import cvxpy", "cvxpy belongs only in"),
        (
            "ucb/solvers/conic/oracle.py",
            "from cvxpylayers.torch import CvxpyLayer",
            "cvxpylayers belongs only",
        ),
        ("cli.py", "import matplotlib.pyplot as plt", "matplotlib belongs only in"),
        ("plotting/experiment.py", "from torchglb.report import table", "looks up into report"),
        ("simulate/runner.py", "import ray", "ray belongs only in"),
        ("mle/fit.py", "import sklearn.linear_model", "sklearn belongs only in"),
        ("mle/fit.py", "import polars", "not a dependency"),
        ("__init__.py", "from torchglb.kitchen import sink", "not a known room"),
        ("kitchen.py", "", "place it in ROOMS"),
        ("kitchen/sink.py", "", "place it in ROOMS"),
    ],
)
def test_planted_violation_is_found(path, source, expected):
    (sentence,) = violations(path, source)
    assert expected in sentence


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("__init__.py", "from torchglb.cli import main\nfrom .ucb.solvers import Native"),
        ("likelihood.py", "import math\nimport torch.nn as nn\nfrom scipy import special"),
        (
            "likelihood.py",
            "from .rows.history import History\nfrom torchglb.families.base import GLMFamily",
        ),
        ("families/__init__.py", "from .bernoulli import Bernoulli"),
        ("families/bernoulli.py", "from torchglb.families import GLMFamily\nfrom . import base"),
        ("sets/likelihood_ratio.py", "from torchglb.ucb import upper_confidence_bound"),
        ("ucb/solvers/conic/cones.py", "import cvxpy as cp"),
        ("ucb/solvers/conic/layer.py", "import cvxpy\nfrom cvxpylayers.torch import CvxpyLayer"),
        ("plotting/radii.py", "from matplotlib import pyplot"),
        ("simulate/ray_executor.py", "import ray"),
        ("policies/a.py", "from .base import Policy\nfrom torchglb.policies import registry"),
        ("policies/registry.py", "from .a import A"),
        ("policies/__init__.py", "from .a import A\nfrom .base import Policy"),
    ],
)
def test_allowed_imports_pass(path, source):
    assert violations(path, source) == []


def test_import_is_light():
    """`import torchglb` leaves the packages behind the doors unloaded."""
    script = (
        f"import sys, torchglb; sys.exit(', '.join(sorted({set(DOORS)!r} & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, f"import torchglb also imports: {done.stderr}"


def test_version_is_the_one_of_pyproject():
    pyproject = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    assert torchglb.__version__ == pyproject["project"]["version"]
