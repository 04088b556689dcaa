"""The models whose shapes are measured."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODELS = Path(__file__).parents[2] / "models"
TOKENS = (1, 2, 4, 8, 32, 128)


@dataclass(frozen=True)
class Shapes:
    """What a model's config.json tells of its layers."""

    name: str
    config: dict[str, Any]

    @classmethod
    def read(cls, name: str) -> "Shapes":
        """The committed or fetched model of that name.

        Raises:
            FileNotFoundError: it is not there: `make setup` fetches it, `make models` makes the small ones.
        """
        return cls(name, json.loads((MODELS / name / "config.json").read_text()))

    @property
    def hidden(self) -> int:
        return int(self.config["hidden_size"])

    @property
    def intermediate(self) -> int:
        return int(self.config["intermediate_size"])

    @property
    def heads(self) -> int:
        return int(self.config["num_attention_heads"])

    @property
    def kv_heads(self) -> int:
        return int(self.config["num_key_value_heads"])

    @property
    def head_dim(self) -> int:
        return int(self.config.get("head_dim") or self.hidden // self.heads)

    @property
    def layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def eps(self) -> float:
        return float(self.config["rms_norm_eps"])
