//! Every split of a model side by side.

use serde::Serialize;

use crate::cost::{Fill, Pricer, Rates, Setting, Shape, report};
use crate::error::Result;
use crate::rule::Step;

/// One split of a search.
#[derive(Debug, Clone, Serialize)]
#[allow(missing_docs)]
pub struct SearchRow {
    pub split: usize,
    pub rows_filled: u64,
    pub flops_ratio: f64,
    pub ttft_ratio: Option<f64>,
    pub exact_s: Option<f64>,
    pub filled_s: Option<f64>,
    /// The ratio if late layers cost nothing.
    pub ratio_limit: f64,
    pub early_attention_share: f64,
    pub map_bytes: f64,
    pub cache_bytes: f64,
    pub break_even_tokens: Option<u64>,
    /// What a gate measured; None: unknown.
    pub loss_nats: Option<f64>,
    /// Whether the loss is known and within the bound; None where no bound was asked for.
    pub allowed: Option<bool>,
    /// Whether no other split with a known loss is both at least as fast and at least as close.
    pub pareto: bool,
}

/// Returns what every split would give: `setting` is used with each of them, `losses` are measured ones by split.
pub fn search(
    shape: &Shape,
    setting: &Setting,
    step: &Step,
    rates: Option<&Rates>,
    losses: &[(usize, f64)],
    max_loss: Option<f64>,
) -> Result<Vec<SearchRow>> {
    let total = step.cached_tokens + step.step_tokens;
    let mut rows = Vec::with_capacity(shape.layers.len());
    for split in 0..shape.layers.len() {
        let pricer = Pricer::new(shape, &Setting { fill: Fill { split, ..setting.fill }, ..*setting })?;
        let report = report(&pricer, step, total, rates)?;
        let loss_nats = losses.iter().find(|(known, _)| *known == split).map(|(_, loss)| *loss);
        rows.push(SearchRow {
            split,
            rows_filled: report.rows_filled,
            flops_ratio: report.flops_ratio,
            ttft_ratio: report.ttft_ratio,
            exact_s: report.exact.seconds,
            filled_s: report.filled.seconds,
            ratio_limit: report.ratio_limit,
            early_attention_share: report.early_attention_share,
            map_bytes: report.map_bytes,
            cache_bytes: report.filled.cache_bytes,
            break_even_tokens: report.break_even_tokens,
            loss_nats,
            allowed: max_loss.map(|bound| loss_nats.is_some_and(|loss| loss <= bound)),
            pareto: false,
        });
    }
    let points: Vec<Option<(f64, f64)>> =
        rows.iter().map(|row| row.loss_nats.map(|loss| (row.ttft_ratio.unwrap_or(row.flops_ratio), loss))).collect();
    for (row, point) in rows.iter_mut().zip(&points) {
        row.pareto = point.is_some_and(|(ratio, loss)| {
            !points.iter().flatten().any(|&(other_ratio, other_loss)| {
                other_ratio >= ratio && other_loss <= loss && (other_ratio > ratio || other_loss < loss)
            })
        });
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Sensitivity;
    use crate::plan::fixtures::*;

    #[test]
    fn a_search_marks_what_is_allowed_and_what_is_best() {
        let step = request(32_768, Sensitivity::Balanced, None).step(&policy(), 512);
        let losses = [(10, 0.32), (15, 0.26), (16, 0.27), (20, 0.04)];
        let rates = policy().rates;
        let rows = search(&shape(), &Setting::default(), &step, Some(&rates), &losses, Some(0.05)).unwrap();
        assert_eq!(rows.len(), 30);
        // Split 16 is slower than 15 and loses more.
        let best: Vec<usize> = rows.iter().filter(|row| row.pareto).map(|row| row.split).collect();
        assert_eq!(best, [10, 15, 20]);
        let allowed: Vec<usize> = rows.iter().filter(|row| row.allowed == Some(true)).map(|row| row.split).collect();
        assert_eq!(allowed, [20]);
        for pair in rows.windows(2) {
            assert!(pair[0].flops_ratio > pair[1].flops_ratio && pair[0].map_bytes > pair[1].map_bytes);
            assert!(pair[0].ttft_ratio <= Some(pair[0].ratio_limit));
        }
        let unknown = search(&shape(), &Setting::default(), &step, None, &[], None).unwrap();
        assert!(unknown.iter().all(|row| row.ttft_ratio.is_none() && row.allowed.is_none() && !row.pareto));
    }
}
