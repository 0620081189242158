"""Every way of replacing weights is noticed, and changes in place are not: graphs read those."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime import toys
from tests.runtime.toys import PackedTable, captured, largest_difference, packed_reference, packed_request, packed_table
from vit_compile.runtime.weights import WeightWatch, modules_of, settings_of, tensors_of, train_mode
from vit_compile.stats import counters


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("missing", None)


def tower() -> nn.Sequential:
    """Two blocks, in eval mode."""
    return nn.Sequential(Block(), Block()).eval()


def in_last(function: Callable[[Any], Any]) -> Callable[[nn.Sequential], Any]:
    """The same for the last block."""
    return lambda module: function(module[1])


def assign_all(module: nn.Module) -> None:
    """A checkpoint whose tensors become the parameters."""
    state = {name: value.clone() for name, value in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


def merge_lora(block: Block) -> None:
    """As merging adapters is often written: a new tensor behind the same parameter."""
    block.linear.weight.data = block.linear.weight.data + torch.ones(4, 1) @ torch.ones(1, 4)


def swap_linear(block: Block) -> None:
    """As quantisation does it."""
    block.linear = nn.Linear(4, 4)


REPLACED: dict[str, Callable[[nn.Sequential], Any]] = {
    "new parameter": in_last(lambda block: setattr(block.linear, "weight", nn.Parameter(torch.ones(4, 4)))),
    "parameter of equal values": in_last(
        lambda block: setattr(block.linear, "bias", nn.Parameter(block.linear.bias.detach().clone()))
    ),
    "load_state_dict(assign=True)": assign_all,
    "to(dtype)": lambda module: module.to(torch.float64),
    "data replaced": in_last(merge_lora),
    "data swapped": in_last(lambda block: torch.utils.swap_tensors(block.linear.bias, nn.Parameter(torch.ones(4)))),
    "submodule swapped": in_last(swap_linear),
    "submodule of equal type added": lambda module: module.append(Block()),
    "submodule added": in_last(lambda block: block.add_module("adapter", nn.Identity())),
    "submodule removed": in_last(lambda block: delattr(block, "norm")),
    "submodule set to None": in_last(lambda block: setattr(block, "norm", None)),
    "parameter added": in_last(lambda block: block.linear.register_parameter("extra", nn.Parameter(torch.ones(1)))),
    "parameter removed": in_last(lambda block: delattr(block.linear, "bias")),
    "parameter set to None": in_last(lambda block: setattr(block.linear, "bias", None)),
    "parameter renamed": in_last(lambda block: block.linear.register_parameter("shift", block.linear._parameters.pop("bias"))),
    "buffer replaced": in_last(lambda block: setattr(block, "table", torch.arange(4.0))),
    "buffer added": in_last(lambda block: block.register_buffer("more", torch.ones(1))),
    "buffer removed": in_last(lambda block: delattr(block, "table")),
    "buffer given a value": in_last(lambda block: setattr(block, "missing", torch.ones(1))),
    "buffer given new memory": in_last(lambda block: setattr(block.table, "data", torch.arange(4.0))),
}


def copied_checkpoint(module: nn.Module) -> None:
    """A checkpoint whose values are copied."""
    module.load_state_dict({name: value + 1 for name, value in module.state_dict().items()})


@torch.no_grad()
def add_in_place(module: nn.Module) -> None:
    """An optimiser's step, say."""
    for parameter in module.parameters():
        parameter.add_(1)


IN_PLACE: dict[str, Callable[[nn.Sequential], Any]] = {
    "nothing": lambda module: None,
    "optimiser step": add_in_place,
    "load_state_dict": copied_checkpoint,
    "data written": in_last(lambda block: block.linear.weight.data.copy_(torch.ones(4, 4))),
    "buffer written": in_last(lambda block: block.table.fill_(7)),
    "to() that changes nothing": lambda module: module.to(torch.float32).to("cpu"),
    "gradients": in_last(lambda block: setattr(block.linear.weight, "grad", torch.ones(4, 4))),
    "requires_grad": lambda module: module.requires_grad_(False),
    "plain attribute": in_last(lambda block: setattr(block, "name", "x")),
    "another module": lambda module: copy.deepcopy(module).to(torch.float64),
}


