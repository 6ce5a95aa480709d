"""What `flatmin bench` measures: every contender has a row, what fails says why, and the README has the figures."""

import copy
import errno
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import cost_table
import page_parts
from flatmin_lab.bench import contenders, roofline, timing
from flatmin_lab.bench.benchmark import BenchmarkOptions, run_benchmark
from flatmin_lab.bench.contenders import build_contender
from flatmin_lab.bench.roofline import floor, flops_of
from flatmin_lab.bench.rows import ratios
from flatmin_lab.bench.timing import Runner, run_rounds
from flatmin_lab.bench.workload import Workload, random_images
from flatmin_lab.cli.commands import bench, bench_view
from flatmin_lab.data import Normalisation, augmentation
from tests import ROOT
from tests.support.processes import flatmin, words

BEGIN, END = page_parts.markers(cost_table.PART)
CPU = torch.device("cpu")


def small(**changes: Any) -> BenchmarkOptions:
    usual: dict[str, Any] = {"models": ("mlp",), "batch_sizes": (4,), "steps": 5, "precision": "fp32"}
    return BenchmarkOptions(**{**usual, **changes})


def measured(wanted: BenchmarkOptions, device: torch.device = CPU) -> dict[str, Any]:
    result = run_benchmark(wanted, device=device, images=200)
    json.dumps(result, allow_nan=False)
    return result


def work(model: str = "mlp", precision: str = "fp32") -> Workload:
    split = random_images(CPU, 64)
    normalise = Normalisation.of(split)
    augment = augmentation("vanilla", "cifar10")
    return Workload.build(model, split, normalise, batch_size=4, augment=augment, precision=precision)


@pytest.fixture(autouse=True)
def a_rough_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "MAX_SECONDS", 0.0)


def test_on_a_cpu_the_eager_ones_are_timed_and_the_others_left_out_with_a_reason() -> None:
    pytest.importorskip("pytorch_optimizer", reason="its SAM is one of the contenders")
    before = torch.get_rng_state(), torch.backends.cudnn.benchmark
    (table,) = measured(small())["tables"]
    assert [(row["method"], row["form"]) for row in table["rows"]] == [(m, "eager") for m in ("erm", "amp", "sam")]
    for row in table["rows"]:
        low, high = row["ms_quartiles"]
        assert 0 < low <= row["ms"] <= high
        assert row["n"] >= 5
        assert row["peak_mib"] is None
    assert [part["form"] for part in table["data"]] == ["eager"]
    (why,) = table["left_out"]
    assert "CUDA" in why
    assert len(table["left_out"][why]) == 8
    assert table["ratios"]["amp / erm, eager"] == table["rows"][1]["ms"] / table["rows"][0]["ms"]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.backends.cudnn.benchmark == before[1]


def test_a_step_that_was_not_captured_is_no_row_of_a_captured_form() -> None:
    made = build_contender(work(), "erm", "graph")
    made(2)
    made.check("eager")
    with pytest.raises(contenders.CannotStepError, match="not on a CUDA device"):
        made.check("graph")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("method", ["erm", "amp", "sam"])
def test_a_step_moves_the_weights_and_leaves_them_finite(
    method: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if method == "sam":
        pytest.importorskip("pytorch_optimizer", reason="its SAM is one of the contenders")
    kept: list[torch.nn.Module] = []
    new = Workload.new_model
    monkeypatch.setattr(Workload, "new_model", lambda self: kept.append(new(self)) or kept[-1])  # type: ignore[func-returns-value]
    own = work(precision=precision)
    made = build_contender(own, method, "eager")
    before = [p.detach().clone() for p in kept[0].parameters()]
    made(2)
    after = [p.detach() for p in kept[0].parameters()]
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(p.isfinite().all() for p in after)


def test_contenders_begin_alike_and_see_the_same_batches() -> None:
    own = work("convnet")
    first, again = own.new_model().state_dict(), own.new_model().state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    x, y = own.batch(*own.inputs[0])
    assert x.shape == (4, 3, 32, 32)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(y, own.batches.split.y[own.inputs[0][0]])


def test_contenders_take_turns_and_one_that_breaks_is_out() -> None:
    order: list[str] = []

    def breaks(count: int) -> None:
        if order.count("b") == 2:
            raise RuntimeError("no more\nof this")
        order.append("b")

    runners = {"a": Runner(lambda count: order.extend("a" * count), 2), "b": Runner(breaks, 1, models=4)}
    run_rounds(runners, CPU, rounds=3)
    assert "".join(order) == "aabaabaa"
    assert runners["b"].failed == "no more"
    assert len(runners["a"].times) == 3


def test_a_block_of_slow_steps_is_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "wall_seconds", lambda work, device: 2.0)
    assert timing.block_length(lambda count: None, CPU, most=20) == 1
    monkeypatch.setattr(timing, "wall_seconds", lambda work, device: 2e-3)
    assert timing.block_length(lambda count: None, CPU, most=20) == 20


