"""From windows to a promotion, with the compiler a real process on a real nats-server and SQLite."""

import datetime as dt
import signal
import urllib.error
import urllib.request

import pytest

pytestmark = pytest.mark.real


def promoted(lab):
    return lab.of("promotion.completed") and lab.of("search.closed")


def candidates(lab):
    return {e["candidate_id"]: e for e in lab.of("candidate.proposed")}


async def test_windows_become_a_signed_promotion(make_lab, names):
    _, gate_up, _ = names
    lab = await make_lab()
    await lab.until(lambda: promoted(lab))
    assert lab.of("traffic.drift-detected")[0]["tuned_for"] is None
    opened, closed = lab.of("search.opened")[0], lab.of("search.closed")[0]
    assert opened["definition"] == gate_up
    assert (opened["min_m"], opened["max_m"]) == (5, 8)
    assert (closed["outcome"], closed["search_id"]) == ("promoted", opened["search_id"])
    state = await lab.desired()
    assert (state.generation, state.mode) == (1, "canary")
    assert state.stable.kernels[0].artifact == f"artifact-{closed['winner']}"
    assert lab.of("promotion.completed")[0]["revision"]["revision"] == state.stable.revision
    # The evaluator found the objects, the weights of the window and a fresh seed for the confirmation.
    document = next(iter(lab.evaluator.workloads.values())).x_polymorph.model_dump()
    assert document["m_weights"] == {"8": 1.0}
    assert document["replay"]["prompt_tokens"]["p50"] == 100
    assert [o.until for o in lab.evaluator.orders if o.confirm_seed > 0][-1] == "G5"
    assert all(s.sources for s in lab.evaluator.solutions.values())


async def test_the_reversed_shares_promote_something_else(make_lab, names):
    _, gate_up, down = names
    lab = await make_lab(operations={gate_up: 0.2, down: 0.5})
    await lab.until(lambda: promoted(lab))
    assert lab.of("search.opened")[0]["definition"] == down
    assert (await lab.desired()).stable.kernels[0].definition == down


async def test_a_shift_of_traffic_opens_a_search_for_its_own_steps(make_lab):
    lab = await make_lab(cooldown_s="0")
    await lab.until(lambda: promoted(lab))
    first = lab.of("search.opened")[0]
    lab.router.tokens_per_step, lab.router.prompt = {"32": 1.0}, 900.0
    await lab.until(lambda: len(lab.of("search.opened")) > 1 and len(lab.of("search.closed")) > 1)
    second = lab.of("search.opened")[1]
    assert (second["min_m"], second["max_m"]) == (17, 32)
    assert second["drift_id"] != first["drift_id"]
    assert lab.of("traffic.drift-detected")[1]["tuned_for"] is not None
    # Another range of M stands beside the first winner in the same revision.
    state = await lab.desired()
    assert [(k.min_m, k.max_m) for k in state.stable.kernels if k.definition == first["definition"]] == [
        (5, 8),
        (17, 32),
    ]


async def test_killed_in_mid_search_it_goes_on_and_promotes_once(make_lab):
    lab = await make_lab()
    lab.evaluator.pause_after = 3
    await lab.until(lambda: not lab.evaluator.go.is_set())
    await lab.compiler.end(signal.SIGKILL)
    before = {o.evaluation_id for o in lab.evaluator.orders}
    await lab.compiler.start()
    lab.evaluator.go.set()
    await lab.until(lambda: promoted(lab))
    assert len({e["search_id"] for e in lab.of("search.opened")}) == 1
    assert len(lab.of("search.closed")) == len(lab.of("promotion.completed")) == 1
    assert before <= {o.evaluation_id for o in lab.evaluator.orders}
    assert len(candidates(lab)) == lab.of("search.closed")[0]["candidates"] == 10
    assert (await lab.desired()).generation == 1


