"""A model that cannot be loaded: one error that says what is wrong, and nothing left."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from llmrt import ConfigError, Engine, EngineStartError, EngineState, LlmrtError
from tests.lifecycle.conftest import SHORT

pytestmark = pytest.mark.slow


def without_config(model: Path) -> None:
    (model / "config.json").unlink()


def config_is_no_json(model: Path) -> None:
    (model / "config.json").write_text("{")


def unknown_architecture(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["architectures"] = ["NobodyKnowsForCausalLM"]
    config["model_type"] = "nobody_knows"
    (model / "config.json").write_text(json.dumps(config))


def tokenizer_is_garbage(model: Path) -> None:
    (model / "tokenizer.json").write_text("garbage")


def without_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def weights_are_cut_short(model: Path) -> None:
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(data[:-1000])


def weights_are_a_pointer(model: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n"
    (model / "model.safetensors").write_text(text)


def weights_are_of_another_shape(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["intermediate_size"] += 32
    (model / "config.json").write_text(json.dumps(config))


DAMAGES: dict[Callable[[Path], None], str] = {
    without_config: "config.json",
    config_is_no_json: "config.json",
    unknown_architecture: "(?i)nobody.?knows",
    tokenizer_is_garbage: "tokenizer.json",
    without_weights: "safetensors",
    weights_are_cut_short: r"model\.safetensors",
    weights_are_a_pointer: r"model\.safetensors",
    weights_are_of_another_shape: "mlp",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_model_is_one_error_that_names_the_damage(
    tiny_model: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    damage(model)
    llm = Engine(model, tp=2)
    with pytest.raises((ConfigError, EngineStartError), match=DAMAGES[damage]):
        llm.open()
    assert llm.workers == ()
    assert llm.state is not EngineState.STARTING
    with pytest.raises(LlmrtError):
        llm.generate("a", SHORT)
    shutil.rmtree(model)
    shutil.copytree(tiny_model, model)
    with llm:
        assert llm.generate("a", SHORT)[0].token_ids
