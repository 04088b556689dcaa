"""Makes the small models again: learns the tokenizer, trains each model, writes bf16 safetensors.

Seeded: on one machine with one torch release the same corpus gives the same weights. A run may be cut into slices:
with --slice-seconds it stops in time, keeps its place in models/.cache and exits with code 75; run it again to go on.
"""

import argparse
import hashlib
import json
import math
import shutil
import sys
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_moe
import corpus
import measure
import numpy as np
import small_tokenizer
import tokens
import torch
import warm_start
from small_models import CONTEXT, DENSE, HERE, MODELS, SPECIAL, TURN_END, SmallModel
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

CACHE = HERE / ".cache"
ROWS = 4
WARMUP = 40
COOL_DOWN = 0.28  # of the steps
KEEP_EVERY = 20
AGAIN = 75  # EX_TEMPFAIL: not done, run again
WEIGHT_DECAY = 0.05


class OutOfTime(Exception):
    """The slice is over; what was learnt so far is kept."""


def say(text: str) -> None:
    print(text, flush=True)


def tokenizer_text() -> list[str]:
    """A balanced part of each domain's training text."""
    return [text for domain in corpus.DOMAINS for text in corpus.documents(domain, "train", limit=1_500_000)]


def shared_tokenizer(*, fresh: bool) -> PreTrainedTokenizerFast:
    """The tokenizer of tiny-dense: learnt if it isn't there or `fresh` asks for it."""
    if fresh or not (DENSE.folder / "tokenizer.json").is_file():
        say("tokenizer: learning the merges")
        small_tokenizer.learn(tokenizer_text()).save_pretrained(DENSE.folder)
    return small_tokenizer.load(DENSE.folder)


def corpus_key() -> str:
    """Names the tokenizer and the kind of text, so that a kept place is used for the same training only."""
    learnt = hashlib.sha256((DENSE.folder / "tokenizer.json").read_bytes()).hexdigest()
    return f"v{corpus.VERSION}-{learnt[:12]}"


def rate(model: SmallModel, step: int) -> float:
    """Linear warm-up, the first half of a cosine, and a straight line to zero at the end."""
    if step < WARMUP:
        return model.learning_rate * (step + 1) / WARMUP
    cosine = 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / max(1, 2 * model.steps - WARMUP)))
    return model.learning_rate * cosine * min(1.0, (model.steps - step) / (COOL_DOWN * model.steps))


def optimizer(network: PreTrainedModel) -> torch.optim.AdamW:
    decayed = [value for value in network.parameters() if value.ndim >= 2]
    plain = [value for value in network.parameters() if value.ndim < 2]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.98), eps=1e-8)


