"""Packed Hugging Face towers as tables, served by a manager, against untouched towers with eager attention.

The reference encodes one item at a time and gets nothing but `grid_thw`.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests import towers
from tests.models.parity import SpoiledMetadata, accelerated, counts, difference, eager_copy, no_positions, one_segment
from tests.models.parity import served as counted
from tests.runtime.toys import captured, largest_difference, manager
from vit_compile.backend.roles import Role
from vit_compile.errors import GridError, InputError, ModelError
from vit_compile.models.hf_attention import ATTENTION_NAME
from vit_compile.models.packed_grid import ROWS, PackedGridTable, _channels
from vit_compile.models.vision_metadata import vision_metadata
from vit_compile.runtime.manager import EncoderCudaGraphManager
from vit_compile.runtime.table_encoder import TableEncoder
from vit_compile.stats import counters

pytest.importorskip("transformers")

Builder = Callable[..., Any]
Grid = tuple[int, int, int]

TOLERANCE = 1e-5
CLEARLY_WRONG = 1e-2
DEPTH = 2
BUDGETS = (16, 48)
BUILDERS = [towers.tiny_qwen2_vl, towers.tiny_qwen2_5_vl, towers.tiny_qwen3_vl, towers.tiny_glm4v]
WINDOWED, INTERPOLATED, SAMPLED = BUILDERS[1:]
RELATIVES = [
    towers.tiny_qwen3_vl_moe,
    towers.tiny_qwen3_5,
    towers.tiny_qwen3_5_moe,
    towers.tiny_glm4v_moe,
    towers.tiny_glm_ocr,
]
"""Towers that have what those have; fewer cases show it."""
ROW_OF_TOWER: dict[Builder, str] = {
    towers.tiny_qwen2_vl: "Qwen2-VL",
    WINDOWED: "Qwen2.5-VL",
    INTERPOLATED: "Qwen3-VL",
    SAMPLED: "GLM-4.1V",
    **dict(zip(RELATIVES, ("Qwen3-VL-MoE", "Qwen3.5, Qwen3.6", "Qwen3.5-MoE, Qwen3.6-MoE", "GLM-4.5V", "GLM-OCR"), strict=True)),
}


def name_of(value: Any) -> str:
    """Of a builder or another function, for test ids."""
    return getattr(value, "__name__", str(value))


# Images and clips; tokens are a quarter of the patches.
CASES: dict[str, tuple[list[Grid], list[Grid]]] = {
    "one image": ([(1, 8, 6)], []),
    "three sizes": ([(1, 8, 12), (1, 4, 6), (1, 10, 2)], []),
    "thin": ([(1, 2, 30), (1, 30, 2)], []),
    "exact fit": ([(1, 8, 8)], []),
    "exact fit of three": ([(1, 8, 8), (1, 4, 16), (1, 16, 4)], []),
    "one above the largest": ([(1, 4, 6), (1, 14, 14), (1, 6, 4)], []),
    "clip": ([], [(3, 4, 6)]),
    "clip among images": ([(1, 8, 8), (1, 4, 4)], [(3, 4, 6), (1, 2, 2)]),
}


def patches(grids: Sequence[Grid]) -> int:
    """Of all items."""
    return sum(t * h * w for t, h, w in grids)


def request_of(images: Sequence[Grid], clips: Sequence[Grid] = (), seed: int = 0) -> dict[str, Any]:
    """As a processor makes it: grids are tensors, and a modality without items is left out."""
    request: dict[str, Any] = {}
    if images:
        request |= {"pixel_values": towers.pixels(patches(images), seed), "image_grid_thw": torch.tensor(images)}
    if clips:
        request |= {"pixel_values_videos": towers.pixels(patches(clips), seed + 1), "video_grid_thw": torch.tensor(clips)}
    return request


@functools.cache
def reference_tower(build: Builder) -> Any:
    """An untouched one."""
    return build("eager", depth=DEPTH)


@torch.no_grad()
def reference(build: Builder, request: dict[str, Any]) -> list[torch.Tensor]:
    """Every item alone; deepstack levels beside the features. GLM wants one row per frame, as its own model gives it."""
    found = []
    for data, name in (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw")):
        grids = request[name].tolist() if name in request else []
        sizes = [t * h * w for t, h, w in grids]
        for part, (t, h, w) in zip(request[data].split(sizes) if grids else [], grids, strict=True):
            frames = [(1, h, w)] * t if "glm" in name_of(build) else [(t, h, w)]
            output = reference_tower(build)(part, grid_thw=torch.tensor(frames))
            found.append(torch.cat([output.pooler_output, *(getattr(output, "deepstack_features", None) or [])], dim=1))
    return found


def table_of(build: Builder, kind: type[PackedGridTable] = PackedGridTable, **options: Any) -> PackedGridTable:
    """A tower of equal weights as a table."""
    return kind(
        build("sdpa", depth=DEPTH), **{"token_range": (8, 48), "max_frames_per_video": 4, "segment_capacities": (2,), **options}
    )


@functools.cache
def served(build: Builder) -> EncoderCudaGraphManager:
    """A captured manager, the same for all tests: what one leaves in its buffers is there for the next."""
    return captured(table_of(build), token_budgets=BUDGETS, packing="greedy")


# --- parity ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("build", BUILDERS, ids=name_of)
def test_features_are_those_of_the_untouched_tower(build: Builder, case: str) -> None:
    """From padded graphs, for every item, in the order of the request; only what is above the largest budget runs eagerly."""
    made, request = served(build), request_of(*CASES[case])
    made._statistics.reset()
    got, want = made.execute(request), reference(build, request)
    assert largest_difference(got, want) <= TOLERANCE
    large = sum(len(feature) > BUDGETS[-1] for feature in want)
    assert counts(made) == (len(want) - large, {"too-large": large} if large else {})


@pytest.mark.parametrize("build", RELATIVES, ids=name_of)
def test_features_of_relatives_are_those_of_their_towers(build: Builder) -> None:
    """The same for towers that share what those have: images of three sizes with one above the largest budget, and clips."""
    made, request = served(build), request_of([(1, 8, 12), (1, 2, 30), (1, 14, 14), (1, 10, 2)], [(3, 4, 6), (1, 2, 2)])
    got, want = made.execute(request), reference(build, request)
    assert largest_difference(got, want) <= TOLERANCE
    assert counts(made) == (5, {"too-large": 1})


@pytest.mark.parametrize("build", ROW_OF_TOWER, ids=name_of)
def test_bfloat16(build: Builder) -> None:
    """Served in bfloat16: within 2.5 % by norm of the untouched tower in bfloat16 with eager attention (measured: 0.6 to 1.5 %),
    and no farther from float32 than that tower, but for a quarter."""
    grids, pixels = [(1, 8, 12), (1, 4, 6)], towers.pixels(120)
    exact = reference(build, {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)})
    table, untouched = table_of(build), build("eager", depth=DEPTH).to(torch.bfloat16)
    table.tower.to(torch.bfloat16)
    made = captured(table, dtype=torch.bfloat16, token_budgets=(48,), packing="greedy")
    found = made.execute({"pixel_values": pixels.bfloat16(), "image_grid_thw": grids})
    for got, want, rows, grid in zip(found, exact, pixels.split([96, 24]), grids, strict=True):
        with torch.no_grad():
            output = untouched(rows.bfloat16(), grid_thw=torch.tensor([grid]))
        rounded = torch.cat([output.pooler_output, *(getattr(output, "deepstack_features", None) or [])], dim=1)
        assert got.dtype == rounded.dtype == torch.bfloat16
        assert distance(got, rounded) < 0.025
        assert distance(got, want) < 1.25 * distance(rounded, want)
    assert counts(made) == (2, {})


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative, by norm."""
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("build", BUILDERS, ids=name_of)
def test_uncaptured_features_are_the_same(build: Builder) -> None:
    """A manager without graphs runs the table's forward on exactly the rows: the same features."""
    request = request_of(*CASES["clip among images"])
    made = manager(table_of(build))
    assert largest_difference(made.execute(request), reference(build, request)) <= TOLERANCE
    assert counts(made) == (0, {"not-captured": 4})


