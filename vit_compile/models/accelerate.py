"""`accelerate`: the vision tower of a Hugging Face model behind an encoder, and nothing else changed."""

from __future__ import annotations

import dataclasses
import threading
import types
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad

from vit_compile.errors import BudgetError, ModelError, OptionError
from vit_compile.models.architecture import Architecture
from vit_compile.models.binding import Binding, Call, Unserved, floating_dtype
from vit_compile.models.hf_attention import AttentionSwitch, encoding
from vit_compile.models.installed_call import InstalledCall
from vit_compile.models.registry import architecture_of
from vit_compile.models.structure import Listeners, Structure
from vit_compile.runtime.config import EncoderConfig
from vit_compile.runtime.manager import EncoderCudaGraphManager
from vit_compile.runtime.table import EncoderTable
from vit_compile.runtime.weights import modules_of
from vit_compile.stats import SKIP_CODES, Skip, report_skip

TABLE_OPTIONS = ("token_range", "max_frames_per_video", "segment_capacities")
"""Options of an architecture's table that `accelerate` and `encoder_for` pass on."""
CAPTURES = ("first-call", "explicit")


def accelerate(
    model: nn.Module,
    *,
    config: EncoderConfig | None = None,
    capture: str = "first-call",
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> AcceleratedModel:
    """Put an encoder behind the vision calls that a Hugging Face model makes.

    `generate`, `forward`, `get_image_features` and `get_video_features` return what they returned, fields and dtypes included.
    Everything else of the model stays as it is: its config, `state_dict`, `save_pretrained`, `to`, `eval`, its text attention.

    Args:
        model: a whole vision-language model, or a vision tower; in eval mode when it is called.
        config: of the encoder; or its fields as keyword arguments.
        capture: "first-call" captures when the first image comes (tens of seconds on a GPU); "explicit" runs eagerly until
            `capture()` is called.
        group: see `EncoderCudaGraphManager`.
        options: fields of `EncoderConfig`, and `token_range`, `max_frames_per_video`, `segment_capacities` of the table.

    Returns:
        The handle: `capture()`, `stats()`, `close()`, usable as a context manager that closes.

    Calls that the encoder does not answer go to the model's own code and are counted with a reason: gradients are wanted, train
    mode, autocast, hidden states or attentions asked for, forward hooks inside of the tower, inputs that it refuses. A model that
    was moved or cast, or whose tower has other modules than before, gets a new encoder at its next call, with counts of its own.

    Raises:
        ModelError: the model is not supported (the text lists what is), is accelerated already, or lies on several devices.
        OptionError, BudgetError: an option is unknown, or does not fit the model.
    """
    if capture not in CAPTURES:
        raise OptionError(f"capture={capture!r}: expected one of {', '.join(CAPTURES)}.")
    table_options, made = _options(config, options)
    return AcceleratedModel(model, made, table_options, first_call=capture == "first-call", group=group)


def encoder_for(
    model: nn.Module, *, config: EncoderConfig | None = None, group: dist.ProcessGroup | None = None, **options: Any
) -> EncoderCudaGraphManager:
    """The vision encoder of a Hugging Face model as a manager, projector included: requests in, features out.

    Args:
        model, config, group, options: see `accelerate`.

    The model's calls are not touched, and compute what they did. Its towers have config objects of the encoder's own, with the
    same values, for as long as the manager lives. A tower or projector that is replaced on the model makes every further call
    an error: make a new encoder.

    Raises:
        ModelError, OptionError, BudgetError: see `accelerate`.
    """
    table_options, made = _options(config, options)
    _check_untouched(model)
    binding = _bind(architecture_of(model), model, None, table_options)
    manager = _manager(binding, made, group)
    manager.bound = Structure(model, modules_of(binding.table), inside=False)
    weakref.finalize(manager, binding.undo).atexit = False
    return manager


def _options(config: EncoderConfig | None, options: Mapping[str, Any]) -> tuple[dict[str, Any], EncoderConfig]:
    of_table = {name: value for name, value in options.items() if name in TABLE_OPTIONS}
    rest = {name: value for name, value in options.items() if name not in TABLE_OPTIONS}
    if config is not None:
        if rest:
            raise OptionError(f"{', '.join(rest)} beside config: put them into the config.")
        return of_table, config
    known = [field.name for field in dataclasses.fields(EncoderConfig)]
    unknown = [name for name in rest if name not in known]
    if unknown:
        raise OptionError(f"unknown option {unknown[0]!r}. Known are {', '.join([*known, *TABLE_OPTIONS])}.")
    return of_table, EncoderConfig(**rest)


def _bind(row: Architecture, model: nn.Module, fields: str | None, options: Mapping[str, Any]) -> Binding:
    try:
        binding = row.bind(model, fields=fields, **options)
    except TypeError as error:
        unexpected = [name for name in options if repr(name) in str(error)]
        if unexpected:
            raise OptionError(f"{row.name} has no option {unexpected[0]!r}.") from error
        raise
    if isinstance(binding.switch, AttentionSwitch):
        binding.switch.confine()
    return binding


def _check_untouched(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ModelError(f"the model is {type(model).__name__}: expected a torch module.")
    if any(isinstance(value, InstalledCall) for module in model.modules() for value in vars(module).values()):
        raise ModelError(f"{type(model).__name__} is accelerated already: close() the handle first.")


def _where(binding: Binding) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of the encoder's weights."""
    modules = modules_of(binding.table)
    devices = {parameter.device for module in modules for parameter in module.parameters()}
    if len(devices) != 1:
        raise ModelError(f"the vision tower lies on {sorted(map(str, devices))}: an encoder needs it on one device.")
    return devices.pop(), floating_dtype(modules[0])


def _manager(binding: Binding, config: EncoderConfig, group: dist.ProcessGroup | None) -> TowerManager:
    try:
        device, dtype = _where(binding)
        manager = TowerManager(binding.table, config, device=device, dtype=dtype, group=group)
        asked = config.token_budgets is not None or config.path_token_budgets is not None
        if asked and config.enabled and manager.get_num_graphs_to_capture() == 0:
            raise BudgetError("every item of this model is larger than the largest budget: no graph could be used.")
        return manager
    except BaseException:
        binding.undo()
        raise


class TowerManager(EncoderCudaGraphManager):
    """A manager in whose calls, and nowhere else, a tower's attention is switched, and autocast is off: a graph would keep it."""

    bound: Structure | None = None
    """Where its modules hang in a model that is not watched by a handle."""

    def capture(self, *, progress: bool = False) -> None:
        """See `EncoderCudaGraphManager`."""
        with encoding(), _no_autocast(self.device):
            super().capture(progress=progress)

    def execute(self, mm_kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """See `EncoderCudaGraphManager`; a ModelError if the model has another tower or projector by now."""
        if self.bound is not None and self.bound.changed():
            raise ModelError("the model's tower or projector was replaced: make its encoder anew.")
        with encoding(), _no_autocast(self.device):
            return super().execute(mm_kwargs)


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast is off inside. Switching it off where it is off would be a tenth of a call for one image."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def _data_dtypes(table: EncoderTable) -> dict[str, torch.dtype]:
    """Of the inputs whose buffers have a floating-point dtype of their own."""
    buffers = {name: buffer for path in table.paths.values() for name, buffer in path.buffers.items()}
    found = {}
    for modality in table.modalities.values():
        for name, source in modality.data.items():
            dtype = buffers[name].dtype
            if dtype is not None and dtype.is_floating_point:
                found[source] = dtype
    return found


class AcceleratedModel:
    """The handle that `accelerate` returns. Any thread may use it and the model."""

    def __init__(
        self,
        model: nn.Module,
        config: EncoderConfig,
        table_options: Mapping[str, Any],
        *,
        first_call: bool,
        group: dist.ProcessGroup | None,
    ) -> None:
        _check_untouched(model)
        self.model, self.config, self.architecture = model, config, architecture_of(model)
        self._options, self._first_call, self._group = dict(table_options), first_call, group
        self._lock = threading.RLock()
        self._own_calls: dict[str, int] = {}
        self._installed: list[InstalledCall] = []
        self._closed = False
        self._refused: str | None = None
        """Why the model, as it was changed since, is not supported any more."""
        self._build()

    def _build(self) -> None:
        self._binding = _bind(self.architecture, self.model, "all", self._options)
        self.manager = _manager(self._binding, self.config, self._group)
        self._device, self._dtype = self.manager.device, self.manager.dtype
        self._watched, self._data_dtypes = modules_of(self._binding.table), _data_dtypes(self._binding.table)
        self._structure = Structure(self.model, self._watched)
        called = [call.owner for call in self._binding.calls if call.method == "forward"]
        self._listeners, self._all_listeners = Listeners(self._watched, called), Listeners(self._watched, [])
        self._installed = [InstalledCall(self, call) for call in self._binding.calls]
        for installed in self._installed:
            installed.install()

    def capture(self, *, progress: bool = False) -> None:
        """Capture every graph now. See `EncoderCudaGraphManager.capture`.

        Raises:
            ModelError: the handle is closed.
            SkipError, ProtocolError: see there.
        """
        with self._lock:
            self._check_open()
            self._follow()
            self.manager.capture(progress=progress)

    def stats(self) -> dict[str, Any]:
        """`EncoderCudaGraphManager.snapshot`, and `own_calls`: calls that the model's own code answered, by reason."""
        with self._lock:
            return {**self.manager.snapshot(), "own_calls": dict(self._own_calls)}

    def encode(self, images: Any) -> Any:
        """Images of native sizes in one packed call, where the architecture offers that; see docs/models.md.

        Raises:
            ModelError: it does not, or the handle is closed.
        """
        with self._lock:
            self._check_open()
            self._follow()
            if self._binding.encode is None:
                raise ModelError(f"{self.architecture.name} takes what its processor makes: call the model.")
            more, hook = self._more_outputs(), self._all_listeners.found()
            if more is not None or hook is not None:
                why = more[1] if more is not None else hook
                raise ModelError(f"encode gives last_hidden_state and pooler_output, and runs no hooks: {why}.")
            with _no_autocast(self._device):
                return self._binding.encode(self._execute, images)

    def close(self) -> None:
        """Give the graphs' memory back and restore the model. Idempotent."""
        with self._lock:
            self._closed = True
            self._take_out()

    def _check_open(self) -> None:
        if self._closed:
            raise ModelError("the handle is closed: accelerate() the model again.")
        if self._refused is not None:
            raise ModelError(f"the model was changed, and is not supported any more: {self._refused}")

    def _take_out(self) -> None:
        for installed in self._installed:
            installed.remove()
        self._installed = []
        self._binding.undo()
        self.manager.clear()

    def __enter__(self) -> AcceleratedModel:
        """The handle; nothing is captured by this."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: types.TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    # --- what installed calls need -----------------------------------------------------------------------------------

    def _is_installed(self, call: InstalledCall) -> bool:
        """See `Handle`."""
        return call in self._installed

    def _serve(self, installed: InstalledCall, arguments: Mapping[str, Any]) -> Any:
        """What the encoder answers. `close()` and a new encoder wait for it."""
        with self._lock:
            if installed not in self._installed:
                raise Unserved("the handle was closed, or the model moved, in the meantime")
            return installed.call.serve(self._execute, **arguments)

    def _execute(self, request: Mapping[str, Any]) -> list[torch.Tensor]:
        """`manager.execute`, capturing first where that is due. Data is cast as towers cast it: to the encoder's dtype, or to
        that of its buffer where the table says one."""
        if self._first_call and not self.manager.capture_done():
            self.manager.capture()
        cast = {
            name: value.to(self._data_dtypes.get(name, self._dtype))
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
            for name, value in request.items()
        }
        return self.manager.execute(cast)

    def _follow(self) -> bool:
        """The model may have been moved, cast, or given other modules: its encoder is made anew then, captured if it was. Was it?

        A model that is not supported any more has its own calls back.
        """
        with self._lock:
            if self._refused is not None or self._closed:
                return False
            if not self._moved() and not self._structure.changed():
                return False
            captured = self.manager.is_captured()
            self._take_out()
            try:
                self._build()
            except ModelError as error:
                self._refused = str(error)
                self._own("unserved", f"the model was changed, and is not supported any more: {error}")
                return True
            if captured:
                self.manager.capture()
            return True

    def _moved(self) -> bool:
        tower = self._watched[0]
        return next(tower.parameters()).device != self._device or floating_dtype(tower) != self._dtype

    def _own(self, reason: str, detail: str) -> None:
        """Count a call that the model's own code answers."""
        skip = Skip(reason if reason in SKIP_CODES else "own-call", f"{reason}: {detail}")
        report_skip(skip, strict=self.config.strict)
        with self._lock:
            self._own_calls[reason] = self._own_calls.get(reason, 0) + 1

    def _why_own(self, call: Call, arguments: Mapping[str, Any]) -> tuple[str, str] | None:
        """Why the encoder does not answer a call: (reason, detail), or None."""
        if any(module.training for module in self._watched):
            return "train-mode", "the tower is in train mode"
        if torch.is_autocast_enabled(self._device.type):
            return "autocast", "the graphs compute in the dtype of the weights, whatever autocast asks for"
        if torch.is_grad_enabled():
            tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
            weights = (weight for module in self._watched for weight in module.parameters())
            if any(tensor.requires_grad for tensor in tensors) or any(weight.requires_grad for weight in weights):
                return "gradients", "gradients are enabled; use torch.inference_mode() or torch.no_grad()"
        if any(_is_dual(value) for value in arguments.values()):
            return "gradients", "forward-mode derivatives are wanted"
        if getattr(getattr(call.owner, "config", None), "return_dict", True) is False:
            return "unserved", "config.return_dict=False"
        return self._more_outputs(call.owner) or self._listening()

    def _more_outputs(self, *owners: nn.Module) -> tuple[str, str] | None:
        for module in (*owners, *self._watched):
            config = getattr(module, "config", None)
            for flag in ("output_hidden_states", "output_attentions"):
                if getattr(config, flag, False):
                    return "more-outputs", f"config.{flag}"
        return None

    def _listening(self) -> tuple[str, str] | None:
        where = self._listeners.found()
        return None if where is None else ("hooks", where)


def _is_dual(value: Any) -> bool:
    """Does a tensor carry a forward-mode derivative?"""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and forward_ad.unpack_dual(value).tangent is not None
