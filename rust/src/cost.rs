//! What a prefill costs, exact and filled: operations, bytes, memory and, with a device's rates, seconds. The one
//! formula behind every "ratio FLOPs allow", every prediction and every plan.
//!
//! A multiply and an add are two operations. Norms, rotary embeddings, softmax and other work linear in the
//! width are left out on both sides. Attention counts each visible (query, key) pair once: a causal row at
//! position p sees p + 1 keys, or `window` of them.
//!
//! Time is a roofline: each [`Part`] takes the longer of its operations at the device's rate and its bytes at the
//! memory's, and each layer of each call adds a fixed overhead. docs/planning.md derives it and says what it leaves out.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Fault, Result};
use crate::family::{self, Mixer, Model};
use crate::rule::{Decision, Step, decide, first_needed_row};

/// Query rows that share one pass over the keys in a blocked attention kernel (FlashAttention-2 uses 64 to 128).
const QUERY_BLOCK: f64 = 128.0;
/// Layers below the split whose exact queries and keys score bulk rows, besides layer S (design, section 2.6).
const SCORED_BELOW_SPLIT: usize = 3;
/// The longest prompt for which a break-even length is looked for.
const LONGEST_PROMPT: u64 = 1 << 24;

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
struct LayerDocument {
    num_attention_heads: u64,
    num_key_value_heads: u64,
    head_dim: u64,
    /// Two times the weights one row passes through (of a mixture: the active experts, and the router).
    mlp_flops_per_row: f64,
    /// Keys a row sees, itself included; None for full attention.
    window: Option<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ShapeDocument {
    hidden_size: u64,
    vocab_size: u64,
    layers: Vec<LayerDocument>,
}

/// What is filled, and how the maps are applied.
#[derive(Debug, Clone, Copy)]
pub struct Fill {
    /// The first layer that does not run on bulk rows.
    pub split: usize,
    /// Width of the maps' input, in units of the stream's.
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

/// Returns the operations of a step, exact and filled.
pub fn prefill_cost(shape: &Shape, step: &Step, fill: &Fill) -> Result<PrefillCost> {
    let pricer = Pricer::new(shape, &Setting { fill: *fill, ..Setting::default() })?;
    let decision = decide(step)?;
    let (exact, filled) = (pricer.exact(step), pricer.filled(step, &decision, &[]));
    Ok(PrefillCost {
        exact_flops: exact.flops(),
        filled_flops: filled.flops(),
        fill_flops: filled.of(Part::Fill).flops + filled.of(Part::FillScan).flops,
        decision,
    })
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
    fn cost(&self, d: f64) -> Layer {
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
            resident_weights: layer.parameters(hidden_size),
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
    fn writes(&self) -> bool {
        self.row_elements + self.state_elements > 0.0
    }
}

/// How a step is run.
#[derive(Debug, Clone, Copy)]
pub struct Setting {
    /// What is filled.
    pub fill: Fill,
    /// The share of bulk rows that run exactly through the late layers, chosen by the tail: 0 to 1.
    pub selected_share: f64,
    /// Bulk rows in one call; None for all of them.
    pub chunk_tokens: Option<u64>,
    /// Bytes of a weight, an activation, a cache element.
    pub element_bytes: f64,
    /// Bytes of an element of a map.
    pub map_element_bytes: f64,
}

impl Default for Setting {
    /// The split at layer 0, the stream alone, two steps, one call, bfloat16.
    fn default() -> Self {
        Self {
            fill: Fill { split: 0, features: 1, fused_rank: None },
            selected_share: 0.0,
            chunk_tokens: None,
            element_bytes: 2.0,
            map_element_bytes: 2.0,
        }
    }
}

/// What a part of the work is limited by at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unit {
    Matmul,
    Attention,
}

/// The parts of a prefill; each is timed by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Part {
    /// Projections and MLPs of the layers below the split.
    EarlyMatmul,
    /// Their attention and scans: what filling cannot help.
    EarlyAttention,
    /// Projections and MLPs of the late layers on exact rows.
    LateMatmul,
    /// Their attention and scans.
    LateAttention,
    /// Maps, and key and value projections, of bulk rows.
    Fill,
    /// Late recurrent states over bulk rows.
    FillScan,
    /// Scores of bulk rows by the tail's queries.
    Scoring,
    /// Projections and MLPs of selected rows in the late layers.
    SelectedMatmul,
    /// Their attention and scans.
    SelectedAttention,
    /// The output layer.
    Output,
}

impl Part {
    /// Every part, in the order of the work.
    pub const ALL: [Self; 10] = [
        Self::EarlyMatmul,
        Self::EarlyAttention,
        Self::LateMatmul,
        Self::LateAttention,
        Self::Fill,
        Self::FillScan,
        Self::Scoring,
        Self::SelectedMatmul,
        Self::SelectedAttention,
        Self::Output,
    ];

    /// Returns the word for this part in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::EarlyMatmul => "early_matmul",
            Self::EarlyAttention => "early_attention",
            Self::LateMatmul => "late_matmul",
            Self::LateAttention => "late_attention",
            Self::Fill => "fill",
            Self::FillScan => "fill_scan",
            Self::Scoring => "scoring",
            Self::SelectedMatmul => "selected_matmul",
            Self::SelectedAttention => "selected_attention",
            Self::Output => "output",
        }
    }

    fn unit(self) -> Unit {
        match self {
            Self::EarlyMatmul | Self::LateMatmul | Self::Fill | Self::SelectedMatmul | Self::Output => Unit::Matmul,
            _ => Unit::Attention,
        }
    }
}

/// Operations and bytes of one part.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[allow(missing_docs)]
pub struct Amount {
    pub flops: f64,
    /// Bytes between memory and processor, weights and caches once a call.
    pub bytes: f64,
}

/// What one prefill costs, part by part.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Cost {
    parts: [Amount; Part::ALL.len()],
    /// Layers run, each counted once for each call.
    pub layer_calls: f64,
}

impl Cost {
    /// Returns one part.
    pub fn of(&self, part: Part) -> Amount {
        self.parts[part as usize]
    }

    /// Returns the operations of all parts.
    pub fn flops(&self) -> f64 {
        self.parts.iter().map(|part| part.flops).sum()
    }