@pytest.mark.parametrize("capacities", [(), (1,)])
def test_towers_that_sample_positions_are_compiled(capacities: tuple[int, ...]) -> None:
    """GLM's sampling of positions, traced, with room for one segment and for more: one code for each, the same features."""
    table = table_of(SAMPLED, segment_capacities=capacities)
    made = captured(table, token_budgets=(48,), packing="greedy", mode="compiled", compiler="aot_eager")
    for case in ("one image", "three sizes"):
        request = request_of(*CASES[case])
        assert largest_difference(made.execute(request), reference(SAMPLED, request)) <= TOLERANCE
    assert counts(made)[1] == {}
    assert counters.graphs_seen > 0


def test_compiled_features_are_the_same() -> None:
    """Through `torch.compile`, with windows, several budgets and numbers of segments: traced forwards take the same buffers."""
    made = captured(
        table_of(WINDOWED, segment_capacities=()), token_budgets=BUDGETS, packing="greedy", mode="compiled", compiler="eager"
    )
    assert [key.token_budget for key in made._captured.set.graphs] == [48, 16]
    for case in ("three sizes", "clip among images", "one image"):
        request = request_of(*CASES[case])
        assert largest_difference(made.execute(request), reference(WINDOWED, request)) <= TOLERANCE
    assert counts(made)[1] == {}
    assert counters.graphs_seen == 1, "traced once for all budgets"


