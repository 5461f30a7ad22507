import gc
from collections import Counter

import pytest
import torch

torch.set_num_threads(1)  # small tensors: a second thread costs more in waiting than it brings


@pytest.fixture
def generator() -> torch.Generator:
    """A seeded CPU generator: tests draw their random numbers from it and from nothing else."""
    return torch.Generator().manual_seed(20240607)


# Torch, Numba and what they load are a million objects, over which Python's garbage collector walks
# again and again: a sixth of the time of these tests. It looks less often, and only at what is new.
gc.set_threshold(1_000_000, 5, 5)


@pytest.fixture(autouse=True, scope="module")
def _keep_from_the_garbage_collector() -> None:
    gc.collect()
    gc.freeze()


#: files that take long for their number of tests: they wait for processes, or run whole scripts
LONGEST = (
    "simulate/test_ray.py",
    "simulate/test_faults.py",
    "test_state_machines.py",
    "test_cli.py",
    "test_distributed.py",  # two processes at work: not beside a cluster, which would starve
    "experiments/test_neural_scripts.py",
    "simulate/test_presets.py",
    "docs/test_readme.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, then those with many tests.

    Two processes take a file each until none is left (``make test``): what is taken last should
    be short, or one of them waits for the other at the end.
    """
    tests = Counter(item.path for item in items)

    def place(item: pytest.Item) -> tuple[int, int]:
        name = item.path.as_posix()
        ranks = [rank for rank, end in enumerate(LONGEST) if name.endswith(f"tests/{end}")]
        return (ranks[0] if ranks else len(LONGEST), -tests[item.path])

    items.sort(key=place)
