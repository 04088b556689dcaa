"""Measures the small models on held-out text and prints the tables of models/README.md.

Loss in nats a token against the best unigram model of the same domain; how often the draft's greedy token is the
target's, along the same text; and which experts the tokens of each domain go to.
"""

import argparse
import json
from datetime import UTC, datetime
from typing import Any

import corpus
import numpy as np
import numpy.typing as npt
import small_tokenizer
import tokens
import torch
from small_models import CONTEXT, DENSE, DRAFT, HERE, MODELS, MOE, SmallModel
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

ROWS = 8


def windows(ids: tokens.Ids, count: int) -> torch.Tensor:
    """About `count` tokens as rows of CONTEXT + 1, spread evenly over the text without overlap."""
    rows = min(max(1, count // CONTEXT), len(ids) // (CONTEXT + 1))
    if rows == 0:
        raise ValueError(f"{len(ids)} tokens are too few for a window of {CONTEXT + 1}")
    step = len(ids) // rows
    return torch.from_numpy(
        np.stack([ids[at * step : at * step + CONTEXT + 1] for at in range(rows)]).astype(np.int64)
    )


def unigram(training: tokens.Ids, vocabulary: int) -> npt.NDArray[np.float64]:
    """Log-probability of each token by its count in the training text of a domain, one added to each."""
    counts = np.bincount(training, minlength=vocabulary) + 1.0
    return np.asarray(np.log(counts / counts.sum()))


def unigram_loss(table: npt.NDArray[np.float64], rows: torch.Tensor) -> float:
    return float(-table[rows[:, 1:].numpy()].mean())


def load(model: SmallModel) -> PreTrainedModel:
    """The committed bf16 weights, computed with in float32."""
    network: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32)
    return network.eval()


def read(network: PreTrainedModel, rows: torch.Tensor) -> tuple[float, npt.NDArray[np.int64]]:
    """(mean loss in nats a token, greedy token at each position) over held-out rows."""
    losses, greedy = [], []
    for part in rows.split(ROWS):
        with torch.inference_mode():
            logits = network(input_ids=part[:, :-1], use_cache=False).logits
        losses.append(
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
        )
        greedy.append(logits.argmax(-1))
    return float(sum(losses)) / rows[:, 1:].numel(), torch.cat(greedy).numpy()


def expert_load(network: PreTrainedModel, rows: torch.Tensor) -> list[list[float]]:
    """Share of the routed tokens that each expert takes, by layer."""
    total = np.zeros((MOE.layers, MOE.experts))
    for part in rows.split(ROWS):
        with torch.inference_mode():
            routed = network(input_ids=part[:, :-1], use_cache=False, output_router_logits=True).router_logits
        for layer, logits in enumerate(routed):
            chosen = logits.reshape(-1, MOE.experts).topk(2, dim=-1).indices.flatten()
            total[layer] += np.bincount(chosen.numpy(), minlength=MOE.experts)
    return [[round(float(share), 4) for share in layer / layer.sum()] for layer in total]


def measure(tokenizer: PreTrainedTokenizerFast, count: int) -> dict[str, Any]:
    networks = {name: load(model) for name, model in MODELS.items()}
    found: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "tokens_a_domain": count,
        "domains": {},
    }
    for domain in corpus.DOMAINS:
        rows = windows(tokens.domain_ids(tokenizer, domain, "heldout"), count)
        table = unigram(tokens.domain_ids(tokenizer, domain, "train"), len(tokenizer))
        answers = {name: read(network, rows) for name, network in networks.items()}
        agree = (answers[DRAFT.name][1] == answers[DENSE.name][1]).mean()
        found["domains"][domain] = {
            "loss": {name: round(loss, 3) for name, (loss, _) in answers.items()},
            "unigram": round(unigram_loss(table, rows), 3),
            "draft_acceptance": round(float(agree), 3),
            "expert_load": expert_load(networks[MOE.name], rows),
        }
        print(f"{domain}: measured on {rows[:, 1:].numel()} tokens", flush=True)
    return found


def loss_table(found: dict[str, Any]) -> str:
    lines = [
        "| domain | unigram | tiny-dense | tiny-moe | tiny-draft | draft acceptance |",
        "|---|---|---|---|---|---|",
    ]
    for domain, values in found["domains"].items():
        losses = " | ".join(f"{values['loss'][name]:.2f}" for name in (DENSE.name, MOE.name, DRAFT.name))
        lines.append(
            f"| {domain} | {values['unigram']:.2f} | {losses} | {values['draft_acceptance'] * 100:.0f} % |"
        )
    return "\n".join(lines)


def expert_table(found: dict[str, Any], layer: int) -> str:
    lines = ["| domain | " + " | ".join(f"e{number}" for number in range(MOE.experts)) + " |"]
    lines.append("|---" * (MOE.experts + 1) + "|")
    for domain, values in found["domains"].items():
        shares = " | ".join(f"{share * 100:.0f}" for share in values["expert_load"][layer])
        lines.append(f"| {domain} | {shares} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=int, default=8192, help="held-out tokens a domain (default: %(default)s)"
    )
    options = parser.parse_args()
    torch.set_num_threads(2)
    found = measure(small_tokenizer.load(DENSE.folder), options.tokens)
    (HERE / "measured.json").write_text(json.dumps(found, indent=1) + "\n")
    print(loss_table(found))
    for layer in (0, MOE.layers - 1):
        print(f"\nlayer {layer}, share of the routed tokens in per cent:\n{expert_table(found, layer)}")


if __name__ == "__main__":
    main()
