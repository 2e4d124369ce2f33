//! A step's seconds in a few dozen multiplications: what [`Rates::seconds`] of [`Pricer::filled`] gives, up to rounding.
//!
//! The plain way counts operations and bytes part by part, then divides by rates. Here every coefficient is divided once,
//! when a planner is made. A sum in another order rounds otherwise, so these seconds only say which of two plans is faster
//! where they differ by more than [`ROUNDING`]; what is reported is always priced the plain way.

use super::pricer::{Filled, unmasked_end};
use super::work::{QUERY_BLOCK, Work, visible_keys};
use super::{Pricer, Rates};
use crate::rule::{Decision, Step, first_needed_row};

/// Relative difference below which two of these figures are not told apart. Sums of a hundred terms of one sign are right
/// to about 1e-14; a plan's few milliseconds need no more than this.
pub const ROUNDING: f64 = 1e-9;

/// Seconds by operations and seconds by bytes: the longer one counts.
#[derive(Debug, Clone, Copy, Default)]
struct Roofline {
    compute_s: f64,
    memory_s: f64,
}

impl Roofline {
    fn seconds(self) -> f64 {
        self.compute_s.max(self.memory_s)
    }
}

/// [`Work::matmul`] with rates.
#[derive(Debug, Clone, Copy)]
struct QuickMatmul {
    row_compute_s: f64,
    /// Weights that lie in memory, once a call; never more than its rows ask for.
    call_memory_s: f64,
    row_weights_memory_s: f64,
    row_moved_memory_s: f64,
}

impl QuickMatmul {
    fn of(work: &Work, rates: &Rates, element_bytes: f64) -> Self {
        let (element_s, weight_s) = (element_bytes / rates.memory_bytes_per_s, element_bytes / rates.weight_rate());
        Self {
            row_compute_s: 2.0 * work.weights / rates.matmul_flops_per_s,
            call_memory_s: work.resident_weights * weight_s,
            row_weights_memory_s: work.weights * weight_s,
            row_moved_memory_s: work.moved_elements * element_s,
        }
    }

    fn of_calls(&self, calls: &[(f64, f64)]) -> Roofline {
        let rows: f64 = calls.iter().map(|(rows, count)| rows * count).sum();
        let weights_s: f64 =
            calls.iter().map(|(rows, count)| count * self.call_memory_s.min(rows * self.row_weights_memory_s)).sum();
        Roofline { compute_s: rows * self.row_compute_s, memory_s: weights_s + rows * self.row_moved_memory_s }
    }
}

/// [`Work::attention`] with rates.
#[derive(Debug, Clone)]
struct QuickAttention {
    row_compute_s: f64,
    state_memory_s: f64,
    /// (visible keys, seconds of a pair, of a row's queries and outputs, of a block of queries' keys and values).
    keys: Vec<(Option<u64>, f64, f64, f64)>,
    /// How much longer a pair takes under a mask.
    mask_factor: f64,
}

impl QuickAttention {
    fn of(work: &Work, rates: &Rates, element_bytes: f64) -> Self {
        let element_s = element_bytes / rates.memory_bytes_per_s;
        let keys = work.keys.iter().map(|keys| {
            let pair_s = keys.pair_flops / rates.attention_flops_per_s;
            (keys.visible, pair_s, keys.pair_flops / 2.0 * element_s, keys.row_elements * element_s)
        });
        Self {
            row_compute_s: work.scan_flops / rates.attention_flops_per_s,
            state_memory_s: 2.0 * work.state_elements * element_s,
            keys: keys.collect(),
            mask_factor: rates.attention_flops_per_s / rates.masked_rate(),
        }
    }

    /// Adds a share of the rows `[from, to)`; `behind`: in a call that begins behind rows of the cache.
    fn add(&self, sum: &mut Roofline, from: u64, to: u64, share: f64, behind: bool) {
        let rows = share * (to - from) as f64;
        if rows == 0.0 {
            return;
        }
        sum.compute_s += rows * self.row_compute_s;
        sum.memory_s += self.state_memory_s;
        for &(visible, pair_s, row_s, block_s) in &self.keys {
            let pairs = share * visible_keys(from, to, visible);
            let masked = behind || visible.is_some_and(|window| window < to);
            sum.compute_s += pairs * pair_s * if masked { self.mask_factor } else { 1.0 };
            sum.memory_s += rows * row_s + (pairs / QUERY_BLOCK).max(1.0) * block_s;
        }
    }
}

