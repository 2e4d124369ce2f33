//! The reader of gemma4: two widths of attention, layers that reuse another's cache, per-layer inputs.

use serde_json::Value;

use super::attention::{causal_only, windows};
use super::config::Config;
use super::families::{Base, experts};
use super::{Attention, Dense, Layer, Mixer, Mlp, Model, Moe};
use crate::error::Result;

/// gemma4.
pub(super) fn read(config: &Config<'_>, base: &Base) -> Result<Model> {
    causal_only(config)?;
    let d = base.hidden_size;
    let window = config.rows("sliding_window", Some(512))?;
    // Every sixth layer is full; the last one always (Gemma4TextConfig.__post_init__).
    let mut windows = windows(config, base, window, |layer| !(layer + 1).is_multiple_of(6))?;
    windows[base.layers - 1] = None;
    let sources = shared_sources(config, &windows)?;

    let inputs = config.size("hidden_size_per_layer_input", 256)?;
    let double = config.flag("use_double_wide_mlp", false)?;
    let moe = if config.flag("enable_moe_block", false)? { Some(routed(config, d)?) } else { None };
    let mut layers = Vec::with_capacity(base.layers);
    for (index, (&window, &source)) in windows.iter().zip(&sources).enumerate() {
        let mixer = Mixer::Attention(attention(config, base, index, window, source)?);
        let width = base.intermediate_size * if double && source.is_some() { 2 } else { 1 };
        let (mlp, norms) = match &moe {
            // The dense MLP runs beside the experts, each with norms of its own.
            Some(moe) => (Mlp::Moe(Moe { shared_intermediate_size: width, ..moe.clone() }), 7),
            None => {
                let dense = Dense { intermediate_size: width, gated: true, fused_gate_up: false, extra_parameters: 0 };
                (Mlp::Dense(dense), 4)
            }
        };
        let norms = if inputs > 0 { norms + 1 } else { norms };
        layers.push(Layer { extra_weights: 2 * d * inputs, ..base.layer(mixer, mlp, norms) });
    }
    let mut model = base.model(layers);
    if inputs > 0 {
        // One table and one projection hold all layers' inputs.
        let width = base.layers as u64 * inputs;
        model.extra_weights = d * width;
        model.extra_parameters += config.count("vocab_size_per_layer_input", 262_144)? * width + inputs;
    }
    Ok(model)
}

/// Returns the experts with their router, whose scales are no weights.
fn routed(config: &Config<'_>, d: u64) -> Result<Moe> {
    for name in ["num_experts", "top_k_experts", "moe_intermediate_size"] {
        if !config.is_set(name) {
            return Err(config.unexpected(name, "a whole number, since enable_moe_block is true"));
        }
    }
    let all = config.count("num_experts", 1)?;
    let active = config.count("top_k_experts", 1)?;
    if active > all {
        return Err(config.unexpected("top_k_experts", format!("at most num_experts, which is {all}")));
    }
    let moe = experts(all, active, config.count("moe_intermediate_size", 1)?);
    Ok(Moe { extra_parameters: d + all, ..moe })
}

fn attention(
    config: &Config<'_>,
    base: &Base,
    index: usize,
    window: Option<u64>,
    shared_from: Option<usize>,
) -> Result<Attention> {
    let values_are_keys = config.flag("attention_k_eq_v", false)? && window.is_none();
    let (num_key_value_heads, head_dim) = heads(config, base, index, window.is_none())?;
    if !base.num_attention_heads.is_multiple_of(num_key_value_heads) {
        let expected = format!("a divisor of num_attention_heads, which is {}", base.num_attention_heads);
        return Err(config.conflict("num_global_key_value_heads", num_key_value_heads.to_string(), expected));
    }
    let q_width = base.num_attention_heads * head_dim;
    let kv_width = num_key_value_heads * head_dim;
    // A layer without a cache of its own has no k_norm and no k and v biases either.
    let (key_gains, kv_bias) = match shared_from {
        Some(_) => (0, 0),
        None => (head_dim, if values_are_keys { kv_width } else { 2 * kv_width }),
    };
    let biases = if config.flag("attention_bias", false)? { q_width + kv_bias + base.hidden_size } else { 0 };
    Ok(Attention {
        num_key_value_heads,
        head_dim,
        shared_from,
        k_norm: true,
        values_are_keys,
        extra_parameters: head_dim + key_gains + biases,
        ..base.attention(window)
    })
}

/// Returns key and value heads and head width of a layer: `per_layer_config` where a config was saved with it, else
/// `global_head_dim` and `num_global_key_value_heads` for full layers.
fn heads(config: &Config<'_>, base: &Base, index: usize, full: bool) -> Result<(u64, u64)> {
    let (kv_heads, head_dim) = (base.num_key_value_heads, base.head_dim);
    match config.get("per_layer_config") {
        Some(Value::Object(all)) => match all.get(&index.to_string()) {
            Some(Value::Object(fields)) => {
                let own = Config::new(fields, "per_layer_config.");
                Ok((own.count("num_key_value_heads", kv_heads)?, own.count("head_dim", head_dim)?))
            }
            None => Ok((kv_heads, head_dim)),
            Some(_) => Err(config.unexpected("per_layer_config", "an object for each layer in it")),
        },
        Some(value) if !value.is_null() => Err(config.unexpected("per_layer_config", "an object")),
        _ if full => {
            let global = config.optional("num_global_key_value_heads", None)?;
            let global = if config.flag("attention_k_eq_v", false)? { global } else { None };
            Ok((global.unwrap_or(kv_heads), config.count("global_head_dim", 512)?))
        }
        _ => Ok((kv_heads, head_dim)),
    }
}

/// Returns for each of the last `num_kv_shared_layers` layers the last layer below them of its own type, whose cache
/// it reads (Gemma4TextConfig.kv_sharing_modes).
fn shared_sources(config: &Config<'_>, windows: &[Option<u64>]) -> Result<Vec<Option<usize>>> {
    let shared = config.size("num_kv_shared_layers", 0)?;
    let Some(first) = (windows.len() as u64).checked_sub(shared).filter(|&first| first > 0) else {
        let expected = format!("fewer than num_hidden_layers, which is {}", windows.len());
        return Err(config.unexpected("num_kv_shared_layers", expected));
    };
    let first = first as usize;
    let source = |index: usize| {
        if index < first {
            return Ok(None);
        }
        let own = (0..first).rev().find(|&below| windows[below] == windows[index]);
        let expected = || format!("a number that leaves a layer of layer {index}'s type with a cache of its own");
        own.map(Some).ok_or_else(|| config.unexpected("num_kv_shared_layers", expected()))
    };
    (0..windows.len()).map(source).collect()
}
