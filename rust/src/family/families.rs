//! The model types that are known, with the defaults of their configuration classes, and what their readers share.
//!
//! Source of every default and every layer: `configuration_<type>.py` and `modeling_<type>.py` of transformers 5.24.

use serde_json::Value;

use super::config::{self, Config, show};
use super::{Attention, Dense, Layer, Mixer, Mlp, Model, Moe, attention, gemma4, hybrid, qwen4_exp};
use crate::error::{Fault, Result};

/// One model type: how its layers are read, and what its configuration class assumes where a config is silent.
struct Family {
    model_type: &'static str,
    read: fn(&Config<'_>, &Base) -> Result<Model>,
    hidden_size: u64,
    intermediate_size: u64,
    num_hidden_layers: u64,
    num_attention_heads: u64,
    /// None: as many as query heads.
    num_key_value_heads: Option<u64>,
    /// None: hidden_size / num_attention_heads, rounded down.
    head_dim: Option<u64>,
    vocab_size: u64,
    max_position_embeddings: u64,
    tied: bool,
}

const LLAMA: Family = Family {
    model_type: "llama",
    read: attention::llama,
    hidden_size: 4096,
    intermediate_size: 11008,
    num_hidden_layers: 32,
    num_attention_heads: 32,
    num_key_value_heads: None,
    head_dim: None,
    vocab_size: 32000,
    max_position_embeddings: 2048,
    tied: false,
};

const MISTRAL: Family = Family {
    model_type: "mistral",
    read: attention::mistral,
    intermediate_size: 14336,
    num_key_value_heads: Some(8),
    max_position_embeddings: 131_072,
    ..LLAMA
};

const QWEN2: Family = Family {
    model_type: "qwen2",
    read: attention::qwen2,
    intermediate_size: 22016,
    num_key_value_heads: Some(32),
    vocab_size: 151_936,
    max_position_embeddings: 32768,
    ..LLAMA
};

const QWEN3_NEXT: Family = Family {
    model_type: "qwen3_next",
    read: hybrid::qwen3_next,
    hidden_size: 2048,
    intermediate_size: 5632,
    num_hidden_layers: 48,
    num_attention_heads: 16,
    num_key_value_heads: Some(2),
    head_dim: Some(256),
    ..QWEN2
};

const GEMMA2: Family = Family {
    model_type: "gemma2",
    read: attention::gemma2,
    hidden_size: 2304,
    intermediate_size: 9216,
    num_hidden_layers: 26,
    num_attention_heads: 8,
    num_key_value_heads: Some(4),
    head_dim: Some(256),
    vocab_size: 256_000,
    max_position_embeddings: 8192,
    tied: true,
};

static FAMILIES: &[Family] = &[
    Family {
        model_type: "deepseek_v3",
        read: attention::deepseek_v3,
        hidden_size: 7168,
        intermediate_size: 18432,
        num_hidden_layers: 61,
        num_attention_heads: 128,
        num_key_value_heads: Some(128),
        head_dim: Some(64), // its rotated part; no width comes from it
        vocab_size: 129_280,
        max_position_embeddings: 4096,
        ..LLAMA
    },
    Family {
        model_type: "falcon_h1",
        read: hybrid::falcon_h1,
        intermediate_size: 14336,
        num_key_value_heads: Some(8),
        vocab_size: 128_000,
        max_position_embeddings: 8192,
        ..LLAMA
    },
    GEMMA2,
    Family {
        model_type: "gemma3",
        read: attention::gemma3,
        vocab_size: 262_208,
        max_position_embeddings: 131_072,
        ..GEMMA2
    },
    Family {
        model_type: "gemma4",
        read: gemma4::read,
        num_hidden_layers: 30,
        vocab_size: 262_144,
        max_position_embeddings: 131_072,
        ..GEMMA2
    },
    Family {
        model_type: "glm4_moe",
        read: attention::glm4_moe,
        intermediate_size: 10944,
        num_hidden_layers: 46,
        num_attention_heads: 96,
        num_key_value_heads: Some(8),
        vocab_size: 151_552,
        max_position_embeddings: 131_072,
        ..LLAMA
    },
    Family {
        model_type: "gpt_oss",
        read: attention::gpt_oss,
        hidden_size: 2880,
        intermediate_size: 2880,
        num_hidden_layers: 36,
        num_attention_heads: 64,
        num_key_value_heads: Some(8),
        head_dim: Some(64),
        vocab_size: 201_088,
        max_position_embeddings: 131_072,
        ..LLAMA
    },
    Family { model_type: "granite", ..LLAMA },
    Family {
        model_type: "lfm2",
        read: hybrid::lfm2,
        hidden_size: 2560,
        intermediate_size: 12288,
        num_key_value_heads: Some(8),
        vocab_size: 65536,
        max_position_embeddings: 128_000,
        tied: true,
        ..LLAMA
    },
    LLAMA,
    Family {
        model_type: "ministral3",
        read: attention::ministral3,
        num_hidden_layers: 34,
        head_dim: Some(128),
        vocab_size: 131_072,
        max_position_embeddings: 262_144,
        ..MISTRAL
    },
    MISTRAL,
    Family { model_type: "mixtral", read: attention::mixtral, ..MISTRAL },
    Family { model_type: "olmo3", read: attention::olmo3, vocab_size: 50304, ..LLAMA },
    Family {
        model_type: "phi3",
        read: attention::phi3,
        hidden_size: 3072,
        intermediate_size: 8192,
        vocab_size: 32064,
        max_position_embeddings: 4096,
        ..LLAMA
    },
    QWEN2,
    Family { model_type: "qwen3", read: attention::qwen3, head_dim: Some(128), ..QWEN2 },
    Family {
        model_type: "qwen3_5",
        read: hybrid::qwen3_5,
        intermediate_size: 12288,
        num_attention_heads: 16,
        num_key_value_heads: Some(4),
        head_dim: Some(256),
        vocab_size: 248_320,
        ..QWEN2
    },
    Family {
        model_type: "qwen3_5_moe",
        read: hybrid::qwen3_5_moe,
        num_hidden_layers: 40,
        vocab_size: 248_320,
        ..QWEN3_NEXT
    },
    Family {
        model_type: "qwen3_moe",
        read: attention::qwen3_moe,
        hidden_size: 2048,
        intermediate_size: 6144,
        num_hidden_layers: 24,
        num_key_value_heads: Some(4),
        ..QWEN2
    },
    QWEN3_NEXT,
    Family { model_type: "qwen4_exp", read: qwen4_exp::read, num_hidden_layers: 40, vocab_size: 248_320, ..QWEN3_NEXT },
    Family {
        model_type: "smollm3",
        read: attention::smollm3,
        hidden_size: 2048,
        num_hidden_layers: 36,
        num_attention_heads: 16,
        num_key_value_heads: Some(4),
        vocab_size: 128_256,
        max_position_embeddings: 32768,
        tied: true,
        ..LLAMA
    },
];

/// Returns the model types that are known. The text part of a multimodal wrapper may also be named "<type>_text".
pub(super) fn known() -> Vec<&'static str> {
    FAMILIES.iter().map(|family| family.model_type).collect()
}

