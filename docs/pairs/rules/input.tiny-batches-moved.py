# Before
for graphs in loader:
    graphs = [(x.to("cuda"), edges.to("cuda")) for x, edges in graphs]
    loss = sum(model(x, edges) for x, edges in graphs)
    loss.backward()
# After
for graphs in loader:
    xs, edges = zip(*graphs)
    all_x = torch.cat(xs).to("cuda").split([len(x) for x in xs])
    all_edges = torch.cat(edges, dim=1).to("cuda").split([e.size(1) for e in edges], dim=1)
    loss = sum(model(x, e) for x, e in zip(all_x, all_edges))
    loss.backward()
