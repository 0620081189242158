"""Options are checked before any tracing; every refusal says what is allowed."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vit_compile import options as module
from vit_compile.errors import BudgetError, OptionError
from vit_compile.options import BackendOptions

FIELDS = [field.name for field in dataclasses.fields(BackendOptions)]
CHOICES = {
    "mode": module.MODES,
    "padding": module.PADDINGS,
    "compiler": module.COMPILERS,
    "outputs": module.OUTPUTS,
    "checks": module.CHECKS,
}


def test_no_options_are_the_defaults() -> None:
    """None and an empty dict give the same, valid record: capture what is seen, auto mode."""
    assert BackendOptions.from_dict(None) == BackendOptions.from_dict({}) == BackendOptions()
    assert BackendOptions().mode == "auto"
    assert BackendOptions().token_budgets is None
    assert BackendOptions().budget_rows() == BackendOptions().compile_rows() == ()


def test_every_option_is_taken() -> None:
    """One dict with every known key set becomes a record with those values."""
    given_options = {
        "mode": "piecewise",
        "token_budgets": [256, 64],
        "spatial_merge_size": 2,
        "patches_per_row": 4,
        "splitting_ops": ["my::attention"],
        "padding": "exact",
        "compiler": "eager",
        "compile_sizes": [64],
        "passes": ["patch_embedding_gemm"],
        "max_graphs": 4,
        "max_graph_bytes": 2**30,
        "outputs": "borrow",
        "debug_dir": "dumps",
        "checks": "full",
        "attention": "fa4",
        "strict": True,
    }
    assert sorted(given_options) == sorted(FIELDS)
    read = dataclasses.asdict(BackendOptions.from_dict(given_options))
    assert read == given_options | {
        "token_budgets": (64, 256),
        "splitting_ops": ("my::attention",),
        "compile_sizes": (64,),
        "passes": ("patch_embedding_gemm",),
    }


def test_an_unknown_key_lists_the_known_ones() -> None:
    """A misspelt option is an error that guesses what was meant and lists every option."""
    with pytest.raises(OptionError, match=r"unknown option 'token_budget'\. Did you mean 'token_budgets'") as caught:
        BackendOptions.from_dict({"token_budget": [64]})
    assert all(name in str(caught.value) for name in FIELDS)


@pytest.mark.parametrize("key", ["zzz", 7, None])
def test_a_key_like_no_other_is_refused_without_a_guess(key: object) -> None:
    """A key that resembles nothing, or is not even text, is an OptionError too."""
    with pytest.raises(OptionError, match="unknown option") as caught:
        BackendOptions.from_dict({key: 1})  # type: ignore[dict-item]
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize("bad", [["mode"], "mode", 3])
def test_options_are_a_dict(bad: object) -> None:
    """Anything but a dict is refused by type."""
    with pytest.raises(OptionError, match=f"must be a dict, not {type(bad).__name__}"):
        BackendOptions.from_dict(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, allowed in CHOICES.items() for value in allowed])
def test_every_listed_choice_is_accepted(name: str, value: str) -> None:
    """What an error lists as allowed is allowed."""
    assert getattr(BackendOptions(**{name: value}), name) == value  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", ["Full", "", None, True, 1, ["full"]])
@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_outside_the_list_names_the_list(name: str, bad: object) -> None:
    """Another word, another case or another type is an error with the option, the value and every choice."""
    with pytest.raises(OptionError) as caught:
        BackendOptions(**{name: bad})  # type: ignore[arg-type]
    assert f"{name}={bad!r}" in str(caught.value)
    assert all(repr(choice) in str(caught.value) for choice in CHOICES[name])


@pytest.mark.parametrize("bad", [0, -1, True, 1.0, "2", [2]])
@pytest.mark.parametrize("name", ["spatial_merge_size", "patches_per_row", "max_graphs", "max_graph_bytes"])
def test_counts_are_positive_integers(name: str, bad: object) -> None:
    """Zero, a negative number, a bool, a float or text is an error with the option and the value."""
    with pytest.raises(OptionError) as caught:
        BackendOptions(**{name: bad})  # type: ignore[arg-type]
    assert f"{name}={bad!r}: expected a positive integer" in str(caught.value)


@pytest.mark.parametrize("bad", [0, -64, True, 64.0, "64", None])
@pytest.mark.parametrize("name", ["token_budgets", "compile_sizes"])
def test_sizes_are_positive_integers(name: str, bad: object) -> None:
    """One bad size among good ones is an error that shows it."""
    with pytest.raises(OptionError) as caught:
        BackendOptions(**{name: [64, bad]})  # type: ignore[arg-type]
    assert f"item of {name}={bad!r}: expected a positive integer" in str(caught.value)


@pytest.mark.parametrize("bad", [64, "64", b"64", {64: 1}])
@pytest.mark.parametrize("name", ["token_budgets", "compile_sizes", "splitting_ops", "passes"])
def test_lists_are_lists(name: str, bad: object) -> None:
    """A lone number, text or a dict in place of a list is refused: text would be taken apart into letters."""
    with pytest.raises(OptionError, match=f"{name}=.*expected a list"):
        BackendOptions(**{name: bad})  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", ["", "  ", 3, None])
@pytest.mark.parametrize("name", ["splitting_ops", "passes"])
def test_names_are_text(name: str, bad: object) -> None:
    """An empty name or another type among names is refused."""
    with pytest.raises(OptionError, match=f"{name} contains .*expected non-empty names"):
        BackendOptions(**{name: ["patch_embedding_gemm", bad]})  # type: ignore[arg-type]


def test_an_unknown_pass_lists_the_passes() -> None:
    """A pass that does not exist is an error with the names of those that do."""
    with pytest.raises(OptionError, match="passes='fuse_everything': expected one of 'patch_embedding_gemm'"):
        BackendOptions(passes=("fuse_everything",))


def test_no_passes_is_not_all_passes() -> None:
    """An empty list of passes switches all off; None leaves the choice to the backend."""
    assert BackendOptions(passes=()).passes == ()
    assert BackendOptions().passes is None


def test_an_empty_list_of_budgets_is_refused() -> None:
    """Budgets are given or left to be seen; an empty list would silently capture nothing."""
    with pytest.raises(OptionError, match="token_budgets is empty"):
        BackendOptions(token_budgets=())


@pytest.mark.parametrize("bad", [1, "yes", None])
def test_strict_is_a_bool(bad: object) -> None:
    """A truthy value that is not a bool is refused."""
    with pytest.raises(OptionError, match=r"strict=.*expected True or False"):
        BackendOptions(strict=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", ["", 3, b"dumps", ["dumps"]])
def test_debug_dir_is_a_path(bad: object) -> None:
    """An empty path, bytes or another type is refused: an empty one would write into the working folder."""
    with pytest.raises(OptionError, match=r"debug_dir=.*expected a folder's path"):
        BackendOptions(debug_dir=bad)  # type: ignore[arg-type]


def test_debug_dir_may_be_a_path_object(tmp_path: Path) -> None:
    """A pathlib path is taken and kept as text."""
    assert BackendOptions(debug_dir=tmp_path).debug_dir == str(tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"token_budgets": [64]}, "token_budgets"),
        ({"max_graphs": 3}, "max_graphs"),
        ({"max_graph_bytes": 1}, "max_graph_bytes"),
        ({"outputs": "borrow"}, 'outputs="borrow"'),
    ],
)
def test_nothing_about_graphs_goes_with_mode_none(extra: dict[str, object], named: str) -> None:
    """An option that mode="none" would ignore is an error, not a flag that silently does nothing."""
    with pytest.raises(OptionError, match='mode="none" captures nothing') as caught:
        BackendOptions.from_dict({"mode": "none", **extra})
    assert str(caught.value).startswith(named)


def test_more_budgets_than_graphs_names_both() -> None:
    """A ladder longer than max_graphs is an error with both numbers; repeats do not count."""
    with pytest.raises(OptionError, match="3 token_budgets, but max_graphs=2"):
        BackendOptions(token_budgets=(1, 2, 3), max_graphs=2)
    assert BackendOptions(token_budgets=(1, 2, 2, 1), max_graphs=2).token_budgets == (1, 2)


@pytest.mark.parametrize("name", ["token_budgets", "compile_sizes"])
def test_a_size_that_makes_no_whole_rows_is_refused_at_once(name: str) -> None:
    """A budget or compile size whose patches do not fill whole rows fails when the options are made, not at capture."""
    with pytest.raises(BudgetError, match=r"100 output tokens.*patches_per_row=256"):
        BackendOptions.from_dict({name: [256, 100], "patches_per_row": 256})


@pytest.mark.parametrize(
    ("merge", "per_row", "budgets", "rows"),
    [(1, 1, [64, 256], (64, 256)), (2, 1, [256, 64], (256, 1024)), (1, 256, [1024, 256], (1, 4)), (2, 256, [64, 128], (1, 2))],
)
def test_budgets_are_given_in_tokens_and_read_in_rows(
    merge: int, per_row: int, budgets: list[int], rows: tuple[int, ...]
) -> None:
    """Rows = tokens x merge^2 / patches per row, in ascending order, for budgets and compile sizes alike."""
    made = BackendOptions.from_dict(
        {"token_budgets": budgets, "compile_sizes": budgets, "spatial_merge_size": merge, "patches_per_row": per_row}
    )
    assert made.budget_rows() == made.compile_rows() == rows
    assert tuple(made.rows(tokens) for tokens in sorted(budgets)) == rows


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=20))
def test_budgets_are_kept_sorted_and_once(budgets: list[int]) -> None:
    """Whatever the order and repeats, budgets ascend and each appears once."""
    kept = BackendOptions(token_budgets=tuple(budgets)).token_budgets
    assert kept is not None
    assert all(small < large for small, large in pairwise(kept))
    assert all(b in kept for b in budgets)
    assert all(b in budgets for b in kept)


def test_names_keep_their_order() -> None:
    """Names stay in the given order, each once: passes run in it."""
    assert BackendOptions(splitting_ops=("b::b", "a::a", "b::b")).splitting_ops == ("b::b", "a::a")


def test_numpy_integers_become_plain_ones() -> None:
    """NumPy integers are taken and kept as plain ints."""
    made = BackendOptions.from_dict({"token_budgets": np.array([64, 32]), "max_graphs": np.int64(2)})
    assert [type(n) for n in (*(made.token_budgets or ()), made.max_graphs)] == [int, int, int]


@pytest.mark.parametrize("name", FIELDS)
def test_the_record_is_frozen(name: str) -> None:
    """No option changes after the check, and none can be added."""
    made = BackendOptions()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, name, getattr(made, name))


def test_equal_options_are_one_key() -> None:
    """Options that mean the same are equal and hash alike, so they can key a cache."""
    assert len({BackendOptions(token_budgets=(2, 1)), BackendOptions(token_budgets=(1, 2, 2))}) == 1


def test_options_are_keyword_only() -> None:
    """Fifteen options by position would be a puzzle."""
    with pytest.raises(TypeError):
        BackendOptions("full")  # type: ignore[call-arg]


def test_every_option_is_documented() -> None:
    """In the source, a docstring follows every field."""
    lines = Path(module.__file__).read_text(encoding="utf-8").splitlines()
    for name in FIELDS:
        (at,) = [i for i, line in enumerate(lines) if line.startswith(f"    {name}: ")]
        assert lines[at + 1].startswith('    """'), name


def test_options_can_be_checked_without_torch() -> None:
    """The files behind the options import no torch: a server can check a configuration before it loads anything."""
    package = Path(module.__file__).parent
    code = (
        "import sys, types\n"
        "sys.modules['torch'] = None\n"
        "package = types.ModuleType('vit_compile'); package.__path__ = [sys.argv[1]]\n"
        "sys.modules['vit_compile'] = package\n"
        "from vit_compile.options import BackendOptions\n"
        "print(BackendOptions(token_budgets=(2, 1)).token_budgets)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(package)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "(1, 2)"), done.stderr
