# Before
for _ in range(num_new_tokens):
    logits = model(input_ids=tokens).logits[:, -1]
    tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
# After
new, cache = tokens, None
for _ in range(num_new_tokens):
    out = model(input_ids=new, past_key_values=cache, use_cache=True)
    new, cache = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
    tokens = torch.cat([tokens, new], dim=1)
