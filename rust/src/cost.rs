//! Floating-point operations of an exact and of a filled prefill: the one formula behind every "ratio FLOPs allow".
//!
//! A multiply and an add are two operations. Norms, rotary embeddings, softmax and other work linear in the
//! width are left out on both sides. Attention counts each visible (query, key) pair once: a causal row at
//! position p sees p + 1 keys, or `window` of them.

use serde::Deserialize;

use crate::error::{Error, Fault, Result};
use crate::rule::{Decision, Step, decide, first_needed_row};

/// The widths of a model that its cost depends on.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct Shape {
    pub hidden_size: u64,
    pub vocab_size: u64,
    pub layers: Vec<Layer>,
}

/// One decoder layer.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct Layer {
    pub num_attention_heads: u64,
    pub num_key_value_heads: u64,
    pub head_dim: u64,
    /// Two times the weights one row passes through (of a mixture: the active experts, and the router).
    pub mlp_flops_per_row: f64,
    /// Keys a row sees, itself included; None for full attention.
    pub window: Option<u64>,
}

/// What is filled, and how the maps are applied.
#[derive(Debug, Clone, Copy)]
pub struct Fill {
    /// The first layer that does not run on bulk rows.
    pub split: usize,
    /// Width of the maps' input, in units of `hidden_size`.
    pub features: u64,
    /// None: two steps (predict the block input, project it). Some(rank): one fused map with a row scale of that rank.
    pub fused_rank: Option<u64>,
}

/// Operations of one prefill step.
#[derive(Debug, Clone)]
pub struct PrefillCost {
    /// With every row exact.
    pub exact_flops: f64,
    /// As configured.
    pub filled_flops: f64,
    /// The part of `filled_flops` spent on predicting keys and values: maps and projections of bulk rows.
    pub fill_flops: f64,
    /// The decision that was priced.
    pub decision: Decision,
}

impl PrefillCost {
    /// Returns the speed-up that the operations allow: exact / filled.
    pub fn ratio(&self) -> f64 {
        self.exact_flops / self.filled_flops
    }
}

impl Shape {
    /// Returns the shape a JSON document describes.
    pub fn from_json(json: &str) -> Result<Self> {
        let shape: Self = serde_json::from_str(json).map_err(|error| refuse(format!("shape: {error}")))?;
        if shape.hidden_size == 0 || shape.layers.is_empty() {
            return Err(refuse("shape: a model has a hidden_size of at least 1 and at least one layer".to_owned()));
        }
        if let Some(layer) = shape.layers.iter().find(|layer| !(layer.mlp_flops_per_row >= 0.0)) {
            return Err(refuse(format!("shape: mlp_flops_per_row is {}; expected 0 or more", layer.mlp_flops_per_row)));
        }
        Ok(shape)
    }
}

/// Returns the operations of a step, exact and filled.
pub fn prefill_cost(shape: &Shape, step: &Step, fill: &Fill) -> Result<PrefillCost> {
    if fill.split >= shape.layers.len() {
        return Err(refuse(format!("split is {}; the model has layers 0 to {}", fill.split, shape.layers.len() - 1)));
    }
    if fill.features < 1 {
        return Err(refuse("features is 0; the stream alone counts 1".to_owned()));
    }
    let decision = decide(step)?;
    let (begin, start, end, step_end) = (step.cached_tokens, decision.fill_start, decision.fill_end, decision.step_end);
    let d = shape.hidden_size as f64;
    let logits = step.logits_to_keep.min(step.step_tokens) as f64;
    let lm_head = 2.0 * d * shape.vocab_size as f64 * logits;

    let (mut exact_flops, mut filled_flops, mut fill_flops) = (lm_head, lm_head, 0.0);
    for (index, layer) in shape.layers.iter().enumerate() {
        let exact = layer.exact_flops(d, begin, step_end);
        exact_flops += exact;
        if index < fill.split || decision.rows_filled() == 0 {
            filled_flops += exact;
            continue;
        }
        filled_flops += layer.exact_flops(d, begin, start) + layer.exact_flops(d, end, step_end);
        let rows = (end - first_needed_row(start, end, layer.window)) as f64;
        // Layer S itself needs no map: its block input is the stream.
        fill_flops += rows * if index == fill.split { layer.projection_flops(d) } else { layer.map_flops(d, fill) };
    }
    filled_flops += fill_flops;
    Ok(PrefillCost { exact_flops, filled_flops, fill_flops, decision })
}

impl Layer {
    /// Width of all keys (or values) of a row together.
    fn kv_width(&self) -> f64 {
        self.num_key_value_heads as f64 * self.head_dim as f64
    }

    /// Width of all queries of a row together.
    fn q_width(&self) -> f64 {
        self.num_attention_heads as f64 * self.head_dim as f64
    }

    /// The whole layer on rows `[from, to)`.
    fn exact_flops(&self, d: f64, from: u64, to: u64) -> f64 {
        let per_row = 2.0 * d * (self.q_width() + 2.0 * self.kv_width()) // q, k and v
            + 2.0 * self.q_width() * d // o
            + self.mlp_flops_per_row;
        // Scores and the weighted sum: 2 operations each per key and query channel.
        (to - from) as f64 * per_row + 4.0 * self.q_width() * visible_keys(from, to, self.window)
    }

    /// Keys and values of one row, from its block input.
    fn projection_flops(&self, d: f64) -> f64 {
        2.0 * d * 2.0 * self.kv_width()
    }

    /// Keys and values of one row, from the stream.
    fn map_flops(&self, d: f64, fill: &Fill) -> f64 {
        let inputs = fill.features as f64 * d;
        match fill.fused_rank {
            None => 2.0 * inputs * d + self.projection_flops(d),
            Some(rank) => 2.0 * inputs * 2.0 * self.kv_width() + 2.0 * inputs * rank as f64,
        }
    }
}

/// Returns the number of (query, key) pairs of the rows `[from, to)`: the sum of min(p + 1, window).
fn visible_keys(from: u64, to: u64, window: Option<u64>) -> f64 {
    // Rows before the window is full see p + 1 keys each, the others `window`.
    let full = window.unwrap_or(u64::MAX).clamp(from, to);
    let triangle = |rows: u64| rows as f64 * (rows as f64 + 1.0) / 2.0;
    triangle(full) - triangle(from) + (to - full) as f64 * window.unwrap_or(0) as f64
}

fn refuse(what: String) -> Error {
    Fault::Schedule { what }.into()
}