    /// Returns the bytes of all parts.
    pub fn bytes(&self) -> f64 {
        self.parts.iter().map(|part| part.bytes).sum()
    }

    fn add(&mut self, part: Part, amount: Amount) {
        let sum = &mut self.parts[part as usize];
        sum.flops += amount.flops;
        sum.bytes += amount.bytes;
    }
}

/// How fast a device is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    /// Operations a second of large matrix products.
    pub matmul_flops_per_s: f64,
    /// Operations a second of causal attention.
    pub attention_flops_per_s: f64,
    /// Bytes a second to and from memory.
    pub memory_bytes_per_s: f64,
    /// Seconds that one layer of one call costs, whatever its rows.
    pub layer_call_s: f64,
    /// Where the figures come from.
    #[serde(default)]
    pub source: String,
}

/// Peak figures of data sheets: dense bf16 operations a second (fp32 sums) and bytes a second.
/// NVIDIA's data sheets of A100 80GB SXM, H100 SXM, H200 SXM, L4, L40S, RTX 4090 (Ada whitepaper) and B200 (HGX, per GPU).
const DEVICES: [(&str, f64, f64); 7] = [
    ("a100", 312e12, 2.039e12),
    ("h100", 989e12, 3.35e12),
    ("h200", 989e12, 4.8e12),
    ("b200", 2250e12, 7.7e12),
    ("l4", 121e12, 0.3e12),
    ("l40s", 362e12, 0.864e12),
    ("rtx4090", 165.2e12, 1.008e12),
];
/// The share of a data sheet's peak that large matrix products, attention and streams are taken to reach. Assumptions: a
/// calibration replaces them.
const REACHED: (f64, f64, f64) = (0.7, 0.5, 0.85);
/// Assumed seconds of launches for one layer of one call.
const LAUNCHES_S: f64 = 50e-6;

impl Rates {
    /// Returns the rates a JSON document gives, as `ridgefill bench --calibrate` prints them.
    pub fn from_json(json: &str) -> Result<Self> {
        let rates: Self = serde_json::from_str(json).map_err(|error| refuse(format!("rates: {error}")))?;
        rates.check()?;
        Ok(rates)
    }

    /// Returns rates for a known device: a data sheet's peaks times assumed shares of them.
    pub fn of_device(name: &str) -> Result<Self> {
        let Some((_, flops, bytes)) = DEVICES.iter().find(|(known, ..)| *known == name) else {
            let known: Vec<&str> = DEVICES.iter().map(|(known, ..)| *known).collect();
            return Err(refuse(format!(
                "device {name:?} is unknown; expected one of {}, or rates measured by `ridgefill bench --calibrate`",
                known.join(", ")
            )));
        };
        let (matmul, attention, memory) = REACHED;
        Ok(Self {
            matmul_flops_per_s: flops * matmul,
            attention_flops_per_s: flops * attention,
            memory_bytes_per_s: bytes * memory,
            layer_call_s: LAUNCHES_S,
            source: format!(
                "assumed for {name}: {:.0}% of its data sheet's bf16 peak in matrix products, {:.0}% in attention, \
                 {:.0}% of its bandwidth",
                100.0 * matmul,
                100.0 * attention,
                100.0 * memory
            ),
        })
    }

    /// Returns rates with which a cost's seconds are its operations: for ratios where no device is known.
    pub fn operations() -> Self {
        Self {
            matmul_flops_per_s: 1.0,
            attention_flops_per_s: 1.0,
            memory_bytes_per_s: f64::INFINITY,
            layer_call_s: 0.0,
            source: "operations alone: every rate is one operation a second".to_owned(),
        }
    }

    /// Refuses rates that no device has.
    pub fn check(&self) -> Result<()> {
        for (name, value) in [
            ("matmul_flops_per_s", self.matmul_flops_per_s),
            ("attention_flops_per_s", self.attention_flops_per_s),
            ("memory_bytes_per_s", self.memory_bytes_per_s),
        ] {
            if value.is_nan() || value <= 0.0 {
                return Err(refuse(format!("rates: {name} is {value}; expected more than 0")));
            }
        }
        if !(0.0..f64::INFINITY).contains(&self.layer_call_s) {
            return Err(refuse(format!("rates: layer_call_s is {}; expected 0 or more", self.layer_call_s)));
        }
        Ok(())
    }

    /// Returns the seconds of one part.
    pub fn part_seconds(&self, cost: &Cost, part: Part) -> f64 {
        let amount = cost.of(part);
        let flops_per_s = match part.unit() {
            Unit::Matmul => self.matmul_flops_per_s,
            Unit::Attention => self.attention_flops_per_s,
        };
        (amount.flops / flops_per_s).max(amount.bytes / self.memory_bytes_per_s)
    }

    /// Returns the seconds that calls take whatever they hold.
    pub fn overhead_seconds(&self, cost: &Cost) -> f64 {
        cost.layer_calls * self.layer_call_s
    }

    /// Returns the predicted time to first token of a prefill.
    pub fn seconds(&self, cost: &Cost) -> f64 {
        let parts: f64 = Part::ALL.iter().map(|part| self.part_seconds(cost, *part)).sum();
        parts + self.overhead_seconds(cost)
    }
}

/// Layers of one kind of visibility, summed.
#[derive(Debug, Clone)]
struct Keys {
    visible: Option<u64>,
    pair_flops: f64,
    row_elements: f64,
}

/// Layers that run exactly, summed, so that a step is priced in a handful of operations however many layers there are.
#[derive(Debug, Clone, Default)]
struct Work {
    layers: f64,
    weights: f64,
    resident_weights: f64,
    scan_flops: f64,
    state_elements: f64,
    /// Elements that one row reads and writes around the weights.
    moved_elements: f64,
    keys: Vec<Keys>,
}

impl Work {
    fn of(layers: &[Layer], d: f64) -> Self {
        let mut work = Self::default();
        for layer in layers {
            work.layers += 1.0;
            work.weights += layer.weights;
            work.resident_weights += layer.resident_weights;
            work.scan_flops += layer.scan_flops;
            work.state_elements += layer.state_elements;
            // Each matrix has one side of about d and writes (or reads) the other; block inputs and outputs besides.
            work.moved_elements += layer.weights / d + 4.0 * d;
            work.see(layer.visible, layer.pair_flops, layer.row_elements);
            if layer.index_flops > 0.0 {
                work.see(None, layer.index_flops, 0.0);
            }
        }
        work
    }