@pytest.mark.parametrize("way", REPLACED)
def test_replaced_weights_are_noticed(way: str) -> None:
    """Whatever puts another object or other memory behind a name, or adds or removes one, also in a nested module."""
    module = tower()
    watch = WeightWatch([module])
    assert not watch.changed()
    REPLACED[way](module)
    assert watch.changed()
    assert watch.changed(), "and it stays noticed"
    assert not WeightWatch([module]).changed(), "a new watch starts from what is there"


@pytest.mark.parametrize("way", IN_PLACE)
def test_changes_in_place_are_none(way: str) -> None:
    """Graphs read the values where they are, so new values in the same memory are no reason to capture again."""
    module = tower()
    watch = WeightWatch([module])
    IN_PLACE[way](module)
    assert not watch.changed()


def test_every_module_is_watched() -> None:
    """All of several modules, and a watch of none never changes."""
    first, second = tower(), tower()
    watch = WeightWatch([first, second])
    assert not WeightWatch([]).changed()
    swap_linear(second[1])  # type: ignore[arg-type]
    assert watch.changed()


def test_a_change_that_is_undone_is_none() -> None:
    """The old parameter back in its place is what the graphs were recorded with."""
    module = tower()
    watch = WeightWatch([module])
    old = module[0].linear.weight
    module[0].linear.weight = nn.Parameter(torch.ones(4, 4))
    assert watch.changed()
    module[0].linear.weight = old
    assert not watch.changed()


def test_train_mode() -> None:
    """A watch sees that of every module and child; before a capture the one in train mode is named."""
    module = tower()
    watch = WeightWatch([module])
    assert not watch.training()
    assert train_mode([module]) is None
    module[1].linear.train()
    assert train_mode([tower(), module]) == "1.linear"
    assert watch.training()
    module[1].linear.eval()
    assert not watch.training()
    module.train()
    assert train_mode([module]) == "Sequential"
    assert watch.training()
    module.eval()
    assert not watch.training()


def test_modules_of_a_model() -> None:
    """What it declares; else itself where it is one; else those among its attributes; else none."""
    one, two = nn.Linear(1, 1), nn.Linear(1, 1)

    class Holder:
        def __init__(self) -> None:
            self.one, self.number, self.two = one, 3, two

    class Declares(Holder):
        def encoder_modules(self) -> list[nn.Module]:
            return [self.two]

    class Slotted:
        __slots__ = ()

    assert modules_of(Holder()) == [one, two]
    assert modules_of(Declares()) == [two]
    assert modules_of(one) == [one]
    assert modules_of(Slotted()) == []


def test_modules_and_tensors_in_containers() -> None:
    """Modules also in lists, tuples and dicts among the attributes of a holder; tensors only where they are attributes.

    What lies in a list or dict of an adapter's may be a cache, which grows. A module's own tensors are in the module.
    """
    one, two, three = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
    scale, table, shift = torch.ones(1), torch.ones(2), torch.ones(3)

    class Holder:
        def __init__(self) -> None:
            self.towers, self.by_name, self.scale = [one, "x"], {"a": two, "b": table}, scale
            self.pair = (three, shift)

    class Declares(Holder):
        def encoder_tensors(self) -> dict[str, torch.Tensor]:
            return {"mine": shift}

    assert modules_of(Holder()) == [one, two, three]
    found = tensors_of(Holder())
    assert list(found) == ["scale"]
    assert found["scale"] is scale
    assert tensors_of(Declares()) == {"mine": shift}
    assert tensors_of(one) == {}


def test_loose_tensors_are_watched() -> None:
    """Another object under the name, another name, or new memory behind the same tensor; not values written in place."""
    scale = torch.ones(3)
    modules: list[nn.Module] = [tower()]
    watch = WeightWatch(modules, {"scale": scale})
    assert watch.is_for(modules, {"scale": scale})
    assert not watch.changed()
    scale.mul_(2)
    assert not watch.changed()
    for others in ({"scale": scale.clone()}, {"other": scale}, {}, {"scale": scale, "more": scale}):
        assert not watch.is_for(modules, others)
    assert not watch.is_for([tower()], {"scale": scale})
    scale.data = torch.ones(3)
    assert watch.changed()


