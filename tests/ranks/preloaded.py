"""Modules that take seconds to import and that some ranks need: transformers and torchao, if installed."""

from importlib.util import find_spec

from fullshard.system.dotted import import_quietly

if find_spec("transformers") is not None:
    import_quietly("transformers.models.llama.modeling_llama")
if find_spec("torchao") is not None:
    import_quietly("torchao.optim")
