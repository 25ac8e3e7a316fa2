"""How tensors lie in buffers and in 2.5-D texture memory, and how kernels walk them (TMModel, 3 and 5)."""
