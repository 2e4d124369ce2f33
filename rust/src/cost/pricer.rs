//! A step priced: operations, bytes and memory, exact and as decided.

use super::amounts::{Amount, Cost, Part};
use super::refuse;
use super::shape::Shape;
use super::work::Work;
use crate::error::Result;
use crate::rule::{Decision, Step, decide, first_needed_row};

/// Returns where attention without a mask ends below the split: a fresh prompt's head and first chunk are one causal call.
pub(super) fn unmasked_end(decision: &Decision, cached_tokens: u64, chunk_tokens: Option<u64>) -> u64 {
    match (cached_tokens, chunk_tokens) {
        (0, None) => decision.fill_end,
        (0, Some(chunk)) => decision.fill_end.min(decision.fill_start.saturating_add(chunk)),
        _ => cached_tokens,
    }
}

/// Layers below the split whose exact queries and keys score bulk rows, besides layer S (design, section 2.6).
const SCORED_BELOW_SPLIT: usize = 3;

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

/// Late layers of one window, summed, as bulk rows are filled in them.
#[derive(Debug, Clone)]
pub(super) struct Filled {
    pub(super) window: Option<u64>,
    pub(super) layers: f64,
    /// Maps and projections that a row meets.
    pub(super) weights: f64,
    pub(super) scan_flops: f64,
    pub(super) row_elements: f64,
}

/// A model and a setting, summed once: it prices a step in a handful of operations and without an allocation.
#[derive(Debug, Clone)]
pub struct Pricer {
    pub(super) setting: Setting,
    pub(super) whole: Work,
    pub(super) early: Work,
    pub(super) late: Work,
    pub(super) filled: Vec<Filled>,
    /// Layers whose attention scores bulk rows, and what a tail row's queries for them cost.
    pub(super) scored: Work,
    pub(super) query_flops: f64,
    pub(super) cached: Vec<(Option<u64>, f64)>,
    pub(super) state_elements: f64,
    pub(super) stream_width: f64,
    pub(super) extra_weights: f64,
    pub(super) output_weights: f64,
    pub(super) vocab_size: f64,
    pub(super) peak_row_elements: f64,
    pub(super) map_elements: f64,
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
        cost.add(Part::EarlyMatmul, self.whole.matmul(&[((to - from) as f64, 1.0)], bytes));
        cost.add(Part::EarlyAttention, self.whole.attention(from, to, 1.0, from > 0, bytes));
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
        let (head_rows, tail_rows) = ((start - begin) as f64, (step_end - end) as f64);
        let exact_calls = f64::from(u8::from(start > begin) + u8::from(step_end > end));
        let mut cost = Cost::default();

        cost.add(Part::HeadMatmul, self.whole.matmul(&[(head_rows, 1.0)], bytes));
        cost.add(Part::EarlyMatmul, self.extra(step_end - begin));
        cost.add(Part::EarlyMatmul, self.early.matmul(&[(bulk as f64 / chunks, chunks), (tail_rows, 1.0)], bytes));
        let open = unmasked_end(decision, begin, self.setting.chunk_tokens);
        cost.add(Part::EarlyAttention, self.early.attention(begin, open, 1.0, false, bytes));
        cost.add(Part::EarlyAttention, self.early.attention(open, step_end, 1.0, true, bytes));
        cost.add(Part::LateMatmul, self.late.matmul(&[(tail_rows, 1.0)], bytes));
        cost.add(Part::LateAttention, self.late.attention(begin, start, 1.0, begin > 0, bytes));
        cost.add(Part::LateAttention, self.late.attention(end, step_end, 1.0, true, bytes));
        cost.layer_calls += exact_calls * self.whole.layers + chunks * self.early.layers;

        for group in &self.filled {
            let rows = (end - first_needed_row(start, end, group.window)) as f64;
            cost.add(
                Part::Fill,
                Amount {
                    flops: rows * 2.0 * group.weights,
                    bytes: bytes * (chunks * group.weights + rows * (group.row_elements + self.stream_width)),
                    weight_bytes: bytes * chunks * group.weights,
                    ..Amount::default()
                },
            );
            cost.add(Part::FillScan, Amount { flops: rows * group.scan_flops, ..Amount::default() });
            cost.layer_calls += chunks * group.layers;
        }

