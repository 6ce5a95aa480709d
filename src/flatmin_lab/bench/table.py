"""One table of the benchmark: all contenders for a model and batch size, built one by one, then timed in turn.

Memory is measured while a contender is built, against what was in use before, so it is the contender's own. A failure
(out of memory, a step that cannot be captured) becomes a row that says why; the others continue.
"""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from flatmin_lab.bench.contenders import CannotStepError, ConcurrentContenders, Contender, build_contender, why_left_out
from flatmin_lab.bench.rows import Row, is_above_noise, memory_over_erm, row_name, timing_columns
from flatmin_lab.bench.timing import (
    MIB,
    Runner,
    block_length,
    failure_reason,
    free_mib,
    memory_in_use,
    peak_mib_since,
    release_memory,
    run_rounds,
    summary,
    wall_seconds,
)
from flatmin_lab.bench.workload import Workload

SINGLE = ("eager", "graph", "compiled")
DATA_FORMS = ("eager", "graph")  # where the data's share is measured; compiling does not change it


class ReadyContender(NamedTuple):
    """A contender that has stepped: the time until it was ready (compilation, capture), and its memory."""

    contender: Contender
    ready_seconds: float
    peak_mib: float | None


class BenchmarkTable:
    """The rows, by name ("amp compiled", "erm 4 at-once"), and the contenders behind them."""

    def __init__(self, workload: Workload, *, steps: int, rounds: int, say: Callable[[str], None]) -> None:
        self.workload, self.device, self.say = workload, workload.device, say
        self.steps, self.rounds = steps, rounds
        self.rows: dict[str, Row] = {}
        self.left_out: dict[str, list[str]] = {}  # names by reason
        self.data: dict[str, Row] = {form: {"form": form} for form in DATA_FORMS}
        self.runners: dict[str, Runner] = {}
        self.replicas: dict[str, list[ReadyContender]] = {}
        self.largest = 0.0

    def add(self, methods: Sequence[str], forms: Sequence[str], at_once: Sequence[int]) -> None:
        """Build the contenders. Single models come first: if memory runs out, several at once are left out."""
        for form in (form for form in SINGLE if form in forms):
            for method in methods:
                if method != "sam" or form == "eager":
                    self._enter(method, form, 1)
        plain = [method for method in methods if method in ("erm", "amp")]
        for form in (form for form in DATA_FORMS if form in forms):
            if plain and row_name(plain[0], form) in self.runners:
                self._guarded(row_name("data", form), self.data[form], partial(self._without_data, plain[0], form))
        for count in sorted(at_once if "at-once" in forms else ()):
            for method in plain:
                self._enter(method, "at-once", count)

    def _enter(self, method: str, form: str, count: int) -> None:
        name = row_name(method, form, count)
        why = why_left_out(method, form, device=self.device, precision=self.workload.precision)
        if why is not None:
            self.left_out.setdefault(why, []).append(name)
            return
        self.rows[name] = {"method": method, "form": form, "models": count}
        self._guarded(name, self.rows[name], partial(self._several if count > 1 else self._single, method, form, count))

    def _guarded(self, name: str, row: Row, build: Callable[[], Row]) -> None:
        self.say(f"{self.workload.model}, batches of {self.workload.batches.batch_size}: making {name} ready")
        try:
            row.update(build())
        except Exception as error:
            row["failed"] = failure_reason(error)

    # ---- building

    def _single(self, method: str, form: str, count: int) -> Row:
        built = self._build(method, form)
        if form == "compiled":
            self.replicas[method] = [built]
        return self._start(row_name(method, form), built.contender, [built])

    def _several(self, method: str, form: str, count: int) -> Row:
        replicas = self.replicas.setdefault(method, [])
        while len(replicas) < count:
            self._check_room(replicas)
            replicas.append(self._build(method, "compiled"))
        streams = [torch.cuda.Stream(self.device) for _ in range(count)]
        taken = replicas[:count]
        return self._start(
            row_name(method, form, count), ConcurrentContenders([one.contender for one in taken], streams), taken
        )

    def _without_data(self, method: str, form: str) -> Row:
        built = self._build(method, form, data=False)
        return self._start(row_name("data", form), built.contender, [built])

    def _build(self, method: str, form: str, *, data: bool = True) -> ReadyContender:
        release_memory(self.device)
        before = memory_in_use(self.device)
        made = build_contender(self.workload, method, form, data=data)
        ready = wall_seconds(lambda: made(2), self.device)  # an ordinary step, then the captured one
        made.check(form)
        peak = peak_mib_since(before, made, self.device)
        self.largest = max(self.largest, peak or 0.0)
        return ReadyContender(made, ready, peak)

    def _check_room(self, replicas: Sequence[ReadyContender]) -> None:
        """Check for memory for one more model, and for the eager ones, which allocate theirs in every step."""
        need = (replicas[0].peak_mib or 0.0 if replicas else 0.0) + self.largest
        if (free := free_mib(self.device)) < need:
            raise CannotStepError(f"one more model needs {need:.0f} MiB, but {free:.0f} are free")

    def _start(self, name: str, take: Callable[[int], None], built: Sequence[ReadyContender]) -> Row:
        length = block_length(take, self.device, most=self.steps // self.rounds)
        self.runners[name] = Runner(take, length, len(built))
        peaks = [one.peak_mib for one in built if one.peak_mib is not None]
        return {
            "ready_s": sum(one.ready_seconds for one in built),
            "peak_mib": sum(peaks) if peaks else None,
        }

    # ---- timing

    def run(self, parameters: int) -> dict[str, Any]:
        """Time all contenders; the rows, the data's share of a step, and what was left out."""
        self.say(
            f"{self.workload.model}, batches of {self.workload.batches.batch_size}: {len(self.runners)} take turns"
        )
        run_rounds(self.runners, self.device, rounds=self.rounds)
        for name, row in self.rows.items():
            if name in self.runners:
                row.update(timing_columns(self.runners[name]))
        for row in self.rows.values():
            row["over_erm_copies"] = memory_over_erm(row, self.rows.values(), 4 * parameters / MIB)
        return {"rows": list(self.rows.values()), "data": self._data(), "left_out": self.left_out}

    def _data(self) -> list[Row]:
        """The time of a step with its data less that of a step without, block by block; or why there is none."""
        found: list[Row] = []
        for form in DATA_FORMS:
            without = self.runners.get(row_name("data", form))
            plain = (row_name("erm", form), row_name("amp", form))
            with_data = next((runner for name, runner in self.runners.items() if name in plain), None)
            why = self.data[form].get("failed") or (without.failed if without else None)
            if why:
                found.append({"form": form, "failed": why})
            if why or without is None or with_data is None or with_data.failed:
                continue
            differences = [one - other for one, other in zip(with_data.times, without.times, strict=True)]
            share = median(differences) / median(with_data.times)
            row = {"form": form, **summary(differences), "n": len(differences) * without.steps, "share": share}
            found.append({**row, "above_noise": is_above_noise(row)})
        return found