def test_the_memory_of_a_step_is_its_peak_and_what_its_graph_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: 100 MiB. A graph then holds 50 of which 10 are in use; other devices' and other memory does not count."""
    mib, gpu = timing.MIB, torch.device("cuda", 0)

    def segment(device: int, total: int, used: int, pool: tuple[int, int]) -> dict[str, Any]:
        return {"device": device, "total_size": total * mib, "allocated_size": used * mib, "segment_pool_id": pool}

    segments = [segment(0, 200, 110, (0, 0)), segment(0, 50, 10, (0, 1)), segment(1, 70, 0, (0, 2))]
    for name, value in {
        "synchronize": None,
        "reset_peak_memory_stats": None,
        "memory_allocated": 120 * mib,
        "max_memory_allocated": 130 * mib,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert timing.memory_in_use(gpu) == (120 * mib, 40 * mib)
    assert timing.peak_mib_since(timing.Memory(100 * mib, 0), lambda count: None, gpu) == 30 + 40


def test_the_floor_counts_two_passes_and_the_bytes_of_the_weights() -> None:
    given: dict[str, Any] = {"flops": 10**9, "batch_size": 50, "size": 4 * 10**6}
    speed = {"flops_per_s": 1e12, "bytes_per_s": 1e9}
    erm, amp = (floor(method, **given, precision="bf16", speed=speed) for method in ("erm", "amp"))
    assert erm["arithmetic_ms"] == pytest.approx(50)
    assert amp["arithmetic_ms"] == pytest.approx(100)
    assert amp["bytes_ms"] / erm["bytes_ms"] == pytest.approx(9 / 6)
    assert amp["floor_ms"] == pytest.approx(100 + 36)
    assert floor("amp", **given, precision="fp32", speed=speed)["bytes_ms"] == pytest.approx(40)


def test_the_arithmetic_of_a_network_is_three_times_its_forward_pass_less_one_gradient() -> None:
    """An MLP on 3072 numbers: the first layer has no gradient to its input."""
    layers = [p.shape for p in work().new_model().parameters() if p.ndim == 2]
    products = [rows * columns for rows, columns in layers]
    assert flops_of("mlp") == 2 * (3 * sum(products) - products[0])


# ---- the command


WRONG = {
    "--model": "resnet1000",
    "--batch-size": "many",
    "--methods": "adam",
    "--forms": "fast",
    "--at-once": "1",
    "--steps": "2",
    "--precision": "fp8",
    "--augment": "wild",
}


def test_a_reader_that_goes_away_costs_nothing_and_a_full_disk_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(wanted: BenchmarkOptions, *, after: Callable[[dict[str, Any]], None], **_: object) -> dict[str, Any]:
        after(made_up())
        after(made_up())
        return made_up()

    def closed(*_: object) -> None:
        raise BrokenPipeError

    file = tmp_path / "bench.json"
    monkeypatch.setattr(bench, "run_benchmark", measured)
    monkeypatch.setattr(bench_view, "table", closed)
    assert flatmin("bench", "--device", "cpu", "--json", file).exit_code == 1
    assert json.loads(file.read_text()) == made_up()
    tables: list[object] = []
    monkeypatch.setattr(bench_view, "table", lambda *table: tables.append(table))
    with monkeypatch.context() as full:

        def fails(path: Path) -> None:
            raise OSError(errno.ENOSPC, "no space left")

        full.setattr(bench, "atomic_write", fails)
        result = flatmin("bench", "--device", "cpu", "--json", file)
    assert (result.exit_code, len(tables)) == (1, 2)
    assert words(result.stderr).count("could not be written (no space left); make room") == 2
    assert "the tables above are what was measured" in words(result.stderr)


def test_a_place_that_cannot_be_written_to_is_found_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> None:
        raise PermissionError(errno.EACCES, "permission denied")

    monkeypatch.setattr(bench, "run_benchmark", None)
    monkeypatch.setattr(Path, "touch", refused)
    result = flatmin("bench", "--device", "cpu", "--json", tmp_path / "bench.json")
    assert result.exit_code == 2
    assert "cannot be written (permission denied); choose another place with --json" in words(result.stderr)
    monkeypatch.undo()
    empty = flatmin("bench", "--methods", " ,", "--device", "cpu", "--json", tmp_path / "bench.json")
    assert empty.exit_code == 2
    assert "--methods takes at least one word or number, got ' ,'" in words(empty.stderr)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("flag", "value"), WRONG.items())
