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
TOKENS = 8192
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


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
    notes = {name: json.loads((model.folder / "training.json").read_text()) for name, model in MODELS.items()}
    found: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "tokens_a_domain": count,
        "steps": {name: note["steps"] for name, note in notes.items()},
        "domains": {},
    }
    for domain in corpus.DOMAINS:
        rows = windows(tokens.domain_ids(tokenizer, domain, "heldout"), count)
        table = unigram(tokens.domain_ids(tokenizer, domain, "train", limit=1_000_000), len(tokenizer))
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


def figures(found: dict[str, Any]) -> str:
    """The part of README.md that is measured."""
    parts = [
        f"By `python models/measure.py` on {found['date']}, {found['tokens_a_domain']:,} held-out tokens a domain.",
        "Steps trained: " + ", ".join(f"{name} {steps}" for name, steps in found["steps"].items()) + ".",
        loss_table(found),
        "Share of the routed tokens that each expert of tiny-moe takes, in per cent, first layer:",
        expert_table(found, 0),
        "and last layer:",
        expert_table(found, MOE.layers - 1),
    ]
    return "\n\n".join(parts)


def with_figures(text: str, found: dict[str, Any]) -> str:
    """`text` with its measured part renewed."""
    before, mark, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"README.md must hold {BEGIN} and then {END}")
    return f"{before}{BEGIN}\n{figures(found)}\n{END}{after}"


def report(tokenizer: PreTrainedTokenizerFast, count: int) -> None:
    """Measures, writes measured.json and the figures of README.md, prints them."""
    found = measure(tokenizer, count)
    (HERE / "measured.json").write_text(json.dumps(found, indent=1) + "\n")
    readme = HERE / "README.md"
    readme.write_text(with_figures(readme.read_text(), found))
    print(figures(found))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, help="held-out tokens a domain (default: %(default)s)"
    )
    options = parser.parse_args()
    torch.set_num_threads(2)
    report(small_tokenizer.load(DENSE.folder), options.tokens)


if __name__ == "__main__":
    main()
