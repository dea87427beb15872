"""peft 0.21.2: adapters of a small language model."""

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def _adapted(config):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes))
    model, ids = peft.get_peft_model(base, config).train(), torch.randint(64, (2, 16))
    return (lambda: model(input_ids=ids, labels=ids).loss), model


def lora():
    return _adapted(peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def dora():
    return _adapted(peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", use_dora=True))


def ia3():
    return _adapted(peft.IA3Config(task_type="CAUSAL_LM"))


def adalora():
    return _adapted(peft.AdaLoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], total_step=100, init_r=4))


def oft():
    return _adapted(peft.OFTConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], oft_block_size=8))


def boft():
    return _adapted(peft.BOFTConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], boft_block_size=8))


def vera():
    return _adapted(peft.VeraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=4))


def prefix_tuning():
    return _adapted(peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
