"""fp8 weights and activations for the decoder's linear layers; loaded by name when asked for."""
