"""What the documents and docstrings say is so: commands, links, names, versions; and nothing names a machine."""

from __future__ import annotations

import re

from tree import ROOT, tree_files

import mlserve
from mlserve import errors

DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_make_targets_in_the_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = {name for path in DOCUMENTS for name in re.findall(r"\bmake ([a-z]+)\b", _code(path.read_text()))}
    assert {"run", "test"} <= used <= targets


def test_links_and_files_in_the_documents_exist() -> None:
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_readme_python_samples_use_public_names() -> None:
    for sample in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL):
        compile(sample, "README.md", "exec")
        for names in re.findall(r"from mlserve import (.+)", sample):
            assert {name.strip() for name in names.split(",")} <= {*mlserve.__all__}


def test_changelog_mentions_the_current_version() -> None:
    assert f"## {mlserve.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_error_tree_in_the_docstring_is_the_classes() -> None:
    drawn: dict[str, tuple[str, ...]] = {}
    parents: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ([│├└─ ]*)(\w+Error)\b(?:.*\(also (\w+)\))?", line)
        if match:
            depth = len(match[1]) // 4
            del parents[depth:]
            drawn[match[2]] = tuple(filter(None, (parents[-1] if parents else "Exception", match[3])))
            parents.append(match[2])
    classes = {name: getattr(errors, name) for name in errors.__all__}
    assert drawn == {name: tuple(base.__name__ for base in cls.__bases__) for name, cls in classes.items()}


def test_nothing_names_a_machine() -> None:
    """Paths of one machine and hosts of registries; put together here so that this file does not name them."""
    banned = re.compile("/" + r"(work|tmp|root|home)/|" + "|".join(map(re.escape, _registry_hosts())))
    for path in tree_files():
        if path.suffix in {".py", ".cpp", ".h", ".md", ".toml", ".yml", ""}:
            match = banned.search(path.read_text())
            assert match is None, f"{path}: {match and match.group()}"


def _registry_hosts() -> list[str]:
    names = (("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org"), ("deb.debian", "org"))
    return [".".join(name) for name in (*names, ("download.pytorch", "org"))]


def _code(markdown: str) -> str:
    """The text of code blocks and code spans."""
    return "\n".join(re.findall(r"```.*?```|`[^`\n]+`", markdown, re.DOTALL))
