//! Map-file version 1: what the metadata and the tensors of a sound container must say (docs/map-format.md).

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use serde::Serialize;
use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::error::{Error, Fault, Result, quoted};
use crate::header::{Dtype, Header, MAX_DIMENSION, TensorInfo};

/// The most features of a split: a list of empty names would otherwise grow its text tenfold.
const MAX_FEATURES: usize = 16;
/// The keys of the metadata that are no key of the user's own ("x_...").
const KEYS: [&str; 8] = ["credit", "default_split", "fit", "format", "gate", "model", "splits", "version"];
/// The largest free JSON ("model" with its rope parameters, "gate"): parsed, text grows up to 32 times.
const MAX_FREE_JSON_BYTES: usize = 128 << 10;

/// What identifies the model that maps were fitted for.
#[derive(Debug, Clone, PartialEq, serde::Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct Fingerprint {
    pub model_type: String,
    pub name: String,
    pub hidden_size: u64,
    pub num_hidden_layers: u64,
    pub num_attention_heads: u64,
    pub num_key_value_heads: u64,
    pub head_dim: u64,
    pub vocab_size: u64,
    pub layer_types: Vec<String>,
    #[serde(deserialize_with = "Option::deserialize")] // null is a value here; a missing field is an error
    pub sliding_window: Option<u64>,
    pub rope: FreeObject,
    #[serde(deserialize_with = "Option::deserialize")]
    pub quantization: Option<String>,
    /// Hash of fixed weight elements, 64 hex digits.
    #[serde(deserialize_with = "Option::deserialize")]
    pub anchors: Option<String>,
    /// Hash of the tokenizer, 64 hex digits.
    #[serde(deserialize_with = "Option::deserialize")]
    pub tokenizer: Option<String>,
}

/// How the maps were fitted.
#[derive(Debug, Clone, PartialEq, serde::Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct Fit {
    pub rows: u64,
    pub held_out_rows: u64,
    pub head: u64,
    pub window_tokens: u64,
    pub texts: Vec<FitText>,
}

/// One calibration text.
#[derive(Debug, Clone, PartialEq, serde::Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct FitText {
    pub name: String,
    pub sha256: String,
    pub rows: u64,
}

/// What the input of a split's maps predicts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Target {
    Normalized,
    Raw,
    MixerInput,
}

/// The maps of one split layer.
#[derive(Debug, Clone, PartialEq, serde::Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct Split {
    pub split: u64,
    #[serde(deserialize_with = "few_features")]
    pub features: Vec<String>,
    pub target: Target,
    pub lambda: f64,
    /// What the fit chose by held-out KL (features, gains), and the figures it chose by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub choice: Option<FreeObject>,
    pub layers: Vec<SplitLayer>,
}

/// One late layer of a split.
#[derive(Debug, Clone, PartialEq, serde::Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct SplitLayer {
    pub layer: u64,
    pub metrics: Metrics,
}

/// A validated map file's content, less the tensors' values.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct Schema {
    pub format: &'static str,
    pub version: u64,
    pub credit: String,
    pub model: Fingerprint,
    pub fit: Fit,
    pub splits: Vec<Split>,
    pub default_split: u64,
    pub gate: Option<FreeObject>,
    /// The user's own keys ("x_...").
    pub extra: BTreeMap<String, String>,
}

impl Schema {
    /// Returns one JSON document with sorted keys: equal content gives equal text.
    pub fn to_json(&self) -> Result<String> {
        let value = serde_json::to_value(self).map_err(|error| bad("splits", error.to_string()))?;
        Ok(value.to_string())
    }
}

