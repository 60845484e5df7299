"""What every test runs under."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

# Before anything imports transformers. Tests never ask a hub.
os.environ["HF_HUB_OFFLINE"] = "1"
# cuBLAS wants a fixed workspace in torch's deterministic mode, which `pytest_configure` turns on.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

ROOT = Path(__file__).resolve().parent.parent
# On sys.path the root would put our `kernels/` before Hugging Face's package of that name. The variable keeps the
# working folder out of the path of the Python processes that tests start.
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != ROOT]
os.environ["PYTHONSAFEPATH"] = "1"

import pytest  # noqa: E402  (after sys.path is right)
import torch  # noqa: E402

if TYPE_CHECKING:
    from mlserve.engine.tokenizer import Tokenizer

# Before anything imports triton. Without a GPU its kernels run in its interpreter, on CPU tensors; what compiles them
# (tests/support/triton_aot.py) is a process of its own, without the variable.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure() -> None:
    """Poison scratch memory: `torch.empty` and its kin, in Python and in C++, return NaN (and the largest integers).

    torch fills uninitialised memory in its deterministic mode only; on a CPU that mode changes little else.
    """
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model TINY and its tokenizer."""
    from tiny import write_tiny

    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    """The byte-level tokenizer of TINY."""
    from mlserve.engine.tokenizer import load_tokenizer

    return load_tokenizer(tiny_model_dir)
