//! Parameters, weights, operations and cache shapes of a model, all from its types.

use serde::Serialize;

use super::{
    Attention, CacheTensor, Dense, GatedDelta, Layer, Mamba2, Mixer, Mla, Mlp, Model, Moe, Parallel, ShortConv,
};

/// The counts of a model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Figures {
    /// All parameters, tied ones once.
    pub parameters: u64,
    /// Weights that one row meets below the output layer, active experts only.
    pub weights: u64,
    /// Weights of the output layer.
    pub output_weights: u64,
    /// The layers, in order.
    pub layers: Vec<LayerFigures>,
}

/// The counts of one layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerFigures {
    /// All parameters.
    pub parameters: u64,
    /// Weights that one row meets, active experts only.
    pub weights: u64,
    /// Those that it must meet to be cached.
    pub cache_weights: u64,
    /// What the layer's cache holds.
    pub cache: Vec<CacheTensor>,
}

impl CacheTensor {
    /// Returns the number of its elements.
    pub fn elements(&self) -> f64 {
        self.shape.iter().map(|&size| size as f64).product()
    }
}

impl Model {
    /// Returns the width of what flows between layers.
    pub fn stream_width(&self) -> u64 {
        self.hidden_size * self.residual_streams
    }

    /// Returns the number of parameters, tied ones once.
    pub fn parameters(&self) -> u64 {
        self.count_parameters() as u64
    }

    /// Returns the weights that one row meets below the output layer: all matrices of the layers, active experts only.
    pub fn weights(&self) -> f64 {
        let layers: f64 = self.layers.iter().map(|layer| layer.weights(self.hidden_size)).sum();
        self.extra_weights as f64 + layers
    }

    /// Returns the weights of the output layer, which meets only rows whose logits are wanted.
    pub fn output_weights(&self) -> f64 {
        self.hidden_size as f64 * self.vocab_size as f64
    }

    /// Returns all counts, and the cache's shapes after `rows` rows.
    pub fn figures(&self, rows: u64) -> Figures {
        let d = self.hidden_size;
        let layer = |layer: &Layer| LayerFigures {
            parameters: layer.parameters(d) as u64,
            weights: layer.weights(d) as u64,
            cache_weights: layer.mixer.cache_weights(d) as u64,
            cache: layer.cache(d, rows),
        };
        Figures {
            parameters: self.parameters(),
            weights: self.weights() as u64,
            output_weights: self.output_weights() as u64,
            layers: self.layers.iter().map(layer).collect(),
        }
    }

    pub(super) fn count_parameters(&self) -> f64 {
        let tables = if self.tied_embeddings { 1.0 } else { 2.0 };
        let layers: f64 = self.layers.iter().map(|layer| layer.parameters(self.hidden_size)).sum();
        tables * self.output_weights() + self.extra_weights as f64 + self.extra_parameters as f64 + layers
    }
}

impl Layer {
    /// Returns the layer's parameters, all experts included.
    pub fn parameters(&self, hidden_size: u64) -> f64 {
        self.extra_weights as f64
            + self.extra_parameters as f64
            + self.mixer.parameters(hidden_size)
            + self.mlp.parameters(hidden_size)
    }

    /// Returns the weights that one row meets in this layer, active experts only.
    pub fn weights(&self, hidden_size: u64) -> f64 {
        self.extra_weights as f64 + self.mixer.weights(hidden_size) + self.mlp.weights(hidden_size)
    }

    /// Returns the operations of one row, without attention's (query, key) pairs: weights and recurrent states.
    pub fn flops_per_row(&self, hidden_size: u64) -> f64 {
        2.0 * self.weights(hidden_size) + self.mixer.scan_flops()
    }

    /// Returns what the cache of one sequence holds for this layer after `rows` rows (transformers' `DynamicCache`).
    pub fn cache(&self, hidden_size: u64, rows: u64) -> Vec<CacheTensor> {
        let mut tensors = self.mixer.cache(hidden_size, rows);
        tensors.extend(self.extra_states.iter().map(|shape| CacheTensor { name: "extra", shape: shape.clone() }));
        tensors
    }

    /// Returns the bytes of that cache.
    pub fn cache_bytes(&self, hidden_size: u64, rows: u64, element_bytes: u64) -> f64 {
        let elements: f64 = self.cache(hidden_size, rows).iter().map(CacheTensor::elements).sum();
        elements * element_bytes as f64
    }
}

impl Mixer {
    /// Returns the attention inside, of MLA none.
    pub fn attention(&self) -> Option<&Attention> {
        match self {
            Self::Attention(attention) | Self::Parallel(Parallel { attention, .. }) => Some(attention),
            _ => None,
        }
    }

