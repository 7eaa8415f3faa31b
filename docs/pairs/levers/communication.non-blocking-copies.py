# Before
for step in range(steps):
    images, labels = draw_batch()
    images, labels = images.to(device), labels.to(device)
    train_step(images, labels)


# After
for step in range(steps):
    images, labels = draw_batch()
    images, labels = images.pin_memory().to(device, non_blocking=True), labels.to(device, non_blocking=True)
    train_step(images, labels)
