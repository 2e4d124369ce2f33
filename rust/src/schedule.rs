//! What each layer does with bulk rows: the schedule of a fill, checked against the model it is for.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Fault, Result};
use crate::family::{Layer, Model};

/// What every layer of a model does with bulk rows; head and tail rows run through all of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerSchedule {
    /// Hugging Face's `model_type` of the model it was made for.
    pub model_type: String,
    /// The first layer that does not run on bulk rows.
    pub split: usize,
    /// The last prompt rows, which run through every layer.
    pub tail: u64,
    /// The first rows of the sequence, which run through every layer.
    pub head: u64,
    /// A fill is a multiple of so many rows.
    pub tile: u64,
    /// Bulk rows in one call; None for all of them.
    pub chunk_tokens: Option<u64>,
    /// The layers in order.
    pub layers: Vec<Role>,
}

/// What one layer does with bulk rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Role {
    /// The layer runs as the model has it.
    Full,
    /// Keys and values of every bulk row come from the block input of layer `source`.
    Filled {
        /// The layer whose block input, the stream, is tapped.
        source: usize,
        /// How the stream becomes this layer's block input.
        input: Input,
    },
    /// The same, of the last `window` bulk rows: no exact row sees the others.
    WindowedFill {
        /// The layer whose block input is tapped.
        source: usize,
        /// How the stream becomes this layer's block input.
        input: Input,
        /// Keys that a row sees, itself included.
        window: u64,
    },
    /// The recurrent mixer scans every bulk row's predicted input for its state (and an attention beside it is
    /// filled); its output is discarded.
    StateScan {
        /// The layer whose block input is tapped.
        source: usize,
        /// How the stream becomes this layer's block input.
        input: Input,
    },
    /// Nothing: the layer reads another layer's cache and writes none.
    Skipped,
}

/// How the tapped stream becomes a layer's block input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Input {
    /// It is that already: the layer is the tapped one.
    Stream,
    /// By the layer's ridge map.
    Map,
}

impl Role {
    /// Returns the role of a layer that does not run on bulk rows, when the block input of layer `source` is tapped.
    pub fn late(layer: &Layer, index: usize, source: usize) -> Self {
        let input = if index == source { Input::Stream } else { Input::Map };
        if layer.mixer.shared_from().is_some() {
            Self::Skipped
        } else if layer.mixer.is_recurrent() {
            Self::StateScan { source, input }
        } else if let Some(window) = layer.mixer.window() {
            Self::WindowedFill { source, input, window }
        } else {
            Self::Filled { source, input }
        }
    }

    /// Returns the word for this role in JSON.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Filled { .. } => "filled",
            Self::WindowedFill { .. } => "windowed_fill",
            Self::StateScan { .. } => "state_scan",
            Self::Skipped => "skipped",
        }
    }

    /// Returns where the layer's block input on bulk rows comes from.
    fn tap(&self) -> Option<(usize, Input)> {
        match *self {
            Self::Filled { source, input }
            | Self::WindowedFill { source, input, .. }
            | Self::StateScan { source, input } => Some((source, input)),
            Self::Full | Self::Skipped => None,
        }
    }
}

impl LayerSchedule {
    /// Returns the schedule of a fill from layer `split` on.
    pub fn new(
        model: &Model,
        split: usize,
        tail: u64,
        head: u64,
        tile: u64,
        chunk_tokens: Option<u64>,
    ) -> Result<Self> {
        let late = |(index, layer)| if index < split { Role::Full } else { Role::late(layer, index, split) };
        let layers = model.layers.iter().enumerate().map(late).collect();
        let schedule = Self { model_type: model.model_type.clone(), split, tail, head, tile, chunk_tokens, layers };
        schedule.check(model)?;
        Ok(schedule)
    }

    /// Returns the schedule a JSON document holds, checked against the model it is for.
    pub fn from_json(json: &str, model: &Model) -> Result<Self> {
        let schedule: Self = serde_json::from_str(json).map_err(|error| refuse(format!("schedule: {error}")))?;
        schedule.check(model)?;
        Ok(schedule)
    }

