"""transformers 5.23.0: small models whose forward pass stops gradients, with their own losses."""

import torch
import transformers

_SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_MIXTURE = {**_SMALL, "vocab_size": 64, "num_key_value_heads": 2, "num_local_experts": 4}
_BOXES = [[0.5, 0.5, 0.2, 0.2], [0.3, 0.3, 0.1, 0.1]]


def _language(kind, config):
    model, ids = getattr(transformers, kind)(config).train(), torch.randint(64, (2, 16))
    return (lambda: model(input_ids=ids, labels=ids).loss), model


def mixtral():
    config = transformers.MixtralConfig(**_MIXTURE, output_router_logits=True)
    return _language("MixtralForCausalLM", config)


def phimoe():
    config = transformers.PhimoeConfig(**_MIXTURE, output_router_logits=True, bos_token_id=1, eos_token_id=2)
    return _language("PhimoeForCausalLM", config)


def xlnet_with_its_memory():
    config = transformers.XLNetConfig(vocab_size=64, d_model=32, n_layer=2, n_head=4, d_inner=64, mem_len=8)
    model, (earlier, later) = transformers.XLNetLMHeadModel(config).train(), torch.randint(64, (2, 2, 8))

    def loss():
        first = model(earlier, labels=earlier, use_mems=True)
        return first.loss + model(later, labels=later, mems=first.mems, use_mems=True).loss

    return loss, model


def reformer_with_chunks():
    config = transformers.ReformerConfig(
        vocab_size=64,
        hidden_size=32,
        attn_layers=["local", "lsh"],
        num_attention_heads=2,
        attention_head_size=16,
        feed_forward_size=32,
        axial_pos_shape=(4, 4),
        axial_pos_embds_dim=(16, 16),
        is_decoder=True,
        num_buckets=4,
        lsh_attn_chunk_length=8,
        local_attn_chunk_length=8,
        hash_seed=0,
    )
    model, ids = transformers.ReformerModelWithLMHead(config).train(), torch.randint(64, (1, 16))
    return (lambda: model(input_ids=ids, labels=ids).loss), model


def wav2vec2_pretraining():
    config = transformers.Wav2Vec2Config(
        **{**_SMALL, "num_attention_heads": 2},
        conv_dim=(16, 16),
        conv_stride=(5, 4),
        conv_kernel=(10, 8),
        num_codevectors_per_group=8,
        codevector_dim=16,
        proj_codevector_dim=16,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        num_negatives=5,
    )
    model, waves = transformers.Wav2Vec2ForPreTraining(config).train(), torch.randn(2, 1600)
    length = int(model._get_feat_extract_output_lengths(1600))
    masked, negatives = torch.rand(2, length) < 0.3, torch.randint(length, (2, length, 5))
    negatives += length * torch.arange(2)[:, None, None]
    return (lambda: model(waves, mask_time_indices=masked, sampled_negative_indices=negatives).loss), model


def _audio(model, decoded):
    waves = torch.randn(1, 1, 400)
    return (lambda: (decoded(model(waves)) - waves).square().mean()), model


def encodec():
    config = transformers.EncodecConfig(
        num_filters=4,
        hidden_size=16,
        codebook_size=16,
        codebook_dim=16,
        upsampling_ratios=[4, 2],
        num_lstm_layers=1,
        target_bandwidths=[24.0],
    )
    return _audio(transformers.EncodecModel(config).train(), lambda out: out.audio_values[..., :400])


def mimi():
    config = transformers.MimiConfig(
        num_filters=4,
        hidden_size=16,
        codebook_size=16,
        codebook_dim=8,
        vector_quantization_hidden_dimension=8,
        upsample_groups=1,
        upsampling_ratios=[4, 2],
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=16,
        num_quantizers=4,
    )
    return _audio(transformers.MimiModel(config).train(), lambda out: out.audio_values[..., :400])


def dac():
    config = transformers.DacConfig(
        encoder_hidden_size=8,
        downsampling_ratios=[2, 4],
        decoder_hidden_size=16,
        upsampling_ratios=[4, 2],
        n_codebooks=2,
        codebook_size=16,
        codebook_dim=4,
        hidden_size=32,
    )
    model, waves = transformers.DacModel(config).train(), torch.randn(1, 1, 256)

    def loss():
        out = model(waves)
        return out.loss.mean() + (out.audio_values[..., :200] - waves[..., :200]).abs().mean()

    return loss, model


