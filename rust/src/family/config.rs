//! A `config.json`, field by field: absent fields take the configuration class's default, wrong ones are named.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::{MAX_DIMENSION, MAX_LAYERS, refuse};
use crate::error::{Error, Result, quoted};

/// The largest config that is read: real ones have a few KiB.
const MAX_CONFIG_BYTES: usize = 4 << 20;
/// The longest window or context that is believed.
const MAX_ROWS: u64 = 1 << 40;

/// The fields of one config, or of the text part of one.
pub(super) struct Config<'a> {
    fields: &'a Map<String, Value>,
    /// "" or "text_config.", for messages.
    prefix: &'static str,
}

/// Returns the JSON object that a config's text holds.
pub(super) fn parse(text: &str) -> Result<Map<String, Value>> {
    let what = || "the config".to_owned();
    if text.len() > MAX_CONFIG_BYTES {
        return Err(refuse(what(), format!("{} bytes long", text.len()), format!("at most {MAX_CONFIG_BYTES} bytes")));
    }
    match serde_json::from_str(&standard_json(text)) {
        Ok(Value::Object(fields)) => Ok(fields),
        Ok(other) => Err(refuse(what(), show(Some(&other)), "a JSON object, the text of a config.json".to_owned())),
        Err(error) => Err(refuse(what(), format!("no valid JSON ({error})"), "the text of a config.json".to_owned())),
    }
}

/// Returns JSON without Python's words for what JSON has no number for: `Infinity`, `-Infinity` and `NaN` become null.
/// Configs on the Hub hold them (`time_step_limit` of Mamba models).
fn standard_json(text: &str) -> Cow<'_, str> {
    if !text.contains("Infinity") && !text.contains("NaN") {
        return Cow::Borrowed(text);
    }
    let (mut out, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(first) = rest.chars().next() {
        let word = ["-Infinity", "Infinity", "NaN"].into_iter().find(|word| rest.starts_with(word));
        let taken = match (first, word) {
            ('"', _) => string_end(rest),
            (_, Some(word)) => {
                out.push_str("null");
                rest = &rest[word.len()..];
                continue;
            }
            _ => first.len_utf8(),
        };
        out.push_str(&rest[..taken]);
        rest = &rest[taken..];
    }
    Cow::Owned(out)
}

