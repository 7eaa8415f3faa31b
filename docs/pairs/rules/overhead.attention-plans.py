# Before
for tokens, targets in loader:  # each batch has a width of its own
    q, k, v = project(embed(tokens))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    loss = F.cross_entropy(head(out), targets)
# After
torch.backends.cuda.enable_cudnn_sdp(False)
for tokens, targets in loader:
    q, k, v = project(embed(tokens))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    loss = F.cross_entropy(head(out), targets)
