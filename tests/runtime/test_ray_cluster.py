"""What is said where Ray cannot be used; none of these imports the real one."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from llmrt.errors import ConfigError
from llmrt.runtime import ray_cluster


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide a Ray that is installed."""
    for name in list(sys.modules):
        if name == "ray" or name.startswith("ray."):
            monkeypatch.delitem(sys.modules, name)


def fake_ray(monkeypatch: pytest.MonkeyPatch, version: str) -> ModuleType:
    ray, raylet = ModuleType("ray"), ModuleType("ray._raylet")
    ray.__path__, raylet.__spec__ = [], ModuleSpec("ray._raylet", None)
    ray.__version__ = version  # type: ignore[attr-defined]
    ray.is_initialized = lambda: False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray._raylet", raylet)
    return ray


@pytest.mark.usefixtures("pretend")
def test_a_missing_ray_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'llmrt\[ray\]'"):
        ray_cluster.check_installation()


@pytest.mark.usefixtures("pretend")
@pytest.mark.parametrize("has_init", [True, False], ids=["package", "folder"])
def test_a_folder_named_ray_is_not_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_init: bool
) -> None:
    folder = tmp_path / "ray"
    folder.mkdir()
    if has_init:
        (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    if not has_init:  # a package further down the path would win
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ConfigError, match="is not Ray but"):
        ray_cluster.check_installation()


@pytest.mark.usefixtures("pretend")
@pytest.mark.parametrize(
    ("version", "is_good"),
    [("2.43.0", False), ("2.44.1", True), ("2.60.0", True), ("3.0.0.dev0", False)],
)
def test_the_version_is_checked(
    monkeypatch: pytest.MonkeyPatch, version: str, is_good: bool
) -> None:
    fake_ray(monkeypatch, version)
    if is_good:
        ray_cluster.check_installation()
    else:
        with pytest.raises(ConfigError, match=rf"ray>=2.44,<3.0; found {version}"):
            ray_cluster.check_installation()


@pytest.mark.usefixtures("pretend")
def test_a_client_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ray(monkeypatch, "2.60.0")
    ray_cluster.check_mode({"RAY_ADDRESS": "10.0.0.1:6379"})
    with pytest.raises(ConfigError, match=r"ray://10\.0\.0\.1:10001.*outside the cluster"):
        ray_cluster.check_mode({"RAY_ADDRESS": "ray://10.0.0.1:10001"})
