"""x-transformers 2.31.10: language models with its extra losses."""

import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper


def _wrapped(wrap=AutoregressiveWrapper, length=17, **options):
    layers = Decoder(dim=16, depth=2, heads=2, rotary_pos_emb=True, **options)
    model = wrap(TransformerWrapper(num_tokens=32, max_seq_len=length, attn_layers=layers))
    ids = torch.randint(32, (2, length))
    return lambda: model(ids), model


def autoregressive():
    return _wrapped()


def query_key_norm():
    return _wrapped(attn_qk_norm=True)


def talking_heads():
    return _wrapped(attn_pre_talking_heads=True)
