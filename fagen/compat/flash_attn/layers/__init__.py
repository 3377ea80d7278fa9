"""`flash_attn.layers`, as far as tests of the attention calls import it."""
