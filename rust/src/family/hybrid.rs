//! Readers of the hybrid families: attention in some layers, or in all beside a state.

use super::attention::{expert_counts, sparse_experts, sparse_mlps};
use super::config::Config;
use super::families::{Base, experts};
use super::{Attention, Dense, GatedDelta, MAX_DIMENSION, Mamba2, Mixer, Mlp, Model, Moe, Parallel, ShortConv};
use crate::error::Result;

const FULL: &str = "full_attention";
const LINEAR: &str = "linear_attention";

/// Returns which layers are attention: `layer_types` where the config has it, else each `full_attention_interval`-th.
pub(super) fn is_attention(config: &Config<'_>, base: &Base, names: &[&'static str]) -> Result<Vec<bool>> {
    if let Some(types) = config.layer_types(base.layers, names)? {
        return Ok(types.into_iter().map(|kind| kind != LINEAR).collect());
    }
    let interval = config.count("full_attention_interval", 4)?;
    Ok((1..=base.layers as u64).map(|layer| layer.is_multiple_of(interval)).collect())
}

/// Returns the gated delta net of the Qwen hybrids.
pub(super) fn gated_delta(config: &Config<'_>) -> Result<GatedDelta> {
    let num_k_heads = config.count("linear_num_key_heads", 16)?;
    let num_v_heads = config.count("linear_num_value_heads", 32)?;
    if !num_v_heads.is_multiple_of(num_k_heads) {
        let expected = format!("a multiple of linear_num_key_heads, which is {num_k_heads}");
        return Err(config.conflict("linear_num_value_heads", num_v_heads.to_string(), expected));
    }
    let v_head_dim = config.count("linear_value_head_dim", 128)?;
    Ok(GatedDelta {
        num_k_heads,
        num_v_heads,
        k_head_dim: config.count("linear_key_head_dim", 128)?,
        v_head_dim,
        conv_kernel: config.count("linear_conv_kernel_dim", 4)?,
        extra_parameters: 2 * num_v_heads + v_head_dim, // dt_bias and A_log; the output's norm
    })
}

/// Returns the attention of the Qwen hybrids: an output gate, norms per head.
pub(super) fn gated_attention(config: &Config<'_>, base: &Base) -> Result<Attention> {
    let bias = config.flag("attention_bias", false)?;
    Ok(Attention { output_gate: true, ..base.attention(None) }
        .with_qkv_bias(bias)
        .with_output_bias(bias, base.hidden_size)
        .with_head_norms(true))
}

fn qwen_hybrid(config: &Config<'_>, base: &Base, mlps: Vec<Mlp>) -> Result<Model> {
    let (attention, delta) = (gated_attention(config, base)?, gated_delta(config)?);
    let kinds = is_attention(config, base, &[FULL, LINEAR])?;
    let layer = |(is_attention, mlp)| {
        let mixer = if is_attention { Mixer::Attention(attention.clone()) } else { Mixer::GatedDelta(delta.clone()) };
        base.layer(mixer, mlp, 2)
    };
    Ok(base.model(kinds.into_iter().zip(mlps).map(layer).collect()))
}

/// Returns experts beside one gated shared expert.
pub(super) fn with_shared_expert(config: &Config<'_>, moe: Moe) -> Result<Moe> {
    let shared_intermediate_size = config.count("shared_expert_intermediate_size", 512)?;
    Ok(Moe { shared_intermediate_size, shared_gate: true, ..moe })
}

/// qwen3_next: gated delta nets, and attention in every fourth layer; experts as in qwen3_moe, with a shared one.
pub(super) fn qwen3_next(config: &Config<'_>, base: &Base) -> Result<Model> {
    let moe = sparse_experts(config, 512, 10, 512)?.map(|moe| with_shared_expert(config, moe)).transpose()?;
    qwen_hybrid(config, base, sparse_mlps(config, base, moe)?)
}

/// qwen3_5: the same mixers, dense.
pub(super) fn qwen3_5(config: &Config<'_>, base: &Base) -> Result<Model> {
    qwen_hybrid(config, base, vec![base.dense(false); base.layers])
}

/// qwen3_5_moe: the same mixers, experts in every layer.
pub(super) fn qwen3_5_moe(config: &Config<'_>, base: &Base) -> Result<Model> {
    qwen_hybrid(config, base, vec![Mlp::Moe(shared_experts(config, 256, 8)?); base.layers])
}

/// Returns the experts of qwen3_5_moe and qwen4_exp.
pub(super) fn shared_experts(config: &Config<'_>, all: u64, active: u64) -> Result<Moe> {
    let (all, active) = expert_counts(config, &["num_experts", "num_local_experts"], all, active)?;
    with_shared_expert(config, experts(all, active, config.count("moe_intermediate_size", 512)?))
}

