"""How a winner goes live, and what a canary has to show."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """The stages of a promotion and its limits.

    `shares` are the canary's shares of new requests, growing; empty is the direct path, from the evidence of the
    end-to-end gate straight to all requests. Times in seconds.
    """

    name: str
    shadow: bool = False
    shares: tuple[float, ...] = ()
    minimum_low: float = 1.0
    harmful_high: float = 1.0
    minimum_samples: int = 50
    patience_s: float = 900.0
    allow_lossy: bool = False

    def __post_init__(self) -> None:
        if any(not 0 < share <= 1 for share in self.shares) or sorted(set(self.shares)) != list(self.shares):
            raise ValueError(f"shares {self.shares} must grow and lie in (0, 1]")

    def share_after(self, share: float) -> float | None:
        """The next share above `share`; None where the canary has seen all of them."""
        return next((step for step in self.shares if step > share), None)


DIRECT = Policy("direct")
STAGED = Policy("staged", shadow=True, shares=(0.01, 0.05, 0.25, 1.0))
POLICIES = {policy.name: policy for policy in (DIRECT, STAGED)}