    fn see(&mut self, visible: Option<u64>, pair_flops: f64, row_elements: f64) {
        if pair_flops + row_elements == 0.0 {
            return;
        }
        match self.keys.iter_mut().find(|keys| keys.visible == visible) {
            Some(keys) => {
                keys.pair_flops += pair_flops;
                keys.row_elements += row_elements;
            }
            None => self.keys.push(Keys { visible, pair_flops, row_elements }),
        }
    }

    /// Projections and MLPs of `rows` rows in `calls` calls.
    fn matmul(&self, rows: f64, calls: f64, element_bytes: f64) -> Amount {
        // A call with few rows of a mixture meets few experts: never more weights than its rows ask for.
        let weights = if rows > 0.0 { (calls * self.resident_weights).min(rows * self.weights) } else { 0.0 };
        Amount { flops: rows * 2.0 * self.weights, bytes: element_bytes * (weights + rows * self.moved_elements) }
    }

    /// Attention and scans of a share of the rows `[from, to)`, spread evenly over them.
    fn attention(&self, from: u64, to: u64, share: f64, element_bytes: f64) -> Amount {
        let rows = share * (to - from) as f64;
        if rows == 0.0 {
            return Amount::default();
        }
        let mut flops = rows * self.scan_flops;
        let mut elements = 2.0 * self.state_elements;
        for keys in &self.keys {
            let pairs = share * visible_keys(from, to, keys.visible);
            flops += pairs * keys.pair_flops;
            // Queries and outputs once; keys and values once for each block of queries that sees them.
            elements += rows * keys.pair_flops / 2.0 + (pairs / QUERY_BLOCK).max(1.0) * keys.row_elements;
        }
        Amount { flops, bytes: element_bytes * elements }
    }
}

/// Late layers of one window, summed, as bulk rows are filled in them.
#[derive(Debug, Clone)]
struct Filled {
    window: Option<u64>,
    layers: f64,
    /// Maps and projections that a row meets.
    weights: f64,
    scan_flops: f64,
    row_elements: f64,
}

/// A model and a setting, summed once: it prices a step in a handful of operations and without an allocation.
#[derive(Debug, Clone)]
pub struct Pricer {
    setting: Setting,
    whole: Work,
    early: Work,
    late: Work,
    filled: Vec<Filled>,
    /// Layers whose attention scores bulk rows, and what a tail row's queries for them cost.
    scored: Work,
    query_flops: f64,
    cached: Vec<(Option<u64>, f64)>,
    state_elements: f64,
    stream_width: f64,
    extra_weights: f64,
    output_weights: f64,
    vocab_size: f64,
    peak_row_elements: f64,
    map_elements: f64,
}

impl Pricer {
    /// Returns the pricer of a fill of this model.
    pub fn new(shape: &Shape, setting: &Setting) -> Result<Self> {
        let Fill { split, features, fused_rank } = setting.fill;
        if split >= shape.layers.len() {
            return Err(refuse(format!("split is {split}; the model has layers 0 to {}", shape.layers.len() - 1)));
        }
        if features < 1 {
            return Err(refuse("features is 0; the stream alone counts 1".to_owned()));
        }
        if !(0.0..=1.0).contains(&setting.selected_share) {
            return Err(refuse(format!("selected_share is {}; expected 0 to 1", setting.selected_share)));
        }
        if setting.chunk_tokens == Some(0) {
            return Err(refuse("chunk_tokens is 0; expected at least 1".to_owned()));
        }
        for (name, value) in
            [("element_bytes", setting.element_bytes), ("map_element_bytes", setting.map_element_bytes)]
        {
            if !(f64::MIN_POSITIVE..=16.0).contains(&value) {
                return Err(refuse(format!("{name} is {value}; expected more than 0 and at most 16")));
            }
        }
        let d = shape.hidden_size as f64;
        let inputs = features as f64 * shape.stream_width as f64;
        let mut filled: Vec<Filled> = Vec::new();
        let mut map_elements = 0.0;
        for (index, layer) in shape.layers.iter().enumerate().skip(split).filter(|(_, layer)| layer.writes()) {
            // Layer S itself needs no map: its block input is the stream.
            let (map, projections) = match fused_rank {
                _ if index == split => (0.0, layer.cache_weights),
                Some(rank) if layer.fusible => (inputs * layer.cache_width + inputs * rank as f64, 0.0),
                _ => (inputs * d, layer.cache_weights),
            };
            map_elements += if index == split { 0.0 } else { map + d };
            let group = match filled.iter_mut().find(|group| group.window == layer.window) {
                Some(group) => group,
                None => {
                    filled.push(Filled {
                        window: layer.window,
                        layers: 0.0,
                        weights: 0.0,
                        scan_flops: 0.0,
                        row_elements: 0.0,
                    });
                    let last = filled.len() - 1;
                    &mut filled[last]
                }
            };
            group.layers += 1.0;
            group.weights += map + projections;
            group.scan_flops += layer.scan_flops;
            group.row_elements += layer.row_elements + layer.cache_width + d;
        }
        let mut scored = Work::default();
        let mut query_flops = 0.0;
        for (index, layer) in shape.layers.iter().enumerate().skip(split.saturating_sub(SCORED_BELOW_SPLIT)) {
            if layer.pair_flops > 0.0 {
                scored.see(layer.visible, layer.pair_flops, layer.row_elements / 2.0);
                // Queries are about a quarter of pair_flops wide; predicted ones need the block input first.
                query_flops += 2.0 * d * layer.pair_flops / 4.0 + if index > split { 2.0 * inputs * d } else { 0.0 };
            }
        }
        let mut cached: Vec<(Option<u64>, f64)> = Vec::new();
        for layer in &shape.layers {
            match cached.iter_mut().find(|(window, _)| *window == layer.window) {
                Some((_, elements)) => *elements += layer.row_elements,
                None => cached.push((layer.window, layer.row_elements)),
            }
        }
        let (early, late) = shape.layers.split_at(split);
        Ok(Self {
            setting: *setting,
            whole: Work::of(&shape.layers, d),
            early: Work::of(early, d),
            late: Work::of(late, d),
            filled,
            scored,
            query_flops,
            cached,
            state_elements: shape.layers.iter().map(|layer| layer.state_elements).sum(),
            stream_width: inputs,
            extra_weights: shape.extra_weights,
            output_weights: d * shape.vocab_size as f64,
            vocab_size: shape.vocab_size as f64,
            // Stream in and out, and the widest point of a layer: what its matrices put out together.
            peak_row_elements: 2.0 * shape.stream_width as f64
                + shape.layers.iter().map(|layer| layer.weights / d).fold(0.0, f64::max),
            map_elements,
        })
    }