/// Returns the bytes of the JSON string at the start of `text`, both quotes included.
fn string_end(text: &str) -> usize {
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

impl<'a> Config<'a> {
    pub(super) fn new(fields: &'a Map<String, Value>, prefix: &'static str) -> Self {
        Self { fields, prefix }
    }

    /// Returns a field's value, null included.
    pub(super) fn get(&self, name: &str) -> Option<&'a Value> {
        self.fields.get(name)
    }

    /// Returns whether a field is there and neither null nor false.
    pub(super) fn is_set(&self, name: &str) -> bool {
        !matches!(self.get(name), None | Some(Value::Null | Value::Bool(false)))
    }

    /// Returns the error that a field's value is not what was expected.
    pub(super) fn unexpected(&self, name: &str, expected: impl Into<String>) -> Error {
        self.conflict(name, show(self.get(name)), expected.into())
    }

    /// Returns the error that a field, or what was derived from it, does not fit the others.
    pub(super) fn conflict(&self, name: &str, found: String, expected: String) -> Error {
        refuse(format!("{}{name}", self.prefix), found, expected)
    }

    /// Returns the first of several names of one field that the config has: a class's own name, then its aliases.
    pub(super) fn named(&self, names: &[&'static str]) -> &'static str {
        names.iter().copied().find(|name| self.get(name).is_some()).unwrap_or(names[0])
    }

    /// Returns a whole number of at least `least`.
    fn whole(&self, name: &str, default: u64, least: u64, most: u64) -> Result<u64> {
        let Some(value) = self.get(name) else { return Ok(default) };
        value
            .as_u64()
            .filter(|value| (least..=most).contains(value))
            .ok_or_else(|| self.unexpected(name, format!("a whole number, {least} to {most}")))
    }

    /// Returns a count or width of at least 1.
    pub(super) fn count(&self, name: &str, default: u64) -> Result<u64> {
        self.whole(name, default, 1, MAX_DIMENSION)
    }

    /// Returns a count or width that may be 0, as it is where the config says null.
    pub(super) fn size(&self, name: &str, default: u64) -> Result<u64> {
        if self.get(name) == Some(&Value::Null) { Ok(0) } else { self.whole(name, default, 0, MAX_DIMENSION) }
    }

    /// Returns a count or width; None where the config says null, `default` where it says nothing.
    pub(super) fn optional(&self, name: &str, default: Option<u64>) -> Result<Option<u64>> {
        match self.get(name) {
            None => Ok(default),
            Some(Value::Null) => Ok(None),
            Some(_) => self.count(name, 1).map(Some),
        }
    }

    /// Returns a number of rows, which may be far larger than any width; None as in [`Config::optional`].
    pub(super) fn rows(&self, name: &str, default: Option<u64>) -> Result<Option<u64>> {
        match self.get(name) {
            None => Ok(default),
            Some(Value::Null) => Ok(None),
            Some(_) => self.whole(name, 1, 1, MAX_ROWS).map(Some),
        }
    }

    /// Returns a flag; null is false, as it is to Python.
    pub(super) fn flag(&self, name: &str, default: bool) -> Result<bool> {
        match self.get(name) {
            None => Ok(default),
            Some(Value::Bool(value)) => Ok(*value),
            Some(Value::Null) => Ok(false),
            Some(_) => Err(self.unexpected(name, "true or false")),
        }
    }

    /// Returns a positive number; None where the config says null.
    pub(super) fn factor(&self, name: &str, default: f64) -> Result<Option<f64>> {
        match self.get(name) {
            None => Ok(Some(default)),
            Some(Value::Null) => Ok(None),
            Some(value) => match value.as_f64() {
                Some(value) if value > 0.0 => Ok(Some(value)),
                _ => Err(self.unexpected(name, "a number above 0")),
            },
        }
    }

    /// Returns a list of whole numbers below `end`; None where the config has none.
    pub(super) fn indices(&self, name: &str, end: u64) -> Result<Option<Vec<u64>>> {
        let expected = || self.unexpected(name, format!("a list of whole numbers below {end}"));
        match self.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Array(values)) => {
                let index = |value: &Value| value.as_u64().filter(|&value| value < end).ok_or_else(expected);
                values.iter().map(index).collect::<Result<_>>().map(Some)
            }
            Some(_) => Err(expected()),
        }
    }

    /// Returns the number of layers.
    pub(super) fn num_hidden_layers(&self, default: u64) -> Result<usize> {
        self.whole("num_hidden_layers", default, 1, MAX_LAYERS as u64).map(|layers| layers as usize)
    }

    /// Returns `layer_types`, one of `allowed` for each layer; None where the config has none.
    pub(super) fn layer_types(&self, layers: usize, allowed: &[&'static str]) -> Result<Option<Vec<&'static str>>> {
        let name = "layer_types";
        let values = match self.get(name) {
            None | Some(Value::Null) => return Ok(None),
            Some(Value::Array(values)) => values,
            Some(_) => return Err(self.unexpected(name, format!("a list of {layers} layer types"))),
        };
        if values.len() != layers {
            let found = format!("a list of {}", values.len());
            let expected = format!("as many as num_hidden_layers, which is {layers}");
            return Err(self.conflict(name, found, expected));
        }
        let kind = |(layer, value): (usize, &Value)| {
            // Names of older configs (configuration_utils.py: _LEGACY_LAYER_TYPE_REMAP).
            let word = match value.as_str() {
                Some("attention") => "full_attention",
                Some("mamba") => "linear_attention",
                Some("qwen_sparse_attention") => "indexed_attention",
                word => word.unwrap_or_default(),
            };
            allowed.iter().copied().find(|&kind| kind == word).ok_or_else(|| {
                let expected = format!("one of {}", allowed.join(", "));
                self.conflict(&format!("{name}[{layer}]"), show(Some(value)), expected)
            })
        };
        values.iter().enumerate().map(kind).collect::<Result<_>>().map(Some)
    }
}

/// Returns a value as a message shows it: short, whatever the config holds.
pub(super) fn show(value: Option<&Value>) -> String {
    match value {
        None => "missing".to_owned(),
        Some(Value::Array(values)) => format!("a list of {}", values.len()),
        Some(Value::Object(_)) => "an object".to_owned(),
        Some(Value::String(text)) => quoted(text),
        Some(other) => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pythons_words_become_null_outside_strings_only() {
        let text = r#"{"a": [0.0, Infinity, -Infinity, NaN], "Infinity": "NaN \" -Infinity", "é": 1}"#;
        let expected = r#"{"a": [0.0, null, null, null], "Infinity": "NaN \" -Infinity", "é": 1}"#;
        assert_eq!(standard_json(text), expected);
        assert!(matches!(standard_json("{}"), Cow::Borrowed(_)));
        assert_eq!(standard_json("NaN \"open"), "null \"open");
    }

    #[test]
    fn long_values_are_cut_in_messages() {
        let fields = parse(&format!(r#"{{"a": "{}", "b": [1, 2], "c": 9e99}}"#, "x".repeat(5000))).unwrap();
        let config = Config::new(&fields, "text_config.");
        let message = config.count("a", 1).unwrap_err().to_string();
        assert!(message.starts_with("text_config.a is \"xxx") && message.len() < 200, "{message}");
        assert_eq!(
            config.count("b", 1).unwrap_err().to_string(),
            "text_config.b is a list of 2; expected a whole number, 1 to 16777216"
        );
        assert!(config.count("c", 1).is_err());
    }
}