    /// Returns the keys a row sees, itself included; None for all of them, or where there are no keys.
    pub fn window(&self) -> Option<u64> {
        self.attention().and_then(|attention| attention.window)
    }

    /// Returns the layer whose cache this one reads, if it writes none of its own.
    pub fn shared_from(&self) -> Option<usize> {
        self.attention().and_then(|attention| attention.shared_from)
    }

    /// Returns whether a state is carried from row to row, so that every row must be scanned.
    pub fn is_recurrent(&self) -> bool {
        !matches!(self, Self::Attention(_) | Self::Mla(_))
    }

    /// Returns the parameters.
    pub fn parameters(&self, hidden_size: u64) -> f64 {
        let extra = match self {
            Self::Attention(mixer) => mixer.extra_parameters,
            Self::Mla(mixer) => mixer.extra_parameters,
            Self::GatedDelta(mixer) => mixer.extra_parameters,
            Self::Mamba2(mixer) => mixer.extra_parameters,
            Self::ShortConv(mixer) => mixer.extra_parameters,
            Self::Parallel(mixer) => mixer.attention.extra_parameters.saturating_add(mixer.mamba.extra_parameters),
        };
        self.weights(hidden_size) + extra as f64
    }

    /// Returns the weights that one row meets.
    pub fn weights(&self, hidden_size: u64) -> f64 {
        let d = hidden_size as f64;
        match self {
            Self::Attention(mixer) => mixer.weights(d),
            Self::Mla(mixer) => mixer.weights(d),
            Self::GatedDelta(mixer) => mixer.weights(d),
            Self::Mamba2(mixer) => mixer.weights(d),
            Self::ShortConv(mixer) => mixer.weights(d),
            Self::Parallel(mixer) => mixer.attention.weights(d) + mixer.mamba.weights(d),
        }
    }

    /// Returns the part of [`Mixer::weights`] that a row must meet to leave its mark in the cache: what a fill pays
    /// after predicting the mixer's input. Queries, output gates and output projections are not in it.
    pub fn cache_weights(&self, hidden_size: u64) -> f64 {
        let d = hidden_size as f64;
        match self {
            Self::Attention(mixer) => mixer.cache_weights(d),
            Self::Mla(mixer) => d * mixer.cache_width(),
            Self::GatedDelta(mixer) => mixer.cache_weights(d),
            Self::Mamba2(mixer) => mixer.cache_weights(d),
            Self::ShortConv(mixer) => mixer.cache_weights(d),
            Self::Parallel(mixer) => mixer.attention.cache_weights(d) + mixer.mamba.cache_weights(d),
        }
    }

    /// Returns the width of what a fused map must predict for one row: what the cache's projections put out.
    pub fn cache_width(&self, hidden_size: u64) -> f64 {
        // cache_weights is that width times the input's; depthwise convolutions come after it.
        match self {
            Self::Attention(mixer) => mixer.cache_width(),
            Self::Mla(mixer) => mixer.cache_width(),
            Self::GatedDelta(mixer) => mixer.cache_width(),
            Self::Mamba2(mixer) => mixer.cache_width(),
            Self::ShortConv(_) => 2.0 * hidden_size as f64,
            Self::Parallel(mixer) => mixer.attention.cache_width() + mixer.mamba.cache_width(),
        }
    }

    /// Returns the operations of one visible (query, key) pair, all heads: scores and the weighted sum.
    pub fn pair_flops(&self) -> f64 {
        match self {
            Self::Attention(attention) | Self::Parallel(Parallel { attention, .. }) => {
                let width = attention.head_dim as f64 + attention.v_head_dim() as f64;
                2.0 * attention.num_attention_heads as f64 * width
            }
            Self::Mla(mixer) => {
                let key = mixer.qk_nope_head_dim as f64 + mixer.qk_rope_head_dim as f64;
                2.0 * mixer.num_attention_heads as f64 * (key + mixer.v_head_dim as f64)
            }
            Self::GatedDelta(_) | Self::Mamba2(_) | Self::ShortConv(_) => 0.0,
        }
    }

    /// Returns the operations of one row in recurrent states, in the plain recurrence: decay, update and read.
    pub fn scan_flops(&self) -> f64 {
        match self {
            Self::GatedDelta(mixer) => mixer.scan_flops(),
            Self::Mamba2(mamba) | Self::Parallel(Parallel { mamba, .. }) => mamba.scan_flops(),
            Self::Attention(_) | Self::Mla(_) | Self::ShortConv(_) => 0.0,
        }
    }

