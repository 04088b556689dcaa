import pytest


def test_the_draft_begins_at_the_embedding_and_first_layer_of_its_origin() -> None:
    import small_models
    import warm_start

    origin, draft = small_models.DENSE.build(), small_models.DRAFT.build()
    warm_start.begin(draft, small_models.DRAFT, origin)
    theirs = origin.state_dict()
    assert all((value == theirs[name]).all() for name, value in draft.state_dict().items())


def test_two_experts_stand_for_the_whole_mlp_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    import small_models
    import torch
    import warm_start

    monkeypatch.setattr(warm_start, "NOISE", 0.0)
    dense = small_models.DENSE.build().state_dict()
    made = warm_start.experts(dense, 2, 8, 192)
    seen = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    at = "model.layers.2.mlp"

    def mlp(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.silu(seen @ gate.T) * (seen @ up.T)) @ down.T

    whole = mlp(*(dense[f"{at}.{part}_proj.weight"] for part in ("gate", "up", "down")))
    gate_up, down = made[f"{at}.experts.gate_up_proj"], made[f"{at}.experts.down_proj"]
    each = torch.stack(
        [mlp(gate_up[number, :192], gate_up[number, 192:], down[number]) for number in range(8)]
    )
    torch.testing.assert_close(each.mean(0), whole, rtol=1e-4, atol=1e-6)


def test_the_mixture_begins_with_the_attention_of_its_origin() -> None:
    import small_models
    import warm_start

    origin, mixture = small_models.DENSE.build(), small_models.MOE.build()
    warm_start.begin(mixture, small_models.MOE, origin)
    theirs, ours = origin.state_dict(), mixture.state_dict()
    name = "model.layers.3.self_attn.q_proj.weight"
    assert (ours[name] == theirs[name]).all()
    gate_up = ours["model.layers.3.mlp.experts.gate_up_proj"]
    assert (gate_up[0] != gate_up[4]).any()
    assert (gate_up[0] - gate_up[4]).abs().mean() < 0.3 * gate_up[0].abs().mean()


def test_a_start_that_does_not_fit_is_refused() -> None:
    import small_models
    import warm_start

    with pytest.raises(ValueError, match="tiny-dense found no start"):
        warm_start.begin(small_models.DENSE.build(), small_models.DENSE, small_models.DRAFT.build())
