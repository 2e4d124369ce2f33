//! The decision rule: which rows of one step are filled. Pure; every backend calls this one function.

use std::fmt;

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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Decision {
    pub fill_start: u64,
    pub fill_end: u64,
    pub step_end: u64,
    pub reason: Reason,
}

/// Why a step is filled or exact; `Display` says it in words. (No text is made until one is asked for: the planner
/// decides a million times a second.)
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // the fields are the numbers that the text shows
pub enum Reason {
    Fill,
    NoRows,
    AllHead { head: u64 },
    NoBulk { after_head: u64, kept: u64 },
    UnderTile { rows: u64, tile: u64 },
    UnderMinBulk { rows: u64, min_bulk: u64 },
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fill => write!(f, "fill"),
            Self::NoRows => write!(f, "the step has no rows"),
            Self::AllHead { head } => write!(f, "every row of the step is one of the {head} head rows"),
            Self::NoBulk { after_head, kept } => {
                write!(f, "no bulk rows: of the step's {after_head} rows after the head, {kept} or more stay exact")
            }
            Self::UnderTile { rows, tile } => write!(f, "{rows} bulk rows are fewer than one tile of {tile}"),
            Self::UnderMinBulk { rows, min_bulk } => write!(f, "{rows} bulk rows are fewer than min_bulk={min_bulk}"),
        }
    }
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
        Reason::Fill
    } else if step_tokens == 0 {
        Reason::NoRows
    } else if start == step_end {
        Reason::AllHead { head }
    } else if room == 0 {
        Reason::NoBulk { after_head: step_end - start, kept }
    } else if rows == 0 {
        Reason::UnderTile { rows: room, tile }
    } else {
        Reason::UnderMinBulk { rows, min_bulk }
    };
    let fill_end = if reason == Reason::Fill { start + rows } else { start };
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn step() -> impl Strategy<Value = Step> {
        let count = || prop_oneof![0u64..40, 0u64..5000, any::<u32>().prop_map(u64::from)];
        (count(), count(), prop_oneof![Just(0), count()], 1u64..2000, 0u64..40, 0u64..600, 1u64..130, 0u64..600)
            .prop_map(|(cached_tokens, step_tokens, n_ahead, tail, head, min_bulk, tile, logits_to_keep)| Step {
                cached_tokens,
                step_tokens,
                n_ahead,
                tail,
                head,
                min_bulk,
                tile,
                logits_to_keep,
            })
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(4096) })]

        #[test]
        fn the_spans_tile_the_step(step in step()) {
            let Decision { fill_start, fill_end, step_end, .. } = decide(&step).unwrap();
            // Three spans, in order, each where the one before ends: every row is in exactly one.
            prop_assert!(step.cached_tokens <= fill_start && fill_start <= fill_end && fill_end <= step_end);
            prop_assert_eq!(step_end, step.cached_tokens + step.step_tokens);
        }

        #[test]
        fn filled_rows_keep_every_promise(step in step()) {
            let decision = decide(&step).unwrap();
            let rows = decision.rows_filled();
            prop_assert_eq!(decision.reason == Reason::Fill, rows > 0);
            if rows > 0 {
                prop_assert!(rows >= step.min_bulk);
                prop_assert_eq!(rows % step.tile, 0);
                prop_assert!(decision.fill_start >= step.head);
                let prompt_end = decision.step_end + step.n_ahead;
                prop_assert!(decision.fill_end <= prompt_end.saturating_sub(step.tail));
                if step.n_ahead == 0 {
                    prop_assert!(decision.step_end - decision.fill_end >= step.logits_to_keep.max(1));
                }
            }
        }

        #[test]
        fn a_fill_is_as_large_as_the_promises_allow(step in step()) {
            let step = Step { min_bulk: 0, ..step };
            let decision = decide(&step).unwrap();
            let kept = if step.n_ahead == 0 { step.tail.max(step.logits_to_keep) } else { step.tail.saturating_sub(step.n_ahead) };
            let left = decision.step_end - decision.fill_end;
            prop_assert!(decision.rows_filled() == 0 || left < kept + step.tile, "{left} rows left, {kept} had to be");
        }

        #[test]
        fn a_longer_tail_never_fills_more(step in step(), more in 1u64..500) {
            let longer = Step { tail: step.tail + more, ..step };
            prop_assert!(decide(&longer).unwrap().rows_filled() <= decide(&step).unwrap().rows_filled());
        }

        #[test]
        fn no_chunking_fills_the_tail_or_the_head(
            chunks in prop::collection::vec(1u64..400, 1..20), step in step()
        ) {
            let prompt: u64 = chunks.iter().sum();
            let mut cached_tokens = 0;
            for step_tokens in chunks {
                let n_ahead = prompt - cached_tokens - step_tokens;
                let step = Step { cached_tokens, step_tokens, n_ahead, ..step };
                let decision = decide(&step).unwrap();
                if decision.rows_filled() > 0 {
                    prop_assert!(decision.fill_start >= step.head);
                    prop_assert!(decision.fill_end + step.tail <= prompt);
                }
                cached_tokens += step_tokens;
            }
        }

        #[test]
        fn with_one_row_tiles_chunks_fill_what_one_call_would(
            chunks in prop::collection::vec(1u64..400, 1..20), tail in 1u64..600, head in 0u64..10
        ) {
            let prompt: u64 = chunks.iter().sum();
            let whole = Step {
                cached_tokens: 0, step_tokens: prompt, n_ahead: 0, tail, head, min_bulk: 0, tile: 1, logits_to_keep: 1,
            };
            let mut cached_tokens = 0;
            let mut rows = 0;
            for step_tokens in chunks {
                let n_ahead = prompt - cached_tokens - step_tokens;
                rows += decide(&Step { cached_tokens, step_tokens, n_ahead, ..whole }).unwrap().rows_filled();
                cached_tokens += step_tokens;
            }
            prop_assert_eq!(rows, decide(&whole).unwrap().rows_filled());
        }

        #[test]
        fn a_window_keeps_the_last_bulk_rows(start in 0u64..5000, rows in 0u64..5000, window in 0u64..6000) {
            let first = first_needed_row(start, start + rows, Some(window));
            prop_assert_eq!(start + rows - first, rows.min(window));
            prop_assert_eq!(first_needed_row(start, start + rows, None), start);
        }
    }

    #[test]
    fn absurd_counts_are_errors_and_not_overflows() {
        let step = Step {
            cached_tokens: u64::MAX,
            step_tokens: 1,
            n_ahead: u64::MAX,
            tail: u64::MAX,
            head: u64::MAX,
            min_bulk: u64::MAX,
            tile: u64::MAX,
            logits_to_keep: u64::MAX,
        };
        assert_eq!(decide(&step).unwrap_err().kind(), "schedule");
        assert_eq!(decide(&Step { step_tokens: 0, ..step }).unwrap().rows_filled(), 0);
        assert_eq!(decide(&Step { tail: 0, ..step }).unwrap_err().kind(), "schedule");
        assert_eq!(decide(&Step { tile: 0, ..step }).unwrap_err().kind(), "schedule");
    }
}
