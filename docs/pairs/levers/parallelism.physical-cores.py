# Before
import torch

model = Transformer()
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
# After
import os

import torch

cores = range(0, 16)  # one of the two processors of each core, on one socket
os.sched_setaffinity(0, cores)
torch.set_num_threads(len(cores))

model = Transformer()
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
