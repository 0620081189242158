"""Choosing attention kernels: who is admitted, who wins, who serves, what is remembered.

No GPU here: kernels and clocks are made for the tests, and run on the CPU through the same code.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.towers import boundaries
from vit_compile.attention import admission, choice, fence, reference
from vit_compile.attention.admission import FENCED, Kernel
from vit_compile.attention.choice import Choice, KernelChoices
from vit_compile.attention.problem import DENSE, VARLEN, Problem, dense_problem, layouts, varlen_problem
from vit_compile.errors import SkipError
from vit_compile.stats import counters

CPU = torch.device("cpu")
HEADS, DIM = 2, 8
PROBLEM = Problem(VARLEN, "float32", (12, HEADS, DIM), 3, 6)


def good(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, longest: int, scale: float) -> torch.Tensor:
    """Right, isolating, and a tail of garbage."""
    out = reference.forward(q, k, v, cu_seqlens, longest, scale)
    out[cu_seqlens[-1] :] = 7
    return out


def wrong(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, longest: int, scale: float
) -> torch.Tensor:
    """Numbers that are off by a little."""
    return good(q, k, v, cu_seqlens, longest, scale) * 1.01


def leaky(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, longest: int, scale: float
) -> torch.Tensor:
    """Right for finite inputs; a NaN in k or v reaches every row, as 0 x NaN does."""
    return good(q, k, v, cu_seqlens, longest, scale) + (0 * (k.sum() + v.sum()))


def leakier(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, longest: int, scale: float
) -> torch.Tensor:
    """Here one in q does, too, which no fence keeps away."""
    return leaky(q, k, v, cu_seqlens, longest, scale) + 0 * q.sum()


def broken(*args: Any) -> torch.Tensor:
    """Does not run."""
    raise RuntimeError("no such instruction\nat line 3")


def anything(problem: Problem, capability: tuple[int, int]) -> str | None:
    """Takes every problem."""
    return None


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Kernel]]:
    """The table of varlen kernels, empty for a test to fill; nothing is remembered before or after."""
    made: dict[str, Kernel] = {}
    monkeypatch.setattr(admission, "VARLEN_KERNELS", made)
    choice.forget()
    yield made
    choice.forget()


def fill(table: dict[str, Kernel], **runs: Callable[..., torch.Tensor]) -> None:
    """Untrusted kernels by name."""
    table |= {name: Kernel(name, run, anything) for name, run in runs.items()}


def serves(run: Any) -> Any:
    """The kernel's own function, in what is handed out: rows past the last boundary are set to zero behind it."""
    assert run.func is admission._with_zero_tail
    return run.args[0]


class Clock:
    """A timer that runs the call and gives each kernel the seconds that a test says."""

    def __init__(self, **seconds: float) -> None:
        self.seconds, self.calls = seconds, 0
        self.limits: list[float] = []

    def __call__(self, call: Callable[[], object], device: torch.device, give_up_s: float = math.inf) -> float:
        self.limits.append(give_up_s)
        call()
        self.calls += 1
        made: Any = call
        run = made.args[0] if made.func is admission._with_zero_tail else made.func
        names = {id(kernel.run): name for name, kernel in admission.VARLEN_KERNELS.items()}
        names |= {id(kernel.run): name for name, kernel in admission.DENSE_KERNELS.items()}
        return self.seconds[names.get(id(run), "fenced")]


