//! Readers of the families whose every layer is attention: each mirrors its configuration and modeling file.

use super::config::Config;
use super::families::{Base, experts};
use super::{Attention, Dense, Layer, Mixer, Mla, Mlp, Model, Moe};
use crate::error::Result;

const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

/// Returns each layer's window: `layer_types` where the config has it, else what `slides` derives.
pub(super) fn windows(
    config: &Config<'_>,
    base: &Base,
    window: Option<u64>,
    slides: impl Fn(usize) -> bool,
) -> Result<Vec<Option<u64>>> {
    let types = config.layer_types(base.layers, &[FULL, SLIDING])?;
    let window_of = |layer: usize| {
        if !types.as_ref().map_or_else(|| slides(layer), |types| types[layer] == SLIDING) {
            return Ok(None);
        }
        let expected = || format!("a number of rows, since layer {layer} is {SLIDING}");
        window.map(Some).ok_or_else(|| config.unexpected("sliding_window", expected()))
    };
    (0..base.layers).map(window_of).collect()
}

/// Returns a model of equal MLPs, with `norms` norms a layer.
fn uniform(base: &Base, attentions: impl IntoIterator<Item = Attention>, mlp: &Mlp, norms: u64) -> Model {
    let layer = |attention| base.layer(Mixer::Attention(attention), mlp.clone(), norms);
    base.model(attentions.into_iter().map(layer).collect())
}

/// Returns the same attention for every layer.
fn same(base: &Base, attention: Attention) -> impl Iterator<Item = Attention> {
    std::iter::repeat_n(attention, base.layers)
}

/// llama, granite.
pub(super) fn llama(config: &Config<'_>, base: &Base) -> Result<Model> {
    let heads = base.num_attention_heads;
    if !config.is_set("head_dim") && !base.hidden_size.is_multiple_of(heads) {
        let expected = format!("a multiple of num_attention_heads, which is {heads}, as head_dim is not given");
        return Err(config.conflict("hidden_size", base.hidden_size.to_string(), expected));
    }
    let bias = config.flag("attention_bias", false)?;
    let attention = base.attention(None).with_qkv_bias(bias).with_output_bias(bias, base.hidden_size);
    Ok(uniform(base, same(base, attention), &base.dense(config.flag("mlp_bias", false)?), 2))
}

/// mistral: every layer slides when there is a window (its class has no `layer_types`).
pub(super) fn mistral(config: &Config<'_>, base: &Base) -> Result<Model> {
    let window = config.rows("sliding_window", Some(4096))?;
    Ok(uniform(base, same(base, base.attention(window)), &base.dense(false), 2))
}

/// ministral3: mistral, with no window unless the config has one.
pub(super) fn ministral3(config: &Config<'_>, base: &Base) -> Result<Model> {
    let window = config.rows("sliding_window", None)?;
    Ok(uniform(base, same(base, base.attention(window)), &base.dense(false), 2))
}

/// mixtral: `intermediate_size` is an expert's.
pub(super) fn mixtral(config: &Config<'_>, base: &Base) -> Result<Model> {
    let window = config.rows("sliding_window", None)?;
    let (all, active) = expert_counts(config, &["num_local_experts", "num_experts"], 8, 2)?;
    let mlp = Mlp::Moe(experts(all, active, base.intermediate_size));
    Ok(uniform(base, same(base, base.attention(window)), &mlp, 2))
}

/// phi3: one matrix for q, k and v, one for gate and up.
pub(super) fn phi3(config: &Config<'_>, base: &Base) -> Result<Model> {
    let window = config.rows("sliding_window", None)?;
    let attention = Attention { fused_qkv: true, ..base.attention(window) };
    let intermediate_size = base.intermediate_size;
    let mlp = Mlp::Dense(Dense { intermediate_size, gated: true, fused_gate_up: true, extra_parameters: 0 });
    Ok(uniform(base, same(base, attention), &mlp, 2))
}

