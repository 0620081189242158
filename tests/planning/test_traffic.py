"""Presets are what they claim to be, everywhere; geometry follows the processors' rule; traces come back as written."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vit_compile.errors import BudgetError, TraceError
from vit_compile.planning import traffic, traffic_presets
from vit_compile.planning.traffic import Geometry, Picture, Request

MERGED = Geometry(16, 2, 2)
DENSE = Geometry(14, extra_tokens=5)
CHAT_FILE = Path(traffic_presets.__file__).parent / "traces" / "servegen_chat.json"


def pictures(preset: str, count: int, *, seed: int = 0, geometry: Geometry = MERGED) -> list[Picture]:
    """All pictures of so many requests."""
    return [picture for request in traffic.generate(preset, count, seed=seed, geometry=geometry) for picture in request]


def chat_buckets() -> list[tuple[int, int, float]]:
    """First tokens, last tokens and weight of each bucket in the file."""
    edges = [(0, 0.0), *json.loads(CHAT_FILE.read_text(encoding="utf-8"))["image_tokens_upper_edges_pdf"]]
    return [(low + 1, high, weight) for (low, _), (high, weight) in itertools.pairwise(edges)]


def chi_square(seen: Counter[int], weights: dict[int, float]) -> float:
    """Pearson's statistic of counts against shares that need not add up to 1."""
    total, whole = seen.total(), sum(weights.values())
    assert set(seen) <= set(weights)
    expected = {value: total * weight / whole for value, weight in weights.items()}
    return sum((seen[value] - wanted) ** 2 / wanted for value, wanted in expected.items())


# --- geometry


def resized(high: int, wide: int, block: int, fewest: int, most: int) -> tuple[int, int]:
    """Smart resize in blocks as published for Qwen2-VL, in floats and pixels."""
    rows, columns = round(high / block) * block, round(wide / block) * block
    if rows * columns > most * block**2:
        beta = math.sqrt(high * wide / (most * block**2))
        rows = max(block, math.floor(high / beta / block) * block)
        columns = max(block, math.floor(wide / beta / block) * block)
    elif rows * columns < fewest * block**2:
        beta = math.sqrt(fewest * block**2 / (high * wide))
        rows, columns = math.ceil(high * beta / block) * block, math.ceil(wide * beta / block) * block
    return rows // block, columns // block


@settings(max_examples=500)
@given(st.integers(30, 3000), st.integers(30, 3000), st.sampled_from([(14, 2), (16, 2), (14, 1)]), st.integers(1, 30))
def test_grids_are_those_of_smart_resize(high: int, wide: int, sides: tuple[int, int], fewest: int) -> None:
    """Rounding, shrinking and growing give the published rule's grid, where that rule's own float rounding decides nothing."""
    patch, merge = sides
    block, most = patch * merge, 1000
    for limit in (fewest, most):  # a scaled side that is a whole number of blocks may fall on either side in floats
        side = high * limit / wide, wide * limit / high
        if any(math.isclose(math.sqrt(square), round(math.sqrt(square)), rel_tol=1e-9) for square in side):
            return
    rows, columns = resized(high, wide, block, fewest, most)
    grid = Geometry(patch, merge, min_tokens=fewest, max_tokens=most).grid(Picture(high, wide))
    assert grid == (1, rows * merge, columns * merge)


@settings(max_examples=500)
@given(st.integers(1, 9000), st.integers(1, 9000), st.integers(1, 40), st.integers(1, 400), st.integers(0, 400))
def test_limits_hold_for_every_picture(high: int, wide: int, block: int, fewest: int, more: int) -> None:
    """The upper limit is never broken; the lower one only where a picture that meets it would break the upper one."""
    geometry = Geometry(block, min_tokens=fewest, max_tokens=fewest + more)
    _, rows, columns = geometry.grid(Picture(high, wide))
    assert rows >= 1
    assert columns >= 1
    assert rows * columns <= fewest + more
    grown = Geometry(block, min_tokens=fewest, max_tokens=10**9).grid(Picture(high, wide))
    assert rows * columns >= fewest or grown[1] * grown[2] > fewest + more