/// Returns the content of a map file of version 1, or the first rule that it breaks.
pub fn validate(header: &Header) -> Result<Schema> {
    let metadata = &header.metadata;
    let text = |key: &'static str| metadata.get(key).map(String::as_str).ok_or(Fault::MissingKey { key });
    let fixed = |key: &'static str, expected: &str| match text(key)? {
        found if found == expected => Ok(()),
        found => Err(bad(key, format!("found {}; this reader knows {expected:?}", quoted(found)))),
    };
    // Format and version first: the file of a later version should be told so, not that a key is unknown.
    fixed("format", "ridgefill")?;
    fixed("version", "1")?;
    if let Some(key) = metadata.keys().find(|key| !KEYS.contains(&key.as_str()) && !key.starts_with("x_")) {
        return Err(Fault::UnknownKey { key: key.clone() }.into());
    }
    let credit = text("credit")?.to_owned();
    if credit.trim().is_empty() {
        return Err(bad("credit", "is empty; it names the method's authors".to_owned()));
    }
    let model = parse_fingerprint(text("model")?)?;
    let fit = parse_fit(text("fit")?)?;
    let splits = parse_splits(text("splits")?, &model)?;
    let default_split = parse_default(text("default_split")?, &splits)?;
    let gate = metadata.get("gate").map(|text| parse_json("gate", text, MAX_FREE_JSON_BYTES)).transpose()?;
    check_tensors(&header.tensors, &splits, &model)?;
    let extra = metadata
        .iter()
        .filter(|(key, _)| key.starts_with("x_"))
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect();
    Ok(Schema { format: "ridgefill", version: 1, credit, model, fit, splits, default_split, gate, extra })
}

fn parse_json<'a, T: Deserialize<'a>>(key: &'static str, text: &'a str, most_bytes: usize) -> Result<T> {
    if text.len() > most_bytes {
        return Err(bad(key, format!("is {} bytes; at most {most_bytes} are read", text.len())));
    }
    serde_json::from_str(text).map_err(|error| bad(key, error.to_string()))
}

fn parse_fingerprint(text: &str) -> Result<Fingerprint> {
    let model: Fingerprint = parse_json("model", text, MAX_FREE_JSON_BYTES)?;
    let sizes = [
        ("hidden_size", model.hidden_size),
        ("num_hidden_layers", model.num_hidden_layers),
        ("num_attention_heads", model.num_attention_heads),
        ("num_key_value_heads", model.num_key_value_heads),
        ("head_dim", model.head_dim),
        ("vocab_size", model.vocab_size),
    ];
    if let Some((field, found)) = sizes.iter().find(|(_, size)| !(1..=MAX_DIMENSION).contains(size)) {
        return Err(bad("model", format!("{field} is {found}; expected 1 to {MAX_DIMENSION}")));
    }
    if model.layer_types.len() as u64 != model.num_hidden_layers {
        return Err(bad(
            "model",
            format!(
                "layer_types has {} entries; num_hidden_layers is {}",
                model.layer_types.len(),
                model.num_hidden_layers
            ),
        ));
    }
    for (field, hash) in [("anchors", &model.anchors), ("tokenizer", &model.tokenizer)] {
        if let Some(found) = hash.as_deref().filter(|hash| !is_sha256(hash)) {
            return Err(bad("model", format!("{field} is {}; expected 64 lower-case hex digits", quoted(found))));
        }
    }
    Ok(model)
}

fn parse_fit(text: &str) -> Result<Fit> {
    let fit: Fit = parse_json("fit", text, usize::MAX)?;
    if let Some(found) = fit.texts.iter().find(|found| !is_sha256(&found.sha256)) {
        let (name, sha256) = (quoted(&found.name), quoted(&found.sha256));
        return Err(bad("fit", format!("text {name} has sha256 {sha256}; expected 64 lower-case hex digits")));
    }
    Ok(fit)
}

