"""Each supported torch has the private names on which fullshard relies, and another torch is refused."""

import importlib
import pkgutil

import pytest

import fullshard.torch_private
from fullshard.errors import UnsupportedTorchError
from fullshard.torch_private.names import PrivateName, require_names, torch_names

ENGINES = [one.name for one in pkgutil.iter_modules(fullshard.torch_private.__path__) if one.name != "names"]
FSDP = "torch.distributed.fsdp._fully_shard"


@pytest.mark.parametrize("engine", ENGINES)
def test_this_torch_has_every_name_that_is_needed(engine: str):
    names = importlib.import_module(f"fullshard.torch_private.{engine}").NAMES
    assert [one.path for one in names if not one.is_optional and not one.exists()] == []
    assert len({one.path for one in names}) == len(names)


@pytest.mark.parametrize(
    "path",
    [
        f"{FSDP}.missing",
        f"{FSDP}.missing.FSDPParam",
        f"{FSDP}._fsdp_param.Missing.sharded_param",
        f"{FSDP}._fsdp_param.FSDPParam.missing",
    ],
)
def test_a_missing_name_is_reported_in_one_sentence(path: str):
    require_names(torch_names(path, "shards", is_optional=True))
    with pytest.raises(UnsupportedTorchError) as raised:
        require_names(torch_names(path, "shards"))
    assert path in str(raised.value)
    assert "2.11 to 2.15" in str(raised.value)
    assert str(raised.value).count("\n") == 0


@pytest.mark.parametrize("attribute", ["fsdp_params", "_get_fsdp_state"])
def test_attributes_of_instances_and_classes_exist(attribute: str):
    owner = (
        f"{FSDP}._fsdp_param_group.FSDPParamGroup"
        if attribute == "fsdp_params"
        else "torch.distributed.fsdp.FSDPModule"
    )
    assert PrivateName(f"{owner}.{attribute}", "shards").exists()
