"""Who may import whom, read from the source."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "llmrt"
BASE = ("errors", "sampling", "outputs", "model_config", "config", "messages")
"""In order: each may import those before it."""
PILLARS = ("scheduler", "runtime", "worker")
BASE_EXTRAS = (
    "version",
    "architectures",
    "config_fields",
    "unpicklable",
    "by_value",
    "shared_memory_layout",
    "cache_entries",
    "c_compiler",
)
"""Base files of their own: they import `errors` and each other."""
OPTIONAL_OR_HEAVY = {
    "tokenizers", "jinja2", "huggingface_hub", "tqdm", "gguf", "cloudpickle", "ray", "IPython",
    "numpy", "torch", "readline", "llguidance",
}  # fmt: skip
NATIVE_POOLS = {"torch", "numpy", "gguf", "ray"}
FILES = sorted(ROOT.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = ["llmrt", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield (module, is_inside_a_function) of every import that runs."""
    tree = ast.parse(path.read_text())
    yield from _walk(tree, inside=False)


def _walk(node: ast.AST, *, inside: bool) -> Iterator[tuple[str, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from ((alias.name, inside) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            names = [f"llmrt.{alias.name}" for alias in child.names]
            for module in names if child.module == "llmrt" else [child.module or ""]:
                yield module, inside
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from _walk(child, inside=inside or is_function)


def floor(module: str) -> str:
    """Return the pillar, `base`, or `top` that a module of llmrt belongs to."""
    name = module.split(".")[1] if "." in module else "top"
    if name in PILLARS:
        return name
    return "base" if name in (*BASE, *BASE_EXTRAS) else "top"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_stay_within_the_house(path: Path) -> None:
    own = floor(module_of(path))
    for module, inside in imports_of(path):
        if not module.startswith("llmrt"):
            continue
        assert not inside, f"{path}: llmrt is imported inside a function: {module}"
        target = floor(module)
        if own in PILLARS:
            assert target in (own, "base"), f"{path} ({own}) imports {module} ({target})"
        if own == "base":
            assert target == "base", f"{path} (base) imports {module} ({target})"
        if own == "top":
            assert target != "worker", f"{path} imports {module}: reach the worker by name"


def test_base_files_import_only_earlier_ones() -> None:
    for position, name in enumerate(BASE):
        imported = {m for m, _ in imports_of(ROOT / f"{name}.py") if m.startswith("llmrt")}
        allowed = {f"llmrt.{b}" for b in (*BASE[:position], *BASE_EXTRAS)}
        assert imported <= allowed, name


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_third_parties_are_imported_where_they_may_be(path: Path) -> None:
    own = floor(module_of(path))
    header_reader = module_of(path) == "llmrt.checkpoint.gguf_header"  # a process of its own
    for module, inside in imports_of(path):
        top = module.split(".")[0]
        if top in sys.stdlib_module_names or top == "llmrt" or own == "worker":
            continue
        if header_reader and top in ("gguf", "numpy"):
            continue
        if module_of(path) == f"llmrt.integrations.{top}":  # whoever imports it wants that library
            continue
        assert top not in NATIVE_POOLS, f"{path} imports {top} into the user's process"
        if inside:
            assert top in OPTIONAL_OR_HEAVY, f"{path}: {top} is imported inside a function"
        else:
            assert top in ("psutil", "typing_extensions"), f"{path} imports {top} at import time"


def test_there_are_no_import_cycles() -> None:
    graph = {
        module_of(path): {m for m, _ in imports_of(path) if m.startswith("llmrt")} for path in FILES
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail, module))
        if module in done:
            return
        for target in graph.get(module, ()):
            visit(target, (*trail, module))
        done.add(module)

    for module in graph:
        visit(module, ())


def test_no_module_has_a_name_that_says_nothing() -> None:
    vague = {"utils", "util", "core", "common", "helpers", "tools", "shared", "misc"}
    assert not [path for path in FILES if path.stem in vague or path.parent.name in vague]