    /// Returns the setting that is priced.
    pub fn setting(&self) -> &Setting {
        &self.setting
    }

    /// Returns what the step costs with every row exact, in one call.
    pub fn exact(&self, step: &Step) -> Cost {
        let bytes = self.setting.element_bytes;
        let (from, to) = (step.cached_tokens, step.cached_tokens.saturating_add(step.step_tokens));
        let mut cost = Cost { layer_calls: self.whole.layers, ..Cost::default() };
        cost.add(Part::EarlyMatmul, self.extra(to - from));
        cost.add(Part::EarlyMatmul, self.whole.matmul((to - from) as f64, 1.0, bytes));
        cost.add(Part::EarlyAttention, self.whole.attention(from, to, 1.0, bytes));
        cost.add(Part::Output, self.output(step));
        cost
    }

    /// Returns what the step costs as it was decided; `exact_spans` names bulk rows that run exactly all the same,
    /// ascending and apart. A decision to fill nothing costs what [`Pricer::exact`] says.
    pub fn filled(&self, step: &Step, decision: &Decision, exact_spans: &[(u64, u64)]) -> Cost {
        if decision.rows_filled() == 0 {
            return self.exact(step);
        }
        let bytes = self.setting.element_bytes;
        let (begin, start, end, step_end) =
            (step.cached_tokens, decision.fill_start, decision.fill_end, decision.step_end);
        let bulk = end - start;
        let chunks = self.chunks(bulk) as f64;
        let head_calls = if start > begin { 1.0 } else { 0.0 };
        let tail_calls = if step_end > end { 1.0 } else { 0.0 };
        let mut cost = Cost::default();

        cost.add(Part::EarlyMatmul, self.extra(step_end - begin));
        cost.add(
            Part::EarlyMatmul,
            self.early.matmul((step_end - begin) as f64, head_calls + chunks + tail_calls, bytes),
        );
        cost.add(Part::EarlyAttention, self.early.attention(begin, step_end, 1.0, bytes));
        let exact_rows = (start - begin) + (step_end - end);
        cost.add(Part::LateMatmul, self.late.matmul(exact_rows as f64, head_calls + tail_calls, bytes));
        cost.add(Part::LateAttention, self.late.attention(begin, start, 1.0, bytes));
        cost.add(Part::LateAttention, self.late.attention(end, step_end, 1.0, bytes));
        cost.layer_calls += (head_calls + tail_calls) * self.whole.layers + chunks * self.early.layers;

        for group in &self.filled {
            let rows = (end - first_needed_row(start, end, group.window)) as f64;
            cost.add(
                Part::Fill,
                Amount {
                    flops: rows * 2.0 * group.weights,
                    bytes: bytes * (chunks * group.weights + rows * (group.row_elements + self.stream_width)),
                },
            );
            cost.add(Part::FillScan, Amount { flops: rows * group.scan_flops, bytes: 0.0 });
            cost.layer_calls += chunks * group.layers;
        }

        let mut named = 0;
        for &(from, to) in exact_spans {
            let (from, to) = (from.clamp(start, end), to.clamp(start, end));
            named += to - from;
            cost.add(Part::SelectedAttention, self.late.attention(from, to, 1.0, bytes));
        }
        let share = self.setting.selected_share;
        let selected = named as f64 + share * (bulk - named) as f64;
        if share > 0.0 {
            let left = share * ((bulk - named) as f64 / bulk as f64);
            cost.add(Part::SelectedAttention, self.late.attention(start, end, left, bytes));
            cost.add(Part::Scoring, self.scoring(step_end - end, start, end));
        }
        if selected > 0.0 {
            cost.add(Part::SelectedMatmul, self.late.matmul(selected, 1.0, bytes));
            cost.layer_calls += self.late.layers;
        }
        cost.add(Part::Output, self.output(step));
        cost
    }

    /// Scores of the bulk by `tail` rows: two passes of products (log-sum-exp, then the largest probability), each half
    /// of what attention does with a pair.
    fn scoring(&self, tail: u64, start: u64, end: u64) -> Amount {
        let bytes = self.setting.element_bytes;
        let tail = tail as f64;
        let mut amount = Amount { flops: tail * self.query_flops, bytes: 0.0 };
        for keys in &self.scored.keys {
            let seen = (end - first_needed_row(start, end, keys.visible)) as f64;
            amount.flops += tail * seen * keys.pair_flops;
            amount.bytes += bytes * (2.0 * seen * keys.row_elements + tail * keys.pair_flops / 4.0);
        }
        amount
    }

    fn extra(&self, rows: u64) -> Amount {
        let rows = rows as f64;
        Amount {
            flops: rows * 2.0 * self.extra_weights,
            bytes: self.setting.element_bytes * self.extra_weights.min(rows * self.extra_weights),
        }
    }

    fn output(&self, step: &Step) -> Amount {
        let rows = step.logits_to_keep.min(step.step_tokens) as f64;
        let weights = if rows > 0.0 { self.output_weights } else { 0.0 };
        Amount {
            flops: rows * 2.0 * self.output_weights,
            bytes: self.setting.element_bytes * (weights + rows * self.vocab_size),
        }
    }

    /// Returns the number of calls that a bulk of so many rows takes.
    pub fn chunks(&self, bulk: u64) -> u64 {
        self.setting.chunk_tokens.map_or(1, |chunk| bulk.div_ceil(chunk))
    }

    /// Returns the bytes of the maps.
    pub fn map_bytes(&self) -> f64 {
        self.map_elements * self.setting.map_element_bytes
    }

