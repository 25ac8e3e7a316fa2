"""From an nn.Module to a Graph: the only room that knows torch.export and PyTorch's private names."""