def test_the_command_names_a_wrong_argument(tmp_path: Path, flag: str, value: str) -> None:
    result = flatmin("bench", flag, value, "--device", "cpu", "--json", tmp_path / "bench.json")
    assert result.exit_code == 2
    assert value in result.output
    assert not (tmp_path / "bench.json").exists()


@pytest.mark.parametrize(
    ("flags", "word"),
    [(("--forms", "graph"), "CUDA graphs need"), (("--methods", "sam", "--forms", "compiled"), "eager")],
)
def test_nothing_to_measure_is_an_error_and_no_file(tmp_path: Path, flags: tuple[str, ...], word: str) -> None:
    result = flatmin("bench", *flags, "--device", "cpu", "--json", tmp_path / "bench.json")
    assert result.exit_code == 2
    assert "nothing can be measured" in words(result.output)
    assert word in words(result.output)
    assert not list(tmp_path.iterdir())


# ---- the README


def row(method: str, form: str, ms: float, models: int = 1, copies: float | None = None) -> dict[str, Any]:
    times = {"ms": ms, "ms_quartiles": [0.99 * ms, 1.01 * ms], "n": 100, "blocks": 10}
    return {
        "method": method,
        "form": form,
        "models": models,
        "ready_s": 1.0,
        "peak_mib": 100.0,
        "over_erm_copies": copies,
        **times,
    }


def made_up() -> dict[str, Any]:
    rows = [
        row("erm", "eager", 10.0),
        row("amp", "eager", 20.0, copies=1.0),
        row("sam", "eager", 25.0, copies=1.5),
        row("erm", "compiled", 2.0),
        row("amp", "compiled", 3.5, copies=0.25),
        row("erm", "at-once", 1.25, models=4),
        {"method": "amp", "form": "at-once", "models": 4, "failed": "out of memory", "over_erm_copies": None},
    ]
    floors = {
        name: {"arithmetic_ms": a, "bytes_ms": 0.1, "floor_ms": a + 0.1} for name, a in (("erm", 0.2), ("amp", 0.4))
    }
    table = {
        "model": "preactresnet18",
        "batch_size": 50,
        "floor": floors,
        "rows": rows,
        "data": [{"form": "graph", "ms": 0.05, "ms_quartiles": [0.04, 0.06], "n": 100, "share": 0.02}],
        "left_out": {"no reason": ["erm graph"]},
        "ratios": ratios(rows),
    }
    other = {**copy.deepcopy(table), "model": "vgg16", "batch_size": 128}
    machine = {"hardware": "NVIDIA H200", "torch": "2.11.0", "commit": "abc1234", "precision": "bf16"}
    return {**machine, "flops_per_s": 7.9e14, "bytes_per_s": 4.1e12, "tables": [other, table]}


