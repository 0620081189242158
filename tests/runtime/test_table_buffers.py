"""What lies in the buffers of one graph: compared, entry by entry, with a layout that is written down in plain Python.

`PATH` has a buffer of every role. The key of an item is the lengths of its segments, in rows; they are multiples of 4, of which
4 rows make a block that an index shuffles, and windows have 8 rows.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vit_compile._torch_compat import DispatchMode
from vit_compile.backend.roles import Role
from vit_compile.runtime.table import Buffer, TablePath
from vit_compile.runtime.table_buffers import CACHED_LAYOUTS, GraphBuffers, Layouts, SharedRows, exact_values

CPU = torch.device("cpu")
BLOCK, WINDOW = 4, 8
Key = tuple[int, ...]

PATH = TablePath(
    buffers={
        "pixels": Buffer(role=Role.ROWS, shape=(3,)),
        "mask": Buffer(role=Role.ROWS, dtype=torch.float64, pad=9),
        "positions": Buffer(role=Role.ROWS, shape=(2,), dtype=torch.int64),
        "weights": Buffer(role=Role.ROWS, shape=(2,), pad=5),
        "merged": Buffer(role=Role.ROWS, dtype=torch.int16, rows_per_entry=BLOCK),
        "order": Buffer(role=Role.INDEX, dtype=torch.int64, rows_per_entry=BLOCK),
        "cu_seqlens": Buffer(role=Role.BOUNDARIES, dtype=torch.int32, bound="max_seqlen"),
        "cu_windows": Buffer(
            role=Role.BOUNDARIES,
            dtype=torch.int64,
            bound="max_window",
            longest=WINDOW,
            capacity=lambda rows, segments: rows // WINDOW + segments,
        ),
        "grid": Buffer(role=Role.PER_SEGMENT, shape=(2,), dtype=torch.int64, pad=1),
    },
)
DATA = ("pixels", "mask")
METADATA = tuple(name for name in PATH.buffers if name not in DATA)
DTYPES = {
    "pixels": torch.float32,
    "mask": torch.float64,
    "positions": torch.int64,
    "weights": torch.float32,
    "merged": torch.int16,
    "order": torch.int64,
    "cu_seqlens": torch.int32,
    "cu_windows": torch.int64,
    "grid": torch.int64,
}


def windows(key: Key) -> list[int]:
    """Lengths of the windows of an item: 8 rows, and what is left of each segment."""
    return [min(WINDOW, length - start) for length in key for start in range(0, length, WINDOW)]


def offsets(lengths: Sequence[int]) -> list[int]:
    """0 and the running sums."""
    return [0, *itertools.accumulate(lengths)]


def metadata(key: Hashable, path: str) -> Mapping[str, torch.Tensor]:
    """Of one item: its blocks are in reversed order, its numbers tell it apart. The dtypes are not those of the buffers."""
    assert isinstance(key, tuple)
    rows = sum(key)
    return {
        "positions": torch.tensor([(row, rows) for row in range(rows)], dtype=torch.int32),
        "weights": torch.tensor([(row / 8, -rows) for row in range(rows)]),
        "merged": torch.arange(rows // BLOCK, dtype=torch.int16) + 100,
        "order": torch.arange(rows // BLOCK).flip(0),
        "cu_seqlens": torch.tensor(offsets(key)),
        "cu_windows": torch.tensor(offsets(windows(key))),
        "grid": torch.tensor([(length, rows) for length in key]),
    }


def data(keys: Sequence[Key], seed: int = 0) -> dict[str, list[torch.Tensor]]:
    """Rows of the items, as slices of two inputs."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixels": [torch.randn(sum(key), 3, generator=generator) for key in keys],
        "mask": [torch.randn(sum(key), generator=generator, dtype=torch.float64) for key in keys],
    }