def qkv(rows: int, seed: int = 0) -> list[torch.Tensor]:
    """Seeded q, k and v."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, HEADS, DIM, generator=generator) for _ in range(3)]


def choices(clock: Clock, wanted: str = "auto", **kwargs: Any) -> KernelChoices:
    """Of a manager: padding is finite."""
    return KernelChoices(wanted, CPU, clock, **{"fence_from": 2, **kwargs})


def settled(made: KernelChoices, *problems: Problem) -> KernelChoices:
    """After a run with these problems."""
    with made.observing():
        for problem in problems:
            assert choice.current() is made
            assert made.kernel(problem) is None, "an observed run takes the default"
    made.settle()
    return made


# --- admission --------------------------------------------------------------------------------------------------------


def test_admission(table: dict[str, Kernel]) -> None:
    """A right kernel is admitted, a wrong or failing one refused with the reason, a leaky one only behind the fence."""
    fill(table, good=good, wrong=wrong, leaky=leaky, leakier=leakier, broken=broken)
    runs, refused = admission.candidates(PROBLEM, CPU, fence_from=2)
    assert set(runs) == {"good", "leaky" + FENCED}
    assert "numbers are wrong" in refused["wrong"]
    assert refused["broken"] == "fails here: RuntimeError: no such instruction"
    assert "NaN" in refused["leaky"]
    assert "NaN" in refused["leakier"], "one that the fence does not hold is not used behind it"


def test_no_candidate_beside_a_faster_one(table: dict[str, Kernel]) -> None:
    """Where the faster one is admitted the slower one is neither tried nor timed; pinned, or without the other, it serves."""
    tried: list[str] = []

    def slow(*args: Any) -> torch.Tensor:
        tried.append("slow")
        return good(*args)

    table["good"] = Kernel("good", good, anything)
    table["slow"] = Kernel("slow", slow, anything, slower_than="good")
    runs, refused = admission.candidates(PROBLEM, CPU, fence_from=2)
    assert set(runs) == {"good"}
    assert refused == {"slow": "not timed: no gain beside good"}
    assert tried == []
    assert admission.admit("slow", PROBLEM, CPU, fence_from=2) == ("slow", None)
    table["good"] = Kernel("good", broken, anything)
    assert set(admission.candidates(PROBLEM, CPU, fence_from=2)[0]) == {"slow"}


def test_no_candidate_with_too_few_rows(table: dict[str, Kernel]) -> None:
    """Below its least number of rows a kernel is neither tried nor timed; from it on, or pinned, it serves."""
    tried: list[int] = []

    def large(*args: Any) -> torch.Tensor:
        tried.append(len(args[0]))
        return good(*args)

    table["large"] = Kernel("large", large, anything, least_rows=13)
    few, enough = (Problem(VARLEN, "float32", (rows, HEADS, DIM), 2, 6) for rows in (12, 13))
    assert admission.candidates(few, CPU, fence_from=2) == ({}, {"large": "not timed: no gain below 13 rows"})
    assert tried == []
    assert set(admission.candidates(few, CPU, fence_from=2, every=True)[0]) == {"large"}
    assert admission.admit("large", few, CPU, fence_from=2) == ("large", None)
    assert set(admission.candidates(enough, CPU, fence_from=2)[0]) == {"large"}


def test_the_code_that_will_serve_is_tried(table: dict[str, Kernel]) -> None:
    """A kernel with other code for more segments is tried with the room that a problem's code has, once for each."""
    rooms: list[int] = []

    def noting(*args: Any) -> torch.Tensor:
        rooms.append(len(args[3]) - 1)
        return good(*args)

    table["noting"] = Kernel("noting", noting, anything, code_for=lambda segments: 64 if segments <= 64 else 1024)
    for segments in (3, 64, 65, 1024):
        problem = Problem(VARLEN, "float32", (12, HEADS, DIM), segments, 6)
        assert set(admission.candidates(problem, CPU, fence_from=2)[0]) == {"noting"}
    assert rooms == [64, 64, 1024, 1024], "clean and with NaN"


@pytest.mark.parametrize(
    ("fence_from", "segments", "fenced"), [(1, 1, True), (1, 3, True), (2, 1, False), (2, 2, True), (0, 9, False)]
)
def test_where_a_leaky_kernel_needs_the_fence(table: dict[str, Kernel], fence_from: int, segments: int, fenced: bool) -> None:
    """Always; from two segments on; never."""
    fill(table, leaky=leaky)
    problem = Problem(VARLEN, "float32", (12, HEADS, DIM), segments, 6)
    runs, _ = admission.candidates(problem, CPU, fence_from=fence_from)
    assert set(runs) == {"leaky" + FENCED if fenced else "leaky"}