@pytest.mark.parametrize("build", [WINDOWED, INTERPOLATED], ids=name_of)
def test_a_default_device_of_the_caller_changes_nothing(build: Builder) -> None:
    """Sizes that are new are prepared on the host, whatever device new tensors get by default: the buffers hold the same."""
    held: list[dict[str, torch.Tensor]] = []
    request = request_of([(1, 8, 6), (1, 4, 10)])
    for default in ("cpu", "meta"):
        encoder = captured(table_of(build), token_budgets=BUDGETS, max_items_per_batch=4, packing="greedy", verify=False)
        encoder.execute(request_of([(1, 4, 4)]))  # what is remembered for all sizes is remembered
        model, graph = encoder.model, max(encoder._captured.set.graphs.values(), key=lambda graph: graph.key.token_budget)
        assert isinstance(model, TableEncoder)
        with torch.device(default):
            assert model.fill_encoder_cudagraph_buffers(graph.inputs.state, request, (0, 1), "main")
        values = graph.inputs.values.items()
        held.append({name: value.clone() for name, value in values if isinstance(value, torch.Tensor)})
    assert held[0].keys() == held[1].keys()
    for name, value in held[0].items():
        assert torch.equal(value, held[1][name]), name


@pytest.mark.parametrize("build", BUILDERS, ids=name_of)
def test_an_item_does_not_depend_on_its_neighbours(build: Builder) -> None:
    """An image of NaN among others changes no bit of their features (hazard 39), nor those of the next request."""
    made, request = served(build), request_of([(1, 4, 6), (1, 8, 6), (1, 4, 4)])
    clean = made.execute(request)
    spoiled = {**request, "pixel_values": request["pixel_values"].clone()}
    spoiled["pixel_values"][24:72] = float("nan")
    got = made.execute(spoiled)
    assert bool(got[1].isnan().all())
    for number in (0, 2):
        assert torch.equal(got[number], clean[number])
    assert all(torch.equal(a, b) for a, b in zip(made.execute(request), clean, strict=True))


@pytest.mark.parametrize("build", BUILDERS, ids=name_of)
def test_padding_stays_finite(build: Builder) -> None:
    """Rows behind the batch are computed too: no NaN and no infinity comes of them, which a kernel could carry over."""
    made = captured(table_of(build), token_budgets=(48,), packing="greedy")
    made.execute(request_of([(1, 4, 6)]))
    made.execute(request_of([(1, 4, 6)] * 3))
    outputs = [graph.output for graph in made._captured.set.graphs.values()]
    assert all(len(output) == 48 and bool(output.isfinite().all()) for output in outputs)