fn parse_splits(text: &str, model: &Fingerprint) -> Result<Vec<Split>> {
    let splits: Vec<Split> = parse_json("splits", text, usize::MAX)?;
    if splits.is_empty() {
        return Err(bad("splits", "is empty; a map file holds at least one split".to_owned()));
    }
    if let Some(pair) = splits.windows(2).find(|pair| pair[0].split >= pair[1].split) {
        return Err(bad(
            "splits",
            format!("split {} is followed by {}; expected ascending", pair[0].split, pair[1].split),
        ));
    }
    for entry in &splits {
        let (split, last) = (entry.split, model.num_hidden_layers - 1);
        if split > last {
            return Err(bad("splits", format!("split {split} is past the model's last layer, {last}")));
        }
        if !(0.0..).contains(&entry.lambda) {
            return Err(bad("splits", format!("split {split}: lambda is {}; expected 0 or more", entry.lambda)));
        }
        check_features(&entry.features)?;
        let mut previous = split; // layer S itself needs no map
        for layer in entry.layers.iter().map(|layer| layer.layer) {
            if layer <= previous || layer > last {
                let what = format!(
                    "split {split}: layer {layer} after {previous}; expected ascending, {} to {last}",
                    split + 1
                );
                return Err(bad("splits", what));
            }
            previous = layer;
        }
    }
    Ok(splits)
}

fn parse_default(text: &str, splits: &[Split]) -> Result<u64> {
    let known: Vec<_> = splits.iter().map(|entry| entry.split).collect();
    // Compared as text, so that "+15" and "015" are no second spelling.
    known.iter().copied().find(|split| split.to_string() == text).ok_or_else(|| {
        bad("default_split", format!("is {}; expected one of the file's splits {known:?}", quoted(text)))
    })
}

fn check_features(features: &[String]) -> Result<()> {
    let refuse = |what: String| Err(Fault::BadFeature { what }.into());
    if features.first().map(String::as_str) != Some("stream") {
        return refuse(format!("{features:.8?} must start with \"stream\""));
    }
    for (index, feature) in features.iter().enumerate() {
        if !is_feature(feature) || (index > 0 && feature == "stream") {
            return refuse(format!(
                "{} is unknown; expected stream (once, first), previous:<k>, mean:<0.x>, mlp or mlp:<rank>",
                quoted(feature)
            ));
        }
        if features[..index].contains(feature) {
            return refuse(format!("{} is given twice", quoted(feature)));
        }
    }
    Ok(())
}

fn is_feature(feature: &str) -> bool {
    let digits = |text: &str| !text.is_empty() && text.len() <= 9 && text.bytes().all(|byte| byte.is_ascii_digit());
    let count = |text: &str| digits(text) && !text.starts_with('0');
    match feature.split_once(':') {
        None => matches!(feature, "stream" | "mlp"),
        Some(("previous" | "mlp", number)) => count(number),
        Some(("mean", decay)) => decay.strip_prefix("0.").is_some_and(|rest| digits(rest) && !rest.ends_with('0')),
        Some(_) => false,
    }
}

/// A layer's tensors: what each must be, and when a layer has it. Scales come right behind their codes.
const LAYER_TENSORS: [(&str, TensorCheck, Presence); 13] = [
    ("weight_in", check_weight_in, Presence::Optional),
    ("weight_in_scales", check_scales, Presence::BesideCodes("weight_in")),
    ("weight_out", check_weight_out, Presence::With("weight_in")),
    ("weight_out_scales", check_scales, Presence::BesideCodes("weight_out")),
    ("weight", check_weight, Presence::Without("weight_in")),
    ("weight_scales", check_scales, Presence::BesideCodes("weight")),
    ("bias", check_bias, Presence::Always),
    ("key_gain", check_gain, Presence::Optional),
    ("value_gain", check_gain, Presence::Optional),
    ("scale_basis", check_scale_basis, Presence::Optional),
    ("scale_basis_scales", check_scales, Presence::BesideCodes("scale_basis")),
    ("scale_residual", check_scale_residual, Presence::With("scale_basis")),
    ("state_correction", check_state_correction, Presence::Optional),
];
/// The inputs that share a scale where a matrix is stored as codes.
const CODES_GROUP: u64 = 128;

