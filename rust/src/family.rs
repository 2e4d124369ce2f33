//! Model families as data: what the layers of a decoder are, read from its `config.json` alone.
//!
//! A [`Model`] is a list of [`Layer`]s, each a [`Mixer`] (what mixes rows and writes the cache) and an [`Mlp`] (what
//! works on each row alone). [`Model::from_config`] reads a Hugging Face config; [`Model::from_description`] reads
//! these same types as JSON, for models that no reader knows.
//!
//! Counts are f64, which are exact below 2^53; a model with more parameters than that is refused. "Weights" are those
//! that one row is multiplied with: two operations each. Norm gains, biases and tables are parameters and not weights.

mod attention;
mod config;
mod counts;
mod families;
mod gemma4;
mod hybrid;
mod qwen4_exp;

pub use counts::{Figures, LayerFigures};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Fault, Result};

/// The largest width, count or vocabulary that is believed.
pub const MAX_DIMENSION: u64 = 1 << 24;
/// The most layers that are believed.
pub const MAX_LAYERS: usize = 4096;
/// The most parameters that are believed: up to here f64 counts them one by one.
pub const MAX_PARAMETERS: f64 = 9_007_199_254_740_992.0;

/// A decoder.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// Hugging Face's `model_type`, or any name in a description.
    pub model_type: String,
    /// Width of what mixers and MLPs read and write.
    pub hidden_size: u64,
    /// Residual streams of that width side by side: more than one with hyper-connections.
    #[serde(default = "one")]
    pub residual_streams: u64,
    /// Rows of the embedding table.
    pub vocab_size: u64,
    /// Whether the output layer shares the embedding table.
    #[serde(default)]
    pub tied_embeddings: bool,
    /// The longest context that the config promises.
    #[serde(default)]
    pub max_positions: Option<u64>,
    /// Weights that each row meets outside layers and output layer.
    #[serde(default)]
    pub extra_weights: u64,
    /// Parameters outside layers and the token embeddings that are not weights: the final norm, tables, biases.
    #[serde(default)]
    pub extra_parameters: u64,
    /// The decoder layers, in order.
    #[serde(with = "runs")]
    pub layers: Vec<Layer>,
}

/// One decoder layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    /// What mixes rows.
    pub mixer: Mixer,
    /// What works on each row alone.
    pub mlp: Mlp,
    /// Weights that each row meets besides mixer and MLP: per-layer inputs, hyper-connections.
    pub extra_weights: u64,
    /// Parameters besides mixer and MLP that are not weights: the layer's norms, tables.
    pub extra_parameters: u64,
    /// Shapes, without the batch, of states kept besides the mixer's: qwen4_exp's n-gram embeddings.
    pub extra_states: Vec<Vec<u64>>,
}

/// What mixes rows and writes the cache.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Mixer {
    /// Softmax attention over keys and values: full, sliding or indexed.
    Attention(Attention),
    /// Multi-head latent attention (deepseek_v3).
    Mla(Mla),
    /// Gated delta net (qwen3_next, qwen3_5, qwen4_exp).
    GatedDelta(GatedDelta),
    /// Mamba 2 alone.
    Mamba2(Mamba2),
    /// Gated short convolution (lfm2).
    ShortConv(ShortConv),
    /// Attention and Mamba 2 on the same input, their outputs added (falcon_h1).
    Parallel(Parallel),
}

/// Softmax attention over keys and values.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attention {
    /// Query heads.
    pub num_attention_heads: u64,
    /// Key and value heads.
    pub num_key_value_heads: u64,
    /// Width of a query or key head.
    pub head_dim: u64,
    /// Width of a value head where it is not `head_dim`.
    #[serde(default)]
    pub v_head_dim: Option<u64>,
    /// Keys a row sees, itself included; None for full attention.
    #[serde(default)]
    pub window: Option<u64>,
    /// The layer whose cache this one reads instead of writing its own; then it has no k and v projections.
    #[serde(default)]
    pub shared_from: Option<usize>,
    /// Whether keys are normed after their projection, so that a row's scale does not matter to them.
    #[serde(default)]
    pub k_norm: bool,
    /// Whether one matrix holds the q, k and v projections.
    #[serde(default)]
    pub fused_qkv: bool,
    /// Whether the q projection is twice as wide and its other half gates the output.
    #[serde(default)]
    pub output_gate: bool,
    /// Whether values are the keys before norm and rotation: no v projection.
    #[serde(default)]
    pub values_are_keys: bool,
    /// What picks the keys that a row sees, if anything does.
    #[serde(default)]
    pub indexer: Option<Indexer>,
    /// Parameters that are not weights: biases, norm gains, sinks.
    #[serde(default)]
    pub extra_parameters: u64,
}

