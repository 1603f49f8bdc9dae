import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """The tensors here are tiny, and results are compared to the bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
