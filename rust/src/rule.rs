//! The decision rule: which rows of one step are filled. Pure; every backend calls this one function.

use crate::error::{Error, Fault, Result};

/// One forward call of a prefill. Positions are absolute; all counts are rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// Rows in the cache before this call.
    pub cached_tokens: u64,
    /// Rows of this call.
    pub step_tokens: u64,
    /// Prompt rows that later calls will bring.
    pub n_ahead: u64,
    /// The last prompt rows, which stay exact: at least 1.
    pub tail: u64,
    /// The first rows of the sequence, which stay exact.
    pub head: u64,
    /// A fill of fewer rows is not worth its overhead.
    pub min_bulk: u64,
    /// The number of filled rows is a multiple of this: at least 1.
    pub tile: u64,
    /// Last rows whose logits the caller wants (used when `n_ahead` is 0).
    pub logits_to_keep: u64,
}

/// The spans of one step: `[cached, fill_start)` exact, `[fill_start, fill_end)` filled, `[fill_end, step_end)` exact.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Decision {
    pub fill_start: u64,
    pub fill_end: u64,
    pub step_end: u64,
    /// "fill", or in words why the step is exact.
    pub reason: String,
}

impl Decision {
    /// Returns the number of filled rows.
    pub fn rows_filled(&self) -> u64 {
        self.fill_end - self.fill_start
    }
}

/// Returns the spans of a step (design, section 3).
///
/// ```text
/// start = max(cached, head)
/// end   = step_end - (n_ahead == 0 ? max(1, tail, logits_to_keep) : max(0, tail - n_ahead))
/// fill [start, start + floor_tile(end - start)) if those are at least min_bulk rows, and at least one
/// ```
/// So the stock forward always gets a row in the prompt's last step, and no row of the last `tail` is ever filled,
/// however the prompt is cut into steps, as long as `n_ahead` is honest.
pub fn decide(step: &Step) -> Result<Decision> {
    let Step { cached_tokens, step_tokens, n_ahead, tail, head, min_bulk, tile, logits_to_keep } = *step;
    if tail < 1 {
        return Err(refuse("tail is 0; at least the last prompt row must be exact: pass tail >= 1"));
    }
    if tile < 1 {
        return Err(refuse("tile is 0; pass tile=1 for no alignment"));
    }
    let Some(step_end) = cached_tokens.checked_add(step_tokens) else {
        return Err(refuse("cached_tokens + step_tokens is more than 2^64"));
    };
    let start = cached_tokens.max(head).min(step_end);
    let kept = if n_ahead == 0 { tail.max(logits_to_keep) } else { tail.saturating_sub(n_ahead) };
    let room = step_end.saturating_sub(kept).saturating_sub(start);
    let rows = room - room % tile;
    let reason = if rows > 0 && rows >= min_bulk {
        "fill".to_owned()
    } else if step_tokens == 0 {
        "the step has no rows".to_owned()
    } else if start == step_end {
        format!("every row of the step is one of the {head} head rows")
    } else if room == 0 {
        let after_head = step_end - start;
        format!("no bulk rows: of the step's {after_head} rows after the head, {kept} or more stay exact")
    } else if rows == 0 {
        format!("{room} bulk rows are fewer than one tile of {tile}")
    } else {
        format!("{rows} bulk rows are fewer than min_bulk={min_bulk}")
    };
    let fill_end = if reason == "fill" { start + rows } else { start };
    Ok(Decision { fill_start: start, fill_end, step_end, reason })
}

/// Returns the first bulk row that a layer must fill: with a window, only the last `window` rows before the exact
/// ones can be seen. (Row p sees keys p-window+1..=p, so one row fewer would do for a causal window; the spare row
/// keeps layers right whose window counts the row itself.)
pub fn first_needed_row(fill_start: u64, fill_end: u64, window: Option<u64>) -> u64 {
    window.map_or(fill_start, |window| fill_start.max(fill_end.saturating_sub(window)))
}

fn refuse(what: &str) -> Error {
    Fault::Schedule { what: what.to_owned() }.into()
}
