"""Features that are handed out lie in memory of their own, whatever they were views of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vit_compile._torch_compat import DispatchMode
from vit_compile.backend.cuda import part_of
from vit_compile.runtime.outputs import owned


def numbered(rows: int, width: int = 3, start: int = 0) -> torch.Tensor:
    """[rows, width] of different numbers."""
    return torch.arange(start, start + rows * width, dtype=torch.float32).view(rows, width)


def storage(tensor: torch.Tensor) -> int:
    """Address of the memory behind a tensor; different for tensors that are alive together, unless they share it."""
    return tensor.untyped_storage().data_ptr()


def check_owned(features: Sequence[torch.Tensor], graph_outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Equal values in memory that nobody else uses: overwriting everything else changes none of them."""
    want = [feature.clone() for feature in features]
    got = owned(features, graph_outputs)
    assert len(got) == len(want)
    for have, expected in zip(got, want, strict=True):
        assert torch.equal(have, expected)
        assert have.dtype == expected.dtype
    own = [storage(have) for have in got if have.numel()]
    assert len(set(own)) == len(own), "two features share memory"
    assert not set(own) & {storage(output) for output in graph_outputs if output.numel()}, "a feature lies in a graph's memory"
    for output in graph_outputs:
        output.fill_(-1)
    for number, have in enumerate(got):
        assert torch.equal(have, want[number])
        have.fill_(-2)
        want[number] = have.clone()
    return got


def test_no_features() -> None:
    """Nothing in, nothing out."""
    assert owned([], []) == []
    assert owned([], [numbered(4)]) == []


def test_rows_of_a_graph_output() -> None:
    """Consecutive rows of the output, which may have more behind: the usual batch."""
    output = numbered(9)
    check_owned(output[:7].split([2, 4, 1]), [output])


def test_rows_of_a_graph_output_are_one_kernel() -> None:
    """They are split and copied at once, whatever their number."""

    class Copies(DispatchMode):
        names: ClassVar[list[str]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func not in (torch.ops.aten.as_strided.default,):
                self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    output = numbered(9)
    parts = output.split([2, 4, 3])
    with Copies() as copies:
        owned(parts, [output])
    assert copies.names == ["aten.split_with_sizes_copy.default"]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(0, 3), st.integers(0, 3))
def test_any_split_of_a_graph_output(sizes: list[int], before: int, behind: int) -> None:
    """Whatever the sizes, zero rows among them, and wherever the features begin."""
    output = numbered(before + sum(sizes) + behind)
    check_owned(output[before : before + sum(sizes)].split(sizes), [output])


@pytest.mark.parametrize("order", [[1, 0], [0, 0], [0, 1, 0]])
def test_rows_in_another_order_or_twice(order: list[int]) -> None:
    """Features that are not consecutive rows are copied one by one."""
    output = numbered(5)
    parts = output.split([2, 3])
    check_owned([parts[i] for i in order], [output])


def test_rows_with_a_gap_between() -> None:
    """Rows that nobody wants are not handed out."""
    output = numbered(6)
    check_owned([output[:2], output[3:]], [output])


def test_other_strides() -> None:
    """Columns, transposed and strided views, and other widths."""
    output = numbered(6, 4)
    check_owned([output[:, :2], output[:, 2:]], [output])
    output = numbered(4, 4)
    check_owned([output[:2, :2], output[1:3, :2]], [output])
    output = numbered(4, 4)
    check_owned([output.T[:2], output.T[2:]], [output])
    output = numbered(6, 4)
    check_owned([output[:2], output[2:4].view(4, 2), output[4:]], [output])


def test_other_dimensions() -> None:
    """Features need not be matrices."""
    output = numbered(6)
    check_owned([output[0], output[1]], [output])
    output = numbered(6)
    check_owned([output[:2, None], output[2:4, None]], [output])


def test_another_dtype_of_the_same_memory() -> None:
    """A view of other numbers in the same bytes is no row of the first."""
    output = numbered(4)
    check_owned([output[:2], output[2:].view(torch.int32)], [output])


def test_features_that_share_memory_with_each_other() -> None:
    """Views of one tensor that is no graph's are copied too: the caller may write into each."""
    whole = numbered(6)
    check_owned(whole.split([1, 2, 3]), [])


def test_features_of_their_own_are_not_copied() -> None:
    """What nobody else uses is handed on as it is; its neighbours in graph memory are not."""
    output, own = numbered(4), numbered(2, start=100)
    got = owned([output[:2], own, output[2:]], [output])
    assert got[1] is own
    assert storage(got[0]) != storage(output)
    check_owned([output[:2], own, output[2:]], [output])


def test_one_view_of_the_front() -> None:
    """A single item, which has no neighbour to share with."""
    output = numbered(6)
    (got,) = check_owned([output[:4]], [output])
    assert got.untyped_storage().nbytes() == got.nbytes, "a copy takes no more than its rows"


def test_outputs_of_two_graphs() -> None:
    """Features in the memory of two graphs, as two paths leave them."""
    one, two = numbered(4), numbered(4, start=50)
    check_owned([one[:2], two[:2], one[2:], two[2:]], [one, two])


def test_outputs_that_follow_each_other_by_chance() -> None:
    """Two graphs' outputs in adjacent memory are not one matrix: rows are only taken together within one output."""
    arena = torch.zeros(96, dtype=torch.uint8)
    one, two = part_of(arena, 0, (4, 3), torch.float32), part_of(arena, 48, (4, 3), torch.float32)
    one.copy_(numbered(4))
    two.copy_(numbered(4, start=50))
    assert two.data_ptr() == one.data_ptr() + one.nbytes
    check_owned([one[:2], one[2:], two[:1], two[1:]], [one, two])


def test_outputs_inside_inference_mode() -> None:
    """Also there the features are plain copies."""
    with torch.inference_mode():
        output = numbered(4)
        check_owned(output.split([1, 3]), [output])
