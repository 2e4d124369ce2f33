"""A hand-made model that answers needles by attention alone, so that what a fill breaks in it is known beforehand.

Two attention layers do it, the rest pass the stream on. Layer 0 tells every row which word came before it; layer
`RECALL` looks for the row whose previous word is the present one, and says what stands there. Its keys read the
previous word's code and its values the row's own, two parts of the stream that a map can damage one by one.
"""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import nn

from ridgefill.evaluate.needle import Wording
from ridgefill.layout import decoder_layout, fingerprint
from ridgefill.maps import LayerMap, RidgeMaps, SplitMaps

SPLIT, RECALL, NUM_LAYERS = 1, 4, 5
_HEAD_DIM, _CODE = 128, 80
_WORD, _BEFORE, _SAID, _CONSTANT, _FIRST_ROW = slice(0, 80), slice(80, 160), slice(160, 240), 240, 241
_WIDTH = 256
# Pairs of rotary dimensions below this one turn fast enough to tell neighbours apart, those from _STILL on hardly turn.
_FAST, _STILL = 24, 24
_ROPE_THETA = 1e10
# The best match beats the next by half of these logits, which leaves it all the mass.
_LOGITS = 120.0

KEYS = tuple(f"key{number}" for number in range(12))
_FIRST = tuple(f"first{number}" for number in range(12))
_SECOND = tuple(f"second{number}" for number in range(12))
_FILLER = tuple(f"word{number}" for number in range(60))
_SPECIAL = ("<pad>", "<unk>", "<eos>", "<bos>")
_PUNCTUATION = (".", "?", ":", "Question", "Answer", "Which")

WORDING = Wording(
    "words",
    ("{key} {value} .",),
    ("Which ?",),  # with the key in it, the recall would find the question
    "{key}",
    KEYS,
    lambda draw: f"{draw.choice(_FIRST)} {draw.choice(_SECOND)}",
)


def word_tokenizer() -> Any:
    """One token a word, of the words above, behind ``<bos>``."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = (*_SPECIAL, *_PUNCTUATION, *KEYS, *_FIRST, *_SECOND, *_FILLER)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [("<bos>", _SPECIAL.index("<bos>"))]
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>", bos_token="<bos>"
    )


def filler_texts(count: int = 24, words: int = 400) -> list[tuple[str, str]]:
    """Texts of random words that no needle uses."""
    draw = random.Random(0)
    return [(f"text {i}", " ".join(draw.choice(_FILLER) for _ in range(words))) for i in range(count)]


def recall_model(*, looks_at_split: bool = False) -> nn.Module:
    """The model, in float32.

    With ``looks_at_split`` layer `SPLIT` looks for the same row as `RECALL`, and says nothing: the tail's queries there
    tell which rows matter.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    vocab = len(word_tokenizer())
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=_WIDTH,
        intermediate_size=8,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=_HEAD_DIM,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA},
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        eos_token_id=2,
        bos_token_id=None,
        pad_token_id=0,
    )
    config._attn_implementation = "sdpa"
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 2, (vocab, _CODE), generator=generator).float() * 2 - 1
    layers: Any = decoder_layout(model).layers
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight[:, _WORD] = codes
        model.model.embed_tokens.weight[:, _CONSTANT] = 1.0
        model.model.embed_tokens.weight[_SPECIAL.index("<bos>"), _FIRST_ROW] = 1.0
        model.lm_head.weight[:, _SAID] = codes / 8
        _tell_the_word_before(layers[0].self_attn)
        _recall(layers[RECALL].self_attn)
        if looks_at_split:
            _recall(layers[SPLIT].self_attn)
            layers[SPLIT].self_attn.o_proj.weight.zero_()
    return model


def _tell_the_word_before(attention: Any) -> None:
    """Head 0 looks one row back: fast pairs of the query are turned by one row against the key's."""
    rms = math.sqrt((_CODE + 1) / _WIDTH)  # of a row that holds its word and the constant
    gain = math.sqrt(_LOGITS * math.sqrt(_HEAD_DIM)) * rms
    half = _HEAD_DIM // 2
    for pair in range(_FAST):
        turn = _ROPE_THETA ** (-pair / half)
        attention.q_proj.weight[pair, _CONSTANT] = gain * math.cos(turn)
        attention.q_proj.weight[pair + half, _CONSTANT] = -gain * math.sin(turn)
        attention.k_proj.weight[pair, _CONSTANT] = gain
    attention.v_proj.weight[:_CODE, _WORD] = rms * torch.eye(_CODE)
    attention.o_proj.weight[_BEFORE, :_CODE] = torch.eye(_CODE)


def _recall(attention: Any) -> None:
    """Head 0: the query is the row's word, the key the word before a row, the value that row's word."""
    rms = math.sqrt((2 * _CODE + 1) / _WIDTH)
    half = _HEAD_DIM // 2
    still = [*range(_STILL, half), *range(half + _STILL, _HEAD_DIM)]  # the 80 dimensions that hardly turn
    gain = math.sqrt(_LOGITS * math.sqrt(_HEAD_DIM) / _CODE) * rms
    for code, dimension in enumerate(still):
        attention.q_proj.weight[dimension, _WORD.start + code] = gain
        attention.k_proj.weight[dimension, _BEFORE.start + code] = gain
    attention.v_proj.weight[:_CODE, _WORD] = rms * torch.eye(_CODE)
    attention.o_proj.weight[_SAID, :_CODE] = torch.eye(_CODE)


def recall_maps(model: nn.Module, damage: str = "none") -> RidgeMaps:
    """Maps at `SPLIT` that predict every late layer's input exactly, or damaged in one known way.

    ``none`` hands the stream on, which nothing changes before `RECALL`. ``forget``: every row looks the same. ``keys``:
    the word before is lost, the row's own word is not. ``values``: the other way round. ``scale``: keys are right but
    for their length. All of them take the very first row for the answer to the first of `KEYS`, so that the head must
    be exact, and let the layers below `RECALL` forget, which do nothing, so that exchanging two maps shows.
    """
    layout = decoder_layout(model)
    key_code = model.model.embed_tokens.weight[word_tokenizer().convert_tokens_to_ids(KEYS[0]), _WORD].detach()
    layers = {}
    for layer in range(SPLIT + 1, NUM_LAYERS):
        weight, bias, gain = torch.eye(_WIDTH), torch.zeros(_WIDTH), None
        weight[_FIRST_ROW, _BEFORE] = 100 * key_code
        if damage == "forget" or layer < RECALL:
            weight, bias = torch.zeros(_WIDTH, _WIDTH), torch.ones(_WIDTH)
        elif damage == "scale":
            gain = torch.full((2,), 0.02)
        elif damage != "none":
            part = {"keys": _BEFORE, "values": _WORD}[damage]
            # Turned by some places, so that its length, which the norm divides by, stays as it is.
            weight[part, part] = torch.eye(_CODE).roll(7, 0)
        layers[layer] = LayerMap(layer, weight, bias, key_gain=gain)
    maps = SplitMaps(SPLIT, layers, target=layout.target(SPLIT))
    fit = {"rows": 1, "held_out_rows": 0, "head": 4, "window_tokens": 1, "texts": []}
    return RidgeMaps(fingerprint(model), fit, {SPLIT: maps}, SPLIT)
