"""Sizes are read from whatever holds integers, and a request that cannot be encoded is refused with its name and value."""

from __future__ import annotations

import itertools
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vit_compile.errors import GridError, InputError
from vit_compile.runtime.inputs import check_request, check_rows, host_grids, host_rows, lossless, same_device

CPU, META = torch.device("cpu"), torch.device("meta")
ROWS = [(1, 2, 3), (4, 5, 6)]

# --- tables of integers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        [[1, 2, 3], [4, 5, 6]],
        ((1, 2, 3), [4, 5, 6]),
        np.array(ROWS),
        np.array(ROWS, dtype=np.uint8),
        [np.array([1, 2, 3]), torch.tensor([4, 5, 6])],
        [[np.int64(1), torch.tensor(2), 3], (4, 5, 6)],
        torch.tensor(ROWS),
        torch.tensor(ROWS, dtype=torch.int32),
        torch.tensor([[1, 4], [2, 5], [3, 6]]).T,
        iter(ROWS),
    ],
    ids=lambda value: type(value).__name__,
)
def test_anything_that_holds_integers_is_read(value: Any) -> None:
    """Lists, arrays, tensors and mixtures of them give the same tuples of plain ints."""
    found = host_rows("grids", value, 3)
    assert found == ROWS
    assert all(type(row) is tuple and all(type(number) is int for number in row) for row in found)


@pytest.mark.parametrize("value", [[], (), np.zeros((0, 3), dtype=int), torch.zeros(0, 3, dtype=torch.int64)])
def test_no_rows_are_a_table_too(value: Any) -> None:
    """An empty table is empty, not an error."""
    assert host_rows("grids", value, 3) == []


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, r"grids=None: expected rows of 3 integers"),
        (7, r"grids=7: expected rows"),
        (torch.tensor(7), "expected rows"),
        ("123", "expected rows"),
        (b"123", "expected rows"),
        ({(1, 2, 3): 0}, "expected rows"),
        ([1, 2, 3], "row 0 of grids is 1: expected 3 integers"),
        (torch.tensor([1, 2, 3]), "row 0 of grids is 1"),
        ([(1, 2, 3), (4, 5)], r"row 1 of grids is \(4, 5\): expected 3 integers, not 2"),
        ([(1, 2, 3, 4)], "not 4"),
        ([(1, 2, 3.0)], r"row 0 of grids is \(1, 2, 3.0\): expected 3 integers"),
        (torch.tensor([[1.0, 2.0, 3.0]]), "expected 3 integers"),
        (np.array([[1.5, 2.0, 3.0]]), "expected 3 integers"),
        ([(1, 2, None)], "expected 3 integers"),
        (["123"], "row 0 of grids is '123'"),
        ([None], "row 0 of grids is None"),
        ([[[1, 2, 3]]], "expected 3 integers"),
    ],
)
def test_no_table_is_refused(value: Any, words: str) -> None:
    """What is no table of integers is an error that names the input, the row and its value; floats are not rounded."""
    with pytest.raises(InputError, match=words):
        host_rows("grids", value, 3)


@given(st.integers(1, 4).flatmap(lambda w: st.tuples(st.just(w), st.lists(st.tuples(*[st.integers(-(2**40), 2**40)] * w)))))
def test_numbers_survive(drawn: tuple[int, list[tuple[int, ...]]]) -> None:
    """Any integers of any width come back as they are, from a list and from a tensor."""
    width, rows = drawn
    assert host_rows("x", rows, width) == rows
    assert host_rows("x", torch.tensor(rows, dtype=torch.int64).view(-1, width), width) == rows


# --- grids -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("merge", [1, 2, 3])
def test_grids_are_what_merges_evenly(merge: int) -> None:
    """Of all small grids exactly those are taken whose sides are positive, and height and width multiples of the merge size."""
    for grid in itertools.product(range(-1, 8), repeat=3):
        t, h, w = grid
        fine = t in range(1, 99) and h in range(merge, 99, merge) and w in range(merge, 99, merge)
        if fine:
            assert host_grids("grids", [grid], spatial_merge_size=merge) == [grid]
        else:
            with pytest.raises(GridError, match=r"grid 0 of grids is \("):
                host_grids("grids", [grid], spatial_merge_size=merge)