/// Returns qwen2's and qwen3's windows: with `use_sliding_window`, layers from `max_window_layers` on slide.
fn qwen_windows(config: &Config<'_>, base: &Base) -> Result<Vec<Option<u64>>> {
    let window =
        if config.flag("use_sliding_window", false)? { config.rows("sliding_window", Some(4096))? } else { None };
    let first = config.size("max_window_layers", 28)?;
    windows(config, base, window, |layer| window.is_some() && layer as u64 >= first)
}

/// qwen2: biases on q, k and v, always.
pub(super) fn qwen2(config: &Config<'_>, base: &Base) -> Result<Model> {
    let windows = qwen_windows(config, base)?;
    let attentions = windows.into_iter().map(|window| base.attention(window).with_qkv_bias(true));
    Ok(uniform(base, attentions, &base.dense(false), 2))
}

/// qwen3: per-head norms of queries and keys.
pub(super) fn qwen3(config: &Config<'_>, base: &Base) -> Result<Model> {
    let bias = config.flag("attention_bias", false)?;
    let attentions = qwen_windows(config, base)?.into_iter().map(|window| {
        base.attention(window).with_qkv_bias(bias).with_output_bias(bias, base.hidden_size).with_head_norms(true)
    });
    Ok(uniform(base, attentions, &base.dense(false), 2))
}

/// qwen3_moe: every layer slides with `use_sliding_window`; experts in every `decoder_sparse_step`-th layer.
pub(super) fn qwen3_moe(config: &Config<'_>, base: &Base) -> Result<Model> {
    let window =
        if config.flag("use_sliding_window", false)? { config.rows("sliding_window", Some(4096))? } else { None };
    let bias = config.flag("attention_bias", false)?;
    let attention =
        base.attention(window).with_qkv_bias(bias).with_output_bias(bias, base.hidden_size).with_head_norms(true);
    let moe = sparse_experts(config, 128, 8, 768)?;
    let mlps = sparse_mlps(config, base, moe)?;
    let layers = mlps.into_iter().map(|mlp| base.layer(Mixer::Attention(attention.clone()), mlp, 2)).collect();
    Ok(base.model(layers))
}

/// Returns qwen3_moe's and qwen3_next's experts; None where the config has 0 of them.
pub(super) fn sparse_experts(config: &Config<'_>, all: u64, active: u64, width: u64) -> Result<Option<Moe>> {
    let names = &["num_experts", "num_local_experts"];
    if config.size(config.named(names), all)? == 0 {
        return Ok(None);
    }
    let (all, active) = expert_counts(config, names, all, active)?;
    Ok(Some(experts(all, active, config.count("moe_intermediate_size", width)?)))
}

/// Returns each layer's MLP: experts unless the layer is in `mlp_only_layers` or off the step.
pub(super) fn sparse_mlps(config: &Config<'_>, base: &Base, moe: Option<Moe>) -> Result<Vec<Mlp>> {
    let step = config.count("decoder_sparse_step", 1)?;
    // Indices past the last layer do nothing in transformers; they are allowed here too.
    let dense_only = config.indices("mlp_only_layers", super::MAX_DIMENSION)?.unwrap_or_default();
    let mlp = |layer: u64| match &moe {
        Some(moe) if !dense_only.contains(&layer) && (layer + 1).is_multiple_of(step) => Mlp::Moe(moe.clone()),
        _ => base.dense(false),
    };
    Ok((0..base.layers as u64).map(mlp).collect())
}

/// Returns the experts a router chooses from and the experts it chooses.
pub(super) fn expert_counts(config: &Config<'_>, names: &[&'static str], all: u64, active: u64) -> Result<(u64, u64)> {
    let all = config.count(config.named(names), all)?;
    let active = config.count("num_experts_per_tok", active)?;
    if active > all {
        let expected = format!("at most {}, which is {all}", config.named(names));
        return Err(config.conflict("num_experts_per_tok", active.to_string(), expected));
    }
    Ok((all, active))
}

