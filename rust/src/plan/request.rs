//! What is asked: one prompt, or a trace of many.

use serde::{Deserialize, Serialize};

use super::{Policy, refuse};
use crate::error::Result;
use crate::rule::Step;

/// The longest prompt that is planned.
pub const MAX_TOKENS: u64 = 1 << 32;

/// The part of the loss budget that a balanced request without a target spends.
const BALANCED_PART: f64 = 0.5;

/// What a request cares about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum Sensitivity {
    Latency,
    #[default]
    Balanced,
    Accuracy,
}

/// One prompt to plan.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// The whole prompt, rows already cached included.
    pub prompt_tokens: u64,
    /// Rows already cached.
    #[serde(default)]
    pub cached_tokens: u64,
    /// Tokens to be generated, for which the cache must have room.
    #[serde(default)]
    pub output_tokens: u64,
    /// What matters.
    #[serde(default)]
    pub sensitivity: Sensitivity,
    /// The time to first token that is asked for.
    #[serde(default)]
    pub ttft_target_s: Option<f64>,
    /// Rows `[from, to)` that must run exactly, ascending and apart.
    #[serde(default)]
    pub exact_spans: Vec<(u64, u64)>,
}

/// Many requests, field by field: what a server's log or a NumPy trace holds.
#[derive(Debug, Clone, Copy, Default)]
pub struct Trace<'a> {
    /// The prompts' lengths.
    pub prompt_tokens: &'a [i64],
    /// Rows already cached; None for none.
    pub cached_tokens: Option<&'a [i64]>,
    /// Tokens to be generated; None for none.
    pub output_tokens: Option<&'a [i64]>,
    /// 0 latency, 1 balanced, 2 accuracy; None for balanced.
    pub sensitivity: Option<&'a [u8]>,
    /// Targets in seconds, NaN for none; None for none.
    pub ttft_target_s: Option<&'a [f64]>,
}

impl Request {
    /// Returns the request a JSON document describes.
    pub fn from_json(json: &str) -> Result<Self> {
        serde_json::from_str(json).map_err(|error| refuse(format!("request: {error}")))
    }

    /// Refuses what no prompt is.
    pub(super) fn check(&self) -> Result<()> {
        let Self { prompt_tokens, cached_tokens, output_tokens, ttft_target_s, .. } = *self;
        if !(1..=MAX_TOKENS).contains(&prompt_tokens) {
            return Err(refuse(format!("prompt_tokens is {prompt_tokens}; expected 1 to {MAX_TOKENS}")));
        }
        if cached_tokens >= prompt_tokens {
            return Err(refuse(format!(
                "cached_tokens is {cached_tokens} of a prompt of {prompt_tokens}; expected fewer: one row at least is computed"
            )));
        }
        if output_tokens > MAX_TOKENS {
            return Err(refuse(format!("output_tokens is {output_tokens}; expected at most {MAX_TOKENS}")));
        }
        if ttft_target_s.is_some_and(|target| !(f64::MIN_POSITIVE..f64::INFINITY).contains(&target)) {
            return Err(refuse(format!(
                "ttft_target_s is {}; expected more than 0",
                ttft_target_s.unwrap_or_default()
            )));
        }
        let mut last = 0;
        for &(from, to) in &self.exact_spans {
            if from >= to || from < last || to > prompt_tokens {
                return Err(refuse(format!(
                    "exact_spans: [{from}, {to}) is empty, out of order or past the prompt's end at {prompt_tokens}"
                )));
            }
            last = to;
        }
        Ok(())
    }

    pub(super) fn step(&self, policy: &Policy, tail: u64) -> Step {
        Step {
            cached_tokens: self.cached_tokens,
            step_tokens: self.prompt_tokens - self.cached_tokens,
            n_ahead: 0,
            tail,
            head: policy.head,
            min_bulk: policy.min_bulk,
            tile: policy.tile,
            logits_to_keep: 1,
        }
    }

    /// The loss that this request may spend of a budget.
    pub(super) fn budget(&self, policy: &Policy) -> f64 {
        match (self.sensitivity, self.ttft_target_s) {
            (Sensitivity::Accuracy, _) => 0.0,
            (Sensitivity::Balanced, None) => BALANCED_PART * policy.loss_budget_nats,
            (Sensitivity::Latency, _) | (Sensitivity::Balanced, Some(_)) => policy.loss_budget_nats,
        }
    }

    /// The target that its choice is made by; a latency-sensitive request takes the fastest plan whatever its target.
    pub(super) fn deciding_target(&self) -> Option<f64> {
        self.ttft_target_s.filter(|_| self.sensitivity == Sensitivity::Balanced)
    }
}

impl Trace<'_> {
    /// Returns the number of requests; refuses fields of different lengths.
    pub(super) fn check(&self) -> Result<usize> {
        let count = self.prompt_tokens.len();
        for (name, length) in [
            ("cached_tokens", self.cached_tokens.map(<[i64]>::len)),
            ("output_tokens", self.output_tokens.map(<[i64]>::len)),
            ("sensitivity", self.sensitivity.map(<[u8]>::len)),
            ("ttft_target_s", self.ttft_target_s.map(<[f64]>::len)),
        ] {
            if length.is_some_and(|length| length != count) {
                let length = length.unwrap_or_default();
                return Err(refuse(format!("trace: {name} has {length} entries; prompt_tokens has {count}")));
            }
        }
        Ok(count)
    }

    /// Returns one request.
    pub(super) fn request(&self, index: usize) -> Result<Request> {
        let count = |name: &str, values: Option<&[i64]>| {
            let value = values.map_or(0, |values| values[index]);
            u64::try_from(value).map_err(|_| refuse(format!("{name} is {value}; expected 0 or more")))
        };
        Ok(Request {
            prompt_tokens: count("prompt_tokens", Some(self.prompt_tokens))?,
            cached_tokens: count("cached_tokens", self.cached_tokens)?,
            output_tokens: count("output_tokens", self.output_tokens)?,
            sensitivity: match self.sensitivity.map_or(1, |values| values[index]) {
                0 => Sensitivity::Latency,
                1 => Sensitivity::Balanced,
                2 => Sensitivity::Accuracy,
                code => {
                    return Err(refuse(format!("sensitivity is {code}; expected 0 latency, 1 balanced or 2 accuracy")));
                }
            },
            ttft_target_s: self.ttft_target_s.map(|values| values[index]).filter(|target| !target.is_nan()),
            exact_spans: Vec::new(),
        })
    }
}
