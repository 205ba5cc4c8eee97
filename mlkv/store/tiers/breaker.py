"""When to leave a failing server alone, and when to try it again. Pure: the caller brings the clock."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

BreakerState: TypeAlias = Literal["closed", "open", "half-open"]


class Breaker:
    """A circuit breaker (Nygard, "Release It!", 2007).

    closed: calls are made. `threshold` failures in a row open it.
    open: no call is made for a pause. Each opening without a success in between doubles the pause, up to a bound.
    half-open: the pause is over; one call at a time is made. A success closes it, a failure opens it again.

    Calls overlap, so an outcome may come after the breaker has changed its mind. Each call carries the *round* in
    which it began, and an outcome from an earlier round is ignored: it says how the server was, not how it is.

    Args:
        threshold: failures in a row, at least 1.
        first_pause_s, max_pause_s: of the first opening, and of the longest.
    """

    def __init__(self, threshold: int = 3, first_pause_s: float = 0.5, max_pause_s: float = 30.0) -> None:
        self._threshold: Final = threshold
        self._first_pause_s: Final = first_pause_s
        self._max_pause_s: Final = max_pause_s
        self._state: BreakerState = "closed"
        self._round = 0
        self._failures = 0
        self._pause_s = first_pause_s
        self._due_at = 0.0
        self._trial_runs = False

    def start_trying(self) -> None:
        """Begin half-open: nothing is known about the server yet. Before the first call."""
        self._become("half-open")

    @property
    def state(self) -> BreakerState:
        return self._state

    @property
    def round(self) -> int:
        """Counts changes of state."""
        return self._round

    @property
    def due_at(self) -> float | None:
        """When the pause is over; None unless it is open."""
        return self._due_at if self._state == "open" else None

    def allows(self, now: float) -> bool:
        """Whether a call may begin. An open breaker whose pause is over becomes half-open here."""
        if self._state == "open" and now >= self._due_at:
            self._become("half-open")
        return self._state == "closed" or (self._state == "half-open" and not self._trial_runs)

    def begin(self, now: float) -> int:
        """A call begins, which `allows` must have permitted. Returns its round, for `succeed` or `fail`."""
        if not self.allows(now):
            raise RuntimeError(f"a call began although the breaker is {self._state}")
        self._trial_runs = self._state == "half-open"
        return self._round

    def succeed(self, round_: int) -> None:
        """A call of that round did its work."""
        if round_ != self._round:
            return
        self._failures = 0
        if self._state == "half-open":
            self._pause_s = self._first_pause_s
            self._become("closed")

    def withdraw(self, round_: int) -> None:
        """A call of that round ended in a way that tells nothing about the server: another may be tried."""
        if round_ == self._round:
            self._trial_runs = False

    def fail(self, round_: int, now: float) -> None:
        """A call of that round failed, or was given up on."""
        if round_ != self._round:
            return
        self._failures += 1
        if self._state == "half-open" or self._failures >= self._threshold:
            self._due_at = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, self._max_pause_s)
            self._become("open")

    def _become(self, state: BreakerState) -> None:
        self._state = state
        self._round += 1
        self._failures = 0
        self._trial_runs = False
