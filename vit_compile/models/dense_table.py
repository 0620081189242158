"""A dense vision tower as a table whose rows are tokens: the class token and registers of an image, then its patches row by row.

The patch embedding is a matrix product, positions are interpolated as the tower itself does it, and attention keeps to an
image's rows. The tower's blocks and norms are called as they are.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vit_compile.backend.roles import Role
from vit_compile.errors import GridError, InputError, ModelError
from vit_compile.models.binding import (
    Execute,
    Unserved,
    check_reentry,
    comparable,
    exact_convolutions,
    floating_dtype,
    noise,
    original,
    plain_layer,
)
from vit_compile.models.dense_positions import PositionTaps, mixed_positions
from vit_compile.models.hf_attention import ATTENTION_NAME, AttentionSwitch, packed_segments
from vit_compile.runtime.config import SEGMENT_CAPACITIES
from vit_compile.runtime.inputs import host_rows, same_device
from vit_compile.runtime.table import Buffer, EncoderTable, ItemSize, Modality, single_path

PIXELS, GRIDS = "pixel_values", "image_grid_hw"
IMAGE = Modality(data={"patches": PIXELS}, per_item=(GRIDS,))
TOKEN_RANGE = (64, 4096)


def pack(
    images: Sequence[torch.Tensor] | torch.Tensor,
    patch_size: int | tuple[int, int],
    *,
    prefix_tokens: int = 0,
    channels: int = 3,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> dict[str, Any]:
    """Images of any sizes as the rows of one request.

    Args:
        images: [C,H,W] each, or one tensor [N,C,H,W]; any dtype, on any device. What does not fill a patch at the right and at
            the bottom is left out, as the towers' convolutions do.
        patch_size: pixels, (height, width) where they differ.
        prefix_tokens: blank rows before the patches of each image, for its class token and registers.
        channels: C.
        dtype, device: of the rows; None: those of the first image.

    Returns:
        "patches": [sum of (prefix_tokens + h * w), C * patch height * patch width]; "grids": (h, w) in patches for each image.

    Raises:
        InputError: something is not an image, or smaller than a patch.
    """
    sides = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size
    batches = [images] if isinstance(images, torch.Tensor) and images.dim() == 4 else [_batch_of_one(image) for image in images]
    grids = [_grid(batch, sides, channels, number) for number, batch in enumerate(batches)]
    lengths = [len(batch) * (prefix_tokens + h * w) for batch, (h, w) in zip(batches, grids, strict=True)]
    first = batches[0] if batches else torch.empty(0)
    width = channels * sides[0] * sides[1]
    rows = torch.empty(sum(lengths), width, dtype=dtype or first.dtype, device=device if device is not None else first.device)
    for batch, (h, w), target in zip(batches, grids, rows.split(lengths), strict=True):
        whole = batch.to(rows.device)[:, :, : h * sides[0], : w * sides[1]]
        pixels = whole.unflatten(3, (w, sides[1])).unflatten(2, (h, sides[0])).permute(0, 2, 4, 1, 3, 5)
        tokens = target.view(len(batch), prefix_tokens + h * w, width)
        if prefix_tokens:
            tokens[:, :prefix_tokens] = 0
        tokens[:, prefix_tokens:].view(len(batch), h, w, channels, *sides).copy_(pixels)
    return {
        "patches": rows,
        "grids": [grid for batch, grid in zip(batches, grids, strict=True) for _ in range(len(batch))],
    }


def _batch_of_one(image: Any) -> torch.Tensor:
    if not isinstance(image, torch.Tensor) or image.dim() != 3:
        found = list(image.shape) if isinstance(image, torch.Tensor) else type(image).__name__
        raise InputError(f"an image is {found}: expected tensors [channels, height, width].")
    return image[None]


def _grid(batch: torch.Tensor, patch: tuple[int, int], channels: int, number: int) -> tuple[int, int]:
    _, found, height, width = batch.shape
    if found != channels or height < patch[0] or width < patch[1]:
        raise InputError(
            f"image {number} is {list(batch.shape[1:])}: expected {channels} channels and at least one patch of "
            f"{patch[0]} x {patch[1]} pixels."
        )
    return height // patch[0], width // patch[1]


class Replaced:
    """A module seen with other attributes, for methods that read positions, so that they can be run on any table."""

    def __init__(self, module: nn.Module, **attributes: Any) -> None:
        self.__dict__.update(attributes)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        """Everything else is the module's."""
        return getattr(self._module, name)