def test_the_tables_have_a_row_for_each_form_and_one_for_each_model() -> None:
    text = cost_table.rendered(made_up())
    for line in (
        "| PreActResNet18, batches of 50 | ERM, ms | AMP, ms | ratio | ERM, MiB | AMP, MiB |",
        "| plain PyTorch | 10.00 | 20.00 | 2.00 | 100 | 100 |",
        "| one CUDA graph, compiled | 2.00 | 3.50 | 1.75 | 100 | 100 |",
        "| 4 models at once, each | 1.25 | failed |  | 25 |  |",
        "| the floor | 0.30 | 0.50 |  |  |  |",
        "| VGG16 | 128 | 3.50 | 1.75 | 0.50 | 10.00 | 0.35 |",
    ):
        assert line in text.splitlines()
    assert "takes 25.00 ms in plain PyTorch, and AMP's 20.00; AMP's compiled step is 7.14 times as fast" in text
    assert "NVIDIA H200, torch 2.11.0, commit abc1234" in text
    assert "medians over 10 blocks of 10 steps each, in turn, quartiles at most 2.0 % apart, those of plain" in text


def test_every_row_of_a_result_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    result = made_up()
    bench_view.table(result, result["tables"][1])
    text = words(capsys.readouterr().out)
    for part in ("AMP, 4 models at once failed: out of memory", "AMP, compiled 3.50", "+0.25 copies", "(no reason)"):
        assert part in text
    assert "data: CUDA graph 0.05 ms, 2.0 % of the step" in text


def test_a_share_of_the_data_that_is_lost_in_the_noise_is_not_shown_as_a_number(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = made_up()
    (part,) = result["tables"][1]["data"]
    part.update(ms=-0.31, ms_quartiles=[-1.25, 0.42], share=-0.15)
    bench_view.table(result, result["tables"][1])
    text = words(capsys.readouterr().out)
    assert "data: CUDA graph less than the noise (at most 0.42 ms" in text
    assert "-0.31" not in text
    assert "-15" not in text


def test_the_page_is_written_once_and_then_up_to_date(tmp_path: Path) -> None:
    page, figures = tmp_path / "page.md", tmp_path / "figures.json"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    figures.write_text(json.dumps(made_up()))

    def program(*more: str) -> int:
        command = [
            sys.executable,
            str(ROOT / "benchmarks/cost_table.py"),
            "--json",
            str(figures),
            "--page",
            str(page),
        ]
        return subprocess.run([*command, *more], capture_output=True, check=False).returncode

    assert [program("--check"), program(), program("--check"), program()] == [1, 0, 0, 0]
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n| PreActResNet18")
    assert text.endswith(f"Memory is the peak during a model's steps.\n{END}\nafter\n")
    page.write_text("no markers")
    assert program() == 2


@pytest.mark.parametrize("content", [None, b"\xff", b"{", b"[]", b"{}", b"3", b'{"tables": [{}]}', b'{"tables": 3}'])
def test_a_foreign_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "other.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"other.json is not a file of flatmin bench \(.+\); write one with flatmin"):
        cost_table.read(tmp_path / "other.json")


def test_the_page_has_the_figures_of_the_committed_file() -> None:
    text = page_parts.PAGES[cost_table.PART].read_text()
    result = json.loads(cost_table.JSON.read_text())
    assert page_parts.put_into(text, cost_table.PART, cost_table.rendered(result)) == text, (
        "run python benchmarks/cost_table.py"
    )


# ---- on a GPU


@pytest.mark.cuda
def test_on_a_gpu_every_form_is_captured_and_has_its_memory() -> None:
    wanted = small(models=("convnet",), batch_sizes=(16,), methods=("erm", "amp"), at_once=(2,), precision="bf16")
    (table,) = measured(wanted, torch.device("cuda"))["tables"]
    assert len(table["rows"]) == 8
    assert all("ms" in row for row in table["rows"]), table["rows"]
    assert all(row["peak_mib"] > 0 for row in table["rows"])
