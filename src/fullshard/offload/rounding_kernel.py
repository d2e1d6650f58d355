"""AdamW in bf16 with stochastic rounding as one GPU kernel, in Triton, which comes with CUDA builds of torch.

It computes the numbers of `rounding.adamw_with_stochastic_rounding`: the same fp32 operations in the same
order, each rounded to nearest (no fused multiply-add, no approximate division), and the random numbers of
`rounding.random_halfwords`.
"""
# Triton is absent from CPU builds, and its language has no types.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUntypedFunctionDecorator=false

import triton
import triton.language as tl
from torch import Tensor

_PAIRS = 512  # of elements, in one program


@triton.jit
def _store(pointers, exact, word, inside):  # signature: Triton's, by position
    """Stores fp32 `exact`, in bf16 rounded stochastically; infinities and NaNs as torch rounds them.

    word: random bits of each pair of elements, which take the low and the high half
    """
    if pointers.dtype.element_ty == tl.float32:
        tl.store(pointers, exact, mask=inside)
    else:
        bits = exact.to(tl.uint32, bitcast=True)
        up = (bits + tl.interleave(word & 0xFFFF, word >> 16)) & 0xFFFF0000
        finite = (bits & 0x7F800000) != 0x7F800000
        rounded = tl.where(finite, up.to(tl.float32, bitcast=True), exact).to(tl.bfloat16)
        tl.store(pointers, rounded, mask=inside)


@triton.jit
def _update(  # signature: the arguments of a launch  # noqa: PLR0913, PLR0917
    value, first, second, gradient, count, key, begin, keep, beta1, rest1, beta2, rest2, eps,
    of_step, step, bias2, rate, scale, PAIRS: tl.constexpr,
):  # fmt: skip
    """Updates elements 2 · PAIRS · program and following. `of_step`: points to the next four, or None."""
    pairs = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    at = tl.program_id(0).to(tl.int64) * (2 * PAIRS) + tl.arange(0, 2 * PAIRS)
    inside = at < count
    if of_step is not None:
        step, bias2, rate = tl.load(of_step), tl.load(of_step + 1), tl.load(of_step + 2)
        scale = tl.load(of_step + 3)
        inside = inside & (tl.load(of_step + 4 + at * 0) == 0)
    counter, zero = (begin + pairs).to(tl.int32), tl.zeros((PAIRS,), tl.int32)
    update = (step + tl.zeros((PAIRS,), tl.float32)).to(tl.int32)
    one, two, three, _ = tl.philox(key, counter, zero, update, zero)
    g = tl.load(gradient + at, mask=inside).to(tl.float32)
    g = tl.div_rn(g, scale + tl.zeros_like(g))
    m = tl.load(first + at, mask=inside).to(tl.float32) * beta1 + g * rest1
    v = tl.load(second + at, mask=inside).to(tl.float32) * beta2 + (g * g) * rest2
    denominator = tl.sqrt_rn(tl.div_rn(v, bias2 + tl.zeros_like(v))) + eps
    new = tl.load(value + at, mask=inside).to(tl.float32) * keep - tl.div_rn(m, denominator) * rate
    _store(value + at, new, one, inside)
    _store(first + at, m, two, inside)
    _store(second + at, v, three, inside)


def launch_update(
    state: tuple[Tensor, Tensor, Tensor],
    gradient: Tensor,
    *,
    fixed: tuple[float, ...],
    of_step: tuple[float, ...] | Tensor,
    key: int,
    begin: int,
) -> None:
    """Updates contiguous `state`, in bf16 or fp32, in place: see `rounding.adamw_with_stochastic_rounding`.

    fixed, of_step: of `rounding.UpdateFactors`
    key, begin: of a `RoundingSeed`; `begin` is even
    """
    count = gradient.numel()
    grid = (triton.cdiv(count, 2 * _PAIRS),)
    launch = _update[grid]  # pyright: ignore[reportIndexIssue]
    decided = (of_step, 0.0, 0.0, 0.0, 1.0) if isinstance(of_step, Tensor) else (None, *of_step[:4])
    launch(
        *state, gradient, count, key, begin // 2, *fixed, *decided, PAIRS=_PAIRS, enable_fp_fusion=False
    )  # fmt: skip