#[derive(Clone, Copy)]
enum Presence {
    Always,
    Optional,
    /// Just where this other tensor is.
    With(&'static str),
    /// Just where it is not.
    Without(&'static str),
    /// Just where it is, as codes.
    BesideCodes(&'static str),
}

impl Presence {
    /// Returns whether the layer must have the tensor, and whether it may.
    fn in_layer(self, layer: &Layer<'_>) -> (bool, bool) {
        let just_where = |it_is_so: bool| (it_is_so, it_is_so);
        match self {
            Self::Always => (true, true),
            Self::Optional => (false, true),
            Self::With(other) => just_where(layer.found(other).is_some()),
            Self::Without(other) => just_where(layer.found(other).is_none()),
            Self::BesideCodes(other) => just_where(layer.found(other).is_some_and(|codes| codes.dtype == Dtype::I8)),
        }
    }
}

/// What a tensor of a late layer is checked against.
struct Layer<'a> {
    features: &'a [String],
    model: &'a Fingerprint,
    /// The layer's tensors before it, by part.
    checked: Vec<(&'static str, &'a TensorInfo)>,
}

impl Layer<'_> {
    fn found(&self, part: &str) -> Option<&TensorInfo> {
        self.checked.iter().find(|(name, _)| *name == part).map(|(_, tensor)| *tensor)
    }

    /// Refuses a matrix that does not take the split's features, or whose width `outputs` refuses (in words: `rest`).
    fn check_inputs(&self, tensor: &TensorInfo, outputs: impl Fn(u64) -> bool, rest: &str) -> Checked {
        check_matrix(tensor)?;
        let (mlp, wide): (Vec<_>, Vec<_>) = self.features.iter().partition(|feature| feature.starts_with("mlp"));
        let width = self.model.hidden_size * wide.len() as u64; // both far below 2^32: the header's caps
        let fits = |inputs: u64| if mlp.is_empty() { inputs == width } else { inputs > width };
        if matches!(tensor.shape.as_slice(), &[inputs, found] if fits(inputs) && outputs(found)) {
            return Ok(());
        }
        let inputs = if mlp.is_empty() { width.to_string() } else { format!("more than {width}") };
        Err(Fault::TensorShape { found: tensor.shape.clone(), expected: format!("[{inputs}, {rest}") })
    }
}

fn check_tensors(tensors: &[TensorInfo], splits: &[Split], model: &Fingerprint) -> Result<()> {
    let mut left: HashMap<&str, &TensorInfo> = tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
    for entry in splits {
        for number in entry.layers.iter().map(|layer| layer.layer) {
            let stem = format!("split.{}.layer.{number}", entry.split);
            let checked = Vec::with_capacity(LAYER_TENSORS.len());
            let mut layer = Layer { features: &entry.features, model, checked };
            for (part, check, presence) in LAYER_TENSORS {
                let (required, allowed) = presence.in_layer(&layer);
                if !allowed {
                    continue; // a part without the one that it belongs to stays behind, and is reported as unexpected
                }
                let name = format!("{stem}.{part}");
                let checked = match left.remove(name.as_str()) {
                    Some(tensor) => check(tensor, &layer).map(|()| layer.checked.push((part, tensor))),
                    None if required => Err(Fault::MissingTensor),
                    None => Ok(()),
                };
                checked.map_err(|fault| Error::from(fault).in_tensor(&name))?;
            }
        }
    }
    // The first in file order, so that the same file always gives the same message.
    match tensors.iter().find(|tensor| left.contains_key(tensor.name.as_str())) {
        Some(tensor) => Err(Error::from(Fault::UnexpectedTensor).in_tensor(&tensor.name)),
        None => Ok(()),
    }
}

type Checked = std::result::Result<(), Fault>;
type TensorCheck = fn(&TensorInfo, &Layer<'_>) -> Checked;

fn check_weight(tensor: &TensorInfo, layer: &Layer<'_>) -> Checked {
    let hidden_size = layer.model.hidden_size;
    layer.check_inputs(tensor, |outputs| outputs == hidden_size, &format!("{hidden_size}]"))
}

fn check_weight_in(tensor: &TensorInfo, layer: &Layer<'_>) -> Checked {
    let hidden_size = layer.model.hidden_size;
    layer.check_inputs(tensor, |rank| (1..=hidden_size).contains(&rank), &format!("rank], rank 1 to {hidden_size}"))
}

fn check_weight_out(tensor: &TensorInfo, layer: &Layer<'_>) -> Checked {
    check_matrix(tensor)?;
    let rank = layer.found("weight_in").and_then(|factor| factor.shape.last()).copied().unwrap_or_default();
    check_shape(tensor, &[rank, layer.model.hidden_size])
}

/// One scale for each group of inputs of each column of the codes, which are the tensor before.
fn check_scales(tensor: &TensorInfo, layer: &Layer<'_>) -> Checked {
    check_dtype(tensor, Dtype::BF16)?;
    let mut shape = layer.checked.last().map(|(_, codes)| codes.shape.clone()).unwrap_or_default();
    if let Some(inputs) = shape.first_mut() {
        *inputs = inputs.div_ceil(CODES_GROUP);
    }
    check_shape(tensor, &shape)
}

fn check_bias(tensor: &TensorInfo, layer: &Layer<'_>) -> Checked {
    check_f32(tensor, &[layer.model.hidden_size])
}

fn check_gain(tensor: &TensorInfo, layer: &Layer<'_>) -> Checked {
    check_f32(tensor, &[layer.model.num_key_value_heads])
}

fn check_scale_basis(tensor: &TensorInfo, layer: &Layer<'_>) -> Checked {
    check_matrix(tensor)?;
    let hidden_size = layer.model.hidden_size;
    match tensor.shape.as_slice() {
        &[rows, rank] if rows == hidden_size && (1..=hidden_size).contains(&rank) => Ok(()),
        _ => Err(Fault::TensorShape {
            found: tensor.shape.clone(),
            expected: format!("[{hidden_size}, rank], rank 1 to {hidden_size}"),
        }),
    }
}

fn check_scale_residual(tensor: &TensorInfo, _: &Layer<'_>) -> Checked {
    check_f32(tensor, &[1])
}

/// What a layer's state is shaped like only the model knows: a matrix for each head.
fn check_state_correction(tensor: &TensorInfo, _: &Layer<'_>) -> Checked {
    match tensor.shape.as_slice() {
        shape @ &[heads, rows, columns] if heads > 0 && rows > 0 && columns > 0 => check_f32(tensor, shape),
        _ => Err(Fault::TensorShape { found: tensor.shape.clone(), expected: "[heads, rows, columns]".to_owned() }),
    }
}

fn check_matrix(tensor: &TensorInfo) -> Checked {
    if matches!(tensor.dtype, Dtype::BF16 | Dtype::F16 | Dtype::F32 | Dtype::I8) {
        return Ok(());
    }
    Err(Fault::TensorDtype { found: tensor.dtype.name(), expected: "BF16, F16, F32 or I8" })
}

fn check_f32(tensor: &TensorInfo, shape: &[u64]) -> Checked {
    check_dtype(tensor, Dtype::F32)?;
    check_shape(tensor, shape)
}

fn check_dtype(tensor: &TensorInfo, dtype: Dtype) -> Checked {
    if tensor.dtype != dtype {
        return Err(Fault::TensorDtype { found: tensor.dtype.name(), expected: dtype.name() });
    }
    Ok(())
}

fn check_shape(tensor: &TensorInfo, shape: &[u64]) -> Checked {
    if tensor.shape != shape {
        return Err(Fault::TensorShape { found: tensor.shape.clone(), expected: format!("{shape:?}") });
    }
    Ok(())
}

/// A difference that does not stop the maps from running, but may cost quality.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Warning {
    pub kind: &'static str,
    pub message: String,
}

/// Compares the fingerprint in a file with a model's (both JSON): the first field that makes the maps unusable is an
/// error, what differs otherwise is returned.
pub fn compare_fingerprints(file_json: &str, model_json: &str) -> Result<Vec<Warning>> {
    let (file, model) = (parse_fingerprint(file_json)?, parse_fingerprint(model_json)?);
    let refuse = |field: &'static str, found: String, expected: String| Fault::Mismatch { field, found, expected };
    let named = |field, found: &str, expected: &str| {
        if found == expected { Ok(()) } else { Err(refuse(field, quoted(found), quoted(expected))) }
    };
    let sized = |field, found: u64, expected: u64| {
        if found == expected { Ok(()) } else { Err(refuse(field, found.to_string(), expected.to_string())) }
    };
    named("model_type", &model.model_type, &file.model_type)?;
    sized("hidden_size", model.hidden_size, file.hidden_size)?;
    sized("num_hidden_layers", model.num_hidden_layers, file.num_hidden_layers)?;
    sized("num_attention_heads", model.num_attention_heads, file.num_attention_heads)?;
    sized("num_key_value_heads", model.num_key_value_heads, file.num_key_value_heads)?;
    sized("head_dim", model.head_dim, file.head_dim)?;
    sized("vocab_size", model.vocab_size, file.vocab_size)?;
    for (layer, (found, expected)) in model.layer_types.iter().zip(&file.layer_types).enumerate() {
        if found != expected {
            let at = |kind: &str| format!("{} at layer {layer}", quoted(kind));
            return Err(refuse("layer_types", at(found), at(expected)).into());
        }
    }
    if model.sliding_window != file.sliding_window {
        let shown = |window: Option<u64>| window.map_or("none".to_owned(), |window| window.to_string());
        return Err(refuse("sliding_window", shown(model.sliding_window), shown(file.sliding_window)).into());
    }
    if let Some((place, found, expected)) = difference(&model.rope.0, &file.rope.0, "rope".to_owned()) {
        return Err(refuse("rope", format!("{place} = {found}"), format!("{place} = {expected}")).into());
    }
    if let (Some(found), Some(expected)) = (&model.tokenizer, &file.tokenizer) {
        named("tokenizer", found, expected)?;
    }

    let mut warnings = Vec::new();
    let mut warn = |kind, message| warnings.push(Warning { kind, message });
    if model.quantization != file.quantization {
        let shown = |scheme: &Option<String>| scheme.as_deref().map_or("no quantization".to_owned(), quoted);
        let (found, expected) = (shown(&model.quantization), shown(&file.quantization));
        warn(
            "quantization",
            format!("the model has {found}, the maps were fitted with {expected}: measure before relying on them"),
        );
    }
    if model.anchors.as_ref().zip(file.anchors.as_ref()).is_some_and(|(found, expected)| found != expected) {
        let message = "the model's weights are not those the maps were fitted for (a finetune or an active adapter): \
                       measure before relying on them, or fit again";
        warn("anchors", message.to_owned());
    }
    if model.name != file.name {
        let (found, expected) = (quoted(&model.name), quoted(&file.name));
        warn("name", format!("the model is {found}, the maps were fitted for {expected}"));
    }
    Ok(warnings)
}

/// Returns the first place at which two documents differ and both values; numbers compare as numbers (1 == 1.0).
fn difference(found: &Value, expected: &Value, place: String) -> Option<(String, String, String)> {
    match (found, expected) {
        (Value::Object(a), Value::Object(b)) => {
            let keys: std::collections::BTreeSet<_> = a.keys().chain(b.keys()).collect();
            keys.into_iter().find_map(|key| {
                let place = format!("{place}.{key}");
                match (a.get(key), b.get(key)) {
                    (Some(a), Some(b)) => difference(a, b, place),
                    (a, b) => Some((place, a.map_or("nothing".to_owned(), cut), b.map_or("nothing".to_owned(), cut))),
                }
            })
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            a.iter().zip(b).enumerate().find_map(|(index, (a, b))| difference(a, b, format!("{place}[{index}]")))
        }
        (a, b) if a == b => None,
        // 10000 and 10000.0; two integers that differ do so whatever float64 makes of them.
        (Value::Number(a), Value::Number(b)) if (a.is_f64() || b.is_f64()) && a.as_f64() == b.as_f64() => None,
        (a, b) => Some((place, cut(a), cut(b))),
    }
}

/// Returns a JSON value for a message, cut to 80 characters.
fn cut(value: &Value) -> String {
    let mut text = value.to_string();
    if let Some((end, _)) = text.char_indices().nth(80) {
        text.truncate(end);
        text.push('…');
    }
    text
}

/// A JSON object of any content, keys unique at every depth.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(transparent)]
pub struct FreeObject(pub Value);

impl<'de> Deserialize<'de> for FreeObject {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        match StrictValue::deserialize(deserializer)?.0 {
            object @ Value::Object(_) => Ok(Self(object)),
            _ => Err(de::Error::custom("expected an object")),
        }
    }
}

