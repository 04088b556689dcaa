"""How often greedy streams give the same text: those that were answered before anything changed say which."""

from collections import Counter
from collections.abc import Sequence

from benchmarks.hotload.streams import Answer


class Agreement:
    """Of each prompt the text that most of `calm` gave: batches that differ in size round differently at times."""

    def __init__(self, calm: Sequence[Answer]) -> None:
        texts: dict[int, Counter[str]] = {}
        for answer in calm:
            if answer.whole:
                texts.setdefault(answer.prompt, Counter())[answer.text] += 1
        self._usual = {prompt: counted.most_common(1)[0][0] for prompt, counted in texts.items()}
        self.incumbent = self.of(calm)
        """How often the engine's own code agrees with itself."""

    def of(self, answers: Sequence[Answer]) -> float:
        """The share of `answers` with the usual text; those to prompts without one are left out."""
        known = [answer for answer in answers if answer.whole and answer.prompt in self._usual]
        if not known:
            raise ValueError(
                "no prompt was answered both before the changes and after: let streams run longer"
            )
        return sum(answer.text == self._usual[answer.prompt] for answer in known) / len(known)