    fn cache(&self, hidden_size: u64, rows: u64) -> Vec<CacheTensor> {
        match self {
            Self::Attention(mixer) => mixer.cache(rows),
            Self::Mla(mixer) => vec![
                CacheTensor { name: "keys", shape: vec![1, rows, mixer.kv_lora_rank] },
                CacheTensor { name: "values", shape: vec![1, rows, mixer.qk_rope_head_dim] },
            ],
            Self::GatedDelta(mixer) => vec![
                CacheTensor { name: "conv", shape: vec![mixer.conv_channels(), mixer.conv_kernel] },
                CacheTensor { name: "recurrent", shape: vec![mixer.num_v_heads, mixer.k_head_dim, mixer.v_head_dim] },
            ],
            Self::Mamba2(mixer) => mixer.cache(),
            Self::ShortConv(mixer) => vec![CacheTensor { name: "conv", shape: vec![hidden_size, mixer.conv_kernel] }],
            Self::Parallel(mixer) => [mixer.attention.cache(rows), mixer.mamba.cache()].concat(),
        }
    }
}

impl Attention {
    /// Returns the width of a value head.
    pub fn v_head_dim(&self) -> u64 {
        self.v_head_dim.unwrap_or(self.head_dim)
    }

    /// Returns the width of all queries of a row.
    pub fn q_width(&self) -> f64 {
        self.num_attention_heads as f64 * self.head_dim as f64
    }

    /// Returns the width of all keys of a row.
    pub fn k_width(&self) -> f64 {
        self.num_key_value_heads as f64 * self.head_dim as f64
    }

    /// Returns the width of all values of a row.
    pub fn v_width(&self) -> f64 {
        self.num_key_value_heads as f64 * self.v_head_dim() as f64
    }

    fn weights(&self, d: f64) -> f64 {
        let gates = if self.output_gate { 2.0 } else { 1.0 };
        let output = self.num_attention_heads as f64 * self.v_head_dim() as f64;
        let index_queries = self.indexer.as_ref().map_or(0.0, |i| i.num_heads as f64 * i.head_dim as f64);
        d * (gates * self.q_width() + output + index_queries) + self.cache_weights(d)
    }

    fn cache_weights(&self, d: f64) -> f64 {
        d * self.cache_width()
    }

    fn cache_width(&self) -> f64 {
        if self.shared_from.is_some() {
            return 0.0;
        }
        let values = if self.values_are_keys { 0.0 } else { self.v_width() };
        self.k_width() + values + self.indexer.as_ref().map_or(0.0, |i| i.head_dim as f64)
    }

    fn cache(&self, rows: u64) -> Vec<CacheTensor> {
        if self.shared_from.is_some() {
            return Vec::new();
        }
        // DynamicSlidingWindowLayer.update keeps the last window - 1 rows: the next row brings the last one it sees.
        let rows = self.window.map_or(rows, |window| rows.min(window.saturating_sub(1).max(1)));
        let heads = self.num_key_value_heads;
        let mut tensors = vec![
            CacheTensor { name: "keys", shape: vec![heads, rows, self.head_dim] },
            CacheTensor { name: "values", shape: vec![heads, rows, self.v_head_dim()] },
        ];
        tensors
            .extend(self.indexer.iter().map(|i| CacheTensor { name: "indexer_keys", shape: vec![rows, i.head_dim] }));
        tensors
    }
}

impl Mla {
    fn cache_width(&self) -> f64 {
        self.kv_lora_rank as f64 + self.qk_rope_head_dim as f64
    }

    /// Returns the weights that expand a cached latent to the keys and values of all heads.
    pub fn expand_weights(&self) -> f64 {
        let width = self.qk_nope_head_dim as f64 + self.v_head_dim as f64;
        self.kv_lora_rank as f64 * self.num_attention_heads as f64 * width
    }

    fn weights(&self, d: f64) -> f64 {
        let heads = self.num_attention_heads as f64;
        let queries = heads * (self.qk_nope_head_dim as f64 + self.qk_rope_head_dim as f64);
        let query_weights = self.q_lora_rank.map_or(d * queries, |rank| rank as f64 * (d + queries));
        let output = heads * self.v_head_dim as f64 * d;
        query_weights + d * self.cache_width() + self.expand_weights() + output
    }
}

impl GatedDelta {
    fn k_width(&self) -> f64 {
        self.num_k_heads as f64 * self.k_head_dim as f64
    }

    fn v_width(&self) -> f64 {
        self.num_v_heads as f64 * self.v_head_dim as f64
    }