class PackedDenseTable(EncoderTable):
    """A dense tower as a table: rows and tokens are the same, an item's key is its grid (h, w) in patches.

    Args:
        tower: the vision model. Its attention is switched (`self.switch` undoes it).
        token_range: (smallest, largest) useful budget in tokens, class token and registers included. None: `TOKEN_RANGE`, and
            up to an image of the size that the model was trained on.
        segment_capacities: see `EncoderTable`.

    Features are `last_hidden_state` of each image, [prefix + h * w, width].

    Raises:
        ModelError: the tower is not laid out as expected.
        GridError (from requests): an image has too few patches for the positions that are kept (`PositionTaps.least`).
    """

    before = 1
    """Entries of the table of positions before those of patches."""
    any_size = True
    """The model's own forward takes images of any size without being asked to."""
    pools_first_row = True
    """`pool` looks at the first token only."""
    switch: AttentionSwitch | None = None

    def __init__(
        self,
        tower: nn.Module,
        *,
        token_range: tuple[int, int] | None = None,
        segment_capacities: Sequence[int] = SEGMENT_CAPACITIES,
    ) -> None:
        self.tower: Any = tower
        for layer, kind in self.read_layers():
            plain_layer(layer, kind)
        conv = self.convolution()
        if not _is_plain(conv):
            raise ModelError(f"the patch embedding of {type(tower).__name__} is not a plain convolution of patches.")
        self.patch, self.channels, width = conv.kernel_size, conv.in_channels, conv.out_channels
        prefix = self.prefix()
        self.prefix_tokens = 0 if prefix is None else len(prefix)
        self.taps = None if self.positions() is None else PositionTaps(self.interpolated, self.sides())
        super().__init__(
            modalities={"image": IMAGE},
            paths=single_path(buffers=self._buffers()),
            out_hidden_size=width,
            token_range=token_range or (TOKEN_RANGE[0], max(TOKEN_RANGE[1], self._native_tokens())),
            segment_capacities=segment_capacities,
        )
        self.switch = self.switched()

    @property
    def least(self) -> int:
        """Patches that an image must have along each side."""
        return 1 if self.taps is None else self.taps.least

    def _native_tokens(self) -> int:
        rows, columns = (0, 0) if self.taps is None else self.taps.sides
        return self.prefix_tokens + rows * columns

    def _buffers(self) -> dict[str, Buffer]:
        found = {
            "patches": Buffer(role=Role.ROWS, shape=(self.channels * self.patch[0] * self.patch[1],)),
            "cu_seqlens": Buffer(role=Role.BOUNDARIES, dtype=torch.int32, bound="max_seqlen"),
        }
        if self.prefix_tokens:
            found["kind"] = Buffer(role=Role.ROWS, dtype=torch.int64)
        if self.taps is not None:
            found["first"] = Buffer(role=Role.ROWS, shape=(2,), dtype=torch.int32)
            found["taps"] = Buffer(role=Role.ROWS, shape=(2 * self.taps.width,), dtype=torch.float32)
        return found | self.more_buffers()

    # --- what towers differ in ---------------------------------------------------------------------------------------

    def convolution(self) -> Any:
        """The patch embedding."""
        return self.tower.embeddings.patch_embeddings.projection

    def read_layers(self) -> Sequence[tuple[Any, type[nn.Module]]]:
        """Layers whose weights are read and that are not called, with the class that they must have."""
        return ((self.convolution(), nn.Conv2d),)

    def positions(self) -> torch.Tensor | None:
        """The table of positions [before + rows * columns, E], if there is one."""
        table: torch.Tensor = self.tower.embeddings.position_embeddings[0]
        return table

    def sides(self) -> tuple[int, int]:
        """Rows and columns of the table of positions."""
        table = self.positions()
        assert table is not None, "only towers with positions have sides"
        side = round((len(table) - self.before) ** 0.5)
        if side * side + self.before != len(table):
            raise ModelError(f"{type(self.tower).__name__} has {len(table)} positions: only square tables are interpolated.")
        return side, side

    def interpolated(self, table: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """The tower's own interpolation of any table of its size: see `dense_positions.Interpolate`."""
        whole = torch.cat([table.new_zeros(self.before, table.shape[1]), table])
        shape_only = torch.empty(1, self.before + height * width, 1, device="cpu").expand(-1, -1, table.shape[1])
        method = type(self.tower.embeddings).interpolate_pos_encoding
        mixed: torch.Tensor = method(self.seen_with(whole), shape_only, height * self.patch[0], width * self.patch[1])
        return mixed[0, self.before :].float()

    def seen_with(self, table: torch.Tensor) -> Any:
        """The embeddings with another table of positions."""
        return Replaced(self.tower.embeddings, position_embeddings=table[None])

    def prefix(self) -> torch.Tensor | None:
        """Class token and registers with what is added to them, [prefix, E]."""
        embeddings = self.tower.embeddings
        first = embeddings.cls_token[0] + embeddings.position_embeddings[0, :1]
        registers = getattr(embeddings, "register_tokens", None)
        return first if registers is None else torch.cat([first, registers[0]])

    def patch_norm(self, x: torch.Tensor) -> torch.Tensor:
        """What comes between patch embedding and positions."""
        return x

    def more_buffers(self) -> dict[str, Buffer]:
        """Further metadata."""
        return {}

    def more_metadata(self, height: int, width: int) -> dict[str, torch.Tensor]:
        """Its values for one image."""
        return {}

    def blocks(self, x: torch.Tensor, values: Mapping[str, Any]) -> torch.Tensor:
        """Embedded rows [1,T,E] -> `last_hidden_state`, without its split into images."""
        found: torch.Tensor = self.tower.layernorm(self.tower.encoder(x, return_dict=True).last_hidden_state)
        return found

    def pool(self, last: torch.Tensor) -> torch.Tensor | None:
        """`pooler_output` [N,D] of N images of equal length [N,n,E]; of their first tokens alone with `pools_first_row`."""
        return last[:, 0]

    def is_native(self, height: int, width: int) -> bool:
        """Does the model's own forward take this size without being asked to interpolate? Pixels."""
        sizes = self.tower.embeddings.image_size
        return (height, width) == (tuple(sizes) if isinstance(sizes, tuple | list) else (sizes, sizes))

    def switched(self) -> AttentionSwitch | None:
        """Attention that knows segments."""
        return AttentionSwitch(self.tower)

    def attention(self, values: Mapping[str, Any]) -> Any:
        """A context in which attention keeps to the images' rows."""
        if self.tower.config._attn_implementation != ATTENTION_NAME:
            raise ModelError(f"{type(self.tower).__name__} was given another attention since: it would look across images.")
        return packed_segments(values["cu_seqlens"], values["max_seqlen"])

    def output(self, last: torch.Tensor, pooled: torch.Tensor | None) -> Any:
        """What the model returns for [N,n,E] and [N,D]."""
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        return BaseModelOutputWithPooling(last_hidden_state=last, pooler_output=pooled)

    def alone(self, image: torch.Tensor) -> Any:
        """What the model's own forward returns for one image [1,C,H,W] of any size."""
        return original(self.tower, "forward")(image, return_dict=True)

    # --- the table ---------------------------------------------------------------------------------------------------

    def item_keys(self, modality: str, inputs: Mapping[str, Any]) -> Sequence[Hashable]:
        """Grids."""
        grids, least = host_rows(GRIDS, inputs[GRIDS], 2), self.least
        for number, (h, w) in enumerate(grids):
            if min(h, w) < least:
                raise GridError(f"grid {number} of {GRIDS} is {(h, w)}: expected (h, w) of at least {least} patches each.")
        return grids

    def item_size(self, key: Any) -> ItemSize:
        """Rows and tokens."""
        h, w = key
        return ItemSize(rows=self.prefix_tokens + h * w, tokens=self.prefix_tokens + h * w)

    def example_key(self, tokens: int) -> Hashable | None:
        """About square."""
        patches = max(0, tokens - self.prefix_tokens)
        height = max(self.least, int(patches**0.5))
        return (height, patches // height) if patches // height >= self.least else None

    def item_metadata(self, key: Any, path: str) -> Mapping[str, torch.Tensor]:
        """One segment, which token of the prefix a row is (0: a patch), and where it lies in the table of positions."""
        (h, w), prefix = key, self.prefix_tokens
        found = {"cu_seqlens": torch.tensor([0, prefix + h * w], dtype=torch.int32, device="cpu")}
        if prefix:
            found["kind"] = F.pad(torch.arange(1, prefix + 1, device="cpu"), (0, h * w))
        if self.taps is not None:
            first, taps = self.taps(h, w)
            found |= {"first": blank_before(first, prefix), "taps": blank_before(taps, prefix)}
        return found | self.more_metadata(h, w)

    def forward(self, path: str, values: Mapping[str, Any]) -> torch.Tensor:
        """Rows embedded, the tower's blocks within segments."""
        x = self._embedded(values)
        with self.attention(values):
            return self.blocks(x[None], values)[0]

    def _embedded(self, values: Mapping[str, Any]) -> torch.Tensor:
        for layer, kind in self.read_layers():
            if type(layer) is not kind:  # since: all that can be asked under a trace
                plain_layer(layer, kind)
        conv, prefix, table = self.convolution(), self.prefix(), self.positions()
        x = self.patch_norm(F.linear(values["patches"].to(conv.weight.dtype), conv.weight.flatten(1), conv.bias))
        if self.taps is not None:
            assert table is not None, "taps are of a table"
            rows, columns = self.taps.sides
            if len(table) != self.before + rows * columns:
                raise ModelError(f"{type(self.tower).__name__} has another number of positions since: make its encoder anew.")
            x = x + mixed_positions(table, values["first"], values["taps"], (rows, columns), before=self.before).to(x.dtype)
        if prefix is not None:
            tokens = F.embedding(values["kind"], F.pad(prefix, (0, 0, 1, 0)).to(x.dtype))
            x = torch.where((values["kind"] == 0)[:, None], x, tokens)
        return x

    @torch.no_grad()
    def check(self) -> None:
        """Compare with the model's own forward on a small image: every field that `encode` gives.

        Raises:
            ModelError: they differ.
        """
        if not comparable(self.tower):
            return
        key = h, w = max(2, self.least), max(2, self.least) + 1
        image = noise(self.tower, self.channels, h * self.patch[0], w * self.patch[1])
        rows = self.request([image])[PIXELS]
        metadata = {name: value.to(rows.device) for name, value in self.item_metadata(key, "main").items()}
        config = self.tower.config
        before, config.return_dict = config.return_dict, True  # else some of these towers fail in their own forward
        try:
            with exact_convolutions():
                last = self.forward("main", {**metadata, "patches": rows, "max_seqlen": len(rows)})[None]
                got, want = self.output(last, self.pool(last)), self.alone(image[None])
        finally:
            config.return_dict = before
        for name, value in got.items():
            check_reentry(self.tower, value, want[name])

    # --- requests and outputs ----------------------------------------------------------------------------------------

    def request(self, images: Sequence[torch.Tensor] | torch.Tensor) -> dict[str, Any]:
        """Images as `pack` takes them -> what the encoder takes, in the dtype and on the device of the tower."""
        weight = self.convolution().weight
        packed = pack(
            images,
            self.patch,
            prefix_tokens=self.prefix_tokens,
            channels=self.channels,
            dtype=floating_dtype(self.tower),
            device=weight.device,
        )
        return {PIXELS: packed["patches"], GRIDS: packed["grids"]}

    def pooled(self, features: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """`pool` for every image [n,E] -> [1,D], in one call for all images of equal length."""
        rows = [feature[:1] for feature in features] if self.pools_first_row else list(features)
        alike: dict[int, list[int]] = {}
        for number, row in enumerate(rows):
            alike.setdefault(len(row), []).append(number)
        found: list[torch.Tensor | None] = [None] * len(rows)
        for numbers in alike.values():
            pooled = self.pool(torch.stack([rows[number] for number in numbers]))
            if pooled is not None:
                for number, one in zip(numbers, pooled.split(1), strict=True):
                    found[number] = one
        return found

    @torch.no_grad()
    def encode(self, execute: Execute, images: Sequence[torch.Tensor]) -> list[Any]:
        """Images [C,H,W] of any sizes, devices and dtypes -> what the model returns for each of them alone.

        Images with too few patches for the encoder go through the model's own forward, one by one.
        """
        images = images if isinstance(images, torch.Tensor) else list(images)
        request = self.request(images)
        small = [number for number, grid in enumerate(request[GRIDS]) if min(grid) < self.least]
        if small:
            request = self.request([image for number, image in enumerate(images) if number not in small])
        features = execute(request) if request[GRIDS] else []
        outputs = [self.output(last[None], pooled) for last, pooled in zip(features, self.pooled(features), strict=True)]
        weight = self.convolution().weight
        for number in small:
            outputs.insert(number, self.alone(images[number][None].to(weight.device, weight.dtype)))
        return outputs

    def refuse(self, pixels: Any, interpolate: bool) -> None:
        """Calls of the model's own forward that it answers another way, or with an error.

        Raises:
            Unserved: this is one.
        """
        if not isinstance(pixels, torch.Tensor) or pixels.dim() != 4 or len(pixels) == 0 or pixels.shape[1] != self.channels:
            raise Unserved(f"pixel_values are not [N,{self.channels},H,W]")
        height, width = pixels.shape[2:]
        if height < self.patch[0] or width < self.patch[1]:
            raise Unserved("images are smaller than a patch")
        if not (self.any_size or interpolate or self.is_native(height, width)):
            raise Unserved(f"{height} x {width} pixels without interpolate_pos_encoding")
        if not same_device(pixels.device, self.convolution().weight.device):
            raise Unserved(f"pixel_values are on {pixels.device}")


def _is_plain(conv: Any) -> bool:
    """Is it one whose windows lie side by side?"""
    side_by_side = conv.stride == conv.kernel_size and conv.dilation == (1, 1) and conv.padding in ((0, 0), "valid")
    return bool(side_by_side and conv.groups == 1 and conv.weight.is_floating_point())


def blank_before(values: torch.Tensor, rows: int) -> torch.Tensor:
    """[n, ...] with so many rows of zeros before."""
    return torch.cat([values.new_zeros(rows, *values.shape[1:]), values]) if rows else values