        let mut named = 0;
        for &(from, to) in exact_spans {
            let (from, to) = (from.clamp(start, end), to.clamp(start, end));
            named += to - from;
            cost.add(Part::SelectedAttention, self.late.attention(from, to, 1.0, true, bytes));
        }
        let share = self.setting.selected_share;
        let selected = named as f64 + share * (bulk - named) as f64;
        if share > 0.0 {
            let left = share * ((bulk - named) as f64 / bulk as f64);
            cost.add(Part::SelectedAttention, self.late.attention(start, end, left, true, bytes));
            cost.add(Part::Scoring, self.scoring(step_end - end, start, end));
        }
        if selected > 0.0 {
            cost.add(Part::SelectedMatmul, self.late.matmul(&[(selected, 1.0)], bytes));
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
        let mut amount = Amount { flops: tail * self.query_flops, ..Amount::default() };
        for keys in &self.scored.keys {
            let seen = (end - first_needed_row(start, end, keys.visible)) as f64;
            amount.flops += tail * seen * keys.pair_flops;
            amount.bytes += bytes * (2.0 * seen * keys.row_elements + tail * keys.pair_flops / 4.0);
        }
        amount
    }

    fn extra(&self, rows: u64) -> Amount {
        let rows = rows as f64;
        let weights = if rows > 0.0 { self.extra_weights } else { 0.0 };
        Amount {
            flops: rows * 2.0 * self.extra_weights,
            bytes: self.setting.element_bytes * weights,
            weight_bytes: self.setting.element_bytes * weights,
            ..Amount::default()
        }
    }

    fn output(&self, step: &Step) -> Amount {
        let rows = step.logits_to_keep.min(step.step_tokens) as f64;
        let weights = if rows > 0.0 { self.output_weights } else { 0.0 };
        Amount {
            flops: rows * 2.0 * self.output_weights,
            bytes: self.setting.element_bytes * (weights + rows * self.vocab_size),
            weight_bytes: self.setting.element_bytes * weights,
            ..Amount::default()
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::fixtures::{rates, setting, shape, step};
    use crate::cost::work::visible_keys;
    use crate::family::Model;
    use proptest::prelude::*;

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
    fn a_call_reads_no_more_experts_than_its_rows_meet() {
        let json = r#"{"model_type":"x","hidden_size":64,"vocab_size":10,"layers":[{"count":2,"mixer":{"kind":"attention",
            "num_attention_heads":4,"num_key_value_heads":2,"head_dim":16},"extra_parameters":1000000,
            "mlp":{"kind":"moe","num_experts":128,"num_experts_per_tok":2,"moe_intermediate_size":64}}]}"#;
        let shape = Shape::of_model(&Model::from_description(json).unwrap());
        let (weights, resident) = (shape.layers[0].weights, shape.layers[0].resident_weights);
        // 126 experts more than a row meets, of three matrices each; tables that rows look up are not among them.
        assert_eq!(resident, weights + 126.0 * 3.0 * 64.0 * 64.0);
        let (step, pricer) = (step(4096), Pricer::new(&shape, &setting(1)).unwrap());
        let cost = pricer.filled(&step, &decide(&step).unwrap(), &[]);
        let moved = weights / 64.0 + 4.0 * 64.0;
        assert!(4.0 * weights < resident);
        // Head rows go through both layers, tail rows through the late one.
        assert_eq!(cost.of(Part::HeadMatmul).bytes, 2.0 * 2.0 * 4.0 * (weights + moved));
        assert_eq!(cost.of(Part::LateMatmul).bytes, 2.0 * (resident + 512.0 * moved));
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
        assert_eq!(cost.of(Part::HeadMatmul).flops, 4.0 * 4.0 * 2.0 * weights);
        assert_eq!(cost.of(Part::EarlyMatmul).flops, 4092.0 * 2.0 * 2.0 * weights);
        assert_eq!(cost.of(Part::LateMatmul).flops, 512.0 * 2.0 * 2.0 * weights);
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
