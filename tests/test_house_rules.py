"""Rules of the house that no linter knows: private names stay in their room, one name is one class."""

import ast
import re
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "torchglb"
FILES = sorted(PACKAGE.rglob("*.py"))

#: private names of other people's classes, and of named tuples
FOREIGN = frozenset({"_C", "_functorch", "_current_level", "_is_zerotensor", "_replace", "_asdict", "_fields", "_version", "_make", "_cache", "_OptLevel"})  # fmt: skip
#: two classes of one name that may stand; none
KNOWN_TWINS: frozenset[str] = frozenset()


def room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def private(name):
    return name.startswith("_") and not name.startswith("__") and name != "_"


def names_of_rooms():
    """The private names that each room defines: functions, attributes, variables, fields."""
    found = defaultdict(set)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found[room(path)].add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found[room(path)].add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found[room(path)].add(node.id)
    return found


def trespasses(tree, own):
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr):
            mine = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            above = (
                isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super"
            )
            if not (mine or above or node.attr in own or node.attr in FOREIGN):
                yield node.lineno, node.attr
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchglb."):
            for alias in node.names:
                if private(alias.name) and alias.name not in own:
                    yield node.lineno, alias.name


def test_private_names_stay_in_their_room():
    rooms = names_of_rooms()
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path in FILES
        for line, name in trespasses(ast.parse(path.read_text(encoding="utf-8")), rooms[room(path)])
    ]
    assert not found, "\n".join(found)


def test_a_trespass_is_found():
    tree = ast.parse("from torchglb.ucb import _a\nx._b\nself._c\nx._own\nsuper()._d")
    assert [name for _, name in trespasses(tree, {"_own"})] == ["_a", "_b"]


def test_one_name_is_one_class():
    places = defaultdict(list)
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    twins = {name: where for name, where in places.items() if len(where) > 1}
    assert set(twins) <= KNOWN_TWINS, twins


WORD = re.compile(r"`(?:[A-Za-z_]+\.)?([A-Za-z_]+)(?:\(([a-z_, ]*)\))?`")


def parameters():
    """What every function and class of the package is called with, by its name."""
    found = defaultdict(set)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                found[node.name] |= {one.arg for one in given}
            elif isinstance(node, ast.ClassDef):
                found[node.name] |= set()
    return found


def test_the_round_in_the_docs_names_what_there_is():
    """docs/round.md: at most twelve hops; files, functions and arguments are in the package."""
    text = (PACKAGE.parent / "docs" / "round.md").read_text(encoding="utf-8")
    hops = [line for line in text.splitlines() if line[:1].isdigit()]
    assert 1 <= len(hops) <= 12
    known, names = parameters(), 0
    for hop in hops:
        for path in re.findall(r"`([a-z_/]+\.py)`", hop):
            assert any(str(file).endswith(f"/{path}") for file in FILES), path
        for name, given in WORD.findall(re.sub(r"`[a-z_/]+\.py`", "", hop)):
            assert name in known, name
            assert not given or set(given.split(", ")) <= known[name], (name, given)
            names += 1
    assert names > 25


def test_a_policy_of_ones_own_at_the_command_line(tmp_path, monkeypatch, capsys):
    from torchglb import policies
    from torchglb.cli import main

    (tmp_path / "my_policies.py").write_text(
        "from torchglb.policies import OFUL, register\n\n\n@register\n"
        "class Mine(OFUL):\n    '''Mine alone.'''\n\n    name = 'mine'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["--import", "my_policies", "list"]) == 0
    assert "mine" in policies.available()
    assert main(["--import", "no_such_module", "list"]) == 2
    assert (
        "imports: expected modules that can be imported, got 'no_such_module'"
        in capsys.readouterr().err
    )
    policies.registry._POLICIES.pop("mine")
