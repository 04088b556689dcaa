"""`make demo`: the loop on this machine, with a real vLLM, real traffic, and a kernel promoted while it serves."""

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
from benchmarks.demo import stack, table, trace
from benchmarks.demo.load import Client, Outcome, Tally, replay
from benchmarks.demo.measure import Comparison, compare, same_text
from benchmarks.demo.slots import SlotSwitch
from benchmarks.demo.story import Clock, Story, follow

from polymorph.embedded.folder import StartRefused, free_port
from polymorph.embedded.options import DEFAULT_MODEL, UpOptions
from polymorph.engine.launch import EngineLaunch

# Two slow cores hold about one chat a second; a replay that fills them leaves none for the search (and no user would).
CHAT = trace.Scale(prompt=20, output=4.0, stretch=24.0, max_prompt=64, max_output=48, longest_gap_s=8.0)
CODE = trace.Scale(prompt=48, output=1.0, stretch=12.0, max_prompt=64, max_output=24, longest_gap_s=6.0)
PHASES = {"conv": (CHAT, 3), "code": (CODE, 4)}
AGREEMENT_TOKENS = 24
_TELL_S = 30.0
_QUIET_S = 10.0  # after a search closes, the next of its plan opens within seconds


@dataclass(frozen=True)
class Plan:
    """Seconds that each phase lasts at most, and how much is measured at the end."""

    first_phase_s: float = 240.0
    second_phase_s: float = 180.0
    rounds: int = 5
    block_tokens: int = 32
    chats: tuple[int, ...] = (1, 4)

    def quick(self) -> "Plan":
        return replace(self, second_phase_s=60, rounds=5, chats=(1,))