/// Picks, by compressed blocks of keys, which keys a row attends to (qwen4_exp).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Indexer {
    /// Query heads of the indexer.
    pub num_heads: u64,
    /// Width of its heads, and of the one key a row keeps for it.
    pub head_dim: u64,
    /// Keys that are chosen at most, besides the incomplete last block.
    pub budget: u64,
    /// Rows of a block: one score each block, query and head.
    pub compress_ratio: u64,
}

/// Multi-head latent attention: the cache holds one latent and one rotated key a row, for all heads.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mla {
    /// Query heads; keys and values are expanded to as many.
    pub num_attention_heads: u64,
    /// Rank of the query projection; None where it is one matrix.
    #[serde(default)]
    pub q_lora_rank: Option<u64>,
    /// Width of the cached latent.
    pub kv_lora_rank: u64,
    /// Width of a head's query and key without rotation.
    pub qk_nope_head_dim: u64,
    /// Width of the rotated part: the cached key.
    pub qk_rope_head_dim: u64,
    /// Width of a value head.
    pub v_head_dim: u64,
    /// Parameters that are not weights.
    #[serde(default)]
    pub extra_parameters: u64,
}

/// Gated delta net: a state of `k_head_dim` by `v_head_dim` for each value head.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GatedDelta {
    /// Query and key heads.
    pub num_k_heads: u64,
    /// Value heads, and states.
    pub num_v_heads: u64,
    /// Width of a query or key head.
    pub k_head_dim: u64,
    /// Width of a value head.
    pub v_head_dim: u64,
    /// Rows that the convolution over queries, keys and values sees.
    pub conv_kernel: u64,
    /// Parameters that are not weights.
    #[serde(default)]
    pub extra_parameters: u64,
}

/// Mamba 2: a state of `head_dim` by `state_size` for each head.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mamba2 {
    /// Heads.
    pub num_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Groups that share one B and C.
    pub num_groups: u64,
    /// Width of B and C.
    pub state_size: u64,
    /// Rows that the convolution over x, B and C sees.
    pub conv_kernel: u64,
    /// Parameters that are not weights.
    #[serde(default)]
    pub extra_parameters: u64,
}

/// Gated convolution over `hidden_size` channels.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShortConv {
    /// Rows that the convolution sees.
    pub conv_kernel: u64,
    /// Parameters that are not weights.
    #[serde(default)]
    pub extra_parameters: u64,
}

/// Attention and Mamba 2 side by side.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parallel {
    /// The attention.
    pub attention: Attention,
    /// The Mamba.
    pub mamba: Mamba2,
}

/// What works on each row alone.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Mlp {
    /// One network for all rows.
    Dense(Dense),
    /// A router sends each row to a few of many experts.
    Moe(Moe),
}

/// One network for all rows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dense {
    /// Its inner width.
    pub intermediate_size: u64,
    /// Whether it has a gate matrix beside up and down.
    #[serde(default = "yes")]
    pub gated: bool,
    /// Whether one matrix holds gate and up.
    #[serde(default)]
    pub fused_gate_up: bool,
    /// Parameters that are not weights.
    #[serde(default)]
    pub extra_parameters: u64,
}

/// A mixture of gated experts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Moe {
    /// Experts that a router chooses from.
    pub num_experts: u64,
    /// Experts that one row meets.
    pub num_experts_per_tok: u64,
    /// Inner width of an expert.
    pub moe_intermediate_size: u64,
    /// Inner width of what every row meets besides: shared experts, or a dense MLP beside them; 0 for none.
    #[serde(default)]
    pub shared_intermediate_size: u64,
    /// Whether a learned gate scales the shared expert (one weight a channel).
    #[serde(default)]
    pub shared_gate: bool,
    /// Parameters that are not weights.
    #[serde(default)]
    pub extra_parameters: u64,
}

/// One tensor that a layer leaves in the cache of one sequence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CacheTensor {
    /// "keys", "values", "indexer_keys", "conv", "recurrent" or "extra": transformers' attribute.
    pub name: &'static str,
    /// Its shape without the batch.
    pub shape: Vec<u64>,
}

impl Model {
    /// Returns the decoder that the text of a Hugging Face `config.json` describes; of a multimodal wrapper its text
    /// part. Fields that the config omits take the defaults of its configuration class in transformers.
    pub fn from_config(text: &str) -> Result<Self> {
        let model = families::read(text)?;
        model.check()?;
        Ok(model)
    }

