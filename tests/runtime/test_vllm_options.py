"""vLLM's options by their own names: each acts, or says that it does not and why."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from vit_compile.errors import OptionError
from vit_compile.runtime import vllm_options
from vit_compile.runtime.config import EncoderConfig
from vit_compile.runtime.vllm_options import explain_vllm

SIDES = [32, 64, 94, 128, 188, 256, 312]

EVERY_OPTION: dict[str, Any] = {
    "cudagraph_mm_encoder": True,
    "encoder_cudagraph_token_budgets": [512, 256],
    "encoder_cudagraph_max_vision_items_per_batch": 8,
    "encoder_cudagraph_max_frames_per_batch": 64,
    "mm_encoder_tp_mode": "data",
    "encoder_cudagraph_piecewise": False,
    "encoder_cudagraph_capture_sizes": [1024],
    "encoder_spatial_merge_size": 2,
    "encoder_cudagraph_bucket_sizes": [32, 94],
    "encoder_cudagraph_grid_configs": [(1, 16, 64), (4, 32, 32)],
    "encoder_cudagraph_padded_mode": True,
    "encoder_cudagraph_max_grid_size": 128,
    "encoder_cudagraph_verbose": True,
    "encoder_cudagraph_one_by_one": False,
    "encoder_cudagraph_batch_sizes": [4],
}


def short(**options: Any) -> dict[str, Any]:
    """Options by the part of their name that tells them apart."""
    names = {name.removeprefix("encoder_cudagraph_").removeprefix("encoder_"): name for name in EVERY_OPTION}
    return {names[name]: value for name, value in options.items()}


def config(**options: Any) -> EncoderConfig:
    """The configuration of options by their short names."""
    return EncoderConfig.from_vllm(short(**options))


def became(**options: Any) -> list[str]:
    """What each option became, in the given order."""
    return list(explain_vllm(short(**options)).values())


def test_every_documented_option_is_known() -> None:
    """All of them together make one configuration, and nothing beyond the documented names is read."""
    made = EncoderConfig.from_vllm(EVERY_OPTION)
    assert made == EncoderConfig(
        # 256 and 512; 1024; squares of 32 and 94; two grids; four images of each.
        token_budgets=(256, 512, 1024, 2209, 4096, 8836),
        max_items_per_batch=8,
        max_frames_per_batch=64,
    )
    assert sorted(vllm_options._CHECKS) == sorted(EVERY_OPTION)


def test_nothing_given_changes_nothing() -> None:
    """Only options that are given act: without any, the configuration is the default one, not the engine's."""
    assert EncoderConfig.from_vllm({}) == EncoderConfig.from_vllm(None) == EncoderConfig()
    assert explain_vllm({}) == {}


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"cudagraph_mm_encoder": True}, {"enabled": True}),
        ({"cudagraph_mm_encoder": False}, {"enabled": False}),
        ({"token_budgets": [512, 64, 512]}, {"token_budgets": (64, 512)}),
        ({"token_budgets": []}, {}),
        ({"token_budgets": None}, {}),
        ({"capture_sizes": [2209, 256]}, {"token_budgets": (256, 2209)}),
        ({"capture_sizes": [256], "token_budgets": [64]}, {"token_budgets": (64, 256)}),
        ({"capture_sizes": [256], "piecewise": True}, {"token_budgets": (256,)}),
        ({"max_vision_items_per_batch": 8}, {"max_items_per_batch": 8}),
        ({"max_vision_items_per_batch": 0}, {}),
        ({"max_frames_per_batch": 32}, {"max_frames_per_batch": 32}),
        ({"max_frames_per_batch": 0}, {"max_frames_per_batch": 0}),
        ({"max_frames_per_batch": None}, {}),
        ({"one_by_one": True}, {"max_items_per_batch": 1}),
        ({"one_by_one": True, "max_vision_items_per_batch": 0}, {"max_items_per_batch": 1}),
        ({"one_by_one": True, "max_vision_items_per_batch": 1}, {"max_items_per_batch": 1}),
        ({"one_by_one": False}, {}),
        ({"bucket_sizes": SIDES}, {"token_budgets": (256, 1024, 2209, 4096, 8836, 16384)}),
        ({"bucket_sizes": SIDES, "max_grid_size": 94}, {"token_budgets": (256, 1024, 2209)}),
        ({"bucket_sizes": SIDES, "max_grid_size": 312}, {"token_budgets": (256, 1024, 2209, 4096, 8836, 16384, 24336)}),
        ({"bucket_sizes": [30, 60], "spatial_merge_size": 3}, {"token_budgets": (100, 400)}),
        ({"bucket_sizes": [16, 33], "spatial_merge_size": 1}, {"token_budgets": (256, 1089)}),
        ({"grid_configs": [[1, 32, 32], (1, 16, 64), (4, 32, 32)]}, {"token_budgets": (256, 1024)}),
        ({"grid_configs": [(1, 16, 64), (1, 64, 128)], "max_grid_size": 64}, {"token_budgets": (256,)}),
        ({"grid_configs": "common"}, {}),
        ({"grid_configs": [], "bucket_sizes": None, "batch_sizes": []}, {}),
        ({"bucket_sizes": [32, 64], "batch_sizes": [4]}, {"token_budgets": (256, 1024, 4096)}),
        ({"grid_configs": [(1, 32, 32)], "batch_sizes": [2, 3]}, {"token_budgets": (256, 512, 768)}),
        ({"bucket_sizes": [32], "batch_sizes": [4], "one_by_one": True}, {"token_budgets": (256, 1024)}),
        ({"batch_sizes": [4], "one_by_one": True}, {"max_items_per_batch": 1}),
        ({"batch_sizes": [4]}, {}),
        ({"padded_mode": True}, {}),
        ({"padded_mode": False}, {}),
        ({"verbose": True, "mm_encoder_tp_mode": "data", "spatial_merge_size": 4, "max_grid_size": 9}, {}),
        ({"piecewise": True, "padded_mode": False, "one_by_one": False, "cudagraph_mm_encoder": False}, {"enabled": False}),
    ],
)
def test_what_options_become(options: dict[str, Any], fields: dict[str, Any]) -> None:
    """Sizes of every kind are one ladder, images one at a time are a cap of one item, and nothing else is touched."""
    assert config(**options) == EncoderConfig(**fields)


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"cudagraph_mm_encoder": False}, ["enabled=False"]),
        ({"token_budgets": [512, 64]}, ["token_budgets=(64, 512)"]),
        ({"token_budgets": []}, ["token_budgets=None: inferred"]),
        ({"max_vision_items_per_batch": 8}, ["max_items_per_batch=8"]),
        ({"max_vision_items_per_batch": 0}, ["max_items_per_batch=None: inferred"]),
        ({"max_frames_per_batch": None}, ["max_frames_per_batch=None: inferred"]),
        ({"max_frames_per_batch": 0}, ["max_frames_per_batch=0"]),
        (
            {"token_budgets": [], "capture_sizes": [256]},
            ["no effect: the ladder is that of encoder_cudagraph_capture_sizes", "token_budgets=(256,)"],
        ),
        (
            {"token_budgets": [64], "bucket_sizes": [32], "spatial_merge_size": 2},
            [
                "token_budgets=(64, 256), of which this gives (64,)",
                "token_budgets=(64, 256), of which this gives (256,)",
                "used by encoder_cudagraph_bucket_sizes",
            ],
        ),
        (
            {"bucket_sizes": [32, 64], "max_grid_size": 32},
            [
                "token_budgets=(256,); encoder_spatial_merge_size=2 is assumed; too large for a graph: (1, 64, 64)",
                "used by encoder_cudagraph_bucket_sizes",
            ],
        ),
        (
            {"one_by_one": True, "max_vision_items_per_batch": 0},
            ["max_items_per_batch=1", "no effect: encoder_cudagraph_one_by_one sets max_items_per_batch=1"],
        ),
    ],
)
def test_it_says_what_options_became(options: dict[str, Any], texts: list[str]) -> None:
    """The text names the field and its value; where several options make one ladder, each one's part; and what was assumed."""
    assert became(**options) == texts


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"piecewise": True}, "'mode': 'piecewise'"),
        ({"piecewise": False}, "captured anyway"),
        ({"padded_mode": True}, "padded to the next budget anyway"),
        ({"padded_mode": False}, "'padding': 'exact'"),
        ({"verbose": True}, "logger 'vit_compile'"),
        ({"one_by_one": False}, "items share replays anyway"),
        ({"batch_sizes": [4]}, "without encoder_cudagraph_bucket_sizes or encoder_cudagraph_grid_configs"),
        ({"batch_sizes": []}, "names no number of images"),
        ({"bucket_sizes": []}, "names no size"),
        ({"grid_configs": None}, "names no grid"),
        ({"grid_configs": "common"}, "list grids (t, h, w)"),
        ({"max_grid_size": 128}, "no option gives a size in patches"),
        ({"spatial_merge_size": 2}, "no option gives a size in patches"),
        ({"mm_encoder_tp_mode": "data"}, "pass group= to EncoderCudaGraphManager"),
        ({"mm_encoder_tp_mode": "weights"}, "without group="),
    ],
)
def test_hazard_37_what_does_nothing_says_so(options: dict[str, Any], reason: str) -> None:
    """An option without effect changes no field, and is told as such with the reason or the way to get what was meant."""
    (text,) = became(**options)
    assert text.startswith("no effect")
    assert reason in text
    assert config(**options) == EncoderConfig()