/// Returns the decoder that a config describes; of a multimodal wrapper its text part.
pub(super) fn read(text: &str) -> Result<Model> {
    let fields = config::parse(text)?;
    let whole = Config::new(&fields, "");
    let nested = match whole.get("text_config") {
        Some(Value::Object(nested)) => Some(nested),
        None | Some(Value::Null) => None,
        Some(_) => return Err(whole.unexpected("text_config", "an object")),
    };
    let config = nested.map_or(Config::new(&fields, ""), |nested| Config::new(nested, "text_config."));
    // A wrapper's text part may leave its type to the wrapper.
    let named = if config.get("model_type").is_some() { &config } else { &whole };
    let model_type = match named.get("model_type") {
        Some(Value::String(name)) => name.as_str(),
        other => {
            let expected = format!("one of {}", known().join(", "));
            return Err(whole.conflict("model_type", show(other), expected));
        }
    };
    let family = family(model_type)?;
    if config.is_set("per_layer_config") && family.model_type != "gemma4" {
        return Err(config.unexpected("per_layer_config", "none: layers that differ are described with --layers"));
    }
    // A wrapper's own flag decides (its class ties, not the text part's); where it has none, the text part's does.
    let tied = if whole.get("tie_word_embeddings").is_some() { &whole } else { &config };
    let tied = tied.flag("tie_word_embeddings", family.tied)?;
    (family.read)(&config, &Base::read(&config, family, model_type, tied)?)
}

fn family(model_type: &str) -> Result<&'static Family> {
    let name = model_type.strip_suffix("_text").unwrap_or(model_type);
    FAMILIES
        .iter()
        .find(|family| family.model_type == name)
        .ok_or_else(|| Fault::UnknownModelType { found: model_type.to_owned(), known: known() }.into())
}

/// The fields that every reader needs, checked.
pub(super) struct Base {
    model_type: String,
    pub(super) hidden_size: u64,
    pub(super) intermediate_size: u64,
    pub(super) layers: usize,
    pub(super) num_attention_heads: u64,
    pub(super) num_key_value_heads: u64,
    pub(super) head_dim: u64,
    pub(super) vocab_size: u64,
    tied: bool,
    max_positions: Option<u64>,
}

