"""A configuration is checked when it is made; every refusal says what is allowed."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vit_compile
from vit_compile.errors import OptionError
from vit_compile.options import BackendOptions
from vit_compile.runtime import config as module
from vit_compile.runtime.config import EncoderConfig

FIELDS = [field.name for field in dataclasses.fields(EncoderConfig)]
CHOICES = {
    "packing": ("greedy", "cost"),
    "mode": ("compiled", "eager"),
    "compiler": ("inductor", "aot_eager", "eager"),
    "outputs": ("copy", "borrow"),
}
FLAGS = ["look_ahead", "enabled", "verify", "strict"]


def make(**given_options: object) -> EncoderConfig:
    """A configuration from values of any type, as a user may give them."""
    return EncoderConfig(**given_options)  # type: ignore[arg-type]


@pytest.mark.default_attention
def test_the_defaults() -> None:
    """Without options everything is inferred, compiled, copied, verified and counted."""
    assert dataclasses.asdict(EncoderConfig()) == {
        "token_budgets": None,
        "path_token_budgets": None,
        "max_items_per_batch": None,
        "max_frames_per_batch": None,
        "packing": "cost",
        "look_ahead": False,
        "mode": "compiled",
        "compiler": "inductor",
        "passes": None,
        "attention": "auto",
        "isolate": True,
        "enabled": True,
        "max_graphs": 128,
        "max_graph_bytes": None,
        "outputs": "copy",
        "log_every": 100,
        "verify": True,
        "strict": False,
    }
    assert EncoderConfig.from_dict(None) == EncoderConfig.from_dict({}) == EncoderConfig()


def test_every_option_is_taken() -> None:
    """One dict with every known key set becomes a record with those values."""
    given_options: dict[str, Any] = {
        "token_budgets": [256, 64],
        "path_token_budgets": {"global": [544, 272], "local": [100, 0]},
        "max_items_per_batch": 8,
        "max_frames_per_batch": 0,
        "packing": "greedy",
        "look_ahead": True,
        "mode": "compiled",
        "compiler": "aot_eager",
        "passes": ["activation_epilogue"],
        "attention": "fa4",
        "isolate": False,
        "enabled": False,
        "max_graphs": 4,
        "max_graph_bytes": 2**30,
        "outputs": "borrow",
        "log_every": 0,
        "verify": False,
        "strict": True,
    }
    assert sorted(given_options) == sorted(FIELDS)
    assert dataclasses.asdict(EncoderConfig.from_dict(given_options)) == given_options | {
        "token_budgets": (64, 256),
        "path_token_budgets": {"global": (272, 544), "local": (0, 100)},
        "passes": ("activation_epilogue",),
    }


def test_hazard_37_an_unknown_key_is_an_error() -> None:
    """A misspelt option is an error that guesses what was meant and lists every option, just as the backend's are."""
    with pytest.raises(OptionError, match=r"unknown option 'max_item_per_batch'\. Did you mean 'max_items_per_batch'") as caught:
        EncoderConfig.from_dict({"max_item_per_batch": 8})
    assert all(name in str(caught.value) for name in FIELDS)
    for bad in ([("mode", "eager")], "mode"):
        with pytest.raises(OptionError, match="must be a dict"):
            EncoderConfig.from_dict(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, allowed in CHOICES.items() for value in allowed])
def test_every_listed_choice_is_accepted(name: str, value: str) -> None:
    """What is documented as a choice is one."""
    assert getattr(make(**{name: value}), name) == value


@pytest.mark.parametrize("bad", ["Copy", "", None, True, ["copy"]])
@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_outside_the_list_names_the_list(name: str, bad: object) -> None:
    """Another word or type is an error with the option, the value and every choice."""
    with pytest.raises(OptionError) as caught:
        make(**{name: bad})
    assert f"{name}={bad!r}" in str(caught.value)
    assert all(repr(choice) in str(caught.value) for choice in CHOICES[name])


@pytest.mark.parametrize("bad", [0, 1, "yes", None])
@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_bools(name: str, bad: object) -> None:
    """A value that is only like a bool is refused."""
    with pytest.raises(OptionError, match=f"{name}={bad!r}: expected True or False"):
        make(**{name: bad})