@pytest.mark.parametrize("way", ["new parameter", "data replaced", "submodule swapped", "in place"])
def test_features_follow_the_weights(way: str) -> None:
    """A captured manager gives the features of the weights as they are now; it captures again only where they were replaced."""
    table = packed_table()
    manager = captured(table, token_budgets=(16,), packing="greedy")
    request = packed_request([(1, 4, 4), (1, 2, 6)])
    before = [feature.clone() for feature in manager.execute(request)]
    merge = table.tower.merge
    with torch.no_grad():
        if way == "new parameter":
            merge.weight = nn.Parameter(merge.weight * 2)
        elif way == "data replaced":
            merge.weight.data = merge.weight.data * 2
        elif way == "submodule swapped":
            table.tower.merge = nn.Linear(32, 8).eval()
        else:
            merge.weight.mul_(2)
    with counters.expect(recaptures=0 if way == "in place" else 1, captures=0 if way == "in place" else len(manager.graphs())):
        got = manager.execute(request)
        assert largest_difference(manager.execute(request), got) == 0, "and only once"
    assert largest_difference(got, packed_reference(table, request)) < 1e-5
    assert largest_difference(got, before) > 1e-2
    assert manager.snapshot()["miss_reasons"] == {}


def test_train_mode_runs_eagerly() -> None:
    """A graph would freeze what train mode changes: nothing replays until eval mode, then the old graphs do."""
    table = packed_table()
    manager = captured(table, token_budgets=(16,), packing="greedy")
    request = packed_request([(1, 4, 4)])
    table.tower.train()
    manager.execute(request)
    assert manager.snapshot()["miss_reasons"] == {"train-mode": 1}
    table.tower.eval()
    with counters.expect(captures=0, recaptures=0):
        manager.execute(request)
    assert manager.snapshot()["graph_hits"] == 1


def test_nothing_is_captured_in_train_mode() -> None:
    """The reason names the module; after `eval()` a capture works."""
    table = packed_table()
    table.tower.qkv[1].train()
    manager = captured(table, token_budgets=(16,), packing="greedy")
    assert not manager.is_captured()
    manager.execute(packed_request([(1, 4, 4)]))
    assert manager.snapshot()["miss_reasons"] == {"train-mode": 1}
    table.tower.eval()
    manager.capture()
    assert manager.is_captured()


def test_tensors_and_nested_modules_of_an_adapter_are_watched() -> None:
    """An adapter's own tensor, and modules in lists and dicts, count as weights: replaced ones are noticed."""

    class Adapter:
        def __init__(self) -> None:
            self.scale = torch.ones(2)
            self.stages = [nn.Linear(2, 2), nn.Linear(2, 2)]
            self.heads = {"a": nn.Linear(2, 2)}
            self.other = 3

    adapter = Adapter()
    assert modules_of(adapter) == [*adapter.stages, adapter.heads["a"]]
    assert list(tensors_of(adapter)) == ["scale"]
    watch = WeightWatch(modules_of(adapter), tensors_of(adapter))

    def same() -> bool:
        return watch.is_for(modules_of(adapter), tensors_of(adapter)) and not watch.changed()

    assert same()
    adapter.scale.mul_(2)
    assert same(), "a change in place needs nothing"
    for change in (
        lambda: setattr(adapter, "scale", torch.ones(2)),
        lambda: setattr(adapter.scale, "data", torch.ones(2)),
        lambda: adapter.stages.__setitem__(0, nn.Linear(2, 2)),
        lambda: adapter.heads.pop("a"),
    ):
        watch = WeightWatch(modules_of(adapter), tensors_of(adapter))
        assert same()
        change()
        assert not same()