    fn conv_channels(&self) -> u64 {
        2 * self.num_k_heads * self.k_head_dim + self.num_v_heads * self.v_head_dim
    }

    fn conv_weights(&self) -> f64 {
        (2.0 * self.k_width() + self.v_width()) * self.conv_kernel as f64
    }

    fn weights(&self, d: f64) -> f64 {
        // q, k, v and the output gate z; beta and decay for each value head; the convolution; the output projection.
        d * (2.0 * self.k_width() + 2.0 * self.v_width() + 2.0 * self.num_v_heads as f64)
            + self.conv_weights()
            + self.v_width() * d
    }

    fn cache_width(&self) -> f64 {
        // Keys, values, beta and decay move the state. (The convolution's state also keeps the last queries.)
        self.k_width() + self.v_width() + 2.0 * self.num_v_heads as f64
    }

    fn cache_weights(&self, d: f64) -> f64 {
        d * self.cache_width() + (self.k_width() + self.v_width()) * self.conv_kernel as f64
    }

    fn scan_flops(&self) -> f64 {
        // For each value head and element of its state: decay 1, k^T S 2, the rank-one update 2, q^T S 2.
        7.0 * self.num_v_heads as f64 * self.k_head_dim as f64 * self.v_head_dim as f64
    }
}

impl Mamba2 {
    fn inner_width(&self) -> f64 {
        self.num_heads as f64 * self.head_dim as f64
    }

    fn bc_width(&self) -> f64 {
        2.0 * self.num_groups as f64 * self.state_size as f64
    }

    fn conv_weights(&self) -> f64 {
        (self.inner_width() + self.bc_width()) * self.conv_kernel as f64
    }

    fn weights(&self, d: f64) -> f64 {
        // x and the gate z, B and C, dt for each head; the convolution; the output projection.
        let projected = 2.0 * self.inner_width() + self.bc_width() + self.num_heads as f64;
        d * projected + self.conv_weights() + self.inner_width() * d
    }

    fn cache_width(&self) -> f64 {
        // x, B and dt move the state; C reads it, but the convolution's state keeps its last rows.
        self.inner_width() + self.bc_width() + self.num_heads as f64
    }

    fn cache_weights(&self, d: f64) -> f64 {
        d * self.cache_width() + self.conv_weights()
    }

    fn scan_flops(&self) -> f64 {
        // For each element of the state: decay 1, the update 2, C's read 2.
        5.0 * self.inner_width() * self.state_size as f64
    }

    fn cache(&self) -> Vec<CacheTensor> {
        let channels = self.num_heads * self.head_dim + 2 * self.num_groups * self.state_size;
        vec![
            CacheTensor { name: "conv", shape: vec![channels, self.conv_kernel] },
            CacheTensor { name: "recurrent", shape: vec![self.num_heads, self.head_dim, self.state_size] },
        ]
    }
}

impl ShortConv {
    fn weights(&self, d: f64) -> f64 {
        // B, C and x; the convolution; the output projection.
        3.0 * d * d + d * self.conv_kernel as f64 + d * d
    }

    fn cache_weights(&self, d: f64) -> f64 {
        2.0 * d * d // B and x: the state keeps their product, before the convolution
    }
}

impl Mlp {
    /// Returns the parameters, all experts included.
    pub fn parameters(&self, hidden_size: u64) -> f64 {
        let d = hidden_size as f64;
        match self {
            Self::Dense(mlp) => mlp.weights(d) + mlp.extra_parameters as f64,
            Self::Moe(mlp) => mlp.weights(d, mlp.num_experts) + mlp.extra_parameters as f64,
        }
    }

    /// Returns the weights that one row meets: of a mixture the router, the active and the shared experts.
    pub fn weights(&self, hidden_size: u64) -> f64 {
        match self {
            Self::Dense(mlp) => mlp.weights(hidden_size as f64),
            Self::Moe(mlp) => mlp.weights(hidden_size as f64, mlp.num_experts_per_tok),
        }
    }
}

impl Dense {
    fn weights(&self, d: f64) -> f64 {
        let matrices = if self.gated { 3.0 } else { 2.0 };
        matrices * d * self.intermediate_size as f64
    }
}

impl Moe {
    fn weights(&self, d: f64, experts: u64) -> f64 {
        let inner = experts as f64 * self.moe_intermediate_size as f64 + self.shared_intermediate_size as f64;
        let gate = if self.shared_gate { d } else { 0.0 };
        3.0 * d * inner + d * self.num_experts as f64 + gate
    }
}
