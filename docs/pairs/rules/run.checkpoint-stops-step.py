# Before
for step, (x, y) in enumerate(loader):
    train_step(x, y)
    if step % 10 == 0:
        torch.save(model.state_dict(), "checkpoint.pt")
# After
import torch.distributed.checkpoint as dcp

for step, (x, y) in enumerate(loader):
    train_step(x, y)
    if step % 500 == 0:
        saving = dcp.async_save(model.state_dict(), checkpoint_id=f"checkpoint-{step}")
