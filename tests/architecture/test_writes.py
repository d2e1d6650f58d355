"""Files are written by functions of `fullshard.system`, which follow no link, and where it is named here."""

import ast
from collections.abc import Iterator

from tests.architecture.source import Module, package
from tests.architecture.test_imports import made_of

_OPEN = {"open", "fdopen", "GzipFile", "ZipFile", "TarFile", "memmap", "open_memmap"}
_CREATING = {"O_CREAT", "O_WRONLY", "O_RDWR", "O_APPEND", "O_TRUNC"}
# Methods and functions that write, whatever they belong to; and functions of the modules below that do.
_WRITERS = {
    *("write_text", "write_bytes", "tofile", "save_pretrained", "save_file", "serialize_file", "savez"),
    *("touch", "symlink_to", "hardlink_to", "rename", "renames", "copyfile", "copytree", "copy2", "mkstemp"),
    *("NamedTemporaryFile", "FileIO", "FileHandler", "SummaryWriter"),
}
_OF_MODULES = {"save", "copy", "move", "link", "symlink", "mknod", "mkfifo", "truncate", "TemporaryFile"}
_MODULES = {"np", "numpy", "torch", "shutil", "os", "tempfile"}

# (module, call) -> why it follows no link.
EXCEPTIONS = {
    ("checkpoint.location", "rename"): "of a directory; rename(2) follows no link",
    ("data.token_store", "rename"): "of a directory; rename(2) follows no link",
    ("jobs.run_directory", "rename"): "of a directory; rename(2) follows no link",
    ("observe.run_log", "replace"): "rename(2) follows no link",
    ("observe.run_log", "FileIO"): "`open_regular_file` opens it",
    ("spec.records.event", "open_regular_file"): "a function of fullshard.system",
    ("data.worker", "fdopen"): "the pipe to the process that asks",
    ("data.token_store", "save"): "numpy writes into a file of `open_new_file`",
    ("checkpoint.shard_file", "save"): "torch writes into a DirectFileWriter",
    ("checkpoint.storage", "save"): "torch writes into a file of `write_new_file`",
    ("weights.export_state", "save"): "torch writes into a file of `write_new_file`",
    ("training.offload_checkpoint", "save"): "torch writes into memory",
    ("observe.profiles", "NamedTemporaryFile"): "its name is random; torch's profiler takes only a path",
    ("observe.trackers", "SummaryWriter"): "tensorboard names and writes its own files",
    ("offload.drive", "open"): "O_EXCL and O_NOFOLLOW, through an interface that tests replace",
    ("offload.directories", "open"): "O_NOFOLLOW, through an interface that tests replace",
}


def writes(module: Module) -> Iterator[str]:
    """Yields the name of each call that creates, writes, copies or renames a file."""
    for node in module.nodes:
        if not isinstance(node, ast.Call):
            continue
        owner, _, name = ast.unparse(node.func).rpartition(".")
        given = [*node.args, *(one.value for one in node.keywords)]
        texts = [one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        inner = [part for one in given for part in ast.walk(one)]
        flags = {one.attr for one in inner if isinstance(one, ast.Attribute)}
        is_mode = any(one and set(one) <= set("rwax+bt") and set(one) & set("wax+") for one in texts)
        is_rename = owner and name == "replace" and len(node.args) == 1 and not node.keywords
        if (
            (name in _OPEN and is_mode)
            or ("open" in name and flags & _CREATING)
            or is_rename
            or name in _WRITERS
            or (owner in _MODULES and (name in _OF_MODULES or (owner == "os" and name == "replace")))
        ):
            yield name


def test_files_are_written_by_functions_that_follow_no_link() -> None:
    found = {
        (name.removeprefix("fullshard."), call)
        for name, module in package().items()
        if module.package != "system"
        for call in writes(module)
    }
    assert found == set(EXCEPTIONS)


def test_every_way_to_write_is_found() -> None:
    wrong = [
        *(
            'open(path, "w")',
            'path.open("ab")',
            'open(path, mode="x")',
            "path.write_text(text)",
            "np.save(path, x)",
        ),
        *(
            "torch.save(x, path)",
            "os.open(path, os.O_WRONLY | os.O_CREAT)",
            "os.replace(a, b)",
            "a.replace(b)",
        ),
        *(
            "a.rename(b)",
            "shutil.copy(a, b)",
            'gzip.open(path, "wb")',
            "shutil.copytree(a, b)",
            "path.touch()",
        ),
    ]
    for text in wrong:
        [module] = made_of(fullshard__spec__run=text).values()
        assert list(writes(module)), text
    right = ["open(path)", 'open(path, "rb")', "os.open(path, os.O_RDONLY)", 'text.replace("a", "b")']
    [module] = made_of(fullshard__spec__run="\n".join([*right, "replace(value, key=1)"])).values()
    assert list(writes(module)) == []