impl Base {
    fn read(config: &Config<'_>, family: &Family, model_type: &str, tied: bool) -> Result<Self> {
        let hidden_size = config.count("hidden_size", family.hidden_size)?;
        let heads = config.count("num_attention_heads", family.num_attention_heads)?;
        let kv_heads = config.optional("num_key_value_heads", family.num_key_value_heads)?.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            let expected = format!("a divisor of num_attention_heads, which is {heads}");
            let found =
                format!("{kv_heads}{}", if config.get("num_key_value_heads").is_some() { "" } else { " by default" });
            return Err(config.conflict("num_key_value_heads", found, expected));
        }
        // Rounded down, as the classes do: glm4_moe's own defaults are 4096 / 96.
        let head_dim = config.optional("head_dim", family.head_dim)?.unwrap_or(hidden_size / heads);
        if head_dim == 0 {
            let expected = format!("at least num_attention_heads, which is {heads}, as head_dim is not given");
            return Err(config.conflict("hidden_size", hidden_size.to_string(), expected));
        }
        Ok(Self {
            model_type: model_type.to_owned(),
            hidden_size,
            intermediate_size: config.count("intermediate_size", family.intermediate_size)?,
            layers: config.num_hidden_layers(family.num_hidden_layers)?,
            num_attention_heads: heads,
            num_key_value_heads: kv_heads,
            head_dim,
            vocab_size: config.count("vocab_size", family.vocab_size)?,
            tied,
            max_positions: config.rows("max_position_embeddings", Some(family.max_position_embeddings))?,
        })
    }

    /// Returns the model with these layers, and a final norm.
    pub(super) fn model(&self, layers: Vec<Layer>) -> Model {
        Model {
            model_type: self.model_type.clone(),
            hidden_size: self.hidden_size,
            residual_streams: 1,
            vocab_size: self.vocab_size,
            tied_embeddings: self.tied,
            max_positions: self.max_positions,
            extra_weights: 0,
            extra_parameters: self.hidden_size,
            layers,
        }
    }

    /// Returns a layer with `norms` norms of its own.
    pub(super) fn layer(&self, mixer: Mixer, mlp: Mlp, norms: u64) -> Layer {
        let extra_parameters = norms * self.hidden_size;
        Layer { mixer, mlp, extra_weights: 0, extra_parameters, extra_states: Vec::new() }
    }

    /// Returns attention without biases and norms.
    pub(super) fn attention(&self, window: Option<u64>) -> Attention {
        Attention {
            num_attention_heads: self.num_attention_heads,
            num_key_value_heads: self.num_key_value_heads,
            head_dim: self.head_dim,
            v_head_dim: None,
            window,
            shared_from: None,
            k_norm: false,
            fused_qkv: false,
            output_gate: false,
            values_are_keys: false,
            indexer: None,
            extra_parameters: 0,
        }
    }

    /// Returns a gated MLP, `mlp_bias` of the config heeded where the class has it.
    pub(super) fn dense(&self, bias: bool) -> Mlp {
        let extra_parameters = if bias { 2 * self.intermediate_size + self.hidden_size } else { 0 };
        let intermediate_size = self.intermediate_size;
        Mlp::Dense(Dense { intermediate_size, gated: true, fused_gate_up: false, extra_parameters })
    }
}

impl Attention {
    /// Returns this attention with biases on its q, k and v projections.
    pub(super) fn with_qkv_bias(mut self, bias: bool) -> Self {
        if bias {
            let gates = if self.output_gate { 2 } else { 1 };
            let heads = gates * self.num_attention_heads + 2 * self.num_key_value_heads;
            self.extra_parameters += heads * self.head_dim;
        }
        self
    }

    /// Returns this attention with a bias on its output projection.
    pub(super) fn with_output_bias(mut self, bias: bool, hidden_size: u64) -> Self {
        self.extra_parameters += if bias { hidden_size } else { 0 };
        self
    }

    /// Returns this attention with a norm over each query and each key head.
    pub(super) fn with_head_norms(mut self, norms: bool) -> Self {
        if norms {
            self.k_norm = true;
            self.extra_parameters += 2 * self.head_dim;
        }
        self
    }
}

/// Returns experts with a router and nothing else.
pub(super) fn experts(num_experts: u64, num_experts_per_tok: u64, moe_intermediate_size: u64) -> Moe {
    Moe {
        num_experts,
        num_experts_per_tok,
        moe_intermediate_size,
        shared_intermediate_size: 0,
        shared_gate: false,
        extra_parameters: 0,
    }
}
