"""`EncoderItemSpec`: how large one image or clip is, in the numbers that packing and load balance need."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from vit_compile.errors import ProtocolError

DEFAULT_PATH = "main"
"""Name of the only path of a model that declares none."""


@dataclass(frozen=True, slots=True)
class EncoderItemSpec:
    """Sizes of one item, all of them host integers."""

    input_size: int
    """Work on the way in (patches, tiles): what data parallel balances over the ranks. Above 0."""

    output_tokens: int
    """Output tokens over all paths: what budgets are compared with. The features may have another length (separators)."""

    path_output_tokens: Mapping[str, int] | None = field(default=None, hash=False)
    """Output tokens of each path; a path that is left out has none. None: all of `output_tokens` on the only path."""

    frames: int = 1
    """Attention segments of the item: 1 for an image, the number of frames for a clip."""

    kind: Hashable = None
    """Free for the adapter: what its choice of capture-axis keys looks at (a resolution class, a row width)."""

    def __post_init__(self) -> None:
        if self.input_size <= 0 or self.frames <= 0 or self.output_tokens < 0:
            raise ProtocolError(f"{self}: input_size and frames must be above 0, output_tokens not below.")
        for path, tokens in (self.path_output_tokens or {}).items():
            if tokens < 0:
                raise ProtocolError(f"{self}: path {path!r} has {tokens} tokens.")

    def tokens_on(self, path: str) -> int:
        """Output tokens of one path."""
        return self.output_tokens if self.path_output_tokens is None else self.path_output_tokens.get(path, 0)
