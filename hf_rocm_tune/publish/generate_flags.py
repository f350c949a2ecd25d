"""Flags that ``generate``, ``chat`` and ``eval`` share."""

from __future__ import annotations

import argparse

from hf_rocm_tune.publish.generate_settings import DTYPES, LoadSettings, Sampling


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """What to load, and how."""
    parser.add_argument("model", help="directory of an adapter or a model, or a Hub id of either")
    parser.add_argument("--base", help="base of an adapter, where it is not the one that the adapter names")
    parser.add_argument("--revision", help="branch, tag or commit of a Hub id")
    parser.add_argument("--dtype", default="auto", help=f"{', '.join(DTYPES)} (default: auto, as the model says)")
    parser.add_argument("--load_in_4bit", action="store_true", help="quantise the base, as the adapter's run did")
    parser.add_argument("--attn_implementation", help="passed to transformers")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that the model brings along")
    parser.add_argument("--compare", action="store_true", help="the base without the adapter, beside it")


def load_settings(wanted: argparse.Namespace) -> LoadSettings:
    """The model flags as settings."""
    return LoadSettings(
        model=wanted.model,
        base=wanted.base,
        revision=wanted.revision,
        dtype=wanted.dtype,
        load_in_4bit=wanted.load_in_4bit,
        attn_implementation=wanted.attn_implementation,
        trust_remote_code=wanted.trust_remote_code,
    )


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen."""
    usual = Sampling()
    parser.add_argument("--max_new_tokens", type=int, default=usual.max_new_tokens, help="of an answer (default: 256)")
    parser.add_argument("--temperature", type=float, help="0: always the likeliest token (default: as the model says)")
    parser.add_argument("--top_p", type=float, help="draw from the likeliest tokens with this share of probability")
    parser.add_argument("--top_k", type=int, help="draw from so many likeliest tokens")
    parser.add_argument("--min_p", type=float, help="draw from tokens at least this likely, relative to the likeliest")
    parser.add_argument("--repetition_penalty", type=float, help="above 1: less of what was said before")
    parser.add_argument("--seed", type=int, default=usual.seed, help="of the random numbers (default: 0)")
    parser.add_argument("--system", help="a system message before the conversation")


def sampling(wanted: argparse.Namespace) -> Sampling:
    """The sampling flags as settings."""
    return Sampling(
        max_new_tokens=wanted.max_new_tokens,
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        top_k=wanted.top_k,
        min_p=wanted.min_p,
        repetition_penalty=wanted.repetition_penalty,
        seed=wanted.seed,
    )
