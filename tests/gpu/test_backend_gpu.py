"""The backend on a real GPU: what only recording and replaying CUDA graphs can show."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import vit_compile
from tests import towers
from vit_compile.errors import CaptureError
from vit_compile.models import hf_attention
from vit_compile.models.vision_metadata import vision_metadata

# Other matrix shapes and other summation orders than eager: relative difference of whole outputs.
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 4e-2}
# A stream on which matrix products ran keeps a cuBLAS workspace (32 MiB seen on an H200) in torch's hands.
WORKSPACE = 40 << 20
LAYOUTS = [[5, 7], [7, 5], [16], [1, 1, 1], [30, 2], [64], [20, 20, 20, 4], [3]]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Every test starts without traces, captures and counts, and with exact float32 products."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False  # eager's patch convolution would round to 10 bits, our matrix product not
    torch.compiler.reset()
    vit_compile.clear()
    vit_compile.counters.reset()
    yield
    torch.compiler.reset()
    vit_compile.clear()


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm of the wanted; inf for NaN."""
    value = ((got.double() - want.double()).norm() / want.double().norm()).item()
    return value if value == value else float("inf")


def norm_view(dtype: torch.dtype, depth: int = 3) -> nn.Module:
    """A packed tower through our attention op, on the GPU."""
    return towers.norm_view_tower(depth=depth, channels=128, heads=2).to("cuda", dtype).eval()


def inputs(lengths: list[int], dtype: torch.dtype, seed: int = 0, width: int = 12) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Rows, boundaries and a bound that holds for every test."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(lengths), width, generator=generator).to("cuda", dtype)
    return x, towers.boundaries(lengths).cuda(), 256


def options(mode: str, **more: Any) -> dict[str, Any]:
    """Small budgets and the quick compiler."""
    return {"mode": mode, "compiler": "aot_eager", "token_budgets": [16, 32, 64], **more}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["full", "piecewise"])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_every_layout_equals_eager(mode: str, dtype: torch.dtype, compiler: str) -> None:
    """Replays, exact and padded, give eager's numbers for any layout, alternating layouts of equal totals (hazard 1)."""
    tower = norm_view(dtype)
    compiled = torch.compile(tower, backend="vit_cudagraph", options=options(mode, compiler=compiler))
    with torch.no_grad():
        vit_compile.warmup(compiled, *inputs([10, 10], dtype), progress=False)
        for seed in range(3):
            for lengths in LAYOUTS:
                call = inputs(lengths, dtype, seed)
                assert relative(compiled(*call), tower(*call)) < TOLERANCE[dtype], (lengths, vit_compile.last_call())
    counts = vit_compile.counters.snapshot()
    assert counts["uncaptured_calls"] <= 1, counts  # the tracing call of warmup may exceed a budget, traffic never
    assert counts["exact_replays"]
    assert counts["padded_replays"]


@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_padding_is_proved_on_the_device(mode: str) -> None:
    """A model whose rows see each other is found out at capture, and still gives eager's numbers."""
    for kind in ("mean", "softmax", "count"):
        torch.compiler.reset()
        tower = towers.row_mixing_tower(kind).cuda().eval()
        compiled = torch.compile(tower, backend="vit_cudagraph", options=options(mode))
        with torch.no_grad():
            for lengths in ([12], [16], [20], [32], [7, 9]):
                call = inputs(lengths, torch.float32)
                assert relative(compiled(*call), tower(*call)) < TOLERANCE[torch.float32], (kind, lengths)
        assert vit_compile.counters.skips["padding-unsafe"] > 0