def test_any_sizes_fit_the_windows() -> None:
    """However thin the images, the window boundaries have room for as many as a batch may have: nothing runs eagerly."""
    made, dice = served(WINDOWED), random.Random(0)
    made._statistics.reset()
    for _ in range(12):
        sides = [(2, 2 * dice.randint(1, 8)) if dice.random() < 0.6 else (6, 2 * dice.randint(1, 4)) for _ in range(8)]
        grids = [(1, *(side if dice.random() < 0.5 else side[::-1])) for side in sides]
        request = request_of(grids, [(4, 2, 2)])
        assert largest_difference(made.execute(request), reference(WINDOWED, request)) <= TOLERANCE
    assert counts(made)[1] == {}


def test_window_capacity_covers_every_grid() -> None:
    """The declared number of windows for rows and frames is enough for any mixture, as the tower itself counts windows."""
    table = table_of(WINDOWED)
    capacity = table.paths["main"].buffers["cu_window_seqlens"].capacity
    assert capacity is not None
    for h, w in itertools.product(range(2, 18, 2), repeat=2):
        windows = len(vision_metadata(table.tower, [(1, h, w)])["cu_window_seqlens"]) - 1
        for copies in (1, 3):
            assert windows * copies <= capacity(h * w * copies, copies)


# --- the comparisons can fail ----------------------------------------------------------------------------------------


class Spoiled(SpoiledMetadata, PackedGridTable):
    """Some of the metadata is replaced just before the forward."""


def identity_order(values: dict[str, Any]) -> dict[str, Any]:
    """Windows over rows as they come."""
    return {"window_index": torch.arange(len(values["window_index"]))}


def one_window(values: dict[str, Any]) -> dict[str, Any]:
    """Windows as large as images."""
    boundaries = values["cu_window_seqlens"].clone()
    boundaries[: len(values["cu_seqlens"])] = values["cu_seqlens"][: len(boundaries)]
    boundaries[len(values["cu_seqlens"]) :] = values["cu_seqlens"][-1]
    return {"cu_window_seqlens": boundaries, "max_window_seqlen": len(values["hidden_states"])}


def other_taps(values: dict[str, Any]) -> dict[str, Any]:
    """Interpolation with the weights of other corners."""
    return {"interp_weights": values["interp_weights"].flip(1)}


def other_grids(values: dict[str, Any]) -> dict[str, Any]:
    """Heights and widths exchanged."""
    return {"grid_thw": values["grid_thw"][:, [0, 2, 1]]}


