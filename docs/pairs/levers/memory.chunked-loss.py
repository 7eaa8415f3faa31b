# Before
def forward(self, tokens, targets):
    x = self.transformer(tokens)
    logits = self.head(x)
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


# After
from flatout import linear_cross_entropy


def forward(self, tokens, targets):
    x = self.transformer(tokens)
    return linear_cross_entropy(x, self.head.weight, targets)