@pytest.mark.parametrize("bad", [0, -1, True, 1.0, "2", [2]])
@pytest.mark.parametrize("name", ["max_items_per_batch", "max_graphs", "max_graph_bytes"])
def test_counts_are_positive_integers(name: str, bad: object) -> None:
    """Zero, a negative number, a bool, a float or text is an error with the option and the value."""
    with pytest.raises(OptionError) as caught:
        make(**{name: bad})
    assert f"{name}={bad!r}: expected a positive integer" in str(caught.value)


@pytest.mark.parametrize("bad", [-1, True, 1.0, "2", [2]])
@pytest.mark.parametrize("name", ["max_frames_per_batch", "log_every"])
def test_frames_and_log_intervals_may_be_zero(name: str, bad: object) -> None:
    """0 frames means no clips, 0 items between log lines means none; anything below or of another type is an error."""
    assert getattr(make(**{name: 0}), name) == 0
    with pytest.raises(OptionError) as caught:
        make(**{name: bad})
    assert f"{name}={bad!r}: expected an integer, 0 or more" in str(caught.value)


@pytest.mark.parametrize("bad", [0, -64, True, 64.0, "64", None])
def test_budgets_are_positive_integers(bad: object) -> None:
    """One bad budget among good ones is an error that shows it."""
    with pytest.raises(OptionError) as caught:
        make(token_budgets=[64, bad])
    assert f"item of token_budgets={bad!r}: expected a positive integer" in str(caught.value)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ((), "token_budgets is empty: give at least one size in output tokens, or None to infer"),
        ("64", "token_budgets='64': expected a list"),
        (64, "token_budgets=64: expected a list"),
    ],
)
def test_budgets_are_a_list_with_something_in_it(bad: object, message: str) -> None:
    """An empty list would capture nothing without a word; a lone number is not a list."""
    with pytest.raises(OptionError, match=message):
        make(token_budgets=bad)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({}, "path_token_budgets is empty"),
        ([64], r"path_token_budgets=\[64\]: expected a dict"),
        ({"": [64]}, "contains the path ''"),
        ({3: [64]}, "contains the path 3"),
        ({"local": []}, r"path_token_budgets\['local'\]=\(\): give at least one size above 0"),
        ({"local": [0]}, r"path_token_budgets\['local'\]=\(0,\): give at least one size above 0"),
        ({"local": [100, -1]}, r"item of path_token_budgets\['local'\]=-1: expected an integer, 0 or more"),
        ({"local": [True]}, r"item of path_token_budgets\['local'\]=True"),
        ({"local": "100"}, r"path_token_budgets\['local'\]='100': expected a list"),
        ({"local": None}, r"path_token_budgets\['local'\]=None: expected a list"),
    ],
)
def test_ladders_of_paths_are_ladders(bad: object, message: str) -> None:
    """Each path has a name and a ladder with at least one size that is not 0."""
    with pytest.raises(OptionError, match=message):
        make(path_token_budgets=bad)


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=20))
def test_ladders_are_kept_sorted_and_once(sizes: list[int]) -> None:
    """Whatever the order and repeats, budgets ascend and each appears once; a path's 0 comes first."""
    kept = make(token_budgets=sizes, path_token_budgets={"local": [*sizes, 0]})
    assert kept.token_budgets == tuple(sorted(set(sizes)))
    assert kept.path_token_budgets == {"local": (0, *kept.token_budgets)}
    assert all(small < large for small, large in pairwise(kept.token_budgets))


def test_hazard_37_look_ahead_goes_with_greedy_only() -> None:
    """Packing by cost always looks ahead: asking for it there would be a flag that does nothing, and is an error that says so."""
    assert make(packing="greedy", look_ahead=True).look_ahead
    with pytest.raises(OptionError, match=r"look_ahead=True is for packing=\"greedy\", and packing='cost' always looks ahead"):
        make(look_ahead=True)


@pytest.mark.parametrize("compiler", ["aot_eager", "eager"])
def test_hazard_37_a_compiler_goes_with_compiled_only(compiler: str) -> None:
    """mode="eager" compiles nothing, so that a chosen compiler is an error and not ignored."""
    assert make(mode="eager").compiler == "inductor"
    with pytest.raises(OptionError, match=f"compiler='{compiler}' would do nothing, since mode=\"eager\""):
        make(mode="eager", compiler=compiler)


