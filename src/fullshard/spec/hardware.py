"""The catalog of known accelerators: what each can do at most, and which datasheet says so.

All figures are for dense matrices (datasheets often print the double, for 2:4 sparsity) and with 32-bit
accumulation, and they are for one device as torch counts devices. A figure that no source gives, or on which
the vendor's own papers disagree, is left out: no utilisation is better than a wrong one.
"""

from collections.abc import Mapping
from typing import Literal

from fullshard.spec.value import Value

ComputeDtype = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]


class Chip(Value):
    """One accelerator. `flops_per_second`: the dense matmul peak for each dtype that is known.

    `memory_bytes` is what the chip carries: vendors print GB and mean GiB, and the driver keeps some percent.
    `device_names`: all that drivers call it, in lower case and without the vendor.
    """

    name: str
    device_names: tuple[str, ...]
    memory_bytes: int
    memory_bytes_per_second: float
    flops_per_second: Mapping[ComputeDtype, float]
    source: str


def find_chip(device_name: str, *, memory_bytes: int | None = None) -> Chip | None:
    """The chip that `torch.cuda.get_device_name` (or `torch.hpu`'s) calls `device_name`; None if unknown.

    Names are compared whole, never by a part: `NVIDIA H100 PCIe`, `NVIDIA H100 NVL` and `NVIDIA H100 80GB
    HBM3` (SXM) are three chips, and `NVIDIA A100-SXM4-40GB MIG 3g.20gb` is a slice of one. A partition that
    bears the whole chip's name (AMD's do) shows in its memory: where `memory_bytes` is given and is not
    about the chip's own, the answer is None too.
    """
    name = " ".join(device_name.lower().split())
    for vendor in ("nvidia ", "amd ", "intel "):
        name = name.removeprefix(vendor)
    chip = next((chip for chip in CATALOG if name in chip.device_names), None)
    if chip is None or memory_bytes is None:
        return chip
    return chip if 0.85 <= memory_bytes / chip.memory_bytes <= 1.05 else None


_GIB = 1024**3

_A100 = "NVIDIA A100 Tensor Core GPU datasheet"
_A100_RATES: dict[ComputeDtype, float] = {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "fp16": 312e12}

_HOPPER = "NVIDIA H100 Tensor Core GPU Architecture whitepaper, dense figures"
_HOPPER_SXM_RATES: dict[ComputeDtype, float] = {
    "fp32": 66.9e12,
    "tf32": 494.7e12,
    "bf16": 989.4e12,
    "fp16": 989.4e12,
    "fp8": 1978.9e12,
}
_HOPPER_PCIE_RATES: dict[ComputeDtype, float] = {
    "fp32": 51.2e12,
    "tf32": 378e12,
    "bf16": 756e12,
    "fp16": 756e12,
    "fp8": 1513e12,
}
_HOPPER_NVL_RATES: dict[ComputeDtype, float] = {
    "fp32": 60e12,
    "tf32": 417.5e12,
    "bf16": 835.5e12,
    "fp16": 835.5e12,
    "fp8": 1670.5e12,
}

# fp32 is left out: 80 TFLOP/s a B200 in the brief, 75 in later HGX pages.
_BLACKWELL = "NVIDIA Blackwell Architecture Technical Brief, dense figures"

_CDNA3_RATES: dict[ComputeDtype, float] = {
    "fp32": 163.4e12,
    "tf32": 653.7e12,
    "bf16": 1307.4e12,
    "fp16": 1307.4e12,
    "fp8": 2614.9e12,
}

