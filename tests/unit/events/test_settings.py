"""Settings of the engine in a revision: what is not named is not written, so that old signatures hold."""

from polymorph.events.state import DesiredState
from polymorph.events.values import EngineSettings, KernelBinding, Numerics, Revision

KERNEL = KernelBinding(
    definition="d", min_m=1, max_m=8, manifest="m", artifact="a", numerics=Numerics.BITWISE
)


def test_a_state_without_settings_is_signed_as_it_was_before_there_were_any() -> None:
    state = DesiredState(
        pool="p",
        generation=3,
        stable=Revision(revision="r", parent="empty", kernels=(KERNEL,)),
        candidate=Revision(revision="c"),
    )
    assert state.signed_content() == (
        b'{"pool":"p","generation":3,"mode":"observe","stable":{"revision":"r","parent":"empty","kernels":'
        b'[{"definition":"d","min_m":1,"max_m":8,"manifest":"m","artifact":"a","numerics":"bitwise"}],'
        b'"regime":"any"},"candidate":{"revision":"c","parent":null,"kernels":[],"regime":"any"},'
        b'"stage":"none","share":0.0,"regime":"any","promotion_id":null}'
    )


def test_only_what_is_named_is_signed() -> None:
    ranged = KERNEL.model_copy(update={"least": 60, "most": 100})
    assert ranged.model_dump_json().endswith('"numerics":"bitwise","least":60,"most":100}')
    revision = Revision(revision="r", engine=EngineSettings(max_num_seqs=4), slots=())
    assert revision.model_dump_json() == (
        '{"revision":"r","parent":null,"kernels":[],"regime":"any","engine":{"max_num_seqs":4},"slots":[]}'
    )


def test_a_name_of_next_year_is_kept_for_the_signature() -> None:
    text = (
        '{"revision":"r","parent":null,"kernels":[],"regime":"any","engine":{"max_num_seqs":4,"later":[1]}}'
    )
    revision = Revision.model_validate_json(text)
    assert revision.model_dump_json() == text
    assert revision.engine is not None
    assert revision.engine.model_extra == {"later": [1]}
