"""The clock of a simulation: the loop's time, on a date that never changes."""

import asyncio
import datetime as dt

EPOCH = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


class SimulatedClock:
    """A `polymorph.config.clock.Clock` inside `run_simulated`; sleeping takes simulated time only."""

    def now(self) -> dt.datetime:
        return EPOCH + dt.timedelta(seconds=self.monotonic())

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
