"""The configuration of an untrained checkpoint: its sizes, and the text of its cosyvoice2.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cosytriton_export.campplus import CamPPlusSizes
from cosytriton_export.speech_tokenizer import SpeechTokenizerSizes

Size = Literal["tiny", "full"]


@dataclass(frozen=True)
class Sizes:
    """Sizes that differ between an official and a tiny checkpoint; all others are the official ones."""

    text_rows: int
    llm_width: int
    llm_layers: int
    llm_heads: int
    llm_key_heads: int
    llm_inner: int
    encoder_width: int
    encoder_heads: int
    encoder_inner: int
    encoder_blocks: int
    unet_width: int
    unet_heads: int
    unet_head_width: int
    unet_blocks: int
    unet_mid_stages: int
    hift_width: int
    f0_width: int
    campplus: CamPPlusSizes
    speech_tokenizer: SpeechTokenizerSizes


SIZES: dict[Size, Sizes] = {
    "tiny": Sizes(
        text_rows=320,
        llm_width=64,
        llm_layers=2,
        llm_heads=4,
        llm_key_heads=2,
        llm_inner=160,
        encoder_width=64,
        encoder_heads=4,
        encoder_inner=128,
        encoder_blocks=2,
        unet_width=32,
        unet_heads=4,
        unet_head_width=16,
        unet_blocks=2,
        unet_mid_stages=2,
        hift_width=32,
        f0_width=32,
        campplus=CamPPlusSizes(head_channels=8, initial=16, growth=4, bottleneck=8, layers=(3, 4, 3)),
        speech_tokenizer=SpeechTokenizerSizes(width=64, layers=2, inner=128),
    ),
    "full": Sizes(
        text_rows=151_936,
        llm_width=896,
        llm_layers=24,
        llm_heads=14,
        llm_key_heads=2,
        llm_inner=4864,
        encoder_width=512,
        encoder_heads=8,
        encoder_inner=2048,
        encoder_blocks=6,
        unet_width=256,
        unet_heads=8,
        unet_head_width=64,
        unet_blocks=4,
        unet_mid_stages=12,
        hift_width=512,
        f0_width=512,
        campplus=CamPPlusSizes(),
        speech_tokenizer=SpeechTokenizerSizes(),
    ),
}

YAML = """\
# Untrained: random weights in the shapes of CosyVoice 2. Its sound is noise.
sample_rate: 24000
llm_input_size: {llm_width}
llm_output_size: {llm_width}
spk_embed_dim: 192
qwen_pretrain_path: ''
token_frame_rate: 25
token_mel_ratio: 2
chunk_size: 25 # speech tokens
num_decoding_left_chunks: -1

llm: !new:cosyvoice.llm.llm.Qwen2LM
    llm_input_size: !ref <llm_input_size>
    llm_output_size: !ref <llm_output_size>
    speech_token_size: 6561
    length_normalized_loss: True
    lsm_weight: 0
    mix_ratio: [5, 15]
    llm: !new:cosyvoice.llm.llm.Qwen2Encoder
        pretrain_path: !ref <qwen_pretrain_path>
    sampling: !name:cosyvoice.utils.common.ras_sampling
        top_p: 0.8
        top_k: 25
        win_size: 10
        tau_r: 0.1

flow: !new:cosyvoice.flow.flow.CausalMaskedDiffWithXvec
    input_size: {encoder_width}
    output_size: 80
    spk_embed_dim: !ref <spk_embed_dim>
    output_type: 'mel'
    vocab_size: 6561
    input_frame_rate: !ref <token_frame_rate>
    only_mask_loss: True
    token_mel_ratio: !ref <token_mel_ratio>
    pre_lookahead_len: 3
    encoder: !new:cosyvoice.transformer.upsample_encoder.UpsampleConformerEncoder
        output_size: {encoder_width}
        attention_heads: {encoder_heads}
        linear_units: {encoder_inner}
        num_blocks: {encoder_blocks}
        dropout_rate: 0.1
        positional_dropout_rate: 0.1
        attention_dropout_rate: 0.1
        normalize_before: True
        input_layer: 'linear'
        pos_enc_layer_type: 'rel_pos_espnet'
        selfattention_layer_type: 'rel_selfattn'
        input_size: {encoder_width}
        use_cnn_module: False
        macaron_style: False
        static_chunk_size: !ref <chunk_size>
    decoder: !new:cosyvoice.flow.flow_matching.CausalConditionalCFM
        in_channels: 240
        n_spks: 1
        spk_emb_dim: 80
        cfm_params: !new:omegaconf.DictConfig
            content:
                sigma_min: 1e-06
                solver: 'euler'
                t_scheduler: 'cosine'
                training_cfg_rate: 0.2
                inference_cfg_rate: 0.7
                reg_loss_type: 'l1'
        estimator: !new:cosyvoice.flow.decoder.CausalConditionalDecoder
            in_channels: 320
            out_channels: 80
            channels: [{unet_width}]
            dropout: 0.0
            attention_head_dim: {unet_head_width}
            n_blocks: {unet_blocks}
            num_mid_blocks: {unet_mid_stages}
            num_heads: {unet_heads}
            act_fn: 'gelu'
            static_chunk_size: !ref <chunk_size> * <token_mel_ratio>
            num_decoding_left_chunks: !ref <num_decoding_left_chunks>

hift: !new:cosyvoice.hifigan.generator.HiFTGenerator
    in_channels: 80
    base_channels: {hift_width}
    nb_harmonics: 8
    sampling_rate: !ref <sample_rate>
    nsf_alpha: 0.1
    nsf_sigma: 0.003
    nsf_voiced_threshold: 10
    upsample_rates: [8, 5, 3]
    upsample_kernel_sizes: [16, 11, 7]
    istft_params:
        n_fft: 16
        hop_len: 4
    resblock_kernel_sizes: [3, 7, 11]
    resblock_dilation_sizes: [[1, 3, 5], [1, 3, 5], [1, 3, 5]]
    source_resblock_kernel_sizes: [7, 7, 11]
    source_resblock_dilation_sizes: [[1, 3, 5], [1, 3, 5], [1, 3, 5]]
    lrelu_slope: 0.1
    audio_limit: 0.99
    f0_predictor: !new:cosyvoice.hifigan.f0_predictor.ConvRNNF0Predictor
        num_class: 1
        in_channels: 80
        cond_channels: {f0_width}

get_tokenizer: !name:cosyvoice.tokenizer.tokenizer.get_qwen_tokenizer
    token_path: !ref <qwen_pretrain_path>
    skip_special_tokens: True
allowed_special: 'all'
feat_extractor: !name:matcha.utils.audio.mel_spectrogram
    n_fft: 1920
    num_mels: 80
    sampling_rate: !ref <sample_rate>
    hop_size: 480
    win_size: 1920
    fmin: 0
    fmax: 8000
    center: False
"""
