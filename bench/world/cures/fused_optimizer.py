"""torch.optim's Adam, AdamW, SGD and Adagrad with fused=True."""

import torch


def cure() -> None:
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):
        _default_fused(kind)


def _default_fused(kind: type) -> None:
    original = kind.__init__

    def init(self, *args, **kwargs):
        if not kwargs.get("foreach"):
            kwargs["fused"] = True
        original(self, *args, **kwargs)

    kind.__init__ = init
