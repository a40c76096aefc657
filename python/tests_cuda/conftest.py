"""All of these tests are on the process's pool, which has to be PyTorch's allocator before its first CUDA
call, whichever of them comes first."""

import pytest

try:
    import torch
except ImportError:
    torch = None


@pytest.fixture(scope="session", autouse=True)
def allocator():
    if torch is not None and torch.cuda.is_available():
        import vpmm.torch

        vpmm.torch.use()
