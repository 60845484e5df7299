"""The names that `mlserve` offers, and what asking for them costs."""

from __future__ import annotations

import pytest
from tree import run_python

import mlserve
from mlserve import config, constraint, errors, request


def test_every_name_exists() -> None:
    assert [name for name in mlserve.__all__ if getattr(mlserve, name, None) is None] == []


def test_names_are_sorted_and_listed_by_dir() -> None:
    capitals_first = sorted(mlserve.__all__, key=lambda name: (not name.isupper(), name))
    assert mlserve.__all__ == capitals_first
    assert {*mlserve.__all__} <= {*dir(mlserve)}


def test_all_plain_data_is_public() -> None:
    for module in (config, constraint, errors, request):
        assert {*module.__all__} <= {*mlserve.__all__}
        for name in module.__all__:
            assert getattr(mlserve, name) is getattr(module, name)


def test_llm_is_the_class_of_its_module() -> None:
    from mlserve.llm import LLM

    assert mlserve.LLM is LLM


def test_llm_is_loaded_only_when_asked_for() -> None:
    code = (
        "import sys, mlserve; before = 'mlserve.llm' in sys.modules; mlserve.LLM; "
        "print(before, 'mlserve.llm' in sys.modules, 'torch' in sys.modules)"
    )
    assert run_python(code).stdout.split() == ["False", "True", "True"]


def test_a_misspelt_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'mlserve' has no attribute 'LLMs'"):
        _ = mlserve.LLMs  # type: ignore[attr-defined]


def test_version_is_the_installed_one() -> None:
    from importlib.metadata import version

    assert version("mlserve") == mlserve.__version__
