"""DataLoaders that had no worker processes, with two that live through all epochs."""

import torch.utils.data as data


def cure() -> None:
    original = data.DataLoader.__init__

    def init(self, *args, **kwargs):
        if not kwargs.get("num_workers"):
            kwargs |= {"num_workers": 2, "persistent_workers": True}
        original(self, *args, **kwargs)

    data.DataLoader.__init__ = init
