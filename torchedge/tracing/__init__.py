"""From an nn.Module to a ForwardGraph or a Step: the only room that uses PyTorch's private names."""