CATALOG: tuple[Chip, ...] = (
    Chip(
        name="A100 PCIe 40 GB",
        device_names=("a100-pcie-40gb",),
        memory_bytes=40 * _GIB,
        memory_bytes_per_second=1555e9,
        flops_per_second=_A100_RATES,
        source=_A100,
    ),
    Chip(
        name="A100 PCIe 80 GB",
        device_names=("a100 80gb pcie", "a100-pcie-80gb"),
        memory_bytes=80 * _GIB,
        memory_bytes_per_second=1935e9,
        flops_per_second=_A100_RATES,
        source=_A100,
    ),
    Chip(
        name="A100 SXM 40 GB",
        device_names=("a100-sxm4-40gb", "a100-sxm-40gb"),
        memory_bytes=40 * _GIB,
        memory_bytes_per_second=1555e9,
        flops_per_second=_A100_RATES,
        source=_A100,
    ),
    Chip(
        name="A100 SXM 80 GB",
        device_names=("a100-sxm4-80gb", "a100-sxm-80gb"),
        memory_bytes=80 * _GIB,
        memory_bytes_per_second=2039e9,
        flops_per_second=_A100_RATES,
        source=_A100,
    ),
    Chip(
        name="H100 SXM",
        device_names=("h100 80gb hbm3",),
        memory_bytes=80 * _GIB,
        memory_bytes_per_second=3.35e12,
        flops_per_second=_HOPPER_SXM_RATES,
        source=f"{_HOPPER}; memory: NVIDIA H100 datasheet",
    ),
    Chip(
        name="H100 PCIe",
        device_names=("h100 pcie", "h100 80gb hbm2e"),
        memory_bytes=80 * _GIB,
        memory_bytes_per_second=2e12,
        flops_per_second=_HOPPER_PCIE_RATES,
        source=f"{_HOPPER}; memory: NVIDIA H100 datasheet",
    ),
    Chip(
        name="H100 NVL",
        device_names=("h100 nvl",),
        memory_bytes=94 * _GIB,
        memory_bytes_per_second=3.9e12,
        flops_per_second=_HOPPER_NVL_RATES,
        source="NVIDIA H100 datasheet, column H100 NVL, half of its figures with sparsity",
    ),
    Chip(
        name="H200 SXM",
        device_names=("h200",),
        memory_bytes=141 * _GIB,
        memory_bytes_per_second=4.8e12,
        flops_per_second=_HOPPER_SXM_RATES,
        source=f"{_HOPPER}, which NVIDIA's H200 datasheet repeats; memory: the H200 datasheet",
    ),
    Chip(
        name="H200 NVL",
        device_names=("h200 nvl",),
        memory_bytes=141 * _GIB,
        memory_bytes_per_second=4.8e12,
        flops_per_second=_HOPPER_NVL_RATES,
        source="NVIDIA H200 datasheet, column H200 NVL, half of its figures with sparsity",
    ),
    Chip(
        name="B200",
        device_names=("b200",),
        memory_bytes=180 * _GIB,
        memory_bytes_per_second=8e12,
        flops_per_second={"tf32": 1.1e15, "bf16": 2.25e15, "fp16": 2.25e15, "fp8": 4.5e15},
        source=f"{_BLACKWELL}; memory: an eighth of NVIDIA's DGX B200 datasheet (1,440 GB, 64 TB/s)",
    ),
    Chip(
        name="GB200",  # one of the superchip's two GPUs
        device_names=("gb200",),
        memory_bytes=186 * _GIB,
        memory_bytes_per_second=8e12,
        flops_per_second={"tf32": 1.25e15, "bf16": 2.5e15, "fp16": 2.5e15, "fp8": 5e15},
        source=f"{_BLACKWELL}; memory: a 72nd of NVIDIA's GB200 NVL72 datasheet (13.4 TB, 576 TB/s)",
    ),
    Chip(
        name="L40S",
        device_names=("l40s",),
        memory_bytes=48 * _GIB,
        memory_bytes_per_second=864e9,
        flops_per_second={
            "fp32": 91.6e12,
            "tf32": 183e12,
            "bf16": 362.05e12,
            "fp16": 362.05e12,
            "fp8": 733e12,
        },
        source="NVIDIA L40S datasheet",
    ),
    Chip(
        name="L4",
        device_names=("l4",),
        memory_bytes=24 * _GIB,
        memory_bytes_per_second=300e9,
        flops_per_second={"fp32": 30.3e12, "tf32": 60e12, "bf16": 121e12, "fp16": 121e12, "fp8": 242.5e12},
        source="NVIDIA L4 datasheet, half of its figures with sparsity",
    ),
    Chip(
        name="A10",
        device_names=("a10",),
        memory_bytes=24 * _GIB,
        memory_bytes_per_second=600e9,
        flops_per_second={"fp32": 31.2e12, "tf32": 62.5e12, "bf16": 125e12, "fp16": 125e12},
        source="NVIDIA A10 datasheet",
    ),
    Chip(
        name="GeForce RTX 4090",
        device_names=("geforce rtx 4090",),
        memory_bytes=24 * _GIB,
        memory_bytes_per_second=1008e9,
        flops_per_second={
            "fp32": 82.6e12,
            "tf32": 82.6e12,
            "bf16": 165.2e12,
            "fp16": 165.2e12,
            "fp8": 330.3e12,
        },
        source="NVIDIA Ada GPU Architecture whitepaper, appendix A, with FP32 accumulate",
    ),
    Chip(
        name="GeForce RTX 3090",
        device_names=("geforce rtx 3090",),
        memory_bytes=24 * _GIB,
        memory_bytes_per_second=936e9,
        flops_per_second={"fp32": 35.6e12, "tf32": 35.6e12, "bf16": 71e12, "fp16": 71e12},
        source="NVIDIA Ampere GA102 GPU Architecture whitepaper, appendix A, with FP32 accumulate",
    ),
    Chip(
        name="Instinct MI250X, one of its two dies",  # torch counts each die as a device
        device_names=("instinct mi250x",),
        memory_bytes=64 * _GIB,
        memory_bytes_per_second=1.6e12,
        flops_per_second={"fp32": 47.85e12, "bf16": 191.5e12, "fp16": 191.5e12},
        source="AMD Instinct MI250X data sheet, half of its figures (fp32: matrix)",
    ),
    Chip(
        name="Instinct MI300X",
        # VF: a virtual machine's view of a whole chip; the driver makes one of each
        device_names=("instinct mi300x", "instinct mi300x oam", "instinct mi300x vf"),
        memory_bytes=192 * _GIB,
        memory_bytes_per_second=5.3e12,
        flops_per_second=_CDNA3_RATES,
        source="AMD Instinct MI300X data sheet",
    ),
    Chip(
        name="Instinct MI325X",
        device_names=("instinct mi325x", "instinct mi325x oam"),
        memory_bytes=256 * _GIB,
        memory_bytes_per_second=6e12,
        flops_per_second=_CDNA3_RATES,
        source="AMD Instinct MI325X data sheet",
    ),
    Chip(
        name="Gaudi 2",
        device_names=("gaudi2", "gaudi 2"),
        memory_bytes=96 * _GIB,
        memory_bytes_per_second=2.45e12,
        flops_per_second={"bf16": 432e12, "fp8": 865e12},
        source="Intel Gaudi 3 AI Accelerator White Paper, comparison with Gaudi 2",
    ),
    Chip(
        name="Gaudi 3",
        device_names=("gaudi3", "gaudi 3"),
        memory_bytes=128 * _GIB,
        memory_bytes_per_second=3.7e12,
        flops_per_second={"bf16": 1835e12, "fp8": 1835e12},
        source="Intel Gaudi 3 AI Accelerator White Paper",
    ),
)