@pytest.mark.parametrize(
    ("build", "spoil"),
    [
        *[(build, spoil) for build in BUILDERS for spoil in (one_segment, no_positions)],
        *[(build, one_segment) for build in RELATIVES],
        (RELATIVES[0], other_taps),
        (RELATIVES[3], other_grids),
        (RELATIVES[4], no_positions),
        (WINDOWED, identity_order),
        (WINDOWED, one_window),
        (INTERPOLATED, other_taps),
        (SAMPLED, other_grids),
    ],
    ids=name_of,
)
def test_wrong_metadata_shows(build: Builder, spoil: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Each kind of metadata reaches the features through the graphs: wrong ones give clearly other features."""
    table = table_of(build, Spoiled)
    table.spoil = spoil  # type: ignore[attr-defined]
    made = captured(table, token_budgets=(48,), packing="greedy", verify=False)
    request = request_of([(1, 8, 12), (1, 4, 6), (1, 10, 2)])
    assert largest_difference(made.execute(request), reference(build, request)) > CLEARLY_WRONG
    assert counts(made) == (3, {})


def test_metadata_that_is_only_copied_changes_nothing() -> None:
    """The control of the controls: the same class with nothing replaced is right."""
    table = table_of(WINDOWED, Spoiled)
    table.spoil = lambda values: {}  # type: ignore[attr-defined]
    made = captured(table, token_budgets=(48,), packing="greedy", verify=False)
    request = request_of([(1, 8, 12), (1, 4, 6), (1, 10, 2)])
    assert largest_difference(made.execute(request), reference(WINDOWED, request)) <= TOLERANCE


# --- the declaration -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "more", "width"),
    [
        (towers.tiny_qwen2_vl, {}, 48),
        (WINDOWED, {"window_index": Role.INDEX, "cu_window_seqlens": Role.BOUNDARIES}, 48),
        (INTERPOLATED, {"interp_indices": Role.ROWS, "interp_weights": Role.ROWS}, 96),
        (SAMPLED, {"grid_thw": Role.PER_SEGMENT}, 48),
        (RELATIVES[0], {"interp_indices": Role.ROWS, "interp_weights": Role.ROWS}, 144),
        (RELATIVES[1], {"interp_indices": Role.ROWS, "interp_weights": Role.ROWS}, 48),
        (RELATIVES[4], {}, 48),
    ],
    ids=name_of,
)
def test_what_a_tower_declares(build: Builder, more: dict[str, Role], width: int) -> None:
    """Pixels, positions and boundaries, and what the tower has beside; the width counts deepstack levels."""
    table = table_of(build)
    (path,) = table.paths.values()
    roles = {name: buffer.role for name, buffer in path.buffers.items()}
    assert roles == {"hidden_states": Role.ROWS, "position_ids": Role.ROWS, "cu_seqlens": Role.BOUNDARIES} | more
    assert path.buffers["hidden_states"].shape == (towers.PACKED_CHANNELS,)
    assert (path.spatial_merge_size, table.out_hidden_size) == (2, width)
    assert table.tower.config._attn_implementation == ATTENTION_NAME
    assert (table.token_range, table.max_frames_per_video, tuple(table.segment_capacities)) == ((8, 48), 4, (2,))


@pytest.mark.parametrize("build", BUILDERS, ids=name_of)
def test_examples_for_trials(build: Builder) -> None:
    """One frame, legal, at most so many tokens and nearly as many; with them trials refuse no graph of a right tower."""
    table = table_of(build)
    for tokens in range(1, 200):
        t, h, w = table.example_key(tokens)  # type: ignore[misc]
        (count,) = [table.item_size((t, h, w)).tokens]
        assert isinstance(count, int)
        assert t == 1
        assert min(h, w) > 0
        assert h % table.merge == w % table.merge == 0
        assert 0.6 * tokens <= count <= tokens
    assert served(build).snapshot()["not_captured"] == []
    made = TableEncoder(table, device=torch.device("cpu"), dtype=torch.float32)
    inputs = made.prepare_encoder_cudagraph_capture_inputs(48, 4, 4, made.device, made.dtype, "main", (0,))
    assert made.fill_encoder_cudagraph_trial(inputs.state, "main", 24, None) == 24
    assert len(made.encoder_cudagraph_trial_values(inputs.state, "main")) == 3


def test_defaults() -> None:
    """Budgets for photographs, clips of 32 frames, tight graphs for images."""
    table = PackedGridTable(towers.tiny_qwen2_vl())
    assert (table.token_range, table.max_frames_per_video, tuple(table.segment_capacities)) == ((64, 4096), 32, (64,))


@pytest.mark.parametrize("grid", [(1, 4, 6), (3, 2, 8)])
@pytest.mark.parametrize("build", BUILDERS, ids=name_of)
def test_metadata_of_an_item_is_what_the_buffers_take(build: Builder, grid: Grid) -> None:
    """Tensors for exactly the declared buffers; interpolation weights stay in float32, whatever the encoder's dtype."""
    table = table_of(build)
    (path,) = table.paths.values()
    found = table.item_metadata(grid, "main")
    assert {*found, "hidden_states"} == {*path.buffers}
    for name, value in found.items():
        assert (value.dtype, tuple(value.shape[1:])) == (path.buffers[name].dtype, path.buffers[name].shape), name
    size = table.item_size(grid)
    t, h, w = grid
    assert (size.rows, size.tokens, size.frames) == (t * h * w, t * h * w // 4, t)
    assert len(found["cu_seqlens"]) == t + 1


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"image_grid_thw": torch.tensor([(1, 4, 5)])}, GridError, r"grid 0 of image_grid_thw is \(1, 4, 5\).*merge size 2"),
        ({"image_grid_thw": torch.tensor([(1, 4, 4)])}, InputError, "pixel_values has 24 rows, but .* add up to 16"),
        ({"pixel_values": torch.zeros(24, 95)}, InputError, r"expected \[24, 96\]"),
    ],
)
def test_wrong_requests_are_refused(change: dict[str, Any], error: type[Exception], words: str) -> None:
    """Grids that do not merge, pixels that are not those of the grids, patches of another size."""
    with pytest.raises(error, match=words):
        served(towers.tiny_qwen2_vl).execute({**request_of([(1, 4, 6)]), **change})


