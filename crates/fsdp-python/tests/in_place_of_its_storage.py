"""A plug-in of pytest: lets the tests of ``torch_checkpointing`` run on our storage in place of its own."""

import sys
from dataclasses import dataclass

import torch_checkpointing  # noqa: F401 : all of it is there before its names are replaced
from fsdp_checkpoint import torch_checkpointing as ours
from torch_checkpointing.storage import filesystem


@dataclass
class Config(ours.StorageConfig):
    """The configuration of our storage, with the option of the library's own."""

    use_direct_io: bool = True


class Storage(ours.Storage):
    """Our storage, made from a configuration as the library's own."""

    def __init__(self, config):
        super().__init__()


REPLACED = {filesystem.LocalFileSystemStorageConfig: Config, filesystem.LocalFileSystemStorage: Storage}

for module in [module for name, module in sys.modules.items() if name.split(".")[0] == "torch_checkpointing"]:
    for name, value in list(vars(module).items()):
        if isinstance(value, type) and value in REPLACED:
            setattr(module, name, REPLACED[value])
