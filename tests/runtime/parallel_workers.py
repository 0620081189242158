"""What the ranks of a data-parallel group do in tests: one process runs every case, since starting one takes long.

A case is a function of `Ranks` that all ranks run in step, for any number of ranks, and that asserts on each. `start`
runs them; the first failed case ends it with the case's name. CPU and GPU tests share both.

Shapes: T tokens, W width.
"""

from __future__ import annotations

import gc
import multiprocessing
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from tests.runtime import toys
from vit_compile.errors import OptionError, ParallelError, ProtocolError, VitCompileError
from vit_compile.planning.balance import longest_first
from vit_compile.runtime import data_parallel
from vit_compile.runtime.config import EncoderConfig
from vit_compile.runtime.data_parallel import DataParallel
from vit_compile.runtime.manager import EncoderCudaGraphManager

WIDTH = 5
DTYPES = (torch.float32, torch.bfloat16)
TIMEOUT = timedelta(seconds=60)
"""Of the group: a rank that is left waiting fails its test."""


@dataclass(frozen=True)
class Ranks:
    """One rank's view of the group."""

    rank: int
    world: int
    group: dist.ProcessGroup
    device: torch.device

    def parallel(self, dtype: torch.dtype = torch.float32, width: int = WIDTH) -> DataParallel:
        return DataParallel(self.group, device=self.device, dtype=dtype, width=width)

    def features(self, index: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """What an encoder would make of an item [T, W]: every third item has no tokens, the others 3 * size + 1."""
        tokens = 0 if index % 3 == 2 else 3 * size + 1
        values = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(1000 * index + size))
        values[:1, 1], values[:1, 2] = float("nan"), -0.0
        return values.to(self.device, dtype)

    def local(self, sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> Callable[[Sequence[int]], list[torch.Tensor]]:
        """A `run_local` that encodes the given items of a request."""
        return lambda indices: [self.features(index, sizes[index], dtype) for index in indices]

    def check(self, parallel: DataParallel, sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        """Run a request; each item must have the bits that this rank computes for it alone."""
        result = parallel.execute(sizes, self.local(sizes, dtype))
        assert_same_bits(result, [self.features(index, size, dtype) for index, size in enumerate(sizes)])
        return result


class Broken(Exception):
    """What a failing encoder raises."""


def assert_same_bits(result: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Equal in number, kind, shape and every bit, NaN and the sign of zero included."""
    assert len(result) == len(expected)
    for got, want in zip(result, expected, strict=True):
        assert (got.shape, got.dtype, got.device) == (want.shape, want.dtype, want.device)
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@contextmanager
def counted_collectives() -> Iterator[list[tuple[int, ...]]]:
    """Shapes that this rank sends."""
    sent: list[tuple[int, ...]] = []
    real = data_parallel._all_gather

    def noting(received: torch.Tensor, tensor: torch.Tensor, **group: object) -> None:
        sent.append(tuple(tensor.shape))
        real(received, tensor, **group)

    with mock.patch.object(data_parallel, "_all_gather", noting):
        yield sent


# --- cases: what every rank gets ---------------------------------------------------------------------------------------


def equals_plain_computation(ranks: Ranks) -> None:
    """0 to 7 items: every rank has every item's bits in the order of the request, though its encoder saw its own share."""
    for dtype in DTYPES:
        parallel = ranks.parallel(dtype)
        for count in range(8):
            sizes = [random.Random(count).randint(1, 20) for _ in range(count)]
            seen: list[list[int]] = []

            def noting(indices: Sequence[int], sizes: list[int] = sizes, seen: list[list[int]] = seen) -> list[torch.Tensor]:
                seen.append(list(indices))
                return ranks.local(sizes, dtype)(indices)  # noqa: B023

            result = parallel.execute(sizes, noting)
            assert_same_bits(result, [ranks.features(index, size, dtype) for index, size in enumerate(sizes)])
            asked = sizes or ranks.world > 1  # a group of one has nobody to tell that there is nothing
            assert seen == ([longest_first(sizes, ranks.world)[ranks.rank]] if asked else [])


def one_item(ranks: Ranks) -> None:
    """With one item the other ranks have none, and get its features (hazard 25)."""
    result = ranks.check(ranks.parallel(), [6])
    assert [len(item) for item in result] == [19]


def input_order(ranks: Ranks) -> None:
    """Ascending sizes are assigned from the last to the first, and come back as they were given (hazard 10)."""
    ranks.check(ranks.parallel(), [1, 2, 3, 4, 5, 6, 7])
    ranks.check(ranks.parallel(), [7, 1, 6, 2, 5, 3, 4])


def kinds_of_integers(ranks: Ranks) -> None:
    """Sizes are compared as numbers: one rank may have NumPy integers and another a tuple of plain ones."""
    sizes: Any = np.array([3, 1, 2]) if ranks.rank == 0 else (3, 1, 2)
    result = ranks.parallel().execute(sizes, ranks.local([3, 1, 2]))
    assert_same_bits(result, [ranks.features(index, size) for index, size in enumerate((3, 1, 2))])


def own_memory(ranks: Ranks) -> None:
    """Each tensor has memory of its own, no more than it needs: writing to one changes no other, now or in later calls."""
    parallel = ranks.parallel()
    sizes = [2, 3, 4, 5, 6]
    wanted = [ranks.features(index, size) for index, size in enumerate(sizes)]
    first, second = ranks.check(parallel, sizes), ranks.check(parallel, sizes)
    for item in first + second:
        assert item.untyped_storage().nbytes() == item.numel() * item.element_size()
    storages = [item.untyped_storage().data_ptr() for item in first + second if len(item)]
    assert len(set(storages)) == len(storages)
    first[0].fill_(7)
    assert_same_bits(first[1:] + second, wanted[1:] + wanted)


def collectives(ranks: Ranks) -> None:
    """One exchange of numbers and one of features; no features where there are no tokens or no items."""
    parallel = ranks.parallel(torch.bfloat16)
    header = (data_parallel._FACTS + data_parallel._SLOTS,)
    with counted_collectives() as sent:
        asked: list[list[int]] = []
        assert parallel.execute([], lambda indices: asked.append(list(indices)) or []) == []  # type: ignore[func-returns-value]
        assert (sent, asked) == ([header], [[]])
        sent.clear()
        sizes = [4, 3]
        parallel.execute(sizes, ranks.local(sizes, torch.bfloat16))
        fullest = max(
            sum(len(ranks.features(index, sizes[index])) for index in share) for share in longest_first(sizes, ranks.world)
        )
        assert sent == [header, (fullest, 2 * WIDTH)]
        sent.clear()
        empty = torch.empty(0, WIDTH, dtype=torch.bfloat16, device=ranks.device)
        assert_same_bits(parallel.execute([5, 5, 5], lambda indices: [empty for _ in indices]), [empty] * 3)
        assert sent == [header]


def many_items(ranks: Ranks) -> None:
    """More items than a header has room for: their lengths travel in a second exchange, and nothing else changes."""
    fits = ranks.world * data_parallel._SLOTS
    for count, exchanges in ((fits, 2), (fits + 1, 3), (2 * fits + 1, 3)):
        with counted_collectives() as sent:
            ranks.check(ranks.parallel(), [1 + index % 3 for index in range(count)])
        assert len(sent) == exchanges


def torch_modes(ranks: Ranks) -> None:
    """Inference mode and gradients on either side change no bit, and no gradient goes through the exchange."""
    sizes = [3, 1, 2, 2]
    wanted = [ranks.features(index, size) for index, size in enumerate(sizes)]
    parallel = ranks.parallel()
    with torch.inference_mode():
        ranks.check(parallel, sizes)
        made_in_inference_mode = [item.clone() for item in wanted]
    assert_same_bits(parallel.execute(sizes, lambda indices: [made_in_inference_mode[i] for i in indices]), wanted)
    trained = [item.clone().requires_grad_() for item in wanted]
    result = parallel.execute(sizes, lambda indices: [trained[i] for i in indices])
    assert not any(item.requires_grad for item in result)
    assert_same_bits(result, wanted)


def strided_features(ranks: Ranks) -> None:
    """Features may be views with any strides, of one buffer that the next call overwrites."""
    sizes = [1, 2, 3, 4]
    wanted = [ranks.features(index, size) for index, size in enumerate(sizes)]
    buffer = torch.empty(WIDTH, 64, device=ranks.device)
    spans = [0, *torch.tensor([len(item) for item in wanted]).cumsum(0).tolist()]

    def views(indices: Sequence[int]) -> list[torch.Tensor]:
        for index in indices:
            buffer[:, spans[index] : spans[index + 1]] = wanted[index].T
        return [buffer[:, spans[index] : spans[index + 1]].T for index in indices]

    result = ranks.parallel().execute(sizes, views)
    buffer.fill_(9)
    assert_same_bits(result, wanted)


def threads(ranks: Ranks) -> None:
    """Two threads may share the object: the collectives of their calls do not mix."""
    parallel = ranks.parallel()
    sizes = [2, 9, 4]
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                ranks.check(parallel, sizes)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures


def part_of_the_ranks(ranks: Ranks) -> None:
    """A group of some ranks works with its own numbers; a process outside of it is told so."""
    members = list(range(1, ranks.world)) or [0]
    group = dist.new_group(members, timeout=TIMEOUT)
    if ranks.rank in members:
        inner = Ranks(members.index(ranks.rank), len(members), group, ranks.device)
        parallel = inner.parallel()
        assert (parallel.rank, parallel.size) == (inner.rank, inner.world)
        inner.check(parallel, [3, 1, 2])
    else:
        with pytest.raises(OptionError, match="not a member"):
            DataParallel(group, device=ranks.device, dtype=torch.float32, width=WIDTH)


# --- cases: every rank raises ------------------------------------------------------------------------------------------


def check_failure(
    ranks: Ranks,
    failing: Sequence[int],
    fail: Callable[[Sequence[int]], Sequence[torch.Tensor]],
    error: type[BaseException],
    match: str,
) -> None:
    """The failing ranks raise their own error, the others one that names them, and the next call works."""
    parallel = ranks.parallel()
    sizes = [3] * ranks.world
    if ranks.rank in failing:
        with pytest.raises(error, match=match):
            parallel.execute(sizes, fail)
    else:
        with pytest.raises(ParallelError, match=", ".join(f"rank {rank}" for rank in failing) + f" of {ranks.world} failed"):
            parallel.execute(sizes, ranks.local(sizes))
    ranks.check(parallel, sizes)


def failing_rank(ranks: Ranks) -> None:
    """Whichever rank fails, and whatever it raises, all ranks raise, and none hangs."""

    def broken(indices: Sequence[int]) -> list[torch.Tensor]:
        raise Broken("no encoder")

    def interrupted(indices: Sequence[int]) -> list[torch.Tensor]:
        raise KeyboardInterrupt("no time")

    for rank in range(ranks.world):
        check_failure(ranks, [rank], broken, Broken, "no encoder")
    check_failure(ranks, list(range(ranks.world)), broken, Broken, "no encoder")
    check_failure(ranks, list(range(1, ranks.world)), broken, Broken, "no encoder")
    check_failure(ranks, [0], interrupted, KeyboardInterrupt, "no time")


def wrong_features(ranks: Ranks) -> None:
    """What is not one tensor [tokens, width] of the right kind per item is that rank's failure, and says what came."""
    good = torch.zeros(2, WIDTH, device=ranks.device)
    outputs: list[tuple[object, str]] = [
        ([], "0 tensors for 1 items"),
        ([good, good], "2 tensors for 1 items"),
        (None, "a NoneType for 1 items"),
        (good, "a Tensor for 1 items"),
        (["text"], "a str as features 0"),
        ([good[0]], r"features 0 as \(5,\)"),
        ([good[None]], r"features 0 as \(1, 2, 5\)"),
        ([good[:, 1:]], r"\(2, 4\).*expected \(tokens, 5\)"),
        ([good.to(torch.bfloat16)], r"bfloat16.*expected.*float32"),
        ([good.to("meta")], "on meta: expected"),
    ]
    for output, match in outputs:
        check_failure(ranks, [ranks.world - 1], lambda indices, output=output: output, ProtocolError, match)  # type: ignore[misc]


def wrong_sizes(ranks: Ranks) -> None:
    """A size that is no number fails where it was given, and the other ranks hear of it."""
    parallel = ranks.parallel()
    with pytest.raises(TypeError if ranks.rank == 0 else ParallelError):
        parallel.execute([3, None if ranks.rank == 0 else 3], ranks.local([3, 3]))  # type: ignore[list-item]
    ranks.check(parallel, [3, 3])


def different_requests(ranks: Ranks) -> None:
    """Ranks that disagree on the items, their sizes, their order, the width or the dtype all raise, and nobody hangs."""
    last = ranks.rank == ranks.world - 1
    parallel = ranks.parallel()
    for common, odd in (
        ([3, 4], [3, 4, 5]),
        ([1] * 200, [1] * 100),
        ([3, 4], [3, 5]),
        ([3, 4], [4, 3]),
        ([2, 2], [1, 3]),
    ):
        mine = odd if last else common
        with pytest.raises(ParallelError, match="different requests") as caught:
            parallel.execute(mine, ranks.local(mine))
        counts = [len(common)] * (ranks.world - 1) + [len(odd)]
        assert f"items {counts}" in str(caught.value)
        ranks.check(parallel, common)
    for odd_one in (ranks.parallel(torch.bfloat16), ranks.parallel(width=WIDTH + 1)):
        chosen = odd_one if last else ranks.parallel()
        with pytest.raises(ParallelError, match="different requests"):
            chosen.execute(
                [2, 2],
                lambda indices, chosen=chosen: [  # type: ignore[misc]
                    torch.zeros(1, chosen._width, dtype=chosen._dtype, device=ranks.device) for _ in indices
                ],
            )


def ranks_out_of_step(ranks: Ranks) -> None:
    """A rank that made one call more or less than the others is found, even where the requests look the same.

    Else it would take the features of one request for those of another.
    """
    parallel = ranks.parallel()
    ranks.check(parallel, [5, 5])
    if ranks.rank == 0:
        parallel = ranks.parallel()  # as after a restart
    for _ in range(2):
        with pytest.raises(ParallelError, match="numbers of calls differ"):
            parallel.execute([5, 5], ranks.local([5, 5]))
    ranks.check(ranks.parallel(), [5, 5])


def an_empty_request_is_a_call(ranks: Ranks) -> None:
    """Ranks of which one has no items disagree like any others: all raise in this very call, and the next is right."""
    parallel = ranks.parallel()
    mine = [] if ranks.rank == 0 else [5, 5]
    with pytest.raises(ParallelError, match="different requests"):
        parallel.execute(mine, ranks.local(mine))
    ranks.check(parallel, [])
    ranks.check(parallel, [5, 5])


def reported_failure(ranks: Ranks) -> None:
    """A rank that cannot begin a call reports that: it raises nothing itself, the others raise and name it; all stay in step."""
    parallel = ranks.parallel()
    for failing in (0, ranks.world - 1):
        for sizes in ([3, 1], [2] * 200):
            if ranks.rank == failing:
                with counted_collectives() as sent:
                    parallel.report_failure()
                assert len(sent) == 1
            else:
                with pytest.raises(ParallelError, match=f"rank {failing} of {ranks.world} failed"):
                    parallel.execute(sizes, ranks.local(sizes))
            ranks.check(parallel, sizes)
    parallel.report_failure()  # by all of them, as where the request itself is wrong
    ranks.check(parallel, [4, 2, 1])


def managers_stay_in_step(ranks: Ranks) -> None:
    """A request that is wrong, or fails, on one rank alone makes all raise for that call; calls before and after are right.

    Each rank counts its own items and no others.
    """
    table = toys.packed_table()
    config = EncoderConfig(mode="eager", packing="greedy", token_budgets=(8,), max_items_per_batch=8)
    with EncoderCudaGraphManager(table, config, device="cpu", dtype=torch.float32, group=ranks.group) as manager:
        last, items = ranks.world - 1, 0
        grids: list[toys.Grid] = [(1, 2, 4), (1, 4, 4), (1, 2, 2), (1, 4, 12), (1, 2, 6)]

        def check(seed: int, given: Sequence[toys.Grid]) -> int:
            """Features of all items on every rank; how many of them this rank encoded."""
            request = toys.packed_request(given, seed=seed)
            got = manager.execute(request)
            assert toys.largest_difference(got, toys.packed_reference(table, request)) <= 1e-5
            return len(longest_first([t * h * w for t, h, w in given], ranks.world)[ranks.rank])

        right = toys.packed_request(grids)
        short = {**right, "pixel_values": right["pixel_values"][:-1]}
        odd = {**right, "image_grid_thw": [(1, 3, 4), *grids[1:]]}
        fewer = toys.packed_request(grids[:2])
        cases: list[tuple[Any, str]] = [
            (short, "failed"),
            (odd, "failed"),
            ({"unknown": 1}, "failed"),
            (3, "failed"),
            (fewer, "different requests"),
            ({}, "different requests"),
        ]
        for step, (bad, match) in enumerate(cases):
            items += check(step, grids)
            wrong = ranks.rank == last
            with pytest.raises(VitCompileError if wrong else ParallelError, match="" if wrong else match):
                manager.execute(bad if wrong else right)
            assert manager.snapshot()["items"] == items
        assert manager.execute({}) == []
        items += check(9, grids[:1])
        assert manager.snapshot()["items"] == items


# --- cases: GPUs -------------------------------------------------------------------------------------------------------


def no_wait_for_the_device(ranks: Ranks) -> None:
    """Where the group has a backend for the CPU, and NCCL for the features, a call never waits for the device."""
    if "cpu" not in (backends := dist.get_backend_config(ranks.group)) or "nccl" not in backends:
        return
    parallel = ranks.parallel(torch.bfloat16)
    sizes = [4, 2, 3, 1]
    wanted = [ranks.features(index, size, torch.bfloat16) for index, size in enumerate(sizes)]
    ranks.check(parallel, sizes, torch.bfloat16)  # NCCL sets itself up in the first call
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = parallel.execute(sizes, lambda indices: [wanted[index] for index in indices])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same_bits(result, wanted)


def device_without_a_number(ranks: Ranks) -> None:
    """The device "cuda" is the current one."""
    parallel = DataParallel(ranks.group, device=torch.device("cuda"), dtype=torch.float32, width=WIDTH)
    ranks.check(parallel, [2, 1, 3])


ANY_WORLD = (equals_plain_computation, one_item, input_order, kinds_of_integers, own_memory)
"""Cases for one rank too."""

TOGETHER = (
    *ANY_WORLD,
    collectives,
    many_items,
    torch_modes,
    strided_features,
    threads,
    part_of_the_ranks,
    failing_rank,
    wrong_features,
    wrong_sizes,
    different_requests,
    ranks_out_of_step,
    an_empty_request_is_a_call,
    reported_failure,
)
"""Cases for two ranks or more."""

ON_CPU = (managers_stay_in_step,)
"""Further cases, for the CPU."""

ON_CUDA = (no_wait_for_the_device, device_without_a_number)
"""Further cases, for GPUs."""


def start(world: int, folder: Path, backend: str = "gloo", device_type: str = "cpu") -> None:
    """Run every case of `TOGETHER`, and those of the device, on so many processes; raises with the case that failed.

    On the CPU they are forked off a server that imports torch once. With CUDA each starts afresh.
    """
    multiprocessing.set_forkserver_preload(["torch", __name__])
    arguments = (world, str(folder / "store"), backend, device_type)
    start_processes(_run, arguments, nprocs=world, start_method="spawn" if device_type == "cuda" else "forkserver")


def _run(rank: int, world: int, store: str, backend: str, device_type: str) -> None:
    """One rank's process."""
    torch.set_num_threads(1)
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=TIMEOUT)
    _run_cases(rank, world, torch.device(device_type, rank) if device_type == "cuda" else torch.device(device_type))
    dist.barrier()  # a rank that leaves early would break the others' last call
    dist.destroy_process_group()
    gc.collect()  # Gloo's threads must end before the interpreter does, and caught errors keep groups alive


def _run_cases(rank: int, world: int, device: torch.device) -> None:
    assert dist.group.WORLD is not None
    ranks = Ranks(rank, world, dist.group.WORLD, device)
    for case in (*TOGETHER, *(ON_CPU if device.type == "cpu" else ON_CUDA)):
        try:
            case(ranks)
        except BaseException as error:
            raise AssertionError(f"{case.__name__} failed on rank {rank} of {world}") from error
