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
        if let Some(layer) = shape.layers.iter().find(|layer| !(0.0..).contains(&layer.mlp_flops_per_row)) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn visible_keys_is_the_sum_it_stands_for() {
        for from in 0..12 {
            for to in from..14 {
                for window in [None, Some(0), Some(1), Some(3), Some(7), Some(100)] {
                    let sum: u64 = (from..to).map(|row| (row + 1).min(window.unwrap_or(u64::MAX))).sum();
                    assert_eq!(visible_keys(from, to, window), sum as f64, "{from}..{to}, window {window:?}");
                }
            }
        }
    }

    fn shape(windows: &[Option<u64>]) -> Shape {
        let layer = |window: &Option<u64>| Layer {
            num_attention_heads: 9,
            num_key_value_heads: 3,
            head_dim: 64,
            mlp_flops_per_row: 2.0 * 3.0 * 576.0 * 1536.0,
            window: *window,
        };
        Shape { hidden_size: 576, vocab_size: 49152, layers: windows.iter().map(layer).collect() }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2048) })]

        #[test]
        fn the_parts_add_up(
            windows in prop::collection::vec(prop_oneof![Just(None), (1u64..5000).prop_map(Some)], 1..12),
            split in any::<prop::sample::Index>(), prompt in 1u64..20_000, tail in 1u64..3000, head in 0u64..9,
            features in 1u64..5, fused_rank in prop::option::of(1u64..300),
        ) {
            let shape = shape(&windows);
            let split = split.index(windows.len());
            let step = Step {
                cached_tokens: 0, step_tokens: prompt, n_ahead: 0, tail, head, min_bulk: 256, tile: 1, logits_to_keep: 1,
            };
            let fill = Fill { split, features, fused_rank };
            let cost = prefill_cost(&shape, &step, &fill).unwrap();
            prop_assert!(cost.exact_flops.is_finite() && cost.filled_flops > 0.0 && cost.fill_flops >= 0.0);
            prop_assert!(cost.fill_flops < cost.filled_flops);
            if cost.decision.rows_filled() == 0 {
                prop_assert_eq!(cost.exact_flops, cost.filled_flops);
                return Ok(());
            }
            // What a fill saves is the late layers' exact work on the bulk rows, less the fill itself.
            let d = 576.0;
            let saved: f64 = shape.layers[split..].iter()
                .map(|layer| layer.exact_flops(d, cost.decision.fill_start, cost.decision.fill_end)).sum();
            let expected = cost.exact_flops - saved + cost.fill_flops;
            prop_assert!((cost.filled_flops - expected).abs() <= 1e-9 * cost.exact_flops);
        }
    }
}