def test_bad_grids_are_named() -> None:
    """The error has the number of the grid, its value, and what to do."""
    with pytest.raises(GridError, match=r"grid 1 of image_grid_thw is \(1, 0, 4\): t, h and w must be at least 1 patch"):
        host_grids("image_grid_thw", [(1, 4, 4), (1, 0, 4)])
    with pytest.raises(GridError, match=r"grid 0 of g is \(1, 4, 6\).*multiples of the merge size 4; resize the image"):
        host_grids("g", [(1, 4, 6)], spatial_merge_size=4)
    with pytest.raises(InputError, match="expected 3 integers, not 2"):
        host_grids("g", [(4, 6)])


# --- requests --------------------------------------------------------------------------------------------------------

MODALITIES = {"image": ("pixels", "grids"), "video": ("clips", "clip_grids", "fps"), "audio": ("waves",)}


def test_modalities_of_every_request() -> None:
    """Of all sets of inputs exactly those are taken in which every modality is whole; they come in the declared order."""
    names = [name for names in MODALITIES.values() for name in names]
    for given_names in itertools.chain.from_iterable(itertools.combinations(reversed(names), n) for n in range(len(names) + 1)):
        request = dict.fromkeys(given_names, 0)
        whole = [modality for modality, needed in MODALITIES.items() if set(needed) <= request.keys()]
        if request.keys() == {name for modality in whole for name in MODALITIES[modality]}:
            assert check_request(request, MODALITIES) == whole
        else:
            with pytest.raises(InputError, match=" without "):
                check_request(request, MODALITIES)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ([("pixels", 1)], "the request is list: expected a dict"),
        (None, "the request is NoneType"),
        ({"pixels": 1, "grids": 2, "pixel": 3}, r"unknown input 'pixel'. This model encodes image: pixels, grids; video: clips"),
        ({"pixels": None, "grids": 2}, "pixels is None: leave it out"),
        ({"clips": 1, "fps": 3}, "clips, fps without clip_grids: video needs clips, clip_grids, fps"),
    ],
)
def test_bad_requests_are_named(request_: Any, words: str) -> None:
    """A request that is no dict, has an unknown or empty input, or half a modality, is an error that says what there is."""
    with pytest.raises(InputError, match=words):
        check_request(request_, MODALITIES)


def test_any_mapping_is_a_request() -> None:
    """Also one that is no dict, such as the output of a processor."""
    assert check_request(MappingProxyType({"waves": 0}), MODALITIES) == ["audio"]


# --- data ------------------------------------------------------------------------------------------------------------


def check(value: Any, *, rows: int = 5, shape: tuple[int, ...] = (3, 2), dtype: torch.dtype = torch.float32) -> None:
    """`check_rows` for an encoder on the CPU."""
    check_rows("pixels", value, rows=rows, shape=shape, dtype=dtype, device=CPU)


def test_data_that_fits_is_taken() -> None:
    """The right rows and shape in a dtype that loses nothing; strides do not matter, and neither do zero rows."""
    check(torch.zeros(5, 3, 2))
    check(torch.zeros(5, 3, 2, dtype=torch.bfloat16))
    check(torch.zeros(5, 3, 2, dtype=torch.uint8))
    check(torch.zeros(2, 3, 5).transpose(0, 2))
    check(torch.zeros(0, 3, 2), rows=0)
    check(torch.zeros(5), shape=())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([[0.0]], r"pixels is list: expected a tensor \[5, 3, 2\]"),
        (np.zeros((5, 3, 2)), "pixels is ndarray"),
        (torch.zeros(5, 3), r"pixels is \[5, 3\]: expected \[5, 3, 2\]"),
        (torch.zeros(5, 2, 3), r"pixels is \[5, 2, 3\]"),
        (torch.zeros(5, 3, 2, 1), r"pixels is \[5, 3, 2, 1\]"),
        (torch.zeros(()), r"pixels is \[\]"),
        (torch.zeros(4, 3, 2), "pixels has 4 rows, but the sizes of its items add up to 5"),
        (torch.zeros(6, 3, 2), "pixels has 6 rows"),
        (
            torch.zeros(5, 3, 2, dtype=torch.float64),
            r"torch.float64 and the encoder works in torch.float32.*\.to\(torch.float32\)",
        ),
        (torch.zeros(5, 3, 2, dtype=torch.int64), "loses precision"),
        (torch.zeros(5, 3, 2, device="meta"), "pixels is on meta and the encoder on cpu"),
    ],
)
def test_data_that_does_not_fit_is_refused(value: Any, words: str) -> None:
    """No tensor, another shape, other rows than the sizes say, a dtype that loses precision, another device: all named."""
    with pytest.raises(InputError, match=words):
        check(value)


