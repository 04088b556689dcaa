"""The byte-level BPE that the small models share."""

from collections.abc import Sequence
from pathlib import Path

from corpus_chat import CHAT_TEMPLATE
from small_models import END_OF_TEXT, MAX_LENGTH, SPECIAL, TURN_END, VOCABULARY
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# Words with their leading space, runs of digits of at most three, punctuation, and indentation as one piece.
PIECES = r"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z_]+| ?[0-9]{1,3}| ?[^\sA-Za-z_0-9]+|\n+|\s+(?!\S)|\s+"


def learn(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Learns the merges of `texts`; the same texts give the same tokenizer."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    if bpe.get_vocab_size() != VOCABULARY:
        raise ValueError(
            f"the texts gave {bpe.get_vocab_size()} tokens, expected {VOCABULARY}; more text is needed"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def load(folder: Path) -> PreTrainedTokenizerFast:
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer
