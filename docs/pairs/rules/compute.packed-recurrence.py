# Before
packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
_, (h, _) = lstm(packed)
logits = head(h[-1])
# After
out, _ = lstm(x)
h = out[torch.arange(len(x)), lengths - 1]
logits = head(h)
