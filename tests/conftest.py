import pytest
import torch

torch.set_num_threads(1)  # small tensors: a second thread costs more in waiting than it brings


@pytest.fixture
def generator() -> torch.Generator:
    """A seeded CPU generator: tests draw their random numbers from it and from nothing else."""
    return torch.Generator().manual_seed(20240607)
