"""Data parallel: each rank encodes its share of a request, and every rank gets the features of all items.

For an encoder whose weights every rank holds, such as one in front of a tensor-parallel language model. Each call: items are
assigned by size, the longest first; the rank encodes its own; all tell each other how that went and how long the features
are; one all-gather, padded to the fullest rank, brings the features everywhere.

Guarantees:
- Features come back in the order of the request, with the same bits on all ranks, each tensor with memory of its own.
- A rank that fails makes every rank raise, and ranks whose requests differ all raise: none waits, none gets wrong features.
- Collectives stay outside of CUDA graphs.

Not seen: requests of equal sizes but other images (contents are not compared), and a rank that dies or runs out of memory
within the exchange itself. For these the group's own timeout counts.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from vit_compile.errors import CaptureError, OptionError, ParallelError, ProtocolError
from vit_compile.planning.balance import longest_first
from vit_compile.stats import logger

_OK, _FAILED = 0, 1
_FACTS = 4
"""Words of a header before its lengths: status, number of the call, number of items, digest of the request."""
_SLOTS = 60
"""Lengths that travel in the header. A rank with more items causes a second, small exchange."""

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""One tensor from every rank into one tensor; torch 2.13 renamed it and warns about the older name."""


class DataParallel:
    """Shares the items of each request out over the ranks of a process group.

    Every rank makes the same calls in the same order. Calls on one object run one at a time; threads that share it must reach
    it in the same order on every rank, so one thread is best.

    Numbers on the host (status, lengths) travel over the group's CPU backend where there is one, and then no call waits for
    the device. A group with NCCL alone takes them over the device, and every call waits for it once or twice:
    `init_process_group("cpu:gloo,cuda:nccl")` avoids that. Features on a device for which the group has no backend but Gloo
    go through the CPU.
    """

    rank: int
    """This process's rank in the group."""

    size: int
    """Ranks in the group."""

    def __init__(self, group: dist.ProcessGroup, *, device: torch.device, dtype: torch.dtype, width: int) -> None:
        """No collective and no GPU work.

        Args:
            group: of which this process is a member.
            device: where this rank's features are, and where the result is wanted.
            dtype: of the features.
            width: of the features, deepstack levels included.

        Raises:
            OptionError: The process is not in the group, the width is not positive, or no backend of the group can be used.
        """
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise OptionError("this process is not a member of the group: give it a group that it is in.")
        if width <= 0:
            raise OptionError(f"width={width}: expected a positive number of values per token.")
        self.size = dist.get_world_size(group)
        self._group = group
        self._device = torch.device(device)
        self._dtype = dtype
        self._width = width
        self._host_route, self._feature_route = _routes(dist.get_backend_config(group), self._device)
        self._calls = 0
        self._lock = threading.Lock()

    def execute(self, sizes: Sequence[int], run_local: Callable[[Sequence[int]], Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Features of every item, from all ranks. Every rank calls this with the same sizes.

        A group of one rank answers by itself, with what `run_local` returned.

        Args:
            sizes: `EncoderItemSpec.input_size` of each item.
            run_local: called once, with the indices of this rank's items, ascending and maybe none. Returns the features
                [tokens, width] of each; any number of tokens, also 0.

        Returns:
            Features [tokens, width] of each item, in the order of `sizes`, on the device; the caller's. No gradient goes
            back through them.

        Raises:
            CaptureError: A CUDA graph is being captured.
            ProtocolError: `run_local` returned something else than features.
            ParallelError: Another rank failed, or the ranks did not get the same request.
            Exception: What `run_local` raised. The other ranks raise a `ParallelError`.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise CaptureError("DataParallel.execute was called while a CUDA graph is captured: collectives stay outside.")
        with self._lock:
            self._calls += 1
            if self.size == 1:
                if len(sizes) == 0:
                    return []
                return self._checked(run_local(list(range(len(sizes)))), len(sizes))
            return self._execute_together(sizes, run_local)

    def report_failure(self) -> None:
        """Tell the other ranks that this one cannot even begin a call that they make: they raise, and stay in step."""
        with self._lock:
            self._calls += 1
            if self.size > 1:
                logger.warning(
                    "rank %d cannot begin call %d: telling the others, who have to make it too", self.rank, self._calls
                )
                with suppress(Exception):  # the caller's own failure says more than a broken connection
                    self._exchange([_FAILED, self._calls], _FACTS + _SLOTS)

    def _execute_together(
        self, sizes: Sequence[int], run_local: Callable[[Sequence[int]], Sequence[torch.Tensor]]
    ) -> list[torch.Tensor]:
        try:
            sizes = [int(size) for size in sizes]
            shares = longest_first(sizes, self.size)
            own = shares[self.rank]
            local = self._checked(run_local(own), len(own))
            facts = [_OK, self._calls, len(sizes), self._digest(sizes)]
        except BaseException:
            with suppress(Exception):  # this rank's own failure says more than a broken connection
                self._exchange([_FAILED, self._calls], _FACTS + _SLOTS)
            raise
        own_tokens = [len(item) for item in local]
        headers = self._exchange([*facts, *own_tokens[:_SLOTS]], _FACTS + _SLOTS)
        self._agree(headers)
        tokens = [header[_FACTS:][: len(share)] for header, share in zip(headers, shares, strict=True)]
        over = max(map(len, shares)) - _SLOTS
        if over > 0:
            rest = self._exchange(own_tokens[_SLOTS:], over)
            tokens = [(first + more)[: len(share)] for first, more, share in zip(tokens, rest, shares, strict=True)]
        return self._share_features(local, shares, tokens)

    def _checked(self, features: Any, items: int) -> list[torch.Tensor]:
        if not isinstance(features, Sequence) or len(features) != items:
            what = f"{len(features)} tensors" if isinstance(features, Sequence) else f"a {type(features).__name__}"
            raise ProtocolError(f"run_local returned {what} for {items} items: expected a list with one tensor for each.")
        device = self._current_device()
        for index, item in enumerate(features):
            if not isinstance(item, torch.Tensor):
                raise ProtocolError(f"run_local returned a {type(item).__name__} as features {index}: expected a tensor.")
            if item.dim() != 2 or item.shape[1] != self._width or item.dtype != self._dtype or item.device != device:
                raise ProtocolError(
                    f"run_local returned features {index} as {tuple(item.shape)}, {item.dtype}, on {item.device}: expected "
                    f"(tokens, {self._width}), {self._dtype}, on {device}."
                )
        return list(features)

    def _current_device(self) -> torch.device:
        """The device with its number, also where it was given as "cuda"."""
        return torch.empty(0, device=self._device).device

    def _digest(self, sizes: Sequence[int]) -> int:
        """63 bits that differ, but for chance, where the sizes or the features' kind do."""
        request = repr((sizes, self._width, str(self._dtype)))
        return int.from_bytes(hashlib.blake2b(request.encode(), digest_size=8).digest(), "big") >> 1

    def _exchange(self, words: Sequence[int], length: int) -> list[list[int]]:
        """The words of every rank, each padded to the same length."""
        padded = [*words, *[0] * (length - len(words))]
        sent = torch.tensor(padded, dtype=torch.int64, device="cpu").to(self._host_route, non_blocking=True)
        received: list[list[int]] = self._gather(sent).tolist()
        return received

    def _gather(self, sent: torch.Tensor) -> torch.Tensor:
        """[size, *shape]: the tensors of all ranks, which have one shape."""
        received = sent.new_empty((self.size * len(sent), *sent.shape[1:]))  # Gloo takes no other form
        _all_gather(received, sent, group=self._group)
        return received.view(self.size, *sent.shape)

    def _agree(self, headers: Sequence[Sequence[int]]) -> None:
        """Raise, on every rank alike, where one failed or where the requests differ."""
        failed = [rank for rank, header in enumerate(headers) if header[0] == _FAILED]
        if failed:
            names = ", ".join(f"rank {rank}" for rank in failed)
            raise ParallelError(f"{names} of {self.size} failed, so no rank returns features: look at the error that it raised.")
        if any(header[:_FACTS] != headers[0][:_FACTS] for header in headers):
            _, calls, items, _ = zip(*(header[:_FACTS] for header in headers), strict=True)
            raise ParallelError(
                f"the ranks got different requests (by rank: items {list(items)}, calls so far {list(calls)}): every rank must "
                "make the same calls, with the same sizes, width and dtype. Where the numbers of calls differ, a rank has left "
                "one out, and every rank needs a new DataParallel."
            )

    @torch.no_grad()
    def _share_features(
        self, local: Sequence[torch.Tensor], shares: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Exchange the features. `shares` and `tokens`: indices of each rank's items, and how many tokens each has."""
        totals = [sum(counts) for counts in tokens]
        own = totals[self.rank]
        sent = torch.empty(max(totals), self._width, dtype=self._dtype, device=self._current_device())
        if own:
            torch.cat(list(local), out=sent[:own])
        sent[own:].zero_()
        received = sent.new_empty((self.size, 0, self._width))
        if len(sent):
            # As bytes: no backend has to know the dtype.
            gathered = self._gather(sent.to(self._feature_route).view(torch.uint8))
            received = gathered.view(self._dtype).to(sent.device)
        features = {}
        for rank, share in enumerate(shares):
            start = 0
            for index, count in zip(share, tokens[rank], strict=True):
                features[index] = received[rank, start : start + count].clone()
                start += count
        return [features[index] for index in range(len(features))]


def _routes(backends: str, device: torch.device) -> tuple[torch.device, torch.device]:
    """Where numbers and where features are when they travel.

    Args:
        backends: of the group, as "cpu:gloo,cuda:nccl".
        device: of the features.
    """
    by_device = dict(pair.split(":", 1) for pair in backends.split(","))
    cpu = torch.device("cpu")
    direct = device.type in by_device and (device.type == "cpu" or by_device[device.type] != "gloo")
    if not direct and "cpu" not in by_device:
        raise OptionError(
            f"the group has the backends {backends!r}, of which none carries tensors on {device}: "
            "give it a backend for this device or for the CPU."
        )
    return cpu if "cpu" in by_device else device, device if direct else cpu