def test_hazard_37_one_by_one_beside_batch_sizes_is_told() -> None:
    """Batch sizes that act win over images one at a time, and the latter says so."""
    _, _, text = became(bucket_sizes=[32], batch_sizes=[4], one_by_one=True)
    assert text == "no effect: encoder_cudagraph_batch_sizes has 4 images share a replay"


def test_hazard_37_every_given_option_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Making a configuration writes one INFO line for each given option, and for no other; asking what it would be, none."""
    with caplog.at_level(logging.INFO, logger="vit_compile"):
        texts = explain_vllm(EVERY_OPTION)
        assert caplog.messages == []
        EncoderConfig.from_vllm(EVERY_OPTION)
    assert list(texts) == list(EVERY_OPTION)
    assert caplog.messages == [f"{name}: {text}" for name, text in texts.items()]
    assert {record.levelno for record in caplog.records} == {logging.INFO}


def test_hazard_37_an_unknown_option_is_an_error() -> None:
    """A misspelt name is an error that guesses what was meant and lists every name; other options of the engine are unknown."""
    for read in (EncoderConfig.from_vllm, explain_vllm):
        with pytest.raises(OptionError, match="Did you mean 'encoder_cudagraph_token_budgets'") as caught:
            read({"encoder_cudagraph_token_budget": [64]})
        assert all(name in str(caught.value) for name in EVERY_OPTION)
        with pytest.raises(OptionError, match="unknown option 'token_budgets'"):
            read({"token_budgets": [64]})
        with pytest.raises(OptionError, match="must be a dict"):
            read([("cudagraph_mm_encoder", True)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"cudagraph_mm_encoder": True},
        {"bucket_sizes": [32]},
        {"grid_configs": [(1, 32, 32)]},
        {"grid_configs": "common"},
        {"padded_mode": True},
        {"max_grid_size": 128},
        {"one_by_one": True},
        {"batch_sizes": [4]},
    ],
)
def test_piecewise_excludes_full_capture(options: dict[str, Any]) -> None:
    """Asking for a graph per piece and for a graph of the whole is a contradiction that names both; either alone is fine."""
    with pytest.raises(OptionError, match="encoder_cudagraph_piecewise=True excludes capture of the whole") as caught:
        config(piecewise=True, **options)
    assert next(iter(short(**options))) in str(caught.value)
    config(piecewise=False, **options)
    config(piecewise=True, capture_sizes=[256])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"one_by_one": True, "max_vision_items_per_batch": 8}, r"one_by_one=True allows one item.*items_per_batch=8 allows 8"),
        (
            {"bucket_sizes": [32], "batch_sizes": [2, 4], "max_vision_items_per_batch": 3},
            r"batch_sizes has 4 images share a replay, and .*items_per_batch=3 allows 3: raise it to 4",
        ),
    ],
)
def test_two_numbers_of_items_contradict(options: dict[str, Any], message: str) -> None:
    """Options that allow different numbers of items in one replay are an error with both numbers."""
    with pytest.raises(OptionError, match=message):
        config(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cudagraph_mm_encoder": 1}, "cudagraph_mm_encoder=1: expected True or False"),
        ({"piecewise": "yes"}, "encoder_cudagraph_piecewise='yes': expected True or False"),
        ({"padded_mode": None}, "encoder_cudagraph_padded_mode=None: expected True or False"),
        ({"verbose": 0}, "encoder_cudagraph_verbose=0: expected True or False"),
        ({"one_by_one": 1}, "encoder_cudagraph_one_by_one=1: expected True or False"),
        ({"token_budgets": [64, 0]}, "item of encoder_cudagraph_token_budgets=0: expected a positive integer"),
        ({"capture_sizes": 64}, "encoder_cudagraph_capture_sizes=64: expected a list"),
        ({"bucket_sizes": [-2]}, "item of encoder_cudagraph_bucket_sizes=-2: expected a positive integer"),
        ({"bucket_sizes": [33]}, "encoder_cudagraph_bucket_sizes: grid .*not a multiple of spatial_merge_size=2: use 32 or 34"),
        ({"bucket_sizes": [300, 400]}, r"encoder_cudagraph_bucket_sizes: no size is left.*max_grid_size=256.*\(1, 300, 300\)"),
        ({"grid_configs": [(9, 64, 2), (1, 32, 32)], "max_grid_size": 8}, r"grid_configs: no size is left.*\(1, 32, 32\)"),
        ({"grid_configs": [(1, 32)]}, r"encoder_cudagraph_grid_configs: grid \(1, 32\): expected \(t, h, w\)"),
        ({"grid_configs": [(1, 32, 33)]}, "encoder_cudagraph_grid_configs: grid .*width of 33"),
        ({"grid_configs": " "}, "encoder_cudagraph_grid_configs=' ': expected a list of grids"),
        ({"batch_sizes": [0]}, "item of encoder_cudagraph_batch_sizes=0"),
        ({"max_grid_size": 0}, "encoder_cudagraph_max_grid_size=0: expected a positive integer"),
        ({"spatial_merge_size": 0}, "encoder_spatial_merge_size=0: expected a positive integer"),
        ({"max_vision_items_per_batch": -1}, "items_per_batch=-1: expected an integer, 0 or more"),
        ({"max_frames_per_batch": 1.5}, "frames_per_batch=1.5: expected an integer, 0 or more"),
        ({"mm_encoder_tp_mode": "both"}, "mm_encoder_tp_mode='both': expected one of 'weights', 'data'"),
    ],
)
def test_values_are_checked_under_their_own_names(options: dict[str, Any], message: str) -> None:
    """A value that cannot be used is an error in the names that were given, also where the option would have no effect."""
    for read in (EncoderConfig.from_vllm, explain_vllm):
        with pytest.raises(OptionError, match=message):
            read(short(**options))


def test_more_sizes_than_the_default_cap_raise_the_cap() -> None:
    """The engine has no cap on the number of graphs, so a long list of sizes is taken as it is, and the raised cap is told."""
    sizes = list(range(1, 151))
    made = config(capture_sizes=sizes)
    assert (made.token_budgets, made.max_graphs) == (tuple(sizes), 150)
    assert became(capture_sizes=sizes) == [f"token_budgets={tuple(sizes)}, max_graphs=150"]
