"""These tests are on the process's pool, which has to be PyTorch's allocator before its first CUDA call,
whichever of them comes first. With --own-allocator PyTorch keeps its own: the service's are for both."""

import pytest

try:
    import torch
except ImportError:
    torch = None


def pytest_addoption(parser):
    parser.addoption("--own-allocator", action="store_true", help="PyTorch keeps its own allocator")


@pytest.fixture(scope="session", autouse=True)
def allocator(request):
    if request.config.getoption("--own-allocator"):
        return
    if torch is not None and torch.cuda.is_available():
        import vpmm.torch

        vpmm.torch.use()
