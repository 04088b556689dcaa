import json
import subprocess
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

TRAINED = ("tiny-dense", "tiny-moe", "tiny-draft")
ALL = (*TRAINED, "bench-moe")
LIMIT = 30_000_000
TRICKY = "def f(x):\n    return  x + 12345  # é 漢字 \U0001f600\n\n\n\tend \\n <|im_end|>"


@pytest.mark.parametrize("name", ALL)
def test_a_folder_holds_what_vllm_reads(models_folder: Path, name: str) -> None:
    found = {path.name for path in (models_folder / name).iterdir()}
    wanted = {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert wanted <= found
    assert ("model.safetensors" in found) is (name in TRAINED)


def test_all_committed_files_together_stay_under_the_limit(models_folder: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=models_folder, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    size = sum((models_folder / name).stat().st_size for name in listed.stdout.split("\0") if name)
    assert 10_000_000 < size < LIMIT


@pytest.mark.parametrize("name", ALL)
def test_text_survives_the_tokenizer(models_folder: Path, name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(models_folder / name)
    assert tokenizer.decode(tokenizer(TRICKY).input_ids) == TRICKY
    assert len(tokenizer) == json.loads((models_folder / name / "config.json").read_text())["vocab_size"]
    assert tokenizer.model_max_length == 2048


@pytest.mark.parametrize("name", ALL)
def test_the_models_share_one_tokenizer(models_folder: Path, name: str) -> None:
    """A draft's tokens are the target's."""
    shared = (models_folder / "tiny-dense" / "tokenizer.json").read_bytes()
    assert (models_folder / name / "tokenizer.json").read_bytes() == shared


@pytest.mark.parametrize("name", ALL)
def test_the_chat_template_renders_what_the_models_learnt(models_folder: Path, name: str) -> None:
    import corpus_chat

    tokenizer = AutoTokenizer.from_pretrained(models_folder / name)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi {there}\n"}]
    asked = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert asked == corpus_chat.render(messages, ask=True)
    assert asked.endswith("<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer(asked, add_special_tokens=False).input_ids
    assert ids.count(tokenizer.eos_token_id) == len(messages)


@pytest.mark.parametrize("name", TRAINED)
def test_generation_ends_with_the_turn(models_folder: Path, name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(models_folder / name)
    ends = json.loads((models_folder / name / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in ends


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        (
            "tiny-dense",
            {"model.embed_tokens.weight": [3072, 256], "model.layers.3.mlp.up_proj.weight": [768, 256]},
        ),
        (
            "tiny-draft",
            {"model.embed_tokens.weight": [3072, 256], "model.layers.0.mlp.up_proj.weight": [768, 256]},
        ),
        (
            "tiny-moe",
            {
                "model.layers.3.mlp.gate.weight": [8, 256],
                "model.layers.3.mlp.experts.7.down_proj.weight": [256, 192],
            },
        ),
    ],
)
def test_weights_are_bf16_of_the_shapes_expected(
    models_folder: Path, name: str, shapes: dict[str, list[int]]
) -> None:
    layers = json.loads((models_folder / name / "config.json").read_text())["num_hidden_layers"]
    with safe_open(models_folder / name / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
        assert {name: weights.get_slice(name).get_shape() for name in shapes} == shapes
        assert {weights.get_slice(name).get_dtype() for name in names} == {"BF16"}
        assert all(weights.get_tensor(name).isfinite().all() for name in names)
    assert {name.split(".")[2] for name in names if ".layers." in name} == {
        str(layer) for layer in range(layers)
    }


def test_bench_moe_activates_about_a_hundred_million_parameters(models_folder: Path) -> None:
    import bench_moe
    from transformers import AutoConfig

    active, whole = bench_moe.parameters(AutoConfig.from_pretrained(models_folder / "bench-moe"))
    assert 90e6 < active < 110e6
    assert whole > 4 * active