    /// Returns the schedule as one JSON document.
    pub fn to_json(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|error| refuse(format!("schedule: {error}")))
    }

    /// Refuses a schedule that would leave a hole in the cache, or read what is not there.
    pub fn check(&self, model: &Model) -> Result<()> {
        let count = model.layers.len();
        let expect = |holds: bool, what: &dyn Fn() -> String| if holds { Ok(()) } else { Err(refuse(what())) };
        expect(self.model_type == model.model_type, &|| {
            format!("schedule: made for a {}, the model is a {}", self.model_type, model.model_type)
        })?;
        expect(self.layers.len() == count, &|| {
            format!("schedule: has {} layers, the model has {count}", self.layers.len())
        })?;
        expect(self.split < count, &|| {
            format!("split is {}; the model has layers 0 to {}", self.split, count.saturating_sub(1))
        })?;
        expect(self.tail >= 1, &|| "tail is 0; at least the last prompt row must be exact: pass tail >= 1".to_owned())?;
        expect(self.tile >= 1, &|| "tile is 0; pass tile=1 for no alignment".to_owned())?;
        expect(self.chunk_tokens != Some(0), &|| "chunk_tokens is 0; expected at least 1".to_owned())?;
        if let (Some(chunk), Some(scan)) =
            (self.chunk_tokens, self.layers.iter().position(|role| role.name() == "state_scan"))
        {
            expect(chunk % self.tile == 0, &|| {
                format!(
                    "layer {scan} scans a state in tiles of {}, and chunk_tokens is {chunk}; expected a multiple of the tile",
                    self.tile
                )
            })?;
        }
        for (index, (role, layer)) in self.layers.iter().zip(&model.layers).enumerate() {
            self.check_layer(index, role, layer)?;
        }
        Ok(())
    }

    fn check_layer(&self, index: usize, role: &Role, layer: &Layer) -> Result<()> {
        if let Some(source) = layer.mixer.shared_from() {
            let serves = source < index && self.layers.get(source).is_some_and(|role| *role != Role::Skipped);
            if !serves {
                return Err(refuse(format!(
                    "layer {index} reads the cache of layer {source}; expected a layer below it that writes one"
                )));
            }
        }
        if index < self.split {
            return if *role == Role::Full {
                Ok(())
            } else {
                Err(refuse(format!(
                    "layer {index} is {}; expected full, as every layer below the split {}",
                    role.name(),
                    self.split
                )))
            };
        }
        if let Some((source, input)) = role.tap() {
            if source > index {
                return Err(refuse(format!(
                    "layer {index} is filled from layer {source}; expected a layer that is not above it"
                )));
            }
            if source > self.split {
                return Err(refuse(format!(
                    "layer {index} is filled from layer {source}, whose block input is not computed on bulk rows; \
                     expected the split {} or below",
                    self.split
                )));
            }
            let expected = if source == index { Input::Stream } else { Input::Map };
            if input != expected {
                return Err(refuse(format!(
                    "layer {index} is filled from layer {source}: only a layer's own block input serves it without a map, \
                     and needs none"
                )));
            }
        }
        let source = role.tap().map_or(self.split, |(source, _)| source);
        let expected = Role::late(layer, index, source);
        if *role != expected {
            let window = |role: &Role| match role {
                Role::WindowedFill { window, .. } => format!(" of {window}"),
                _ => String::new(),
            };
            return Err(refuse(format!(
                "layer {index} is {}{}; expected {}{}, which is what this layer's cache needs",
                role.name(),
                window(role),
                expected.name(),
                window(&expected)
            )));
        }
        Ok(())
    }
}

