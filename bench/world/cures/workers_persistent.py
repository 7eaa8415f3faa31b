"""DataLoaders whose workers live through all epochs."""

import torch.utils.data as data


def cure() -> None:
    original = data.DataLoader.__init__

    def init(self, *args, **kwargs):
        if kwargs.get("num_workers"):
            kwargs["persistent_workers"] = True
        original(self, *args, **kwargs)

    data.DataLoader.__init__ = init