    /// Returns the bytes of the cache after `tokens` rows, filled or not.
    pub fn cache_bytes(&self, tokens: u64) -> f64 {
        let rows = |window: Option<u64>| window.map_or(tokens, |window| tokens.min(window)) as f64;
        let kept: f64 = self.cached.iter().map(|(window, elements)| elements * rows(*window)).sum();
        (kept + self.state_elements) * self.setting.element_bytes
    }

    /// Returns the peak bytes of activations of the exact step.
    pub fn exact_activation_bytes(&self, step: &Step) -> f64 {
        step.step_tokens as f64 * self.peak_row_elements * self.setting.element_bytes
    }

    /// Returns the peak bytes of activations as decided, with the stream that selection keeps until the tail is there.
    pub fn filled_activation_bytes(&self, decision: &Decision, step: &Step) -> f64 {
        let bulk = decision.rows_filled();
        if bulk == 0 {
            return self.exact_activation_bytes(step);
        }
        let call =
            self.setting.chunk_tokens.unwrap_or(bulk).min(bulk).max(decision.step_end - decision.fill_end) as f64;
        let kept = if self.setting.selected_share > 0.0 { bulk as f64 * self.stream_width } else { 0.0 };
        (call * self.peak_row_elements.max(2.0 * self.stream_width) + kept) * self.setting.element_bytes
    }

    /// Returns the shortest prompt, nothing cached, for which a fill is predicted to be faster than exact: None when there
    /// is none of up to 2^24 tokens. What a fill saves grows with the prompt, so the length is found by bisection.
    pub fn break_even_tokens(&self, rates: &Rates, step: &Step) -> Result<Option<u64>> {
        let pays = |tokens: u64| -> Result<bool> {
            let step = Step { cached_tokens: 0, step_tokens: tokens, n_ahead: 0, ..*step };
            let decision = decide(&step)?;
            let filled = self.filled(&step, &decision, &[]);
            Ok(decision.rows_filled() > 0 && rates.seconds(&filled) < rates.seconds(&self.exact(&step)))
        };
        let (mut no, mut yes) = (0, 1);
        while !pays(yes)? {
            no = yes;
            yes *= 2;
            if yes > LONGEST_PROMPT {
                return Ok(None);
            }
        }
        while yes - no > 1 {
            let middle = no + (yes - no) / 2;
            if pays(middle)? {
                yes = middle;
            } else {
                no = middle;
            }
        }
        Ok(Some(yes))
    }
}

/// Returns the number of (query, key) pairs of the rows `[from, to)`: the sum of min(p + 1, window).
fn visible_keys(from: u64, to: u64, window: Option<u64>) -> f64 {
    // Rows before the window is full see p + 1 keys each, the others `window`.
    let full = window.unwrap_or(u64::MAX).clamp(from, to);
    let triangle = |rows: u64| rows as f64 * (rows as f64 + 1.0) / 2.0;
    triangle(full) - triangle(from) + (to - full) as f64 * window.unwrap_or(0) as f64
}

/// A prefill to be priced, as a JSON document asks for it.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)] // as in Step, Fill and Setting
pub struct Question {
    pub prompt_tokens: u64,
    #[serde(default)]
    pub cached_tokens: u64,
    #[serde(default)]
    pub output_tokens: u64,
    #[serde(default)]
    pub split: usize,
    #[serde(default = "default_tail")]
    pub tail: u64,
    #[serde(default = "default_head")]
    pub head: u64,
    #[serde(default = "default_min_bulk")]
    pub min_bulk: u64,
    #[serde(default = "one")]
    pub tile: u64,
    #[serde(default = "one")]
    pub features: u64,
    #[serde(default)]
    pub fused_rank: Option<u64>,
    #[serde(default)]
    pub selected_share: f64,
    #[serde(default)]
    pub chunk_tokens: Option<u64>,
    #[serde(default = "two_bytes")]
    pub element_bytes: f64,
    #[serde(default = "two_bytes")]
    pub map_element_bytes: f64,
    #[serde(default)]
    pub rates: Option<Rates>,
}

pub(crate) fn default_tail() -> u64 {
    512
}

pub(crate) fn default_head() -> u64 {
    4
}

pub(crate) fn default_min_bulk() -> u64 {
    256
}

pub(crate) fn one() -> u64 {
    1
}

pub(crate) fn two_bytes() -> f64 {
    2.0
}

impl Question {
    /// Returns the question a JSON document asks.
    pub fn from_json(json: &str) -> Result<Self> {
        let question: Self = serde_json::from_str(json).map_err(|error| refuse(format!("question: {error}")))?;
        let Self { prompt_tokens, cached_tokens, output_tokens, .. } = question;
        if prompt_tokens > LONGEST_PROMPT || cached_tokens >= prompt_tokens || output_tokens > LONGEST_PROMPT {
            return Err(refuse(format!(
                "prompt_tokens is {prompt_tokens}, of which {cached_tokens} are cached, and output_tokens {output_tokens}; \
                 expected a prompt of 1 to {LONGEST_PROMPT} tokens with at least one to compute, and as many output \
                 tokens at most"
            )));
        }
        if let Some(rates) = &question.rates {
            rates.check()?;
        }
        Ok(question)
    }

    /// Returns the step to price.
    pub fn step(&self) -> Step {
        Step {
            cached_tokens: self.cached_tokens,
            step_tokens: self.prompt_tokens - self.cached_tokens,
            n_ahead: 0,
            tail: self.tail,
            head: self.head,
            min_bulk: self.min_bulk,
            tile: self.tile,
            logits_to_keep: 1,
        }
    }

    /// Returns how it is to be run.
    pub fn setting(&self) -> Setting {
        let Self { split, features, fused_rank, .. } = *self;
        Setting {
            fill: Fill { split, features, fused_rank },
            selected_share: self.selected_share,
            chunk_tokens: self.chunk_tokens,
            element_bytes: self.element_bytes,
            map_element_bytes: self.map_element_bytes,
        }
    }

    /// Returns the answer for this model.
    pub fn report(&self, shape: &Shape) -> Result<Report> {
        let pricer = Pricer::new(shape, &self.setting())?;
        report(&pricer, &self.step(), self.prompt_tokens + self.output_tokens, self.rates.as_ref())
    }
}