@pytest.mark.parametrize(
    ("geometry", "picture", "grid", "tokens"),
    [
        (MERGED, Picture(336, 448), (1, 20, 28), 140),  # 336 / 32 = 10.5 rounds to the even 10
        (MERGED, Picture(448, 448, frames=8), (4, 28, 28), 784),
        (MERGED, Picture(448, 448, frames=7), (4, 28, 28), 784),
        (DENSE, Picture(224, 224), (1, 16, 16), 261),
        (Geometry(16, 2, max_tokens=1024), Picture(2048, 2048), (1, 64, 64), 1024),
        (Geometry(16, 2, max_tokens=1024), Picture(1024, 4096), (1, 32, 128), 1024),
        (Geometry(16, 2, min_tokens=64), Picture(32, 32), (1, 16, 16), 64),
        (Geometry(14, 2, max_tokens=16), Picture(28, 28000), (1, 2, 32), 16),
    ],
)
def test_known_grids(geometry: Geometry, picture: Picture, grid: tuple[int, int, int], tokens: int) -> None:
    """Grids and tokens worked out by hand: frame groups, extra tokens, both limits met exactly, a side of one block."""
    assert geometry.grid(picture) == grid
    assert geometry.tokens(picture) == tokens


@pytest.mark.parametrize(
    "sizes",
    [
        {"patch_size": 0},
        {"patch_size": 14, "merge_size": -1},
        {"patch_size": 14, "temporal_patch_size": 0},
        {"patch_size": 14, "extra_tokens": -1},
        {"patch_size": 14, "min_tokens": 5, "max_tokens": 4},
        {"patch_size": True},
        {"patch_size": 14.0},
    ],
)
def test_an_impossible_geometry_is_refused(sizes: dict[str, int]) -> None:
    """Sizes are positive integers, and limits are in order."""
    with pytest.raises(BudgetError):
        Geometry(**sizes)


# --- presets


def test_chat_follows_the_histograms() -> None:
    """20000 requests: tokens by bucket and images by request pass a chi-square test against the file at 1 in 1000."""
    buckets = {last: weight for _, last, weight in chat_buckets()}
    images = json.loads(CHAT_FILE.read_text(encoding="utf-8"))["images_per_request_pdf"]
    requests = traffic.generate("chat", 20000, seed=7, geometry=MERGED)
    tokens = [MERGED.tokens(picture) for request in requests for picture in request]
    found = Counter(min(edge for edge in buckets if edge >= count) for count in tokens)
    assert len(buckets) == 28
    assert chi_square(found, buckets) < 55.5  # 27 degrees of freedom
    common = {number: images[str(number)] for number in range(1, 6)}
    counts = Counter(len(request) for request in requests)
    assert min(counts) == 1
    assert chi_square(Counter({number: counts[number] for number in common}), common) < 18.5  # 4 degrees of freedom


def test_chat_is_uniform_within_a_bucket() -> None:
    """In buckets of 257 to 1024 tokens the mean is the middle, to four standard errors of a uniform distribution."""
    tokens = [MERGED.tokens(picture) for picture in pictures("chat", 20000)]
    chosen = [(first, last) for first, last, _ in chat_buckets() if 256 < first < 1024]
    assert len(chosen) == 8
    for first, last in chosen:
        inside = [count for count in tokens if first <= count <= last]
        spread = (last - first) / math.sqrt(12 * len(inside))
        assert abs(sum(inside) / len(inside) - (first + last) / 2) < 4 * spread, (first, last)


@pytest.mark.parametrize("geometry", [MERGED, Geometry(14, 2, 2), Geometry(16)], ids=str)
def test_chat_has_the_mean_of_its_histogram(geometry: Geometry) -> None:
    """Tokens of an image average what the file says, 544, whatever the patches are."""
    mean = sum(weight * (first + last) / 2 for first, last, weight in chat_buckets())
    tokens = [geometry.tokens(picture) for picture in pictures("chat", 8000, geometry=geometry)]
    assert mean == pytest.approx(544, abs=0.5)
    assert sum(tokens) / len(tokens) == pytest.approx(mean, rel=0.03)


def test_chat_images_are_at_most_four_times_as_long_as_wide() -> None:
    """No aspect ratio is above 4, both orientations are as common, and ratios above 2 are more than a third."""
    drawn = pictures("chat", 5000)
    ratios = [picture.height / picture.width for picture in drawn]
    assert all(1 / 4 <= ratio <= 4 for ratio in ratios)
    assert sum(ratio > 1 for ratio in ratios) == pytest.approx(sum(ratio < 1 for ratio in ratios), rel=0.1)
    assert sum(max(ratio, 1 / ratio) > 2 for ratio in ratios) > len(ratios) / 3


