# Before
mask = torch.ones(T, T, dtype=torch.bool, device="cuda").tril()
for block in blocks:
    q, k, v = block.project(x)
    x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
# After
mask = torch.ones(T, T, dtype=torch.bool, device="cuda").tril()
for block in blocks:
    q, k, v = block.project(x)
    x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
