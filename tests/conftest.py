"""Every test starts from nothing: no compiled graph, no capture, no count."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

import vit_compile
from vit_compile.attention import choice
from vit_compile.options import BackendOptions
from vit_compile.runtime import known_costs
from vit_compile.runtime.config import EncoderConfig

torch.set_num_threads(1)  # tiny tensors: a second thread costs more than it brings
logging.getLogger("torch.__trace").disabled = True  # else a failure prints thousands of empty lines


def pytest_addoption(parser: pytest.Parser) -> None:
    """The whole suite with other defaults: every test that does not name these options itself runs with them."""
    parser.addoption("--passes", help="graph passes by name, with commas between them; `none` for no pass at all")
    parser.addoption("--attention", help="attention kernel of graphs, such as `default` (shows on a GPU only)")


def pytest_configure(config: pytest.Config) -> None:
    """Changes what a default is, before any test module is imported."""
    passes, attention = config.getoption("--passes"), config.getoption("--attention")
    if passes is not None:
        BackendOptions.__init__.__kwdefaults__["passes"] = () if passes == "none" else tuple(passes.split(","))
    for options in (BackendOptions, EncoderConfig) if attention is not None else ():
        options.__init__.__kwdefaults__["attention"] = attention


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of the defaults themselves."""
    for option in ("passes", "attention"):
        if config.getoption(f"--{option}") is not None:
            reason = pytest.mark.skip(reason=f"about what is done without --{option}")
            for item in items:
                if item.get_closest_marker(f"default_{option}"):
                    item.add_marker(reason)


@pytest.fixture(autouse=True)
def _from_nothing() -> Iterator[None]:
    """Forget what earlier tests compiled, captured, counted and measured."""
    torch.compiler.reset()
    vit_compile.clear()
    vit_compile.counters.reset()
    choice.forget()
    known_costs.forget()
    yield
    torch.compiler.reset()
    vit_compile.clear()
