//! The whole answer in numbers: both sides part by part, their ratio, what limits it, and from which length it pays.

use serde::Serialize;

use super::{Cost, LONGEST_PROMPT, Part, Pricer, Rates};
use crate::error::Result;
use crate::rule::{Step, decide};

impl Pricer {
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
    /// The ratio if late layers and the head rows cost nothing at all: what no map can exceed at this split and length.
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
        split: pricer.setting().fill.split,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::Setting;
    use crate::cost::fixtures::{rates, setting, shape, step};

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
}
