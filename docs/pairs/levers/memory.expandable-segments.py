# Before
import torch

model = Model().to("cuda")
for x, y in loader:  # the length of a batch differs from step to step
    loss = F.cross_entropy(model(x), y)
    loss.backward()
# After
import os

os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
import torch

model = Model().to("cuda")
for x, y in loader:  # the length of a batch differs from step to step
    loss = F.cross_entropy(model(x), y)
    loss.backward()
