# Before
for step, (x, y) in enumerate(bar := tqdm(loader)):
    loss = train_step(x, y)
    writer.add_scalar("loss", loss, step)
    bar.set_postfix(loss=loss.item())
# After
for step, (x, y) in enumerate(bar := tqdm(loader, mininterval=1)):
    loss = train_step(x, y)
    if step % 50 == 0:
        writer.add_scalar("loss", loss, step)
        bar.set_postfix(loss=loss.item(), refresh=False)
