"""A byte-level tokenizer without merges, made in memory: 256 byte tokens after the special ones, optional BOS."""

from __future__ import annotations

from typing import Any

BOS = 1
_SPECIAL = {"<pad>": 0, "<bos>": BOS, "<eos>": 2}


def byte_tokenizer(*, bos: bool = False) -> Any:
    """One token for each byte of UTF-8, ids 3 … 258; with ``bos`` the tokenizer puts ``<bos>`` before every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {**_SPECIAL, **{letter: len(_SPECIAL) + i for i, letter in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", model_max_length=4096
    )


def random_text(characters: int, seed: int = 0) -> str:
    """Words of random letters: ``characters`` ASCII characters, so as many tokens."""
    import random

    draw = random.Random(seed)
    return "".join(draw.choice("abcdefghijklmnopqrstuvwxyz      \n") for _ in range(characters))