def test_what_is_not_installed_is_told() -> None:
    """The real table on a machine without a GPU: every kernel is either there or has a reason."""
    runs, refused = admission.candidates(Problem(VARLEN, "bfloat16", (12, HEADS, DIM), 3, 6), CPU, fence_from=2)
    assert set(runs) | {name.removesuffix(FENCED) for name in refused} == set(admission.VARLEN_KERNELS)
    assert "dense" in runs
    assert refused["fa4"].startswith("needs a device of capability 9.0")


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_the_fence(poison: float) -> None:
    """Behind the fence a leaky kernel keeps other segments' bits, and every row of the broken one is NaN."""
    inputs, cu_seqlens = qkv(14), boundaries([4, 5, 3], 5)
    run = fence.fenced(leaky)
    clean = run(*inputs, cu_seqlens, 5, 0.3)
    assert torch.equal(clean[:12], reference.forward(*inputs, cu_seqlens, 5, 0.3)[:12])
    inputs[1][6, 1, 2] = poison
    inputs[0][13] = poison
    out = run(*inputs, cu_seqlens, 5, 0.3)
    assert torch.equal(out[:4], clean[:4])
    assert torch.equal(out[9:12], clean[9:12])
    assert out[4:9].isnan().all()


# --- choosing ---------------------------------------------------------------------------------------------------------


def test_the_fastest_wins(table: dict[str, Kernel]) -> None:
    """The time of the fence counts, times and refusals are reported, and what is timed is what was observed."""
    fill(table, good=good, leaky=leaky, wrong=wrong)
    made = settled(choices(Clock(good=3e-6, fenced=2e-6)), PROBLEM)
    assert made.kernel(PROBLEM) == "leaky" + FENCED
    (row,) = made.rows()
    assert json.loads(json.dumps(row)) == row
    assert row["microseconds"] == {"good": 3.0, "leaky" + FENCED: 2.0}
    assert set(row["refused"]) == {"leaky", "wrong"}
    assert row["shape"] == [12, HEADS, DIM]
    choice.forget()
    assert settled(choices(Clock(good=1e-6, fenced=2e-6)), PROBLEM).kernel(PROBLEM) == "good"


def test_hopeless_ones_are_not_timed_to_the_end(table: dict[str, Kernel]) -> None:
    """A kernel may take twice the time of the best one so far; the first one may take any."""
    fill(table, good=good, slow=lambda *call: good(*call), fast=lambda *call: good(*call))
    clock = Clock(good=4e-6, slow=9e-6, fast=1e-6)
    assert settled(choices(clock), PROBLEM).kernel(PROBLEM) == "fast"
    assert clock.limits == pytest.approx([limit for limit in (math.inf, 8e-6, 8e-6) for _ in layouts(PROBLEM)])


def test_nobody_is_tried_twice(table: dict[str, Kernel]) -> None:
    """Neither a kernel nor the same behind the fence."""
    runs = 0

    def counting(*call: Any) -> torch.Tensor:
        nonlocal runs
        runs += 1
        return leaky(*call)

    fill(table, leaky=counting)
    for _ in range(3):
        assert set(admission.candidates(PROBLEM, CPU, fence_from=1)[0]) == {"leaky" + FENCED}
    assert runs == 4, "two runs each"


def test_a_lack_of_memory_is_not_remembered(table: dict[str, Kernel]) -> None:
    """A kernel whose trial finds no memory is refused this time, and tried again the next."""
    full = True

    def run(*call: Any) -> torch.Tensor:
        if full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return good(*call)

    fill(table, hungry=run)
    assert admission.candidates(PROBLEM, CPU, fence_from=1) == ({}, {"hungry": "out of memory"})
    full = False
    assert set(admission.candidates(PROBLEM, CPU, fence_from=1)[0]) == {"hungry"}


