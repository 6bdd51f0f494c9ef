from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from llmrt.checkpoint.checkpoint import Checkpoint
from llmrt.checkpoint.resolve import resolve
from llmrt.display.progress import Progress
from llmrt.errors import ConfigError

QUIET = Progress(False)


def find(model: str | os.PathLike[str] | None) -> Checkpoint:
    return resolve(model, progress=QUIET)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with the files of a model (and a space in its name)."""
    directory = tmp_path / "my model"
    directory.mkdir()
    (directory / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    (directory / "model.safetensors").write_bytes(b"")
    (directory / "tokenizer.json").write_text("{}")
    return directory


# ---- what is here is taken from here ----


@pytest.mark.parametrize("form", ["./{}", "./{}/", "{}", "absolute", "link", "path", "home"])
def test_a_directory_is_found_however_it_is_written(
    form: str, model: Path, no_network: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HOME", str(model.parent))
    (model.parent / "link").symlink_to(model)
    named: dict[str, str | Path] = {
        "absolute": str(model),
        "link": "link",
        "path": model,
        "home": "~/my model",
    }
    found = find(named.get(form, form.format(model.name)))
    assert found.name == "my model"
    assert found.config == {"architectures": ["LlamaForCausalLM"]}
    assert found.generation_config == {"eos_token_id": [2, 7]}
    assert os.path.samefile(found.weights, model)
    assert os.path.isabs(found.weights)
    assert found.gguf_index is None
    assert found.has_tokenizer
    assert not no_network.exists()


def test_a_directory_wins_over_a_hub_id_of_the_same_name(
    model: Path, no_network: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model.parent / "org").mkdir()
    model.rename(model.parent / "org" / "name")
    monkeypatch.chdir(model.parent)
    assert find("org/name").name == "name"
    assert not no_network.exists()


# ---- what is missing is named ----


@pytest.mark.parametrize(
    "text", ["/no/such/dir", "./nothing", "../nothing/", "nothing/at/all", "a.gguf", "C:\\model"]
)
def test_a_path_that_does_not_exist_is_named_and_never_looked_for_elsewhere(
    text: str, no_network: Path
) -> None:
    with pytest.raises(ConfigError, match="does not exist") as caught:
        find(text)
    assert text in str(caught.value).replace("\\\\", "\\")
    assert not no_network.exists()


def test_a_path_object_is_never_a_hub_id(no_network: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        find(Path("org/name"))
    assert not no_network.exists()


def test_a_misspelt_path_gets_the_nearest(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"Did you mean .*my model"):
        find(str(model.parent / "my-model"))


def test_no_config_is_named_with_what_to_do(model: Path) -> None:
    (model / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"my model has no config\.json.*save_pretrained"):
        find(model)
    (model / "a.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"only GGUF files.*my model/a\.gguf"):
        find(model)


def test_only_pickled_weights_are_refused_with_the_way_out(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"only as pytorch_model\.bin.*save_pretrained"):
        find(model)
    (model / "pytorch_model.bin").unlink()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors file"):
        find(model)


def test_only_a_sentencepiece_model_is_refused_with_the_way_out(model: Path) -> None:
    (model / "tokenizer.json").rename(model / "tokenizer.model")
    with pytest.raises(ConfigError, match=r"only tokenizer\.model.*AutoTokenizer"):
        find(model)


def test_a_model_without_any_tokenizer_is_a_model(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert not find(model).has_tokenizer


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_damaged_config_is_named(model: Path, content: str) -> None:
    (model / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"config\.json"):
        find(model)


def test_one_file_of_a_model_points_to_its_directory(model: Path) -> None:
    with pytest.raises(ConfigError, match="Give the directory"):
        find(model / "model.safetensors")


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="names no model"):
        find(" ")


# ---- the hub ----


def fake_hub(packages: Path, body: str) -> None:
    (packages / "huggingface_hub.py").write_text(
        f"def snapshot_download(model, **options):\n{body}"
    )


def test_a_hub_id_is_fetched_with_the_files_that_are_needed(model: Path, packages: Path) -> None:
    asked = packages / "asked.json"
    fake_hub(
        packages,
        f"    import json; json.dump([model, options], open({str(asked)!r}, 'w'))\n"
        f"    print('noise'); return {str(model)!r}\n",
    )
    found = find("org/name")
    assert (found.name, found.weights) == ("org/name", str(model))
    name, options = json.loads(asked.read_text())
    assert name == "org/name"
    assert "*.safetensors" in options["allow_patterns"]
    assert not any("bin" in pattern for pattern in options["allow_patterns"])


def test_what_the_hub_does_not_give_is_named_with_its_reason(packages: Path) -> None:
    fake_hub(packages, "    raise OSError('401\\n  gated repo')\n")
    with pytest.raises(ConfigError, match=r"'org/name'.*OSError: 401 gated repo.*HF_TOKEN"):
        find("org/name")


def test_an_offline_hub_serves_its_cache(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0" * 40
    repository = tmp_path / "hub" / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots").mkdir()
    model.rename(repository / "snapshots" / commit)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert find("org/name").generation_config == {"eos_token_id": [2, 7]}
    with pytest.raises(ConfigError, match="'org/other'"):
        find("org/other")
