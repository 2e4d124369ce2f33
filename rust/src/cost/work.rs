//! Layers that run exactly, summed, so that a step is priced in a handful of operations however many layers there are.

use super::amounts::Amount;
use super::shape::Layer;

/// Query rows that share one pass over the keys in a blocked attention kernel (FlashAttention-2 uses 64 to 128).
pub(super) const QUERY_BLOCK: f64 = 128.0;

/// Layers of one kind of visibility, summed.
#[derive(Debug, Clone)]
pub(super) struct Keys {
    pub(super) visible: Option<u64>,
    pub(super) pair_flops: f64,
    pub(super) row_elements: f64,
}

/// Layers that run exactly, summed, so that a step is priced in a handful of operations however many layers there are.
#[derive(Debug, Clone, Default)]
pub(super) struct Work {
    pub(super) layers: f64,
    pub(super) weights: f64,
    pub(super) resident_weights: f64,
    pub(super) scan_flops: f64,
    pub(super) state_elements: f64,
    /// Elements that one row reads and writes around the weights.
    pub(super) moved_elements: f64,
    pub(super) keys: Vec<Keys>,
}

impl Keys {
    /// Whether rows up to `to`, from the first one on, see less than what is before them.
    pub(super) fn needs_mask(&self, to: u64) -> bool {
        self.visible.is_some_and(|window| window < to)
    }
}

impl Work {
    pub(super) fn of(layers: &[Layer], d: f64) -> Self {
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

    pub(super) fn see(&mut self, visible: Option<u64>, pair_flops: f64, row_elements: f64) {
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

    /// Projections and MLPs of calls, each with so many rows: `(rows of one, how many such calls)`.
    pub(super) fn matmul(&self, calls: &[(f64, f64)], element_bytes: f64) -> Amount {
        let rows: f64 = calls.iter().map(|(rows, count)| rows * count).sum();
        // A call with few rows of a mixture meets few experts: never more weights than its rows ask for.
        let weights: f64 =
            calls.iter().map(|(rows, count)| count * self.resident_weights.min(rows * self.weights)).sum();
        Amount {
            flops: rows * 2.0 * self.weights,
            bytes: element_bytes * (weights + rows * self.moved_elements),
            weight_bytes: element_bytes * weights,
            ..Amount::default()
        }
    }

    /// Attention and scans of a share of the rows `[from, to)`, spread evenly over them; `behind`: in a call that begins
    /// behind rows of the cache, whose attention needs a mask. So does one whose window is shorter than its rows.
    pub(super) fn attention(&self, from: u64, to: u64, share: f64, behind: bool, element_bytes: f64) -> Amount {
        let rows = share * (to - from) as f64;
        if rows == 0.0 {
            return Amount::default();
        }
        let (mut flops, mut masked_flops) = (rows * self.scan_flops, 0.0);
        let mut elements = 2.0 * self.state_elements;
        for keys in &self.keys {
            let pairs = share * visible_keys(from, to, keys.visible);
            flops += pairs * keys.pair_flops;
            if behind || keys.needs_mask(to) {
                masked_flops += pairs * keys.pair_flops;
            }
            // Queries and outputs once; keys and values once for each block of queries that sees them.
            elements += rows * keys.pair_flops / 2.0 + (pairs / QUERY_BLOCK).max(1.0) * keys.row_elements;
        }
        Amount { flops, masked_flops, bytes: element_bytes * elements, ..Amount::default() }
    }
}

/// Returns the number of (query, key) pairs of the rows `[from, to)`: the sum of min(p + 1, window).
pub(super) fn visible_keys(from: u64, to: u64, window: Option<u64>) -> f64 {
    // Rows before the window is full see p + 1 keys each, the others `window`.
    let full = window.unwrap_or(u64::MAX).clamp(from, to);
    let triangle = |rows: u64| rows as f64 * (rows as f64 + 1.0) / 2.0;
    triangle(full) - triangle(from) + (to - full) as f64 * window.unwrap_or(0) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