def test_a_scalar_is_no_row() -> None:
    """A tensor without dimensions is refused also where a row has none."""
    with pytest.raises(InputError, match=r"pixels is \[\]"):
        check(torch.zeros(()), rows=1, shape=())


def test_host_data_is_fine_for_any_device() -> None:
    """The encoder may be elsewhere: data from the host is copied."""
    check_rows("pixels", torch.zeros(1), rows=1, shape=(), dtype=torch.float32, device=META)


# --- devices and dtypes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("cpu", "cpu", True),
        ("cpu", "cpu:0", True),
        ("cpu", "meta", False),
        ("cuda:1", "cuda:1", True),
        ("cuda:0", "cuda:1", False),
        ("cuda", "cuda:1", True),
        ("cuda", "cuda:0", False),
        ("cuda", "cuda", True),
        ("cuda:0", "cpu", False),
    ],
)
def test_a_device_without_an_index_is_the_current_one(one: str, other: str, same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where GPU 1 is the current one, "cuda" is "cuda:1"; either way round."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert same_device(torch.device(one), torch.device(other)) is same
    assert same_device(torch.device(other), torch.device(one)) is same


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """All bit patterns of a dtype of one or two bytes."""
    if dtype == torch.bool:
        return torch.tensor([False, True])
    if dtype.itemsize == 1:
        return torch.arange(256).to(torch.uint8).view(dtype)
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


def survives(source: torch.dtype, target: torch.dtype) -> bool:
    """Does every value of `source` come back equal from `target`? Compared as float64, which holds all of them."""
    values = every_value(source)
    there = values.to(target)
    if target == torch.bool:
        there = there.to(torch.uint8)
    return torch.equal(values.to(torch.float64).nan_to_num(1e300), there.to(torch.float64).nan_to_num(1e300))


SMALL = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]
# Without float8_e5m2fnuz, whose precision torch.finfo overstates.
TARGETS = [*SMALL[:-1], torch.int32, torch.int64, torch.float32, torch.float64]


@pytest.mark.parametrize("source", SMALL, ids=str)
def test_lossless_is_what_a_round_trip_over_all_values_says(source: torch.dtype) -> None:
    """For all values of every dtype of one or two bytes, infinities and NaN included, into every common dtype."""
    for target in TARGETS:
        assert lossless(source, target) == survives(source, target), f"{source} -> {target}"


@pytest.mark.parametrize(
    ("source", "target", "fine"),
    [
        (torch.int32, torch.float32, False),
        (torch.int32, torch.float64, True),
        (torch.int64, torch.float64, False),
        (torch.int32, torch.int64, True),
        (torch.int64, torch.int32, False),
        (torch.float32, torch.float64, True),
        (torch.float64, torch.float32, False),
        (torch.float32, torch.bfloat16, False),
        (torch.float32, torch.int64, False),
        (torch.complex64, torch.float32, False),
        (torch.complex64, torch.complex64, True),
    ],
)
def test_lossless_of_wide_dtypes(source: torch.dtype, target: torch.dtype, fine: bool) -> None:
    """Integers fit a float with as many digits, floats a wider float and no integer; complex numbers only themselves."""
    assert lossless(source, target) is fine