/// Returns an error for a bidirectional model, which has no prefill.
pub(super) fn causal_only(config: &Config<'_>) -> Result<()> {
    match config.get("use_bidirectional_attention") {
        Some(serde_json::Value::Bool(true)) => {}
        Some(serde_json::Value::String(what)) if what == "all" => {}
        _ => return Ok(()),
    }
    Err(config.unexpected("use_bidirectional_attention", "a causal decoder: an encoder has no prefill to fill"))
}

/// gemma2: every other layer slides; four norms a layer.
pub(super) fn gemma2(config: &Config<'_>, base: &Base) -> Result<Model> {
    gemma(config, base, 2, false)
}

/// gemma3: every layer slides but each `sliding_window_pattern`-th; per-head norms; four norms a layer.
pub(super) fn gemma3(config: &Config<'_>, base: &Base) -> Result<Model> {
    let pattern = config.count("sliding_window_pattern", 6)?;
    gemma(config, base, pattern, true)
}

fn gemma(config: &Config<'_>, base: &Base, pattern: u64, head_norms: bool) -> Result<Model> {
    causal_only(config)?;
    let window = config.rows("sliding_window", Some(4096))?;
    let bias = config.flag("attention_bias", false)?;
    let windows = windows(config, base, window, |layer| !(layer as u64 + 1).is_multiple_of(pattern))?;
    let attentions = windows.into_iter().map(|window| {
        base.attention(window).with_qkv_bias(bias).with_output_bias(bias, base.hidden_size).with_head_norms(head_norms)
    });
    Ok(uniform(base, attentions, &base.dense(false), 4))
}

/// gpt_oss: every other layer slides; a sink for each head; biases also in experts and router.
pub(super) fn gpt_oss(config: &Config<'_>, base: &Base) -> Result<Model> {
    let window = config.rows("sliding_window", Some(128))?;
    let bias = config.flag("attention_bias", true)?;
    let windows = windows(config, base, window, |layer| !(layer + 1).is_multiple_of(2))?;
    let attentions = windows.into_iter().map(|window| {
        let attention = base.attention(window).with_qkv_bias(bias).with_output_bias(bias, base.hidden_size);
        Attention { extra_parameters: attention.extra_parameters + base.num_attention_heads, ..attention }
    });
    let (all, active) = expert_counts(config, &["num_local_experts", "num_experts"], 128, 4)?;
    let moe = experts(all, active, base.intermediate_size);
    let extra_parameters = all * (2 * base.intermediate_size + base.hidden_size + 1);
    Ok(uniform(base, attentions, &Mlp::Moe(Moe { extra_parameters, ..moe }), 2))
}

/// olmo3: three of four layers slide; norms over all queries and over all keys; no norm before the attention.
pub(super) fn olmo3(config: &Config<'_>, base: &Base) -> Result<Model> {
    let window = config.rows("sliding_window", Some(4096))?;
    let bias = config.flag("attention_bias", false)?;
    let windows = windows(config, base, window, |layer| !(layer + 1).is_multiple_of(4))?;
    let attentions = windows.into_iter().map(|window| {
        let attention = base.attention(window).with_qkv_bias(bias).with_output_bias(bias, base.hidden_size);
        let gains = (base.num_attention_heads + base.num_key_value_heads) * base.head_dim;
        Attention { k_norm: true, extra_parameters: attention.extra_parameters + gains, ..attention }
    });
    Ok(uniform(base, attentions, &base.dense(false), 2))
}

