"""Run by test_lora_slots.py in a process of its own: vLLM with an adapter, and a kernel under the layers that it adapts."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from polymorph.engine.launch import EngineLaunch
from polymorph.engine.support import features

PROMPTS = ("def main(", "The licence permits", '{"name": ')
RANK = 8


def launch_of(model: str) -> EngineLaunch:
    return EngineLaunch(
        model=Path(model), slots=("linear",), max_model_len=256, max_num_seqs=4, enforce_eager=True
    )


def adapter(model: Path, folder: Path) -> Path:
    """Random factors for the projections of every layer, large enough to change what is generated."""
    config = json.loads((model / "config.json").read_text())
    width, heads = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    sizes = {"self_attn.q_proj": (width, heads), "self_attn.o_proj": (heads, width)}
    sizes |= {
        "mlp.up_proj": (width, config["intermediate_size"]),
        "mlp.down_proj": (config["intermediate_size"], width),
    }
    torch.manual_seed(3)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in sizes.items():
            stem = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, inputs) * 0.1
            tensors[f"{stem}.lora_B.weight"] = torch.randn(outputs, RANK) * 0.1
    folder.mkdir()
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    modules = [name.split(".")[1] for name in sizes]
    described = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": modules,
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


def main(model: str, linear: str, folder: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    adapted = LoRARequest("random", 1, str(adapter(Path(model), Path(folder) / "adapter")))
    llm = LLM(**launch_of(model).arguments(), enable_lora=True, max_lora_rank=RANK, max_loras=1)
    options = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)

    def rpc(method: str, *arguments: Any) -> dict[str, Any]:
        answer: dict[str, Any] = llm.collective_rpc(method, args=arguments)[0]
        assert answer.get("ok", True), answer
        return answer

    def tokens(lora: Any) -> list[list[int]]:
        done = llm.generate(list(PROMPTS), options, use_tqdm=False, lora_request=lora)
        return [list(each.outputs[0].token_ids) for each in done]

    found: dict[str, Any] = {"bare": tokens(None), "adapted": tokens(adapted)}
    names = rpc("slots_describe")["definitions"]
    bindings = [
        {"definition": name, "min_m": 1, "max_m": 1 << 30, "path": linear, "artifact": f"test-{name}"}
        for name in names
    ]
    rpc("slots_prepare", bindings, 60.0)
    rpc("slots_engage", bindings)
    found["tuned"] = tokens(adapted)
    found["bare tuned"] = tokens(None)
    found["counters"] = rpc("slots_read")
    found["names"] = list(names)
    found["told"] = {each.name: each.verdict for each in features(llm.llm_engine.vllm_config)}
    (Path(folder) / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
