"""Windows: grids for sums over the batch, agreed between all devices before the sum begins.

A sum over samples is split over shards, micro-batches and ranks. It is the same for every split if each term is
rounded to one grid that no split can change. The grid of a place in the model follows from the largest magnitude seen
there over the whole global batch: a maximum does not depend on the split. A step whose magnitudes exceed the agreed
window is run again with a wider one, so no term is ever out of range (FP8 training delays its scales in the same way,
but is not exact).
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from samebits.errors import CollectiveError, NotFiniteError, few
from samebits.numerics.exact.grid import largest, shift_of, snapped, snapped_sum, top_of_magnitude, top_of_number
from samebits.numerics.exact.spare import SpareMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor

    from samebits.errors import UserError

LOSS = "the loss"
GRADIENTS_OF = "the gradients of"
"""Places; the second is followed by the name of a parameter."""

HEADROOM = 1  # bits above the largest magnitude when a window is set
SLACK = 2  # bits below the top at which a window is narrowed, by one
COUNT_EVERY = 100  # steps between counts of what is rounded to zero
_OVERFLOW = 129  # the exponent of infinities and NaN
_UNSEEN = -(1 << 20)  # below every exponent


class Windows:
    """The windows of one training, by place; the same on every rank.

    ``places`` lists all possible places: ranks agree on each of them, even if some have not met it. ``tops`` holds the
    exponent of each window's upper end.
    """

    tops: dict[str, int]
    widened: int
    """How often a step was run again, not counting the first step."""

    def __init__(self, places: Iterable[str] = ()) -> None:
        self._places: list[str] = []
        self.spare = SpareMemory()
        self.apart = self._agreed_apart = False
        """Whether shards of some rank have other bits in one pass than alone. ``settle`` makes ranks agree on it."""
        self._recording = False
        self._shifts: dict[tuple[str, int, torch.device], tuple[Tensor, int]] = {}
        self._used_again: set[str] = set()
        self.expect(places)
        self.clear()

    def clear(self) -> None:
        """Reset everything but the places to the start of a training."""
        self.tops = {}
        self.widened = 0
        self._seen: dict[str, list[Tensor]] = {}
        self._missing = self._again = False
        self._steps = 0
        self._counts = torch.zeros(2, dtype=torch.int64)
        self._passing: list[Tensor] = []
        self._deferred: list[tuple[UserError, Tensor]] = []

    def expect(self, places: Iterable[str]) -> None:
        """Add possible places."""
        self._places = sorted({*self._places, *places})

    def _shift(self, place: str, bits: int, device: torch.device) -> Tensor | float:
        """What rounds to so many bits of a window; see ``shifter``. Recorded passes and GPUs read it from memory."""
        if device.type == "cpu" and not self._recording:
            return shift_of(self.tops[place], bits)
        key = place, bits, device
        if self._recording and key in self._shifts:
            return self._shifts[key][0]
        return self._in_memory(key)

    def _in_memory(self, key: tuple[str, int, torch.device]) -> Tensor:
        """A window's shift in the device's memory. No mode sees how it is made."""
        place, bits, device = key
        number, top = self._shifts.get(key, (None, None))
        if top != self.tops[place]:
            value = shift_of(self.tops[place], bits)
            if number is None:
                number = torch.tensor(value, dtype=torch.float64, device=device)
            else:
                number.fill_(value)
            self._shifts[key] = number, self.tops[place]
        assert number is not None
        return number

    def renew(self) -> None:
        """Write windows that have changed into the device's memory."""
        for key in self._shifts:
            if key[0] in self.tops:
                self._in_memory(key)

    @property
    def are_settled(self) -> bool:
        """Whether all windows are agreed, and this is none of the steps in which zeros are counted."""
        return bool(self.tops) and not self._missing and self._steps % COUNT_EVERY != 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context for passes that are recorded, which read windows from the device's memory alone."""
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    def taken(self) -> tuple[dict[str, list[Tensor]], list[tuple[UserError, Tensor]]]:
        """The sizes and refusals of passes so far, which count for this step no longer.

        Raises RuntimeError: a place has no window yet.
        """
        found, missing = (self._seen, self._deferred), self._missing or self._again
        self._seen, self._deferred, self._missing, self._again = {}, [], False, False
        if missing:
            raise RuntimeError("a parameter is used in a way that no step before has used it")
        return found

    def give(self, seen: Mapping[str, list[Tensor]], refusals: Iterable[tuple[UserError, Tensor]]) -> None:
        """Let sizes and refusals of passes count for this step."""
        for place, sizes in seen.items():
            self._seen.setdefault(place, []).extend(sizes)
        self._deferred.extend(refusals)

    def round(self, place: str, x: Tensor, bits: int) -> Tensor | None:
        """Round ``x`` to ``bits`` bits of the window at ``place``, as float64.

        None if no window is agreed yet: the step will be run again, and its sum does not matter.
        """
        seen = self._seen.setdefault(place, [])
        if place not in self.tops:
            seen.append(largest(x))
            self._missing = True
            return None
        values, size = snapped(x, self._shift(place, bits, x.device))
        seen.append(size)
        if self._steps % COUNT_EVERY == 0:
            nonzero = x != 0
            self._passing.append(torch.stack([(nonzero & (values == 0)).sum(), nonzero.sum()]))
        return values

    def sum(self, place: str, x: Tensor, bits: int) -> Tensor:
        """The sum over the first axis of ``x``, rounded as in ``round``; zeros if no window is agreed yet."""
        total = self.sum_by(place, bits, x.device, partial(snapped_sum, x))
        if total is not None:
            return total
        values = self.round(place, x, bits)
        return torch.zeros_like(x[0], dtype=torch.float64) if values is None else values.sum(0)

    def sum_by(
        self, place: str, bits: int, device: torch.device, sum_of: Callable[[Tensor | float], tuple[Tensor, Tensor]]
    ) -> Tensor | None:
        """The sum that ``sum_of`` makes by a window's shift, beside the largest magnitude.

        None if no window is agreed yet, or zeros are counted in this step.
        """
        if place not in self.tops or self._steps % COUNT_EVERY == 0:
            return None
        total, size = sum_of(self._shift(place, bits, device))
        self._seen.setdefault(place, []).append(size)
        return total

    def is_used_once(self, place: str) -> bool:
        """False once a pass has found a second use of a parameter."""
        return place not in self._used_again

    def use_again(self, place: str) -> None:
        """Note a second use of a parameter, part of whose gradient was taken for all of it: the step is run again."""
        self._used_again.add(place)
        self.run_again()

    def run_again(self) -> None:
        """Have this step run again, because a gradient is not whole."""
        self._again = True

    def defer(self, refusal: UserError, wrong: Tensor) -> None:
        """Raise ``refusal`` when the step is settled, if ``wrong`` is true."""
        self._deferred.append((refusal, wrong))

    def settle(self, largest_of_all: Callable[[Tensor], Tensor], device: torch.device) -> bool:
        """Agree on the windows with all ranks; False if the step has to be run again.

        Raises:
            NotFiniteError: a magnitude is infinite or NaN.
            UserError: a deferred refusal applies.
            CollectiveError: a refusal that another rank deferred applies.
        """
        deferred, self._deferred = self._deferred, []
        wrong = [flag for _, flag in deferred]
        told = self._told_by_host(wrong) if device.type == "cpu" else self._told_by_device(device, wrong)
        self._seen.clear()
        *agreed, missing, again, apart, refused = largest_of_all(told).tolist()
        if refused:
            here_refused = (refusal for refusal, flag in deferred if flag)
            raise next(here_refused, CollectiveError("another rank has refused the step", hint="see what it says"))
        if again:  # some of the magnitudes are those of a part of a gradient
            self._missing = self._again = False
            self._passing.clear()
            return False
        tops = {place: top for place, top in zip(self._places, agreed, strict=True) if top > _UNSEEN}
        if beyond := sorted((place for place, top in tops.items() if top >= _OVERFLOW), key=lambda one: one != LOSS):
            raise NotFiniteError(
                f"{few(beyond, 1)}: infinite or not a number, so there is no exact sum over the batch",
                hint="lower train.optimizer.lr, or set train.clip_grad_norm or a warm-up",
            )
        fits = not missing and bool(apart) == self._agreed_apart
        self._agreed_apart = self.apart = bool(apart)
        for place, top in tops.items():
            if place not in self.tops or top > self.tops[place]:
                fits = False
                self.tops[place] = top + HEADROOM
        if fits:
            self._steps += 1
            for pair in self._passing:
                self._counts += pair.cpu()
            for place, top in tops.items():
                self.tops[place] -= top < self.tops[place] - SLACK
        else:
            self.widened += not missing
        self._missing = False
        self._passing.clear()
        return fits

    def _told_by_host(self, wrong: list[Tensor]) -> Tensor:
        """What ranks agree on: the top of each place in this step, three flags, and whether anything is ``wrong``."""
        tops = {place: max(map(top_of_number, sizes)) for place, sizes in self._seen.items()}
        flags = self._missing, self._again, self.apart, any(wrong)
        return torch.tensor([*(tops.get(place, _UNSEEN) for place in self._places), *flags], dtype=torch.int64)

    def _told_by_device(self, device: torch.device, wrong: list[Tensor]) -> Tensor:
        """The same, with nothing read by the host: each read waits for all work queued on a GPU."""
        tops, known = self._largest_tops(device), torch.tensor([_UNSEEN, self._missing, self._again, self.apart, 0])
        unseen, *flags, right = known.to(device, non_blocking=True).unbind()
        is_wrong = torch.stack([flag.to(device, torch.int64) for flag in wrong]).amax() if wrong else right
        return torch.stack([*(tops.get(place, unseen) for place in self._places), *flags, is_wrong])

    def _largest_tops(self, device: torch.device) -> dict[str, Tensor]:
        """The exponent of the largest magnitude of each place seen in this step; one batch of kernels for each type."""
        tops: dict[str, Tensor] = {}
        for dtype in {sizes[0].dtype for sizes in self._seen.values()}:
            rows = {place: sizes for place, sizes in self._seen.items() if sizes[0].dtype is dtype}
            longest = max(map(len, rows.values()))
            flat = []
            for sizes in rows.values():
                filled_up = [*sizes, *[sizes[0]] * (longest - len(sizes))]  # which does not change the largest
                flat += [size.to(device) for size in filled_up]
            largest_of_each = top_of_magnitude(torch.stack(flat)).view(len(rows), longest).amax(1)
            tops |= zip(rows, largest_of_each.unbind(), strict=True)
        return tops

    def share_below(self) -> float:
        """This rank's share of numbers rounded to zero, in each ``COUNT_EVERY``-th step."""
        lost, rounded = self._counts.tolist()
        return lost / rounded if rounded else 0.0

    def state(self) -> dict[str, Any]:
        """The windows, and how often steps were run again, as JSON."""
        return {"tops": dict(self.tops), "widened": self.widened}

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that ``state`` has returned."""
        self.clear()
        self.tops |= state["tops"]
        self.widened = state["widened"]
