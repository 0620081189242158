"""The lint for forwards: each fault in a toy that has it and nothing else, and none where there is none."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime import toys
from vit_compile.backend.roles import Role
from vit_compile.errors import MissingDependencyError
from vit_compile.runtime import host_reads
from vit_compile.runtime.host_reads import HostRead, find_host_reads
from vit_compile.runtime.item_spec import DEFAULT_PATH
from vit_compile.runtime.table import Buffer, EncoderTable, Modality, single_path

built_with_cuda = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="fake CUDA tensors need a build of torch with CUDA (a GPU they do not)"
)

Body = Callable[["Faulty", torch.Tensor, torch.Tensor], Any]


class Layer(nn.Linear):
    """Of a class of this file, where `_cached_ramp` is."""


class Faulty(EncoderTable):
    """Rows through a layer, and then whatever `body(table, features, cu_seqlens)` does with them."""

    def __init__(self, body: Body) -> None:
        self.body, self.tower = body, nn.Sequential(Layer(4, 8), nn.BatchNorm1d(8)).eval()
        self.shift = torch.ones(8)
        self.tower.plain = torch.arange(6)
        self.runs = 0
        super().__init__(
            modalities={"image": Modality(data={"rows": "pixel_values"}, per_item=("sizes",))},
            paths=single_path(
                buffers={
                    "rows": Buffer(role=Role.ROWS, shape=(4,)),
                    "cu_seqlens": Buffer(role=Role.BOUNDARIES, dtype=torch.int32, bound="max_seqlen"),
                }
            ),
            out_hidden_size=8,
            token_range=(6, 12),
        )

    def forward(self, path: str, values: Mapping[str, Any]) -> torch.Tensor:
        self.runs += 1
        features = self.tower(values["rows"]) + self.shift
        self.body(self, features, values["cu_seqlens"])
        return features


def once(table: Faulty, features: torch.Tensor, cu: torch.Tensor) -> None:
    """A table on the device that the first run makes and keeps."""
    if not hasattr(table.tower, "kept"):
        table.tower.kept = torch.tensor([1.0, 2.0], device=features.device)


@functools.lru_cache
def _cached_ramp(length: int, device: torch.device) -> torch.Tensor:
    return torch.arange(length, device=device)


_kept = torch.arange(6)

# name -> (operation, reason, how many places)
FAULTS: dict[str, tuple[Body, str, str]] = {
    "item": (lambda t, x, cu: cu[-1].item(), "_local_scalar_dense", host_reads.READ),
    "tolist": (lambda t, x, cu: x.split(cu.tolist()), "_local_scalar_dense", host_reads.READ),
    "if": (lambda t, x, cu: x * 2 if (x > 0).any() else x, "_local_scalar_dense", host_reads.READ),
    "equal": (lambda t, x, cu: torch.equal(x, x), "equal", host_reads.READ),
    "range": (lambda t, x, cu: torch.arange(cu[1], device=x.device), "_local_scalar_dense", host_reads.READ),
    "mask selects": (lambda t, x, cu: x[x[:, 0] > 0], "index", host_reads.SIZED_BY_DATA),
    "mask assigns": (lambda t, x, cu: x.index_put_((x[:, 0] > 0,), x[:2]), "index_put_", host_reads.SIZED_BY_DATA),
    "nonzero": (lambda t, x, cu: x.nonzero(), "nonzero", host_reads.SIZED_BY_DATA),
    "masked_select": (lambda t, x, cu: x.masked_select(x > 0), "masked_select", host_reads.SIZED_BY_DATA),
    "unique": (lambda t, x, cu: cu.unique_consecutive(), "unique_consecutive", host_reads.SIZED_BY_DATA),
    "repeat": (lambda t, x, cu: cu.repeat_interleave(cu.long()), "repeat_interleave", host_reads.SIZED_BY_DATA),
    "new tensor": (lambda t, x, cu: torch.tensor([1, 2], device=x.device), "_to_copy", host_reads.TO_DEVICE),
    "new number": (lambda t, x, cu: torch.tensor(1.0, device=x.device), "_to_copy", host_reads.TO_DEVICE),
    "list as index": (lambda t, x, cu: x[[0, 1]], "_to_copy", host_reads.TO_DEVICE),
    "to": (lambda t, x, cu: torch.arange(3).to(x.device), "_to_copy", host_reads.TO_DEVICE),
    "copy_": (lambda t, x, cu: x.copy_(torch.zeros(8)), "copy_", host_reads.TO_DEVICE),
    "cpu": (lambda t, x, cu: x.cpu(), "_to_copy", host_reads.TO_HOST),
    "copy_ to the host": (lambda t, x, cu: torch.zeros(1, 8).copy_(x[:1]), "copy_", host_reads.TO_HOST),
    "index on the host": (lambda t, x, cu: x[torch.arange(3)], "index", host_reads.MIXED),
    "sum with the host": (lambda t, x, cu: x + torch.zeros(8), "add", host_reads.MIXED),
    "plain attribute": (lambda t, x, cu: x[t.tower.plain], "index", host_reads.MIXED),
    "computed on the host": (lambda t, x, cu: torch.arange(3).sum().item(), "_local_scalar_dense", host_reads.ON_HOST),
}

RIGHT: dict[str, Body] = {
    "arithmetic": lambda t, x, cu: (x * 2 + cu[-1]).softmax(-1),
    "a number of the host": lambda t, x, cu: x * torch.tensor(2.0) + torch.tensor(3).item(),
    "assigned number": lambda t, x, cu: x.__setitem__(0, 1.0),
    "masked number": lambda t, x, cu: x.__setitem__(x[:, 0] > 0, 1.0),
    "where": lambda t, x, cu: torch.where(x > 0, x, torch.full((), 0.0, device=x.device)),
    "index on the device": lambda t, x, cu: x[cu.long()] + x[torch.arange(3, device=x.device)].sum(),
    "repeats of known size": lambda t, x, cu: x.repeat_interleave(2, 0) + cu.repeat_interleave(cu.long(), output_size=4).sum(),
    "one-hot": lambda t, x, cu: nn.functional.one_hot(cu.long(), 9),
    "search": lambda t, x, cu: torch.searchsorted(cu, cu, right=True),
    "attention": lambda t, x, cu: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    "only the first run": once,
    "kept by the adapter": lambda t, x, cu: x[_kept] + torch.cat([x[0], _kept])[:6].sum(),
    "cached": lambda t, x, cu: x + _cached_ramp(8, x.device),
}


@built_with_cuda
@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found(name: str) -> None:
    """Once, with the operation, the reason, and the line in this file."""
    body, operation, why = FAULTS[name]
    (found,) = find_host_reads(Faulty(body))
    assert (found.path, found.op.split(".")[1], found.why) == (DEFAULT_PATH, operation, why)
    assert found.where == f"{__file__}:{inspect.getsourcelines(body)[1]}"
    assert str(found) == f"{found.where}: {found.op} {why} (path 'main')"


@built_with_cuda
@pytest.mark.parametrize("name", RIGHT)
def test_what_a_capture_can_hold_is_not_found(name: str) -> None:
    """Neither what reads nothing, nor what only a warm-up run does."""
    assert find_host_reads(Faulty(RIGHT[name])) == []


@built_with_cuda
def test_several_faults_in_their_order() -> None:
    """A value that is read is made up, so what is behind it is found too; each place once, however often it is reached."""

    def body(table: Faulty, features: torch.Tensor, cu: torch.Tensor) -> None:
        for _ in range(3):
            number = cu[-1].item()
        features.cpu()
        features[features[:, 0] > number]
        cu.nonzero()

    found = find_host_reads(Faulty(body))
    assert [read.why for read in found] == [host_reads.READ, host_reads.TO_HOST, host_reads.SIZED_BY_DATA]
    lines = [int(read.where.rsplit(":", 1)[1]) for read in found]
    assert lines == sorted(set(lines))


@built_with_cuda
@pytest.mark.parametrize("table", [toys.packed_table, toys.tiled_table, toys.twin_table])
def test_toys_are_right(table: Callable[[], EncoderTable]) -> None:
    """Packed, two paths, every role of buffer."""
    assert find_host_reads(table()) == []


@built_with_cuda
def test_every_path_is_run() -> None:
    """A fault on the second path is found there; a contract that is written out is taken as well as a table."""
    table = toys.tiled_table()
    names, forward = list(table.paths), table.forward

    def faulty(path: str, values: Mapping[str, Any]) -> torch.Tensor:
        features = forward(path, values)
        return features * features.sum().item() if path == names[1] else features

    table.forward = faulty  # type: ignore[method-assign]
    assert [read.path for read in find_host_reads(table)] == [names[1]]
    assert find_host_reads(toys.HandWritten()) == []


@built_with_cuda
def test_the_model_is_as_before() -> None:
    """Weights, buffers, attributes, caches and the adapter's own tensors are the same objects afterwards, and it still runs."""

    def body(table: Faulty, features: torch.Tensor, cu: torch.Tensor) -> None:
        once(table, features, cu)
        _cached_ramp(3, features.device)
        table.tower.plain, table.tower.more = features, features
        features.cpu()

    table = Faulty(body)
    before = {name: id(tensor) for name, tensor in (*table.tower.named_parameters(), *table.tower.named_buffers())}
    attributes, shift = {name: id(value) for name, value in vars(table.tower).items()}, table.shift
    assert len(find_host_reads(table)) == 1
    assert {n: id(t) for n, t in (*table.tower.named_parameters(), *table.tower.named_buffers())} == before
    assert {name: id(value) for name, value in vars(table.tower).items()} == attributes
    assert (table.shift is shift, table.runs, _cached_ramp.cache_info().currsize) == (True, 2, 0)
    values = {"rows": torch.zeros(6, 4), "cu_seqlens": torch.tensor([0, 6], dtype=torch.int32), "max_seqlen": 6}
    assert type(table.forward("main", values)) is torch.Tensor


