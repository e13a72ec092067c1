"""The operations of a decoding step: what they mean (`torch_ops`), fast ones, and the table that picks between them."""