fn refuse(what: String) -> Error {
    Fault::Schedule { what }.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::family::Mixer;
    use proptest::prelude::*;

    /// A model of the given mixers: f full, w window of 512, s shared with the last full one before it, g scan.
    fn model(kinds: &str) -> Model {
        let attention = |more: &str| {
            format!(r#"{{"kind":"attention","num_attention_heads":4,"num_key_value_heads":2,"head_dim":8{more}}}"#)
        };
        let layers: Vec<String> = kinds
            .chars()
            .enumerate()
            .map(|(index, kind)| {
                let mixer = match kind {
                    'w' => attention(r#","window":512"#),
                    's' => attention(&format!(r#","shared_from":{}"#, kinds[..index].rfind('f').unwrap())),
                    'g' => r#"{"kind":"gated_delta","num_k_heads":2,"num_v_heads":4,"k_head_dim":8,"v_head_dim":8,"conv_kernel":4}"#
                        .to_owned(),
                    _ => attention(""),
                };
                format!(r#"{{"mixer":{mixer},"mlp":{{"kind":"dense","intermediate_size":64}}}}"#)
            })
            .collect();
        let json =
            format!(r#"{{"model_type":"mixed","hidden_size":32,"vocab_size":100,"layers":[{}]}}"#, layers.join(","));
        Model::from_description(&json).unwrap()
    }

    fn names(schedule: &LayerSchedule) -> Vec<&'static str> {
        schedule.layers.iter().map(Role::name).collect()
    }

    #[test]
    fn each_kind_of_layer_gets_its_role() {
        let schedule = LayerSchedule::new(&model("ffwgfs"), 1, 512, 4, 64, Some(2048)).unwrap();
        assert_eq!(names(&schedule), ["full", "filled", "windowed_fill", "state_scan", "filled", "skipped"]);
        assert_eq!(schedule.layers[1], Role::Filled { source: 1, input: Input::Stream });
        assert_eq!(schedule.layers[2], Role::WindowedFill { source: 1, input: Input::Map, window: 512 });
        assert_eq!(schedule.layers[3], Role::StateScan { source: 1, input: Input::Map });
    }

    #[test]
    fn what_would_leave_a_hole_is_refused() {
        let model = model("ffwgfs");
        let good = LayerSchedule::new(&model, 1, 512, 4, 64, Some(2048)).unwrap();
        let map = |source| Role::Filled { source, input: Input::Map };
        let with = |layer: usize, role: Role| {
            let mut bad = good.clone();
            bad.layers[layer] = role;
            bad
        };
        let bad = [
            (with(0, map(0)), "layer 0 is filled; expected full, as every layer below the split 1"),
            (with(1, map(2)), "layer 1 is filled from layer 2; expected a layer that is not above it"),
            (with(4, map(3)), "whose block input is not computed on bulk rows"),
            (with(1, map(1)), "only a layer's own block input serves it without a map"),
            (with(4, Role::Filled { source: 1, input: Input::Stream }), "only a layer's own block input"),
            (with(4, Role::Full), "layer 4 is full; expected filled"),
            (with(4, Role::Skipped), "layer 4 is skipped; expected filled"),
            (with(3, Role::Skipped), "layer 3 is skipped; expected state_scan"),
            (with(2, map(1)), "layer 2 is filled; expected windowed_fill of 512"),
            (
                with(2, Role::WindowedFill { source: 1, input: Input::Map, window: 256 }),
                "layer 2 is windowed_fill of 256; expected windowed_fill of 512",
            ),
            (LayerSchedule { split: 6, ..good.clone() }, "split is 6; the model has layers 0 to 5"),
            (LayerSchedule { tail: 0, ..good.clone() }, "tail is 0"),
            (LayerSchedule { tile: 0, ..good.clone() }, "tile is 0"),
            (LayerSchedule { chunk_tokens: Some(0), ..good.clone() }, "chunk_tokens is 0"),
            (
                LayerSchedule { chunk_tokens: Some(100), ..good.clone() },
                "layer 3 scans a state in tiles of 64, and chunk_tokens is 100",
            ),
            (
                LayerSchedule { model_type: "llama".to_owned(), ..good.clone() },
                "made for a llama, the model is a mixed",
            ),
            (LayerSchedule { layers: good.layers[1..].to_vec(), ..good.clone() }, "has 5 layers, the model has 6"),
        ];
        for (schedule, words) in bad {
            let error = schedule.check(&model).unwrap_err();
            assert_eq!(error.kind(), "schedule");
            assert!(error.to_string().contains(words), "{error} lacks {words}");
        }
        // A layer that reads a cache which nobody has written yet.
        let mut backwards = model.clone();
        if let Mixer::Attention(attention) = &mut backwards.layers[5].mixer {
            attention.shared_from = Some(5);
        }
        let error = good.check(&backwards).unwrap_err().to_string();
        assert!(error.contains("layer 5 reads the cache of layer 5; expected a layer below it"), "{error}");
        // Nothing above is wrong with chunks off the tile where nothing is scanned.
        let attention = self::model("fff");
        assert!(LayerSchedule::new(&attention, 1, 512, 4, 64, Some(100)).is_ok());
    }

    #[test]
    fn json_that_is_no_schedule_is_refused() {
        let model = model("ff");
        let good = LayerSchedule::new(&model, 1, 512, 4, 1, None).unwrap().to_json().unwrap();
        for bad in ["", "{}", "[]", &good.replace("filled", "guessed"), &good.replace("\"tail\"", "\"tali\"")] {
            let error = LayerSchedule::from_json(bad, &model).unwrap_err().to_string();
            assert!(error.starts_with("schedule: "), "{error}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(512) })]

        #[test]
        fn json_gives_the_schedule_back(
            kinds in "f[fwgs]{0,12}", split in any::<prop::sample::Index>(), tail in 1u64..5000, head in 0u64..9,
            tile in 1u64..100, chunks in prop::option::of(1u64..50),
        ) {
            let model = model(&kinds);
            let split = split.index(kinds.len());
            let schedule = LayerSchedule::new(&model, split, tail, head, tile, chunks.map(|n| n * tile)).unwrap();
            prop_assert_eq!(&LayerSchedule::from_json(&schedule.to_json().unwrap(), &model).unwrap(), &schedule);
            // Below the split everything runs; from it on nothing does, and whatever writes a cache is written.
            for (index, (role, layer)) in schedule.layers.iter().zip(&model.layers).enumerate() {
                prop_assert_eq!(*role == Role::Full, index < split);
                if index >= split {
                    prop_assert_eq!(*role == Role::Skipped, layer.mixer.shared_from().is_some());
                }
            }
        }
    }
}