async def test_a_nats_server_killed_in_mid_search_loses_nothing(make_lab, nats_server):
    lab = await make_lab()
    lab.evaluator.pause_after = 3
    await lab.until(lambda: not lab.evaluator.go.is_set())
    await nats_server.kill()
    await nats_server.start()
    lab.evaluator.go.set()
    await lab.until(lambda: promoted(lab))
    assert (await lab.desired()).generation == 1
    assert len({e["promotion_id"] for e in lab.of("promotion.completed")}) == 1


async def test_in_observe_it_tells_the_drift_and_changes_nothing(make_lab):
    lab = await make_lab(default_mode="observe")
    await lab.until(lambda: lab.of("traffic.drift-detected"))
    windows = len(lab.of("traffic.shape-observed"))
    await lab.until(lambda: len(lab.of("traffic.shape-observed")) > windows + 4)
    assert lab.of("search.opened") == []
    assert ((await lab.desired()).generation, (await lab.desired()).mode) == (0, "observe")


async def test_a_worker_that_refuses_has_the_promotion_taken_back(make_lab, bus_factory):
    from polymorph.events.types import WorkerRefused

    lab = await make_lab()
    await lab.until(lambda: promoted(lab))
    state = await lab.desired()
    worker = await bus_factory("worker")
    await worker.publish(
        WorkerRefused(
            pool=state.pool,
            worker_id="worker-0",
            generation=state.generation,
            revision=state.stable.revision,
            reason="its self-test failed",
        )
    )
    await lab.until(lambda: lab.of("promotion.rolled-back"))
    assert "its self-test failed" in lab.of("promotion.rolled-back")[0]["reason"]
    back = await lab.desired()
    assert (back.generation, back.stable.revision) == (2, "empty")


async def test_a_kernel_that_took_an_engine_down_is_quarantined_and_taken_back(make_lab, bus_factory):
    from polymorph.events.types import WorkerKernelFaulted

    lab = await make_lab()
    await lab.until(lambda: promoted(lab))
    state = await lab.desired()
    worker = await bus_factory("worker")
    kernel = state.stable.kernels[0]
    await worker.publish(
        WorkerKernelFaulted(
            pool=state.pool,
            worker_id="worker-0",
            generation=state.generation,
            revision=state.stable.revision,
            definition=kernel.definition,
            artifact=kernel.artifact,
            how="crash",
            evidence="The engine ended inside call 17.",
            at=dt.datetime.now(dt.UTC),
        )
    )
    await lab.until(lambda: lab.of("promotion.rolled-back"))
    assert "call 17" in lab.of("promotion.rolled-back")[0]["reason"]
    assert (await lab.desired()).stable.revision == "empty"
    assert b"call 17" in (await worker.kv_get("quarantine", kernel.artifact)).value


async def test_it_is_ready_only_when_the_bus_is_there_and_ends_in_order(
    make_lab, nats_server, unused_tcp_port
):
    lab = await make_lab(health_port=unused_tcp_port)

    def read(path):
        with urllib.request.urlopen(f"http://127.0.0.1:{unused_tcp_port}{path}", timeout=10) as answer:
            return answer.read().decode()

    def status(path):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{unused_tcp_port}{path}", timeout=10) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    await lab.until(lambda: status("/readyz") == 200)
    series = read("/metrics")
    for counted in (
        "drifts_detected",
        "searches_opened",
        "searches_closed",
        "candidates_evaluated",
        "promotions",
    ):
        assert f"# TYPE polymorph_compiler_{counted}_total counter" in series
    await nats_server.kill()
    await lab.until(lambda: status("/readyz") == 503)
    assert status("/healthz") == 200
    await nats_server.start()
    await lab.until(lambda: status("/readyz") == 200)
    assert await lab.compiler.end(signal.SIGTERM) == 0


async def test_without_a_key_it_says_so_and_exits_with_2(make_lab, tmp_path):
    lab = await make_lab(signing_key=str(tmp_path / "nowhere.key"))
    assert await lab.compiler.wait() == 2
    assert "nowhere.key" in lab.compiler.log()