def test_a_replaced_tensor_of_an_adapter_is_captured_anew() -> None:
    """The public call gives the numbers of the new tensor."""

    class Scaled(PackedTable):
        scale = torch.ones(1)

        def forward(self, path: str, values: Mapping[str, Any]) -> torch.Tensor:
            return super().forward(path, values) * self.scale

    table = Scaled(packed_table().tower)
    table.scale = torch.full((1,), 2.0)
    made = captured(table, packing="greedy")
    request = packed_request([(1, 4, 4)])
    want = packed_reference(table, request)
    assert largest_difference(made.execute(request), [2 * w for w in want]) <= 1e-5
    table.scale = torch.full((1,), 3.0)
    assert largest_difference(made.execute(request), [3 * w for w in want]) <= 1e-5
    assert made.snapshot()["recaptures"] == 1


# --- settings of layers that somebody put in -----------------------------------------------------------------------------


class Adapter(nn.Module):
    """A layer beside another one, switched as peft's are; it counts its calls."""

    rate = 0.0

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.side = layer, nn.Linear(layer.in_features, layer.out_features)
        self.disabled, self.active, self.scaling, self.calls = False, ["default"], {"default": 1.0}, 0
        self.dtype, self.activation, self.many = torch.float32, torch.relu, list(range(10_000))
        self.itself: list[Any] = []
        self.itself.append(self.itself)
        self.in_features, self.out_features = layer.in_features, layer.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer, and what is beside it."""
        self.calls += 1
        out: torch.Tensor = self.layer(x)
        return out if self.disabled else out + self.scaling[self.active[0]] * self.side(x)


def adapted() -> nn.Sequential:
    """A tower with one."""
    return nn.Sequential(Adapter(nn.Linear(4, 4)), nn.Linear(4, 4)).eval()


def watched(module: nn.Module) -> WeightWatch:
    """As a manager does: settings before, runs, the watch after."""
    before = settings_of([module])
    for _ in range(3):
        module(torch.zeros(2, 4))
    return WeightWatch([module], settings=before)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("disabled", lambda layer: setattr(layer, "disabled", True)),
        ("active", lambda layer: setattr(layer, "active", ["other"])),
        ("active in place", lambda layer: layer.active.append("other")),
        ("scaling in place", lambda layer: layer.scaling.update(default=0.5)),
        ("taken away", lambda layer: delattr(layer, "disabled")),
        ("a default of the class", lambda layer: setattr(layer, "rate", 0.5)),
        ("dtype", lambda layer: setattr(layer, "dtype", torch.float16)),
        ("function", lambda layer: setattr(layer, "activation", torch.tanh)),
        ("forward", lambda layer: setattr(layer, "forward", lambda x: x)),
    ],
)
def test_a_switched_adapter_is_seen(name: str, change: Callable[[Any], Any]) -> None:
    """A flag, a name or a scale that a graph has frozen, also where it is changed in place; a layer's own counter is none."""
    module = adapted()
    watch = watched(module)
    module(torch.zeros(2, 4))
    assert not watch.changed()
    change(module[0])
    assert watch.changed(), name


def test_layers_of_the_libraries_have_no_settings() -> None:
    """They would be thousands of attributes to compare before every call."""
    assert settings_of([nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))]) == []
    assert {name for _, name, _ in settings_of([adapted()])} > {"disabled", "active", "scaling", "calls"}


def test_a_manager_captures_anew_for_a_switched_adapter() -> None:
    """The features are those of the tower as it is switched, from new graphs, once."""
    table = packed_table()
    table.tower.qkv[0] = Adapter(table.tower.qkv[0]).eval()
    request = packed_request([(1, 2, 2)])
    with captured(table) as manager:
        for disabled, recaptures in ((False, 0), (True, 1), (True, 1)):
            table.tower.qkv[0].disabled = disabled
            got = manager.execute(request)
            assert largest_difference(got, packed_reference(table, request)) <= 1e-5
            assert manager.snapshot()["recaptures"] == recaptures


def test_what_a_model_notes_down_itself_is_no_change() -> None:
    """A log that only its eager path writes: the call during which it grew is the model's own doing, and captures nothing."""
    model = toys.HandWritten()
    with captured(model, mode="eager", token_budgets=(4,)) as manager:
        for count in (2, 9, 2, 9, 2):  # 9 is above the budget
            manager.execute(toys.written_request([count]))
        assert len(model.calls) >= 2
        assert manager.snapshot()["recaptures"] == 0