@pytest.mark.parametrize("mode", ["full", "piecewise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_large_small_on_a_poisoned_pool(mode: str, dtype: torch.dtype, poison_allocator: Callable[[], None]) -> None:
    """Leftovers of a larger call and NaN in freshly allocated memory never reach real rows (hazards 3 and 40)."""
    tower = norm_view(dtype)
    compiled = torch.compile(tower, backend="vit_cudagraph", options=options(mode))
    with torch.no_grad():
        poison_allocator()
        for lengths in ([3, 2], [40, 20], [3, 2], [64], [1], [17], [3, 2]):
            call = inputs(lengths, dtype)
            poison_allocator()
            out = compiled(*call)
            assert torch.isfinite(out).all()
            assert relative(out, tower(*call)) < TOLERANCE[dtype], lengths


@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_a_broken_image_stays_alone(mode: str) -> None:
    """NaN in one of five images leaves the other four bit for bit as they were, in this call and in later ones (hazard 39)."""
    tower = norm_view(torch.bfloat16)
    compiled = torch.compile(tower, backend="vit_cudagraph", options=options(mode))
    lengths = [9, 11, 10, 12, 8]
    with torch.no_grad():
        x, boundaries, bound = inputs(lengths, torch.bfloat16)
        vit_compile.warmup(compiled, x, boundaries, bound, progress=False)
        clean_out = compiled(x, boundaries, bound)
        broken = x.clone()
        broken[20:30] = float("nan")
        out = compiled(broken, boundaries, bound)
        keep = torch.ones(50, dtype=torch.bool)
        keep[20:30] = False
        assert torch.equal(out[keep], clean_out[keep])
        assert out[20:30].isnan().all()
        assert torch.equal(compiled(x, boundaries, bound), clean_out)
        small = inputs([4, 4], torch.bfloat16)
        assert relative(compiled(*small), tower(*small)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_copied_outputs_survive_later_calls(mode: str) -> None:
    """`outputs="copy"`: results are the caller's and do not change over 100 further calls (hazard 7)."""
    tower = norm_view(torch.float32)
    compiled = torch.compile(tower, backend="vit_cudagraph", options=options(mode))
    with torch.no_grad():
        call = inputs([10, 6], torch.float32)
        held = compiled(*call)
        before = held.clone()
        for seed in range(100):
            compiled(*inputs(LAYOUTS[seed % len(LAYOUTS)], torch.float32, seed))
        assert torch.equal(held, before)


def test_borrowed_outputs_alias_graph_memory() -> None:
    """`outputs="borrow"` hands out the same memory at every replay of one size: valid until the next call."""
    tower = norm_view(torch.float32)
    compiled = torch.compile(tower, backend="vit_cudagraph", options=options("full", outputs="borrow"))
    with torch.no_grad():
        first, second = inputs([16], torch.float32, 0), inputs([16], torch.float32, 1)
        compiled(*first)
        a = compiled(*first)
        assert relative(a, tower(*first)) < TOLERANCE[torch.float32]
        b = compiled(*second)
        assert a.data_ptr() == b.data_ptr()
        assert relative(b, tower(*second)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_replays_do_not_synchronise(mode: str) -> None:
    """A replay after warm-up never waits for the device (hazard 34)."""
    tower = norm_view(torch.bfloat16)
    compiled = torch.compile(tower, backend="vit_cudagraph", options=options(mode))
    with torch.no_grad():
        vit_compile.warmup(compiled, *inputs([10, 10], torch.bfloat16), progress=False)
        calls = [inputs(lengths, torch.bfloat16) for lengths in ([5, 7], [16], [20, 20], [3])]
        for call in calls:
            compiled(*call)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for call in calls * 3:
                compiled(*call)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_eight_threads(mode: str) -> None:
    """Eight threads on one encoder, each with its own stream and sizes, get their own numbers (hazards 20 and 21)."""
    tower = norm_view(torch.float32)
    compiled = torch.compile(tower, backend="vit_cudagraph", options=options(mode))
    with torch.no_grad():
        vit_compile.warmup(compiled, *inputs([10, 10], torch.float32), progress=False)
        work = [inputs(LAYOUTS[i % len(LAYOUTS)], torch.float32, i) for i in range(8)]
        wanted = [tower(*call) for call in work]
    torch.cuda.synchronize()
    worst: list[float] = [0.0] * 8
    errors: list[BaseException] = []

    def body(index: int) -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(50):
                    torch.zeros(1000, pin_memory=True)  # another thread's CUDA calls must not disturb anything
                    worst[index] = max(worst[index], relative(compiled(*work[index]), wanted[index]))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert max(worst) < TOLERANCE[torch.float32]


def test_capture_while_another_thread_uses_the_device() -> None:
    """Allocations and pinned copies of another thread do not break a capture (`thread_local` mode, hazard 20)."""
    stop = threading.Event()

    def noise() -> None:
        while not stop.is_set():
            torch.zeros(1 << 16, pin_memory=True).cuda(non_blocking=True)
            torch.cuda.current_stream().synchronize()

    thread = threading.Thread(target=noise)
    thread.start()
    try:
        tower = norm_view(torch.float32)
        compiled = torch.compile(tower, backend="vit_cudagraph", options=options("full"))
        with torch.no_grad():
            vit_compile.warmup(compiled, *inputs([10, 10], torch.float32), progress=False)
            call = inputs([5, 7], torch.float32)
            assert relative(compiled(*call), tower(*call)) < TOLERANCE[torch.float32]
    finally:
        stop.set()
        thread.join()
    assert "capture-failed" not in vit_compile.counters.skips


def test_two_streams_are_ordered() -> None:
    """A replay on one stream waits for the previous one on another, since both write the same buffers (hazard 21)."""
    tower = norm_view(torch.float32)
    compiled = torch.compile(tower, backend="vit_cudagraph", options=options("full"))
    with torch.no_grad():
        vit_compile.warmup(compiled, *inputs([10, 10], torch.float32), progress=False)
        calls = [inputs([8, 8], torch.float32, seed) for seed in range(2)]
        wanted = [tower(*call) for call in calls]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        results = []
        for turn in range(50):
            with torch.cuda.stream(streams[turn % 2]):
                if turn % 2 == 0:
                    torch.cuda._sleep(100_000)
                results.append(compiled(*calls[turn % 2]))
        torch.cuda.synchronize()
    assert max(relative(out, wanted[turn % 2]) for turn, out in enumerate(results)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_replaced_weights_are_noticed(mode: str) -> None:
    """New parameter storage leads to new captures with the new numbers; in-place updates need none (hazard 8)."""
    tower = norm_view(torch.float32)
    compiled = torch.compile(tower, backend="vit_cudagraph", options=options(mode))
    call = inputs([10, 6], torch.float32)
    with torch.no_grad():
        compiled(*call)
        for parameter in tower.parameters():
            parameter.mul_(1.5)
        assert relative(compiled(*call), tower(*call)) < TOLERANCE[torch.float32]
        assert vit_compile.counters.recaptures == 0
        for parameter in tower.parameters():
            parameter.data = parameter.data * 0.5
        junk = [torch.full((1 << 16,), float("nan"), device="cuda") for _ in range(64)]  # takes the freed memory
        assert relative(compiled(*call), tower(*call)) < TOLERANCE[torch.float32]
        assert vit_compile.counters.recaptures == 1
        del junk


def test_modes_of_grad_in_both_orders() -> None:
    """Buffers made under inference_mode serve no_grad and the reverse (hazard 22)."""
    for first, second in ((torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)):
        torch.compiler.reset()
        tower = norm_view(torch.float32)
        compiled = torch.compile(tower, backend="vit_cudagraph", options=options("full"))
        for mode in (first, second, first):
            with mode():
                call = inputs([5, 6], torch.float32)
                assert relative(compiled(*call), tower(*call)) < TOLERANCE[torch.float32]


class _HostReader(nn.Module):
    """Reads the device on the host behind a custom op, which no graph analysis can see."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, boundaries: torch.Tensor, bound: int) -> torch.Tensor:
        return torch.ops.vit_compile_test.synchronising(self.inner(x, boundaries, bound))


@torch.library.custom_op("vit_compile_test::synchronising", mutates_args=())
def _synchronising(x: torch.Tensor) -> torch.Tensor:
    return x * (1.0 if x.sum().item() > 0 else 2.0)


@_synchronising.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_a_failed_capture_leaves_everything_working(mode: str) -> None:
    """A model that cannot be recorded runs uncaptured with a reason; another encoder still records and replays (hazard 19)."""
    bad = _HostReader(norm_view(torch.float32)).cuda().eval()
    good = norm_view(torch.float32)
    compiled_bad = torch.compile(bad, backend="vit_cudagraph", options=options(mode, padding="exact"))
    compiled_good = torch.compile(good, backend="vit_cudagraph", options=options(mode))
    call = inputs([10, 6], torch.float32)
    with torch.no_grad():
        for _ in range(2):
            assert relative(compiled_bad(*call), bad(*call)) < TOLERANCE[torch.float32]
            assert relative(compiled_good(*call), good(*call)) < TOLERANCE[torch.float32]
    assert vit_compile.counters.skips["capture-failed"] >= 1
    assert vit_compile.counters.captures == 1


def test_out_of_memory_skips_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A size for which memory does not suffice is skipped with the reason; smaller ones replay (hazard 31)."""
    tower = norm_view(torch.float32)
    sizes = options("full", token_budgets=[16, 1 << 14], padding="exact")
    compiled = torch.compile(tower, backend="vit_cudagraph", options=sizes)
    with torch.no_grad():
        small = inputs([16], torch.float32)
        compiled(*small)
        free, total = torch.cuda.mem_get_info()
        held = torch.cuda.memory_reserved()
        torch.cuda.set_per_process_memory_fraction((held + (40 << 20)) / total)
        try:
            large = inputs([1 << 14], torch.float32)
            with pytest.raises(torch.OutOfMemoryError):
                compiled(*large)  # there is not enough for the compiled path either: an honest error
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert vit_compile.counters.skips["out-of-memory"] == 1
        assert relative(compiled(*small), tower(*small)) < TOLERANCE[torch.float32]
        assert vit_compile.last_call().kind == "exact"
        del free


@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_memory_comes_back(mode: str) -> None:
    """`clear()` gives the device what the captures took, and a later call captures anew (hazard 30)."""
    tower = norm_view(torch.bfloat16)
    compiled = torch.compile(tower, backend="vit_cudagraph", options=options(mode, token_budgets=[1 << 12, 1 << 18]))
    with torch.no_grad():
        compiled(*inputs([20], torch.bfloat16))
        vit_compile.clear()
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        vit_compile.warmup(compiled, *inputs([20], torch.bfloat16), progress=False)
        during = torch.cuda.memory_reserved()
        torch.compiler.reset()  # the traces go first, and their captures with them: the pool must go all the same
        vit_compile.clear()
        gc.collect()
        torch.cuda.empty_cache()
        after = torch.cuda.memory_reserved()
        assert during > before + 2 * WORKSPACE
        assert after <= before + WORKSPACE, (before, during, after)
        call = inputs([20], torch.bfloat16)
        assert relative(compiled(*call), tower(*call)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_memory_goes_with_the_model(mode: str) -> None:
    """Deleting a model gives its captures' memory back, without `clear()` (hazard 30)."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    tower = norm_view(torch.bfloat16)
    compiled = torch.compile(tower, backend="vit_cudagraph", options=options(mode, token_budgets=[1 << 18]))
    with torch.no_grad():
        vit_compile.warmup(compiled, *inputs([20], torch.bfloat16), progress=False)
    assert torch.cuda.memory_reserved() > before + 2 * WORKSPACE
    del tower, compiled
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + WORKSPACE


def test_captures_that_die_with_their_trace_leave_a_usable_pool() -> None:
    """When torch.compile forgets a trace its captures go, and the same weights can be captured again."""
    tower = norm_view(torch.float32)
    call = inputs([10, 6], torch.float32)
    with torch.no_grad():
        for mode in ("full", "piecewise", "full"):
            torch.compiler.reset()
            gc.collect()
            compiled = torch.compile(tower, backend="vit_cudagraph", options=options(mode))
            for _ in range(2):
                assert relative(compiled(*call), tower(*call)) < TOLERANCE[torch.float32]
    assert vit_compile.counters.captures == 3
    assert not vit_compile.counters.skips


@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_memory_does_not_grow_with_depth(mode: str) -> None:
    """Layers reuse each other's pool memory: a capture of 16 layers takes less than twice that of 4 (hazards 28 and 29)."""
    taken = []
    for depth in (4, 16):
        torch.compiler.reset()
        vit_compile.clear()
        tower = norm_view(torch.bfloat16, depth)
        compiled = torch.compile(tower, backend="vit_cudagraph", options=options(mode, token_budgets=[1 << 16]))
        with torch.no_grad():
            report = vit_compile.warmup(compiled, *inputs([20], torch.bfloat16), progress=False)
        assert report.captures
        taken.append(report.nbytes)
    assert taken[1] < 2 * taken[0], taken


def test_clearing_one_encoder_while_another_replays() -> None:
    """Destroying an encoder's graphs leaves those of another intact (hazard 35)."""
    first, second = norm_view(torch.float32), norm_view(torch.float32)
    compiled = [torch.compile(t, backend="vit_cudagraph", options=options("full")) for t in (first, second)]
    call = inputs([10, 6], torch.float32)
    with torch.no_grad():
        for one in compiled:
            one(*call)
        want = second(*call)
        encoder = vit_compile.backend.encoder.encoder_of(list(_weights(first)), torch.device("cuda", 0))
        for turn in range(20):
            if turn == 5:
                with encoder.lock:
                    encoder.clear()
            assert relative(compiled[1](*call), want) < TOLERANCE[torch.float32]
        assert relative(compiled[0](*call), first(*call)) < TOLERANCE[torch.float32]


def _weights(tower: nn.Module) -> Iterator[torch.Tensor]:
    yield from tower.parameters()


def test_an_empty_graph_is_an_error() -> None:
    """A recording that launched nothing would replay stale numbers: it is refused (hazard 23)."""
    from vit_compile.backend.cuda import Recorder, check_recorded

    recorder = Recorder(torch.device("cuda", torch.cuda.current_device()))
    with warnings.catch_warnings(), recorder.session():
        graph, _ = recorder.record(lambda: None)
    with pytest.raises(CaptureError, match="empty"):
        check_recorded(graph, "nothing")


@pytest.mark.parametrize("build", [towers.tiny_qwen2_5_vl, towers.tiny_qwen3_vl])
@pytest.mark.parametrize("mode", ["full", "piecewise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vl_towers(build: Any, mode: str, dtype: torch.dtype) -> None:
    """Tiny Qwen2.5-VL and Qwen3-VL towers with precomputed metadata equal an untouched tower with eager attention."""
    reference = build("eager").cuda().eval()
    tower = copy.deepcopy(reference)
    tower.config = copy.deepcopy(reference.config)
    for module in tower.modules():
        if hasattr(module, "config"):
            module.config = tower.config
    hf_attention.register()
    hf_attention.use_attention(tower)
    for model in (reference, tower):
        for parameter in model.parameters():  # cast parameters only: rotary tables stay in float32
            parameter.data = parameter.data.to(dtype)

    def forward(pixels: torch.Tensor, **metadata: Any) -> torch.Tensor:
        return tower(pixels, **metadata).pooler_output

    sizes = options(mode, token_budgets=[64, 128, 256], spatial_merge_size=2)
    compiled = torch.compile(forward, backend="vit_cudagraph", options=sizes)
    several = [(1, 6, 10), (4, 4, 6), (1, 10, 14)]
    with torch.no_grad():
        for grids in ([(1, 16, 16)], several, [(3, 6, 8)], [(1, 2, 30)], [(1, 40, 40)], [(1, 4, 4)] * 2):
            pixels = towers.pixels(sum(t * h * w for t, h, w in grids)).to("cuda", dtype)
            metadata = vision_metadata(tower, grids, device="cuda")
            out = compiled(pixels, **metadata)
            want = reference(pixels, grid_thw=torch.tensor(grids, device="cuda")).pooler_output
            assert relative(out, want) < TOLERANCE[dtype], (grids, vit_compile.last_call())
    counts = vit_compile.counters.snapshot()
    assert counts["padded_replays"] >= 4, counts


@pytest.mark.parametrize("build", [towers.tiny_dinov2, towers.tiny_siglip, towers.tiny_clip])
@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_batch_first_towers(build: Any, mode: str) -> None:
    """DINOv2, SigLIP and CLIP, batches of 1 to 9 images, padded to the next budget, equal eager."""
    tower = build().cuda().eval()
    side, patch = tower.config.image_size, tower.config.patch_size
    patches = (side // patch) ** 2
    budgets = [n * patches for n in (2, 4, 8)]
    sizes = options(mode, token_budgets=budgets, patches_per_row=patches)
    compiled = torch.compile(tower, backend="vit_cudagraph", options=sizes)
    with torch.no_grad():
        vit_compile.warmup(compiled, torch.randn(1, 3, side, side, device="cuda"), progress=False)
        for images in (1, 2, 3, 5, 8, 9):
            x = torch.randn(images, 3, side, side, device="cuda")
            out, want = compiled(x), tower(x)
            assert type(out) is type(want)
            assert relative(out.last_hidden_state, want.last_hidden_state) < TOLERANCE[torch.float32]
            assert relative(out.pooler_output, want.pooler_output) < TOLERANCE[torch.float32]
    assert vit_compile.counters.padded_replays == 2
