"""Data parallel on CPU processes over Gloo; the cases are in `parallel_workers.py`.

Processes are dear, so each number of ranks is one test that runs every case. One rank runs in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.runtime import parallel_workers
from tests.runtime.parallel_workers import WIDTH, Broken, Ranks
from vit_compile.errors import CaptureError, OptionError, ProtocolError
from vit_compile.runtime import data_parallel
from vit_compile.runtime.data_parallel import DataParallel


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Ranks]:
    """A group of one rank, in this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield Ranks(0, 1, dist.group.WORLD, torch.device("cpu"))
    dist.destroy_process_group()


@pytest.fixture
def no_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any collective fails the test."""
    monkeypatch.setattr(data_parallel, "_all_gather", lambda *args, **group: pytest.fail("a collective was started"))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks(world: int, tmp_path: Path) -> None:
    """Every case of `parallel_workers.TOGETHER` holds for this number of ranks; the error names the case that does not."""
    parallel_workers.start(world, tmp_path)


@pytest.mark.parametrize("case", parallel_workers.ANY_WORLD, ids=lambda case: case.__name__)
@pytest.mark.usefixtures("no_collectives")
def test_one_rank(case: Callable[[Ranks], None], alone: Ranks) -> None:
    """A group of one rank gives the same results without any collective."""
    case(alone)


@pytest.mark.usefixtures("no_collectives")
def test_one_rank_fails_like_any_other(alone: Ranks) -> None:
    """Its own error comes out as it is, wrong features are an error, and the next call works."""

    def broken(indices: Sequence[int]) -> list[torch.Tensor]:
        raise Broken("no encoder")

    parallel = alone.parallel()
    with pytest.raises(Broken, match="no encoder"):
        parallel.execute([1], broken)
    with pytest.raises(ProtocolError, match="0 tensors for 1 items"):
        parallel.execute([1], lambda indices: [])
    alone.check(parallel, [1])


@pytest.mark.usefixtures("no_collectives")
def test_one_rank_has_nobody_to_tell(alone: Ranks) -> None:
    """No items are answered without asking the encoder, and a failure is reported to nobody."""
    parallel = alone.parallel()
    assert parallel.execute([], lambda indices: pytest.fail("the encoder ran")) == []
    parallel.report_failure()
    alone.check(parallel, [1])


@pytest.mark.usefixtures("no_collectives")
def test_the_constructor_touches_neither_group_nor_device(alone: Ranks) -> None:
    """It starts no collective, and takes a GPU that is not there."""
    parallel = DataParallel(alone.group, device=torch.device("cuda", 99), dtype=torch.bfloat16, width=WIDTH)
    assert (parallel.rank, parallel.size) == (0, 1)


@pytest.mark.parametrize("width", [0, -1])
def test_width_is_positive(width: int, alone: Ranks) -> None:
    """Features without values cannot be exchanged: an error that shows the width."""
    with pytest.raises(OptionError, match=f"width={width}"):
        alone.parallel(width=width)


def test_not_inside_a_capture(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a graph is captured nothing runs: a captured collective hangs when the group goes (hazard 24)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(CaptureError, match="collectives stay outside"):
        alone.parallel().execute([1], lambda indices: pytest.fail("the encoder ran"))


@pytest.mark.parametrize(
    ("backends", "device", "host_route", "feature_route"),
    [
        ("cpu:gloo,cuda:gloo", "cpu", "cpu", "cpu"),
        ("cpu:gloo,cuda:nccl", "cpu", "cpu", "cpu"),
        ("cpu:gloo,cuda:nccl", "cuda:1", "cpu", "cuda:1"),
        ("cuda:nccl", "cuda:1", "cuda:1", "cuda:1"),
        ("cuda:nccl", "cuda", "cuda", "cuda"),
        ("cpu:gloo,cuda:gloo", "cuda:1", "cpu", "cpu"),
        ("cpu:gloo", "cuda:1", "cpu", "cpu"),
        ("cpu:mpi,cuda:mpi", "cuda:1", "cpu", "cuda:1"),
    ],
)
def test_routes(backends: str, device: str, host_route: str, feature_route: str) -> None:
    """Numbers go over the CPU where the group can; features stay on their device unless only Gloo could carry them."""
    assert data_parallel._routes(backends, torch.device(device)) == (torch.device(host_route), torch.device(feature_route))


def test_a_group_without_a_backend_for_the_features_is_an_error() -> None:
    """NCCL alone cannot carry features on the CPU: the error names the backends and the device."""
    with pytest.raises(OptionError, match=r"'cuda:nccl'.*on cpu"):
        data_parallel._routes("cuda:nccl", torch.device("cpu"))