def groupvit():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = transformers.GroupViTConfig(
        text_config={**sizes, "vocab_size": 64, "num_hidden_layers": 1, "eos_token_id": 63},
        vision_config={**sizes, "depths": [1, 1], "num_group_tokens": [4, 0], "num_output_groups": [4, 0]}
        | {"num_hidden_layers": 2, "image_size": 16, "patch_size": 4},
        projection_dim=16,
        projection_intermediate_dim=32,
    )
    model, images, ids = (
        transformers.GroupViTModel(config).train(),
        torch.randn(4, 3, 16, 16),
        torch.randint(62, (4, 8)),
    )
    ids[:, -1] = 63
    return (lambda: model(input_ids=ids, pixel_values=images, return_loss=True).loss), model


def videomae_pretraining():
    config = transformers.VideoMAEConfig(
        **_SMALL,
        image_size=16,
        patch_size=8,
        num_frames=4,
        decoder_hidden_size=16,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=32,
    )
    model, video = transformers.VideoMAEForPreTraining(config).train(), torch.randn(2, 4, 3, 16, 16)
    masked = torch.zeros(2, 8, dtype=torch.bool)
    masked[:, ::2] = True
    return (lambda: model(video, bool_masked_pos=masked).loss), model


def _backbone(**config):
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "layer_type": "basic"}
    return {**sizes, "out_features": ["stage2", "stage3", "stage4"], **config}


def _detection(model, size=64):
    images = torch.randn(1, 3, size, size)
    labels = [{"class_labels": torch.tensor([1, 2]), "boxes": torch.tensor(_BOXES)}]
    return (lambda: model.train()(pixel_values=images, labels=labels).loss), model


_DECODER = {"decoder_layers": 2, "decoder_attention_heads": 2, "encoder_attention_heads": 2, "num_queries": 10}
_REAL_TIME = {
    **_DECODER,
    "encoder_in_channels": [8, 16, 16],
    "encoder_hidden_dim": 16,
    "d_model": 16,
    "decoder_in_channels": [16, 16, 16],
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "num_denoising": 4,
    "num_labels": 5,
}


def rt_detr():
    backbone = transformers.RTDetrResNetConfig(**_backbone())
    config = transformers.RTDetrConfig(backbone_config=backbone, **_REAL_TIME)
    return _detection(transformers.RTDetrForObjectDetection(config))


def rt_detr_v2():
    backbone = transformers.RTDetrResNetConfig(**_backbone())
    config = transformers.RTDetrV2Config(backbone_config=backbone, **_REAL_TIME)
    return _detection(transformers.RTDetrV2ForObjectDetection(config))


def deformable_detr_in_two_stages():
    config = transformers.DeformableDetrConfig(
        **_DECODER,
        backbone_config=transformers.ResNetConfig(**_backbone()),
        d_model=32,
        encoder_layers=1,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_labels=5,
        two_stage=True,
        with_box_refine=True,
        two_stage_num_proposals=10,
        auxiliary_loss=True,
    )
    return _detection(transformers.DeformableDetrForObjectDetection(config), 128)


def dab_detr():
    config = transformers.DabDetrConfig(
        **{**_DECODER, "encoder_layers": 1, "num_labels": 5},
        backbone_config=transformers.ResNetConfig(**_backbone(out_features=["stage4"])),
        hidden_size=32,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        auxiliary_loss=True,
    )
    return _detection(transformers.DabDetrForObjectDetection(config))


def mask2former():
    config = transformers.Mask2FormerConfig(
        backbone_config=transformers.ResNetConfig(**_backbone(out_features=["stage1", "stage2", "stage3", "stage4"])),
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_feedforward_dim=32,
        dim_feedforward=32,
        num_attention_heads=4,
        num_queries=6,
        num_labels=5,
        train_num_points=64,
    )
    model, images = transformers.Mask2FormerForUniversalSegmentation(config).train(), torch.randn(1, 3, 64, 64)
    masks, classes = [(torch.rand(2, 64, 64) > 0.5).float()], [torch.tensor([1, 2])]
    return (lambda: model(pixel_values=images, mask_labels=masks, class_labels=classes).loss), model


def hierarchical_reasoning():
    config = transformers.HrmTextConfig(**_SMALL, vocab_size=64, num_key_value_heads=4)
    return _language("HrmTextForCausalLM", config)
