"""trl 1.16.0: the losses of its trainers, on a small language model and a few preferences."""

import tempfile

import pyarrow as pa
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

_WORDS = ["<pad>", "<eos>", "<unk>", "what", "is", "it", "a", "good", "bad", "long", "short", "answer", "."]


def _tokenizer():
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(_WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def _model(kind=LlamaForCausalLM):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(_WORDS), num_key_value_heads=2, pad_token_id=0, **sizes, num_labels=1)
    return kind(config)


_PREFERENCES = {
    "prompt": ["what is it ", "is it good ", "is it bad ", "what is good "],
    "chosen": ["a good answer .", "it is good .", "it is a long answer .", "a short answer ."],
    "rejected": ["bad .", "a bad answer .", "long .", "it is long ."],
}


def _rows(columns):
    return Dataset(pa.table(columns), fingerprint=str(len(columns)))  # one that is computed depends on dill


def _loss(trainer):
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    return (lambda: trainer.compute_loss(trainer.model, batch)), trainer.model


def _options(**options):
    basic = {"use_cpu": True, "report_to": "none", "per_device_train_batch_size": 4, "bf16": False}
    return {"output_dir": tempfile.mkdtemp(), "gradient_checkpointing": False, **basic, **options}


def _preferences(**options):
    return trl.DPOTrainer(
        _model(),
        ref_model=_model(),
        args=trl.DPOConfig(**_options(**options)),
        train_dataset=_rows(_PREFERENCES),
        processing_class=_tokenizer(),
    )


def direct_preferences():
    return _loss(_preferences())


def identity_preferences():
    return _loss(_preferences(loss_type="ipo"))


def weighted_preferences():
    return _loss(_preferences(use_weighting=True))


def preferences_with_a_likelihood():
    return _loss(_preferences(loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5]))


def kahneman_tversky():
    rows = {
        "prompt": _PREFERENCES["prompt"] * 2,
        "completion": [*_PREFERENCES["chosen"], *_PREFERENCES["rejected"]],
        "label": [True] * 4 + [False] * 4,
    }
    return _loss(
        trl.KTOTrainer(
            _model(),
            ref_model=_model(),
            args=trl.KTOConfig(**_options()),
            train_dataset=_rows(rows),
            processing_class=_tokenizer(),
        )
    )


def reward_model():
    return _loss(
        trl.RewardTrainer(
            _model(LlamaForSequenceClassification),
            args=trl.RewardConfig(**_options(center_rewards_coefficient=0.01)),
            train_dataset=_rows(_PREFERENCES),
            processing_class=_tokenizer(),
        )
    )


def _group(**options):
    folder = tempfile.mkdtemp()
    _model().save_pretrained(folder)  # the reference of a penalty is read from where the model came from
    trainer = trl.GRPOTrainer(
        LlamaForCausalLM.from_pretrained(folder),
        reward_funcs=lambda completions, **_: [float(len(set(text.split()))) for text in completions],
        args=trl.GRPOConfig(**_options(num_generations=4, max_completion_length=6, **options)),
        train_dataset=_rows({"prompt": _PREFERENCES["prompt"]}),
        processing_class=_tokenizer(),
    )
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return (lambda: trainer.compute_loss(trainer.model, batch)), trainer.model


def group_relative_policy():
    return _group()


def group_relative_policy_with_a_penalty():
    return _group(beta=0.1)


def clipped_importance():
    return _group(loss_type="cispo", epsilon_high=5.0)


def sequence_ratios():
    return _group(importance_sampling_level="sequence")
