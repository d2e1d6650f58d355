"""Arguments of calls in Python source, found in its syntax tree. Nothing is ever executed."""

import ast
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, cast

from fullshard.convert.reader import UnevaluatedExpression

_MOST_VALUES = 20_000
# Calls whose arguments are settings, with the names of their positional arguments.
_FSDP1 = (
    "module",
    "process_group",
    "sharding_strategy",
    "cpu_offload",
    "auto_wrap_policy",
    "backward_prefetch",
    "mixed_precision",
    "ignored_modules",
    "param_init_fn",
    "device_id",
    "sync_module_states",
    "forward_prefetch",
    "limit_all_gathers",
    "use_orig_params",
    "ignored_states",
    "device_mesh",
)
LIGHTNING_STRATEGIES: dict[str, tuple[str, ...]] = {
    "FSDPStrategy": ("accelerator", "parallel_devices", "cluster_environment", "precision"),
    "DeepSpeedStrategy": ("accelerator", "zero_optimization", "stage"),
    "ModelParallelStrategy": ("parallelize_fn", "data_parallel_size", "tensor_parallel_size"),
}
LIGHTNING_HOSTS: dict[str, tuple[str, ...]] = {"Fabric": (), "Trainer": ()}
_OBJECTIVES = ("SFT", "DPO", "OnlineDPO", "KTO", "ORPO", "CPO", "BCO", "XPO", "NashMD", "GRPO", "RLOO", "PPO")
TRAINER_CALLS: dict[str, tuple[str, ...]] = {
    name: ("output_dir",)
    for name in (
        *("TrainingArguments", "Seq2SeqTrainingArguments"),
        *(f"{objective}Config" for objective in (*_OBJECTIVES, "GKD", "Reward", "PRM")),
    )
}
# Arguments of a Trainer that change what is trained, and their names in trainer.toml.
_TRAINER_PARTS = {
    "optimizers": "optimizer_objects",
    "optimizer_cls_and_kwargs": "optimizer_objects",
    "compute_loss_func": "compute_loss_func",
    "peft_config": "peft_config",
}
_JSON_CONSTANTS = {"true": True, "false": False, "null": None}
FSDP_CALLS: dict[str, tuple[str, ...]] = {
    "FSDP": _FSDP1,
    "FullyShardedDataParallel": _FSDP1,
    "FSDP2Config": ("sharding_strategy",),
    "fully_shard": ("module",),
}
_PARTS: dict[str, tuple[str, ...]] = {
    "MixedPrecision": ("param_dtype", "reduce_dtype", "buffer_dtype", "keep_low_precision_grads"),
    "MixedPrecisionPolicy": ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"),
    "CPUOffload": ("offload_params",),
    "CPUOffloadPolicy": ("pin_memory",),
    "partial": ("function",),
    "ModuleWrapPolicy": ("module_classes",),
    "CustomPolicy": ("lambda_fn",),
    "init_device_mesh": ("device_type", "mesh_shape"),
    "DeviceMesh": ("device_type", "mesh"),
    "timedelta": ("days", "seconds"),
}


