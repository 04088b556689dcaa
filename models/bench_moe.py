"""A mixture of experts of realistic width without weights, for benchmarks with load_format="dummy".

As a program it writes models/bench-moe/ again: config.json, and the tokenizer of the small models.
"""

import small_tokenizer
from small_models import DENSE, HERE, SPECIAL, TURN_END, VOCABULARY
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeConfig

FOLDER = HERE / "bench-moe"


def config() -> Qwen3MoeConfig:
    """12 layers of width 1024, 32 experts, 4 of them active: about 100 million parameters a token."""
    return Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        dtype="bfloat16",
        vocab_size=VOCABULARY,
        hidden_size=1024,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=2048,
        moe_intermediate_size=448,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=8192,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=SPECIAL.index(TURN_END),
        pad_token_id=0,
    )


def parameters(shape: Qwen3MoeConfig) -> tuple[int, int]:
    """(active for a token, in all), counted from the configuration; norms are left out."""
    heads = shape.num_attention_heads + shape.num_key_value_heads
    attention = 2 * shape.hidden_size * heads * shape.head_dim
    expert = 3 * shape.hidden_size * shape.moe_intermediate_size
    router = shape.hidden_size * shape.num_experts
    head = shape.vocab_size * shape.hidden_size

    def total(experts: int) -> int:
        return int(shape.num_hidden_layers * (attention + router + experts * expert) + head)

    return total(shape.num_experts_per_tok), total(shape.num_experts)


def write(tokenizer: PreTrainedTokenizerFast) -> None:
    FOLDER.mkdir(exist_ok=True)
    shape = config()
    shape.save_pretrained(FOLDER)
    GenerationConfig(eos_token_id=shape.eos_token_id, pad_token_id=0).save_pretrained(FOLDER)
    tokenizer.save_pretrained(FOLDER)
    active, whole = parameters(shape)
    print(
        f"bench-moe: {active / 1e6:.0f} million parameters active, {whole / 1e6:.0f} million in all, no weights"
    )


if __name__ == "__main__":
    write(small_tokenizer.load(DENSE.folder))