/// What a prefill is predicted to cost, ready for JSON. Seconds are None where no device's rates are known; shares are
/// then shares of the operations.
#[derive(Debug, Clone, Serialize)]
#[allow(missing_docs)]
pub struct Report {
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub split: usize,
    pub rows_filled: u64,
    /// "fill", or why the prompt runs exactly.
    pub reason: String,
    /// Where the rates come from.
    pub rates: Option<String>,
    pub exact: Side,
    pub filled: Side,
    pub flops_ratio: f64,
    pub ttft_ratio: Option<f64>,
    pub break_even_tokens: Option<u64>,
    pub map_bytes: f64,
    /// The share of the filled prefill that is early layers' attention and scans: filling cannot help it.
    pub early_attention_share: f64,
    /// The ratio if late layers cost nothing at all: what no map can exceed at this split and length.
    pub ratio_limit: f64,
}

/// One way of running a prefill.
#[derive(Debug, Clone, Serialize)]
#[allow(missing_docs)]
pub struct Side {
    pub flops: f64,
    pub bytes_moved: f64,
    pub seconds: Option<f64>,
    pub overhead_seconds: Option<f64>,
    pub cache_bytes: f64,
    pub activation_bytes: f64,
    pub parts: Vec<PartReport>,
}

/// One part of it.
#[derive(Debug, Clone, Serialize)]
#[allow(missing_docs)]
pub struct PartReport {
    pub name: &'static str,
    pub flops: f64,
    pub bytes: f64,
    pub seconds: Option<f64>,
    pub share: f64,
}