def test_more_budgets_than_graphs_names_both() -> None:
    """Ladders longer than max_graphs are an error with both numbers; repeats and a path's 0 do not count."""
    with pytest.raises(OptionError, match="3 token_budgets, but max_graphs=2"):
        make(token_budgets=[1, 2, 3], max_graphs=2)
    with pytest.raises(OptionError, match="3 budgets in path_token_budgets, but max_graphs=2"):
        make(path_token_budgets={"a": [1, 2], "b": [0, 1]}, max_graphs=2)
    assert make(token_budgets=[1, 2, 2], path_token_budgets={"a": [1], "b": [0, 1]}, max_graphs=2)


def test_numpy_integers_become_plain_ones() -> None:
    """NumPy integers are taken and kept as plain ints."""
    made = make(token_budgets=np.array([64, 32]), max_graphs=np.int64(2), path_token_budgets={"a": np.array([3])})
    assert made.path_token_budgets is not None
    assert [type(n) for n in (*(made.token_budgets or ()), made.max_graphs, *made.path_token_budgets["a"])] == [int] * 4


@pytest.mark.parametrize("name", FIELDS)
def test_the_record_is_frozen(name: str) -> None:
    """No option changes after the check."""
    made = EncoderConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, name, getattr(made, name))


def test_the_callers_dict_is_not_kept() -> None:
    """Changing the dict that was given changes no configuration."""
    ladders: dict[str, tuple[int, ...]] = {"local": (100,)}
    made = make(path_token_budgets=ladders)
    ladders["local"] = (7,)
    assert made.path_token_budgets == {"local": (100,)}


def test_configurations_compare_hash_and_travel() -> None:
    """Equal ones are one key, ladders of paths tell them apart, and a rank can send its configuration to another."""
    one, same = (
        make(token_budgets=[2, 1], path_token_budgets={"a": [1]}),
        make(token_budgets=[1, 2], path_token_budgets={"a": [1]}),
    )
    assert len({one, same}) == 1
    assert one != make(token_budgets=[1, 2], path_token_budgets={"a": [2]})
    assert pickle.loads(pickle.dumps(one)) == one
    assert dataclasses.replace(one, strict=True).strict


def test_options_are_keyword_only() -> None:
    """Fifteen options by position would be a puzzle."""
    with pytest.raises(TypeError):
        EncoderConfig((64,))  # type: ignore[call-arg]


def test_every_option_is_documented() -> None:
    """In the source, a docstring follows every field."""
    lines = Path(module.__file__).read_text(encoding="utf-8").splitlines()
    for name in FIELDS:
        (at,) = [i for i, line in enumerate(lines) if line.startswith(f"    {name}: ")]
        assert lines[at + 1].startswith('    """'), name


@pytest.mark.default_passes
def test_words_mean_the_same_as_the_backends() -> None:
    """Options that the backend has too take the same values and have the same defaults, but for the number of graphs."""
    shared = {field.name for field in dataclasses.fields(BackendOptions)} & set(FIELDS)
    assert shared == {
        "mode",
        "token_budgets",
        "compiler",
        "max_graphs",
        "max_graph_bytes",
        "outputs",
        "strict",
        "attention",
        "passes",
    }
    for name in shared - {"mode", "max_graphs"}:
        assert getattr(EncoderConfig(), name) == getattr(BackendOptions(), name), name


def test_a_configuration_can_be_checked_without_torch() -> None:
    """Configuration, vLLM's names and ladders import no torch: a server can check them before it loads anything."""
    code = (
        "import sys, types\n"
        "sys.modules['torch'] = None\n"
        "package = types.ModuleType('vit_compile'); package.__path__ = [sys.argv[1]]\n"
        "sys.modules['vit_compile'] = package\n"
        "from vit_compile.runtime import ladders\n"
        "from vit_compile.runtime.config import EncoderConfig\n"
        "print(EncoderConfig.from_vllm({'encoder_cudagraph_token_budgets': [2, 1]}).token_budgets)\n"
    )
    package = str(Path(vit_compile.__file__).parent)
    done = subprocess.run([sys.executable, "-c", code, package], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "(1, 2)"), done.stderr
