"""A plain timer in the process of any script: put this folder on PYTHONPATH. It knows nothing of flatout.

Python imports this file at its start. It waits until the script imports torch, then stamps each call that ends a step:

    WORLD_MARKS    the stamps' file, one a process: a byte (which optimizer) and a double (seconds) for each call
    WORLD_TIMER    what is stamped: optimizer (default), backward, or forward (calls of outermost modules with parameters)
    WORLD_CLOCK    wall (default), or cpu: stamps in CPU seconds of the process, for a machine that others use at the same time
    WORLD_SYNC     wait for the GPU before each stamp: a host that runs ahead of it stamps what it launched, not what was done
    WORLD_END_S    end the process so many seconds after the first stamp
    WORLD_END_STEPS  end it at this stamp of the optimizer (or module) that stamped first
    WORLD_LOSSES   a file for the losses that backwards start from, a double each
    WORLD_SEED     moves the seeds of torch, NumPy and Python that the script sets, and those that it starts with
    WORLD_CURE     a file of the folder cures/, whose `cure()` is called once torch is imported
"""

import os
import sys
from importlib.machinery import PathFinder


def _allow_torchvision():
    """torchvision's wheels bring operators that need CUDA's libraries; beside a CPU build of torch, importing it asks for them.

    They are declared, so that the rest of torchvision can be used; the operators themselves (nms, roi_align) stay missing.
    """
    import torch

    names = ("nms", "qnms", "qroi_align", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
    names += tuple(f"_{name}_backward" for name in names[3:])
    if torch.version.cuda is None:
        library = torch.library.Library("torchvision", "DEF")
        for name in names:
            library.define(f"{name}() -> ()")
        torch._world_library = library  # it lives as long as torch


def _install():
    import struct
    from time import perf_counter, process_time

    stamps = open(f"{os.environ['WORLD_MARKS']}.{os.getpid()}", "wb", buffering=0)  # noqa: SIM115  # open as long as the process
    main = os.getpid()
    end_s = float(os.environ.get("WORLD_END_S", "0"))
    clock = process_time if os.environ.get("WORLD_CLOCK") == "cpu" else perf_counter
    end_steps = int(os.environ.get("WORLD_END_STEPS", "0"))
    order = {}
    counts = {}
    first = []

    def stamp(key):
        if os.getpid() != main:
            return
        if os.environ.get("WORLD_SYNC"):
            wait_for_device()
        now = perf_counter()
        if not first:
            first.append(now)
        stamps.write(struct.pack("<Bd", order.setdefault(key, len(order)) % 256, clock()))
        counts[key] = counts.get(key, 0) + 1
        is_last = bool(end_steps) and order[key] == 0 and counts[key] >= end_steps
        if is_last or (end_s and now - first[0] > end_s):
            try:
                sys.stdout.flush()
                if "multiprocessing" in sys.modules:
                    for child in sys.modules["multiprocessing"].active_children():
                        child.kill()  # a loader's handler raises an error when its worker dies
            finally:
                os._exit(0)

    def wait_for_device():
        import torch

        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # noqa: TID251  # the timer knows nothing of flatout, and is used in races alone

    kind = os.environ.get("WORLD_TIMER", "optimizer")
    if kind == "optimizer":
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(lambda optimizer, args, kwargs: stamp(id(optimizer)))
    elif kind == "backward":
        import torch

        original = torch.autograd.backward

        def backward(*args, **kwargs):
            original(*args, **kwargs)
            stamp(0)

        torch.autograd.backward = backward
    else:
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

        depth = [0]

        def before(module, inputs):
            depth[0] += 1

        def after(module, inputs, output):
            depth[0] -= 1
            if depth[0] == 0 and any(True for _ in module.parameters()):
                stamp(id(module))

        register_module_forward_pre_hook(before)
        register_module_forward_hook(after, always_call=True)
    if cure := os.environ.get("WORLD_CURE"):
        import runpy

        runpy.run_path(cure)["cure"]()


def _record_losses(path):
    """Write each loss to a file as soon as it is there."""
    import struct

    import torch

    main, losses = os.getpid(), open(path, "wb", buffering=0)  # noqa: SIM115  # open as long as the process
    original = torch.autograd.backward

    def backward(tensors, *args, **kwargs):
        first = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors))
        if os.getpid() == main:
            losses.write(struct.pack("<d", float(first.detach().float().sum())))
        return original(tensors, *args, **kwargs)

    torch.autograd.backward = backward


def _move_seeds(by):
    """Start random numbers from a seed, and move those seeds that the script sets."""
    import random

    import numpy
    import torch

    for owner, name in ((torch, "manual_seed"), (numpy.random, "seed"), (random, "seed")):
        setattr(owner, name, _moved(getattr(owner, name), by))
        getattr(owner, name)(0)


def _moved(original, by):
    """A function that sets a seed, further on where that is a whole number."""

    def seed(value=None, *args, **kwargs):
        return original(value + by if isinstance(value, int) else value, *args, **kwargs)

    return seed


def _accept_stand_ins(module):
    """torchvision's data sets take files whose checksums are not the true ones, as random stand-ins have."""
    module.check_integrity = lambda fpath, md5=None: os.path.isfile(fpath)


class _After:
    """Finds one module as ever, and does something once it is imported; libraries may look for it long before that."""

    def __init__(self, name, action):
        self.name, self.action = name, action

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            original = spec.loader.exec_module

            def exec_module(module):
                sys.meta_path.remove(self)
                original(module)
                self.action(module)

            spec.loader.exec_module = exec_module
        return spec


def _after_torch(module):
    _allow_torchvision()
    if os.environ.get("WORLD_MARKS"):
        _install()
    if os.environ.get("WORLD_LOSSES"):
        _record_losses(os.environ["WORLD_LOSSES"])
    if os.environ.get("WORLD_SEED"):
        _move_seeds(int(os.environ["WORLD_SEED"]))


if os.environ.get("WORLD_MARKS") or os.environ.get("WORLD_TORCHVISION"):
    sys.meta_path.insert(0, _After("torch", _after_torch))
    sys.meta_path.insert(0, _After("torchvision.datasets.utils", _accept_stand_ins))
