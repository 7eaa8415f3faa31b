# Before
def forward(self, tokens, targets):
    x = self.transformer(tokens)
    logits = self.head(x)
    loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
    return logits, loss


# After
from flatout import linear_cross_entropy


def forward(self, tokens, targets):
    x = self.transformer(tokens)
    if torch.is_grad_enabled():
        loss = linear_cross_entropy(x, self.head.weight, targets, float8=True)
        logits = None
    else:
        logits = self.head(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
    return logits, loss
