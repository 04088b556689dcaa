"""Where tiny-draft and tiny-moe begin: at what tiny-dense has learnt, which saves most of the training.

The draft takes the embedding, one layer and the last norm. The mixture takes everything but the MLPs, and cuts those into
its experts (sparse upcycling, Komatsuzaki et al. 2022, with slices of the MLP instead of whole copies).
"""

import torch
from small_models import SmallModel
from transformers import PreTrainedModel

State = dict[str, torch.Tensor]
NOISE = 0.05


def experts(dense: State, layer: int, count: int, width: int) -> State:
    """`count` slices of one MLP, in the order of its columns and then again from the first.

    Two of them with weights of one half stand for the whole MLP, hence the factor; noise tells equal slices apart.
    """
    at = f"model.layers.{layer}.mlp"
    gate, up, down = (dense[f"{at}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    pieces = gate.shape[0] // width
    gate_up, out = [], []
    for number in range(count):
        cut = slice(number % pieces * width, (number % pieces + 1) * width)
        gate_up.append(torch.cat([gate[cut], up[cut]]))
        out.append(down[:, cut] * pieces)
    made = {f"{at}.experts.gate_up_proj": torch.stack(gate_up), f"{at}.experts.down_proj": torch.stack(out)}
    return {name: value + NOISE * value.std() * torch.randn_like(value) for name, value in made.items()}


def begin(network: PreTrainedModel, model: SmallModel, source: PreTrainedModel) -> None:
    """Copies into `network` what `source` has under the same name, and makes experts of its MLPs.

    A draft's only layer is the source's first. What is left (the router) keeps its random values.
    """
    theirs: State = source.state_dict()
    ours: State = network.state_dict()
    taken = {
        name: value for name, value in theirs.items() if name in ours and value.shape == ours[name].shape
    }
    if model.experts:
        for layer in range(model.layers):
            taken |= experts(theirs, layer, model.experts, network.config.moe_intermediate_size)
    left = network.load_state_dict(taken, strict=False)
    random = [name for name in left.missing_keys if not name.endswith("mlp.gate.weight")]
    if random or left.unexpected_keys:
        raise ValueError(f"{model.name} found no start for {random}, and has no {list(left.unexpected_keys)}")