/// A pricer and rates, made ready: the seconds of a filled step that computes at least one row and wants one row's logits,
/// with no row named exact.
#[derive(Debug, Clone)]
pub struct Quick {
    whole: QuickMatmul,
    early: QuickMatmul,
    late: QuickMatmul,
    early_attention: QuickAttention,
    late_attention: QuickAttention,
    /// (window, seconds by operations of a row, of its scan, seconds by bytes of a row, and of a call).
    filled: Vec<(Option<u64>, f64, f64, f64, f64)>,
    /// (visible keys, seconds of a pair, seconds by bytes of a key, and of a query).
    scored: Vec<(Option<u64>, f64, f64, f64)>,
    query_s: f64,
    /// Weights outside the layers.
    extra: Roofline,
    output_s: f64,
    share: f64,
    chunk_tokens: Option<u64>,
    /// Calls: of every layer, of a bulk chunk's layers, of the late ones.
    whole_call_s: f64,
    chunk_call_s: f64,
    late_call_s: f64,
}

impl Quick {
    /// Returns the quick form of a pricer on a device.
    pub fn new(pricer: &Pricer, rates: &Rates) -> Self {
        let setting = pricer.setting();
        let bytes = setting.element_bytes;
        let (element_s, weight_s) = (bytes / rates.memory_bytes_per_s, bytes / rates.weight_rate());
        let group = |group: &Filled| {
            (
                group.window,
                2.0 * group.weights / rates.matmul_flops_per_s,
                group.scan_flops / rates.attention_flops_per_s,
                (group.row_elements + pricer.stream_width) * element_s,
                group.weights * weight_s,
            )
        };
        let scored = pricer.scored.keys.iter().map(|keys| {
            let pair_s = keys.pair_flops / rates.attention_flops_per_s;
            (keys.visible, pair_s, 2.0 * keys.row_elements * element_s, keys.pair_flops / 4.0 * element_s)
        });
        let filled_layers: f64 = pricer.filled.iter().map(|group| group.layers).sum();
        let output = Roofline {
            compute_s: 2.0 * pricer.output_weights / rates.matmul_flops_per_s,
            memory_s: pricer.output_weights * weight_s + pricer.vocab_size * element_s,
        };
        Self {
            whole: QuickMatmul::of(&pricer.whole, rates, bytes),
            early: QuickMatmul::of(&pricer.early, rates, bytes),
            late: QuickMatmul::of(&pricer.late, rates, bytes),
            early_attention: QuickAttention::of(&pricer.early, rates, bytes),
            late_attention: QuickAttention::of(&pricer.late, rates, bytes),
            filled: pricer.filled.iter().map(group).collect(),
            scored: scored.collect(),
            query_s: pricer.query_flops / rates.attention_flops_per_s,
            extra: Roofline {
                compute_s: 2.0 * pricer.extra_weights / rates.matmul_flops_per_s,
                memory_s: pricer.extra_weights * weight_s,
            },
            output_s: output.seconds(),
            share: setting.selected_share,
            chunk_tokens: setting.chunk_tokens,
            whole_call_s: pricer.whole.layers * rates.layer_call_s,
            chunk_call_s: (pricer.early.layers + filled_layers) * rates.layer_call_s,
            late_call_s: pricer.late.layers * rates.layer_call_s,
        }
    }