    /// Returns the model types that [`Model::from_config`] reads.
    pub fn known_types() -> Vec<&'static str> {
        families::known()
    }

    /// Returns the model that a description in JSON gives: these types, each layer optionally with a `count`.
    pub fn from_description(json: &str) -> Result<Self> {
        let model: Self = serde_json::from_str(json).map_err(|error| {
            refuse("the description".to_owned(), format!("not one ({error})"), "what docs/layers.md says".to_owned())
        })?;
        model.check()?;
        Ok(model)
    }

    /// Returns the description of this model as JSON, one entry for each run of equal layers.
    pub fn to_json(&self) -> Result<String> {
        serde_json::to_string(self)
            .map_err(|error| refuse("the model".to_owned(), error.to_string(), "one that JSON can hold".to_owned()))
    }

    /// Refuses what no model is: empty, absurdly large, or with parts that do not fit each other.
    fn check(&self) -> Result<()> {
        let place = |name: &'static str| name.to_owned();
        within(self.hidden_size, 1, place, "hidden_size")?;
        within(self.residual_streams, 1, place, "residual_streams")?;
        within(self.vocab_size, 1, place, "vocab_size")?;
        if self.layers.is_empty() || self.layers.len() > MAX_LAYERS {
            let found = self.layers.len().to_string();
            return Err(refuse("the number of layers", found, format!("1 to {MAX_LAYERS}")));
        }
        for (index, layer) in self.layers.iter().enumerate() {
            layer.check(index, &self.layers)?;
        }
        let parameters = self.count_parameters();
        if parameters > MAX_PARAMETERS {
            return Err(refuse("the number of parameters", format!("{parameters:.3e}"), "at most 2^53".to_owned()));
        }
        Ok(())
    }
}

impl Layer {
    fn check(&self, index: usize, layers: &[Self]) -> Result<()> {
        let place = |name: &'static str| format!("layers[{index}].{name}");
        match &self.mixer {
            Mixer::Attention(attention) => attention.check(index, layers)?,
            Mixer::Parallel(Parallel { attention, mamba }) => {
                attention.check(index, layers)?;
                mamba.check(index)?;
            }
            Mixer::Mla(mixer) => {
                let fields = [
                    (mixer.num_attention_heads, "mixer.num_attention_heads"),
                    (mixer.q_lora_rank.unwrap_or(1), "mixer.q_lora_rank"),
                    (mixer.kv_lora_rank, "mixer.kv_lora_rank"),
                    (mixer.qk_nope_head_dim, "mixer.qk_nope_head_dim"),
                    (mixer.qk_rope_head_dim, "mixer.qk_rope_head_dim"),
                    (mixer.v_head_dim, "mixer.v_head_dim"),
                ];
                fields.into_iter().try_for_each(|(value, name)| within(value, 1, place, name))?;
            }
            Mixer::GatedDelta(mixer) => {
                let fields = [
                    (mixer.num_k_heads, "mixer.num_k_heads"),
                    (mixer.num_v_heads, "mixer.num_v_heads"),
                    (mixer.k_head_dim, "mixer.k_head_dim"),
                    (mixer.v_head_dim, "mixer.v_head_dim"),
                    (mixer.conv_kernel, "mixer.conv_kernel"),
                ];
                fields.into_iter().try_for_each(|(value, name)| within(value, 1, place, name))?;
                multiple(mixer.num_v_heads, mixer.num_k_heads, place, "mixer.num_v_heads", "mixer.num_k_heads")?;
            }
            Mixer::Mamba2(mixer) => mixer.check(index)?,
            Mixer::ShortConv(mixer) => within(mixer.conv_kernel, 1, place, "mixer.conv_kernel")?,
        }
        match &self.mlp {
            Mlp::Dense(mlp) => within(mlp.intermediate_size, 1, place, "mlp.intermediate_size")?,
            Mlp::Moe(mlp) => {
                within(mlp.num_experts, 1, place, "mlp.num_experts")?;
                within(mlp.num_experts_per_tok, 1, place, "mlp.num_experts_per_tok")?;
                within(mlp.moe_intermediate_size, 1, place, "mlp.moe_intermediate_size")?;
                within(mlp.shared_intermediate_size, 0, place, "mlp.shared_intermediate_size")?;
                if mlp.num_experts_per_tok > mlp.num_experts {
                    let expected = format!("at most the {} experts there are", mlp.num_experts);
                    return Err(refuse(
                        place("mlp.num_experts_per_tok"),
                        mlp.num_experts_per_tok.to_string(),
                        expected,
                    ));
                }
            }
        }
        for shape in &self.extra_states {
            if shape.is_empty() || shape.len() > 3 || shape.iter().any(|size| !(1..=1 << 32).contains(size)) {
                let expected = "shapes of 1 to 3 sizes, each 1 to 2^32".to_owned();
                return Err(refuse(place("extra_states"), format!("{shape:?}"), expected));
            }
        }
        Ok(())
    }
}

