"""lm-evaluation-harness with filled prefills: its ``hf`` model, with maps attached, as the model ``ridgefill``.

lm-eval's own model pads scored prompts on the right, passes no mask and asks for every row's logits, so that nothing
of them could be filled. Here they are padded on the left, and only the continuation's logits are kept; generation pads
left in lm-eval already. Results say for each task how many rows were filled (``config.ridgefill.tasks``); a task that
filled none is an error, not a result.

This module imports lm-eval: the command line and lm-eval's plugin discovery load it when the model is asked for.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch.nn.functional import log_softmax
from tqdm import tqdm

from ridgefill.attachment import attach
from ridgefill.errors import RidgeFillError
from ridgefill.evaluate.controls import identity_maps
from ridgefill.layout import causal_lm
from ridgefill.maps import RidgeMaps

# What `attach` takes and model arguments can say. lm-eval's own "backend" is another thing: causal or seq2seq.
_ATTACH = set(inspect.signature(attach).parameters) - {"model", "maps", "tokenizer", "scorer", "backend"}
_REPORTED = ("maps", "split", "tier", "tail", "head", "min_bulk", "form", "features", "guard", "warnings")
_log = logging.getLogger("ridgefill")

# Tasks of this process that were to be filled and were not, in words: for a command's exit code.
UNFILLED: list[str] = []


@dataclass
class Tally:
    """What became of one task's prompts.

    Attributes:
        prompts: sequences that were read.
        rows: their tokens, pads left out.
        rows_filled: of these, the rows that late layers got predicted.
        rows_selected: of these, the bulk rows that tier ``quality`` ran exactly.
        calls: forward calls by what they did: filled, decode, or the reason why they ran stock, numbers as ``#``.
    """

    prompts: int = 0
    rows: int = 0
    rows_filled: int = 0
    rows_selected: int = 0
    calls: Counter[str] = field(default_factory=Counter)


class RidgeFillLM(HFLM):  # type: ignore[misc]  # lm-eval has no types
    """lm-eval's ``hf`` model whose long prefills are filled.

    Args:
        pretrained: as in lm-eval's ``hf`` model, like every argument that is not named here.
        maps: a map file, or maps already loaded.
        identity: hand the split's stream on instead of the maps' predictions: the baseline that a fit must beat.
        arguments: those of `attach` by their names (``tier``, ``split``, ``tail``, ``head``, ``share`` …, not
            ``backend``), and lm-eval's own. ``tier=exact`` is the stock model on the same padding and batches.

    Raises:
        RidgeFillError: no maps, an encoder-decoder model, or several processes; and whatever `attach` raises.
    """

    def __init__(
        self, pretrained: Any, maps: RidgeMaps | str | None = None, identity: bool = False, **arguments: Any
    ) -> None:
        if maps is None:
            raise RidgeFillError("the model 'ridgefill' needs maps=FILE among its arguments (ridgefill fit writes one)")
        options = {name: arguments.pop(name) for name in _ATTACH & arguments.keys()}
        if isinstance(options.get("gates"), dict):  # on a command line they are JSON, whose names are strings
            options["gates"] = {int(split): float(share) for split, share in options["gates"].items()}
        super().__init__(pretrained, **arguments)
        if self.backend != "causal" or self.world_size > 1:
            raise RidgeFillError(
                f"the model 'ridgefill' runs a causal model in one process, found {self.backend!r} in "
                f"{self.world_size}; for several GPUs use parallelize=True"
            )
        loaded = maps if isinstance(maps, RidgeMaps) else RidgeMaps.load(maps)
        if identity:
            loaded = replace(identity_maps(loaded), gate=None)  # the gate judged other maps
        self.identity = identity
        self.attachment = attach(self.model, loaded, tokenizer=self.tokenizer, **options)
        self.tallies: dict[str, Tally] = {}
        self._tally = Tally()  # of the task that is running

    # --- lm-eval's three kinds of requests, task by task -----------------------------------------------------------

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """As lm-eval's, of continuations at the end of filled prompts."""
        return self._by_task(super().loglikelihood, requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """As lm-eval's: every row's logits count, so every row runs exactly, and the task is reported as not filled."""
        return self._by_task(super().loglikelihood_rolling, requests, disable_tqdm)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """As lm-eval's, from filled prompts."""
        return self._by_task(super().generate_until, requests, disable_tqdm)

    def _by_task(self, run: Callable[..., list[Any]], requests: Sequence[Any], disable_tqdm: bool) -> list[Any]:
        """Run requests (lm-eval's instances) one task after the other, so that what they fill can be told apart."""
        places: dict[str, list[int]] = defaultdict(list)
        for place, request in enumerate(requests):
            places[request.task_name or "unnamed"].append(place)
        answers: list[Any] = [None] * len(requests)
        for task, own in places.items():
            self._tally, before = self.tallies.setdefault(task, Tally()), self.attachment.counters.copy()
            found = run([requests[place] for place in own], disable_tqdm=disable_tqdm)
            self._tally.calls += self.attachment.counters - before
            for place, answer in zip(own, found, strict=True):
                answers[place] = answer
        return answers

    @contextmanager
    def _counted(self, mask: torch.Tensor) -> Iterator[None]:
        """Put the one prefill inside into the running task's tally; ``mask`` ``[batch, rows]`` is 1 where no pad is."""
        history, tally = self.attachment.history, self._tally
        before = history[-1] if history else None
        yield
        tally.prompts += len(mask)
        tally.rows += int(mask.sum())
        if history and history[-1] is not before:  # a prompt of one row is no prefill, and leaves no record
            tally.rows_filled += len(mask) * history[-1]["rows_filled"]
            tally.rows_selected += len(mask) * history[-1]["rows_selected"]

    # --- the model's calls -----------------------------------------------------------------------------------------

    def _model_generate(self, context: torch.Tensor, **options: Any) -> torch.Tensor:
        mask = options.get("attention_mask")
        with self._counted(torch.ones_like(context) if mask is None else mask):
            generated: torch.Tensor = super()._model_generate(context, **options)
        return generated

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Score continuations: ``(key, context tokens, continuation tokens)`` to log-likelihood, and whether greedy.

        Requests that read the same rows share one prompt: the choices of a question that differ in their last token.

        Raises:
            RidgeFillError: a context or a continuation is empty, or a continuation is longer than the model allows.
        """
        sharing: dict[tuple[int, ...], list[int]] = defaultdict(list)
        most = self.max_length
        for place, (_, context, continuation) in enumerate(requests):
            if not context or not 0 < len(continuation) <= most:
                raise RidgeFillError(
                    f"request {place}: {len(context)} context and {len(continuation)} continuation tokens; expected at "
                    f"least one of each, and a continuation of at most max_length={most}"
                )
            # The last token is read by nobody. What is too long loses its beginning, as in lm-eval.
            rows = tuple(context + continuation)[:-1]
            if len(rows) > most:
                _log.warning("a prompt of %d tokens loses its beginning: max_length=%d", len(rows), most)
            sharing[rows[-most:]].append(place)
        # Equal lengths side by side need no pads; the longest first, so that what does not fit in memory fails at once.
        prompts = sorted(sharing, key=len, reverse=True)
        size = override_bs or self.batch_size
        if size == "auto":
            longest = max(requests, key=lambda request: len(request[1]) + len(request[2]))
            size = self._detect_batch_size([longest])
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        for start in tqdm(range(0, len(prompts), size), desc="scoring continuations", disable=disable_tqdm):
            batch = prompts[start : start + size]
            keep = max(len(requests[place][2]) for prompt in batch for place in sharing[prompt])
            scores = log_softmax(self._last_logits(batch, keep), dim=-1, dtype=self.softmax_dtype)
            for prompt, of_prompt in zip(batch, scores, strict=True):  # [keep, vocab]
                for place in sharing[prompt]:
                    asked = torch.tensor(requests[place][2], device=of_prompt.device)
                    own = of_prompt[-len(asked) :]  # [continuation, vocab]
                    total = float(own.gather(1, asked.unsqueeze(1)).sum())
                    answers[place] = total, bool((own.argmax(-1) == asked).all())
        return answers

    def _last_logits(self, prompts: Sequence[tuple[int, ...]], keep: int) -> torch.Tensor:
        """The logits of the last ``keep`` rows of prompts padded on the left: ``[batch, keep, vocab]``.

        They must be exact rows' logits, so the tail is at least as long.
        """
        rows = max(map(len, prompts))
        ids = torch.zeros(len(prompts), rows, dtype=torch.long, device=self.device)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, rows - len(prompt) :] = torch.tensor(prompt, device=self.device)
            mask[row, rows - len(prompt) :] = 1
        padded: dict[str, torch.Tensor] = {}
        if min(map(len, prompts)) < rows:  # without pads no mask: attention keeps its causal kernel
            padded = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp_min(0)}
        precision = self.mixed_precision_dtype
        with (
            torch.no_grad(),
            torch.autocast(self.device.type, dtype=precision, enabled=precision is not None),
            self._counted(mask),
            self.attachment.request(tail=max(self.attachment.rule.tail, keep)),
        ):
            # Of a PEFT model the one inside, to which maps are attached.
            logits: torch.Tensor = causal_lm(self.model)(ids, use_cache=True, logits_to_keep=keep, **padded).logits
        return logits

    # --- what lm-eval asks besides ---------------------------------------------------------------------------------

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Refuse lm-eval's ``--use_cache``: an answer from a file tells nothing of a fill.

        Raises:
            RidgeFillError: always.
        """
        raise RidgeFillError(
            "the model 'ridgefill' answers no request from a cache, whose entries do not say what was filled; "
            "leave out --use_cache"
        )

    def report(self) -> dict[str, Any]:
        """What was attached, and each task's `Tally`, ready for JSON."""
        status = self.attachment.status()
        tasks = {task: {**vars(tally), "calls": dict(tally.calls)} for task, tally in self.tallies.items()}
        return {**{name: status[name] for name in _REPORTED}, "identity": self.identity, "tasks": tasks}

    def unfilled(self) -> list[str]:
        """Every task that should have filled rows and filled none, in words; none in tier ``exact``."""
        if self.attachment.tier == "exact":
            return []
        found = []
        for task, tally in self.tallies.items():
            if not tally.rows_filled:
                why = (f"{count} x {what}" for what, count in tally.calls.most_common() if "decode" not in what)
                found.append(
                    f"{task}: tier {self.attachment.tier!r} filled none of {tally.rows:,} rows, so its results say "
                    f"nothing of a fill ({'; '.join(why)})"
                )
        return found

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its results about the model, with `report`; logs an error for each task unfilled."""
        for message in self.unfilled():
            _log.error("%s", message)
            UNFILLED.append(message)
        info: dict[str, Any] = super().get_model_info()
        return {**info, "ridgefill": self.report()}
