"""Inputs that are nearly right: bytes, JSON and texts with one or a few things changed."""

import json
from collections.abc import Iterator
from copy import deepcopy
from random import Random
from typing import Any

# Stand in the tree while it is mutated; what they become cannot be held by a tree.
_PUT_IN = {
    "@deep@": "[" * 5000 + "]" * 5000,
    "@objects@": '{"a":' * 5000 + "1" + "}" * 5000,
    "@digits@": "9" * 5000,
    "@nan@": "NaN",
    "@infinite@": "1e999",
}
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, -8, 3, 2**31, 2**63, 10**23, 10**30, 0.5, -0.0, 1e300),
    *("", " ", "x", "../../payload", "/etc/passwd", "a/b", "nul\0", "\ud800", "é" * 300, "x" * 100_000, "1"),
    *(
        "float32",
        "torch",
        "os.system",
        "__class__",
        "{{ 7 * 7 }}",
        "{% for i in range(10**9) %}x{% endfor %}",
    ),
    *([], {}, [[]], [None], [0], [-1], [10**18, 10**18], {"a": 1}, {"": {}}),
    *_PUT_IN,
)


def mutated_bytes(data: bytes, rng: Random) -> bytes:
    """Returns `data` cut off, flipped, doubled, filled with something else, or continued."""
    changed, at = bytearray(data), rng.randrange(len(data) + 1)
    stop = min(len(data), at + rng.choice((1, 4, 64, 4096)))
    match rng.randrange(8):
        case 0:
            del changed[at:]
        case 1:
            for _ in range(rng.choice((1, 3, 20))):
                if changed:
                    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        case 2:
            changed[at:stop] = bytes(stop - at)
        case 3:
            changed[at:stop] = b"\xff" * (stop - at)
        case 4:
            changed[at:at] = changed[at:stop] * rng.choice((1, 100))
        case 5:
            del changed[at:stop]
        case 6:
            changed += rng.randbytes(rng.choice((1, 100, 100_000)))
        case _:
            changed = bytearray(
                rng.choice((b"", b"\0" * 999, b"[" * 50_000, b'{"a":' * 50_000, b"\x80\x04."))
            )
    return bytes(changed)


def mutated_json(tree: Any, rng: Random) -> bytes:
    """Returns the JSON of `tree` with a few values replaced, removed, moved or renamed."""
    tree = json.loads(json.dumps(tree))
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        places = list(_places(tree))
        if not places:
            break
        holder, key = rng.choice(places)
        match rng.randrange(8):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[str(rng.choice(HOSTILE))[:1000]] = holder.pop(key)
            case 2:
                other, place = rng.choice(places)
                holder[key] = json.loads(json.dumps(other[place]))
            case 3 if isinstance(holder[key], int) and not isinstance(holder[key], bool):
                holder[key] = rng.choice((holder[key] + 1, holder[key] - 1, -holder[key], holder[key] * 1000))
            case 4 if isinstance(holder[key], list):
                holder[key] *= rng.choice((2, 1000))
            case _:
                holder[key] = deepcopy(rng.choice(HOSTILE))  # else an input would depend on those before it
    text = json.dumps(tree)
    for name, raw in _PUT_IN.items():
        text = text.replace(f'"{name}"', raw)
    data = text.encode()
    return mutated_bytes(data, rng) if rng.random() < 0.1 else data


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key or index) of every value."""
    if isinstance(tree, dict | list):
        for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
            yield tree, key
            yield from _places(tree[key])


def mutated_lines(text: str, rng: Random) -> bytes:
    """Returns TOML, YAML or Python with a few lines removed, doubled, moved, or of another value."""
    lines = text.splitlines()
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        if not lines:
            break
        at = rng.randrange(len(lines))
        match rng.randrange(7):
            case 0:
                del lines[at]
            case 1:
                lines.insert(at, lines[rng.randrange(len(lines))])
            case 2:
                lines[at] = (
                    rng.choice(("\t", "  ", "- ", "[", "]]", "&a ", "*a", "!!python/object/apply:", ""))
                    + lines[at]
                )
            case 3:
                lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)]
            case _:
                lines[at] = _other_value(lines[at], rng)
    data = "\n".join(lines).encode(errors="surrogatepass")
    return mutated_bytes(data, rng) if rng.random() < 0.1 else data


def _other_value(line: str, rng: Random) -> str:
    for sign in ("=", ": ", "("):
        head, found, _ = line.partition(sign)
        if found:
            hostile = rng.choice(HOSTILE)
            text = (
                _PUT_IN.get(hostile, json.dumps(hostile)) if isinstance(hostile, str) else json.dumps(hostile)
            )
            return f"{head}{sign} {text}"
    return line + str(rng.choice(HOSTILE))[:1000]