/// A JSON value whose objects may not give a key twice (serde_json's own keeps the last in silence).
struct StrictValue(Value);

impl<'de> Deserialize<'de> for StrictValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_any(StrictVisitor).map(Self)
    }
}

struct StrictVisitor;

impl<'de> Visitor<'de> for StrictVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E>(self, value: bool) -> std::result::Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> std::result::Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> std::result::Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> std::result::Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> std::result::Result<Value, E> {
        Ok(value.into())
    }

    fn visit_unit<E>(self) -> std::result::Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> std::result::Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(StrictValue(value)) = access.next_element()? {
            values.push(value);
        }
        Ok(values.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> std::result::Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some((key, StrictValue(value))) = access.next_entry::<String, _>()? {
            if map.contains_key(&key) {
                return Err(given_twice(&key));
            }
            map.insert(key, value);
        }
        Ok(map.into())
    }
}

fn few_features<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Vec<String>, D::Error> {
    struct FeaturesVisitor;
    impl<'de> Visitor<'de> for FeaturesVisitor {
        type Value = Vec<String>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "a list of at most {MAX_FEATURES} feature names")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> std::result::Result<Vec<String>, A::Error> {
            let mut features = Vec::new();
            while let Some(feature) = access.next_element()? {
                if features.len() == MAX_FEATURES {
                    return Err(de::Error::invalid_length(MAX_FEATURES + 1, &self));
                }
                features.push(feature);
            }
            Ok(features)
        }
    }
    deserializer.deserialize_seq(FeaturesVisitor)
}