def layout(keys: Sequence[Key], rows: int, segments: int, slices: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, list[Any]]:
    """What every buffer of a graph of this size must hold, in plain Python. `rows` below 0: nothing is padded."""
    lengths = [length for key in keys for length in key]
    real = sum(lengths)
    order, base = list[int](), 0
    for key in keys:
        blocks = sum(key) // BLOCK
        order += [base + block for block in reversed(range(blocks))]
        base += blocks
    found: dict[str, list[Any]] = {
        "pixels": [row.tolist() for part in slices["pixels"] for row in part],
        "mask": [float(row) for part in slices["mask"] for row in part],
        "positions": [[row, sum(key)] for key in keys for row in range(sum(key))],
        "weights": [[row / 8, -sum(key)] for key in keys for row in range(sum(key))],
        "merged": [100 + block for key in keys for block in range(sum(key) // BLOCK)],
        "order": order,
        "cu_seqlens": offsets(lengths),
        "cu_windows": offsets([window for key in keys for window in windows(key)]),
        "grid": [[length, sum(key)] for key in keys for length in key],
    }
    if rows < 0:
        return found
    found["pixels"] += [[0.0] * 3] * (rows - real)
    found["mask"] += [9.0] * (rows - real)
    found["positions"] += [[0, 0]] * (rows - real)
    found["weights"] += [[5.0, 5.0]] * (rows - real)
    found["merged"] += [0] * (rows // BLOCK - real // BLOCK)
    found["order"] += range(real // BLOCK, rows // BLOCK)
    found["cu_seqlens"] += [real] * (segments + 1 - len(found["cu_seqlens"]))
    found["cu_windows"] += [real] * (rows // WINDOW + segments + 1 - len(found["cu_windows"]))
    found["grid"] += [[1, 1]] * (segments + 1 - len(found["grid"]))
    return found


def graph(rows: int = 32, segments: int = 4, shared: SharedRows | None = None, layouts: Layouts | None = None) -> GraphBuffers:
    """Buffers of one graph of `PATH`, in which a token is a row."""
    return GraphBuffers(
        PATH,
        DATA,
        tokens=rows,
        segments=segments,
        device=CPU,
        dtype=torch.float32,
        shared=shared,
        layouts=Layouts() if layouts is None else layouts,
    )


def check_content(buffers: GraphBuffers, keys: Sequence[Key], slices: Mapping[str, Sequence[torch.Tensor]]) -> None:
    """Every entry of every buffer is what `layout` says."""
    want = layout(keys, buffers.rows, buffers.segments, slices)
    values = buffers.values()
    for name, entries in want.items():
        assert values[name].tolist() == torch.tensor(entries, dtype=DTYPES[name]).tolist(), name
        assert values[name].dtype == DTYPES[name]


def fill(buffers: GraphBuffers, keys: Sequence[Key], seed: int = 0) -> dict[str, list[torch.Tensor]]:
    """Put a batch into the buffers, which has to fit; returns its data."""
    slices = data(keys, seed)
    assert buffers.fill(tuple(keys), slices, metadata, "main")
    return slices


class Copies(DispatchMode):
    """Counts copies into one block of memory."""

    def __init__(self, block: torch.Tensor) -> None:
        super().__init__()
        self.address, self.count = block.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith("aten.copy_") and args[0].untyped_storage().data_ptr() == self.address:
            self.count += 1
        return func(*args, **(kwargs or {}))


# --- shapes and contents ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "segments"), [(8, 1), (32, 4), (12, 7), (4, 0)])
def test_shapes_follow_the_budget_and_the_segments(rows: int, segments: int) -> None:
    """Rows as the budget says, blocks a quarter of that, boundaries and per-segment entries one more than segments."""
    values = graph(rows, segments).values()
    assert {name: tuple(value.shape) for name, value in values.items() if isinstance(value, torch.Tensor)} == {
        "pixels": (rows, 3),
        "mask": (rows,),
        "positions": (rows, 2),
        "weights": (rows, 2),
        "merged": (rows // 4,),
        "order": (rows // 4,),
        "cu_seqlens": (segments + 1,),
        "cu_windows": (rows // 8 + segments + 1,),
        "grid": (segments + 1, 2),
    }
    assert (values["max_seqlen"], values["max_window"]) == (rows, min(WINDOW, rows))
    assert len(values) == len(PATH.buffers) + 2


def test_tokens_become_rows() -> None:
    """The budget is in tokens, the buffers in rows: merged patches have more, tiles have fewer."""
    for path, rows in (({"spatial_merge_size": 2}, 64), ({"tokens_per_row": 4}, 4)):
        made = GraphBuffers(
            TablePath(buffers={"pixels": Buffer(role=Role.ROWS)}, **path),
            ("pixels",),
            tokens=16,
            segments=1,
            device=CPU,
            dtype=torch.bfloat16,
            shared=None,
            layouts=Layouts(),
        )
        assert made.rows == made.values()["pixels"].shape[0] == rows
        assert made.values()["pixels"].dtype == torch.bfloat16, "the encoder's, where a buffer names none"


def test_new_buffers_are_a_batch_of_nothing() -> None:
    """Before the first fill everything is padding, which a first run can be made with."""
    made = graph()
    want = layout([], 32, 4, data([]))
    for name, entries in want.items():
        assert made.values()[name].tolist() == torch.tensor(entries, dtype=DTYPES[name]).tolist(), name


def test_new_buffers_are_no_inference_tensors() -> None:
    """They are written in normal mode later, wherever they were made (hazard 22)."""
    with torch.inference_mode():
        made = graph()
    fill(made, [(8,)])
    assert not any(value.is_inference() for value in made.values().values() if isinstance(value, torch.Tensor))


def test_buffers_of_the_block_are_aligned() -> None:
    """Every metadata buffer begins at a multiple of 256 bytes of its block, and none overlaps the next."""
    made = graph(12, 7)
    start = made.block.data_ptr()
    spans = sorted((buffer.tensor.data_ptr() - start, buffer.tensor.nbytes) for buffer in made.metadata.values())
    assert all(offset % 256 == 0 for offset, _ in spans)
    assert all(offset + nbytes <= later for (offset, nbytes), (later, _) in itertools.pairwise(spans))
    assert spans[-1][0] + spans[-1][1] <= made.block.nbytes == made.nbytes - made.shared.nbytes


BATCHES: dict[str, list[Key]] = {
    "one": [(8,)],
    "exact fit": [(12, 4), (16,)],
    "all segments": [(4,), (4, 4), (4,)],
    "short windows": [(12,), (12,)],
    "clip": [(4, 8, 4), (8,)],
}


@pytest.mark.parametrize("case", BATCHES)
def test_content_after_a_fill(case: str) -> None:
    """Real entries in front; behind them zeros or `pad`, repeated boundaries, an index that goes on as identity."""
    made = graph()
    slices = fill(made, BATCHES[case])
    check_content(made, BATCHES[case], slices)


def test_content_after_large_and_small_fills() -> None:
    """Nothing of an earlier batch is left behind, in any order of sizes (hazard 1 and 3)."""
    made = graph()
    for seed, case in enumerate(["exact fit", "one", "exact fit", "all segments", "one", "clip", "clip", "short windows"]):
        slices = fill(made, BATCHES[case], seed)
        check_content(made, BATCHES[case], slices)


segments_of_4 = st.lists(st.integers(1, 6).map(lambda n: n * BLOCK), min_size=1, max_size=3).map(tuple)


@given(st.lists(st.lists(segments_of_4, min_size=1, max_size=4), min_size=1, max_size=6))
def test_content_after_any_fills(batches: list[list[Key]]) -> None:
    """Any sequence of batches; one that does not fit is refused and leaves what is there."""
    made = graph(48, 5)
    held: tuple[list[Key], dict[str, list[torch.Tensor]]] = ([], data([]))
    for seed, keys in enumerate(batches):
        slices = data(keys, seed)
        fits = sum(map(sum, keys)) <= 48 and sum(map(len, keys)) <= 5
        assert made.fill(tuple(keys), slices, metadata, "main") == fits
        if fits:
            held = keys, slices
        check_content(made, *held)


def test_only_stale_rows_are_written() -> None:
    """Behind the data only what an earlier batch left is reset; what was reset already is not touched again."""
    made = graph()
    fill(made, [(24,)])
    slices = fill(made, [(8,)])
    check_content(made, [(8,)], slices)
    pixels = made.values()["pixels"]
    pixels[20:] = 7  # nobody writes here any more
    fill(made, [(16,)])
    fill(made, [(4,)])
    assert bool((pixels[20:] == 7).all())
    assert not bool(pixels[4:20].any())


def test_the_rows_of_a_batch_may_come_from_several_inputs_and_dtypes() -> None:
    """Slices of other dtypes and strides are converted."""
    made = graph()
    parts = data([(8,), (4,), (8,)])
    slices = {
        "pixels": [parts["pixels"][0], parts["pixels"][1].bfloat16(), parts["pixels"][2].T.contiguous().T],
        "mask": [parts["mask"][0].float(), *parts["mask"][1:]],
    }
    assert made.fill(((8,), (4,), (8,)), slices, metadata, "main")
    want = {"pixels": [*parts["pixels"]], "mask": [*parts["mask"]]}
    want["pixels"][1], want["mask"][0] = parts["pixels"][1].bfloat16().float(), parts["mask"][0].float().double()
    check_content(made, [(8,), (4,), (8,)], want)


def test_inputs_are_only_read() -> None:
    """A fill does not write into the request's tensors or the items' metadata."""
    made = graph()
    items = {key: dict(metadata(key, "main")) for key in ((8,), (4, 4))}
    before = {key: {name: value.clone() for name, value in item.items()} for key, item in items.items()}
    slices = data(list(items))
    copies = {name: [part.clone() for part in parts] for name, parts in slices.items()}
    assert made.fill(tuple(items), slices, lambda key, path: items[key], "main")
    fill(made, [(32,)], seed=3)
    assert all(torch.equal(a, b) for name in slices for a, b in zip(slices[name], copies[name], strict=True))
    assert all(torch.equal(items[key][name], value) for key, item in before.items() for name, value in item.items())


@pytest.mark.parametrize(
    "keys",
    [[(4,)] * 5, [(4, 4, 4), (4, 4)], [(28, 8)], [(32,), (4,)]],
    ids=["items", "segments of a clip", "rows of one", "rows of two"],
)
def test_a_batch_that_does_not_fit_is_refused(keys: list[Key]) -> None:
    """More segments or rows than there is room for: False, and buffers, layout and later fills are as if nothing had been."""
    made = graph()
    slices = fill(made, [(8, 4)])
    held = made.held
    assert not made.fill(tuple(keys), data(keys, 5), metadata, "main")
    assert made.held == held
    check_content(made, [(8, 4)], slices)
    check_content(made, [(12,)], fill(made, [(12,)]))


# --- copies and cached layouts ---------------------------------------------------------------------------------------


def test_one_copy_of_metadata_for_a_layout_and_none_if_it_is_there() -> None:
    """Seven buffers of metadata are one copy; the same sizes again are none; sizes of earlier are not laid out anew."""
    made, asked = graph(), list[Hashable]()

    def counting(key: Hashable, path: str) -> Mapping[str, torch.Tensor]:
        asked.append(key)
        return metadata(key, path)

    def run(keys: list[Key], seed: int) -> tuple[int, int]:
        asked.clear()
        slices = data(keys, seed)
        with Copies(made.block) as copies:
            assert made.fill(tuple(keys), slices, counting, "main")
        check_content(made, keys, slices)
        return copies.count, len(asked)

    assert run([(8,), (4, 4)], 0) == (1, 2)
    assert run([(8,), (4, 4)], 1) == (0, 0)
    assert run([(4, 4), (8,)], 2) == (1, 2), "another order is another layout"
    assert run([(8,), (4, 4)], 3) == (1, 0)


def test_a_layout_is_not_there_any_more_after_a_trial() -> None:
    """Made-up data replaces the metadata, so the next batch brings its own, also one of the layout before."""
    made = graph()
    fill(made, [(8,), (4, 4)])
    made.fill_for_trial(12, 4, torch.Generator().manual_seed(0))
    check_content(made, [(8,), (4, 4)], fill(made, [(8,), (4, 4)]))


def test_layouts_of_graphs_are_kept_apart() -> None:
    """Two graphs of one encoder share the cache; the same batch has another layout in each, and the sizes of a third too."""
    layouts = Layouts()
    made = [
        graph(32, 4, layouts=layouts),
        graph(16, 4, layouts=layouts),
        graph(32, 4, layouts=layouts),
        graph(32, 2, layouts=layouts),
    ]
    for keys in ([(8, 4)], [(4,)], [(8, 4)]):
        for buffers in made:
            check_content(buffers, keys, fill(buffers, keys))
    assert len(layouts._blocks) == 8


def test_a_new_graph_does_not_inherit_layouts() -> None:
    """A graph that takes the place of another, and maybe its address, never sees its blocks."""
    layouts = Layouts()
    for rows in (16, 32, 24, 16, 32, 24):
        made = graph(rows, 4, layouts=layouts)
        check_content(made, [(8, 4)], fill(made, [(8, 4)]))


def test_kept_layouts_are_never_written() -> None:
    """A block may still be on its way to the device: later fills make new ones."""
    layouts = Layouts()
    made = graph(layouts=layouts)
    fill(made, [(8,)])
    (block,) = layouts._blocks.values()
    before = block.clone()
    for keys in ([(32,)], [(4, 4), (4,)], [(8,)]):
        fill(made, keys)
    assert torch.equal(block, before)


@given(st.integers(0, 60), st.lists(st.tuples(st.integers(0, 6), st.integers(1, 30)), max_size=40))
def test_kept_layouts_are_bounded_and_least_recently_used_go_first(capacity: int, asked: list[tuple[int, int]]) -> None:
    """Never more bytes than allowed; beside that, what was asked for last is there. Compared with a plain list."""
    layouts, kept = Layouts(capacity), list[tuple[int, int]]()
    for name, nbytes in asked:
        held = next(((n, b) for n, b in kept if n == name), None)
        found = layouts.get(name)
        assert (found is None) == (held is None)
        if held is not None:
            assert found is not None
            assert found.nbytes == held[1]
            kept.remove(held)
            kept.append(held)
        else:
            layouts.put(name, torch.zeros(nbytes, dtype=torch.uint8))
            if nbytes <= capacity:
                kept.append((name, nbytes))
            while sum(size for _, size in kept) > capacity:
                kept.pop(0)
        assert sum(block.nbytes for block in layouts._blocks.values()) <= capacity
        assert [*layouts._blocks] == [name for name, _ in kept]


def test_kept_layouts_are_bounded_in_number() -> None:
    """Small blocks have keys that take memory too: so many at most, and what was asked for last stays."""
    layouts = Layouts()
    block = torch.zeros(1, dtype=torch.uint8)
    for number in range(CACHED_LAYOUTS + 100):
        layouts.put(number, block)
        layouts.get(0)
    assert len(layouts._blocks) == CACHED_LAYOUTS
    assert layouts.get(0) is block
    assert layouts.get(100) is None
    assert layouts.get(101) is block
    assert layouts._nbytes == CACHED_LAYOUTS
    layouts.clear()
    assert (len(layouts._blocks), layouts._nbytes) == (0, 0)
    layouts.put(1, block)
    assert layouts.get(1) is block


def test_a_cache_that_is_too_small_changes_nothing() -> None:
    """Layouts that cannot be kept are made each time."""
    made = graph(layouts=Layouts(1))
    for seed, keys in enumerate(([(8,)], [(4, 4)], [(8,)])):
        check_content(made, keys, fill(made, keys, seed))


# --- shared data buffers ---------------------------------------------------------------------------------------------


def test_a_smaller_graph_reads_the_front_of_a_larger_one() -> None:
    """Data buffers are shared between budgets, and metadata is not; each graph sees its own batch after its own fill."""
    large = graph(32, 4)
    small = graph(16, 2, shared=large.shared)
    assert (large.own_rows, small.own_rows) == (True, False)
    assert small.values()["pixels"].data_ptr() == large.values()["pixels"].data_ptr()
    assert small.values()["grid"].data_ptr() != large.values()["grid"].data_ptr()
    assert large.nbytes == large.block.nbytes + 32 * (3 * 4 + 8)
    assert small.nbytes == small.block.nbytes
    for seed, (buffers, keys) in enumerate(
        [(large, [(20, 12)]), (small, [(4,)]), (large, [(8,)]), (small, [(16,)]), (large, [(20, 12)]), (small, [(4,)])]
    ):
        check_content(buffers, keys, fill(buffers, keys, seed))


def test_a_larger_graph_makes_its_own() -> None:
    """Buffers with too few rows, or on another device, are not shared."""
    small = graph(16)
    large = graph(32, shared=small.shared)
    assert large.own_rows
    assert large.values()["pixels"].shape[0] == 32
    assert graph(16, shared=large.shared).own_rows is False
    only_data = TablePath(buffers={name: PATH.buffers[name] for name in DATA})
    for device in ("meta", "cpu"):
        made = GraphBuffers(
            only_data,
            DATA,
            tokens=16,
            segments=1,
            device=torch.device(device),
            dtype=torch.float32,
            shared=large.shared,
            layouts=Layouts(),
        )
        assert made.own_rows == (device == "meta")


# --- trials ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("real", "segments"), [(12, 4), (32, 4), (32, 1), (4, 1), (20, 3)])
def test_a_trial_is_a_legal_batch(real: int, segments: int) -> None:
    """Made-up data obeys what real data obeys: boundaries to the last real row, windows not too long, an index in range."""
    made = graph(32, segments)
    made.fill_for_trial(real, segments, torch.Generator().manual_seed(0))
    values = made.values()
    for name, longest in (("cu_seqlens", real), ("cu_windows", WINDOW)):
        boundaries = values[name].tolist()
        lengths = [end - start for start, end in itertools.pairwise(boundaries)]
        assert boundaries[0] == 0
        assert boundaries[-1] == real
        assert all(0 <= length <= longest for length in lengths), name
    assert values["order"].tolist() == list(range(8))
    assert bool((values["pixels"][:real] != 0).all())
    assert not bool(values["pixels"][real:].any())
    assert bool((values["mask"][real:] == 9).all())
    assert bool((values["weights"][real:] == 5).all())
    assert not bool(values["grid"][:segments].any()), "whole numbers are zeros, whatever the pad"
    assert bool((values["grid"][segments:] == 1).all())
    assert bool((values["positions"][:real] == 0).all())


@pytest.mark.parametrize(("real", "segments"), [(12, 4), (32, 4), (32, 1), (20, 3)])
def test_a_trial_without_padding(real: int, segments: int) -> None:
    """Copies of the real entries of every buffer, and the bounds of so many rows: what a batch of its own would be."""
    made = graph(32, segments)
    fill(made, [(24, 8)] if segments > 1 else [(32,)])
    made.fill_for_trial(real, segments, torch.Generator().manual_seed(0))
    values, exact = made.values(), made.unpadded_trial()
    assert exact.keys() == values.keys()
    assert (exact["max_seqlen"], exact["max_window"]) == (real, min(WINDOW, real))
    for name in ("pixels", "mask", "positions", "weights"):
        assert torch.equal(exact[name], values[name][:real]), name
    for name in ("merged", "order"):
        assert torch.equal(exact[name], values[name][: real // BLOCK]), name
    for name in ("cu_seqlens", "cu_windows"):
        assert exact[name].unique().tolist() == values[name].unique().tolist(), name
    assert len(exact["grid"]) == len(exact["cu_seqlens"]) - 1
    made.fill_for_trial(4, 1, torch.Generator().manual_seed(1))
    assert not torch.equal(exact["pixels"][:4], values["pixels"][:4]), "copies stay"


@pytest.mark.parametrize("kind", ["small", "large", "nan"])
def test_garbage_goes_into_the_padding_of_data_only(kind: str) -> None:
    """Real rows and all metadata, whose padding is clean in real calls too, stay; all padding of data is garbage."""
    made = graph()
    made.fill_for_trial(12, 3, torch.Generator().manual_seed(0))
    clean = {name: value.clone() for name, value in made.values().items() if isinstance(value, torch.Tensor)}
    made.poison(kind, torch.Generator().manual_seed(1))
    for name, value in made.values().items():
        if name in DATA:
            assert torch.equal(value[:12], clean[name][:12]), name
            changed = value[12:] != clean[name][12:]
            assert bool(changed.all()), name
            assert bool(torch.isnan(value[12:]).all()) == (kind == "nan")
        elif name in clean:
            assert torch.equal(value, clean[name]), name


@pytest.mark.parametrize("kind", ["large", "nan"])
def test_no_garbage_is_left_after_a_trial(kind: str) -> None:
    """A clean trial resets everything, and real batches afterwards have clean padding, in this graph and in smaller ones."""
    made = graph()
    small = graph(16, 4, shared=made.shared)
    generator = torch.Generator().manual_seed(0)
    for buffers, real in ((made, 16), (small, 8)):
        buffers.fill_for_trial(real, 4, generator)
        buffers.poison(kind, generator)
        buffers.fill_for_trial(real, 4, generator)
        for name, pad in (("pixels", 0), ("mask", 9), ("weights", 5)):
            assert bool((buffers.values()[name][real:] == pad).all()), name
    for buffers in (small, made):
        check_content(buffers, [(4,)], fill(buffers, [(4,)]))


@pytest.mark.parametrize("kind", ["small", "large", "nan"])
def test_clean_undoes_poison(kind: str) -> None:
    """Every buffer is again what the trial made of it."""
    made = graph()
    generator = torch.Generator().manual_seed(0)
    made.fill_for_trial(12, 3, generator)
    clean = {name: value.clone() for name, value in made.values().items() if isinstance(value, torch.Tensor)}
    made.poison(kind, generator)
    made.clean()
    assert all(torch.equal(made.values()[name], value) for name, value in clean.items())


def test_a_trial_after_batches_has_clean_padding() -> None:
    """Batches write metadata past the buffers' own bookkeeping; a trial afterwards does not show their rows."""
    made = graph()
    made.fill_for_trial(4, 1, torch.Generator().manual_seed(0))
    fill(made, [(24, 8)])
    made.fill_for_trial(8, 1, torch.Generator().manual_seed(0))
    assert bool((made.values()["weights"][8:] == 5).all())
    assert not bool(made.values()["positions"][8:].any())
    assert not bool(made.values()["grid"][:1].any())
    assert bool((made.values()["grid"][1:] == 1).all())


# --- exact values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_exact_values_are_the_layout_without_padding(seed: int) -> None:
    """What an eager run gets: the same entries, none behind, new dtypes as declared, and bounds of this batch."""
    dice = random.Random(seed)
    keys = [tuple(dice.randrange(1, 6) * BLOCK for _ in range(dice.randrange(1, 4))) for _ in range(dice.randrange(1, 5))]
    slices = data(keys, seed)
    values = exact_values(PATH, tuple(keys), slices, metadata, "main", CPU, torch.float32)
    want = layout(keys, -1, 0, slices)
    assert values.keys() == {*PATH.buffers, "max_seqlen", "max_window"}
    for name, entries in want.items():
        assert values[name].tolist() == torch.tensor(entries, dtype=DTYPES[name]).tolist(), name
        assert values[name].dtype == DTYPES[name]
    rows = sum(map(sum, keys))
    assert (values["max_seqlen"], values["max_window"]) == (rows, min(WINDOW, rows))


def test_exact_values_of_a_dtype() -> None:
    """Buffers without a dtype have the encoder's, others keep theirs."""
    keys = [(8,)]
    values = exact_values(PATH, tuple(keys), data(keys), metadata, "main", CPU, torch.bfloat16)
    assert (values["pixels"].dtype, values["weights"].dtype, values["mask"].dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float64,
    )
