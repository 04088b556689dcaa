"""What the small committed models are: names, configurations, training budgets."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig
from transformers import Qwen3MoeForCausalLM as MoeModel

HERE = Path(__file__).resolve().parent
VOCABULARY = 3072
CONTEXT = 256
MAX_LENGTH = 2048
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, TURN_START, TURN_END)

SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": MAX_LENGTH,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": SPECIAL.index(TURN_END),
    "pad_token_id": SPECIAL.index(END_OF_TEXT),
}


@dataclass(frozen=True)
class SmallModel:
    """One model: its shape, and how long it learns."""

    name: str
    steps: int
    layers: int
    learning_rate: float
    seed: int
    origin: str | None = None
    distilled: bool = False
    experts: int = 0

    @property
    def folder(self) -> Path:
        return HERE / self.name

    def config(self) -> PretrainedConfig:
        if not self.experts:
            return Qwen3Config(**SHARED, num_hidden_layers=self.layers, intermediate_size=768)
        return Qwen3MoeConfig(
            **SHARED,
            num_hidden_layers=self.layers,
            intermediate_size=768,
            moe_intermediate_size=192,
            num_experts=self.experts,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            router_aux_loss_coef=0.01,
        )

    def build(self) -> PreTrainedModel:
        """A fresh float32 model; its values depend on torch's generator."""
        config = self.config()
        return MoeModel(config) if self.experts else Qwen3ForCausalLM(config)


DENSE = SmallModel("tiny-dense", steps=400, layers=4, learning_rate=2.5e-3, seed=1)
MOE = SmallModel(
    "tiny-moe", steps=200, layers=4, learning_rate=2.5e-3, seed=2, origin="tiny-dense", experts=8
)
DRAFT = SmallModel(
    "tiny-draft", steps=240, layers=1, learning_rate=4e-3, seed=3, origin="tiny-dense", distilled=True
)
MODELS = {model.name: model for model in (DENSE, DRAFT, MOE)}