class PythonSource:
    """A parsed program, in which the settings passed to calls can be found.

    A name that is assigned once is replaced by its value. Values that are only known at run time are kept as
    their source text (`UnevaluatedExpression`).

    Raises SyntaxError or ValueError for text that is not Python, RecursionError or MemoryError if it is
    nested too deep, and ValueError for too many values.
    """

    def __init__(self, text: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about the user's program
            self._tree = ast.parse(text)
        self._left = _MOST_VALUES
        self._assigned = _values_of_names_assigned_once(self._tree)

    def fullest_call(self, names: Mapping[str, tuple[str, ...]]) -> tuple[str, dict[str, Any], int] | None:
        """Returns (function, arguments by name, number of other calls) of the call with the most arguments.

        names: the functions whose calls are considered, with the names of their positional arguments
        """
        calls = [
            one for one in ast.walk(self._tree) if isinstance(one, ast.Call) and _bare_callee(one) in names
        ]
        if not calls:
            return None
        best = max(calls, key=lambda one: len(one.keywords) + len(one.args))
        name = _bare_callee(best)
        return name, self._argument_values(best, names[name]), len(calls) - 1

    def trainer_and_its_parts(self, arguments: str) -> dict[str, Any]:
        """Returns the class of the program's Trainer, and arguments of it that change what is trained.

        arguments: the class of the arguments; its name gives the Trainer, unless transformers has the class
        """
        found: dict[str, Any] = {}
        if arguments.endswith("Config"):
            found["trainer"] = arguments.removesuffix("Config") + "Trainer"
        for call in (one for one in ast.walk(self._tree) if isinstance(one, ast.Call)):
            if _bare_callee(call).endswith("Trainer"):
                found["trainer"] = _bare_callee(call)
                parts = {_TRAINER_PARTS[one.arg]: one for one in call.keywords if one.arg in _TRAINER_PARTS}
                found |= {name: UnevaluatedExpression(ast.unparse(one.value)) for name, one in parts.items()}
            elif _bare_callee(call) == "get_peft_model":
                found["peft_config"] = UnevaluatedExpression(ast.unparse(call))
        return found

    def iterate_options(self) -> Iterator[dict[str, Any]]:
        """Yields the non-empty dicts that stand alone or are assigned, and the fields of classes with values.

        Dicts within functions come last. Such a class is, for example, a dataclass.
        """
        for node in [*self._tree.body, *ast.walk(self._tree)]:
            found: Any = None
            if isinstance(node, ast.ClassDef):
                fields = dict(_iterate_assignments(ast.Module(node.body, [])))
                found = {name: self._expression_value(value) for name, value in fields.items()}
            elif isinstance(node, ast.Expr | ast.Assign | ast.AnnAssign) and node.value is not None:
                is_options = isinstance(node.value, ast.Dict | ast.Call)
                found = self._expression_value(node.value) if is_options else None
            if isinstance(found, dict) and found:
                yield cast(dict[str, Any], found)

    def _argument_values(self, call: ast.Call, positions: tuple[str, ...]) -> dict[str, Any]:
        named: dict[str, Any] = {}
        for index, argument in enumerate(call.args):
            name = positions[index] if index < len(positions) else f"argument_{index + 1}"
            named[name] = self._expression_value(argument)
        for keyword in call.keywords:
            value = self._expression_value(keyword.value)
            if keyword.arg is not None:
                named[keyword.arg] = value
            elif isinstance(value, dict):  # **options
                named |= cast(dict[str, Any], value)
            else:
                named["**"] = value
        return named

    def _expression_value(self, node: ast.expr) -> Any:
        self._left -= 1
        if self._left < 0:  # names that expand to several other names, recursively
            raise ValueError(f"its arguments are more than {_MOST_VALUES:,} values")
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self._name_value(node)
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return [self._expression_value(one) for one in node.elts]
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            return {
                str(self._expression_value(key)): self._expression_value(value)
                for key, value in pairs
                if key is not None
            }
        if isinstance(node, ast.Call):
            return self._call_value(node)
        folded = _constant_number(node)
        return UnevaluatedExpression(ast.unparse(node)) if folded is None else folded

    def _name_value(self, node: ast.Name) -> Any:
        if node.id in self._assigned:
            return self._expression_value(self._assigned[node.id])
        return _JSON_CONSTANTS.get(node.id, UnevaluatedExpression(node.id))

    def _call_value(self, call: ast.Call) -> Any:
        name = _bare_callee(call)
        parts = {**_PARTS, **LIGHTNING_STRATEGIES}
        if name == "dict" and not call.args:
            return self._argument_values(call, ())
        if name in ("int", "float") and len(call.args) == 1:
            value = self._expression_value(call.args[0])
            if isinstance(value, int | float):
                return int(value) if name == "int" and math.isfinite(value) else float(value)
        arguments = self._argument_values(call, parts[name]) if name in parts else {}
        return arguments or UnevaluatedExpression(ast.unparse(call))


def _bare_callee(call: ast.Call) -> str:
    """Returns the function's name without its module: `FSDP` for `torch.distributed.fsdp.FSDP(…)`."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _values_of_names_assigned_once(tree: ast.Module) -> dict[str, ast.expr]:
    """Returns the expressions of names that are assigned exactly once."""
    found: dict[str, list[ast.expr]] = {}
    for name, value in _iterate_assignments(tree):
        found.setdefault(name, []).append(value)
    once = {name: values[0] for name, values in found.items() if len(values) == 1}
    order = {name: index for index, name in enumerate(once)}
    # A value may refer only to names assigned before it: otherwise `a = b; b = a` would never end.
    return {
        name: value
        for name, value in once.items()
        if all(order.get(one.id, -1) < order[name] for one in ast.walk(value) if isinstance(one, ast.Name))
    }


def _iterate_assignments(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value


def _constant_number(node: ast.expr) -> int | float | None:
    """Returns the value of a constant such as `-1`, `2 * 8` or `10**8`; None for any other expression."""
    if isinstance(node, ast.Constant):
        value = node.value
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _constant_number(node.operand)
        return None if inner is None else -inner
    return _constant_product_or_power(node) if isinstance(node, ast.BinOp) else None


def _constant_product_or_power(node: ast.BinOp) -> int | float | None:
    """Returns the value of a product or power of constants; None if it is neither, or slow to compute."""
    left, right = _constant_number(node.left), _constant_number(node.right)
    if left is None or right is None:
        return None
    if isinstance(node.op, ast.Mult) and max(abs(left), abs(right)) < 1e15:
        return left * right
    if isinstance(node.op, ast.Pow) and 0 <= left < 1e3 and 0 <= right < 16:
        return cast(float, left**right)
    return None