class Demo:
    """One run, start to table."""

    def __init__(self, model: Path, data: Path, port: int, order: list[str], plan: Plan) -> None:
        self._model = model.resolve()
        self._served = model.resolve().name
        self._data = data
        self._port = port
        self._url = f"http://127.0.0.1:{port}"
        self._order = order
        self._plan = plan
        self._clock = Clock()
        self._story = Story()
        self._tally = Tally()

    def say(self, text: str) -> None:
        self._clock.say(text)

    async def run(self) -> int:
        """Returns the exit code; SIGTERM ends it as Ctrl-C does, with everything stopped."""
        task = asyncio.ensure_future(self._run())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            self.say("stopped before its end")
            return 130

    async def _run(self) -> int:
        plain_port = free_port()
        launch = EngineLaunch(model=self._model, served_model_name=self._served)
        ours = stack.embedded(self._data, self._model, self._served, self._port)
        plain = stack.plain_vllm(launch, plain_port, self._data / "plain-vllm.log")
        async with (
            stack.stopped_at_the_end(ours, plain),
            aiohttp.ClientSession(connector=_unlimited()) as session,
        ):
            self.say(
                "phase 1 of 4: starting embedded mode, and plain vLLM beside it for the comparison (2 to 6 minutes)"
            )
            await asyncio.gather(ours.start(self.say), plain.start())
            await stack.wait_ready(ours, self._port, "/readyz", self.say)
            client = Client(session, self._url, self._served)
            await self._first_request(client)
            await stack.wait_ready(plain, plain_port, "/health", self.say)
            following = asyncio.create_task(follow(session, self._url, self._story, self.say))
            await self._traffic(client)
            with stack.held(self._data, "compiler", "evaluator"):
                comparisons, agreements = await self._measure(session, plain_port)
            following.cancel()
            result = self._result(comparisons, agreements)
            table.tell(result, self._tally, self._story, comparisons, again=self._again(), say=print)
        print(json.dumps(result.as_dict()), flush=True)
        return result.exit_code

    def _again(self) -> str:
        up = f".venv/bin/polymorph up --model {self._model} --data {self._data} --port {self._port}"
        return f"{up}, then curl -N -H 'Last-Event-ID: 0-0' {self._url}/v1/events"

    async def _first_request(self, client: Client) -> None:
        outcome = await client.chat("What is the capital of France?", 24)
        self._tally.outcomes.append(outcome)
        if not outcome.ok:
            raise RuntimeError(f"the first request failed: {outcome.error}")
        self.say(f"first request answered in {outcome.total_s:.1f} s: {outcome.text.strip()[:90]!r}")

    async def _traffic(self, client: Client) -> None:
        """Both phases of the trace; each ends when the loop has answered it, or when its time is over."""
        limits = (self._plan.first_phase_s, self._plan.second_phase_s)
        for number, (name, limit_s) in enumerate(zip(self._order, limits, strict=True), start=2):
            self.say(
                f"phase {number} of 4: {name} traffic, until the loop has answered it or {limit_s:.0f} s are over"
            )
            await self._replay(client, name, self._answered(number, limit_s, all_of_it=number > len(limits)))

    async def _replay(self, client: Client, name: str, over: Awaitable[None]) -> None:
        scale, cap = PHASES[name]
        until = asyncio.Event()
        sending = asyncio.create_task(
            replay(client, trace.requests(name, scale, seed=7), self._tally, cap=cap, until=until)
        )
        await over
        until.set()
        await sending

    async def _answered(self, number: int, limit_s: float, *, all_of_it: bool) -> None:
        """Returns once a drift of this phase was found and a winner is loaded; `all_of_it` waits for every search."""
        loop = asyncio.get_running_loop()
        begun = told = loop.time()
        drifts, promotions = len(self._story.named("traffic.drift-detected")), len(self._story.promotions)
        loaded = len(self._tuned_loads())
        while (passed := loop.time() - begun) < limit_s:
            opened, closed = len(self._story.named("search.opened")), len(self._story.named("search.closed"))
            promoted, loads = len(self._story.promotions), len(self._tuned_loads())
            found = len(self._story.named("traffic.drift-detected")) > drifts
            if loop.time() - told > _TELL_S:
                told = loop.time()
                self.say(
                    f"phase {number} of 4: {opened} searches opened, {closed} closed, {promoted} promotions, "
                    f"{loads} loads; at most {limit_s - passed:.0f} s left"
                )
            quiet = loop.time() - self._story.last_search_event
            settled = not all_of_it or (opened == closed and quiet > _QUIET_S)
            if found and promoted > promotions and loads > loaded and settled:
                return
            await asyncio.sleep(1)

    def _tuned_loads(self) -> list[dict[str, Any]]:
        return [e for e in self._story.named("worker.loaded") if e["data"]["kernels"]]

    async def _measure(
        self, session: aiohttp.ClientSession, plain_port: int
    ) -> tuple[list[Comparison], tuple[float, float]]:
        state = stack.instance(self._data)
        worker_url = f"http://127.0.0.1:{state['ports']['worker-0']}"
        worker = Client(session, worker_url, self._served)
        clients = {
            "plain": Client(session, f"http://127.0.0.1:{plain_port}", self._served),
            "empty": worker,
            "tuned": worker,
        }
        self.say(
            "phase 4 of 4: paired blocks of plain vLLM, empty slots and the tuned engine (about 3 minutes)"
        )
        async with SlotSwitch(self._data, state["nats"], "worker-0") as switch:
            comparisons = [await self._compare(clients, switch, chats) for chats in self._plan.chats]
            agreements = await self._agreements(worker, switch)
            await switch("tuned")
        return comparisons, agreements

    async def _compare(
        self, clients: dict[str, Client], switch: Callable[[str], Awaitable[None]], chats: int
    ) -> Comparison:
        return await compare(
            clients,
            switch,
            chats=chats,
            max_tokens=self._plan.block_tokens,
            rounds=self._plan.rounds,
            seed=11 + chats,
            say=self.say,
        )

    async def _agreements(
        self, worker: Client, switch: Callable[[str], Awaitable[None]]
    ) -> tuple[float, float]:
        """Greedy texts: tuned against empty at one batch size; empty against itself at another."""
        prompts = [f"Number {i}. Explain in simple words what a {word} is." for i, word in enumerate(_WORDS)]
        self.say("comparing greedy texts: tuned, empty, and empty at another batch size (about 1 minute)")
        await switch("empty")
        together = await _at_once(worker, prompts, len(prompts))
        pairs = await _at_once(worker, prompts, 2)
        await switch("tuned")
        tuned = await _at_once(worker, prompts, len(prompts))
        return same_text(tuned, together), same_text(pairs, together)

    def _result(self, comparisons: list[Comparison], agreements: tuple[float, float]) -> table.Result:
        main = comparisons[0]
        speedup = main.ratio("tuned", "plain", 1)
        kernels = [k for e in self._story.promotions for k in e["data"]["revision"]["kernels"]]
        order = ("bitwise", "reordered", "lossy")
        return table.Result(
            requests=len(self._tally.outcomes),
            failed=self._tally.failed,
            truncated=self._tally.truncated,
            promotions=len(self._story.promotions),
            numerics=max((k["numerics"] for k in kernels), key=order.index, default="none"),
            slot_baseline_ratio=main.ratio("empty", "plain", 3).point,
            stolen_s=self._story.stolen_s,
            speedup=speedup.point,
            speedup_low=speedup.low,
            speedup_high=speedup.high,
            drift_to_promotion_s=self._story.drift_to_promotion_s(),
            greedy_agreement=agreements[0],
            greedy_agreement_incumbent=agreements[1],
        )


