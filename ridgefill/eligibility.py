"""Which calls may be filled: an allow-list over a forward call's arguments. Anything else runs stock, with a reason."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ridgefill import _core, caches
from ridgefill.prefill import Step

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ridgefill.layout import DecoderLayout

_CACHE_NAMES = ("cache", "past_key_values")
_KNOWN = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "use_cache", "return_dict", "logits_to_keep"}


@dataclass(frozen=True)
class FillRule:
    """The numbers of the decision rule (rust/src/rule.rs), in tokens.

    ``reach``: how many rows before a row the maps read; a continued cache does not have their streams, so as many of
    the call's first rows run exactly. ``probe_rows``: rows after those that run exactly too, for the guard to compare.
    ``tile``: the number of filled rows is a multiple of this.
    """

    tail: int
    head: int
    min_bulk: int
    reach: int = 0
    probe_rows: int = 0
    tile: int = 1


@dataclass(frozen=True)
class Signature:
    """A model's forward parameters: order, defaults, and the name of its cache argument."""

    names: tuple[str, ...]
    defaults: dict[str, Any]
    cache_argument: str

    @staticmethod
    def of(model: nn.Module) -> Signature:
        """Read the signature once, at attach."""
        parameters = inspect.signature(model.forward).parameters
        names = tuple(n for n, p in parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD)
        defaults = {n: p.default for n, p in parameters.items() if p.default is not inspect.Parameter.empty}
        return Signature(names, defaults, next((n for n in _CACHE_NAMES if n in parameters), _CACHE_NAMES[0]))

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments by name."""
        return {**dict(zip(self.names, args, strict=False)), **kwargs} if args else kwargs


def given_cache(arguments: dict[str, Any]) -> Any:
    """The cache among a call's arguments, under whichever name, or None."""
    return next((arguments[name] for name in _CACHE_NAMES if arguments.get(name) is not None), None)


