"""Declarations in the table form: what they mean, and that wrong ones are errors before anything runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.runtime.toys import PackedTable, PackedTower, TiledTable, TiledTower, packed_table, tiled_table, twin_table
from vit_compile.backend.roles import Role
from vit_compile.errors import BudgetError, ProtocolError
from vit_compile.runtime.config import EncoderConfig
from vit_compile.runtime.graph_config import EncoderCudaGraphConfig
from vit_compile.runtime.item_spec import DEFAULT_PATH
from vit_compile.runtime.ladders import resolve
from vit_compile.runtime.table import Buffer, EncoderTable, Modality, TablePath, single_path
from vit_compile.runtime.table_encoder import TableEncoder

INT = torch.int64


def encoder(table: EncoderTable) -> TableEncoder:
    """The protocol object of a table, on the CPU."""
    return TableEncoder(table, device=torch.device("cpu"), dtype=torch.float32)


# --- buffers and paths -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"role": Role.FIXED}, "ROWS, INDEX, BOUNDARIES or PER_SEGMENT"),
        ({"role": Role.INDEX, "dtype": INT, "rows_per_entry": 0}, "rows_per_entry=0"),
        ({"role": Role.ROWS, "bound": "max_seqlen"}, "bound and longest are about boundaries"),
        ({"role": Role.PER_SEGMENT, "longest": 4}, "bound and longest are about boundaries"),
        ({"role": Role.INDEX, "dtype": INT, "bound": "max_seqlen"}, "bound and longest are about boundaries"),
        ({"role": Role.BOUNDARIES}, "dtype=None: boundaries and indices are integers"),
        ({"role": Role.INDEX}, "dtype=None"),
        ({"role": Role.INDEX, "dtype": torch.float32}, "dtype=torch.float32"),
        ({"role": Role.BOUNDARIES, "dtype": torch.complex64}, "dtype=torch.complex64"),
        ({"role": Role.INDEX, "dtype": INT, "shape": (2,)}, r"shape=\(2,\): boundaries and indices are single integers"),
        ({"role": Role.BOUNDARIES, "dtype": INT, "shape": (1,)}, r"shape=\(1,\)"),
        ({"role": Role.ROWS, "capacity": lambda rows, segments: 3}, "capacity is about boundaries and per-segment buffers"),
        ({"role": Role.INDEX, "dtype": INT, "capacity": lambda rows, segments: 3}, "capacity is about"),
        ({"role": Role.INDEX, "dtype": INT, "pad": 1}, "take no pad"),
    ],
)
def test_wrong_buffers_are_refused(fields: dict[str, Any], words: str) -> None:
    """A role that is never padded, numbers that mean nothing, options of another role, offsets that are no integers."""
    with pytest.raises(ProtocolError, match=words):
        Buffer(**fields)


@pytest.mark.parametrize("role", [Role.BOUNDARIES, Role.PER_SEGMENT])
def test_room_in_segments_may_be_said(role: Role) -> None:
    """Buffers of segments may have room of their own."""
    assert Buffer(role=role, dtype=INT, capacity=lambda rows, segments: 3).capacity is not None


@pytest.mark.parametrize(
    ("path", "tokens", "rows"),
    [
        ({}, 7, 7),
        ({"spatial_merge_size": 2}, 7, 28),
        ({"spatial_merge_size": 3}, 2, 18),
        ({"tokens_per_row": 6}, 48, 8),
        ({"tokens_per_row": 6}, 47, 7),
        ({"tokens_per_row": 6}, 5, 0),
    ],
)
def test_rows_of_a_budget(path: dict[str, Any], tokens: int, rows: int) -> None:
    """A token is merge^2 patches, a tile is so many tokens, and a tile that fits in part is left out."""
    assert TablePath(buffers={}, **path).rows(tokens) == rows


def test_inputs_of_a_modality() -> None:
    """Data and sizes together: what a request has to have."""
    assert Modality(data={"a": "pixels", "b": "tiles"}, per_item=("grids", "crops")).names == (
        "pixels",
        "tiles",
        "grids",
        "crops",
    )


def test_one_path_has_the_default_name() -> None:
    """A tower with one path need not name it."""
    assert single_path(buffers={}, spatial_merge_size=2) == {DEFAULT_PATH: TablePath(buffers={}, spatial_merge_size=2)}


def test_an_item_is_what_its_only_path_gives() -> None:
    """Without an `assemble` of its own a table hands on the tokens of the only path, without a copy."""
    tokens = torch.ones(3, 8)
    assert packed_table().assemble((1, 2, 6), {DEFAULT_PATH: tokens}) is tokens


@pytest.mark.parametrize("call", ["item_keys", "item_size", "forward"])
def test_what_an_adapter_has_to_write(call: str) -> None:
    """Keys, sizes and the forward have no default; metadata has none to give."""
    bare = EncoderTable(modalities={}, paths={}, out_hidden_size=8, token_range=(1, 2))
    arguments = {"item_keys": ("image", {}), "item_size": (1,), "forward": ("main", {})}[call]
    with pytest.raises(NotImplementedError):
        getattr(bare, call)(*arguments)
    assert bare.item_metadata(1, "main") == {}


# --- tables ----------------------------------------------------------------------------------------------------------


def test_the_declaration_of_a_packed_table() -> None:
    """Names, sizes and modalities go through; segments are an axis with the tight numbers and 0 for all."""
    found = encoder(packed_table()).get_encoder_cudagraph_config()
    assert found.modalities == ("image", "video")
    assert found.buffer_keys == found.path_buffer_keys(DEFAULT_PATH) == ("pixels", "positions", "cu_seqlens")
    assert (found.out_hidden_size, found.max_frames_per_video, found.refusal) == (8, 4, None)
    assert found.capture_axes == ((64, 0),)
    assert encoder(packed_table()).get_encoder_cudagraph_budget_range() == (4, 64)


def test_the_declaration_of_two_paths() -> None:
    """Every path has its own buffers, minimum and permission to be empty; without boundaries there is no axis."""
    found = encoder(tiled_table()).get_encoder_cudagraph_config()
    assert list(found.paths) == ["global", "local"]
    assert found.buffer_keys == ("thumbnails", "tiles")
    assert found.path_buffer_keys("local") == ("tiles",)
    assert [(path.min_token_budget, path.allow_zero_tokens) for path in found.paths.values()] == [(None, False), (4, True)]
    assert found.capture_axes == ()
    assert found.axis_keys_of_frames is None


@pytest.mark.parametrize(
    ("capacities", "axes"), [((), ()), ((4, 1, 4), ((1, 4, 0),)), ((2,), ((2, 0),))], ids=["none", "unsorted", "one"]
)
def test_the_segment_axis(capacities: tuple[int, ...], axes: tuple[Any, ...]) -> None:
    """Sorted, each number once; none where none are declared."""
    assert encoder(packed_table(segment_capacities=capacities)).get_encoder_cudagraph_config().capture_axes == axes


def test_a_refusal_goes_through() -> None:
    """A table that says why it cannot be served is not served."""
    assert encoder(packed_table(refusal="prunes tokens")).get_encoder_cudagraph_config().refusal == "prunes tokens"


def changed(**fields: Any) -> Callable[[], EncoderTable]:
    """The packed table with other fields."""

    def make() -> EncoderTable:
        table = packed_table()
        for name, value in fields.items():
            setattr(table, name, value)
        return table

    return make


def changed_buffers(**buffers: Buffer) -> Callable[[], EncoderTable]:
    """The packed table with other buffers."""
    (path,) = packed_table().paths.values()
    return changed(paths={DEFAULT_PATH: dataclasses.replace(path, buffers={**path.buffers, **buffers})})


def half_of_the_data() -> EncoderTable:
    """A second data buffer, which clips do not fill."""
    table = changed_buffers(depth=Buffer(role=Role.ROWS))()
    image = table.modalities["image"]
    more = Modality(data={**image.data, "depth": "depth_values"}, per_item=image.per_item)
    table.modalities = {**table.modalities, "image": more}
    return table


def lonely_path() -> EncoderTable:
    """Two paths, and no input for the second."""
    table = tiled_table()
    table.modalities = {"image": Modality(data={"thumbnails": "pixel_values"}, per_item=("crops",))}
    return table


def boundaries(**fields: Any) -> Buffer:
    """A boundary buffer."""
    return Buffer(role=Role.BOUNDARIES, dtype=torch.int32, **fields)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (changed(modalities={}), "has no buffer that a modality fills"),
        (
            changed(modalities={"image": Modality(data={"patches": "pixel_values"})}),
            r"\['patches'\] of the modalities are no buf",
        ),
        (half_of_the_data, "video fills some data buffers of path 'main' but not depth"),
        (lonely_path, "path 'local' has no buffer that a modality fills"),
        (changed(paths={}), "declares no path"),
        (changed(out_hidden_size=0), "out_hidden_size=0"),
        (changed(max_frames_per_video=-1), "max_frames_per_video=-1"),
        (changed(segment_capacities=(0, 4)), r"segment_capacities=\(0, 4\): expected positive"),
        (changed(segment_capacities=(-1,)), "segment_capacities"),
        (changed_buffers(windows=boundaries(bound="max_seqlen")), "'max_seqlen' twice among its buffers and bounds"),
        (changed_buffers(windows=boundaries(bound="pixels")), "'pixels' twice"),
    ],
)
def test_wrong_tables_are_refused(make: Callable[[], EncoderTable], words: str) -> None:
    """No modality, a buffer that is not there, a path without data or with half of it, sizes and names that mean nothing."""
    with pytest.raises(ProtocolError, match=words):
        encoder(make()).get_encoder_cudagraph_config()


@pytest.mark.parametrize("role", [Role.INDEX, Role.PER_SEGMENT, Role.BOUNDARIES])
def test_data_is_rows(role: Role) -> None:
    """A buffer that a modality fills has an entry per row: others are refused when they are allocated."""
    made = encoder(changed_buffers(pixels=Buffer(role=role, shape=(6,) if role is Role.PER_SEGMENT else (), dtype=INT))())
    with pytest.raises(ProtocolError, match="pixels holds data of the request, so it must be a ROWS buffer"):
        made.prepare_encoder_cudagraph_capture_inputs(4, 1, 0, made.device, made.dtype, DEFAULT_PATH, (0,))


def test_data_has_an_entry_for_every_row() -> None:
    """Data of merged rows is refused too."""
    made = encoder(changed_buffers(pixels=Buffer(role=Role.ROWS, shape=(6,), rows_per_entry=4))())
    with pytest.raises(ProtocolError, match="an entry per row"):
        made.prepare_encoder_cudagraph_capture_inputs(4, 1, 0, made.device, made.dtype, DEFAULT_PATH, (0,))


@pytest.mark.parametrize("token_range", [(0, 4), (8, 4)])
def test_a_wrong_range_is_refused(token_range: tuple[int, int]) -> None:
    """A range that is not positive or is inverted is an error where ladders are made."""
    made = encoder(packed_table(token_range=token_range))
    with pytest.raises(BudgetError):
        resolve(EncoderConfig(), made.get_encoder_cudagraph_config(), made.get_encoder_cudagraph_budget_range())


def test_modules_are_the_attributes_of_the_table() -> None:
    """Their weights are the ones that are watched."""
    tower = PackedTower().eval()
    assert encoder(PackedTable(tower)).encoder_modules() == [tower]
    tiled = TiledTower().eval()
    assert encoder(TiledTable(tiled)).encoder_modules() == [tiled]


def test_tables_are_declared_without_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making a protocol object and asking for its declaration allocates no buffer."""
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: pytest.fail("a buffer was allocated"))
    for table in (packed_table(), tiled_table(), twin_table()):
        assert isinstance(encoder(table).get_encoder_cudagraph_config(), EncoderCudaGraphConfig)
