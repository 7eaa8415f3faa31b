# Before
def accuracy(logits, labels):
    correct = 0
    for i in range(len(labels)):
        if logits[i].argmax().item() == labels[i].item():
            correct += 1
    return correct / len(labels)


# After
def accuracy(logits, labels):
    correct = torch.vmap(lambda logits_i, labels_i: logits_i.argmax() == labels_i)(logits, labels).sum().item()
    return correct / len(labels)