def test_a_choice_made_without_memory_is_not_remembered(table: dict[str, Kernel]) -> None:
    """Another kernel wins while one finds no memory; the next encoder asks again."""

    def hungry(*call: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    fill(table, good=good, hungry=hungry)
    assert settled(choices(Clock(good=1e-6)), PROBLEM).kernel(PROBLEM) == "good"
    assert not choice.known()


def test_one_that_cannot_be_timed_is_refused(table: dict[str, Kernel]) -> None:
    """A kernel that fails in a capture loses with the reason; with none left the default serves."""
    fill(table, good=good)

    def timer(call: Callable[[], object], device: torch.device, give_up_s: float = 0.0) -> float:
        raise RuntimeError("operation not permitted when stream is capturing")

    made = settled(KernelChoices("auto", CPU, timer, fence_from=2), PROBLEM)
    assert made.kernel(PROBLEM) is None
    assert "not permitted" in made.rows()[0]["refused"]["good"]
    assert not choice.known(), "the next encoder tries again"
    assert settled(choices(Clock(good=1e-6)), PROBLEM).kernel(PROBLEM) == "good"


def test_calls_without_rows_are_no_problem(table: dict[str, Kernel]) -> None:
    """Nothing to compute is not observed, so it is never timed."""
    fill(table, good=good)
    made = choices(Clock(good=1e-6))
    with made.observing():
        assert choice.varlen_kernel(torch.randn(0, HEADS, DIM), boundaries([]), 4) is None
        assert choice.varlen_kernel(torch.randn(4, HEADS, DIM), boundaries([4]), 0) is None
    made.settle()
    assert made.rows() == []


def test_only_the_chosen_runs_and_only_inside(table: dict[str, Kernel]) -> None:
    """`active` gives calls the chosen kernel; outside, and for a problem never seen, the default serves."""
    fill(table, good=good)
    made = settled(choices(Clock(good=1e-6)), PROBLEM)
    q, cu_seqlens = torch.randn(12, HEADS, DIM), boundaries([6, 6], 3)
    assert varlen_problem(q, cu_seqlens, 6) == PROBLEM
    assert choice.varlen_kernel(q, cu_seqlens, 6) is None
    with made.active():
        assert serves(choice.varlen_kernel(q, cu_seqlens, 6)) is good
        assert choice.varlen_kernel(q, cu_seqlens, 7) is None
        with contextlib.suppress(ValueError), made.active():
            raise ValueError
        assert serves(choice.varlen_kernel(q, cu_seqlens, 6)) is good
    assert choice.current() is None


def test_nothing_is_measured_twice(table: dict[str, Kernel]) -> None:
    """A second encoder and a recapture take what is known; another isolation is another question."""
    fill(table, good=good, leaky=leaky)
    clock = Clock(good=2e-6, fenced=3e-6, leaky=1e-6)
    assert settled(choices(clock), PROBLEM).kernel(PROBLEM) == "good"
    calls = clock.calls
    assert calls == 2 * len(layouts(PROBLEM)), "each kernel, each layout"
    made = settled(settled(choices(clock), PROBLEM), PROBLEM)
    assert made.kernel(PROBLEM) == "good"
    assert clock.calls == calls
    assert settled(choices(clock, fence_from=0), PROBLEM).kernel(PROBLEM) == "leaky"


def test_what_was_learnt_elsewhere_is_used_where_it_can_be(table: dict[str, Kernel]) -> None:
    """A loaded choice saves the measurement, unless its kernel is not here."""
    fill(table, good=good, other=good)
    clock = Clock(good=1e-6, other=2e-6)
    choice.learn({("cpu", PROBLEM, 2): Choice("other", {"other": 1.0})})
    assert settled(choices(clock), PROBLEM).kernel(PROBLEM) == "other"
    assert clock.calls == 0
    del table["other"]
    assert settled(choices(clock), PROBLEM).kernel(PROBLEM) == "good"


def counted(table: dict[str, Kernel], name: str, runs: list[str]) -> None:
    """A kernel that notes its name when it runs."""

    def run(*call: Any) -> torch.Tensor:
        runs.append(name)
        return good(*call)

    fill(table, **{name: run})


@pytest.mark.parametrize("wanted", ["auto", "second"])
def test_nobody_else_is_tried_for_a_kernel_that_is_known(table: dict[str, Kernel], wanted: str) -> None:
    """Whose kernel was learnt or pinned needs no trial of the others, which may each take a compile."""
    runs: list[str] = []
    for name in ("first", "second", "third"):
        counted(table, name, runs)
    choice.learn({("cpu", PROBLEM, 2): Choice("second", {"second": 1.0})})
    assert settled(choices(Clock(), wanted), PROBLEM).kernel(PROBLEM) == "second"
    assert set(runs) == {"second"}


def test_a_pinned_kernel(table: dict[str, Kernel]) -> None:
    """It is taken without a measurement, behind the fence where it must be; where it cannot serve, that is counted."""
    fill(table, good=good, leaky=leaky, wrong=wrong)
    clock = Clock()
    assert settled(choices(clock, "leaky"), PROBLEM).kernel(PROBLEM) == "leaky" + FENCED
    with counters.expect(skips={"attention-kernel": 1}):
        assert settled(choices(clock, "wrong"), PROBLEM).kernel(PROBLEM) is None
    with pytest.raises(SkipError, match="attention-kernel"):
        settled(choices(clock, "wrong", strict=True), PROBLEM)
    with counters.expect(skips={}):
        assert settled(choices(clock, "sdpa-flash"), PROBLEM).kernel(PROBLEM) is None, "names the other kind of attention"
    assert clock.calls == 0


@pytest.mark.parametrize(("wanted", "timer"), [("default", Clock()), ("auto", None)])
def test_nothing_to_choose(table: dict[str, Kernel], wanted: str, timer: Any) -> None:
    """With "default", and without CUDA, calls are not even observed."""
    fill(table, good=good)
    made = KernelChoices(wanted, CPU, timer)
    assert not made.enabled
    with made.observing():
        assert choice.current() is None
    with made.active():
        assert choice.current() is None


# --- problems ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "segments", "longest", "expected"),
    [
        (12, 1, 12, ([0, 12], [0, 10])),
        (1, 1, 12, ([0, 1], [0, 1])),
        (12, 1, 6, ([0, 6], [0, 5])),
        (12, 3, 2, ([0, 2, 4, 6],)),
        (12, 3, 12, ([0, 12, 12, 12],)),
        (3, 5, 3, ([0, 3, 3, 3, 3, 3],)),
        (1600, 3, 1600, ([0, *[1600] * 3], [0, 800, 1600, 1600], [0, 533, 1066, 1600])),
        (1024, 9, 1024, ([0, *[1024] * 9], [0, 512, *[1024] * 8], [0, 256, 512, 768, *[1024] * 6])),
        (1024, 9, 512, ([0, 512, *[1024] * 8], [0, 341, 682, *[1024] * 7], [0, 256, 512, 768, *[1024] * 6])),
        (1024, 9, 128, ([0, 128, 256, 384, 512, 640, 768, 896, 1024, 1024],)),
    ],
)
def test_layouts_are_legal(rows: int, segments: int, longest: int, expected: tuple[list[int], ...]) -> None:
    """Boundaries to time with: the fewest segments, as many as an ordinary batch of so many rows has, and a number between; none
    above the bound, none past the rows."""
    made = layouts(Problem(VARLEN, "float32", (rows, HEADS, DIM), segments, longest))
    assert made == expected
    for ends in made:
        assert len(ends) == segments + 1
        assert max(b - a for a, b in itertools.pairwise(ends)) <= longest