/// smollm3: layers without rotation slide, with `use_sliding_window`.
pub(super) fn smollm3(config: &Config<'_>, base: &Base) -> Result<Model> {
    let bias = config.flag("attention_bias", false)?;
    let use_window = config.flag("use_sliding_window", false)?;
    let window = if use_window { config.rows("sliding_window", None)? } else { None };
    let interval = config.count("no_rope_layer_interval", 4)?;
    // A list of 0 and 1, one for each layer: 1 where the layer rotates.
    let rotates = config.indices("no_rope_layers", 2)?;
    if rotates.as_ref().is_some_and(|rotates| rotates.len() != base.layers) {
        return Err(config.unexpected("no_rope_layers", format!("a 0 or 1 for each of {} layers", base.layers)));
    }
    let slides = |layer: usize| {
        let rotates = rotates.as_ref().map_or(!(layer as u64 + 1).is_multiple_of(interval), |list| list[layer] == 1);
        window.is_some() && !rotates
    };
    let windows = windows(config, base, window, slides)?;
    let attentions = windows
        .into_iter()
        .map(|window| base.attention(window).with_qkv_bias(bias).with_output_bias(bias, base.hidden_size));
    Ok(uniform(base, attentions, &base.dense(config.flag("mlp_bias", false)?), 2))
}

/// Returns the MLPs of deepseek_v3 and glm4_moe: dense first layers, then experts beside shared ones.
fn dense_first_mlps(config: &Config<'_>, base: &Base, dense: u64, defaults: [u64; 3]) -> Result<Vec<Mlp>> {
    let [all, active, width] = defaults;
    let (all, active) = expert_counts(config, &["n_routed_experts", "num_local_experts"], all, active)?;
    let width = config.count("moe_intermediate_size", width)?;
    let moe =
        Moe { shared_intermediate_size: config.size("n_shared_experts", 1)? * width, ..experts(all, active, width) };
    let first = config.size("first_k_dense_replace", dense)?;
    let mlp = |layer: u64| if layer < first { base.dense(false) } else { Mlp::Moe(moe.clone()) };
    Ok((0..base.layers as u64).map(mlp).collect())
}

/// glm4_moe: biases on q, k and v only; norms per head with `use_qk_norm`.
pub(super) fn glm4_moe(config: &Config<'_>, base: &Base) -> Result<Model> {
    let attention = base
        .attention(None)
        .with_qkv_bias(config.flag("attention_bias", false)?)
        .with_head_norms(config.flag("use_qk_norm", false)?);
    let mlps = dense_first_mlps(config, base, 1, [128, 8, 1408])?;
    let layer = |mlp| base.layer(Mixer::Attention(attention.clone()), mlp, 2);
    Ok(base.model(mlps.into_iter().map(layer).collect()))
}

/// deepseek_v3: latent attention. Its multi-token prediction layer is no part of the decoder.
pub(super) fn deepseek_v3(config: &Config<'_>, base: &Base) -> Result<Model> {
    let q_lora_rank = config.optional("q_lora_rank", Some(1536))?;
    let kv_lora_rank = config.count("kv_lora_rank", 512)?;
    let qk_rope_head_dim = config.count("qk_rope_head_dim", 64)?;
    let mut extra_parameters = q_lora_rank.unwrap_or(0) + kv_lora_rank; // the norms of both latents
    if config.flag("attention_bias", false)? {
        extra_parameters += q_lora_rank.unwrap_or(0) + kv_lora_rank + qk_rope_head_dim + base.hidden_size;
    }
    let mla = Mla {
        num_attention_heads: base.num_attention_heads,
        q_lora_rank,
        kv_lora_rank,
        qk_nope_head_dim: config.count("qk_nope_head_dim", 128)?,
        qk_rope_head_dim,
        v_head_dim: config.count("v_head_dim", 128)?,
        extra_parameters,
    };
    let mlps = dense_first_mlps(config, base, 3, [256, 8, 2048])?;
    let layer = |mlp| -> Layer { base.layer(Mixer::Mla(mla.clone()), mlp, 2) };
    Ok(base.model(mlps.into_iter().map(layer).collect()))
}
