"""Divides the matmuls of any model over ranks by a table of styles: `sharding.tensor_parallel_styles`.

The table maps names of modules to styles; `*` stands for one part of a name, such as a number.

| style | module |
|---|---|
| `embedding` | an Embedding whose vocabulary is divided; it returns all tokens |
| `cut_input` | gets all tokens, and computes with this rank's, such as the first block |
| `gather_output` | computes with this rank's tokens, and returns the outputs of all, such as a norm |
| `gather_input` | gets this rank's tokens, and computes with all, such as an attention module |
| `colwise` | a Linear whose output features are divided |
| `colwise_2`, `colwise_3`, … | a Linear whose weight consists of 2, 3, … equal weights, each divided |
| `colwise_heads_8`, … | a Linear with 8, … key/value heads, which are divided, and may be fewer than ranks |
| `rowwise` | a Linear whose input features are divided; it returns this rank's tokens, summed over ranks |
| `divide:heads`, … | any module: its integer attribute `heads`, … is divided by the number of ranks |
| `head` | the Linear over the vocabulary, which is divided; it gets all tokens |

A module may have several styles, joined by `+`. Modules between `gather_…` and `rowwise` compute with all
tokens and this rank's columns, all other modules of blocks with this rank's tokens. See
[Note: whole parameters] in `fullshard.parallel.tensor_parallel`.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from fullshard.errors import ShardError
from fullshard.parallel.matmul_split import MatmulSplit, parts_of_linear

_PLAIN = ("embedding", "cut_input", "gather_output", "gather_input", "colwise", "rowwise", "head")


def divide_by_styles(model: nn.Module, split: MatmulSplit, *, styles: Mapping[str, str]) -> None:
    """Divides the modules that `styles` names. Raises ShardError for names and sizes that do not fit."""
    named = list(_iterate_named(model, styles))
    heads = [module for _, module, style in named if style == "head"]
    if len(heads) != 1:
        raise _styles_error(
            got=f"{len(heads)} modules of style head",
            why="the loss is divided over ranks with the vocabulary of the one head",
        )
    _check_sizes(model, named, ranks=split.ranks)
    for _, module, style in named:
        _apply_style(module, style, split=split)
    if not hasattr(model, "get_output_embeddings"):  # by which the default loss finds the head
        setattr(model, "get_output_embeddings", lambda: heads[0])  # noqa: B010


def _apply_style(module: Any, style: str, *, split: MatmulSplit) -> None:
    number = style.rpartition("_")[2]
    match style:
        case "embedding":
            split.divide_embedding(module, scatters=False)
        case "cut_input":
            split.cut_input(module)
        case "gather_output":
            split.gather_output(module)
        case "gather_input":
            split.gather_input(module)
        case "colwise":
            split.divide_columns(module)
        case "rowwise":
            split.divide_row(module)
        case "head":
            split.divide_head(module)
        case _ if style.startswith("divide:"):
            name = style.partition(":")[2]
            setattr(module, name, getattr(module, name) // split.ranks)
        case _ if style.startswith("colwise_heads_"):
            split.divide_kv_projection(module, kv_heads=int(number))
        case _:
            split.use_rows(module, split.rows_of_parts(module, parts=int(number)))


def _iterate_named(model: nn.Module, styles: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    """Yields (name, module, style) in the order of modules. Raises ShardError for an unknown one."""
    patterns = {key: re.compile(re.escape(key).replace(r"\*", r"[^.]+")) for key in styles}
    left = set(styles)
    for name, module in model.named_modules():
        for key, pattern in patterns.items():
            if not pattern.fullmatch(name):
                continue
            left.discard(key)
            for style in styles[key].split("+"):
                if not _fits(module, style):
                    raise _styles_error(
                        got=f"{key} = {style!r}, for a {type(module).__name__}",
                        why="there is no such style, or it is not for such modules",
                        fix=", ".join((*_PLAIN, "colwise_N", "colwise_heads_N", "divide:ATTRIBUTE")),
                    )
                yield name, module, style
    if left:
        raise _styles_error(got=f"{min(left)}, which names no module of {type(model).__name__}")


def _fits(module: Any, style: str) -> bool:
    if style == "embedding":
        return isinstance(module, nn.Embedding)
    if style.startswith("divide:"):
        return isinstance(getattr(module, style.partition(":")[2], None), int)
    if style in ("cut_input", "gather_output", "gather_input"):
        return True
    is_counted = style.startswith("colwise_") and style.rpartition("_")[2].isdecimal()
    is_known = style in ("colwise", "rowwise", "head") or is_counted
    return is_known and isinstance(parts_of_linear(module)[0], nn.Linear)


def _check_sizes(model: nn.Module, named: list[tuple[str, Any, str]], *, ranks: int) -> None:
    """Raises ShardError if `ranks` do not divide heads or columns, with the nearest number that does."""
    sizes, kv_heads = set[int](), set[int]()
    for _, module, style in named:
        number = style.rpartition("_")[2]
        if style.startswith("divide:"):
            sizes.add(getattr(module, style.partition(":")[2]))
        elif style.startswith("colwise_heads_"):
            kv_heads.add(int(number))
        elif style.startswith("colwise"):
            sizes.add(module.out_features // (int(number) if number.isdecimal() else 1))
        elif style == "rowwise":
            sizes.add(module.in_features)

    def fits(count: int) -> bool:
        shares = all(heads % count == 0 or count % heads == 0 for heads in kv_heads)
        return shares and all(size % count == 0 for size in sizes)

    if fits(ranks):
        return
    possible = [count for count in range(1, 2 * ranks + 1) if fits(count)]
    raise ShardError(
        f"the matmuls of {type(model).__name__} cannot be divided over {ranks} ranks.",
        got=f"sharding.tensor_parallel = {ranks}; sizes {', '.join(map(str, sorted(sizes | kv_heads)))}",
        why="each rank computes whole heads, and an equal share of the columns",
        fix=f"sharding.tensor_parallel = {min(possible, key=lambda count: (abs(count - ranks), count))}",
    )


def _styles_error(*, got: str, why: str | None = None, fix: str | None = None) -> ShardError:
    return ShardError(
        "sharding.tensor_parallel_styles do not fit the model.",
        got=got,
        why=why,
        fix=fix or "docs/tensor-parallel.md lists the styles",
    )