def next_token_loss(logits: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats of window[:, 1:] under logits[:, :-1]."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), window[:, 1:].flatten())


def distillation(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Mean KL divergence of the student from the teacher, a token."""
    student = torch.log_softmax(logits, -1).flatten(0, 1)
    return torch.nn.functional.kl_div(
        student, torch.log_softmax(teacher, -1).flatten(0, 1), reduction="batchmean", log_target=True
    )


def load_origin(model: SmallModel) -> PreTrainedModel | None:
    if model.origin is None:
        return None
    origin: PreTrainedModel = AutoModelForCausalLM.from_pretrained(HERE / model.origin, dtype=torch.float32)
    return origin.eval()


def loss_of(
    network: PreTrainedModel, teacher: PreTrainedModel | None, window: torch.Tensor, *, balance: float
) -> torch.Tensor:
    """Cross-entropy, plus the router's balance loss (experts) or the distance from the teacher (draft)."""
    options: dict[str, Any] = {"output_router_logits": True} if balance else {}
    out = network(input_ids=window, use_cache=False, **options)
    loss = next_token_loss(out.logits, window)
    if balance:
        loss = loss + balance * out.aux_loss
    if teacher is not None:
        with torch.no_grad():
            goal = teacher(input_ids=window, use_cache=False).logits
        loss = 0.3 * loss + 0.7 * distillation(out.logits, goal)
    return loss


class Training:
    """One model's way from random values to a folder; it can stop after any step and go on later."""

    def __init__(self, model: SmallModel, ids: dict[str, tokens.Ids], key: str) -> None:
        torch.manual_seed(model.seed)
        self.model, self.ids = model, ids
        self.network = model.build().train()
        origin = load_origin(model)
        if origin is not None:
            warm_start.begin(self.network, model, origin)
        self.teacher = origin if model.distilled else None
        self.optimizer = optimizer(self.network)
        self.balance = 0.01 if model.experts else 0.0
        self.path = CACHE / f"{model.name}-{key}-{model.steps}.pt"
        self.step = 0

    def resume(self) -> None:
        if self.path.is_file():
            state = torch.load(self.path, weights_only=True)
            self.network.load_state_dict(state["network"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]
            say(f"{self.model.name}: going on at step {self.step}")

    def keep(self) -> None:
        state = {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
        }
        part = self.path.with_suffix(".part")
        torch.save(state, part)
        part.rename(self.path)

    def advance(self) -> float:
        window = torch.from_numpy(tokens.batch(self.ids, ROWS, CONTEXT + 1, self.model.seed, self.step))
        for group in self.optimizer.param_groups:
            group["lr"] = rate(self.model, self.step)
        loss = loss_of(self.network, self.teacher, window, balance=self.balance)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return float(loss.detach())

    def run(self, deadline: float) -> None:
        began, first = time.monotonic(), self.step
        recent: deque[float] = deque(maxlen=KEEP_EVERY)
        while self.step < self.model.steps:
            recent.append(self.advance())
            if self.step % KEEP_EVERY == 0 or self.step == self.model.steps:
                pace = (time.monotonic() - began) / (self.step - first)
                left = pace * (self.model.steps - self.step)
                loss = sum(recent) / len(recent)
                say(
                    f"{self.model.name}: step {self.step}/{self.model.steps} loss {loss:.3f}, {left:.0f} s left"
                )
                self.keep()
            if time.monotonic() > deadline and self.step < self.model.steps:
                self.keep()
                raise OutOfTime


def save(model: SmallModel, network: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, key: str) -> None:
    """Writes the folder that vLLM serves. The old weights stay until the new ones are whole."""
    scratch = CACHE / f"{model.name}-new"
    shutil.rmtree(scratch, ignore_errors=True)
    network.generation_config = GenerationConfig(
        eos_token_id=[SPECIAL.index(TURN_END), tokenizer.pad_token_id], pad_token_id=tokenizer.pad_token_id
    )
    network.to(torch.bfloat16).save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)
    note = {"steps": model.steps, "rows": ROWS, "context": CONTEXT, "seed": model.seed, "corpus": key}
    (scratch / "training.json").write_text(json.dumps(note, indent=2) + "\n")
    model.folder.mkdir(exist_ok=True)
    for path in scratch.iterdir():
        path.chmod(0o644)
        path.rename(model.folder / path.name)
    scratch.rmdir()


def receipt(model: SmallModel, key: str) -> Path:
    """Exists once this machine has made the model from this corpus; a fresh clone has none, and trains."""
    return CACHE / f"{model.name}-{key}-{model.steps}.made"


def make(model: SmallModel, tokenizer: PreTrainedTokenizerFast, deadline: float) -> None:
    key = corpus_key()
    if receipt(model, key).is_file():
        say(f"{model.name}: made here already from this corpus, nothing to do (--fresh makes it again)")
        return
    training = Training(model, tokens.cached_ids(tokenizer, CACHE, key), key)
    training.resume()
    training.run(deadline)
    save(model, training.network, tokenizer, key)
    receipt(model, key).touch()
    training.path.unlink(missing_ok=True)
    size = (model.folder / "model.safetensors").stat().st_size
    say(f"{model.name}: ready, {size / 1e6:.1f} MB")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--all", action="store_true", help="tokenizer, tiny-dense, tiny-moe and tiny-draft")
    which.add_argument("--only", choices=sorted(MODELS), help="one model, with the tokenizer that is there")
    parser.add_argument("--fresh", action="store_true", help="forget what is there and begin anew")
    parser.add_argument("--steps", type=int, help="train for this many steps instead of each model's own")
    parser.add_argument(
        "--slice-seconds", type=float, default=math.inf, help="stop in time; exit code 75: run again"
    )
    parser.add_argument(
        "--threads", type=int, default=2, help="threads; another number gives other roundings"
    )
    return parser.parse_args()


def forget(models: list[SmallModel]) -> None:
    for model in models:
        for path in CACHE.glob(f"{model.name}-*.*"):
            path.unlink()


def main() -> int:
    options = arguments()
    deadline = time.monotonic() + options.slice_seconds
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(mode=True)
    np.seterr(all="raise")
    chosen = list(MODELS.values()) if options.all else [MODELS[options.only]]
    if options.steps:
        chosen = [replace(model, steps=options.steps) for model in chosen]
    if options.fresh:
        forget(chosen)
    tokenizer = shared_tokenizer(fresh=options.fresh and options.all)
    try:
        for model in chosen:
            make(model, tokenizer, deadline)
        if options.all:
            bench_moe.write(tokenizer)
            measure.report(tokenizer, measure.TOKENS)
    except OutOfTime:
        say("out of time: the place is kept, run the same command again (without --fresh) to go on")
        return AGAIN
    return 0


if __name__ == "__main__":
    sys.exit(main())
