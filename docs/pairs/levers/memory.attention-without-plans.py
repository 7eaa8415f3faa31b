# Before
import torch

for tokens, targets in loader:  # each batch has a width of its own
    loss = F.cross_entropy(model(tokens), targets)
    loss.backward()
# After
import torch

torch.backends.cuda.enable_cudnn_sdp(False)

for tokens, targets in loader:  # each batch has a width of its own
    loss = F.cross_entropy(model(tokens), targets)
    loss.backward()