@pytest.mark.parametrize("module", [torch.nn.Linear(2, 2), towers.tiny_clip()], ids=["linear", "dense tower"])
def test_other_modules_are_refused(module: torch.nn.Module) -> None:
    """A module without grids is an error that says so."""
    with pytest.raises(ModelError, match="not a packed tower with grids"):
        PackedGridTable(module)


# --- rows of the support table ----------------------------------------------------------------------------------------

WHOLE = {
    "Qwen2-VL": ("Qwen2VLConfig", "Qwen2VLForConditionalGeneration"),
    "Qwen2.5-VL": ("Qwen2_5_VLConfig", "Qwen2_5_VLForConditionalGeneration"),
    "Qwen3-VL": ("Qwen3VLConfig", "Qwen3VLForConditionalGeneration"),
    "Qwen3-VL-MoE": ("Qwen3VLMoeConfig", "Qwen3VLMoeForConditionalGeneration"),
    "Qwen3.5, Qwen3.6": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration"),
    "Qwen3.5-MoE, Qwen3.6-MoE": ("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration"),
    "GLM-4.1V": ("Glm4vConfig", "Glm4vForConditionalGeneration"),
    "GLM-4.5V": ("Glm4vMoeConfig", "Glm4vMoeForConditionalGeneration"),
    "GLM-4.6V": ("Glm46VConfig", "Glm46VForConditionalGeneration"),
    "GLM-OCR": ("GlmOcrConfig", "GlmOcrForConditionalGeneration"),
}


def test_every_row_is_tested() -> None:
    """Whole models of all rows, and bare towers of all but GLM-4.6V, whose tower is GLM-4.1V's."""
    names = {row.name for row in ROWS}
    assert names == {*WHOLE}
    assert names - {*ROW_OF_TOWER.values()} == {"GLM-4.6V"}


@pytest.mark.parametrize("name", WHOLE)
def test_rows_of_whole_models(name: str) -> None:
    """The released configuration of a model finds its row, and only that one; nothing is allocated for it."""
    import transformers

    config_class, model_class = (getattr(transformers, attribute) for attribute in WHOLE[name])
    config = config_class()
    config.vision_config.depth = config.text_config.num_hidden_layers = 1
    if getattr(config.text_config, "layer_types", None):
        config.text_config.layer_types = ["full_attention"]
    config.vision_config.deepstack_visual_indexes = [0]
    with torch.device("meta"):
        model = model_class(config)
    assert [row.name for row in ROWS if row.is_for(model)] == [name]
    tower = model.model.visual
    rows_of_patch = tower.patch_embed.proj.weight[0].numel()
    assert _channels(tower.config) == rows_of_patch, "values in a row of pixel_values"


@pytest.mark.parametrize("build", ROW_OF_TOWER, ids=name_of)
def test_bare_towers_are_accelerated(build: Builder) -> None:
    """A tower by itself finds its row; its whole output is what it was, for images and for frames of a clip."""
    tower = build("sdpa", depth=DEPTH)
    assert [row.name for row in ROWS if row.is_for(tower)] == [ROW_OF_TOWER[build]]
    grid = torch.tensor([(1, 4, 6), (1, 8, 4), (1, 2, 4), (1, 2, 4)])
    if "glm4v" not in name_of(build):
        grid = torch.tensor([(1, 4, 6), (1, 8, 4), (2, 2, 4)])
    untouched, pixels = eager_copy(tower), towers.pixels(72)
    options: dict[str, Any] = {"token_range": (8, 48), "max_frames_per_video": 4, "segment_capacities": (), "token_budgets": [48]}
    with accelerated(tower, **options) as handle:
        assert difference(tower(pixels, grid_thw=grid), untouched(pixels, grid_thw=grid)) <= TOLERANCE
        assert counted(handle) == (len(grid), {}, {})