def step_rows(signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The number of rows a call brings, found without looking at anything else; 0 when it cannot be told."""
    inputs: Any = kwargs.get("input_ids")
    if inputs is None:
        inputs = args[0] if args and args[0] is not None else kwargs.get("inputs_embeds")
    return inputs.shape[1] if getattr(inputs, "ndim", 0) >= 2 else 0


def prepare(
    model: nn.Module,
    layout: DecoderLayout,
    rule: FillRule,
    signature: Signature,
    arguments: dict[str, Any],
    n_ahead: int = 0,
) -> tuple[Step | None, str]:
    """The step to fill and the rule's word for it, or None and the reason why the call runs stock.

    ``n_ahead``: prompt rows that later calls will bring.
    """
    import torch

    if (reason := _mode_refusal(model, layout)) or (reason := _argument_refusal(layout, rule, signature, arguments)):
        return None, reason
    inputs = {n: arguments[n] for n in ("input_ids", "inputs_embeds") if arguments.get(n) is not None}
    if len(inputs) != 1:
        return None, f"expected one of input_ids and inputs_embeds, found {sorted(inputs) or 'neither'}"
    rows = next(iter(inputs.values())).shape[1]
    cache = given_cache(arguments)
    if cache is not None and (refusal := caches.refusal(cache, layout)):
        return None, refusal
    if torch.is_grad_enabled() and (
        any(tensor.requires_grad for tensor in inputs.values())
        or any(_requires_grad(layer) for layer in (cache.layers if cache is not None else ()))
    ):
        return None, "gradients are enabled and the inputs or the cache require them; call under torch.no_grad()"
    cached = caches.cached_tokens(cache)
    position_ids = arguments.get("position_ids")
    if position_ids is None:
        # Stock counts a prompt's rows from 0; a tail behind a cache would follow the images of an earlier call.
        if not cached and vars(layout.base).get("rope_deltas") is not None:
            tensor = next(iter(inputs.values()))
            position_ids = torch.arange(rows, device=tensor.device).expand(tensor.shape[0], -1)
    elif position_ids.ndim not in (2, 3) or position_ids.shape[-1] != rows:
        return None, f"position_ids have shape {tuple(position_ids.shape)}, expected [batch, {rows}], or more of them"
    padding, refusal = padding_of(arguments.get("attention_mask"), cached, rows, mask_window(layout))
    if refusal:
        return None, refusal
    left_pads = 0
    if padding is not None:
        # One trip from the device, and lists: after a forward pass each call of torch or NumPy costs 20 to 40 us.
        for row in padding.tolist():
            real = next((column for column, flag in enumerate(row) if flag), len(row))
            if not all(row[real:]):
                return None, "the attention mask is not left padding (right padding or holes)"
            left_pads = max(left_pads, real)
        padding = padding.expand(next(iter(inputs.values())).shape[0], -1)  # one mask row may serve a whole batch
        if left_pads > (cached + rows) // 4:
            return None, f"{left_pads} left pads of {cached + rows} rows would make the exact head too long"
    if (switch := layout.rope_switch) is not None and cached + rows > switch:
        return None, f"past {switch} rows, all rows' rotary tables depend on the length of the call"
    decision = _core.decide(
        cached_tokens=cached,
        step_tokens=rows,
        n_ahead=n_ahead,
        tail=rule.tail,
        head=max(rule.head + left_pads, cached + rule.reach if cached else 0) + rule.probe_rows,
        min_bulk=rule.min_bulk,
        tile=rule.tile,
        logits_to_keep=arguments["logits_to_keep"],
    )
    if decision.rows_filled == 0:
        return None, decision.reason
    if cache is None:
        from transformers import DynamicCache

        cache = DynamicCache(config=layout.config)  # what the base model would make for itself
    return (
        Step(inputs, padding, position_ids, cache, cached, decision.fill_start, decision.fill_end, rule.probe_rows),
        decision.reason,
    )


def _requires_grad(layer: Any) -> bool:
    """Whether what a cache layer holds belongs to a graph: its keys, or where it has none its state."""
    held = getattr(layer, "keys", None), *getattr(layer, "recurrent_states", {}).values()
    return any(getattr(tensor, "requires_grad", False) for tensor in held)


def _mode_refusal(model: nn.Module, layout: DecoderLayout) -> str | None:
    import torch

    if model.training:
        return "the model is in training mode; call model.eval()"
    if torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters()):
        return "gradients are enabled; call under torch.no_grad() or torch.inference_mode()"
    for flag in ("output_hidden_states", "_output_attentions", "output_router_logits"):
        if layout.config_values.get(flag):
            return f"config.{flag.removeprefix('_')} asks for outputs of every layer"
    return None


def _argument_refusal(
    layout: DecoderLayout, rule: FillRule, signature: Signature, arguments: dict[str, Any]
) -> str | None:
    for name, value in arguments.items():
        if name in _KNOWN or name in _CACHE_NAMES or value is None or value is False:
            continue
        if isinstance(value, dict) and not value:  # generate hands a multimodal model its outputs of no image
            continue
        if name not in signature.defaults or value is not signature.defaults[name]:
            return f"the argument {name!r} is given"
    use_cache = arguments.get("use_cache")
    if not (layout.config_values.get("use_cache", True) if use_cache is None else use_cache):
        return "use_cache is off: there is no cache to fill"
    keep = arguments.get("logits_to_keep", signature.defaults.get("logits_to_keep", 0))
    if isinstance(keep, bool) or not isinstance(keep, int) or not 1 <= keep <= rule.tail:
        found = keep if isinstance(keep, int) else f"a {type(keep).__name__}"
        return f"logits_to_keep is {found}; a fill keeps exact logits for 1 to tail={rule.tail} last rows"
    return None


def mask_window(layout: DecoderLayout) -> int | None:
    """The window that a ready-made mask of one layer type has: None as soon as one layer sees the whole prompt."""
    return None if None in layout.windows else layout.windows[0]


def padding_of(mask: Any, cached: int, rows: int, window: int | None = None) -> tuple[torch.Tensor | None, str | None]:
    """A call's 2-D padding ``[batch, cached + rows]`` (None: no padding), or the reason why it has none.

    ``generate`` with a static cache hands over a ready 4-D mask sized before the fill, or a dict of them by layer
    type. What its rows see is turned back into padding, provided that the mask is causal attention within ``window``
    (None: everything before) and nothing else; that is checked.
    """
    import torch

    if isinstance(mask, dict):
        if "full_attention" not in mask:
            return None, f"the mask holds layer types {sorted(mask)}, of which none sees the whole prompt"
        mask, window = mask["full_attention"], None
    if mask is None:
        return None, None
    if not isinstance(mask, torch.Tensor) or mask.ndim not in (2, 4):
        shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        return None, f"the attention mask is {shape}; a 2-D or causal 4-D tensor can be filled"
    total = cached + rows
    if mask.ndim == 2:
        if mask.shape[1] != total:
            return None, f"the attention mask has {mask.shape[1]} columns, expected {total} (cached + new rows)"
        return mask, None
    if mask.shape[2] != rows or mask.shape[3] < total:
        return None, f"the 4-D attention mask has shape {tuple(mask.shape)}, expected [.., .., {rows}, >= {total}]"
    if window is not None and cached:
        return None, "a sliding 4-D attention mask does not tell which cached rows are pads"
    allowed = mask if mask.dtype == torch.bool else mask == 0
    columns = torch.arange(mask.shape[3], device=mask.device)
    positions = torch.arange(cached, total, device=mask.device).unsqueeze(1)
    causal = columns <= positions  # [rows, columns]
    if window is None:
        padding = allowed[:, 0, -1, :total]  # [batch, total]
    else:
        padding = allowed[:, 0, :, :total].diagonal(dim1=1, dim2=2)  # each row sees itself unless it is a pad
        causal &= columns > positions - window
    expected = causal & torch.nn.functional.pad(padding, (0, mask.shape[3] - total)).unsqueeze(1)
    # Rows that are pads themselves may hold anything; they are never read.
    if not bool(((allowed == expected.unsqueeze(1)) | ~padding[:, None, cached:, None]).all()):
        return None, "the 4-D attention mask is not causal attention with padding"
    return padding.to(torch.long), None