@built_with_cuda
def test_other_errors_are_not_hidden() -> None:
    """A forward that fails without a finding raises what it raises, and the model is put back."""

    def body(table: Faulty, features: torch.Tensor, cu: torch.Tensor) -> None:
        raise ZeroDivisionError("of the forward")

    table = Faulty(body)
    weight = table.tower[0].weight
    with pytest.raises(ZeroDivisionError, match="of the forward"):
        find_host_reads(table)
    assert table.tower[0].weight is weight
    assert weight.is_cpu


@built_with_cuda
def test_dtype_and_budget() -> None:
    """Buffers have the encoder's dtype, and the rows of the budget that is asked for; weights keep their own dtype."""
    seen: list[tuple[Any, ...]] = []

    def body(table: Faulty, features: torch.Tensor, cu: torch.Tensor) -> None:
        seen.append((len(features), features.dtype, features.device.type))

    table = Faulty(body)
    table.tower.bfloat16()
    table.shift = table.shift.bfloat16()
    find_host_reads(table)
    find_host_reads(table, dtype=torch.bfloat16, token_budget=9)
    assert seen == [(6, torch.bfloat16, "cuda")] * 2 + [(9, torch.bfloat16, "cuda")] * 2


def test_builds_without_cuda_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason and the way on, instead of an error from inside torch."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(MissingDependencyError, match="build of torch with CUDA"):
        find_host_reads(toys.packed_table())


def test_findings_are_values() -> None:
    """Equal where everything about them is, so that a list of known ones can be kept."""
    assert HostRead("main", "aten.equal.default", host_reads.READ, "a.py:1") == HostRead(
        "main", "aten.equal.default", host_reads.READ, "a.py:1"
    )