/// falcon_h1: attention and Mamba 2 side by side in every layer.
pub(super) fn falcon_h1(config: &Config<'_>, base: &Base) -> Result<Model> {
    let d = base.hidden_size;
    let bias = config.flag("attention_bias", false)?;
    let attention = base.attention(None).with_qkv_bias(bias).with_output_bias(bias, d);
    let num_heads = config.count("mamba_n_heads", 128)?;
    let inner = match config.optional("mamba_d_ssm", Some(1024))? {
        Some(inner) => inner,
        None => config.count("mamba_expand", 2)? * d,
    };
    let automatic = config.get("mamba_d_head").is_none_or(|value| value.as_str() == Some("auto"));
    let head_dim = if automatic { inner / num_heads } else { config.count("mamba_d_head", 1)? };
    if head_dim * num_heads != inner {
        let expected = format!("{inner} (mamba_d_ssm, or mamba_expand * hidden_size) in all");
        let found = format!("{num_heads} heads of {head_dim}");
        return Err(config.conflict("mamba_n_heads", found, expected));
    }
    let (num_groups, state_size) = (config.count("mamba_n_groups", 1)?, config.count("mamba_d_state", 256)?);
    let conv_channels = inner + 2 * num_groups * state_size;
    let optional =
        |flag: &str, default: bool, count: u64| config.flag(flag, default).map(|on| if on { count } else { 0 });
    let extra_parameters = 3 * num_heads // A_log, D and dt_bias
        + optional("mamba_conv_bias", true, conv_channels)?
        + optional("mamba_proj_bias", false, inner + conv_channels + num_heads)?
        + optional("mamba_rms_norm", false, inner)?
        + optional("projectors_bias", false, d)?;
    let conv_kernel = config.count("mamba_d_conv", 4)?;
    let mamba = Mamba2 { num_heads, head_dim, num_groups, state_size, conv_kernel, extra_parameters };
    let mixer = Mixer::Parallel(Parallel { attention, mamba });
    let layer = base.layer(mixer, base.dense(config.flag("mlp_bias", false)?), 2);
    Ok(base.model(vec![layer; base.layers]))
}

/// lfm2: gated short convolutions, and attention where `layer_types` or `full_attn_idxs` say so.
pub(super) fn lfm2(config: &Config<'_>, base: &Base) -> Result<Model> {
    let d = base.hidden_size;
    let attention = base.attention(None).with_head_norms(true);
    let bias = config.flag("conv_bias", false)?;
    let conv = ShortConv {
        conv_kernel: config.count("conv_L_cache", 3)?,
        extra_parameters: if bias { 5 * d } else { 0 }, // in 3d, convolution d, out d
    };
    let kinds: Vec<bool> = match config.layer_types(base.layers, &[FULL, "conv"])? {
        Some(types) => types.into_iter().map(|kind| kind == FULL).collect(),
        None => match config.indices("full_attn_idxs", MAX_DIMENSION)? {
            Some(indices) => (0..base.layers as u64).map(|layer| indices.contains(&layer)).collect(),
            None => vec![true; base.layers],
        },
    };
    let intermediate_size = lfm2_intermediate_size(config, base)?;
    let mlp = Mlp::Dense(Dense { intermediate_size, gated: true, fused_gate_up: false, extra_parameters: 0 });
    let layer = |is_attention: bool| {
        let mixer = if is_attention { Mixer::Attention(attention.clone()) } else { Mixer::ShortConv(conv.clone()) };
        base.layer(mixer, mlp.clone(), 2)
    };
    let mut model = base.model(kinds.into_iter().map(layer).collect());
    // The class renames this field; its new name has been read already.
    model.tied_embeddings = config.flag("tie_embedding", model.tied_embeddings)?;
    Ok(model)
}

/// Returns two thirds of the config's width, times a factor, rounded up to a multiple (Lfm2MLP).
fn lfm2_intermediate_size(config: &Config<'_>, base: &Base) -> Result<u64> {
    let width = config.count("block_ff_dim", base.intermediate_size)?;
    if !config.flag("block_auto_adjust_ff_dim", true)? {
        return Ok(width);
    }
    let width = 2 * width / 3;
    let Some(factor) = config.factor("block_ffn_dim_multiplier", 1.0)? else { return Ok(width) };
    let multiple = config.count("block_multiple_of", 256)?;
    // Cut off where it is refused anyway, so that nothing overflows.
    let width = (factor * width as f64).min(2.0 * MAX_DIMENSION as f64) as u64;
    Ok(width.div_ceil(multiple) * multiple)
}