@given(st.integers(1, 2000), st.floats(0.25, 4))
def test_a_shape_has_nearly_the_tokens_it_should(tokens: int, aspect: float) -> None:
    """Rows x columns is within a percent and 2 of the tokens, pixels give just that, the aspect is off by 2 at most."""
    rows, columns = traffic_presets.shape_of(tokens, aspect, (tokens, tokens))
    assert abs(rows * columns - tokens) <= 2 + tokens / 100
    assert MERGED.tokens(traffic_presets._picture(rows, columns, 32)) == rows * columns
    if tokens > 200:
        assert abs(math.log(rows / columns / aspect)) < math.log(2.1)


def test_chat_counts_extra_tokens_as_tokens() -> None:
    """Class and register tokens are part of the tokens that are drawn: with and without them the mean is the same."""
    plain, extra = Geometry(16), Geometry(16, extra_tokens=5)
    means = []
    for geometry in (plain, extra):
        tokens = [geometry.tokens(picture) for picture in pictures("chat", 3000, geometry=geometry)]
        means.append(sum(tokens) / len(tokens))
    assert means[0] == pytest.approx(means[1], abs=1.5)


def test_catalogue_is_square_and_zipf() -> None:
    """Sides are the listed ones or a block beside one; three in four exactly; the n-th is about 1 / n as common as the first."""
    drawn = pictures("catalogue", 8000)
    listed = (62, 32, 50, 38, 76, 94, 64, 124, 68, 100, 16)
    sides = Counter(picture.height // 16 for picture in drawn)
    assert all(picture.height == picture.width for picture in drawn)
    assert set(sides) == {side + step for side in listed for step in (-2, 0, 2)}
    apart = [side for side in listed if not {side - 2, side + 2, side - 4, side + 4} & set(listed)]  # nobody's neighbours
    harmonic = sum(1 / rank for rank in range(1, 12))
    for side in apart:
        rank = listed.index(side) + 1
        assert sides[side] / len(drawn) == pytest.approx(0.75 / rank / harmonic, rel=0.15)
    assert sides[48] + sides[52] == pytest.approx(sides[50] / 3, rel=0.15)


def test_documents_are_log_uniform() -> None:
    """Sides stay in the stated ranges, reach both ends, and as many are below as above the geometric mean."""
    drawn = pictures("documents", 4000)
    for sides, low, high in (([p.width for p in drawn], 590, 5367), ([p.height for p in drawn], 290, 7184)):
        assert low <= min(sides) < low * 1.01
        assert high * 0.99 < max(sides) <= high
        assert sum(side < math.sqrt(low * high) for side in sides) == pytest.approx(len(sides) / 2, rel=0.05)


def test_fixed_requests_have_one_of_two_sizes() -> None:
    """Every picture is 336 or 384 pixels square; a request has one size, and both are about as common."""
    requests = traffic.generate("fixed", 2000, seed=0, geometry=MERGED)
    assert all(len(set(request)) == 1 for request in requests)
    sizes = Counter(request[0] for request in requests)
    assert set(sizes) == {Picture(336, 336), Picture(384, 384)}
    assert sizes[Picture(336, 336)] == pytest.approx(1000, rel=0.1)
    assert {len(request) for request in requests} == set(range(1, 9))


@pytest.mark.parametrize(("group", "most"), [(1, 64), (2, 64), (3, 63), (100, 100)])
def test_videos_fill_their_frame_groups(group: int, most: int) -> None:
    """Clips have 4 to 64 frames in whole groups (one group where that is longer), and 224 to 480 pixels a side."""
    requests = traffic.generate("video", 2000, seed=0, geometry=Geometry(16, 2, group))
    frames = {clip.frames for (clip,) in requests}
    assert frames == set(range(-(-4 // group) * group, most + 1, group))
    sides = {side for (clip,) in requests for side in (clip.height, clip.width)}
    assert sides == set(range(224, 481))


def test_adversarial_grids_are_all_as_likely() -> None:
    """Every legal grid of a small geometry is drawn, no other, and their counts pass a chi-square test at 1 in 1000."""
    geometry = Geometry(16, 2, min_tokens=4, max_tokens=12)
    legal = [(1, 2 * rows, 2 * cols) for rows in range(1, 13) for cols in range(1, 13) if 4 <= rows * cols <= 12]
    drawn = Counter(geometry.grid(picture) for picture in pictures("adversarial", 6000, geometry=geometry))
    assert set(drawn) == set(legal)
    assert len(legal) == 30
    numbered = Counter({legal.index(grid): count for grid, count in drawn.items()})
    assert chi_square(numbered, dict.fromkeys(range(30), 1.0)) < 58.3  # 29 degrees of freedom


def test_adversarial_pictures_are_what_processors_take() -> None:
    """No picture is more than 200 times as long as wide; limits that leave no such grid are an error."""
    drawn = pictures("adversarial", 3000)
    assert all(max(p.height, p.width) <= 200 * min(p.height, p.width) for p in drawn)
    with pytest.raises(TraceError, match="no grid of 211 to 211 tokens"):
        pictures("adversarial", 1, geometry=Geometry(16, min_tokens=211, max_tokens=211))


PINNED: dict[str, list[Request]] = {
    "chat": [(Picture(2144, 544),), (Picture(145, 37), Picture(672, 1856), Picture(640, 672))],
    "catalogue": [
        (Picture(1216, 1216), Picture(1600, 1600), Picture(1120, 1120)),
        (Picture(1600, 1600), Picture(1120, 1120)),
    ],
    "documents": [
        (Picture(3723, 3035), Picture(3117, 4727), Picture(318, 4521)),
        (Picture(2328, 4736), Picture(417, 4312)),
    ],
    "fixed": [(Picture(384, 384),) * 6, (Picture(384, 384),) * 8],
    "video": [(Picture(384, 414, 52),), (Picture(466, 414, 60),)],
    "adversarial": [
        (Picture(9056, 1472), Picture(29568, 448), Picture(25696, 160)),
        (Picture(29760, 416), Picture(22464, 192)),
    ],
}


@pytest.mark.parametrize("preset", traffic.PRESETS)
def test_a_seed_names_its_requests_for_ever(preset: str) -> None:
    """The first two requests of seed 5 are these, and a longer list begins with them; another seed gives others."""
    requests = traffic.generate(preset, 40, seed=5, geometry=MERGED)
    assert requests[:2] == PINNED[preset]
    assert traffic.generate(preset, 2, seed=5, geometry=MERGED) == PINNED[preset]
    assert traffic.generate(preset, 40, seed=6, geometry=MERGED) != requests
    assert all(requests)


def test_requests_do_not_depend_on_the_process() -> None:
    """Another process with another hash seed makes the same requests."""
    code = (
        "from vit_compile.planning.traffic import *; "
        "print([generate(p, 3, seed=1, geometry=Geometry(16, 2, 2)) for p in PRESETS])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": "3"}
    )
    assert done.stdout.strip() == str([traffic.generate(p, 3, seed=1, geometry=MERGED) for p in traffic.PRESETS])


@pytest.mark.parametrize("preset", ["documents", "fixed"])
def test_presets_in_pixels_do_not_depend_on_the_geometry(preset: str) -> None:
    """Two geometries, one list of requests; for clips the sides are the same and only frames are fitted to groups."""
    assert pictures(preset, 50) == pictures(preset, 50, geometry=DENSE)
    clips, others = pictures("video", 50), pictures("video", 50, geometry=DENSE)
    assert [(clip.height, clip.width) for clip in clips] == [(clip.height, clip.width) for clip in others]


def test_a_mistaken_preset_or_count_is_refused() -> None:
    """An unknown preset is an error that lists the known ones; a count is positive."""
    with pytest.raises(TraceError, match=r"'caht' is not a preset: choose one of chat, catalogue, .*adversarial"):
        traffic.generate("caht", 1, seed=0, geometry=MERGED)
    with pytest.raises(BudgetError, match="count=0"):
        traffic.generate("chat", 0, seed=0, geometry=MERGED)
    assert tuple(traffic_presets.DRAWN_BY) == traffic.PRESETS


def test_the_trace_names_its_source() -> None:
    """The histograms that ship with the package say where they are from and under which licence."""
    source = json.loads(CHAT_FILE.read_text(encoding="utf-8"))["source"]
    assert source == "alibaba/ServeGen@f891d11 data/multimodal/mm-image (Apache-2.0), rate-weighted over 35 clients"


# --- files

PICTURES = st.builds(Picture, st.integers(1, 10**6), st.integers(1, 10**6), st.just(1) | st.integers(1, 500))


@settings(max_examples=100)
@given(requests=st.lists(st.lists(PICTURES, min_size=1, max_size=5).map(tuple), min_size=1, max_size=8))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, requests: list[Request]) -> None:
    """A trace comes back equal, and has one line a request."""
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    traffic.write_jsonl(path, requests)
    assert traffic.read_jsonl(path) == requests
    assert path.read_bytes().count(b"\n") == len(requests)


def test_the_format_of_a_line(tmp_path: Path) -> None:
    """Lines are as documented: frames only of clips; a file without its last newline, or with Windows' line ends, is read too."""
    path = tmp_path / "trace.jsonl"
    traffic.write_jsonl(path, [(Picture(336, 448), Picture(240, 320, frames=8))])
    written = '{"images": [{"height": 336, "width": 448}, {"height": 240, "width": 320, "frames": 8}]}\n'
    assert path.read_bytes() == written.encode()
    path.write_bytes(b'{"images": [{"height": 3, "width": 4}]}\r\n{"images": [{"width": 5, "height": 6, "frames": 1}]}')
    assert traffic.read_jsonl(path) == [(Picture(3, 4),), (Picture(6, 5),)]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("", "not a JSON object"),
        ("{", "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
        ('{"images": [{"height": 1' + "0" * 5000 + ', "width": 1}]}', "not a JSON object"),
        ("[]", "expected an object with images"),
        ("{}", "images is missing"),
        ('{"images": []}', "at least one picture"),
        ('{"images": {"height": 1, "width": 1}}', "at least one picture"),
        ('{"images": [7]}', "expected an object with height, width, frames"),
        ('{"images": [{"height": 1, "width": 1}], "id": 3}', "unknown key 'id': known are images"),
        ('{"images": [{"height": 1, "width": 1, "depth": 1}]}', "unknown key 'depth': known are height, width, frames"),
        ('{"images": [{"height": 1}]}', "width is missing"),
        ('{"images": [{"height": 0, "width": 1}]}', "height=0: expected a positive integer"),
        ('{"images": [{"height": 1, "width": 2.0}]}', "width=2.0: expected a positive integer"),
        ('{"images": [{"height": 1, "width": true}]}', "width=True: expected a positive integer"),
        ('{"images": [{"height": 1, "width": NaN}]}', "width=nan: expected a positive integer"),
        ('{"images": [{"height": 1, "width": 1, "frames": null}]}', "frames=None: expected a positive integer"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    """What is wrong in the middle of a file is told with the file, the number of the line and the reason, in a short text."""
    path = tmp_path / "trace.jsonl"
    good = '{"images": [{"height": 1, "width": 1}]}'
    path.write_text(f"{good}\n{line}\n{good}\n", encoding="utf-8")
    with pytest.raises(TraceError) as caught:
        traffic.read_jsonl(path)
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert complaint in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 200


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    """Missing, empty, a folder, not text: each is an error that names the file."""
    (tmp_path / "empty").touch()
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for name, complaint in (("missing", "No such file"), ("empty", "is empty"), ("", "directory"), ("bytes", "cannot be read")):
        with pytest.raises(TraceError, match=complaint) as caught:
            traffic.read_jsonl(tmp_path / name)
        assert str(tmp_path) in str(caught.value)


def test_nothing_is_not_written(tmp_path: Path) -> None:
    """No requests, a request without pictures and a folder that is not there are errors; no file is left behind."""
    path = tmp_path / "trace.jsonl"
    with pytest.raises(TraceError, match="no requests"):
        traffic.write_jsonl(path, [])
    with pytest.raises(TraceError, match="request 2 has no pictures"):
        traffic.write_jsonl(path, [(Picture(1, 1),), ()])
    with pytest.raises(TraceError, match="cannot be written"):
        traffic.write_jsonl(tmp_path / "absent" / "trace.jsonl", [(Picture(1, 1),)])
    assert not path.exists()
