//! The model, step, setting and rates that tests price.

use super::shape::LayerDocument;
use super::{Fill, Rates, Setting, Shape};
use crate::rule::Step;

pub(crate) fn shape(windows: &[Option<u64>]) -> Shape {
    let layer = |window: &Option<u64>| LayerDocument {
        num_attention_heads: 9,
        num_key_value_heads: 3,
        head_dim: 64,
        mlp_flops_per_row: 2.0 * 3.0 * 576.0 * 1536.0,
        window: *window,
    };
    Shape {
        hidden_size: 576,
        stream_width: 576,
        vocab_size: 49152,
        extra_weights: 0.0,
        layers: windows.iter().map(|window| layer(window).cost(576.0)).collect(),
    }
}

pub(crate) fn step(prompt: u64) -> Step {
    Step {
        cached_tokens: 0,
        step_tokens: prompt,
        n_ahead: 0,
        tail: 512,
        head: 4,
        min_bulk: 256,
        tile: 1,
        logits_to_keep: 1,
    }
}

pub(crate) fn setting(split: usize) -> Setting {
    Setting { fill: Fill { split, features: 1, fused_rank: None }, ..Setting::default() }
}

pub(crate) fn rates() -> Rates {
    Rates {
        matmul_flops_per_s: 1e12,
        attention_flops_per_s: 5e11,
        masked_attention_flops_per_s: Some(4e11),
        memory_bytes_per_s: 1e11,
        weight_bytes_per_s: Some(8e10),
        layer_call_s: 1e-5,
        source: "a test".to_owned(),
    }
}