@pytest.mark.parametrize("odd", ["empty segment", "single row", "unused slots"])
def test_a_kernel_that_is_wrong_in_a_corner_is_refused(odd: str, table: dict[str, Kernel]) -> None:
    """Right on long segments is not enough: graphs have empty ones, single rows, and slots that nobody uses."""

    def wrong(q: Any, k: Any, v: Any, cu_seqlens: torch.Tensor, *rest: Any) -> torch.Tensor:
        out, lengths = good(q, k, v, cu_seqlens, *rest), cu_seqlens.diff()
        end = int(cu_seqlens[-1])
        if odd == "empty segment" and bool(((lengths == 0) & (cu_seqlens[:-1] < end)).any()):
            out[end - 1] += 1
        if odd == "single row" and bool((lengths == 1).any()):
            out[int(cu_seqlens[int((lengths == 1).nonzero()[0])])] += 1
        if odd == "unused slots" and bool((cu_seqlens[:-1] == end).any()):
            out[0] = float("nan")
        return out

    fill(table, wrong=wrong, good=lambda *args: good(*args))
    runs, refused = admission.candidates(PROBLEM, CPU, fence_from=2)
    assert "good" in runs
    assert "wrong" not in runs
    assert "its numbers are wrong here" in refused["wrong"]


@pytest.mark.parametrize(
    ("width", "seconds", "chosen"),
    [
        (16, {"short": (1.1e-3, 2e-4, 1e-5), "long": (1e-3, 3e-4, 3e-5)}, "short"),
        (16, {"short": (1.25e-3, 2e-4, 1e-5), "long": (1e-3, 2.2e-4, 3e-5)}, "short"),
        (1152, {"short": (1.1e-3, 2e-4, 1e-5), "long": (1e-3, 3e-4, 3e-5)}, "short"),
        (1152, {"short": (1.25e-3, 2e-4, 1e-5), "long": (1e-3, 2.2e-4, 3e-5)}, "long"),
    ],
)
def test_layouts_weigh_what_they_take_of_a_layer(
    table: dict[str, Kernel], width: int, seconds: dict[str, tuple[float, ...]], chosen: str
) -> None:
    """A kernel that takes a third of the time with many short segments and a tenth more with one long one is chosen, though the
    long one takes most of the time: in a narrow tower. In a wide one the rest of a layer counts, and a quarter more with the long
    one is more than what the others save."""
    fill(table, short=good, long=lambda *args: good(*args))
    problem = Problem(VARLEN, "float32", (1600, HEADS, width // HEADS), 16, 1600)
    asked: dict[str, int] = dict.fromkeys(seconds, 0)

    def timer(call: Any, device: torch.device, give_up_s: float = math.inf) -> float:
        name = next(name for name in seconds if table[name].run is call.args[0])
        asked[name] += 1
        return seconds[name][asked[name] - 1]

    made = choice.measure(problem, CPU, timer, fence_from=2)
    assert asked == {"short": 3, "long": 3}
    assert made.kernel == chosen == min(made.microseconds, key=lambda name: made.microseconds[name])
    # 24 operations for each row and square of the width, at 1.5 times the speed of attention's 4 for each pair and column.
    rest = 24 * 1600 * width**2 / (4 * 1600**2 * width * 1.5) * 1e-3
    mean = math.prod(time + rest for time in seconds["long"]) ** (1 / 3)
    assert made.microseconds["long"] == pytest.approx((mean - rest) * 1e6, rel=1e-2)


def test_a_clock_that_shows_nothing(table: dict[str, Kernel]) -> None:
    """Is no error."""
    fill(table, short=good)
    made = choice.measure(PROBLEM, CPU, lambda call, device, give_up_s=0.0: 0.0, fence_from=2)
    assert made.kernel in made.microseconds


def test_problems_are_written_and_read() -> None:
    """A problem survives JSON."""
    for problem in (PROBLEM, Problem(DENSE, "bfloat16", (2, 4, 16, 64), 0, 16, "causal")):
        assert Problem.from_dict(json.loads(json.dumps(problem.as_dict()))) == problem


# --- dense attention --------------------------------------------------------------------------------------------------


def heads(batch: int = 2, rows: int = 10) -> list[torch.Tensor]:
    """Seeded q, k and v of dense attention, transposed views."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(batch, rows, HEADS, DIM, generator=generator).transpose(1, 2) for _ in range(3)]


def test_dense_attention_takes_the_chosen_kernel(table: dict[str, Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    """A dense call is observed, timed and served by the kernel that won; its numbers are those of the default."""
    used: list[str] = []

    def named(name: str) -> Callable[..., torch.Tensor]:
        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float | None) -> torch.Tensor:
            used.append(name)
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale).contiguous()

        return run

    monkeypatch.setattr(
        admission, "DENSE_KERNELS", {name: Kernel(name, named(name), anything, trusted=True) for name in ("slow", "quick")}
    )
    q, k, v = heads()
    want = F.scaled_dot_product_attention(q, k, v, scale=0.2)
    made = choices(Clock(slow=2e-6, quick=1e-6))
    with made.observing():
        assert torch.equal(choice.dense_attention(q, k, v, scale=0.2), want)
    assert not used, "an observed run takes the default"
    made.settle()
    used.clear()
    with made.active():
        got = choice.dense_attention(q, k, v, scale=0.2)
        assert torch.equal(got, want)
        assert got.stride() == want.stride(), "the strides are the default's, whatever the kernel makes"
        assert used == ["quick"]
        choice.dense_attention(q, k, v, attn_mask=torch.ones(10, 10, dtype=torch.bool))
        choice.dense_attention(q, k, v, dropout_p=0.5)
    assert used == ["quick"], "calls with a mask or dropout are torch's alone"
    assert made.rows()[0]["kind"] == DENSE


def test_dense_problems_differ() -> None:
    """Whatever changes which kernels apply is part of the problem."""
    q, k, _ = heads()
    made = {
        dense_problem(queries, keys, causal=causal)
        for queries in (q, q[:1], q.double())
        for keys in (k, k[:, :, :4])
        for causal in (True, False)
    }
    assert len(made) == 12