/// Returns what a step is predicted to cost, exact and filled; `total_tokens` are the rows that the cache must hold.
pub fn report(pricer: &Pricer, step: &Step, total_tokens: u64, rates: Option<&Rates>) -> Result<Report> {
    let decision = decide(step)?;
    let (exact, filled) = (pricer.exact(step), pricer.filled(step, &decision, &[]));
    let known = rates.is_some();
    let operations = Rates::operations();
    let rates = rates.unwrap_or(&operations);
    let side = |cost: &Cost, activation_bytes: f64| {
        let total = rates.seconds(cost);
        let part = |part: &Part| {
            let (amount, seconds) = (cost.of(*part), rates.part_seconds(cost, *part));
            PartReport {
                name: part.name(),
                flops: amount.flops,
                bytes: amount.bytes,
                seconds: known.then_some(seconds),
                share: seconds / total,
            }
        };
        Side {
            flops: cost.flops(),
            bytes_moved: cost.bytes(),
            seconds: known.then_some(total),
            overhead_seconds: known.then_some(rates.overhead_seconds(cost)),
            cache_bytes: pricer.cache_bytes(total_tokens),
            activation_bytes,
            parts: Part::ALL.iter().map(part).filter(|part| part.flops > 0.0).collect(),
        }
    };
    let (exact_seconds, filled_seconds) = (rates.seconds(&exact), rates.seconds(&filled));
    let kept = [Part::EarlyMatmul, Part::EarlyAttention, Part::Output];
    let unavoidable: f64 = kept.iter().map(|part| rates.part_seconds(&filled, *part)).sum();
    Ok(Report {
        prompt_tokens: step.cached_tokens + step.step_tokens,
        cached_tokens: step.cached_tokens,
        split: pricer.setting.fill.split,
        rows_filled: decision.rows_filled(),
        reason: decision.reason.to_string(),
        rates: known.then(|| rates.source.clone()),
        exact: side(&exact, pricer.exact_activation_bytes(step)),
        filled: side(&filled, pricer.filled_activation_bytes(&decision, step)),
        flops_ratio: exact.flops() / filled.flops(),
        ttft_ratio: known.then_some(exact_seconds / filled_seconds),
        break_even_tokens: pricer.break_even_tokens(rates, step)?,
        map_bytes: pricer.map_bytes(),
        early_attention_share: rates.part_seconds(&filled, Part::EarlyAttention) / filled_seconds,
        ratio_limit: exact_seconds / unavoidable,
    })
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

    fn step(prompt: u64) -> Step {
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

    fn setting(split: usize) -> Setting {
        Setting { fill: Fill { split, features: 1, fused_rank: None }, ..Setting::default() }
    }

    fn rates() -> Rates {
        Rates {
            matmul_flops_per_s: 1e12,
            attention_flops_per_s: 5e11,
            memory_bytes_per_s: 1e11,
            layer_call_s: 1e-5,
            source: "a test".to_owned(),
        }
    }

    #[test]
    fn a_family_and_a_shape_of_the_same_model_cost_the_same() {
        let description = r#"{"model_type":"llama","hidden_size":576,"vocab_size":49152,"layers":[{"count":30,
            "mixer":{"kind":"attention","num_attention_heads":9,"num_key_value_heads":3,"head_dim":64},
            "mlp":{"kind":"dense","intermediate_size":1536}}]}"#;
        let family = Shape::of_model(&Model::from_description(description).unwrap());
        assert_eq!(family, shape(&[None; 30]));
    }

    #[test]
    fn an_indexer_caps_attention_and_pays_for_its_choice() {
        let json = |indexer: &str| {
            format!(
                r#"{{"model_type":"x","hidden_size":64,"vocab_size":10,"layers":[{{"count":2,"mixer":{{"kind":"attention",
                "num_attention_heads":4,"num_key_value_heads":2,"head_dim":16{indexer}}},
                "mlp":{{"kind":"dense","intermediate_size":64}}}}]}}"#
            )
        };
        let plain = Shape::of_model(&Model::from_description(&json("")).unwrap());
        let indexed = Shape::of_model(
            &Model::from_description(&json(
                r#","indexer":{"num_heads":2,"head_dim":8,"budget":1024,"compress_ratio":4}"#,
            ))
            .unwrap(),
        );
        let attention = |shape: &Shape, prompt| {
            Pricer::new(shape, &setting(1)).unwrap().exact(&step(prompt)).of(Part::EarlyAttention).flops
        };
        // 1,000 rows are within the budget: the same pairs, and the scores of blocks, 2 * 2 * 8 / 4 a pair, besides.
        let pairs = visible_keys(0, 1000, None);
        assert_eq!(attention(&indexed, 1000), attention(&plain, 1000) + 2.0 * 8.0 * pairs);
        assert!(attention(&indexed, 100_000) < 0.2 * attention(&plain, 100_000));
    }

    #[test]
    fn parts_and_shares_by_hand() {
        let shape = shape(&[None, None, Some(300), None]);
        let selecting = Setting { selected_share: 0.25, chunk_tokens: Some(1000), ..setting(2) };
        let pricer = Pricer::new(&shape, &selecting).unwrap();
        let step = step(4096);
        let decision = decide(&step).unwrap();
        let cost = pricer.filled(&step, &decision, &[]);
        let (bulk, weights) = (decision.rows_filled() as f64, shape.layers[0].weights);
        assert_eq!(bulk, 4096.0 - 512.0 - 4.0);
        assert_eq!(cost.of(Part::EarlyMatmul).flops, 4096.0 * 2.0 * 2.0 * weights);
        assert_eq!(cost.of(Part::LateMatmul).flops, 516.0 * 2.0 * 2.0 * weights);
        assert_eq!(cost.of(Part::SelectedMatmul).flops, 0.25 * bulk * 2.0 * 2.0 * weights);
        // Layer 2 projects its last 300 bulk rows, layer 3 maps and projects all of them.
        let (map, project) = (576.0 * 576.0, 576.0 * 384.0);
        assert_eq!(cost.of(Part::Fill).flops, 2.0 * (300.0 * project + bulk * (map + project)));
        assert_eq!(pricer.map_bytes(), 2.0 * (map + 576.0));
        // Four layers score (0 to 3): the windowed one 300 rows, the others all of them; queries of layer 3 are predicted.
        let pair = 4.0 * 576.0;
        let scores = 512.0 * pair * (3.0 * bulk + 300.0);
        let queries = 512.0 * (4.0 * 2.0 * 576.0 * 576.0 + 2.0 * map);
        assert_eq!(cost.of(Part::Scoring).flops, scores + queries);
        // Head and tail go through 4 layers, each of 4 chunks through 2 and 2 filled ones, the selected rows through 2.
        assert_eq!(cost.layer_calls, 2.0 * 4.0 + 4.0 * (2.0 + 2.0) + 2.0);
        // Keys and values of three full layers and of 300 rows of the windowed one.
        assert_eq!(pricer.cache_bytes(4096), 2.0 * 384.0 * (3.0 * 4096.0 + 300.0));
        assert_eq!(pricer.cache_bytes(10), 2.0 * 384.0 * 40.0);
        // Named rows alone: no scores, and each row's own keys.
        let naming = Pricer::new(&shape, &setting(2)).unwrap();
        let named = naming.filled(&step, &decision, &[(0, 14), (100, 200)]);
        assert_eq!(named.of(Part::Scoring).flops, 0.0);
        assert_eq!(named.of(Part::SelectedMatmul).flops, 110.0 * 2.0 * 2.0 * weights);
        let seen = visible_keys(4, 14, None) + visible_keys(100, 200, None);
        assert_eq!(named.of(Part::SelectedAttention).flops, 2.0 * pair * seen);
    }

    #[test]
    fn a_question_in_json_is_the_same_question() {
        let asked = Question::from_json(r#"{"prompt_tokens": 8192, "split": 15}"#).unwrap();
        assert_eq!(asked.step(), step(8192));
        let (shape, pricer) = (shape(&[None; 30]), Pricer::new(&shape(&[None; 30]), &setting(15)).unwrap());
        let expected = report(&pricer, &step(8192), 8192, None).unwrap();
        assert_eq!(asked.report(&shape).unwrap().flops_ratio, expected.flops_ratio);
        for (bad, words) in [
            ("{}", "question: missing field `prompt_tokens`"),
            (r#"{"prompt_tokens": 1, "colour": 2}"#, "question: unknown field `colour`"),
            (r#"{"prompt_tokens": 0}"#, "prompt_tokens is 0"),
            (r#"{"prompt_tokens": 9, "cached_tokens": 9}"#, "of which 9 are cached"),
            (r#"{"prompt_tokens": 99999999999}"#, "prompt_tokens is 99999999999"),
        ] {
            let error = Question::from_json(bad).unwrap_err().to_string();
            assert!(error.contains(words), "{error} lacks {words}");
        }
    }

    #[test]
    fn a_report_adds_up_and_says_what_filling_cannot_help() {
        let shape = shape(&[None; 30]);
        let pricer = Pricer::new(&shape, &setting(15)).unwrap();
        for prompt in [300, 8192, 131_072] {
            for rates in [None, Some(&rates())] {
                let report = report(&pricer, &step(prompt), prompt + 100, rates).unwrap();
                for side in [&report.exact, &report.filled] {
                    let overhead = side.overhead_seconds.unwrap_or(0.0) / side.seconds.unwrap_or(1.0);
                    let shares: f64 = side.parts.iter().map(|part| part.share).sum();
                    assert!((shares + overhead - 1.0).abs() < 1e-12);
                    assert_eq!(side.seconds.is_some(), rates.is_some());
                }
                let ratio = report.ttft_ratio.unwrap_or(report.flops_ratio);
                assert!(ratio <= report.ratio_limit);
                assert_eq!(report.reason == "fill", prompt > 300);
            }
        }
        let early = |prompt| report(&pricer, &step(prompt), prompt, Some(&rates())).unwrap().early_attention_share;
        assert!(early(131_072) > 0.9 && early(4096) < 0.5, "{} and {}", early(131_072), early(4096));
    }

    #[test]
    fn a_part_takes_the_longer_of_its_operations_and_its_bytes() {
        let shape = shape(&[None; 4]);
        let pricer = Pricer::new(&shape, &setting(2)).unwrap();
        let cost = pricer.exact(&step(1));
        let slow_memory = Rates { memory_bytes_per_s: 1.0, ..rates() };
        assert_eq!(slow_memory.part_seconds(&cost, Part::Output), cost.of(Part::Output).bytes);
        let fast_memory = Rates { memory_bytes_per_s: f64::INFINITY, ..rates() };
        assert_eq!(fast_memory.part_seconds(&cost, Part::Output), cost.of(Part::Output).flops / 1e12);
        assert_eq!(rates().overhead_seconds(&cost), 4.0 * 1e-5);
        assert_eq!(Rates::operations().seconds(&cost), cost.flops());
    }

    #[test]
    fn the_break_even_length_is_where_filling_begins_to_pay() {
        let shape = shape(&[None; 30]);
        let pricer = Pricer::new(&shape, &setting(15)).unwrap();
        // Operations alone: as soon as min_bulk rows can be filled.
        let operations = Rates::operations();
        assert_eq!(pricer.break_even_tokens(&operations, &step(1)).unwrap(), Some(512 + 4 + 256));
        // Overhead moves it up; the length before it does not pay.
        let slow = Rates { layer_call_s: 2e-3, ..rates() };
        let tokens = pricer.break_even_tokens(&slow, &step(1)).unwrap().unwrap();
        assert!(tokens > 772);
        let gain = |tokens| report(&pricer, &step(tokens), tokens, Some(&slow)).unwrap().ttft_ratio.unwrap();
        assert!(gain(tokens) > 1.0 && gain(tokens - 1) <= 1.0 && gain(10 * tokens) > 1.0);
        // Every row selected: nothing is saved, at any length.
        let all = Setting { selected_share: 1.0, ..setting(15) };
        assert_eq!(Pricer::new(&shape, &all).unwrap().break_even_tokens(&operations, &step(1)).unwrap(), None);
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        let shape = shape(&[None; 4]);
        let good = setting(2);
        for (bad, words) in [
            (setting(4), "split is 4; the model has layers 0 to 3"),
            (Setting { fill: Fill { features: 0, ..good.fill }, ..good }, "features is 0"),
            (Setting { selected_share: 1.5, ..good }, "selected_share is 1.5; expected 0 to 1"),
            (Setting { selected_share: f64::NAN, ..good }, "selected_share is NaN"),
            (Setting { chunk_tokens: Some(0), ..good }, "chunk_tokens is 0"),
            (Setting { element_bytes: 0.0, ..good }, "element_bytes is 0"),
            (Setting { map_element_bytes: f64::NAN, ..good }, "map_element_bytes is NaN"),
        ] {
            let error = Pricer::new(&shape, &bad).unwrap_err();
            assert!(error.to_string().contains(words), "{error} lacks {words}");
        }
        let json = |rates: &Rates| serde_json::to_string(rates).unwrap();
        assert_eq!(Rates::from_json(&json(&rates())).unwrap(), rates());
        for (bad, words) in [
            ("{}".to_owned(), "rates: missing field"),
            (json(&Rates { matmul_flops_per_s: 0.0, ..rates() }), "matmul_flops_per_s is 0"),
            (json(&Rates { attention_flops_per_s: -1.0, ..rates() }), "attention_flops_per_s is -1"),
            (json(&Rates { memory_bytes_per_s: 0.0, ..rates() }), "memory_bytes_per_s is 0"),
            (json(&Rates { layer_call_s: -1.0, ..rates() }), "layer_call_s is -1"),
        ] {
            let error = Rates::from_json(&bad).unwrap_err().to_string();
            assert!(error.contains(words), "{error} lacks {words}");
        }
        assert!(Rates::of_device("abacus").unwrap_err().to_string().contains("expected one of a100, h100"));
        assert!(Rates::of_device("h100").unwrap().source.contains("70% of its data sheet's"));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(1024) })]

        #[test]
        fn the_parts_add_up(
            windows in prop::collection::vec(prop_oneof![Just(None), (1u64..5000).prop_map(Some)], 1..12),
            split in any::<prop::sample::Index>(), prompt in 1u64..20_000, tail in 1u64..3000, head in 0u64..9,
            features in 1u64..5, fused_rank in prop::option::of(1u64..300),
        ) {
            let shape = shape(&windows);
            let split = split.index(windows.len());
            let step = Step { tail, head, ..step(prompt) };
            let fill = Fill { split, features, fused_rank };
            let cost = prefill_cost(&shape, &step, &fill).unwrap();
            prop_assert!(cost.exact_flops.is_finite() && cost.filled_flops > 0.0 && cost.fill_flops >= 0.0);
            prop_assert!(cost.fill_flops < cost.filled_flops);
            if cost.decision.rows_filled() == 0 {
                prop_assert_eq!(cost.exact_flops, cost.filled_flops);
                return Ok(());
            }
            // What a fill saves is the late layers' exact work on the bulk rows, less the fill itself.
            let (start, end) = (cost.decision.fill_start, cost.decision.fill_end);
            let saved: f64 = shape.layers[split..].iter()
                .map(|layer| (end - start) as f64 * 2.0 * layer.weights
                    + layer.pair_flops * visible_keys(start, end, layer.visible)).sum();
            let expected = cost.exact_flops - saved + cost.fill_flops;
            prop_assert!((cost.filled_flops - expected).abs() <= 1e-9 * cost.exact_flops);
        }

        #[test]
        fn more_rows_selected_named_or_prompted_never_cost_less(
            windows in prop::collection::vec(prop_oneof![Just(None), (1u64..5000).prop_map(Some)], 1..8),
            split in any::<prop::sample::Index>(), prompt in 1u64..60_000, more in 0u64..5000,
            share in 0.0f64..0.5, extra in 0.0f64..0.5, chunk in prop::option::of(1u64..5000), from in 0u64..60_000,
        ) {
            let shape = shape(&windows);
            let base = Setting { selected_share: share, chunk_tokens: chunk, ..setting(split.index(windows.len())) };
            let pricer = Pricer::new(&shape, &base).unwrap();
            let rates = rates();
            let seconds = |pricer: &Pricer, prompt, spans: &[(u64, u64)]| {
                let step = step(prompt);
                rates.seconds(&pricer.filled(&step, &decide(&step).unwrap(), spans))
            };
            let now = seconds(&pricer, prompt, &[]);
            let tolerance = 1.0 - 1e-9;
            let selecting = Pricer::new(&shape, &Setting { selected_share: share + extra, ..base }).unwrap();
            prop_assert!(seconds(&selecting, prompt, &[]) >= now * tolerance);
            let exact = |prompt| rates.seconds(&pricer.exact(&step(prompt)));
            prop_assert!(exact(prompt + more) >= exact(prompt));
            if share == 0.0 {
                prop_assert!(seconds(&pricer, prompt, &[(from, from + more)]) >= now * tolerance);
            }
        }
    }
}