impl Attention {
    fn check(&self, index: usize, layers: &[Layer]) -> Result<()> {
        let place = |name: &'static str| format!("layers[{index}].mixer.{name}");
        within(self.num_attention_heads, 1, place, "num_attention_heads")?;
        within(self.num_key_value_heads, 1, place, "num_key_value_heads")?;
        within(self.head_dim, 1, place, "head_dim")?;
        within(self.v_head_dim(), 1, place, "v_head_dim")?;
        multiple(
            self.num_attention_heads,
            self.num_key_value_heads,
            place,
            "num_attention_heads",
            "num_key_value_heads",
        )?;
        if self.window == Some(0) {
            return Err(refuse(
                place("window"),
                "0".to_owned(),
                "1 or more rows, or null for full attention".to_owned(),
            ));
        }
        if let Some(indexer) = &self.indexer {
            within(indexer.num_heads, 1, place, "indexer.num_heads")?;
            within(indexer.head_dim, 1, place, "indexer.head_dim")?;
            within(indexer.budget, 1, place, "indexer.budget")?;
            within(indexer.compress_ratio, 1, place, "indexer.compress_ratio")?;
        }
        let Some(source) = self.shared_from else { return Ok(()) };
        let fits = layers[..index].get(source).and_then(|layer| layer.mixer.attention()).is_some_and(|shared| {
            let widths = |it: &Self| (it.num_key_value_heads, it.head_dim, it.v_head_dim(), it.window);
            shared.shared_from.is_none() && widths(shared) == widths(self)
        });
        if fits {
            return Ok(());
        }
        let expected = "a layer below with a cache of its own, and the same key and value heads, widths and window";
        Err(refuse(place("shared_from"), source.to_string(), expected.to_owned()))
    }
}

impl Mamba2 {
    fn check(&self, index: usize) -> Result<()> {
        let place = |name: &'static str| format!("layers[{index}].mixer.{name}");
        within(self.num_heads, 1, place, "num_heads")?;
        within(self.head_dim, 1, place, "head_dim")?;
        within(self.num_groups, 1, place, "num_groups")?;
        within(self.state_size, 1, place, "state_size")?;
        within(self.conv_kernel, 1, place, "conv_kernel")?;
        multiple(self.num_heads, self.num_groups, place, "num_heads", "num_groups")
    }
}

/// Refuses a value outside `least..=MAX_DIMENSION`.
fn within(value: u64, least: u64, place: impl Fn(&'static str) -> String, name: &'static str) -> Result<()> {
    if (least..=MAX_DIMENSION).contains(&value) {
        return Ok(());
    }
    Err(refuse(place(name), value.to_string(), format!("{least} to {MAX_DIMENSION}")))
}

/// Refuses a value that is not a multiple of another, which is at least 1.
fn multiple(
    value: u64,
    of: u64,
    place: impl Fn(&'static str) -> String,
    name: &'static str,
    of_name: &'static str,
) -> Result<()> {
    if value.is_multiple_of(of) {
        return Ok(());
    }
    Err(refuse(place(name), value.to_string(), format!("a multiple of {of_name}, which is {of}")))
}

/// Layers in JSON: runs of equal layers are one entry with a `count`.
mod runs {
    use super::{Layer, MAX_LAYERS, Mixer, Mlp, one};
    use serde::de::Error as _;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Run {
        #[serde(default = "one")]
        count: u64,
        mixer: Mixer,
        mlp: Mlp,
        #[serde(default)]
        extra_weights: u64,
        #[serde(default)]
        extra_parameters: u64,
        #[serde(default)]
        extra_states: Vec<Vec<u64>>,
    }

    pub fn serialize<S: Serializer>(layers: &[Layer], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(layers.chunk_by(|a, b| a == b).map(|run| {
            let Layer { mixer, mlp, extra_weights, extra_parameters, extra_states } = run[0].clone();
            Run { count: run.len() as u64, mixer, mlp, extra_weights, extra_parameters, extra_states }
        }))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Layer>, D::Error> {
        let mut layers = Vec::new();
        for Run { count, mixer, mlp, extra_weights, extra_parameters, extra_states } in
            Vec::<Run>::deserialize(deserializer)?
        {
            if count == 0 || count > (MAX_LAYERS - layers.len()) as u64 {
                return Err(D::Error::custom(format_args!(
                    "count is {count}; expected 1 or more, and at most {MAX_LAYERS} layers together"
                )));
            }
            let layer = Layer { mixer, mlp, extra_weights, extra_parameters, extra_states };
            layers.extend(std::iter::repeat_n(layer, count as usize));
        }
        Ok(layers)
    }
}

fn one() -> u64 {
    1
}

fn yes() -> bool {
    true
}

fn refuse(field: impl Into<String>, found: String, expected: String) -> Error {
    Fault::Config { field: field.into().into_boxed_str(), found: found.into(), expected: expected.into() }.into()
}

#[cfg(test)]
mod tests;