    /// Returns the seconds of a step that the decision fills.
    pub fn seconds(&self, step: &Step, decision: &Decision) -> f64 {
        let (begin, start, end, step_end) =
            (step.cached_tokens, decision.fill_start, decision.fill_end, decision.step_end);
        let (rows, bulk) = ((step_end - begin) as f64, (end - start) as f64);
        let (head_rows, tail_rows) = ((start - begin) as f64, (step_end - end) as f64);
        let chunks = self.chunk_tokens.map_or(1.0, |chunk| (end - start).div_ceil(chunk) as f64);
        let exact_calls = if start > begin { 1.0 } else { 0.0 } + if step_end > end { 1.0 } else { 0.0 };

        let head = self.whole.of_calls(&[(head_rows, 1.0)]);
        let mut early = self.early.of_calls(&[(bulk / chunks, chunks), (tail_rows, 1.0)]);
        early.compute_s += rows * self.extra.compute_s;
        early.memory_s += self.extra.memory_s;
        let mut early_attention = Roofline::default();
        let open = unmasked_end(decision, begin, self.chunk_tokens);
        self.early_attention.add(&mut early_attention, begin, open, 1.0, false);
        self.early_attention.add(&mut early_attention, open, step_end, 1.0, true);
        let late = self.late.of_calls(&[(tail_rows, 1.0)]);
        let mut late_attention = Roofline::default();
        self.late_attention.add(&mut late_attention, begin, start, 1.0, begin > 0);
        self.late_attention.add(&mut late_attention, end, step_end, 1.0, true);

        let (mut fill, mut scan_s) = (Roofline::default(), 0.0);
        for &(window, row_s, row_scan_s, row_memory_s, call_memory_s) in &self.filled {
            let rows = (end - first_needed_row(start, end, window)) as f64;
            fill.compute_s += rows * row_s;
            fill.memory_s += rows * row_memory_s + chunks * call_memory_s;
            scan_s += rows * row_scan_s;
        }
        let mut total = head.seconds()
            + early.seconds()
            + early_attention.seconds()
            + late.seconds()
            + late_attention.seconds()
            + fill.seconds()
            + scan_s
            + self.output_s
            + exact_calls * self.whole_call_s
            + chunks * self.chunk_call_s;
        if self.share > 0.0 {
            let tail = (step_end - end) as f64;
            let mut scoring = Roofline { compute_s: tail * self.query_s, memory_s: 0.0 };
            for &(visible, pair_s, key_s, query_s) in &self.scored {
                let seen = (end - first_needed_row(start, end, visible)) as f64;
                scoring.compute_s += tail * seen * pair_s;
                scoring.memory_s += seen * key_s + tail * query_s;
            }
            let mut attention = Roofline::default();
            self.late_attention.add(&mut attention, start, end, self.share, true);
            let matmul = self.late.of_calls(&[(self.share * bulk, 1.0)]);
            total += scoring.seconds() + attention.seconds() + matmul.seconds() + self.late_call_s;
        }
        total
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::Setting;
    use crate::cost::fixtures::{rates, setting, shape, step};
    use crate::family::Model;
    use crate::rule::decide;
    use proptest::prelude::*;

    /// Attention of both kinds, a mixture, and a recurrent state: every coefficient is in use.
    fn hybrid() -> super::super::Shape {
        let attention = r#"{"kind":"attention","num_attention_heads":8,"num_key_value_heads":2,"head_dim":32"#;
        let dense = r#"{"kind":"dense","intermediate_size":512}"#;
        let moe = r#"{"kind":"moe","num_experts":16,"num_experts_per_tok":2,"moe_intermediate_size":128}"#;
        let delta =
            r#"{"kind":"gated_delta","num_k_heads":2,"num_v_heads":4,"k_head_dim":32,"v_head_dim":32,"conv_kernel":4}"#;
        let json = format!(
            r#"{{"model_type":"mixed","hidden_size":256,"vocab_size":1000,"extra_weights":4096,"layers":[
            {{"count":3,"mixer":{attention}}},"mlp":{dense}}},{{"count":3,"mixer":{attention},"window":300}},"mlp":{moe}}},
            {{"count":3,"mixer":{delta},"mlp":{dense}}},{{"count":2,"mixer":{attention}}},"mlp":{moe}}}]}}"#
        );
        super::super::Shape::of_model(&Model::from_description(&json).unwrap())
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2048) })]

        #[test]
        fn quick_seconds_are_the_plain_ones_up_to_rounding(
            windows in prop::option::of(prop::collection::vec(prop_oneof![Just(None), (1u64..5000).prop_map(Some)], 1..8)),
            split in any::<prop::sample::Index>(), prompt in 800u64..200_000, cached in 0.0f64..1.0, tail in 1u64..700,
            features in 1u64..4, fused_rank in prop::option::of(1u64..300), share in prop_oneof![Just(0.0), 0.0f64..1.0],
            chunk in prop::option::of(1u64..9000), memory in 1e6f64..1e15,
            weight_share in prop::option::of(1e-3f64..1.0), call in 0.0f64..1e-2,
        ) {
            // None: the hybrid.
            let shape = windows.map_or_else(hybrid, |windows| shape(&windows));
            let base = setting(split.index(shape.layers.len()));
            let fill = super::super::Fill { features, fused_rank, ..base.fill };
            let pricer = Pricer::new(
                &shape, &Setting { fill, selected_share: share, chunk_tokens: chunk, ..base }
            ).unwrap();
            let rates = Rates { memory_bytes_per_s: memory,
                weight_bytes_per_s: weight_share.map(|share| share * memory), layer_call_s: call, ..rates() };
            let cached_tokens = (cached * prompt as f64) as u64;
            let step = Step { cached_tokens, step_tokens: prompt - cached_tokens, tail, min_bulk: 1, ..step(prompt) };
            let decision = decide(&step).unwrap();
            prop_assume!(decision.rows_filled() > 0);
            let plain = rates.seconds(&pricer.filled(&step, &decision, &[]));
            let quick = Quick::new(&pricer, &rates).seconds(&step, &decision);
            // A thousandth of what `choose_all` allows for.
            prop_assert!((quick - plain).abs() <= 1e-3 * ROUNDING * plain, "{quick} and {plain}");
        }
    }
}
