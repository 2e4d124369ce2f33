//! A prefill to be priced, as a JSON document asks for it.

use serde::Deserialize;

use super::{Fill, LONGEST_PROMPT, Pricer, Rates, Report, Setting, Shape, refuse, report};
use crate::error::Result;
use crate::rule::Step;

/// A prefill to be priced, as a JSON document asks for it.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)] // as in Step, Fill and Setting
pub struct Question {
    pub prompt_tokens: u64,
    #[serde(default)]
    pub cached_tokens: u64,
    #[serde(default)]
    pub output_tokens: u64,
    #[serde(default)]
    pub split: usize,
    #[serde(default = "default_tail")]
    pub tail: u64,
    #[serde(default = "default_head")]
    pub head: u64,
    #[serde(default = "default_min_bulk")]
    pub min_bulk: u64,
    #[serde(default = "one")]
    pub tile: u64,
    #[serde(default = "one")]
    pub features: u64,
    #[serde(default)]
    pub fused_rank: Option<u64>,
    #[serde(default)]
    pub selected_share: f64,
    #[serde(default)]
    pub chunk_tokens: Option<u64>,
    #[serde(default = "two_bytes")]
    pub element_bytes: f64,
    #[serde(default = "two_bytes")]
    pub map_element_bytes: f64,
    #[serde(default)]
    pub rates: Option<Rates>,
}

pub(crate) fn default_tail() -> u64 {
    512
}

pub(crate) fn default_head() -> u64 {
    4
}

pub(crate) fn default_min_bulk() -> u64 {
    256
}

pub(crate) fn one() -> u64 {
    1
}

pub(crate) fn two_bytes() -> f64 {
    2.0
}

impl Question {
    /// Returns the question a JSON document asks.
    pub fn from_json(json: &str) -> Result<Self> {
        let question: Self = serde_json::from_str(json).map_err(|error| refuse(format!("question: {error}")))?;
        let Self { prompt_tokens, cached_tokens, output_tokens, .. } = question;
        if prompt_tokens > LONGEST_PROMPT || cached_tokens >= prompt_tokens || output_tokens > LONGEST_PROMPT {
            return Err(refuse(format!(
                "prompt_tokens is {prompt_tokens}, of which {cached_tokens} are cached, and output_tokens {output_tokens}; \
                 expected a prompt of 1 to {LONGEST_PROMPT} tokens with at least one to compute, and as many output \
                 tokens at most"
            )));
        }
        if let Some(rates) = &question.rates {
            rates.check()?;
        }
        Ok(question)
    }

    /// Returns the step to price.
    pub fn step(&self) -> Step {
        Step {
            cached_tokens: self.cached_tokens,
            step_tokens: self.prompt_tokens - self.cached_tokens,
            n_ahead: 0,
            tail: self.tail,
            head: self.head,
            min_bulk: self.min_bulk,
            tile: self.tile,
            logits_to_keep: 1,
        }
    }

    /// Returns how it is to be run.
    pub fn setting(&self) -> Setting {
        let Self { split, features, fused_rank, .. } = *self;
        Setting {
            fill: Fill { split, features, fused_rank },
            selected_share: self.selected_share,
            chunk_tokens: self.chunk_tokens,
            element_bytes: self.element_bytes,
            map_element_bytes: self.map_element_bytes,
        }
    }

    /// Returns the answer for this model.
    pub fn report(&self, shape: &Shape) -> Result<Report> {
        let pricer = Pricer::new(shape, &self.setting())?;
        report(&pricer, &self.step(), self.prompt_tokens + self.output_tokens, self.rates.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::fixtures::{setting, shape, step};

    #[test]
    fn a_question_in_json_is_the_same_question() {
        let asked = Question::from_json(r#"{"prompt_tokens": 8192, "split": 15}"#).unwrap();
        assert_eq!(asked.step(), step(8192));
        let (shape, pricer) = (shape(&[None; 30]), Pricer::new(&shape(&[None; 30]), &setting(15)).unwrap());
        let expected = report(&pricer, &step(8192), 8192, None).unwrap();
        assert_eq!(asked.report(&shape).unwrap().flops_ratio, expected.flops_ratio);
        for (bad, words) in [
            ("{}", "question: missing field `prompt_tokens`"),
            (r#"{"prompt_tokens": 1, "colour": 2}"#, "question: unknown field `colour`"),
            (r#"{"prompt_tokens": 0}"#, "prompt_tokens is 0"),
            (r#"{"prompt_tokens": 9, "cached_tokens": 9}"#, "of which 9 are cached"),
            (r#"{"prompt_tokens": 99999999999}"#, "prompt_tokens is 99999999999"),
        ] {
            let error = Question::from_json(bad).unwrap_err().to_string();
            assert!(error.contains(words), "{error} lacks {words}");
        }
    }
}
