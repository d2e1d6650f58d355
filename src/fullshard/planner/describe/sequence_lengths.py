"""Derives the spec of a run for any sequence length and number of ranks that share a sequence.

[Note: sequence lengths]
If C ranks share each sequence of S tokens, a rank has L = S / C. Everything else equal, each number in a
recording is a sum of a constant and of multiples of L, S, S L and L L; and with whole sequences, of a
constant and of multiples of L and L L. So specs at `POINTS` define all others. They are shipped as one spec
in JSON, in which a number that differs is `{"terms": [coefficients]}`. It has all launches and moments of
memory that may count at some length, since the highest moment depends on the length.
With fewer than FEWEST tokens per rank the loss may have no chunks, and lengths that are no multiple of
ALIGNED tokens may leave rows of matrices unaligned. Such runs are traced.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fullshard.spec.model import ModelSpec

FEWEST, ALIGNED = 2048, 64
POINTS = {
    False: ((2048, 1), (4096, 1), (8192, 1)),
    True: ((16384, 2), (16384, 4), (16384, 8), (32768, 2), (32768, 4)),
}
"""Tokens of a sequence, and ranks that share it, of the specs that define all others; by whether ranks do."""


def settings_for_any_length(settings: Mapping[str, Any]) -> str:
    """Returns the settings of a `SpecKey`, as JSON, without those that `derive_spec` takes."""
    data = {name: value for name, value in settings["data"].items() if name != "sequence_length"}
    model = {name: value for name, value in settings["model"].items() if name != "max_sequence"}
    own = {**settings, "data": data, "model": model, "context": "context" in settings}
    return json.dumps(own, sort_keys=True, separators=(",", ":"))


def derive_spec(text: str, settings: Mapping[str, Any]) -> ModelSpec | None:
    """Returns the spec for the length and the ranks in `settings`; None if these must be traced.

    text: a spec with terms. That of the reference decoder has as many positions as a sequence has tokens.
    """
    length, ranks = settings["data"]["sequence_length"], settings.get("context", 1)
    if length % ranks or length // ranks < FEWEST or length // ranks % ALIGNED:
        return None
    found = _evaluate(json.loads(text), find_terms(length, ranks)) | {"context_parallel": ranks}
    if (most := settings["model"].get("max_sequence")) is not None:
        found["buffer_bytes"] = found["buffer_bytes"] * most // length
    return ModelSpec.model_validate(found)


def find_terms(length: int, ranks: int) -> Sequence[int]:
    """Returns the terms of which numbers are sums, for sequences of `length` tokens that `ranks` share."""
    own = length // ranks
    return (1, own, length, length * own, own * own) if ranks > 1 else (1, own, own * own)


def _evaluate(nest: Any, terms: Sequence[int]) -> Any:
    if isinstance(nest, list):
        return [_evaluate(one, terms) for one in nest]
    if not isinstance(nest, dict):
        return nest
    if "terms" in nest:
        return sum(a * b for a, b in zip(nest["terms"], terms, strict=True))
    return {name: _evaluate(value, terms) for name, value in nest.items()}
