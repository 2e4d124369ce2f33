//! What the cost of a model depends on: its layers in numbers, counted from a JSON shape or from a known family.

use serde::Deserialize;

use super::refuse;
use crate::error::Result;
use crate::family::{self, Mixer, Model};

/// What the cost of a model depends on.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub struct Shape {
    pub hidden_size: u64,
    /// Width of what flows between layers, and of the maps' input: `hidden_size`, or several streams of it.
    pub stream_width: u64,
    pub vocab_size: u64,
    /// Weights that each row meets outside layers and output layer.
    pub extra_weights: f64,
    pub layers: Vec<Layer>,
}

/// One decoder layer in the numbers that its cost is made of. "Weights" are those that one row is multiplied with.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    /// Of the whole layer; of a mixture the active experts and the router.
    pub weights: f64,
    /// Those that lie in memory: of a mixture all of them.
    pub resident_weights: f64,
    /// Those that turn a block input into cache rows: what a filled row meets.
    pub cache_weights: f64,
    /// Width that a fused map puts out instead.
    pub cache_width: f64,
    /// Whether a fused map can replace the projections: not where a recurrent state is scanned.
    pub fusible: bool,
    /// Operations of one row in a recurrent state.
    pub scan_flops: f64,
    /// Operations of one visible (query, key) pair, all heads.
    pub pair_flops: f64,
    /// The most keys that a row sees, itself included; None for all.
    pub visible: Option<u64>,
    /// Operations of choosing those keys, for one (query, key) pair.
    pub index_flops: f64,
    /// Bulk rows before an exact one that must be filled; None for all.
    pub window: Option<u64>,
    /// Elements that one row leaves in the cache.
    pub row_elements: f64,
    /// Elements of state, whatever the length.
    pub state_elements: f64,
}

/// A layer as a JSON shape describes it: full or sliding attention, and an MLP.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LayerDocument {
    pub(super) num_attention_heads: u64,
    pub(super) num_key_value_heads: u64,
    pub(super) head_dim: u64,
    /// Two times the weights one row passes through (of a mixture: the active experts, and the router).
    pub(super) mlp_flops_per_row: f64,
    /// Keys a row sees, itself included; None for full attention.
    pub(super) window: Option<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ShapeDocument {
    hidden_size: u64,
    vocab_size: u64,
    layers: Vec<LayerDocument>,
}

impl Shape {
    /// Returns the shape a JSON document describes.
    pub fn from_json(json: &str) -> Result<Self> {
        let shape: ShapeDocument = serde_json::from_str(json).map_err(|error| refuse(format!("shape: {error}")))?;
        if shape.hidden_size == 0 || shape.layers.is_empty() {
            return Err(refuse("shape: a model has a hidden_size of at least 1 and at least one layer".to_owned()));
        }
        if let Some(layer) = shape.layers.iter().find(|layer| !(0.0..).contains(&layer.mlp_flops_per_row)) {
            return Err(refuse(format!("shape: mlp_flops_per_row is {}; expected 0 or more", layer.mlp_flops_per_row)));
        }
        Ok(Self {
            hidden_size: shape.hidden_size,
            stream_width: shape.hidden_size,
            vocab_size: shape.vocab_size,
            extra_weights: 0.0,
            layers: shape.layers.iter().map(|layer| layer.cost(shape.hidden_size as f64)).collect(),
        })
    }

    /// Returns the shape of a model of a known family.
    pub fn of_model(model: &Model) -> Self {
        Self {
            hidden_size: model.hidden_size,
            stream_width: model.stream_width(),
            vocab_size: model.vocab_size,
            extra_weights: model.extra_weights as f64,
            layers: model.layers.iter().map(|layer| Layer::of_family(layer, model.hidden_size)).collect(),
        }
    }
}

impl LayerDocument {
    pub(super) fn cost(&self, d: f64) -> Layer {
        let kv_width = 2.0 * self.num_key_value_heads as f64 * self.head_dim as f64;
        let q_width = self.num_attention_heads as f64 * self.head_dim as f64;
        let weights = d * (q_width + kv_width) + q_width * d + self.mlp_flops_per_row / 2.0;
        Layer {
            weights,
            resident_weights: weights,
            cache_weights: d * kv_width,
            cache_width: kv_width,
            fusible: true,
            scan_flops: 0.0,
            // Scores and the weighted sum: 2 operations each per key and query channel.
            pair_flops: 4.0 * q_width,
            visible: self.window,
            index_flops: 0.0,
            window: self.window,
            row_elements: kv_width,
            state_elements: 0.0,
        }
    }
}

impl Layer {
    fn of_family(layer: &family::Layer, hidden_size: u64) -> Self {
        let mixer = &layer.mixer;
        let indexer = mixer.attention().and_then(|attention| attention.indexer.as_ref());
        let elements = |rows| layer.cache(hidden_size, rows).iter().map(family::CacheTensor::elements).sum::<f64>();
        Self {
            weights: layer.weights(hidden_size),
            // Gains of norms take no time, and of a table of n-grams a row reads its own line.
            resident_weights: layer.parameters(hidden_size) - layer.extra_parameters as f64,
            cache_weights: mixer.cache_weights(hidden_size),
            cache_width: mixer.cache_width(hidden_size),
            fusible: matches!(mixer, Mixer::Attention(_) | Mixer::Mla(_)),
            scan_flops: mixer.scan_flops(),
            pair_flops: mixer.pair_flops(),
            // An indexer leaves its budget and the block that is still incomplete.
            visible: indexer.map_or(mixer.window(), |indexer| Some(indexer.budget + indexer.compress_ratio)),
            index_flops: indexer.map_or(0.0, |indexer| {
                2.0 * (indexer.num_heads * indexer.head_dim) as f64 / indexer.compress_ratio.max(1) as f64
            }),
            window: mixer.window(),
            row_elements: elements(1) - elements(0),
            state_elements: elements(0),
        }
    }

    /// Whether bulk rows must leave anything in this layer's cache.
    pub(super) fn writes(&self) -> bool {
        self.row_elements + self.state_elements > 0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::fixtures::shape;

    #[test]
    fn a_family_and_a_shape_of_the_same_model_cost_the_same() {
        let description = r#"{"model_type":"llama","hidden_size":576,"vocab_size":49152,"layers":[{"count":30,
            "mixer":{"kind":"attention","num_attention_heads":9,"num_key_value_heads":3,"head_dim":64},
            "mlp":{"kind":"dense","intermediate_size":1536}}]}"#;
        let family = Shape::of_model(&Model::from_description(description).unwrap());
        assert_eq!(family, shape(&[None; 30]));
    }
}
