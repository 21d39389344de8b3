"""Shapes of tiny models, as transformers' configs take them."""

PAIRED = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}  # two heads to a key
SMALL = {**PAIRED, "vocab_size": 102, "intermediate_size": 64, "num_hidden_layers": 2}
