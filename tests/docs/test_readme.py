"""Every python block of README.md and of the site's pages runs, in a namespace of its own."""

import sys
import types
from pathlib import Path

import pytest
import torch
from documents import python_blocks

import torchglb as glb

PROJECT = Path(__file__).parents[2]
README = PROJECT / "README.md"
PAGES = (README, *sorted((PROJECT / "docs").glob("*.md")))

BLOCKS = [(p, *block) for p in PAGES for block in python_blocks(p.read_text(encoding="utf-8"))]


def run(line: int, code: str, monkeypatch: pytest.MonkeyPatch, page: Path = README) -> None:
    module = types.ModuleType("readme_example")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses and pickle look here
    # The empty lines make a traceback show the line number of the page itself.
    exec(compile("\n" * line + code, str(page), "exec"), module.__dict__)


def test_pages_that_show_how_have_examples():
    shown = {page.stem for page, _, _ in BLOCKS}
    assert shown >= {"README", "start", "guide", "contrasts", "preferences", "stopping"}


@pytest.mark.parametrize(
    ("page", "line", "code"), BLOCKS, ids=[f"{page.stem}-line{line}" for page, line, _ in BLOCKS]
)
def test_example_runs(page, line, code, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    run(line, code, monkeypatch, page)


def test_readme_opens_with_the_two_commands():
    first_block = README.read_text(encoding="utf-8").split("```")[1]
    assert first_block.split("\n")[1:] == ["make demo", "make test", ""]


def test_the_quickstart_makes_a_policy_and_nobody_types_double():
    text = README.read_text(encoding="utf-8")
    assert "policies.make(" in python_blocks(text)[0][1]
    assert not [page.name for page in PAGES if ".double()" in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize(
    ("S", "radius", "width"),
    [(2, "pac-bayes", 0.66), (4, "pac-bayes", 0.71), (8, "pac-bayes", 0.76),
     (16, "pac-bayes", 0.80), (2, "gaussian-prior", 0.68), (8, "gaussian-prior", 0.76)],
)  # fmt: skip
def test_what_the_readme_says_about_S(S, radius, width):
    text = README.read_text(encoding="utf-8").partition("## Choosing S")[2].partition("\n## ")[0]
    assert f"{width:.2f}" in text
    assert "BoundaryWarning" in text
    generator = torch.Generator().manual_seed(0)
    x = torch.nn.functional.normalize(torch.randn(2000, 2, generator=generator), dim=-1)
    sequence = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, S), 0.05, radius)
    sequence.update(x, glb.Bernoulli().sample(x @ torch.tensor([1.5, 0.0]), generator))
    lower, upper = sequence.current().interval([1.0, 0.0])
    assert round(float(upper - lower), 2) == width


def test_blocks_are_found_and_their_errors_seen(monkeypatch):
    text = "a\n```python\nx = 1\n```\nb\n```\nnot python\n```\n```python\nassert x == 1\n```\n"
    blocks = python_blocks(text)
    assert blocks == [(2, "x = 1"), (9, "assert x == 1")]
    run(*blocks[0], monkeypatch)
    with pytest.raises(NameError) as failure:  # nothing leaks from one block into the next
        run(*blocks[1], monkeypatch)
    assert failure.traceback[-1].lineno + 1 == 10


@pytest.mark.parametrize(
    "fence", ["```python no-run", "```py", "```Python", "  ```python", "```{python}", "```pycon"]
)
def test_no_block_can_opt_out(fence):
    with pytest.raises(ValueError, match="exactly"):
        python_blocks(f"{fence}\nx = 1\n```\n")


def test_unclosed_block():
    with pytest.raises(ValueError, match="never closed"):
        python_blocks("```python\nx = 1\n")
