"""The registry of peers: names, what they are, and in which order they run."""

from __future__ import annotations

from collections.abc import Iterable

from vit_compile.errors import OptionError
from vit_compile.options import did_you_mean
from vit_compile.tools.bench import peers_eager, peers_graphs
from vit_compile.tools.bench.peer import PeerSpec

RECORDING_REQUESTS = 25
"""Of mixed traffic, for a peer that records a graph for every size that it sees."""

_SPECS = (
    PeerSpec(
        name="eager",
        summary="Hugging Face as shipped: sdpa, metadata computed in the call",
        make=peers_eager.make_eager,
        in_groups=True,
    ),
    PeerSpec(
        name="eager-hoisted",
        summary="not compiled; metadata computed before the clock starts, varlen attention",
        make=peers_eager.make_hoisted,
        refuses=peers_eager.refuses_dense,
    ),
    PeerSpec(
        name="compile",
        summary="torch.compile, dynamic sizes, hoisted metadata",
        make=peers_eager.make_compile,
        compiles=True,
        rehearses=True,
    ),
    PeerSpec(
        name="reduce-overhead",
        summary='torch.compile(mode="reduce-overhead"), hoisted metadata; records every size',
        make=peers_eager.make_reduce_overhead,
        compiles=True,
        refuses=peers_eager.refuses_without_recordings,
        max_requests=RECORDING_REQUESTS,
    ),
    PeerSpec(
        name="capture-of-eager",
        summary="the documented method: eager forward captured at powers of two, greedy packing",
        make=peers_graphs.make_capture_of_eager,
        ours=True,
        in_groups=True,
    ),
    PeerSpec(
        name="vit-backend-piecewise",
        summary='torch.compile(backend="vit_cudagraph"), graphs between attentions, hoisted metadata',
        make=peers_graphs.make_backend_piecewise,
        ours=True,
        compiles=True,
        refuses=peers_graphs.refuses_mixed,
    ),
    PeerSpec(
        name="vit-backend-full",
        summary='torch.compile(backend="vit_cudagraph"), whole graphs, hoisted metadata',
        make=peers_graphs.make_backend_full,
        ours=True,
        compiles=True,
        refuses=peers_graphs.refuses_mixed,
    ),
    PeerSpec(
        name="vit-full",
        summary="EncoderCudaGraphManager, all defaults, fitted ladder",
        make=peers_graphs.make_full,
        ours=True,
        compiles=True,
        in_groups=True,
    ),
)

PEERS: dict[str, PeerSpec] = {spec.name: spec for spec in _SPECS}


def chosen(names: Iterable[str] | None) -> list[PeerSpec]:
    """The peers with these names, in their order; None: all of them.

    Raises:
        OptionError: a name is unknown.
    """
    if names is None:
        return list(PEERS.values())
    for name in names:
        if name not in PEERS:
            raise OptionError(f"peer {name!r}.{did_you_mean(name, PEERS)} Known are {', '.join(PEERS)}.")
    return [PEERS[name] for name in dict.fromkeys(names)]
