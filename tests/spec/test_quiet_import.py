"""A package that warns while another one brings it along is not heard."""

import logging
import sys

from fullshard.system.dotted import import_quietly

NOISY = """
import logging
for name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(name).warning("of no concern")
logging.getLogger("torchao").error("it is broken")
"""


def test_warnings_of_torchao_are_left_out_while_it_is_imported(tmp_path, monkeypatch, caplog):
    (tmp_path / "brings_torchao.py").write_text(NOISY)
    monkeypatch.syspath_prepend(tmp_path)
    import_quietly("brings_torchao")
    assert caplog.messages == ["it is broken"]
    logging.getLogger("torchao").warning("heard again")
    assert caplog.messages[-1] == "heard again"
    del sys.modules["brings_torchao"]
