# Before
scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
mask = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
scores = scores.masked_fill(~mask, float("-inf"))
weights = F.dropout(scores.softmax(dim=-1), 0.1, self.training)
out = weights @ v
# After
out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0, is_causal=True)