/// A layer's held-out figures by name.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Metrics(pub BTreeMap<String, Metric>);

/// One figure, or a list of them (quantiles).
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
#[allow(missing_docs)]
pub enum Metric {
    One(f64),
    List(Vec<f64>),
}

impl<'de> Deserialize<'de> for Metrics {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct MetricsVisitor;
        impl<'de> Visitor<'de> for MetricsVisitor {
            type Value = Metrics;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of numbers and lists of numbers")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> std::result::Result<Metrics, A::Error> {
                let mut map = BTreeMap::new();
                while let Some((key, value)) = access.next_entry::<String, Metric>()? {
                    if map.contains_key(&key) {
                        return Err(given_twice(&key));
                    }
                    map.insert(key, value);
                }
                Ok(Metrics(map))
            }
        }
        deserializer.deserialize_map(MetricsVisitor)
    }
}

impl<'de> Deserialize<'de> for Metric {
    // By hand: serde's `untagged` would first hold a list of numbers at 32 bytes each.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct MetricVisitor;
        impl<'de> Visitor<'de> for MetricVisitor {
            type Value = Metric;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number or a list of numbers")
            }

            fn visit_i64<E>(self, value: i64) -> std::result::Result<Metric, E> {
                Ok(Metric::One(value as f64))
            }

            fn visit_u64<E>(self, value: u64) -> std::result::Result<Metric, E> {
                Ok(Metric::One(value as f64))
            }

            fn visit_f64<E>(self, value: f64) -> std::result::Result<Metric, E> {
                Ok(Metric::One(value))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> std::result::Result<Metric, A::Error> {
                let mut values = Vec::new();
                while let Some(value) = access.next_element()? {
                    values.push(value);
                }
                Ok(Metric::List(values))
            }
        }
        deserializer.deserialize_any(MetricVisitor)
    }
}

fn given_twice<E: de::Error>(key: &str) -> E {
    de::Error::custom(format_args!("key {} is given twice", quoted(key)))
}

fn is_sha256(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

fn bad(key: &'static str, what: String) -> Error {
    Fault::BadValue { key, what }.into()
}