_WORDS = (
    "river",
    "bridge",
    "violin",
    "planet",
    "market",
    "battery",
    "glacier",
    "poem",
    "harbour",
    "engine",
    "forest",
    "clock",
    "window",
    "bakery",
)


async def _at_once(client: Client, prompts: list[str], width: int) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for start in range(0, len(prompts), width):
        part = prompts[start : start + width]
        outcomes += await asyncio.gather(*(client.chat(prompt, AGREEMENT_TOKENS) for prompt in part))
    return outcomes


def _unlimited() -> aiohttp.TCPConnector:
    return aiohttp.TCPConnector(limit=0, force_close=True)


_ABOUT = (
    "The loop on this machine, with a real vLLM, real traffic, and a kernel promoted while it serves. On two slow cores "
    "it takes about 12 minutes; the first time about 18, for set-up and compiled graphs. "
    'From make: ARGS="--quick", and so on.'
)
_EXIT_CODES = (
    "exit codes: 0 a promoted kernel beats plain vLLM, 3 none does, 1 a request failed or was cut short, "
    "2 it cannot start, 130 stopped before its end"
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make demo", description=_ABOUT, epilog=_EXIT_CODES)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="what is served (%(default)s)")
    parser.add_argument(
        "--data", type=Path, default=Path(".polymorph/demo"), help="emptied first (%(default)s)"
    )
    parser.add_argument("--port", type=int, default=8000, help="the gateway's, must be free (%(default)s)")
    parser.add_argument("--reversed", action="store_true", help="code first, then chat")
    parser.add_argument("--quick", action="store_true", help="a shorter second phase, one chat measured")
    parser.add_argument("--phase-s", type=float, help="seconds that each phase of traffic lasts at most")
    options = parser.parse_args()
    order = ["code", "conv"] if options.reversed else ["conv", "code"]
    plan = Plan().quick() if options.quick else Plan()
    if options.phase_s is not None:
        plan = replace(plan, first_phase_s=options.phase_s, second_phase_s=options.phase_s)
    try:
        UpOptions(model=options.model, port=options.port, data=options.data, mode="canary").check()
        stack.clear(options.data)
    except (ValueError, StartRefused) as error:
        return _refuse(error)
    try:
        return asyncio.run(Demo(options.model, options.data, options.port, order, plan).run())
    except stack.NotReady as error:
        return _refuse(error)


def _refuse(error: Exception) -> int:
    print(f"make demo: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
